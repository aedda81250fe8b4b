"""Byte-level BPE whose pieces respect Python's tokens: text goes in, token ids come out, and back without loss.

In: any text. Out: ids below `vocab_size`; ids 0 … S-1 are the special tokens, then come the 256 bytes, then the merges.

Source: the report does not describe its tokenizer.
Choice: before BPE, text is cut so that every Python token begins where a piece begins, save for one space in front of
it that may belong to the piece. So an edit written as `" >="` has the very ids that `x >= y` has in the prompt, and
copying source text is copying ids. Digits stand alone (numbers are read digit by digit), line breaks and the
indentation after them form one piece, common operators are single tokens, other marks are pieces of one character.
Choice: special tokens cannot be written as text. `encode("<|edit|>")` gives the ids of plain characters, so neither a
file nor a tool's output can forge the end of a turn; only code that asks for `special_id` produces them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

SPECIAL_NAMES: tuple[str, ...] = (
    *("pad", "doc", "task", "file", "read", "search", "edit", "run", "finish", "sep", "end", "result"),
    *("error", "ok", "pass", "fail", "summarize", "summary", "agent"),
)
"""Names of the special tokens of the tiny template, in the order of their ids; `<|pad|>` is id 0."""

_OPERATORS = (
    *("**=", "//=", ">>=", "<<=", "...", "!=", "->", ":=", "==", "<=", ">="),
    *("+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "@=", "//", "**", "<<", ">>"),
)

_WHOLE_OPERATORS = (
    " ==",
    " !=",
    " <=",
    " >=",
    " //",
    " **",
    " <<",
    " >>",
    " +=",
    " -=",
    " *=",
    "//",
    "**",
    "==",
    " ->",
    " /",
)

SPLIT_PATTERN = "|".join(
    (
        r"(?:\r?\n[ \t]*)+",  # line breaks and the indentation that follows
        r" ?[\p{L}\p{M}_]+",  # words: identifiers up to a digit, keywords, string prefixes
        r" ?\p{N}",  # one digit
        " ?(?:" + "|".join("".join("\\" + c for c in operator) for operator in _OPERATORS) + ")",
        r" ?[^\s\p{L}\p{M}\p{N}_]",  # one character of anything else
        r"[^\S\r\n]+(?= \S)",  # a run of blanks, leaving one space to the token after it
        r"[^\S\r\n]+",
        r"\s",
    )
)


class Tokenizer:
    """Byte-level BPE with special tokens; implements `types.TokenizerLike`. Make one with `train` or `load`."""

    def __init__(self, backend: Backend) -> None:
        """Wrap a `tokenizers` object whose decoder is byte-level and whose special tokens read `<|name|>`."""
        # Not stored in tokenizer.json: with it, "<|edit|>" inside a text is ten characters and not the token.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        added = backend.get_added_tokens_decoder()
        self._special_ids = {str(token.content)[2:-2]: int(i) for i, token in added.items() if token.special}
        self._special_set = frozenset(self._special_ids.values())
        self._bytes_of_id = _byte_table(backend, self._special_set)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, specials: Sequence[str] = SPECIAL_NAMES) -> Tokenizer:
        """Learn merges from `texts`; the same texts in the same order give the same tokenizer.

        `vocab_size` counts specials and bytes too. A corpus too small for that many merges gives a smaller vocabulary.
        """
        smallest = 256 + len(specials)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size is {vocab_size}, accepted is at least {smallest} (256 bytes + {len(specials)} specials)"
            )
        if len(set(specials)) != len(specials):
            raise ValueError(f"specials is {list(specials)}, accepted are distinct names")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[AddedToken(f"<|{name}|>", special=True, normalized=False) for name in specials],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        texts = list(texts)
        # Rare operators would not earn a merge of their own; one token each keeps edits short, so they are added:
        repeats = max(100, sum(map(len, texts)) // 500)
        operators = [f"x{operator}" * repeats for operator in _WHOLE_OPERATORS]
        backend.train_from_iterator([*texts, *operators], trainer)
        return cls(backend)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a `tokenizer.json`; `path` is the file or the folder that holds it."""
        return cls(read_backend(path, "a tokenizer.json of a run"))

    def save(self, path: str | Path) -> None:
        """Write a `tokenizer.json` in Hugging Face's format; `path` is the file or an existing folder."""
        _json_path(path).write_text(self._backend.to_str(pretty=True), encoding="utf-8")

    @property
    def special_ids(self) -> dict[str, int]:
        """Name -> id of every special token."""
        return dict(self._special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, never a special one. Lone surrogates, which have no UTF-8 form, count as `?`."""
        return self._backend.encode(_valid(text), add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of many texts, faster."""
        encodings = self._backend.encode_batch([_valid(text) for text in texts], add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of any ids: specials read `<|name|>`, bytes that are not UTF-8 and unknown ids read U+FFFD."""
        table, size = self._bytes_of_id, self.vocab_size
        return b"".join(table[i] if 0 <= i < size else b"\xff" for i in token_ids).decode("utf-8", errors="replace")

    def special_id(self, name: str) -> int:
        """Id of `<|name|>`; ValueError for a name the tokenizer lacks."""
        if name not in self._special_ids:
            raise ValueError(f"special token name is {name!r}, accepted are {sorted(self._special_ids)}")
        return self._special_ids[name]

    def is_special(self, token_id: int) -> bool:
        """True for ids that only `special_id` hands out."""
        return token_id in self._special_set


def read_backend(path: str | Path, accepted: str) -> Backend:
    """The `tokenizers` object of a file, or of the folder that holds it. ValueError names a damaged file."""
    path = _json_path(path)
    text = path.read_bytes()  # an absent file is an OSError that names it
    try:
        return Backend.from_buffer(text)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is damaged ({error}), accepted is {accepted}") from error


def _byte_table(backend: Backend, special_ids: frozenset[int]) -> list[bytes]:
    """Bytes of every id. Byte-level BPE writes each byte as one printable character; this undoes it once for all."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of_char = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    table = []
    for token_id in range(backend.get_vocab_size()):
        token = backend.id_to_token(token_id)
        if token is None:
            raise ValueError(f"tokenizer has no token {token_id}, accepted are ids without gaps")
        text = token.encode() if token_id in special_ids else bytes(byte_of_char[char] for char in token)
        table.append(text)
    return table


def _valid(text: str) -> str:
    return text if text.isascii() else text.encode("utf-8", errors="replace").decode("utf-8")


def _json_path(path: str | Path) -> Path:
    path = Path(path)
    return path / "tokenizer.json" if path.is_dir() else path


class PublishedTokenizer:
    """The `tokenizer.json` of a published model; implements `types.TokenizerLike`, special names being whole texts.

    Choice: every added token counts as special, those the file calls ordinary (`<tool_call>`, `<think>`) included, so
    that no text can forge a call or the end of a turn."""

    def __init__(self, backend: Backend) -> None:
        """Wrap a `tokenizers` object, whose added tokens become special in a copy."""
        data = json.loads(backend.to_str())
        for token in data["added_tokens"]:
            token["special"] = True
        self._backend = Backend.from_str(json.dumps(data))
        self._backend.encode_special_tokens = True  # their text inside a text is not the token
        self.vocab_size: int = self._backend.get_vocab_size()
        self._special_ids = {str(t.content): int(i) for i, t in self._backend.get_added_tokens_decoder().items()}
        self._special_set = frozenset(self._special_ids.values())

    @classmethod
    def load(cls, path: str | Path) -> PublishedTokenizer:
        """Read a `tokenizer.json`; `path` is the file or the folder that holds it."""
        return cls(read_backend(path, "a published tokenizer.json"))

    @property
    def special_ids(self) -> dict[str, int]:
        """Text -> id of every added token."""
        return dict(self._special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of a text, never those of an added token. Lone surrogates count as `?`."""
        return self._backend.encode(_valid(text), add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of any ids >= 0, added tokens as their text; ids beyond the vocabulary have none."""
        return self._backend.decode(list(token_ids), skip_special_tokens=False)

    def special_id(self, name: str) -> int:
        """Id of the added token that reads `name`; ValueError for a text that is none."""
        if name not in self._special_ids:
            raise ValueError(f"special token is {name!r}, accepted are {sorted(self._special_ids)[:40]}")
        return self._special_ids[name]

    def is_special(self, token_id: int) -> bool:
        """True for added tokens."""
        return token_id in self._special_set
