"""Packing: nothing lost, nothing mixed, little wasted."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.pack import PackCost, fill, pack, packing_report, plan_rows, to_tensors, unpack

lengths_lists = st.lists(st.integers(1, 40), max_size=25)


@given(lengths_lists, st.integers(1, 30), st.integers(1, 4))
def test_every_sample_lies_in_exactly_one_row(lengths, row_length, rows_per_batch):
    plan = plan_rows(lengths, row_length=row_length, rows_per_batch=rows_per_batch)
    placed = [index for rows in plan for row in rows for index in row]
    assert sorted(placed) == list(range(len(lengths)))
    for rows in plan:
        assert 1 <= len(rows) <= rows_per_batch
        for row in rows:
            used = sum(lengths[index] for index in row)
            assert used <= row_length or (len(row) == 1 and len(rows) == 1)


@given(lengths_lists, st.integers(10, 50))
@settings(max_examples=50)
def test_number_of_rows_is_within_the_bound_of_first_fit_decreasing(lengths, row_length):
    short = [length for length in lengths if length <= row_length]
    rows = sum(len(batch) for batch in plan_rows(short, row_length=row_length, rows_per_batch=3))
    assert rows <= int(np.ceil(sum(short) / row_length)) * 11 / 9 + 2


def test_plan_by_hand():
    # 6+4 and 5+3+2 fill two rows of 10, the first with more attention (36+16 > 25+9+4); the 12 gets its own.
    assert plan_rows([2, 3, 4, 5, 6, 12], row_length=10, rows_per_batch=2) == [[[5]], [[4, 2], [3, 1, 0]]]


def test_typical_rollouts_pack_well(build):
    generator = np.random.default_rng(0)
    samples = [build.sample(int(n), seed=i) for i, n in enumerate(generator.integers(100, 250, size=120))]
    report = packing_report([b.document_ids for b in pack(samples, row_length=512, rows_per_batch=8)])
    assert report["pack_efficiency"] > 0.93
    assert report["num_rows"] == sum(
        len(b) for b in plan_rows([len(s.token_ids) for s in samples], row_length=512, rows_per_batch=8)
    )


def test_fields_by_hand(build):
    first, second = build.sample(3, num_sampled=1, advantage=2.0), build.sample(2, num_sampled=1, seed=1, logprob=-3.0)
    (batch,) = pack([second, first], row_length=8, rows_per_batch=4, pad_id=9)
    assert batch.token_ids.tolist() == [[*first.token_ids, *second.token_ids]]  # trimmed to the longest row
    assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.loss_mask.tolist() == [[False, False, True, False, True]]
    assert batch.advantages.tolist() == [[0, 0, 2, 0, 1]]
    assert batch.behaviour_logprobs.tolist() == [[0, 0, -1, 0, -3]]
    assert batch.policy_versions.tolist() == [[-1, -1, 0, -1, 0]]
    assert batch.routes[0, :, 0, 0].tolist() == [0, 0, -1, 0, -1]


def test_padding_carries_nothing(build):
    batch = fill([[build.sample(5)], [build.sample(2, seed=1)]], pad_id=9)
    assert batch.token_ids.shape == (2, 5)
    padding = batch.document_ids == -1
    assert padding.sum() == 3
    assert (batch.token_ids[padding] == 9).all()
    assert not batch.loss_mask[padding].any()
    assert (batch.advantages[padding] == 0).all()
    assert (batch.policy_versions[padding] == -1).all()
    assert (batch.routes[padding] == -1).all()


@given(st.lists(st.integers(2, 30), min_size=1, max_size=12), st.integers(4, 40), st.integers(1, 3))
@settings(max_examples=40)
def test_unpack_undoes_pack(build, lengths, row_length, rows_per_batch):
    samples = [build.sample(length, num_sampled=1, seed=i) for i, length in enumerate(lengths)]
    plan = plan_rows(lengths, row_length=row_length, rows_per_batch=rows_per_batch)
    batches = [fill([[samples[i] for i in row] for row in rows]) for rows in plan]
    back = unpack([batch.token_ids for batch in batches], plan, lengths)
    assert all((tokens == sample.token_ids).all() for tokens, sample in zip(back, samples, strict=True))


def test_is_deterministic_and_pure(build):
    samples = [build.sample(4 + i % 5, seed=i) for i in range(9)]
    first, second = (pack(samples, row_length=12, rows_per_batch=2) for _ in range(2))
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert (a.token_ids == b.token_ids).all()


def test_temperatures_never_mix(build):
    samples = [build.sample(3, temperature=t, seed=i) for i, t in enumerate([1.0, 0.7, 1.0])]
    batches = pack(samples, row_length=16, rows_per_batch=4)
    assert [(batch.temperature, int(batch.loss_mask.sum())) for batch in batches] == [(0.7, 2), (1.0, 4)]
    with pytest.raises(ValueError, match="accepted is one per micro-batch"):
        fill([samples])


def test_tensors_hold_the_same(build):
    batch = pack([build.sample(6, layers=2, experts=3)], row_length=8, rows_per_batch=1)[0]
    tensors = to_tensors(batch)
    for name in ("token_ids", "position_ids", "document_ids", "loss_mask", "advantages", "policy_versions", "routes"):
        assert (getattr(tensors, name).numpy() == getattr(batch, name)).all()


def test_no_samples_no_batches():
    assert pack([], row_length=8, rows_per_batch=1) == []
    assert packing_report([])["num_batches"] == 0


def test_report_by_hand(build):
    batches = [fill([[build.sample(4)], [build.sample(2, seed=1)]]), fill([[build.sample(2, seed=2)]])]
    report = packing_report([b.document_ids for b in batches], PackCost(linear=1, quadratic=1))
    # costs 4+16 + 2+4 = 26 and 6: mean 16
    assert report == {"num_batches": 2, "num_rows": 3, "pack_efficiency": 0.8, "pack_imbalance": 26 / 16}


def test_errors(build):
    sample = build.sample(4)
    with pytest.raises(ValueError, match="row_length is 0"):
        pack([sample], row_length=0, rows_per_batch=1)
    with pytest.raises(ValueError, match="rows_per_batch is 0"):
        pack([sample], row_length=4, rows_per_batch=0)
    with pytest.raises(ValueError, match="sample 1 has 0 tokens"):
        plan_rows([3, 0], row_length=4, rows_per_batch=1)
    with pytest.raises(ValueError, match=r"sample 1: loss_mask\[0\] is True"):
        pack([sample, replace(sample, loss_mask=np.ones(4, bool))], row_length=8, rows_per_batch=1)
    with pytest.raises(ValueError, match=r"PackCost\.linear is -1"):
        PackCost(linear=-1)
    with pytest.raises(ValueError, match="one of them above 0"):
        PackCost(linear=0, quadratic=0)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("advantages", np.ones(1, np.float32), r"advantages has shape \(1,\), accepted is one a token: \(4,\)"),
        ("loss_mask", np.zeros(1, bool), r"loss_mask has shape \(1,\)"),
        ("behaviour_logprobs", np.zeros(3, np.float32), r"behaviour_logprobs has shape \(3,\)"),
        ("token_ids", np.arange(4) + 0.9, "token_ids has dtype float64, accepted is integer"),
        ("loss_mask", np.array([0, 0, 2, 1]), "loss_mask has dtype int64, accepted is bool"),
        ("temperature", float("nan"), "temperature is nan, accepted is a finite number >= 0"),
    ],
)
def test_fields_that_a_copy_would_broadcast_or_cast_are_refused(build, field, value, message):
    """A row takes an array of one entry for all its tokens; samples at temperature nan were left out of every batch."""
    samples = [build.sample(4), replace(build.sample(4), **{field: value})]
    with pytest.raises(ValueError, match=f"sample 1: {message}"):
        pack(samples, row_length=8, rows_per_batch=1)
    with pytest.raises(ValueError, match=f"sample 1: {message}"):
        fill([samples])
    whole = replace(samples[0], advantages=np.array([0, 0, 1, -1]))
    assert pack([whole], row_length=4, rows_per_batch=1)[0].advantages.tolist() == [[0.0, 0.0, 1.0, -1.0]]
