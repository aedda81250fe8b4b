"""A model that RL begins with: a Hugging Face directory, or a run, becomes the fine-tuned policy of a new run.

    start     config.json, *.safetensors, tokenizer.json, chat template    or    models/NAME, tokenizer.json, chat.json
    folder    models/sft, tokenizer.json and what belongs to it, chat.json (a published model alone)

In: a `RunConfig` with `start`. Out: an error before anything is written, or a folder that needs `start` no more.

Source: row E6; rows M9 X1 (each error names field, value and what is accepted).
Choice: the trainer's weights are float32 whatever the directory holds: bfloat16 has no digits for steps as small as
those of RL. The sampler rounds them to its own dtype.
Choice: the model is read shard by shard and written once in our own format, which costs its size on disk; memory never
holds more than the weights and a shard, less than the trainer needs anyway.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch

from composer2.config import save_config
from composer2.env.tasks.procedural import generate_task
from composer2.model.checkpoint.huggingface import load_huggingface, plan_huggingface
from composer2.model.checkpoint.native import load_config, save_model
from composer2.model.checkpoint.published import FAMILY_OF, MULTIMODAL, is_published, read_published
from composer2.model.config import ModelConfig
from composer2.recipes import RunConfig
from composer2.runner import stable_seed
from composer2.templates import CHAT_FILE, Chat, find_chat, open_template, read_chat, tokenizer_files
from composer2.types import Template

MODELS = ("rl", "sft", "cpt-long", "mtp", "cpt")
"""Models of a run, the last stage first."""


def holds_published(folder: Path) -> bool:
    """Whether a folder is a Hugging Face directory rather than a run; ValueError when it is neither."""
    if is_published(folder):
        return True
    if (folder / "models").is_dir():
        return False
    if (folder / "config.json").is_file():
        read_published(folder)  # says what is wrong with it
    raise ValueError(
        f"model is {str(folder)!r}, accepted is the folder of a run, or a Hugging Face directory with a config.json of "
        f"model_type {', '.join((*FAMILY_OF, *MULTIMODAL))}"
    )


def newest_model(run: Path) -> Path:
    """The last model a run has finished; ValueError when it has none."""
    for name in MODELS:
        if (run / "models" / name / "config.json").exists():
            return run / "models" / name
    raise ValueError(f"{run} holds no finished model, accepted is the directory of a run")


def check_start(config: RunConfig) -> None:
    """ValueError when RL of this config cannot begin with `config.start`; reads headers only."""
    start = Path(config.start)
    model, chat = _described(start, config)
    template, tokenizer = open_template(start / "tokenizer.json", chat)
    if tokenizer.vocab_size > model.vocab_size:
        raise ValueError(
            f"{start / 'tokenizer.json'} has {tokenizer.vocab_size} tokens, accepted is at most the model's "
            f"vocab_size {model.vocab_size}"
        )
    lengths = {"episode.context_budget": config.episode.context_budget, "engine.max_len": config.engine.max_len}
    for name, length in lengths.items():
        if length > model.max_position_embeddings:
            raise ValueError(
                f"{name} is {length}, accepted with {start} is at most its max_position_embeddings "
                f"{model.max_position_embeddings}"
            )
    if config.engine.speculative and not model.num_nextn_predict_layers:
        raise ValueError(f"engine.speculative is True, accepted with {start} is False: it has no MTP module")
    _check_room(config, template)


def _described(start: Path, config: RunConfig) -> tuple[ModelConfig, Chat | None]:
    """Config and chat of the model."""
    if is_published(start):
        return plan_huggingface(start).config, find_chat(start, config.chat, thinks=config.thinks)
    if not (start / "models").is_dir() or not (start / "tokenizer.json").is_file():
        raise ValueError(
            f"start is {config.start!r}, accepted is a Hugging Face directory with a config.json of model_type "
            f"{', '.join((*FAMILY_OF, *MULTIMODAL))}, or the folder of a run with a finished model"
        )
    for name, value, accepted in (("chat", config.chat, "auto"), ("thinks", config.thinks, True)):
        if value != accepted:
            raise ValueError(f"{name} is {value!r}, accepted with the run {start} is {accepted!r}: it has its own")
    return load_config(newest_model(start)), read_chat(start)


def _check_room(config: RunConfig, template: Template) -> None:
    """ValueError when not even the first turn fits behind a task's prompt."""
    limits = config.episode
    task = generate_task(random.Random(stable_seed(config.seed, "rl", 0)), "train", config.tasks)
    summary = 0
    if limits.on_full == "summarize" and limits.max_summaries:
        summary = len(template.render_summary_request()) + limits.max_summary_tokens
    prompt = len(template.render_prompt(task))
    least = prompt + limits.reserve(summary)
    if limits.context_budget < least:
        raise ValueError(
            f"episode.context_budget is {limits.context_budget}, accepted with this model is {least} or more: a "
            f"task's prompt takes {prompt} tokens; a turn, its answers and a summary must fit besides"
        )


def copy_start(folder: Path, start: Path, *, model: str, chat: str, thinks: bool) -> None:
    """Put the model, named `model` where `start` is a run, into `folder` as models/sft, with all that belongs to its
    tokenizer. `start` is only read."""
    policy = folder / "models" / "sft"
    if is_published(start):
        found = find_chat(start, chat, thinks=thinks)
        save_model(policy, load_huggingface(start, dtype=torch.float32))
        save_config(folder / CHAT_FILE, found)
    else:
        shutil.copytree(start / "models" / model, policy, dirs_exist_ok=True)
        if (start / CHAT_FILE).is_file():
            shutil.copyfile(start / CHAT_FILE, folder / CHAT_FILE)
    for path in tokenizer_files(start):
        shutil.copyfile(path, folder / path.name)
