"""The agent loop: sample a turn, make its calls, show the answers, until the model finishes or a limit ends it.

In: a task, a sampler, pods, a template. Out: a `Rollout` with the exact token record of every context window.
Training, evaluation and use run this same function (row E6).

    segment 0   prompt                 | turn | results | turn | … | summary request | summary
    segment 1   prompt + summary       | turn | results | …

Source: report §4.1 (self-summaries; every token the model generated gets the final reward), §6.2; rows E6 R3 A3 I1.
Choice: a summary is sampled, and trained, at the end of the window it sums up, where the cache still holds all of it.
The next window quotes it as part of its prompt, not trained a second time.
Choice: all windows of a rollout are one session of the sampler, so the prompt they share stays in its cache.
Choice: a window is closed while there is still room for a turn, its answers and a summary, so nothing is ever cut out
of a window that a token was sampled on.
`on_full = "truncate"` is a comparison: the oldest turns are dropped instead, and what they said is gone.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from composer2.env.grade import PodGrader
from composer2.env.tools.files import Workspace
from composer2.env.tools.registry import Toolbox
from composer2.env.window import Window
from composer2.types import (
    Generation,
    Grader,
    Message,
    PodBackend,
    PodError,
    Role,
    Rollout,
    RolloutStats,
    RolloutStatus,
    Sampler,
    SamplingParams,
    SpanKind,
    Task,
    Template,
    ToolCall,
    ToolResult,
)

SHORT_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """What one episode may use, and how strict its tools are."""

    max_turns: int = 4
    """Turns over the whole chain; a summary is not a turn."""
    max_tokens_per_turn: int = 32
    """Sampled tokens of one turn, stop token included."""
    max_calls_per_turn: int = 4
    """Further calls of a turn are not made, and the model is told."""
    max_result_tokens: int = 64
    """Tokens of all answers to one turn; longer ones are shortened before the model sees them."""
    context_budget: int = 320
    """Tokens of one context window, everything included."""
    on_full: Literal["summarize", "truncate"] = "summarize"
    """What a full window leads to: a summary (the report), or, for comparison, a window without the oldest turns."""
    max_summaries: int = 2
    """Summaries of an episode, one for each window after the first; 0 switches them off. Cuts have no cap."""
    max_summary_tokens: int = 48
    """Sampled tokens of one summary, stop token included."""
    run_timeout: float = 1.0
    """CPU seconds of each test call."""
    locate_failures: bool = False
    """A failed `run` also names the line on which the first failing test's call ended."""
    lenient_tools: tuple[str, ...] = ()
    """Tools whose arguments are checked leniently; all others are strict."""
    share_runs: bool = False
    """Let the grader's store answer `run` for equal files, as long as the episode has no pod of its own."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "max_tokens_per_turn", "max_calls_per_turn", "max_summary_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"EpisodeLimits.{name} is {getattr(self, name)}, accepted is 1 or more")
        if self.on_full not in ("summarize", "truncate"):
            raise ValueError(f"EpisodeLimits.on_full is {self.on_full!r}, accepted is 'summarize' or 'truncate'")
        if self.max_summaries < 0:
            raise ValueError(f"EpisodeLimits.max_summaries is {self.max_summaries}, accepted is 0 or more")
        least = (SHORT_BYTES + 2) * (self.max_calls_per_turn + 1) + 1
        if self.max_result_tokens < least:
            raise ValueError(
                f"EpisodeLimits.max_result_tokens is {self.max_result_tokens}, accepted is {least} or more"
            )
        if not 0 < self.run_timeout < float("inf"):
            raise ValueError(f"EpisodeLimits.run_timeout is {self.run_timeout}, accepted is above 0 seconds")
        can_summarize = self.on_full == "summarize" and self.max_summaries > 0
        least = self.reserve(self.max_summary_tokens if can_summarize else 0)
        if self.context_budget <= least:
            raise ValueError(
                f"EpisodeLimits.context_budget is {self.context_budget}, accepted is above {least}: "
                "a turn, its answers and a summary must fit besides the prompt"
            )

    def reserve(self, num_summary_tokens: int) -> int:
        """Tokens that must be free before a turn begins; the 1 is an end token the harness may have to add."""
        return self.max_tokens_per_turn + 1 + self.max_result_tokens + num_summary_tokens


class _Next(Enum):
    ACT = "act"
    SUMMARIZE = "summarize"
    CUT = "cut"
    STOP = "stop"


def generation_seed(seed: int, segment: int, index: int) -> int:
    """Seed of the `index`-th generation of a segment: 62 bits that depend on nothing but the arguments."""
    digest = hashlib.blake2b(f"{seed}/{segment}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class _Episode:
    """State of one run; `run_episode` is the way in."""

    def __init__(
        self,
        task: Task,
        *,
        sampler: Sampler,
        workspace: Workspace,
        toolbox: Toolbox,
        template: Template,
        limits: EpisodeLimits,
        sampling: SamplingParams,
        session: str,
        group: str,
        seed: int,
    ) -> None:
        self.task, self.sampler, self.template, self.limits = task, sampler, template, limits
        self.session, self.group, self.seed = session, group, seed
        self.workspace, self.toolbox = workspace, toolbox
        self.sampling = replace(sampling, stop_ids=template.stop_ids)
        self.summary_request = template.render_summary_request()
        self.windows: list[Window] = []
        self.messages: list[Message] = [Message(role=Role.USER, content=task.instruction)]
        self.events = toolbox.events
        self.counts: Counter[str] = Counter()

    async def run(self) -> RolloutStatus:
        """The loop. `PodError` and cancellation pass through."""
        self._open(None)
        while self.counts["num_turns"] < self.limits.max_turns:
            step = self._next()
            if step is _Next.STOP or (step is _Next.SUMMARIZE and not await self._summarize()):
                return RolloutStatus.CONTEXT_FULL
            if step is _Next.CUT:
                self._cut()
            if step is _Next.ACT:
                status = await self._turn()
                if status is not None:
                    return status
        return RolloutStatus.MAX_TURNS

    def _open(self, summary: Sequence[int] | None) -> None:
        window = Window()
        window.append(SpanKind.PROMPT, self.template.render_prompt(self.task, summary=summary))
        self.windows.append(window)

    def _next(self) -> _Next:
        window = self.windows[-1]
        cuts = self.limits.on_full == "truncate"
        is_last = self.counts["num_summaries"] >= self.limits.max_summaries
        summary = 0 if cuts or is_last else len(self.summary_request) + self.limits.max_summary_tokens
        if len(window.token_ids) + self.limits.reserve(summary) <= self.limits.context_budget:
            return _Next.ACT
        if cuts:
            return _Next.CUT if window.turn_starts else _Next.STOP
        # A window without a turn holds nothing to sum up: another summary would not make it shorter.
        return _Next.STOP if is_last or not window.generations else _Next.SUMMARIZE

    def _cut(self) -> None:
        """Go on in a window without the oldest turns."""
        self.events["context_cut"] += 1
        room = self.limits.context_budget - self.limits.reserve(0)
        self.windows.append(self.windows[-1].without_oldest(self.template.render_prompt(self.task), room))

    async def _sample(self, kind: SpanKind, max_tokens: int) -> tuple[Generation, list[int]]:
        window, index = self.windows[-1], len(self.windows) - 1
        generation = await self.sampler.generate(
            tuple(window.token_ids),
            replace(self.sampling, max_tokens=max_tokens),
            session=self.session,
            group=self.group,
            seed=generation_seed(self.seed, index, len(window.generations)),
        )
        if generation.finish_reason == "cancelled":
            raise PodError("the sampler cancelled the generation")
        ids = window.append_sampled(kind, generation)
        self.counts["sampled_tokens"] += len(ids)
        return generation, ids

    async def _summarize(self) -> bool:
        """Close the window with a summary and open the next one; False when the sampler had no room left."""
        window = self.windows[-1]
        window.append(SpanKind.PROMPT, self.summary_request)
        _, ids = await self._sample(SpanKind.SUMMARY, self.limits.max_summary_tokens)
        if not ids:
            return False
        self.counts["num_summaries"] += 1
        if ids[-1] not in self.template.stop_ids:
            self.events["malformed_summary"] += 1
        self.messages.append(Message(role=Role.ASSISTANT, content=self.template.parse_turn(ids).text))
        self._open(ids)
        return True

    async def _turn(self) -> RolloutStatus | None:
        """One turn and its calls; a status when the episode is over."""
        generation, ids = await self._sample(SpanKind.ACTION, self.limits.max_tokens_per_turn)
        if not ids:
            return RolloutStatus.CONTEXT_FULL
        self.counts["num_turns"] += 1
        turn = self.template.parse_turn(ids)
        made = tuple(call for call in turn.calls if isinstance(call, ToolCall))
        self.messages.append(Message(role=Role.ASSISTANT, content=turn.text, reasoning=turn.reasoning, tool_calls=made))
        if not turn.ended:
            self.events["cut_turn"] += 1
        # Fewer tokens than allowed and yet cut: the sampler's own window is full.
        is_full = generation.finish_reason == "length" and len(ids) < self.limits.max_tokens_per_turn
        if not turn.calls:
            self.counts["final_message_tokens"] += len(ids)
            return RolloutStatus.CONTEXT_FULL if is_full else RolloutStatus.FINISHED
        self.counts["thinking_tokens"] += turn.num_text_tokens
        self.counts["tool_call_tokens"] += len(ids) - turn.num_text_tokens
        results = await self._call_tools(turn.calls)
        self.messages.append(Message(role=Role.TOOL, tool_results=tuple(results)))
        if self.toolbox.is_finished:
            return RolloutStatus.FINISHED
        if is_full:
            return RolloutStatus.CONTEXT_FULL
        if self.counts["num_turns"] < self.limits.max_turns:
            self._append_results(turn.ended, results)
        return None

    async def _call_tools(self, calls: Sequence[ToolCall | ToolResult]) -> list[ToolResult]:
        results: list[ToolResult] = []
        most = self.limits.max_calls_per_turn
        for call in calls[:most]:
            if isinstance(call, ToolResult):
                results.append(call)
                self.events[call.event or "malformed_call"] += 1
                continue
            self.counts["num_tool_calls"] += 1
            results.append(await self.toolbox.call(call))
            if self.toolbox.is_finished:
                return results
        if len(calls) > most:
            self.events["too_many_calls"] += 1
            text = f"error: {len(calls) - most} more calls not made; a turn may hold {most}"
            results.append(ToolResult(content=text, is_error=True, event="too_many_calls"))
        return results

    def _append_results(self, turn_ended: bool, results: Sequence[ToolResult]) -> None:
        """Show the answers. A turn cut by length first gets the end token it lacks, which is not trained."""
        ids = self.template.render_results(results)
        if len(ids) > self.limits.max_result_tokens:
            self.events["result_cut"] += 1
            ids = self._render_short(results)
        self.counts["tool_output_tokens"] += len(ids)
        self.windows[-1].append(SpanKind.RESULT, ids if turn_ended else [self.template.stop_ids[0], *ids])

    def _render_short(self, results: Sequence[ToolResult]) -> list[int]:
        """Answers cut to the most that fits. No token is shorter than a byte, so short enough bytes always fit."""
        num_bytes = max(len(result.content.encode("utf-8", errors="replace")) for result in results)
        ids = self.template.render_results(results)
        while len(ids) > self.limits.max_result_tokens and num_bytes > 0:
            num_bytes = min(num_bytes - 1, num_bytes * self.limits.max_result_tokens // len(ids))
            ids = self.template.render_results([replace(r, content=_cut(r.content, num_bytes)) for r in results])
        return ids


def _cut(text: str, num_bytes: int) -> str:
    """At most `num_bytes` of a text, ending in `…` where cut; a text of SHORT_BYTES, such as `fail 7`, stays whole."""
    data = text.encode("utf-8", errors="replace")
    if len(data) <= max(num_bytes, SHORT_BYTES):
        return text
    return data[: num_bytes - 3].decode("utf-8", errors="ignore") + "…" if num_bytes > 3 else ""


async def run_episode(
    task: Task,
    *,
    sampler: Sampler,
    backend: PodBackend,
    grader: Grader,
    template: Template,
    limits: EpisodeLimits,
    sampling: SamplingParams,
    session: str,
    group: str,
    seed: int,
    sample_index: int,
) -> Rollout:
    """One rollout of the policy on a task. `max_tokens` and `stop_ids` of `sampling` are set from limits and template.

    A failing machine (`PodError`, a lost connection) gives a rollout of status INFRASTRUCTURE that holds what was
    recorded so far. Cancellation passes through once the pod is destroyed. `reward` stays 0: `rl` decides.
    """
    started = time.monotonic()
    if task.context_budget is not None:
        limits = replace(limits, context_budget=min(limits.context_budget, task.context_budget))
    workspace = Workspace(task, backend)
    toolbox = Toolbox(
        workspace,
        run_timeout=limits.run_timeout,
        locate=limits.locate_failures,
        lenient=limits.lenient_tools,
        shared_runs=grader if limits.share_runs and isinstance(grader, PodGrader) else None,
    )
    episode = _Episode(
        task,
        sampler=sampler,
        workspace=workspace,
        toolbox=toolbox,
        template=template,
        limits=limits,
        sampling=sampling,
        session=session,
        group=group,
        seed=seed,
    )
    status, error, grade, final_files = RolloutStatus.INFRASTRUCTURE, "", None, {}
    try:
        try:
            ended = await episode.run()
            final_files = await workspace.final_files()
        finally:
            sampler.release(session)
            await workspace.close()
        grade = await grader.grade(task, final_files)
        status = ended
    except (PodError, ConnectionError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    return Rollout(
        task_id=task.task_id,
        sample_index=sample_index,
        segments=tuple(window.segment() for window in episode.windows if window.generations),
        status=status,
        passed=grade is not None and grade.passed,
        passed_frac=grade.passed_frac if grade is not None else 0.0,
        stats=RolloutStats(**episode.counts),
        events=dict(episode.events),
        attempts=tuple(toolbox.attempts),
        messages=tuple(episode.messages),
        final_files=final_files,
        seconds=time.monotonic() - started,
        error=error,
    )
