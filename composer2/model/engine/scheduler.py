"""Who runs next: waiting sequences come in, slots are handed out, and prefill is planned in rounds.

Source: report §6.2; rows I1 (continuous batching) I2 (prefix shared by a group's samples and by turns of a rollout).
Every running sequence decodes one token a step. Before that its context, except for the last token, must be in the
cache. One round of prefill first copies prefixes that other sessions of the group can lend, then computes the rest;
a sequence that would compute what a group mate computes in this very round waits for the next round and copies. So
eight identical prompts that arrive together are computed once.

Choice: only the last token of a context is left to decode, so prefill needs no logits and sampling has one path.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from composer2.model.engine.cache import PrefixCopy, SlotCache, common_prefix
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

    def __init__(self, cache: SlotCache, *, max_prefill_tokens: int) -> None:
        self.cache = cache
        self.max_prefill_tokens = max_prefill_tokens
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        """Sorted by slot."""

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

    def admit(self) -> list[Sequence]:
        """Give slots to waiting sequences, first come first served; those whose session holds a slot go first."""
        if not self.waiting:
            return []
        admitted: list[Sequence] = []
        owners = [sequence for sequence in self.waiting if self.cache.get(sequence.request.session) is not None]
        others = [sequence for sequence in self.waiting if self.cache.get(sequence.request.session) is None]
        for sequence in owners + others:
            request = sequence.request
            slot = self.cache.acquire(request.session, request.group)
            if slot is None:
                break
            self.cache.keep_common_prefix(slot, sequence.token_ids)
            sequence.slot = slot
            admitted.append(sequence)
        self.waiting = [sequence for sequence in self.waiting if sequence.slot is None]
        self.running = sorted(self.running + admitted, key=_slot_index)
        return admitted

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
            slot = sequence.slot
            assert slot is not None
            if slot.num_cached == 0:
                slot.base_version = version
            copy = self.cache.find_prefix(slot, version)
            have = slot.num_cached if copy is None else copy.length
            wanted = len(sequence.token_ids) - 1
            mates = leaders[slot.group] if slot.base_version == version else []
            soon = max((common_prefix(mate.token_ids[:-1], sequence.token_ids, wanted) for mate in mates), default=0)
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


def _slot_index(sequence: Sequence) -> int:
    assert sequence.slot is not None
    return sequence.slot.index
