"""The memory of the engine: sessions and token ids come in, pages of KV cache come out, shared where prefixes agree.

    slot of a session = its token ids + its page table;   position t lies in page table[t // M] at offset t % M

One tensor [P, M, C] a layer holds all pages, and one more the experts each cached token was routed to. A session keeps
its slot between requests, so the next turn computes only what is new. What two slots of a group agree on is lent: full
pages are shared by counting references, the rest of a prefix is copied into a page of the borrower's own. A shared page
is full, and a full page is only written by a slot that starts over, which leaves shared pages to the others.

Source: report §6.2; rows I1 I2. C is what the model's attention caches: the latent for MLA (row M1), keys and values
for GQA (row M3).
Choice: the default page size is one page a context window: its read part is one piece of memory. Small pages waste no
memory on short contexts and share whole prefixes instead of copying them.
Choice: a prefix is lent only if it was computed by the weights of today (`base_version`). Positions are computed in
order, so the version at position 0 is the oldest of a slot, and one number tells all. A session itself may go on with
its own older cache when weights change under `keep`.
Choice: idle slots are the prefix cache. When pages run out, the one used longest ago goes first.

Shape letters: P pages, M positions of a page, C cache width, L MoE layers, K experts a token, B batch.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch


@dataclass(kw_only=True, slots=True, eq=False)
class Slot:
    """What one session has in the cache."""

    session: str
    group: str
    pages: list[int] = field(default_factory=list)
    """The page table."""
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


class PagedCache:
    """`num_pages` pages of `page_size` positions."""

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        layer_widths: Sequence[int],
        num_moe_layers: int,
        num_experts_per_tok: int,
        dtype: torch.dtype,
        device: torch.device,
        lookahead: int = 0,
    ) -> None:
        """`layer_widths` has the C of every layer. With `lookahead` n, what is cached of position t may depend on
        tokens up to t + n (the layer of an MTP module); so much less of a common prefix is reused."""
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"num_pages, page_size are {num_pages}, {page_size}, accepted is 1 or more for each")
        self.num_pages, self.page_size, self.lookahead = num_pages, page_size, lookahead
        # Zeros, not empty: masked positions have weight 0, and 0 * NaN would spoil the sum.
        self.layers_PMC = [
            torch.zeros(num_pages, page_size, width, dtype=dtype, device=device) for width in layer_widths
        ]
        self.routes_PMLK = torch.full(
            (num_pages, page_size, num_moe_layers, num_experts_per_tok), -1, dtype=torch.int16, device=device
        )
        self._free = list(range(num_pages))
        self._num_holders = [0] * num_pages
        self._slots: dict[str, Slot] = {}
        self._clock = 0
        self.num_evictions = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def slots(self) -> list[Slot]:
        """Slots in use, idle ones included."""
        return list(self._slots.values())

    def get(self, session: str) -> Slot | None:
        return self._slots.get(session)

    def num_holders(self, page: int) -> int:
        """How many slots have this page in their table."""
        return self._num_holders[page]

    # -----------------------------------------------------------------------------------------------------------------
    # Slots and pages

    def open(self, session: str, group: str) -> Slot:
        """The session's slot, or a new one without pages; it is busy from now on."""
        slot = self._slots.get(session)
        if slot is None:
            slot = self._slots[session] = Slot(session=session, group=group)
        assert not slot.is_busy, f"session {session!r} has a request already"
        slot.is_busy = True
        self.touch(slot)
        return slot

    def touch(self, slot: Slot) -> None:
        """Note that the slot was used now."""
        self._clock += 1
        slot.last_used = self._clock

    def reserve(self, slot: Slot, num_positions: int) -> bool:
        """Pages for that many positions, lowest first, idle slots evicted as needed; False, and nothing done, when even
        that does not free enough."""
        missing = -(-num_positions // self.page_size) - len(slot.pages)
        if missing > len(self._free):
            if missing > len(self._free) + self._num_evictable():
                return False
            while missing > len(self._free):
                self._evict()
        for _ in range(missing):
            page = heapq.heappop(self._free)
            self._num_holders[page] = 1
            slot.pages.append(page)
        return True

    def release(self, session: str) -> None:
        """Forget a session and let go of its pages; an unknown one is ignored."""
        slot = self._slots.pop(session, None)
        if slot is not None:
            self._let_go(slot, 0)

    def truncate(self, slot: Slot, length: int) -> None:
        """Keep at most the first `length` positions, and let go of shared pages that would be written again.

        A page that others share is not cut: its part of the prefix is then computed again."""
        length = min(length, slot.num_cached)
        full, rest = divmod(length, self.page_size)
        if rest and self._num_holders[slot.pages[full]] > 1:
            length, rest = full * self.page_size, 0
        keep = full + (rest > 0)
        slot.num_cached = length
        if any(self._num_holders[page] > 1 for page in slot.pages[keep:]):
            self._let_go(slot, keep)

    def invalidate(self) -> None:
        """The weights changed: nothing cached is of use. Busy slots start over, idle ones are forgotten."""
        for slot in self.slots:
            if slot.is_busy:
                self.truncate(slot, 0)
            else:
                self.release(slot.session)

    def _let_go(self, slot: Slot, keep: int) -> None:
        for page in slot.pages[keep:]:
            self._num_holders[page] -= 1
            if self._num_holders[page] == 0:
                heapq.heappush(self._free, page)
        del slot.pages[keep:]

    def _num_evictable(self) -> int:
        """Pages that only idle slots hold."""
        idle = Counter(page for slot in self._slots.values() if not slot.is_busy for page in slot.pages)
        return sum(self._num_holders[page] == count for page, count in idle.items())

    def _evict(self) -> None:
        idle = [slot for slot in self._slots.values() if not slot.is_busy]
        self.release(min(idle, key=lambda slot: slot.last_used).session)
        self.num_evictions += 1

    # -----------------------------------------------------------------------------------------------------------------
    # Prefixes

    def reusable(self, cached: Sequence[int], wanted: Sequence[int], num_cached: int) -> int:
        """How many positions of a cache over the tokens `cached` serve a context `wanted`, whose last token is never
        taken from a cache."""
        limit = min(num_cached + self.lookahead, len(wanted) - 1)
        return max(0, common_prefix(cached, wanted, limit) - self.lookahead)

    def start_over(self, slot: Slot, token_ids: list[int]) -> None:
        """Point the slot at a new context. What agrees with it stays cached."""
        self.truncate(slot, self.reusable(slot.token_ids, token_ids, slot.num_cached))
        slot.token_ids = token_ids

    def find_prefix(self, slot: Slot, version: int) -> PrefixCopy | None:
        """The longest prefix another slot of the group can lend under weights `version`, if longer than our own."""
        if slot.num_cached and slot.base_version != version:
            return None
        best, donor = slot.num_cached, None
        for other in self._slots.values():
            if other is slot or other.group != slot.group or other.base_version != version:
                continue
            length = self.reusable(other.token_ids, slot.token_ids, other.num_cached)
            if length > best:
                best, donor = length, other
                if best == len(slot.token_ids) - 1 - self.lookahead:
                    break
        return None if donor is None else PrefixCopy(source=donor, target=slot, length=best)

    def share_pages(self, copy: PrefixCopy) -> None:
        """Put the full pages of the prefix into the target's table, in place of its own."""
        source, target = copy.source, copy.target
        for place in range(copy.length // self.page_size):
            page = source.pages[place]
            if place < len(target.pages):
                own = target.pages[place]
                if own == page:
                    continue
                target.pages[place] = page
                self._num_holders[own] -= 1
                if self._num_holders[own] == 0:
                    heapq.heappush(self._free, own)
            else:
                target.pages.append(page)
            self._num_holders[page] += 1
        target.num_cached = max(target.num_cached, copy.length // self.page_size * self.page_size)
        target.base_version = source.base_version

    def copy_prefixes(self, copies: Sequence[PrefixCopy]) -> None:
        """Carry out copies into slots that have pages reserved: share what is full, copy the rest in one operation a
        layer. What a target has cached itself may be lent on by another copy of the same call."""
        tails: list[tuple[int, int, int]] = []
        for copy in copies:
            self.share_pages(copy)
            full, rest = divmod(copy.length, self.page_size)
            if rest:
                tails.append((copy.source.pages[full], copy.target.pages[full], rest))
            copy.target.num_cached = copy.length
        if not tails:
            return
        # Positions beyond a copy's own length are copied too; they are rewritten before anything attends to them.
        sources, targets, lengths = zip(*tails, strict=True)
        source_B = torch.tensor(sources, device=self.routes_PMLK.device)
        target_B = torch.tensor(targets, device=self.routes_PMLK.device)
        longest = max(lengths)
        for rows in (*self.layers_PMC, self.routes_PMLK):
            rows[target_B, :longest] = rows[source_B, :longest]

    # -----------------------------------------------------------------------------------------------------------------
    # Batches

    def tables(self, batch: Sequence[Slot]) -> torch.Tensor:
        """int64 [B, X]: page tables, short ones filled up with page 0; [B] when all have one page."""
        longest = max(len(slot.pages) for slot in batch)
        table_BX = np.zeros((len(batch), longest), dtype=np.int64)
        for row, slot in enumerate(batch):
            table_BX[row, : len(slot.pages)] = slot.pages
        return torch.from_numpy(table_BX[:, 0] if longest == 1 else table_BX).to(self.routes_PMLK.device)

    def write_routes(self, batch: Sequence[Slot], position_ids_BS: np.ndarray, routes_BSLK: torch.Tensor) -> None:
        """Note the experts of new tokens; position -1 is padding."""
        rows_W, columns_W = np.nonzero(position_ids_BS >= 0)
        positions_W = position_ids_BS[rows_W, columns_W]
        places = zip(rows_W.tolist(), (positions_W // self.page_size).tolist(), strict=True)
        pages_W = np.array([batch[row].pages[place] for row, place in places])
        fresh_WLK, device = routes_BSLK.flatten(0, 1), self.routes_PMLK.device
        if len(rows_W) < len(fresh_WLK):
            fresh_WLK = fresh_WLK[torch.from_numpy(rows_W * position_ids_BS.shape[1] + columns_W).to(device)]
        index = (torch.from_numpy(pages_W).to(device), torch.from_numpy(positions_W % self.page_size).to(device))
        self.routes_PMLK[index] = fresh_WLK

    def read_routes(self, slot: Slot) -> np.ndarray:
        """int16 [num_cached, L, K]."""
        pages = torch.tensor(slot.pages, dtype=torch.int64, device=self.routes_PMLK.device)
        return self.routes_PMLK[pages].flatten(0, 1)[: slot.num_cached].cpu().numpy()


def common_prefix(a: Sequence[int], b: Sequence[int], limit: int) -> int:
    """How many of the first `limit` ids agree."""
    limit = min(limit, len(a), len(b))
    if a[:limit] == b[:limit]:
        return limit
    return next(i for i in range(limit) if a[i] != b[i])
