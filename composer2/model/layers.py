"""Small layers: root-mean-square norm, gated feed-forward, and rotary positions with YaRN.

    norm(x) = w * x / sqrt(mean(x^2) + eps)        ffn(x) = W_down (silu(W_gate x) * W_up x)
    rope: a pair of numbers turns by the angle position * f_i, f_i = theta^(-2i/d); the pair is (x_2i, x_2i+1)
          (interleaved: DeepSeek-V3) or (x_i, x_i+d/2) (half-split: Qwen3, MiniMax-M2), d the part that turns
    YaRN: f_i' = f_i / factor * ramp_i + f_i * (1 - ramp_i), ramp 0 for fast and 1 for slow dimensions

Source: DeepSeek-V3 paper and the YaRN paper, for the base model that report §3 names; rows M1 M3 M4. Which pairs turn
is fixed by a family's weights.
Choice: a rotated interleaved vector is written [all first halves of the pairs, all second halves]: queries and keys
share the order, so every dot product is that of the pairwise order, and no interleaving copy is paid.
Frequencies are computed from the config at every forward (a few numbers), not kept in a buffer: a model built on the
meta device, cast or moved has nothing stale to carry.

Shape letters: B batch, T tokens, D model, F ffn, R rope pairs.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from composer2.model.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Same shape; a half-precision input under autocast is normed, and returned, in the dtype of the weight."""
        x = x.to(torch.promote_types(x.dtype, self.weight.dtype))
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class SwiGLU(nn.Module):
    """Gated feed-forward of a dense layer or of the shared experts."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def rope_frequencies(config: ModelConfig) -> list[float]:
    """The angle per position of each rotary pair, YaRN applied."""
    dim, theta, yarn = config.rope_dim, config.rope_theta, config.rope_scaling
    plain = [theta ** (-2 * i / dim) for i in range(dim // 2)]
    if yarn is None:
        return plain

    def pair_index(turns: float) -> float:
        """The (fractional) pair that makes `turns` turns within the original context."""
        length = yarn.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_index(yarn.beta_fast)), 0)
    high = min(math.ceil(pair_index(yarn.beta_slow)), dim - 1)
    span = high - low if high != low else 0.001
    ramp = [min(max((i - low) / span, 0.0), 1.0) for i in range(dim // 2)]
    return [f / yarn.factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True)]


def rope_tables(
    position_ids: torch.Tensor, config: ModelConfig, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of shape [*position_ids, R], float32 or, for a float64 model, float64; YaRN magnitude included."""
    dtype = torch.promote_types(dtype, torch.float32)
    frequencies_R = torch.tensor(rope_frequencies(config), dtype=dtype, device=position_ids.device)
    angles = position_ids.to(dtype)[..., None] * frequencies_R
    scale = 1.0 if config.rope_scaling is None else config.rope_scaling.cos_sin_scale
    return angles.cos() * scale, angles.sin() * scale


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate interleaved pairs of the last dimension of `x` [..., 2R]; cos and sin broadcast to [..., R]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1).to(x.dtype)


def apply_rope_half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + R) of the first 2R of the last dimension of `x`; what is behind them stays.

    cos and sin broadcast to [..., R]."""
    pairs = cos.shape[-1]
    first, second, rest = x.split((pairs, pairs, x.shape[-1] - 2 * pairs), dim=-1)
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*(half.to(x.dtype) for half in turned), rest), dim=-1)
