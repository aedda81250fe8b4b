"""AdamW, its parameter groups, and learning-rate schedules.

In: a model's named parameters and an `OptimConfig`. Out: a torch optimizer; the learning rate of a step.

Source: report §3.1 (AdamW), row P2 (warm-up + cosine or WSD, gradient clipping).
Choice: a schedule is aimed at `schedule_steps` but training may end earlier (`stop_step`): supervised fine-tuning that
leaves room for RL stops before its learning rate has decayed.

With w warm-up steps, S schedule steps, floor f = min_lr_frac and u = (step - w) / (S - w) within [0, 1], all times lr:
  warm-up  (step + 1) / w            for step < w
  constant 1
  linear   1 - (1 - f) u
  cosine   f + (1 - f) (1 + cos(pi u)) / 2
  wsd      1 until the last decay_frac of the S steps, then linearly to f (warm-up, stable, decay)
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

ScheduleName = Literal["constant", "linear", "cosine", "wsd"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 3e-3
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled decay of matrices; norms, biases and other vectors have none."""
    clip: float = 1.0
    """Largest gradient norm over all parameters; 0 does not clip."""
    warmup_steps: int = 20
    """Steps of linear warm-up from 0."""
    schedule: ScheduleName = "cosine"
    """Shape after the warm-up: constant, linear, cosine or wsd."""
    schedule_steps: int = 100
    """Step at which the schedule has reached its floor, warm-up included."""
    stop_step: int | None = None
    """Step at which training ends; None: at `schedule_steps`."""
    min_lr_frac: float = 0.0
    """Floor of the schedule as a fraction of `lr`."""
    decay_frac: float = 0.2
    """wsd only: fraction of `schedule_steps` that decays."""

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"OptimConfig.lr is {self.lr}, accepted is a number above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"OptimConfig.betas is {self.betas}, accepted are two numbers 0 <= beta < 1")
        for name in ("weight_decay", "clip", "warmup_steps", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"OptimConfig.{name} is {getattr(self, name)}, accepted is 0 or more")
        if self.schedule not in get_args(ScheduleName):
            raise ValueError(f"OptimConfig.schedule is {self.schedule!r}, accepted is one of {get_args(ScheduleName)}")
        if self.schedule_steps < 1:
            raise ValueError(f"OptimConfig.schedule_steps is {self.schedule_steps}, accepted is 1 or more")
        if self.stop_step is not None and self.stop_step < 0:
            raise ValueError(f"OptimConfig.stop_step is {self.stop_step}, accepted is None or 0 and more")
        for name in ("min_lr_frac", "decay_frac"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"OptimConfig.{name} is {getattr(self, name)}, accepted is 0 to 1")

    @property
    def num_steps(self) -> int:
        """Steps that are really taken."""
        return self.schedule_steps if self.stop_step is None else self.stop_step

    def lr_at(self, step: int) -> float:
        """Learning rate of the step number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.schedule_steps - self.warmup_steps)
        progress = min(1.0, progress)
        floor = self.min_lr_frac
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "linear":
            return self.lr * (1 - (1 - floor) * progress)
        if self.schedule == "cosine":
            return self.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress)))
        remaining = max(0, self.schedule_steps - step) / max(1.0, self.decay_frac * self.schedule_steps)
        return self.lr * (floor + (1 - floor) * min(1.0, remaining))


def make_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over two groups: matrices with weight decay, vectors (norms, biases) without. Weights stay fp32."""
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for _, parameter in named_parameters:
        if parameter.requires_grad:
            (decayed if parameter.ndim >= 2 else plain).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def clip_gradients(optimizer: torch.optim.Optimizer, max_norm: float) -> float:
    """Scale all gradients so that their joint norm is at most `max_norm` (0: leave them). Returns the norm before."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    if max_norm > 0:
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
    return float(norm)
