"""A plain model becomes one rank's part of a sharded one: seams are filled, experts are split, weights are sharded.

In: a `Transformer`, whole, with equal weights on every rank (or on the meta device), and meshes. Out: the same object,
its parameters DTensors; forward, backward, optimizer and distributed checkpoints work as before.

    latent attention   gathers latents over the context ranks            (context_parallel.py)
    experts            stacks of matrices split over the expert ranks    (expert_parallel.py), then sharded
    everything         one FSDP unit a layer or MTP module, one for its experts, one for embedding, last norm and head

Gradients are summed over ranks, never averaged: the loss is divided by a constant of the whole step (rl/loss.py), so
that the terms of all ranks add up.
Source: report §6.1 (FSDP; dense and expert weights on meshes of their own); rows D1 D2 D3. torch's FSDP2.
Choice: sums are asked of gloo as plain sums, because it has no scaled ones.
Choice: MTP modules train over data and expert ranks, not over context ranks, where their teacher is a neighbour's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composer2.dist.context_parallel import GatherLatents
from composer2.dist.expert_parallel import ExpertExchange
from composer2.dist.meshes import Meshes
from composer2.model.attention import LatentAttention
from composer2.model.moe import Exchange, Experts
from composer2.model.transformer import Transformer


def parallelize(
    model: Transformer,
    meshes: Meshes,
    *,
    exchange: Exchange | None = None,
    mixed_precision: MixedPrecisionPolicy | None = None,
) -> Transformer:
    """Fill the seams of `model`, split its experts and shard its weights, in place.

    `exchange` takes tokens to their experts; None: `ExpertExchange` with the wire of the model's config."""
    fill_seams(model, meshes, exchange)
    shard_weights(model, meshes, mixed_precision or MixedPrecisionPolicy())
    return model


def fill_seams(model: Transformer, meshes: Meshes, exchange: Exchange | None = None) -> None:
    """Gather latents where rows are spread, exchange tokens where experts are; experts become DTensors over ep."""
    config = model.config
    if meshes.degrees.cp > 1:
        gather = GatherLatents(meshes.context.get_group())
        for module in model.modules():
            if isinstance(module, LatentAttention):
                module.gather = gather
    if meshes.degrees.ep == 1:
        return
    exchange = exchange or ExpertExchange(
        meshes.experts.get_group(), config.n_routed_experts, wire=config.dispatch_wire
    )
    for module in model.modules():
        if isinstance(module, Experts):
            module.exchange, module.localise = exchange, local_part
            for name, matrices in list(module.named_parameters(recurse=False)):
                # Weights are equal on every rank: each takes its own part, nothing is sent.
                part = distribute_tensor(matrices.detach(), meshes.experts, [Shard(0)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(part))


def local_part(matrices: torch.Tensor) -> torch.Tensor:
    """What of a parameter lies on this rank, with gradient."""
    return matrices.to_local() if isinstance(matrices, DTensor) else matrices


def shard_weights(
    model: Transformer,
    meshes: Meshes,
    mixed_precision: MixedPrecisionPolicy,
    offload: OffloadPolicy | None = None,
) -> None:
    """FSDP over the dense mesh; experts over the ranks that hold the same ones. `offload` None: nothing."""
    options: dict[str, Any] = {"mp_policy": mixed_precision, "offload_policy": offload or OffloadPolicy()}
    for module in model.modules():
        if isinstance(module, Experts):
            fully_shard(module, mesh=meshes.expert_shards, **options)
    for block in (*model.layers, *model.mtp):
        fully_shard(block, mesh=meshes.dense, **options)
    fully_shard(model, mesh=meshes.dense, **options)
    register_fsdp_forward_method(model, "mtp_forward")
    sum_gradients(model)


def sum_gradients(model: nn.Module) -> None:
    """Let every FSDP unit add the gradients of its ranks, as plain sums."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scale all gradients of all ranks so that their joint 2-norm is at most `max_norm`; returns the norm before.

    The same number on every rank, and for every layout (fault 6). `model` is one that `parallelize` sharded; every rank
    calls this. ValueError when no parameter has a gradient."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not gradients:
        raise ValueError("model holds no gradient, accepted is at least one")
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, accepted is > 0")
    parts = [local_part(gradient) for gradient in gradients]
    squares = torch.stack([p.to(torch.promote_types(p.dtype, torch.float32)).square().sum() for p in parts]).sum()
    dist.all_reduce(squares)  # every gradient lies spread over all ranks exactly once
    norm = squares.sqrt()
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for part in parts:
        part.mul_(scale)
    return norm
