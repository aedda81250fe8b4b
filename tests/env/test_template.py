import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.json_template import JsonTemplate
from composer2.env.template import TinyTemplate
from composer2.types import ToolCall, ToolResult

EDIT = ToolCall(name="edit", arguments={"line": 2, "old": " >", "new": " >=", "restart": True})


@pytest.fixture
def tokenizer(fakes):
    return fakes.ByteTokenizer()


@pytest.fixture
def template(tokenizer):
    return TinyTemplate(tokenizer)


def test_prompt_has_the_written_form(template, tokenizer, fakes):
    lines = "1 def f(x):\n2     if x > 3:\n3         return x\n4     return 0\n"
    opening = f"<|task|>x from 3 on<|file|>solution.py\n{lines}"
    task = fakes.make_task()
    assert template.render_prompt(task) == tokenizer.ids(opening + "<|agent|>")
    summary = tokenizer.ids("2 > 7<|end|>")
    assert template.render_prompt(task, summary=summary) == tokenizer.ids(opening + "<|summary|>2 > 7<|end|><|agent|>")
    cut = tokenizer.ids("2 >")
    assert template.render_prompt(task, summary=cut) == tokenizer.ids(opening + "<|summary|>2 ><|end|><|agent|>")


def test_prompts_of_a_group_are_encoded_once(template, tokenizer, fakes):
    first = template.render_prompt(fakes.make_task())
    num_encoded = tokenizer.num_encoded
    second = template.render_prompt(fakes.make_task())
    assert tokenizer.num_encoded == num_encoded
    assert first == second
    assert first is not second
    other = template.render_prompt(fakes.make_task(files={"solution.py": "pass\n"}))  # same id, another text
    assert other != first


def test_cache_forgets_the_oldest(tokenizer, fakes):
    template = TinyTemplate(tokenizer, num_cached_prompts=1)
    for name in ("a", "b", "a"):
        before = tokenizer.num_encoded
        template.render_prompt(fakes.make_task(task_id=name))
        assert tokenizer.num_encoded > before


def test_calls_round_trip(template, tokenizer):
    calls = (
        EDIT,
        ToolCall(name="run"),
        ToolCall(name="read", arguments={"path": "a.py"}),
        ToolCall(name="read", arguments={"path": "a.py", "start": 3, "limit": 10}),
        ToolCall(name="search", arguments={"pattern": "x >"}),
        ToolCall(name="finish"),
        ToolCall(name="finish", arguments={"message": "done"}),
    )
    ids = template.render_calls(calls, text="hm")
    opening = tokenizer.ids("hm<|edit|>2<|sep|> ><|sep|> >=<|run|><|read|>a.py")
    assert ids[: len(opening)] == opening
    turn = template.parse_turn(ids)
    assert (turn.calls, turn.text, turn.ended, turn.num_text_tokens) == (calls, "hm", True, 2)


@pytest.mark.parametrize("arguments", [{"line": 1, "old": "a"}, {"line": 1, "old": "a", "new": "b", "path": "c"}])
def test_calls_that_cannot_be_written_are_refused(template, arguments):
    with pytest.raises(ValueError, match="edit"):
        template.render_calls([ToolCall(name="edit", arguments=arguments)])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<|edit|>2<|sep|>a<|end|>", "error: edit takes line, old, new separated by <|sep|>; got 2 parts"),
        ("<|edit|><|end|>", "error: edit takes line, old, new separated by <|sep|>; got 1 part"),
        ("<|edit|>1<|sep|>a<|ok|><|sep|>b<|end|>", "error: <|ok|> inside the arguments of edit"),
        ("<|run|>now<|end|>", "error: run takes no arguments"),
        ("<|search|>a<|sep|>b<|end|>", "error: search takes 1 part; got 2 parts"),
        ("<|read|>a<|sep|>1<|sep|>2<|sep|>3<|end|>", "error: read takes path, start, limit separated by <|sep|>; got 4 "
         "parts"),
        ("<|edit|>1<|sep|>a<|sep|>b", "error: edit was cut before <|end|>"),
        ("a<|sep|>b<|end|>", "error: <|sep|> is not a call"),
    ],
)  # fmt: skip
def test_broken_calls_get_a_precise_error(template, tokenizer, text, message):
    (result,) = template.parse_turn(tokenizer.ids(text)).calls
    assert result == ToolResult(content=message, is_error=True, event="malformed_call")


def test_good_calls_beside_a_broken_one_are_kept_in_order(template, tokenizer):
    turn = template.parse_turn(tokenizer.ids("<|run|><|edit|>1<|run|><|search|>x"))
    assert [type(call).__name__ for call in turn.calls] == ["ToolCall", "ToolResult", "ToolCall", "ToolResult"]
    assert not turn.ended


def test_line_that_is_no_number_is_left_for_the_schema(template, tokenizer):
    for text, value in (
        ("12", 12),
        (" 7", 7),
        ("x", "x"),
        ("", ""),
        ("9" * 5000, "9" * 5000),
        ("٣", "٣"),
        ("-1", "-1"),
    ):
        (call,) = template.parse_turn(tokenizer.ids(f"<|edit|>{text}<|sep|>a<|sep|>b<|end|>")).calls
        assert call.arguments["line"] == value


def test_results_have_the_written_form(template, tokenizer):
    results = (
        ToolResult(content="ok"),
        ToolResult(content="pass"),
        ToolResult(content="fail 7"),
        ToolResult(content="error: no <|end|> here", is_error=True),
        ToolResult(content="a.py\n1 ok\n"),
    )
    expected = tokenizer.ids("<|result|><|ok|><|result|><|pass|><|result|><|fail|>7<|result|><|error|>")
    # text that looks like a special token stays text
    expected += tokenizer.encode(" no <|end|> here") + tokenizer.ids("<|result|>a.py\n1 ok\n<|agent|>")
    assert template.render_results(results) == expected


def test_summary_tokens(template, tokenizer):
    assert template.render_summary_request() == tokenizer.ids("<|summarize|>")
    assert template.render_summary("2 > 7") == tokenizer.ids("2 > 7<|end|>")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids_parse(fakes, data):
    tokenizer = fakes.ByteTokenizer()
    token = st.one_of(st.integers(0, fakes.FIRST_BYTE - 1), st.integers(0, tokenizer.vocab_size - 1))
    ids = data.draw(st.lists(token, max_size=24))
    for template in (TinyTemplate(tokenizer), JsonTemplate(tokenizer)):
        turn = template.parse_turn(ids)
        assert turn.ended == (tokenizer.special_id("end") in ids)
        assert turn.num_text_tokens >= 0
        for call in turn.calls:
            assert isinstance(call, ToolCall) or (call.is_error and call.event and call.content.startswith("error: "))


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 10**8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=5))
def test_any_edit_round_trips(fakes, line, old, new, text):
    template = TinyTemplate(fakes.ByteTokenizer())
    call = ToolCall(name="edit", arguments={"line": line, "old": old, "new": new, "restart": True})
    turn = template.parse_turn(template.render_calls([call], text=text))
    assert turn.calls == (call,)
    assert turn.text == text


# -- calls as JSON text


@pytest.fixture
def json_template(tokenizer):
    return JsonTemplate(tokenizer)


def test_json_prompt_lists_the_offered_tools(json_template, tokenizer, fakes):
    text = tokenizer.decode(json_template.render_prompt(fakes.make_task(tools=("run", "finish"))))
    specs = [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]
    assert [spec["name"] for spec in specs] == ["run", "finish"]
    assert text.endswith("4     return 0\n<|agent|>")


def test_json_calls_round_trip(json_template):
    calls = (EDIT, ToolCall(name="run", arguments={}), ToolCall(name="search", arguments={"pattern": '"\n{'}))
    turn = json_template.parse_turn(json_template.render_calls(calls, text="First\nthis."))
    assert (turn.calls, turn.text) == (calls, "First\nthis.")


@pytest.mark.parametrize(
    ("text", "event", "message"),
    [
        ('{"name": "edit", "arguments": {"a":', "bad_json", "error: broken JSON at line 1 column 36: Expecting value"),
        ('hm\n {"name": run}', "bad_json", "error: broken JSON at line 2 column 11: Expecting value"),
        ('{"name": 1}', "malformed_call", "error: a call needs a string `name` and an object `arguments`"),
        ('{"name": "run", "arguments": []}', "malformed_call", None),
        ("{}", "malformed_call", None),
        ('{"name": "run", "id": 1}', "malformed_call", "error: a call holds `name` and `arguments`; got 'id' too"),
        ('{"name": "edit", "arguments": {"line": NaN}}', "bad_json", "error: JSON not accepted: NaN is no JSON number"),
        ('{"name": "edit", "arguments": {"line": ' + "9" * 5000 + "}}", "bad_json", None),
        ('{"name": "edit", "arguments": ' + '{"a":' * 100_000, "bad_json", None),
    ],
)
def test_json_errors_say_where(json_template, tokenizer, text, event, message):
    (result,) = json_template.parse_turn(tokenizer.ids(text.replace("<|", "")) + list(json_template.stop_ids)).calls
    assert result.is_error
    assert result.event == event
    assert message is None or result.content == message


def test_json_after_a_broken_line_is_still_read(json_template, tokenizer):
    turn = json_template.parse_turn(tokenizer.encode('{"name":\n{"name": "run"}\nbye') + list(json_template.stop_ids))
    assert [type(call).__name__ for call in turn.calls] == ["ToolResult", "ToolCall"]
    assert turn.text == "bye"
