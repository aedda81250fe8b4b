"""The job of test_parity.py: every layout against the single process, two optimizer steps, on real gloo ranks.

The reference is the trainer's own single-device path (`trained_logprobs`, `policy_loss`) over the whole batch."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import composer2.dist.fsdp as sharding
from composer2.dist.context_parallel import rank_logprobs, rank_policy_loss, shard_batch
from composer2.dist.expert_parallel import reduce_routing
from composer2.dist.fsdp import clip_gradients, parallelize
from composer2.dist.meshes import Degrees, make_meshes
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer
from composer2.rl.loss import policy_loss
from composer2.rl.pack import fill, to_tensors
from composer2.rl.train import RLConfig, replay_config, trained_logprobs
from composer2.types import Sample

CONFIG = ModelConfig(
    vocab_size=61, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=48,
    moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, num_attention_heads=3, q_lora_rank=12,
    kv_lora_rank=20, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, num_nextn_predict_layers=0,
)  # fmt: skip
UNUSED = (5, 6)
"""Experts nobody chooses: with eight expert ranks, two of them receive nothing."""
ROWS = ((5, 17, 9, 17), (23, 1, 19), (48,), (2, 3, 31, 7))
"""Lengths of the documents of each row of 48 tokens; two rows end in padding."""
PER_TOKEN = ("token_ids", "loss_mask", "advantages", "behaviour_logprobs", "policy_versions", "routes")
RL = RLConfig(replay_tau=0.0)
DENOMINATOR = 37.0
LR = 0.005
LAYOUTS = {
    1: [(1, 1, 1)],
    2: [(2, 1, 2), (1, 2, 1), (1, 2, 2)],
    4: [(2, 2, 4), (2, 2, 2), (1, 4, 4)],
    8: [(2, 4, 8), (4, 2, 4)],
}


@dataclass(frozen=True)
class Case:
    degrees: tuple[int, int, int]
    dtype: str = "float64"
    replay: bool = True
    fault: str = ""

    @property
    def name(self) -> str:
        return "-".join(
            [",".join(map(str, self.degrees)), self.dtype, "replay" if self.replay else "own", self.fault or "right"]
        )


def cases(world: int) -> list[Case]:
    made = [Case(degrees, dtype) for degrees in LAYOUTS[world] for dtype in ("float64", "float32")]
    made.append(Case(LAYOUTS[world][-1], replay=False))
    if world == 2:
        made += [Case((1, 2, 1), fault="chunk_order"), Case((1, 2, 1), fault="replay_off")]
        made += [Case((2, 1, 2), fault="replay_off"), Case((2, 1, 2), fault="divide_factor")]
    return made


def build_model(dtype: torch.dtype, config: ModelConfig = CONFIG) -> Transformer:
    """Matrices large enough that every part matters; the correction bias keeps tokens away from UNUSED."""
    generator = torch.Generator().manual_seed(7)
    model = Transformer(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(1 + 0.1 * draw if parameter.ndim == 1 else draw * parameter.shape[-1] ** -0.5)
        for layer in model.moe_layers():
            layer.gate.e_score_correction_bias[list(UNUSED)] = -10
    return model


def build_batch(config: ModelConfig = CONFIG):
    """Four packed rows; recorded experts at random, some tokens without."""
    rng = np.random.default_rng(3)
    usable = [e for e in range(config.n_routed_experts) if e not in UNUSED]
    rows = []
    for lengths in ROWS:
        row = []
        for length in lengths:
            shape = (length, config.num_moe_layers)
            routes = np.stack([rng.permutation(usable)[: config.num_experts_per_tok] for _ in range(np.prod(shape))])
            routes = routes.reshape(*shape, -1)
            routes[rng.random(length) < 0.2] = -1
            mask = (rng.random(length) < 0.6) & (np.arange(length) > 0)
            row.append(
                Sample(
                    token_ids=rng.integers(0, config.vocab_size, length).astype(np.int32),
                    loss_mask=mask,
                    advantages=np.where(mask, rng.normal(), 0).astype(np.float32),
                    behaviour_logprobs=np.where(mask, rng.normal(-4, 0.3, length), 0).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    routes=routes.astype(np.int16),
                )
            )
        rows.append(row)
    return to_tensors(fill(rows))


def rows_of(batch, dp_rank: int, dp: int):
    parts = {n: v[dp_rank::dp] for n, v in vars(batch).items() if isinstance(v, torch.Tensor)}
    return replace(batch, **parts)


def optimizer_of(model):
    return torch.optim.Adam(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-3)


def record(model, loss, norm, load):
    full = {n: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for n, p in model.named_parameters()}
    return {
        "loss": float(loss.detach()),
        "norm": float(norm),
        "load": load,
        "grads": {n: g.clone() for n, g in full.items()},
    }


def single_process(dtype: torch.dtype, replay: bool) -> list[dict]:
    """Two steps over the whole batch."""
    model, batch, steps = build_model(dtype), build_batch(), []
    optimizer = optimizer_of(model)
    for _ in range(2):
        optimizer.zero_grad()
        logprobs, _, routing = trained_logprobs(model, batch, replace(RL, replay=replay))
        loss, _ = policy_loss(logprobs, batch, RL.loss, DENOMINATOR)
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        norm = torch.sqrt(sum(g.double().square().sum() for g in gradients))
        steps.append(record(model, loss, norm, routing.tokens_per_expert_LE.tolist()))
        steps[-1]["differing"] = int(routing.num_tokens_differing)
        for gradient in gradients:
            gradient.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
        optimizer.step()
    return steps


def over_ranks(case: Case) -> list[dict]:
    """The same two steps on this layout."""
    degrees = Degrees(dp=case.degrees[0], cp=case.degrees[1], ep=case.degrees[2])
    degrees.check(CONFIG, 48)
    meshes = make_meshes(degrees, "cpu")
    right = sharding.sum_gradients
    if case.fault == "divide_factor":
        sharding.sum_gradients = lambda model: None
    model = parallelize(build_model(getattr(torch, case.dtype)), meshes)
    sharding.sum_gradients = right
    batch = shard_batch(rows_of(build_batch(), meshes.dp_rank, degrees.dp), degrees.cp, meshes.cp_rank)
    if case.fault == "chunk_order":  # keys taken to lie as if rank i held chunks 2i and 2i + 1
        batch = replace(batch, key_view=replace(batch.key_view, key_index_M=torch.arange(48)))
    replayed = case.replay and case.fault != "replay_off"
    optimizer, steps = optimizer_of(model), []
    for _ in range(2):
        optimizer.zero_grad()
        logprobs_N, routing = rank_logprobs(model, batch, replay_config(RL) if replayed else None)
        loss = rank_policy_loss(logprobs_N, batch, RL.loss, DENOMINATOR)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        routing = reduce_routing(routing)
        recorded = record(model, total, 0.0, routing.tokens_per_expert_LE.tolist())
        recorded["norm"] = float(clip_gradients(model, 0.5))
        recorded["differing"] = int(routing.num_tokens_differing)
        steps.append(recorded)
        optimizer.step()
    return steps


def relative(value: float, expected: float) -> float:
    return abs(value - expected) / abs(expected)


def compare(steps: list[dict], expected: list[dict]) -> dict:
    """Largest errors over both steps; a tensor's error is its largest difference over its largest entry."""
    errors: dict = {"loss": 0.0, "norm": 0.0, "grads": {}, "loads_equal": True}
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours["grads"].keys() == theirs["grads"].keys()
        errors["loss"] = max(errors["loss"], relative(ours["loss"], theirs["loss"]))
        errors["norm"] = max(errors["norm"], relative(ours["norm"], theirs["norm"]))
        errors["loads_equal"] &= ours["load"] == theirs["load"] and ours["differing"] == theirs["differing"]
        for name, grad in theirs["grads"].items():
            error = float((ours["grads"][name] - grad).abs().max() / grad.abs().max())
            errors["grads"][name] = max(errors["grads"].get(name, 0.0), error)
    errors["unused"] = [sum(layer[e] for s in steps for layer in s["load"]) for e in UNUSED]
    errors["differing"] = [s["differing"] for s in steps]
    return errors


def job(folder: Path) -> None:
    found, expected = {}, {}
    for case in cases(dist.get_world_size()):
        steps = over_ranks(case)
        if dist.get_rank() == 0:
            key = (case.dtype, case.replay)
            if key not in expected:
                expected[key] = single_process(getattr(torch, case.dtype), case.replay)
            found[case.name] = compare(steps, expected[key])
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(found))


def mtp_loss(model: Transformer, batch) -> torch.Tensor:
    """Next-token loss of the trunk and of the MTP module, summed."""
    where = {"position_ids_BT": batch.position_ids, "document_ids_BT": batch.document_ids}
    out = model(batch.token_ids, **where)
    drafts = model.mtp_forward(out.hidden_BTD, batch.token_ids, **where).logits[0]
    total = out.hidden_BTD.new_zeros(())
    for ahead, logits in ((1, out.logits_BTV), (2, drafts)):
        logprobs = torch.log_softmax(logits[:, :-ahead], dim=-1)
        picked = logprobs.gather(-1, batch.token_ids[:, ahead:, None])[..., 0]
        total = total - (picked * (batch.document_ids[:, ahead:] >= 0)).sum()
    return total / 100


def mtp_job(folder: Path) -> None:
    """MTP modules over two data and two expert ranks, float64."""
    sizes = replace(CONFIG, num_nextn_predict_layers=1)
    meshes = make_meshes(Degrees(dp=2, ep=2), "cpu")
    model, single = parallelize(build_model(torch.float64, sizes), meshes), build_model(torch.float64, sizes)
    loss = mtp_loss(model, rows_of(build_batch(sizes), meshes.dp_rank, 2))
    loss.backward()
    right = mtp_loss(single, build_batch(sizes))
    right.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    steps = [record(m, value, 1.0, []) | {"differing": 0} for m, value in ((model, total), (single, right))]
    errors = compare(steps[:1], [steps[1]]) if dist.get_rank() == 0 else {}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(errors))
