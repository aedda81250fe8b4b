"""Keeps the MTP layers in step with a policy that moves: on some steps of RL they are distilled on its own rollouts.

In: the model, the samples of a step. Out: gradients on the MTP layers alone, and what was measured.

    loss = mean over the sampled tokens of  KL_top-K( main head || MTP layer )        main head, trunk: constants

Source: MiniMax-M2 report (MTP modules continuously co-trained with the policy by a top-K KL loss, so that drafts stay
acceptable); rows M7 I5.
Choice: nothing of it reaches the trunk: the policy is RL's alone. The trunk replays the recorded experts, as in the
policy's own loss; MTP layers route freely, since the sampler records none for them.
Choice: prefixes are not merged here, because an MTP layer reads the token after its own, which differs by branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from composer2.model.mtp import mtp_acceptance, mtp_distillation_loss
from composer2.model.router_replay import ReplayConfig
from composer2.model.transformer import Transformer
from composer2.rl.pack import pack, to_tensors
from composer2.types import Sample


@dataclass(frozen=True, kw_only=True)
class MtpCotrainConfig:
    """When and how the MTP layers are trained during RL."""

    every: int = 0
    """Steps from one co-training to the next; 0 leaves the MTP layers as they are."""
    top_k: int = 64
    """Tokens of the main head's distribution that are told apart."""
    lr: float = 3e-4
    """Learning rate of the MTP layers."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"MtpCotrainConfig.every is {self.every}, accepted is 0 or more")
        if self.top_k < 1:
            raise ValueError(f"MtpCotrainConfig.top_k is {self.top_k}, accepted is 1 or more")
        if not 0 < self.lr < float("inf"):
            raise ValueError(f"MtpCotrainConfig.lr is {self.lr}, accepted is a finite number > 0")

    def is_due(self, step: int) -> bool:
        """Whether the step number `step`, counted from 0, trains them."""
        return self.every > 0 and step % self.every == 0


def distil_mtp(
    model: Transformer,
    samples: Sequence[Sample],
    config: MtpCotrainConfig,
    *,
    replay: ReplayConfig | None,
    row_length: int,
    rows_per_batch: int,
) -> dict[str, float]:
    """Adds the gradient of the loss to the MTP layers; returns `mtp_loss` and `mtp_acceptance` (first layer).

    `replay` None: the trunk routes freely. Micro-batches weigh by their sampled tokens."""
    device = next(model.parameters()).device
    batches = [to_tensors(b, device) for b in pack(samples, row_length=row_length, rows_per_batch=rows_per_batch)]
    total = sum(float(batch.loss_mask.sum()) for batch in batches)
    loss_sum = kept = 0.0
    for batch in batches:
        places = {"position_ids_BT": batch.position_ids, "document_ids_BT": batch.document_ids}
        with torch.no_grad():
            out = model(batch.token_ids, routes_BTLK=None if replay is None else batch.routes, replay=replay, **places)
        drafts = model.mtp_logits(out.hidden_BTD, batch.token_ids, detach_trunk=True, **places)
        counts = {"document_ids_BT": batch.document_ids, "loss_mask_BT": batch.loss_mask}
        weight = float(batch.loss_mask.sum()) / total
        loss = weight * mtp_distillation_loss(out.logits_BTV, drafts, top_k=config.top_k, **counts)
        loss.backward()  # type: ignore[no-untyped-call]
        loss_sum += float(loss.detach())
        kept += weight * float(mtp_acceptance(out.logits_BTV, drafts, **counts)[0])
    return {"mtp_loss": loss_sum, "mtp_acceptance": kept}
