"""`composer2 plan`: a model, a number of GPUs and a layout go in; bytes on each rank and bytes sent a step come out.

    memory    weights + gradients + optimizer + gathered weights + activations + logits' gradient + KV cache
    traffic   FSDP gathers and scatters + experts' all-to-all + keys and values gathered over CP (received by a rank)
    all-to-all, a layer, a micro-batch:  tokens * K * (ep - 1) / ep * (sent + returned + both gradients)
    CP, a layer, a micro-batch:          (cp - 1) * tokens * cached values a token * (gather + scatter of its gradient)

With `block` checkpointing the forward part of the all-to-all and of the CP gather runs twice.

Source: report §6.1 (FSDP with CP folded in, EP independent; EP 8 with CP 2 in CPT and CP 8 in RL; MXFP8 dispatch, BF16
combine); rows D1-D6 K5. plan_state.py and plan_activations.py hold the terms.
Choice: without a layout those with ep and cp up to eight (one node, where their traffic stays) are compared and the one
with the least traffic a token that fits is taken. Choice: a tenth of the memory is left to the allocator, kernels and
communication buffers. Sampler and trainer are separate services; the KV cache is counted for a sampler that shares its
GPU with the trainer, and is 0 with `kv_windows` 0.

Letters: K experts a token, GB 1e9 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.table import Table

from composer2.dist.meshes import Degrees
from composer2.dist.plan_activations import (
    ActivationShape,
    Checkpointing,
    activation_bytes,
    logits_working_bytes,
)
from composer2.dist.plan_state import fsdp_traffic, gathered_bytes, state_bytes
from composer2.model.config import ModelConfig

GPU_MEMORY_GB: Mapping[str, float] = {"h100": 80, "h200": 141, "b200": 180, "b300": 288}
"""GB of one GPU, from the vendor's data sheets of the eight-GPU systems: HGX B200 1.44 TB and HGX B300 2.3 TB in all (a
B200 package carries 192 GB, of which that system gives 180)."""
NODE_GPUS = 8
BYTES = {"bfloat16": 2, "float32": 4}
WIRES = ("native", "bf16", "mxfp8")


class DoesNotFit(ValueError):
    """The layout divides, but its ranks need more memory than they have; the text names the largest term."""


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What runs, apart from the model and the layout."""

    seq_len: int = 32_768
    """Tokens of a packed row."""
    rows: int = 1
    """Rows of a micro-batch, for each of the dp groups."""
    micro_batches: int = 1
    """Micro-batches of an optimizer step."""
    storage: str = "float32"
    """float32 or bfloat16: dtype of stored weights, their gradients and both Adam moments."""
    compute: str = "bfloat16"
    """bfloat16 or float32: dtype of gathered weights and activations. Gradients are summed in float32."""
    checkpointing: Checkpointing = "block"
    """`block` keeps the input of each decoder layer and computes the layer again; `none` keeps everything."""
    wire: Literal["native", "bf16", "mxfp8"] = "mxfp8"
    """What a token is sent to its experts as: the compute dtype, bf16 or mxfp8; all but native come back as bf16."""
    kv_windows: int = 1
    """Windows of `seq_len` tokens in the KV cache of a sampler on the same GPU; 0 for none."""
    usable_frac: float = 0.9
    """Part of the memory a plan may fill."""

    def __post_init__(self) -> None:
        for name in ("seq_len", "rows", "micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"PlanConfig.{name} is {getattr(self, name)}, accepted is 1 or more")
        for name in ("storage", "compute"):
            if getattr(self, name) not in BYTES:
                raise ValueError(f"PlanConfig.{name} is {getattr(self, name)!r}, accepted is one of {sorted(BYTES)}")
        if self.wire not in WIRES:
            raise ValueError(f"PlanConfig.wire is {self.wire!r}, accepted is one of {WIRES}")
        if self.kv_windows < 0:
            raise ValueError(f"PlanConfig.kv_windows is {self.kv_windows}, accepted is 0 or more")
        if not 0 < self.usable_frac <= 1:
            raise ValueError(f"PlanConfig.usable_frac is {self.usable_frac}, accepted is in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Bytes of the fullest rank."""

    layout: Degrees
    memory: Mapping[str, int]
    """Bytes by term: weights, gradients, optimizer, gathered, activations, logits_gradient, kv_cache."""
    traffic: Mapping[str, int]
    """Bytes a rank receives a step: fsdp, expert, context."""
    tokens_per_step: int
    """Over all ranks."""
    budget: int
    """Bytes a rank may fill."""

    @property
    def total(self) -> int:
        """Bytes of all terms."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether the terms stay within the budget."""
        return self.total <= self.budget

    @property
    def traffic_per_token(self) -> float:
        """Bytes received by all ranks for one trained token."""
        return sum(self.traffic.values()) * self.layout.world / self.tokens_per_step

    def misfit(self) -> str:
        """Why it does not fit, the largest term first."""
        terms = sorted(self.memory.items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in terms if size)
        return (
            f"dp {self.layout.dp} cp {self.layout.cp} ep {self.layout.ep} needs {self.total / 1e9:.1f} GB a rank, "
            f"accepted is {self.budget / 1e9:.1f} GB; the largest term is {terms[0][0]}: {parts} GB"
        )

    def record(self) -> dict[str, Any]:
        """Flat figures; sizes in bytes."""
        return {
            "dp": self.layout.dp,
            "cp": self.layout.cp,
            "ep": self.layout.ep,
            **{f"{name}_bytes": size for name, size in self.memory.items()},
            "total_bytes": self.total,
            "budget_bytes": self.budget,
            "fits": self.fits,
            **{f"traffic_{name}_bytes": size for name, size in self.traffic.items()},
            "traffic_bytes": sum(self.traffic.values()),
            "tokens_per_step": self.tokens_per_step,
            "traffic_bytes_per_token": self.traffic_per_token,
        }


def make_plan(config: ModelConfig, layout: Degrees, settings: PlanConfig, *, gpu_bytes: int) -> Plan:
    """Memory and traffic of one layout, whether it fits or not. ValueError for a layout that does not divide."""
    layout.check(config, settings.seq_len)
    if layout.ep > 1 and config.num_moe_layers == 0:
        raise ValueError(f"ep is {layout.ep}, accepted is 1 for a model without experts")
    if settings.seq_len > config.max_position_embeddings:
        raise ValueError(f"seq_len is {settings.seq_len}, accepted is at most {config.max_position_embeddings}")
    storage, compute, reduce = BYTES[settings.storage], BYTES[settings.compute], BYTES["float32"]
    row_tokens = settings.rows * settings.seq_len
    shape = ActivationShape(
        tokens=row_tokens // layout.cp,
        gathered_tokens=row_tokens,
        compute_bytes=compute,
        expert_ranks=layout.ep,
    )
    state = state_bytes(config, layout, storage_bytes=storage)
    cached = config.num_hidden_layers * config.cache_dim * compute
    is_sharded = layout.world > 1
    memory = {
        "weights": state.weights,
        "gradients": state.gradients,
        "optimizer": state.optimizer,
        "gathered": gathered_bytes(config, layout, compute_bytes=compute, reduce_bytes=reduce) if is_sharded else 0,
        "activations": activation_bytes(config, shape, settings.checkpointing),
        "logits_gradient": logits_working_bytes(config, shape),
        "kv_cache": settings.kv_windows * settings.seq_len * cached,
    }
    once = {
        "fsdp": fsdp_traffic(config, layout, compute_bytes=compute, reduce_bytes=reduce),
        "expert": expert_traffic(config, layout, settings, tokens=shape.tokens),
        "context": context_traffic(config, layout, settings, tokens=shape.tokens),
    }
    return Plan(
        layout=layout,
        memory=memory,
        traffic={name: size * settings.micro_batches for name, size in once.items()},
        tokens_per_step=settings.micro_batches * layout.dp * row_tokens,
        budget=int(gpu_bytes * settings.usable_frac),
    )


def expert_traffic(config: ModelConfig, layout: Degrees, settings: PlanConfig, *, tokens: int) -> int:
    """Bytes a rank receives for its `tokens` tokens of one micro-batch from the all-to-all of all MoE layers."""
    returned = config.hidden_size * (BYTES[settings.compute] if settings.wire == "native" else 2)
    sent = config.hidden_size * 33 // 32 if settings.wire == "mxfp8" else returned
    forwards = 2 if settings.checkpointing == "block" else 1
    rows = config.num_moe_layers * tokens * config.num_experts_per_tok
    return rows * (forwards * (sent + returned) + 2 * returned) * (layout.ep - 1) // layout.ep


def context_traffic(config: ModelConfig, layout: Degrees, settings: PlanConfig, *, tokens: int) -> int:
    """Bytes a rank receives for one micro-batch in gathering latents (or keys and values), and their gradient."""
    forwards = 2 if settings.checkpointing == "block" else 1
    values = config.num_hidden_layers * tokens * config.cache_dim
    return (layout.cp - 1) * values * BYTES[settings.compute] * (forwards + 1)


def candidate_layouts(
    config: ModelConfig, gpus: int, *, dp: int | None = None, cp: int | None = None, ep: int | None = None
) -> list[Degrees]:
    """Layouts of `gpus` ranks with the given degrees; a degree that is None runs over powers of two up to a node.

    ValueError when given degrees do not divide."""
    if gpus < 1:
        raise ValueError(f"gpus is {gpus}, accepted is 1 or more")
    for name, degree in (("dp", dp), ("cp", cp), ("ep", ep)):
        if degree is not None and (degree < 1 or gpus % degree):
            raise ValueError(f"{name} is {degree}, accepted is a divisor of the {gpus} GPUs")
    if dp is not None and cp is not None and dp * cp != gpus:
        raise ValueError(f"dp * cp is {dp} * {cp} = {dp * cp}, accepted is the number of GPUs {gpus}")
    if dp is not None:
        cp = gpus // dp
    powers = [1 << i for i in range(NODE_GPUS.bit_length())]
    contexts = [cp] if cp is not None else [degree for degree in powers if gpus % degree == 0]
    experts = [degree for degree in powers if gpus % degree == 0 and config.n_routed_experts % degree == 0]
    if ep is not None:
        experts = [ep]
    elif config.num_moe_layers == 0:
        experts = [1]
    return [Degrees(dp=gpus // context, cp=context, ep=expert) for context in contexts for expert in experts]


def choose_plan(
    config: ModelConfig,
    gpus: int,
    settings: PlanConfig,
    *,
    gpu_bytes: int,
    dp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
) -> tuple[Plan, list[Plan]]:
    """The plan with the least traffic a token among those that fit, and all that were compared.

    ValueError when no layout divides, `DoesNotFit` when none fits: of the smallest one, what is too large."""
    plans: list[Plan] = []
    refusals: list[str] = []
    for layout in candidate_layouts(config, gpus, dp=dp, cp=cp, ep=ep):
        try:
            plans.append(make_plan(config, layout, settings, gpu_bytes=gpu_bytes))
        except ValueError as error:
            refusals.append(str(error))
    if not plans:
        raise ValueError(refusals[0])
    fitting = [plan for plan in plans if plan.fits]
    if not fitting:
        raise DoesNotFit(min(plans, key=lambda plan: plan.total).misfit())
    return min(fitting, key=lambda plan: plan.traffic_per_token), plans


def plan_view(chosen: Plan, plans: list[Plan], title: str) -> tuple[RenderableType, dict[str, Any]]:
    """What the command shows: for people the chosen plan and a line for each layout compared, else one record."""
    layout = chosen.layout
    terms = Table("GB a rank", "", title=f"{title}: dp {layout.dp} cp {layout.cp} ep {layout.ep}", title_justify="left")
    sizes = {**chosen.memory, "total": chosen.total, "of": chosen.budget}
    sizes |= {f"received a step, {name}": size for name, size in chosen.traffic.items()}
    for name, size in sizes.items():
        terms.add_row(name, f"{size / 1e9:,.1f}", end_section=name in ("kv_cache", "of"))
    compared = Table("dp", "cp", "ep", "GB a rank", "fits", "GB received a step", "MB a token")
    for plan in plans if len(plans) > 1 else ():
        degrees = [str(degree) for degree in (plan.layout.dp, plan.layout.cp, plan.layout.ep)]
        traffic = (f"{sum(plan.traffic.values()) / 1e9:,.1f}", f"{plan.traffic_per_token / 1e6:,.2f}")
        compared.add_row(*degrees, f"{plan.total / 1e9:,.1f}", "yes" if plan.fits else "no", *traffic)
    view = Group(terms, compared) if len(plans) > 1 else terms
    return view, {**chosen.record(), "layouts": [plan.record() for plan in plans]}
