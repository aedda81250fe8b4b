"""Fault 85: a save that keeps writing the tensors of the first one, noticed only on resume."""

import torch
from safetensors.torch import load_file

from composer2.model.pretrain.optim import OptimConfig, make_optimizer
from composer2.model.pretrain.state import model_tensors, optimizer_tensors, save_state


def test_saves_at_two_steps_differ_and_each_equals_its_live_tensors(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = make_optimizer(model.named_parameters(), OptimConfig())
    live, saved = [], []
    for step in (1, 2):
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        path = save_state(tmp_path, step=step, model=model, optimizer=optimizer)
        tensors = {**model_tensors(model), **optimizer_tensors(model, optimizer)}
        live.append({name: tensor.clone() for name, tensor in tensors.items()})
        saved.append(path)
    for path, expected in zip(saved, live, strict=True):  # read both only after the second step
        found = {**load_file(path / "model.safetensors"), **load_file(path / "optimizer.safetensors")}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(not torch.equal(live[0][name], tensor) for name, tensor in live[1].items())
