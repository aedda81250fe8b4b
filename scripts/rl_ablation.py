"""Dr. GRPO against its relatives on the tiny task: `python scripts/rl_ablation.py --out DIR [--quick] [--start RUN]`.

    arm          what differs from dr_grpo
    dr_grpo      nothing: no division by length or deviation, constant normaliser, asymmetric clip, replay with filter
    length_norm  every rollout divided by its sampled tokens
    std_norm     every group divided by its deviation
    grpo         both of these, symmetric clip
    cispo        importance weight clipped instead of the gradient; std_norm, normaliser by tokens
    kl_k1        KL to the start in the advantage, by k1 to go: the exact gradient
    kl_k3        the same place and weight with k3: another gradient
    replay_off   the trainer routes for itself

In: nothing, or a finished `tiny` run whose fine-tuned policy is the start. Out: `DIR/rl_ablation.json` (flat figures),
`curves.jsonl` (one line an arm, seed and step) and `rl_ablation.png`; exit code 0 when every arm was run to its end
with every seed. All begin with the same weights; a seed decides training tasks, held-out tasks and sampling, alike in
every arm. Finished arms are kept in `DIR/arms`; the same command goes on after Ctrl-C.

    pass_start, pass_end_ARM            pass@1 on held-out tasks before and after, mean over seeds
    pass_minus_dr_grpo_ARM{,_low,_high} paired over seeds, with the 95 % Student interval over them
    reward_{start,end}_ARM              training reward, mean of the first and last third of steps
    entropy_end_ARM, tokens_end_ARM     nats a token; sampled tokens an episode; last third
    kl_end_ARM                          k1 to the start on the held-out episodes after RL, nats a token
    mismatch_p99_ARM                    |log-prob of trainer - of sampler| in training; weights differ by a step
    clip_frac_ARM, staleness_mean_ARM   share of clipped tokens; versions a token was behind; all three means of steps
    cpu_seconds_ARM                     of trainer, sampler and pods, mean over seeds

Source: report §4.1 (Dr. GRPO, KL by k1) and §6.2 (replay); rows R1 R2 R7 R8 M6.
Choice: sampling runs one step ahead (staleness 1). On-policy every ratio would be 1, and neither corrections nor replay
could differ; the price is that a run does not repeat bit for bit. What number formats do to replay is measured by
`router_replay_mismatch.py`.
Choice: twice the learning rate of `tiny`, so that few steps move the policy far enough for corrections to bind.
Choice: the interval is over seeds, the unit that a second run would draw anew; with three of them it is wide.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from composer2.config import load_config
from composer2.env.tasks.evalsets import build_eval_set
from composer2.env.tasks.procedural import generate_task
from composer2.log import Console
from composer2.model.checkpoint.native import load_model
from composer2.model.pretrain.config import MtpConfig
from composer2.pipeline import adopt_start, run_stages
from composer2.recipes import RunConfig, tiny
from composer2.rl.evaluate import EvalSpec, passed_table, run_tasks
from composer2.rl.kl import Estimator, KLConfig
from composer2.rl.system.loop import LoopHooks, RLLoop
from composer2.rl.system.weight_sync import FolderSink
from composer2.rl.system.worker import RolloutPool
from composer2.rl.train import RLConfig, make_optimizer, reference_k1, reference_logprobs
from composer2.rl.variants import Algorithm, cispo, dr_grpo, grpo
from composer2.run import Run, write_json
from composer2.runner import RunnerSpec, make_runner, stable_seed
from composer2.types import Task

KL_WEIGHT = 0.05
"""Reward a nat of sequence KL costs in the arms with KL."""
CURVES = (
    "reward_mean",
    "pass_rate",
    "entropy",
    "mismatch_p99",
    "clip_frac",
    "grad_norm",
    "degenerate_frac",
    "response_tokens",
    "staleness_mean",
)
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's t with 1, 2, ... degrees of freedom."""
PANELS = {
    "normalisation": ("dr_grpo", "length_norm", "std_norm", "grpo"),
    "KL to the start": ("dr_grpo", "kl_k1", "kl_k3"),
    "correction and replay": ("dr_grpo", "cispo", "replay_off"),
}


def settings(quick: bool) -> tuple[RunConfig, int]:
    """(the run that makes the common start and holds RL and evaluation of every arm, number of seeds)."""
    base = tiny()
    share = 1 if quick else 4
    config = replace(
        base,
        preset="tiny-rl-ablation",
        cpt=replace(base.cpt, phase1_steps=100 * share, phase2_steps=8 * share, num_eval_points=4),
        mtp=MtpConfig(num_steps=1, joint_weight=0.0),
        sft=replace(base.sft, num_steps=500 * share, schedule_steps=720 * share),
        rl=replace(base.rl, num_steps=24 * share, prompts_per_step=8, lr=6e-4, reference_every=10_000),
        eval=replace(base.eval, during=EvalSpec(name="test", num_tasks=64 * share, num_samples=4)),
    )
    return config, 3 if quick else 5


def arms(base: RLConfig) -> dict[str, RLConfig]:
    """RL settings by name."""

    def of(algorithm: Algorithm, **changes: Any) -> RLConfig:
        return replace(base, advantage=algorithm.advantage, loss=algorithm.loss, **changes)

    def with_kl(estimator: Estimator) -> RLConfig:
        kl = KLConfig(weight=KL_WEIGHT, estimator=estimator)
        return of(replace(ours, advantage=replace(ours.advantage, kl=kl)))

    ours = dr_grpo()
    # The length is divided by in the advantage, and no longer in the normaliser.
    by_length = replace(
        ours, advantage=replace(ours.advantage, length_norm=True), loss=replace(ours.loss, norm_length=1.0)
    )
    return {
        "dr_grpo": of(ours),
        "length_norm": of(by_length),
        "std_norm": of(replace(ours, advantage=replace(ours.advantage, baseline="grpo"))),
        "grpo": of(grpo()),
        "cispo": of(cispo()),
        "kl_k1": with_kl("k1"),
        "kl_k3": with_kl("k3"),
        "replay_off": of(ours, replay=False),
    }


# ---------------------------------------------------------------------------------------------------------------------
# One arm with one seed, in a process of its own


def run_arm(start: Path, config: RunConfig, rl: RLConfig, seed: int) -> dict[str, Any]:
    """RL from the start and an evaluation after it; no RL when `rl.num_steps` is 0."""
    spec = RunnerSpec(
        model_dir=start / "models" / "sft",
        tokenizer_path=start / "tokenizer.json",
        episode=config.episode,
        engine=config.engine,
        pods=config.pods,
    )
    model, reference = (load_model(spec.model_dir) for _ in range(2))
    reference.requires_grad_(False)
    steps: list[dict[str, float]] = []

    def task_at(index: int) -> Task:
        return generate_task(random.Random(stable_seed(seed, "rl", index)), "train", config.tasks)

    hooks = LoopHooks(
        on_step=lambda done, metrics, groups: steps.append({n: float(metrics.get(n, np.nan)) for n in CURVES}),
        checkpoint=lambda done, state: None,
        evaluate=lambda done: None,
        should_stop=lambda: False,
    )
    with tempfile.TemporaryDirectory() as weights, RolloutPool(make_runner, spec) as pool:
        if rl.num_steps:
            sink, optimizer = FolderSink(Path(weights)), make_optimizer(model, rl)
            parts: dict[str, Any] = {"pool": pool, "sink": sink, "task_at": task_at, "reference": reference}
            RLLoop(model, optimizer, rl, seed=seed, **parts).run(hooks)
        evaluation = config.eval.during
        tasks = build_eval_set(evaluation.name, evaluation.num_tasks, config.eval.task_seed + seed, config.tasks)
        groups = run_tasks(pool, tasks, num_samples=evaluation.num_samples, seed=seed + 11)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "curves": {name: [step[name] for step in steps] for name in CURVES},
        "passed": passed_table(groups).astype(int).tolist(),
        "kl": reference_k1(groups, reference_logprobs(reference, groups, rl)),
        "cpu_seconds": time.process_time() + usage.ru_utime + usage.ru_stime,
    }


def run_job(out: Path, name: str) -> None:
    """The job ARM-SEED of a folder whose start is finished."""
    torch.set_num_threads(1)
    arm, seed = name.rsplit("-", 1)
    config = load_config(out / "start" / "config.json", RunConfig)
    rl = replace(config.rl, num_steps=0) if arm == "start" else arms(config.rl)[arm]
    write_json(out / "arms" / f"{name}.json", run_arm(out / "start", config, rl, int(seed)))


# ---------------------------------------------------------------------------------------------------------------------
# All jobs


def run_jobs(commands: Mapping[str, Sequence[str]], logs: Path, console: Console, *, width: int) -> None:
    """Run the commands, `width` at once. RuntimeError when one fails; whatever ends this, no process stays behind."""
    waiting, running = list(commands), dict[str, subprocess.Popen[bytes]]()
    done = 0
    with console.stage("arms", total=len(commands), detail="arms times seeds") as stage:
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    name = waiting.pop(0)
                    with (logs / f"{name}.log").open("wb") as log:
                        running[name] = subprocess.Popen(
                            commands[name], stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
                        )
                time.sleep(0.2)
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    status = running.pop(name).returncode
                    if status:
                        raise RuntimeError(f"{name} ended with {status}, see {logs / name}.log")
                    done += 1
                    stage.update(done)
        finally:
            for process in running.values():
                process.terminate()
            for process in running.values():
                process.wait()


def student_interval(values_S: np.ndarray) -> tuple[float, float, float]:
    """(mean, low, high) of a 95 % interval over independent values, two or more."""
    mean = float(values_S.mean())
    half = T_975[len(values_S) - 2] * float(values_S.std(ddof=1)) / len(values_S) ** 0.5
    return mean, mean - half, mean + half


def summarise(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Flat figures from the results of every arm (and of `start`), one a seed."""
    passed = {arm: np.array([np.mean(result["passed"]) for result in results]) for arm, results in found.items()}
    figures: dict[str, float] = {"pass_start": float(passed["start"].mean())}
    for arm, results in found.items():
        if arm == "start":
            continue
        figures[f"pass_end_{arm}"] = float(passed[arm].mean())
        for name, other in (("gain", "start"), ("pass_minus_dr_grpo", "dr_grpo")):
            if arm != other:
                ends = student_interval(passed[arm] - passed[other])
                figures |= {f"{name}_{arm}{end}": value for end, value in zip(("", "_low", "_high"), ends, strict=True)}
        curves = {name: np.array([result["curves"][name] for result in results]) for name in CURVES}
        third = max(1, curves["reward_mean"].shape[1] // 3)
        figures[f"reward_start_{arm}"] = float(curves["reward_mean"][:, :third].mean())
        for name, key in (("reward", "reward_mean"), ("entropy", "entropy"), ("tokens", "response_tokens")):
            figures[f"{name}_end_{arm}"] = float(np.nanmean(curves[key][:, -third:]))
        for key in ("mismatch_p99", "clip_frac", "staleness_mean"):
            figures[f"{key}_{arm}"] = float(np.nanmean(curves[key]))
        figures[f"kl_end_{arm}"] = float(np.mean([result["kl"] for result in results]))
        figures[f"cpu_seconds_{arm}"] = float(np.mean([result["cpu_seconds"] for result in results]))
    return figures


def smooth(values_SN: np.ndarray, width: int = 5) -> np.ndarray:
    """Running mean over the last `width` steps, fewer at the start; [seeds, steps]."""
    steps = range(values_SN.shape[1])
    return np.stack([values_SN[:, max(0, n + 1 - width) : n + 1].mean(axis=1) for n in steps], axis=1)


def draw(found: Mapping[str, Sequence[Mapping[str, Any]]], figures: Mapping[str, float], path: Path) -> None:
    """Reward by step, mean and range over seeds; held-out differences; entropy and mismatch at the end."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(14, 8), layout="constrained")
    for ax, (title, names) in zip(axes[0], PANELS.items(), strict=True):
        for arm in (name for name in names if name in found):
            values = smooth(np.array([result["curves"]["reward_mean"] for result in found[arm]]))
            steps = np.arange(1, values.shape[1] + 1)
            (line,) = ax.plot(steps, values.mean(axis=0), label=arm)
            ax.fill_between(steps, values.min(axis=0), values.max(axis=0), color=line.get_color(), alpha=0.15)
        ax.set(title=title, xlabel="step", ylabel="reward, mean of 5 steps; band: all seeds")
        ax.legend(fontsize=8)
    others = [arm for arm in found if arm not in ("start", "dr_grpo")]
    ends = np.array([[figures[f"pass_minus_dr_grpo_{arm}{end}"] for end in ("", "_low", "_high")] for arm in others])
    axes[1, 0].errorbar(ends[:, 0], others, xerr=[ends[:, 0] - ends[:, 1], ends[:, 2] - ends[:, 0]], fmt="o", capsize=3)
    axes[1, 0].locator_params(axis="x", nbins=5)
    axes[1, 0].axvline(0, color="0.6", lw=1)
    axes[1, 0].set_title("held-out pass@1 minus dr_grpo, 95 % over seeds")
    trained = [arm for arm in found if arm != "start"]
    for ax, key, title in (
        (axes[1, 1], "entropy_end", "entropy, nats a token, last third"),
        (axes[1, 2], "mismatch_p99", "mismatch in training, p99, nats"),
    ):
        ax.barh(trained, [figures[f"{key}_{arm}"] for arm in trained])
        ax.set_title(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps, 3 seeds instead of 5")
    parser.add_argument("--start", type=Path, help="a finished `tiny` run, whose fine-tuned policy is the start")
    parser.add_argument("--width", type=int, default=2, help="arms that run at once")
    parser.add_argument("--job", help="run this one ARM-SEED only, as the script does itself")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    out: Path = options.out
    if options.job is not None:
        run_job(out, options.job)
        return 0
    started = time.perf_counter()
    (out / "arms").mkdir(parents=True, exist_ok=True)
    config, num_seeds = settings(options.quick)
    if options.start is not None:
        adopt_start(out / "start", options.start)
    with Console("rich") as console:
        if not run_stages(Run(out / "start", config, console), last="sft"):
            return 1
        names = {arm: [f"{arm}-{seed}" for seed in range(num_seeds)] for arm in ("start", *arms(config.rl))}
        jobs = [jobs[seed] for seed in range(num_seeds) for jobs in names.values()]
        command = [sys.executable, str(Path(__file__).resolve()), "--out", str(out), "--job"]
        missing = {job: [*command, job] for job in jobs if not (out / "arms" / f"{job}.json").exists()}
        try:
            run_jobs(missing, out / "arms", console, width=options.width)
        except KeyboardInterrupt:
            console.note(f"interrupted; the same command keeps the finished arms of {out} and goes on")
            return 1
    found = {
        arm: [json.loads((out / "arms" / f"{job}.json").read_text(encoding="utf-8")) for job in jobs]
        for arm, jobs in names.items()
    }
    figures = summarise(found) | {"num_seeds": num_seeds, "seconds": time.perf_counter() - started}
    with (out / "curves.jsonl").open("w", encoding="utf-8") as file:
        for arm, results in found.items():
            for seed, result in enumerate(results):
                for step, values in enumerate(zip(*result["curves"].values(), strict=True), start=1):
                    line = {"arm": arm, "seed": seed, "step": step, **dict(zip(result["curves"], values, strict=True))}
                    file.write(json.dumps(line) + "\n")
    write_json(out / "rl_ablation.json", figures)
    draw(found, figures, out / "rl_ablation.png")
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
