"""What FSDP2 keeps on one rank and sends a step: a model on the meta device and a layout go in, bytes come out.

    dense parameter   rows cut into dp * cp pieces of ceil(n / (dp cp)) rows; the last pieces may be shorter or empty
    expert matrix     E / ep experts a rank, these cut over efsdp = dp * cp / ep ranks in the same way
    weights           own pieces, and every buffer whole           gradients   own pieces of what is trained
    optimizer         two moments of every own piece that is trained, and a four-byte step count for each parameter
    traffic           a group is gathered in the forward and again in the backward pass (the root group stays gathered),
                      its gradient is scattered once:  (ranks - 1) * padded piece  received each time

Source: report §6.1 (FSDP, CP folded into it, EP over the same ranks, separate meshes for experts); rows D1 D6.
Choice: bytes are those of the pieces themselves. FSDP2 allocates a short last piece padded to the full one, whose size
the first rank has anyway.
Choice: MTP modules are held, not trained: they learn in a stage of their own, whose trunk is frozen.

Letters: n rows of a parameter, E experts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from composer2.dist.meshes import Degrees
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer

GroupKind = Literal["root", "block", "experts"]


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter of the model as FSDP2 sees it."""

    name: str
    shape: tuple[int, ...]
    """As in the whole model, all experts included."""
    kind: GroupKind
    """Which communication group it belongs to: `root`, `block` (a decoder layer) or `experts` (of a layer)."""
    group: str
    """Name of that group."""
    is_trained: bool

    def local_shape(self, layout: Degrees) -> tuple[int, ...]:
        """Shape on the ranks of one FSDP group, before it is cut: an expert matrix has E / ep of its experts."""
        first = self.shape[0] // layout.ep if self.kind == "experts" else self.shape[0]
        return (first, *self.shape[1:])

    def piece(self, layout: Degrees, index: int) -> int:
        """Values on the `index`-th rank of the FSDP group; the first piece is the longest."""
        shape = self.local_shape(layout)
        chunk = math.ceil(shape[0] / (layout.efsdp if self.kind == "experts" else layout.world))
        rows = min(chunk, max(0, shape[0] - index * chunk))
        return rows * math.prod(shape[1:])


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one rank that stay between steps."""

    weights: int
    gradients: int
    optimizer: int


@functools.lru_cache(maxsize=8)
def model_parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """Every parameter of the model, from a meta-device instance; a tied head is the embedding."""
    with torch.device("meta"):
        model = Transformer(config)
    return tuple(_place(name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def _place(name: str, shape: tuple[int, ...]) -> Parameter:
    """The parameter with its group and role, which its name tells."""
    parts = name.split(".")
    if parts[0] not in ("layers", "mtp"):
        return Parameter(name=name, shape=shape, kind="root", group="root", is_trained=True)
    layer, is_trained = ".".join(parts[:2]), parts[0] == "layers"
    if ".experts." in name:
        return Parameter(name=name, shape=shape, kind="experts", group=f"{layer}.experts", is_trained=is_trained)
    return Parameter(name=name, shape=shape, kind="block", group=layer, is_trained=is_trained)


def buffer_bytes(config: ModelConfig, storage_bytes: int) -> int:
    """Selection biases of the routers, whole on every rank."""
    num_routers = config.num_moe_layers + config.num_nextn_predict_layers
    return num_routers * config.n_routed_experts * storage_bytes


def state_bytes(config: ModelConfig, layout: Degrees, *, storage_bytes: int, rank: int = 0) -> StateBytes:
    """What rank `rank` (of dp * cp, experts: efsdp outside, ep inside) holds; rank 0 holds the most.

    `storage_bytes`: bytes of a stored value, of its gradient and of each moment."""
    weights = buffer_bytes(config, storage_bytes)
    gradients = optimizer = 0
    for parameter in model_parameters(config):
        index = rank // layout.ep if parameter.kind == "experts" else rank
        own = parameter.piece(layout, index) * storage_bytes
        weights += own
        if parameter.is_trained:
            gradients += own
            optimizer += 2 * own + 4
    return StateBytes(weights=weights, gradients=gradients, optimizer=optimizer)


def groups(config: ModelConfig) -> Iterator[tuple[GroupKind, list[Parameter]]]:
    """The trained communication groups in the order of the forward pass, the root group last."""
    by_name: dict[str, list[Parameter]] = {}
    for parameter in model_parameters(config):
        if parameter.is_trained:
            by_name.setdefault(parameter.group, []).append(parameter)
    root = by_name.pop("root")
    for members in by_name.values():
        yield members[0].kind, members
    yield "root", root


def gathered_bytes(config: ModelConfig, layout: Degrees, *, compute_bytes: int, reduce_bytes: int) -> int:
    """Whole weights that lie on a rank at the widest moment: the root group, two neighbouring layers (one runs, the
    next is fetched), and of one layer the gradient, once as computed and once as it is sent."""
    layers: dict[str, int] = {}
    root = 0
    for kind, members in groups(config):
        values = sum(math.prod(parameter.local_shape(layout)) for parameter in members)
        if kind == "root":
            root = values
        else:
            layer = members[0].group.removesuffix(".experts")
            layers[layer] = layers.get(layer, 0) + values
    sizes = list(layers.values())
    pairs = max((sum(sizes[i : i + 2]) for i in range(len(sizes))), default=0)
    return (root + pairs) * compute_bytes + max(sizes, default=0) * (compute_bytes + reduce_bytes)


def fsdp_traffic(config: ModelConfig, layout: Degrees, *, compute_bytes: int, reduce_bytes: int) -> int:
    """Bytes a rank receives for one micro-batch in gathering weights and scattering gradients."""
    total = 0
    for kind, members in groups(config):
        ranks = layout.efsdp if kind == "experts" else layout.world
        piece = sum(parameter.piece(layout, 0) for parameter in members)
        gathers = 1 if kind == "root" else 2
        total += (ranks - 1) * piece * (gathers * compute_bytes + reduce_bytes)
    return total
