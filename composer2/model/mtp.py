"""Multi-token prediction: small modules behind the trunk guess tokens further ahead, taught by the main head itself.

    module j (j from 0):  h^j_i = Block(W [norm(Emb(t_{i+j+1})) ; norm(h^{j-1}_i)]),  h^{-1} = trunk output
    logits^j_i = Head(norm(h^j_i)) predict token i + j + 2, as the main head does at index i + j + 1
    loss = mean_i KL(stop-grad main_{i+j+1} || mtp^j_i)         acceptance = mean_i sum_v min(p_main, p_mtp)

The last is the probability that speculative sampling accepts a draft token.
Source: report §3 (MTP taught by self-distillation); DeepSeek-V3 paper; row M7. Embedding and head are the trunk's.
The trunk output taken is the one after the final norm, as with the published weights: their hnorm was fit on it (the
papers leave it open). Choice: between modules the state is handed on unnormed; the published weights have one module.
Choice: a prediction counts when the token it predicts lies in the same document; others carry no loss.
Choice: `detach_trunk` cuts the gradient of everything shared: trunk output, embedding and head.

Shape letters: B batch, T tokens, S new tokens, D model, V vocab, N modules (of a cache: rows), E experts, M cache
positions, C cache width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from composer2.model.attention import Attend, CacheView
from composer2.model.block import Block
from composer2.model.config import ModelConfig
from composer2.model.layers import RMSNorm


@dataclass(frozen=True, kw_only=True)
class MTPOutput:
    """What the MTP modules say."""

    logits: list[torch.Tensor]
    """[B, T, V] per module."""
    tokens_per_expert_NE: torch.Tensor
    """int64: load of each module's router, over indices that know the tokens they need."""


class MTPModule(nn.Module):
    """One module; tensor names follow the published checkpoints of the family."""

    def __init__(self, config: ModelConfig, *, attend: Attend, grouped_backend: str) -> None:
        super().__init__()
        self.enorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Block(config, is_moe=True, attend=attend, grouped_backend=grouped_backend)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        embedding_BTD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        mask: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden state of this depth, the same normed for the head, and the experts used [B * T, K]."""
        joined = self.eh_proj(torch.cat((self.enorm(embedding_BTD), self.hnorm(hidden_BTD)), dim=-1))
        hidden_BTD, selection = self.block(joined.to(hidden_BTD.dtype), rope, mask)
        return hidden_BTD, self.norm(hidden_BTD), selection.expert_ids_TK

    def forward_cached(
        self,
        hidden_BSD: torch.Tensor,
        embedding_BSD: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        cache_NMC: torch.Tensor,
        view: CacheView,
    ) -> torch.Tensor:
        """The same over new positions, earlier ones coming from the module's own cache; normed for the head."""
        joined = self.eh_proj(torch.cat((self.enorm(embedding_BSD), self.hnorm(hidden_BSD)), dim=-1))
        hidden_BSD, _ = self.block.forward_cached(joined.to(hidden_BSD.dtype), rope, cache_NMC, view)
        return self.norm(hidden_BSD)


def shift_left(x: torch.Tensor, places: int, fill: int | float) -> torch.Tensor:
    """x[:, t + places] at index t; `fill` where there is none."""
    if places == 0:
        return x
    tail = x.new_full((x.shape[0], min(places, x.shape[1]), *x.shape[2:]), fill)
    return torch.cat((x[:, places:], tail), dim=1)


def same_document(document_ids_BT: torch.Tensor, places: int) -> torch.Tensor:
    """bool [B, T]: the token `places` ahead exists and belongs to the same document; padding (-1) never."""
    ahead = shift_left(document_ids_BT, places, -1)
    return (ahead == document_ids_BT) & (document_ids_BT >= 0)


def _predicting(
    logits_BTV: torch.Tensor, module: int, document_ids_BT: torch.Tensor | None, loss_mask_BT: torch.Tensor | None
) -> torch.Tensor:
    """bool [B, T]: indices whose prediction, token index + module + 2, counts."""
    B, T = logits_BTV.shape[:2]
    if document_ids_BT is None:
        document_ids_BT = torch.zeros(B, T, dtype=torch.int64, device=logits_BTV.device)
    counts = same_document(document_ids_BT, module + 2)
    if loss_mask_BT is not None:
        counts = counts & shift_left(loss_mask_BT, module + 2, 0).bool()
    return counts


def _pairs(
    main_logits_BTV: torch.Tensor,
    mtp_logits: Sequence[torch.Tensor],
    document_ids_BT: torch.Tensor | None,
    loss_mask_BT: torch.Tensor | None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Per module the log-probabilities ([P, V], [P, V]) of teacher and student on the P predictions that count."""
    pairs = []
    for module, logits_BTV in enumerate(mtp_logits):
        row, column = _predicting(logits_BTV, module, document_ids_BT, loss_mask_BT).nonzero(as_tuple=True)
        teacher = main_logits_BTV.detach()[row, column + module + 1]
        pairs.append((_log_softmax(teacher), _log_softmax(logits_BTV[row, column])))
    return pairs


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return F.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)


def mtp_distillation_loss(
    main_logits_BTV: torch.Tensor,
    mtp_logits: Sequence[torch.Tensor],
    *,
    document_ids_BT: torch.Tensor | None = None,
    loss_mask_BT: torch.Tensor | None = None,
    top_k: int | None = None,
) -> torch.Tensor:
    """KL(main || MTP) in nats, mean over predictions of each module, then over modules; 0 when there are none.

    `loss_mask_BT` (bool) describes the token predicted: only predictions of its True tokens count. `top_k`: see
    `top_k_log_probs`; None compares whole distributions.
    """
    losses = []
    for teacher, student in _pairs(main_logits_BTV, mtp_logits, document_ids_BT, loss_mask_BT):
        if top_k is not None:
            teacher, student = top_k_log_probs(teacher, student, top_k)
        divergence = (teacher.exp() * (teacher - student)).sum(-1)
        losses.append(divergence.sum() / max(len(divergence), 1))
    return torch.stack(losses).mean() if losses else main_logits_BTV.new_zeros(())


def top_k_log_probs(teacher_PV: torch.Tensor, student_PV: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs [P, k + 1] of the teacher's k likeliest tokens and of all others together; [P, V] from k = V - 1 on.

    Source: MiniMax-M2 report (MTP co-trained by top-K KL), row M7. Choice: the report leaves open what becomes of the
    other tokens. As one event they make the loss the KL of a coarser outcome: never negative, never above the full KL.
    """
    if k < 1:
        raise ValueError(f"top_k is {k}, accepted is 1 or more")
    if k >= teacher_PV.shape[1] - 1:
        return teacher_PV, student_PV
    tokens_PK = teacher_PV.topk(k, dim=1).indices
    is_other_PV = torch.ones_like(teacher_PV, dtype=torch.bool).scatter(1, tokens_PK, False)
    parts = []
    for log_probs_PV in (teacher_PV, student_PV):
        others_P1 = log_probs_PV.masked_fill(~is_other_PV, -torch.inf).logsumexp(1, keepdim=True)
        parts.append(torch.cat((log_probs_PV.gather(1, tokens_PK), others_P1), dim=1))
    return parts[0], parts[1]


def mtp_label_loss(
    mtp_logits: Sequence[torch.Tensor],
    token_ids_BT: torch.Tensor,
    *,
    document_ids_BT: torch.Tensor | None = None,
    loss_mask_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross entropy against the tokens themselves, reduced as `mtp_distillation_loss` is; needs at least one module."""
    losses = []
    for module, logits_BTV in enumerate(mtp_logits):
        row, column = _predicting(logits_BTV, module, document_ids_BT, loss_mask_BT).nonzero(as_tuple=True)
        student = _log_softmax(logits_BTV[row, column])
        picked = student.gather(1, token_ids_BT[row, column + module + 2].long()[:, None])
        losses.append(-picked.sum() / max(len(picked), 1))
    return torch.stack(losses).mean()


@torch.no_grad()
def mtp_acceptance(
    main_logits_BTV: torch.Tensor,
    mtp_logits: Sequence[torch.Tensor],
    *,
    document_ids_BT: torch.Tensor | None = None,
    loss_mask_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """Mean of sum_v min(p, q) per module, [N]: how often a draft token would be accepted; 0 without predictions."""
    shares = []
    for teacher, student in _pairs(main_logits_BTV, mtp_logits, document_ids_BT, loss_mask_BT):
        overlap = torch.minimum(teacher, student).exp().sum(-1)
        shares.append(overlap.sum() / max(len(overlap), 1))
    return torch.stack(shares) if shares else main_logits_BTV.new_zeros(0)
