import asyncio
import json
import re
from dataclasses import replace

import numpy as np
import pytest

from composer2.env.grade import PodGrader
from composer2.env.harness import EpisodeLimits, generation_seed
from composer2.env.json_template import JsonTemplate
from composer2.env.tasks.expert import ExpertConfig, after_own_tries
from composer2.env.template import TinyTemplate
from composer2.types import PodError, Role, RolloutStatus, SpanKind

FIX_AND_RUN = "<|edit|>2<|sep|> ><|sep|> >=<|run|><|end|>"
WRONG_AND_RUN = "<|edit|>2<|sep|>3<|sep|>5<|run|><|end|>"


def play(fakes, turns, *, task=None, **options):
    tokenizer = fakes.ByteTokenizer()
    template = TinyTemplate(tokenizer)
    script = [tokenizer.ids(turn) for turn in turns]
    rollout, sampler, backend = asyncio.run(
        fakes.run_script(task or fakes.make_task(), script, template=template, **options)
    )
    return rollout, sampler, backend, tokenizer


def spans(segment):
    return [(span.kind, span.start, span.stop) for span in segment.spans]


def test_solved_in_two_turns(fakes):
    rollout, _, _, tokenizer = play(fakes, [FIX_AND_RUN, "<|finish|><|end|>"])
    assert (rollout.status, rollout.passed, rollout.passed_frac) == (RolloutStatus.FINISHED, True, 1.0)
    assert (rollout.task_id, rollout.sample_index, rollout.reward, rollout.error) == ("keep-three", 1, 0.0, "")
    assert rollout.final_files == fakes.make_task().reference
    assert rollout.attempts == (True,)
    assert rollout.events == {}
    (segment,) = rollout.segments
    prompt = TinyTemplate(tokenizer).render_prompt(fakes.make_task())
    turn = tokenizer.ids(FIX_AND_RUN)  # edit 2 sep " >" sep " >" "=" run end: 9 tokens
    results = tokenizer.ids("<|result|><|ok|><|result|><|pass|><|agent|>")
    finish = tokenizer.ids("<|finish|><|end|>")
    assert segment.token_ids.tolist() == prompt + turn + results + finish
    p = len(prompt)
    assert spans(segment) == [
        (SpanKind.PROMPT, 0, p),
        (SpanKind.ACTION, p, p + 9),
        (SpanKind.RESULT, p + 9, p + 14),
        (SpanKind.ACTION, p + 14, p + 16),
    ]
    assert segment.sampled.tolist() == [False] * p + [True] * 9 + [False] * 5 + [True] * 2
    expected = [0.0] * p + [-1 - i / 100 for i in range(9)] + [0.0] * 5 + [-2.0, -2.01]
    np.testing.assert_allclose(segment.logprobs, expected, rtol=1e-6)
    assert segment.policy_versions.tolist() == [-1] * p + [10] * 9 + [-1] * 5 + [11] * 2
    # routes: the newest generation covers all tokens, the very last has none
    assert segment.routes[:, 0, 0].tolist() == [*range(p + 15), -1]
    assert segment.routes[:-1, 1].tolist() == [[1, 1]] * (p + 15)
    assert (segment.token_ids.dtype, segment.routes.dtype, segment.sampled.dtype) == (np.int32, np.int16, np.bool_)


def test_a_failed_run_names_the_line_when_asked(fakes):
    rollout, *_ = play(fakes, [WRONG_AND_RUN, "<|end|>"], locate_failures=True)
    (answer,) = [m.tool_results[1].content for m in rollout.messages if m.role is Role.TOOL]
    assert re.fullmatch(r"fail \d \d", answer)


def test_a_task_may_narrow_the_context_and_not_widen_it(fakes):
    task = fakes.make_task()
    p = len(TinyTemplate(fakes.ByteTokenizer()).render_prompt(task))
    roomy = {"max_tokens_per_turn": 16, "max_result_tokens": 51, "max_summaries": 0}
    narrow = replace(task, context_budget=p + 68)
    turns = [FIX_AND_RUN, "<|finish|><|end|>"]
    for budget, given, status in (
        (p + 200, task, RolloutStatus.FINISHED),
        (p + 200, narrow, RolloutStatus.CONTEXT_FULL),
        (p + 68, replace(task, context_budget=p + 200), RolloutStatus.CONTEXT_FULL),
    ):
        rollout, *_ = play(fakes, turns, task=given, context_budget=budget, **roomy)
        assert rollout.status is status
        assert rollout.seconds > 0


def test_the_expert_goes_on_after_the_policy_s_own_failed_runs(fakes):
    """Windows keep what was sampled without weight, stop after a failed run, and end with the reference's edit."""
    task = replace(
        fakes.make_task(), meta={"line": 2, "old": " >", "new": " >=", "bug_kind": "x", "path": "solution.py"}
    )
    other = "<|edit|>3<|sep|> x<|sep|> 7<|run|><|end|>"
    turns = [WRONG_AND_RUN, "<|read|>solution.py<|end|>", other, FIX_AND_RUN, "<|finish|><|end|>"]
    rollout, _, _, tokenizer = play(fakes, turns, task=task)
    assert rollout.attempts == (False, False, True)
    template = TinyTemplate(tokenizer)
    solution = tokenizer.ids(FIX_AND_RUN + "<|result|><|ok|><|result|><|pass|><|agent|><|finish|><|end|>")
    one, two = after_own_tries(task, template, rollout, ExpertConfig(prompt_weight=0.25), 2)
    ids = rollout.segments[0].token_ids.tolist()
    p = len(template.render_prompt(task))
    first = p + 8 + 6  # edit 2 sep 3 sep 5 run end; result ok result fail N agent
    assert one.token_ids.tolist() == ids[:first] + solution
    assert one.weights.tolist() == [0.25] * p + [0.0] * 14 + [1.0] * 9 + [0.0] * 5 + [1.0] * 2
    third = rollout.segments[0].spans[6].stop
    assert two.token_ids.tolist() == ids[:third] + solution
    assert two.weights.tolist()[p:third] == [0.0] * (third - p)
    assert len(after_own_tries(task, template, rollout, ExpertConfig(), 1)) == 1
    solved, *_ = play(fakes, [FIX_AND_RUN, "<|finish|><|end|>"], task=task)
    assert after_own_tries(task, template, solved, ExpertConfig(), 2) == []


def test_stats_split_the_tokens_by_kind(fakes):
    rollout, *_ = play(fakes, ["hm" + FIX_AND_RUN, "bye<|end|>"])
    stats = rollout.stats
    assert (stats.num_turns, stats.num_tool_calls, stats.num_summaries) == (2, 2, 0)
    assert (stats.thinking_tokens, stats.tool_call_tokens, stats.tool_output_tokens) == (2, 9, 5)
    assert (stats.final_message_tokens, stats.sampled_tokens) == (4, 15)
    assert rollout.status is RolloutStatus.FINISHED


def test_messages_tell_the_story(fakes):
    rollout, *_ = play(fakes, ["hm" + FIX_AND_RUN, "bye<|end|>"])
    assert [message.role for message in rollout.messages] == [Role.USER, Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
    assert [message.content for message in rollout.messages] == ["x from 3 on", "hm", "", "bye"]
    assert [call.name for call in rollout.messages[1].tool_calls] == ["edit", "run"]
    assert [result.content for result in rollout.messages[2].tool_results] == ["ok", "pass"]


def test_requests_carry_limits_sessions_and_seeds(fakes):
    rollout, sampler, *_ = play(fakes, [WRONG_AND_RUN, FIX_AND_RUN, "<|end|>"], max_tokens_per_turn=20)
    contexts, params, sessions, groups, seeds = zip(*sampler.requests, strict=True)
    assert {(p.max_tokens, p.temperature, p.stop_ids) for p in params} == {(20, 0.7, (10,))}
    assert set(sessions) == {"s"}
    assert set(groups) == {"g"}
    assert list(seeds) == [generation_seed(5, 0, i) for i in range(3)]
    assert len(set(seeds)) == 3
    assert generation_seed(5, 0, 1) == generation_seed(5, 0, 1) < 2**62
    assert len({generation_seed(a, b, c) for a in range(12) for b in range(12) for c in range(12)}) == 12**3
    assert sampler.released == ["s"]
    assert rollout.attempts == (False, True)
    # every context the sampler saw is the beginning of what is trained
    ids = rollout.segments[0].token_ids.tolist()
    assert all(list(context) == ids[: len(context)] for context in contexts)


def test_turns_are_limited_and_the_result_is_still_graded(fakes):
    rollout, *_ = play(fakes, [WRONG_AND_RUN, FIX_AND_RUN], max_turns=2)
    assert (rollout.status, rollout.passed) == (RolloutStatus.MAX_TURNS, True)
    assert rollout.stats.num_turns == 2
    assert rollout.segments[0].spans[-1].kind is SpanKind.ACTION  # answers nobody reads are not appended
    assert rollout.attempts == (False, True)


def test_no_pod_without_a_tool_that_needs_one(fakes):
    rollout, _, backend, _ = play(fakes, ["done<|end|>"])
    assert (rollout.passed, rollout.passed_frac) == (False, 0.75)
    assert backend.num_created == 1  # the grader's
    rollout, _, backend, _ = play(fakes, [FIX_AND_RUN, "<|end|>"])
    assert backend.num_created == backend.num_destroyed == 2


def test_calls_after_finish_are_not_made(fakes):
    rollout, *_ = play(fakes, ["<|finish|><|run|><|end|>"])
    assert rollout.attempts == ()
    assert rollout.stats.num_tool_calls == 1


def test_shared_runs_use_the_graders_store(fakes):
    backend = fakes.MemoryBackend()
    grader = PodGrader(backend)
    for _ in range(3):
        turns = [WRONG_AND_RUN, FIX_AND_RUN, "<|finish|><|end|>"]
        rollout, *_ = play(fakes, turns, backend=backend, grader=grader, share_runs=True)
        assert (rollout.attempts, rollout.passed) == ((False, True), True)
    assert backend.num_created == 2


def test_too_many_calls_are_told(fakes):
    rollout, *_ = play(fakes, ["<|run|>" * 6 + "<|end|>", "<|end|>"])
    assert len(rollout.attempts) == 4
    assert rollout.messages[2].tool_results[-1].content == "error: 2 more calls not made; a turn may hold 4"
    assert rollout.events == {"too_many_calls": 1}


def test_long_answers_are_cut_before_the_model_sees_them(fakes):
    task = fakes.make_task(files={"solution.py": fakes.SOURCE, "long.py": "é = 1\n" * 5000})
    rollout, *_ = play(fakes, ["<|read|>long.py<|run|><|run|><|end|>", "<|end|>"], task=task)
    (result,) = [span for span in rollout.segments[0].spans if span.kind is SpanKind.RESULT]
    assert 32 < result.stop - result.start <= 64
    assert rollout.events == {"result_cut": 1}
    tokenizer = fakes.ByteTokenizer()
    text = tokenizer.decode(rollout.segments[0].token_ids[result.start : result.stop].tolist())
    assert text.startswith("<|result|>long.py\n1 é = 1\n")
    assert text.endswith("…<|result|><|fail|>3<|result|><|fail|>3<|agent|>")


def chain_limits(prompt_tokens):
    """Room for one turn and its answers in each window, hand counted: 16 + 1 + 51 + 1 + 8 must stay free."""
    return {
        "max_tokens_per_turn": 16,
        "max_result_tokens": 51,
        "max_summary_tokens": 8,
        "max_summaries": 2,
        "context_budget": prompt_tokens + 10 + 77,
    }


def test_chain_of_three_windows(fakes):
    tokenizer = fakes.ByteTokenizer()
    prompt = TinyTemplate(tokenizer).render_prompt(fakes.make_task())
    p = len(prompt)
    turns = [WRONG_AND_RUN, "3>5 3<|end|>", WRONG_AND_RUN, "again<|end|>", FIX_AND_RUN]
    rollout, sampler, *_ = play(fakes, turns, max_turns=3, **chain_limits(p))
    assert (rollout.status, rollout.passed) == (RolloutStatus.MAX_TURNS, True)
    a, b, c = rollout.segments
    # turn 8 tokens; answers 6: result ok result fail 2 agent; request 1; summaries 6: "3>5 3" end, "again" end
    assert a.sampled.tolist() == [False] * p + [True] * 8 + [False] * 7 + [True] * 6
    assert b.sampled.tolist() == [False] * (p + 7) + [True] * 8 + [False] * 7 + [True] * 6
    assert c.sampled.tolist() == [False] * (p + 7) + [True] * 9
    assert [kind for kind, *_ in spans(a)] == ["prompt", "action", "result", "prompt", "summary"]
    assert b.token_ids.tolist()[: p + 7] == prompt[:-1] + tokenizer.ids("<|summary|>3>5 3<|end|><|agent|>")
    assert c.token_ids.tolist()[: p + 7] == prompt[:-1] + tokenizer.ids("<|summary|>again<|end|><|agent|>")
    assert {request[2] for request in sampler.requests} == {"s"}
    assert len({request[4] for request in sampler.requests}) == 5
    assert sampler.released == ["s"]
    assert rollout.stats.num_summaries == 2
    assert rollout.stats.sampled_tokens == 8 + 6 + 8 + 6 + 9 == sum(s.sampled.sum() for s in rollout.segments)
    assert all(len(s.token_ids) <= chain_limits(p)["context_budget"] for s in rollout.segments)
    assert rollout.messages[3].content == "3>5 3"


def test_summaries_are_capped(fakes):
    tokenizer = fakes.ByteTokenizer()
    p = len(TinyTemplate(tokenizer).render_prompt(fakes.make_task()))
    turns = [WRONG_AND_RUN, "a<|end|>", WRONG_AND_RUN, WRONG_AND_RUN]  # the last window keeps no room for a summary
    limits = chain_limits(p) | {"max_summaries": 1}
    rollout, *_ = play(fakes, turns, max_turns=9, **limits)
    assert rollout.status is RolloutStatus.CONTEXT_FULL
    assert len(rollout.segments) == 2
    assert rollout.segments[1].spans[-1].kind is SpanKind.RESULT
    assert rollout.segments[1].routes[-6:].tolist() == [[[-1, -1]] * 2] * 6  # tokens after the last generation
    assert rollout.stats.num_turns == 3
    assert rollout.passed_frac == 0.5  # still graded


def test_summary_without_end_is_used_and_counted(fakes):
    tokenizer = fakes.ByteTokenizer()
    p = len(TinyTemplate(tokenizer).render_prompt(fakes.make_task()))
    rollout, *_ = play(fakes, [WRONG_AND_RUN, "0123456789", "<|end|>"], **chain_limits(p))
    first, second = rollout.segments
    assert rollout.events == {"malformed_summary": 1}
    assert tokenizer.decode(first.token_ids[first.sampled][8:].tolist()) == "01234567"
    assert tokenizer.decode(second.token_ids[p - 1 : -1].tolist()) == "<|summary|>01234567<|end|><|agent|>"


def test_a_harness_that_cuts_drops_the_oldest_turns(fakes):
    """Turn and answers are 8 + 6 tokens; 16 + 1 + 51 must stay free, which leaves 19 for old turns: one of them."""
    tokenizer = fakes.ByteTokenizer()
    prompt = TinyTemplate(tokenizer).render_prompt(fakes.make_task())
    p = len(prompt)
    turns = [f"<|edit|>2<|sep|>3<|sep|>{digit}<|run|><|end|>" for digit in (5, 6, 7)] + [FIX_AND_RUN]
    limits = chain_limits(p) | {"on_full": "truncate", "context_budget": p + 19 + 68, "max_turns": 4}
    rollout, sampler, *_ = play(fakes, turns, **limits)
    assert (rollout.status, rollout.passed) == (RolloutStatus.MAX_TURNS, True)
    assert rollout.events == {"context_cut": 2}
    assert rollout.stats.num_summaries == 0
    scripted = [tokenizer.ids(turn) for turn in turns]
    answers = tokenizer.ids("<|result|><|ok|><|result|><|fail|>2<|agent|>")
    a, b, c = (segment.token_ids.tolist() for segment in rollout.segments)
    assert a == prompt + scripted[0] + answers + scripted[1] + answers
    assert b == prompt + scripted[1] + answers + scripted[2] + answers
    assert c == prompt + scripted[2] + answers + scripted[3]
    assert [kind for kind, *_ in spans(rollout.segments[1])] == ["prompt", "action", "result"]
    # every sampled token is trained once: where it was sampled, not where an old turn is shown again
    assert [i for s in rollout.segments for i in s.token_ids[s.sampled].tolist()] == [
        i for ids in scripted for i in ids
    ]
    assert {request[2] for request in sampler.requests} == {"s"}
    assert sampler.released == ["s"]


def test_a_turn_that_does_not_fit_is_dropped_whole(fakes):
    tokenizer = fakes.ByteTokenizer()
    prompt = TinyTemplate(tokenizer).render_prompt(fakes.make_task())
    p = len(prompt)
    limits = chain_limits(p) | {"on_full": "truncate", "context_budget": p + 13 + 68}
    rollout, *_ = play(fakes, [WRONG_AND_RUN, "<|end|>"], **limits)
    assert rollout.segments[1].token_ids.tolist() == [*prompt, tokenizer.special_id("end")]
    # and a prompt that leaves no room ends the episode: a cut would not make it shorter
    rollout, sampler, *_ = play(fakes, [], **(limits | {"context_budget": p - 1 + 68}))
    assert (rollout.status, rollout.events, sampler.requests) == (RolloutStatus.CONTEXT_FULL, {}, [])


def test_prompt_that_leaves_no_room(fakes):
    limits = {"max_tokens_per_turn": 16, "max_result_tokens": 51, "max_summary_tokens": 8, "context_budget": 100}
    rollout, sampler, *_ = play(fakes, [], **limits)
    assert (rollout.status, rollout.segments, sampler.requests) == (RolloutStatus.CONTEXT_FULL, (), [])


def test_samplers_own_window_is_full(fakes):
    tokenizer = fakes.ByteTokenizer()
    p = len(TinyTemplate(tokenizer).render_prompt(fakes.make_task()))
    script = [tokenizer.ids(FIX_AND_RUN)]
    for room, length in ((0, 0), (5, 5)):
        sampler = fakes.ScriptedSampler(script, max_len=p + room)
        rollout, *_ = play(fakes, [], sampler=sampler)
        assert rollout.status is RolloutStatus.CONTEXT_FULL
        assert rollout.stats.sampled_tokens == length


@pytest.mark.parametrize("fail_from", [0, 1])
def test_pod_failure_travels_as_data(fakes, fail_from):
    """At the run (the first pod), or in the grader (the second)."""
    backend = fakes.MemoryBackend(fail_from=fail_from)
    rollout, sampler, *_ = play(fakes, [FIX_AND_RUN, "<|end|>"], backend=backend)
    assert (rollout.status, rollout.passed, rollout.error) == (
        RolloutStatus.INFRASTRUCTURE,
        False,
        "PodError: no pod today",
    )
    assert rollout.stats.num_turns == 1 + fail_from
    assert sampler.released == ["s"]
    assert backend.num_created == backend.num_destroyed


def test_sampler_failure_travels_as_data(fakes):
    tokenizer = fakes.ByteTokenizer()
    sampler = fakes.ScriptedSampler([tokenizer.ids(FIX_AND_RUN)], fail_at=1)
    rollout, _, backend, _ = play(fakes, [], sampler=sampler)
    assert (rollout.status, rollout.error) == (RolloutStatus.INFRASTRUCTURE, "PodError: sampler died")
    assert backend.num_created == backend.num_destroyed == 1
    assert len(rollout.segments) == 1


def test_bugs_are_not_hidden_as_infrastructure(fakes):
    with pytest.raises(IndexError):
        play(fakes, [])


def test_cancellation_destroys_the_pod_and_passes_through(fakes):
    tokenizer = fakes.ByteTokenizer()
    backend = fakes.MemoryBackend()

    class Hanging(fakes.ScriptedSampler):
        async def generate(self, *args, **kwargs):
            if self.requests:
                await asyncio.sleep(3600)
            return await super().generate(*args, **kwargs)

    async def go():
        sampler = Hanging([tokenizer.ids(FIX_AND_RUN)])
        script = fakes.run_script(
            fakes.make_task(), [], template=TinyTemplate(tokenizer), sampler=sampler, backend=backend
        )
        episode = asyncio.create_task(script)
        while not backend.num_runs:
            await asyncio.sleep(0.001)
        episode.cancel()
        with pytest.raises(asyncio.CancelledError):
            await episode
        return sampler

    sampler = asyncio.run(go())
    assert backend.num_created == backend.num_destroyed == 1
    assert sampler.released == ["s"]


def test_many_episodes_at_once(fakes):
    tokenizer = fakes.ByteTokenizer()
    template, backend = TinyTemplate(tokenizer), fakes.MemoryBackend()
    grader, task = PodGrader(backend), fakes.make_task()
    script = [tokenizer.ids(t) for t in (WRONG_AND_RUN, FIX_AND_RUN, "<|finish|><|end|>")]

    async def go():
        runs = (fakes.run_script(task, script, template=template, backend=backend, grader=grader) for _ in range(128))
        return await asyncio.gather(*runs)

    rollouts = [rollout for rollout, *_ in asyncio.run(go())]
    assert all(rollout.passed for rollout in rollouts)
    assert backend.num_created == backend.num_destroyed == 129


def test_the_same_harness_serves_json_calls(fakes):
    tokenizer = fakes.ByteTokenizer()
    template = JsonTemplate(tokenizer)
    turns = [
        fakes.json_line("edit", line=2, old=" >", new=" >=") + "\n" + fakes.json_line("run"),
        "Fixed.",
    ]
    script = [[*tokenizer.encode(turn), template.stop_ids[0]] for turn in turns]
    rollout, *_ = asyncio.run(fakes.run_script(fakes.make_task(), script, template=template))
    assert (rollout.status, rollout.passed, rollout.attempts) == (RolloutStatus.FINISHED, True, (True,))
    assert json.loads(turns[0].splitlines()[0])["arguments"]["old"] == " >"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_turns", 0),
        ("max_summaries", -1),
        ("on_full", "forget"),
        ("run_timeout", 0.0),
        ("max_result_tokens", 50),
        ("context_budget", 32 + 1 + 64 + 48),
    ],
)
def test_limits_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        EpisodeLimits(**{field: value})


def test_lost_connection_is_infrastructure(fakes):
    class Lost(fakes.MemoryBackend):
        async def create(self, files, limits=None):
            raise ConnectionResetError("pod server went away")

    rollout, *_ = play(fakes, [FIX_AND_RUN], backend=Lost())
    assert rollout.status is RolloutStatus.INFRASTRUCTURE
    assert rollout.error == "ConnectionResetError: pod server went away"
    assert issubclass(PodError, RuntimeError)
