"""Fault 44: an observation is shortened after the action, so training scores the action on a context never sampled."""

import asyncio

import numpy as np

from composer2.env.template import TinyTemplate


def test_every_action_is_trained_on_the_context_it_was_sampled_on(fakes):
    tokenizer = fakes.ByteTokenizer()
    template = TinyTemplate(tokenizer)
    task = fakes.make_task(files={"solution.py": fakes.SOURCE, "long.py": "value = 1\n" * 300})
    budget = len(template.render_prompt(task)) + 30 + 40 + 1 + 64 + 1 + 8
    turns = [
        "<|read|>long.py<|end|>",
        "long<|end|>",
        "<|search|>value<|end|>",
        "hits<|end|>",
        "<|run|><|end|>",
        "<|end|>",
    ]
    rollout, sampler, _ = asyncio.run(
        fakes.run_script(
            task,
            [tokenizer.ids(turn) for turn in turns],
            template=template,
            max_tokens_per_turn=40,
            max_result_tokens=64,
            max_summary_tokens=8,
            context_budget=budget,
        )
    )
    assert rollout.events["result_cut"] == 2
    assert len(rollout.segments) == 3
    for number, (context, *_) in enumerate(sampler.requests):
        segment = rollout.segments[number // 2]  # two generations a window: an action, then a summary or the last word
        assert segment.token_ids[: len(context)].tolist() == list(context)
        # the scripted sampler's log-probs name the generation: those of this one start where its context stopped
        np.testing.assert_allclose(segment.logprobs[len(context)], -(number + 1))
