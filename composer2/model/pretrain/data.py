"""From documents to batches: packed rows of fixed length, in an order that is a pure function of (seed, step).

In: a `Corpus` and a tokenizer, or finished examples of (token ids, weights). Out: `PretrainBatch`.

Source: row P1: packing with correct position reset and no attention across documents; deterministic, resumable,
shardable by rank; after resume not one token repeated or skipped.
Choice: all documents of a source form one stream, `<|doc|>` text `<|doc|>` one after the other, cut every `seq_len`
tokens. Each row is cut from one place of the stream, so an epoch holds every token exactly once, whatever `seq_len`.
A document cut by a row boundary goes on in the next row as a new document at position 0.
Choice: nothing is stored for resume. Row r of the run comes from source s = slot[r mod 1000] of a shuffled cycle of
1000 slots that holds every source by weight; it is the n-th row of that source, hence row perm_e[n mod R_s] with
e = n div R_s and perm_e a permutation drawn from (seed, s, e). A step alone fixes its rows.

Shape letters: B rows, T tokens of a row, N tokens of a stream, D documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from composer2.model.pretrain.corpus import Corpus, Document

CYCLE = 1000
Example = tuple[Sequence[int] | np.ndarray, Sequence[float] | np.ndarray]
"""(token ids, weight of predicting each of them)."""


class BatchTokenizer(Protocol):
    """What packing needs of a tokenizer."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]: ...

    def special_id(self, name: str) -> int: ...


@dataclass(frozen=True, kw_only=True)
class PretrainBatch:
    """Packed rows. Index t describes token t; its predictor is t - 1 of the same document."""

    token_ids: np.ndarray
    """int32 [B, T]."""
    position_ids: np.ndarray
    """int32 [B, T], restarting at 0 in every document."""
    document_ids: np.ndarray
    """int32 [B, T], distinct within a row; -1 marks padding."""
    weights: np.ndarray
    """float32 [B, T]: weight of predicting token t; 0 for the first token of a document, which nothing predicts."""

    def __post_init__(self) -> None:
        for name in ("position_ids", "document_ids", "weights"):
            assert getattr(self, name).shape == self.token_ids.shape, name
        unpredicted = (self.position_ids == 0) | (self.document_ids < 0)
        assert not self.weights[unpredicted].any(), "a token without a predictor in its document carries weight"

    def rows(self, start: int, stop: int) -> PretrainBatch:
        """Rows [start, stop)."""
        return PretrainBatch(
            token_ids=self.token_ids[start:stop],
            position_ids=self.position_ids[start:stop],
            document_ids=self.document_ids[start:stop],
            weights=self.weights[start:stop],
        )

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int((self.document_ids >= 0).sum())


# ---------------------------------------------------------------------------------------------------------------------
# Streams of tokens


@dataclass(frozen=True, kw_only=True)
class TokenStream:
    """The documents of one source end to end."""

    token_ids: np.ndarray
    """int32 [N]."""
    document_starts: np.ndarray
    """int64 [D], ascending, the first is 0."""

    def num_rows(self, seq_len: int) -> int:
        """Rows an epoch has; the last one may hold padding."""
        return -(-len(self.token_ids) // seq_len)

    def rows(self, indices: Sequence[int] | np.ndarray, seq_len: int, pad_id: int) -> PretrainBatch:
        """Cut out rows: row i holds tokens [i * seq_len, (i + 1) * seq_len)."""
        starts_B1 = np.asarray(indices, dtype=np.int64)[:, None] * seq_len
        places_BT = starts_B1 + np.arange(seq_len)
        is_token_BT = places_BT < len(self.token_ids)
        inside_BT = np.minimum(places_BT, len(self.token_ids) - 1)
        documents_BT = np.searchsorted(self.document_starts, inside_BT, side="right") - 1
        positions_BT = inside_BT - np.maximum(self.document_starts[documents_BT], starts_B1)
        positions_BT = np.where(is_token_BT, positions_BT, 0)
        return PretrainBatch(
            token_ids=np.where(is_token_BT, self.token_ids[inside_BT], pad_id).astype(np.int32),
            position_ids=positions_BT.astype(np.int32),
            document_ids=np.where(is_token_BT, documents_BT - documents_BT[:, :1], -1).astype(np.int32),
            weights=(positions_BT > 0).astype(np.float32),
        )


@dataclass(frozen=True, kw_only=True)
class TokenisedCorpus:
    """A corpus in tokens, held in memory; independent of the row length."""

    train: tuple[TokenStream, ...]
    """One stream per source."""
    heldout: TokenStream | None
    weights: tuple[float, ...]
    pad_id: int

    @property
    def num_train_tokens(self) -> int:
        return sum(len(stream.token_ids) for stream in self.train)

    def heldout_rows(self, seq_len: int, max_rows: int) -> PretrainBatch:
        """At most `max_rows` held-out rows, evenly spread over that text. ValueError when nothing is held out."""
        if self.heldout is None:
            raise ValueError("this corpus holds nothing out, accepted is CorpusConfig.heldout_frac above 0")
        num_rows = self.heldout.num_rows(seq_len)
        indices = np.unique(np.linspace(0, num_rows - 1, min(max_rows, num_rows)).round().astype(np.int64))
        return self.heldout.rows(indices, seq_len, self.pad_id)


def tokenise_corpus(corpus: Corpus, tokenizer: BatchTokenizer) -> TokenisedCorpus:
    """Encode every document once."""
    train = [
        _encode([document for document in corpus.train if document.source == source], tokenizer)
        for source in range(len(corpus.weights))
    ]
    return TokenisedCorpus(
        train=tuple(train),
        heldout=_encode(corpus.heldout, tokenizer) if corpus.heldout else None,
        weights=corpus.weights,
        pad_id=tokenizer.special_id("pad"),
    )


def _encode(documents: Sequence[Document], tokenizer: BatchTokenizer) -> TokenStream:
    mark = np.array([tokenizer.special_id("doc")], dtype=np.int32)
    pieces: list[np.ndarray] = []
    starts: list[int] = []
    length = 0
    for token_ids in tokenizer.encode_batch([document.text for document in documents]):
        starts.append(length)
        pieces += [mark, np.asarray(token_ids, dtype=np.int32), mark]
        length += len(token_ids) + 2
    return TokenStream(token_ids=np.concatenate(pieces), document_starts=np.asarray(starts, dtype=np.int64))


# ---------------------------------------------------------------------------------------------------------------------
# Order


class RowOrder:
    """Which (source, row) stands at each place of an endless run. Stateless but for a cache of permutations."""

    def __init__(self, num_rows: Sequence[int], weights: Sequence[float], seed: int) -> None:
        shares = np.asarray(weights, dtype=np.float64) / sum(weights) * CYCLE
        counts = np.floor(shares).astype(np.int64)
        for source in np.argsort(counts - shares, kind="stable")[: CYCLE - int(counts.sum())]:
            counts[source] += 1
        if not counts.all():
            raise ValueError(
                f"weights {tuple(weights)} give a source less than 1/{CYCLE} of the rows, accepted is at least that"
            )
        self._num_rows = tuple(num_rows)
        self._slots = np.repeat(np.arange(len(counts)), counts)
        self._counts = counts
        self._seed = seed
        self._cache: dict[tuple[int, int], np.ndarray] = {}

    def __getitem__(self, place: int) -> tuple[int, int]:
        cycle, slot = divmod(place, CYCLE)
        slots = self._shuffled_slots(cycle)
        source = int(slots[slot])
        nth = cycle * int(self._counts[source]) + int((slots[:slot] == source).sum())
        epoch, index = divmod(nth, self._num_rows[source])
        return source, int(self._permutation(source, epoch)[index])

    def _shuffled_slots(self, cycle: int) -> np.ndarray:
        return self._draw((-1, cycle), self._slots)

    def _permutation(self, source: int, epoch: int) -> np.ndarray:
        return self._draw((source, epoch), np.arange(self._num_rows[source]))

    def _draw(self, key: tuple[int, int], values: np.ndarray) -> np.ndarray:
        if key not in self._cache:
            if len(self._cache) > 16 + 2 * len(self._num_rows):
                self._cache.clear()
            generator = np.random.default_rng([self._seed, key[0] + 1, key[1]])
            self._cache[key] = generator.permutation(values)
        return self._cache[key]


class PackedBatches:
    """Call with a step, get its batch. Ranks of one step share its rows without overlap."""

    def __init__(
        self, corpus: TokenisedCorpus, *, seq_len: int, num_rows: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        """`num_rows`: rows of a step over all ranks."""
        if num_rows % world or not 0 <= rank < world:
            raise ValueError(
                f"rank {rank} of {world} with {num_rows} rows, accepted is 0 <= rank < world and a multiple of world"
            )
        self._corpus = corpus
        self._seq_len = seq_len
        self._num_rows = num_rows
        self._rank, self._world = rank, world
        self._order = RowOrder([stream.num_rows(seq_len) for stream in corpus.train], corpus.weights, seed)

    def row_ids(self, step: int) -> list[tuple[int, int]]:
        """(source, row of its stream) of this rank's rows."""
        first = step * self._num_rows
        return [self._order[place] for place in range(first + self._rank, first + self._num_rows, self._world)]

    def __call__(self, step: int) -> PretrainBatch:
        parts = [
            self._corpus.train[source].rows([row], self._seq_len, self._corpus.pad_id)
            for source, row in self.row_ids(step)
        ]
        return concatenate(parts)


def concatenate(parts: Sequence[PretrainBatch]) -> PretrainBatch:
    """Stack batches of equal row length."""
    return PretrainBatch(
        token_ids=np.concatenate([part.token_ids for part in parts]),
        position_ids=np.concatenate([part.position_ids for part in parts]),
        document_ids=np.concatenate([part.document_ids for part in parts]),
        weights=np.concatenate([part.weights for part in parts]),
    )


# ---------------------------------------------------------------------------------------------------------------------
# Finished examples


def pack_examples(
    examples: Sequence[Example], *, row_len: int, pad_id: int, max_len: int | None = None
) -> PretrainBatch:
    """First-fit-decreasing packing of whole examples; columns that no row uses are cut off.

    Rows have `row_len` tokens, or as many as the longest example needs, up to `max_len` (None: `row_len`). Raises
    ValueError for an example that is empty, too long, or with other than one weight a token.
    """
    max_len = row_len if max_len is None else max_len
    if not examples:
        raise ValueError("0 examples to pack, accepted is at least one")
    for index, (token_ids, weights) in enumerate(examples):
        if len(token_ids) != len(weights) or not 0 < len(token_ids) <= max_len:
            raise ValueError(
                f"example {index} has {len(token_ids)} tokens and {len(weights)} weights, accepted is as many weights "
                f"as tokens, 1 to {max_len}"
            )
    row_len = max(row_len, *(len(token_ids) for token_ids, _ in examples))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(examples)), key=lambda i: (-len(examples[i][0]), i)):
        length = len(examples[index][0])
        row = next((r for r in range(len(rows)) if room[r] >= length), len(rows))
        if row == len(rows):
            rows.append([])
            room.append(row_len)
        rows[row].append(index)
        room[row] -= length
    width = row_len - min(room)
    token_ids_BT = np.full((len(rows), width), pad_id, dtype=np.int32)
    positions_BT = np.zeros((len(rows), width), dtype=np.int32)
    documents_BT = np.full((len(rows), width), -1, dtype=np.int32)
    weights_BT = np.zeros((len(rows), width), dtype=np.float32)
    for row, members in enumerate(rows):
        start = 0
        for document, index in enumerate(members):
            tokens, weights = examples[index]
            stop = start + len(tokens)
            token_ids_BT[row, start:stop] = tokens
            positions_BT[row, start:stop] = np.arange(len(tokens))
            documents_BT[row, start:stop] = document
            weights_BT[row, start + 1 : stop] = weights[1:]
            start = stop
    return PretrainBatch(
        token_ids=token_ids_BT, position_ids=positions_BT, document_ids=documents_BT, weights=weights_BT
    )
