"""Redraws Fig. 4, the variance of KL estimators, and shows which of them have the gradient of the KL.

    python scripts/fig4_kl_estimators.py --out DIR [--quick]

In: nothing. Out: `DIR/fig4_kl_estimators.json`, flat figures, and `DIR/fig4_kl_estimators.png`, all computed here.

    q = N(0, 1), p = N(mu, 1), x ~ q, r = p(x) / q(x)        KL(q || p) = mu^2 / 2
    k1 = -log r = mu^2/2 - mu x       k2 = (log r)^2 / 2       k3 = r - 1 - log r

Expectation and variance for a distance mu, keys `k1_bias_mu2`, `k1_var_mu2` (mu = 2; `mu0p5` is 0.5):
sampled for mu <= 1; above, closed form for k1 and k2 and Gauss-Hermite quadrature on moments tilted to where they live
for k3, since its variance comes from a tail that no sample of feasible size holds (`k3_var_sampled_mu4` shows it).
Relative standard error of the sampled values: `sampling_error`.

Gradients by sampling, on a categorical (`cat_`) and a two-step autoregressive policy (`seq_`) whose exact gradients are
enumerated. For each variant the component of the mean along the exact gradient and its standard error (`_se`), to be
compared with 0 and with `exact_grad`; without prefix those of `seq_`:

    k1_as_loss_grad     grad k1, what back-propagation through a sampled k1 gives
    k1_in_reward_grad   (k1 still to come) * grad log q, what training uses
    k1_own_token_grad   (own k1 of the token) * grad log q

`_se_from_zero` and `_se_from_exact` are distances in standard errors over all coordinates, the worst one; without
prefix the worse of both policies.

Source: report §4.1, Fig. 4; row R2.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from composer2.rl.kl import ESTIMATORS, KLConfig, chain_kl_advantages, estimate, exact_kl

SAMPLED_MUS = (0.1, 0.25, 0.5, 0.75, 1.0)
EXACT_MUS = (1.5, 2.0, 2.5, 3.0, 3.5, 4.0)


def log_densities(x: np.ndarray, mu: float) -> tuple[np.ndarray, np.ndarray]:
    """(log q, log p) without their common constant."""
    return -(x**2) / 2, -((x - mu) ** 2) / 2


def sampled_moments(mu: float, num_samples: int, rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """(mean, variance) of each estimator from draws of q."""
    log_q, log_p = log_densities(rng.standard_normal(num_samples), mu)
    values = {name: estimate(name, log_q, log_p) for name in ESTIMATORS}
    return {name: (float(found.mean()), float(found.var(ddof=1))) for name, found in values.items()}


def expectation(function: np.polynomial.Polynomial, shift: float) -> float:
    """E of a polynomial under N(shift, 1), by Gauss-Hermite quadrature (exact for polynomials of such degree)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(16)
    return float((weights * function(nodes + shift)).sum() / np.sqrt(2 * np.pi))


def exact_moments(mu: float) -> dict[str, tuple[float, float]]:
    """(mean, variance) of each estimator under N(0, 1).

    E_q[r f] = E_p[f] moves the exponential into the mean of the Gaussian, E_q[r^2] = exp(mu^2): what is left are
    polynomials, for which quadrature is exact."""
    log_r = np.polynomial.Polynomial([-(mu**2) / 2, mu])  # log r as a function of x
    one = np.polynomial.Polynomial([1.0])
    found = {}
    for name, value in (("k1", -log_r), ("k2", log_r**2 / 2)):
        mean = expectation(value, 0.0)
        found[name] = (mean, expectation(value**2, 0.0) - mean**2)
    # k3 = r + c with c = -1 - log r: E k3^2 = E_q r^2 + 2 E_p c + E_q c^2.
    rest = -one - log_r
    mean = 1.0 + expectation(rest, 0.0)
    second = float(np.exp(mu**2)) + 2 * expectation(rest, mu) + expectation(rest**2, 0.0)
    found["k3"] = (mean, second - mean**2)
    return found


def variance_figures(num_samples: int, rng: np.random.Generator) -> dict[str, float]:
    """Bias and variance over all distances, and how far samples are from the exact values where both exist."""
    figures: dict[str, float] = {}
    errors = []
    for mu in (*SAMPLED_MUS, *EXACT_MUS):
        exact = exact_moments(mu)
        moments = sampled_moments(mu, num_samples, rng) if mu in SAMPLED_MUS else exact
        key = f"mu{mu:g}".replace(".", "p")
        figures[f"kl_{key}"] = mu**2 / 2
        for name, (mean, variance) in moments.items():
            figures[f"{name}_bias_{key}"] = mean - mu**2 / 2
            figures[f"{name}_var_{key}"] = variance
            figures[f"{name}_var_exact_{key}"] = exact[name][1]
            if mu in SAMPLED_MUS and name != "k3":
                errors.append(abs(variance / exact[name][1] - 1))
    figures["sampling_error"] = max(errors)
    figures["k3_var_sampled_mu4"] = sampled_moments(4.0, num_samples, rng)["k3"][1]
    return figures


# ---------------------------------------------------------------------------------------------------------------------
# Gradients


def standard_errors(terms_NP: torch.Tensor, target_P: torch.Tensor) -> float:
    """Largest distance of the mean over N draws to `target_P`, in standard errors of its coordinate."""
    error_P = terms_NP.std(dim=0) / len(terms_NP) ** 0.5
    return float(((terms_NP.mean(dim=0) - target_P).abs() / error_P).max())


def gradient_figures(
    prefix: str, variants: dict[str, torch.Tensor], exact_P: torch.Tensor, num_samples: int
) -> dict[str, float]:
    """Flat figures of the gradient estimates of one policy; see the top of the file."""
    zero_P = torch.zeros_like(exact_P)
    figures = {f"{prefix}_exact_grad": float(exact_P.norm())}
    for name, terms_NP in variants.items():
        along_N = terms_NP @ (exact_P / exact_P.norm())
        figures[f"{prefix}_{name}"] = float(along_N.mean())
        figures[f"{prefix}_{name}_se"] = float(along_N.std()) / num_samples**0.5
        figures[f"{prefix}_{name}_se_from_zero"] = standard_errors(terms_NP, zero_P)
        figures[f"{prefix}_{name}_se_from_exact"] = standard_errors(terms_NP, exact_P)
    return figures


def categorical_gradients(num_samples: int, generator: torch.Generator) -> dict[str, float]:
    """A three-way choice."""
    logits = torch.tensor([0.4, -0.3, 0.8], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([-0.5, 0.6, 0.2], dtype=torch.float64), 0)
    exact = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    log_q = torch.log_softmax(logits, 0).detach()
    x_N = torch.multinomial(log_q.exp(), num_samples, replacement=True, generator=generator)
    table = torch.stack([torch.autograd.grad(torch.log_softmax(logits, 0)[choice], logits)[0] for choice in range(3)])
    scores_NP = table[x_N]
    as_loss = torch.stack(
        [
            torch.autograd.grad(estimate("k1", torch.log_softmax(logits, 0)[c], reference[c]), logits)[0]
            for c in range(3)
        ]
    )[x_N]
    in_reward = scores_NP * estimate("k1", log_q[x_N], reference[x_N])[:, None]
    return gradient_figures("cat", {"k1_as_loss_grad": as_loss, "k1_in_reward_grad": in_reward}, exact, num_samples)


def sequence_gradients(num_samples: int, generator: torch.Generator) -> dict[str, float]:
    """Two tokens, the second drawn given the first: logits [0] of the first, [1 + a] of the second after a."""
    tables = torch.tensor([[0.2, -0.6], [0.9, -0.1], [-0.7, 0.5]], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([[-0.4, 0.3], [-0.2, 0.8], [0.6, -0.5]], dtype=torch.float64), -1)
    paths = list(itertools.product(range(2), range(2)))

    def log_probs(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        log_q = torch.log_softmax(tables, -1)
        return log_q[0, a], log_q[1 + a, b]

    kl = torch.zeros((), dtype=torch.float64)
    weights, as_loss, in_reward, own = [], [], [], []
    for a, b in paths:
        first, second = log_probs(a, b)
        against = (reference[0, a], reference[1 + a, b])
        kl = kl + (first + second).exp() * (first + second - against[0] - against[1])
        weights.append(float((first + second).detach().exp()))
        scores = [torch.autograd.grad(token, tables, retain_graph=True)[0].flatten() for token in (first, second)]
        behaviour = np.array([float(first.detach()), float(second.detach())])
        anchor = np.array([float(value) for value in against])
        (to_go,) = chain_kl_advantages([behaviour], [anchor], [np.ones(2, dtype=bool)], KLConfig(weight=1.0))
        in_reward.append(-sum(float(value) * score for value, score in zip(to_go, scores, strict=True)))
        own.append(sum(float(value) * score for value, score in zip(behaviour - anchor, scores, strict=True)))
        k1 = estimate("k1", first, against[0]) + estimate("k1", second, against[1])
        as_loss.append(torch.autograd.grad(k1, tables, retain_graph=True)[0].flatten())
    exact = torch.autograd.grad(kl, tables)[0].flatten()
    drawn_N = torch.multinomial(torch.tensor(weights), num_samples, replacement=True, generator=generator)
    variants = {"k1_as_loss_grad": as_loss, "k1_in_reward_grad": in_reward, "k1_own_token_grad": own}
    return gradient_figures(
        "seq", {name: torch.stack(list(terms))[drawn_N] for name, terms in variants.items()}, exact, num_samples
    )


def draw(figures: dict[str, float], path: Path) -> None:
    """Variance and bias over the KL, and what the gradients come to."""
    figure, axes = plt.subplots(1, 3, figsize=(14, 4))
    mus = np.array((*SAMPLED_MUS, *EXACT_MUS))
    keys = [f"mu{mu:g}".replace(".", "p") for mu in mus]
    for name in ESTIMATORS:
        axes[0].plot(mus**2 / 2, [figures[f"{name}_var_{key}"] for key in keys], marker="o", label=name)
        axes[1].plot(mus**2 / 2, [figures[f"{name}_bias_{key}"] for key in keys], marker="o", label=name)
    axes[0].set(xlabel="KL(q || p) (nats)", ylabel="variance (nats²)", yscale="log", title="q = N(0,1), p = N(μ,1)")
    axes[1].set(xlabel="KL(q || p) (nats)", ylabel="bias (nats)", yscale="symlog", title="the same: k1 lies under k3")
    names = ["k1_as_loss_grad", "k1_own_token_grad", "k1_in_reward_grad"]
    heights = [figures[f"seq_{name}"] for name in names]
    axes[2].bar(
        ["k1 as\nloss", "own k1\nin reward", "k1 to go\nin reward", "exact"], [*heights, figures["seq_exact_grad"]]
    )
    axes[2].set(ylabel="mean gradient along the exact one", title="two-step policy")
    for axis in axes[:2]:
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a fifth of the samples")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    num_samples = 400_000 if options.quick else 2_000_000
    generator = torch.Generator().manual_seed(options.seed)
    figures = variance_figures(num_samples, np.random.default_rng(options.seed))
    figures |= categorical_gradients(num_samples, generator) | sequence_gradients(num_samples, generator)
    figures["exact_grad"] = figures["seq_exact_grad"]
    for name in ("k1_as_loss_grad", "k1_in_reward_grad"):
        figures[name], figures[f"{name}_se"] = figures[f"seq_{name}"], figures[f"seq_{name}_se"]
        zero, exact = ([figures[f"{p}_{name}_se_from_{what}"] for p in ("cat", "seq")] for what in ("zero", "exact"))
        is_loss = (
            name == "k1_as_loss_grad"
        )  # wanted near 0 and far from the exact one; the other way round in the reward
        figures[f"{name}_se_from_zero"] = max(zero) if is_loss else min(zero)
        figures[f"{name}_se_from_exact"] = min(exact) if is_loss else max(exact)
    figures["num_samples"] = float(num_samples)
    (options.out / "fig4_kl_estimators.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    draw(figures, options.out / "fig4_kl_estimators.png")
    shown = ("k1_var_mu2", "k3_var_mu2", "k1_as_loss_grad_se_from_zero", "k1_as_loss_grad_se_from_exact")
    print({name: round(figures[name], 4) for name in (*shown, "k1_in_reward_grad_se_from_exact")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
