"""Redraws Fig. 6, the concave length penalty, and checks it: `python scripts/fig6_length_penalty.py --out DIR`.

In: nothing. Out: `DIR/fig6_length_penalty.json`, flat figures, and `DIR/fig6_length_penalty.png`.

    C(x) = ((1 + k x)^(1-q) - 1) / (k (1-q)),    log(1 + k x) / k at q = 1

Checks over all (k, q) and a grid of efforts x, each the largest violation found (0 or rounding when the law holds):

    value_at_zero_error   |C(0)|                                     slope_at_zero_error   |C'(0) - 1|
    formula_error         relative, against the formula in 60-digit arithmetic
    slope_error           relative, of the numerical slope against C'(x) = (1 + k x)^(-q)
    limit_error           relative, q = 1 against q = 1 - 1e-9 and 1 + 1e-9
    decrease              largest fall of C from one x to the next   convexity   largest rise of its slope
    bound_error           for q > 1, excess of C over its bound 1 / (k (q - 1))

`long_over_linear`: share of the linear price that ten units of effort pay at k = 1, q = 1.

Source: report §4.2, Fig. 6; row R5.
"""

from __future__ import annotations

import argparse
import json
import sys
from decimal import Decimal, getcontext
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from composer2.rl.length_penalty import concave_cost

SHAPES = ((0.1, 1.0), (1.0, 0.0), (1.0, 0.5), (1.0, 1.0), (1.0, 2.0), (10.0, 1.0))
"""(k, q) of the curves."""


def by_formula(x: float, k: float, q: float) -> float:
    """C(x) as printed, in 60 digits."""
    getcontext().prec = 60
    base, rate, power = 1 + Decimal(k) * Decimal(x), Decimal(k), 1 - Decimal(q)
    return float(base.ln() / rate if power == 0 else (base**power - 1) / (rate * power))


def checks(shapes: tuple[tuple[float, float], ...], efforts: np.ndarray) -> dict[str, float]:
    """Largest violation of each law over all shapes."""
    worst: dict[str, float] = {}

    def note(name: str, value: float) -> None:
        worst[name] = max(worst.get(name, 0.0), float(value))

    for k, q in shapes:
        cost = concave_cost(efforts, k=k, q=q)
        note("value_at_zero_error", abs(float(concave_cost(0.0, k=k, q=q))))
        step = 1e-6 / k
        note("slope_at_zero_error", abs(float(concave_cost(step, k=k, q=q)) / step - 1))
        exact = np.array([by_formula(float(x), k, q) for x in efforts])
        note("formula_error", np.max(np.abs(cost[1:] / exact[1:] - 1)))
        h = efforts[1:] * 1e-5
        slope = (concave_cost(efforts[1:] + h, k=k, q=q) - concave_cost(efforts[1:] - h, k=k, q=q)) / (2 * h)
        note("slope_error", np.max(np.abs(slope / (1 + k * efforts[1:]) ** -q - 1)))
        secants = np.diff(cost) / np.diff(efforts)
        note("decrease", np.max(-np.diff(cost)))
        note("convexity", np.max(np.diff(secants) / secants[:-1]))
        for near in (1 - 1e-9, 1 + 1e-9):
            logarithmic = concave_cost(efforts[1:], k=k, q=1.0)
            note("limit_error", np.max(np.abs(concave_cost(efforts[1:], k=k, q=near) / logarithmic - 1)))
        if q > 1:
            note("bound_error", np.max(cost * k * (q - 1) - 1))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="a coarser grid")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    efforts = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 61 if options.quick else 601)])
    figures = checks(SHAPES, efforts)
    figures["long_over_linear"] = float(concave_cost(10.0, k=1.0, q=1.0)) / 10.0
    shown = np.linspace(0.0, 10.0, 201)
    figure, axis = plt.subplots(figsize=(6, 4))
    for k, q in SHAPES:
        curve = concave_cost(shown, k=k, q=q)
        axis.plot(shown, curve, label=f"k={k:g}, q={q:g}")
        name = f"k{k:g}_q{q:g}".replace(".", "p")
        figures |= {f"cost_{name}_x{x}": float(concave_cost(float(x), k=k, q=q)) for x in (1, 5, 10)}
    axis.set(xlabel="effort x", ylabel="C(x)", title="Concave length penalty")
    axis.legend()
    axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(options.out / "fig6_length_penalty.png", dpi=120)
    plt.close(figure)
    (options.out / "fig6_length_penalty.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print({name: figures[name] for name in ("formula_error", "slope_error", "limit_error", "decrease", "convexity")})
    return 0


if __name__ == "__main__":
    sys.exit(main())
