"""Context parallelism for latent attention: one row over several ranks, equal work for each, latents on the wire.

    a row of T tokens is cut into 2 CP chunks; rank i holds chunks i and 2 CP - 1 - i, in that order
    keys:   every rank sends the latents (and rope keys) of its tokens to all, and expands them itself
    pairs:  token t of a document looks at t + 1 keys; an early and a late chunk add up to the same for every rank

In: whole rows, known to all ranks of the context group. Out: what lies on one rank, and the `KeyView` that attention
needs to know which of the gathered keys a token may see. Every per-token field is cut alike: tokens, positions,
documents, targets, masks, advantages, log-probs, routes.
Source: report §6.1 (local KV latents are gathered, KV up-projection on every rank, overlapped with the query
projection; 2 CP chunks); row D2.
Choice: what a token predicts is shifted to the place it is predicted from before rows are cut, since the next token may
lie on another rank. Choice: keys stay in the order in which ranks hold them, which saves a copy: the mask knows.

Shape letters: B rows, T tokens of a row, S tokens of it on one rank (T / CP), C latent and rope key, M gathered keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from composer2.model.attention import KeyView
from composer2.model.mtp import shift_left
from composer2.model.router_replay import ReplayConfig
from composer2.model.transformer import RoutingStats, Transformer
from composer2.rl.loss import (
    MAX_LOG_RATIO,
    LossConfig,
    check_finite,
    check_loss_mask,
    corrected_terms,
    target_logprobs,
)
from composer2.rl.pack import BatchTensors
from composer2.rl.routes import NO_ROUTE

# ---------------------------------------------------------------------------------------------------------------------
# Chunks


def chunk_places(length: int, cp: int, rank: int) -> torch.Tensor:
    """int64 [length / cp]: places of a row that rank `rank` of `cp` holds. ValueError unless 2 cp divides it."""
    if length < 1 or length % (2 * cp):
        raise ValueError(f"length is {length}, accepted is a multiple of 2 * cp = {2 * cp}")
    if not 0 <= rank < cp:
        raise ValueError(f"rank is {rank}, accepted is 0 .. {cp - 1}")
    chunks = torch.arange(length).view(2 * cp, -1)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))


def gathered_places(length: int, cp: int) -> torch.Tensor:
    """int64 [length]: the place in the row of every key, in the order in which the ranks' parts follow each other."""
    return torch.cat([chunk_places(length, cp, rank) for rank in range(cp)])


def visible_until(document_ids_BT: torch.Tensor) -> torch.Tensor:
    """int64 [B, T]: the end of each token's document (a run of equal ids); for padding (-1) the token itself only."""
    length = document_ids_BT.shape[1]
    places = torch.arange(length, device=document_ids_BT.device).expand(document_ids_BT.shape)
    ends = torch.full_like(places, length)
    last = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    ends[:, :-1] = torch.where(last, places[:, 1:], length)
    ends = ends.flip(1).cummin(dim=1).values.flip(1)
    return torch.where(document_ids_BT < 0, places + 1, ends)


def causal_pairs(document_ids_BT: torch.Tensor, cp: int) -> torch.Tensor:
    """int64 [cp]: (query, key) pairs that each rank computes for these rows. Padding has its pair with itself."""
    length = document_ids_BT.shape[1]
    until = visible_until(document_ids_BT)
    starts = torch.zeros_like(until)
    starts[:, 1:] = torch.where(document_ids_BT[:, 1:] != document_ids_BT[:, :-1], torch.arange(1, length), 0)
    places = torch.arange(length)
    pairs_BT = torch.where(document_ids_BT < 0, 1, places - starts.cummax(dim=1).values + 1)
    return torch.stack([pairs_BT[:, chunk_places(length, cp, rank)].sum() for rank in range(cp)])


def imbalance(document_ids_BT: torch.Tensor, cp: int) -> float:
    """Pairs of the busiest rank over the mean: 1.0 for one document, more for packed ones."""
    pairs = causal_pairs(document_ids_BT, cp).double()
    return float(pairs.max() / pairs.mean())


# ---------------------------------------------------------------------------------------------------------------------
# One rank's part of a batch


@dataclass(frozen=True, kw_only=True)
class RankBatch:
    """Tokens that lie on one rank; the fields from `targets` on belong to what a token predicts, the next token."""

    token_ids: torch.Tensor
    """int64 [B, S]."""
    position_ids: torch.Tensor
    """int64 [B, S]."""
    document_ids: torch.Tensor
    """int64 [B, S], -1 at padding."""
    routes: torch.Tensor
    """int64 [B, S, L, K], -1 where none."""
    targets: torch.Tensor
    """int64 [B, S]: the next token."""
    loss_mask: torch.Tensor
    """bool [B, S]: the next token is trained."""
    advantages: torch.Tensor
    """float32 [B, S], the next token's."""
    behaviour_logprobs: torch.Tensor
    """float32 [B, S], the next token's."""
    policy_versions: torch.Tensor
    """int64 [B, S], the next token's."""
    key_view: KeyView
    temperature: float = 1.0


def shard_batch(batch: BatchTensors, cp: int, rank: int) -> RankBatch:
    """The part of whole rows that rank `rank` of `cp` holds. ValueError for a length that does not divide."""
    check_loss_mask(batch)
    length = batch.token_ids.shape[1]
    places = chunk_places(length, cp, rank).to(batch.token_ids.device)
    order = gathered_places(length, cp).to(batch.token_ids.device)
    here = {name: getattr(batch, name)[:, places] for name in ("token_ids", "position_ids", "document_ids", "routes")}
    for name in ("loss_mask", "advantages", "behaviour_logprobs", "policy_versions"):
        here[name] = shift_left(getattr(batch, name), 1, 0)[:, places]
    return RankBatch(
        **here,
        targets=shift_left(batch.token_ids, 1, 0)[:, places],
        key_view=KeyView(
            query_index_T=places, key_index_M=order, visible_until_BM=visible_until(batch.document_ids)[:, order]
        ),
        temperature=batch.temperature,
    )


def pad_rows(batch: BatchTensors, multiple: int) -> BatchTensors:
    """The batch with rows a multiple of `multiple` long; what is added is padding (document -1), trained by nothing."""
    missing = -batch.token_ids.shape[1] % multiple
    if not missing:
        return batch
    fills = {"document_ids": -1, "policy_versions": -1, "routes": NO_ROUTE}
    padded: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, torch.Tensor):
            tail = value.new_full((len(value), missing, *value.shape[2:]), fills.get(name, 0))
            padded[name] = torch.cat((value, tail), dim=1)
    return replace(batch, **padded)


def rank_logprobs(
    model: Transformer, batch: RankBatch, replay: ReplayConfig | None
) -> tuple[torch.Tensor, RoutingStats]:
    """Log-probs [N] of the trained tokens this rank predicts, in row-major order, and its routing statistics.

    `replay` None lets the routers decide. Every rank calls this for every batch, trained tokens or not: the model's
    collectives wait for all."""
    out = model(
        batch.token_ids,
        position_ids_BT=batch.position_ids,
        document_ids_BT=batch.document_ids,
        routes_BTLK=None if replay is None else batch.routes,
        replay=replay,
        with_logits=False,
        key_view=batch.key_view,
    )
    # A rank without trained tokens still takes part in the backward collectives: the empty selection carries gradient.
    logits_NV = model.lm_head(out.hidden_BTD[batch.loss_mask])
    logprobs_N, _ = target_logprobs(logits_NV, batch.targets[batch.loss_mask], batch.temperature)
    return logprobs_N, out.routing


def rank_policy_loss(
    logprobs_N: torch.Tensor, batch: RankBatch, config: LossConfig, denominator: float
) -> torch.Tensor:
    """This rank's term of `policy_loss`: summed over ranks, and its gradients, they are those of the whole batch.

    `denominator` is that of the whole step over all ranks. `gspo` is refused: its ratio is a mean over a sequence,
    which may lie on several ranks."""
    if config.correction == "gspo":
        raise ValueError("correction is 'gspo', accepted over context ranks is one whose ratio is per token")
    mask = batch.loss_mask
    advantages_N = batch.advantages[mask].to(logprobs_N.dtype)
    behaviour_N = batch.behaviour_logprobs[mask].to(logprobs_N.dtype)
    check_finite({"logprobs_N": logprobs_N, "advantages": advantages_N, "behaviour_logprobs": behaviour_N})
    ratio_N = (logprobs_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    terms_N, _ = corrected_terms(logprobs_N, ratio_N, advantages_N, config)
    return -terms_N.sum() / denominator


# ---------------------------------------------------------------------------------------------------------------------
# Latents of all ranks


class GatherLatents:
    """The `gather` seam of latent attention: [B, S, C] of this rank -> [B, M, C] of all, in rank order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, entries_BSC: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start; the function that is returned waits. What runs in between runs beside the transfer."""
        size = dist.get_world_size(self.group)
        sent = entries_BSC.detach().contiguous()
        received = sent.new_empty(size * sent.shape[0], *sent.shape[1:])
        work = dist.all_gather_single(received, sent, group=self.group, async_op=True)
        assert work is not None

        def finish() -> torch.Tensor:
            work.wait()
            gathered: torch.Tensor = _Gathered.apply(entries_BSC, received, self.group)
            return gathered

        return finish


class _Gathered(torch.autograd.Function):
    """Parts of all ranks side by side; the gradient of a part is the sum of what all ranks have for it."""

    @staticmethod
    def forward(ctx: Any, entries: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group, ctx.shape = group, entries.shape
        return received.unflatten(0, (-1, len(entries))).transpose(0, 1).flatten(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        here = ctx.shape[1]
        sent = grads[0].unflatten(1, (-1, here)).transpose(0, 1).flatten(0, 1).contiguous()
        received = sent.new_empty(ctx.shape)
        dist.reduce_scatter_single(received, sent, group=ctx.group)
        return received, None, None
