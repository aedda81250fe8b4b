"""Fault 11: differentiating a sampled k1 has zero gradient in expectation, so the KL does nothing."""

import torch

from composer2.rl.kl import estimate, exact_kl

NUM_SAMPLES = 1_000_000


def test_sampled_gradient_of_the_score_function_is_the_exact_one_within_three_standard_errors():
    logits = torch.tensor([0.4, -0.3, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.2], dtype=torch.float64), 0)
    exact = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    log_q = torch.log_softmax(logits, 0).detach()
    x = torch.multinomial(log_q.exp(), NUM_SAMPLES, replacement=True, generator=torch.Generator().manual_seed(0))
    scores_N3 = torch.nn.functional.one_hot(x, 3) - log_q.exp()
    k1_N = estimate("k1", log_q[x], reference[x])

    as_reward = scores_N3 * k1_N[:, None]
    error = as_reward.std(0) / NUM_SAMPLES**0.5
    assert ((as_reward.mean(0) - exact).abs() < 3 * error).all()
    assert (exact.abs() > 30 * error).all()  # and they are far from zero

    differentiated = scores_N3.mean(0)  # grad k1 = grad log q: the faulty way
    assert (differentiated.abs() < 4 * scores_N3.std(0) / NUM_SAMPLES**0.5).all()
