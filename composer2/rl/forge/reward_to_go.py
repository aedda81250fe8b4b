"""Credit for single steps of an episode: what is still to come, minus a baseline of the trajectory.

In: rollouts of a group, a process reward for each of their steps, their wall-clock times. Out: one advantage a step,
and samples whose sampled tokens carry the advantage of their step.

    r_p = alpha * process_p   + [p is the last step] * (beta * h(T / T_base) + performance)
    A_t = sum_{p >= t} r_p - B_i                        h(u) = 1 / (1 + u), falling from 1 over 1/2 at u = 1 to 0

A step is one generation: an action or a summary. Training takes (state, action) pairs; since the loss is a sum over
tokens, the tokens of a segment with the advantages of their steps are those pairs, without running a state twice.

Source: MiniMax-M2 report (composite reward, reward-to-go with trajectory baseline); row R9.
Choice: the stored text lost the formulas. Performance and time are known at the end only, so they are paid at the last
step; every earlier step has them still to come. h is bounded, so that a stuck clock cannot outweigh the task.
Choice: B_i is the mean return of the *other* counted rollouts of the group. It does not depend on what rollout i did,
so the gradient stays exact (a mean over all of them scales it by (G-1)/G, which is Dr. GRPO's, as `group`). Without
process and time rewards every step gets what R1 gives: r_i - mean(r), times G/(G-1) for `others`.
Choice: a rollout lost to infrastructure, or without a sampled token, is in no baseline and has no samples. Neither have
a lone counted rollout and rollouts whose steps all have exactly zero advantage.

Shape letters: G samples of a group, S steps of a rollout, T tokens of a segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from composer2.rl.advantage import AdvantageConfig, counts_in_group, is_withheld, segment_sample, trained_tokens
from composer2.rl.kl import reward_to_go
from composer2.rl.train import Credit
from composer2.types import Group, Role, Rollout, Sample, SpanKind

TrajectoryBaseline = Literal["others", "group", "none"]
TRAJECTORY_BASELINES: tuple[TrajectoryBaseline, ...] = ("others", "group", "none")


@dataclass(frozen=True, kw_only=True)
class StepRewardConfig:
    """Weights of the composite reward, and the baseline."""

    alpha: float = 0.1
    """Weight of process rewards."""
    beta: float = 0.1
    """Weight of the completion time."""
    base_seconds: float = 60.0
    """T_base: wall-clock seconds that earn half of `beta`."""
    baseline: TrajectoryBaseline = "others"
    """`others` and `group` are means over returns, `none` is 0."""

    def __post_init__(self) -> None:
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"StepRewardConfig.{name} is {value}, accepted is a finite number >= 0")
        if not (np.isfinite(self.base_seconds) and self.base_seconds > 0):
            raise ValueError(f"StepRewardConfig.base_seconds is {self.base_seconds}, accepted is a finite number > 0")
        if self.baseline not in TRAJECTORY_BASELINES:
            raise ValueError(
                f"StepRewardConfig.baseline is {self.baseline!r}, accepted is one of {TRAJECTORY_BASELINES}"
            )


def speed(time_ratio: float) -> float:
    """h: 1 for no time at all, 1/2 at the reference time, falling towards 0; `time_ratio` = T / T_base >= 0."""
    if not time_ratio >= 0:
        raise ValueError(f"time_ratio is {time_ratio}, accepted is >= 0")
    return 1.0 / (1.0 + time_ratio)


def step_rewards(process_S: np.ndarray, performance: float, seconds: float, config: StepRewardConfig) -> np.ndarray:
    """r_p of every step, float64 [S]; at least one step. `seconds` is the rollout's wall-clock time."""
    rewards_S = config.alpha * np.asarray(process_S, dtype=np.float64)
    if rewards_S.ndim != 1 or len(rewards_S) < 1:
        raise ValueError(f"process_S has shape {rewards_S.shape}, accepted is one number for each of >= 1 steps")
    rewards_S[-1] += config.beta * speed(seconds / config.base_seconds) + performance
    if not np.isfinite(rewards_S).all():
        raise ValueError(f"step rewards hold {rewards_S.tolist()}, accepted are finite numbers")
    return rewards_S


def trajectory_baselines(returns_G: np.ndarray, baseline: TrajectoryBaseline) -> np.ndarray:
    """B_i of counted rollouts from their returns (sums of r_p), float64 [G]; G >= 2 unless `none`."""
    returns_G = np.asarray(returns_G, dtype=np.float64)
    if baseline == "none":
        return np.zeros_like(returns_G)
    if len(returns_G) < 2:
        raise ValueError(f"returns_G holds {len(returns_G)} returns, accepted are at least two to compare")
    if (returns_G == returns_G[0]).all():
        return returns_G.copy()  # whatever rounding the mean would bring
    if baseline == "group":
        return np.full_like(returns_G, returns_G.mean())
    return (returns_G.sum() - returns_G) / (len(returns_G) - 1)


def step_advantages(rewards: Sequence[np.ndarray], config: StepRewardConfig) -> list[np.ndarray]:
    """A_t for the steps of every counted rollout of one group: float64 [S] each, from its float64 [S] step rewards."""
    baselines_G = trajectory_baselines(np.array([rewards_S.sum() for rewards_S in rewards]), config.baseline)
    advantages = []
    for rewards_S, baseline in zip(rewards, baselines_G, strict=True):
        advantages.append(reward_to_go(rewards_S) - baseline)
    return advantages


def steps_of(rollout: Rollout) -> list[tuple[int, int, int]]:
    """(segment, start, stop) of every generation of a chain, in order. Every sampled token belongs to exactly one."""
    steps = []
    for number, segment in enumerate(rollout.segments):
        covered_T = np.zeros(len(segment.sampled), dtype=np.int64)
        for span in segment.spans:
            if span.kind in (SpanKind.ACTION, SpanKind.SUMMARY) and segment.sampled[span.start : span.stop].any():
                covered_T[span.start : span.stop] += 1
                steps.append((number, span.start, span.stop))
        if (covered_T[segment.sampled] != 1).any():
            raise ValueError(
                f"Segment.spans of segment {number} cover its sampled tokens {sorted(set(covered_T[segment.sampled]))} "
                "times, accepted is each by exactly one action or summary"
            )
    return steps


def step_samples(
    group: Group,
    process: Sequence[np.ndarray],
    seconds: Sequence[float],
    config: StepRewardConfig,
    *,
    advantage: AdvantageConfig | None = None,
    temperature: float = 1.0,
    policy_version: int | None = None,
    group_index: int = 0,
) -> list[Sample]:
    """Training samples of a group, one for each segment, as `rl.advantage.group_samples` gives them.

    `process[i]` is float [S] with one process reward for each step of rollout i (read for counted rollouts only),
    `seconds[i]` its wall-clock time; `Rollout.reward` is the performance. Of `advantage` the fields `max_token_age`
    (with `policy_version`, the trainer's) and `train_summaries` are read. No KL term enters here."""
    advantage = advantage or AdvantageConfig()
    if not len(process) == len(seconds) == len(group.rollouts):
        raise ValueError(
            f"process and seconds are given for {len(process)} and {len(seconds)} rollouts, accepted is one entry for "
            f"each of the {len(group.rollouts)} rollouts"
        )
    counted = [index for index, rollout in enumerate(group.rollouts) if counts_in_group(rollout)]
    if len(counted) < 2 and config.baseline != "none":
        return []
    steps = {index: steps_of(group.rollouts[index]) for index in counted}
    for index in counted:
        if len(process[index]) != len(steps[index]):
            raise ValueError(
                f"process[{index}] has {len(process[index])} rewards, accepted is one a step: {len(steps[index])}"
            )
    rewards = [step_rewards(process[i], group.rollouts[i].reward, seconds[i], config) for i in counted]
    samples: list[Sample] = []
    for index, advantages_S in zip(counted, step_advantages(rewards, config), strict=True):
        if not advantages_S.any() or is_withheld(group.rollouts[index], advantage, policy_version):
            continue
        for number, segment in enumerate(group.rollouts[index].segments):
            trained_T = trained_tokens(segment, advantage)
            if not trained_T.any():
                continue
            values_T = np.zeros(len(segment.sampled))
            for (where, start, stop), value in zip(steps[index], advantages_S, strict=True):
                if where == number:
                    values_T[start:stop] = value
            sample = segment_sample(segment, values_T, trained=trained_T, temperature=temperature)
            samples.append(replace(sample, group=group_index))
    return samples


def process_rewards(rollout: Rollout) -> np.ndarray:
    """-1 for every generation whose calls were answered with an error, 0 for all others; float64 [S].

    Choice: the report names tool errors among its process rewards and gives no values."""
    rewards: list[float] = []
    for message in rollout.messages:
        if message.role is Role.ASSISTANT:
            rewards.append(0.0)
        elif message.role is Role.TOOL and any(result.is_error for result in message.tool_results):
            rewards[-1] = -1.0
    return np.array(rewards, dtype=np.float64)


def step_credit(config: StepRewardConfig) -> Credit:
    """Credit for single steps in the form the trainer calls: `process_rewards`, and the wall-clock time of rollouts.

    Of the advantage config, tokens' age and summaries are heeded. Raises ValueError for what is defined for advantages
    of whole rollouts only: a positive KL weight, another baseline than the default, a length norm."""

    def samples(
        group: Group,
        advantage: AdvantageConfig,
        *,
        temperature: float = 1.0,
        policy_version: int | None = None,
        reference_logprobs: object = None,
        group_index: int = 0,
    ) -> list[Sample]:
        if advantage.kl.weight > 0:
            raise ValueError(f"KLConfig.weight is {advantage.kl.weight}, accepted with credit for steps is 0")
        for name in ("baseline", "length_norm"):
            value, default = getattr(advantage, name), getattr(AdvantageConfig(), name)
            if value != default:
                raise ValueError(f"AdvantageConfig.{name} is {value!r}, accepted with credit for steps is {default!r}")
        return step_samples(
            group,
            [process_rewards(rollout) for rollout in group.rollouts],
            [rollout.seconds for rollout in group.rollouts],
            config,
            advantage=advantage,
            temperature=temperature,
            policy_version=policy_version,
            group_index=group_index,
        )

    return samples
