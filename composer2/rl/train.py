"""The RL trainer: groups of rollouts go in, policy versions come out.

One loop serves synchronous and asynchronous training: with `max_staleness = 0` no group may start before the weights of
its step exist; with more, the samplers run ahead by that many steps while weights change under them in mid-rollout.

    version v            weights after v optimizer steps, published to the samplers as soon as they exist
    step s               trains groups s*P .. s*P+P-1 (P prompts a step), whatever order they finished in
    staleness of a token v at its training minus the version that sampled it, at most max_staleness

Source: report §4.1 (asynchronous RL, single epoch, fixed group size, Adam, full parameters, router replay); rows R1 R7
A2 A3 M6.
Choice: batches are trained in the order their prompts were drawn, not in order of completion, so that short rollouts
are not favoured; the report only says that throughput is traded against staleness.
Choice: the router's correction bias is frozen during RL. Replay ignores the bias, so updating it from replayed choices
would move the sampler's routing without any gradient asking for it (fault 30).
Choice: the reference replays the experts of the policy too, so that k1 compares two models on one set of experts.
Choice: the optimizer is Adam with betas (0.9, 0.95) and no weight decay; the report gives no learning rate.

The trainer does not branch on algorithm names: rewards, advantages and masks arrive per token (`rl.advantage`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from composer2.model.router_replay import ReplayConfig
from composer2.model.transformer import Transformer
from composer2.rl.advantage import AdvantageConfig, counts_in_group, group_samples, is_withheld, trained_tokens
from composer2.rl.kl import estimate
from composer2.rl.loss import (
    LossConfig,
    clip_gradients,
    loss_denominator,
    mean_metrics,
    policy_loss,
    target_logprobs,
)
from composer2.rl.mtp_cotrain import MtpCotrainConfig, distil_mtp
from composer2.rl.pack import BatchTensors, pack, packing_report, to_tensors
from composer2.rl.prefix_tree import TreeBatch, pack_trees
from composer2.rl.reward import RewardConfig, permute_rewards, score
from composer2.types import Group, Sample


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """A reinforcement-learning run."""

    num_steps: int = 120
    """Optimizer steps."""
    prompts_per_step: int = 16
    """Prompts (groups) of one step."""
    group_size: int = 8
    """Rollouts of one prompt, fixed (row R1). 1 has nothing to be compared with: only the KL would be trained."""
    max_staleness: int = 1
    """Steps the samplers may run ahead of the trainer; 0 is synchronous and reproducible bit for bit."""
    num_workers: int = 1
    """Sampler processes."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are scored at it."""
    lr: float = 3e-4
    """Peak learning rate."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    final_lr_frac: float = 1.0
    """After the warm-up the rate goes linearly to this fraction of `lr` at `num_steps`; 1 keeps it constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Adam's."""
    grad_clip: float = 1.0
    """Joint gradient norm."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Baseline and KL."""
    loss: LossConfig = field(default_factory=LossConfig)
    """Off-policy correction and normaliser."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """Components and weights. A preset fixes how many there are: on the command line a measure of one's own takes the
    place of a component at weight 0, with both its name and its weight."""
    replay: bool = True
    """Override the router's selection with the experts the sampler used (row M6)."""
    replay_tau: float = 0.5
    """Plausibility threshold of the replay filter; 0 keeps every replayed expert."""
    mtp: MtpCotrainConfig = field(default_factory=MtpCotrainConfig)
    """Training of the MTP layers beside the policy (row M7)."""
    merge_prefixes: bool = True
    """Run what samples of one prompt have in common once (row R11); the gradient is the same."""
    row_length: int = 512
    """Tokens of a packed row."""
    rows_per_batch: int = 8
    """Rows of a micro-batch."""
    eval_every: int = 0
    """Steps between evaluations on held-out tasks; 0: only before and after."""
    checkpoint_every: int = 10
    """Steps between checkpoints."""
    reference_every: int = 10
    """Steps between measurements of k1 to the reference when the KL weight is 0 (a reference pass costs a forward)."""
    permute_rewards: bool = False
    """Control experiment: shuffle the rewards inside each group, so that they carry no information."""

    def __post_init__(self) -> None:
        positive = ("prompts_per_step", "group_size", "num_workers", "row_length", "rows_per_batch", "checkpoint_every")
        for name in (*positive, "reference_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"RLConfig.{name} is {getattr(self, name)}, accepted is 1 or more")
        for name in ("num_steps", "max_staleness", "warmup_steps", "eval_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"RLConfig.{name} is {getattr(self, name)}, accepted is 0 or more")
        if not 0 <= self.replay_tau < 1:
            raise ValueError(f"RLConfig.replay_tau is {self.replay_tau}, accepted is in [0, 1)")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"RLConfig.lr is {self.lr}, accepted is a finite number > 0")
        if not self.grad_clip > 0:
            raise ValueError(f"RLConfig.grad_clip is {self.grad_clip}, accepted is > 0")
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"RLConfig.temperature is {self.temperature}, accepted is a finite number >= 0")
        if not 0 <= self.final_lr_frac <= 1:
            raise ValueError(f"RLConfig.final_lr_frac is {self.final_lr_frac}, accepted is in [0, 1]")

    def lr_at(self, step: int) -> float:
        """Learning rate of the step number `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(self.num_steps - self.warmup_steps, 1)
        return self.lr * (1 - (1 - self.final_lr_frac) * min(progress, 1.0))


def make_optimizer(model: Transformer, config: RLConfig) -> torch.optim.Adam:
    """Adam over the trunk. MTP layers take no RL gradient; they are a group of their own when they are co-trained."""
    groups = [{"params": trunk_parameters(model), "lr": config.lr}]
    if config.mtp.every and len(model.mtp):
        groups.append({"params": list(model.mtp.parameters()), "lr": config.mtp.lr})  # type: ignore[attr-defined]
    return torch.optim.Adam(groups, betas=config.betas, fused=True)


def trunk_parameters(model: Transformer) -> list[torch.nn.Parameter]:
    """Everything but the MTP layers."""
    return [p for name, p in model.named_parameters() if not name.startswith("mtp.")]


def replay_config(config: RLConfig) -> ReplayConfig:
    """The filter of the replay, as the model takes it."""
    return ReplayConfig(tau=config.replay_tau)


Credit = Callable[..., list[Sample]]
"""How a group's rewards become samples: called as `rl.advantage.group_samples`, which is the report's way."""


# ---------------------------------------------------------------------------------------------------------------------
# One optimizer step


def trained_logprobs(
    model: Transformer,
    batch: BatchTensors,
    config: RLConfig,
    *,
    tree: TreeBatch | None = None,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, Any]:
    """(log-probs [B, T], entropy [B, T] or None, routing statistics) of the trained tokens of a packed batch.

    With `tree` the model runs the merged tokens instead of the batch's own. Only predictors of trained tokens go
    through the head: the other entries are 0."""
    rows = batch if tree is None else tree
    out = model(
        rows.token_ids,
        position_ids_BT=rows.position_ids,
        document_ids_BT=rows.document_ids,
        routes_BTLK=rows.routes if config.replay else None,
        replay=replay_config(config),
        with_logits=False,
        visible_until_BT=None if tree is None else tree.visible_until,
    )
    if tree is None:
        hidden_ND = out.hidden_BTD[:, :-1][batch.loss_mask[:, 1:]]
    else:
        hidden_ND = out.hidden_BTD.flatten(0, 1).index_select(0, tree.predictors)
    picked_N, entropy_N = target_logprobs(
        model.lm_head(hidden_ND), batch.token_ids[batch.loss_mask], batch.temperature, with_entropy=with_entropy
    )
    logprobs_BT = torch.zeros(batch.token_ids.shape, dtype=picked_N.dtype, device=picked_N.device)
    logprobs_BT = logprobs_BT.masked_scatter(batch.loss_mask, picked_N)
    entropy_BT = None
    if entropy_N is not None:
        entropy_BT = torch.zeros_like(logprobs_BT.detach()).masked_scatter(batch.loss_mask, entropy_N)
    return logprobs_BT, entropy_BT, out.routing


def update(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: RLConfig,
    step: int,
    *,
    num_tokens: int | None = None,
) -> dict[str, float]:
    """One optimizer step on `samples`; returns its metrics. Without samples the weights stay exactly as they are.

    `num_tokens`: tokens the normaliser `tokens` divides by, those of rollouts left out for their zero gradient
    included; None counts the samples' own."""
    if not samples:
        return {"num_tokens": 0.0, "loss": 0.0, "grad_norm": 0.0}
    optimizer.param_groups[0]["lr"] = config.lr_at(step)
    optimizer.zero_grad(set_to_none=True)
    device = next(model.parameters()).device
    batches = micro_batches(samples, config, device)
    denominator = loss_denominator(
        config.loss,
        num_rollouts_planned=config.prompts_per_step * config.group_size,
        num_tokens=sum(int(s.loss_mask.sum()) for s in samples) if num_tokens is None else num_tokens,
    )
    sums, gaps, routing = [], [], dict.fromkeys(("replayed", "replaced", "free", "tokens", "tokens_differing"), 0.0)
    for batch, tree in batches:
        logprobs_BT, entropy_BT, stats = trained_logprobs(model, batch, config, tree=tree, with_entropy=True)
        loss, parts = policy_loss(logprobs_BT, batch, config.loss, denominator, entropy_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.append(parts)
        gaps.append((logprobs_BT.detach() - batch.behaviour_logprobs)[batch.loss_mask].abs().cpu().numpy())
        for name in routing:
            routing[name] += float(getattr(stats, f"num_{name}"))
    norm = clip_gradients((p for p in trunk_parameters(model) if p.grad is not None), config.grad_clip)
    drafted: dict[str, float] = {}
    if config.mtp.is_due(step) and len(model.mtp):
        drafted = distil_mtp(
            model, samples, config.mtp, replay=replay_config(config) if config.replay else None,
            row_length=config.row_length, rows_per_batch=config.rows_per_batch,
        )  # fmt: skip
        clip_gradients(model.mtp.parameters(), config.grad_clip)  # type: ignore[attr-defined]
    optimizer.step()
    gap_N = np.concatenate(gaps)
    metrics = mean_metrics(sums) | drafted
    metrics |= {f"mismatch_p{int(q * 100)}": float(np.quantile(gap_N, q)) for q in (0.5, 0.99)}
    metrics |= {"mismatch_max": float(gap_N.max()), "grad_norm": float(norm)}
    recorded = routing["replayed"] * model.config.num_experts_per_tok
    metrics["replaced_expert_frac"] = routing["replaced"] / max(recorded, 1.0)
    metrics["free_route_frac"] = routing["free"] / max(routing["free"] + routing["replayed"], 1.0)
    metrics["differing_token_frac"] = routing["tokens_differing"] / max(routing["tokens"], 1.0)
    metrics["num_samples"] = float(len(samples))
    metrics |= packing_report([batch.document_ids.cpu().numpy() for batch, _ in batches])
    trees = [tree for _, tree in batches if tree is not None]
    if trees:
        metrics["token_ratio"] = sum(t.num_unmerged for t in trees) / sum(t.num_merged for t in trees)
        metrics["route_forks"] = float(sum(tree.num_route_forks for tree in trees))
    return metrics


def micro_batches(
    samples: Sequence[Sample], config: RLConfig, device: torch.device | str
) -> list[tuple[BatchTensors, TreeBatch | None]]:
    """The packed samples, each with its prefix trees when prefixes are merged."""
    sizes: dict[str, int] = {"row_length": config.row_length, "rows_per_batch": config.rows_per_batch}
    if config.merge_prefixes:
        return [(to_tensors(batch, device), tree) for batch, tree in pack_trees(samples, device=device, **sizes)]
    return [(to_tensors(batch, device), None) for batch in pack(samples, **sizes)]


def score_groups(groups: Sequence[Group], config: RLConfig, step: int, seed: int) -> list[Group]:
    """Groups with rewards; shuffled inside each group when the control experiment is on."""
    scored = [replace(g, rollouts=tuple(score(r, config.reward, step) for r in g.rollouts)) for g in groups]
    if config.permute_rewards:
        rng = np.random.default_rng([seed, step])
        scored = [permute_rewards(group, rng) for group in scored]
    return scored


@torch.no_grad()
def reference_logprobs(
    reference: Transformer, groups: Sequence[Group], config: RLConfig
) -> list[list[list[np.ndarray]]]:
    """Log-probs of every sampled token under the reference: [group][rollout][segment] -> float32 [T]."""
    device = next(reference.parameters()).device
    result: list[list[list[np.ndarray]]] = []
    for group in groups:
        rollouts = []
        for rollout in group.rollouts:
            segments = []
            for segment in rollout.segments:
                tokens = torch.from_numpy(segment.token_ids.astype(np.int64))[None].to(device)
                recorded = torch.from_numpy(segment.routes.astype(np.int64))[None].to(device)
                routes = recorded if config.replay else None
                out = reference(tokens, routes_BTLK=routes, replay=replay_config(config))
                picked, _ = target_logprobs(out.logits_BTV[0, :-1], tokens[0, 1:], config.temperature)
                segments.append(np.concatenate([[0.0], picked.cpu().numpy()]).astype(np.float32))
            rollouts.append(segments)
        result.append(rollouts)
    return result


def reference_k1(groups: Sequence[Group], logprobs: Sequence[Sequence[Sequence[np.ndarray]]]) -> float:
    """Mean k1 estimate, nats a sampled token, of the behaviour policy against the reference."""
    values = [
        estimate("k1", segment.logprobs[segment.sampled], reference[segment.sampled])
        for group, per_group in zip(groups, logprobs, strict=True)
        for rollout, per_rollout in zip(group.rollouts, per_group, strict=True)
        for segment, reference in zip(rollout.segments, per_rollout, strict=True)
    ]
    joined = np.concatenate(values) if values else np.zeros(0)
    return float(joined.mean()) if joined.size else float("nan")


def train_step(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    config: RLConfig,
    *,
    step: int,
    reference: Transformer | None = None,
    credit: Credit = group_samples,
) -> dict[str, float]:
    """Advantages, samples and one update from scored groups. `reference` is needed when the KL weight is positive."""
    measured: dict[str, float] = {}
    references: list[Any] = [None] * len(groups)
    if reference is not None and (config.advantage.kl.weight > 0 or step % config.reference_every == 0):
        logprobs = reference_logprobs(reference, groups, config)
        measured["reference_k1"] = reference_k1(groups, logprobs)
        if config.advantage.kl.weight > 0:
            references = list(logprobs)
    samples = [
        sample
        for index, (group, logprobs_of_group) in enumerate(zip(groups, references, strict=True))
        for sample in credit(
            group,
            config.advantage,
            temperature=config.temperature,
            policy_version=step,
            reference_logprobs=logprobs_of_group,
            group_index=index,
        )
    ]
    counted = [
        r for g in groups for r in g.rollouts if counts_in_group(r) and not is_withheld(r, config.advantage, step)
    ]
    num_tokens = sum(int(trained_tokens(s, config.advantage).sum()) for rollout in counted for s in rollout.segments)
    return update(model, optimizer, samples, config, step, num_tokens=num_tokens) | measured
