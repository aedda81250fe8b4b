"""Probe rows read back by brute force: answers and distances from the tokens alone."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.pretrain.probes import NO_ANSWER, ProbeConfig, probe_batch
from composer2.model.transformer import Transformer, init_weights


def read_row(tokens, config):
    """(arrows as {tail: (head, place of the head)}, [(place, hops, node)]) of a row, by its mark alone."""
    tokens, arrows = list(tokens), {}
    place = 0
    while tokens[place] < config.num_nodes:
        arrows[tokens[place]] = (tokens[place + 1], place + 1)
        place += 2
    (mark,) = (i for i in range(place, len(tokens)) if config.num_nodes <= tokens[i] < config.blank_id)
    asked = (i for i in range(mark + 1, len(tokens)) if tokens[i] < config.num_nodes)
    return arrows, [(i, tokens[mark] - config.num_nodes + 1, tokens[i]) for i in asked]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans(), st.integers(0, 10**6))
def test_answers_and_distances_by_brute_force(data, is_longest, seed):
    num_arrows = data.draw(st.integers(3, 9))
    config = ProbeConfig(
        num_nodes=data.draw(st.integers(num_arrows, 12)),
        num_arrows=num_arrows,
        num_queries=data.draw(st.integers(1, 5)),
        max_gap=data.draw(st.integers(0, 6)),
        max_hops=data.draw(st.integers(1, num_arrows - 1)),
    )
    hops_given = data.draw(st.none() | st.integers(1, config.max_hops))
    batch = probe_batch(config, 4, np.random.default_rng(seed), is_longest=is_longest, hops=hops_given)
    assert batch.token_ids_BT.shape == (4, config.row_len)
    assert batch.token_ids_BT.max() < config.vocab_size
    for row in range(4):
        arrows, queries = read_row(batch.token_ids_BT[row], config)
        assert len(arrows) == num_arrows if is_longest else 3 <= len(arrows) <= num_arrows
        assert set(arrows) == {head for head, _ in arrows.values()}
        assert len(queries) == config.num_queries
        asked = batch.answers_BT[row] != NO_ANSWER
        assert np.flatnonzero(asked).tolist() == [place for place, _, _ in queries]
        for place, hops, node in queries:
            places = []
            for _ in range(hops):
                node, where = arrows[node]
                places.append(where)
            assert batch.answers_BT[row, place] == node
            assert batch.hops_BT[row, place] == hops
            assert hops_given in (None, hops)
            assert batch.nearest_BT[row, place] == place - max(places)
            assert batch.farthest_BT[row, place] == place - min(places)
        for name in ("hops_BT", "nearest_BT", "farthest_BT"):
            assert (getattr(batch, name)[row][~asked] == 0).all()


def test_a_guess_among_the_other_nodes_has_the_chance_given():
    """All arrows of a cycle of four, by hand: one step never stays, so of three other nodes one is right."""
    config = ProbeConfig(num_nodes=4, num_arrows=4, num_queries=40, max_hops=1)
    batch = probe_batch(config, 200, np.random.default_rng(0), is_longest=True)
    asked = batch.answers_BT != NO_ANSWER
    assert not (batch.answers_BT == batch.token_ids_BT)[asked].any()
    assert config.chance == pytest.approx(1 / 3)
    guess = (batch.token_ids_BT + 1) % 4
    assert (guess == batch.answers_BT)[asked].mean() == pytest.approx(1 / 3, abs=0.03)


def test_hops_beyond_the_most_are_refused():
    with pytest.raises(ValueError, match=r"hops is 3, accepted is None or 1 \.\. max_hops 2"):
        probe_batch(ProbeConfig(), 1, np.random.default_rng(0), hops=3)


def test_same_seed_same_rows():
    first, second, other = (probe_batch(ProbeConfig(), 3, np.random.default_rng(s)).token_ids_BT for s in (1, 1, 2))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_arrows": 2}, "num_arrows is 2, accepted is 3 .. num_nodes 16"),
        ({"num_arrows": 17}, "num_arrows is 17, accepted is 3 .. num_nodes 16"),
        ({"max_hops": 6}, "max_hops is 6, accepted is less than num_arrows 6"),
        ({"num_queries": 0}, "num_queries is 0, accepted is 1 or more"),
        ({"max_gap": -1}, "max_gap is -1, accepted is 0 or more"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        ProbeConfig(**fields)


@pytest.mark.parametrize(("every", "is_blind"), [(0, True), (2, False), (1, False)])
def test_what_lies_beyond_the_reach_of_all_windows_cannot_be_answered(every, is_blind):
    """Two rows that differ in one arrow further away than layers * (window - 1): the same logits, or others."""
    probe = ProbeConfig(max_gap=16)
    window, layers = 4, 4
    model = Transformer(
        ModelConfig(
            vocab_size=probe.vocab_size, hidden_size=32, num_hidden_layers=layers, first_k_dense_replace=layers,
            intermediate_size=32, attention="grouped", num_attention_heads=2, sliding_window=window,
            full_attention_every=every, n_shared_experts=0, num_nextn_predict_layers=0, initializer_range=0.3,
        )
    )  # fmt: skip
    init_weights(model, 0)
    batch = probe_batch(probe, 8, np.random.default_rng(0), hops=1, is_longest=True)
    far = batch.nearest_BT > layers * (window - 1)
    places = {int(row): int(np.flatnonzero(far[row]).max()) for row in np.flatnonzero(far.any(1))}
    assert len(places) >= 4
    other = batch.token_ids_BT.copy()
    for row, place in places.items():
        head = place - batch.nearest_BT[row, place]
        other[row, head] = (other[row, head] + 1) % probe.num_nodes
    with torch.no_grad():
        before, after = (model(torch.from_numpy(t)).logits_BTV for t in (batch.token_ids_BT, other))
    same = [torch.equal(before[row, place], after[row, place]) for row, place in places.items()]
    assert all(same) if is_blind else not any(same)
