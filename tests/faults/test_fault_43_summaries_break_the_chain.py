"""Fault 43: a harness that summarises cuts the trajectory to pieces, and part of the tokens gets no reward."""

import asyncio

from composer2.env.template import TinyTemplate
from composer2.types import Group, SpanKind

WRONG = "<|edit|>2<|sep|>3<|sep|>5<|run|><|end|>"
RIGHT = "<|edit|>2<|sep|> ><|sep|> >=<|run|><|end|>"


def test_three_windows_are_one_rollout_with_every_token_sampled_once(fakes):
    tokenizer = fakes.ByteTokenizer()
    template, task = TinyTemplate(tokenizer), fakes.make_task()
    budget = len(template.render_prompt(task)) + 10 + 16 + 1 + 51 + 1 + 8
    script = [tokenizer.ids(turn) for turn in (WRONG, "3>5 3<|end|>", WRONG, "12345678", RIGHT)]
    rollout, *_ = asyncio.run(
        fakes.run_script(
            task,
            script,
            template=template,
            max_turns=3,
            max_tokens_per_turn=16,
            max_result_tokens=51,
            max_summary_tokens=8,
            max_summaries=2,
            context_budget=budget,
        )
    )
    group = Group(task=task, rollouts=(rollout,))
    assert len(group.rollouts) == 1
    assert len(rollout.segments) == 3
    # the sampled tokens of all windows, in order, are what the sampler produced: nothing twice, nothing lost
    trained = [i for segment in rollout.segments for i in segment.token_ids[segment.sampled].tolist()]
    assert trained == [i for ids in script for i in ids]
    for segment in rollout.segments:
        by_span = [span.kind in (SpanKind.ACTION, SpanKind.SUMMARY) for span in segment.spans]
        lengths = [span.stop - span.start for span in segment.spans]
        assert segment.sampled.tolist() == [flag for flag, n in zip(by_span, lengths, strict=True) for _ in range(n)]
        assert (segment.policy_versions[segment.sampled] >= 0).all()
        assert (segment.policy_versions[~segment.sampled] == -1).all()
    assert rollout.events == {"malformed_summary": 1}  # the second summary never ended; it is trained all the same
    assert rollout.passed
