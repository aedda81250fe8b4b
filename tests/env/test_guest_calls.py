"""The text of outcomes: against Python's own `repr` and its inverse, `ast.literal_eval`."""

import ast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.guest_calls import MAX_VALUE_CHARS, NotPlain, plain_repr

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5), st.binary(max_size=5)
)
ORDERED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(LEAVES, inner, max_size=3),
    ),
    max_leaves=8,
)
SETS = st.sets(st.one_of(st.integers(), st.text(max_size=3), st.tuples(st.integers(), st.text(max_size=2))), min_size=1)


@settings(max_examples=150, deadline=None)
@given(ORDERED)
def test_without_sets_it_is_repr(value):
    assert plain_repr(value) == repr(value)


@settings(max_examples=80, deadline=None)
@given(SETS, st.randoms(use_true_random=False))
def test_sets_do_not_depend_on_their_history(value, rng):
    shuffled = list(value)
    rng.shuffle(shuffled)
    text = plain_repr(value)
    assert plain_repr(set(shuffled)) == text
    assert plain_repr(frozenset(value)) == f"frozenset({text})"
    assert ast.literal_eval(text) == value


def test_numbers_in_sets_are_in_order():
    assert plain_repr({10, 9, 1}) == "{1, 9, 10}"
    assert plain_repr([set(), frozenset()]) == "[set(), frozenset()]"


class Text(str):
    def __repr__(self):
        raise AssertionError("code of the value's type must not run")


@pytest.mark.parametrize(
    "value",
    [
        Text("a"),
        [Text("a")],
        {1: Text("a")},
        {Text("a")},
        object(),
        1j,
        range(3),
        "a" * (MAX_VALUE_CHARS + 1),
        10**9999,
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(NotPlain):
        plain_repr(value)


def test_length_limit_is_on_the_text():
    assert len(plain_repr("a" * (MAX_VALUE_CHARS - 2))) == MAX_VALUE_CHARS
    with pytest.raises(NotPlain):
        plain_repr("\0" * (MAX_VALUE_CHARS // 2))
