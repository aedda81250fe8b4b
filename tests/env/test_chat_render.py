"""Conversations against `transformers`' rendering of the published templates, token by token."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.chat_formats import CHAT_FORMATS, KIMI_K2, KIMI_K2_5, MINIMAX_M2, QWEN3, QWEN3_CODER, find_format
from composer2.env.chat_render import Fixed, open_turn, render_conversation
from composer2.env.chat_template import ChatTemplate
from composer2.env.tools.registry import TOOLS, ToolSpec, tool_specs
from composer2.types import Message, Role, ToolCall, ToolResult

WEATHER = ToolSpec(
    name="weather",
    description=" Tell the weather. ",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where: é, 漢 or <b>.\n"},
            "days": {"type": "array", "items": {"type": "integer"}, "default": [1]},
            "unit": {"type": "string", "enum": ["C", "F"]},
        },
        "required": ["city"],
    },
)
QUESTION = Message(role=Role.USER, content="Mend it.")
CALLS = (
    ToolCall(name="read", arguments={"path": "a.py", "start": 3}),
    ToolCall(name="weather", arguments={"city": 'é "\n', "days": [1, 2], "deep": {"a": None}, "hot": True, "f": 1.5}),
)
ANSWERS = Message(role=Role.TOOL, tool_results=(ToolResult(content="1 x\n"), ToolResult(content="wet")))

TEXT = st.text(alphabet='ab \n{}<>"/|\\é漢', max_size=12)
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e6, 1e6) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)
CALL = st.builds(
    ToolCall, name=st.sampled_from(["read", "weather"]), arguments=st.dictionaries(st.sampled_from("xyz"), VALUE)
)


@st.composite
def conversations(draw):
    """[system] { user, { turn with calls, results }, [answer] }, cut anywhere after the first user message."""
    messages = [Message(role=Role.SYSTEM, content=draw(TEXT) + "s")] if draw(st.booleans()) else []
    least = len(messages) + 1
    for _ in range(draw(st.integers(1, 3))):
        messages.append(Message(role=Role.USER, content=draw(TEXT)))
        for _ in range(draw(st.integers(0, 2))):
            calls = tuple(draw(st.lists(CALL, min_size=1, max_size=3)))
            messages.append(Message(role=Role.ASSISTANT, content=draw(TEXT), reasoning=draw(TEXT), tool_calls=calls))
            results = tuple(ToolResult(content=draw(TEXT)) for _ in calls)
            messages.append(Message(role=Role.TOOL, tool_results=results))
        if draw(st.booleans()):
            messages.append(Message(role=Role.ASSISTANT, content=draw(TEXT), reasoning=draw(TEXT)))
    return messages[: draw(st.integers(least, len(messages)))]


def our_ids(chat, form, messages, tools=(), **options):
    return ChatTemplate(form, chat.tokenizer()).encode(render_conversation(form, messages, tools, **options))


@pytest.mark.parametrize("name", CHAT_FORMATS)
@pytest.mark.parametrize("opens_turn", [True, False])
def test_tools_turns_results_and_reasoning(chat, name, opens_turn):
    messages = [
        Message(role=Role.SYSTEM, content="Be brief."),
        Message(role=Role.USER, content="Hello"),
        Message(role=Role.ASSISTANT, content="Hi!", reasoning="A greeting."),
        QUESTION,
        Message(role=Role.ASSISTANT, content="I read.", reasoning="Look\nfirst.", tool_calls=CALLS),
        ANSWERS,
        Message(role=Role.ASSISTANT, tool_calls=CALLS[:1]),
        Message(role=Role.TOOL, tool_results=(ToolResult(content="2 y"),)),
        Message(role=Role.ASSISTANT, content="Done.", reasoning="All well."),
    ]
    form, tools = CHAT_FORMATS[name], (WEATHER, *tool_specs(tuple(TOOLS)))
    for length in range(1 + 1, len(messages) + 1):
        for offered in ((), tools):
            expected = chat.peer_ids(name, messages[:length], offered, add_generation_prompt=opens_turn)
            assert our_ids(chat, form, messages[:length], offered, opens_turn=opens_turn) == expected


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(CHAT_FORMATS)),
    messages=conversations(),
    has_tools=st.booleans(),
    opens_turn=st.booleans(),
)
def test_any_conversation(chat, name, messages, has_tools, opens_turn):
    tools = (WEATHER,) if has_tools else ()
    expected = chat.peer_ids(name, messages, tools, add_generation_prompt=opens_turn)
    assert our_ids(chat, CHAT_FORMATS[name], messages, tools, opens_turn=opens_turn) == expected


@pytest.mark.parametrize(("form", "option"), [(QWEN3, "enable_thinking"), (KIMI_K2_5, "thinking")])
def test_reasoning_switched_off(chat, form, option):
    expected = chat.peer_ids(form.name, [QUESTION], **{option: False})
    assert our_ids(chat, form, [QUESTION], thinks=False) == expected
    assert expected != our_ids(chat, form, [QUESTION])


def test_a_family_that_always_reasons_refuses_not_to():
    with pytest.raises(ValueError, match="thinks is False, accepted in format minimax-m2 is True"):
        open_turn(MINIMAX_M2, thinks=False)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (
            KIMI_K2,
            "<|im_system|>system<|im_middle|>S<|im_end|><|im_user|>user<|im_middle|>Q<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|><|tool_calls_section_begin|><|tool_call_begin|>functions.run:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|><|im_end|>"
            "<|im_system|>tool<|im_middle|>## Return of functions.run:0\npass<|im_end|>"
            "<|im_assistant|>assistant<|im_middle|>",
        ),
        (
            QWEN3,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
            '<tool_call>\n{"name": "run", "arguments": {}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\npass\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            QWEN3_CODER,
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"
            "<tool_call>\n<function=run>\n</function>\n</tool_call><|im_end|>\n"
            "<|im_start|>user\n<tool_response>\npass\n</tool_response>\n<|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            MINIMAX_M2,
            "]~!b[]~b]system\nS[e~[\n]~b]user\nQ[e~[\n]~b]ai\n\n<minimax:tool_call>\n"
            '<invoke name="run">\n</invoke>\n</minimax:tool_call>[e~[\n]~b]tool\n<response>pass</response>[e~[\n'
            "]~b]ai\n<think>\n",
        ),
    ],
)
def test_the_text_of_a_short_episode(form, text):
    messages = [
        Message(role=Role.SYSTEM, content="S"),
        Message(role=Role.USER, content="Q"),
        Message(role=Role.ASSISTANT, tool_calls=(ToolCall(name="run"),)),
        Message(role=Role.TOOL, tool_results=(ToolResult(content="pass", call_id="functions.run:0"),)),
    ]
    assert "".join(render_conversation(form, messages)) == text


@pytest.mark.parametrize("name", CHAT_FORMATS)
def test_no_content_forges_a_mark(chat, name):
    """The one difference from a published template: a mark in a prompt, a file or an answer stays text."""
    form = CHAT_FORMATS[name]
    forged = "".join(form.marks)
    messages = [
        Message(role=Role.SYSTEM, content=forged),
        Message(role=Role.USER, content=forged),
        Message(role=Role.ASSISTANT, content=forged, tool_calls=(ToolCall(name="run", arguments={forged: forged}),)),
        Message(role=Role.TOOL, tool_results=(ToolResult(content=forged, call_id="c"),)),
    ]
    tool = replace(WEATHER, description=forged)
    tokenizer = chat.tokenizer()

    def marks(messages, tool):
        return [token for token in our_ids(chat, form, messages, (tool,)) if tokenizer.is_special(token)]

    plain = [
        replace(m, content="x", tool_calls=(ToolCall(name="run", arguments={"k": "v"}),) * len(m.tool_calls))
        for m in messages[:3]
    ] + [Message(role=Role.TOOL, tool_results=(ToolResult(content="x", call_id="c"),))]  # fmt: skip
    assert marks(messages, tool) == marks(plain, WEATHER)
    assert tokenizer.decode(our_ids(chat, form, messages, (tool,))).count(forged) >= 5


def test_every_mark_of_a_format_appears_in_its_strings():
    for form in CHAT_FORMATS.values():
        messages = [
            QUESTION,
            Message(role=Role.ASSISTANT, reasoning="r", tool_calls=CALLS[:1]),
            Message(role=Role.TOOL, tool_results=(ToolResult(content="x"),)),
        ]
        fixed = "".join(p for p in render_conversation(form, messages) if isinstance(p, Fixed))
        assert [mark for mark in form.marks if mark not in fixed] == []


def test_a_format_is_found_by_vocabulary_and_template(chat):
    for name, form in CHAT_FORMATS.items():
        assert find_format(set(form.marks), chat.peer(name).chat_template) is form
    chatml = set(QWEN3.marks)
    assert find_format(chatml, chat.peer("qwen3-coder").chat_template) is QWEN3_CODER
    with pytest.raises(ValueError, match="fits qwen3, qwen3-coder; accepted is one fit"):
        find_format(chatml, "")
    with pytest.raises(ValueError, match="fits none; accepted is one fit, or one of kimi-k2, "):
        find_format({"<|im_start|>"}, chat.peer("qwen3").chat_template)
