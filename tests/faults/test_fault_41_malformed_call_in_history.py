"""Fault 41: a malformed call kept in the history makes every later turn fail."""

import asyncio

import numpy as np

from composer2.env.harness import EpisodeLimits
from composer2.env.json_template import JsonTemplate
from composer2.env.template import TinyTemplate
from composer2.types import RolloutStatus


def test_next_turns_still_sample(fakes):
    tokenizer = fakes.ByteTokenizer()
    turns = [
        "<|edit|>x<|end|>",
        "<|edit|>2<|sep|>a<|pad|><|end|>",
        "<|edit|>2<|sep|> ><|sep|> >=<|run|><|end|>",
        "<|end|>",
    ]
    rollout, sampler, _ = asyncio.run(
        fakes.run_script(fakes.make_task(), list(map(tokenizer.ids, turns)), template=TinyTemplate(tokenizer))
    )
    assert len(sampler.requests) == 4
    assert rollout.events == {"malformed_call": 2}
    assert rollout.passed


def test_any_history_samples_on(fakes):
    """Turns of random ids, calls of every broken kind among them, never stop an episode by an error."""
    tokenizer, rng = fakes.ByteTokenizer(), np.random.default_rng(0)
    first, size = fakes.FIRST_BYTE, tokenizer.vocab_size
    for template in (TinyTemplate(tokenizer), JsonTemplate(tokenizer)):
        for _ in range(60):
            num_special = rng.integers(1, 12)
            script = [
                [*rng.permutation(np.r_[rng.integers(0, first, num_special), rng.integers(first, size, 8)]), 10]
                for _ in range(4)
            ]
            rollout, _, _ = asyncio.run(fakes.run_script(fakes.make_task(), script, template=template))
            assert rollout.status in (RolloutStatus.FINISHED, RolloutStatus.MAX_TURNS)
            assert rollout.stats.num_turns <= EpisodeLimits().max_turns
            for segment in rollout.segments:
                assert segment.sampled.sum() == rollout.stats.sampled_tokens
