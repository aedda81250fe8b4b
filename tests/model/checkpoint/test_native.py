"""Native checkpoints: round trip, named misfits, and old folders that survive failures."""

import errno
import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from composer2.model.checkpoint import native
from composer2.model.checkpoint.native import load_config, load_model, save_model
from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.transformer import Transformer, init_weights

CONFIG = ModelConfig(
    vocab_size=16,
    hidden_size=8,
    num_hidden_layers=2,
    intermediate_size=8,
    moe_intermediate_size=8,
    n_routed_experts=4,
    kv_lora_rank=4,
    q_lora_rank=3,
    rope_scaling=YarnConfig(factor=4, original_max_position_embeddings=128, mscale_all_dim=0.5),
)


def build(seed=0):
    model = Transformer(CONFIG)
    init_weights(model, seed)
    with torch.no_grad():
        for layer in model.moe_layers():
            layer.gate.e_score_correction_bias.copy_(torch.tensor([0.1, -0.2, 0.3, -0.2]))
    return model


def same(first, second):
    state = second.state_dict()
    return all(torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_round_trip(tmp_path, dtype):
    model = build().to(dtype)
    save_model(tmp_path / "runs" / "tiny", model)
    loaded = load_model(tmp_path / "runs" / "tiny")
    assert loaded.config == CONFIG == load_config(tmp_path / "runs" / "tiny")
    assert same(model, loaded)
    assert {p.dtype for p in loaded.parameters()} == {dtype}
    assert all(p.requires_grad for p in loaded.parameters())
    tokens = torch.arange(10)[None]
    assert torch.equal(loaded(tokens).logits_BTV, model(tokens).logits_BTV)
    assert os.listdir(tmp_path / "runs") == ["tiny"]


def test_saving_again_replaces(tmp_path):
    save_model(tmp_path / "m", build(0))
    save_model(tmp_path / "m", build(1))
    assert same(load_model(tmp_path / "m"), build(1))
    assert os.listdir(tmp_path) == ["m"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.1.mlp.experts.down_proj"), r"lacks tensor layers\.1\.mlp\.experts\.down_proj"),
        (lambda t: t.update(extra=torch.zeros(1)), "holds tensor extra"),
        (
            lambda t: t.update({"norm.weight": torch.zeros(9)}),
            r"tensor norm\.weight has shape \(9,\), accepted is \(8,\)",
        ),
    ],
)
def test_misfits_name_the_tensor(tmp_path, change, message):
    save_model(tmp_path / "m", build())
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "m")


def test_truncated_weights_and_foreign_configs_are_refused(tmp_path):
    save_model(tmp_path / "m", build())
    weights = tmp_path / "m" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        load_model(tmp_path / "m")
    config_file = tmp_path / "m" / "config.json"
    config = json.loads(config_file.read_text())
    config_file.write_text(json.dumps({**config, "hiden_size": 3}))
    with pytest.raises(ValueError, match="hiden_size"):
        load_model(tmp_path / "m")
    config_file.write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type 'composer2'"):
        load_model(tmp_path / "m")
    config_file.write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        load_model(tmp_path / "m")
    with pytest.raises(FileNotFoundError):
        load_model(tmp_path / "absent")


def disk_full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("failing", ["save_file", "_flush"])
def test_full_disk_leaves_the_old_checkpoint(tmp_path, monkeypatch, failing):
    save_model(tmp_path / "m", build(0))
    monkeypatch.setattr(native, failing, disk_full)
    with pytest.raises(OSError, match="could not save the model"):
        save_model(tmp_path / "m", build(1))
    assert same(load_model(tmp_path / "m"), build(0))
    assert os.listdir(tmp_path) == ["m"]


def test_failed_rename_puts_the_old_checkpoint_back(tmp_path, monkeypatch):
    save_model(tmp_path / "m", build(0))
    rename, calls = os.rename, []

    def second_fails(source, target):
        calls.append(source)
        if len(calls) == 2:
            disk_full()
        rename(source, target)

    monkeypatch.setattr(native.os, "rename", second_fails)
    with pytest.raises(OSError, match="could not save the model"):
        save_model(tmp_path / "m", build(1))
    assert same(load_model(tmp_path / "m"), build(0))
    assert os.listdir(tmp_path) == ["m"]


def test_a_writer_killed_between_the_renames_leaves_a_loadable_model(tmp_path):
    save_model(tmp_path / "m", build(0))
    os.rename(tmp_path / "m", tmp_path / ".m.previous")
    assert same(load_model(tmp_path / "m"), build(0))
    save_model(tmp_path / "m", build(1))
    assert same(load_model(tmp_path / "m"), build(1))
    assert os.listdir(tmp_path) == ["m"]
