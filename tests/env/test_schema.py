import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.tools.registry import TOOLS, tool_specs
from composer2.env.tools.schema import check_arguments, check_schema

EDIT = TOOLS["edit"].parameters


def problems(arguments, schema=EDIT, lenient=False):
    return check_arguments(arguments, schema, lenient=lenient).problems


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"line": 1, "old": "a", "new": "b"}, ()),
        ({"line": "x", "old": "a", "new": "b"}, ("line is 'x', accepted is an integer of at least 1",)),
        ({"line": "3", "old": "a", "new": "b"}, ("line is '3', accepted is an integer of at least 1",)),
        ({"line": 0, "old": "a", "new": "b"}, ("line is 0, accepted is an integer of at least 1",)),
        ({"line": True, "old": "a", "new": "b"}, ("line is True, accepted is an integer of at least 1",)),
        ({"line": 1, "old": "a"}, ("new is missing, accepted is a string",)),
        ({"line": 1, "old": None, "new": ""}, ("old is None, accepted is a string",)),
        ({"line": 1, "old": ["a"], "new": ""}, ("old is a list of 1, accepted is a string",)),
        (
            {"line": 1, "old": "a", "new": "b", "file": 1},
            ("'file' is no argument, accepted are line, old, new, path, restart",),
        ),
        ({"line": 1, "old": "a", "new": "b", "restart": 1}, ("restart is 1, accepted is true or false",)),
        ({"line": 10**9000, "old": 10**9000, "new": ""}, ("old is a huge integer, accepted is a string",)),
    ],
)
def test_messages_name_field_value_and_what_is_accepted(arguments, expected):
    assert problems(arguments) == expected


def test_lenient_reads_digits_and_drops_the_unknown():
    checked = check_arguments({"line": " 12", "old": "a", "new": "b", "why": 1}, EDIT, lenient=True)
    assert checked.arguments == {"line": 12, "old": "a", "new": "b"}
    assert checked.problems == ()
    assert checked.forgiven == ("line ' 12' read as 12", "why dropped")
    assert problems({"line": "x", "old": "a", "new": "b"}, lenient=True) != ()
    assert problems({"line": "9" * 5000, "old": "a", "new": "b"}, lenient=True) != ()


def test_nested_values_enum_and_items():
    schema = {
        "type": "object",
        "properties": {
            "kind": {"type": "string", "enum": ["a", "b"]},
            "rows": {"type": "array", "items": {"type": "number"}},
            "box": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    }
    check_schema(schema)
    assert problems({"kind": "a", "rows": [1, 2.5], "box": {"n": 1, "more": 2}}, schema) == ()
    assert problems({"kind": "c", "rows": [1, "2"], "box": {}}, schema) == (
        "kind is 'c', accepted is one of 'a', 'b'",
        "rows[1] is '2', accepted is a number",
        "box.n is missing, accepted is an integer",
    )


def test_a_schema_beyond_the_subset_is_refused():
    with pytest.raises(ValueError, match="pattern"):
        check_schema({"type": "string", "pattern": "a"})
    with pytest.raises(ValueError, match="null"):
        check_schema({"type": "object", "properties": {"a": {"type": "null"}}})
    for spec in tool_specs(tuple(TOOLS)):
        check_schema(spec.parameters)
    with pytest.raises(ValueError, match="shell"):
        tool_specs(("run", "shell"))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(st.dictionaries(st.sampled_from(["line", "old", "new", "path", "q"]), JSON, max_size=5), st.booleans())
def test_any_json_is_judged_without_raising(arguments, lenient):
    checked = check_arguments(arguments, EDIT, lenient=lenient)
    if not checked.problems:
        assert isinstance(checked.arguments["line"], int)
        assert checked.arguments["line"] >= 1
        assert isinstance(checked.arguments["old"], str)
