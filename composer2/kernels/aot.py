"""Ahead-of-time check of the Triton kernels: architectures go in, a table of what the compiler made of each comes out.

    python -m composer2.kernels.aot --arch 90a 100a --json PATH

No GPU and no driver are needed: Triton's bundled assembler compiles every kernel to a cubin, and the PTX is read.

Source: report §6.1; row K6. The rules, exit status 1 if one is broken:
    NVFP4 quantisers hold IEEE divisions (div.rn) and no approximate one (div.full, div.approx, rcp.approx, rcp.ftz)
    no quantiser holds a fused multiply-add, or flushes subnormals (.ftz)
    GEMMs multiply on tensor cores; on sm_100a by block-scaled MMA of the right kind and block
    no kernel spills more than 256 bytes a thread at 8 warps
Tests cannot see these on a CPU: in the interpreter every division is an IEEE division.
Choice: kernels are compiled as the wrappers launch them, with pointers and widths divisible by 16.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer2.kernels import triton_gemm, triton_quant
from composer2.kernels.backend import BackendUnavailable, refusal

ARCHES = ("90a", "100a")
MAX_SPILL_BYTES = 256
DIV_RN = re.compile(r"\bdiv\.rn\.f(?:32|64)\b")
APPROX_DIV = re.compile(r"\b(?:div\.(?:full|approx)|rcp\.approx|(?:div|rcp)\.rn\.ftz)[a-z0-9.]*")
FMA_OR_FTZ = re.compile(r"\bfma\.[a-z0-9.]*f(?:32|64)(?:x2)?\b|\b(?:add|sub|mul)[a-z.]*\.ftz[a-z0-9.]*")
MMA = re.compile(r"\b(?:tcgen05\.mma|wgmma\.mma_async|mma\.sync)[a-z0-9_.:]*")
NVFP4_MMA = re.compile(r"kind::mxf4nvf4\.block_scale\.(?:block16|scale_vec::4X)")
MXFP8_MMA = re.compile(r"kind::mxf8f6f4\.block_scale\.(?:block32|scale_vec::1X)")


class Kernel(NamedTuple):
    """One kernel as its wrapper launches it, with the rules it is under."""

    name: str
    function: Any
    types: dict[str, str]
    """Triton type of every argument that is not a constant."""
    constants: dict[str, Any]
    divides: bool = False
    """Must divide, and only by the IEEE rule."""
    mma: re.Pattern[str] | None = None
    """What an instruction of a GEMM must look like on sm_100a; None for a quantiser."""


def all_kernels(quant: Any = triton_quant, gemm: Any = triton_gemm) -> list[Kernel]:
    """Every kernel of the two modules; another module with the same names is how a test checks a changed source."""
    outputs = {"codes_ptr": "*u8", "scales_ptr": "*u8"}
    nvfp4 = {**outputs, "amax_ptr": "*fp32", "outer_ptr": "*fp32", "K": "i32"}
    tokens = {**outputs, "start_ptr": "*i32", "end_ptr": "*i32", "K": "i32"}
    block_k = {"BLOCK_K": quant.MAX_BLOCK_K}
    sizes = gemm.TILES
    operands = dict.fromkeys(("a_ptr", "a_scales_ptr", "b_ptr", "b_scales_ptr"), "*u8")
    shape = {"out_ptr": "*bf16", "tiles_ptr": "*i32", "num_experts": "i32", "N": "i32", "K": "i32"}
    fp32_outer, no_outer = ({"a_outer_ptr": kind, "b_outer_ptr": kind} for kind in ("*fp32", "*u8"))
    wgrad = dict.fromkeys(("grad_ptr", "grad_scales_ptr", "x_ptr", "x_scales_ptr"), "*u8")
    wgrad |= {"out_ptr": "*bf16", "bounds_ptr": "*i32", "N": "i32", "K": "i32"}
    wgrad_sizes = {"BLOCK_N": sizes["BLOCK_M"], "BLOCK_K": sizes["BLOCK_N"], "BLOCK_T": sizes["BLOCK_K"]}
    kernels = []
    for x, wide in (("bf16", False), ("fp32", True)):
        constants = {"WIDE": wide, **block_k}
        types = {**nvfp4, "x_ptr": f"*{x}"}
        token = {**constants, "PER_ROW": True, "rows_per_outer": 1}
        matrix = {**constants, "PER_ROW": False}
        kernels += [
            Kernel(f"nvfp4_token_{x}", quant.nvfp4_rows_kernel, types, token, divides=True),
            Kernel(
                f"nvfp4_matrix_{x}", quant.nvfp4_rows_kernel, {**types, "rows_per_outer": "i32"}, matrix, divides=True
            ),
            Kernel(
                f"mxfp8_rows_{x}",
                quant.mxfp8_rows_kernel,
                {**outputs, "x_ptr": f"*{x}", "num_blocks": "i32"},
                {"RCEIL": True, "BLOCKS": quant.MXFP8_BLOCKS},
            ),
            Kernel(
                f"mxfp8_tokens_{x}",
                quant.mxfp8_tokens_kernel,
                {**tokens, "x_ptr": f"*{x}"},
                {"RCEIL": True, "BLOCK_K": quant.TOKEN_COLUMNS},
            ),
        ]
    nvfp4_mm, mxfp8_mm = ({"FP4": fp4, "DECODE": False, **sizes} for fp4 in (True, False))
    mm, wgrad_mm = gemm.grouped_mm_kernel, gemm.wgrad_kernel
    return [
        *kernels,
        Kernel("nvfp4_grouped_mm", mm, {**operands, **fp32_outer, **shape}, nvfp4_mm, mma=NVFP4_MMA),
        Kernel("mxfp8_grouped_mm", mm, {**operands, **no_outer, **shape}, mxfp8_mm, mma=MXFP8_MMA),
        Kernel("mxfp8_grouped_wgrad", wgrad_mm, wgrad, {"DECODE": False, **wgrad_sizes}, mma=MXFP8_MMA),
    ]


def compile_kernel(kernel: Kernel, arch: str) -> dict[str, Any]:
    """Compiles for "90a" or "100a" and counts.

    Returns div_rn, approx_div, fma_or_ftz (instructions in the PTX), mma (the distinct tensor-core instructions),
    spill_bytes (spill stores a thread), registers, cubin_bytes. Raises BackendUnavailable without Triton's compiler.
    """
    require_compiler()
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    names = kernel.function.arg_names
    divisible = [name for name in names if name in ("N", "K") or kernel.types.get(name, "").startswith("*")]
    source = ASTSource(
        fn=kernel.function,
        signature={name: kernel.types.get(name, "constexpr") for name in names},
        constexprs=kernel.constants,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    options = triton_quant.LAUNCH if kernel.mma is None else triton_gemm.LAUNCH_GEMM
    compiled = compile(source, target=GPUTarget("cuda", check_arch(arch), 32), options=dict(options))
    ptx = compiled.asm["ptx"]
    return {
        "div_rn": len(DIV_RN.findall(ptx)),
        "approx_div": len(APPROX_DIV.findall(ptx)),
        "fma_or_ftz": len(FMA_OR_FTZ.findall(ptx)),
        "mma": sorted(set(MMA.findall(ptx))),
        **assembler_figures(ptx, arch),
        "cubin_bytes": len(compiled.asm["cubin"]),
    }


def assembler_figures(ptx: str, arch: str) -> dict[str, int]:
    """What the assembler says of registers and spills. Triton runs it with the same flags, and drops what it says."""
    from triton.backends.nvidia.compiler import get_ptxas

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [
            get_ptxas(check_arch(arch)).path,
            "-v",
            "--fmad=false",
            "--regAllocOptLevel=2",
            f"--gpu-name=sm_{arch}",
        ]
        done = subprocess.run(
            [*command, str(source), "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        )
    spilled = re.findall(r"(\d+) bytes spill stores", done.stderr)
    registers = re.findall(r"Used (\d+) registers", done.stderr)
    assert spilled, done.stderr
    assert registers, done.stderr
    return {"spill_bytes": max(map(int, spilled)), "registers": max(map(int, registers))}


def broken_rules(kernel: Kernel, arch: str, figures: dict[str, Any]) -> list[str]:
    """One sentence for every rule of this file that the figures of a compiled kernel break."""
    broken = []
    if kernel.divides and not figures["div_rn"]:
        broken.append("has no IEEE division (div.rn)")
    if kernel.divides and figures["approx_div"]:
        broken.append(f"has {figures['approx_div']} approximate divisions")
    if kernel.mma is None and figures["fma_or_ftz"]:
        broken.append(f"has {figures['fma_or_ftz']} fused multiply-adds or flushes of subnormals")
    if kernel.mma is not None:
        wanted = kernel.mma if arch.startswith("100") else MMA
        if not any(wanted.search(instruction) for instruction in figures["mma"]):
            broken.append(f"has no instruction {wanted.pattern}, only {figures['mma']}")
    if figures["spill_bytes"] > MAX_SPILL_BYTES:
        broken.append(f"spills {figures['spill_bytes']} bytes, allowed are {MAX_SPILL_BYTES}")
    return [f"{kernel.name} on sm_{arch} {what}" for what in broken]


def report(kernels: Sequence[Kernel], arches: Sequence[str]) -> dict[str, Any]:
    """{"triton", "kernels": {name: {arch: figures}}, "broken_rules": [sentence]} of all kernels on all arches."""
    require_compiler()
    import triton

    figures: dict[str, dict[str, Any]] = {kernel.name: {} for kernel in kernels}
    broken: list[str] = []
    for kernel in kernels:
        for arch in arches:
            figures[kernel.name][arch] = compile_kernel(kernel, arch)
            broken += broken_rules(kernel, arch, figures[kernel.name][arch])
    return {"triton": triton.__version__, "kernels": figures, "broken_rules": broken}


def table(result: dict[str, Any]) -> str:
    """The report as text, one line for every kernel and architecture, then the broken rules."""
    layout = "{:<20} {:>5} {:>6} {:>10} {:>10} {:>11} {:>9} {:>11}  {}"
    lines = [layout.format("kernel", "arch", *FIGURES, "mma")]
    for name, by_arch in result["kernels"].items():
        for arch, figures in by_arch.items():
            lines.append(layout.format(name, arch, *(figures[key] for key in FIGURES), " ".join(figures["mma"]) or "-"))
    lines += [f"broken: {sentence}" for sentence in result["broken_rules"]] or ["all rules hold"]
    return "\n".join(lines)


FIGURES = ("div_rn", "approx_div", "fma_or_ftz", "spill_bytes", "registers", "cubin_bytes")


def check_arch(arch: str) -> int:
    """90 or 100, or ValueError."""
    if arch not in ARCHES:
        raise ValueError(f"arch is {arch!r}, accepted is one of {ARCHES}")
    return int(arch[:-1])


def require_compiler() -> None:
    """Raises BackendUnavailable, with the reason, where the kernels cannot be compiled."""
    if reason := refusal("triton", "cuda"):
        raise BackendUnavailable(f"ahead-of-time compilation cannot run: {reason}")
    if triton_quant.is_interpreted():
        raise BackendUnavailable(
            "ahead-of-time compilation cannot run: the Triton interpreter is on (TRITON_INTERPRET)"
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m composer2.kernels.aot", description="Compile and check the kernels"
    )
    parser.add_argument("--arch", nargs="+", default=list(ARCHES), choices=ARCHES, help="architectures to compile for")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        result = report(all_kernels(), options.arch)
    except BackendUnavailable as error:
        parser.error(str(error))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    sys.stdout.write(table(result) + "\n")
    return 1 if result["broken_rules"] else 0


if __name__ == "__main__":
    sys.exit(main())
