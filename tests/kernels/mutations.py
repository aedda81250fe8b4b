"""Do the tests of the number formats see a wrong division, rounding or block? `python tests/kernels/mutations.py`

In: the table below; words on the command line keep the mutations whose file, lines or test hold one of them. Out: exit
status 0 when every mutant, one at a time in a copy of the tree, makes its test fail, else 1 with the survivors on
stderr.
Choice: pytest runs in forks of this process, which has imported torch and the oracle libraries already: that is most of
the time otherwise. composer2 itself is imported in the fork only, from the copy.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    "torch",
    "hypothesis",
    "ml_dtypes",
    "torchao.prototype.mx_formats.nvfp4_tensor",
    "modelopt.torch.quantization.qtensor",
)

FORMATS = "composer2/kernels/formats.py"
NVFP4 = "composer2/kernels/nvfp4.py"
MXFP8 = "composer2/kernels/mxfp8.py"
TRITON = "composer2/kernels/triton_quant.py"
OF_FORMATS, OF_NVFP4, OF_MXFP8, OF_ORACLES, OF_TRITON, OF_FAULTS = (
    f"tests/kernels/test_{name}.py" for name in ("formats", "nvfp4", "mxfp8", "oracles", "triton", "faults_numerics")
)

TABLE = [
    # One IEEE division into a multiplication by a reciprocal: codes, scales, outer scale; the Triton kernel's.
    (NVFP4, "magnitude.div_(divisor.unsqueeze(-1))", "magnitude.mul_(divisor.reciprocal().unsqueeze(-1))", OF_NVFP4),
    (NVFP4, "/ peak.masked_fill(peak == 0, 1.0)", "* peak.masked_fill(peak == 0, 1.0).reciprocal()", OF_NVFP4),
    (NVFP4, "return x / torch.full_like(x, divisor)", "return x * (1 / divisor)", OF_NVFP4),
    (TRITON, "return tl.div_rn(numerator, denominator)", "return numerator * tl.div_rn(1.0, denominator)", OF_TRITON),
    # The order of operations: the outer scale divided out first; an engine's order tidied up.
    (
        NVFP4,
        "(block_amax * shift * E4M3_MAX) / peak.masked_fill(peak == 0, 1.0)",
        "(block_amax * shift / 6) / (peak.masked_fill(peak == 0, 1.0) / 2688)",
        OF_NVFP4,
    ),
    (NVFP4, "block_amax / (E2M1_MAX * outer)", "block_amax / E2M1_MAX / outer", OF_ORACLES),
    (NVFP4, "magnitude * (outer.reciprocal() / scales)", "magnitude / (scales * outer)", OF_ORACLES),
    (NVFP4, "block_amax * (encode * sixth)", "block_amax * (encode / 6)", OF_ORACLES),
    (NVFP4, "(scales * encode.reciprocal()).reciprocal_()", "(encode / scales)", OF_ORACLES),
    # float32 input in float32; no power of two first.
    (NVFP4, "torch.float32 if blocks.dtype == torch.bfloat16 else torch.float64", "torch.float32", OF_NVFP4),
    (NVFP4, ".clamp_(27, 227) << 23", ".clamp_(127, 127) << 23", OF_NVFP4),
    # Round to nearest even into truncation, into half up; saturation lost.
    (FORMATS, "alpha=0.5).round_()", "alpha=0.5).trunc_()", OF_FORMATS),
    (FORMATS, "alpha=0.5).round_()", "alpha=0.5).add_(0.5).floor_()", OF_FORMATS),
    (FORMATS, "x.div_(step).round_().mul_(step)", "x.div_(step).trunc_().mul_(step)", OF_FORMATS),
    (FORMATS, "if x.dtype == torch.float64:", "if False:", OF_FORMATS),
    (FORMATS, "x.double().abs_()", "x.float().abs_()", OF_FORMATS),
    (NVFP4, "e2m1_index(scaled.double()", "e2m1_index(scaled.float()", OF_ORACLES),
    (TRITON, "((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)", "0", OF_TRITON),
    (TRITON, "((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)", "1 << (drop - 1)", OF_TRITON),
    # A block boundary off by one; a block of another size; experts that share a block.
    (NVFP4, "finite_amax(part.unflatten", "finite_amax(part.roll(1, -1).unflatten", OF_NVFP4),
    (
        MXFP8,
        "finite_amax(blocks, dim), rule",
        "finite_amax(blocks.flatten().roll(1).view_as(blocks), dim), rule",
        OF_MXFP8,
    ),
    (FORMATS, "MXFP8_BLOCK = 32", "MXFP8_BLOCK = 64", OF_MXFP8),
    (
        FORMATS,
        "return ((counts_E + block - 1) // block * block).cumsum(0)",
        "return ((counts_E + block - 2) // block * block).cumsum(0)",
        OF_FORMATS,
    ),
    (MXFP8, "padded_PK = pad_rows(x, offsets)", "padded_PK = pad_rows(x, offsets[-1:])", OF_MXFP8),
    (TRITON, "(block_bits & 0x7FFFFF) > 0x600000", "(block_bits & 0x7FFFFF) >= 0x600000", OF_TRITON),
    # Scale bytes: one mantissa too many, one too few, another exponent, byte 0 as zero, byte 255 as infinity.
    (FORMATS, "bits + 0x1FFFFF ", "bits + 0x200000 ", OF_FORMATS),
    (FORMATS, "bits + 0x1FFFFF ", "bits + 0x1FFFFE ", OF_FORMATS),
    (FORMATS, "((bits >> 23) - 8)", "((bits >> 23) - 7)", OF_MXFP8),
    (FORMATS, "torch.where(wide == 0, 1 << 22, wide << 23)", "wide << 23", OF_FORMATS),
    (FORMATS, "torch.where(wide == 255, 0x7FC00000, bits)", "bits", OF_FAULTS),
    # Zero blocks, signs, nibbles, swizzle, non-finite input.
    (NVFP4, "divisor.masked_fill_(divisor == 0, torch.inf)", "divisor.masked_fill_(divisor == 0, 1.0)", OF_NVFP4),
    (NVFP4, ".masked_fill(block_amax == 0, 0.0)", ".nan_to_num(1.0)", OF_NVFP4),
    (NVFP4, "signs.bitwise_or_(index", "signs.mul_(index > 0).bitwise_or_(index", OF_NVFP4),
    (
        NVFP4,
        "values.repeat(16), values.repeat_interleave(16)",
        "values.repeat_interleave(16), values.repeat(16)",
        OF_NVFP4,
    ),
    (FORMATS, "return (pairs | (pairs >> shift))", "return (pairs << 4 | (pairs >> (shift + 4)))", OF_FORMATS),
    (FORMATS, "tiles.permute(0, 3, 2, 1, 4).reshape(-1)", "tiles.permute(0, 3, 1, 2, 4).reshape(-1)", OF_FORMATS),
    (FORMATS, "if (bits >= infinity).any():", "if (bits > infinity).any():", OF_FORMATS),
    # The outer scale: a divisor; one amax for all rows.
    (NVFP4, ".mul_(t.outer)", ".div_(t.outer)", OF_FAULTS),
    (NVFP4, '{"token": 1, "matrix": 2', '{"token": 2, "matrix": 2', OF_NVFP4),
]


def run(test: str, tree: Path) -> int:
    """Exit status of pytest on one file of the copied tree: 0 passed, 1 failed, above 1 could not run."""
    child = multiprocessing.get_context("fork").Process(target=run_here, args=(test, tree))
    child.start()
    child.join()
    return 99 if child.exitcode is None else child.exitcode


def run_here(test: str, tree: Path) -> None:
    """Ends the process with the exit status of pytest. The first entry of the path decides which composer2 it is."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", test])
        where = importlib.import_module("composer2").__file__ or ""
    sys.exit(int(status) if Path(where).is_relative_to(tree) else 98)


def survives(file: str, original: str, mutated: str, test: str, tree: Path) -> str:
    """Empty when the test fails on the mutant as it should, else what is wrong."""
    path = tree / file
    text = path.read_text()
    if text.count(original) != 1:
        return f"the original occurs {text.count(original)} times, accepted is once"
    path.write_text(text.replace(original, mutated))
    try:
        status = run(test, tree)
        return "" if status == 1 else f"the test does not fail (status {status})"
    finally:
        path.write_text(text)


def main() -> int:
    """Copy the tree, see that the tests pass there, then try every mutation."""
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    table = [row for row in TABLE if not sys.argv[1:] or any(word in part for word in sys.argv[1:] for part in row)]
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        tree.mkdir()
        for name in ("composer2", "tests"):
            ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
            shutil.copytree(ROOT / name, tree / name, ignore=ignored)
        shutil.copy(ROOT / "pyproject.toml", tree)
        for test in sorted({test for *_, test in table}):
            if status := run(test, tree):
                problems.append(f"{test}: does not pass before any mutation (status {status})")
        for file, original, mutated, test in table:
            problem = survives(file, original, mutated, test, tree)
            sys.stderr.write(f"{'SURVIVES' if problem else 'caught':9}{file}: {mutated}\n")
            if problem:
                problems.append(f"{file}: {mutated!r}: {test}: {problem}")
    sys.stderr.write("".join(f"{line}\n" for line in problems))
    sys.stderr.write(f"{len(table)} mutations, {len(problems)} problems\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
