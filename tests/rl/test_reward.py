"""Every measured behaviour by hand, weights over time, and what is logged."""

import json
import sys

import numpy as np
import pytest

from composer2.rl.length_penalty import LengthPenaltyConfig
from composer2.rl.reward import (
    MEASURES,
    RewardComponent,
    RewardConfig,
    comment_words,
    find_measure,
    permute_rewards,
    score,
)
from composer2.types import Message, Role, RolloutStats, RolloutStatus, ToolCall


def edit(new="x", old="y", line=1):
    return ToolCall(name="edit", arguments={"line": line, "old": old, "new": new})


def turns(*turns):
    return tuple(Message(role=Role.ASSISTANT, tool_calls=calls) for calls in turns)


def measured(name, rollout, **config):
    return MEASURES[name](rollout, RewardConfig(**config))


def test_reward_is_the_weighted_sum_and_components_are_raw(build):
    config = RewardConfig(
        components=(
            RewardComponent(name="correctness", weight=1.0),
            RewardComponent(name="invalid_edit", weight=-0.1),
            RewardComponent(name="bad_tool_calls", weight=0.0),
        )
    )
    rollout = build.rollout(passed=True, events={"invalid_edit": 3, "unknown_tool": 2, "bad_arguments": 1})
    scored = score(rollout, config, step=0)
    assert scored.reward == pytest.approx(1.0 - 0.3)
    assert scored.reward_components == {"correctness": 1.0, "invalid_edit": 3.0, "bad_tool_calls": 3.0}
    assert rollout.reward == 0.0


def test_weights_change_in_mid_run(build):
    component = RewardComponent(name="invalid_edit", weight=0.0, schedule=((10, -0.1), (20, -0.5)))
    assert [component.weight_at(step) for step in (0, 9, 10, 19, 20, 99)] == [0, 0, -0.1, -0.1, -0.5, -0.5]
    config = RewardConfig(components=(component,))
    rollout = build.rollout(events={"invalid_edit": 1})
    assert [score(rollout, config, step).reward for step in (0, 10, 20)] == [0, -0.1, -0.5]
    assert score(rollout, config, 0).reward_components == {"invalid_edit": 1.0}


def test_length_penalty_enters_with_its_weight(build):
    length = LengthPenaltyConfig(k=1, q=2)
    config = RewardConfig(components=(RewardComponent(name="length_penalty", weight=-0.5),), length=length)
    rollout = build.rollout(stats=RolloutStats(num_turns=15))  # x = 15 * 0.2 = 3, C = 3/4
    assert score(rollout, config, 0).reward == pytest.approx(-0.375)


def test_repeated_edits(build):
    rollout = build.rollout(messages=turns((edit("a"), edit("b")), (edit("a"),), (edit("a"), edit("a", line=2))))
    assert measured("repeated_edit", rollout) == 2
    assert measured("repeated_edit", build.rollout()) == 0


def test_unfinished(build):
    done = build.rollout(messages=turns((edit(),), (ToolCall(name="finish"),)))
    assert measured("unfinished", done) == 0
    assert measured("unfinished", build.rollout(messages=turns((edit(),)))) == 1


def test_terminal_only(build):
    run = ToolCall(name="run")
    assert measured("terminal_only", build.rollout(messages=turns((run, run)))) == 1
    assert measured("terminal_only", build.rollout(messages=turns((run,), (edit(),)))) == 0
    assert measured("terminal_only", build.rollout()) == 0


def todo(*done):
    return ToolCall(name="todo", arguments={"items": [{"text": str(n), "done": d} for n, d in enumerate(done)]})


def test_open_todos(build):
    assert measured("open_todos", build.rollout(messages=turns((todo(False, False, True),)))) == 2
    assert measured("open_todos", build.rollout(messages=turns((todo(False, False),), (todo(True, True),)))) == 0
    assert measured("open_todos", build.rollout()) == 0
    broken = ToolCall(name="todo", arguments={"items": "all"})  # refused by the tool: the list before it stands
    assert measured("open_todos", build.rollout(messages=turns((todo(False),), (broken,)))) == 1


@pytest.mark.parametrize(
    ("new", "faults"),
    [
        ("x = 1", 0),
        ("x = 1  ", 1),
        ("\tx = 1", 1),
        ("try:\n    f()\nexcept:\n    print(1)", 2),
        ("except ValueError:", 0),
        ("blueprint(x)", 0),
        ("y" * 120, 0),
        ("y" * 121, 1),
    ],
)
def test_style_faults(build, new, faults):
    assert measured("style_faults", build.rollout(messages=turns((edit(new),)))) == faults
    assert measured("style_faults", build.rollout(messages=turns((edit(new, old=new),)))) == 0


def test_silent_finish(build):
    finish, told = ToolCall(name="finish"), ToolCall(name="finish", arguments={"message": "done"})
    assert measured("silent_finish", build.rollout(messages=turns((edit(),), (finish,)))) == 1
    assert measured("silent_finish", build.rollout(messages=turns((edit(),), (told,)))) == 0
    assert measured("silent_finish", build.rollout(messages=turns((finish,)))) == 0
    cut = build.rollout(messages=turns((edit(),)), status=RolloutStatus.MAX_TURNS)
    assert measured("silent_finish", cut) == 0
    spoken = (*turns((edit(),)), Message(role=Role.ASSISTANT, content="I changed x."))
    assert measured("silent_finish", build.rollout(messages=spoken)) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1  # three words here", 3),
        ("s = '# not a comment'", 0),
        ('s = "it\'s"  # one', 1),
        ("# a\n# b c", 3),
        ("#", 0),
        ("", 0),
    ],
)
def test_comment_words(text, words):
    assert comment_words(text) == words


def test_reasoning_in_comments_counts_beyond_the_free_words(build):
    long = "x  # " + "why " * 20
    assert measured("comments_cot", build.rollout(messages=turns((edit(long),)))) == 8
    assert measured("comments_cot", build.rollout(messages=turns((edit(long, old=long),)))) == 0
    assert measured("comments_cot", build.rollout(messages=turns((edit(long),))), free_comment_words=0) == 20


def test_infrastructure_failures_have_no_components(build):
    scored = score(build.rollout(status=RolloutStatus.INFRASTRUCTURE, passed=True), RewardConfig(), 0)
    assert scored.reward == 0.0
    assert scored.reward_components == {}


def test_solving_outweighs_any_default_mix_of_behaviours(build):
    stats = RolloutStats(num_turns=8, num_tool_calls=16, tool_call_tokens=200, tool_output_tokens=500)
    clumsy = build.rollout(
        passed=True, stats=stats, events={"invalid_edit": 4, "bad_arguments": 4}, messages=turns((edit(),) * 5)
    )
    assert score(clumsy, RewardConfig(), 0).reward > score(build.rollout(), RewardConfig(), 0).reward


def test_default_config_logs_everything(build):
    scored = score(build.rollout(), RewardConfig(), 0)
    assert set(scored.reward_components) == set(MEASURES)
    json.dumps(dict(scored.reward_components))


def test_a_measure_of_ones_own(build, tmp_path, monkeypatch):
    (tmp_path / "manners.py").write_text(
        "def turns(rollout, config): return float(rollout.stats.num_turns)\n"
        "def broken(rollout, config): return float('nan')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rollout = build.rollout(passed=True, stats=RolloutStats(num_turns=3))
    parts = (RewardComponent(name="correctness", weight=1), RewardComponent(name="manners:turns", weight=-0.125))
    scored = score(rollout, RewardConfig(components=parts), 0)
    assert scored.reward == 1 - 0.375
    assert scored.reward_components == {"correctness": 1.0, "manners:turns": 3.0}
    with pytest.raises(ValueError, match="'manners:broken' is nan, accepted is a finite number"):
        score(rollout, RewardConfig(components=(RewardComponent(name="manners:broken", weight=0),)), 0)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('boom')", r"raised KeyError\('boom'\) at .*rude\.py:2, accepted is a number"),
        ("return None", "is None, accepted is a finite number"),
        ("return 'good'", "is 'good', accepted is a finite number"),
        ("return [1.0, 2.0]", r"is \[1.0, 2.0\], accepted is a finite number"),
    ],
)
def test_a_measure_that_fails_is_named(build, tmp_path, monkeypatch, body, message):
    (tmp_path / "rude.py").write_text(f"def of(rollout, config):\n    {body}\ndef yes(rollout, config): return True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "rude", raising=False)
    find_measure.cache_clear()
    with pytest.raises(ValueError, match=f"^task 't': reward component 'rude:of' {message}"):
        score(build.rollout(), RewardConfig(components=(RewardComponent(name="rude:of", weight=1),)), 0)
    agreed = score(build.rollout(), RewardConfig(components=(RewardComponent(name="rude:yes", weight=0.5),)), 0)
    assert agreed.reward == 0.5
    assert json.dumps(agreed.reward_components) == '{"rude:yes": 1.0}'
    monkeypatch.delitem(sys.modules, "rude")
    find_measure.cache_clear()


def test_permuted_rewards_keep_their_multiset_and_spare_the_dead(build):
    group = build.group([float(i) for i in range(8)], lost=(2,))
    permuted = permute_rewards(group, np.random.default_rng(0))
    before = [rollout.reward for rollout in group.rollouts]
    after = [rollout.reward for rollout in permuted.rollouts]
    assert sorted(before) == sorted(after)
    assert after != before
    assert after[2] == before[2]
    assert [r.segments for r in permuted.rollouts] == [r.segments for r in group.rollouts]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RewardComponent(name="charm", weight=1), "RewardComponent.name is 'charm'"),
        (lambda: RewardComponent(name="no.such:thing", weight=1), "'no.such:thing', accepted is one of .*No module"),
        (lambda: RewardComponent(name="math:thing", weight=1), "'math:thing', accepted is .*has no attribute"),
        (lambda: RewardComponent(name=":f", weight=1), "':f', accepted is .*Empty module"),
        (lambda: RewardComponent(name="math:pi", weight=1), "'math:pi', accepted is .*it is no function"),
        (lambda: RewardComponent(name="correctness", weight=float("inf")), "'correctness' is inf"),
        (lambda: RewardComponent(name="correctness", weight="1"), "'correctness' is '1', accepted is a finite number"),
        (lambda: RewardComponent(name="correctness", weight=1, schedule=((5, 1), (5, 2))), r"steps \[5, 5\]"),
        (lambda: RewardConfig(components=(RewardComponent(name="correctness", weight=1),) * 2), "each name once"),
        (lambda: RewardConfig(free_comment_words=-1), "free_comment_words is -1"),
    ],
)
def test_errors(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_call_that_could_not_be_read_is_a_bad_tool_call(build):
    events = {"malformed_call": 1, "bad_json": 2, "unknown_tool": 4, "bad_arguments": 8, "invalid_edit": 16}
    assert measured("bad_tool_calls", build.rollout(events=events)) == 15


def test_permuted_rewards_leave_a_rollout_that_sampled_nothing(build):
    segments = [(build.segment(),), (build.segment(num_sampled=0),), (build.segment(),), (build.segment(),)]
    group = build.group([1.0, 7.0, 0.0, 0.0], segments=segments)
    for seed in range(8):
        shuffled = permute_rewards(group, np.random.default_rng(seed))
        assert shuffled.rollouts[1].reward == 7.0
        assert sorted(rollout.reward for rollout in shuffled.rollouts) == [0.0, 0.0, 1.0, 7.0]
