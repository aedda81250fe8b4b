"""Small segments, rollouts and groups for the tests of the algorithm."""

import numpy as np

from composer2.types import Group, Rollout, RolloutStatus, Sample, Segment, Task


def segment(length=6, num_sampled=3, *, versions=0, logprobs=-1.0, layers=1, experts=1, seed=0):
    """`num_sampled` tokens at the end are sampled, the rest is prompt; the last token has no route."""
    sampled = np.arange(length) >= length - num_sampled
    routes = np.full((length, layers, experts), -1, dtype=np.int16)
    routes[:-1] = np.arange(experts)
    return Segment(
        token_ids=np.random.default_rng(seed).integers(1, 30, size=length).astype(np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, logprobs, 0.0).astype(np.float32),
        policy_versions=np.where(sampled, versions, -1).astype(np.int32),
        routes=routes,
    )


def rollout(reward=0.0, segments=None, *, status=RolloutStatus.FINISHED, index=0, **fields):
    segments = (segment(seed=index),) if segments is None else tuple(segments)
    return Rollout(
        task_id="t",
        sample_index=index,
        segments=segments,
        status=status,
        reward=reward,
        **({"passed": reward > 0} | fields),
    )


def group(rewards, *, lost=(), segments=None):
    """One rollout per reward; indices in `lost` died with their machine."""
    rollouts = tuple(
        rollout(
            reward,
            None if segments is None else segments[index],
            index=index,
            status=RolloutStatus.INFRASTRUCTURE if index in lost else RolloutStatus.FINISHED,
        )
        for index, reward in enumerate(rewards)
    )
    return Group(task=Task(task_id="t", instruction="", files={}), rollouts=rollouts)


def sample(length, *, num_sampled=2, advantage=1.0, seed=0, layers=1, experts=1, logprob=-1.0, temperature=1.0):
    part = segment(length, num_sampled, layers=layers, experts=experts, seed=seed, logprobs=logprob)
    return Sample(
        token_ids=part.token_ids,
        loss_mask=part.sampled,
        advantages=np.where(part.sampled, advantage, 0.0).astype(np.float32),
        behaviour_logprobs=part.logprobs,
        policy_versions=part.policy_versions,
        routes=part.routes,
        temperature=temperature,
    )
