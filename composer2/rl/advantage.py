"""From the rewards of a group to training samples with one advantage per token.

In: a `Group` whose rollouts carry rewards. Out: `Sample`s, one for each segment that has something to learn from.

Source: report §4.1 (Dr. GRPO, fixed group size, one reward for all tokens of a chain); rows R1 R3.

    A_i = r_i - mean(r)          over the rollouts of the group that count

There is no division by the standard deviation (it blows up small differences in nearly equal groups) and none by the
response length (a length bias). Every sampled token of every segment gets A_i: actions, summaries, malformed turns.
A truncated rollout counts with its reward (no overlong masking). What does not count, neither in the mean nor in the
loss: rollouts lost to infrastructure, and rollouts without a single sampled token.

`grpo` (divide by the population standard deviation), `rloo` (mean of the others) and `length_norm` (divide by the
sampled tokens of the rollout) are comparisons; `rl.variants` names their combinations.
Choice: a group with exactly equal rewards has exactly zero advantages, whatever rounding the mean would bring; with KL
weight 0 its samples have exactly zero gradient and are left out. With a positive KL weight such a group still takes
its KL step, which is the gradient of the stated objective.
Choice: a rollout with a token older than `max_token_age` versions is withheld from the loss but its reward stays in
the baseline, since the reward is as true as its siblings'.

Shape letters: G samples of a group, T tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from composer2.rl.kl import KLConfig, chain_kl_advantages
from composer2.types import Group, Rollout, RolloutStatus, Sample, Segment, SpanKind

Baseline = Literal["dr_grpo", "grpo", "rloo"]
BASELINES: tuple[Baseline, ...] = ("dr_grpo", "grpo", "rloo")


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How rewards become advantages."""

    baseline: Baseline = "dr_grpo"
    """`dr_grpo` is the report's; the other two are comparisons."""
    std_epsilon: float = 1e-6
    """Added to the standard deviation by `grpo` alone."""
    length_norm: bool = False
    """Divide every token's advantage, its KL term included, by the sampled tokens of its whole rollout (GRPO)."""
    kl: KLConfig = field(default_factory=KLConfig)
    """KL to the reference, as a per-token term of the advantage."""
    train_summaries: bool = True
    """Summaries take the chain's advantage like every sampled token (row R3); False leaves them out of the loss, a
    control experiment."""
    max_token_age: int | None = None
    """Rollouts with an older token (trainer version minus token version) are withheld from the loss; None: never."""

    def __post_init__(self) -> None:
        if self.baseline not in BASELINES:
            raise ValueError(f"AdvantageConfig.baseline is {self.baseline!r}, accepted is one of {BASELINES}")
        if not (np.isfinite(self.std_epsilon) and self.std_epsilon > 0):
            raise ValueError(f"AdvantageConfig.std_epsilon is {self.std_epsilon}, accepted is a finite number > 0")
        if self.max_token_age is not None and self.max_token_age < 0:
            raise ValueError(f"AdvantageConfig.max_token_age is {self.max_token_age}, accepted is None or >= 0")


def counts_in_group(rollout: Rollout) -> bool:
    """True when a rollout belongs in its group's mean: not an infrastructure failure, and it sampled something."""
    if rollout.status is RolloutStatus.INFRASTRUCTURE:
        return False
    return any(bool(segment.sampled.any()) for segment in rollout.segments)


def group_advantages(rewards_G: np.ndarray, counts_G: np.ndarray, config: AdvantageConfig) -> np.ndarray:
    """float64 [G] advantages; 0 where `counts_G` (bool [G]) is False, and everywhere in a degenerate group.

    One group a call. ValueError for rewards of another shape, or counted ones that are not finite."""
    rewards_G = np.asarray(rewards_G, dtype=np.float64)
    counts_G = np.asarray(counts_G, dtype=bool)
    if rewards_G.shape != counts_G.shape:
        raise ValueError(f"counts_G has shape {counts_G.shape}, accepted is that of rewards_G: {rewards_G.shape}")
    if rewards_G.ndim != 1:
        raise ValueError(f"rewards_G has shape {rewards_G.shape}, accepted is [G]: one group, which has one baseline")
    counted = rewards_G[counts_G]
    if not np.isfinite(counted).all():
        raise ValueError(f"rewards_G holds {counted.tolist()}, accepted are finite numbers")
    advantages_G = np.zeros_like(rewards_G)
    if is_degenerate(rewards_G, counts_G):
        return advantages_G
    centred = counted - counted.mean()
    if config.baseline == "grpo":
        centred = centred / (counted.std() + config.std_epsilon)
    elif config.baseline == "rloo":
        centred = centred * (len(counted) / (len(counted) - 1))
    advantages_G[counts_G] = centred
    return advantages_G


def is_degenerate(rewards_G: np.ndarray, counts_G: np.ndarray) -> bool:
    """True when all counted rewards are equal (or there are fewer than two), so that nothing can be compared."""
    counted = np.asarray(rewards_G)[np.asarray(counts_G, dtype=bool)]
    return len(counted) < 2 or bool((counted == counted[0]).all())


def rewards_of(group: Group) -> tuple[np.ndarray, np.ndarray]:
    """(rewards float64 [G], counts bool [G]) of a group."""
    rewards_G = np.array([rollout.reward for rollout in group.rollouts], dtype=np.float64)
    counts_G = np.array([counts_in_group(rollout) for rollout in group.rollouts], dtype=bool)
    return rewards_G, counts_G


def oldest_version(rollout: Rollout) -> int | None:
    """Smallest policy version among the sampled tokens, or None without any."""
    versions = [segment.policy_versions[segment.sampled] for segment in rollout.segments]
    return min((int(values.min()) for values in versions if len(values)), default=None)


def is_withheld(rollout: Rollout, config: AdvantageConfig, policy_version: int | None) -> bool:
    """True when the rollout is too old to train at `policy_version`, though it still informs the baseline."""
    if config.max_token_age is None:
        return False
    if policy_version is None:
        raise ValueError("policy_version is None, accepted is the trainer's version when max_token_age is set")
    oldest = oldest_version(rollout)
    return oldest is not None and policy_version - oldest > config.max_token_age


def group_samples(
    group: Group,
    config: AdvantageConfig,
    *,
    temperature: float = 1.0,
    policy_version: int | None = None,
    reference_logprobs: Sequence[Sequence[np.ndarray]] | None = None,
    group_index: int = 0,
) -> list[Sample]:
    """Training samples of a group, in order of rollout and segment.

    `temperature`: that of the sampler. `policy_version`: the trainer's, needed with `max_token_age`.
    `reference_logprobs[rollout][segment]` is float [T] in nats, needed (for every rollout that counts) when the KL
    weight is positive. `group_index` becomes `Sample.group`. Rollouts with exactly zero advantage and no KL term yield
    nothing: their gradient is exactly zero. ValueError for what is needed and missing or of another shape, for a reward
    that is not finite, and for a segment whose first token is sampled."""
    use_kl = config.kl.weight > 0
    if use_kl and (reference_logprobs is None or len(reference_logprobs) != len(group.rollouts)):
        given = None if reference_logprobs is None else len(reference_logprobs)
        raise ValueError(
            f"reference_logprobs is given for {given} rollouts, accepted with KLConfig.weight > 0 is one entry for "
            f"each of the {len(group.rollouts)} rollouts"
        )
    rewards_G, counts_G = rewards_of(group)
    advantages_G = group_advantages(rewards_G, counts_G, config)
    samples: list[Sample] = []
    for index, rollout in enumerate(group.rollouts):
        if not counts_G[index] or is_withheld(rollout, config, policy_version):
            continue
        if use_kl:
            assert reference_logprobs is not None
            kl_terms = chain_kl_advantages(
                [segment.logprobs for segment in rollout.segments],
                reference_logprobs[index],
                [segment.sampled for segment in rollout.segments],
                config.kl,
            )
        elif advantages_G[index] == 0.0:
            continue
        else:
            kl_terms = [np.zeros(len(segment.token_ids)) for segment in rollout.segments]
        divisor = sum(int(segment.sampled.sum()) for segment in rollout.segments) if config.length_norm else 1
        for segment, kl_term_T in zip(rollout.segments, kl_terms, strict=True):
            trained_T = trained_tokens(segment, config)
            if trained_T.any():
                advantages_T = (advantages_G[index] + kl_term_T) / divisor
                sample = segment_sample(segment, advantages_T, trained=trained_T, temperature=temperature)
                samples.append(replace(sample, group=group_index))
    return samples


def trained_tokens(segment: Segment, config: AdvantageConfig) -> np.ndarray:
    """bool [T]: the sampled tokens, without those of summaries when `config.train_summaries` is False."""
    mask_T = segment.sampled.astype(bool)
    if not config.train_summaries:
        for span in segment.spans:
            if span.kind is SpanKind.SUMMARY:
                mask_T[span.start : span.stop] = False
    return mask_T


def segment_sample(
    segment: Segment, advantages: float | np.ndarray, *, trained: np.ndarray | None = None, temperature: float = 1.0
) -> Sample:
    """A segment as a sample: `advantages` (one number, or [T]) at its trained tokens and 0 elsewhere.

    `trained`: bool [T], some of the sampled tokens; None for all of them."""
    if len(segment.sampled) and segment.sampled[0]:
        raise ValueError("Segment.sampled[0] is True, accepted is False: the first token has no context to score it")
    loss_mask_T = segment.sampled.astype(bool) if trained is None else trained
    return Sample(
        token_ids=segment.token_ids,
        loss_mask=loss_mask_T,
        advantages=np.where(loss_mask_T, advantages, 0.0).astype(np.float32),
        behaviour_logprobs=np.where(segment.sampled, segment.logprobs, 0.0).astype(np.float32),
        policy_versions=segment.policy_versions,
        routes=segment.routes,
        temperature=temperature,
    )
