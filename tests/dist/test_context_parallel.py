"""Chunks, shards and the work of a rank, against lists, loops and closed forms; no process group."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.dist.context_parallel import (
    causal_pairs,
    chunk_places,
    gathered_places,
    imbalance,
    rank_policy_loss,
    shard_batch,
    visible_until,
)
from composer2.model.attention import document_mask
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer
from composer2.rl.loss import LossConfig
from composer2.rl.pack import BatchTensors

documents = st.lists(st.tuples(st.booleans(), st.integers(1, 9)), min_size=1, max_size=6)
"""Runs of (is padding, length)."""


def row_of(runs, multiple):
    """Document ids of one row, padded to a multiple."""
    ids = [-1 if padding else number for number, (padding, length) in enumerate(runs) for _ in range(length)]
    return torch.tensor([ids + [-1] * (-len(ids) % multiple)])


@given(cp=st.integers(1, 64), scale=st.integers(1, 6))
@settings(max_examples=200, deadline=None)
def test_one_document_gives_every_rank_exactly_the_same_work(cp, scale):
    length = 2 * cp * scale
    pairs = causal_pairs(torch.zeros(1, length, dtype=torch.int64), cp)
    assert pairs.tolist() == [length * (length + 1) // 2 // cp] * cp


def test_every_degree_from_1_to_64_is_exactly_equal():
    for cp in range(1, 65):
        assert len(set(causal_pairs(torch.zeros(1, 128 * cp, dtype=torch.int64), cp).tolist())) == 1


@given(runs=documents, cp=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_pairs_of_packed_documents_equal_the_attention_mask(runs, cp):
    ids = row_of(runs, 2 * cp)
    mask = document_mask(ids)[0, 0]
    chunk = ids.shape[1] // (2 * cp)
    expected = []
    for rank in range(cp):
        places = [
            *range(rank * chunk, (rank + 1) * chunk),
            *range((2 * cp - 1 - rank) * chunk, (2 * cp - rank) * chunk),
        ]
        assert chunk_places(ids.shape[1], cp, rank).tolist() == places
        expected.append(int(mask[places].sum()))
    assert causal_pairs(ids, cp).tolist() == expected
    assert imbalance(ids, cp) == pytest.approx(max(expected) / (sum(expected) / cp))


def test_packed_documents_are_out_of_balance_and_it_is_told():
    """[4, 4] over two ranks with chunks of 2: places 0 1 6 7 and 2 3 4 5, pairs 1+2+3+4 each; [2, 6] is unequal."""
    assert causal_pairs(torch.tensor([[0] * 4 + [1] * 4]), 2).tolist() == [10, 10]
    uneven = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1]])
    assert causal_pairs(uneven, 2).tolist() == [1 + 2 + 5 + 6, 1 + 2 + 3 + 4]
    assert imbalance(uneven, 2) == pytest.approx(14 / 12)


@given(runs=documents, cp=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_key_views_put_together_are_the_mask_of_the_row(runs, cp):
    ids = row_of(runs, 2 * cp)
    whole = document_mask(ids)[0, 0]
    order = gathered_places(ids.shape[1], cp)
    assert sorted(order.tolist()) == list(range(ids.shape[1]))
    for rank in range(cp):
        view = shard_batch(batch_of(ids), cp, rank).key_view
        assert torch.equal(view.mask()[0, 0], whole[chunk_places(ids.shape[1], cp, rank)][:, order])


def test_visible_until_by_hand():
    assert visible_until(torch.tensor([[-1, 4, 4, 7, -1, -1]])).tolist() == [[1, 3, 3, 4, 5, 6]]


def batch_of(ids):
    """Every field says where it belongs: place in the row, plus a hundred for each field."""
    place = torch.arange(ids.shape[1])[None].expand(ids.shape).clone()
    return BatchTensors(
        token_ids=100 + place,
        position_ids=200 + place,
        document_ids=ids,
        loss_mask=torch.zeros(ids.shape, dtype=torch.bool),
        advantages=300.0 + place,
        behaviour_logprobs=400.0 + place,
        policy_versions=500 + place,
        routes=(600 + place)[..., None, None].expand(*ids.shape, 2, 3),
    )


@pytest.mark.parametrize(("cp", "rank"), [(1, 0), (2, 0), (2, 1), (4, 3)])
def test_every_field_is_cut_alike_and_predictions_are_shifted_first(cp, rank):
    batch = batch_of(torch.zeros(1, 16, dtype=torch.int64))
    mask = torch.arange(16)[None] % 3 == 1
    shard = shard_batch(replace(batch, loss_mask=mask), cp, rank)
    places = chunk_places(16, cp, rank).tolist()
    following = [(p + 1) if p < 15 else None for p in places]
    assert shard.token_ids[0].tolist() == [100 + p for p in places]
    assert shard.position_ids[0].tolist() == [200 + p for p in places]
    assert shard.routes[0, :, 1, 2].tolist() == [600 + p for p in places]
    for name, base in (("targets", 100), ("advantages", 300), ("behaviour_logprobs", 400), ("policy_versions", 500)):
        assert getattr(shard, name)[0].tolist() == [0 if p is None else base + p for p in following], name
    assert shard.loss_mask[0].tolist() == [p is not None and p % 3 == 1 for p in following]


def test_masks_that_do_not_know_the_gathered_keys_are_refused():
    """None would be causal by the number of rows: silently wrong."""
    config = ModelConfig(num_nextn_predict_layers=0)
    model = Transformer(config)
    for layer in model.layers:
        layer.self_attn.gather = lambda entries: lambda: torch.cat((entries, entries), dim=1)
    tokens, ids = torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 16, dtype=torch.int64)
    for documents in (None, tokens):
        with pytest.raises(ValueError, match="accepted with gathered keys"):
            model(tokens, document_ids_BT=documents)
    view = shard_batch(batch_of(ids), 2, 0).key_view
    assert model(tokens, position_ids_BT=tokens, key_view=view).hidden_BTD.shape == (1, 8, config.hidden_size)
    with pytest.raises(ValueError, match="position_ids is None"):
        model(tokens, key_view=view)
    windowed = Transformer(ModelConfig(attention="grouped", sliding_window=4, num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="key_view is given, accepted is None with windowed layers"):
        windowed(tokens, position_ids_BT=tokens, key_view=view)


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="length is 12, accepted is a multiple of 2 \\* cp = 8"):
        chunk_places(12, 4, 0)
    with pytest.raises(ValueError, match="rank is 2"):
        chunk_places(8, 2, 2)
    batch = batch_of(torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="loss_mask selects the first token"):
        shard_batch(replace(batch, loss_mask=torch.ones(1, 4, dtype=torch.bool)), 2, 0)
    with pytest.raises(ValueError, match="gspo"):
        rank_policy_loss(torch.zeros(0), shard_batch(batch, 2, 0), LossConfig(correction="gspo"), 1.0)
    mask = torch.tensor([[False, True, True, True]])
    lost = shard_batch(replace(batch, loss_mask=mask, behaviour_logprobs=torch.full((1, 4), torch.nan)), 1, 0)
    assert int(lost.loss_mask.sum()) == 3
    with pytest.raises(ValueError, match="behaviour_logprobs holds nan at a trained token"):
        rank_policy_loss(torch.zeros(3), lost, LossConfig(), 1.0)
