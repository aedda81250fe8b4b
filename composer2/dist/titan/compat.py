"""What torchtitan asks of a device that a machine without a GPU does not have. Call `prepare()` before it is imported.

torchtitan takes CUDA for granted: it sets a device, asks its name and its memory. On a CPU those questions get plain
answers, and gloo carries the collectives. With a GPU nothing is done here.
Choice: attributes are only added where torch has none, and one private function of torch, which tells torchtitan its
device, is told to say "cpu"; torchtitan itself stays as it is.
"""

from __future__ import annotations

import types
from typing import Any

import torch
import torch._utils

MEMORY_BYTES = 1 << 34
"""Told as the size of the CPU's memory; only a percentage in the log depends on it."""


def prepare() -> str:
    """The device type torchtitan will use: "cuda", or "cpu" where no GPU is."""
    if torch.cuda.is_available():
        return "cuda"
    answers: dict[str, Any] = {
        "get_device_name": lambda device=None: "cpu",
        "get_device_properties": lambda device=None: types.SimpleNamespace(total_memory=MEMORY_BYTES),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda device=None: {},
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    torch._utils._get_available_device_type = lambda: "cpu"
    torch.cpu.current_device = lambda: 0  # type: ignore[assignment, return-value]  # barriers want a number
    return "cpu"
