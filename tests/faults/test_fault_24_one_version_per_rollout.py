"""Fault 24: with in-flight updates switched off, the tails of some rollouts were still sampled with newer weights."""

import asyncio

import numpy as np
import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.service import AsyncSampler
from composer2.model.transformer import Transformer, init_weights
from composer2.types import SamplingParams

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, moe_intermediate_size=16,
    max_position_embeddings=128, num_nextn_predict_layers=0,
)  # fmt: skip


def make_model(seed: int) -> Transformer:
    model = Transformer(CONFIG)
    init_weights(model, seed)
    return model


async def rollout(sampler: AsyncSampler, number: int, versions: dict[int, set[int]]) -> None:
    await asyncio.sleep(0.003 * number)
    async with sampler.episode():
        token_ids = [number + 1] * 5
        for _ in range(3):
            generation = await sampler.generate(
                token_ids, SamplingParams(max_tokens=6), session=str(number), group="g", seed=number
            )
            versions.setdefault(number, set()).update(generation.policy_versions.tolist())
            token_ids = [*token_ids, *generation.token_ids.tolist(), 7]
            await asyncio.sleep(0.002)
        sampler.release(str(number))


async def run(in_flight: bool) -> dict[int, set[int]]:
    versions: dict[int, set[int]] = {}
    async with AsyncSampler(Engine(make_model(0), num_slots=8, max_len=128, dtype=torch.float32)) as sampler:
        rollouts = asyncio.gather(*(rollout(sampler, number, versions) for number in range(12)))
        for version in (1, 2):
            await asyncio.sleep(0.012)
            await sampler.load_weights(make_model(version).state_dict(), version, in_flight=in_flight)
        await asyncio.wait_for(rollouts, 30)
        assert sampler.engine.policy_version == 2
    return versions


def test_without_in_flight_updates_every_rollout_has_one_version() -> None:
    versions = asyncio.run(run(in_flight=False))
    assert len(versions) == 12
    assert all(len(seen) == 1 for seen in versions.values())
    assert len(set().union(*versions.values())) >= 2


def test_with_in_flight_updates_some_rollouts_have_more() -> None:
    versions = asyncio.run(run(in_flight=True))
    assert len(versions) == 12
    assert any(len(seen) > 1 for seen in versions.values())
    assert all(np.isin(list(seen), (0, 1, 2)).all() for seen in versions.values())
