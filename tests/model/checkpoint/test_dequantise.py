"""Matrices taller than the stripe that is dequantised at a time, against loops over blocks and groups."""

import ml_dtypes
import numpy as np
import pytest
import torch

from composer2.model.checkpoint.dequantise import STRIPE, dequantise_fp8_block, dequantise_int4_group

ROWS = 2 * STRIPE + 7


@pytest.mark.parametrize("block", [(128, 128), (100, 3)])
def test_fp8_blocks_beyond_a_stripe(block):
    """Blocks that divide the stripe and blocks that do not, with partial ones at both edges."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 126, (ROWS, 10), dtype=np.uint8)
    scales = rng.uniform(0.1, 2, (-(-ROWS // block[0]), -(-10 // block[1]))).astype(np.float32)
    expected = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            expected[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]] *= scales[i, j]
    out = torch.full((ROWS, 10), float("nan"))
    dequantise_fp8_block(torch.from_numpy(codes).view(torch.float8_e4m3fn), torch.from_numpy(scales), block, out)
    assert torch.equal(out, torch.from_numpy(expected))


def test_int4_groups_beyond_a_stripe():
    rng = np.random.default_rng(1)
    codes = rng.integers(-8, 8, (ROWS, 12))
    scales = rng.uniform(0.1, 1, (ROWS, 3)).astype(np.float32)
    words = np.zeros((ROWS, 2), dtype=np.uint32)
    for j in range(12):
        words[:, j // 8] += ((codes[:, j] + 8) * 16 ** (j % 8)).astype(np.uint32)
    expected = np.stack([codes[:, j].astype(np.float32) * scales[:, j // 4] for j in range(12)], axis=1)
    out = torch.full((ROWS, 12), float("nan"))
    dequantise_int4_group(torch.from_numpy(words.view(np.int32)), torch.from_numpy(scales), 4, out)
    assert torch.equal(out, torch.from_numpy(expected))
