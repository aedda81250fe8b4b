"""Which implementation runs an operation of this package: the caller's word, checked, or one fixed rule by device.

In: the `backend=` argument of a public function and the device of its tensors. Out: the name of one implementation, or
BackendUnavailable with the reason.

    reference            plain PyTorch on any device: the definition
    triton               our kernels on a CUDA device, or under the Triton interpreter on a CPU (tests)
    torchao              adapter, composer2.kernels.torchao
    transformer_engine   adapter, composer2.kernels.te
    auto                 reference on a CPU, triton on a CUDA device; nothing else is looked at, so the answer never
                         depends on what happens to be installed

Source: report §6.1; row K6.
Choice: `auto` on a CUDA device without Triton raises instead of taking the reference: a slow run nobody asked for is a
silent fallback. Pass backend="reference" to have it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging

import torch

BACKENDS = ("auto", "reference", "triton", "torchao", "transformer_engine")

logger = logging.getLogger(__name__)


class BackendUnavailable(RuntimeError):
    """The implementation that was asked for cannot run here; the message says why."""


def which(device: torch.device | str = "cpu") -> str:
    """The implementation `auto` stands for on this device: "reference" (cpu) or "triton" (cuda).

    Raises BackendUnavailable for any other device type.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        return "reference"
    if kind == "cuda":
        return "triton"
    raise BackendUnavailable(f"device is {kind!r}, backend 'auto' knows cpu and cuda; pass backend='reference'")


def choose(
    operation: str,
    backend: str,
    device: torch.device | str,
    accepted: tuple[str, ...] = ("auto", "reference", "triton"),
) -> str:
    """The implementation that runs `operation` on `device`: never "auto", always available.

    `accepted` are the names the operation implements. Raises ValueError for a name it does not implement and
    BackendUnavailable, with the reason, where the implementation cannot run. The choice is logged once per operation.
    """
    if backend not in accepted:
        raise ValueError(f"{operation}: backend is {backend!r}, accepted is one of {accepted}")
    device = torch.device(device)
    chosen = which(device) if backend == "auto" else backend
    reason = refusal(chosen, device)
    if reason:
        raise BackendUnavailable(f"{operation}: backend {chosen!r} cannot run: {reason}")
    log_choice(operation, backend, chosen, device.type)
    return chosen


def refusal(backend: str, device: torch.device | str) -> str:
    """Why this implementation cannot run on this device, or an empty string. "auto" is not an implementation."""
    kind = torch.device(device).type
    if backend == "reference":
        return ""
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install 'composer2[kernels]')"
        if kind == "cpu" and not is_triton_interpreted():
            return "the tensors are on the CPU and the Triton interpreter is off (TRITON_INTERPRET=1 before the import)"
        return "" if kind in ("cpu", "cuda") else f"device is {kind!r}, accepted is cuda (or cpu, interpreted)"
    package = {"torchao": "torchao", "transformer_engine": "transformer_engine"}.get(backend)
    if package is None:
        return f"no such implementation, known are {BACKENDS[1:]}"
    if importlib.util.find_spec(package) is None:
        return f"{package} is not installed (pip install 'composer2[kernels]')"
    return ""


def is_triton_interpreted() -> bool:
    """Does Triton run its kernels in its interpreter? Imports triton."""
    from triton import knobs

    return bool(knobs.runtime.interpret)


@functools.cache
def log_choice(operation: str, asked: str, chosen: str, device: str) -> None:
    """One log line per distinct choice."""
    logger.info("%s on %s: backend %s (asked for %s)", operation, device, chosen, asked)
