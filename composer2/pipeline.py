"""The stages of a run, from raw text to a report, each resumable: in goes a `RunConfig`, out comes a run directory.

    data -> cpt (phase 1) -> mtp (self-distillation on the middle of phase 1) -> cpt-long (phase 2, joint)
         -> sft (phase 3) -> eval-sft -> rl -> eval-rl -> mismatch -> summary, report

    config.json  tokenizer.json  chat.json (published start)  metrics.jsonl  rollouts.jsonl  summary.json  report.html
    stages/NAME.json      result of a finished stage; its presence is what "finished" means
    checkpoints/NAME/     training state inside a stage
    models/NAME/          weights and config as safetensors

With a `start` the stages before eval-sft are that model's: recorded as adopted, and not run.

Source: report §3 (continued pretraining, MTP), §4 (reinforcement learning), §5 (evaluation); rows P3 P4 P5 R1 R7 V2 X4.
Choice: a stage that was interrupted continues from its newest checkpoint and skips the metric lines and rollouts that
are written already; training is deterministic, so these are the ones it would write again. What RL wrote after its
checkpoint is dropped: asynchronous rollouts differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from composer2.model.checkpoint.native import load_model, save_model
from composer2.model.checkpoint.published import is_published
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
from composer2.model.tokenizer import Tokenizer
from composer2.model.transformer import Transformer, init_weights
from composer2.own_tries import collect, train_on_own_tries
from composer2.pipeline_rl import stage_eval, stage_mismatch, stage_rl
from composer2.rl.evaluate import compare
from composer2.run import Interrupted, Run, stop_on_interrupt, write_json
from composer2.start import copy_start, newest_model

ADOPTED = ("data", "cpt", "mtp", "cpt-long", "sft")
"""Stages that a run with a `start` does not have."""
STAGES = (*ADOPTED, "eval-sft", "rl", "eval-rl", "mismatch", "report")


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
    """Phase 3: the scripted expert, MTP jointly; then rounds on the policy's own wrong tries, if any are asked for."""
    tokens, num_windows, pool = imitate_expert(run)["sft_train_tokens"], 0, []
    for number in range(run.config.own_tries.num_rounds):
        name = f"own-tries-{number}"
        known = run.result(name)
        pool += collect(run, number)
        if known is None:
            num_steps = run.config.own_tries.num_steps
            with run.console.stage(f"sft round {number + 1}", total=num_steps, detail="own wrong tries") as stage:
                control = phase_control(run, name, stage, name)
                known = {"tokens": train_on_own_tries(run, control, number, pool)}
            run.finish(name, known)
        tokens += known["tokens"]
        num_windows = len(pool)
    return {"sft_train_tokens": tokens, "own_tries": num_windows}


def imitate_expert(run: Run) -> dict[str, Any]:
    """The scripted expert alone."""
    known = run.result("sft-expert")
    if known is not None:
        return known
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
    run.finish("sft-expert", {"sft_train_tokens": result.tokens})
    return {"sft_train_tokens": result.tokens}


# ---------------------------------------------------------------------------------------------------------------------
# Report, and all stages in order


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
    run.console.plan(STAGES[len(ADOPTED) :] if run.config.start else STAGES)
    try:
        with stop_on_interrupt(run):
            if run.config.start and run.result("sft") is None:
                begin_with_start(run)
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


def begin_with_start(run: Run) -> None:
    """Make the model of `config.start` the policy that RL begins with."""
    config, start = run.config, Path(run.config.start)
    model = "" if is_published(start) else newest_model(start).name
    with run.console.stage("start", total=1, detail=config.start) as stage, run.abortable():
        adopt_start(run.folder, start, model=model, chat=config.chat, thinks=config.thinks)
        stage.update(1)


def adopt_start(folder: Path, start: Path, *, model: str = "sft", chat: str = "auto", thinks: bool = True) -> None:
    """Make `folder` a run whose fine-tuned policy is that of `start`, so that `run_stages` trains none: the model
    `model` of a run, or the model of a Hugging Face directory, talked to in format `chat`.

    ValueError when `start` has no such policy, or `folder` has one of its own or of another start."""
    has_policy = is_published(start) or (start / "models" / model).is_dir()
    if not (has_policy and (start / "tokenizer.json").is_file()):
        raise ValueError(f"start is {start}, accepted is a run folder with models/{model} and tokenizer.json")
    mark = folder / "stages" / "sft.json"
    known = json.loads(mark.read_text(encoding="utf-8")).get("adopted_from") if mark.exists() else str(start)
    if known != str(start):
        raise ValueError(f"{folder} holds a policy of {known or 'its own'}, accepted is the same start or a new folder")
    (folder / "stages").mkdir(parents=True, exist_ok=True)
    copy_start(folder, start, model=model, chat=chat, thinks=thinks)
    for stage in ADOPTED:
        write_json(folder / "stages" / f"{stage}.json", {"adopted_from": str(start)})
