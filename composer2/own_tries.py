"""The end of phase 3: the policy tries tasks, and is shown what the expert would do after its own wrong tries.

In: a run whose policy has imitated the expert. Out: the policy after further rounds of fine-tuning.

    round:  episodes of the newest policy on fresh tasks -> windows cut after a failed run, fix appended -> fine-tuning

Source: report §3 (supervised phase before RL); rows P3 P4.
Choice: the report says nothing of this. Scripted wrong tries are blind; a policy's own ones are plausible, and what it
has to learn is to leave them. All rounds keep their windows, as dataset aggregation (Ross et al. 2011) does.
Choice: episodes of asynchronous workers differ between runs, so a round's windows are stored before they are used, and
a resumed run trains on the same ones.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np

from composer2.env.tasks.expert import after_own_tries
from composer2.env.tasks.procedural import generate_task
from composer2.model.checkpoint.native import load_model, save_model
from composer2.model.pretrain.data import Example
from composer2.model.pretrain.phases import RunControl, run_sft
from composer2.rl.evaluate import run_tasks
from composer2.rl.system.worker import RolloutPool
from composer2.run import STOP_GRACE, Interrupted, Run
from composer2.runner import make_runner, stable_seed


def save_examples(path: Path, examples: list[Example]) -> None:
    """Windows of any lengths as one file, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        np.savez(
            file,
            lengths=np.array([len(ids) for ids, _ in examples], dtype=np.int64),
            token_ids=np.concatenate([np.asarray(ids, np.int32) for ids, _ in examples] or [np.zeros(0, np.int32)]),
            weights=np.concatenate([np.asarray(w, np.float32) for _, w in examples] or [np.zeros(0, np.float32)]),
        )
    os.replace(partial, path)


def load_examples(path: Path) -> list[Example]:
    """What `save_examples` wrote."""
    with np.load(path) as stored:
        ends = np.cumsum(stored["lengths"])[:-1]
        return list(zip(np.split(stored["token_ids"], ends), np.split(stored["weights"], ends), strict=True))


def collect(run: Run, number: int) -> list[Example]:
    """The windows of one round, from the file of an interrupted run or from fresh episodes of the policy `sft`."""
    path = run.folder / "checkpoints" / f"own-tries-{number}.npz"
    if path.exists():
        return load_examples(path)
    config = run.config.own_tries
    rng = random.Random(stable_seed(run.config.seed, "own tries", number))
    tasks = [generate_task(rng, "train", run.config.tasks) for _ in range(config.num_tasks)]
    # Workers of their own: each round has other weights, and they are no policy version of RL.
    spec = run.spec("sft")
    pool = RolloutPool(make_runner, spec, num_workers=run.config.rl.num_workers, lockstep=spec.lockstep)
    with run.console.stage(f"own tries {number}", total=len(tasks), detail="episodes") as stage:
        try:
            groups = run_tasks(
                pool, tasks, num_samples=config.num_samples,
                seed=stable_seed(run.config.seed, "own tries", number) % (1 << 31),
                should_stop=run.should_stop, on_progress=stage.update,
            )  # fmt: skip
        finally:
            pool.close(grace=STOP_GRACE if run.stop_requested else 5.0)
        run.check_stop()
        windows: list[Example] = [
            (example.token_ids, example.weights)
            for group in groups
            for rollout in group.rollouts
            for example in after_own_tries(group.task, run.template, rollout, run.config.expert, config.max_tries)
        ]
        stage.end(windows=len(windows))
    save_examples(path, windows)
    return windows


def train_on_own_tries(run: Run, control: RunControl, number: int, pool: list[Example]) -> int:
    """One round of fine-tuning on the policy `sft`, which it replaces; returns the tokens trained."""
    config = run.config.own_tries
    num_own = max(1, round(run.config.sft.batch_size * config.own_frac)) if pool else 0

    def examples(step: int) -> list[Example]:
        rng = random.Random(stable_seed(run.config.seed, "own tries", number, step))
        scripted = run.examples_at(run.config.sft.num_steps + number * config.num_steps + step)
        return scripted[: run.config.sft.batch_size - num_own] + [
            pool[rng.randrange(len(pool))] for _ in range(num_own)
        ]

    model = load_model(run.model_dir("sft")).to(run.config.device)
    phase = replace(run.config.sft, num_steps=config.num_steps, schedule_steps=config.num_steps, lr=config.lr)
    result = run_sft(
        model, examples, phase, pad_id=run.tokenizer.special_id("pad"), mtp=run.config.mtp, control=control
    )
    if not result.finished:
        raise Interrupted
    save_model(run.model_dir("sft"), model)
    return result.tokens
