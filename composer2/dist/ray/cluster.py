"""A Ray cluster for one run: sizes go in; connected, with a place for every service, it comes out, and goes away again.

    bundle 0            the trainer                                            1 CPU (and 1 GPU when it trains on one)
    bundle 1 + i        sampler i, its environments and evaluation worker i    2 CPUs
    object store        finished groups; what does not fit is spilled to disk

Source: report §6.2 (training, environments, inference and evaluation are services of their own); row A1.
Choice: a sampler and the environments of its episodes share a bundle, hence a node: a tool call does not cross the
network. Evaluation takes turns with training on a sampler's bundle and asks for no CPU of its own.
Choice: without an address a cluster is started on this machine in a folder of its own, which is removed at the end with
everything that was spilled. Only this package imports ray.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

try:
    import ray
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ImportError(f"the ray executor needs ray, which cannot be imported: {error}") from error

MIN_STORE_BYTES = 80 * 2**20
"""Ray refuses a smaller object store."""
PLACEMENT_SECONDS = 60.0


class ClusterError(ValueError):
    """The cluster has no room for the services; the text says what was asked for and what there is."""


@dataclass(frozen=True, kw_only=True)
class RayConfig:
    """Which cluster a run uses."""

    address: str | None = None
    """Of a running cluster, e.g. `auto` or `ray://host:10001`; None starts one on this machine."""
    object_store_bytes: int = 256 * 2**20
    """Memory for finished groups on this machine; ignored with an address."""

    def __post_init__(self) -> None:
        if self.object_store_bytes < MIN_STORE_BYTES:
            raise ValueError(
                f"RayConfig.object_store_bytes is {self.object_store_bytes}, accepted is {MIN_STORE_BYTES} or more"
            )


class Cluster:
    """The connection and the placement group of one run; a context manager."""

    def __init__(self, config: RayConfig, *, num_samplers: int, trainer_gpus: int = 0) -> None:
        """ClusterError when the services cannot be placed."""
        self._folder: str | None = None
        bundles: list[dict[str, float]] = [{"CPU": 1.0}, *({"CPU": 2.0} for _ in range(num_samplers))]
        if trainer_gpus:
            bundles[0]["GPU"] = trainer_gpus
        try:
            self._connect(config, num_cpus=int(sum(bundle["CPU"] for bundle in bundles)))
            self.group = self._place(bundles)
        except BaseException:
            self._disconnect()
            raise

    def _connect(self, config: RayConfig, *, num_cpus: int) -> None:
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if config.address is not None:
            ray.init(address=config.address, **quiet)
            return
        # Names of sockets in it are limited to 107 bytes, so the folder has a short name.
        self._folder = tempfile.mkdtemp(prefix="c2ray")
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            object_store_memory=config.object_store_bytes,
            _temp_dir=self._folder,
            **quiet,
        )

    @staticmethod
    def _place(bundles: list[dict[str, float]]) -> PlacementGroup:
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(PLACEMENT_SECONDS):
            free = {name: ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
            remove_placement_group(group)
            raise ClusterError(f"the services need {bundles}, the cluster has {free} free")
        return group

    def close(self) -> None:
        """Give the places back; a cluster that was started here ends, and its folder goes."""
        remove_placement_group(self.group)
        self._disconnect()

    def _disconnect(self) -> None:
        ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def in_bundle(group: PlacementGroup, index: int) -> dict[str, Any]:
    """Options that put an actor into bundle `index`."""
    return {
        "scheduling_strategy": PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=index
        )
    }


def store_figures() -> Mapping[str, int]:
    """Bytes and objects that the object stores of all nodes made and spilled since they started."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    # Ray has no public call for these counters without its dashboard.
    state = get_state_from_address(ray.get_runtime_context().gcs_address)
    totals = {"ray_stored_bytes": 0, "ray_spilled_bytes": 0, "ray_spilled_objects": 0}
    for node in ray.nodes():
        if node["Alive"]:
            stats = get_memory_info_reply(state, node["NodeManagerAddress"], node["NodeManagerPort"]).store_stats
            totals["ray_stored_bytes"] += stats.cumulative_created_bytes
            totals["ray_spilled_bytes"] += stats.spilled_bytes_total
            totals["ray_spilled_objects"] += stats.spilled_objects_total
    return totals


def node_number(node_id: str) -> int:
    """Place of a node among all nodes the cluster ever had, by id."""
    return sorted(node["NodeID"] for node in ray.nodes()).index(node_id)


def here() -> str:
    """The node this runs on."""
    return str(ray.get_runtime_context().get_node_id())
