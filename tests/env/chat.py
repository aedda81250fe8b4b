"""A small published tokenizer with the added tokens of every chat format, and the templates in `transformers`."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from composer2.env.chat_formats import CHAT_FORMATS
from composer2.model.tokenizer import PublishedTokenizer
from composer2.types import Role

ORDINARY = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Marks that Qwen3's tokenizer.json does not call special."""


@functools.cache
def backend() -> Tokenizer:
    """Byte-level BPE whose pieces are runs of words, blanks and line breaks, so that texts merge across their seams."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s*[\r\n]+|\s+(?!\S)| ?\w+| ?[^\s\w]+|\s+"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts = [path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("chat_templates/*.jinja"))]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts, "\n\n" * 500, ">\n" * 500], trainer)
    marks = dict.fromkeys(mark for form in CHAT_FORMATS.values() for mark in form.marks)
    tokenizer.add_tokens([AddedToken(mark, special=mark not in ORDINARY, normalized=False) for mark in marks])
    return tokenizer


@functools.cache
def tokenizer() -> PublishedTokenizer:
    """The same for the formats."""
    return PublishedTokenizer(backend())


@functools.cache
def peer(name: str) -> PreTrainedTokenizerFast:
    """`transformers`' tokenizer with the template of format `name`."""
    template = (Path(__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(tokenizer_object=backend(), chat_template=template)


def as_dicts(messages):
    """Messages as `apply_chat_template` takes them, with the ids that an engine of Kimi's family hands out."""
    out, ids, num_calls = [], [], 0
    for message in messages:
        if message.role is Role.TOOL:
            for result in message.tool_results:
                out.append({"role": "tool", "content": result.content, "tool_call_id": ids.pop(0)})
            continue
        entry = {"role": str(message.role), "content": message.content}
        if message.reasoning:
            entry["reasoning_content"] = message.reasoning
        if message.tool_calls:
            entry["tool_calls"] = []
            for call in message.tool_calls:
                ids.append(f"functions.{call.name}:{num_calls}")
                num_calls += 1
                function = {"name": call.name, "arguments": dict(call.arguments)}
                entry["tool_calls"].append({"id": ids[-1], "type": "function", "function": function})
        out.append(entry)
    return out


def peer_tools(specs):
    """Tools as `apply_chat_template` takes them."""
    return [
        {
            "type": "function",
            "function": {
                "name": spec.name,
                "description": spec.description,
                "parameters": json.loads(json.dumps(spec.parameters)),
            },
        }
        for spec in specs
    ] or None


def peer_ids(name, messages, specs=(), **options):
    """Token ids of a conversation by `transformers`."""
    options = {"add_generation_prompt": True} | options
    return peer(name).apply_chat_template(
        as_dicts(messages), tools=peer_tools(specs), tokenize=True, return_dict=False, **options
    )


def split_odd(ids):
    """Every merged text token replaced by the tokens of its bytes, which no tokenizer would choose."""
    reader, odd = tokenizer(), []
    for token in ids:
        text = reader.decode([token])
        is_plain = not reader.is_special(token) and text.isascii()
        odd += [i for char in text for i in reader.encode(char)] if is_plain else [token]
    return odd
