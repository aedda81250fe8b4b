"""Fault 38: the parser waits for another call format, so no tool ever runs and nobody notices."""

import asyncio

import pytest

from composer2.env.json_template import JsonTemplate
from composer2.env.template import TinyTemplate
from composer2.types import RolloutStatus

JSON_CALL = '{"name": "run", "arguments": {}}'
XML_CALL = '<invoke name="run"></invoke>'
WRAPPED_CALL = f"<tool_call>\n{JSON_CALL}\n</tool_call>"


def play(fakes, template_type, text):
    tokenizer = fakes.ByteTokenizer()
    template = template_type(tokenizer)
    end = template.stop_ids[0]
    script = [[*tokenizer.encode(text), end], [*tokenizer.encode("bye"), end]]
    rollout, _, _ = asyncio.run(fakes.run_script(fakes.make_task(), script, template=template, max_result_tokens=200))
    return rollout


@pytest.mark.parametrize("text", [JSON_CALL, WRAPPED_CALL])
def test_the_templates_own_format_is_parsed(fakes, text):
    rollout = play(fakes, JsonTemplate, text)
    assert rollout.stats.num_tool_calls == len(rollout.attempts) == 1
    assert rollout.events == {}


@pytest.mark.parametrize(
    ("template_type", "text"), [(TinyTemplate, JSON_CALL), (TinyTemplate, XML_CALL), (JsonTemplate, XML_CALL)]
)
def test_another_format_is_flagged_and_answered(fakes, template_type, text):
    rollout = play(fakes, template_type, text)
    assert rollout.events == {"malformed_call": 1}
    assert rollout.stats.num_tool_calls == 0  # what a report must watch: calls per rollout
    assert rollout.messages[2].tool_results[0].content.startswith("error: a call ")
    assert (rollout.stats.num_turns, rollout.status) == (2, RolloutStatus.FINISHED)
