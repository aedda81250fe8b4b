"""The `composer2` command: parse, wire, call.

    composer2 train PRESET [--run-dir DIR] [--quiet | --json] [--FIELD VALUE …]   the whole pipeline; resumes
    composer2 cpt | sft | rl | eval PRESET …       the same up to that stage
    composer2 generate --model RUN|DIR --prompt TEXT   continue a text (DIR: Hugging Face weights and tokenizer.json)
    composer2 generate --model DIR --prompt TEXT --chat [FORMAT]   answer a message
    composer2 train | rl | eval PRESET --start DIR   RL from a published model in DIR, or from another run
    composer2 solve DIR "what is wrong" --model RUN|DIR [--apply]
    composer2 export RUN DIR                       the newest model as a Hugging Face directory
    composer2 report RUN                           write the report again
    composer2 inspect run RUN [N]                  read a run, its rollouts turn by turn
    composer2 inspect model NAME|DIR               count a published model, or one in a folder
    composer2 plan NAME --gpus N --gpu b200        memory a rank and traffic a step of a layout

Source: rows X1 X2 X4 X5 D6.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from composer2.log import Console, Mode, fail
from composer2.types import PodError

if TYPE_CHECKING:
    from composer2.model.config import ModelConfig
    from composer2.recipes import RunConfig

TRAINING = {"train": "report", "cpt": "cpt-long", "sft": "sft", "rl": "rl", "eval": "eval-rl"}
"""Commands that run the pipeline, and the stage each one ends with."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def _mode(quiet: bool, json: bool) -> Mode:
    if quiet and json:
        fail("--quiet and --json exclude each other")
    return "quiet" if quiet else "json" if json else "rich"


def _parser(command: str, summary: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"composer2 {command}", description=summary, allow_abbrev=False)
    parser.add_argument("--quiet", action="store_true", help="print results only")
    parser.add_argument("--json", action="store_true", help="print one JSON object per event")
    return parser


def _train(command: str, argv: Sequence[str]) -> int:
    from composer2.config import apply_overrides, choose_preset
    from composer2.recipes import NEEDS_START, PRESETS

    summary = (
        f"Runs the pipeline up to {TRAINING[command]}; the same command resumes. Every field of the preset can be "
        "overridden, e.g. --rl.num-steps 50; --fields lists them. With --start DIR, RL begins with a published model "
        "or another run, and eval evaluates that model."
    )
    parser = _parser(command, summary)
    parser.add_argument("preset", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--run-dir", type=Path, help="default: runs/PRESET, with -seedN when the seed is not 0")
    parser.add_argument("--unsafe-process-pods", action="store_true", help="accept pods without isolation")
    parser.add_argument("--executor", choices=("local", "ray"), default="local", help="who runs the services")
    parser.add_argument("--ray-address", help="of a running Ray cluster; default: one is started on this machine")
    parser.add_argument("--fields", action="store_true", help="list every field of the preset and leave")
    options, overrides = parser.parse_known_args(argv)
    config = choose_preset(options.preset, {name: make() for name, make in PRESETS.items()})
    if options.executor == "ray":  # a cluster is worth it from two samplers on; --rl.num-workers says otherwise
        config = replace(config, rl=replace(config.rl, num_workers=max(2, config.rl.num_workers)))
    if options.fields:
        overrides = ["--help"]
    config = apply_overrides(config, overrides, prog=f"composer2 {command} {options.preset}")
    if options.unsafe_process_pods:
        config = replace(config, pods=replace(config.pods, allow_unsafe=True))
    last = TRAINING[command]
    if config.start:  # known by its whole path, so that the same command resumes from anywhere
        config = replace(config, start=str(Path(config.start).resolve()))
        last = "eval-sft" if command == "eval" else last
    elif options.preset in NEEDS_START:
        fail(f"start is '', accepted with the preset {options.preset} is a directory, --start DIR")
    suffix = "" if config.seed == 0 else f"-seed{config.seed}"
    folder = options.run_dir or Path("runs") / f"{options.preset}{suffix}"

    with Console(_mode(options.quiet, options.json)) as console:
        try:
            if options.executor == "ray":
                completed = _run_on_ray(folder, config, last, console, options.ray_address)
            else:
                completed = _run_here(folder, config, last, console)
        except _run_errors() as error:
            return _run_failed(error, folder, console)
        if not completed:
            return INTERRUPTED
        if command == "train":
            console.final(f"report: {folder / 'report.html'}", report=str(folder / "report.html"))
        else:
            console.final(f"run: {folder}", run=str(folder))
    return 0


def _run_here(folder: Path, config: RunConfig, last: str, console: Console) -> bool:
    """The stages in this process and its workers; False when interrupted."""
    from composer2.env.pod import open_backend
    from composer2.pipeline import run_stages
    from composer2.run import Run

    if last not in ("cpt-long", "sft"):
        try:
            _, reason = open_backend(config.pods.backend, allow_unsafe=config.pods.allow_unsafe)
        except PodError as error:
            fail(str(error))
        console.note(f"pods: {reason}")
    try:
        run = Run(folder, config, console)
    except ValueError as error:
        fail(str(error))
    return run_stages(run, last=last)


def _run_on_ray(folder: Path, config: RunConfig, last: str, console: Console, address: str | None) -> bool:
    """The stages in Ray actors; False when interrupted."""
    try:
        from composer2.dist.ray.cluster import RayConfig
        from composer2.dist.ray.executor import run_on_ray
    except ImportError as error:
        fail(str(error))
    return run_on_ray(folder, config, last=last, console=console, ray_config=RayConfig(address=address))


def _run_errors() -> tuple[type[Exception], ...]:
    """What ends a run for a reason that one line tells."""
    from composer2.model.pretrain.state import CheckpointError
    from composer2.rl.system.loop import TaskSourceError
    from composer2.rl.system.worker import WorkerError

    return (CheckpointError, TaskSourceError, WorkerError, PodError, FloatingPointError, ValueError, OSError)


def _run_failed(error: Exception, folder: Path, console: Console) -> int:
    """One line for the reader; what else there is to know (a worker's traceback) goes to error.txt."""
    first, *others = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    if others:
        first = f"{first} {others[-1]}"
        with contextlib.suppress(OSError):
            (folder / "error.txt").write_text(f"{error}\n", encoding="utf-8")
            first += f" (all of it in {folder / 'error.txt'})"
    console.error(first)
    return 1


def _generate(argv: Sequence[str]) -> int:
    parser = _parser("generate", "Continues a text with a model of a run or of a Hugging Face directory.")
    parser.add_argument("--model", type=Path, required=True, help="a run directory, or one with published weights")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the model runs, e.g. cuda")
    parser.add_argument(
        "--chat",
        nargs="?",
        const="auto",
        help="the prompt is a user's message in the model's chat format, or in this one",
    )
    options = parser.parse_args(argv)
    from composer2.use import generate

    text = generate(
        options.model,
        options.prompt,
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        device=options.device,
        chat=options.chat,
    )
    with Console(_mode(options.quiet, options.json)) as console:
        console.final(text if options.chat else options.prompt + text, completion=text)
    return 0


def _solve(argv: Sequence[str]) -> int:
    parser = _parser("solve", "Lets the agent repair a folder in a pod; the folder changes only with --apply.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("instruction", nargs="?", default="")
    parser.add_argument("--model", type=Path, required=True, help="a run directory, or one with published weights")
    parser.add_argument("--apply", action="store_true", help="write the changed files back")
    parser.add_argument("--samples", type=int, default=8, help="episodes; the first that passes the tests is shown")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="where the model runs, e.g. cuda")
    parser.add_argument("--no-thinks", action="store_true", help="a published model acts without reasoning first")
    parser.add_argument("--unsafe-process-pods", action="store_true", help="accept pods without isolation")
    options = parser.parse_args(argv)
    from composer2.inspect_run import rollout_record, rollout_view
    from composer2.use import apply_changes, changed_files, solve

    task, rollout = solve(
        options.folder,
        options.instruction,
        options.model,
        samples=options.samples,
        seed=options.seed,
        allow_unsafe=options.unsafe_process_pods,
        device=options.device,
        thinks=not options.no_thinks,
    )
    record = rollout_record(task, rollout)
    with Console(_mode(options.quiet, options.json)) as console:
        console.show(rollout_view(record), record)
        changed = changed_files(task, rollout)
        if options.apply:
            apply_changes(options.folder, changed)
        verb = "changed" if options.apply else "would change (use --apply)"
        console.final(f"{verb}: {', '.join(changed) or 'nothing'}", changed=list(changed), passed=rollout.passed)
    return 0 if rollout.passed else 1


def _report(argv: Sequence[str]) -> int:
    parser = _parser("report", "Writes report.html of a run again, from its own files.")
    parser.add_argument("run", type=Path)
    options = parser.parse_args(argv)
    from composer2.report import write_report

    path = write_report(options.run)
    with Console(_mode(options.quiet, options.json)) as console:
        console.final(f"report: {path}", report=str(path))
    return 0


def _export(argv: Sequence[str]) -> int:
    parser = _parser("export", "Writes the newest model of a run as a Hugging Face directory, with its tokenizer.")
    parser.add_argument("run", type=Path)
    parser.add_argument("folder", type=Path, help="a new or an empty folder")
    parser.add_argument(
        "--dtype", help="default: that of the published start, else float32; bfloat16 loses changes below its digits"
    )
    options = parser.parse_args(argv)
    from composer2.use import export

    path = export(options.run, options.folder, options.dtype)
    with Console(_mode(options.quiet, options.json)) as console:
        console.final(f"model: {path}", model=str(path))
    return 0


def _inspect(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("-h", "--help"):
        Console().final("usage: composer2 inspect run RUN_DIR [N] | model NAME|DIR\n\nEach of the two has --help.")
        return 0
    if argv and argv[0] == "model":
        return _inspect_model(argv[1:])
    if not argv or argv[0] != "run":
        fail("inspect takes `run RUN_DIR` or `model NAME|DIR`")
    parser = _parser("inspect run", "Shows a run, its list of rollouts, or one rollout turn by turn.")
    parser.add_argument("run", type=Path)
    parser.add_argument("rollout", nargs="?", type=int, help="number of a rollout")
    parser.add_argument("--list", action="store_true", help="list the rollouts")
    options = parser.parse_args(argv[1:])
    from composer2.inspect_run import inspect_run

    renderable, data = inspect_run(options.run, rollout=options.rollout, show_list=options.list)
    with Console(_mode(options.quiet, options.json)) as console:
        console.show(renderable, data)
    return 0


def _inspect_model(argv: Sequence[str]) -> int:
    parser = _parser("inspect model", "Counts the parameters of a model, all and active, and what it caches a token.")
    parser.add_argument("model", help="a published name, e.g. kimi-k2.5, or a folder with a model")
    options = parser.parse_args(argv)
    from composer2.inspect_model import inspect_model

    renderable, data = inspect_model(options.model)
    with Console(_mode(options.quiet, options.json)) as console:
        console.show(renderable, data)
    return 0


def _plan(argv: Sequence[str]) -> int:
    from composer2.config import apply_overrides
    from composer2.dist.plan import GPU_MEMORY_GB, PlanConfig, choose_plan, plan_view

    summary = (
        "Memory a rank and traffic a step, from the model on the meta device. Degrees that are not given are chosen. "
        "Every field of PlanConfig can be overridden, e.g. --seq-len 262144; --fields lists them."
    )
    parser = _parser("plan", summary)
    parser.add_argument("preset", help="a published name, e.g. kimi-k2.5, or a preset of train")
    parser.add_argument("--gpus", type=int, required=True, help="ranks, dp * cp")
    parser.add_argument("--gpu", default="b200", help=f"one of {', '.join(GPU_MEMORY_GB)}")
    for degree in ("dp", "cp", "ep"):
        parser.add_argument(f"--{degree}", type=int, help="default: chosen")
    parser.add_argument("--fields", action="store_true", help="list every field of PlanConfig and leave")
    options, overrides = parser.parse_known_args(argv)
    config = _named_model(options.preset)
    if options.gpu not in GPU_MEMORY_GB:
        raise ValueError(f"gpu is {options.gpu!r}, accepted is one of {', '.join(GPU_MEMORY_GB)}")
    default = PlanConfig(seq_len=min(PlanConfig().seq_len, config.max_position_embeddings))
    arguments = ["--help"] if options.fields else overrides
    settings = apply_overrides(default, arguments, prog=f"composer2 plan {options.preset}")
    memory = GPU_MEMORY_GB[options.gpu]
    degrees = {name: getattr(options, name) for name in ("dp", "cp", "ep")}
    chosen, plans = choose_plan(config, options.gpus, settings, gpu_bytes=int(memory * 1e9), **degrees)
    title = f"{options.preset} on {options.gpus} {options.gpu} of {memory:g} GB"
    renderable, record = plan_view(chosen, plans, title)
    with Console(_mode(options.quiet, options.json)) as console:
        console.show(renderable, {"preset": options.preset, "gpus": options.gpus, "gpu": options.gpu, **record})
    return 0


def _named_model(name: str) -> ModelConfig:
    """The policy of a preset of `train`, or a published model."""
    from composer2.config import nearest_names
    from composer2.model.families import FAMILIES
    from composer2.recipes import NEEDS_START, PRESETS

    if name in PRESETS and name not in NEEDS_START:
        preset = PRESETS[name]()
        return replace(preset.model, vocab_size=preset.vocab_size)
    if name not in FAMILIES:
        names = [n for n in dict.fromkeys((*PRESETS, *FAMILIES)) if n not in NEEDS_START]
        raise ValueError(f"preset is {name!r}, accepted are {', '.join(names)}{nearest_names(name, names)}")
    return FAMILIES[name]()


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    **{name: (lambda argv, name=name: _train(name, argv)) for name in TRAINING},  # type: ignore[misc]
    "generate": _generate,
    "solve": _solve,
    "report": _report,
    "export": _export,
    "inspect": _inspect,
    "plan": _plan,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        Console().final(__doc__ or "")
        return 0
    command, *rest = argv
    if command not in COMMANDS:
        from composer2.config import nearest_names

        fail(f"command is {command!r}, accepted are {', '.join(COMMANDS)}{nearest_names(command, COMMANDS)}")
    try:
        return COMMANDS[command](rest)
    except KeyboardInterrupt:
        return INTERRUPTED
    except (ValueError, OSError, PodError, FloatingPointError) as error:
        fail(str(error), exit_code=1)


if __name__ == "__main__":
    raise SystemExit(main())
