"""How many processes do what: degrees go in, checked; the groups and device meshes of this process come out.

    rank = dp_rank * cp + cp_rank        world = dp * cp
    dense weights     sharded over all of it (context parallelism folded into the data-parallel dimension)
    expert weights    split over ep consecutive ranks, then sharded over the world / ep ranks that hold the same experts

Expert parallelism is formed from data and context ranks; it costs no ranks of its own.
Source: report §6.1 ("Parallelism": EP 8 with CP 2 in continued pretraining, EP 8 with CP 8 in RL); row D1.
Choice: no tensor parallelism here. `tp` is a field so that a recipe which asks for it is refused by name: torchtitan's
expert parallelism then borrows the TP ranks, which is another layout than the report's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from composer2.model.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """Sizes of the parallel dimensions."""

    dp: int = 1
    """Data-parallel ranks: each sees other rows."""
    cp: int = 1
    """Context-parallel ranks that share a row."""
    ep: int = 1
    """Ranks that the experts are split over, a divisor of dp * cp."""
    tp: int = 1
    """Tensor-parallel ranks: 1."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"Degrees.{name} is {value!r}, accepted is an integer >= 1")
        if self.tp > 1:
            raise ValueError(
                f"Degrees.tp is {self.tp} with ep {self.ep}, accepted is 1: experts are split over data and context "
                "ranks, independent of tensor parallelism"
            )
        if self.world % self.ep:
            raise ValueError(f"Degrees.ep is {self.ep}, accepted is a divisor of dp * cp = {self.world}")

    @property
    def world(self) -> int:
        """Processes."""
        return self.dp * self.cp

    @property
    def efsdp(self) -> int:
        """Ranks that hold the same experts and shard their weights."""
        return self.world // self.ep

    def check(self, config: ModelConfig, row_length: int) -> None:
        """ValueError unless a model and rows of this length divide."""
        experts = config.n_routed_experts
        if experts % self.ep:
            raise ValueError(f"n_routed_experts is {experts}, accepted is a multiple of ep {self.ep}")
        if self.cp > 1 and config.attention != "latent":
            raise ValueError(f"attention is {config.attention!r}, accepted with cp {self.cp} is 'latent'")
        if row_length % (2 * self.cp):
            raise ValueError(f"row_length is {row_length}, accepted is a multiple of 2 * cp = {2 * self.cp}")


def pretraining_degrees(num_ranks: int) -> Degrees:
    """EP 8, CP 2: the report's continued pretraining, data parallel over what is left."""
    return _report_degrees(num_ranks, cp=2)


def rl_degrees(num_ranks: int) -> Degrees:
    """EP 8, CP 8: the report's RL, whose rows are long."""
    return _report_degrees(num_ranks, cp=8)


def _report_degrees(num_ranks: int, cp: int) -> Degrees:
    if num_ranks < 8 or num_ranks % 8:
        raise ValueError(f"num_ranks is {num_ranks}, accepted with ep 8 and cp {cp} is a multiple of 8")
    return Degrees(dp=num_ranks // cp, cp=cp, ep=8)


@dataclass(frozen=True, kw_only=True)
class Meshes:
    """The groups of this process."""

    degrees: Degrees
    dense: DeviceMesh
    """All ranks, one dimension."""
    context: DeviceMesh
    """The cp ranks that share this rank's rows."""
    experts: DeviceMesh
    """The ep ranks that together hold all experts once."""
    expert_shards: DeviceMesh
    """The ranks with the same experts as this one."""

    @property
    def dp_rank(self) -> int:
        """Which rows are this rank's."""
        return dist.get_rank() // self.degrees.cp

    @property
    def cp_rank(self) -> int:
        """Which chunks of them."""
        return self.context.get_local_rank()


def make_meshes(degrees: Degrees, device_type: str) -> Meshes:
    """Meshes over the initialised process group, whose size is that of the degrees."""
    if dist.get_world_size() != degrees.world:
        raise ValueError(f"{dist.get_world_size()} processes run, accepted with {degrees} is {degrees.world}")
    rows = init_device_mesh(device_type, (degrees.dp, degrees.cp), mesh_dim_names=("dp", "cp"))
    split = init_device_mesh(device_type, (degrees.efsdp, degrees.ep), mesh_dim_names=("efsdp", "ep"))
    dense = init_device_mesh(device_type, (degrees.world,), mesh_dim_names=("dense",))
    return Meshes(degrees=degrees, dense=dense, context=rows["cp"], experts=split["ep"], expert_shards=split["efsdp"])
