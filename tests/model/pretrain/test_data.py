"""Packing, order and sharding."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.pretrain.corpus import Corpus, Document
from composer2.model.pretrain.data import (
    CYCLE,
    PackedBatches,
    PretrainBatch,
    RowOrder,
    TokenisedCorpus,
    TokenStream,
    pack_examples,
    tokenise_corpus,
)


class LetterTokenizer:
    """One token a letter: its code."""

    def encode_batch(self, texts):
        return [[ord(letter) for letter in text] for text in texts]

    def special_id(self, name):
        return {"pad": 0, "doc": 1}[name]


def corpus_of(*lengths: int, seed: int = 0, sources: int = 1) -> TokenisedCorpus:
    """Streams whose tokens are all different, so that every token can be told apart."""
    streams, next_id = [], 1
    for _ in range(sources):
        starts = np.cumsum([0, *lengths[:-1]])
        streams.append(
            TokenStream(
                token_ids=np.arange(next_id, next_id + sum(lengths), dtype=np.int32),
                document_starts=starts.astype(np.int64),
            )
        )
        next_id += sum(lengths)
    return TokenisedCorpus(train=tuple(streams), heldout=streams[0], weights=(1.0,) * sources, pad_id=0)


def real_tokens(batch: PretrainBatch) -> list[int]:
    return sorted(int(token) for token in batch.token_ids[batch.document_ids >= 0])


def test_documents_are_framed_and_packed_by_hand():
    corpus = Corpus(
        train=(Document(path="a", text="AB"), Document(path="b", text="CDE")),
        heldout=(Document(path="c", text="F"),),
    )
    tokens = tokenise_corpus(corpus, LetterTokenizer())
    # stream: 1 A B 1 | 1 C D E 1 -> rows of 6, the last padded
    rows = tokens.train[0].rows([0, 1], 6, pad_id=0)
    assert rows.token_ids.tolist() == [[1, 65, 66, 1, 1, 67], [68, 69, 1, 0, 0, 0]]
    assert rows.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert rows.document_ids.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]]
    assert rows.weights.tolist() == [[0, 1, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]]
    assert tokens.heldout_rows(3, 8).token_ids.tolist() == [[1, 70, 1]]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=8),
    seq_len=st.integers(2, 17),
    seed=st.integers(0, 1000),
)
def test_an_epoch_holds_every_token_once(lengths, seq_len, seed):
    corpus = corpus_of(*lengths)
    batches = PackedBatches(corpus, seq_len=seq_len, num_rows=1, seed=seed)
    epoch = corpus.train[0].num_rows(seq_len)
    for start in (0, epoch):
        seen = sorted(token for step in range(start, start + epoch) for token in real_tokens(batches(step)))
        assert seen == list(range(1, sum(lengths) + 1))


@settings(max_examples=20, deadline=None)
@given(world=st.sampled_from([1, 2, 3, 6]), seed=st.integers(0, 99), step=st.integers(0, 30))
def test_ranks_are_disjoint_and_complete(world, seed, step):
    corpus = corpus_of(50, 31, 7, sources=2)
    whole = PackedBatches(corpus, seq_len=5, num_rows=6, seed=seed)
    parts = [PackedBatches(corpus, seq_len=5, num_rows=6, seed=seed, rank=r, world=world) for r in range(world)]
    ids = [row for part in parts for row in part.row_ids(step)]
    assert sorted(ids) == sorted(whole.row_ids(step))
    assert [part.row_ids(step)[0] for part in parts] == whole.row_ids(step)[:world]


def test_order_needs_only_the_step():
    corpus = corpus_of(400, 300, sources=2)
    forward = PackedBatches(corpus, seq_len=8, num_rows=4, seed=3)
    expected = [forward.row_ids(step) for step in range(60)]
    for step in (59, 7, 31, 0):  # any step first, in a fresh object
        assert PackedBatches(corpus, seq_len=8, num_rows=4, seed=3).row_ids(step) == expected[step]
    assert PackedBatches(corpus, seq_len=8, num_rows=4, seed=4).row_ids(0) != expected[0]


def test_epochs_differ_and_the_mixture_keeps_its_shares():
    order = RowOrder([70, 30], [3.0, 1.0], seed=1)
    drawn = [order[place] for place in range(2 * CYCLE)]
    assert sum(source == 0 for source, _ in drawn[:CYCLE]) == 750
    rows = [row for source, row in drawn if source == 1]
    assert sorted(rows[:30]) == sorted(rows[30:60]) == list(range(30))
    assert rows[:30] != rows[30:60]
    with pytest.raises(ValueError, match="less than 1/1000"):
        RowOrder([5, 5], [1.0, 1e-6], seed=0)


def test_examples_are_packed_whole_by_hand():
    batch = pack_examples(
        [([5, 6], [1.0, 0.5]), ([7, 8, 9], [9.0, 0.0, 1.0]), ([4, 4, 4, 4], [0, 0.25, 0.25, 1])], row_len=6, pad_id=0
    )
    assert batch.token_ids.tolist() == [[4, 4, 4, 4, 5, 6], [7, 8, 9, 0, 0, 0]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 0, 1], [0, 1, 2, 0, 0, 0]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, -1, -1, -1]]
    assert batch.weights.tolist() == [[0, 0.25, 0.25, 1, 0, 0.5], [0, 0, 1, 0, 0, 0]]


def test_unused_columns_are_cut_and_long_examples_refused():
    assert pack_examples([([1, 2], [0, 1]), ([1, 2], [0, 1])], row_len=3, pad_id=0).token_ids.shape == (2, 2)
    with pytest.raises(ValueError, match="1 to 2"):
        pack_examples([([1, 2, 3], [0, 1, 1])], row_len=2, pad_id=0)
    wider = pack_examples([([1, 2, 3], [0, 1, 1]), ([4], [0])], row_len=2, max_len=3, pad_id=0)
    assert wider.token_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    with pytest.raises(ValueError, match="0 examples"):
        pack_examples([], row_len=4, pad_id=0)
    with pytest.raises(ValueError, match="2 tokens and 1 weights"):
        pack_examples([([1, 2], [0])], row_len=4, pad_id=0)


def test_a_weight_without_a_predictor_is_refused():
    ids = np.zeros((1, 2), dtype=np.int32)
    with pytest.raises(AssertionError, match="without a predictor"):
        PretrainBatch(token_ids=ids, position_ids=ids, document_ids=ids, weights=np.ones((1, 2), dtype=np.float32))


def test_ranks_must_divide_the_rows():
    with pytest.raises(ValueError, match="multiple of world"):
        PackedBatches(corpus_of(10), seq_len=2, num_rows=3, seed=0, world=2)
