import random

import pytest

from composer2.env.tasks.mutate import (
    BUG_KINDS,
    Mutation,
    apply_mutation,
    as_edit,
    candidate_mutations,
    split_line,
)
from composer2.env.tasks.procedural import generate_function
from composer2.env.tools.lines import apply_edit

SOURCE = '''def f(xs, k):
    """sum of x from k on"""
    t = 0
    for x in xs:
        if x >= k:
            t += x
    return t
'''


def changes(line, variables=()):
    source = f"def f({', '.join(variables)}):\n{line}\n"
    return {
        (m.kind, apply_mutation(source, m).split("\n")[1].strip()) for m in candidate_mutations(source) if m.line == 2
    }


def test_comparisons_of_one_line():
    assert changes("    if a < 3:") == {
        ("compare", "if a <= 3:"),
        ("compare", "if a > 3:"),
        ("constant", "if a < 4:"),
        ("constant", "if a < 2:"),
        ("negate", "if not a < 3:"),
    }


def test_unary_minus_is_no_operator():
    assert changes("    return -1") == {("constant", "return -2"), ("constant", "return -0")}
    assert ("arithmetic", "return a + 1") in changes("    return a - 1", ("a",))


def test_index_moves_by_one_and_back():
    assert ("index", "return xs[i + 1]") in changes("    return xs[i]", ("xs", "i"))
    assert ("index", "return xs[i]") in changes("    return xs[i + 1]", ("xs", "i"))
    assert not any(kind == "index" for kind, _ in changes("    return [i]", ("i",)))


def test_words_swap_and_negations_drop():
    found = changes("    if not any(xs) and True:", ("xs",))
    assert ("word", "if any(xs) and True:") in found
    assert ("word", "if not all(xs) and True:") in found
    assert ("word", "if not any(xs) or True:") in found
    assert ("word", "if not any(xs) and False:") in found
    assert ("word", "if a not in b:") in changes("    if a in b:")
    assert ("word", "if a in b:") in changes("    if a not in b:")
    assert not any("not in" in text for _, text in changes("    for a in b:", ("b",)))


def test_text_in_quotes_signature_and_docstring_stay():
    assert [m.line for m in candidate_mutations(SOURCE) if m.line < 3] == []
    assert changes("    return 'a < 3'") == set()


def test_wrong_variable():
    found = {m for m in candidate_mutations(SOURCE, ("variable",)) if m.line == 6}
    assert Mutation(6, " x", " k", "variable") in found
    assert {m.new for m in found if m.old == " x"} == {" xs", " k", " t"}


def test_old_grows_until_its_first_match_is_the_place():
    line = "        if x > 3 and y > 3:"
    start = line.rindex(">")
    edit = as_edit(line, 1, start, start + 1, "<", "compare")
    assert edit.old == " y >"
    assert edit.new == " y <"
    assert apply_mutation(line, edit) == "        if x > 3 and y < 3:"


def test_old_keeps_the_space_before_it_also_at_the_start_of_a_line():
    edit = as_edit("    break", 7, 4, 9, "continue", "word")
    assert edit == Mutation(7, " break", " continue", "word")


def test_old_that_is_missing_is_refused():
    with pytest.raises(ValueError, match=r"old: ' <='"):
        apply_mutation(SOURCE, Mutation(5, " <=", " <", "compare"))


def test_operators_are_whole_tokens():
    assert [t.text for t in split_line("a//=b**2!='x y'")] == ["a", "//=", "b", "**", "2", "!=", "'x y'"]


@pytest.mark.parametrize("split", ["train", "ood"])
def test_every_candidate_is_what_the_edit_tool_does_and_can_be_undone(split):
    rng = random.Random(3)
    undone = total = 0
    for _ in range(60):
        source = generate_function(rng, split).source
        for edit in candidate_mutations(source):
            changed = apply_mutation(source, edit)
            assert changed != source
            assert changed == apply_edit(source, line=edit.line, old=edit.old, new=edit.new)
            if edit.kind in BUG_KINDS and total < 600:
                total += 1
                undone += any(apply_mutation(changed, back) == source for back in candidate_mutations(changed))
    assert undone / total > 0.93
