"""Settings of the pretraining phases: `CptConfig` (phases 1 and 2), `MtpConfig`, `SftConfig` (phase 3).

In: numbers. Out: frozen dataclasses that know their optimizer settings and evaluation steps.

Source: report §3.1 gives the phases and AdamW, no numbers; rows P2 P3 P4 P5.
Choice: the defaults are those of a policy of one or two million parameters trained on one CPU core for minutes.
Choice: supervised fine-tuning aims its linear decay at step 1000 and stops at 600, which leaves a policy that still
explores when RL begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from composer2.model.pretrain.loop import AutocastMode
from composer2.model.pretrain.loss_fit import log_spaced_steps
from composer2.model.pretrain.optim import OptimConfig, ScheduleName


def _check(config: Any, *, positive: Sequence[str] = (), not_negative: Sequence[str] = ()) -> None:
    kind = type(config).__name__
    for name in positive:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{kind}.{name} is {getattr(config, name)}, accepted is a finite number above 0")
    for name in not_negative:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{kind}.{name} is {getattr(config, name)}, accepted is 0 or more")
    if config.autocast not in ("off", "bf16"):
        raise ValueError(f"{kind}.autocast is {config.autocast!r}, accepted is 'off' or 'bf16'")


@dataclass(frozen=True, kw_only=True)
class CptConfig:
    """Phases 1 and 2: next-token training on the corpus, at short and then at long rows."""

    phase1_steps: int = 150
    """Steps at short rows."""
    phase1_seq_len: int = 192
    """Tokens of a short row."""
    phase1_rows: int = 16
    """Rows of a step in phase 1."""
    phase2_steps: int = 20
    """Steps at long rows, after the context extension."""
    phase2_seq_len: int = 384
    """Tokens of a long row."""
    phase2_rows: int = 8
    """Rows of a step in phase 2."""
    lr: float = 3e-3
    """Peak learning rate of phase 1."""
    phase2_lr: float = 1e-3
    """Peak learning rate of phase 2."""
    warmup_steps: int = 20
    """Warm-up of phase 1; evaluation points inside it stay out of the loss fit."""
    phase2_warmup_steps: int = 5
    """Warm-up of phase 2."""
    schedule: ScheduleName = "cosine"
    """Shape of the learning rate in both phases."""
    min_lr_frac: float = 0.1
    """Floor of the schedule as a fraction of the peak."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    clip: float = 1.0
    """Largest gradient norm."""
    accumulation: int = 1
    """Micro-batches a step is cut into; changes memory, not the result."""
    autocast: AutocastMode = "bf16"
    """bf16 or off (fp32)."""
    router_bias_rate: float = 1e-2
    """Step of the router's correction bias towards equal load; large, since a short run must balance from scratch."""
    num_eval_points: int = 14
    """Held-out evaluations of phase 1 at log-spaced steps after the warm-up, besides one before the first step."""
    eval_rows: int = 32
    """Held-out rows of an evaluation."""
    mid_frac: float = 0.5
    """Where phase 1 leaves the checkpoint that the MTP layers are first trained on."""

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("phase1_steps", "phase1_rows", "phase2_rows", "lr", "phase2_lr", "eval_rows", "accumulation"),
            not_negative=(
                "phase2_steps",
                "warmup_steps",
                "phase2_warmup_steps",
                "weight_decay",
                "clip",
                "router_bias_rate",
            ),
        )
        for name in ("phase1_seq_len", "phase2_seq_len"):
            if getattr(self, name) < 2:
                raise ValueError(f"CptConfig.{name} is {getattr(self, name)}, accepted is 2 or more")
        if not self.num_eval_points >= 0 or self.num_eval_points == 1:
            raise ValueError(f"CptConfig.num_eval_points is {self.num_eval_points}, accepted is 0, or 2 and more")
        if not 0 < self.mid_frac <= 1:
            raise ValueError(f"CptConfig.mid_frac is {self.mid_frac}, accepted is above 0, at most 1")

    @property
    def mid_step(self) -> int:
        """Step after which the mid-run checkpoint is written."""
        return max(1, round(self.mid_frac * self.phase1_steps))

    @property
    def eval_steps(self) -> tuple[int, ...]:
        """Steps of phase 1 after which held-out loss is measured; 0 is before training."""
        if self.num_eval_points == 0:
            return ()
        first = min(self.warmup_steps + 1, self.phase1_steps)
        return (0, *log_spaced_steps(first, self.phase1_steps, self.num_eval_points))

    def optim(self, phase: int) -> OptimConfig:
        """Optimizer settings of phase 1 or 2."""
        return OptimConfig(
            lr=self.lr if phase == 1 else self.phase2_lr,
            weight_decay=self.weight_decay,
            clip=self.clip,
            warmup_steps=self.warmup_steps if phase == 1 else self.phase2_warmup_steps,
            schedule=self.schedule,
            schedule_steps=max(1, self.phase1_steps if phase == 1 else self.phase2_steps),
            stop_step=self.phase1_steps if phase == 1 else self.phase2_steps,
            min_lr_frac=self.min_lr_frac,
        )


@dataclass(frozen=True, kw_only=True)
class MtpConfig:
    """MTP layers: training from scratch with the trunk frozen, and their weight in joint training."""

    num_steps: int = 40
    """Steps from scratch on the mid-run checkpoint."""
    seq_len: int = 192
    """Tokens of a row."""
    rows: int = 8
    """Rows of a step."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 5
    """Steps of warm-up."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    clip: float = 1.0
    """Largest gradient norm."""
    accumulation: int = 1
    """Micro-batches a step is cut into."""
    autocast: AutocastMode = "bf16"
    """bf16 or off (fp32)."""
    router_bias_rate: float = 1e-2
    """Step of the correction bias of the MTP layers' routers, as in phase 1."""
    joint_weight: float = 0.1
    """Weight of the MTP loss in phase 2 and in supervised fine-tuning; 0 leaves the MTP layers out."""
    sft_every: int = 4
    """In supervised fine-tuning, steps from one with the MTP loss to the next; 1 has it in every step."""

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("rows", "lr", "accumulation", "sft_every"),
            not_negative=("num_steps", "warmup_steps", "weight_decay", "clip", "router_bias_rate", "joint_weight"),
        )
        if self.seq_len < 3:
            raise ValueError(f"MtpConfig.seq_len is {self.seq_len}, accepted is 3 or more")

    def optim(self) -> OptimConfig:
        """Optimizer settings of the training from scratch."""
        return OptimConfig(
            lr=self.lr,
            weight_decay=self.weight_decay,
            clip=self.clip,
            warmup_steps=self.warmup_steps,
            schedule="cosine",
            schedule_steps=max(1, self.num_steps),
            stop_step=self.num_steps,
            min_lr_frac=0.1,
        )


@dataclass(frozen=True, kw_only=True)
class SftConfig:
    """Phase 3: supervised fine-tuning on scripted trajectories."""

    num_steps: int = 600
    """Steps taken."""
    schedule_steps: int = 1000
    """Step the linear decay aims at; above `num_steps` training stops before the rate has decayed."""
    batch_size: int = 16
    """Examples the provider gives for a step."""
    row_len: int = 256
    """Length that examples are packed to; a longer example widens the rows of its step. Short rows attend cheaply."""
    max_len: int = 512
    """Longest example accepted."""
    lr: float = 3e-3
    """Peak learning rate."""
    warmup_steps: int = 20
    """Steps of warm-up."""
    schedule: ScheduleName = "linear"
    """Shape of the learning rate."""
    weight_decay: float = 0.01
    """Decoupled weight decay of matrices."""
    clip: float = 1.0
    """Largest gradient norm."""
    accumulation: int = 1
    """Micro-batches a step is cut into."""
    autocast: AutocastMode = "bf16"
    """bf16 or off (fp32)."""
    router_bias_rate: float = 1e-3
    """Step of the router's correction bias towards equal load."""

    def __post_init__(self) -> None:
        _check(
            self,
            positive=("schedule_steps", "batch_size", "row_len", "max_len", "lr", "accumulation"),
            not_negative=("num_steps", "warmup_steps", "weight_decay", "clip", "router_bias_rate"),
        )

    def optim(self) -> OptimConfig:
        """Optimizer settings."""
        return OptimConfig(
            lr=self.lr,
            weight_decay=self.weight_decay,
            clip=self.clip,
            warmup_steps=self.warmup_steps,
            schedule=self.schedule,
            schedule_steps=self.schedule_steps,
            stop_step=self.num_steps,
        )
