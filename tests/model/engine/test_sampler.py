"""Sampling against the definition of softmax, top-k and top-p."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.model.engine.sampler import HEAD, sample, uniforms


def draw(logits_BV, uniform, *, temperature=1.0, top_p=1.0, top_k=0):
    size = len(logits_BV)
    return sample(
        logits_BV,
        temperature_B=torch.full((size,), temperature, dtype=torch.float64),
        top_p_B=torch.full((size,), top_p, dtype=torch.float64),
        top_k_B=torch.full((size,), top_k),
        uniform_B=torch.as_tensor(uniform, dtype=torch.float64).expand(size).clone(),
    )[:2]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_distribution_is_softmax_at_the_temperature(temperature: float) -> None:
    num_draws, logits_V = 20_000, torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -2.0])
    uniform = uniforms(list(range(num_draws)), [7] * num_draws)
    tokens, logprobs = draw(logits_V.expand(num_draws, -1), uniform, temperature=temperature)
    weights = [math.exp(x / temperature) for x in logits_V.tolist()]
    probs = np.array(weights) / sum(weights)
    counts = np.bincount(tokens.numpy(), minlength=6)
    assert chi_square(counts, probs * num_draws) < 20.5  # 5 degrees of freedom, p = 0.001
    assert np.allclose(logprobs.numpy(), np.log(probs)[tokens.numpy()], atol=1e-6)


def test_uniforms_are_uniform_over_seeds_and_over_positions() -> None:
    for numbers in (uniforms(list(range(10_000)), [3] * 10_000), uniforms([11] * 10_000, list(range(10_000)))):
        counts = np.bincount((numbers * 20).astype(int), minlength=20)
        assert chi_square(counts, np.full(20, 500.0)) < 43.8  # 19 degrees of freedom, p = 0.001
    assert uniforms([-1, 1 << 70], [0, 0]).shape == (2,)


def test_inverse_cdf_by_hand() -> None:
    logits = torch.tensor([[0.2, 0.3, 0.5]]).log()
    for u, token in ((0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (1 - 2**-53, 2)):
        assert draw(logits, u)[0].item() == token


def test_last_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert draw(logits, 1 - 2**-53)[0].item() == 1


def test_greedy_is_argmax_with_the_log_prob_of_temperature_one() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    token, logprob = draw(logits, 0.99, temperature=0.0)
    assert token.item() == 1
    assert logprob.item() == pytest.approx(math.log(0.5), abs=1e-6)


def test_top_k_and_top_p_by_hand() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log()
    # top-k 2 keeps 1 and 3 with 4/7 and 3/7; log-probs stay those of the whole distribution.
    assert draw(logits, 0.56, top_k=2)[0].item() == 1
    token, logprob = draw(logits, 0.58, top_k=2)
    assert token.item() == 3
    assert logprob.item() == pytest.approx(math.log(0.3), abs=1e-6)
    # top-p 0.6 needs 0.4 + 0.3; of top-k 2, where 0.4 counts 4/7 = 0.571, top-p 0.5 needs token 1 alone.
    assert {draw(logits, u, top_p=0.6)[0].item() for u in np.linspace(0, 0.999, 50)} == {1, 3}
    assert {draw(logits, u, top_p=0.5, top_k=2)[0].item() for u in np.linspace(0, 0.999, 50)} == {1}


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([5, HEAD, HEAD + 1, 300]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    top_k=st.sampled_from([0, 1, 3, 64, 65, 200]),
    scale=st.sampled_from([0.1, 1.0, 4.0]),
)
def test_limited_draws_agree_with_a_plain_sort(seed: int, vocab: int, top_p: float, top_k: int, scale: float) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale
    order = sorted(range(vocab), key=lambda v: -logits[0, v].item())
    probs = torch.softmax(logits[0], -1)
    kept = order[:top_k] if top_k else order
    whole, mass, allowed = sum(probs[v].item() for v in kept), 0.0, set()
    for token in kept:
        if mass < top_p * whole - 1e-12:
            allowed.add(token)
        mass += probs[token].item()
    drawn = {draw(logits, u, top_p=top_p, top_k=top_k)[0].item() for u in np.linspace(0, 1 - 1e-9, 40)}
    assert drawn <= allowed


def test_a_greedy_batch_equals_greedy_rows_among_others() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    logits[0, 7] = logits[0, 9] = 5.0  # a tie
    logits[1, :39] = -math.inf
    alone = draw(logits, 0.3, temperature=0.0)
    options = {name: torch.zeros(7, dtype=torch.float64) for name in ("temperature_B", "uniform_B")}
    options["temperature_B"][6] = 1.0
    mixed = sample(
        torch.cat((logits, logits[:1])), top_p_B=torch.ones(7, dtype=torch.float64), top_k_B=torch.zeros(7), **options
    )
    assert torch.equal(alone[0], mixed.tokens_B[:6])
    assert alone[1].tolist() == mixed.logprobs_B[:6].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", [[0.0, math.nan], [math.inf, 0.0], [-math.inf, -math.inf]])
def test_logits_that_are_not_finite_are_an_error(values: list[float], temperature: float) -> None:
    with pytest.raises(FloatingPointError):
        draw(torch.tensor([[0.0, 1.0], values]), 0.5, temperature=temperature)


def test_truncated_log_probs_are_renormalised_over_what_is_kept() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]] * 4).log()
    drawn = sample(
        logits,
        temperature_B=torch.tensor([1.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        top_p_B=torch.tensor([1.0, 0.6, 1.0, 1.0], dtype=torch.float64),
        top_k_B=torch.tensor([2, 0, 0, 0]),
        uniform_B=torch.tensor([0.58, 0.1, 0.55, 0.9], dtype=torch.float64),
    )
    assert drawn.tokens_B.tolist() == [3, 1, 2, 1]
    expected = [math.log(3 / 7), math.log(4 / 7), math.log(0.2), 0.0]
    assert drawn.truncated_logprobs_B.tolist() == pytest.approx(expected, abs=1e-6)
    assert drawn.logprobs_B.tolist() == pytest.approx([math.log(x) for x in (0.3, 0.4, 0.2, 0.4)], abs=1e-6)
    assert drawn.truncated_logprobs_B[2] == drawn.logprobs_B[2]
