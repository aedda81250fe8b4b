"""The tokenizer against Python's own `tokenize`, and its round trips."""

import io
import sysconfig
import tokenize
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from composer2.model.tokenizer import SPECIAL_NAMES, PublishedTokenizer, Tokenizer

STDLIB = Path(sysconfig.get_paths()["stdlib"])
FILES = ("bisect.py", "heapq.py", "textwrap.py", "fnmatch.py", "shlex.py", "statistics.py", "fractions.py", "ast.py")


def read(name: str) -> str:
    return (STDLIB / name).read_text(encoding="utf-8")


def trained(vocab_size: int = 600) -> Tokenizer:
    return Tokenizer.train([read(name) for name in FILES], vocab_size)


TOKENIZER = trained()


def token_starts(tokenizer: Tokenizer, text: str) -> set[int]:
    """Character offsets (of an ASCII text) where a token begins."""
    starts, offset = set(), 0
    for token_id in tokenizer.encode(text):
        starts.add(offset)
        offset += len(tokenizer.decode([token_id]))
    assert offset == len(text)
    return starts


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_comes_back(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([f"<|{name}|>" for name in SPECIAL_NAMES] + ["<|", "|>", "edit", " ", "\n", "é"])))
def test_text_never_yields_special_ids(parts: list[str]) -> None:
    text = "".join(parts)
    token_ids = TOKENIZER.encode(text)
    assert not any(TOKENIZER.is_special(i) for i in token_ids)
    assert TOKENIZER.decode(token_ids) == text
    assert TOKENIZER.encode_batch([text, text]) == [token_ids, token_ids]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-5, 700)))
def test_decode_never_raises(token_ids: list[int]) -> None:
    assert isinstance(TOKENIZER.decode(token_ids), str)


def test_lone_surrogate_is_a_question_mark() -> None:
    assert TOKENIZER.decode(TOKENIZER.encode("a\ud800b")) == "a?b"


def test_specials_are_the_first_ids_and_read_as_their_names() -> None:
    assert [TOKENIZER.special_id(name) for name in SPECIAL_NAMES] == list(range(len(SPECIAL_NAMES)))
    assert TOKENIZER.decode([TOKENIZER.special_id("edit"), *TOKENIZER.encode("3")]) == "<|edit|>3"
    assert TOKENIZER.vocab_size == 600
    with pytest.raises(ValueError, match="'nothing'"):
        TOKENIZER.special_id("nothing")


@pytest.mark.parametrize("name", [*FILES, "argparse.py", "calendar.py", "difflib.py"])
def test_python_tokens_start_at_token_boundaries(name: str) -> None:
    text = read(name)
    text = text.encode("ascii", errors="replace").decode("ascii")
    starts = token_starts(TOKENIZER, text)
    line_offsets = [0]
    for line in text.splitlines(keepends=True):
        line_offsets.append(line_offsets[-1] + len(line))
    layout = {tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    checked = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in layout:
            continue
        offset = line_offsets[token.start[0] - 1] + token.start[1]
        with_space = offset > 0 and text[offset - 1] == " " and offset - 1 in starts
        assert offset in starts or with_space, (name, token)
        checked += 1
    assert checked > 300


def test_an_operator_has_the_same_ids_in_an_edit_and_in_the_file() -> None:
    for operator in (">=", "+=", "//", "**", "==", "!=", "->", "<"):
        whole = TOKENIZER.encode(f"12     if x {operator} y:\n")
        part = TOKENIZER.encode(f" {operator}")
        assert len(part) == 1
        assert part[0] in whole


def test_python_operators_are_single_tokens() -> None:
    for operator in (" ==", " !=", " <=", " >=", " //", " **", " <<", " >>", " +=", " -=", " *=", "//", "**", " ->"):
        assert len(TOKENIZER.encode(operator)) == 1


def test_digits_stand_alone_and_newlines_keep_their_indentation() -> None:
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("2024")] == ["2", "0", "2", "4"]
    tokenizer = Tokenizer.train(["def f():\n    return 1\n\n    x = 2\n" * 50], 400)
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("def f():\n    return 1\n")]
    assert pieces == ["def", " f", "(", ")", ":", "\n    ", "return", " 1", "\n"]


def test_training_is_deterministic_and_survives_saving(tmp_path: Path) -> None:
    TOKENIZER.save(tmp_path / "a.json")
    trained().save(tmp_path)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    loaded = Tokenizer.load(tmp_path)
    text = "x = '<|end|>' if y >= 10 else None  # ü\n"
    assert loaded.encode(text) == TOKENIZER.encode(text)
    assert not any(loaded.is_special(i) for i in loaded.encode(text))
    assert loaded.special_ids == TOKENIZER.special_ids


def test_a_vocabulary_smaller_than_bytes_and_specials_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size is 100"):
        Tokenizer.train(["x"], 100)


@pytest.mark.parametrize("data", [b"", b"{}", b'{"version": "1.0", "model"', b"\xff"])
def test_a_damaged_file_is_named(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(data)
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(tmp_path)
    with pytest.raises(FileNotFoundError, match="absent"):
        Tokenizer.load(tmp_path / "absent.json")


# -- tokenizers of published models

MARKS = ("<|im_end|>", "<tool_call>", "]~b]")


def published() -> PublishedTokenizer:
    """Ordinary and special added tokens; `<tool_call>` is no special one, as in Qwen3's file."""
    backend = Backend.from_str(TOKENIZER._backend.to_str())
    backend.add_tokens([AddedToken(mark, special=mark != "<tool_call>", normalized=False) for mark in MARKS])
    assert len(backend.encode("<tool_call>").ids) == 1
    return PublishedTokenizer(backend)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([*MARKS, "<|task|>", "a ", "\n", "é", "<tool"])))
def test_no_text_yields_an_added_token(parts: list[str]) -> None:
    tokenizer, text = published(), "".join(parts)
    ids = tokenizer.encode(text)
    assert not any(tokenizer.is_special(token) for token in ids)
    assert tokenizer.decode(ids) == text


def test_added_tokens_are_found_by_their_text() -> None:
    tokenizer = published()
    size = tokenizer.vocab_size
    assert [tokenizer.special_id(mark) for mark in MARKS] == [size - 3, size - 2, size - 1]
    assert tokenizer.decode([size - 2, *tokenizer.encode("x"), size - 3, size + 5]) == "<tool_call>x<|im_end|>"
    assert tokenizer.special_ids.keys() >= set(MARKS)
    with pytest.raises(ValueError, match="special token is 'task', accepted are "):
        tokenizer.special_id("task")


def test_a_published_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    published()._backend.save(str(tmp_path / "tokenizer.json"))
    assert PublishedTokenizer.load(tmp_path).encode("a <tool_call>") == published().encode("a <tool_call>")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json is damaged .* accepted is a published tokenizer\.json"):
        PublishedTokenizer.load(tmp_path)
