"""A scripted expert: whole transcripts to imitate, with masked wrong tries, and the random search it is compared with.

In: a task and a template. Out: token ids with a weight for each token, as the harness would have written the episode.

    plain      prompt | edit run | results | finish
    unopened   prompt | read | results | edit run | …         (search: one more turn before)
    wrong      prompt | edit run (weight 0) | results | … | edit run | results | finish
    own tries  prompt | what the policy did, to a failed run (weight 0) | edit run | results | finish
    summary    prompt | edit run (weight 0) | results | <|summarize|> summary ; prompt summary | edit run | …

Source: report §2 (self-summary of a long rollout), §3 (supervised phase before RL); rows P4 R3 E6.
Choice: wrong tries are real single mutations of the broken file with the answers its tests really give, and carry no
weight, so the policy learns to go on after a failure and not to fail.
Choice: wrong tries drawn at random are not those a policy makes; after its own ones the expert is asked again (dataset
aggregation), so that a second try is learnt where it is needed. Text runs through the template only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from composer2.env.tasks.mutate import Mutation, apply_mutation, candidate_mutations
from composer2.env.tasks.record import compile_calls, run_calls
from composer2.env.tools.lines import EditError, apply_edit, number_lines, split_lines
from composer2.env.tools.registry import run_answer
from composer2.types import CallStatus, Role, Rollout, SpanKind, Task, Template, ToolCall, ToolResult

RUN = ToolCall(name="run")
FINISH = ToolCall(name="finish")
OK = ToolResult(content="ok")


@dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """How transcripts are written and weighed."""

    wrong_frac: float = 0.30
    """Share of transcripts with wrong tries before the fix."""
    max_wrong: int = 2
    """At most so many wrong tries; the number is uniform from 1."""
    invalid_frac: float = 0.15
    """Share of wrong tries whose `old` is not in the file."""
    prompt_weight: float = 0.15
    """Loss weight of prompt tokens."""
    long_summary_frac: float = 0.35
    """Share of "long" tasks told as a chain of two windows joined by a summary."""
    other_summary_frac: float = 0.02
    """The same for all other tasks."""

    def __post_init__(self) -> None:
        for name in ("wrong_frac", "invalid_frac", "prompt_weight", "long_summary_frac", "other_summary_frac"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"ExpertConfig.{name}: {getattr(self, name)}, accepted is 0 to 1")
        if self.max_wrong < 1:
            raise ValueError(f"ExpertConfig.max_wrong: {self.max_wrong}, accepted is 1 or more")


@dataclass(frozen=True, kw_only=True)
class OwnTriesConfig:
    """Fine-tuning on what the expert would do after the policy's own wrong tries."""

    num_rounds: int = 0
    """Times that episodes are collected with the newest policy and trained on; 0 leaves all of it out."""
    num_tasks: int = 4000
    """Fresh training tasks of a round."""
    num_samples: int = 2
    """Episodes of each."""
    num_steps: int = 1000
    """Optimizer steps of a round; the rate falls linearly to 0."""
    lr: float = 1.5e-3
    """Peak learning rate of a round."""
    own_frac: float = 0.5
    """Share of own tries in a batch, the rest are the expert's transcripts."""
    max_tries: int = 2
    """An episode gives an example after each of its first so many failed runs."""

    def __post_init__(self) -> None:
        if self.num_rounds < 0:
            raise ValueError(f"OwnTriesConfig.num_rounds: {self.num_rounds}, accepted is 0 or more")
        for name in ("num_tasks", "num_samples", "num_steps", "max_tries"):
            if getattr(self, name) < 1:
                raise ValueError(f"OwnTriesConfig.{name}: {getattr(self, name)}, accepted is 1 or more")
        if not 0 < self.own_frac <= 1:
            raise ValueError(f"OwnTriesConfig.own_frac: {self.own_frac}, accepted is above 0, up to 1")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"OwnTriesConfig.lr: {self.lr}, accepted is a finite number above 0")


@dataclass(frozen=True, kw_only=True)
class SftExample:
    """One context window to imitate."""

    token_ids: np.ndarray
    """int32 [T]."""
    weights: np.ndarray
    """float32 [T]: loss weight of predicting the token itself."""


@dataclass(frozen=True, slots=True)
class Try:
    """One edit that did not solve the task, and the answers to it and to the test run after it."""

    edit: Mutation
    edit_result: ToolResult
    run_result: ToolResult

    def note(self) -> str:
        """How a summary remembers it: line, old, new, number of tests passed or `no` for an edit that was refused."""
        answer = "no" if self.edit_result.is_error else self.run_result.content.removeprefix("fail ")
        return f"{self.edit.line}{self.edit.old} ->{self.edit.new} {answer}"


class Transcript:
    """Tokens and weights of one window, growing to the right."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.weights: list[float] = []

    def add(self, token_ids: Sequence[int], weight: float) -> None:
        self.token_ids += token_ids
        self.weights += [weight] * len(token_ids)

    def example(self) -> SftExample:
        """The window as arrays."""
        return SftExample(
            token_ids=np.asarray(self.token_ids, dtype=np.int32), weights=np.asarray(self.weights, dtype=np.float32)
        )


def edit_call(edit: Mutation) -> ToolCall:
    """The call that makes an edit."""
    return ToolCall(name="edit", arguments={"line": edit.line, "old": edit.old, "new": edit.new})


def fix_of(task: Task) -> Mutation:
    """The edit that turns the broken file into the reference."""
    meta = task.meta
    return Mutation(meta["line"], meta["old"], meta["new"], meta["bug_kind"])


def candidate_edits(task: Task) -> list[Mutation]:
    """All single mutations of the broken file: what a blind search tries, and where wrong tries come from."""
    return candidate_mutations(task.files[task.meta["path"]])


def answer_to_run(task: Task, source: str, *, locate: bool = False) -> str | None:
    """What `run` answers with the trusted `source` in the broken file's place; None when a test ran out of steps."""
    tests = (*task.fail_to_pass, *task.pass_to_pass)
    outcomes = run_calls(source, compile_calls([test.call for test in tests]), locate=locate)
    if any(outcome.status is CallStatus.TIMEOUT for outcome in outcomes):
        return None
    return run_answer(tests, outcomes, locate=locate)


def wrong_tries(
    task: Task, rng: random.Random, count: int, invalid_frac: float, *, locate_failures: bool = False
) -> list[Try]:
    """Up to `count` different edits that do not solve the task, in the order they are made."""
    path = task.meta["path"]
    source = task.files[path]
    candidates = candidate_edits(task)
    rng.shuffle(candidates)
    tries: list[Try] = []
    for edit in candidates[: 3 * count]:
        if len(tries) == count:
            break
        if rng.random() < invalid_frac:
            # Another candidate's replacement is a plausible name for something that is not there.
            edit = Mutation(edit.line, rng.choice(candidates).new, edit.old, edit.kind)
        try:
            changed = apply_edit(source, line=edit.line, old=edit.old, new=edit.new, path=path)
        except EditError as problem:
            refused = ToolResult(content=f"error: {problem}", is_error=True, event="invalid_edit")
            changed, answer = source, refused
        else:
            answer = OK
        outcome = answer_to_run(task, changed, locate=locate_failures)
        if outcome not in (None, "pass") and edit not in [t.edit for t in tries]:
            tries.append(Try(edit, answer, ToolResult(content=str(outcome))))
    return tries


def opening_turns(task: Task, *, is_located: bool) -> list[tuple[ToolCall, ToolResult]]:
    """Calls that bring the broken file into view, each a turn of its own. `is_located`: the path is known already."""
    path, variant = task.meta["path"], task.meta["variant"]
    if path in task.recent_files:
        return []
    turns = []
    if variant == "search" and not is_located:
        pattern = f"def {task.meta['function']}"
        hits = [
            f"{name}:{n} {line}"
            for name in sorted(task.files)
            for n, line in enumerate(split_lines(task.files[name]), 1)
            if pattern in line
        ]
        turns.append((ToolCall(name="search", arguments={"pattern": pattern}), ToolResult(content="\n".join(hits))))
    shown = ToolResult(content=f"{path}\n{number_lines(task.files[path])}")
    return [*turns, (ToolCall(name="read", arguments={"path": path}), shown)]


def summary_text(task: Task, tries: Sequence[Try]) -> str:
    """The expert's summary: where the bug is looked for, when the prompt does not say, and the edits tried so far."""
    notes = [t.note() for t in tries]
    return "\n".join([task.meta["path"], *notes] if task.meta["variant"] == "search" else notes)


def sft_example(
    task: Task,
    template: Template,
    rng: random.Random,
    config: ExpertConfig | None = None,
    *,
    locate_failures: bool = False,
) -> list[SftExample]:
    """The windows of one expert episode on the task: one, or two joined by a summary.

    `locate_failures` is that of the episodes to imitate (`EpisodeLimits`)."""
    config = config or ExpertConfig()
    share = config.long_summary_frac if task.meta["variant"] == "long" else config.other_summary_frac
    has_summary = rng.random() < share
    tries: list[Try] = []
    if has_summary or rng.random() < config.wrong_frac:
        count = 1 + int(rng.random() * config.max_wrong)
        tries = wrong_tries(task, rng, count, config.invalid_frac, locate_failures=locate_failures)
    window = Transcript()
    window.add(template.render_prompt(task), config.prompt_weight)
    _add_opening(window, template, task, is_located=False)
    for attempt in tries:
        window.add(template.render_calls([edit_call(attempt.edit), RUN]), 0.0)
        window.add(template.render_results([attempt.edit_result, attempt.run_result]), 0.0)
    if not (has_summary and tries):
        _add_solution(window, template, task)
        return [window.example()]
    summary = template.render_summary(summary_text(task, tries))
    window.add(template.render_summary_request(), 0.0)
    window.add(summary, 1.0)
    second = Transcript()
    prompt = template.render_prompt(task, summary=summary)
    second.add(prompt, config.prompt_weight)
    _add_opening(second, template, task, is_located=True)
    _add_solution(second, template, task)
    return [window.example(), second.example()]


def after_own_tries(
    task: Task, template: Template, rollout: Rollout, config: ExpertConfig, max_tries: int
) -> list[SftExample]:
    """Windows that begin as the policy's episode did, up to a failed run, and end with the expert's fix.

    One for each of the first `max_tries` failed runs of the first window. What the policy sampled has weight 0."""
    if not rollout.segments:
        return []
    segment = rollout.segments[0]
    results = [span for span in segment.spans if span.kind is SpanKind.RESULT]
    answers = [message.tool_results for message in rollout.messages if message.role is Role.TOOL]
    stops = [
        span.stop
        for span, answer in zip(results, answers, strict=False)
        if any(result.content.startswith("fail") for result in answer)
    ]
    examples = []
    ids = segment.token_ids.tolist()
    start = segment.spans[0].stop
    for stop in stops[:max_tries]:
        window = Transcript()
        window.add(ids[:start], config.prompt_weight)
        window.add(ids[start:stop], 0.0)
        _add_solution(window, template, task)
        examples.append(window.example())
    return examples


def _add_opening(window: Transcript, template: Template, task: Task, *, is_located: bool) -> None:
    for call, result in opening_turns(task, is_located=is_located):
        window.add(template.render_calls([call]), 1.0)
        window.add(template.render_results([result]), 0.0)


def _add_solution(window: Transcript, template: Template, task: Task) -> None:
    window.add(template.render_calls([edit_call(fix_of(task)), RUN]), 1.0)
    window.add(template.render_results([OK, ToolResult(content="pass")]), 0.0)
    window.add(template.render_calls([FINISH]), 1.0)


def random_search_baseline(tasks: Sequence[Task], tries: Sequence[int] = (1, 3, 24)) -> dict[int, float]:
    """Chance that a uniform draw of k different candidates of the broken file holds a fix, averaged over tasks.

    Exact, by counting: with s fixes among n candidates it is 1 - C(n - s, k) / C(n, k).
    """
    if not tasks:
        raise ValueError("tasks: empty, accepted is at least one task")
    solved = dict.fromkeys(tries, 0.0)
    for task in tasks:
        source = task.files[task.meta["path"]]
        candidates = candidate_edits(task)
        fixes = sum(answer_to_run(task, apply_mutation(source, edit)) == "pass" for edit in candidates)
        for k in tries:
            drawn = min(k, len(candidates))
            misses = math.comb(len(candidates) - fixes, drawn)
            solved[k] += 1.0 - misses / max(math.comb(len(candidates), drawn), 1)
    return {k: total / len(tasks) for k, total in solved.items()}
