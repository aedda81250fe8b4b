"""The loss against hand calculation, finite sums and a real tiny model."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.advantage import AdvantageConfig, group_samples, segment_sample
from composer2.rl.loss import (
    LossConfig,
    check_loss_mask,
    clip_gradients,
    loss_denominator,
    mean_metrics,
    policy_loss,
    target_logprobs,
    token_logprobs,
)
from composer2.rl.pack import pack, to_tensors


def one_token(build, log_ratio, advantage, **config):
    """(d loss / d logprob, loss, sums) of one trained token, denominator 1."""
    batch = to_tensors(pack([build.sample(3, num_sampled=1, advantage=advantage)], row_length=3, rows_per_batch=1)[0])
    logprobs = torch.zeros(1, 3, dtype=torch.float64)
    logprobs[0, 2] = -1.0 + log_ratio
    logprobs.requires_grad_()
    loss, sums = policy_loss(logprobs, batch, LossConfig(**config), 1.0)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert (gradient[0, :2] == 0).all()
    return float(gradient[0, 2]), float(loss.detach()), sums


@pytest.mark.parametrize(
    ("correction", "ratio", "advantage", "slope", "bound"),
    [
        # none: d/dlogp of -A logp is -A, whatever the ratio.
        ("none", 3.0, 2.0, -2.0, 0),
        # ppo_clip, range [0.8, 1.28]: inside -A r; beyond the clip on the harmful side 0.
        ("ppo_clip", 1.1, 2.0, -2.2, 0),
        ("ppo_clip", 1.5, 2.0, 0.0, 1),
        ("ppo_clip", 0.5, 2.0, -1.0, 0),
        ("ppo_clip", 0.5, -2.0, 0.0, 1),
        ("ppo_clip", 1.5, -2.0, 3.0, 0),
        # tis: -min(r, 2) A.
        ("tis", 1.5, 2.0, -3.0, 0),
        ("tis", 4.0, 2.0, -4.0, 1),
        ("tis", 4.0, -2.0, 4.0, 1),
        # cispo: -min(r, 1.28) A, and no token is dropped.
        ("cispo", 1.2, 2.0, -2.4, 0),
        ("cispo", 4.0, 2.0, -2.56, 1),
        ("cispo", 0.1, -2.0, 0.2, 0),
    ],
)
def test_slope_of_every_correction(build, correction, ratio, advantage, slope, bound):
    gradient, _, sums = one_token(build, math.log(ratio), advantage, correction=correction)
    assert gradient == pytest.approx(slope, abs=1e-6)
    assert float(sums["clip_frac"]) == bound


def test_value_by_hand(build):
    # Two samples, 2 trained tokens each, advantages 1 and -0.5, log-probs equal to the behaviour's: ratio 1.
    samples = [build.sample(4, advantage=1.0), build.sample(5, advantage=-0.5, seed=1)]
    batch = to_tensors(pack(samples, row_length=16, rows_per_batch=1)[0])
    config = LossConfig(norm_length=10)
    denominator = loss_denominator(config, num_rollouts_planned=8)
    assert denominator == 80
    loss, sums = policy_loss(batch.behaviour_logprobs.clone(), batch, config, denominator)
    assert float(loss) == pytest.approx(-(2 * 1.0 - 2 * 0.5) / 80)
    metrics = mean_metrics([sums])
    assert metrics["num_tokens"] == 4
    assert metrics["ratio"] == pytest.approx(1.0)
    assert metrics["advantage_abs"] == pytest.approx(0.75)
    assert metrics["logprob"] == pytest.approx(-1.0)
    assert metrics["clip_frac"] == 0


def test_metrics_of_parts_equal_those_of_the_whole(build):
    samples = [build.sample(4 + i, advantage=float(i), seed=i, logprob=-0.1 * i) for i in range(5)]

    def metrics(row_length, rows_per_batch):
        sums = []
        for batch in map(to_tensors, pack(samples, row_length=row_length, rows_per_batch=rows_per_batch)):
            sums.append(policy_loss(torch.full(batch.token_ids.shape, -0.7), batch, LossConfig(), 40.0, None)[1])
        return mean_metrics(sums)

    assert metrics(8, 1) == pytest.approx(metrics(64, 8), rel=1e-5)


def test_tokens_normaliser_counts_the_whole_step():
    config = LossConfig(normaliser="tokens")
    assert loss_denominator(config, num_rollouts_planned=8, num_tokens=123) == 123
    with pytest.raises(ValueError, match="num_tokens is None"):
        loss_denominator(config, num_rollouts_planned=8)


@given(st.integers(0, 10_000), st.floats(0.3, 2.0))
@settings(max_examples=25)
def test_token_logprobs_against_brute_force(seed, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64) * 3
    tokens = torch.randint(0, 7, (2, 5), generator=generator)
    logprobs, entropies = token_logprobs(logits, tokens, temperature, with_entropy=True)
    assert entropies is not None
    assert (logprobs[:, 0] == 0).all()
    assert (entropies[:, 0] == 0).all()
    for b in range(2):
        for t in range(1, 5):
            weights = [math.exp(float(logits[b, t - 1, v]) / temperature) for v in range(7)]
            probs = [weight / sum(weights) for weight in weights]
            assert float(logprobs[b, t]) == pytest.approx(math.log(probs[int(tokens[b, t])]), abs=1e-9)
            assert float(entropies[b, t]) == pytest.approx(-sum(p * math.log(p) for p in probs), abs=1e-9)


def test_half_precision_logits_are_scored_in_float32_and_greedy_as_temperature_one():
    logits = torch.randn(4, 9, dtype=torch.bfloat16)
    targets = torch.tensor([0, 3, 8, 1])
    logprobs, none = target_logprobs(logits, targets, 0.0)
    assert none is None
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, torch.log_softmax(logits.float(), -1)[range(4), targets])
    with pytest.raises(ValueError, match="temperature is -1"):
        target_logprobs(logits, targets, -1)


def test_distance_from_the_sampler_by_hand(build):
    """k1 of the sampler against the trainer, log mu - log pi, on a token that the sampler drew."""
    _, _, sums = one_token(build, 0.5, 2.0)
    assert float(sums["behaviour_k1"]) == pytest.approx(-0.5)


def test_masked_values_never_enter_the_arithmetic(build):
    batch = to_tensors(pack([build.sample(5)], row_length=8, rows_per_batch=1)[0])
    logprobs = torch.where(batch.loss_mask, -1.0, float("inf")).requires_grad_()
    loss, _ = policy_loss(logprobs, batch, LossConfig(), 1.0)
    gradient = torch.autograd.grad(loss, logprobs)[0]
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("correction", ["none", "ppo_clip", "tis", "cispo", "gspo"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("field", ["logprobs_BT", "advantages", "behaviour_logprobs"])
def test_trained_values_must_be_finite(build, field, value, correction):
    """The clamp of the log-ratio has gradient 0 at nan: without the check the token would silently not be trained."""
    batch = to_tensors(pack([build.sample(5)], row_length=5, rows_per_batch=1)[0])
    logprobs = torch.full((1, 5), -1.0)
    target = logprobs if field == "logprobs_BT" else getattr(batch, field)
    target[0, 4] = value
    with pytest.raises(ValueError, match=rf"{field} holds {value} at a trained token, accepted are finite"):
        policy_loss(logprobs.requires_grad_(), batch, LossConfig(correction=correction), 1.0)


def test_an_absurd_ratio_stays_finite(build):
    _, loss, sums = one_token(build, 500.0, -1.0, correction="ppo_clip")
    assert math.isfinite(loss)
    assert float(sums["ratio"]) == pytest.approx(math.exp(20))


def test_first_token_of_a_document_is_refused(build):
    batch = to_tensors(pack([build.sample(4), build.sample(4, seed=1)], row_length=8, rows_per_batch=1)[0])
    check_loss_mask(batch)
    batch.loss_mask[0, 4] = True  # first token of the second document
    with pytest.raises(ValueError, match="first token of a document or padding"):
        policy_loss(torch.zeros(1, 8), batch, LossConfig(), 1.0)


def test_chain_through_a_real_model_equals_a_loop_over_its_tokens(build):
    """Packed, replay on: the gradient is that of -sum A log pi over segments computed one by one, unpacked."""
    model = Transformer(tiny_config())
    init_weights(model, 0)
    model.double()
    segments = [build.segment(6 + i, 3, layers=1, experts=2, seed=i) for i in range(4)]
    group = build.group([1.0, 0.0], segments=[segments[:3], segments[3:]])
    config = LossConfig(correction="none", norm_length=4)
    samples = group_samples(group, AdvantageConfig())
    losses = 0.0
    for batch in map(to_tensors, pack(samples, row_length=16, rows_per_batch=2)):
        out = model(
            batch.token_ids,
            position_ids_BT=batch.position_ids,
            document_ids_BT=batch.document_ids,
            routes_BTLK=batch.routes,
        )
        logprobs, _ = token_logprobs(out.logits_BTV, batch.token_ids)
        losses = losses + policy_loss(logprobs, batch, config, loss_denominator(config, num_rollouts_planned=2))[0]
    expected = 0.0
    for index, part in enumerate(segments):
        tokens = torch.from_numpy(part.token_ids).long()[None]
        logits = model(tokens, routes_BTLK=torch.from_numpy(part.routes).long()[None]).logits_BTV
        log_probs = torch.log_softmax(logits, -1)
        for t in np.flatnonzero(part.sampled):
            expected = expected - (0.5 if index < 3 else -0.5) * log_probs[0, t - 1, tokens[0, t]] / 8
    parameters = [p for name, p in model.named_parameters() if not name.startswith("mtp.")]
    got = torch.autograd.grad(losses, parameters, allow_unused=True)
    want = torch.autograd.grad(expected, parameters, allow_unused=True)
    assert any(w is not None and w.abs().max() > 1e-6 for w in want)
    for g, w in zip(got, want, strict=True):
        if w is None:
            assert g is None or (g == 0).all()
        else:
            torch.testing.assert_close(g, w, atol=1e-10, rtol=1e-7)


def tiny_config():
    return ModelConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=16,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_attention_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
    )


def test_zero_advantage_is_exactly_zero_gradient_through_a_real_model(build):
    """Were the samples of a degenerate group kept, their gradient would be exactly zero, bit by bit."""
    model = Transformer(tiny_config())
    init_weights(model, 0)
    group = build.group([0.3] * 3, segments=[(build.segment(9, 4, layers=1, experts=2, seed=i),) for i in range(3)])
    assert group_samples(group, AdvantageConfig()) == []
    samples = [segment_sample(rollout.segments[0], 0.0) for rollout in group.rollouts]
    for correction in ("none", "ppo_clip", "tis", "cispo"):
        model.zero_grad()
        batch = to_tensors(pack(samples, row_length=32, rows_per_batch=1)[0])
        out = model(
            batch.token_ids,
            position_ids_BT=batch.position_ids,
            document_ids_BT=batch.document_ids,
            routes_BTLK=batch.routes,
        )
        logprobs, _ = token_logprobs(out.logits_BTV, batch.token_ids)
        policy_loss(logprobs, batch, LossConfig(correction=correction), 16.0)[0].backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        assert gradients
        assert all((g == 0).all() for g in gradients)


def test_clip_gradients_by_hand():
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert float(clip_gradients([a, b], 10.0)) == pytest.approx(5.0)
    assert a.grad.item() == pytest.approx(3.0)
    clip_gradients([a, b], 1.0)
    assert [a.grad.item(), b.grad.item()] == pytest.approx([0.6, 0.8], rel=1e-5)


def test_a_gradient_that_is_not_finite_is_refused_before_it_is_spread():
    a, b = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    a.grad, b.grad = torch.tensor([math.nan]), torch.tensor([4.0])
    with pytest.raises(ValueError, match="the gradient norm is nan, accepted is a finite number"):
        clip_gradients([a, b], 1.0)
    assert b.grad.item() == 4.0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"correction": "vtrace"}, "LossConfig.correction is 'vtrace'"),
        ({"eps_low": 0}, "LossConfig.eps_low is 0"),
        ({"eps_high": -1}, "LossConfig.eps_high is -1"),
        ({"tis_cap": 0}, "LossConfig.tis_cap is 0"),
        ({"normaliser": "rows"}, "LossConfig.normaliser is 'rows'"),
        ({"norm_length": 0}, "LossConfig.norm_length is 0"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        LossConfig(**fields)


def test_logprobs_of_another_shape_are_refused(build):
    batch = to_tensors(pack([build.sample(3, num_sampled=1)], row_length=3, rows_per_batch=1)[0])
    with pytest.raises(ValueError, match=r"logprobs_BT has shape \(1, 2\), accepted is \[B, T\] = \(1, 3\)"):
        policy_loss(torch.zeros(1, 2), batch, LossConfig(), 1.0)


@pytest.mark.parametrize("field", ["advantages", "behaviour_logprobs", "document_ids"])
def test_a_trailing_dimension_does_not_multiply_every_token_by_every_other(build, field):
    """[N] times [N, 1] would be [N, N]: three trained tokens gave three times their loss."""
    batch = to_tensors(pack([build.sample(5, num_sampled=3)], row_length=5, rows_per_batch=1)[0])
    wrong = replace(batch, **{field: getattr(batch, field)[..., None]})
    with pytest.raises(ValueError, match=rf"{field} has shape \(1, 5, 1\), accepted is \[B, T\] = \(1, 5\)"):
        policy_loss(torch.full((1, 5), -1.0), wrong, LossConfig(), 1.0)
    with pytest.raises(ValueError, match=r"entropy_BT has shape \(1, 4\)"):
        policy_loss(torch.full((1, 5), -1.0), batch, LossConfig(), 1.0, torch.zeros(1, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int64])
def test_logprobs_too_coarse_for_a_ratio_are_refused(build, dtype):
    batch = to_tensors(pack([build.sample(5)], row_length=5, rows_per_batch=1)[0])
    with pytest.raises(ValueError, match=rf"logprobs_BT has dtype {dtype}, accepted is torch.float32"):
        policy_loss(torch.full((1, 5), -1, dtype=dtype), batch, LossConfig(), 1.0)
    with pytest.raises(ValueError, match=r"loss_mask has dtype torch.int64, accepted is torch.bool"):
        policy_loss(torch.full((1, 5), -1.0), replace(batch, loss_mask=batch.loss_mask.long()), LossConfig(), 1.0)


def test_what_would_be_cut_or_broadcast_is_refused():
    with pytest.raises(ValueError, match=r"targets has shape \(1, 2\), accepted is logits without V: \(2, 2\)"):
        token_logprobs(torch.zeros(2, 3, 4), torch.zeros(1, 3, dtype=torch.int64))
    for temperature in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"temperature is {temperature}, accepted is a finite number >= 0"):
            target_logprobs(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64), temperature)
    with pytest.raises(ValueError, match="num_tokens is -5, accepted is >= 0"):
        loss_denominator(LossConfig(normaliser="tokens"), num_rollouts_planned=1, num_tokens=-5)
