"""The algorithm of the report, and its relatives as named comparisons: an advantage config and a loss config each.

In: nothing. Out: pairs of configs. Nothing branches on a name: what differs is in the fields.

    name      baseline      / std  / length  correction            normaliser
    dr_grpo   mean          no     no        ppo_clip              constant          the report's, and the default
    grpo      mean          yes    yes       ppo_clip, symmetric   rollouts
    rloo      mean of rest  no     no        none                  rollouts
    dapo      mean          yes    no        ppo_clip, clip-higher tokens
    cispo     mean          yes    no        cispo                 tokens
    gspo      mean          yes    yes       gspo                  rollouts

    J = (1 / normaliser) sum_i sum_t w_it        with w of `rl.loss` and A_it of `rl.advantage`

Source: report §4.1 (Dr. GRPO); rows R1 R8; the papers of DeepSeekMath (GRPO), RLOO, DAPO, MiniMax-M1 (CISPO), GSPO.
GRPO's 1/|o_i| may be written into the advantage, since clipping does not change under a positive factor.
What is simplified: DAPO resamples prompts until no group is degenerate and softens the penalty of overlong answers.
Here a prompt is drawn once (single epoch), so a degenerate group simply has no samples, and length is priced by the
reward (row R5). GRPO's k3 term is left out of `grpo`: the KL is an option of its own (row R2).
Choice: `tokens` counts the trained tokens of the whole step, not of each prompt, so that prompts weigh by their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from composer2.rl.advantage import AdvantageConfig
from composer2.rl.loss import LossConfig


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """What of a training step makes the algorithm."""

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rewards to advantages."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Advantages to a loss."""


def dr_grpo() -> Algorithm:
    """The report's: no division by deviation or length, one constant normaliser."""
    return Algorithm()


def grpo() -> Algorithm:
    """Divides by the deviation of the group and by the length of the rollout."""
    return Algorithm(
        advantage=AdvantageConfig(baseline="grpo", length_norm=True),
        loss=LossConfig(correction="ppo_clip", eps_low=0.2, eps_high=0.2, norm_length=1.0),
    )


def rloo() -> Algorithm:
    """REINFORCE with the mean of the other rollouts as baseline; on-policy, so nothing is corrected or clipped."""
    return Algorithm(advantage=AdvantageConfig(baseline="rloo"), loss=LossConfig(correction="none", norm_length=1.0))


def dapo() -> Algorithm:
    """Clips higher than lower and weighs every token of the step alike."""
    return Algorithm(
        advantage=AdvantageConfig(baseline="grpo"),
        loss=LossConfig(correction="ppo_clip", eps_low=0.2, eps_high=0.28, normaliser="tokens"),
    )


def cispo() -> Algorithm:
    """M2's and M1's: the importance weight is clipped and held constant, so that no token loses its gradient."""
    return Algorithm(
        advantage=AdvantageConfig(baseline="grpo"), loss=LossConfig(correction="cispo", normaliser="tokens")
    )


def gspo() -> Algorithm:
    """One importance ratio a sequence, the geometric mean over its tokens, clipped in the paper's narrow range."""
    return Algorithm(
        advantage=AdvantageConfig(baseline="grpo", length_norm=True),
        loss=LossConfig(correction="gspo", eps_low=3e-4, eps_high=4e-4, norm_length=1.0),
    )


VARIANTS: Mapping[str, Callable[[], Algorithm]] = {
    "dr_grpo": dr_grpo,
    "grpo": grpo,
    "rloo": rloo,
    "dapo": dapo,
    "cispo": cispo,
    "gspo": gspo,
}
"""For scripts that compare them."""
