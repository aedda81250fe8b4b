"""KL estimators, and the gradients of each way a KL can enter, by exhaustive enumeration."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.rl.kl import KLConfig, chain_kl_advantages, entropy, estimate, exact_kl, reward_to_go

POLICY = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64)
REFERENCE = torch.tensor([-0.4, 0.5, 0.1], dtype=torch.float64)


def exact_gradient(function, logits):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(function(logits), logits)[0]


def test_estimators_by_hand():
    q, p = np.log(0.5), np.log(0.25)  # r = 1/2
    assert estimate("k1", q, p) == pytest.approx(np.log(2))
    assert estimate("k2", q, p) == pytest.approx(np.log(2) ** 2 / 2)
    assert estimate("k3", np.array(q), np.array(p)) == pytest.approx(0.5 - 1 + np.log(2))


@given(st.lists(st.floats(-3, 3), min_size=3, max_size=3), st.lists(st.floats(-3, 3), min_size=3, max_size=3))
@settings(max_examples=50)
def test_k1_and_k3_have_the_exact_expectation(policy, reference):
    q = torch.log_softmax(torch.tensor(policy, dtype=torch.float64), 0)
    p = torch.log_softmax(torch.tensor(reference, dtype=torch.float64), 0)
    exact = float(exact_kl(q, p))
    for name in ("k1", "k3"):
        assert float((q.exp() * estimate(name, q, p)).sum()) == pytest.approx(exact, abs=1e-10)
    assert (estimate("k3", q, p) >= -1e-12).all()


def test_what_each_estimator_does_as_reward_and_as_loss():
    """Score function with k1 = grad KL; with k3 = grad [KL(q|p) - KL(p|q)]. As a loss: k1 gives 0, k2 gives grad KL."""
    exact = exact_gradient(lambda x: exact_kl(x, REFERENCE), POLICY)
    reverse = exact_gradient(lambda x: exact_kl(REFERENCE, x), POLICY)
    probs, p = torch.softmax(POLICY, 0), torch.log_softmax(REFERENCE, 0)

    def as_reward(name):
        values = estimate(name, torch.log_softmax(POLICY, 0), p)
        return exact_gradient(lambda x: (probs * values * torch.log_softmax(x, 0)).sum(), POLICY)

    def as_loss(name):
        return exact_gradient(lambda x: (probs * estimate(name, torch.log_softmax(x, 0), p)).sum(), POLICY)

    torch.testing.assert_close(as_reward("k1"), exact, atol=1e-12, rtol=0)
    torch.testing.assert_close(as_reward("k3"), exact - reverse, atol=1e-12, rtol=0)
    torch.testing.assert_close(as_loss("k1"), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(as_loss("k2"), exact, atol=1e-12, rtol=0)
    assert exact.abs().max() > 0.05
    assert reverse.abs().max() > 0.05


def sequence_log_probs(tables):
    """log q of both tokens of every two-token sequence: first from tables[0], second from the row of the first."""
    first = torch.log_softmax(tables[0], -1)
    second = torch.log_softmax(tables[1:], -1)
    return [(first[a], second[a, b]) for a, b in itertools.product(range(2), range(2))]


@pytest.mark.parametrize("split", [False, True])
def test_two_step_gradient_needs_the_reward_to_go(split):
    """An autoregressive toy, enumerated: the advantages built from k1 reproduce the exact gradient of the sequence KL;
    each token's own k1 does not. With `split` the two tokens lie in two windows of one chain."""
    generator = torch.Generator().manual_seed(0)
    tables = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    reference = torch.randn(3, 2, generator=generator, dtype=torch.float64)

    def sequence_kl(x):
        pairs = zip(sequence_log_probs(x), sequence_log_probs(reference), strict=True)
        return sum((q1 + q2).exp() * (q1 + q2 - p1 - p2) for (q1, q2), (p1, p2) in pairs)

    exact = exact_gradient(sequence_kl, tables)
    leaf = tables.clone().requires_grad_()
    to_go, own = 0.0, 0.0
    for q, p in zip(sequence_log_probs(leaf), sequence_log_probs(reference), strict=True):
        weight = float((q[0] + q[1]).detach().exp())
        behaviour = np.array([float(q[0].detach()), float(q[1].detach())])
        against = np.array([float(p[0]), float(p[1])])
        if split:
            windows = [(behaviour[:1], against[:1]), (behaviour[1:], against[1:])]
        else:
            windows = [(behaviour, against)]
        terms = chain_kl_advantages(
            [b for b, _ in windows],
            [a for _, a in windows],
            [np.ones(len(b), bool) for b, _ in windows],
            KLConfig(weight=1.0),
        )
        advantages = np.concatenate(terms)
        to_go = to_go - weight * sum(a * lp for a, lp in zip(advantages, q, strict=True))
        own = own + weight * sum(k * lp for k, lp in zip(behaviour - against, q, strict=True))
    torch.testing.assert_close(torch.autograd.grad(to_go, leaf, retain_graph=True)[0], exact, atol=1e-6, rtol=0)
    assert (torch.autograd.grad(own, leaf)[0] - exact).abs().max() > 0.02


@given(st.lists(st.floats(-5, 5), max_size=6))
def test_reward_to_go_is_the_suffix_sum(values):
    expected = [sum(values[t:]) for t in range(len(values))]
    np.testing.assert_allclose(reward_to_go(np.array(values)), expected, atol=1e-12)


def test_k3_variance_explodes_where_k1_does_not():
    """Fig. 4: N(0,1) against N(mu,1), KL = mu^2 / 2, Var k1 = mu^2."""
    generator = np.random.default_rng(0)
    x, mu = generator.standard_normal(100_000), 3.0
    log_q, log_p = -(x**2) / 2, -((x - mu) ** 2) / 2
    k1, k3 = estimate("k1", log_q, log_p), estimate("k3", log_q, log_p)
    assert k1.mean() == pytest.approx(mu**2 / 2, abs=0.05)
    assert k1.var() == pytest.approx(mu**2, rel=0.03)
    assert k3.var() > 20 * k1.var()


def test_entropy_by_hand():
    probs = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]], dtype=torch.float64)
    logits = torch.log(probs.clamp_min(1e-300)) + 7.0
    torch.testing.assert_close(entropy(logits), torch.tensor([1.5 * np.log(2), 0.0], dtype=torch.float64))
    assert entropy(torch.zeros(1, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_errors():
    with pytest.raises(ValueError, match=r"KLConfig\.weight is -1"):
        KLConfig(weight=-1)
    with pytest.raises(ValueError, match=r"KLConfig\.estimator is 'k4'"):
        KLConfig(estimator="k4")
    with pytest.raises(ValueError, match="estimator is 'k4'"):
        estimate("k4", np.zeros(1), np.zeros(1))


@pytest.mark.parametrize(
    ("behaviour", "reference", "mask", "message"),
    [
        (np.zeros(2), np.zeros(3), np.ones(3, bool), r"behaviour_logprobs\[0\] has shape \(2,\)"),
        (np.zeros(3), np.zeros(2), np.ones(3, bool), r"reference_logprobs\[0\] has shape \(2,\)"),
        (np.zeros(3), np.zeros(3), np.ones(3, int), r"sampled\[0\] has dtype int64"),
    ],
)
def test_arrays_that_do_not_fit_a_chain_are_refused(behaviour, reference, mask, message):
    with pytest.raises(ValueError, match=message):
        chain_kl_advantages([behaviour], [reference], [mask], KLConfig(weight=1.0))


def test_masked_logits_and_arrays_of_unlike_shapes():
    masked = torch.tensor([0.0, 0.0, -torch.inf])
    assert float(entropy(masked)) == pytest.approx(np.log(2))  # 0 log 0 is 0
    with pytest.raises(ValueError, match=r"reference_logprobs has shape \(3,\), accepted is .*: \(3, 1\)"):
        estimate("k1", np.zeros((3, 1)), np.zeros(3))
