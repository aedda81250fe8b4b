"""Using a trained run or a published model: continue a text, or let the agent repair a folder with what it trained on.

Source: report §2 (the agent), row E6 (train/test match), X1.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend

from composer2.config import load_config
from composer2.env.chat_formats import CHAT_FORMATS, ChatFormat, find_format
from composer2.env.chat_template import ChatTemplate
from composer2.env.tasks.record import plain_tests
from composer2.model.checkpoint.huggingface import load_huggingface
from composer2.model.checkpoint.native import load_model
from composer2.model.checkpoint.published import is_published, read_published
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.tokenizer import PublishedTokenizer, Tokenizer
from composer2.model.transformer import Transformer
from composer2.recipes import RunConfig
from composer2.rl.system.worker import GroupRequest
from composer2.runner import EpisodeRunner, PodsConfig, RunnerSpec
from composer2.types import Group, Message, Role, Rollout, SamplingParams, Task

MAX_FILE_BYTES = 20_000


def newest_model(run: Path) -> Path:
    """The last model a run has finished; ValueError when it has none."""
    for name in ("rl", "sft", "cpt-long", "mtp", "cpt"):
        if (run / "models" / name / "config.json").exists():
            return run / "models" / name
    raise ValueError(f"{run} holds no finished model, accepted is the directory of a run")


def generate(
    folder: Path,
    prompt: str,
    *,
    max_tokens: int,
    temperature: float,
    seed: int,
    device: str = "cpu",
    chat: str | None = None,
) -> str:
    """Text the newest model of a run, or the model of a Hugging Face directory, puts after `prompt`.

    `chat`: the prompt is a user's message in the format of this name, or in the one that `auto` finds; published models
    only. ValueError for a run, for an unknown format, and where `auto` finds none or several."""
    torch.set_num_threads(1)
    if is_published(folder):
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
        return _generate_published(folder, prompt, params, seed, device, chat)
    if chat is not None:
        raise ValueError(f"chat is {chat!r}, accepted with a model of a run is none: its format is no chat")
    model = load_model(newest_model(folder), device=device)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    token_ids = [tokenizer.special_id("doc"), *tokenizer.encode(prompt)]
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, stop_ids=(tokenizer.special_id("doc"),))
    return tokenizer.decode(_continue(model, token_ids, params, seed))


def _generate_published(
    folder: Path, prompt: str, params: SamplingParams, seed: int, device: str, chat: str | None
) -> str:
    """The same with the tokenizer of the directory. Without `chat` it adds what it puts before a text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenizer.json, accepted is a directory with one")
    backend = Backend.from_file(str(path))
    stop_ids = read_published(folder).eos_ids
    if chat is None:
        token_ids = backend.encode(prompt).ids
    else:
        tokenizer = PublishedTokenizer(backend)
        template = ChatTemplate(chat_format(folder, tokenizer, chat), tokenizer)
        token_ids = template.render_messages([Message(role=Role.USER, content=prompt)])
        stop_ids = (*template.stop_ids, *stop_ids)
    model = load_huggingface(folder, device=device)
    ids = _continue(model, token_ids, replace(params, stop_ids=stop_ids), seed)
    return backend.decode(ids, skip_special_tokens=True)


def chat_format(folder: Path, tokenizer: PublishedTokenizer, name: str) -> ChatFormat:
    """The format `name`, or, for `auto`, the one that the tokenizer's marks and the directory's template tell."""
    if name != "auto":
        if name not in CHAT_FORMATS:
            raise ValueError(f"chat is {name!r}, accepted is auto or one of {', '.join(CHAT_FORMATS)}")
        return CHAT_FORMATS[name]
    published = ""
    if (folder / "chat_template.jinja").is_file():
        published = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif (folder / "tokenizer_config.json").is_file():
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        published = str(settings.get("chat_template") or "")
    return find_format(set(tokenizer.special_ids), published)


def _continue(model: Transformer, token_ids: Sequence[int], params: SamplingParams, seed: int) -> list[int]:
    """Tokens the model puts after a context."""
    length = min(max(len(token_ids) + params.max_tokens + 1, 32), model.config.max_position_embeddings)
    engine = Engine(model, num_slots=1, max_len=length, dtype=model.embed_tokens.weight.dtype)
    engine.submit(Request(token_ids=tuple(token_ids), params=params, session="generate", seed=seed))
    while True:
        for finished in engine.step():
            return finished.generation.token_ids.tolist()


def folder_task(folder: Path, instruction: str) -> Task:
    """A task from a folder: its Python files; tests are the assertions `assert CALL == VALUE` in its test files.

    Raises ValueError when the folder holds no module or no such assertion, or a file that is no Python text."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder, accepted is a folder with Python modules and test files")
    files = {str(path.relative_to(folder)): _python_text(path) for path in _python_files(folder)}
    modules = {name: text for name, text in files.items() if not Path(name).name.startswith("test")}
    tests = plain_tests({name: text for name, text in files.items() if name not in modules}, modules)
    if not modules or not tests:
        raise ValueError(
            f"{folder} has {len(modules)} modules and {len(tests)} readable tests, accepted is at least one module and "
            "one test file `test_*.py` with lines such as `assert f(1, [2]) == 3`"
        )
    return Task(
        task_id=str(folder),
        instruction=instruction,
        files=modules,
        recent_files=(tests[0].module,),
        fail_to_pass=tuple(tests),
    )


def _python_files(folder: Path) -> list[Path]:
    """Regular files inside the folder. Links that leave it are left out, since `--apply` would write through them, and
    so are hidden folders: they hold environments and version control, not the code in question."""
    root = folder.resolve()
    return [
        path
        for path in sorted(folder.rglob("*.py"))
        if path.is_file()
        and path.resolve().is_relative_to(root)
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and path.stat().st_size <= MAX_FILE_BYTES
    ]


def _python_text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is unreadable ({error}), accepted is Python source in UTF-8") from error
    return text


def solve(
    folder: Path, instruction: str, run: Path, *, samples: int, seed: int, allow_unsafe: bool
) -> tuple[Task, Rollout]:
    """Run `samples` episodes on a folder; returns the first that passes its tests, else the one that passes most."""
    if samples < 1:
        raise ValueError(f"samples is {samples}, accepted is 1 or more")
    config = load_config(run / "config.json", RunConfig)
    task = folder_task(folder, instruction)
    spec = RunnerSpec(
        model_dir=newest_model(run),
        tokenizer_path=run / "tokenizer.json",
        episode=config.episode,
        engine=config.engine,
        pods=PodsConfig(backend=config.pods.backend, allow_unsafe=allow_unsafe or config.pods.allow_unsafe),
    )
    found: list[Group] = []

    async def episodes() -> None:
        runner = EpisodeRunner(spec)
        async with runner.session():
            request = GroupRequest(key=0, task=task, num_samples=samples, seed=seed)
            await runner.run_cohort([request], lambda key, group: found.append(group))

    asyncio.run(episodes())
    rollouts = found[0].rollouts
    failures = {rollout.error for rollout in rollouts if rollout.error}
    if len(failures) and all(rollout.error for rollout in rollouts):
        raise ValueError(f"no episode could run: {'; '.join(sorted(failures))}")
    return task, max(rollouts, key=lambda rollout: (rollout.passed, rollout.passed_frac))


def apply_changes(folder: Path, changed: Mapping[str, str]) -> None:
    """Write changed files back, each whole or not at all, with the line ends and the permissions the file had."""
    for name, text in changed.items():
        path = folder / name
        if path.exists():
            with path.open(encoding="utf-8", newline="") as file:
                if "\r\n" in file.read():
                    text = text.replace("\r\n", "\n").replace("\n", "\r\n")
        partial = path.with_name(path.name + ".partial")
        partial.write_text(text, encoding="utf-8", newline="")
        if path.exists():
            shutil.copymode(path, partial)
        os.replace(partial, path)


def changed_files(task: Task, rollout: Rollout) -> Mapping[str, str]:
    """Path -> new text of the files the episode changed."""
    return {path: text for path, text in rollout.final_files.items() if task.files.get(path) != text}
