"""Trainer against sampler on the same rollouts and weights: how far the log-probs part, with and without replay.

In: rollouts as the sampler recorded them, a model with the very weights that sampled them. Out: flat figures.

Source: report §6.2 (router replay and its plausibility filter lower the p99 mismatch); rows M6 R7 I4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from composer2.model.mtp import mtp_acceptance
from composer2.model.transformer import Transformer
from composer2.rl.advantage import segment_sample
from composer2.rl.pack import BatchTensors, pack, to_tensors
from composer2.rl.routes import differing_expert_frac, logprob_mismatch
from composer2.rl.train import RLConfig, trained_logprobs
from composer2.types import Group


def packed_rollouts(groups: Sequence[Group], config: RLConfig) -> list[BatchTensors]:
    """All segments with sampled tokens, packed as in training."""
    samples = [
        segment_sample(segment, 0.0, temperature=config.temperature)
        for group in groups
        for rollout in group.rollouts
        for segment in rollout.segments
        if segment.sampled.any()
    ]
    packed = pack(samples, row_length=config.row_length, rows_per_batch=config.rows_per_batch)
    return [to_tensors(batch) for batch in packed]


@torch.no_grad()
def measure_mismatch(model: Transformer, groups: Sequence[Group], config: RLConfig) -> dict[str, float]:
    """mismatch_{p50,p99,max,mean}_replay_{off,on,filter}, mismatch_tokens, differing_expert_frac (own top-k against the
    recorded experts), replaced_expert_frac_filter."""
    batches = packed_rollouts(groups, config)
    settings = {
        "off": replace(config, replay=False),
        "on": replace(config, replay=True, replay_tau=0.0),
        "filter": config,
    }
    figures: dict[str, float] = {}
    for name, setting in settings.items():
        ours, theirs, own_routes, recorded = [], [], [], []
        replaced = replayed = 0.0
        for batch in batches:
            logprobs_BT, _, routing = trained_logprobs(model, batch, setting)
            ours.append(logprobs_BT[batch.loss_mask].numpy())
            theirs.append(batch.behaviour_logprobs[batch.loss_mask].numpy())
            real = (batch.document_ids >= 0).numpy()
            own_routes.append(routing.expert_ids_BTLK.numpy()[real])
            recorded.append(batch.routes.numpy()[real])
            replaced, replayed = replaced + float(routing.num_replaced), replayed + float(routing.num_replayed)
        ours_N = np.concatenate(ours)
        measured = logprob_mismatch(np.concatenate(theirs), ours_N, np.ones(len(ours_N), dtype=bool))
        figures |= {f"{key}_replay_{name}": value for key, value in measured.items() if key.startswith("mismatch_")}
        figures["mismatch_tokens"] = measured["num_tokens"]
        if name == "off":
            figures["differing_expert_frac"] = differing_expert_frac(
                np.concatenate(own_routes), np.concatenate(recorded)
            )
        if name == "filter":
            figures["replaced_expert_frac_filter"] = replaced / max(replayed * model.config.num_experts_per_tok, 1.0)
    return figures


@torch.no_grad()
def measure_acceptance(model: Transformer, groups: Sequence[Group], config: RLConfig | None = None) -> float:
    """Chance that speculative sampling at temperature 1 keeps the first MTP draft, over the sampled tokens of rollouts
    (row P4)."""
    kept = total = 0.0
    for batch in packed_rollouts(groups, config or RLConfig()):
        out = model(batch.token_ids, position_ids_BT=batch.position_ids, document_ids_BT=batch.document_ids)
        drafts = model.mtp_logits(
            out.trunk_BTD, batch.token_ids, position_ids_BT=batch.position_ids, document_ids_BT=batch.document_ids
        )
        share = mtp_acceptance(out.logits_BTV, drafts, document_ids_BT=batch.document_ids, loss_mask_BT=batch.loss_mask)
        weight = float(batch.loss_mask.sum())
        kept, total = kept + float(share[0]) * weight, total + weight
    return kept / max(total, 1.0)
