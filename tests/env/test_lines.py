import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.tools.lines import EditError, apply_edit, find_edit, number_lines, split_lines


def test_numbered_lines_keep_text_as_is():
    assert number_lines("a\n\tb \n\nc") == "1 a\n2 \tb \n3 \n4 c\n"
    assert number_lines("a\r\nb\r\n") == "1 a\r\n2 b\r\n"
    assert number_lines("a\nb\nc\nd\n", start=2, limit=2) == "2 b\n3 c\n"
    assert number_lines("") == ""


@pytest.mark.parametrize(
    ("text", "old", "offset"),
    [
        ("y = max(x)", "x", 8),  # not inside max
        ("a >= b = c", "=", 7),  # not inside >=
        ("a >= b", " >=", 1),
        ("a > b >= c", " >", 1),
        ("a >= b", " >", None),
        ("f(10, 1)", "1", 6),
        ("f(10, 1)", " 1", 5),
        ("x1 + x", "x", 5),
        ("a // b / c", "/", 7),
        ("x **y", "*", None),
        ("'max' in s", "max", 1),
        ("été = é", "é", 6),
        ("def f():\n    return x", "return x", 13),
        ("a = 1\nb = 2", "1\nb", 4),
        ("a", "", None),
        ("if a:\n\treturn", "\t", 6),
    ],
)
def test_old_matches_whole_tokens_only(text, old, offset):
    assert find_edit(text, line=1, old=old) == offset


def test_line_is_a_hint_and_the_nearest_wins():
    text = "x\nb\nx\nb\nb\nx\n"
    assert [find_edit(text, line=n, old="x") for n in (1, 2, 3, 4, 5, 6, 99)] == [0, 0, 4, 4, 10, 10, 10]
    assert find_edit("x + x\n", line=1, old="x") == 0


def test_everything_else_stays_byte_for_byte():
    text = "a = 1\r\n\tb = 1  \r\nc = 1"
    assert apply_edit(text, line=2, old=" 1", new=" 22") == "a = 1\r\n\tb = 22  \r\nc = 1"
    assert apply_edit(text, line=3, old="1", new="2\n") == "a = 1\r\n\tb = 1  \r\nc = 2\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [("", "a", "old is empty"), ("x", "x", "equal"), ("q", "x", "'q' is not in s.py")],
)
def test_edits_that_do_nothing_are_errors(old, new, message):
    with pytest.raises(EditError, match=message):
        apply_edit("x\n", line=1, old=old, new=new, path="s.py")


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet="ax1 =>\t\r\n(é", max_size=30), st.text(alphabet="ax1 =>\n", max_size=4), st.integers(-3, 40))
def test_an_edit_is_one_replacement(text, old, line):
    position = find_edit(text, line=line, old=old)
    if position is None:
        return
    edited = apply_edit(text, line=line, old=old, new="NEW", path="p")
    assert edited == text[:position] + "NEW" + text[position + len(old) :]
    assert text[position:].startswith(old)


def test_last_line_break_opens_no_line():
    assert split_lines("a\n") == ["a"]
    assert split_lines("a\n\n") == ["a", ""]
    assert split_lines("") == []
