"""Expert exchange on four ranks: transport, number formats on the wire, and DeepEP's interface over a stand-in."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.dist.deepep import DeepEPExchange, make_buffer
from composer2.dist.expert_parallel import by_expert, join_payload, split_payload
from composer2.kernels.backend import BackendUnavailable
from composer2.kernels.mxfp8 import quantize_mxfp8

pytestmark = pytest.mark.timeout(600)
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def found(run_ranks):
    return run_ranks("exchange.py", "job", 4)


@pytest.mark.dist
def test_a_native_wire_changes_nothing(found):
    assert max(found["native"].values()) < 1e-12


@pytest.mark.dist
@pytest.mark.parametrize("parts", ["parts_2", "parts_100"])
def test_tokens_in_parts_give_the_same(found, parts):
    """100 parts of 70 to 79 tokens: some parts are empty."""
    assert max(found[parts][f"{name}_error"] for name in ("out", "dgrad", "wgrad")) < 1e-12


@pytest.mark.dist
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_one_part_travels_while_the_experts_work_on_another(found, way):
    """Both parts leave before any expert works, and the results of one return while the other is worked on."""
    events = found["parts_2"][way]
    assert sorted(events) == ["experts"] * 2 + ["start"] * 4 + ["wait"] * 4
    assert events == ["start", "start", "wait", "experts", "start", "wait", "experts", "start", "wait", "wait"]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["0.0", "4.0", "few"])
def test_forward_and_dgrad_of_mxfp8_experts_do_not_notice_the_mxfp8_wire(found, dtype, case):
    """`few`: all tokens choose among three of eight experts, so that two ranks receive no row."""
    result = found[f"{dtype}_{case}"]
    assert result["rows_without"] == (5 if case == "few" else 0)
    assert result["out_equal"]
    assert result["dgrad_equal"]
    assert result["gate_equal"]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["0.0", "4.0", "few"])
def test_wgrad_is_that_of_tokens_rounded_twice(found, dtype, case, capsys):
    """Against a float64 reference; in float32 closer by far than the gap to rounding once."""
    result = found[f"{dtype}_{case}"]
    with capsys.disabled():
        sys.stdout.write(
            f"\nwgrad {dtype} {case}: to twice {result['wgrad_error']:.1e}, to once {result['wgrad_gap']:.1e}"
        )
    assert result["wgrad_error"] < (2**-8 if dtype == "bfloat16" else 1e-6)
    if case != "0.0":
        assert not result["wgrad_equal"]
        assert result["wgrad_gap"] < 1e-3
        assert dtype == "bfloat16" or result["wgrad_gap"] > 10 * result["wgrad_error"]


@pytest.mark.dist
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_whole_feed_forward_of_mxfp8_experts_does_not_notice_the_wire(found, dtype):
    assert all(found[f"{dtype}_module"].values())


@pytest.mark.dist
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_deepep_gives_what_the_plain_exchange_gives(found, wire):
    """Up to the BF16 rounding of a rank's sum, which its gradients carry through MXFP8 products."""
    assert max(found[f"deepep_{wire}"].values()) < (0.02 if wire == "mxfp8" else 0.01)


@settings(max_examples=50, deadline=None)
@given(counts=st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=1, max_size=5))
def test_rows_are_reordered_by_expert_then_rank(counts):
    arrived = [(rank, e, i) for rank, row in enumerate(counts) for e, n in enumerate(row) for i in range(n)]
    order = by_expert(torch.tensor(counts)).tolist()
    assert [arrived[i] for i in order] == sorted(arrived, key=lambda row: (row[1], row[0], row[2]))


def test_a_row_on_the_wire_is_33_bytes_for_32_elements():
    codes = quantize_mxfp8(torch.randn(5, 96, generator=torch.Generator().manual_seed(0)))
    payload = join_payload(codes)
    assert payload.dtype == torch.uint8
    assert payload.shape == (5, 96 // 32 * 33)
    back = split_payload(payload, 96)
    assert torch.equal(back.codes.view(torch.uint8), codes.codes.view(torch.uint8))
    assert torch.equal(back.scales, codes.scales)


def test_deepep_says_why_it_cannot_run():
    if "deep_ep" in sys.modules:
        pytest.skip("deep_ep is installed")
    with pytest.raises(BackendUnavailable, match="deep_ep cannot be imported"):
        make_buffer(None, 128)


def test_deepep_refuses_what_it_cannot_send():
    class FourRanks:
        group_size = 4

    with pytest.raises(ValueError, match="wire is 'native'"):
        DeepEPExchange(FourRanks(), 8, "native")
    with pytest.raises(ValueError, match="num_experts is 6"):
        DeepEPExchange(FourRanks(), 6)
    with pytest.raises(ValueError, match="multiple of 128"):
        DeepEPExchange(FourRanks(), 8, "mxfp8")(torch.zeros(2, 96), torch.zeros(2, 1), torch.zeros(2, 1), None)
