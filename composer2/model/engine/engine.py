"""The engine: requests come in through `submit`, every `step` moves all of them one token on, finished ones come out.

    step = pages for everyone -> prefill what the caches lack -> one decode of everything that runs (with a draft, two)

Source: report §6.2; rows I1 I2 I5 A3 (new weights in the middle of generations; each token carries the version that
produced it; caches kept or recomputed).
Choice: the engine is synchronous and has no thread; between two steps anything may happen to it (new requests,
cancellations, new weights), within a step nothing. `service.py` drives it on asyncio.
Choice: it owns a copy of the model in its own dtype, so training may change its weights at any time.

Shape letters: B sequences in a batch, S new tokens a sequence, T context, N sampled tokens, W written tokens, D model,
X pages of a table, L MoE layers, K experts a token, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from composer2.model.engine.cache import PagedCache
from composer2.model.engine.sampler import Distribution, distribution, invert, measure, sample, uniforms
from composer2.model.engine.scheduler import Scheduler
from composer2.model.engine.sequence import Draft, EngineStats, Finished, Request, Sequence
from composer2.model.engine.speculative import CHECK, DRAFT, DRAW, probabilities, verify
from composer2.model.moe import Router
from composer2.model.transformer import Transformer
from composer2.types import Generation


class Engine:
    """Continuous batching over a paged cache."""

    def __init__(
        self,
        model: Transformer,
        *,
        num_slots: int,
        max_len: int,
        policy_version: int = 0,
        dtype: torch.dtype = torch.float32,
        max_prefill_tokens: int = 2048,
        page_size: int | None = None,
        num_pages: int | None = None,
        speculative: bool = False,
    ) -> None:
        """Copy `model` in `dtype`, where its weights are. `max_len` bounds a context with what is sampled after it;
        `max_prefill_tokens` bounds one prefill batch, padding included.

        At most `num_slots` requests run at once, on `num_pages` pages of `page_size` positions: by default one page of
        `max_len` for each (see cache.py). `speculative` decodes with drafts of the model's first MTP module.
        """
        config = model.config
        page_size = max_len if page_size is None else page_size
        if not 1 <= max_len <= config.max_position_embeddings:
            raise ValueError(
                f"max_len is {max_len}, accepted is 1 .. max_position_embeddings {config.max_position_embeddings}"
            )
        for name, value in (("max_prefill_tokens", max_prefill_tokens), ("num_slots", num_slots)):
            if value < 1:
                raise ValueError(f"{name} is {value}, accepted is 1 or more")
        if not 1 <= page_size <= max_len:
            raise ValueError(f"page_size is {page_size}, accepted is 1 .. max_len {max_len}")
        pages_per_window = -(-max_len // page_size)
        num_pages = num_slots * pages_per_window if num_pages is None else num_pages
        if num_pages < pages_per_window:
            raise ValueError(f"num_pages is {num_pages}, accepted is at least one window of {pages_per_window} pages")
        if speculative and not model.mtp:
            raise ValueError("speculative is True, accepted with num_nextn_predict_layers 0 is False")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype is {dtype}, accepted is a floating-point one")
        self.config, self.max_len, self.policy_version = config, max_len, policy_version
        self.speculative = speculative
        self.model = copy.deepcopy(model).to(dtype).eval().requires_grad_(False)
        for own, given in zip(self.model.modules(), model.modules(), strict=True):
            if isinstance(own, Router) and isinstance(given, Router):  # a rounded router would choose other experts
                own.to(torch.promote_types(dtype, torch.float32)).load_state_dict(given.state_dict())
        self.device = next(self.model.parameters()).device
        self.cache = PagedCache(
            num_pages=num_pages,
            page_size=page_size,
            layer_widths=[config.cache_dim] * (config.num_hidden_layers + speculative),
            num_moe_layers=config.num_moe_layers,
            num_experts_per_tok=config.num_experts_per_tok,
            dtype=dtype,
            device=self.device,
            lookahead=int(speculative),
        )
        self.scheduler = Scheduler(
            self.cache, max_running=num_slots, max_len=max_len, max_prefill_tokens=max_prefill_tokens
        )
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
        """Free what the session has cached; a request in progress is cancelled. Unknown sessions are ignored."""
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
            if not tensor.is_floating_point():  # codes of a quantised checkpoint are no weights
                raise ValueError(f"{name} has dtype {tensor.dtype}, accepted is a floating-point dtype")
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
        """Sample a token, with drafts up to two, for every running request; returns those that ended, in order of
        submission. FloatingPointError when logits are not finite."""
        finished, self._cancelled = self._cancelled, []
        admitted = self.scheduler.schedule(self.policy_version)
        self.stats.preemptions = self.scheduler.num_preemptions
        self.stats.reused_tokens += sum(sequence.place.num_cached for sequence in admitted)
        self._prefill()
        if admitted:
            finished += self._finish_ended()  # contexts that leave no room for a token
        if self.scheduler.running:
            if self.speculative:
                self._decode_with_drafts(self.scheduler.running)
            else:
                self._decode(self.scheduler.running)
            self.stats.decode_steps += 1
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
            next_ids_BS = np.zeros_like(token_ids_BS)
            position_ids_BS = np.full_like(token_ids_BS, -1)
            for row, (sequence, count) in enumerate(zip(batch, counts, strict=True)):
                start = sequence.place.num_cached
                token_ids_BS[row, :count] = sequence.token_ids[start : start + count]
                next_ids_BS[row, :count] = sequence.token_ids[start + 1 : start + count + 1]
                position_ids_BS[row, :count] = np.arange(start, start + count)
            hidden_BSD = self._forward(batch, token_ids_BS, position_ids_BS)
            if self.speculative:
                self._draft(batch, hidden_BSD, next_ids_BS, position_ids_BS)
            for sequence, count in zip(batch, counts, strict=True):
                sequence.place.num_cached += count
            self.stats.prefill_tokens += sum(counts)

    def _decode(self, batch: list[Sequence]) -> None:
        """Feed the last token of every sequence and sample the next one."""
        token_ids_BS = np.array([[sequence.token_ids[-1]] for sequence in batch])
        position_ids_BS = np.array([[len(sequence.token_ids) - 1] for sequence in batch])
        hidden_BSD = self._forward(batch, token_ids_BS, position_ids_BS)
        drawn = sample(
            self.model.lm_head(hidden_BSD[:, 0]), uniform_B=self._uniforms(batch, DRAW), **self._limits(batch)
        )
        lists = [tensor.tolist() for tensor in drawn]
        for sequence, token_id, logprob, truncated in zip(batch, *lists, strict=True):
            sequence.place.num_cached += 1
            sequence.append(token_id, logprob, truncated, self.policy_version)
        self.stats.generated_tokens += len(batch)

    def _decode_with_drafts(self, batch: list[Sequence]) -> None:
        """Feed the last token and the draft behind it; sample one token, and where it is the draft one more."""
        drafts = [sequence.draft for sequence in batch]
        token_ids_BS = np.array(
            [[s.token_ids[-1], 0 if d is None else d.token_id] for s, d in zip(batch, drafts, strict=True)]
        )
        position_ids_BS = np.array(
            [[len(s.token_ids) - 1, -1 if d is None else len(s.token_ids)] for s, d in zip(batch, drafts, strict=True)]
        )
        hidden_BSD = self._forward(batch, token_ids_BS, position_ids_BS)
        limits = self._limits(batch)
        first, second = (distribution(self.model.lm_head(hidden_BSD[:, place]), **limits) for place in (0, 1))
        none_V = torch.zeros(self.config.vocab_size, dtype=torch.float64, device=self.device)
        q_BV = torch.stack([none_V if draft is None else draft.probs_V for draft in drafts])
        tokens_B, is_taken_B = verify(
            probabilities(first),
            q_BV,
            self._tensor(token_ids_BS[:, 1]),
            self._uniforms(batch, CHECK),
            self._uniforms(batch, DRAW),
        )
        bonus_B = invert(second.kept_BV, self._uniforms(batch, DRAW, 1))
        taken = is_taken_B.tolist()
        self.stats.drafted_tokens += sum(draft is not None for draft in drafts)
        self.stats.accepted_tokens += sum(taken)
        self._append(batch, first, tokens_B, [True] * len(batch))
        self._append(
            batch,
            second,
            bonus_B,
            [t and s.finish_reason(self.max_len) is None for s, t in zip(batch, taken, strict=True)],
        )
        next_ids_BS = np.zeros_like(token_ids_BS)
        for row, sequence in enumerate(batch):
            start = sequence.place.num_cached
            count = len(sequence.token_ids) - 1 - start
            next_ids_BS[row, :count] = sequence.token_ids[start + 1 :]
            position_ids_BS[row, count:] = -1
            sequence.place.num_cached += count
        self._draft(batch, hidden_BSD, next_ids_BS, position_ids_BS)

    def _append(self, batch: list[Sequence], source: Distribution, tokens_B: Tensor, wanted: list[bool]) -> None:
        """Give each sequence that wants it its token of `tokens_B`, drawn from `source`."""
        lists = [tensor.tolist() for tensor in measure(source, tokens_B)]
        for sequence, is_wanted, token_id, logprob, truncated in zip(batch, wanted, *lists, strict=True):
            if is_wanted:
                sequence.append(token_id, logprob, truncated, self.policy_version)
                self.stats.generated_tokens += 1

    def _draft(
        self, batch: list[Sequence], hidden_BSD: Tensor, next_ids_BS: np.ndarray, position_ids_BS: np.ndarray
    ) -> None:
        """Run the MTP module over new positions; each sequence's last one guesses the token after its last."""
        hidden_BSD = self.model.mtp_cached(
            hidden_BSD,
            self._tensor(next_ids_BS),
            self._tensor(position_ids_BS),
            cache_NMC=self.cache.layers_PMC[-1],
            slot_ids_B=self.cache.tables([sequence.place for sequence in batch]),
        )
        last_B = self._tensor((position_ids_BS >= 0).sum(1) - 1)
        logits_BV = self.model.lm_head(hidden_BSD[torch.arange(len(batch), device=self.device), last_B])
        q_BV = probabilities(distribution(logits_BV, **self._limits(batch)))
        drafts_B = invert(q_BV, self._uniforms(batch, DRAFT))
        for sequence, token_id, probs_V in zip(batch, drafts_B.tolist(), q_BV, strict=True):
            sequence.draft = Draft(token_id=token_id, probs_V=probs_V)

    # -----------------------------------------------------------------------------------------------------------------
    # Batches

    def _forward(self, batch: list[Sequence], token_ids_BS: np.ndarray, position_ids_BS: np.ndarray) -> Tensor:
        """The trunk over new tokens (position -1: padding): what the head and the MTP module read, [B, S, D]. Their
        cache entries and routes are written."""
        places = [sequence.place for sequence in batch]
        out = self.model.forward_cached(
            self._tensor(token_ids_BS),
            self._tensor(position_ids_BS),
            cache=self.cache.layers_PMC[: self.config.num_hidden_layers],
            slot_ids_B=self.cache.tables(places),
        )
        self.cache.write_routes(places, position_ids_BS, out.routes_BSLK)
        return out.hidden_BSD

    def _limits(self, batch: list[Sequence]) -> dict[str, Tensor]:
        params = [sequence.request.params for sequence in batch]
        return {
            "temperature_B": self._tensor(np.array([p.temperature for p in params], dtype=np.float64)),
            "top_p_B": self._tensor(np.array([p.top_p for p in params], dtype=np.float64)),
            "top_k_B": self._tensor(np.array([p.top_k for p in params], dtype=np.int64)),
        }

    def _uniforms(self, batch: list[Sequence], stream: int, ahead: int = 0) -> Tensor:
        """Numbers for the token after the last (or `ahead` places further). A token's number in the stream is its
        position, so a session may use one seed for all of its turns."""
        seeds = [sequence.request.seed for sequence in batch]
        positions = [len(sequence.token_ids) + ahead for sequence in batch]
        return self._tensor(uniforms(seeds, positions, stream))

    def _finish(self, sequence: Sequence, reason: str) -> Finished:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.request_id], self._request_ids[sequence.request.session]
        self.stats.finished_requests += 1
        shape = (len(sequence.token_ids), self.config.num_moe_layers, self.config.num_experts_per_tok)
        routes_TLK = np.full(shape, -1, dtype=np.int16)
        if sequence.slot is not None:
            routes_TLK[: sequence.slot.num_cached] = self.cache.read_routes(sequence.slot)
        generation = Generation(
            token_ids=np.array(sequence.token_ids[sequence.num_prompt :], dtype=np.int32),
            logprobs=np.array(sequence.logprobs, dtype=np.float32),
            policy_versions=np.array(sequence.policy_versions, dtype=np.int32),
            routes=routes_TLK,
            finish_reason=reason,
            truncated_logprobs=np.array(sequence.truncated_logprobs, dtype=np.float32),
        )
        return Finished(request_id=sequence.request_id, session=sequence.request.session, generation=generation)

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.device)
