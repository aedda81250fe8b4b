"""TransformerEngine's NVFP4 under this package's types: its Python reference as an oracle, its kernels on a GPU.

In: bfloat16 or float32 tensors. Out: NVFP4 with TransformerEngine's own bytes. The library is imported inside the
functions; where it is missing they raise BackendUnavailable.

Source: rows K6 K7. TransformerEngine's row-scaled NVFP4 is the report's per-token format; its reference quantiser is
plain PyTorch, but `import transformer_engine` needs the compiled package. So `load_reference` loads the three files it
consists of beside stand-ins for the two classes they derive from, and takes the stand-ins out of sys.modules again.
Choice: the compiled quantiser is used only for CUDA tensors and only if it imports; it has not been run by us.
Known differences from our reference: order "te"; codes of -0.0 lose the sign.

Shape letters: T rows, K width.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from composer2.kernels.backend import BackendUnavailable
from composer2.kernels.formats import NVFP4, NVFP4_BLOCK, NVFP4_OUTER

PACKAGE = "transformer_engine.pytorch"
FILES = ("reference_utils", "gemm", "reference_nvfp4")


def quantize_nvfp4(x: torch.Tensor, *, outer: str = "token") -> NVFP4:
    """NVFP4 of [..., K], order "te"; fields as in `nvfp4.quantize_nvfp4`. CUDA: compiled kernels; CPU: the reference.

    outer "token" or "tensor"; "matrix" raises ValueError (quantise matrix by matrix). Raises BackendUnavailable.
    """
    if outer not in ("token", "tensor"):
        raise ValueError(f"outer is {outer!r}, accepted with backend 'transformer_engine' is 'token' or 'tensor'")
    rows = x.reshape(-1, x.shape[-1])
    quantize = quantize_compiled if x.device.type == "cuda" else quantize_reference
    codes, scales, amax = quantize(rows, outer == "token")
    shape = (*x.shape[:-1], 1) if outer == "token" else [1] * x.ndim
    divisor = torch.full_like(amax, NVFP4_OUTER)
    return NVFP4(codes.view(*x.shape[:-1], -1), scales.view(*x.shape[:-1], -1), (amax / divisor).view(shape))


def quantize_reference(x_TK: torch.Tensor, per_token: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales and float32 amax ([T] or [1]) by TransformerEngine's own reference, any device."""
    library = load_reference()
    quantizer = library.NVFP4QuantizerRef(
        library.reference_utils.Fp4Formats.E2M1,
        rowwise=True,
        columnwise=False,
        quant_tile_shape=(1, NVFP4_BLOCK),
        row_scaled_nvfp4=per_token,
    )
    result = quantizer.quantize(x_TK)
    rows, blocks = len(x_TK), x_TK.shape[-1] // NVFP4_BLOCK
    codes = result.data.view(torch.uint8)
    return codes, result.scale.view(torch.float8_e4m3fn)[:rows, :blocks].contiguous(), result.global_amax_row.float()


def quantize_compiled(x_TK: torch.Tensor, per_token: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by the compiled kernels. Raises BackendUnavailable if they do not import."""
    try:
        library = importlib.import_module(f"{PACKAGE}.tensor.nvfp4_tensor")
    except (ImportError, RuntimeError, OSError) as error:  # the meta package raises RuntimeError, a missing .so OSError
        raise BackendUnavailable(f"TransformerEngine's compiled package does not import: {error}") from error
    quantizer = library.NVFP4Quantizer(rowwise=True, columnwise=False, row_scaled_nvfp4=per_token)
    result = quantizer(x_TK.contiguous())
    rows, blocks = len(x_TK), x_TK.shape[-1] // NVFP4_BLOCK
    scales = result._rowwise_scale_inv.view(torch.float8_e4m3fn)[:rows, :blocks].contiguous()
    return result._rowwise_data.view(torch.uint8), scales, result._amax_rowwise.float()


@functools.cache
def load_reference() -> Any:
    """TransformerEngine's module `reference_nvfp4`, from the installed files. Raises BackendUnavailable."""
    try:
        distribution = importlib.metadata.distribution("transformer-engine")
    except importlib.metadata.PackageNotFoundError as error:
        raise BackendUnavailable("transformer-engine is not installed") from error
    folder = Path(str(distribution.locate_file("transformer_engine"))) / "pytorch" / "custom_recipes"
    if not all((folder / f"{name}.py").is_file() for name in FILES):
        raise BackendUnavailable(f"{folder} lacks one of {FILES}; known to fit is transformer-engine 2.20.2")
    before = {name: module for name, module in sys.modules.items() if is_of_library(name)}
    for name in before:
        del sys.modules[name]
    try:
        return load_files(folder)
    finally:
        for name in [name for name in sys.modules if is_of_library(name)]:
            del sys.modules[name]
        sys.modules.update(before)


def load_files(folder: Path) -> ModuleType:
    """The last of FILES, loaded beside stand-ins for the packages around it."""
    recipes = f"{PACKAGE}.custom_recipes"
    for name in ("transformer_engine", PACKAGE, recipes, f"{PACKAGE}.tensor"):
        stand_in(name).__path__ = []
    stand_in(f"{PACKAGE}.quantized_tensor", QuantizedTensorStorage=Storage, Quantizer=Quantizer)
    stand_in(f"{PACKAGE}.tensor.utils", is_custom=lambda _: True)
    module = sys.modules[recipes]
    for file in FILES:
        name = f"{recipes}.{file}"
        spec = importlib.util.spec_from_file_location(name, folder / f"{file}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        setattr(sys.modules[recipes], file, module)
        spec.loader.exec_module(module)
    return module


class Storage:
    """Stand-in for TransformerEngine's QuantizedTensorStorage."""


class Quantizer:
    """Stand-in for TransformerEngine's Quantizer: the fields its reference reads."""

    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage = rowwise
        self.columnwise_usage = columnwise
        self.internal = False


def stand_in(name: str, **attributes: Any) -> ModuleType:
    """An empty module with these attributes, in sys.modules."""
    module = ModuleType(name)
    module.__dict__.update(attributes)
    sys.modules[name] = module
    return module


def is_of_library(name: str) -> bool:
    """Is this module name one of TransformerEngine's?"""
    return name == "transformer_engine" or name.startswith("transformer_engine.")
