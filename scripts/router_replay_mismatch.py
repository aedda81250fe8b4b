"""How far trainer and sampler part on the same tokens: replay off, on, and on with the filter over a range of tau.

    python scripts/router_replay_mismatch.py --out DIR [--quick] [--start RUN] [--seed N]

In: nothing, or a finished `tiny` run whose fine-tuned policy is taken. Out: `DIR/router_replay_mismatch.json` (flat
figures) and `DIR/router_replay_mismatch.png`; exit code 0 only with at least 20,000 sampled tokens and the whole range.
A trained tiny MoE samples episodes on held-out tasks in bf16; the trainer scores the very tokens in fp32, with the same
weights. SETTING is `off`, `on` or `filter_tauX`:

    {p50,p99,max,mean}_SETTING          |trainer's - sampler's log-prob| of sampled tokens, nats
    differing_expert_frac_SETTING       share of tokens, prompts included, with another set of experts in any layer
    replaced_expert_frac_SETTING        recorded slots that the filter dropped, of all that were replayed
    replaced_of_differing_SETTING       the same, of the recorded slots that the trainer's own top-k lacks
    p99_SETTING_minus_{off,on}          difference, with `_low` and `_high`, its 95 % bootstrap interval over tasks

Source: report §6.2 (router replay with a filter of implausible experts); rows M6 R7 I4.
Choice: intervals resample tasks, since tokens of one episode are not independent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np

from composer2.env.tasks.evalsets import build_eval_set
from composer2.log import Console
from composer2.model.checkpoint.native import load_model
from composer2.model.pretrain.config import MtpConfig
from composer2.model.transformer import Transformer
from composer2.pipeline import adopt_start, run_stages
from composer2.recipes import RunConfig, tiny
from composer2.rl.evaluate import run_tasks
from composer2.rl.mismatch import Comparison, compare, joined, packed_rollouts
from composer2.rl.system.worker import RolloutPool
from composer2.rl.train import RLConfig
from composer2.run import Run, write_json
from composer2.runner import make_runner
from composer2.types import Group

TAUS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
"""At 0 the filter keeps everything, which is `on`."""
MIN_TOKENS = 20_000
COHORT = 16
"""Tasks that are sampled at once."""
SAMPLES = 8
"""Episodes of a task."""


def settings(quick: bool, seed: int) -> RunConfig:
    """The run that trains the policy; MTP layers are of no use here."""
    base = tiny()
    share = 1 if quick else 5
    return replace(
        base,
        preset="tiny-mismatch",
        seed=seed,
        cpt=replace(base.cpt, phase1_steps=100 * share, phase2_steps=8 * share, num_eval_points=4),
        mtp=MtpConfig(num_steps=1, joint_weight=0.0),
        sft=replace(base.sft, num_steps=500 * share, schedule_steps=720 * share),
        rl=replace(base.rl, max_staleness=0),
    )


def sample(run: Run, console: Console, min_tokens: int) -> list[Group]:
    """Episodes of the fine-tuned policy in bf16 on held-out tasks, until they hold `min_tokens` sampled tokens."""
    groups: list[Group] = []
    tokens, num_tasks = 0, 0
    with (
        console.stage("sample", total=min_tokens, detail="tokens, bf16") as stage,
        RolloutPool(make_runner, run.spec("sft", dtype="bfloat16"), lockstep=True) as pool,
    ):
        while tokens < min_tokens:
            num_tasks += COHORT
            tasks = build_eval_set("test", num_tasks, run.config.eval.task_seed + 1, run.config.tasks)[-COHORT:]
            fresh = run_tasks(pool, tasks, num_samples=SAMPLES, seed=run.config.seed + num_tasks)
            sampled = sum(int(s.sampled.sum()) for group in fresh for r in group.rollouts for s in r.segments)
            if sampled == 0:
                raise RuntimeError(f"{COHORT * SAMPLES} episodes hold no sampled token")
            groups, tokens = groups + fresh, tokens + sampled
            stage.update(min(tokens, min_tokens))
    return groups


def measure(
    model: Transformer, groups: Sequence[Group], config: RLConfig, console: Console
) -> dict[str, list[Comparison]]:
    """One comparison a task for every setting."""
    configs = {"off": replace(config, replay=False)}
    for tau in TAUS:
        configs[f"filter_tau{tau:g}" if tau else "on"] = replace(config, replay=True, replay_tau=tau)
    batches = [batch for group in groups if (batch := packed_rollouts([group], config))]
    measured: dict[str, list[Comparison]] = {}
    with console.stage("compare", total=len(configs) * len(batches), detail="fp32, off, on and tau") as stage:
        for name, setting in configs.items():
            measured[name] = []
            for batch in batches:
                measured[name].append(compare(model, batch, setting))
                stage.update(sum(len(comparisons) for comparisons in measured.values()))
    return measured


def gaps(comparisons: Sequence[Comparison]) -> list[np.ndarray]:
    """|trainer's - sampler's log-prob|, float64, one array a task."""
    return [np.abs(c.trainer_N.astype(np.float64) - c.sampler_N) for c in comparisons]


def p99_difference(
    ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray], rng: np.random.Generator, num_resamples: int = 1000
) -> tuple[float, float, float]:
    """(p99 of ours - p99 of theirs, low, high): 95 % bootstrap over tasks, the same ones on both sides."""

    def difference(picked: np.ndarray) -> float:
        one, two = (np.quantile(np.concatenate([side[i] for i in picked]), 0.99) for side in (ours, theirs))
        return float(one - two)

    tasks = np.arange(len(ours))
    drawn = [difference(rng.integers(len(tasks), size=len(tasks))) for _ in range(num_resamples)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return difference(tasks), float(low), float(high)


def differing_slots(comparison: Comparison) -> int:
    """Recorded experts that are not among those of the trainer's pass."""
    recorded = comparison.recorded_TLK[..., :, None]
    return int(((recorded >= 0) & ~(recorded == comparison.used_TLK[..., None, :]).any(-1, keepdims=True)).sum())


def summarise(measured: Mapping[str, Sequence[Comparison]], seed: int) -> dict[str, float]:
    """Flat figures of all settings."""
    figures: dict[str, float] = {}
    differing = sum(differing_slots(c) for c in measured["off"])
    for name, comparisons in measured.items():
        whole = joined(comparisons)
        found = whole.figures()
        figures["num_tokens"] = found.pop("num_tokens")
        figures |= {f"{key.removeprefix('mismatch_')}_{name}": value for key, value in found.items()}
        figures[f"replaced_of_differing_{name}"] = whole.num_replaced / max(differing, 1)
        for other in ("off", "on"):
            if name not in ("off", other):
                ends = p99_difference(gaps(comparisons), gaps(measured[other]), np.random.default_rng(seed))
                key = f"p99_{name}_minus_{other}"
                figures |= {f"{key}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
    figures["num_tasks"] = float(len(measured["off"]))
    return figures


def draw(measured: Mapping[str, Sequence[Comparison]], figures: Mapping[str, float], path: Path) -> None:
    """Tail of the gap for each setting; p99 and replaced slots over tau."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (tail, over_tau) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for name, comparisons in measured.items():
        ordered = np.sort(np.concatenate(gaps(comparisons)))
        tail.plot(ordered, 1 - np.arange(len(ordered)) / len(ordered), label=name, lw=2 if name in ("off", "on") else 1)
    tail.set(xscale="log", yscale="log", xlim=(1e-4, None), xlabel="|Δ log-prob|, nats", ylabel="share of tokens above")
    tail.legend(fontsize=8)
    names = [f"filter_tau{tau:g}" if tau else "on" for tau in TAUS]
    over_tau.axhline(figures["p99_off"], color="0.5", ls="--", label="p99, replay off")
    over_tau.plot(TAUS, [figures[f"p99_{name}"] for name in names], "o-", label="p99, replay on")
    over_tau.set(xlabel="tau (0: no filter)", ylabel="p99 of |Δ log-prob|, nats", ylim=(0, None))
    over_tau.legend(loc="center left", fontsize=8)
    share = over_tau.twinx()
    share.plot(TAUS, [1e6 * figures[f"replaced_expert_frac_{name}"] for name in names], "s:", color="C3")
    share.set_ylabel("replaced slots, ppm", color="C3")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a fifth of the training, a quarter of the tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="a finished `tiny` run, whose fine-tuned policy is measured")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.start is not None:
        adopt_start(options.out / "start", options.start)
    with Console("rich") as console:
        run = Run(options.out / "start", settings(options.quick, options.seed), console)
        if not run_stages(run, last="sft"):
            return 1
        groups = sample(run, console, MIN_TOKENS if options.quick else 4 * MIN_TOKENS)
        measured = measure(load_model(run.model_dir("sft")), groups, run.config.rl, console)
    figures = summarise(measured, options.seed)
    figures["seconds"] = time.perf_counter() - started
    write_json(options.out / "router_replay_mismatch.json", figures)
    draw(measured, figures, options.out / "router_replay_mismatch.png")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
