"""Fault 18: the mismatch of trainer and sampler grows though the learning rate is 0."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer2.rl.reward import RewardComponent, RewardConfig
from composer2.rl.system.weight_sync import FolderSink, read_weights
from composer2.rl.train import RLConfig, make_optimizer, score_groups, train_step

NUM_STEPS = 50
CONFIG = RLConfig(
    prompts_per_step=1,
    group_size=4,
    row_length=48,
    lr=1e-30,  # changes no float32 weight
    reward=RewardConfig(components=(RewardComponent(name="correctness", weight=1.0),)),
)


def mismatches(policy, folder, config, drift=0.0):
    """Largest |difference| of log-probs at every step that had something to train; weights are pushed after each."""
    model, sink = policy.model(), FolderSink(folder)
    sampler, optimizer, found = policy.engine(policy.model()), make_optimizer(model, config), []
    generator = torch.Generator().manual_seed(0)
    for step in range(NUM_STEPS):
        group = policy.group(sampler, f"task{step}", 4, seed=step % 5)
        rollouts = tuple(replace(r, passed=index % 2 == 0) for index, r in enumerate(group.rollouts))
        (scored,) = score_groups([replace(group, rollouts=rollouts)], config, step, 0)
        found.append(train_step(model, optimizer, [scored], config, step=step)["mismatch_max"])
        state = read_weights(sink.publish(step + 1, model.state_dict()))
        for name, tensor in state.items():  # what a push that rounds would do to the sampler's copy
            if drift and tensor.is_floating_point():
                state[name] = tensor + drift * (step + 1) * torch.randn(tensor.shape, generator=generator)
        sampler.load_weights(state, step + 1)
    return np.array(found)


def slope(values):
    """Growth over the whole run of a straight line through the values."""
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) * len(values)


@pytest.mark.parametrize("replay", [True, False])
def test_fifty_pushes_at_learning_rate_zero_leave_no_trend(policy, tmp_path, replay):
    found = mismatches(policy, tmp_path, replace(CONFIG, replay=replay))
    assert len(found) == NUM_STEPS
    assert found.max() < 1e-4
    assert abs(slope(found)) < 1e-5


def test_the_measure_sees_a_drift(policy, tmp_path):
    assert slope(mismatches(policy, tmp_path, CONFIG, drift=1e-4)) > 1e-3
