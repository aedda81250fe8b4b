"""Sampled ids read in every chat format: parts tile them, calls round-trip, broken calls get a precise answer."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.chat_formats import CHAT_FORMATS, KIMI_K2, KIMI_K2_5, MINIMAX_M2, QWEN3, QWEN3_CODER
from composer2.env.chat_parse import ChatParser, PartKind, typed_value
from composer2.env.chat_render import Fixed
from composer2.env.chat_template import ChatTemplate
from composer2.env.tools.registry import TOOLS
from composer2.types import ToolCall, ToolResult

EDIT = ToolCall(name="edit", arguments={"line": 2, "old": " >", "new": " >=\n", "restart": True})
CALLS = (EDIT, ToolCall(name="run"), ToolCall(name="search", arguments={"pattern": 'é "\\\n{'}))


@pytest.fixture(params=CHAT_FORMATS)
def template(request, chat):
    return ChatTemplate(CHAT_FORMATS[request.param], chat.tokenizer())


def ids_of(chat, form, text):
    """Ids of a text in which the format's marks stand for their tokens."""
    return ChatTemplate(form, chat.tokenizer()).encode([Fixed(text)])


def parser(chat, form):
    return ChatParser(form, chat.tokenizer(), tuple(TOOLS.values()))


def same_calls(parsed, calls):
    return [(c.name, dict(c.arguments)) for c in parsed] == [(c.name, dict(c.arguments)) for c in calls]


def test_calls_round_trip_with_text(template):
    turn = template.parse_turn(template.render_calls(CALLS, text="I look."))
    assert same_calls(turn.calls, CALLS)
    assert (turn.text, turn.ended) == ("I look.", True)


@settings(max_examples=80, deadline=None)
@given(
    name=st.sampled_from(sorted(CHAT_FORMATS)),
    edits=st.lists(
        st.tuples(st.integers(1, 10**8), st.text(max_size=9), st.text('a<>/="\n', max_size=9), st.booleans()),
        min_size=1,
        max_size=3,
    ),
    text=st.sampled_from(["", "Hm.", "漢 {"]),
)
def test_any_edits_round_trip(chat, name, edits, text):
    """Any string survives that text with marks can hold: lone surrogates have no UTF-8 form and are not drawn."""
    template = ChatTemplate(CHAT_FORMATS[name], chat.tokenizer())
    calls = [
        ToolCall(name="edit", arguments={"line": line, "old": old, "new": new, "restart": restart})
        for line, old, new, restart in edits
    ]
    turn = template.parse_turn(template.render_calls(calls, text=text))
    assert same_calls(turn.calls, calls)
    assert turn.text == text


def test_ids_are_those_sampled_whatever_their_split(template, chat):
    canonical = template.render_calls(CALLS, text="I look.")
    odd = chat.split_odd(canonical)
    assert len(odd) > len(canonical)
    turn, expected = template.parse_turn(odd), template.parse_turn(canonical)
    assert turn.num_text_tokens > expected.num_text_tokens
    assert replace(turn, num_text_tokens=0) == replace(expected, num_text_tokens=0)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(CHAT_FORMATS)), starts_thinking=st.booleans())
def test_any_ids_parse_and_no_id_changes(chat, data, name, starts_thinking):
    """Marks, pieces of calls and arbitrary ids, those beyond the vocabulary included."""
    form, tokenizer = CHAT_FORMATS[name], chat.tokenizer()
    mark = st.sampled_from(form.marks).map(lambda text: [tokenizer.special_id(text)])
    fragments = (
        *(
            '{"name": "edit", "arguments": {"line": 2}}',
            '{"a":',
            "functions.edit:0",
            "<function=edit>\n",
            "</function>",
        ),
        *("<parameter=line>\n", "\n</parameter>\n", '<invoke name="edit">\n', '<parameter name="line">', "</invoke>"),
        *("</parameter>", "3", "NaN", "\n", "[" * 300, '"\\ud800"'),
    )
    piece = st.one_of(
        mark, mark, st.sampled_from(fragments).map(tokenizer.encode),
        st.lists(st.integers(0, tokenizer.vocab_size + 50), max_size=3),
    )  # fmt: skip
    ids = [token for part in data.draw(st.lists(piece, max_size=14)) for token in part]
    reader = parser(chat, form)
    before = list(ids)
    parts = reader.split(ids, starts_thinking=starts_thinking)
    assert [token for part in parts for token in ids[part.start : part.stop]] == before
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert all(part.stop > part.start for part in parts)
    turn = reader.parse(ids, starts_thinking=starts_thinking)
    assert ids == before
    assert turn.ended == (tokenizer.special_id(form.end) in ids)
    sizes = {kind: sum(p.stop - p.start for p in parts if p.kind is kind) for kind in PartKind}
    assert turn.num_text_tokens == sizes[PartKind.TEXT] + sizes[PartKind.THINK]
    if sizes[PartKind.CALLS]:
        assert turn.calls  # a block is a call or an error, never nothing
    for call in turn.calls:
        assert isinstance(call, ToolCall) or (call.is_error and call.event and call.content.startswith("error: "))


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(CHAT_FORMATS)))
def test_a_turn_cut_anywhere_makes_whole_calls_only(chat, data, name):
    template = ChatTemplate(CHAT_FORMATS[name], chat.tokenizer())
    ids = template.render_calls(CALLS, text="I look.")
    cut = data.draw(st.integers(0, len(ids) - 1))
    turn = template.parse_turn(ids[:cut])
    made = [call for call in turn.calls if isinstance(call, ToolCall)]
    assert not turn.ended
    assert same_calls(made, CALLS[: len(made)])
    assert len(turn.calls) - len(made) <= 1


HERMES = [
    ("<tool_call>\n{\"name\": \"run\", \"arguments\": {\n</tool_call><|im_end|>", "bad_json",
     "error: broken JSON at line 1 column 31: Expecting property name enclosed in double quotes"),
    ("<tool_call>[1]</tool_call><|im_end|>", "malformed_call",
     "error: a call is a list of 1, accepted is a JSON object"),
    ("<tool_call>{\"name\": 3}</tool_call><|im_end|>", "malformed_call",
     "error: a call needs a string `name` and an object `arguments`"),
    ("<tool_call>{\"name\": \"run\", \"id\": 1}</tool_call><|im_end|>", "malformed_call",
     "error: a call holds `name` and `arguments`; got 'id' too"),
    ("<tool_call>{\"name\": \"edit\", \"arguments\": {\"line\": NaN}}</tool_call><|im_end|>", "bad_json",
     "error: JSON not accepted: NaN is no JSON number"),
    ("<tool_call>{\"name\": \"run\"}<|im_end|>", "malformed_call",
     "error: a call was not closed with </tool_call>"),
    ("<tool_call>{\"name\": \"run\"}", "malformed_call", "error: a call was cut before </tool_call>"),
    ("hm </tool_call><|im_end|>", "malformed_call", None),
    ("<think>\n<tool_call>{\"name\": \"run\"}</tool_call>\n</think>\n\nDone<|im_end|>", "malformed_call",
     "error: a call inside the reasoning is not made; it belongs after </think>"),
    ("<function=run></function><|im_end|>", "malformed_call", None),
]  # fmt: skip
CODER = [
    ("<tool_call>\n<function=edit>\n<parameter=line>\n2\n</function>\n</tool_call><|im_end|>", "malformed_call",
     "error: 'edit': argument 'line' is not closed with </parameter>"),
    ("<tool_call>\n<function=edit>\nline 2\n</function>\n</tool_call><|im_end|>", "malformed_call",
     "error: 'edit': <parameter= or </function> was expected; got 'line 2\\n</function>\\n'"),
    ("<tool_call>\n<function=run>\n</tool_call><|im_end|>", "malformed_call",
     "error: 'run': <parameter= or </function> was expected; got the end of the block"),
    ("<tool_call>{\"name\": \"run\"}</tool_call><|im_end|>", "malformed_call",
     "error: '{\"name\": \"run\"}' stands outside a call; each begins with <function="),
    ("<tool_call>\n<function=run\n</tool_call><|im_end|>", "malformed_call",
     "error: the name of a call is closed with >"),
    ("<tool_call>\n</tool_call><|im_end|>", "malformed_call", None),
    ("<tool_call>\n<function=a>\n<parameter=x>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n</function></tool_call>",
     "malformed_call", "error: 'a': argument 'x' is given twice"),
]  # fmt: skip
MINIMAX = [
    ("</think>\n<minimax:tool_call>\n<invoke name=\"run\">\n</invoke>\n[e~[", "malformed_call",
     "error: a call was not closed with </minimax:tool_call>"),
    ("hm</think><invoke name=\"run\"></invoke>[e~[", "malformed_call", None),
]  # fmt: skip
KIMI = [
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_end|><|tool_calls_section_end|><|im_end|>",
     "malformed_call", "error: a call needs <|tool_call_argument_begin|> between its id and its arguments"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>my run<|tool_call_argument_begin|>{}<|tool_call_end|>"
     "<|tool_calls_section_end|><|im_end|>", "malformed_call",
     "error: the id of a call is functions.NAME:INDEX; got 'my run'"),
    ("<|tool_calls_section_begin|>run<|tool_calls_section_end|><|im_end|>", "malformed_call",
     "error: 'run' stands between calls; each begins with <|tool_call_begin|>"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.run:7<|tool_call_argument_begin|>{\"a\":<|tool_call_end|>"
     "<|tool_calls_section_end|><|im_end|>", "bad_json", "error: broken JSON at line 1 column 6: Expecting value"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>[]<|tool_call_end|>"
     "<|tool_calls_section_end|><|im_end|>", "malformed_call",
     "error: the arguments of a call is a list of 0, accepted is a JSON object"),
    ("<|tool_calls_section_begin|><|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}", "malformed_call",
     "error: a call was cut before <|tool_calls_section_end|>"),
    ("<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}<|tool_call_end|><|im_end|>",
     "malformed_call", None),
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text", "event", "message"),
    [
        (form, *case)
        for form, cases in ((QWEN3, HERMES), (QWEN3_CODER, CODER), (MINIMAX_M2, MINIMAX), (KIMI_K2, KIMI))
        for case in cases
    ],
)
def test_broken_calls_get_a_precise_error(chat, form, text, event, message):
    errors = [
        call
        for call in ChatTemplate(form, chat.tokenizer()).parse_turn(ids_of(chat, form, text)).calls
        if isinstance(call, ToolResult)
    ]
    assert [error.event for error in errors] == [event]
    assert message is None or errors[0].content == message


def test_good_calls_beside_broken_ones_are_kept_in_order(chat):
    text = "<tool_call>\n<function=run>\n</function>\n<function=edit\n</function>\n<function=search>\n"
    text += "<parameter=pattern>\nx\n</parameter>\n</function>\n</tool_call><|im_end|>"
    calls = parser(chat, QWEN3_CODER).parse(ids_of(chat, QWEN3_CODER, text)).calls
    assert [type(call).__name__ for call in calls] == ["ToolCall", "ToolResult", "ToolCall"]
    assert calls[2].arguments == {"pattern": "x"}


def test_calls_of_a_section_that_was_cut_are_made_up_to_the_cut(chat):
    one = "<|tool_call_begin|>functions.run:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
    text = "<|tool_calls_section_begin|>" + one + "<|tool_call_begin|>functions.ed"
    turn = parser(chat, KIMI_K2).parse(ids_of(chat, KIMI_K2, text))
    assert [type(call).__name__ for call in turn.calls] == ["ToolCall", "ToolResult"]
    assert turn.calls[0].call_id == "functions.run:0"


def test_a_value_may_hold_the_tags_of_its_format(chat):
    new = "a\n</parameter>\nb </function> <parameter=c>"
    text = f"<tool_call>\n<function=edit>\n<parameter=new>\n{new}\n</parameter>\n</function>\n</tool_call><|im_end|>"
    (call,) = parser(chat, QWEN3_CODER).parse(ids_of(chat, QWEN3_CODER, text)).calls
    assert call == ToolCall(name="edit", arguments={"new": new})


@pytest.mark.parametrize("form", [QWEN3_CODER, MINIMAX_M2])
def test_calls_a_format_has_no_place_for_are_refused(chat, form):
    template = ChatTemplate(form, chat.tokenizer())
    for call in (
        ToolCall(name="edit", arguments={"line": "2"}),  # would read back as a number
        ToolCall(name="search", arguments={"pattern": 3}),  # would read back as text
        ToolCall(name="a\nb"),
    ):
        with pytest.raises(ValueError, match=f"(?s)call 1 is .* accepted in format {form.name} is one that reads back"):
            template.render_calls([ToolCall(name="run"), call])


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("12", "integer", 12),
        (" -3\n", "integer", -3),
        ("1.5", "integer", "1.5"),
        ("٣", "integer", "٣"),
        ("9" * 5000, "integer", "9" * 5000),
        ("1.5", "number", 1.5),
        ("2", "number", 2),
        ("1e999", "number", "1e999"),
        ("nan", "number", "nan"),
        ("True", "boolean", True),
        ("false", "boolean", False),
        ("yes", "boolean", "yes"),
        ("[1]", "array", [1]),
        ("{}", "array", "{}"),
        ('{"a": null}', "object", {"a": None}),
        ("[", "object", "["),
        ("12", "string", "12"),
    ],
)
def test_tagged_values_become_what_the_schema_says(text, kind, value):
    found = typed_value(text, kind)
    assert (found, type(found)) == (value, type(value))


def test_reasoning_is_told_from_text_and_counted_outside_the_calls(chat):
    text = '<think>\nLook.\n</think>\n\nI read.\n<tool_call>\n{"name": "run"}\n</tool_call><|im_end|>'
    ids = ids_of(chat, QWEN3, text)
    turn = parser(chat, QWEN3).parse(ids)
    assert (turn.reasoning, turn.text) == ("Look.", "I read.")
    open_at, close_at = (ids.index(chat.tokenizer().special_id(mark)) for mark in ("<tool_call>", "</tool_call>"))
    assert turn.num_text_tokens == len(ids) - 1 - (close_at + 1 - open_at)


def test_reasoning_that_the_prompt_opened_needs_no_opening(chat):
    for form, text in ((MINIMAX_M2, "Look.\n</think>\n\nDone[e~["), (KIMI_K2_5, "Look.</think>Done<|im_end|>")):
        template = ChatTemplate(form, chat.tokenizer())
        turn = template.parse_turn(ids_of(chat, form, text))
        assert (turn.reasoning, turn.text, turn.calls) == ("Look.", "Done", ())
        assert parser(chat, form).parse(ids_of(chat, form, text)).reasoning == "Look."  # even where nobody said so


def test_interleaved_reasoning_in_one_turn(chat):
    text = "a</think>b<think>c</think>d[e~["
    turn = ChatTemplate(MINIMAX_M2, chat.tokenizer()).parse_turn(ids_of(chat, MINIMAX_M2, text))
    assert (turn.reasoning, turn.text) == ("a c", "b d")


def test_a_closing_mark_after_a_call_does_not_make_the_call_reasoning(chat):
    text = '<tool_call>\n{"name": "run"}\n</tool_call>Done.</think><|im_end|>'
    turn = parser(chat, QWEN3).parse(ids_of(chat, QWEN3, text))
    assert turn.calls[0] == ToolCall(name="run")
    assert turn.calls[1].content.startswith("error: </think> has no place here")
    assert (turn.reasoning, turn.text) == ("", "Done.")


def test_a_tokenizer_without_the_marks_is_refused(fakes):
    with pytest.raises(ValueError):
        ChatTemplate(QWEN3, fakes.ByteTokenizer())
