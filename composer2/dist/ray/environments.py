"""Environments as a service: an actor owns the pods of its node; samplers use them as if they were their own.

In: calls of the `Pod` and `PodBackend` protocols in a sampler. Out: the same calls on the pods of an
`EnvironmentActor`, and their results or errors.

Source: report §6.2 (environments are a service of their own); rows A1 E1.
Choice: one actor call a pod call: episodes wait for the tools they called, so nothing is gained by batching.
Choice: pods belong to the sampler that made them; when it dies, the trainer lets the actor destroy them. An actor that
dies itself is started again by Ray; its pods are gone, which the episodes that used them see as PodError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from composer2.dist.ray.cluster import here, ray
from composer2.env.pod import open_backend
from composer2.runner import EpisodeRunner, PodsConfig, RunnerSpec
from composer2.types import CallOutcome, ExecResult, Pod, PodBackend, PodError, PodLimits


class EnvironmentActor:
    """Pods of one node."""

    def __init__(self, config: PodsConfig) -> None:
        self._config = config
        self._backend: PodBackend | None = None
        self._reason = ""
        self._pods: dict[str, Pod] = {}
        self._owners: dict[str, str] = {}

    def where(self) -> str:
        """The node."""
        return here()

    async def open(self) -> str:
        """Start making pods, if not done; says which kind and why. PodError when this node cannot."""
        self._opened()
        return self._reason

    async def create(self, owner: str, files: Mapping[str, str], limits: PodLimits | None) -> str:
        """A fresh pod of `owner`; its id."""
        pod = await self._opened().create(files, limits)
        self._pods[pod.pod_id], self._owners[pod.pod_id] = pod, owner
        return pod.pod_id

    async def call(self, pod_id: str, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """`method` of the pod. PodError for one that is gone."""
        if pod_id not in self._pods:
            raise PodError(f"pod {pod_id} is gone")
        return await getattr(self._pods[pod_id], method)(*arguments, **named)

    async def destroy(self, pod_id: str) -> None:
        """See `Pod.destroy`."""
        pod = self._pods.pop(pod_id, None)
        self._owners.pop(pod_id, None)
        if pod is not None:
            await pod.destroy()

    async def release(self, owner: str) -> int:
        """Destroy the pods of `owner`; how many there were."""
        mine = [pod_id for pod_id, name in self._owners.items() if name == owner]
        await asyncio.gather(*(self.destroy(pod_id) for pod_id in mine))
        return len(mine)

    async def close(self) -> None:
        """Destroy everything."""
        if self._backend is not None:
            await self._backend.close()
            self._backend = None

    def _opened(self) -> PodBackend:
        if self._backend is None:
            self._backend, self._reason = open_backend(self._config.backend, allow_unsafe=self._config.allow_unsafe)
        return self._backend


async def _answer(ref: Any) -> Any:
    """The result of an actor call, or the error it raised, as it was raised there."""
    try:
        return await ref
    except asyncio.CancelledError:
        ray.cancel(ref)  # so that the pod learns of it, as it does in one process
        raise
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayActorError as error:
        raise PodError(f"the environments are gone: {error}") from error


class RemotePod:
    """A `Pod` that lies with an `EnvironmentActor`."""

    def __init__(self, environment: Any, pod_id: str) -> None:
        self.pod_id = pod_id
        self._environment = environment

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return await _answer(self._environment.call.remote(self.pod_id, method, arguments, named))

    async def exec(
        self, argv: Sequence[str], *, timeout: float = 30.0, stdin: bytes = b"", cwd: str = "/repo"
    ) -> ExecResult:
        return await self._call("exec", argv, timeout=timeout, stdin=stdin, cwd=cwd)

    async def read(self, path: str) -> bytes:
        return await self._call("read", path)

    async def write(self, path: str, data: bytes) -> None:
        await self._call("write", path, data)

    async def list_files(self, path: str = ".") -> list[str]:
        return await self._call("list_files", path)

    async def run_calls(self, module: str, calls: Sequence[str], *, timeout: float = 2.0) -> list[CallOutcome]:
        return await self._call("run_calls", module, calls, timeout=timeout)

    async def destroy(self) -> None:
        try:
            await _answer(self._environment.destroy.remote(self.pod_id))
        except PodError:
            return  # gone with its actor


class RemotePods:
    """A `PodBackend` over an `EnvironmentActor`, for one owner."""

    name = "ray"

    def __init__(self, environment: Any, owner: str) -> None:
        self._environment, self._owner = environment, owner

    async def create(self, files: Mapping[str, str], limits: PodLimits | None = None) -> Pod:
        pod_id = await _answer(self._environment.create.remote(self._owner, dict(files), limits))
        return RemotePod(self._environment, pod_id)

    async def close(self) -> None:
        """Destroy the pods of this owner; the actor and those of others stay."""
        await _answer(self._environment.release.remote(self._owner))


class RemoteRunner(EpisodeRunner):
    """The runner of one machine, with pods that an environment actor makes."""

    def __init__(self, spec: RunnerSpec, environment: Any, owner: str) -> None:
        super().__init__(spec)
        self._pods = RemotePods(environment, owner)

    def open_pods(self) -> PodBackend:
        return self._pods


def make_remote_runner(payload: tuple[RunnerSpec, Any, str]) -> RemoteRunner:
    """The `setup` function of a `SamplerActor`: (spec, environment actor, owner of the pods)."""
    return RemoteRunner(*payload)
