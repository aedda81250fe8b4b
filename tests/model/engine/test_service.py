"""The engine on asyncio: waiting, failing, cancelling, and bit-identical lockstep runs."""

import asyncio
import random

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.service import AsyncSampler
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

CONFIG = ModelConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    max_position_embeddings=128,
    initializer_range=0.3,
    num_nextn_predict_layers=0,
)
STOP = SamplingParams(max_tokens=12, stop_ids=(0, 1, 2, 3))


def make_model(seed: int) -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return model


MODEL = make_model(0)


def make_engine(num_slots: int = 8) -> Engine:
    return Engine(MODEL, num_slots=num_slots, max_len=128, dtype=torch.float32)


async def play(sampler: AsyncSampler, number: int, delays: random.Random | None, log: dict[str, bytes]) -> None:
    """An episode of up to three turns with tool results of its own and tools of random duration."""
    session, group, prompt = f"s{number}", f"g{number // 4}", [5 + number // 4] * (10 + number // 4)
    async with sampler.episode():
        token_ids, record = prompt, b""
        for turn in range(1 + number % 3):
            generation = await sampler.generate(token_ids, STOP, session=session, group=group, seed=number)
            record += generation.token_ids.tobytes() + generation.logprobs.tobytes() + generation.routes.tobytes()
            if delays is not None:
                await asyncio.sleep(delays.random() * 0.01)
            token_ids = [*token_ids, *generation.token_ids.tolist(), 20 + turn, 30]
        sampler.release(session)
    log[session] = record


async def play_all(lockstep: bool, delays: random.Random | None, num_slots: int) -> dict[str, bytes]:
    log: dict[str, bytes] = {}
    async with AsyncSampler(make_engine(num_slots), lockstep=lockstep) as sampler:
        await asyncio.gather(*(play(sampler, number, delays, log) for number in range(12)))
        assert sampler.num_live_episodes == 0
        assert sampler.engine.cache.num_free == num_slots
    return log


@pytest.mark.parametrize("num_slots", [12, 5])
def test_lockstep_runs_are_bit_identical_whatever_the_tools_take(num_slots: int) -> None:
    logs = [asyncio.run(play_all(True, random.Random(seed), num_slots)) for seed in range(4)]
    assert len(logs[0]) == 12
    assert all(log == logs[0] for log in logs)


def test_without_lockstep_all_episodes_end() -> None:
    assert len(asyncio.run(play_all(False, random.Random(0), 5))) == 12


def test_a_failing_engine_reaches_every_waiter() -> None:
    async def main() -> None:
        calls = 0

        def fail() -> None:
            nonlocal calls
            calls += 1
            if calls == 3:
                raise OSError("weights are gone")

        async with AsyncSampler(make_engine(2), before_step=fail) as sampler:
            params = SamplingParams(max_tokens=50)
            waiters = [
                asyncio.create_task(sampler.generate([n + 1], params, session=str(n), group="g", seed=0))
                for n in range(4)
            ]
            results = await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 10)
            assert [type(result) for result in results] == [OSError] * 4
            with pytest.raises(RuntimeError, match="not running"):
                await sampler.generate([1], params, session="x", group="g", seed=0)

    asyncio.run(main())


def test_logits_that_are_not_finite_reach_the_waiter() -> None:
    async def main() -> None:
        engine = make_engine()
        state = dict(MODEL.state_dict())
        state["norm.weight"] = torch.full_like(state["norm.weight"], float("nan"))
        engine.load_weights(state, 1)
        async with AsyncSampler(engine) as sampler:
            with pytest.raises(FloatingPointError):
                await asyncio.wait_for(sampler.generate([1], STOP, session="x", group="g", seed=0), 10)

    asyncio.run(main())


def test_leaving_ends_those_who_still_wait() -> None:
    async def main() -> None:
        async with AsyncSampler(make_engine(), lockstep=True) as sampler, sampler.episode(), sampler.episode():
            waiter = asyncio.create_task(sampler.generate([1], STOP, session="x", group="g", seed=0))
            await asyncio.sleep(0.02)
            assert not waiter.done()  # the other episode does not wait yet
        with pytest.raises(RuntimeError, match="stopped"):
            await asyncio.wait_for(waiter, 10)

    asyncio.run(main())


def test_callers_mistakes_are_raised_to_the_caller_alone() -> None:
    async def main() -> None:
        async with AsyncSampler(make_engine()) as sampler:
            good = asyncio.create_task(sampler.generate([1], STOP, session="x", group="g", seed=0))
            with pytest.raises(ValueError, match=r"129 tokens.*128"):
                await sampler.generate([1] * 129, STOP, session="y", group="g", seed=0)
            twice = asyncio.create_task(sampler.generate([1], STOP, session="x", group="g", seed=0))
            with pytest.raises(ValueError, match="'x' has a request"):
                await twice
            assert (await good).token_ids.size
        with pytest.raises(RuntimeError, match="not running"):
            await sampler.generate([1], STOP, session="x", group="g", seed=0)

    asyncio.run(main())


def test_a_cancelled_waiter_frees_its_place() -> None:
    async def main() -> None:
        engine = make_engine(1)
        async with AsyncSampler(engine) as sampler:
            long = SamplingParams(max_tokens=100)
            first = asyncio.create_task(sampler.generate([1], long, session="x", group="g", seed=0))
            second = asyncio.create_task(sampler.generate([1], STOP, session="y", group="g", seed=0))
            await asyncio.sleep(0.005)
            first.cancel()
            generation = await asyncio.wait_for(second, 10)
            assert generation.finish_reason in ("stop", "length")
            assert engine.stats.generated_tokens < 100

    asyncio.run(main())


def test_episodes_that_end_by_an_error_do_not_hold_up_the_wave() -> None:
    async def main() -> None:
        async with AsyncSampler(make_engine(), lockstep=True) as sampler:

            async def broken() -> None:
                async with sampler.episode():
                    await asyncio.sleep(0.01)
                    raise KeyError("tool")

            log: dict[str, bytes] = {}
            results = await asyncio.wait_for(
                asyncio.gather(broken(), play(sampler, 5, None, log), return_exceptions=True), 10
            )
            assert isinstance(results[0], KeyError)
            assert log.keys() == {"s5"}

    asyncio.run(main())


def test_before_step_takes_weights_in_mid_generation() -> None:
    async def main() -> None:
        engine = make_engine()
        new = make_model(1).state_dict()

        def poll() -> None:
            if engine.stats.decode_steps == 5 and engine.policy_version == 0:
                engine.load_weights(new, 1)

        async with AsyncSampler(engine, before_step=poll) as sampler:
            generation = await sampler.generate([1, 2], SamplingParams(max_tokens=9), session="x", group="g", seed=0)
        assert np.array_equal(generation.policy_versions, [0] * 5 + [1] * 4)

    asyncio.run(main())
