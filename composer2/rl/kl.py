"""Estimators of KL(policy || reference) from sampled tokens, and how the KL enters the policy gradient.

In: log-probs of the sampled tokens under the policy q and a fixed reference p. Out: per-token estimates and per-token
advantage terms.

Source: report §4.1 and Fig. 4; row R2. With r = p(x)/q(x) and x drawn from q:

    k1 = -log r          unbiased, linear in the log-ratio: the one the report uses
    k2 = (log r)^2 / 2   biased, low variance
    k3 = r - 1 - log r   unbiased, but its variance explodes when p and q part

Choice: the KL enters as a score function, that is inside the advantage, because the report does not say how and the
obvious other way is wrong: E_q[grad k1] = E_q[grad log q] = 0, so differentiating k1 as a loss does nothing. For a
sequence, grad KL = E[sum_t grad log q(x_t | x_<t) * sum_{s >= t} k1_s]: each token is weighed by the k1 still to come
over the rest of the chain, not by its own alone. That is exact; `reward_to_go` is the inner sum.
Choice: the k1 inside the advantage uses the behaviour log-probs: exact on-policy. For stale tokens the loss corrects
their weight by the importance ratio, while the k1 itself stays that of the policy that sampled them.
k2 and k3 in this place are comparisons only: k3 there gives grad[KL(q||p) - KL(p||q)], not grad KL(q||p).

Shape letters: T tokens of a segment, N sampled tokens of a chain, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
import torch

Estimator = Literal["k1", "k2", "k3"]
ESTIMATORS: tuple[Estimator, ...] = ("k1", "k2", "k3")
Array = TypeVar("Array", np.ndarray, torch.Tensor)


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """How strongly the policy is held to the reference."""

    weight: float = 0.0
    """Weight of the sequence KL against the reward; 0 switches it off and needs no reference pass."""
    estimator: Estimator = "k1"
    """Only k1 gives the exact gradient; k2 and k3 exist for comparison."""

    def __post_init__(self) -> None:
        if not (np.isfinite(self.weight) and self.weight >= 0):
            raise ValueError(f"KLConfig.weight is {self.weight}, accepted is a finite number >= 0")
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"KLConfig.estimator is {self.estimator!r}, accepted is one of {ESTIMATORS}")


def estimate(estimator: Estimator, policy_logprobs: Array, reference_logprobs: Array) -> Array:
    """Elementwise estimate, in nats, of KL(policy || reference) at tokens drawn from the policy; numpy arrays or torch
    tensors of any shape, the same for both (else ValueError: broadcasting would pair tokens that do not belong).

    Differentiable in torch, for tests and comparisons; training uses the values only (see the top of the file)."""
    if np.shape(policy_logprobs) != np.shape(reference_logprobs):
        raise ValueError(
            f"reference_logprobs has shape {tuple(np.shape(reference_logprobs))}, accepted is that of policy_logprobs: "
            f"{tuple(np.shape(policy_logprobs))}"
        )
    log_ratio = reference_logprobs - policy_logprobs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return log_ratio**2 / 2
    if estimator == "k3":
        expm1 = torch.expm1 if isinstance(log_ratio, torch.Tensor) else np.expm1
        return expm1(log_ratio) - log_ratio
    raise ValueError(f"estimator is {estimator!r}, accepted is one of {ESTIMATORS}")


def reward_to_go(values_N: np.ndarray) -> np.ndarray:
    """sum_{s >= t} values_s for every t, float64 [N]."""
    return np.cumsum(np.asarray(values_N, dtype=np.float64)[::-1])[::-1]


def chain_kl_advantages(
    behaviour_logprobs: Sequence[np.ndarray],
    reference_logprobs: Sequence[np.ndarray],
    sampled: Sequence[np.ndarray],
    config: KLConfig,
) -> list[np.ndarray]:
    """-weight * (KL still to come) at the sampled tokens of a chain, 0 elsewhere.

    One float [T] log-prob array and one bool [T] mask for each segment, in the order the model saw them; the sum runs
    over all later sampled tokens, in later segments too. Returns one float64 [T] array for each segment."""
    if not len(behaviour_logprobs) == len(reference_logprobs) == len(sampled):
        raise ValueError(
            f"reference_logprobs covers {len(reference_logprobs)} segments, accepted is one array for each of the "
            f"{len(sampled)} segments of the chain"
        )
    per_token = []
    for index, (behaviour, reference, mask) in enumerate(
        zip(behaviour_logprobs, reference_logprobs, sampled, strict=True)
    ):
        for name, values in (("behaviour_logprobs", behaviour), ("reference_logprobs", reference)):
            if values.shape != mask.shape:
                raise ValueError(f"{name}[{index}] has shape {values.shape}, accepted is one per token: {mask.shape}")
        if mask.dtype != bool:
            raise ValueError(f"sampled[{index}] has dtype {mask.dtype}, accepted is bool")
        picked = np.flatnonzero(mask)
        per_token.append(
            estimate(config.estimator, behaviour[picked].astype(np.float64), reference[picked].astype(np.float64))
        )
    to_go_N = reward_to_go(np.concatenate(per_token)) if per_token else np.zeros(0)
    terms, start = [], 0
    for mask, values in zip(sampled, per_token, strict=True):
        term_T = np.zeros(len(mask))
        term_T[mask] = -config.weight * to_go_N[start : start + len(values)]
        terms.append(term_T)
        start += len(values)
    return terms


def entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy in nats of softmax(logits) over the last dimension, [..., V] -> [...], computed in at least float32.

    A logit of -inf (a token that is masked out) adds 0."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return torch.special.entr(torch.softmax(wide, dim=-1)).sum(dim=-1)


def exact_kl(policy_logits: torch.Tensor, reference_logits: torch.Tensor) -> torch.Tensor:
    """KL(policy || reference) of two categoricals over the last dimension, no sampling: [..., V] -> [...], in nats.

    Logits of one shape, finite."""
    log_q = torch.log_softmax(policy_logits, dim=-1)
    log_p = torch.log_softmax(reference_logits, dim=-1)
    return (log_q.exp() * (log_q - log_p)).sum(dim=-1)
