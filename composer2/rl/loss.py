"""The policy-gradient loss of one micro-batch.

In: log-probs of the tokens of a packed batch under the current policy, the batch, and one constant denominator.
Out: a scalar whose gradients simply add up over micro-batches, accumulation steps and data-parallel ranks.

Source: report §4.1 (Dr. GRPO); rows R1 R8. With ratio r_t = pi(o_t) / mu(o_t), mu the behaviour policy:

    loss = -(1 / denominator) * sum over trained tokens of  w_t

    none      w_t = A_t log pi(o_t)                                          plain policy gradient on stale tokens
    ppo_clip  w_t = min(r_t A_t, clip(r_t, 1-eps_low, 1+eps_high) A_t)
    tis       w_t = sg(min(r_t, cap)) A_t log pi(o_t)                        truncated importance sampling
    cispo     w_t = sg(clip(r_t, 0, 1+eps_high)) A_t log pi(o_t)             [M2] clips the weight, keeps every token
    gspo      as ppo_clip with s_t = sg(s) pi(o_t) / sg(pi(o_t)) for r_t, s = exp(mean of log r over the sequence)

    denominator = planned rollouts of the step * norm_length

The denominator is a constant of the step: never a count of the tokens or rows of a micro-batch, never changed by
failures or by samples that were skipped for having no gradient. Hence cutting the step differently changes nothing.

Choice: the report is silent on the off-policy correction; the default is ppo_clip with the asymmetric range common in
this line of work. `normaliser="tokens"` divides by the trained tokens of the whole step instead (the form CISPO was
published with), for comparison. Log-ratios are clamped to +-20 so that one token cannot overflow float32.
Choice: a sequence of `gspo` is a segment, since only a segment is one context. Its advantages come divided by the
length of their rollout (`rl.variants`), so that the terms of a sequence add up to s A times its share of the rollout.

Shape letters: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from composer2.rl.kl import entropy
from composer2.rl.pack import BatchTensors

Correction = Literal["none", "ppo_clip", "tis", "cispo", "gspo"]
CORRECTIONS: tuple[Correction, ...] = ("none", "ppo_clip", "tis", "cispo", "gspo")
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Off-policy correction and normaliser."""

    correction: Correction = "ppo_clip"
    """none, ppo_clip, tis, cispo or gspo; the formulas stand at the top of the file."""
    eps_low: float = 0.2
    """Lower clip distance of ppo_clip and gspo."""
    eps_high: float = 0.28
    """Upper clip distance of ppo_clip, gspo and cispo."""
    tis_cap: float = 2.0
    """Largest importance weight of tis."""
    normaliser: Literal["constant", "tokens"] = "constant"
    """`constant`: planned rollouts * norm_length (Dr. GRPO). `tokens`: trained tokens of the whole step."""
    norm_length: float = 16.0
    """Tokens a rollout is taken to have; only scales the learning rate."""

    def __post_init__(self) -> None:
        if self.correction not in CORRECTIONS:
            raise ValueError(f"LossConfig.correction is {self.correction!r}, accepted is one of {CORRECTIONS}")
        if not 0 < self.eps_low <= 1:
            raise ValueError(f"LossConfig.eps_low is {self.eps_low}, accepted is in (0, 1]")
        if not (np.isfinite(self.eps_high) and self.eps_high > 0):
            raise ValueError(f"LossConfig.eps_high is {self.eps_high}, accepted is a finite number > 0")
        if not (np.isfinite(self.tis_cap) and self.tis_cap > 0):
            raise ValueError(f"LossConfig.tis_cap is {self.tis_cap}, accepted is a finite number > 0")
        if self.normaliser not in ("constant", "tokens"):
            raise ValueError(f"LossConfig.normaliser is {self.normaliser!r}, accepted is 'constant' or 'tokens'")
        if not (np.isfinite(self.norm_length) and self.norm_length > 0):
            raise ValueError(f"LossConfig.norm_length is {self.norm_length}, accepted is a finite number > 0")


def loss_denominator(config: LossConfig, *, num_rollouts_planned: int, num_tokens: int | None = None) -> float:
    """The divisor of every micro-batch of one step. `num_tokens`: trained tokens of the whole step, over all ranks;
    only the normaliser `tokens` reads it, and a step without any divides by 1. ValueError for a smaller count."""
    if config.normaliser == "constant":
        if num_rollouts_planned < 1:
            raise ValueError(f"num_rollouts_planned is {num_rollouts_planned}, accepted is >= 1")
        return num_rollouts_planned * config.norm_length
    if num_tokens is None:
        raise ValueError("num_tokens is None, accepted is the count of trained tokens when normaliser is 'tokens'")
    if num_tokens < 0:
        raise ValueError(f"num_tokens is {num_tokens}, accepted is >= 0")
    return float(max(num_tokens, 1))


def token_logprobs(
    logits_BTV: torch.Tensor, token_ids_BT: torch.Tensor, temperature: float = 1.0, *, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-prob of each token given those before it, in nats: (float32 [B, T], detached entropy [B, T] or None).

    `logits_BTV`: any float dtype; `token_ids_BT`: an integer dtype, ids below V. ValueError for shapes that differ.
    Index t belongs to token t and is read from the logits at t - 1; index 0 is 0. At the first token of a later
    document in a packed row the value is meaningless, and no loss mask may select it."""
    logprobs_BS, entropy_BS = target_logprobs(
        logits_BTV[:, :-1], token_ids_BT[:, 1:], temperature, with_entropy=with_entropy
    )
    pad = (1, 0)
    logprobs_BT = torch.nn.functional.pad(logprobs_BS, pad)
    return logprobs_BT, None if entropy_BS is None else torch.nn.functional.pad(entropy_BS, pad)


def target_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0, *, with_entropy: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """log softmax(logits / temperature) at `targets`, [..., V] and [...] -> [...], in float32 (float64 stays).

    Temperature 0 (greedy sampling) is scored at 1, as the sampler reports it. ValueError for shapes that differ, which
    would be cut or broadcast."""
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}, accepted is a finite number >= 0")
    if targets.shape != logits.shape[:-1]:
        raise ValueError(
            f"targets has shape {tuple(targets.shape)}, accepted is logits without V: {tuple(logits.shape[:-1])}"
        )
    wide = logits if logits.dtype == torch.float64 else logits.float()
    if temperature not in (0.0, 1.0):
        wide = wide / temperature
    chosen = wide.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    logprobs = chosen - torch.logsumexp(wide, dim=-1)
    return logprobs, entropy(wide.detach()) if with_entropy else None


def check_loss_mask(batch: BatchTensors) -> None:
    """Raise ValueError when a trained token is padding or the first of its document (it has no predictor)."""
    documents = batch.document_ids
    first = torch.ones_like(batch.loss_mask)
    first[:, 1:] = documents[:, 1:] != documents[:, :-1]
    if bool((batch.loss_mask & (first | (documents < 0))).any()):
        raise ValueError("loss_mask selects the first token of a document or padding, accepted are later tokens only")


def check_finite(trained: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError when a named tensor holds nan or an infinity: clamps would turn it into a gradient of 0."""
    for name, values in trained.items():
        wrong = values.detach()[~torch.isfinite(values)]
        if len(wrong):
            raise ValueError(f"{name} holds {float(wrong[0])} at a trained token, accepted are finite numbers")


def check_fields(logprobs_BT: torch.Tensor, batch: BatchTensors, entropy_BT: torch.Tensor | None = None) -> None:
    """Raise ValueError unless all of them are [B, T], the mask bool and the log-probs float32 or float64.

    A trailing dimension of 1 would multiply every token by every other, an integer mask would pick rows, and bfloat16
    keeps 8 bits: a log-prob of -5 is off by up to .016, and a sum of 257 tokens is 256."""
    mask = batch.loss_mask
    if mask.dtype != torch.bool:
        raise ValueError(f"loss_mask has dtype {mask.dtype}, accepted is torch.bool")
    fields = {"logprobs_BT": logprobs_BT, "entropy_BT": entropy_BT}
    fields |= {name: getattr(batch, name) for name in ("advantages", "behaviour_logprobs", "document_ids")}
    for name, values in fields.items():
        if values is not None and values.shape != mask.shape:
            raise ValueError(f"{name} has shape {tuple(values.shape)}, accepted is [B, T] = {tuple(mask.shape)}")
    if logprobs_BT.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"logprobs_BT has dtype {logprobs_BT.dtype}, accepted is torch.float32 or torch.float64")


def policy_loss(
    logprobs_BT: torch.Tensor,
    batch: BatchTensors,
    config: LossConfig,
    denominator: float,
    entropy_BT: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, sums) of a micro-batch; see the top of the file. `sums` are detached totals over trained tokens.

    `logprobs_BT`: float32 or float64 [B, T] as `token_logprobs` gives them, `entropy_BT` likewise. `denominator`: that
    of `loss_denominator`, the same for every micro-batch of the step. Hand the sums of all micro-batches to
    `mean_metrics`. ValueError for a shape, dtype, denominator or loss mask that does not fit, and for a trained token
    whose log-probs or advantage are not finite."""
    if not (np.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator is {denominator}, accepted is a finite number > 0")
    check_fields(logprobs_BT, batch, entropy_BT)
    check_loss_mask(batch)
    mask = batch.loss_mask
    # Gathering the trained tokens first keeps masked values, infinities included, out of the arithmetic altogether.
    logprobs_N = logprobs_BT[mask]
    advantages_N = batch.advantages[mask].to(logprobs_N.dtype)
    behaviour_N = batch.behaviour_logprobs[mask].to(logprobs_N.dtype)
    check_finite({"logprobs_BT": logprobs_N, "advantages": advantages_N, "behaviour_logprobs": behaviour_N})
    log_ratio_N = (logprobs_N - behaviour_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_N = sequence_ratio(log_ratio_N, batch) if config.correction == "gspo" else log_ratio_N.exp()
    terms_N, clipped_N = corrected_terms(logprobs_N, ratio_N, advantages_N, config)
    loss = -terms_N.sum() / denominator
    with torch.no_grad():
        sums = {
            "num_tokens": mask.sum().to(loss.dtype),
            "loss": loss.detach(),
            "ratio": ratio_N.sum(),
            "clip_frac": clipped_N.sum().to(loss.dtype),
            "behaviour_k1": -log_ratio_N.sum(),
            "logprob": logprobs_N.sum(),
            "advantage": advantages_N.sum(),
            "advantage_abs": advantages_N.abs().sum(),
        }
        if entropy_BT is not None:
            sums["entropy"] = entropy_BT[mask].sum()
    return loss, sums


def sequence_ratio(log_ratio_N: torch.Tensor, batch: BatchTensors) -> torch.Tensor:
    """[N] for every trained token exp(mean log-ratio of its document); the gradient is that of its own log-prob."""
    rows_B1 = torch.arange(len(batch.document_ids), device=batch.document_ids.device)[:, None]
    documents_N = (rows_B1 * (batch.document_ids.max() + 1) + batch.document_ids)[batch.loss_mask]
    _, index_N = documents_N.unique(return_inverse=True)
    counts_S = torch.bincount(index_N)
    fixed_N = log_ratio_N.detach()
    sums_S = torch.zeros(len(counts_S), dtype=fixed_N.dtype, device=fixed_N.device).index_add(0, index_N, fixed_N)
    return (sums_S / counts_S)[index_N].exp() * (log_ratio_N - fixed_N).exp()


def corrected_terms(
    logprobs_N: torch.Tensor, ratio_N: torch.Tensor, advantages_N: torch.Tensor, config: LossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """(w_N to maximise, bool [N]: the correction bound this token). `ratio_N` carries gradient."""
    weight_N = ratio_N.detach()
    if config.correction == "none":
        return advantages_N * logprobs_N, torch.zeros_like(weight_N, dtype=torch.bool)
    if config.correction in ("ppo_clip", "gspo"):
        low, high = 1 - config.eps_low, 1 + config.eps_high
        terms_N = torch.minimum(ratio_N * advantages_N, ratio_N.clamp(low, high) * advantages_N)
        bound = ((weight_N > high) & (advantages_N > 0)) | ((weight_N < low) & (advantages_N < 0))
        return terms_N, bound
    cap = config.tis_cap if config.correction == "tis" else 1 + config.eps_high
    return weight_N.clamp(max=cap) * advantages_N * logprobs_N, weight_N > cap


def mean_metrics(sums: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, float]:
    """Token means over the micro-batches of a step from their sums; `loss` and `num_tokens` stay totals."""
    totals: dict[str, float] = {}
    for part in sums:
        for name, value in part.items():
            totals[name] = totals.get(name, 0.0) + float(value)
    tokens = max(totals.get("num_tokens", 0.0), 1.0)
    return {name: value if name in ("loss", "num_tokens") else value / tokens for name, value in totals.items()}


def clip_gradients(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale all gradients so that their joint 2-norm is at most `max_norm`; returns the norm before.

    `parameters` may be a one-shot iterator: it is read once. Raises ValueError when no parameter has a gradient, since
    a step that clips nothing trains nothing, and when the norm is not finite, since it would reach every weight."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise ValueError("parameters hold no gradient, accepted is at least one (was the iterator already used up?)")
    if not max_norm > 0:
        raise ValueError(f"max_norm is {max_norm}, accepted is > 0")
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.float()) for g in gradients]))
    if not bool(torch.isfinite(norm)):
        raise ValueError(f"the gradient norm is {float(norm)}, accepted is a finite number")
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
