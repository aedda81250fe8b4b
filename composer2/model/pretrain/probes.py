"""Probe tasks for attention: rows of arrows between nodes and questions about them go out, with the answers.

    a b | c a | b c | _ _ _ | ?2 | a -> c | c -> b | …         arrows in any order, blanks, a mark, then queries

`?h` before the queries asks for the nodes that h arrows lead to. One arrow is retrieval: find the place where a stood
before, say what followed it. Two are multi-hop: what the first lookup finds is what the second one looks for.

Source: row M10 (retrieval and multi-hop probes of sliding-window / full hybrids).
Choice: the arrows of a row form one cycle, so that no number of arrows leads back to itself early and every node has a
successor. An answer is a label and never a token of the row, so queries tell nothing new and an arrow is only where it
was written. Choice: a training row has 3 arrows or more, up to the largest number, since short rows teach the lookup
that long ones need; probes are measured at the largest.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NO_ANSWER = -1


@dataclass(frozen=True, kw_only=True)
class ProbeConfig:
    """Sizes of a probe row."""

    num_nodes: int = 16
    """Nodes there are; a row uses some of them. Ids 0 … num_nodes - 1."""
    num_arrows: int = 6
    """Arrows of the longest row, at least 3: two nodes cannot tell one arrow from three."""
    num_queries: int = 8
    """Queries of a row."""
    max_gap: int = 12
    """Most blanks between arrows and queries."""
    max_hops: int = 2
    """Most arrows a query follows."""

    def __post_init__(self) -> None:
        if not 3 <= self.num_arrows <= self.num_nodes:
            raise ValueError(f"num_arrows is {self.num_arrows}, accepted is 3 .. num_nodes {self.num_nodes}")
        for name, least in (("num_queries", 1), ("max_gap", 0), ("max_hops", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, accepted is {least} or more")
        if self.max_hops >= self.num_arrows:
            raise ValueError(f"max_hops is {self.max_hops}, accepted is less than num_arrows {self.num_arrows}")

    @property
    def blank_id(self) -> int:
        """Token of a place without meaning; the mark of queries over h arrows is num_nodes + h - 1."""
        return self.num_nodes + self.max_hops

    @property
    def vocab_size(self) -> int:
        """Nodes, query marks and the blank."""
        return self.blank_id + 1

    @property
    def row_len(self) -> int:
        """Tokens of every row; shorter ones end in blanks."""
        return 2 * self.num_arrows + self.max_gap + 1 + self.num_queries

    @property
    def chance(self) -> float:
        """Accuracy of one who knows the nodes of a row but no arrow: any node but the one asked about."""
        return 1 / (self.num_arrows - 1)


@dataclass(frozen=True, kw_only=True)
class ProbeBatch:
    """Rows and, at the node of every query, what is asked there. All arrays are [B, T]."""

    token_ids_BT: np.ndarray
    """int64."""
    answers_BT: np.ndarray
    """int64: the node to be said, NO_ANSWER where no query ends."""
    hops_BT: np.ndarray
    """int64: arrows to follow, 0 where no query ends."""
    nearest_BT: np.ndarray
    """int64: tokens back to the head of the nearest arrow that has to be read; a window of W sees distances below W."""
    farthest_BT: np.ndarray
    """int64: the same of the farthest one."""


def probe_batch(
    config: ProbeConfig, num_rows: int, rng: np.random.Generator, *, hops: int | None = None, is_longest: bool = False
) -> ProbeBatch:
    """Random rows. `hops`: arrows that queries follow, None for any number up to `max_hops`, row by row.

    `is_longest`: all rows have `num_arrows` arrows; else any number from 3 on."""
    if hops is not None and not 1 <= hops <= config.max_hops:
        raise ValueError(f"hops is {hops}, accepted is None or 1 .. max_hops {config.max_hops}")
    shape = (num_rows, config.row_len)
    token_ids = np.full(shape, config.blank_id, dtype=np.int64)
    answers = np.full(shape, NO_ANSWER, dtype=np.int64)
    asked, nearest, farthest = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for row in range(num_rows):
        num_arrows = config.num_arrows if is_longest else int(rng.integers(3, config.num_arrows + 1))
        cycle = rng.permutation(config.num_nodes)[:num_arrows]
        following = dict(zip(cycle.tolist(), np.roll(cycle, -1).tolist(), strict=True))
        head_of: dict[int, int] = {}
        for place, tail in enumerate(rng.permutation(cycle).tolist()):
            token_ids[row, 2 * place : 2 * place + 2] = tail, following[tail]
            head_of[tail] = 2 * place + 1
        start = 2 * num_arrows + int(rng.integers(0, config.max_gap + 1))
        count = int(rng.integers(1, config.max_hops + 1)) if hops is None else hops
        token_ids[row, start] = config.num_nodes + count - 1
        for at in range(start + 1, start + 1 + config.num_queries):
            node = int(rng.choice(cycle))
            token_ids[row, at] = node
            distances = []
            for _ in range(count):
                distances.append(at - head_of[node])
                node = following[node]
            answers[row, at], asked[row, at] = node, count
            nearest[row, at], farthest[row, at] = min(distances), max(distances)
    return ProbeBatch(
        token_ids_BT=token_ids, answers_BT=answers, hops_BT=asked, nearest_BT=nearest, farthest_BT=farthest
    )
