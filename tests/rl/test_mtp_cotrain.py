"""MTP layers beside RL: the top-K loss by hand, nothing of it in the trunk, drafts that follow a policy that moved."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.mtp import mtp_distillation_loss, top_k_log_probs
from composer2.model.router_replay import ReplayConfig
from composer2.rl.advantage import AdvantageConfig, group_samples
from composer2.rl.mtp_cotrain import MtpCotrainConfig, distil_mtp
from composer2.rl.train import RLConfig, make_optimizer, update

ROWS = {"row_length": 64, "rows_per_batch": 2}


def test_top_k_by_hand():
    teacher = torch.tensor([[0.5, 0.3, 0.1, 0.1]]).log()
    student = torch.tensor([[0.2, 0.2, 0.5, 0.1]]).log()
    one, two = top_k_log_probs(teacher, student, 2)
    torch.testing.assert_close(one.exp(), torch.tensor([[0.5, 0.3, 0.2]]))
    torch.testing.assert_close(two.exp(), torch.tensor([[0.2, 0.2, 0.6]]))


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(2, 9), st.integers(1, 10))
def test_top_k_is_a_divergence_below_the_whole_one(seed, num_tokens, k):
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (
        torch.log_softmax(3 * torch.randn(5, num_tokens, generator=generator, dtype=torch.float64), -1) for _ in "ab"
    )
    whole = (teacher.exp() * (teacher - student)).sum(-1)
    one, two = top_k_log_probs(teacher, student, k)
    torch.testing.assert_close(one.exp().sum(-1), torch.ones(5, dtype=torch.float64))
    part = (one.exp() * (one - two)).sum(-1)
    assert (part >= -1e-12).all()
    assert (part <= whole + 1e-12).all()
    if k >= num_tokens - 1:
        torch.testing.assert_close(part, whole)


def test_top_k_refuses_less_than_one():
    with pytest.raises(ValueError, match="top_k is 0, accepted is 1 or more"):
        top_k_log_probs(torch.zeros(1, 4), torch.zeros(1, 4), 0)


@pytest.fixture
def samples(policy):
    """Two groups with unequal rewards."""
    made = policy.model()
    sampler = policy.engine(made)
    groups = [policy.group(sampler, f"task{n}", 4, seed=n) for n in range(2)]
    scored = [
        replace(g, rollouts=tuple(replace(r, reward=float(r.sample_index % 2)) for r in g.rollouts)) for g in groups
    ]
    return [s for g in scored for s in group_samples(g, AdvantageConfig())]


@pytest.mark.parametrize("replay", [None, ReplayConfig()])
@pytest.mark.parametrize(("row_length", "rows_per_batch"), [(4096, 100), (1, 1)])
def test_gradient_is_on_the_mtp_layers_alone_and_that_of_the_definition(
    policy, samples, replay, row_length, rows_per_batch
):
    """With other experts recorded than the trunk's own, and samples of unlike numbers of sampled tokens."""
    for index, sample in enumerate(samples):
        routes = np.where(sample.routes < 0, sample.routes, 3 - sample.routes)
        mask = sample.loss_mask & (np.arange(len(sample.loss_mask)) >= len(sample.loss_mask) - 1 - index % 5)
        samples[index] = replace(sample, routes=routes, loss_mask=mask)
    made = policy.model()
    config = MtpCotrainConfig(every=1, top_k=1000)
    figures = distil_mtp(made, samples, config, replay=replay, row_length=row_length, rows_per_batch=rows_per_batch)
    found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    assert found
    assert all(name.startswith("mtp.") for name in found)
    # The definition, one sample at a time: mean over the predictions of sampled tokens.
    other = policy.model()
    total, terms = 0, []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype("int64"))[None]
        routes = None if replay is None else torch.from_numpy(sample.routes.astype("int64"))[None]
        out = other(ids, routes_BTLK=routes)
        (drafts,) = other.mtp_logits(out.hidden_BTD, ids, detach_trunk=True)
        for t in range(ids.shape[1] - 2):
            if sample.loss_mask[t + 2]:
                p = torch.log_softmax(out.logits_BTV[0, t + 1].detach(), -1)
                q = torch.log_softmax(drafts[0, t], -1)
                terms.append((p.exp() * (p - q)).sum())
                total += 1
    loss = torch.stack(terms).sum() / total
    loss.backward()
    assert figures["mtp_loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for name, parameter in other.named_parameters():
        if name.startswith("mtp.") and parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-7)


def trained(policy, samples, every, steps=1):
    made = policy.model()
    config = RLConfig(mtp=MtpCotrainConfig(every=every), **ROWS)
    optimizer = make_optimizer(made, config)
    for step in range(steps):
        metrics = update(made, optimizer, samples, config, step)
    return made.state_dict(), metrics


def test_the_policy_is_trained_as_without(policy, samples):
    alone, _ = trained(policy, samples, 0)
    beside, metrics = trained(policy, samples, 1)
    start = policy.model().state_dict()
    assert 0 < metrics["mtp_acceptance"] < 1
    for name, tensor in start.items():
        if name.startswith("mtp."):
            assert torch.equal(alone[name], tensor)
        else:
            assert torch.equal(alone[name], beside[name])
    assert any(not torch.equal(beside[name], start[name]) for name in start if name.startswith("mtp."))


def test_steps_between_leave_the_layers_alone(policy, samples):
    one, _ = trained(policy, samples, 3, steps=1)
    three, metrics = trained(policy, samples, 3, steps=3)
    assert "mtp_loss" not in metrics
    # Adam has momentum, but a group without gradients takes no step.
    assert all(torch.equal(one[name], three[name]) for name in one if name.startswith("mtp."))


def test_drafts_follow_a_policy_that_moved(policy, samples):
    made = policy.model()
    with torch.no_grad():
        for parameter in made.lm_head.parameters():
            parameter.mul_(8.0)  # a sharper policy, which the MTP layers' own weights do not know yet
    optimizer = torch.optim.Adam(made.mtp.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(distil_mtp(made, samples, MtpCotrainConfig(every=1), replay=None, **ROWS))
        optimizer.step()
    assert losses[-1]["mtp_loss"] < 0.5 * losses[0]["mtp_loss"]
    assert losses[-1]["mtp_acceptance"] > losses[0]["mtp_acceptance"]


def test_the_loss_takes_top_k():
    torch.manual_seed(0)
    main, draft = torch.randn(1, 6, 10), torch.randn(1, 6, 10)
    whole = mtp_distillation_loss(main, [draft])
    assert 0 < mtp_distillation_loss(main, [draft], top_k=2) < whole


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"every": -1}, "every is -1"), ({"top_k": 0}, "top_k is 0"), ({"lr": float("nan")}, "lr is nan")],
)
def test_bad_values_are_named(fields, message):
    with pytest.raises(ValueError, match=f"MtpCotrainConfig.{message}, accepted"):
        MtpCotrainConfig(**fields)
