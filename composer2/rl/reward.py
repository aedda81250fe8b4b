"""The reward of a rollout: a weighted list of measured behaviours.

In: an ungraded `Rollout` (verdict, counts, events, messages). Out: the same rollout with `reward` and
`reward_components`.

Source: report §2 (correctness, succinctness) and §4.2 (auxiliary behaviour rewards, added as behaviours emerge; a
length penalty); rows R4 R5.

    reward = sum over components of weight(step) * value(rollout)

Values are amounts >= 0 (a count, a share, a cost), so penalties have negative weights. `reward_components` holds the
raw values of every listed component, at weight 0 too: watch a behaviour first, weigh it later.
Weights may change in mid-run: `schedule` lists (from step, weight), and a run that was stopped may be resumed with
another reward. A component of one's own is named `package.module:function`; workers need not import it, since rewards
are given where the policy is trained.

Choice: the report gives no weights; the defaults are small against correctness, so that no mix of behaviours outweighs
solving the task. Choice: a rollout lost to infrastructure gets reward 0 and no components; nothing averages it.
What is not measured here: judgements by rubric.
"""

from __future__ import annotations

import importlib
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from numbers import Real
from typing import cast

import numpy as np

from composer2.rl.advantage import counts_in_group
from composer2.rl.length_penalty import LengthPenaltyConfig, length_penalty
from composer2.types import Group, Role, Rollout, RolloutStatus, ToolCall

FAULTY_LINE = re.compile(r"^.{121}|[ \t]+$|\t|^\s*except\s*:|^\s*print\(")
"""Choice: the report names style and gives no rules; these need no parser and no opinion."""


@dataclass(frozen=True, kw_only=True)
class RewardComponent:
    """One measured behaviour and what it is worth."""

    name: str
    """A key of `MEASURES`, or `package.module:function` of one's own `Measure`, installed or on PYTHONPATH."""
    weight: float
    """Reward per unit; negative for a penalty, 0 to log only."""
    schedule: tuple[tuple[int, float], ...] = ()
    """(from step, weight) in rising order of step: later weights, for changes in mid-run."""

    def __post_init__(self) -> None:
        find_measure(self.name)
        steps = [step for step, _ in self.schedule]
        if steps != sorted(set(steps)) or any(step < 0 for step in steps):
            raise ValueError(f"RewardComponent.schedule has steps {steps}, accepted are rising steps >= 0")
        for weight in (self.weight, *(weight for _, weight in self.schedule)):
            if not (isinstance(weight, Real) and np.isfinite(weight)):
                raise ValueError(f"RewardComponent weight of {self.name!r} is {weight!r}, accepted is a finite number")

    def weight_at(self, step: int) -> float:
        """The weight in force at a step."""
        return next((weight for start, weight in reversed(self.schedule) if start <= step), self.weight)


def _default_components() -> tuple[RewardComponent, ...]:
    weights = {
        "correctness": 1.0,
        "length_penalty": -0.02,
        "bad_tool_calls": -0.02,
        "invalid_edit": -0.02,
        "repeated_edit": -0.02,
        "unfinished": 0.0,
        "comments_cot": 0.0,
        "terminal_only": 0.0,
        "open_todos": 0.0,
        "style_faults": 0.0,
        "silent_finish": 0.0,
        "passed_frac": 0.0,
    }
    return tuple(RewardComponent(name=name, weight=weight) for name, weight in weights.items())


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What the reward consists of."""

    components: tuple[RewardComponent, ...] = field(default_factory=_default_components)
    """Each name once; order is the order of the log."""
    length: LengthPenaltyConfig = field(default_factory=LengthPenaltyConfig)
    """Shape of the component `length_penalty`."""
    free_comment_words: int = 12
    """Words of new comments per rollout that `comments_cot` does not count."""

    def __post_init__(self) -> None:
        names = [component.name for component in self.components]
        if len(names) != len(set(names)):
            raise ValueError(f"RewardConfig.components names {names}, accepted is each name once")
        if self.free_comment_words < 0:
            raise ValueError(f"RewardConfig.free_comment_words is {self.free_comment_words}, accepted is >= 0")


def score(rollout: Rollout, config: RewardConfig, step: int) -> Rollout:
    """The rollout with its reward at a training step and the raw value of every component (errors: `measured`)."""
    if rollout.status is RolloutStatus.INFRASTRUCTURE:
        return replace(rollout, reward=0.0, reward_components={})
    values = {component.name: measured(component.name, rollout, config) for component in config.components}
    reward = sum(component.weight_at(step) * values[component.name] for component in config.components)
    return replace(rollout, reward=float(reward), reward_components=values)


def measured(name: str, rollout: Rollout, config: RewardConfig) -> float:
    """The value of one component. ValueError naming it, its task and the place when it fails or is no finite number."""
    where = f"task {rollout.task_id!r}: reward component {name!r}"
    try:
        value = find_measure(name)(rollout, config)
    except Exception as error:  # a measure may be anyone's code; what it raised is told, and the run ends
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise ValueError(f"{where} raised {error!r} at {last.filename}:{last.lineno}, accepted is a number") from error
    if not (isinstance(value, Real) and np.isfinite(value)):
        raise ValueError(f"{where} is {value!r}, accepted is a finite number")
    return float(value)


def permute_rewards(group: Group, generator: np.random.Generator) -> Group:
    """The control experiment: rewards shuffled among the rollouts of a group that count, so that they mean nothing."""
    counted = [i for i, rollout in enumerate(group.rollouts) if counts_in_group(rollout)]
    order = generator.permutation(len(counted))
    rewards = {i: group.rollouts[counted[j]].reward for i, j in zip(counted, order, strict=True)}
    return replace(
        group, rollouts=tuple(replace(r, reward=rewards.get(i, r.reward)) for i, r in enumerate(group.rollouts))
    )


# ---------------------------------------------------------------------------------------------------------------------
# Measures


def correctness(rollout: Rollout, config: RewardConfig) -> float:
    """1 when every hidden test passed."""
    return float(rollout.passed)


def passed_frac(rollout: Rollout, config: RewardConfig) -> float:
    """Share of hidden tests that passed: denser than correctness, and easier to game."""
    return float(rollout.passed_frac)


def length_cost(rollout: Rollout, config: RewardConfig) -> float:
    """C(x) of the length penalty."""
    return length_penalty(rollout, config.length)


def bad_tool_calls(rollout: Rollout, config: RewardConfig) -> float:
    """Calls of unknown tools, with bad arguments, or too broken to read."""
    names = ("unknown_tool", "bad_arguments", "malformed_call", "bad_json")
    return float(sum(rollout.events.get(name, 0) for name in names))


def invalid_edit(rollout: Rollout, config: RewardConfig) -> float:
    """Edits whose old text was nowhere, or that changed nothing."""
    return float(rollout.events.get("invalid_edit", 0))


def repeated_edit(rollout: Rollout, config: RewardConfig) -> float:
    """Edits that were tried before in the same rollout, argument for argument."""
    texts = [
        json.dumps(dict(call.arguments), sort_keys=True, default=str) for call in _calls(rollout) if call.name == "edit"
    ]
    return float(len(texts) - len(set(texts)))


def unfinished(rollout: Rollout, config: RewardConfig) -> float:
    """1 unless the model said that it was done by calling `finish`."""
    return float(not any(call.name == "finish" for call in _calls(rollout)))


def comments_cot(rollout: Rollout, config: RewardConfig) -> float:
    """Words that edits added in comments, beyond the free ones: reasoning belongs elsewhere."""
    added = 0
    for call in _calls(rollout):
        if call.name == "edit":
            old, new = (str(call.arguments.get(key, "")) for key in ("old", "new"))
            added += max(comment_words(new) - comment_words(old), 0)
    return float(max(added - config.free_comment_words, 0))


def terminal_only(rollout: Rollout, config: RewardConfig) -> float:
    """1 when the rollout made calls and all of them were `run`."""
    names = {call.name for call in _calls(rollout)}
    return float(names == {"run"})


def open_todos(rollout: Rollout, config: RewardConfig) -> float:
    """Items of the last to-do list that are not done when the episode ends; 0 without a list."""
    lists = [call.arguments.get("items") for call in _calls(rollout) if call.name == "todo"]
    readable = [items for items in lists if isinstance(items, list) and all(isinstance(i, Mapping) for i in items)]
    return float(sum(not item.get("done") for item in readable[-1])) if readable else 0.0


def style_faults(rollout: Rollout, config: RewardConfig) -> float:
    """Lines that edits added and no reviewer would pass: too long, blanks at the end, a tab, a bare except, a print."""
    faults = 0
    for call in _calls(rollout):
        if call.name == "edit":
            old, new = (str(call.arguments.get(key, "")).split("\n") for key in ("old", "new"))
            faults += sum(1 for line in new if line not in old and FAULTY_LINE.search(line))
    return float(faults)


def silent_finish(rollout: Rollout, config: RewardConfig) -> float:
    """1 when the model ended an episode in which it made edits without a word to the user."""
    calls = list(_calls(rollout))
    said = any(call.name == "finish" and str(call.arguments.get("message", "")).strip() for call in calls)
    last = next((m.content for m in reversed(rollout.messages) if m.role is Role.ASSISTANT), "")
    has_edits = any(call.name == "edit" for call in calls)
    return float(rollout.status is RolloutStatus.FINISHED and has_edits and not said and not last.strip())


Measure = Callable[[Rollout, RewardConfig], float]
MEASURES: Mapping[str, Measure] = {
    "correctness": correctness,
    "passed_frac": passed_frac,
    "length_penalty": length_cost,
    "bad_tool_calls": bad_tool_calls,
    "invalid_edit": invalid_edit,
    "repeated_edit": repeated_edit,
    "unfinished": unfinished,
    "comments_cot": comments_cot,
    "terminal_only": terminal_only,
    "open_todos": open_todos,
    "style_faults": style_faults,
    "silent_finish": silent_finish,
}
"""The behaviours that a config names shortly."""


@cache
def find_measure(name: str) -> Measure:
    """A measure by its key, or by `package.module:function`. ValueError when there is none of that name."""
    if name in MEASURES:
        return MEASURES[name]
    accepted = f"accepted is one of {sorted(MEASURES)}, or package.module:function of a function (rollout, config)"
    module, separator, function = name.partition(":")
    if not separator:
        raise ValueError(f"RewardComponent.name is {name!r}, {accepted}")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"RewardComponent.name is {name!r}, {accepted} ({error})") from error
    if not callable(found):
        raise ValueError(f"RewardComponent.name is {name!r}, {accepted} (it is no function)")
    return cast(Measure, found)


def comment_words(text: str) -> int:
    """Words after an unquoted `#`, line by line. Fragments are common, so this is no parser; a quote lasts one line."""
    words = 0
    for line in text.splitlines():
        quote = ""
        for position, char in enumerate(line):
            if quote:
                quote = "" if char == quote else quote
            elif char in "'\"":
                quote = char
            elif char == "#":
                words += len(line[position + 1 :].split())
                break
    return words


def _calls(rollout: Rollout) -> Iterator[ToolCall]:
    for message in rollout.messages:
        yield from message.tool_calls
