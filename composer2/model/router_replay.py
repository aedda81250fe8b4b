"""Router replay: the experts a sampler recorded replace the router's own choice, the gate weights stay the router's.

In: for every token the router's scores, its own top-k and, per token, K recorded expert ids or K times -1. Out: the ids
to use and what differed. A row of -1 routes freely.

    plausibility filter: a recorded expert e is dropped when  gate_e < tau * min(gate over the router's own top-k)
    both gates unbiased; a dropped slot is refilled from the router's own ranking, skipping what was kept

Source: report §6.2 (replay with a filter of implausible experts); row M6; faults 25, 29 and 32.
Choice: the report gives no formula for the filter; this one compares within the token, so it needs no global threshold.
Since every expert of the own top-k passes it, a refill always comes from the own top-k, and tau = 0 disables it.
Choice: routes that do not fit (length, ids, a row half -1, an expert twice) are an error, never cut or broadcast.

Shape letters: B batch, T tokens, L MoE layers, K experts a token, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from composer2.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """How recorded routes are used."""

    tau: float = 0.0
    """Plausibility threshold, 0 <= tau < 1; 0 replays everything."""

    def __post_init__(self) -> None:
        if not 0 <= self.tau < 1:
            raise ValueError(f"tau is {self.tau!r}, accepted is 0 <= tau < 1")


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Experts of one layer and how they came about; `replaced_T` and `differs_T` are None without replay."""

    expert_ids_TK: torch.Tensor
    """int64."""
    replaced_T: torch.Tensor | None = None
    """int64: recorded experts the filter dropped."""
    differs_T: torch.Tensor | None = None
    """bool: the recorded set is not the router's own."""


def check_routes(routes_BTLK: torch.Tensor, token_ids_BT: torch.Tensor, config: ModelConfig) -> torch.Tensor:
    """The routes as int64; ValueError unless they are exactly one row of K distinct experts (or -1) a token a layer."""
    expected = (*token_ids_BT.shape, config.num_moe_layers, config.num_experts_per_tok)
    if tuple(routes_BTLK.shape) != expected:
        raise ValueError(f"routes have shape {tuple(routes_BTLK.shape)}, accepted is [B, T, L, K] = {expected}")
    if routes_BTLK.is_floating_point() or routes_BTLK.dtype == torch.bool:
        raise ValueError(f"routes have dtype {routes_BTLK.dtype}, accepted is an integer dtype")
    routes = routes_BTLK.to(device=token_ids_BT.device, dtype=torch.int64)
    if routes.numel() == 0:
        return routes
    low, high = (int(bound) for bound in routes.aminmax())
    if low < -1 or high >= config.n_routed_experts:
        raise ValueError(f"routes hold ids {low} .. {high}, accepted is -1 .. {config.n_routed_experts - 1}")
    free = routes < 0
    if bool((free.any(-1) != free.all(-1)).any()):
        raise ValueError("routes hold a row that is -1 in part, accepted is K expert ids or K times -1")
    ranked = routes.sort(dim=-1).values
    if bool(((ranked[..., 1:] == ranked[..., :-1]) & (ranked[..., 1:] >= 0)).any()):
        raise ValueError("routes hold one expert twice in a row, accepted is K distinct expert ids")
    return routes


@torch.no_grad()
def replay_selection(
    scores_TE: torch.Tensor, ranking_TE: torch.Tensor, own_TK: torch.Tensor, routes_TK: torch.Tensor, tau: float
) -> Selection:
    """Override `own_TK` by `routes_TK`. `scores_TE`: unbiased gates; `ranking_TE`: what the router ranks by.

    Floats [T, E], the higher the better; int64 [T, K]. Nothing is checked here: `check_routes` is for that."""
    recorded = torch.where(routes_TK < 0, own_TK, routes_TK)
    in_own_TK = (recorded[:, :, None] == own_TK[:, None, :]).any(-1)
    differs_T = ~in_own_TK.all(-1)
    if tau == 0:
        return Selection(expert_ids_TK=recorded, replaced_T=torch.zeros_like(recorded[:, 0]), differs_T=differs_T)
    floor_T1 = scores_TE.gather(1, own_TK).amin(dim=1, keepdim=True)
    dropped_TK = (scores_TE.gather(1, recorded) < tau * floor_T1) & ~in_own_TK
    kept_TE = torch.zeros_like(scores_TE, dtype=torch.bool).scatter(1, recorded, ~dropped_TK)
    refilled = ranking_TE.masked_fill(kept_TE, float("inf")).topk(own_TK.shape[1], dim=1).indices
    chosen = torch.where(dropped_TK.any(1, keepdim=True), refilled, recorded)
    return Selection(expert_ids_TK=chosen, replaced_T=dropped_TK.sum(1), differs_T=differs_T)
