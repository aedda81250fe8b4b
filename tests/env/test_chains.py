"""Chains of windows: what the budget promises whatever a model says, and what the cache keeps between windows."""

import asyncio

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from composer2.env.grade import PodGrader
from composer2.env.harness import EpisodeLimits, run_episode
from composer2.env.template import TinyTemplate
from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.service import AsyncSampler
from composer2.model.transformer import Transformer, init_weights
from composer2.types import RolloutStatus, SamplingParams, SpanKind

PIECES = (
    "<|edit|>2<|sep|>3<|sep|>5<|run|><|end|>",
    "<|read|>solution.py<|end|>",
    "<|read|>nowhere.py",
    "<|run|><|run|><|run|><|end|>",
    "a word, and one more, <|sep|> and no end to it at all",
    "well<|end|>",
)


@given(
    st.lists(st.sampled_from(PIECES), min_size=24, max_size=24),
    st.integers(1, 120),
    st.integers(0, 3),
    st.sampled_from(["summarize", "truncate"]),
)
@settings(max_examples=40, deadline=None)
def test_no_window_outgrows_the_budget_and_no_token_is_lost(fakes, turns, room, max_summaries, on_full):
    """Turns, results and summaries of any kind and size; windows of any size that a turn fits into."""
    tokenizer = fakes.ByteTokenizer()
    template, task = TinyTemplate(tokenizer), fakes.make_task()
    script = [tokenizer.ids(turn) for turn in turns]
    budget = len(template.render_prompt(task)) + 20 + 1 + 60 + 1 + 12 + room
    rollout, sampler, _ = asyncio.run(
        fakes.run_script(
            task,
            script,
            template=template,
            max_turns=12,
            max_tokens_per_turn=20,
            max_result_tokens=60,
            max_summary_tokens=12,
            max_summaries=max_summaries,
            context_budget=budget,
            on_full=on_full,
        )
    )
    assert all(len(segment.token_ids) <= budget for segment in rollout.segments)
    summaries = [span for s in rollout.segments for span in s.spans if span.kind is SpanKind.SUMMARY]
    assert len(summaries) == rollout.stats.num_summaries <= (max_summaries if on_full == "summarize" else 0)
    assert rollout.stats.num_turns <= 12
    limits = [params.max_tokens for _, params, *_ in sampler.requests]
    said = [i for ids, most in zip(script, limits, strict=False) for i in ids[:most]]
    assert [i for s in rollout.segments for i in s.token_ids[s.sampled].tolist()] == said
    assert rollout.stats.sampled_tokens == len(said)
    # what the sampler was shown is what is trained on, window by window
    for context, *_ in sampler.requests:
        assert any(tuple(s.token_ids[: len(context)].tolist()) == context for s in rollout.segments)


def test_a_chain_that_dies_keeps_its_windows_and_says_so(fakes):
    tokenizer = fakes.ByteTokenizer()
    template, task = TinyTemplate(tokenizer), fakes.make_task()
    script = [tokenizer.ids(turn) for turn in (PIECES[0], "3>5 3<|end|>", PIECES[0])]
    sampler = fakes.ScriptedSampler(script, fail_at=3)
    rollout, _, backend = asyncio.run(
        fakes.run_script(
            task,
            script,
            template=template,
            sampler=sampler,
            max_tokens_per_turn=16,
            max_result_tokens=51,
            max_summary_tokens=8,
            context_budget=len(template.render_prompt(task)) + 10 + 77,
        )
    )
    assert (rollout.status, rollout.error) == (RolloutStatus.INFRASTRUCTURE, "PodError: sampler died")
    assert [int(segment.sampled.sum()) for segment in rollout.segments] == [8 + 6, 8]
    assert sampler.released == ["s"]
    assert backend.num_created == backend.num_destroyed == 1


def test_the_next_window_does_not_compute_the_prompt_again(fakes):
    """The real engine under a policy of noise: later windows prefill only what follows the opening."""
    tokenizer = fakes.ByteTokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=24,
        moe_intermediate_size=8,
        n_routed_experts=4,
        num_attention_heads=2,
        kv_lora_rank=8,
        qk_nope_head_dim=4,
        qk_rope_head_dim=4,
        v_head_dim=4,
        max_position_embeddings=512,
    )
    model = Transformer(config)
    init_weights(model, 0)
    engine = Engine(model, num_slots=2, max_len=512, dtype=torch.float32)
    template, task, backend = TinyTemplate(tokenizer), fakes.make_task(), fakes.MemoryBackend()
    p = len(template.render_prompt(task))
    limits = EpisodeLimits(
        max_turns=6,
        max_tokens_per_turn=40,
        max_result_tokens=64,
        max_summary_tokens=8,
        max_summaries=2,
        context_budget=p + 40 + 1 + 64 + 1 + 8 + 12,
    )

    async def go(seed):
        async with AsyncSampler(engine) as sampler, sampler.episode():
            return await run_episode(
                task,
                sampler=sampler,
                backend=backend,
                grader=PodGrader(backend),
                template=template,
                limits=limits,
                sampling=SamplingParams(),
                session=f"s{seed}",
                group=f"g{seed}",
                seed=seed,
                sample_index=0,
            )

    for seed in range(20):
        before = engine.stats.prefill_tokens
        rollout = asyncio.run(go(seed))
        if rollout.stats.num_summaries == 2:
            break
    assert rollout.stats.num_summaries == 2, "no seed of 20 led to two summaries"
    # Prefill takes what was not sampled, and of each generation its last token, which decoding has not fed. The p - 1
    # tokens before <|agent|> stand in all three windows.
    unsampled = sum(int((~segment.sampled).sum()) for segment in rollout.segments)
    num_generations = rollout.stats.num_turns + 2
    assert engine.stats.prefill_tokens - before <= unsampled + num_generations - 2 * (p - 1)
