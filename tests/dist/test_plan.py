"""What `composer2 plan` says, against real ranks, against what autograd keeps, and against arithmetic by hand."""

import importlib.util
import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from composer2.cli import main
from composer2.dist.meshes import Degrees
from composer2.dist.plan import (
    DoesNotFit,
    PlanConfig,
    candidate_layouts,
    choose_plan,
    context_traffic,
    expert_traffic,
    make_plan,
)
from composer2.dist.plan_activations import ActivationShape, activation_bytes, block_bytes
from composer2.dist.plan_state import fsdp_traffic, gathered_bytes, model_parameters, state_bytes
from composer2.model.config import ModelConfig
from composer2.model.families import FAMILIES
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.loss import target_logprobs

spec = importlib.util.spec_from_file_location("composer2_dist_plan_job", Path(__file__).parent / "plan_job.py")
assert spec is not None
assert spec.loader is not None
plan_job = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = plan_job
spec.loader.exec_module(plan_job)

CASES = [
    pytest.param(world, layout, compute, id=f"{'-'.join(map(str, layout))}-{compute}")
    for world, layouts in plan_job.LAYOUTS.items()
    for layout in layouts
    for compute in ("float32", "bfloat16")
]
KIMI = FAMILIES["kimi-k2.5"]()

# ---------------------------------------------------------------------------------------------------------------------
# Real ranks


@pytest.mark.dist
@pytest.mark.parametrize(("world", "layout", "compute"), CASES)
def test_state_and_traffic_equal_and_activations_come_near_what_real_ranks_count(run_ranks, world, layout, compute):
    config, tokens = plan_job.CONFIG, plan_job.ROWS * plan_job.LENGTH
    dp, cp, ep = layout
    degrees = Degrees(dp=dp, cp=cp, ep=ep)
    size = 4 if compute == "float32" else 2
    run = PlanConfig(compute=compute, checkpointing="none", wire="native" if size == 4 else "mxfp8")
    shape = ActivationShape(
        tokens=tokens // cp, gathered_tokens=tokens, compute_bytes=size, expert_ranks=ep, fused_norm=False
    )
    counts = run_ranks("plan_job.py", "job", world)[",".join(map(str, layout)) + f" {compute}"]
    assert len(counts) == world
    for rank, count in enumerate(counts):
        state = state_bytes(config, degrees, storage_bytes=4, rank=rank)
        assert (count["weights"], count["gradients"], count["optimizer"]) == (
            state.weights,
            state.gradients,
            state.optimizer,
        )
        planned = activation_bytes(config, shape, "none")
        assert planned == pytest.approx(count["activations"], rel=0.02)  # the promise is 10 %
        assert count["all_to_all"] == expert_traffic(config, degrees, run, tokens=tokens // cp)
        weights = fsdp_traffic(config, degrees, compute_bytes=size, reduce_bytes=4)
        latents = context_traffic(config, degrees, run, tokens=tokens // cp)
        assert count["gather"] + count["scatter"] == weights + latents


# ---------------------------------------------------------------------------------------------------------------------
# Activations against what autograd keeps


class _FusedNorm(torch.autograd.Function):
    """Keeps what a fused kernel keeps: the input and one number a row. Its gradient is not needed here."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        scale = (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x.float() * scale * weight.float()).to(x.dtype)


def fused_norm(x, shape, weight, eps):
    return _FusedNorm.apply(x, weight, eps)


def kept_bytes(run: Callable[[], object], model: torch.nn.Module) -> int:
    """Bytes of the storages that autograd keeps of `run()`, each once, weights not."""
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        key = tensor.untyped_storage()._cdata
        if key not in weights:
            kept.setdefault(key, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    assert result is not None
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def run_policy(model: Transformer, rows: int, length: int) -> torch.Tensor:
    """Log-probs of every token, as the trainer computes them."""
    ids = torch.randint(0, model.config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(0))
    hidden = model(ids, with_logits=False).hidden_BTD.flatten(0, 1)
    return target_logprobs(model.lm_head(hidden), ids.flatten())[0]


def grouped(**fields) -> ModelConfig:
    return ModelConfig(attention="grouped", num_key_value_heads=2, num_nextn_predict_layers=0, **fields)


SHAPES = {
    "tiny": ModelConfig(num_nextn_predict_layers=0),
    "low-rank queries, many experts a token": ModelConfig(
        q_lora_rank=48, num_experts_per_tok=6, num_hidden_layers=2, num_nextn_predict_layers=0
    ),
    "wide values, softmax, no shared experts": ModelConfig(
        v_head_dim=64, hidden_size=256, first_k_dense_replace=0, n_shared_experts=0, scoring_func="softmax",
        num_hidden_layers=2, num_nextn_predict_layers=0,
    ),
    "equal widths": ModelConfig(v_head_dim=48, num_hidden_layers=2, num_nextn_predict_layers=0),
    "grouped, norm a head": grouped(head_dim=40, qk_norm="head", num_experts_per_tok=4),
    "grouped, flat norm": grouped(head_dim=64, qk_norm="flat", first_k_dense_replace=0, n_shared_experts=0),
    "dense": grouped(first_k_dense_replace=4, vocab_size=4000),
}  # fmt: skip


@pytest.mark.parametrize("norm", ["plain", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "length"), [(1, 64), (3, 96)])
@pytest.mark.parametrize("name", SHAPES)
def test_activations_come_near_what_autograd_keeps(name, rows, length, dtype, norm, monkeypatch):
    config = SHAPES[name]
    if norm == "fused":
        monkeypatch.setattr(F, "rms_norm", fused_norm)
    model = Transformer(config).to(dtype)
    init_weights(model, 0)
    tokens = rows * length
    shape = ActivationShape(
        tokens=tokens, gathered_tokens=tokens, compute_bytes=dtype.itemsize, fused_norm=norm == "fused"
    )
    counted = kept_bytes(lambda: run_policy(model, rows, length), model)
    assert activation_bytes(config, shape, "none") == pytest.approx(counted, rel=0.03)  # the promise is 10 %


@pytest.mark.parametrize(("vocab", "experts_a_token"), [(4096, 2), (64, 8)])
def test_checkpointed_blocks_keep_their_inputs_and_one_of_them_at_a_time(vocab, experts_a_token):
    """With the large vocabulary the head is the widest moment, with the small one a block computed again."""
    config = ModelConfig(vocab_size=vocab, num_experts_per_tok=experts_a_token, num_nextn_predict_layers=0)
    model, rows, length = Transformer(config), 2, 96
    init_weights(model, 0)
    tokens = rows * length
    block = model.layers[-1]
    x = torch.randn(rows, length, config.hidden_size, requires_grad=True)
    rope = model._geometry(torch.zeros(rows, length, dtype=torch.int64), None, None, torch.float32)[0]
    one = kept_bytes(lambda: block(x, rope, None), model)
    head = kept_bytes(
        lambda: target_logprobs(model.lm_head(model.norm(x)), torch.zeros(rows, length, dtype=torch.int64))[0], model
    )
    for layer in model.layers:
        layer.forward = (lambda run: lambda *args: checkpoint(run, *args, use_reentrant=False))(layer.forward)
    at_head = kept_bytes(lambda: run_policy(model, rows, length), model)
    shape = ActivationShape(tokens=tokens, gathered_tokens=tokens, compute_bytes=4, fused_norm=False)
    assert (head > one) == (vocab == 4096)
    planned = activation_bytes(config, shape, "block")
    assert planned == pytest.approx(at_head - head + max(head, one), rel=0.05)
    assert planned < 0.5 * activation_bytes(config, shape, "none")


# ---------------------------------------------------------------------------------------------------------------------
# Algebra and arithmetic


@settings(max_examples=60, deadline=None)
@given(dp=st.integers(1, 12), cp=st.integers(1, 6), ep=st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_the_pieces_of_all_ranks_are_the_model_once(dp, cp, ep):
    if dp * cp % ep:
        return
    layout = Degrees(dp=dp, cp=cp, ep=ep)
    config = replace(plan_job.CONFIG, num_nextn_predict_layers=0)
    states = [state_bytes(config, layout, storage_bytes=1, rank=rank) for rank in range(layout.world)]
    assert sum(state.gradients for state in states) == config.num_parameters
    assert states[0].weights == max(state.weights for state in states)


def test_kimi_k2_5_by_hand():
    """256 GPUs, EP 8: a rank has 48 experts cut over 32 ranks, two for the fullest; the rest divides by 256."""
    parameters = model_parameters(KIMI)
    assert sum(math.prod(parameter.shape) for parameter in parameters) == 1_026_408_209_408
    experts = 60 * 384 * 3 * 7168 * 2048
    dense = 1_026_408_209_408 - experts
    state = state_bytes(KIMI, Degrees(dp=32, cp=8, ep=8), storage_bytes=4)
    own = experts // 384 * 2 * 4 + dense // 256 * 4
    assert state.gradients == pytest.approx(own, rel=1e-3)  # norm weights and routers leave a rest
    assert state.optimizer == 2 * state.gradients + 4 * len(parameters)
    run = PlanConfig(seq_len=131_072)
    plan = make_plan(KIMI, Degrees(dp=32, cp=8, ep=8), run, gpu_bytes=288 * 10**9)
    assert plan.memory["kv_cache"] == 131_072 * 576 * 61 * 2
    assert plan.memory["logits_gradient"] == 131_072 // 8 * 163_840 * 6
    # Latents: seven other ranks' 16,384 tokens of 576 values, forward, again, and their gradient, in two bytes.
    assert plan.traffic["context"] == 61 * 7 * 16_384 * 576 * 2 * 3
    # Rows: 33/32 bytes a value out and two back, twice; two bytes for each of both gradients; 7 of 8 leave the rank.
    assert plan.traffic["expert"] == 60 * 16_384 * 8 * 7 * (2 * (7392 + 14_336) + 2 * 14_336) // 8
    assert plan.tokens_per_step == 32 * 131_072


def test_gathered_weights_by_hand():
    config = ModelConfig(
        vocab_size=10, hidden_size=4, num_hidden_layers=2, first_k_dense_replace=2, intermediate_size=6,
        n_shared_experts=0, attention="grouped", num_attention_heads=1, num_nextn_predict_layers=0,
    )  # fmt: skip
    layer, root = 4 * 4 * 4 + 3 * 4 * 6 + 2 * 4, 2 * 10 * 4 + 4
    expected = (root + 2 * layer) * 2 + layer * (2 + 4)
    assert gathered_bytes(config, Degrees(dp=2), compute_bytes=2, reduce_bytes=4) == expected


def test_context_parallelism_divides_queries_but_not_expanded_keys():
    alone = ActivationShape(tokens=4096, gathered_tokens=4096, compute_bytes=2)
    shared = ActivationShape(tokens=512, gathered_tokens=4096, compute_bytes=2)
    keys = 2 * 4096 * 2 * 64 * 192 + 4096 * 2 * 512
    constant = 4 * 7168 * 384
    whole, part = (block_bytes(KIMI, shape, is_moe=True) - constant for shape in (alone, shared))
    assert part - keys == (whole - keys) // 8


# ---------------------------------------------------------------------------------------------------------------------
# Choice and refusals


def test_the_chosen_layout_fits_and_has_the_least_traffic_a_token():
    chosen, plans = choose_plan(KIMI, 256, PlanConfig(), gpu_bytes=288 * 10**9)
    layouts = {(plan.layout.dp, plan.layout.cp, plan.layout.ep) for plan in plans}
    assert layouts == {(256 // cp, cp, ep) for cp in (1, 2, 4, 8) for ep in (1, 2, 4, 8)}
    assert chosen.fits
    assert chosen.traffic_per_token == min(plan.traffic_per_token for plan in plans if plan.fits)
    assert not all(plan.fits for plan in plans)
    assert all(plan.fits == (plan.total <= 0.9 * 288e9) for plan in plans)


def test_what_is_too_large_is_named():
    with pytest.raises(DoesNotFit, match=r"accepted is 162\.0 GB; the largest term is optimizer: optimizer 1026"):
        choose_plan(KIMI, 8, PlanConfig(), gpu_bytes=180 * 10**9)
    long = PlanConfig(seq_len=262_144, checkpointing="none")
    with pytest.raises(DoesNotFit, match="the largest term is activations"):
        choose_plan(KIMI, 256, long, gpu_bytes=288 * 10**9, cp=8, ep=8)


@pytest.mark.parametrize(
    ("degrees", "text"),
    [
        ({"cp": 7}, "cp is 7, accepted is a divisor of the 64 GPUs"),
        ({"ep": 64 * 2}, "ep is 128, accepted is a divisor of the 64 GPUs"),
        ({"dp": 16, "cp": 8}, "dp \\* cp is 16 \\* 8 = 128, accepted is the number of GPUs 64"),
        ({"cp": 64}, "row_length is 1000, accepted is a multiple of 2 \\* cp = 128"),
    ],
)
def test_layouts_that_do_not_divide_are_refused(degrees, text):
    with pytest.raises(ValueError, match=text):
        choose_plan(KIMI, 64, PlanConfig(seq_len=1000), gpu_bytes=10**12, **degrees)


def test_experts_that_do_not_divide_are_refused():
    config = replace(plan_job.CONFIG, n_routed_experts=6)
    with pytest.raises(ValueError, match="n_routed_experts is 6, accepted is a multiple of ep 4"):
        make_plan(config, Degrees(dp=4, ep=4), PlanConfig(seq_len=64), gpu_bytes=10**12)
    dense = FAMILIES["qwen3-0.6b"]()
    with pytest.raises(ValueError, match="ep is 2, accepted is 1 for a model without experts"):
        make_plan(dense, Degrees(dp=2, ep=2), PlanConfig(seq_len=64), gpu_bytes=10**12)
    assert {layout.ep for layout in candidate_layouts(dense, 8)} == {1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("seq_len", 0), ("rows", 0), ("storage", "fp4"), ("wire", "int8"), ("kv_windows", -1), ("usable_frac", 1.5)],
)
def test_misfitting_settings_are_refused(field, value):
    with pytest.raises(ValueError, match=f"PlanConfig.{field} is {value!r}, accepted is"):
        PlanConfig(**{field: value})


def test_the_command_prints_one_record(capsys):
    assert main(["plan", "kimi-k2.5", "--gpus", "256", "--gpu", "b300", "--ep", "8", "--cp", "8", "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    record = record.get("data", record)
    plan = make_plan(KIMI, Degrees(dp=32, cp=8, ep=8), PlanConfig(), gpu_bytes=288 * 10**9)
    assert record["total_bytes"] == plan.total == sum(plan.memory.values())
    assert (record["preset"], record["gpus"], record["gpu"], record["dp"]) == ("kimi-k2.5", 256, "b300", 32)
    assert [layout["ep"] for layout in record["layouts"]] == [8]


@pytest.mark.parametrize(
    ("arguments", "text"), [(["nowhere"], "preset is 'nowhere'"), (["tiny", "--gpu", "a1"], "gpu")]
)
def test_the_command_refuses_unknown_names(arguments, text, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", *arguments, "--gpus", "2"])
    assert stop.value.code == 1
    assert text in capsys.readouterr().err


def test_the_command_says_what_is_too_large(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plan", "kimi-k2.5", "--gpus", "8"])
    assert stop.value.code == 1
    assert "the largest term is optimizer" in capsys.readouterr().err
