"""The stages of a run, from raw text to a report, each resumable: in goes a `RunConfig`, out comes a run directory.

    data -> cpt (phase 1) -> mtp (self-distillation on the middle of phase 1) -> cpt-long (phase 2, joint)
         -> sft (phase 3) -> eval-sft -> rl -> eval-rl -> mismatch -> summary, report

    config.json  tokenizer.json  metrics.jsonl  rollouts.jsonl  summary.json  report.html
    stages/NAME.json      result of a finished stage; its presence is what "finished" means
    checkpoints/NAME/     training state inside a stage
    models/NAME/          weights and config as safetensors

Source: report §3 (continued pretraining, MTP), §4 (reinforcement learning), §5 (evaluation); rows P3 P4 P5 R1 R7 V2 X4.
Choice: a stage that was interrupted continues from its newest checkpoint and skips the metric lines and rollouts that
are written already; training is deterministic, so these are the ones it would write again. What RL wrote after its
checkpoint is dropped: asynchronous rollouts differ.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from composer2.env.tasks.evalsets import build_eval_set
from composer2.model.checkpoint.native import load_model, save_model
from composer2.model.pretrain.corpus import load_corpus
from composer2.model.pretrain.loop import StepMetrics
from composer2.model.pretrain.loss_fit import MIN_POINTS, fit_loss
from composer2.model.pretrain.mtp import measure_mtp_acceptance, mid_run_copy, move_mtp
from composer2.model.pretrain.phases import (
    EvalPoint,
    PhaseResult,
    RunControl,
    extend_context,
    long_context_config,
    run_cpt,
    run_long_context,
    run_sft,
    train_mtp_from_scratch,
)
from composer2.model.pretrain.state import load_state, save_state
from composer2.model.tokenizer import Tokenizer
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.evaluate import EvalSpec, compare, eval_figures, passed_table, run_tasks
from composer2.rl.mismatch import measure_acceptance, measure_mismatch
from composer2.rl.system.loop import LoopHooks, LoopState, RLLoop
from composer2.rl.system.worker import RolloutPool
from composer2.rl.train import make_optimizer
from composer2.run import STOP_GRACE, Interrupted, Run, stop_on_interrupt, write_json
from composer2.runner import make_runner, stable_seed
from composer2.types import Group

STAGES = ("data", "cpt", "mtp", "cpt-long", "sft", "eval-sft", "rl", "eval-rl", "mismatch", "report")


# ---------------------------------------------------------------------------------------------------------------------
# Continued pretraining


def stage_data(run: Run) -> dict[str, Any]:
    """Tokenizer on the corpus, and how much text there is."""
    with run.console.stage("data", total=1, detail="tokenizer and corpus") as stage, run.abortable():
        path = run.folder / "tokenizer.json"
        if not path.exists():
            documents = load_corpus(run.config.corpus).train
            tokenizer = Tokenizer.train([d.text for d in documents], run.config.vocab_size)
            partial = run.folder / "tokenizer.partial.json"
            tokenizer.save(partial)
            os.replace(partial, path)
        figures = {
            "vocab_size": run.tokenizer.vocab_size,
            "train_documents": len(load_corpus(run.config.corpus).train),
        }
        stage.update(1)
        stage.end(**figures)
    return figures


def phase_control(run: Run, name: str, stage: Any, metric_stage: str, *, offset: int = 0) -> RunControl:
    """Checkpoints, progress and metric lines of one pretraining phase."""

    def on_step(metrics: StepMetrics) -> None:
        values = dict(metrics)
        step = int(values.pop("step"))
        values["time/seconds"] = values.pop("seconds")
        run.log(metric_stage, offset + step, values)
        rate = values["tokens"] / max(values["time/seconds"], 1e-9)
        stage.update(step, loss=values["loss"], lr=values["lr"], tokens_per_s=rate)

    def on_eval(point: EvalPoint) -> None:
        run.log(metric_stage, offset + point.step, {"heldout_loss": point.loss, "tokens": point.tokens})

    return RunControl(
        folder=run.folder / "checkpoints" / name, on_step=on_step, on_eval=on_eval, should_stop=run.should_stop
    )


def initial_model(run: Run) -> Transformer:
    """The policy with fresh weights; its vocabulary is the tokenizer's."""
    model = Transformer(replace(run.config.model, vocab_size=run.tokenizer.vocab_size))
    init_weights(model, run.config.seed)
    return model.to(run.config.device)


def finished_or_interrupt(result: PhaseResult) -> PhaseResult:
    if not result.finished:
        raise Interrupted
    return result


def stage_cpt(run: Run) -> dict[str, Any]:
    """Phase 1, with held-out losses fitted against log tokens."""
    config = run.config.cpt
    model = initial_model(run)
    with run.console.stage("cpt", total=config.phase1_steps, detail="phase 1, short rows") as stage:
        control = phase_control(run, "cpt", stage, "cpt")
        result = run_cpt(
            model, run.corpus, config, seed=run.config.seed, control=control,
            mid_folder=run.folder / "checkpoints" / "cpt-mid",
        )  # fmt: skip
        finished_or_interrupt(result)
    save_model(run.model_dir("cpt"), model)
    figures: dict[str, Any] = {"cpt_tokens": result.tokens}
    if result.evals:
        figures["cpt_heldout_loss_start"] = result.evals[0].loss
        figures["cpt_heldout_loss_end"] = result.evals[-1].loss
    return figures | fitted_loss(run, result.evals)


def fitted_loss(run: Run, evals: Sequence[EvalPoint]) -> dict[str, Any]:
    """Held-out loss against log tokens after the warm-up; nothing, and a note, when there are too few points."""
    config = run.config.cpt
    after = max(0, next((p.tokens for p in evals if p.step > config.warmup_steps), 0) - 1)
    points = [(p.tokens, p.loss) for p in evals if p.tokens > after]
    if len(points) < MIN_POINTS:
        run.console.note(
            f"loss fit left out: {len(points)} evaluations after the warm-up, it needs {MIN_POINTS} "
            "(cpt.num-eval-points, cpt.phase1-steps)"
        )
        return {}
    fit = fit_loss(points)
    return {
        "loss_fit_r2": fit.r2,
        "loss_fit_slope": fit.slope,
        "loss_fit_points": len(fit.points),
        "loss_fit_after_tokens": after,
    }


def stage_mtp(run: Run) -> dict[str, Any]:
    """MTP layers from scratch on the middle of phase 1, then moved to its end."""
    model = load_model(run.model_dir("cpt")).to(run.config.device)
    middle = mid_run_copy(model, run.folder / "checkpoints" / "cpt-mid")
    rows = run.corpus.heldout_rows(run.config.mtp.seq_len, run.config.cpt.eval_rows)
    with run.console.stage("mtp", total=run.config.mtp.num_steps, detail="self-distillation") as stage:
        control = phase_control(run, "mtp", stage, "mtp")
        finished_or_interrupt(
            train_mtp_from_scratch(middle, run.corpus, run.config.mtp, seed=run.config.seed, control=control)
        )
        acceptance_mid = measure_mtp_acceptance(middle, rows)[0]
        move_mtp(middle, model)
        acceptance_moved = measure_mtp_acceptance(model, rows)[0]
        stage.end(acceptance_mid=acceptance_mid, acceptance_after_move=acceptance_moved)
    save_model(run.model_dir("mtp"), model)
    return {"mtp_acceptance_mid": acceptance_mid, "mtp_acceptance_after_move": acceptance_moved}


def stage_cpt_long(run: Run) -> dict[str, Any]:
    """Phase 2: YaRN, long rows, MTP jointly."""
    short = load_model(run.model_dir("mtp"))
    config = run.config.cpt
    longer = long_context_config(short.config, trained_len=config.phase1_seq_len, new_len=config.phase2_seq_len)
    model = extend_context(short, longer).to(run.config.device)
    with run.console.stage("cpt-long", total=config.phase2_steps, detail="phase 2, long rows") as stage:
        control = phase_control(run, "cpt-long", stage, "cpt-long")
        result = run_long_context(
            model, run.corpus, config, mtp=run.config.mtp, seed=run.config.seed + 1, control=control
        )
        finished_or_interrupt(result)
    save_model(run.model_dir("cpt-long"), model)
    return {"cpt_long_tokens": result.tokens, "cpt_long_heldout_loss_end": result.evals[-1].loss}


def stage_sft(run: Run) -> dict[str, Any]:
    """Phase 3: the scripted expert, MTP jointly."""
    model = load_model(run.model_dir("cpt-long")).to(run.config.device)
    with run.console.stage("sft", total=run.config.sft.num_steps, detail="phase 3, scripted expert") as stage:
        control = phase_control(run, "sft", stage, "sft")
        result = run_sft(
            model,
            run.examples_at,
            run.config.sft,
            pad_id=run.tokenizer.special_id("pad"),
            mtp=run.config.mtp,
            control=control,
        )
        finished_or_interrupt(result)
    save_model(run.model_dir("sft"), model)
    return {"sft_train_tokens": result.tokens}


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and reinforcement learning


def evaluate_set(run: Run, spec: EvalSpec, *, when: str, step: int) -> dict[str, Any]:
    """Run one evaluation set on the published policy; writes the metric line and some rollouts, returns the figures."""
    tasks = build_eval_set(spec.name, spec.num_tasks, run.config.eval.task_seed, run.config.tasks)
    with run.console.stage(f"eval {spec.name}", total=len(tasks), detail=when) as stage:
        groups = run_tasks(
            run.pool,
            tasks,
            num_samples=spec.num_samples,
            seed=stable_seed(run.config.seed, "eval", spec.name) % (1 << 31),
            should_stop=run.should_stop,
            on_progress=stage.update,
        )
        run.check_stop()
        figures = eval_figures(groups, np.random.default_rng(0))
        stage.end(**{name: figures[name] for name in ("pass_at_1", f"best_of_{spec.num_samples}", "tokens", "turns")})
    run.log("eval", step, {"split": spec.name, "when": when, **figures})
    run.keep_rollouts(groups, split=spec.name, step=step, when=when)
    return {**figures, "passed": passed_table(groups).astype(int).tolist()}


def stage_eval(run: Run, *, model_name: str, when: str, step: int) -> dict[str, Any]:
    """All evaluation sets on one model, and the MTP acceptance on its own held-out rollouts."""
    model = load_model(run.model_dir(model_name))
    run.pool.publish(step, run.sink.publish(step, model.state_dict()))
    results: dict[str, Any] = {}
    for spec in run.config.eval.sets:
        partial = f"{when}-{spec.name}"
        known = run.result(partial)
        if known is None:
            known = evaluate_set(run, spec, when=when, step=step)
            run.finish(partial, known)
        results[spec.name] = known
    return results


def stage_rl(run: Run) -> dict[str, Any]:
    """Dr. GRPO on fresh tasks until the last step."""
    config = run.config.rl
    reference = load_model(run.model_dir("sft")).to(run.config.device).requires_grad_(False)
    model = load_model(run.model_dir("sft")).to(run.config.device)
    optimizer = make_optimizer(model, config)
    folder = run.folder / "checkpoints" / "rl"
    saved = load_state(folder, model=model, optimizer=optimizer)
    state = LoopState(**saved.metadata["loop"]) if saved else None
    totals = (
        dict(saved.metadata["totals"])
        if saved
        else {"summaries": 0.0, "trained_twice": 0.0, "staleness": 0.0, "replaced": 0.0}
    )
    first = saved.step if saved else 0
    run.forget_after({"rl": first, "eval": first})
    kept = {1, config.num_steps // 2, config.num_steps}

    with run.console.stage("rl", total=config.num_steps, first_step=first, detail="Dr. GRPO") as stage:

        def on_step(done: int, metrics: dict[str, Any], groups: Sequence[Group]) -> None:
            run.log("rl", done, metrics)
            totals["summaries"] += metrics.get("summaries", 0.0)
            totals["trained_twice"] = metrics["trained_twice"]
            totals["staleness"] += metrics["staleness_mean"]
            totals["replaced"] += metrics.get("replaced_expert_frac", 0.0)
            if done in kept:
                run.keep_rollouts(groups, split="train", step=done, when=f"rl-{done}")
            stage.update(
                done,
                reward=metrics.get("reward_mean", 0.0),
                passed=metrics.get("pass_rate", 0.0),
                best_of_k=metrics["best_of_k"],
                mismatch_p99=metrics.get("mismatch_p99", 0.0),
                staleness=metrics["staleness_mean"],
            )

        def checkpoint(done: int, loop_state: LoopState) -> None:
            metadata = {"loop": vars(loop_state), "totals": totals}
            save_state(folder, step=done, model=model, optimizer=optimizer, metadata=metadata)

        def evaluate(done: int) -> None:
            spec = run.config.eval.during
            if run.is_logged("eval", done, split=spec.name):
                return
            tasks = build_eval_set(spec.name, spec.num_tasks, run.config.eval.task_seed, run.config.tasks)
            seed = stable_seed(run.config.seed, "eval", spec.name) % (1 << 31)
            groups = run_tasks(run.pool, tasks, num_samples=spec.num_samples, seed=seed, should_stop=run.should_stop)
            if not run.stop_requested:
                run.log(
                    "eval", done,
                    {"split": spec.name, "when": f"rl-{done}", **eval_figures(groups, np.random.default_rng(0))},
                )  # fmt: skip

        loop = RLLoop(
            model,
            optimizer,
            config,
            pool=run.pool,
            sink=run.sink,
            task_at=run.task_at,
            seed=run.config.seed,
            state=state,
            reference=reference,
        )
        hooks = LoopHooks(on_step=on_step, checkpoint=checkpoint, evaluate=evaluate, should_stop=run.should_stop)
        if not loop.run(hooks):
            raise Interrupted
    save_model(run.model_dir("rl"), model)
    steps = max(config.num_steps, 1)
    return {
        "summaries_used": totals["summaries"],
        "trained_twice": totals["trained_twice"],
        "staleness_mean": totals["staleness"] / steps,
        "replaced_expert_frac": totals["replaced"] / steps,
        "rl_steps": config.num_steps,
    }


def stage_mismatch(run: Run) -> dict[str, Any]:
    """Sampler in bf16, trainer in fp32, same weights and rollouts: replay off, on, and on with the filter."""
    if run.config.eval.mismatch_tasks == 0:
        return {}
    tasks = build_eval_set("test", run.config.eval.mismatch_tasks, run.config.eval.task_seed + 1, run.config.tasks)
    model = load_model(run.model_dir("rl"))
    with run.console.stage("mismatch", total=len(tasks), detail="bf16 sampler against fp32 trainer") as stage:
        spec = run.spec("rl", dtype="bfloat16")
        pool = RolloutPool(make_runner, spec, lockstep=spec.lockstep)
        try:
            groups = run_tasks(
                pool, tasks, num_samples=8, seed=run.config.seed + 11, should_stop=run.should_stop,
                on_progress=stage.update,
            )  # fmt: skip
        finally:
            pool.close(grace=STOP_GRACE if run.stop_requested else 5.0)
        with run.abortable():
            figures = measure_mismatch(model, groups, run.config.rl)
            figures["mtp_acceptance"] = figures["mtp_acceptance_end"] = measure_acceptance(model, groups)
        stage.end(**{k: figures[k] for k in ("mismatch_p99_replay_off", "mismatch_p99_replay_on", "mtp_acceptance")})
    return figures


def stage_report(run: Run) -> dict[str, Any]:
    """summary.json and report.html."""
    from composer2.report import write_report  # imports matplotlib, which costs a second that most commands save

    with run.abortable():
        write_json(run.folder / "summary.json", summarise(run))
        write_report(run.folder)
    return {}


def summarise(run: Run) -> dict[str, Any]:
    """Flat figures of the whole run."""
    summary: dict[str, Any] = {"preset": run.config.preset, "seed": run.config.seed}
    for stage in ("data", "cpt", "mtp", "cpt-long", "sft", "rl", "mismatch"):
        summary |= run.result(stage) or {}
    before, after = run.result("eval-sft") or {}, run.result("eval-rl") or {}
    for spec in run.config.eval.sets:
        prefix = "" if spec.name == "test" else f"{spec.name}_"
        one, two = before[spec.name], after[spec.name]
        for name, figures in (("sft", one), ("rl", two)):
            for key, value in figures.items():
                if isinstance(value, int | float):
                    summary[f"{prefix}{name}_{key}"] = value
        rng = np.random.default_rng(0)
        for key, value in compare(np.array(one["passed"]), np.array(two["passed"]), rng).items():
            summary[f"{prefix}{key.replace('best_', f'best_of_{spec.num_samples}_')}"] = value
    return summary


def stage_functions(run: Run) -> Mapping[str, Callable[[], dict[str, Any]]]:
    """Every stage by name, in order."""
    return {
        "data": lambda: stage_data(run),
        "cpt": lambda: stage_cpt(run),
        "mtp": lambda: stage_mtp(run),
        "cpt-long": lambda: stage_cpt_long(run),
        "sft": lambda: stage_sft(run),
        "eval-sft": lambda: stage_eval(run, model_name="sft", when="sft", step=0),
        "rl": lambda: stage_rl(run),
        "eval-rl": lambda: stage_eval(run, model_name="rl", when="rl", step=run.config.rl.num_steps),
        "mismatch": lambda: stage_mismatch(run),
        "report": lambda: stage_report(run),
    }


def run_stages(run: Run, *, last: str = "report") -> bool:
    """All stages up to `last`, skipping those that are finished. False when the run was interrupted."""
    functions = stage_functions(run)
    run.console.plan(STAGES)
    try:
        with stop_on_interrupt(run):
            for name in STAGES[: STAGES.index(last) + 1]:
                if name == "report" or run.result(name) is None:
                    run.finish(name, functions[name]())
                run.check_stop()
    except Interrupted:
        run.console.note(f"interrupted; the same command continues {run.folder}")
        return False
    finally:
        run.close()
    return True
