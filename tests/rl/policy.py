"""A real policy of a few thousand parameters, and rollouts that the real engine sampled from it."""

import numpy as np
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.types import Group, Rollout, RolloutStatus, SamplingParams, Segment, Task

CONFIG = ModelConfig(
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=3,
    intermediate_size=24,
    moe_intermediate_size=8,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=8,
    qk_nope_head_dim=4,
    qk_rope_head_dim=4,
    v_head_dim=4,
    max_position_embeddings=64,
    initializer_range=0.3,
)


def model(seed=0):
    made = Transformer(CONFIG)
    init_weights(made, seed)
    return made


def weights(made):
    """A copy of the weights, for comparison."""
    return {name: tensor.clone() for name, tensor in made.state_dict().items()}


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def engine(made, version=0):
    return Engine(made, num_slots=16, max_len=48, policy_version=version, dtype=torch.float32)


def group(sampler, task_id, num_samples, *, seed=0, prompt_length=6, num_tokens=5, temperature=1.0, lost=()):
    """`num_samples` episodes of one turn; a rollout passes when its first token is even. Those in `lost` died."""
    prompt = np.random.default_rng(seed).integers(0, CONFIG.vocab_size, size=prompt_length).tolist()
    params = SamplingParams(max_tokens=num_tokens, temperature=temperature)
    for index in range(num_samples):
        sampler.submit(
            Request(
                token_ids=tuple(prompt),
                params=params,
                session=f"{task_id}.{index}",
                group=task_id,
                seed=seed * 100 + index,
            )
        )
    done = {}
    while sampler.has_work:
        done |= {finished.session: finished.generation for finished in sampler.step()}
    rollouts = []
    for index in range(num_samples):
        generation = done[f"{task_id}.{index}"]
        sampler.release(f"{task_id}.{index}")
        failed = index in lost
        rollouts.append(
            Rollout(
                task_id=task_id,
                sample_index=index,
                segments=() if failed else (segment(prompt, generation),),
                status=RolloutStatus.INFRASTRUCTURE if failed else RolloutStatus.FINISHED,
                passed=not failed and int(generation.token_ids[0]) % 2 == 0,
            )
        )
    return Group(task=Task(task_id=task_id, instruction="", files={}), rollouts=tuple(rollouts))


def segment(prompt, generation):
    count = len(generation.token_ids)
    total = len(prompt) + count
    sampled = np.arange(total) >= len(prompt)
    logprobs, versions = np.zeros(total, np.float32), np.full(total, -1, np.int32)
    logprobs[sampled], versions[sampled] = generation.logprobs, generation.policy_versions
    return Segment(
        token_ids=np.array([*prompt, *generation.token_ids], np.int32),
        sampled=sampled,
        logprobs=logprobs,
        policy_versions=versions,
        routes=generation.routes,
    )
