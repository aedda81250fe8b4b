"""One context window of an episode: the exact tokens the model sees, and what each stretch of them is.

In: stretches of tokens, in order, some of them sampled. Out: a `Segment` to train on; or, for a harness that cuts
instead of summing up, the window that follows a full one.

Source: report §4.1 (chains of generations); rows R3 A3.
Choice: the routes of a window are those its newest generation reported. An engine that recomputes its cache after a
weight update routes old tokens anew, and the tokens sampled after that saw the new routes.
Choice: a cut drops whole turns with their answers, the oldest first and as few as possible. Turns that are kept stand
in the new window as part of its prompt: each sampled token is trained once, in the window it was sampled in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from composer2.types import Generation, Segment, Span, SpanKind


@dataclass
class Window:
    """One context window while it grows."""

    token_ids: list[int] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    generations: list[tuple[int, Generation]] = field(default_factory=list)
    """Start of the sampled tokens, and what was sampled."""
    turn_starts: list[int] = field(default_factory=list)
    """First token of every turn, those kept from an earlier window included."""

    def append(self, kind: SpanKind, token_ids: Sequence[int]) -> None:
        """Add tokens that were not sampled here."""
        start = len(self.token_ids)
        self.token_ids.extend(map(int, token_ids))
        if token_ids:
            self.spans.append(Span(kind=kind, start=start, stop=len(self.token_ids)))

    def append_sampled(self, kind: SpanKind, generation: Generation) -> list[int]:
        """Add what the sampler drew; returns its token ids."""
        self.generations.append((len(self.token_ids), generation))
        ids: list[int] = np.asarray(generation.token_ids).tolist()
        if kind is SpanKind.ACTION:
            self.turn_starts.append(len(self.token_ids))
        self.append(kind, ids)
        return ids

    def without_oldest(self, prompt: Sequence[int], budget: int) -> Window:
        """The next window of a harness that cuts: `prompt`, then the newest turns of this one, at least one fewer,
        that together leave at most `budget` tokens. No turn at all where none fits."""
        length = len(self.token_ids)
        starts = [*self.turn_starts[1:], length]
        first = next((start for start in starts if len(prompt) + length - start <= budget), length)
        window = Window()
        window.append(SpanKind.PROMPT, [*prompt, *self.token_ids[first:]])
        window.turn_starts = [start - first + len(prompt) for start in self.turn_starts if start >= first]
        return window

    def segment(self) -> Segment:
        """The record to train on. Needs at least one generation, since only that says how many layers route.

        ValueError when the newest generation reports routes for another number of tokens than it saw."""
        length = len(self.token_ids)
        sampled = np.zeros(length, dtype=bool)
        logprobs = np.zeros(length, dtype=np.float32)
        versions = np.full(length, -1, dtype=np.int32)
        for start, generation in self.generations:
            rows = slice(start, start + len(generation.token_ids))
            sampled[rows] = True
            logprobs[rows] = generation.logprobs
            versions[rows] = generation.policy_versions
        start, generation = self.generations[-1]
        newest, seen = np.asarray(generation.routes, dtype=np.int16), start + len(generation.token_ids)
        if len(newest) != seen:
            raise ValueError(f"Generation.routes has {len(newest)} rows, accepted is one for each of {seen} tokens")
        routes = np.full((length, *newest.shape[1:]), -1, dtype=np.int16)
        routes[: len(newest)] = newest
        return Segment(
            token_ids=np.array(self.token_ids, dtype=np.int32),
            sampled=sampled,
            logprobs=logprobs,
            policy_versions=versions,
            routes=routes,
            spans=tuple(self.spans),
        )
