"""Tasks of one early fact: the reference passes, a guess is right once in 32, and nothing but the first file tells."""

import asyncio
import random
import re
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from composer2.env.grade import PodGrader, validate_task
from composer2.env.harness import EpisodeLimits
from composer2.env.tasks.recall import (
    WORDS,
    RecallConfig,
    drill,
    edit_of,
    recall_task,
    scripted_examples,
    scripted_rollout,
)
from composer2.env.template import TinyTemplate
from composer2.env.tools.lines import apply_edit
from composer2.types import RolloutStatus, SpanKind

CONFIG = RecallConfig()


def tasks(count, config=CONFIG, seed=0):
    rng = random.Random(seed)
    return [recall_task(rng, config) for _ in range(count)]


def byte_limits(**changes):
    """Room for the first file or one long filler in bytes, not for both."""
    fields = {
        "max_turns": CONFIG.num_turns,
        "max_tokens_per_turn": 16,
        "max_calls_per_turn": 1,
        "max_result_tokens": 112,
        "max_summary_tokens": 24,
        "max_summaries": 4,
        "context_budget": 270,
    }
    return EpisodeLimits(**(fields | changes))


@pytest.fixture
def template(fakes):
    return TinyTemplate(fakes.ByteTokenizer())


def test_references_pass_and_first_states_fail(fakes):
    async def go():
        for task in tasks(40):
            await validate_task(task, fakes.MemoryBackend())

    asyncio.run(go())


def test_a_guess_is_right_once_in_ninety(fakes):
    """By counting: every word, written and graded."""
    backend = fakes.MemoryBackend()
    for task in tasks(3):
        last = task.meta["paths"][-1]
        verdicts = Counter()
        for word in WORDS:
            text = apply_edit(task.files[last], path=last, **edit_of(word).arguments)
            verdicts[asyncio.run(PodGrader(backend).grade(task, {last: text})).passed] += 1
        assert verdicts == {True: 1, False: 31}


def test_words_are_uniform_and_facts_of_a_task_differ():
    drawn = tasks(3200)
    counts = Counter(task.meta["value"] for task in drawn)
    # 100 each, s.e. 10: five of them for the farthest of 32
    assert set(counts) == set(WORDS)
    assert all(abs(count - 100) < 50 for count in counts.values())
    assert all(len(set(task.meta["facts"].values())) == CONFIG.num_facts for task in drawn)
    assert len({task.task_id for task in drawn}) == 3200


def test_the_way_leads_through_every_file_and_only_the_first_one_tells():
    for task in tasks(200):
        paths, asked, value = (task.meta[name] for name in ("paths", "asked", "value"))
        named = {path: re.findall(r"\w+\.py", text) for path, text in task.files.items()}
        assert named == {path: [then] for path, then in pairwise(paths)} | {paths[-1]: []}
        assert task.instruction == f"{paths[0]} {asked}"
        assert task.recent_files == ()
        assert f"# {asked} {value}\n" in task.files[paths[0]]
        assert not any(re.search(rf"# {asked} ", task.files[path]) for path in paths[1:])
        # as many turns as files and one edit: a second look at the first file would cost the edit
        assert CONFIG.num_turns == len(paths) + 1
        assert set(task.tools) == {"read", "edit"}


@pytest.mark.parametrize(("right_frac", "passed"), [(1.0, True), (0.0, False)])
def test_the_script_writes_what_it_noted(template, right_frac, passed):
    config = RecallConfig(right_frac=right_frac)
    numbers = Counter()
    for task in tasks(20, config):
        rollout = scripted_rollout(task, template, byte_limits(), random.Random(1), config)
        assert rollout.status is RolloutStatus.MAX_TURNS
        assert (dict(rollout.final_files) == {task.meta["paths"][-1]: task.reference[task.meta["paths"][-1]]}) == passed
        assert rollout.events == {}
        last = template.tokenizer.decode(rollout.segments[-1].token_ids.tolist())
        assert f"# {task.meta['asked']} {task.meta['value']}\n" not in last
        numbers[rollout.stats.num_summaries] += 1
    assert min(numbers) >= 1
    assert len(numbers) > 1


def test_later_summaries_carry_what_the_first_one_noted(template):
    config = RecallConfig(right_frac=0.4)
    right = []
    for index, task in enumerate(tasks(400, config)):
        rollout = scripted_rollout(task, template, byte_limits(), random.Random(index), config)
        noted = [
            template.tokenizer.decode(segment.token_ids[span.start : span.stop].tolist()).split(" ", 1)[1]
            for segment in rollout.segments
            for span in segment.spans
            if span.kind is SpanKind.SUMMARY
        ]
        assert len({text.removesuffix("<|end|>") for text in noted}) == 1
        name, value = noted[0].removesuffix("<|end|>").split()
        assert task.meta["facts"][name] == value
        right.append(value == task.meta["value"])
    assert abs(np.mean(right) - 0.4) < 3 * np.sqrt(0.4 * 0.6 / 400)


def test_where_the_harness_cuts_the_fact_is_gone_and_the_script_guesses(template):
    limits = byte_limits(on_full="truncate")
    guesses = []
    for index, task in enumerate(tasks(300)):
        rollout = scripted_rollout(task, template, limits, random.Random(index), CONFIG)
        assert rollout.stats.num_summaries == 0
        assert rollout.events["context_cut"] >= 1
        last = template.tokenizer.decode(rollout.segments[-1].token_ids.tolist())
        assert f"# {task.meta['asked']} {task.meta['value']}\n" not in last
        guesses.append(next(iter(rollout.final_files.values())) == task.reference[task.meta["paths"][-1]])
    assert np.mean(guesses) < 1 / 32 + 4 * np.sqrt(1 / 32 / 300)


def test_examples_weigh_what_a_policy_would_sample(template):
    rng, limits = random.Random(0), byte_limits()
    only = {"cut": RecallConfig(cut_frac=1, short_frac=0), "short": RecallConfig(cut_frac=0, short_frac=1)}
    summarize = template.tokenizer.special_id("summarize")
    for name, config in (only | {"chain": RecallConfig(cut_frac=0, short_frac=0)}).items():
        windows = scripted_examples(rng, template, limits, config)
        assert (len(windows) == 1) == (name == "short")
        assert any(summarize in window.token_ids for window in windows) == (name == "chain")
        for window in windows:
            assert set(np.unique(window.weights).tolist()) == {np.float32(0.05), 1.0}
    (short,) = scripted_examples(rng, template, limits, only["short"])
    said = template.tokenizer.decode(short.token_ids[short.weights == 1].tolist())
    assert re.fullmatch(
        r"<\|read\|>\w+.py<\|end\|><\|read\|>\w+.py<\|end\|><\|edit\|>1<\|sep\|>None<\|sep\|>'\w+'<\|end\|>", said
    )
    whole = template.tokenizer.decode(short.token_ids.tolist())
    asked = re.search(r"^<\|task\|>\w+.py (\w+)<", whole)[1]
    assert said.endswith("'" + re.search(rf"# {asked} (\w+)\n", whole)[1] + "'<|end|>")


def test_a_drill_shows_a_file_and_asks_for_its_words(template):
    rng = random.Random(0)
    for _ in range(50):
        shown = drill(rng, template, CONFIG, num_lookups=5)
        text = template.tokenizer.decode(shown.token_ids.tolist())
        window, pairs = text[: text.rindex("<|agent|>")], text[text.rindex("<|agent|>") + len("<|agent|>") :].split()
        path, asked = re.match(r"<\|task\|>(\w+\.py) (\w+)<\|agent\|><\|read\|>", window).groups()
        assert f"<|result|>{path}\n" in window
        facts = dict(re.findall(r"# (\w+) (\w+)\n", window))
        assert 2 <= len(facts) <= CONFIG.num_facts
        names, words = pairs[::2], pairs[1::2]
        assert (len(names), names[0]) == (5, asked)
        assert words == [facts[name] for name in names]
        # what is trained: the name asked for, and every word
        taught = template.tokenizer.decode(shown.token_ids[shown.weights == 1].tolist())
        assert taught == "".join(f" {part}" for part in (asked, *words))
        assert set(np.unique(shown.weights).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_facts": 1}, "RecallConfig.num_facts is 1"),
        ({"num_fillers": 11}, "RecallConfig.num_fillers is 11"),
        ({"filler_lines": (0, 3)}, r"RecallConfig.filler_lines is \(0, 3\)"),
        ({"right_frac": 1.5}, "RecallConfig.right_frac is 1.5"),
        ({"word_weight": 0.0}, "RecallConfig.word_weight is 0.0"),
        ({"cut_frac": 0.8, "short_frac": 0.5}, "RecallConfig.short_frac is 0.5"),
    ],
)
def test_sizes_are_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        RecallConfig(**fields)
