"""How the episodes of a model are written: in its published chat format, or in the template of the tiny presets.

In: a folder with a `tokenizer.json`. Out: a `types.Template` and its tokenizer.

    Hugging Face directory   the format that its tokenizer's marks and its chat template tell, or a named one
    run folder               the same where the run began with a published model (chat.json), else the tiny template

Source: report §2 and §6.2, row E6: one harness and one template for training, evaluation and use.
Choice: a run keeps the name of its format, so that it can go on without the directory it began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from composer2.config import load_config
from composer2.env.chat_formats import CHAT_FORMATS, ChatFormat, find_format
from composer2.env.chat_template import ChatTemplate
from composer2.env.template import TinyTemplate
from composer2.model.checkpoint.published import read_published
from composer2.model.tokenizer import PublishedTokenizer, Tokenizer

CHAT_FILE = "chat.json"
"""Where a run keeps its `Chat`."""
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("chat_template.jinja", "generation_config.json"),
)
"""Files of a Hugging Face directory that belong to its tokenizer."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """How to talk to a published model; picklable, and JSON through `config.py`."""

    format: str
    """A name of CHAT_FORMATS."""
    thinks: bool = True
    """Let the model reason before it acts."""
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a text, as the model's config.json says."""
    dtype: str = "float32"
    """Dtype of the published weights."""


def open_template(
    tokenizer_path: Path, chat: Chat | None
) -> tuple[TinyTemplate, Tokenizer] | tuple[ChatTemplate, PublishedTokenizer]:
    """The template and its tokenizer; without `chat` those of the tiny presets.

    ValueError when the file is damaged or lacks a mark, or when the format cannot do without reasoning."""
    if chat is None:
        tokenizer = Tokenizer.load(tokenizer_path)
        return TinyTemplate(tokenizer), tokenizer
    published = PublishedTokenizer.load(tokenizer_path)
    return ChatTemplate(CHAT_FORMATS[chat.format], published, thinks=chat.thinks, eos_ids=chat.eos_ids), published


def read_chat(run: Path) -> Chat | None:
    """How the episodes of a run are written; None for a run with a policy of its own."""
    path = run / CHAT_FILE
    return load_config(path, Chat) if path.is_file() else None


def find_chat(folder: Path, name: str = "auto", *, thinks: bool = True) -> Chat:
    """How to talk to the model of a Hugging Face directory: format `name`, or, for `auto`, the one that the tokenizer's
    marks and the directory's chat template tell.

    ValueError without tokenizer.json, for an unknown name, where `auto` finds none or several, and for a format whose
    marks are no tokens of the model."""
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder} holds no tokenizer.json, accepted is a directory with one")
    published = read_published(folder)
    marks = set(PublishedTokenizer.load(folder).special_ids)
    form = _named(name) if name != "auto" else find_format(marks, _published_template(folder))
    missing = [mark for mark in form.marks if mark not in marks]
    if missing:
        raise ValueError(
            f"chat is {name!r}, accepted is a format whose marks {folder / 'tokenizer.json'} has as added tokens; it "
            f"lacks {', '.join(missing)}"
        )
    dtype = str(published.dtype).removeprefix("torch.")
    return Chat(format=form.name, thinks=thinks, eos_ids=published.eos_ids, dtype=dtype)


def _named(name: str) -> ChatFormat:
    if name not in CHAT_FORMATS:
        raise ValueError(f"chat is {name!r}, accepted is auto or one of {', '.join(CHAT_FORMATS)}")
    return CHAT_FORMATS[name]


def _published_template(folder: Path) -> str:
    """Text of the directory's chat template, empty without one."""
    if (folder / "chat_template.jinja").is_file():
        try:
            return (folder / "chat_template.jinja").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{folder / 'chat_template.jinja'} is damaged ({error}), accepted is UTF-8") from error
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return ""
    try:
        return str(json.loads(path.read_text(encoding="utf-8")).get("chat_template") or "")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}), accepted is a JSON object") from error


def tokenizer_files(folder: Path) -> Iterator[Path]:
    """Those of TOKENIZER_FILES that the folder has."""
    return (folder / name for name in TOKENIZER_FILES if (folder / name).is_file())
