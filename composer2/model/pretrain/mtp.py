"""Training the multi-token-prediction layers: from scratch on a mid-run checkpoint, then jointly with the model.

In: a model whose trunk is trained and whose `mtp` layers are not. Out: MTP losses and acceptance rates.

Source: report §3.1 (MTP layers initialised from scratch, self-distilled to the exact logit distribution of the main
head, trained on a checkpoint cut from the middle of the run; trained jointly in the last two phases); rows P4 M7.
Equations. MTP layer k (1, 2 …) at position t has read tokens up to t + k and predicts token t + k + 1, as the main head
does at position t + k. With p the main head's distribution there (no gradient) and q the layer's:
  loss       = sum_t w_{t+k+1} KL(p_{t+k} || q_t) , summed over layers / number of layers
  acceptance = sum_t w_{t+k+1} sum_v min(p, q) / sum_t w_{t+k+1}
the second being the chance that speculative sampling at temperature 1 keeps a draft of q. w counts only where t and
t + k + 1 lie in one document.
Choice: from scratch the trunk runs without gradient and the shared embedding and head are detached, so distillation
cannot move the model it copies.
Choice: in fine-tuning the joint loss has its MTP term on every n-th step only: the layers are already trained, and a
term on every step would cost two fifths more time.

Shape letters: B rows, T tokens, D model, V vocab.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn

from composer2.model.mtp import MTPOutput
from composer2.model.pretrain.data import PretrainBatch
from composer2.model.pretrain.loop import (
    AutocastMode,
    LossFn,
    LossOutput,
    TensorBatch,
    autocast_context,
    device_of,
    next_token_loss,
    next_token_nll_sum,
    to_tensors,
)
from composer2.model.pretrain.state import CheckpointError, list_states, load_state_from
from composer2.model.transformer import ModelOutput, Transformer


def mtp_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of the MTP layers alone."""
    return [(name, parameter) for name, parameter in model.named_parameters() if name.startswith("mtp.")]


def trunk_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """All other parameters."""
    return [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith("mtp.")]


def mid_run_copy(model: Transformer, folder: Path | str) -> Transformer:
    """A copy of `model` holding the weights of the newest checkpoint of `folder`; CheckpointError without one."""
    states = list_states(folder)
    if not states:
        raise CheckpointError(f"{folder} holds no checkpoint to train MTP layers on")
    duplicate = copy.deepcopy(model)
    load_state_from(states[-1], model=duplicate)
    return duplicate


def move_mtp(source: Transformer, target: Transformer) -> None:
    """Give `target` the MTP layers of `source`; nothing else changes."""
    for theirs, ours in zip(source.mtp, target.mtp, strict=True):
        ours.load_state_dict(theirs.state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# Losses


def distillation_sum(main_logits_BTV: torch.Tensor, mtp_logits: list[torch.Tensor], batch: TensorBatch) -> torch.Tensor:
    """KL summed with the weights of the predicted tokens, mean over layers, float32. No gradient to the main logits."""
    with torch.no_grad():
        target_BTV = torch.log_softmax(main_logits_BTV.float(), dim=-1)
    total = main_logits_BTV.new_zeros((), dtype=torch.float32)
    for depth, logits_BTV in enumerate(mtp_logits, start=1):
        weights_BS = draft_weights(batch, depth)
        length = weights_BS.shape[1]
        p_BSV = target_BTV[:, depth : depth + length]
        q_BSV = torch.log_softmax(logits_BTV[:, :length].float(), dim=-1)
        kl_BS = torch.nn.functional.kl_div(q_BSV, p_BSV, reduction="none", log_target=True).sum(dim=-1)
        total = total + (kl_BS * weights_BS).sum() / len(mtp_logits)
    return total


def draft_weights(batch: TensorBatch, depth: int) -> torch.Tensor:
    """float32 [B, T - depth - 1]: weight of the token that layer `depth` predicts at position t, 0 across documents."""
    ahead = depth + 1
    documents_BT = batch.document_ids_BT
    is_same_BS = (documents_BT[:, :-ahead] == documents_BT[:, ahead:]) & (documents_BT[:, :-ahead] >= 0)
    return batch.weights_BT[:, ahead:] * is_same_BS


def mtp_only_loss(model: Transformer, batch: TensorBatch) -> LossOutput:
    """Self-distillation with the trunk detached: no gradient outside the MTP layers."""
    with torch.no_grad():
        output = _forward(model, batch)
    drafts = _drafts(model, output.hidden_BTD, batch, detach_trunk=True)
    loss_sum = distillation_sum(output.logits_BTV, drafts.logits, batch)
    return LossOutput(
        loss_sum=loss_sum,
        sums={"mtp_loss": loss_sum.detach()},
        mtp_tokens_per_expert_NE=drafts.tokens_per_expert_NE,
    )


def joint_loss(mtp_weight: float, every: int = 1) -> LossFn:
    """Next-token loss plus, on every `every`-th step, `mtp_weight` times self-distillation; both reach the trunk."""

    def loss(model: Transformer, batch: TensorBatch) -> LossOutput:
        if batch.step % every:
            return next_token_loss(model, batch)
        output = _forward(model, batch)
        nll_sum = next_token_nll_sum(output.logits_BTV, batch)
        drafts = _drafts(model, output.hidden_BTD, batch)
        kl_sum = distillation_sum(output.logits_BTV, drafts.logits, batch)
        return LossOutput(
            loss_sum=nll_sum + mtp_weight * kl_sum,
            sums={"next_token_loss": nll_sum.detach(), "mtp_loss": kl_sum.detach()},
            tokens_per_expert_LE=output.routing.tokens_per_expert_LE,
            mtp_tokens_per_expert_NE=drafts.tokens_per_expert_NE,
        )

    return loss


@torch.no_grad()
def measure_mtp_acceptance(
    model: Transformer, rows: PretrainBatch, *, rows_per_batch: int = 16, autocast: AutocastMode = "off"
) -> tuple[float, ...]:
    """Acceptance of each MTP layer over the weighted tokens of the rows, at temperature 1."""
    device = device_of(model)
    accepted = [0.0] * len(model.mtp)
    weight = [0.0] * len(model.mtp)
    for start in range(0, rows.num_rows, rows_per_batch):
        batch = to_tensors(rows.rows(start, start + rows_per_batch), device)
        with autocast_context(device, autocast):
            output = _forward(model, batch)
            drafts = _drafts(model, output.hidden_BTD, batch)
        p_BTV = torch.softmax(output.logits_BTV.float(), dim=-1)
        for depth, logits_BTV in enumerate(drafts.logits, start=1):
            weights_BS = draft_weights(batch, depth)
            length = weights_BS.shape[1]
            q_BSV = torch.softmax(logits_BTV[:, :length].float(), dim=-1)
            overlap_BS = torch.minimum(p_BTV[:, depth : depth + length], q_BSV).sum(dim=-1)
            accepted[depth - 1] += float((overlap_BS * weights_BS).sum())
            weight[depth - 1] += float(weights_BS.sum())
    if not all(weight):
        raise ValueError(f"weights of the drafted tokens sum to {weight}, accepted is above 0 for every MTP layer")
    return tuple(a / w for a, w in zip(accepted, weight, strict=True))


def _forward(model: Transformer, batch: TensorBatch) -> ModelOutput:
    return model(batch.token_ids_BT, position_ids_BT=batch.position_ids_BT, document_ids_BT=batch.document_ids_BT)


def _drafts(
    model: Transformer, trunk_BTD: torch.Tensor, batch: TensorBatch, *, detach_trunk: bool = False
) -> MTPOutput:
    return model.mtp_forward(
        trunk_BTD,
        batch.token_ids_BT,
        position_ids_BT=batch.position_ids_BT,
        document_ids_BT=batch.document_ids_BT,
        detach_trunk=detach_trunk,
    )
