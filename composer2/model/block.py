"""One pre-norm decoder block: x + attention(norm(x)), then x + feed-forward(norm(x)), the latter dense or MoE.

Source: report App. B; rows M1 M3. The trunk and the MTP modules are made of this one block.

Shape letters: B batch, T tokens, S new tokens, D model, K experts a token, N cache slots, M positions, C cache width.
"""

from __future__ import annotations

import torch
from torch import nn

from composer2.model.attention import Attend, CacheView, LatentAttention
from composer2.model.config import ModelConfig
from composer2.model.gqa import GroupedQueryAttention
from composer2.model.layers import RMSNorm, SwiGLU
from composer2.model.moe import MoE
from composer2.model.router_replay import Selection


class Block(nn.Module):
    """A decoder layer."""

    def __init__(
        self, config: ModelConfig, *, is_moe: bool, attend: Attend, grouped_backend: str, is_windowed: bool = False
    ) -> None:
        super().__init__()
        self.is_windowed = is_windowed
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: LatentAttention | GroupedQueryAttention
        if config.attention == "latent":
            self.self_attn = LatentAttention(config, attend)
        else:
            self.self_attn = GroupedQueryAttention(config, attend, is_windowed=is_windowed)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp: MoE | SwiGLU
        if is_moe:
            self.mlp = MoE(config, grouped_backend)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x_BTD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
        routes_BTK: torch.Tensor | None = None,
        tau: float = 0.0,
    ) -> tuple[torch.Tensor, Selection | None]:
        """The block's output and, for an MoE block, the experts used."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rope, mask)
        return self._feed_forward(x_BTD, routes_BTK, tau)

    def forward_cached(
        self, x_BSD: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], cache_NMC: torch.Tensor, view: CacheView
    ) -> tuple[torch.Tensor, Selection | None]:
        """The same over new tokens, earlier ones coming from the cache."""
        x_BSD = x_BSD + self.self_attn.forward_cached(self.input_layernorm(x_BSD), rope, cache_NMC, view)
        return self._feed_forward(x_BSD, None, 0.0)

    def _feed_forward(
        self, x_BTD: torch.Tensor, routes_BTK: torch.Tensor | None, tau: float
    ) -> tuple[torch.Tensor, Selection | None]:
        normed = self.post_attention_layernorm(x_BTD)
        if isinstance(self.mlp, MoE):
            out, selection = self.mlp(normed, routes_BTK, tau)
            return x_BTD + out, selection
        return x_BTD + self.mlp(normed), None
