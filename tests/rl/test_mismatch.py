"""Trainer against sampler: the same weights agree, wrong routes and wrong weights are seen."""

from dataclasses import replace

import numpy as np
import pytest

from composer2.model.transformer import Transformer
from composer2.rl.mismatch import measure_acceptance, measure_mismatch, packed_rollouts
from composer2.rl.train import RLConfig, trained_logprobs
from composer2.types import Group

CONFIG = RLConfig(row_length=32, rows_per_batch=4)


@pytest.fixture(scope="module")
def sampled(policy):
    """(model, groups the engine sampled from it in fp32)."""
    model = policy.model()
    sampler = policy.engine(model)
    return model, [policy.group(sampler, f"t{seed}", 4, seed=seed, num_tokens=8) for seed in range(3)]


def with_routes(groups, change):
    return [
        Group(
            task=group.task,
            rollouts=tuple(
                replace(r, segments=tuple(replace(s, routes=change(s.routes)) for s in r.segments))
                for r in group.rollouts
            ),
        )
        for group in groups
    ]


def test_equal_weights_agree_in_fp32(sampled):
    figures = measure_mismatch(*sampled, CONFIG)
    assert figures["mismatch_tokens"] == 3 * 4 * 8
    for name in ("off", "on", "filter"):
        assert figures[f"mismatch_max_replay_{name}"] < 1e-4
    assert figures["differing_expert_frac"] == 0
    assert figures["replaced_expert_frac_filter"] == 0


def test_wrong_routes_raise_the_mismatch_of_replay_alone(sampled):
    model, groups = sampled
    wrong = with_routes(groups, lambda routes: np.where(routes < 0, routes, 3 - routes).astype(np.int16))
    right, figures = measure_mismatch(model, groups, CONFIG), measure_mismatch(model, wrong, CONFIG)
    assert figures["mismatch_mean_replay_off"] == right["mismatch_mean_replay_off"]
    assert figures["mismatch_mean_replay_on"] > 100 * right["mismatch_mean_replay_on"]
    assert figures["differing_expert_frac"] > 0


def test_the_filter_drops_implausible_experts(sampled):
    model, groups = sampled
    wrong = with_routes(groups, lambda routes: np.where(routes < 0, routes, 3 - routes).astype(np.int16))
    figures = measure_mismatch(model, wrong, replace(CONFIG, replay_tau=0.99))
    assert figures["replaced_expert_frac_filter"] > 0
    assert figures["mismatch_mean_replay_filter"] < figures["mismatch_mean_replay_on"]
    dropped = recorded = 0
    for batch in packed_rollouts(wrong, CONFIG):
        used = trained_logprobs(model, batch, replace(CONFIG, replay_tau=0.99))[2].expert_ids_BTLK.long()
        given = batch.routes >= 0
        dropped += int((given & (batch.routes[..., None] != used[..., None, :]).all(-1)).sum())
        recorded += int(given.sum())
    assert figures["replaced_expert_frac_filter"] == pytest.approx(dropped / recorded)


def test_all_three_settings_are_measured_in_a_run_without_replay(sampled):
    model, groups = sampled
    wrong = with_routes(groups, lambda routes: np.where(routes < 0, routes, 3 - routes).astype(np.int16))
    config = replace(CONFIG, replay_tau=0.99)
    without = measure_mismatch(model, wrong, replace(config, replay=False))
    assert without["replaced_expert_frac_filter"] > 0
    assert without == measure_mismatch(model, wrong, config)


def test_other_weights_are_seen(policy, sampled):
    _, groups = sampled
    assert measure_mismatch(policy.model(1), groups, CONFIG)["mismatch_p50_replay_off"] > 1e-2


def test_every_sampled_segment_is_measured_once(policy, sampled):
    model, groups = sampled
    lost = policy.group(policy.engine(model), "lost", 2, lost=(0,))
    batches = packed_rollouts([*groups, lost], CONFIG)
    assert sum(int(batch.loss_mask.sum()) for batch in batches) == 3 * 4 * 8 + 5


def test_acceptance_is_a_share(sampled):
    model, groups = sampled
    assert 0 < measure_acceptance(model, groups, CONFIG) < 1
    assert measure_acceptance(model, groups, replace(CONFIG, row_length=20)) == pytest.approx(
        measure_acceptance(model, groups, CONFIG), abs=1e-6
    )
    without = Transformer(replace(model.config, num_nextn_predict_layers=0))
    with pytest.raises(ValueError, match="num_nextn_predict_layers is 0, accepted is a model with an MTP module"):
        measure_acceptance(without, groups, CONFIG)
