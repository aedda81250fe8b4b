"""Faults 33, 34, 35, 38 and 41 in the chat formats of published models."""

import asyncio
import itertools

import pytest

from composer2.env.chat_formats import CHAT_FORMATS, KIMI_K2, MINIMAX_M2, QWEN3, QWEN3_CODER
from composer2.env.chat_render import Fixed
from composer2.env.chat_template import ChatTemplate
from composer2.types import RolloutStatus, SpanKind, ToolCall

RUN = ToolCall(name="run")


@pytest.fixture(params=CHAT_FORMATS)
def template(request, chat):
    return ChatTemplate(CHAT_FORMATS[request.param], chat.tokenizer())


def play(fakes, template, script, **limits):
    limits = {"context_budget": 50_000, "max_result_tokens": 2000, "max_tokens_per_turn": 1000} | limits
    rollout, sampler, _ = asyncio.run(fakes.run_script(fakes.make_task(), script, template=template, **limits))
    return rollout, sampler


def test_33_two_splits_of_one_text_stay_two(template, chat, fakes):
    canonical = template.render_calls([RUN], text="I look.")
    odd = chat.split_odd(canonical)
    assert chat.tokenizer().decode(odd) == chat.tokenizer().decode(canonical)
    assert odd != canonical
    rollout, sampler = play(fakes, template, [odd, template.render_calls([ToolCall(name="finish")])])
    prompt = template.render_prompt(fakes.make_task())
    assert list(sampler.requests[1][0])[: len(prompt) + len(odd)] == prompt + odd
    assert rollout.attempts == (False,)


def test_34_a_mark_inside_a_turn_moves_no_observation(template, chat, fakes):
    """A stray beginning of a message, which text without special tokens would not show."""
    opening = chat.tokenizer().special_id(template.form.marks[0])
    turn = [opening, *template.render_calls([RUN])]
    rollout, _ = play(fakes, template, [turn, template.render_calls([ToolCall(name="finish")])])
    (segment,) = rollout.segments
    action, result = segment.spans[1:3]
    start = len(template.render_prompt(fakes.make_task()))
    assert (action.kind, action.start, action.stop) == (SpanKind.ACTION, start, start + len(turn))
    assert (result.kind, result.start) == (SpanKind.RESULT, start + len(turn))
    assert segment.sampled.tolist() == [
        span.kind is SpanKind.ACTION for span in segment.spans for _ in range(span.start, span.stop)
    ]


def test_35_a_turn_cut_by_length_gets_exactly_one_end(template, chat, fakes):
    whole = template.render_calls([RUN, RUN])
    cut = len(whole) - 3
    end = template.stop_ids[0]
    script = [whole, template.render_calls([RUN])[:cut], template.render_calls([ToolCall(name="finish")])[:cut]]
    rollout, sampler = play(fakes, template, script, max_tokens_per_turn=cut)
    contexts = [list(request[0]) for request in sampler.requests]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(contexts))
    start = len(contexts[0])
    assert contexts[1][start : start + cut] == whole[:cut]
    assert contexts[1][start + cut] == end
    between = contexts[1][start : len(contexts[1])]
    shares = template.form.results_share_message
    assert between.count(end) == 1 + (1 if shares else len(rollout.messages[2].tool_results))
    (segment,) = rollout.segments
    assert not segment.sampled[start + cut]  # the end the model did not write is not trained
    assert rollout.events["cut_turn"] >= 1


FOREIGN = {
    "hermes": '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call>',
    "tags": "<function=run>\n</function>",
    "minimax": '<minimax:tool_call>\n<invoke name="run">\n</invoke>\n</minimax:tool_call>',
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}",
    "json": '{"name": "run", "arguments": {}}',
}


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("form", [KIMI_K2, QWEN3, QWEN3_CODER, MINIMAX_M2], ids=lambda form: form.name)
def test_38_a_call_in_another_format_is_flagged_and_answered(chat, fakes, form, foreign):
    """As text: no mark of any format is a token of it. The format's own call written as text is as foreign."""
    template = ChatTemplate(form, chat.tokenizer())
    close = template.encode([Fixed(form.think.close)]) if form.prefill else []
    turns = [
        [*close, *chat.tokenizer().encode(FOREIGN[foreign]), *template.stop_ids],
        template.render_calls([ToolCall(name="finish")]),
    ]
    rollout, _ = play(fakes, template, turns)
    assert rollout.events == {"malformed_call": 1}
    assert rollout.stats.num_tool_calls == 1  # what a report must watch: calls per rollout; here only `finish`
    assert rollout.messages[2].tool_results[0].content.startswith("error: a call is written as ")


def test_41_a_history_of_malformed_calls_samples_on(template, chat, fakes):
    shape = template.form.calls
    close = template.encode([Fixed(template.form.think.close)]) if template.form.prefill else []
    bad = [
        [*close, *template.encode([Fixed(shape.open), body, Fixed(shape.close)]), *template.stop_ids]
        for body in ("{", "functions.run", "<function=run", "\n")
    ]
    rollout, sampler = play(fakes, template, bad, max_turns=4)
    assert len(sampler.requests) == 4
    assert sum(rollout.events.values()) == 4
    assert set(rollout.events) <= {"malformed_call", "bad_json"}
    assert rollout.status is RolloutStatus.MAX_TURNS
