"""The policy loss as a torchtitan loss: log-probs of this rank's trained tokens go in, this rank's term comes out.

    term = -(1 / denominator) * sum over trained tokens of w_t           (rl/loss.py); terms of all ranks add up

Source: report §4.1 (Dr. GRPO); rows R1 R8. Continued pretraining is the same sum with w_t = weight * log pi and as
denominator the number of predicted tokens: correction "none", normaliser "tokens".
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchtitan.components.loss import BaseLoss
from torchtitan.config import CompileConfig

from composer2.dist.context_parallel import RankBatch, rank_policy_loss
from composer2.rl.loss import LossConfig


class PolicyLoss(BaseLoss):
    """Dr. GRPO and its variants, the correction by config."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        policy: LossConfig = field(default_factory=LossConfig)
        """Correction and normaliser."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.config = config.policy

    def __call__(
        self,
        pred: torch.Tensor,
        labels: RankBatch,  # type: ignore[override]
        global_valid_tokens: torch.Tensor | None = None,
        *,
        denominator: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(this rank's term, nothing). `pred`: log-probs [N]; `denominator`: the step's, with the constant normaliser.

        With "tokens" it is `global_valid_tokens`, the trained tokens of the step over all ranks."""
        if self.config.normaliser == "tokens":
            if global_valid_tokens is None:
                raise ValueError("global_valid_tokens is None, accepted with normaliser 'tokens' is a count")
            denominator = max(float(global_valid_tokens), 1.0)
        if denominator is None:
            raise ValueError("denominator is None, accepted with normaliser 'constant' is the step's constant")
        return rank_policy_loss(pred, labels, self.config, denominator), {}
