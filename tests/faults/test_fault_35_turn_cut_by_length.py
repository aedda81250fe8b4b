"""Fault 35: after a turn without its end token, the next one has a doubled or a missing turn end."""

import asyncio
import itertools

from composer2.env.template import TinyTemplate


def play(fakes, first, max_tokens):
    tokenizer = fakes.ByteTokenizer()
    template = TinyTemplate(tokenizer)
    script = [tokenizer.ids(first), tokenizer.ids("<|run|><|end|>"), tokenizer.ids("<|finish|><|end|>")]
    rollout, sampler, _ = asyncio.run(
        fakes.run_script(fakes.make_task(), script, template=template, max_tokens_per_turn=max_tokens)
    )
    return rollout, sampler, tokenizer, len(template.render_prompt(fakes.make_task()))


def test_a_cut_turn_gets_exactly_one_end(fakes):
    rollout, sampler, tokenizer, start = play(fakes, "<|run|><|edit|>2<|sep|> ><|sep|> >=<|end|>", 5)
    (segment,) = rollout.segments
    answer = tokenizer.ids("<|result|><|fail|>3<|result|><|error|> edit was cut before ")
    answer += tokenizer.encode("<|end|>") + tokenizer.ids("<|agent|>")
    expected = [*tokenizer.ids("<|run|><|edit|>2<|sep|> >"), tokenizer.special_id("end"), *answer]
    assert segment.token_ids[start : start + len(expected)].tolist() == expected
    assert not segment.sampled[start + 5]  # the end token the model did not write is not trained
    assert rollout.events == {"cut_turn": 1, "malformed_call": 1}
    assert rollout.attempts == (False, False)  # the whole call was made, the cut one was not
    contexts = [list(request[0]) for request in sampler.requests]
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(contexts))


def test_a_whole_turn_gets_none(fakes):
    rollout, _, tokenizer, start = play(fakes, "<|run|><|end|>", 5)
    ids = rollout.segments[0].token_ids[start:].tolist()
    assert ids == tokenizer.ids(
        "<|run|><|end|><|result|><|fail|>3<|agent|><|run|><|end|><|result|><|fail|>3<|agent|><|finish|><|end|>"
    )
