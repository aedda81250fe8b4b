"""Episodes of the harness in every chat format, with a scripted sampler, against `transformers`' conversations."""

import asyncio

import pytest

from composer2.env.chat_formats import CHAT_FORMATS, KIMI_K2, MINIMAX_M2, QWEN3
from composer2.env.chat_render import Fixed
from composer2.env.chat_template import ChatTemplate
from composer2.env.tools.registry import TOOLS
from composer2.inspect_run import rollout_record
from composer2.types import Message, Role, ToolCall, ToolResult


@pytest.fixture(params=CHAT_FORMATS)
def template(request, chat):
    return ChatTemplate(CHAT_FORMATS[request.param], chat.tokenizer())


def play(fakes, template, script, **limits):
    limits = {"context_budget": 50_000, "max_result_tokens": 2000, "max_tokens_per_turn": 1000} | limits
    return asyncio.run(fakes.run_script(fakes.make_task(), script, template=template, **limits))


def test_an_episode_is_the_conversation_transformers_renders(template, chat, fakes):
    """Prompt, sampled turns and results of an episode, as one conversation of the published template."""
    solve = ToolCall(name="edit", arguments={"line": 2, "old": " >", "new": " >="})
    finish = ToolCall(name="finish", arguments={"message": "x"}, call_id="functions.finish:2")
    turns = [(solve, ToolCall(name="run")), (finish,)]
    script = [template.render_calls(calls) for calls in turns]
    rollout, sampler, _ = play(fakes, template, script)
    assert rollout.passed
    assert rollout.events == {}
    assert rollout.stats.num_tool_calls == 3
    task = fakes.make_task()
    listing = "1 def f(x):\n2     if x > 3:\n3         return x\n4     return 0\n"
    messages = [
        Message(role=Role.USER, content=f"{task.instruction}\n\nsolution.py\n{listing}"),
        Message(role=Role.ASSISTANT, tool_calls=turns[0]),
        Message(role=Role.TOOL, tool_results=(ToolResult(content="ok"), ToolResult(content="pass"))),
        Message(role=Role.ASSISTANT, tool_calls=turns[1]),
    ]
    (segment,) = rollout.segments
    specs = tuple(TOOLS[name] for name in task.tools)
    if template.form is MINIMAX_M2:
        # The published template leaves empty reasoning out of a turn; the model had opened and closed it.
        messages = [messages[0]]
        expected = chat.peer_ids(template.form.name, messages, specs)
        assert list(sampler.requests[0][0]) == expected
        return
    text = chat.tokenizer().decode(chat.peer_ids(template.form.name, messages, specs, add_generation_prompt=False))
    if template.form is QWEN3:
        # Its template gives the last turn an empty reasoning that this model did not write.
        head, tail = text.rsplit("<think>\n\n</think>\n\n", 1)
        text = head + tail
    assert chat.tokenizer().decode(segment.token_ids) == text.removesuffix(template.form.after_end)


def test_sampled_ids_stay_in_the_history(template, chat, fakes):
    """Ids that no tokenizer would choose reach the next context, and the record, unchanged."""
    odd = chat.split_odd(template.render_calls([ToolCall(name="run")], text="I look."))
    rollout, sampler, _ = play(fakes, template, [odd, template.render_calls([ToolCall(name="finish")])])
    start = len(sampler.requests[0][0])
    assert list(sampler.requests[1][0][start : start + len(odd)]) == odd
    (segment,) = rollout.segments
    assert segment.token_ids[start : start + len(odd)].tolist() == odd
    assert segment.sampled[start : start + len(odd)].all()


def test_a_malformed_call_is_answered_counted_and_survived(template, chat, fakes):
    shape = template.form.calls
    bad = [*template.encode([Fixed(shape.open + "rubbish" + shape.close)]), *template.stop_ids]
    if template.form.prefill:
        bad = template.encode([Fixed("</think>")]) + bad
    rollout, sampler, _ = play(fakes, template, [bad, template.render_calls([ToolCall(name="finish")])])
    assert sum(rollout.events.values()) == 1
    assert set(rollout.events) <= {"malformed_call", "bad_json"}
    assert len(sampler.requests) == 2
    assert "error: " in chat.tokenizer().decode(sampler.requests[1][0])


def test_arguments_of_a_wrong_type_reach_the_schema_check(chat, fakes):
    for form in CHAT_FORMATS.values():
        template = ChatTemplate(form, chat.tokenizer())
        wrong = ToolCall(name="edit", arguments={"line": "two", "old": "a", "new": "b"})
        turns = [template.render_calls([wrong]), template.render_calls([ToolCall(name="finish")])]
        rollout, _, _ = play(fakes, template, turns)
        assert rollout.events == {"bad_arguments": 1}
        assert rollout.messages[2].tool_results[0].content == (
            "error: line is 'two', accepted is an integer of at least 1"
        )


def test_kimi_results_carry_the_id_the_model_gave(chat, fakes):
    template = ChatTemplate(KIMI_K2, chat.tokenizer())
    turns = [template.render_calls([ToolCall(name="run", call_id="functions.run:41")]), [*template.stop_ids]]
    _, sampler, _ = play(fakes, template, turns)
    assert "## Return of functions.run:41\nfail 3<|im_end|>" in chat.tokenizer().decode(sampler.requests[1][0])


def test_a_full_window_is_summarised_and_quoted_as_sampled(template, chat, fakes):
    tokenizer = chat.tokenizer()
    summary = chat.split_odd(template.render_summary("Line 2 was tried."))
    prompt, request = len(template.render_prompt(fakes.make_task())), len(template.render_summary_request())
    script = [template.render_calls([ToolCall(name="run")]), summary, template.render_calls([ToolCall(name="finish")])]
    rollout, sampler, _ = play(
        fakes, template, script, context_budget=prompt + 551 + request, max_tokens_per_turn=200, max_result_tokens=150,
        max_summary_tokens=200, max_summaries=1,
    )  # fmt: skip
    assert len(rollout.segments) == 2
    assert tokenizer.decode(sampler.requests[1][0]).endswith(
        "left to do." + template.form.end + template.form.after_end + template.form.assistant + template.form.prefill
    )
    second = list(sampler.requests[2][0])
    assert second[prompt : prompt + len(summary)] == summary
    assert (
        tokenizer.decode(second).count(template.form.user)
        == tokenizer.decode(second[:prompt]).count(template.form.user) + 1
    )
    assert rollout.events == {}


def test_reasoning_is_kept_apart_in_the_messages(chat, fakes):
    template = ChatTemplate(QWEN3, chat.tokenizer())
    think = template.encode([Fixed("<think>\n"), "Look.", Fixed("\n</think>\n\n")])
    finish = template.render_calls([ToolCall(name="finish")], text="Done.")
    rollout, _ = play(fakes, template, [think + finish])[:2]
    assert (rollout.messages[1].reasoning, rollout.messages[1].content) == ("Look.", "Done.")
    assert rollout.stats.thinking_tokens >= len(think)
    (record,) = [m for m in rollout_record(fakes.make_task(), rollout)["messages"] if m["role"] == "assistant"]
    assert (record["reasoning"], record["content"]) == ("Look.", "Done.")


@pytest.mark.parametrize("name", ["qwen3", "kimi-k2"])
def test_other_end_tokens_of_the_model_end_a_turn_too(name, chat, fakes):
    """A model may end with the token that ends its texts: nothing is added, cut or read into the call."""
    tokenizer, form = chat.tokenizer(), CHAT_FORMATS[name]
    other = next(i for text, i in tokenizer.special_ids.items() if text not in form.marks)
    template = ChatTemplate(form, tokenizer, eos_ids=(other, tokenizer.special_id(form.end)))
    assert template.stop_ids == (tokenizer.special_id(form.end), other)
    plain = template.render_calls([ToolCall(name="run")])
    ended = [*plain[:-1], other]
    assert template.parse_turn(ended) == template.parse_turn(plain)
    rollout, sampler, _ = play(fakes, template, [ended, template.render_calls([ToolCall(name="finish")])])
    assert rollout.events == {}
    second = list(sampler.requests[1][0])
    start = len(sampler.requests[0][0])
    assert second[start : start + len(ended)] == ended
    results = template.render_results(rollout.messages[2].tool_results)
    assert second[start + len(ended) :] == results
    task, summary = fakes.make_task(), template.render_summary("x")
    prompt, whole = template.render_prompt(task), template.render_prompt(task, summary=summary)
    assert template.render_prompt(task, summary=summary[:-1]) == whole
    with_other = template.render_prompt(task, summary=[*summary[:-1], other])
    assert with_other == [*prompt, *summary[:-1], other, *whole[len(prompt) + len(summary) :]]
