"""The parts taken elsewhere: loss, replay and packing inside a plain `transformers` loop, against our own trainer.

    python scripts/port_check.py --out DIR [--quick]

In: nothing; a tiny DeepSeek-V3 of `transformers` and our model get the same random weights. Out:
`DIR/port_check.json`, flat figures; exit code 1 when a gradient is off by more than 1e-5.

    max_rel_grad_error    largest over parameters and steps of |theirs - ours| / |ours|, replay on, plain packing
    ..._replay_off        the same without replay
    ..._merged            the same against the trainer with prefixes merged
    replay_effect         relative change of the gradient that replay makes: far from 0, or the check sees nothing
    dense_rel_grad_error  a tiny dense Llama: packed rows against its samples one by one

`plain_loop` is the port, and all that a user has to write. `transformers` passes no routes to its mixture of experts,
so `ReplayGate` (ten lines around `composer2.model.router_replay`) stands in for each gate and is handed the routes of a
micro-batch before its forward pass. Packed rows need a 4-D mask and positions, which every model there takes.

Source: rows R1 R8 R12 M6 X6.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from composer2.model.config import ModelConfig
from composer2.model.router_replay import replay_selection
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.advantage import group_samples
from composer2.rl.loss import clip_gradients, loss_denominator, policy_loss, token_logprobs
from composer2.rl.pack import BatchTensors, pack, to_tensors
from composer2.rl.train import RLConfig, update
from composer2.types import Group, Rollout, RolloutStatus, Sample, Segment, Task

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_attention_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 256,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
}
TOLERANCE = 1e-5
Gradients = dict[str, torch.Tensor]

# ---------------------------------------------------------------------------------------------------------------------
# The port


class ReplayGate(nn.Module):
    """A DeepSeek-V3 gate that takes recorded experts."""

    def __init__(self, gate: nn.Module, tau: float) -> None:
        super().__init__()
        self.gate, self.tau = gate, tau
        self.routes_TK: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(router logits, gate weights [T, K], expert ids [T, K]), as the gate it stands for."""
        logits_TE, weights_TK, own_TK = self.gate(hidden)
        if self.routes_TK is None:
            return logits_TE, weights_TK, own_TK
        scores_TE = logits_TE.sigmoid()
        ranking_TE = scores_TE + self.gate.e_score_correction_bias
        ids_TK = replay_selection(scores_TE, ranking_TE, own_TK, self.routes_TK, self.tau).expert_ids_TK
        weights_TK = scores_TE.gather(1, ids_TK)
        return logits_TE, weights_TK / (weights_TK.sum(dim=1, keepdim=True) + 1e-20), ids_TK


def packed_mask(batch: BatchTensors) -> torch.Tensor:
    """Additive [B, 1, T, T]: causal inside each document."""
    documents = batch.document_ids
    allowed = (documents[:, :, None] == documents[:, None, :]).tril()
    return torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)[:, None]


def plain_loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    samples: Sequence[Sample],
    config: RLConfig,
    gates: Sequence[ReplayGate] = (),
) -> None:
    """One step of a plain loop over any causal language model; gradients are left on the parameters."""
    optimizer.zero_grad()
    denominator = loss_denominator(
        config.loss,
        num_rollouts_planned=config.prompts_per_step * config.group_size,
        num_tokens=sum(int(sample.loss_mask.sum()) for sample in samples),
    )
    for batch in map(to_tensors, pack(samples, row_length=config.row_length, rows_per_batch=config.rows_per_batch)):
        for layer, gate in enumerate(gates):
            gate.routes_TK = batch.routes[:, :, layer].flatten(0, 1) if config.replay else None
        logits = model(batch.token_ids, attention_mask=packed_mask(batch), position_ids=batch.position_ids).logits
        logprobs_BT, _ = token_logprobs(logits, batch.token_ids, batch.temperature)
        policy_loss(logprobs_BT, batch, config.loss, denominator)[0].backward()
    clip_gradients(model.parameters(), config.grad_clip)
    optimizer.step()


# ---------------------------------------------------------------------------------------------------------------------
# Both sides


def our_model(seed: int) -> Transformer:
    """Random weights far enough from zero that routing and attention matter."""
    model = Transformer(ModelConfig(**SIZES, num_nextn_predict_layers=0, initializer_range=0.15))
    init_weights(model, seed)
    return model


def twin_of(model: Transformer, tau: float) -> tuple[nn.Module, list[ReplayGate]]:
    """The same weights in `transformers`, and its gates."""
    config = DeepseekV3Config(
        **SIZES,
        num_key_value_heads=SIZES["num_attention_heads"],
        rope_parameters={"rope_type": "default", "rope_theta": model.config.rope_theta},
        rms_norm_eps=model.config.rms_norm_eps,
        tie_word_embeddings=False,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
    )
    twin = DeepseekV3ForCausalLM(config)
    twin.set_experts_implementation("eager")
    twin.load_state_dict(
        {name if name.startswith("lm_head.") else f"model.{name}": t for name, t in model.state_dict().items()}
    )
    gates = []
    for layer in twin.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate = ReplayGate(layer.mlp.gate, tau)
            gates.append(layer.mlp.gate)
    return twin, gates


def make_groups(config: RLConfig, layers: int, seed: int) -> list[Group]:
    """Groups with a shared prompt, unlike lengths, noisy behaviour log-probs and random recorded experts."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(config.prompts_per_step):
        prompt = rng.integers(0, SIZES["vocab_size"], size=int(rng.integers(4, 20)))
        prompt_routes = random_routes(rng, len(prompt), layers)
        rollouts = []
        for index in range(config.group_size):
            count = int(rng.integers(2, 24))
            sampled = np.arange(len(prompt) + count) >= len(prompt)
            routes = np.concatenate([prompt_routes, random_routes(rng, count, layers)])
            routes[-1] = -1  # the last token was never fed to the sampler
            segment = Segment(
                token_ids=np.concatenate([prompt, rng.integers(0, SIZES["vocab_size"], count)]).astype(np.int32),
                sampled=sampled,
                logprobs=np.where(sampled, rng.normal(-4.2, 0.4, len(sampled)), 0).astype(np.float32),
                policy_versions=np.where(sampled, 0, -1).astype(np.int32),
                routes=routes,
            )
            reward = float(rng.integers(0, 2))
            rollouts.append(
                Rollout(
                    task_id=str(number),
                    sample_index=index,
                    segments=(segment,),
                    status=RolloutStatus.FINISHED,
                    reward=reward,
                )
            )
        task = Task(task_id=str(number), instruction="", files={})
        groups.append(Group(task=task, rollouts=tuple(rollouts)))
    return groups


def random_routes(rng: np.random.Generator, num_tokens: int, layers: int) -> np.ndarray:
    """Distinct experts for every token and layer, int16 [T, L, K]."""
    ranked = rng.random((num_tokens, layers, SIZES["n_routed_experts"])).argsort(axis=-1)
    return ranked[..., : SIZES["num_experts_per_tok"]].astype(np.int16)


def gradients_of(model: nn.Module) -> Gradients:
    """Copies under our names."""
    return {
        name.removeprefix("model.").replace(".gate.gate.", ".gate."): parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def relative_error(ours: Gradients, theirs: Gradients) -> float:
    """Largest over parameters of the relative 2-norm of the difference; both sides hold the same parameters."""
    if ours.keys() != theirs.keys():
        raise AssertionError(f"parameters with gradients differ: {sorted(ours.keys() ^ theirs.keys())}")
    return max(float((theirs[name] - grad).norm() / grad.norm().clamp_min(1e-8)) for name, grad in ours.items())


def trained(steps: Sequence[Sequence[Sample]], config: RLConfig, *, port: bool, seed: int) -> list[Gradients]:
    """Gradients of every step; each side goes its own way with its own optimizer."""
    model: nn.Module = our_model(seed)
    run: Callable[[Sequence[Sample]], object]
    if port:
        twin, gates = twin_of(our_model(seed), config.replay_tau)
        model, optimizer = twin, torch.optim.SGD(twin.parameters(), lr=config.lr)
        run = lambda samples: plain_loop(twin, optimizer, samples, config, gates)  # noqa: E731
    else:
        ours = our_model(seed)
        model, optimizer = ours, torch.optim.SGD(ours.parameters(), lr=config.lr)
        run = lambda samples: update(ours, optimizer, samples, config, 0)  # noqa: E731
    found = []
    for samples in steps:
        run(samples)
        found.append(gradients_of(model))
    return found


def dense_error(steps: Sequence[Sequence[Sample]], config: RLConfig, seed: int) -> float:
    """A dense model has nothing of ours to be compared with: packed against one sample at a time."""
    torch.manual_seed(seed)
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, attn_implementation="eager"))
    frozen = torch.optim.SGD(model.parameters(), lr=0.0)
    found = []
    for row_length in (config.row_length, 1):
        plain_loop(model, frozen, steps[0], replace(config, row_length=row_length))
        found.append(gradients_of(model))
    return relative_error(*found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="two steps instead of five")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    config = RLConfig(
        prompts_per_step=4, group_size=6, row_length=96, rows_per_batch=3, lr=1e-2, grad_clip=1e9, merge_prefixes=False
    )
    layers = SIZES["num_hidden_layers"] - SIZES["first_k_dense_replace"]
    steps = [
        [
            sample
            for index, group in enumerate(make_groups(config, layers, 100 * options.seed + step))
            for sample in group_samples(group, config.advantage, group_index=index)
        ]
        for step in range(2 if options.quick else 5)
    ]
    ours = trained(steps, config, port=False, seed=options.seed)
    theirs = trained(steps, config, port=True, seed=options.seed)
    merged = trained(steps, replace(config, merge_prefixes=True), port=False, seed=options.seed)
    off = replace(config, replay=False)
    ours_off, theirs_off = (trained(steps, off, port=port, seed=options.seed) for port in (False, True))
    figures = {
        "max_rel_grad_error": max(map(relative_error, ours, theirs)),
        "max_rel_grad_error_merged": max(map(relative_error, merged, theirs)),
        "max_rel_grad_error_replay_off": max(map(relative_error, ours_off, theirs_off)),
        "replay_effect": relative_error(ours[0], ours_off[0]),
        "dense_rel_grad_error": dense_error(steps, config, options.seed),
        "num_steps": float(len(steps)),
        "num_samples": float(sum(map(len, steps))),
        "num_parameters_compared": float(len(ours[0])),
    }
    (options.out / "port_check.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(figures)
    errors = [value for name, value in figures.items() if "grad_error" in name]
    return 0 if max(errors) <= TOLERANCE and figures["replay_effect"] > 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
