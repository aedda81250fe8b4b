"""Using a trained run or a published model: continue a text, let the agent repair a folder, write the model for others.

Source: report §2 (the agent), row E6 (train/test match), X1.
"""

from __future__ import annotations

import ast
import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from composer2.config import load_config
from composer2.env.chat_template import ChatTemplate
from composer2.env.tasks.record import plain_tests
from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.checkpoint.native import load_model
from composer2.model.checkpoint.published import DTYPES, read_published
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.tokenizer import Tokenizer, read_backend
from composer2.model.transformer import Transformer
from composer2.recipes import RunConfig, published
from composer2.rl.system.worker import GroupRequest
from composer2.runner import EpisodeRunner, PodsConfig, RunnerSpec, open_model, require_device
from composer2.start import holds_published, newest_model
from composer2.templates import Chat, find_chat, open_template, read_chat, tokenizer_files
from composer2.types import Group, Message, Role, Rollout, SamplingParams, Task

MAX_FILE_BYTES = 20_000


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
    only, or runs that began with one. Lone surrogates of the prompt count as `?`. ValueError for other runs, for an
    unknown format, and where `auto` finds none or several."""
    torch.set_num_threads(1)
    require_device("device", device)
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    prompt = prompt.encode("utf-8", errors="replace").decode("utf-8")
    if holds_published(folder) or read_chat(folder) is not None:
        return _generate_published(folder, prompt, params, seed, device, chat)
    if chat is not None:
        raise ValueError(f"chat is {chat!r}, accepted with a model of a run is none: its format is no chat")
    model = load_model(newest_model(folder), device=device)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    token_ids = [tokenizer.special_id("doc"), *tokenizer.encode(prompt)]
    params = replace(params, stop_ids=(tokenizer.special_id("doc"),))
    return tokenizer.decode(_continue(model, token_ids, params, seed))


def _generate_published(
    folder: Path, prompt: str, params: SamplingParams, seed: int, device: str, chat: str | None
) -> str:
    """The same with the tokenizer of the directory. Without `chat` it adds what it puts before a text."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ValueError(f"{folder} holds no tokenizer.json, accepted is a directory with one")
    known = read_chat(folder)
    stop_ids = read_published(folder).eos_ids if known is None else known.eos_ids
    backend = read_backend(path, "a published tokenizer.json")
    if chat is None:
        token_ids = backend.encode(prompt).ids
    else:
        if known is not None and chat not in ("auto", known.format):
            raise ValueError(f"chat is {chat!r}, accepted with the run {folder} is auto or {known.format}")
        template, _ = open_template(path, known or find_chat(folder, chat))
        assert isinstance(template, ChatTemplate)
        token_ids = template.render_messages([Message(role=Role.USER, content=prompt)])
        stop_ids = template.stop_ids
    if not token_ids:
        raise ValueError(f"prompt is {prompt!r}, accepted is a text that {path} makes a token of")
    model = open_model(folder if known is None else newest_model(folder), device)
    ids = _continue(model, token_ids, replace(params, stop_ids=stop_ids), seed)
    return backend.decode(ids, skip_special_tokens=True)


def _continue(model: Transformer, token_ids: Sequence[int], params: SamplingParams, seed: int) -> list[int]:
    """Tokens the model puts after a context."""
    longest = model.config.max_position_embeddings
    if len(token_ids) > longest:
        raise ValueError(f"prompt has {len(token_ids)} tokens, accepted is at most the model's {longest}")
    length = min(max(len(token_ids) + params.max_tokens + 1, 32), longest)
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


def solver(model: Path, *, samples: int, allow_unsafe: bool, device: str, thinks: bool) -> RunnerSpec:
    """The harness that a run trained with; for a Hugging Face directory that of the preset `published`, its windows no
    longer than the model's."""
    if holds_published(model):
        config, policy = published(), model
        chat: Chat | None = find_chat(model, thinks=thinks)
        length = min(config.engine.max_len, read_published(model).config.max_position_embeddings)
        engine = replace(config.engine, max_len=length, page_size=min(length, 256), num_pages=None)
        config = replace(config, engine=engine, episode=replace(config.episode, context_budget=length))
    else:
        config, policy, chat = load_config(model / "config.json", RunConfig), newest_model(model), read_chat(model)
        chat = chat if thinks or chat is None else replace(chat, thinks=False)
    return RunnerSpec(
        model_dir=policy,
        tokenizer_path=model / "tokenizer.json",
        episode=config.episode,
        chat=chat,
        engine=replace(config.engine, num_slots=min(samples, config.engine.num_slots), device=device),
        pods=PodsConfig(backend=config.pods.backend, allow_unsafe=allow_unsafe or config.pods.allow_unsafe),
    )


def solve(
    folder: Path,
    instruction: str,
    model: Path,
    *,
    samples: int,
    seed: int,
    allow_unsafe: bool,
    device: str = "cpu",
    thinks: bool = True,
) -> tuple[Task, Rollout]:
    """Run `samples` episodes on a folder; returns the first that passes its tests, else the one that passes most.

    `model`: a run, or a Hugging Face directory; `thinks`: let a published model reason before it acts."""
    if samples < 1:
        raise ValueError(f"samples is {samples}, accepted is 1 or more")
    spec = solver(model, samples=samples, allow_unsafe=allow_unsafe, device=device, thinks=thinks)
    task = folder_task(folder, instruction)
    found: list[Group] = []

    async def episodes() -> None:
        runner = EpisodeRunner(spec)
        async with runner.session():
            request = GroupRequest(key=0, task=task, num_samples=samples, seed=seed)
            await runner.run_cohort([request], lambda key, group: found.append(group))

    try:
        asyncio.run(episodes())
    except ExceptionGroup as group:  # several episodes fail of one fault: that of the engine they share
        fault: Exception = group
        while isinstance(fault, ExceptionGroup):
            fault = fault.exceptions[0]
        raise fault from group
    rollouts = found[0].rollouts
    if not any(rollout.segments or rollout.error for rollout in rollouts):
        raise ValueError(
            f"episode.context_budget is {spec.episode.context_budget}, accepted is more: no turn fits behind the prompt"
        )
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


def export(run: Path, folder: Path, dtype: str | None = None) -> Path:
    """Write the newest model of a run as a Hugging Face directory, with the tokenizer it began with; returns its path.

    Weights are written as `dtype`, else in the dtype of a published start, else as they are: float32. ValueError for
    another dtype, when `folder` holds something, or when no published family is what the model computes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"folder is {folder}, accepted is a new or an empty folder")
    model, chat = load_model(newest_model(run)), read_chat(run)
    wanted = dtype or (chat.dtype if chat is not None else "float32")
    if wanted not in DTYPES:
        raise ValueError(f"dtype is {wanted!r}, accepted is one of {', '.join(DTYPES)}")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[wanted])
    files = tuple(tokenizer_files(run))
    save_huggingface(folder, model, eos_ids=() if chat is None else chat.eos_ids, files=files)
    return folder
