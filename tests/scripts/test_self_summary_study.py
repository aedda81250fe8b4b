"""The summary study: that its windows hide the fact, figures by hand, and one study at the scale of seconds."""

import json
import random
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from composer2.env.tasks.recall import WORDS, recall_task, scripted_examples, scripted_rollout
from composer2.env.template import TinyTemplate
from composer2.log import Console
from composer2.types import Group, Rollout, RolloutStats, RolloutStatus, Segment, Span, SpanKind, Task


@pytest.fixture
def script(load_script):
    return load_script("self_summary_study")


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("on_full", ["summarize", "truncate"])
def test_the_fact_is_out_of_sight_when_it_is_needed(script, quick, on_full):
    """The limits and the tokenizer of the study: no answer is cut, no episode ends early, no last window shows it."""
    config = script.settings(quick)
    tokenizer = script.make_tokenizer(config.recall)
    limits = replace(script.episode_limits(config.recall), on_full=on_full)
    rng, numbers = random.Random(5), Counter()
    for _ in range(150):
        task = recall_task(rng, config.recall)
        rollout = scripted_rollout(task, TinyTemplate(tokenizer), limits, rng, config.recall)
        assert rollout.status is RolloutStatus.MAX_TURNS
        assert set(rollout.events) <= {"context_cut"}
        numbers[rollout.stats.num_summaries] += 1
        last = tokenizer.decode(rollout.segments[-1].token_ids.tolist())
        assert f"# {task.meta['asked']} {task.meta['value']}\n" not in last
        assert max(len(segment.token_ids) for segment in rollout.segments) <= config.model.max_position_embeddings
    # one summary in a part of the tasks, several in others
    assert set(numbers) == ({1, 2} if on_full == "summarize" else {0})
    assert on_full == "truncate" or min(numbers.values()) > 30


def test_the_word_of_a_window_weighs_most(script):
    """Every window of a scripted chain ends in one word: noted in a summary, or written into the last file."""
    recall = replace(script.Settings().recall, cut_frac=0.0, short_frac=0.0)
    tokenizer, rng = script.make_tokenizer(recall), random.Random(2)
    limits = script.episode_limits(recall)
    windows = [w for _ in range(20) for w in scripted_examples(rng, TinyTemplate(tokenizer), limits, recall)]
    heavy = [w.token_ids[w.weights == recall.word_weight].tolist() for w in windows]
    assert {len(ids) for ids in heavy} == {1}
    assert {tokenizer.decode(ids).strip() for ids in heavy} <= set(WORDS)
    said = [tokenizer.decode(w.token_ids[w.weights >= 1].tolist()) for w in windows]
    assert all(re.search(r" \w+ \w+<\|end\|>$|<\|sep\|>'\w+'<\|end\|>$", text) for text in said)
    assert {float(x) for w in windows for x in w.weights} == {np.float32(recall.prompt_weight), 1.0, recall.word_weight}


def result(passed, *, seconds=1.0, **chains):
    chains = {"fact_visible": 0.0, "notes": 0.0, "infra_failures": 0.0, "summary_right": 0.5} | chains
    table = {"passed": passed, "chains": chains}
    start = {"passed": [[0, 1], [0, 1], [0, 1]], "chains": chains}
    return {"start": start, "end": table, "steps": [], "seconds": seconds}


def test_figures_by_hand(script):
    """Three tasks, two episodes, two seeds: the mean of seeds first, then differences task by task."""
    config = script.Settings(num_tasks=3, num_samples=2, seeds=(0, 1))
    found = {
        "trained": [result([[1, 1], [1, 1], [1, 1]], summary_right=1.0), result([[1, 1], [1, 0], [1, 1]])],
        "untrained": [result([[1, 0], [0, 0], [1, 0]]), result([[0, 0], [0, 0], [1, 0]])],
        "truncation": [result([[0, 0]] * 3, notes=3.0), result([[0, 0]] * 3, notes=1.0)],
    }
    figures = script.summarise(found, config)
    assert figures["success_trained"] == pytest.approx((1 + 0.75 + 1) / 3)
    assert figures["success_untrained"] == pytest.approx((0.25 + 0 + 0.5) / 3)
    assert figures["trained_minus_truncation"] == pytest.approx((1 + 0.75 + 1) / 3)
    # resampled means lie between the smallest and the largest difference, 0.75 and 1; 2.5 % is less than (1/3)^3
    assert figures["trained_minus_truncation_ci_low"] == pytest.approx(0.75)
    assert figures["trained_minus_truncation_ci_high"] == pytest.approx(1.0)
    assert figures["trained_minus_untrained"] == pytest.approx((0.75 + 0.75 + 0.5) / 3)
    assert figures["untrained_minus_truncation"] == pytest.approx(0.25)
    assert figures["start_success"] == 0.5
    assert (figures["summary_right_trained"], figures["notes_truncation"]) == (0.75, 2.0)
    assert figures["chance"] == pytest.approx(1 / 32)
    assert (figures["num_tasks"], figures["num_seeds"], figures["seconds_trained"]) == (3, 2, 2.0)


def test_chains_are_described_by_their_spans(script):
    tokenizer = script.make_tokenizer(script.Settings().recall)
    task = Task(task_id="t", instruction="", files={}, meta={"asked": "blue", "value": "fox"})

    def rollout(texts, *, last="", passed=False, thinking=0):
        segments = []
        for text in (*texts, last):
            ids = tokenizer.encode(f"x{text}")
            start = len(tokenizer.encode("x"))
            kind = SpanKind.PROMPT if text == last else SpanKind.SUMMARY
            blank = {
                name: np.zeros(len(ids), np.int32) for name in ("sampled", "logprobs", "policy_versions", "routes")
            }
            spans = (Span(kind=kind, start=start, stop=len(ids)),)
            segments.append(Segment(token_ids=np.array(ids, np.int32), spans=spans, **blank))
        return Rollout(
            task_id="t",
            sample_index=0,
            segments=tuple(segments),
            status=RolloutStatus.MAX_TURNS,
            passed=passed,
            stats=RolloutStats(thinking_tokens=thinking),
        )

    rollouts = (
        rollout(["core.py blue fox<|end|>"], passed=True),
        rollout(["core.py blue oak<|end|>", "core.py blue fox<|end|>"], last="1 # blue fox\n"),
        rollout([], last="1 # blue oak\n", thinking=4),
        rollout(["core.py blue fo<|end|>"]),
    )
    figures = script.chain_figures([Group(task=task, rollouts=rollouts)], tokenizer)
    assert figures == {
        "summaries_per_episode": 1.0,
        "several_summaries_frac": 0.25,
        "fact_visible": 0.25,
        "notes": 1.0,
        "infra_failures": 0.0,
        "summary_right": pytest.approx(1 / 3),
        "success_one_summary": 0.5,
        "success_several_summaries": 0.0,
    }


def test_a_study_of_seconds(script, tmp_path):
    base = script.Settings()
    config = replace(
        base,
        model=replace(base.model, hidden_size=32, num_hidden_layers=2, n_routed_experts=2),
        drill=replace(base.drill, num_steps=2, schedule_steps=2, batch_size=4),
        sft=replace(base.sft, num_steps=3, schedule_steps=3, batch_size=6),
        rl=replace(base.rl, num_steps=2, prompts_per_step=2, group_size=2),
        num_tasks=3,
        num_samples=2,
    )
    with Console("quiet") as console:
        figures = script.study(tmp_path, config, console)
        names = [f"{kind}_{arm}" for kind in ("success", "seconds") for arm in script.ARMS]
        names += [
            f"trained_minus_{arm}{end}" for arm in ("truncation", "untrained") for end in ("", "_ci_low", "_ci_high")
        ]
        names += ["start_success", "summaries_per_episode", "num_tasks", "num_samples", "chance", "seconds"]
        stored = json.loads((tmp_path / "self_summary_study.json").read_text())
        assert stored == pytest.approx(figures)
        assert set(names) <= set(stored)
        assert all(isinstance(value, int | float) for value in stored.values())
        assert (stored["num_tasks"], stored["num_samples"], stored["infra_failures"]) == (3, 2, 0)
        assert (tmp_path / "self_summary_study.png").stat().st_size > 1000
        curves = [json.loads(line) for line in (tmp_path / "curves.jsonl").read_text().splitlines()]
        assert [(c["arm"], c["step"]) for c in curves] == [(arm, step) for arm in script.ARMS for step in (1, 2)]
        # the arms share start and held-out tasks: equal harness, equal first evaluation, to the episode
        first = {arm: json.loads((tmp_path / "arms" / f"{arm}-0.json").read_text())["start"] for arm in script.ARMS}
        assert first["trained"] == first["untrained"]
        # finished arms are read, not run again
        made = {path: path.stat().st_mtime_ns for path in (tmp_path / "arms").iterdir()}
        again = script.study(tmp_path, config, console)
        assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "arms").iterdir()}
        assert {**again, "seconds": 0} == {**figures, "seconds": 0}
        with pytest.raises(ValueError, match="another --out"):
            script.study(tmp_path, replace(config, num_tasks=4), console)


def test_a_tokenizer_under_which_turns_do_not_fit_is_refused(script, fakes):
    with pytest.raises(ValueError, match=r"the tokenizer leads to .*, accepted is one with shorter texts"):
        script.check_sizes(script.Settings(num_tasks=2), TinyTemplate(fakes.ByteTokenizer()))
