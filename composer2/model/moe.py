"""Mixture of experts: a router picks K of E small feed-forwards for every token; shared experts see all tokens.

    s = sigmoid(W x) or softmax(W x)    ids = topk(s + b)    w = s[ids] / sum(s[ids]) * factor
    out = sum_k w_k expert_ids_k(x) + shared(x)

The correction bias b only selects: gate weights come from the unbiased s, so the gradient reaches the router whatever
was selected, a replayed expert beyond the own top-k included (fault 29).
Source: report §3 (a mixture of experts); rows M5 M6; DeepSeek-V3 paper (sigmoid scores, bias from load, group-limited
selection).
A group's score is the sum of its two best biased scores. The router computes in float32 even under autocast.
Choice: tokens are sorted by expert, two grouped GEMMs run, and index_add sums in a fixed order: no loop over tokens.
`ModelConfig.expert_recipe` chooses the number formats of these GEMMs (row K4), `dispatch_wire` what tokens are sent as
(row K5); by default both are the model's own dtype, and nothing is rounded.
Choice: the bias is centred after every update; a common offset changes no selection and only drifts (fault 59).
Choice: experts may live in other processes (row D3). Two seams of `Experts`, both None on one device, are all that this
file knows of it: `exchange` takes tokens to their experts and back, `localise` gives the matrices that lie here.

Shape letters: B batch, T tokens, D model, E experts, K experts a token, F ffn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from composer2.kernels.dispatch import combine_tokens, pack_tokens
from composer2.kernels.formats import MXFP8
from composer2.kernels.grouped import grouped_mm
from composer2.kernels.linear import Recipe, expert_linear
from composer2.model.config import ModelConfig
from composer2.model.layers import SwiGLU
from composer2.model.router_replay import Selection, replay_selection


class FeedForward(Protocol):
    """The experts that lie here: rows sorted by expert, int32 running ends, codes of the rows or None -> rows."""

    def __call__(self, rows_RD: torch.Tensor, offsets_E: torch.Tensor, codes: MXFP8 | None = None) -> torch.Tensor: ...


Exchange = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FeedForward], torch.Tensor]
"""(x_TD, expert_ids_TK out of all E, weights_TK, the experts here) -> weighted sum over each token's experts [T, D]."""


class Router(nn.Module):
    """Scores, selects and weighs experts."""

    e_score_correction_bias: torch.Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))

    def forward(
        self, x_TD: torch.Tensor, routes_TK: torch.Tensor | None = None, tau: float = 0.0
    ) -> tuple[Selection, torch.Tensor]:
        """The selection and its gate weights [T, K] (at least float32)."""
        scores_TE = self.scores(x_TD)
        ranking_TE, own_TK = self.rank(scores_TE)
        if routes_TK is None:
            selection = Selection(expert_ids_TK=own_TK)
        else:
            selection = replay_selection(scores_TE, ranking_TE, own_TK, routes_TK, tau)
        weights_TK = scores_TE.gather(1, selection.expert_ids_TK)
        if self.config.norm_topk_prob:
            weights_TK = weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20)
        return selection, weights_TK * self.config.routed_scaling_factor

    def scores(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Unbiased gate scores [T, E], in float32 or better."""
        dtype = torch.promote_types(torch.promote_types(x_TD.dtype, self.weight.dtype), torch.float32)
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
        return logits_TE.sigmoid() if self.config.scoring_func == "sigmoid" else logits_TE.softmax(dim=-1)

    @torch.no_grad()
    def rank(self, scores_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What experts are ranked by (biased scores, -inf outside the best groups) and the router's own top-k."""
        ranking_TE = scores_TE + self.e_score_correction_bias.to(scores_TE.dtype)
        groups, allowed = self.config.n_group, self.config.topk_group
        if allowed < groups:
            by_group = ranking_TE.view(len(ranking_TE), groups, -1)
            group_scores = by_group.topk(min(2, by_group.shape[-1]), dim=-1).values.sum(-1)
            best = group_scores.topk(allowed, dim=-1).indices
            outside = torch.ones_like(group_scores, dtype=torch.bool).scatter(1, best, False)
            ranking_TE = by_group.masked_fill(outside[..., None], float("-inf")).flatten(1)
        return ranking_TE, ranking_TE.topk(self.config.num_experts_per_tok, dim=-1).indices

    @torch.no_grad()
    def update_bias(self, tokens_per_expert_E: torch.Tensor, rate: float) -> None:
        """b += rate * sign(mean load - load), then the mean of b is removed. A layer without tokens stays as it is."""
        load = tokens_per_expert_E.to(device=self.weight.device, dtype=torch.float64)
        bias = self.e_score_correction_bias.double() + rate * torch.sign(load.mean() - load)
        self.e_score_correction_bias.copy_(bias - bias.mean())


class Experts(nn.Module):
    """E gated feed-forwards as two stacks of matrices."""

    def __init__(self, config: ModelConfig, grouped_backend: str = "auto") -> None:
        super().__init__()
        experts, hidden, width = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.zeros(experts, hidden, width))
        self.grouped_backend, self.wire = grouped_backend, config.dispatch_wire
        self.recipe: Recipe | None = None
        if config.expert_recipe != "native":
            self.recipe = Recipe(name=config.expert_recipe, order=config.nvfp4_order)
        self.exchange: Exchange | None = None
        self.localise: Callable[[torch.Tensor], torch.Tensor] | None = None

    def forward(self, x_TD: torch.Tensor, expert_ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """Weighted sum over each token's experts, [T, D], in the dtype of the weights times that of x."""
        gate_up, down = (
            matrices if self.localise is None else self.localise(matrices)
            for matrices in (self.gate_up_proj, self.down_proj)
        )
        if torch.is_autocast_enabled(x_TD.device.type):
            dtype = torch.get_autocast_dtype(x_TD.device.type)
            x_TD = x_TD.to(dtype)
            if self.recipe is None:
                gate_up, down = gate_up.to(dtype), down.to(dtype)

        def feed_forward(rows_RD: torch.Tensor, offsets_E: torch.Tensor, codes: MXFP8 | None = None) -> torch.Tensor:
            gate, up = self.product(rows_RD, gate_up, offsets_E, codes).chunk(2, dim=-1)
            return self.product(F.silu(gate) * up, down, offsets_E)

        if self.exchange is not None:
            return self.exchange(x_TD, expert_ids_TK, weights_TK, feed_forward)
        packed = pack_tokens(x_TD, expert_ids_TK, len(down), wire=self.wire)
        return combine_tokens(feed_forward(packed.rows_RD, packed.offsets_E, packed.codes), packed, weights_TK)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, offsets_E: torch.Tensor, codes: MXFP8 | None = None
    ) -> torch.Tensor:
        """Rows times their expert's matrix, in the formats of the recipe."""
        if self.recipe is None:
            if self.wire != "native":
                weight = weight.to(x.dtype)
            return grouped_mm(x, weight, offsets_E, backend=self.grouped_backend)
        return expert_linear(x, weight, offsets_E, recipe=self.recipe, wire=codes, backend=self.grouped_backend)


class MoE(nn.Module):
    """Routed experts and, when there are any, shared experts (row M5)."""

    def __init__(self, config: ModelConfig, grouped_backend: str = "auto") -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, grouped_backend)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = SwiGLU(config.hidden_size, shared) if shared else None

    def forward(
        self, x_BTD: torch.Tensor, routes_BTK: torch.Tensor | None = None, tau: float = 0.0
    ) -> tuple[torch.Tensor, Selection]:
        x_TD = x_BTD.flatten(0, 1)
        routes_TK = None if routes_BTK is None else routes_BTK.flatten(0, 1)
        selection, weights_TK = self.gate(x_TD, routes_TK, tau)
        out = self.experts(x_TD, selection.expert_ids_TK, weights_TK).view_as(x_BTD).to(x_BTD.dtype)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x_BTD)
        return out, selection
