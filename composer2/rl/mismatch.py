"""Trainer against sampler on the same rollouts and weights: how far the log-probs part, with and without replay.

In: rollouts as the sampler recorded them, a model with the very weights that sampled them. Out: flat figures.

Source: report §6.2 (router replay and its plausibility filter lower the p99 mismatch); rows M6 R7 I4.

Shape letters: B rows, T tokens, N sampled tokens, L MoE layers, K experts a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from composer2.model.mtp import mtp_acceptance
from composer2.model.transformer import Transformer
from composer2.rl.advantage import segment_sample
from composer2.rl.pack import BatchTensors, pack, to_tensors
from composer2.rl.routes import differing_expert_frac, logprob_mismatch
from composer2.rl.train import RLConfig, trained_logprobs
from composer2.types import Group


def packed_rollouts(
    groups: Sequence[Group], config: RLConfig, device: torch.device | str = "cpu"
) -> list[BatchTensors]:
    """All segments with sampled tokens, packed as in training, on a device."""
    samples = [
        segment_sample(segment, 0.0, temperature=config.temperature)
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.sampled.any()
    ]
    packed = pack(samples, row_length=config.row_length, rows_per_batch=config.rows_per_batch)
    return [to_tensors(batch, device) for batch in packed]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One trainer pass over recorded tokens beside what the sampler recorded; N sampled tokens, T all but padding."""

    trainer_N: np.ndarray
    """Log-probs, float32."""
    sampler_N: np.ndarray
    """Log-probs, float32."""
    used_TLK: np.ndarray
    """Experts of the trainer's pass, int."""
    recorded_TLK: np.ndarray
    """Experts of the sampler, int; -1 where none were recorded."""
    num_replaced: int
    """Recorded slots the filter dropped."""
    num_recorded: int
    """Slots that were replayed, those dropped included; 0 without replay."""

    def figures(self) -> dict[str, float]:
        """num_tokens, mismatch_{p50,p99,max,mean,k1}, differing_expert_frac, replaced_expert_frac."""
        everywhere = np.ones(len(self.trainer_N), dtype=bool)
        return {
            **logprob_mismatch(self.sampler_N, self.trainer_N, everywhere),
            "differing_expert_frac": differing_expert_frac(self.used_TLK, self.recorded_TLK),
            "replaced_expert_frac": self.num_replaced / max(self.num_recorded, 1),
        }


@torch.no_grad()
def compare(model: Transformer, batches: Sequence[BatchTensors], config: RLConfig) -> Comparison:
    """The trainer's pass over `batches` with the replay settings of `config`. ValueError without a batch."""
    if not batches:
        raise ValueError("batches is empty, accepted is one batch or more")
    parts = []
    for batch in batches:
        logprobs_BT, _, routing = trained_logprobs(model, batch, config)
        real = (batch.document_ids >= 0).cpu().numpy()
        parts.append(
            Comparison(
                trainer_N=logprobs_BT[batch.loss_mask].cpu().numpy(),
                sampler_N=batch.behaviour_logprobs[batch.loss_mask].cpu().numpy(),
                used_TLK=routing.expert_ids_BTLK.cpu().numpy()[real],
                recorded_TLK=batch.routes.cpu().numpy()[real],
                num_replaced=int(routing.num_replaced),
                num_recorded=int(routing.num_replayed) * model.config.num_experts_per_tok,
            )
        )
    return joined(parts)


def joined(parts: Sequence[Comparison]) -> Comparison:
    """All tokens of `parts` as one comparison."""
    return Comparison(
        trainer_N=np.concatenate([part.trainer_N for part in parts]),
        sampler_N=np.concatenate([part.sampler_N for part in parts]),
        used_TLK=np.concatenate([part.used_TLK for part in parts]),
        recorded_TLK=np.concatenate([part.recorded_TLK for part in parts]),
        num_replaced=sum(part.num_replaced for part in parts),
        num_recorded=sum(part.num_recorded for part in parts),
    )


def measure_mismatch(model: Transformer, groups: Sequence[Group], config: RLConfig) -> dict[str, float]:
    """mismatch_{p50,p99,max,mean,k1}_replay_{off,on,filter}, mismatch_tokens, differing_expert_frac (own top-k against
    the recorded experts), replaced_expert_frac_filter. All three settings whatever `config.replay` says."""
    batches = packed_rollouts(groups, config, next(model.parameters()).device)
    settings = {
        "off": replace(config, replay=False),
        "on": replace(config, replay=True, replay_tau=0.0),
        "filter": replace(config, replay=True),
    }
    measured = {name: compare(model, batches, setting).figures() for name, setting in settings.items()}
    figures = {
        f"{key}_replay_{name}": value
        for name, found in measured.items()
        for key, value in found.items()
        if key.startswith("mismatch_")
    }
    figures["mismatch_tokens"] = measured["off"]["num_tokens"]
    figures["differing_expert_frac"] = measured["off"]["differing_expert_frac"]
    figures["replaced_expert_frac_filter"] = measured["filter"]["replaced_expert_frac"]
    return figures


@torch.no_grad()
def measure_acceptance(model: Transformer, groups: Sequence[Group], config: RLConfig | None = None) -> float:
    """Chance that speculative sampling at temperature 1 keeps the first MTP draft, over the sampled tokens of rollouts
    (row P4). ValueError for a model without MTP modules."""
    if not model.mtp:
        raise ValueError("num_nextn_predict_layers is 0, accepted is a model with an MTP module")
    kept = total = 0.0
    for batch in packed_rollouts(groups, config or RLConfig(), next(model.parameters()).device):
        out = model(batch.token_ids, position_ids_BT=batch.position_ids, document_ids_BT=batch.document_ids)
        drafts = model.mtp_logits(
            out.hidden_BTD, batch.token_ids, position_ids_BT=batch.position_ids, document_ids_BT=batch.document_ids
        )
        share = mtp_acceptance(out.logits_BTV, drafts, document_ids_BT=batch.document_ids, loss_mask_BT=batch.loss_mask)
        weight = float(batch.loss_mask.sum())
        kept, total = kept + float(share[0]) * weight, total + weight
    return kept / max(total, 1.0)
