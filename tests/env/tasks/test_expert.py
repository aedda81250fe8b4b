import asyncio
import random
import re
from itertools import pairwise

import numpy as np
import pytest

from composer2.env.tasks.expert import (
    ExpertConfig,
    answer_to_run,
    candidate_edits,
    edit_call,
    fix_of,
    opening_turns,
    random_search_baseline,
    sft_example,
    wrong_tries,
)
from composer2.env.tasks.mutate import apply_mutation
from composer2.env.tasks.procedural import TaskConfig, generate_task
from composer2.env.tasks.record import CODE_ERRORS, run_tests
from composer2.env.template import TinyTemplate
from composer2.env.tools.files import Workspace
from composer2.env.tools.lines import apply_edit
from composer2.env.tools.registry import Toolbox
from composer2.types import RolloutStatus, Task, TestCase

PLAIN = ExpertConfig(wrong_frac=0, long_summary_frac=0, other_summary_frac=0)
WRONG = ExpertConfig(wrong_frac=1, long_summary_frac=0, other_summary_frac=0)
CHAIN = ExpertConfig(long_summary_frac=1, other_summary_frac=1)
SOURCE = "def f(x):\n    if x > 3:\n        return x\n    return 0\n"


@pytest.fixture
def template(fakes):
    return TinyTemplate(fakes.ByteTokenizer())


def small_task():
    tests = [("f(3)", "3"), ("f(4)", "4"), ("f(1)", "0")]
    cases = tuple(TestCase(name=call, module="a.py", call=call, expected=value) for call, value in tests)
    return Task(
        task_id="small",
        instruction="",
        files={"a.py": SOURCE},
        recent_files=("a.py",),
        fail_to_pass=cases[:1],
        pass_to_pass=cases[1:],
        reference={"a.py": SOURCE.replace(">", ">=")},
        meta={"bug_kind": "compare", "line": 2, "old": " >", "new": " >=", "path": "a.py", "variant": "plain"},
    )


def tasks_of(variant, count, seed=0):
    weights = {f"{name}_weight": float(name == variant) for name in ("plain", "long", "unopened", "search")}
    rng = random.Random(seed)
    return [generate_task(rng, "train", TaskConfig(**weights)) for _ in range(count)]


def runs(example, template):
    """The window as (text, weight) stretches of equal weight."""
    edges = [0, *(np.flatnonzero(np.diff(example.weights)) + 1).tolist(), len(example.weights)]
    return [
        (template.tokenizer.decode(example.token_ids[a:b].tolist()), round(float(example.weights[a]), 3))
        for a, b in pairwise(edges)
    ]


def test_weights_of_a_plain_example_by_hand(template):
    (example,) = sft_example(small_task(), template, random.Random(0), PLAIN)
    assert example.token_ids.dtype == np.int32
    assert example.weights.dtype == np.float32
    numbered = "1 def f(x):\n2     if x > 3:\n3         return x\n4     return 0\n"
    assert runs(example, template) == [
        (f"<|task|><|file|>a.py\n{numbered}<|agent|>", 0.15),
        ("<|edit|>2<|sep|> ><|sep|> >=<|run|><|end|>", 1.0),
        ("<|result|><|ok|><|result|><|pass|><|agent|>", 0.0),
        ("<|finish|><|end|>", 1.0),
    ]


def test_wrong_tries_carry_no_weight(template):
    seen_errors = seen_fails = 0
    for seed in range(60):
        (example,) = sft_example(small_task(), template, random.Random(seed), WRONG)
        parts = runs(example, template)
        if len(parts) == 5:
            assert [weight for _, weight in parts] == [0.15, 0.0, 1.0, 0.0, 1.0]
            assert parts[1][0].endswith("<|agent|>")
            seen_errors += "<|error|>" in parts[1][0]
            seen_fails += "<|result|><|ok|><|result|><|fail|>" in parts[1][0]
            assert parts[2][0] == "<|edit|>2<|sep|> ><|sep|> >=<|run|><|end|>"
    assert seen_errors > 3
    assert seen_fails > 20


def test_tries_are_real_and_never_the_fix():
    for task in tasks_of("plain", 60, seed=1):
        path = task.meta["path"]
        tests = (*task.fail_to_pass, *task.pass_to_pass)
        for attempt in wrong_tries(task, random.Random(task.task_id), 2, 0.3):
            source = task.files[path]
            if not attempt.edit_result.is_error:
                edit = attempt.edit
                source = apply_edit(source, line=edit.line, old=edit.old, new=edit.new)
            passed = sum(run_tests(source, tests))
            assert passed < 10
            assert attempt.run_result.content == f"fail {passed}"


def script_of(example, template, start):
    """The stretches that a policy would have sampled: the turns, wrong ones included."""
    parse, ids = [], example.token_ids.tolist()
    stop, agent, position = template.stop_ids[0], template.tokenizer.special_id("agent"), start
    while position < len(ids):
        end = ids.index(stop, position)
        parse.append(ids[position : end + 1])
        position = ids.index(agent, end) + 1 if agent in ids[end:] else len(ids)
    return parse


@pytest.mark.parametrize("variant", ["plain", "long", "unopened", "search"])
@pytest.mark.parametrize("config", [PLAIN, WRONG], ids=["clean", "wrong"])
def test_an_example_is_what_the_harness_writes(variant, config, template, fakes, monkeypatch):
    monkeypatch.setattr(fakes, "TEST_CODE_ERRORS", (*CODE_ERRORS, SyntaxError))
    for task in tasks_of(variant, 6, seed=2):
        (example,) = sft_example(task, template, random.Random(task.task_id), config)
        script = script_of(example, template, len(template.render_prompt(task)))
        rollout, _, _ = asyncio.run(
            fakes.run_script(task, script, template=template, context_budget=9000, max_turns=9, max_result_tokens=4000)
        )
        assert rollout.status is RolloutStatus.FINISHED
        assert rollout.passed
        np.testing.assert_array_equal(rollout.segments[0].token_ids, example.token_ids)


def test_a_chain_is_what_the_harness_writes(template, fakes, monkeypatch):
    monkeypatch.setattr(fakes, "TEST_CODE_ERRORS", (*CODE_ERRORS, SyntaxError))
    request = template.tokenizer.special_id("summarize")
    chains = 0
    for task in tasks_of("long", 80, seed=3):
        windows = sft_example(task, template, random.Random(task.task_id), CHAIN)
        if len(windows) == 1:
            continue
        first, second = windows
        at = first.token_ids.tolist().index(request)
        summary = first.token_ids[at + 1 :].tolist()
        assert first.weights[at] == 0.0
        assert first.weights[at + 1 :].tolist() == [1.0] * len(summary)
        opening = template.render_prompt(task, summary=summary)
        assert second.token_ids[: len(opening)].tolist() == opening
        script = [*script_of(first, template, len(template.render_prompt(task)))[:-1], summary]
        limits = {"max_tokens_per_turn": 100, "max_result_tokens": 400, "max_summary_tokens": 200}
        budget = at + 100 + 1 + 400 + 1 + 200 - 1
        if len(second.token_ids) > at:
            continue  # the budget that closes the first window here would close the second one too
        script += script_of(second, template, len(opening))
        rollout, _, _ = asyncio.run(
            fakes.run_script(task, script, template=template, context_budget=budget, max_turns=9, **limits)
        )
        chains += 1
        assert rollout.passed
        np.testing.assert_array_equal(rollout.segments[0].token_ids, first.token_ids)
        np.testing.assert_array_equal(rollout.segments[1].token_ids, second.token_ids)
    assert chains >= 5


def test_a_summary_lists_the_tries_and_the_fix_is_none_of_them(template):
    for task in tasks_of("long", 25, seed=4):
        windows = sft_example(task, template, random.Random(1), CHAIN)
        if len(windows) == 2:
            text = template.tokenizer.decode(windows[0].token_ids.tolist())
            summary = text.split("<|summarize|>")[1].removesuffix("<|end|>")
            fix = fix_of(task)
            assert 1 <= len(summary.split("\n")) <= 2
            for note in summary.split("\n"):
                assert not note.startswith(f"{fix.line}{fix.old} ->{fix.new} ")


@pytest.mark.parametrize("variant", ["unopened", "search"])
def test_answers_are_those_of_the_tools(variant):
    async def answers(task):
        toolbox = Toolbox(Workspace(task, None))
        return [(await toolbox.call(call), result) for call, result in opening_turns(task, is_located=False)]

    for task in tasks_of(variant, 15, seed=5):
        pairs = asyncio.run(answers(task))
        assert len(pairs) == {"unopened": 1, "search": 2}[variant]
        for real, written in pairs:
            assert real == written


def test_examples_depend_on_the_generator_alone(template):
    task = tasks_of("long", 1)[0]
    a = sft_example(task, template, random.Random(7), CHAIN)
    b = sft_example(task, template, random.Random(7), CHAIN)
    assert [x.token_ids.tolist() for x in a] == [x.token_ids.tolist() for x in b]


def test_candidates_hold_a_fix_nearly_always_and_search_counts_them():
    tasks = tasks_of("plain", 60, seed=6)
    solved = 0
    for task in tasks:
        path = task.meta["path"]
        solved += task.reference[path] in {apply_mutation(task.files[path], edit) for edit in candidate_edits(task)}
    assert solved >= 57
    rates = random_search_baseline(tasks, tries=(1, 3, 1000))
    assert 0.02 < rates[1] < rates[3] < 0.5
    assert rates[1000] >= solved / 60


def test_random_search_by_hand():
    """Of the small task's candidates, those that make f(3) = 3, f(4) = 4, f(1) = 0 are counted one by one."""
    task = small_task()
    tests = (*task.fail_to_pass, *task.pass_to_pass)
    candidates = candidate_edits(task)
    good = [edit for edit in candidates if all(run_tests(apply_mutation(SOURCE, edit), tests))]
    assert {(edit.old, edit.new) for edit in good} == {(" >", " >="), (" 3", " 2")}
    n = len(candidates)
    rates = random_search_baseline([task], tries=(1, 2))
    assert rates[1] == pytest.approx(2 / n)
    assert rates[2] == pytest.approx(1 - (n - 2) * (n - 3) / (n * (n - 1)))


def test_calls_and_bad_config():
    call = edit_call(fix_of(small_task()))
    assert (call.name, dict(call.arguments)) == ("edit", {"line": 2, "old": " >", "new": " >="})
    with pytest.raises(ValueError, match=r"ExpertConfig.wrong_frac: 1.5"):
        ExpertConfig(wrong_frac=1.5)
    with pytest.raises(ValueError, match=r"ExpertConfig.max_wrong: 0"):
        ExpertConfig(max_wrong=0)
    with pytest.raises(ValueError, match="tasks: empty"):
        random_search_baseline([])


def test_located_answers_are_those_of_the_tool():
    task = small_task()
    broken = task.files[task.meta["path"]]
    count = answer_to_run(task, broken)
    located = answer_to_run(task, broken, locate=True)
    assert located.startswith(count + " ")
    line = int(located.split()[-1])
    assert 1 <= line <= broken.count("\n") + 1
    for attempt in wrong_tries(task, random.Random(1), 3, 0.0, locate_failures=True):
        assert re.fullmatch(r"fail \d \d+", attempt.run_result.content)
