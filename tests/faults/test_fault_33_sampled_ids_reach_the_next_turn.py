"""Fault 33: generated text tokenised again gives other ids than those sampled."""

import asyncio

from composer2.env.template import TinyTemplate


def test_a_split_no_tokenizer_would_make_is_kept(fakes):
    tokenizer = fakes.ByteTokenizer()
    canonical = tokenizer.ids("<|edit|>3<|sep|>return<|sep|>re<|run|><|end|>")
    merged, r, e = tokenizer.encode("re")[0], fakes.FIRST_BYTE + ord("r"), fakes.FIRST_BYTE + ord("e")
    odd = [i for token in canonical for i in ((r, e) if token == merged else (token,))]
    assert tokenizer.decode(odd) == tokenizer.decode(canonical)
    assert len(odd) == len(canonical) + 2
    template = TinyTemplate(tokenizer)
    rollout, sampler, _ = asyncio.run(
        fakes.run_script(fakes.make_task(), [odd, tokenizer.ids("<|end|>")], template=template)
    )
    prompt = template.render_prompt(fakes.make_task())
    second_context = list(sampler.requests[1][0])
    assert second_context[: len(prompt) + len(odd)] == prompt + odd
    (segment,) = rollout.segments
    assert segment.token_ids[segment.sampled].tolist() == odd + tokenizer.ids("<|end|>")
