"""The engine: requests come in through `submit`, every `step` moves all of them one token on, finished ones come out.

    step = admit waiting requests to slots -> prefill what their caches lack -> one decode of everything that runs

Source: report §6.2; rows I1 I2 A3 (new weights in the middle of generations; each token carries the version that
produced it; caches kept or recomputed).
Choice: the engine is synchronous and has no thread; between two steps anything may happen to it (new requests,
cancellations, new weights), within a step nothing. `service.py` drives it on asyncio.
Choice: it owns a copy of the model in its own dtype, so training may change its weights at any time.

Shape letters: B sequences in a batch, S new tokens a sequence, T context, N sampled tokens, D model, L MoE layers,
K experts a token, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from composer2.model.engine.cache import Slot, SlotCache
from composer2.model.engine.sampler import sample, uniforms
from composer2.model.engine.scheduler import Scheduler
from composer2.model.engine.sequence import Finished, Request, Sequence
from composer2.model.transformer import Transformer
from composer2.types import Generation

CONTIGUOUS_FRAC = 0.75
"""At least this share of a stretch of slots must run for the batch to be that stretch, instead of gathered rows."""


@dataclass(kw_only=True)
class EngineStats:
    """Counts since the engine was made."""

    prefill_tokens: int = 0
    """Context tokens computed."""
    copied_tokens: int = 0
    """Context tokens whose cache another session lent."""
    reused_tokens: int = 0
    """Context tokens already in the session's own cache at admission."""
    decode_steps: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    weight_updates: int = 0


class Engine:
    """Continuous batching over a slot cache."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int,
        max_len: int,
        policy_version: int = 0,
        dtype: torch.dtype = torch.float32,
        max_prefill_tokens: int = 2048,
    ) -> None:
        """Copy `model` in `dtype`, where its weights are. `max_len` bounds a context with what is sampled after it;
        `max_prefill_tokens` bounds one prefill batch, padding included."""
        config = model.config
        if not 1 <= max_len <= config.max_position_embeddings:
            raise ValueError(
                f"max_len is {max_len}, accepted is 1 .. max_position_embeddings {config.max_position_embeddings}"
            )
        if max_prefill_tokens < 1:
            raise ValueError(f"max_prefill_tokens is {max_prefill_tokens}, accepted is 1 or more")
        self.config, self.max_len, self.policy_version = config, max_len, policy_version
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        for layer in self.model.moe_layers():
            layer.gate.to(torch.promote_types(dtype, torch.float32))  # a rounded router would choose other experts
        self.device = next(self.model.parameters()).device
        self.cache = SlotCache(
            num_slots=num_slots,
            max_len=max_len,
            latent_dim=config.cache_dim,
            num_layers=config.num_hidden_layers,
            num_moe_layers=config.num_moe_layers,
            num_experts_per_tok=config.num_experts_per_tok,
            dtype=dtype,
            device=self.device,
        )
        self.scheduler = Scheduler(self.cache, max_prefill_tokens=max_prefill_tokens)
        self.stats = EngineStats()
        self._sequences: dict[int, Sequence] = {}
        self._request_ids: dict[str, int] = {}
        self._cancelled: list[Finished] = []
        self._next_id = 0

    # -----------------------------------------------------------------------------------------------------------------
    # Requests

    @property
    def num_waiting(self) -> int:
        return len(self.scheduler.waiting)

    @property
    def num_running(self) -> int:
        return len(self.scheduler.running)

    @property
    def has_work(self) -> bool:
        """True when `step` would do something."""
        return bool(self._sequences or self._cancelled)

    def check(self, request: Request) -> None:
        """ValueError if the context does not fit or holds ids outside of the vocabulary."""
        if len(request.token_ids) > self.max_len:
            raise ValueError(f"context has {len(request.token_ids)} tokens, accepted is at most max_len {self.max_len}")
        low, high = min(request.token_ids), max(request.token_ids)
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(f"token ids span {low} .. {high}, accepted is 0 .. {self.config.vocab_size - 1}")

    def submit(self, request: Request) -> int:
        """Queue a request; returns the id that its `Finished` will carry."""
        self.check(request)
        if request.session in self._request_ids:
            raise ValueError(f"session {request.session!r} has a request already, accepted is one at a time")
        sequence = Sequence.of(self._next_id, request)
        self._next_id += 1
        self._sequences[sequence.request_id] = sequence
        self._request_ids[request.session] = sequence.request_id
        self.scheduler.add(sequence)
        return sequence.request_id

    def cancel(self, request_id: int) -> None:
        """End a request early; the next `step` returns it as `cancelled`. Unknown or finished ids are ignored."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            self._cancelled.append(self._finish(sequence, "cancelled"))

    def release(self, session: str) -> None:
        """Free the session's slot, cancelling its request if one is in progress. Unknown sessions are ignored."""
        if session in self._request_ids:
            self.cancel(self._request_ids[session])
        self.cache.release(session)

    # -----------------------------------------------------------------------------------------------------------------
    # Weights

    @torch.inference_mode()
    def load_weights(
        self, state: Mapping[str, Tensor], version: int, cache: Literal["keep", "recompute"] = "keep"
    ) -> None:
        """Take new weights between two steps; generations in progress go on with them.

        `keep`: sessions go on with the cache they have, but lend it to nobody. `recompute`: every cache and its routes
        are computed again with the new weights.
        """
        if cache not in ("keep", "recompute"):
            raise ValueError(f"cache is {cache!r}, accepted is 'keep' or 'recompute'")
        if version < self.policy_version:
            raise ValueError(f"version is {version}, accepted is the current {self.policy_version} or later")
        own = self.model.state_dict()
        if own.keys() != state.keys():
            missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
            raise ValueError(f"state lacks {missing} and has {extra} too many, accepted are the model's names")
        for name, tensor in state.items():
            if own[name].shape != tensor.shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, accepted is {tuple(own[name].shape)}")
        for name, tensor in state.items():
            own[name].copy_(tensor)
        self.policy_version = version
        self.stats.weight_updates += 1
        if cache == "recompute":
            self.cache.invalidate()

    # -----------------------------------------------------------------------------------------------------------------
    # One step

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Sample one token for every running request; returns those that ended, in order of submission."""
        finished, self._cancelled = self._cancelled, []
        admitted = self.scheduler.admit()
        self.stats.reused_tokens += sum(_slot(sequence).num_cached for sequence in admitted)
        self._prefill()
        if admitted:
            finished += self._finish_ended()  # contexts that leave no room for a token
        if self.scheduler.running:
            self._decode(self.scheduler.running)
            finished += self._finish_ended()
        return finished

    def _finish_ended(self) -> list[Finished]:
        ended = [(s, reason) for s in self.scheduler.running if (reason := s.finish_reason(self.max_len)) is not None]
        ended.sort(key=lambda pair: pair[0].request_id)
        return [self._finish(sequence, reason) for sequence, reason in ended]

    def _prefill(self) -> None:
        while (round_ := self.scheduler.next_round(self.policy_version)) is not None:
            self.stats.copied_tokens += sum(copy.length - copy.target.num_cached for copy in round_.copies)
            self.cache.copy_prefixes(round_.copies)
            for batch in round_.batches:
                self._prefill_batch(batch)

    def _prefill_batch(self, batch: Iterable[Sequence]) -> None:
        """Compute all but the last token of each context, in chunks of at most `max_prefill_tokens` with padding."""
        while batch := [sequence for sequence in batch if sequence.num_uncached > 0]:
            chunk = max(1, self.scheduler.max_prefill_tokens // len(batch))
            counts = [min(sequence.num_uncached, chunk) for sequence in batch]
            token_ids_BS = np.zeros((len(batch), max(counts)), dtype=np.int64)
            position_ids_BS = np.full_like(token_ids_BS, -1)
            slots = [_slot(sequence) for sequence in batch]
            for row, (sequence, slot, count) in enumerate(zip(batch, slots, counts, strict=True)):
                start = slot.num_cached
                token_ids_BS[row, :count] = sequence.token_ids[start : start + count]
                position_ids_BS[row, :count] = np.arange(start, start + count)
            index_B = torch.tensor([slot.index for slot in slots], device=self.device)
            out = self.model.forward_cached(
                self._tensor(token_ids_BS),
                self._tensor(position_ids_BS),
                cache=self.cache.latents_NMC,
                slot_ids_B=index_B,
                context_len=int(position_ids_BS.max()) + 1,
            )
            rows, columns = np.nonzero(position_ids_BS >= 0)
            row_W, column_W = self._tensor(rows), self._tensor(columns)
            position_W = self._tensor(position_ids_BS[rows, columns])
            self.cache.routes_NMLK[index_B[row_W], position_W] = out.routes_BSLK[row_W, column_W]
            for slot, count in zip(slots, counts, strict=True):
                slot.num_cached += count
            self.stats.prefill_tokens += sum(counts)

    def _decode(self, batch: list[Sequence]) -> None:
        """Feed the last token of every sequence and sample the next one."""
        slot_ids = np.array([_slot(sequence).index for sequence in batch])
        positions = np.array([len(sequence.token_ids) - 1 for sequence in batch])
        first, stop = int(slot_ids[0]), int(slot_ids[-1]) + 1
        rows: Tensor | None = None
        slots: Tensor | slice = self._tensor(slot_ids)
        token_ids_BS, position_ids_BS = np.array([sequence.token_ids[-1] for sequence in batch]), positions
        if len(batch) >= CONTIGUOUS_FRAC * (stop - first):
            slots = slice(first, stop)
            if len(batch) < stop - first:  # idle slots in between take part as padding
                rows = self._tensor(slot_ids - first)
                wide_ids, wide_positions = np.zeros(stop - first, np.int64), np.full(stop - first, -1)
                wide_ids[slot_ids - first], wide_positions[slot_ids - first] = token_ids_BS, positions
                token_ids_BS, position_ids_BS = wide_ids, wide_positions
        out = self.model.forward_cached(
            self._tensor(token_ids_BS)[:, None],
            self._tensor(position_ids_BS)[:, None],
            cache=self.cache.latents_NMC,
            slot_ids_B=slots,
            context_len=int(positions.max()) + 1,
        )
        hidden_BD, routes_BLK = out.hidden_BSD[:, 0], out.routes_BSLK[:, 0]
        if rows is not None:
            hidden_BD, routes_BLK = hidden_BD[rows], routes_BLK[rows]
        self.cache.routes_NMLK[self._tensor(slot_ids), self._tensor(positions)] = routes_BLK
        self._sample(batch, self.model.lm_head(hidden_BD))

    def _sample(self, batch: list[Sequence], logits_BV: Tensor) -> None:
        params = [sequence.request.params for sequence in batch]
        # A token's number in the stream is its position, so a session may use one seed for all of its turns.
        uniform_B = uniforms(
            [sequence.request.seed for sequence in batch], [len(sequence.token_ids) for sequence in batch]
        )
        tokens_B, logprobs_B = sample(
            logits_BV,
            temperature_B=self._tensor(np.array([p.temperature for p in params], dtype=np.float64)),
            top_p_B=self._tensor(np.array([p.top_p for p in params], dtype=np.float64)),
            top_k_B=self._tensor(np.array([p.top_k for p in params], dtype=np.int64)),
            uniform_B=self._tensor(uniform_B),
        )
        version = self.policy_version
        for sequence, token_id, logprob in zip(batch, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            _slot(sequence).num_cached += 1
            sequence.append(token_id, logprob, version)
        self.stats.decode_steps += 1
        self.stats.generated_tokens += len(batch)

    def _finish(self, sequence: Sequence, reason: str) -> Finished:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id], self._request_ids[sequence.request.session]
        self.stats.finished_requests += 1
        shape = (len(sequence.token_ids), self.config.num_moe_layers, self.config.num_experts_per_tok)
        routes_TLK = np.full(shape, -1, dtype=np.int16)
        if sequence.slot is not None:
            cached = sequence.slot.num_cached
            routes_TLK[:cached] = self.cache.routes_NMLK[sequence.slot.index, :cached].cpu().numpy()
        generation = Generation(
            token_ids=np.array(sequence.token_ids[sequence.num_prompt :], dtype=np.int32),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            policy_versions=np.array(sequence.policy_versions, dtype=np.int32),
            routes=routes_TLK,
            finish_reason=reason,
        )
        return Finished(request_id=sequence.request_id, session=sequence.request.session, generation=generation)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def _slot(sequence: Sequence) -> Slot:
    assert sequence.slot is not None
    return sequence.slot
