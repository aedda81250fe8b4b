"""Fault 34: a special token vanishes from the text but not from the ids, the observation is cut at a wrong place."""

import asyncio

import pytest

from composer2.env.template import TinyTemplate
from composer2.types import SpanKind


@pytest.mark.parametrize("turn", ["<|doc|>hm<|run|><|end|>", "<|doc|><|task|><|agent|><|result|><|end|>"])
def test_observation_starts_after_the_last_sampled_token(fakes, turn):
    tokenizer = fakes.ByteTokenizer()
    template, ids = TinyTemplate(tokenizer), tokenizer.ids(turn)
    rollout, _, _ = asyncio.run(
        fakes.run_script(fakes.make_task(), [ids, tokenizer.ids("bye<|end|>")], template=template)
    )
    (segment,) = rollout.segments
    start = len(template.render_prompt(fakes.make_task()))
    action, result = segment.spans[1:3]
    assert (action.kind, action.start, action.stop) == (SpanKind.ACTION, start, start + len(ids))
    assert (result.kind, result.start) == (SpanKind.RESULT, start + len(ids))
    assert segment.token_ids[result.start] == tokenizer.special_id("result")
    assert segment.sampled.tolist() == [
        span.kind is SpanKind.ACTION for span in segment.spans for _ in range(span.start, span.stop)
    ]
    assert rollout.events == {"malformed_call": 1}
