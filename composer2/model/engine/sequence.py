"""What the engine works on: a `Request` comes in, a `Sequence` is its life inside, a `Finished` goes out.

Source: row I1 (per-token log-probs and router indices returned; stop strings as token ids; token ids are the truth),
row A3 (each token carries the policy version that produced it).

Shape letters: T tokens of the context, N sampled tokens, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING

from composer2.types import Generation, SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

    from composer2.model.engine.cache import Slot


MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0: logits divided by less leave the range of float32, which would end every request."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """Continue one context. A session has at most one request in the engine at a time."""

    token_ids: tuple[int, ...]
    """The whole context [T], T >= 1."""
    params: SamplingParams
    session: str
    """Names the cache: a later request of the same session prefills only what is new."""
    group: str = ""
    """Sessions of one group lend each other the cache of a common prefix."""
    seed: int = 0
    """Decides the tokens together with their positions: same seed and context, same tokens."""

    def __post_init__(self) -> None:
        params = self.params
        if not self.token_ids:
            raise ValueError("Request.token_ids is empty, accepted is at least one token")
        wrong = [token for token in self.token_ids if not isinstance(token, Integral)]
        if wrong:
            raise ValueError(f"Request.token_ids holds {wrong[0]!r}, accepted are integers")
        if params.temperature != 0 and not MIN_TEMPERATURE <= params.temperature < math.inf:
            accepted = f"0 (greedy) or a finite number >= {MIN_TEMPERATURE}"
            raise ValueError(f"SamplingParams.temperature is {params.temperature}, accepted is {accepted}")
        if not 0 < params.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p is {params.top_p}, accepted is 0 < top_p <= 1")
        if not (isinstance(params.top_k, int) and 0 <= params.top_k < 2**63):
            raise ValueError(f"SamplingParams.top_k is {params.top_k}, accepted is 0 (off) or a positive int64")
        if params.max_tokens < 1:
            raise ValueError(f"SamplingParams.max_tokens is {params.max_tokens}, accepted is 1 or more")
        if not all(params.stop_sequences):
            raise ValueError("SamplingParams.stop_sequences has an empty one, accepted is at least one token id each")


@dataclass(kw_only=True, slots=True, eq=False)
class Draft:
    """A guess of the next token (row I5)."""

    token_id: int
    probs_V: Tensor
    """What it was drawn from, float64, of sum 1."""


@dataclass(kw_only=True, slots=True, eq=False)
class Sequence:
    """A request in progress. `token_ids` grows by one or more tokens a step; its last one is not in the cache yet."""

    request_id: int
    request: Request
    token_ids: list[int]
    """Context, then sampled tokens."""
    num_prompt: int
    stop_ids: frozenset[int]
    logprobs: list[float] = field(default_factory=list)
    truncated_logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    slot: Slot | None = None
    """What it holds of the cache while it runs."""
    draft: Draft | None = None

    @classmethod
    def of(cls, request_id: int, request: Request) -> Sequence:
        """A fresh sequence that has sampled nothing."""
        return cls(
            request_id=request_id,
            request=request,
            token_ids=list(request.token_ids),
            num_prompt=len(request.token_ids),
            stop_ids=frozenset(request.params.stop_ids),
        )

    @property
    def num_sampled(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncached(self) -> int:
        """Tokens to prefill before the last token can be decoded."""
        return len(self.token_ids) - 1 - self.place.num_cached

    @property
    def place(self) -> Slot:
        """The slot of a running sequence."""
        assert self.slot is not None
        return self.slot

    def append(self, token_id: int, logprob: float, truncated_logprob: float, policy_version: int) -> None:
        """Take one sampled token."""
        self.token_ids.append(token_id)
        self.logprobs.append(logprob)
        self.truncated_logprobs.append(truncated_logprob)
        self.policy_versions.append(policy_version)

    def finish_reason(self, max_len: int) -> str | None:
        """`stop`, `length`, or None while more tokens may come."""
        if self.num_sampled and (self.token_ids[-1] in self.stop_ids or self._ends_with_stop_sequence()):
            return "stop"
        if self.num_sampled >= self.request.params.max_tokens or len(self.token_ids) >= max_len:
            return "length"
        return None

    def _ends_with_stop_sequence(self) -> bool:
        """Of sampled tokens only: what the context ends with does not count."""
        return any(
            len(stop) <= self.num_sampled and self.token_ids[-len(stop) :] == list(stop)
            for stop in self.request.params.stop_sequences
        )


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One request done (or cancelled)."""

    request_id: int
    session: str
    generation: Generation


@dataclass(kw_only=True)
class EngineStats:
    """Counts since the engine was made."""

    prefill_tokens: int = 0
    """Context tokens computed."""
    copied_tokens: int = 0
    """Context tokens whose cache another session lent."""
    reused_tokens: int = 0
    """Context tokens already in the session's own cache, or in shared pages, at admission."""
    decode_steps: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    weight_updates: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    """Drafts that were checked."""
    accepted_tokens: int = 0
    """Drafts that were taken."""
