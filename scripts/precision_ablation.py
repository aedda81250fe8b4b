"""What number formats of the experts do to training, small: `python scripts/precision_ablation.py --out DIR [--quick]`.

    arm                  forward of the experts                         backward
    native               FP32                                           FP32
    bf16                 BF16                                           BF16
    mxfp8                MXFP8                                          MXFP8
    nvfp4_token          NVFP4, a scale per token, exact division       MXFP8
    nvfp4_tensor         NVFP4, one scale per tensor, exact division    MXFP8
    nvfp4_token_approx   NVFP4, a scale per token, x * reciprocal       MXFP8

Every arm takes the same continued pretraining from the same fresh weights, and the same RL from one fine-tuned start,
which is trained natively. In: nothing. Out: `DIR/precision_ablation.json` (flat figures), `curves.jsonl` (one line a
step) and `precision_ablation.png`; exit code 0 when every arm was run to its end. An interrupted run goes on where it
was.

    cpt_heldout_loss_ARM, cpt_loss_end_ARM        nats a token after CPT; mean of the last tenth of steps
    rl_reward_{start,end}_ARM, rl_pass_rate_*     means of the first and last third of RL steps
    mismatch_p99_ARM, mismatch_p99_replay_off_ARM |log-prob of trainer - of sampler|, p99, at the common start
    rl_mismatch_p99_ARM                           the same over RL, mean of steps; the weights of both sides are equal
    mismatch_p99_orders_apart                     sampler exact, trainer x * reciprocal: division that differs by side
    code_flips_ppm_{tokens,mxfp8_tokens,weights}  codes that x * reciprocal gives otherwise than exact division does

Source: report §6.1 (stability of NVFP4 training); rows K8 K5.
Choice: CPT runs without autocast, so that the recipe is all that differs. RL is synchronous (staleness 0): the trainer
scores what its own weights sampled, and the mismatch is numerical alone. Trainer and sampler multiply in one recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from composer2.env.tasks.evalsets import build_eval_set
from composer2.kernels.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from composer2.kernels.nvfp4 import quantize_nvfp4
from composer2.log import Console
from composer2.model.checkpoint.native import load_model, save_model
from composer2.model.moe import Experts
from composer2.model.pretrain.config import CptConfig, MtpConfig
from composer2.model.pretrain.loop import StepMetrics
from composer2.model.pretrain.phases import RunControl, run_cpt
from composer2.model.transformer import Transformer, init_weights
from composer2.pipeline import adopt_start, run_stages
from composer2.recipes import RunConfig, tiny
from composer2.rl.evaluate import run_tasks
from composer2.rl.mismatch import measure_mismatch
from composer2.rl.system.loop import LoopHooks, RLLoop
from composer2.rl.system.weight_sync import FolderSink
from composer2.rl.system.worker import RolloutPool
from composer2.rl.train import make_optimizer
from composer2.run import Run, write_json
from composer2.runner import make_runner

ARMS: Mapping[str, Mapping[str, Any]] = {
    "native": {},
    "bf16": {"expert_recipe": "bf16"},
    "mxfp8": {"expert_recipe": "mxfp8"},
    "nvfp4_token": {"expert_recipe": "nvfp4"},
    "nvfp4_tensor": {"expert_recipe": "nvfp4-tensor"},
    "nvfp4_token_approx": {"expert_recipe": "nvfp4", "nvfp4_order": "reciprocal"},
}


def settings(quick: bool, seed: int) -> tuple[RunConfig, CptConfig, int]:
    """The run that makes the common start and holds the RL settings, CPT of an arm, tasks of the mismatch."""
    base = tiny()
    share = 1 if quick else 5
    config = replace(
        base,
        preset="tiny-ablation",
        seed=seed,
        cpt=replace(base.cpt, phase1_steps=100 * share, phase2_steps=8 * share, num_eval_points=4),
        mtp=MtpConfig(num_steps=1, joint_weight=0.0),
        sft=replace(base.sft, num_steps=700 * share, schedule_steps=1000 * share),
        rl=replace(
            base.rl, num_steps=16 * share, prompts_per_step=8, max_staleness=0, replay_tau=0.0, reference_every=1000
        ),
    )
    arm = replace(
        config.cpt,
        phase1_steps=60 * share,
        phase1_rows=8,
        warmup_steps=6,
        num_eval_points=2,
        eval_rows=16,
        autocast="off",
    )
    return config, arm, 8 * share


def cpt_arm(run: Run, config: CptConfig, fields: Mapping[str, Any]) -> dict[str, Any]:
    """CPT from fresh weights: losses by step, held-out loss at the end."""
    model = Transformer(replace(run.config.model, vocab_size=run.tokenizer.vocab_size, **fields))
    init_weights(model, run.config.seed)
    steps: list[StepMetrics] = []
    control = RunControl(on_step=lambda metrics: steps.append(dict(metrics)))
    result = run_cpt(model, run.corpus, config, seed=run.config.seed, control=control)
    return {
        "loss": [metrics["loss"] for metrics in steps],
        "grad_norm": [metrics["grad_norm"] for metrics in steps],
        "heldout_loss": result.evals[-1].loss,
        "seconds": sum(metrics["seconds"] for metrics in steps),
    }


def start_with(run: Run, folder: Path, fields: Mapping[str, Any]) -> Transformer:
    """The fine-tuned weights in a model of another recipe, written to `folder`."""
    start = load_model(run.model_dir("sft"))
    model = Transformer(replace(start.config, **fields))
    model.load_state_dict(start.state_dict())
    save_model(folder, model)
    return model


def rl_arm(run: Run, folder: Path, fields: Mapping[str, Any], num_tasks: int) -> dict[str, Any]:
    """Mismatch at the start, then RL: reward and mismatch by step."""
    started = time.perf_counter()
    model = start_with(run, folder / "start", fields)
    spec = replace(run.spec("sft"), model_dir=folder / "start")
    steps: list[dict[str, Any]] = []
    with RolloutPool(make_runner, spec, lockstep=True) as pool:
        tasks = build_eval_set("test", num_tasks, run.config.eval.task_seed + 1, run.config.tasks)
        groups = run_tasks(pool, tasks, num_samples=8, seed=run.config.seed + 11)
        mismatch = measure_mismatch(model, groups, run.config.rl)
        apart = {}
        if fields == ARMS["nvfp4_token"]:
            other = start_with(run, folder / "other", ARMS["nvfp4_token_approx"])
            apart = measure_mismatch(other, groups, run.config.rl)
        loop = RLLoop(
            model,
            make_optimizer(model, run.config.rl),
            run.config.rl,
            pool=pool,
            sink=FolderSink(folder / "weights"),
            task_at=run.task_at,
            seed=run.config.seed,
        )
        loop.run(
            LoopHooks(
                on_step=lambda done, metrics, groups: steps.append(metrics),
                checkpoint=lambda done, state: None,
                evaluate=lambda done: None,
                should_stop=lambda: False,
            )
        )
    names = ("reward_mean", "pass_rate", "mismatch_p99", "grad_norm")
    return {
        **{name: [float(metrics.get(name, 0.0)) for metrics in steps] for name in names},
        "start": mismatch,
        "apart": apart,
        "seconds": time.perf_counter() - started,
    }


@torch.no_grad()
def code_flips(run: Run) -> dict[str, float]:
    """Parts per million of codes that differ between the two divisions, on what the start's experts really see."""
    model = load_model(run.model_dir("sft"))
    seen: list[torch.Tensor] = []
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    handles = [
        module.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0])) for module in experts
    ]
    rows = run.corpus.heldout_rows(run.config.cpt.phase1_seq_len, 16)
    model(torch.from_numpy(rows.token_ids.astype(np.int64)))
    for handle in handles:
        handle.remove()
    tokens = torch.cat(seen).bfloat16()
    weights = torch.cat([module.gate_up_proj for module in experts]).bfloat16()
    rounded = dequantize_mxfp8(quantize_mxfp8(tokens), torch.bfloat16)
    return {
        "code_flips_ppm_tokens": flips(tokens, "token"),
        "code_flips_ppm_mxfp8_tokens": flips(rounded, "token"),
        "code_flips_ppm_weights": flips(weights, "matrix"),
        "code_flips_num_token_codes": float(tokens.numel()),
    }


def flips(x: torch.Tensor, outer: Any) -> float:
    """Codes, two a byte, that differ between exact division and multiplication by the reciprocal, in ppm."""
    exact, approx = (quantize_nvfp4(x, outer=outer, order=order).codes for order in ("exact", "reciprocal"))  # type: ignore[arg-type]
    differ = exact ^ approx
    return 1e6 * float(((differ & 15) != 0).sum() + ((differ >> 4) != 0).sum()) / x.numel()


def kept(path: Path, make: Any) -> Any:
    """The result at `path`, made first when it is not there."""
    if not path.exists():
        write_json(path, make())
    return json.loads(path.read_text(encoding="utf-8"))


def summarise(cpt: Mapping[str, Any], rl: Mapping[str, Any]) -> dict[str, float]:
    """Flat figures of all arms."""
    figures: dict[str, float] = {}
    for arm, found in cpt.items():
        tail = max(1, len(found["loss"]) // 10)
        figures[f"cpt_heldout_loss_{arm}"] = found["heldout_loss"]
        figures[f"cpt_loss_end_{arm}"] = float(np.mean(found["loss"][-tail:]))
        figures[f"cpt_grad_norm_max_{arm}"] = max(found["grad_norm"])
        figures[f"cpt_seconds_{arm}"] = found["seconds"]
    for arm, found in rl.items():
        third = max(1, len(found["reward_mean"]) // 3)
        for name, key in (("reward", "reward_mean"), ("pass_rate", "pass_rate")):
            figures[f"rl_{name}_start_{arm}"] = float(np.mean(found[key][:third]))
            figures[f"rl_{name}_end_{arm}"] = float(np.mean(found[key][-third:]))
        figures[f"mismatch_p99_{arm}"] = found["start"]["mismatch_p99_replay_on"]
        figures[f"mismatch_p99_replay_off_{arm}"] = found["start"]["mismatch_p99_replay_off"]
        figures[f"mismatch_mean_{arm}"] = found["start"]["mismatch_mean_replay_on"]
        figures[f"differing_expert_frac_{arm}"] = found["start"]["differing_expert_frac"]
        figures[f"rl_mismatch_p99_{arm}"] = float(np.mean(found["mismatch_p99"]))
        figures[f"rl_grad_norm_max_{arm}"] = max(found["grad_norm"])
        figures[f"rl_seconds_{arm}"] = found["seconds"]
    apart = rl["nvfp4_token"]["apart"]
    figures["mismatch_p99_orders_apart"] = apart["mismatch_p99_replay_on"]
    figures["mismatch_mean_orders_apart"] = apart["mismatch_mean_replay_on"]
    return figures


def smooth(values: Sequence[float], width: int) -> np.ndarray:
    """Running mean over the last `width` values, fewer at the start."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def draw(cpt: Mapping[str, Any], rl: Mapping[str, Any], figures: Mapping[str, float], path: Path) -> None:
    """CPT loss against native, RL reward, mismatch by RL step, mismatch at the start."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), layout="constrained")
    native = np.array(cpt["native"]["loss"])
    for arm in ARMS:
        axes[0, 0].plot(smooth(np.array(cpt[arm]["loss"]) - native, 5), label=arm)
        axes[0, 1].plot(smooth(rl[arm]["reward_mean"], 5), label=arm)
        axes[1, 0].plot(rl[arm]["mismatch_p99"], label=arm)
    titles = (
        "CPT loss minus native, nats (mean of 5)",
        "RL reward (mean of 5)",
        "RL trainer/sampler mismatch, p99, nats",
    )
    for ax, title in zip(axes.flat, titles, strict=False):
        ax.set_title(title)
        ax.set_xlabel("step")
    axes[1, 0].set_yscale("log")
    axes[0, 1].legend(fontsize=8)
    bars = {arm: figures[f"mismatch_p99_{arm}"] for arm in ARMS} | {
        "sampler exact,\ntrainer approx": figures["mismatch_p99_orders_apart"]
    }
    axes[1, 1].barh(list(bars), list(bars.values()))
    axes[1, 1].set_xscale("log")
    axes[1, 1].set_title("mismatch p99 at the common start, nats, replay on")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="a finished `tiny` run, whose fine-tuned policy is the RL start")
    options = parser.parse_args()
    out: Path = options.out
    (out / "arms").mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    config, arm_cpt, num_tasks = settings(options.quick, options.seed)
    if options.start is not None:
        adopt_start(out / "start", options.start)
    cpt: dict[str, Any] = {}
    rl: dict[str, Any] = {}
    with Console("rich") as console:
        run = Run(out / "start", config, console)
        if not run_stages(run, last="sft"):
            return 1
        for arm, fields in ARMS.items():
            cpt[arm] = kept(out / "arms" / f"cpt-{arm}.json", lambda fields=fields: cpt_arm(run, arm_cpt, fields))
            console.note(f"CPT {arm}: held-out {cpt[arm]['heldout_loss']:.4f}, {cpt[arm]['seconds']:.0f} s")
        for arm, fields in ARMS.items():
            folder = out / "arms" / arm
            rl[arm] = kept(
                out / "arms" / f"rl-{arm}.json", lambda fields=fields, at=folder: rl_arm(run, at, fields, num_tasks)
            )
            p99 = rl[arm]["start"]["mismatch_p99_replay_on"]
            console.note(f"RL {arm}: mismatch p99 {p99:.2e} at the start, {rl[arm]['seconds']:.0f} s")
        figures = summarise(cpt, rl) | code_flips(run)
    figures |= {"num_arms": len(ARMS), "seconds": time.perf_counter() - started}
    with (out / "curves.jsonl").open("w", encoding="utf-8") as file:
        for stage, arms in (("cpt", cpt), ("rl", rl)):
            for arm, found in arms.items():
                curves = {name: values for name, values in found.items() if isinstance(values, list)}
                for step, values in enumerate(zip(*curves.values(), strict=True), start=1):
                    line = {"stage": stage, "arm": arm, "step": step, **dict(zip(curves, values, strict=True))}
                    file.write(json.dumps(line) + "\n")
    write_json(out / "precision_ablation.json", figures)
    draw(cpt, rl, figures, out / "precision_ablation.png")
    print(json.dumps({name: value for name, value in figures.items() if "mismatch_p99" in name or "flips" in name}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
