"""torchao's quantisers and MXFP8 expert GEMM under this package's types: an oracle on a CPU, a fast path on Blackwell.

In: the tensors of `nvfp4.py` and `mxfp8.py`. Out: NVFP4 or MXFP8 with torchao's own bytes, or its GEMM's result. The
library is imported inside the functions; where it is missing they raise BackendUnavailable.

Source: rows K6 K7.
Known differences from our reference, all torchao 0.18's: NVFP4 has order "reciprocal" and writes scale 2^-6 for zero
blocks; MXFP8 "rceil" takes a float log2, so for float32 input amax = 448 * 2^k plus one ulp comes out one too small,
and blocks with scale byte 0 are multiplied by 1 instead of 2^127.
Choice: no GPU kernel is used for NVFP4: torchao's needs a further package. On CUDA the same PyTorch code runs.

Shape letters: T rows, K width in, N width out, E experts.
"""

from __future__ import annotations

from typing import Any

import torch

from composer2.kernels.backend import BackendUnavailable, refusal
from composer2.kernels.formats import MXFP8, MXFP8_BLOCK, NVFP4, NVFP4_BLOCK, NVFP4_OUTER


def quantize_nvfp4(x: torch.Tensor, *, outer: str = "token") -> NVFP4:
    """NVFP4 of bfloat16 or float32 [..., K], order "reciprocal"; fields as in `nvfp4.quantize_nvfp4`.

    A zero token, matrix or tensor is quantised with outer scale 1 and reported with 0. Raises BackendUnavailable.
    """
    library = load("torchao.prototype.mx_formats.nvfp4_tensor")
    num_axes = {"token": 1, "matrix": 2, "tensor": x.ndim}[outer]
    scale = x.float().abs().amax(tuple(range(-num_axes, 0)), keepdim=True) / torch.tensor(NVFP4_OUTER, device=x.device)
    rows = x.reshape(-1, x.shape[-1])
    per_row = scale.expand(*x.shape[:-1], 1).reshape(-1, 1)
    scales, codes = library.nvfp4_quantize(rows, NVFP4_BLOCK, per_row.masked_fill(per_row == 0, 1.0))
    lead = x.shape[:-1]
    return NVFP4(codes.view(torch.uint8).reshape(*lead, -1), scales.reshape(*lead, -1), scale)


def quantize_mxfp8(
    x: torch.Tensor, *, scale: str = "rceil", axis: int = -1, offsets: torch.Tensor | None = None
) -> MXFP8:
    """MXFP8 along the last axis; on a Blackwell device by torchao's Triton kernel (bfloat16), else by its PyTorch code.

    Raises ValueError for axis 0, which torchao has only inside its GEMM, and BackendUnavailable.
    """
    if axis != -1 or offsets is not None:
        raise ValueError(f"axis is {axis}, accepted with backend 'torchao' is -1 without offsets")
    library = load("torchao.prototype.mx_formats.mx_tensor")
    if is_blackwell(x.device) and x.dtype == torch.bfloat16:
        kernels = load("torchao.prototype.mx_formats.kernels")
        codes, scales = kernels.triton_to_mxfp8_dim0(x.contiguous(), MXFP8_BLOCK, scale)
    else:
        mode = library.ScaleCalculationMode(scale)
        scales, codes = library.to_mx(x.contiguous(), torch.float8_e4m3fn, MXFP8_BLOCK, mode)
    return MXFP8(codes, scales.view(torch.uint8).reshape(*x.shape[:-1], -1))


def expert_linear_mxfp8(
    x_TK: torch.Tensor, weight_ENK: torch.Tensor, offsets_E: torch.Tensor, *, scale: str = "rceil"
) -> torch.Tensor:
    """x times the matrix of its expert, [T, N] bfloat16, forward and backward in MXFP8, differentiable in both.

    On a Blackwell device torchao's kernels, elsewhere its emulation. `offsets_E` int32; expert counts need not be
    multiples of 32. Raises BackendUnavailable.
    """
    grouped = load("torchao.prototype.moe_training.mxfp8_grouped_mm")
    preference = load("torchao.quantization.quantize_.common.kernel_preference").KernelPreference
    mode = load("torchao.prototype.mx_formats.config").ScaleCalculationMode
    result: torch.Tensor = grouped._to_mxfp8_then_scaled_grouped_mm(
        x_TK,
        weight_ENK.transpose(-2, -1),
        offsets_E,
        kernel_preference=preference.AUTO if is_blackwell(x_TK.device) else preference.EMULATED,
        scale_calculation_mode=mode(scale),
        pad_token_groups_for_grouped_mm=True,
    )
    return result


def is_blackwell(device: torch.device) -> bool:
    """Is this a CUDA device of capability 10.0 or above?"""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (10, 0)


def load(module: str) -> Any:
    """A module of torchao, or BackendUnavailable with the reason."""
    import importlib

    reason = refusal("torchao", "cpu")
    if reason:
        raise BackendUnavailable(reason)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise BackendUnavailable(f"torchao has no {module}: {error}; known to fit is torchao 0.18.0") from error
