"""Schedules against hand values, AdamW groups, clipping."""

import pytest
import torch
from torch import nn

from composer2.model.pretrain.optim import OptimConfig, clip_gradients, make_optimizer


def test_warm_up_then_linear():
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule="linear", schedule_steps=14, stop_step=9)
    assert [config.lr_at(step) for step in (0, 1, 3, 4, 9, 14, 99)] == pytest.approx(
        [0.25, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    )
    assert config.num_steps == 9


def test_cosine_reaches_its_floor():
    config = OptimConfig(lr=2.0, warmup_steps=0, schedule="cosine", schedule_steps=10, min_lr_frac=0.1)
    # half way: 2 * (0.1 + 0.9 / 2)
    assert [config.lr_at(step) for step in (0, 5, 10)] == pytest.approx([2.0, 1.1, 0.2])
    assert config.num_steps == 10


def test_wsd_is_flat_then_decays():
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule="wsd", schedule_steps=20, decay_frac=0.25, min_lr_frac=0.2)
    # the last 5 steps fall from 1 to 0.2: at step 18 two fifths are left
    assert [config.lr_at(step) for step in (2, 15, 18, 20)] == pytest.approx([1.0, 1.0, 0.2 + 0.8 * 0.4, 0.2])


def test_constant():
    config = OptimConfig(lr=0.5, warmup_steps=1, schedule="constant", schedule_steps=3)
    assert [config.lr_at(step) for step in (0, 1, 50)] == [0.5, 0.5, 0.5]


def test_a_stopped_schedule_leaves_the_recipe_value():
    config = OptimConfig(lr=3e-3, warmup_steps=20, schedule="linear", schedule_steps=1000, stop_step=600)
    assert config.lr_at(600) == pytest.approx(3e-3 * 400 / 980)


def test_vectors_are_not_decayed():
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = make_optimizer(model.named_parameters(), OptimConfig(weight_decay=0.3))
    decay = {p.shape: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay == {torch.Size([2, 3]): 0.3, torch.Size([2]): 0.0}


def test_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = make_optimizer(model.named_parameters(), OptimConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 2


def test_clipping_by_the_joint_norm():
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1, 1))
    first.grad, second.grad = torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    assert clip_gradients(optimizer, 0.0) == 5.0
    assert clip_gradients(optimizer, 2.5) == 5.0
    torch.testing.assert_close(first.grad, torch.tensor([1.5, 0.0]))
    torch.testing.assert_close(second.grad, torch.tensor([[2.0]]))
    assert clip_gradients(optimizer, 10.0) == pytest.approx(2.5, rel=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("betas", (1.0, 0.9)),
        ("schedule", "step"),
        ("schedule_steps", 0),
        ("decay_frac", 2.0),
        ("clip", -1.0),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"OptimConfig.{field}"):
        OptimConfig(**{field: value})
