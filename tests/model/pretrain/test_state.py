"""Atomic checkpoints."""

import errno
import resource

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from composer2.model.pretrain import state
from composer2.model.pretrain.optim import OptimConfig, make_optimizer
from composer2.model.pretrain.state import CheckpointError, list_states, load_state, load_state_from, save_state


def trained(seed: int = 0, steps: int = 2):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model.register_buffer("bias_buffer", torch.arange(3.0))
    optimizer = make_optimizer(model.named_parameters(), OptimConfig())
    for _ in range(steps):
        step(model, optimizer)
    return model, optimizer


def step(model, optimizer):
    model(torch.ones(1, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def bits(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def test_resume_continues_with_equal_bits(tmp_path):
    model, optimizer = trained()
    save_state(tmp_path, step=2, model=model, optimizer=optimizer, metadata={"evals": [[1, 0.5]]})
    step(model, optimizer)
    other, other_optimizer = trained(seed=9, steps=1)
    found = load_state(tmp_path, model=other, optimizer=other_optimizer)
    assert (found.step, found.metadata) == (2, {"evals": [[1, 0.5]]})
    step(other, other_optimizer)
    for name, tensor in bits(model).items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_the_newest_states_are_kept(tmp_path):
    model, optimizer = trained()
    assert load_state(tmp_path / "none", model=model) is None
    for number in (1, 2, 3, 3, 4):
        save_state(tmp_path, step=number, model=model, optimizer=optimizer, keep=3)
    assert [path.name for path in list_states(tmp_path)] == ["step-00000003-00", "step-00000003-01", "step-00000004-00"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [path.name for path in list_states(tmp_path)]
    save_state(tmp_path, step=4, model=model, keep=1)
    assert [path.name for path in list_states(tmp_path)] == ["step-00000004-01"]
    save_state(tmp_path, step=4, model=model, keep=1)
    assert [path.name for path in list_states(tmp_path)] == ["step-00000004-02"]


def test_a_full_disk_leaves_the_old_state_whole(tmp_path, monkeypatch):
    model, optimizer = trained()
    save_state(tmp_path, step=1, model=model, optimizer=optimizer)
    before = bits(model)
    step(model, optimizer)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "_write_text", full)
    with pytest.raises(CheckpointError, match=f"could not save step 2 in {tmp_path}.*No space left.*are whole"):
        save_state(tmp_path, step=2, model=model, optimizer=optimizer, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-00"]
    load_state(tmp_path, model=model, optimizer=optimizer)
    for name, tensor in bits(model).items():
        assert torch.equal(tensor, before[name])


def test_leftovers_of_killed_saves_are_ignored_and_removed(tmp_path):
    model, _ = trained()
    (tmp_path / ".saving-abc").mkdir()
    (tmp_path / ".saving-abc" / "model.safetensors").write_bytes(b"half")
    assert load_state(tmp_path, model=model) is None
    save_state(tmp_path, step=1, model=model)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-00"]


def test_errors_name_the_tensor(tmp_path):
    model, _ = trained()
    path = save_state(tmp_path, step=1, model=model)
    with pytest.raises(CheckpointError, match=r"holds tensor 1.bias"):
        load_state_from(path, model=_smaller())
    with pytest.raises(CheckpointError, match=r"lacks tensor 2.weight"):
        load_state_from(path, model=_larger())
    with pytest.raises(CheckpointError, match=r"0.weight has shape \(3, 4\), accepted is \(3, 5\)"):
        load_state_from(path, model=_wider())
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(CheckpointError, match="could not read checkpoint"):
        load_state_from(path, model=model)


def _with_buffer(model):
    model.register_buffer("bias_buffer", torch.zeros(3))
    return model


def _smaller():
    return _with_buffer(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2, bias=False)))


def _larger():
    return _with_buffer(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2, bias=False)))


def _wider():
    return _with_buffer(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)))


def test_a_failed_load_changes_nothing(tmp_path):
    model, _ = trained()
    path = save_state(tmp_path, step=1, model=model)
    other = _larger()
    before = bits(other)
    with pytest.raises(CheckpointError):
        load_state_from(path, model=other)
    for name, tensor in bits(other).items():
        assert torch.equal(tensor, before[name])


def test_shared_tensors_are_stored_once(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    model["b"].weight = model["a"].weight
    path = save_state(tmp_path, step=1, model=model)
    assert sorted(load_file(path / "model.safetensors")) == ["a.bias", "a.weight", "b.bias"]
    load_state(tmp_path, model=model)


def test_a_parameter_without_gradient_has_no_moments(tmp_path):
    model, optimizer = trained(steps=0)
    model[0](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    save_state(tmp_path, step=1, model=model, optimizer=optimizer)
    other, other_optimizer = trained(seed=3, steps=2)
    load_state(tmp_path, model=other, optimizer=other_optimizer)
    assert len(other_optimizer.state) == 2


def test_a_real_write_error_while_tensors_are_written(tmp_path):
    model, optimizer = trained()
    save_state(tmp_path, step=1, model=model, optimizer=optimizer)
    big = nn.Linear(300, 300)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a longer file fails as on a full disk
    try:
        with pytest.raises(CheckpointError, match="could not save step 2"):
            save_state(tmp_path, step=2, model=big, keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001-00"]
    assert load_state(tmp_path, model=model, optimizer=optimizer).step == 1
