"""The job of test_plan.py: one optimizer step of a small sharded model; what lies on the rank and what it received.

Every expert gets equally many rows, by replayed routes, so that traffic does not depend on a router."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from composer2.dist.context_parallel import RankBatch, rank_logprobs, shard_batch
from composer2.dist.expert_parallel import ExpertExchange
from composer2.dist.fsdp import parallelize
from composer2.dist.meshes import Degrees, make_meshes
from composer2.model.config import ModelConfig
from composer2.model.router_replay import ReplayConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.pack import BatchTensors
from composer2.rl.train import RLConfig, make_optimizer

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=64, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=90,
    moe_intermediate_size=32, n_routed_experts=12, num_experts_per_tok=2, num_attention_heads=3, q_lora_rank=25,
    kv_lora_rank=21, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, num_nextn_predict_layers=1,
)  # fmt: skip
"""Widths that do not divide evenly over two or four ranks."""
ROWS, LENGTH = 2, 48
LAYOUTS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 1), (2, 1, 2), (1, 2, 1), (1, 2, 2)],
    4: [(4, 1, 1), (2, 2, 2), (4, 1, 4), (1, 4, 2)],
}


def whole_batch() -> BatchTensors:
    """One document a row; token t goes to experts t and t + 1 (mod E) in every layer."""
    places = torch.arange(LENGTH).expand(ROWS, LENGTH)
    chosen = torch.stack((places, places + 1), dim=-1) % CONFIG.n_routed_experts
    mask = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    mask[:, 0] = False
    return BatchTensors(
        token_ids=places % CONFIG.vocab_size,
        position_ids=places.clone(),
        document_ids=torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        loss_mask=mask,
        advantages=torch.ones(ROWS, LENGTH),
        behaviour_logprobs=torch.zeros(ROWS, LENGTH),
        policy_versions=torch.zeros(ROWS, LENGTH, dtype=torch.int64),
        routes=chosen[:, :, None].expand(-1, -1, CONFIG.num_moe_layers, -1).contiguous(),
        temperature=1.0,
    )


@contextmanager
def counted_traffic() -> Iterator[dict[str, int]]:
    """Bytes this rank receives from others, by kind of collective."""
    received = {"gather": 0, "scatter": 0, "all_to_all": 0}
    gather, scatter, exchange = dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all_single

    def counted_gather(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        received["gather"] += output.nbytes - input.nbytes
        return gather(output, input, *args, **kwargs)

    def counted_scatter(output: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
        received["scatter"] += input.nbytes - output.nbytes
        return scatter(output, input, *args, **kwargs)

    def counted_exchange(
        output: Any, input: Any, arriving: Any = None, *args: Any, group: Any = None, **kw: Any
    ) -> Any:
        if arriving is not None:  # without sizes: the counts of rows, eight bytes an expert
            runs = output.split(arriving)
            received["all_to_all"] += sum(r.nbytes for i, r in enumerate(runs) if i != dist.get_rank(group))
        return exchange(output, input, arriving, *args, group=group, **kw)

    counted = (counted_gather, counted_scatter, counted_exchange)
    dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all_single = counted
    try:
        yield received
    finally:
        dist.all_gather_single, dist.reduce_scatter_single, dist.all_to_all_single = gather, scatter, exchange


@contextmanager
def counted_saves(model: Transformer, ignored: tuple[int, ...]) -> Iterator[list[int]]:
    """Bytes of the storages that autograd keeps, each once; not those of weights, nor of masks (shape `ignored`)."""
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        weights = {local(parameter).untyped_storage()._cdata for parameter in model.parameters()}
        key = local(tensor).untyped_storage()._cdata
        if key not in weights and tuple(tensor.shape[-2:]) != ignored:
            kept.setdefault(key, local(tensor))
        return tensor

    total: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield total
    total.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_bytes(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    return local(tensor).nbytes


def step(layout: tuple[int, int, int], wire: str, policy: MixedPrecisionPolicy) -> dict[str, Any]:
    """One step; counts of this rank."""
    dp, cp, ep = layout
    degrees = Degrees(dp=dp, cp=cp, ep=ep)
    meshes = make_meshes(degrees, "cpu")
    model = Transformer(CONFIG)
    init_weights(model, 0)
    exchange = ExpertExchange(meshes.experts.get_group(), CONFIG.n_routed_experts, wire=wire) if ep > 1 else None
    parallelize(model, meshes, exchange=exchange, mixed_precision=policy)
    optimizer = make_optimizer(model, RLConfig())
    batch: RankBatch = shard_batch(whole_batch(), cp, meshes.cp_rank)
    with counted_traffic() as received:
        with counted_saves(model, (LENGTH // cp, LENGTH)) as saved:
            logprobs, _ = rank_logprobs(model, batch, ReplayConfig())
        logprobs.sum().backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    return {
        "weights": sum(map(local_bytes, (*model.parameters(), *model.buffers()))),
        "gradients": sum(local_bytes(parameter.grad) for parameter in model.parameters()),
        "optimizer": sum(map(local_bytes, states)),
        "activations": saved[0],
        **received,
    }


def job(folder: Path) -> None:
    """All layouts of this many ranks, in float32; written: layout -> counts of every rank."""
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    found = {}
    for layout in LAYOUTS[dist.get_world_size()]:
        for name, wire, policy in (("float32", "native", MixedPrecisionPolicy()), ("bfloat16", "mxfp8", half)):
            counts: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(counts, step(layout, wire, policy))
            found[",".join(map(str, layout)) + " " + name] = counts
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(found))
