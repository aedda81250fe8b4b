"""Who runs next: waiting sequences come in, pages are handed out, and prefill is planned in rounds.

Source: report §6.2; rows I1 (continuous batching) I2 (prefix shared by a group's samples and by turns of a rollout).
Every running sequence decodes a token or more a step. Before that its context, except for the last token, must be in
the cache. One round of prefill first takes over prefixes that other sessions of the group can lend, then computes the
rest; a sequence that would compute what a group mate computes in this very round waits for the next round and takes it
over. So eight identical prompts that arrive together are computed once.

Choice: only the last token of a context is left to decode, so prefill needs no logits and sampling has one path.
Choice: when pages run out in the middle of generations, the newest request gives its pages back and waits with what it
has sampled; later its cache is computed again. The oldest one always gets on, so all of them end.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from composer2.model.engine.cache import PagedCache, PrefixCopy
from composer2.model.engine.sequence import Sequence

MIN_TOKENS_WORTH_WAITING = 16
"""A sequence waits one more round for a group mate only if that saves this many tokens."""


@dataclass(frozen=True, kw_only=True)
class PrefillRound:
    """Copies to do first, then batches of sequences whose missing tokens are to be computed."""

    copies: tuple[PrefixCopy, ...]
    batches: tuple[tuple[Sequence, ...], ...]


class Scheduler:
    """Keeps the waiting line and the running set over one cache."""

    def __init__(self, cache: PagedCache, *, max_running: int, max_len: int, max_prefill_tokens: int) -> None:
        self.cache = cache
        self.max_running, self.max_len, self.max_prefill_tokens = max_running, max_len, max_prefill_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Sorted by length: what decodes side by side is equally long (attention.py)."""
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Put a sequence at the end of the line."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a finished or cancelled sequence out; its session keeps the slot."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        sequence.slot.is_busy = False
        self.cache.touch(sequence.slot)

    def schedule(self, version: int) -> list[Sequence]:
        """Pages for this step's positions: first for who runs, oldest request first, then for the waiting line.

        Returns the sequences admitted."""
        for sequence in sorted(self.running, key=_age):
            while sequence.slot is not None and not self._reserve(sequence):
                self._preempt(max(self.running, key=_age))
        admitted = self._admit(version)
        self.running.sort(key=_length)
        return admitted

    def _reserve(self, sequence: Sequence) -> bool:
        # One position a token; with a draft one more is written.
        num_positions = min(len(sequence.token_ids) + self.cache.lookahead, self.max_len)
        return self.cache.reserve(sequence.place, num_positions)

    def _preempt(self, sequence: Sequence) -> None:
        assert len(self.running) > 1, "one context always fits"
        self.running.remove(sequence)
        self.cache.release(sequence.request.session)
        sequence.slot = sequence.draft = None
        self.waiting.append(sequence)
        self.waiting.sort(key=_age)
        self.num_preemptions += 1

    def _admit(self, version: int) -> list[Sequence]:
        """First come first served, but those whose session holds a slot go first."""
        admitted: list[Sequence] = []
        if not self.waiting:
            return admitted
        owners = [sequence for sequence in self.waiting if self.cache.get(sequence.request.session) is not None]
        others = [sequence for sequence in self.waiting if self.cache.get(sequence.request.session) is None]
        for sequence in owners + others:
            if len(self.running) + len(admitted) >= self.max_running or not self._start(sequence, version):
                break
            admitted.append(sequence)
        self.waiting = [sequence for sequence in self.waiting if sequence.slot is None]
        self.running += admitted
        return admitted

    def _start(self, sequence: Sequence, version: int) -> bool:
        """Give the sequence a slot and pages for its context; False when there are too few."""
        request = sequence.request
        is_new = self.cache.get(request.session) is None
        slot = sequence.slot = self.cache.open(request.session, request.group)
        self.cache.start_over(slot, sequence.token_ids)
        if len(sequence.token_ids) > self.cache.page_size:
            lent = self.cache.find_prefix(slot, version)
            if lent is not None:
                self.cache.share_pages(lent)
        if self._reserve(sequence):
            return True
        sequence.slot, slot.is_busy = None, False
        if is_new:
            self.cache.release(request.session)
        return False

    def next_round(self, version: int) -> PrefillRound | None:
        """Plan one round under weights `version`; None when every running sequence is ready to decode."""
        copies: list[PrefixCopy] = []
        compute: list[Sequence] = []
        leaders: dict[str, list[Sequence]] = defaultdict(list)
        missing: dict[Sequence, int] = {}
        behind = [sequence for sequence in self.running if sequence.num_uncached > 0]
        if not behind:
            return None
        for sequence in behind:
            slot = sequence.place
            if slot.num_cached == 0:
                slot.base_version = version
            copy = self.cache.find_prefix(slot, version)
            have = slot.num_cached if copy is None else copy.length
            wanted = len(sequence.token_ids) - 1
            mates = leaders[slot.group] if slot.base_version == version else []
            soon = max(
                (self.cache.reusable(mate.token_ids, sequence.token_ids, len(mate.token_ids) - 1) for mate in mates),
                default=0,
            )
            if soon >= have + min(MIN_TOKENS_WORTH_WAITING, max(1, wanted - have)):
                continue
            if copy is not None:
                copies.append(copy)
            if have < wanted:
                missing[sequence] = wanted - have
                compute.append(sequence)
                leaders[slot.group].append(sequence)
        return PrefillRound(copies=tuple(copies), batches=self._batches(compute, missing))

    def _batches(self, compute: list[Sequence], missing: dict[Sequence, int]) -> tuple[tuple[Sequence, ...], ...]:
        """Sequences of similar length together: no batch is more than half padding."""
        batches: list[list[Sequence]] = []
        longest = 0
        for sequence in sorted(compute, key=lambda sequence: -missing[sequence]):
            length = missing[sequence]
            full = batches and (len(batches[-1]) + 1) * longest > self.max_prefill_tokens
            if not batches or full or 2 * length < longest:
                batches.append([])
                longest = length
            batches[-1].append(sequence)
        return tuple(tuple(batch) for batch in batches)


def _age(sequence: Sequence) -> int:
    return sequence.request_id


def _length(sequence: Sequence) -> tuple[int, int]:
    return len(sequence.token_ids), sequence.request_id
