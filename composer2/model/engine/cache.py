"""The memory of the engine: sessions and token ids come in, slots of latent KV cache come out.

One slot is one row of every layer's latent tensor [N, M, C], plus the experts each cached token was routed to. A
session keeps its slot between requests, so the next turn computes only what is new; slots can lend prefixes.

Source: report §6.2; rows I1 I2. The latent C = kv_lora_rank + qk_rope_head_dim is what MLA caches (row M1).
Choice: fixed slots instead of pages. Rows of one tensor need no gather while most slots are busy, and with contexts
bounded by `max_len` the memory lost to unused tails is small at the sizes this engine is meant for.
Choice: a prefix is lent only if it was computed by the weights of today (`base_version`). Positions are computed in
order, so the version at position 0 is the oldest of a slot, and one number tells all. A session itself may go on with
its own older cache when weights change under `keep`.

Shape letters: N slots, M positions of a slot, C latent, L MoE layers, K experts a token.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(kw_only=True, slots=True, eq=False)
class Slot:
    """One row of the cache and the session that holds it."""

    index: int
    session: str
    group: str
    token_ids: list[int] = field(default_factory=list)
    """Ids the session has seen; the first `num_cached` are in the cache."""
    num_cached: int = 0
    base_version: int = 0
    """Policy version that computed position 0, the oldest one in this slot."""
    last_used: int = 0
    is_busy: bool = False
    """A request is running on it."""


@dataclass(frozen=True, kw_only=True)
class PrefixCopy:
    """Give the first `length` positions of `source` to `target`."""

    source: Slot
    target: Slot
    length: int


class SlotCache:
    """`num_slots` slots of `max_len` positions."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_len: int,
        latent_dim: int,
        num_layers: int,
        num_moe_layers: int,
        num_experts_per_tok: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_slots < 1 or max_len < 1:
            raise ValueError(f"num_slots, max_len are {num_slots}, {max_len}, accepted is 1 or more for each")
        self.num_slots, self.max_len = num_slots, max_len
        # Zeros, not empty: masked positions have weight 0, and 0 * NaN would spoil the sum.
        self.latents_NMC = [
            torch.zeros(num_slots, max_len, latent_dim, dtype=dtype, device=device) for _ in range(num_layers)
        ]
        self.routes_NMLK = torch.full(
            (num_slots, max_len, num_moe_layers, num_experts_per_tok), -1, dtype=torch.int16, device=device
        )
        self._free = list(range(num_slots))
        self._slots: dict[str, Slot] = {}
        self._clock = 0
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def slots(self) -> list[Slot]:
        """Slots in use."""
        return list(self._slots.values())

    def get(self, session: str) -> Slot | None:
        return self._slots.get(session)

    def acquire(self, session: str, group: str) -> Slot | None:
        """The session's slot: its own, the lowest free one, or that of the idle session used longest ago; else None."""
        slot = self._slots.get(session)
        if slot is None:
            if not self._free and not self._evict():
                return None
            slot = Slot(index=heapq.heappop(self._free), session=session, group=group)
            self._slots[session] = slot
        assert not slot.is_busy, f"session {session!r} has a request already"
        slot.is_busy = True
        self.touch(slot)
        return slot

    def touch(self, slot: Slot) -> None:
        """Note that the slot was used now."""
        self._clock += 1
        slot.last_used = self._clock

    def release(self, session: str) -> None:
        """Free the session's slot, if it has one."""
        slot = self._slots.pop(session, None)
        if slot is not None:
            heapq.heappush(self._free, slot.index)

    def invalidate(self) -> None:
        """Forget what is cached (the weights changed), not who holds which slot."""
        for slot in self._slots.values():
            slot.num_cached = 0

    def keep_common_prefix(self, slot: Slot, token_ids: list[int]) -> None:
        """Point the slot at a new context. What agrees with it stays cached, its last token excluded."""
        limit = min(slot.num_cached, len(token_ids) - 1)
        slot.num_cached = common_prefix(slot.token_ids, token_ids, limit)
        slot.token_ids = token_ids

    def find_prefix(self, slot: Slot, version: int) -> PrefixCopy | None:
        """The longest prefix another slot of the group can lend under weights `version`, if longer than our own."""
        if slot.num_cached and slot.base_version != version:
            return None
        wanted, best, donor = len(slot.token_ids) - 1, slot.num_cached, None
        for other in self._slots.values():
            if other is slot or other.group != slot.group or other.base_version != version:
                continue
            length = common_prefix(other.token_ids, slot.token_ids, min(other.num_cached, wanted))
            if length > best:
                best, donor = length, other
                if best == wanted:
                    break
        return None if donor is None else PrefixCopy(source=donor, target=slot, length=best)

    def copy_prefixes(self, copies: Sequence[PrefixCopy]) -> None:
        """Carry out copies whose sources are none of their targets, all in one operation a layer."""
        if not copies:
            return
        # Positions beyond a copy's own length are copied too; they are rewritten before anything attends to them.
        longest = max(copy.length for copy in copies)
        device = self.routes_NMLK.device
        source_B = torch.tensor([copy.source.index for copy in copies], device=device)
        target_B = torch.tensor([copy.target.index for copy in copies], device=device)
        for rows in (*self.latents_NMC, self.routes_NMLK):
            rows[target_B, :longest] = rows[source_B, :longest]
        for copy in copies:
            copy.target.num_cached = copy.length
            copy.target.base_version = copy.source.base_version

    def _evict(self) -> bool:
        idle = [slot for slot in self._slots.values() if not slot.is_busy]
        if not idle:
            return False
        self.release(min(idle, key=lambda slot: slot.last_used).session)
        self.num_evictions += 1
        return True


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first `limit` ids agree."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
