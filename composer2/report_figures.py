"""The figures of a run report, each a function from metric records to one inline SVG.

In: records of `metrics.jsonl` and the summary. Out: SVG text that stands inside an HTML page, or None when the run
holds no data for it.

Source: report Fig. 2 right (evaluation loss against tokens), Fig. 5 (mean and best-of-K through RL), §6.2 (mismatch and
router replay); rows P4 P5 R7 X3.
Choice: text stays text in the SVG, so figures are small and follow the fonts of the page.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from composer2.model.pretrain.loss_fit import fit_loss

Record = Mapping[str, Any]

BLUE, ORANGE, GREEN, PURPLE, GREY = "#2456a6", "#c8591a", "#2f7d4f", "#7b4ea3", "#8a8f98"
CYCLE = (BLUE, ORANGE, GREEN, PURPLE, GREY)
STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 10.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa0a8",
    "axes.labelcolor": "#3b4048",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "xtick.color": "#5a6068",
    "ytick.color": "#5a6068",
    "lines.linewidth": 1.8,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
}
SIZE = (5.4, 3.2)
"""Inches. Narrow, so that labels stay readable when a phone shrinks the figure."""


# ---------------------------------------------------------------------------------------------------------------------
# Data


def series(records: Sequence[Record], stage: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one metric of a stage; records without it are skipped."""
    pairs = [(r["step"], r[name]) for r in records if r["stage"] == stage and isinstance(r.get(name), int | float)]
    return np.array([p[0] for p in pairs], dtype=float), np.array([p[1] for p in pairs], dtype=float)


def moving_mean(values: np.ndarray, width: int = 9) -> np.ndarray:
    """Centred mean over `width` neighbours, fewer at the ends."""
    half = width // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def eval_step(record: Record, last_rl_step: int) -> int:
    """RL step of an evaluation: `sft` is before the first, `rl` after the last, `rl-40` after step 40."""
    when = str(record["when"])
    if when == "sft":
        return 0
    return int(when.split("-", 1)[1]) if "-" in when else last_rl_step


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def _axes(x: str, y: str, *, size: tuple[float, float] = SIZE) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def to_svg(figure: Figure, name: str) -> str:
    """The figure as SVG for an HTML page: ids made unique by `name`, no prolog, no metadata, no fixed size."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 role="img"', svg, count=1)
    svg = re.sub(r'id="([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1{name}-", svg)
    return re.sub(r"font-family: [^;\"]*", "font-family: system-ui, sans-serif", svg)


def _smoothed(axes: Axes, x: np.ndarray, y: np.ndarray, color: str, label: str) -> None:
    if len(x) < 30:  # too few points for a mean to say more than they do
        axes.plot(x, y, "o-", color=color, markersize=3.0, label=label)
        return
    axes.plot(x, y, color=color, alpha=0.25, linewidth=1.0)
    axes.plot(x, moving_mean(y), color=color, label=label)


def short_count(value: float) -> str:
    """A count on an axis: 50k, 2M."""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= unit:
            return f"{value / unit:g}{letter}"
    return f"{value:g}"


def _whole_steps(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def styled(draw: Any, *args: Any, **kwargs: Any) -> str | None:
    """Run a drawing function under the style of the report; nothing outside is changed."""
    with rc_context(STYLE):
        return draw(*args, **kwargs)


# ---------------------------------------------------------------------------------------------------------------------
# Figures


def loss_fit(records: Sequence[Record], summary: Record) -> str | None:
    """Fig. 2 right: held-out loss against tokens on a logarithmic axis, with the least-squares line."""
    points = [
        (r["tokens"], r["heldout_loss"])
        for r in records
        if r["stage"] == "cpt" and "heldout_loss" in r and r.get("tokens", 0) > 0
    ]
    if not points:
        return None
    figure, axes = _axes("training tokens", "held-out loss (nats per token)")
    tokens, losses = np.array(points, dtype=float).T
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.plot(tokens, losses, "o", color=BLUE, markersize=4.5, label="held-out files")
    after = int(summary.get("loss_fit_after_tokens", 0))
    if len({t for t, _ in points if t > after}) >= 3:
        fit = fit_loss(points, after_tokens=after, min_points=3)
        ends = np.array([min(t for t, _ in fit.points), max(t for t, _ in fit.points)])
        label = (
            f"{fit.intercept:.2f} {'−' if fit.slope < 0 else '+'} {abs(fit.slope):.3f} ln(tokens), R² = {fit.r2:.3f}"
        )
        axes.plot(ends, [fit.loss_at(t) for t in ends], "--", color=ORANGE, label=label)
    axes.legend()
    return to_svg(figure, "lossfit")


def acceptance(records: Sequence[Record]) -> str | None:
    """Acceptance of the first MTP draft through training."""
    x, y = series(records, "mtp", "acceptance")
    if not len(x):
        return None
    figure, axes = _axes("MTP training step", "first draft accepted (share)")
    axes.plot(x, y, "o-", color=GREEN, markersize=3.5)
    axes.set_ylim(0, 1)
    _whole_steps(axes)
    return to_svg(figure, "mtp")


def acceptance_bars(values: Mapping[str, float]) -> str | None:
    """Acceptance at the mid-run checkpoint, after the move to the later trunk, and at the end."""
    if not values:
        return None
    figure, axes = _axes("", "first draft accepted (share)")
    bars = axes.bar(list(values), list(values.values()), color=GREEN, width=0.5)
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.set_ylim(0, 1)
    axes.grid(axis="x", visible=False)
    return to_svg(figure, "mtpbars")


def curves(
    records: Sequence[Record],
    stage: str,
    names: Mapping[str, str],
    *,
    x: str,
    y: str,
    colors: Sequence[str] = CYCLE,
    log: bool = False,
) -> str | None:
    """Several metrics (name -> label) of one stage against its steps, each with a moving mean."""
    found = {name: series(records, stage, name) for name in names}
    found = {name: pair for name, pair in found.items() if len(pair[0])}
    if not found:
        return None
    figure, axes = _axes(x, y)
    for color, (name, (steps, values)) in zip(colors, found.items(), strict=False):
        _smoothed(axes, steps, values, color, names[name])
    if log and any((values > 0).any() for _, values in found.values()):
        axes.set_yscale("log")
    if any(names[name] for name in found):
        axes.legend()
    _whole_steps(axes)
    return to_svg(figure, f"{stage}-{'-'.join(found)}")


def evaluation(records: Sequence[Record]) -> str | None:
    """Fig. 5: pass@1 with its interval and best-of-8 on held-out tasks, before, during and after RL."""
    evals = [r for r in records if r["stage"] == "eval" and "pass_at_1" in r]
    if not evals:
        return None
    last = max((r["step"] for r in records if r["stage"] == "rl"), default=0)
    last = max([last, *(eval_step(r, 0) for r in evals)])
    figure, axes = _axes("RL step", "share of held-out tasks solved", size=(5.4, 3.6))
    for color, split in zip(CYCLE, dict.fromkeys(str(r["split"]) for r in evals), strict=False):
        rows = sorted((r for r in evals if r["split"] == split), key=lambda r: eval_step(r, last))
        steps = np.array([eval_step(r, last) for r in rows], dtype=float)
        means = np.array([r["pass_at_1"] for r in rows], dtype=float)
        low = means - np.array([r.get("pass_ci_low", r["pass_at_1"]) for r in rows], dtype=float)
        high = np.array([r.get("pass_ci_high", r["pass_at_1"]) for r in rows], dtype=float) - means
        label = f"{split}: mean"
        axes.errorbar(
            steps, means, yerr=np.maximum([low, high], 0), fmt="o-", color=color, capsize=3, markersize=4, label=label
        )
        best = np.array([r.get("best_of_8", math.nan) for r in rows], dtype=float)
        if np.isfinite(best).any():
            axes.plot(steps, best, "s--", color=color, markersize=3.5, alpha=0.75, label=f"{split}: best of 8")
    axes.set_ylim(0, 1)
    axes.legend(ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.18), fontsize=8.5)
    _whole_steps(axes)
    return to_svg(figure, "eval")


def mismatch_bars(summary: Record) -> str | None:
    """|Δ log-prob| between trainer and sampler on the same rollouts and weights: replay off, on, on with the filter."""
    settings = {"replay off": "replay_off", "replay on": "replay_on", "on + filter": "replay_filter"}
    ranks = ("p50", "p99", "max")
    rows = {
        label: [summary[f"mismatch_{rank}_{key}"] for rank in ranks]
        for label, key in settings.items()
        if all(isinstance(summary.get(f"mismatch_{rank}_{key}"), int | float) for rank in ranks)
    }
    if not rows:
        return None
    figure, axes = _axes("", "|Δ log-prob| per token (nats)")
    width = 0.8 / len(rows)
    for i, (color, (label, values)) in enumerate(zip((GREY, BLUE, GREEN), rows.items(), strict=False)):
        bars = axes.bar(
            np.arange(3) + (i - (len(rows) - 1) / 2) * width, values, width * 0.92, color=color, label=label
        )
        axes.bar_label(bars, fmt="%.2g", padding=2, fontsize=8)
    if any(value > 0 for values in rows.values() for value in values):
        axes.set_yscale("log")
    axes.margins(y=0.12)
    axes.set_xticks(range(3), ["median", "99th percentile", "maximum"])
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper left")
    return to_svg(figure, "mismatch")


def histogram(counts: Mapping[str, float], *, x: str, y: str, name: str) -> str | None:
    """Bars of counts whose keys are whole numbers, shown as shares."""
    total = sum(counts.values())
    if not total:
        return None
    keys = sorted(int(key) for key in counts)
    figure, axes = _axes(x, y)
    bars = axes.bar([str(key) for key in keys], [counts[str(key)] / total for key in keys], color=BLUE, width=0.7)
    axes.bar_label(bars, fmt=lambda share: f"{share:.0%}" if share >= 0.01 else f"{share:.1%}", padding=2, fontsize=8.5)
    axes.margins(y=0.12)
    axes.grid(axis="x", visible=False)
    return to_svg(figure, name)
