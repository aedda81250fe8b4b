"""The stages of a run from the fine-tuned policy on: evaluation, reinforcement learning, mismatch measurement.

In: a `Run` whose earlier stages are finished. Out: the figures of each stage, and its models in the run directory.

Source: report §4 (reinforcement learning), §5 (evaluation); rows R1 R7 V2 I4 X4.
Choice: what RL wrote after its last checkpoint is dropped on a restart, since asynchronous rollouts differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from composer2.env.tasks.evalsets import build_eval_set
from composer2.model.checkpoint.native import load_model, save_model
from composer2.model.pretrain.state import load_state, save_state
from composer2.rl.advantage import group_samples
from composer2.rl.curriculum import FamilyStats, family_stats
from composer2.rl.evaluate import EvalSpec, eval_figures, passed_table, run_tasks
from composer2.rl.forge.reward_to_go import step_credit
from composer2.rl.mismatch import measure_acceptance, measure_mismatch
from composer2.rl.system.loop import LoopHooks, LoopState, RLLoop
from composer2.rl.train import make_optimizer
from composer2.run import STOP_GRACE, Interrupted, Run
from composer2.runner import stable_seed
from composer2.task_source import TaskSource, probe_tasks
from composer2.types import Group


def evaluate_set(run: Run, spec: EvalSpec, *, when: str, step: int) -> dict[str, Any]:
    """Run one evaluation set on the published policy; writes the metric line and some rollouts, returns the figures."""
    tasks = build_eval_set(spec.name, spec.num_tasks, run.config.eval.task_seed, run.config.tasks)
    with run.console.stage(f"eval {spec.name}", total=len(tasks), detail=when) as stage:
        groups = run_tasks(
            run.evaluation_pool,
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
    run.evaluation_pool.publish(step, run.sink.publish(step, model.state_dict()))
    results: dict[str, Any] = {}
    for spec in run.config.eval.sets:
        partial = f"{when}-{spec.name}"
        known = run.result(partial)
        if known is None:
            known = evaluate_set(run, spec, when=when, step=step)
            run.finish(partial, known)
        results[spec.name] = known
    return results


def task_source(run: Run) -> TaskSource:
    """The training tasks; with a curriculum the fine-tuned policy is measured on the probes first."""
    if run.config.curriculum.strength == 0:
        return TaskSource(run.config)
    known = run.result("probes")
    if known is None:
        tasks = probe_tasks(run.config)
        run.pool.publish(0, run.sink.publish(0, load_model(run.model_dir("sft")).state_dict()))
        with run.console.stage("probes", total=len(tasks), detail="effort of each variant") as stage:
            seed = stable_seed(run.config.seed, "probes") % (1 << 31)
            groups = run_tasks(
                run.pool, tasks, num_samples=run.config.rl.group_size, seed=seed, should_stop=run.should_stop,
                on_progress=stage.update,
            )  # fmt: skip
            run.check_stop()
        known = {family: vars(stats) for family, stats in family_stats(groups).items()}
        run.finish("probes", known)
    return TaskSource(run.config, {family: FamilyStats(**stats) for family, stats in known.items()})


def stage_rl(run: Run) -> dict[str, Any]:
    """Dr. GRPO on fresh tasks until the last step."""
    config, source = run.config.rl, task_source(run)
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
    run.forget_after({"rl": first, "services": first, "eval": first})
    kept = {1, config.num_steps // 2, config.num_steps}

    with run.console.stage("rl", total=config.num_steps, first_step=first, detail="Dr. GRPO") as stage:

        def on_step(done: int, metrics: dict[str, Any], groups: Sequence[Group]) -> None:
            run.log("rl", done, metrics)
            if figures := run.services.figures():
                run.log("services", done, figures)
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
            pool = run.evaluation_pool
            if pool is not run.pool:  # the workers of training have these weights already
                pool.publish(done, run.sink.path(done))
            groups = run_tasks(pool, tasks, num_samples=spec.num_samples, seed=seed, should_stop=run.should_stop)
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
            task_at=source.at,
            credit=step_credit(run.config.step_rewards) if run.config.credit == "steps" else group_samples,
            seed=run.config.seed,
            state=state,
            reference=reference,
            shelf=run.services.open_shelf(),
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
        **run.services.figures(),
    }


def stage_mismatch(run: Run) -> dict[str, Any]:
    """Sampler in bf16, trainer in fp32, same weights and rollouts: replay off, on, and on with the filter."""
    if run.config.eval.mismatch_tasks == 0:
        return {}
    tasks = build_eval_set("test", run.config.eval.mismatch_tasks, run.config.eval.task_seed + 1, run.config.tasks)
    model = load_model(run.model_dir("rl"), device=run.config.device)
    with run.console.stage("mismatch", total=len(tasks), detail="bf16 sampler against fp32 trainer") as stage:
        spec = run.spec("rl", dtype="bfloat16")
        pool = run.services.open_pool("mismatch", spec, 1)
        try:
            groups = run_tasks(
                pool, tasks, num_samples=8, seed=run.config.seed + 11, should_stop=run.should_stop,
                on_progress=stage.update,
            )  # fmt: skip
        finally:
            pool.close(grace=STOP_GRACE if run.stop_requested else 5.0)
        with run.abortable():
            figures = measure_mismatch(model, groups, run.config.rl)
            if model.mtp:
                figures["mtp_acceptance"] = figures["mtp_acceptance_end"] = measure_acceptance(model, groups)
        shown = ("mismatch_p99_replay_off", "mismatch_p99_replay_on", "mtp_acceptance")
        stage.end(**{name: figures[name] for name in shown if name in figures})
    return figures
