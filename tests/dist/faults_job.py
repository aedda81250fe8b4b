"""The job of the fault tests that need ranks (tests/faults, numbers 20, 51, 53 and 58): two gloo ranks against one."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from composer2.dist.context_parallel import rank_logprobs, rank_policy_loss, shard_batch
from composer2.dist.fsdp import parallelize
from composer2.dist.meshes import Degrees, make_meshes
from composer2.rl.pack import fill, to_tensors
from composer2.rl.train import RLConfig, replay_config, trained_logprobs
from composer2.types import Sample

spec = importlib.util.spec_from_file_location("composer2_dist_parity", Path(__file__).parent / "parity.py")
assert spec is not None
assert spec.loader is not None
parity = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = parity
spec.loader.exec_module(parity)

RL = RLConfig(replay_tau=0.0)


def spread(dtype, dp, cp, ep):
    """(model over the ranks, meshes)."""
    meshes = make_meshes(Degrees(dp=dp, cp=cp, ep=ep), "cpu")
    return parallelize(parity.build_model(dtype), meshes), meshes


def mine(batch, meshes):
    degrees = meshes.degrees
    return shard_batch(parity.rows_of(batch, meshes.dp_rank, degrees.dp), degrees.cp, meshes.cp_rank)


def own_routing_gap(steps: int) -> list[float]:
    """Fault 20: largest difference of log-probs, EP 2 against EP 1, both with their own routers, after every step."""
    models = [spread(torch.float32, 2, 1, ep) for ep in (1, 2)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3, eps=1e-3) for model, _ in models]
    gaps = []
    for _ in range(steps):
        for (model, meshes), optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            batch = mine(parity.build_batch(), meshes)
            logprobs, _ = rank_logprobs(model, batch, None)
            rank_policy_loss(logprobs, batch, RL.loss, parity.DENOMINATOR).backward()
            optimizer.step()
        with torch.no_grad():
            one, two = (rank_logprobs(model, mine(parity.build_batch(), m), None)[0] for model, m in models)
        gap = (one - two).abs().max()
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        gaps.append(float(gap))
    return gaps


def packed(lengths):
    """One row of documents, every token but the first of each trained, no routes recorded."""
    rng = np.random.default_rng(len(lengths))
    samples = []
    for length in lengths:
        mask = np.arange(length) > 0
        samples.append(
            Sample(
                token_ids=rng.integers(0, parity.CONFIG.vocab_size, length).astype(np.int32),
                loss_mask=mask,
                advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                behaviour_logprobs=np.where(mask, rng.normal(-5, 0.5, length), 0).astype(np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
                routes=np.full((length, 2, 2), -1, np.int16),
            )
        )
    return to_tensors(fill([samples]))


def logits_of_packed_documents() -> dict:
    """Fault 51: logits of two packed documents of 8, CP 2 against CP 1, for each; and with places on the rank."""
    model, meshes = spread(torch.float64, 1, 2, 1)
    batch = packed((8, 8))
    with torch.no_grad():
        whole = parity.build_model(torch.float64)(
            batch.token_ids, position_ids_BT=batch.position_ids, document_ids_BT=batch.document_ids
        ).logits_BTV
    found = {}
    shard = mine(batch, meshes)
    for name, positions in (("right", shard.position_ids), ("of_the_rank", torch.arange(8)[None])):
        with torch.no_grad():
            here = model(
                shard.token_ids,
                position_ids_BT=positions,
                document_ids_BT=shard.document_ids,
                key_view=shard.key_view,
            ).logits_BTV
        error = (here - whole[:, shard.key_view.query_index_T]).abs().amax(dim=(0, 2))
        by_document = torch.stack([error[shard.document_ids[0] == document].max() for document in (0, 1)])
        dist.all_reduce(by_document, op=dist.ReduceOp.MAX)
        found[name] = by_document.tolist()
    return found


def kl_of_packed_documents() -> dict:
    """Fault 53: the k1 between trainer and sampler over four packed documents of unequal length, CP 2 and CP 1."""
    model, meshes = spread(torch.float64, 1, 2, 2)
    batch = packed((3, 11, 5, 13))
    shard = mine(batch, meshes)
    logprobs, _ = rank_logprobs(model, shard, replay_config(RL))
    here = (shard.behaviour_logprobs[shard.loss_mask] - logprobs.detach()).sum()
    dist.all_reduce(here)
    single, _, _ = trained_logprobs(parity.build_model(torch.float64), batch, RL)
    right = (batch.behaviour_logprobs - single.detach())[batch.loss_mask].sum()
    return {"context_parallel": float(here), "single": float(right)}


def gradients(dp, cp, ep):
    model, meshes = spread(torch.float64, dp, cp, ep)
    batch = mine(parity.build_batch(), meshes)
    logprobs, _ = rank_logprobs(model, batch, replay_config(RL))
    rank_policy_loss(logprobs, batch, RL.loss, parity.DENOMINATOR).backward()
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for name, p in model.named_parameters()
    }


def expert_gradient_ratios() -> dict:
    """Fault 58: norm of every expert gradient, EP 2 over EP 1."""
    one, two = gradients(2, 1, 1), gradients(2, 1, 2)
    return {name: float(two[name].norm() / one[name].norm()) for name in one if ".experts." in name}


def job(folder: Path) -> None:
    found = {
        "20": own_routing_gap(8),
        "51": logits_of_packed_documents(),
        "53": kl_of_packed_documents(),
        "58": expert_gradient_ratios(),
    }
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(found))
