"""Grouped GEMMs on quantised operands in Triton: codes and scales go in, all experts' products come out of one launch

    grouped_mm_nvfp4, grouped_mm_mxfp8    out[t]  = a[t] @ b[e].T              rows t of expert e, blocks along K
    grouped_wgrad_mxfp8                   grad[e] = g[rows of e].T @ x[rows of e]              blocks along tokens
    NVFP4 epilogue, in FP32               out[t]  = (sum over code * block scale) * a.outer[t] * b.outer[e]

Source: report §6.1; rows K4 K6. `grouped.py` holds the definitions.
The products are `tl.dot_scaled`: block-scaled MMA on sm_100a, a BF16 product of decoded operands on sm_90a (codes times
block scales are exact in BF16). A tile of rows belongs to one expert; rows behind the last offset are a group of their
own, whose tiles read no operand and store zeros, so that every row of the output is written exactly once.
Choice: DECODE replaces `tl.dot_scaled` by decoding to FP32 and `tl.dot`, on the same loads. The interpreter needs it,
since it reads the E4M3 scales of NVFP4 as E8M0; tests use it to check all index arithmetic on a CPU.

Shape letters: T rows, P rows with every expert's padded to 32, N width out, K width in, E experts, M tiles of rows.
"""

from __future__ import annotations

import torch

from composer2.kernels.formats import MXFP8, NVFP4, padded_offsets
from composer2.kernels.triton_quant import LAUNCH, decode_e4m3, jit, require

try:
    import triton
    import triton.language as tl
except ImportError:  # `require` says so
    pass

TILES = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128}
LAUNCH_GEMM = {**LAUNCH, "num_stages": 3}
INTERPRETER_TILES = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 64}


@jit
def decode_e2m1(packed):
    """float32 [rows, 2 * columns] of uint8 [rows, columns], the low nibble first."""
    code = tl.join(packed & 15, packed >> 4).to(tl.int32)
    magnitude = code & 7
    normal = ((magnitude << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 2, magnitude.to(tl.float32) * 0.5, normal)
    value = tl.where(code >= 8, -value, value)
    return tl.reshape(value, (packed.shape[0], 2 * packed.shape[1]))


@jit
def decode_e8m0(byte):
    """float32 2^(byte - 127) of uint8: 0 is 2^-127, 255 is NaN."""
    wide = byte.to(tl.int32)
    bits = tl.where(wide == 0, 1 << 22, wide << 23)
    return tl.where(wide == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@jit
def decode_operand(codes, scales, FP4: tl.constexpr):
    """float32 [rows, K] of codes [rows, K] (E4M3) or [rows, K // 2] (E2M1) and one scale for every block along K."""
    rows: tl.constexpr = scales.shape[0]
    blocks: tl.constexpr = scales.shape[1]
    if FP4:
        values = tl.reshape(decode_e2m1(codes), (rows, blocks, 16)) * decode_e4m3(scales.to(tl.int32))[:, :, None]
        return tl.reshape(values, (rows, blocks * 16))
    else:
        values = tl.reshape(decode_e4m3(codes.to(tl.int32)), (rows, blocks, 32)) * decode_e8m0(scales)[:, :, None]
        return tl.reshape(values, (rows, blocks * 32))


@jit
def block_scaled_dot(a, a_scales, b, b_scales, acc, FP4: tl.constexpr, DECODE: tl.constexpr):
    """acc [M, N] + a [M, K] @ b [N, K].T in FP32; uint8 codes and scales, scales [M or N, K // block]."""
    if DECODE:
        left, right = decode_operand(a, a_scales, FP4), decode_operand(b, b_scales, FP4)
        return tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    elif FP4:
        a_e4m3, b_e4m3 = a_scales.to(tl.float8e4nv, bitcast=True), b_scales.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(a, a_e4m3, "e2m1", tl.trans(b), b_e4m3, "e2m1", acc)
    else:
        return tl.dot_scaled(a, a_scales, "e4m3", tl.trans(b), b_scales, "e4m3", acc)


@jit
def round_to(x, dtype: tl.constexpr):
    """float32 x as `dtype`, float32 or bfloat16: nearest, ties to even, by bits (the interpreter's cast truncates)."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return tl.where(is_nan, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x


@jit
def grouped_mm_kernel(
    a_ptr, a_scales_ptr, a_outer_ptr, b_ptr, b_scales_ptr, b_outer_ptr, out_ptr, tiles_ptr, num_experts, N, K,
    FP4: tl.constexpr, DECODE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of out [T, N]: up to BLOCK_M rows of one expert, BLOCK_N columns.

    tiles_ptr: int32 [M, 3], expert, first row and end of the expert's rows; expert `num_experts` is the tail.
    The outer scales, FP32 [T] and [E], are read with FP4 only.
    """
    PACK: tl.constexpr = 2 if FP4 else 1
    BLOCK: tl.constexpr = 16 if FP4 else 32
    expert = tl.load(tiles_ptr + 3 * tl.program_id(1))
    end = tl.load(tiles_ptr + 3 * tl.program_id(1) + 2)
    m = tl.load(tiles_ptr + 3 * tl.program_id(1) + 1) + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_expert = expert < num_experts
    rows, columns = m < end, n < N
    a_rows = m.to(tl.int64)[:, None]
    b_rows = (expert.to(tl.int64) * N + n)[:, None]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, tl.where(has_expert, K, 0), BLOCK_K):
        k = (start // PACK + tl.arange(0, BLOCK_K // PACK))[None, :]
        kb = (start // BLOCK + tl.arange(0, BLOCK_K // BLOCK))[None, :]
        in_k, in_kb = k < K // PACK, kb < K // BLOCK
        a = tl.load(a_ptr + a_rows * (K // PACK) + k, mask=rows[:, None] & in_k, other=0)
        b = tl.load(b_ptr + b_rows * (K // PACK) + k, mask=columns[:, None] & in_k, other=0)
        a_scales = tl.load(a_scales_ptr + a_rows * (K // BLOCK) + kb, mask=rows[:, None] & in_kb, other=0)
        b_scales = tl.load(b_scales_ptr + b_rows * (K // BLOCK) + kb, mask=columns[:, None] & in_kb, other=0)
        acc = block_scaled_dot(a, a_scales, b, b_scales, acc, FP4, DECODE)
    if FP4:
        a_outer = tl.load(a_outer_ptr + m, mask=rows & has_expert, other=0.0)
        acc = acc * a_outer[:, None] * tl.load(b_outer_ptr + expert, mask=has_expert, other=0.0)
    out = round_to(acc, out_ptr.dtype.element_ty)
    tl.store(out_ptr + a_rows * N + n[None, :], out, mask=rows[:, None] & columns[None, :])


@jit
def wgrad_kernel(
    grad_ptr, grad_scales_ptr, x_ptr, x_scales_ptr, out_ptr, bounds_ptr, N, K,
    DECODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """One program computes one tile of out [E, N, K]: the sum over the padded rows of one expert.

    bounds_ptr: int32 [E + 1], where the padded rows of each expert begin, and the end. Operands are [P, N] and [P, K]
    with scales [P // 32, N] and [P // 32, K]; tiles are loaded transposed, tokens along the second axis.
    """
    expert = tl.program_id(2)
    first, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    in_n, in_k = (n < N)[:, None], (k < K)[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    for start in range(first, end, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)[None, :]
        tb = (start // 32 + tl.arange(0, BLOCK_T // 32)).to(tl.int64)[None, :]
        in_t, in_tb = t < end, tb < end // 32
        grad = tl.load(grad_ptr + t * N + n[:, None], mask=in_n & in_t, other=0)
        x = tl.load(x_ptr + t * K + k[:, None], mask=in_k & in_t, other=0)
        grad_scales = tl.load(grad_scales_ptr + tb * N + n[:, None], mask=in_n & in_tb, other=0)
        x_scales = tl.load(x_scales_ptr + tb * K + k[:, None], mask=in_k & in_tb, other=0)
        acc = block_scaled_dot(grad, grad_scales, x, x_scales, acc, False, DECODE)
    at = (expert.to(tl.int64) * N + n)[:, None] * K + k[None, :]
    tl.store(out_ptr + at, round_to(acc, out_ptr.dtype.element_ty), mask=in_n & (k < K)[None, :])


def grouped_mm_nvfp4(
    a: NVFP4, b: NVFP4, offsets_E: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, *, decode: bool | None = None
) -> torch.Tensor:
    """[T, N] in `out_dtype`, bfloat16 or float32, of rows a [T, K] and matrices b [E, N, K], rounded once from FP32.

    `decode` None decodes in the interpreter only. Offsets are taken as valid; rows they do not cover are zero. Raises
    BackendUnavailable where Triton cannot run.
    """
    require(a.codes)
    a_outer = a.outer.float().expand(len(a.codes), 1).contiguous()
    b_outer = b.outer.float().expand(len(b.codes), 1, 1).contiguous()
    scales = a.scales.view(torch.uint8), b.scales.view(torch.uint8)
    decode = a.codes.device.type == "cpu" if decode is None else decode
    return launch_grouped_mm(
        (a.codes, scales[0], a_outer), (b.codes, scales[1], b_outer), offsets_E, out_dtype, fp4=True, decode=decode
    )


def grouped_mm_mxfp8(
    a: MXFP8, b: MXFP8, offsets_E: torch.Tensor, out_dtype: torch.dtype = torch.bfloat16, *, decode: bool = False
) -> torch.Tensor:
    """As `grouped_mm_nvfp4` on MXFP8 operands, a [T, K] and b [E, N, K], both blocked along K."""
    require(a.codes)
    left, right = ((t.codes.view(torch.uint8), t.scales, t.scales) for t in (a, b))
    return launch_grouped_mm(left, right, offsets_E, out_dtype, fp4=False, decode=decode)


def launch_grouped_mm(
    a: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    b: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    offsets_E: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    fp4: bool,
    decode: bool,
) -> torch.Tensor:
    """Codes, scales and outer scales of both operands -> [T, N]."""
    num_rows, num_experts, width_out = len(a[0]), len(b[0]), b[0].shape[1]
    out_TN = torch.empty(num_rows, width_out, dtype=check_out_dtype(out_dtype), device=a[0].device)
    sizes = INTERPRETER_TILES if a[0].device.type == "cpu" else TILES
    tiles_M3 = row_tiles(offsets_E, num_rows, sizes["BLOCK_M"])
    if out_TN.numel():
        grouped_mm_kernel[(triton.cdiv(width_out, sizes["BLOCK_N"]), len(tiles_M3))](
            *(t.contiguous() for t in (*a, *b)), out_TN, tiles_M3, num_experts, width_out, a[0].shape[1] * (1 + fp4),
            FP4=fp4, DECODE=decode, **sizes, **LAUNCH_GEMM,
        )  # fmt: skip
    return out_TN


def row_tiles(offsets_E: torch.Tensor, num_rows: int, block: int) -> torch.Tensor:
    """int32 [M, 3]: group, first row and end of the group's rows, for tiles that cover each row once; no host copy.

    Groups are the experts and, last, the tail. M depends on shapes only, so some tiles at the end may be empty.
    """
    ends_G = torch.cat([offsets_E, offsets_E.new_full((1,), num_rows)]).long()
    starts_G = torch.cat([ends_G.new_zeros(1), ends_G[:-1]])
    tiles_G = (ends_G - starts_G + block - 1) // block
    tile_ends_G = tiles_G.cumsum(0)
    tile_M = torch.arange(num_rows // block + len(ends_G), device=offsets_E.device)
    group_M = torch.searchsorted(tile_ends_G, tile_M, right=True).clamp_(max=len(ends_G) - 1)
    first_M = starts_G[group_M] + (tile_M - (tile_ends_G - tiles_G)[group_M]) * block
    return torch.stack([group_M, first_M, ends_G[group_M]], dim=1).int()


def grouped_wgrad_mxfp8(
    grad: MXFP8,
    x: MXFP8,
    offsets_E: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    decode: bool = False,
) -> torch.Tensor:
    """[E, N, K] of grad [P, N] and x [P, K], both blocked along tokens; zero for an expert without tokens.

    `offsets_E` are those before padding. Raises BackendUnavailable where Triton cannot run.
    """
    require(grad.codes)
    num_experts, width_out, width_in = len(offsets_E), grad.codes.shape[1], x.codes.shape[1]
    bounds = torch.cat([offsets_E.new_zeros(1), padded_offsets(offsets_E)])
    out_ENK = torch.empty(num_experts, width_out, width_in, dtype=check_out_dtype(out_dtype), device=grad.codes.device)
    sizes = INTERPRETER_TILES if grad.codes.device.type == "cpu" else TILES
    block_t, block_n, block_k = sizes["BLOCK_K"], sizes["BLOCK_M"], sizes["BLOCK_N"]
    if out_ENK.numel():
        wgrad_kernel[(triton.cdiv(width_in, block_k), triton.cdiv(width_out, block_n), num_experts)](
            grad.codes.view(torch.uint8).contiguous(), grad.scales.contiguous(),
            x.codes.view(torch.uint8).contiguous(), x.scales.contiguous(), out_ENK, bounds, width_out, width_in,
            DECODE=decode, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_T=block_t, **LAUNCH_GEMM,
        )  # fmt: skip
    return out_ENK


def check_out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype, or ValueError unless the epilogue can round to it."""
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out_dtype is {dtype}, accepted is torch.bfloat16 or torch.float32")
    return dtype
