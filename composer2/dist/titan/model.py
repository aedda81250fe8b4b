"""The model as torchtitan builds it: the plain `Transformer`, told how to initialise and to spread itself.

In: a `ModelConfig` inside a torchtitan config. Out: a model whose parameters have the names they have on one device.

Source: rows D1 M1. Choice: the plain modules run as they are. torchtitan asks every submodule to be one of its own, so
that it can initialise and distribute it; this model does both itself and says so by overriding three methods.
Choice: weights are drawn whole on the CPU, one matrix at a time, and each rank keeps its part: the same numbers for
every layout. For a model whose matrices are too large for that, load a checkpoint instead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from composer2.dist.expert_parallel import ExpertExchange
from composer2.dist.fsdp import fill_seams, shard_weights
from composer2.dist.meshes import Degrees, Meshes
from composer2.model.attend_flex import flex_attend
from composer2.model.attention import sdpa_attend
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer


class TitanTransformer(Transformer, BaseModel):
    """`Transformer` with torchtitan's protocol."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        sizes: ModelConfig = field(default_factory=ModelConfig)
        """The model."""
        seed: int = 0
        """Of the initialisation."""
        exchange_parts: int = 2
        """Runs of tokens that travel to their experts one behind the other, so that transfer and experts overlap."""

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """Refuse what does not divide, before anything is built."""
            parallelism = config.parallelism
            degrees = Degrees(
                cp=parallelism.context_parallel_degree,
                dp=parallelism.expert_parallel_degree,  # the data ranks are not known yet; they are checked when built
                ep=parallelism.expert_parallel_degree,
                tp=parallelism.tensor_parallel_degree,
            )
            degrees.check(self.sizes, config.training.seq_len)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Parameters, and multiply-adds times two a token, forward and backward (6 a parameter used)."""
            sizes = self.sizes
            pairs = 6 * sizes.num_hidden_layers * sizes.num_attention_heads * (sizes.qk_head_dim + sizes.v_head_dim)
            return sum(p.numel() for p in model.parameters()), 6 * sizes.num_active_parameters + pairs * seq_len // 2

    def __init__(self, config: Config) -> None:
        attend = flex_attend if torch.cuda.is_available() else sdpa_attend
        Transformer.__init__(self, config.sizes, attend=attend)
        self.seed, self.exchange_parts = config.seed, config.exchange_parts

    def verify_module_protocol(self) -> None:
        """Nothing: the submodules are plain, `init_states` and `parallelize_model` do what theirs would."""

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """As `model.transformer.init_weights`, on whatever part of each parameter lies here."""
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            copy_part(parameter, draw * self.config.initializer_range)
        for buffer in self.buffers():
            buffer.zero_()


def copy_part(parameter: torch.Tensor, whole: torch.Tensor) -> None:
    """Copy what of `whole` lies here into `parameter`, a DTensor or not. Every rank passes equal values."""
    if isinstance(parameter, DTensor):
        whole = whole.to(device=parameter.device, dtype=parameter.dtype)
        part = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.to_local().copy_(part.to_local())
    else:
        parameter.copy_(whole)


def meshes_of(parallel_dims: ParallelDims) -> Meshes:
    """torchtitan's meshes under our names. ValueError for layouts that are not the report's."""
    dims = parallel_dims
    if dims.spmd_backend != "partial_dtensor":
        raise ValueError(f"parallelism.spmd_backend is {dims.spmd_backend!r}, accepted is 'partial_dtensor'")
    if dims.pp > 1:
        raise ValueError(f"parallelism.pipeline_parallel_degree is {dims.pp}, accepted is 1")
    degrees = Degrees(dp=dims.dp_replicate * dims.dp_shard, cp=dims.cp, ep=dims.ep, tp=dims.tp)
    replicas = ["dp_replicate"] if dims.dp_replicate > 1 else []
    dense = dims.get_mesh([*replicas, "fsdp"] if replicas else "fsdp")
    shards = dims.get_mesh([*replicas, "efsdp"] if replicas else "efsdp") if dims.ep > 1 else dense
    return Meshes(
        degrees=degrees,
        dense=dense,
        context=dims.get_mesh("cp") if dims.cp > 1 else dense,
        experts=dims.get_mesh("ep") if dims.ep > 1 else dense,
        expert_shards=shards,
    )


def parallelize_model(
    model: TitanTransformer,
    *,
    parallel_dims: ParallelDims,
    training: Any,
    parallelism: Any,
    compile_config: Any,
    ac_config: Any,
    dump_folder: str,
) -> nn.Module:
    """torchtitan's `parallelize_fn`: seams and experts, activation checkpoints, sharded weights, in this order."""
    if compile_config.enable:
        raise ValueError("compile.enable is True, accepted is False: exchanges of tokens have no fixed shapes")
    meshes = meshes_of(parallel_dims)
    sizes, exchange = model.config, None
    if meshes.degrees.ep > 1:
        exchange = ExpertExchange(
            meshes.experts.get_group(), sizes.n_routed_experts, sizes.dispatch_wire, model.exchange_parts
        )
    fill_seams(model, meshes, exchange)
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    precision = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy() if training.enable_cpu_offload else None
    shard_weights(model, meshes, precision, offload)
    return model


def model_spec(name: str, sizes: ModelConfig, seed: int = 0) -> ModelSpec:
    """What torchtitan needs to know of a model."""
    return ModelSpec(
        name="composer2",
        flavor=name,
        model=TitanTransformer.Config(sizes=sizes, seed=seed),
        parallelize_fn=parallelize_model,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
