"""Prefix-tree merging: samples of one prompt that begin alike run their common beginning once.

In: `Sample`s, each knowing which prompt (`group`) it belongs to. Out: micro-batches, each an ordinary `Batch` with the
per-token loss data of its samples, and a `TreeBatch`, the merged tokens to run the model on in place of it.

    tree      every distinct (token, routes) path is one node; its tokens are laid out depth first
    position  depth in the tree = position in every sample that passes through it
    sees      token i sees token j  <=>  j <= i < visible_until[j]       (visible_until[j]: end of the subtree of j)
    loss      a trained token of a sample is read at the node of the token before it; siblings may share that node

Attention sees exactly the ancestors, so hidden states equal those of the samples run one by one; the gradient of a
shared node is the sum over its samples, which is what separate runs would add up.

Source: MiniMax-M2 report (prefix-tree merging of agent samples); row R11; with router replay, row M6.
Choice: tokens merge only when their recorded experts are the same too. Samples of one prefix can carry different routes
(weights changed between two prefills); running one of them for both would train on experts the sampler did not use.
Such forks are counted in `num_route_forks`.
Choice: what follows the token that predicts a sample's last trained token cannot reach the loss and is not run.

Shape letters: B rows, T tokens of a row, L MoE layers, K experts a token, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from composer2.rl.pack import check_samples, fill, plan_rows
from composer2.rl.routes import NO_ROUTE
from composer2.types import Batch, Sample


@dataclass(eq=False, kw_only=True)
class Node:
    """A run of tokens without a branch inside: tokens start..stop-1 of one of the samples that pass through it."""

    sample: int
    start: int
    stop: int
    parent: Node | None = None
    children: dict[bytes, Node] = field(default_factory=dict)
    offset: int = 0
    """Index of its first token in the depth-first layout."""


@dataclass(frozen=True, kw_only=True)
class PrefixTree:
    """The merged tokens of some samples in depth-first order, and where each sample's tokens went."""

    token_ids: np.ndarray
    """int32 [T]."""
    position_ids: np.ndarray
    """int32 [T]."""
    visible_until: np.ndarray
    """int32 [T]: one past the last descendant."""
    routes: np.ndarray
    """int16 [T, L, K]."""
    index_of: list[np.ndarray]
    """For each sample, int64 [its tokens that run]: where they are in the layout."""
    num_unmerged: int
    """Tokens the samples would run one by one."""
    num_route_forks: int
    """Places where tokens agreed and recorded experts did not."""


def tokens_needed(sample: Sample) -> int:
    """How many of a sample's tokens have to run: all before its last trained token."""
    trained = np.flatnonzero(sample.loss_mask)
    if len(trained) == 0 or trained[0] == 0:
        raise ValueError(
            f"loss_mask selects {trained[:1].tolist() or 'nothing'}, accepted is at least one token, the first excluded"
        )
    return int(trained[-1])


def build_tree(samples: Sequence[Sample], lengths: Sequence[int] | None = None) -> PrefixTree:
    """Merge samples whose beginnings agree in tokens and routes. `lengths`: tokens of each that run (default: needed).

    Time and memory are linear in the tokens given. Raises ValueError for no samples at all, and for samples
    without a trained token. All must have routes of one [L, K]; a sampler without experts gives int16 [T, 0, 0]."""
    if not samples:
        raise ValueError("samples is empty, accepted is at least one sample")
    lengths = [tokens_needed(sample) for sample in samples] if lengths is None else lengths
    builder = _Builder(samples)
    leaves = [builder.insert(index, length) for index, length in enumerate(lengths)]
    return builder.layout(leaves, sum(lengths))


class _Builder:
    """A radix tree over (token, routes) rows."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self.routes = [np.ascontiguousarray(s.routes).reshape(len(s.token_ids), -1) for s in samples]
        self.root = Node(sample=0, start=0, stop=0)
        self.num_route_forks = 0

    def new_tokens(self, index: int, length: int) -> int:
        """How many tokens `insert` would add."""
        node, at = self.root, 0
        while at < length:
            child = node.children.get(self._key(index, at))
            if child is None:
                break
            same = self._common(child, index, at, length)
            at += same
            if child.start + same < child.stop:
                break
            node = child
        return length - at

    def insert(self, index: int, length: int) -> Node:
        """Walk down as far as the sample agrees, branch where it does not; returns the node of its last token."""
        node, at = self.root, 0
        while at < length:
            child = node.children.get(self._key(index, at))
            if child is None:
                token = self.samples[index].token_ids[at]
                others = (self.samples[c.sample].token_ids[c.start] for c in node.children.values())
                self.num_route_forks += any(token == other for other in others)
                child = Node(sample=index, start=at, stop=length, parent=node)
                node.children[self._key(index, at)] = child
                return child
            same = self._common(child, index, at, length)
            if child.start + same < child.stop:
                child = self._split(child, child.start + same)
            node, at = child, at + same
        return node

    def layout(self, leaves: Sequence[Node], num_unmerged: int) -> PrefixTree:
        """Number the tokens depth first."""
        order: list[Node] = []
        ends: dict[int, int] = {}
        total = 0
        stack: list[tuple[Node, bool]] = [(self.root, False)]
        while stack:
            node, left = stack.pop()
            if left:
                ends[id(node)] = total
                continue
            node.offset = total
            total += node.stop - node.start
            order.append(node)
            stack.append((node, True))
            stack.extend((child, False) for child in reversed(node.children.values()))
        shape_LK = self.samples[0].routes.shape[1:]
        pieces = [(node, slice(node.start, node.stop)) for node in order if node.stop > node.start]
        return PrefixTree(
            token_ids=np.concatenate([self.samples[n.sample].token_ids[part] for n, part in pieces]).astype(np.int32),
            position_ids=np.concatenate([np.arange(n.start, n.stop, dtype=np.int32) for n, _ in pieces]),
            visible_until=np.concatenate([np.full(n.stop - n.start, ends[id(n)], dtype=np.int32) for n, _ in pieces]),
            routes=np.concatenate([self.routes[n.sample][part] for n, part in pieces]).reshape(total, *shape_LK),
            index_of=[self._path(leaf) for leaf in leaves],
            num_unmerged=num_unmerged,
            num_route_forks=self.num_route_forks,
        )

    def _key(self, index: int, at: int) -> bytes:
        return (
            int(self.samples[index].token_ids[at]).to_bytes(8, "little", signed=True) + self.routes[index][at].tobytes()
        )

    def _common(self, node: Node, index: int, at: int, length: int) -> int:
        """How many tokens of the node the sample follows, at least one."""
        limit = min(node.stop - node.start, length - at)
        mine, theirs = slice(at, at + limit), slice(node.start, node.start + limit)
        equal = self.samples[index].token_ids[mine] == self.samples[node.sample].token_ids[theirs]
        same_routes = (self.routes[index][mine] == self.routes[node.sample][theirs]).all(axis=1)
        different = np.flatnonzero(~(equal & same_routes))
        return int(different[0]) if len(different) else limit

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two before token `at`; returns the upper half."""
        assert node.parent is not None
        upper = Node(sample=node.sample, start=node.start, stop=at, parent=node.parent)
        node.parent.children[self._key(node.sample, node.start)] = upper
        node.start, node.parent = at, upper
        upper.children[self._key(node.sample, at)] = node
        return upper

    @staticmethod
    def _path(leaf: Node) -> np.ndarray:
        parts = []
        node: Node | None = leaf
        while node is not None:
            parts.append(np.arange(node.offset, node.offset + node.stop - node.start))
            node = node.parent
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    """Merged tokens of one micro-batch as tensors on one device."""

    token_ids: torch.Tensor
    """int64 [B, T]."""
    position_ids: torch.Tensor
    """int64 [B, T]."""
    document_ids: torch.Tensor
    """int64 [B, T]: one id a tree, -1 at padding."""
    visible_until: torch.Tensor
    """int64 [B, T]: one past the last token of the row that sees this one."""
    routes: torch.Tensor
    """int64 [B, T, L, K], -1 where none."""
    predictors: torch.Tensor
    """int64 [N]: index into the flattened [B * T] of what predicts each trained token, in the order of the batch's
    loss mask."""
    num_unmerged: int
    """Tokens the samples would run one by one."""
    num_merged: int
    """Tokens that run."""
    num_route_forks: int


def row_sized(samples: Sequence[Sample], row_length: int) -> list[list[Sample]]:
    """The samples of one prompt, in order, cut into parts whose trees fit into a row, each as large as it can be.

    Choice: attention over a tree is dense, so one that outgrows its row costs more than running its prefix twice."""
    parts: list[list[Sample]] = []
    builder, used = _Builder(samples), 0
    for index, sample in enumerate(samples):
        added = builder.new_tokens(index, tokens_needed(sample))
        if not parts or used + added > row_length:
            parts.append([])
            builder, used = _Builder(samples), 0
            added = tokens_needed(sample)
        builder.insert(index, tokens_needed(sample))
        parts[-1].append(sample)
        used += added
    return parts


def pack_trees(
    samples: Sequence[Sample], *, row_length: int, rows_per_batch: int, device: torch.device | str = "cpu"
) -> list[tuple[Batch, TreeBatch]]:
    """Micro-batches that hold every sample once. Samples of different `group` or temperature never share a tree, and a
    tree is no longer than a row unless one sample is.

    The `Batch` carries the loss (its rows are not meant for the model), the `TreeBatch` the tokens to run: with logits
    [B, T, V] of the model on the latter, the log-probs of the former's trained tokens, in the order of its loss mask,
    are `target_logprobs(logits.flatten(0, 1)[tree.predictors], token_ids[loss_mask])`; `rl.train.trained_logprobs`
    does both. ValueError for a sample without a trained token, or that `check_samples` refuses."""
    check_samples(samples)
    by_prompt: dict[tuple[float, int], list[Sample]] = {}
    for sample in samples:
        by_prompt.setdefault((sample.temperature, sample.group), []).append(sample)
    packed = []
    for temperature in sorted({key[0] for key in by_prompt}):
        prompts = [group for key, group in by_prompt.items() if key[0] == temperature]
        members = [part for group in prompts for part in row_sized(group, row_length)]
        trees = [build_tree(group) for group in members]
        plan = plan_rows([len(tree.token_ids) for tree in trees], row_length=row_length, rows_per_batch=rows_per_batch)
        for rows in plan:
            order = [index for row in rows for index in row]
            batch = fill([[sample for index in order for sample in members[index]]])
            packed.append((batch, _collate(rows, trees, members, device)))
    return packed


def _collate(
    rows: Sequence[Sequence[int]],
    trees: Sequence[PrefixTree],
    members: Sequence[Sequence[Sample]],
    device: torch.device | str,
) -> TreeBatch:
    shape = (len(rows), max(sum(len(trees[index].token_ids) for index in row) for row in rows))
    shape_LK = trees[0].routes.shape[1:]
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    document_ids = np.full(shape, -1, np.int64)
    visible_until = np.tile(np.arange(1, shape[1] + 1), (shape[0], 1))
    routes = np.full((*shape, *shape_LK), NO_ROUTE, np.int64)
    predictors: list[np.ndarray] = []
    for b, row in enumerate(rows):
        start = 0
        for document, index in enumerate(row):
            tree = trees[index]
            part = slice(start, start + len(tree.token_ids))
            token_ids[b, part], position_ids[b, part] = tree.token_ids, tree.position_ids
            document_ids[b, part], routes[b, part] = document, tree.routes
            visible_until[b, part] = tree.visible_until + start
            for sample, where in zip(members[index], tree.index_of, strict=True):
                predictors.append(b * shape[1] + start + where[np.flatnonzero(sample.loss_mask) - 1])
            start = part.stop
    chosen = [trees[index] for row in rows for index in row]

    def tensor(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device)

    return TreeBatch(
        token_ids=tensor(token_ids),
        position_ids=tensor(position_ids),
        document_ids=tensor(document_ids),
        visible_until=tensor(visible_until),
        routes=tensor(routes),
        predictors=tensor(np.concatenate(predictors)),
        num_unmerged=sum(tree.num_unmerged for tree in chosen),
        num_merged=sum(len(tree.token_ids) for tree in chosen),
        num_route_forks=sum(tree.num_route_forks for tree in chosen),
    )
