"""Presets: they construct, survive JSON, and `small` trains two steps of every stage at reduced width."""

from dataclasses import replace

import pytest

from composer2.config import from_json, to_json
from composer2.recipes import PRESETS, RunConfig, tiny


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_constructs_and_survives_json(name):
    config = PRESETS[name]()
    assert config.preset == name
    assert from_json(RunConfig, to_json(config)) == config


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_consistent(name):
    config = PRESETS[name]()
    limits = config.episode
    assert limits.context_budget <= config.engine.max_len
    assert config.engine.max_len <= max(config.model.max_position_embeddings, config.cpt.phase2_seq_len)
    assert config.cpt.phase1_seq_len <= config.model.max_position_embeddings
    assert config.engine.num_slots >= config.rl.group_size
    assert {spec.name for spec in config.eval.sets} >= {"test", "ood"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: replace(c, device="tpu"), r"RunConfig.device is 'tpu', accepted is 'cpu' or 'cuda'"),
        (lambda c: replace(c, engine=replace(c.engine, max_len=100)), r"RunConfig.engine.max_len is 100, accepted"),
        (lambda c: replace(c, engine=replace(c.engine, num_slots=4)), r"RunConfig.engine.num_slots is 4, accepted"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(tiny())
