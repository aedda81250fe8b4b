"""Hugging Face directories: layouts against oracles that share no code with the loader, and misfits named."""

import dataclasses
import json
import struct

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from composer2.model.checkpoint import huggingface
from composer2.model.checkpoint.huggingface import load_huggingface, plan_huggingface, save_huggingface
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights

LATENT = ModelConfig(
    vocab_size=40,
    hidden_size=64,
    num_hidden_layers=2,
    intermediate_size=136,
    moe_intermediate_size=40,
    n_routed_experts=4,
    num_attention_heads=2,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    num_nextn_predict_layers=0,
)
GROUPED = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    first_k_dense_replace=2,
    intermediate_size=24,
    n_shared_experts=0,
    attention="grouped",
    num_key_value_heads=2,
    qk_norm="head",
    tie_word_embeddings=True,
    num_nextn_predict_layers=0,
)


def build(config, seed=0):
    model = Transformer(config)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if "norm" in name or "bias" in name:
                tensor.add_(0.2 * torch.randn(tensor.shape, generator=generator))
            else:
                tensor.mul_(8)
    return model


def same(first, second):
    state = second.state_dict()
    return list(state) == list(first.state_dict()) and all(
        torch.equal(tensor, state[name]) for name, tensor in first.state_dict().items()
    )


def saved(folder, model, **options):
    """The files of a saved model as {file: {name: tensor}}, read by another library."""
    save_huggingface(folder, model, **options)
    return {path.name: load_file(path) for path in sorted(folder.glob("*.safetensors"))}


def edit(folder, change, file="model.safetensors"):
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# ---------------------------------------------------------------------------------------------------------------------
# Layouts


@pytest.mark.parametrize("shard", [3_000, 40_000, 10**9])
def test_shards_and_index(tmp_path, shard):
    model = build(LATENT)
    files = saved(tmp_path / "m", model, max_shard_bytes=shard)
    names = [name for tensors in files.values() for name in tensors]
    assert len(names) == len(set(names))
    for tensors in files.values():
        assert len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors.values()) <= shard
    index = tmp_path / "m" / "model.safetensors.index.json"
    assert index.exists() == (len(files) > 1)
    if len(files) > 1:
        weight_map = json.loads(index.read_text())["weight_map"]
        assert weight_map == {name: file for file, tensors in files.items() for name in tensors}
    assert same(load_huggingface(tmp_path / "m"), model)


def test_kimi_layout(tmp_path):
    """Text under `language_model.`, beside a vision tower that is left alone."""
    model = build(LATENT)
    tensors = saved(tmp_path / "m", model, prefix="language_model.", eos_ids=[7])["model.safetensors"]
    assert {"language_model.lm_head.weight", "language_model.model.layers.1.mlp.experts.3.up_proj.weight"} <= set(
        tensors
    )
    assert all(name.startswith("language_model.") for name in tensors)
    edit(tmp_path / "m", lambda t: t.update({"vision_tower.patch.weight": torch.zeros(2)}))
    assert same(load_huggingface(tmp_path / "m"), model)


def test_mtp_layout(tmp_path):
    """The published names; transformers' decoder layer on the stored tensors computes what the module does."""
    config = dataclasses.replace(LATENT, num_nextn_predict_layers=2)
    model = build(config)
    tensors = saved(tmp_path / "m", model)["model.safetensors"]
    for layer in (2, 3):
        own = {name.removeprefix(f"model.layers.{layer}.") for name in tensors if f"layers.{layer}." in name}
        usual = {name.removeprefix("model.layers.1.") for name in tensors if "layers.1." in name}
        extra = {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"}
        assert own == usual | extra | {"shared_head.head.weight", "embed_tokens.weight"}
        assert torch.equal(tensors[f"model.layers.{layer}.shared_head.head.weight"], tensors["lm_head.weight"])
    assert same(load_huggingface(tmp_path / "m"), model)

    edit_config(tmp_path / "m", num_hidden_layers=4, num_nextn_predict_layers=0)
    twin = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    twin.set_experts_implementation("eager")
    tokens = torch.randint(0, 40, (2, 9), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        trunk = model(tokens).hidden_BTD
        ours = model.mtp_logits(trunk, tokens)
        hidden, mask = trunk, torch.full((9, 9), float("-inf")).triu(1)[None, None]
        rope = twin.model.rotary_emb(trunk, torch.arange(9)[None])
        for module in range(2):
            stored = {n.split(".", 3)[3]: t for n, t in tensors.items() if n.startswith(f"model.layers.{2 + module}.")}
            ahead = torch.cat((tokens[:, module + 1 :], torch.zeros(2, module + 1, dtype=torch.int64)), dim=1)
            halves = [
                norm(values, stored[f"{name}.weight"])
                for name, values in (("enorm", stored["embed_tokens.weight"][ahead]), ("hnorm", hidden))
            ]
            joined = torch.cat(halves, dim=-1) @ stored["eh_proj.weight"].T
            hidden = twin.model.layers[2 + module](joined, attention_mask=mask, position_embeddings=rope)
            logits = norm(hidden, stored["shared_head.norm.weight"]) @ stored["shared_head.head.weight"].T
            assert float((logits - ours[module]).abs().max()) <= 1e-4 * float(logits.abs().max())


def test_mtp_drafts_equal_those_of_transformers(tmp_path, monkeypatch):
    """Its own speculative decoding over the stored directory, the norms far from one: first draft, all logits."""
    model = build(dataclasses.replace(LATENT, num_nextn_predict_layers=1))
    save_huggingface(tmp_path / "m", model)
    # It finds MTP weights by the layer number of the released model, 61.
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.2\..*"])
    twin = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    twin.set_experts_implementation("eager")
    drafted, forward = [], MtpModel.forward
    monkeypatch.setattr(MtpModel, "forward", lambda *a, **k: drafted.append(forward(*a, **k)) or drafted[-1])
    tokens = torch.randint(0, 40, (1, 12), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(tokens)
    options = {"do_sample": False, "max_new_tokens": 4, "use_mtp": True, "pad_token_id": 0, "eos_token_id": None}
    known = twin.generate(input_ids=tokens, attention_mask=mask, **options)[:, :13]
    with torch.no_grad():
        ours = model.mtp_logits(model(known).hidden_BTD, known)[0][0, -2]
    theirs = drafted[0][1][0, 0]
    assert float((ours - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max())


def norm(x, weight):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def test_mtp_may_be_missing_as_a_whole_but_not_in_part(tmp_path):
    config = dataclasses.replace(LATENT, num_nextn_predict_layers=1)
    save_huggingface(tmp_path / "m", build(config))
    edit(tmp_path / "m", lambda t: t.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.2\.eh_proj\.weight"):
        load_huggingface(tmp_path / "m")
    edit(tmp_path / "m", lambda t: [t.pop(name) for name in list(t) if "layers.2." in name])
    assert load_huggingface(tmp_path / "m").config.num_nextn_predict_layers == 0


@pytest.mark.parametrize("compared_rows", [4096, 16])
def test_mtp_copies_must_be_copies(tmp_path, monkeypatch, compared_rows):
    """Whether all 40 rows are compared at once or the one that differs is in the last of three parts."""
    monkeypatch.setattr(huggingface, "COMPARED_ROWS", compared_rows)
    save_huggingface(tmp_path / "m", build(dataclasses.replace(LATENT, num_nextn_predict_layers=1)))
    edit(tmp_path / "m", lambda t: t["model.layers.2.shared_head.head.weight"][39, 3].add_(1))
    with pytest.raises(ValueError, match=r"shared_head\.head\.weight differs from lm_head\.weight"):
        load_huggingface(tmp_path / "m")


def test_tied_head(tmp_path):
    model = build(GROUPED)
    tensors = saved(tmp_path / "m", model)["model.safetensors"]
    assert "lm_head.weight" not in tensors
    loaded = load_huggingface(tmp_path / "m")
    assert same(loaded, model)
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    edit(tmp_path / "m", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert same(load_huggingface(tmp_path / "m"), model)
    edit(tmp_path / "m", lambda t: t["lm_head.weight"][0, 0].add_(1))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from embed_tokens\.weight"):
        load_huggingface(tmp_path / "m")


def test_dtypes(tmp_path):
    model = build(LATENT).bfloat16()
    for layer in model.moe_layers():
        layer.gate.e_score_correction_bias = layer.gate.e_score_correction_bias.float() + 1e-4
    save_huggingface(tmp_path / "m", model)
    loaded = load_huggingface(tmp_path / "m")
    assert same(loaded, model)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.buffers()} == {torch.float32}
    wide = load_huggingface(tmp_path / "m", dtype=torch.float32)
    assert {parameter.dtype for parameter in wide.parameters()} == {torch.float32}


# ---------------------------------------------------------------------------------------------------------------------
# Quantised weights

DENSE = "model.layers.0.mlp.gate_proj"
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


@pytest.mark.parametrize("block", [128, 16])
def test_fp8_blocks(tmp_path, block):
    """ml_dtypes decodes the codes, a loop over blocks scales them."""
    model = build(LATENT)
    tensors = saved(tmp_path / "m", model)["model.safetensors"]
    rng = np.random.default_rng(0)
    expected = {}
    for name in (DENSE, EXPERT, "model.layers.0.self_attn.kv_b_proj"):
        rows, columns = tensors[f"{name}.weight"].shape
        codes = rng.integers(0, 126, (rows, columns)).astype(np.uint8) + 128 * rng.integers(
            0, 2, (rows, columns), np.uint8
        )
        scales = rng.uniform(0.001, 2, (-(-rows // block), -(-columns // block))).astype(np.float32)
        plain = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        for i in range(len(scales)):
            for j in range(len(scales[0])):
                plain[i * block : (i + 1) * block, j * block : (j + 1) * block] *= scales[i, j]
        expected[name] = torch.from_numpy(plain.astype(np.float32))
        tensors[f"{name}.weight"] = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_inv"] = torch.from_numpy(scales)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    edit_config(tmp_path / "m", quantization_config={"quant_method": "fp8", "weight_block_size": [block, block]})
    state = load_huggingface(tmp_path / "m").state_dict()
    assert torch.equal(state["layers.0.mlp.gate_proj.weight"], expected[DENSE])
    assert torch.equal(state["layers.1.mlp.experts.down_proj"][2], expected[EXPERT])
    assert torch.equal(state["layers.0.self_attn.kv_b_proj.weight"], expected["model.layers.0.self_attn.kv_b_proj"])
    assert torch.equal(state["layers.1.mlp.experts.down_proj"][1], model.layers[1].mlp.experts.down_proj[1])


def pack(codes):
    """Eight numbers -8 … 7 to an int32, the first in the lowest bits, by Python's integers."""
    rows = []
    for row in codes.tolist():
        words = [row[first : first + 8] for first in range(0, len(row), 8)]
        unsigned = [sum((value + 8) << (4 * place) for place, value in enumerate(word)) for word in words]
        rows.append([word - 2**32 if word >= 2**31 else word for word in unsigned])
    return torch.tensor(rows, dtype=torch.int32)


def quantise_int4(folder, group=32):
    """Put INT4 experts into a saved model; returns the plain numbers by name."""
    rng = np.random.default_rng(1)
    tensors, expected = load_file(folder / "model.safetensors"), {}
    for name in [name.removesuffix(".weight") for name in tensors if ".experts." in name]:
        rows, columns = tensors.pop(f"{name}.weight").shape
        codes = rng.integers(-8, 8, (rows, columns))
        scales = torch.from_numpy(rng.uniform(0.01, 1, (rows, -(-columns // group)))).bfloat16()
        plain = [[codes[i, j] * float(scales[i, j // group]) for j in range(columns)] for i in range(rows)]
        expected[name] = torch.tensor(plain, dtype=torch.float32)
        tensors |= {f"{name}.weight_packed": pack(codes), f"{name}.weight_scale": scales}
        tensors[f"{name}.weight_shape"] = torch.tensor([rows, columns])
    save_file(tensors, folder / "model.safetensors")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group}
    scheme = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_config(folder, quantization_config=scheme | {"config_groups": {"group_0": {"weights": weights}}})
    return expected


@pytest.mark.parametrize("group", [32, 8])
def test_int4_groups(tmp_path, group):
    save_huggingface(tmp_path / "m", build(LATENT))
    expected = quantise_int4(tmp_path / "m", group)
    state = load_huggingface(tmp_path / "m").state_dict()
    for expert in range(4):
        stem = f"model.layers.1.mlp.experts.{expert}"
        gate_up = torch.cat((expected[f"{stem}.gate_proj"], expected[f"{stem}.up_proj"]))
        assert torch.equal(state["layers.1.mlp.experts.gate_up_proj"][expert], gate_up)
        assert torch.equal(state["layers.1.mlp.experts.down_proj"][expert], expected[f"{stem}.down_proj"])


PACKED = f"{EXPERT}.weight_packed"
NORM = "model.norm.weight"
SCALE = f"{DENSE}.weight_scale_inv"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERT}.weight_scale"), f"{PACKED} .*{EXPERT}.weight_scale is nowhere"),
        (lambda t: t.update({PACKED: t[PACKED].long()}), f"{PACKED} has dtype I64, accepted is I32"),
        (lambda t: t.update({PACKED: t[PACKED][:, :4]}), rf"{PACKED} has shape \(64, 4\)"),
        (lambda t: t[f"{EXPERT}.weight_shape"].fill_(3), rf"{PACKED}: weight_shape says \(3, 3\)"),
        (
            lambda t: t.update({f"{EXPERT}.weight_scale": torch.ones(64, 3)}),
            rf"{EXPERT}.weight_scale has shape \(64, 3\), accepted is \(64, 2\)",
        ),
        (
            lambda t: t.update(
                {f"{DENSE}.weight": torch.zeros(136, 64).to(torch.float8_e4m3fn), SCALE: torch.ones(1, 1)}
            ),
            rf"{SCALE} has shape \(1, 1\), accepted is \(2, 1\)",
        ),
        (lambda t: t.update({NORM: t[NORM].to(torch.float8_e4m3fn)}), f"{NORM} has dtype F8_E4M3, accepted is F64"),
        (lambda t: t.update({f"{DENSE}.weight": torch.zeros(136, 64).to(torch.float8_e4m3fn)}), "scale_inv is nowhere"),
    ],
)
def test_quantised_misfits_name_file_and_tensor(tmp_path, change, message):
    save_huggingface(tmp_path / "m", build(LATENT))
    quantise_int4(tmp_path / "m")
    edit(tmp_path / "m", lambda t: [change(t), t.update({n: v.contiguous() for n, v in t.items()})])
    # Only what `weight_shape` says is data: everything else is known before anything is loaded.
    read = load_huggingface if "weight_shape says" in message else plan_huggingface
    with pytest.raises(ValueError, match=f"{tmp_path}/m/model.safetensors .*{message}"):
        read(tmp_path / "m")


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "float-quantized"}, "format is 'float-quantized'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
            "num_bits of config_groups is 8",
        ),
    ],
)
def test_other_quantisations_are_refused(tmp_path, scheme, message):
    save_huggingface(tmp_path / "m", build(LATENT))
    edit_config(tmp_path / "m", quantization_config=scheme)
    with pytest.raises(ValueError, match=message):
        load_huggingface(tmp_path / "m")


# ---------------------------------------------------------------------------------------------------------------------
# Misfits


def rename_in_index(folder, name, file):
    path = folder / "model.safetensors.index.json"
    data = json.loads(path.read_text())
    data["weight_map"][name] = file
    path.write_text(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"lacks tensor {NORM} of shape"),
        (lambda t: t.update(extra=torch.zeros(1)), r"model\.safetensors holds tensor extra"),
        (lambda t: t.update({NORM: torch.zeros(9)}), rf"model\.safetensors tensor {NORM} has shape \(9,\)"),
        (lambda t: t.update({NORM: torch.zeros(64).int()}), rf"model\.safetensors tensor {NORM} has dtype I32"),
    ],
)
def test_misfits_name_file_and_tensor(tmp_path, change, message):
    save_huggingface(tmp_path / "m", build(LATENT))
    edit(tmp_path / "m", change)
    with pytest.raises(ValueError, match=f"{tmp_path}/m.*{message}"):
        load_huggingface(tmp_path / "m")


def test_truncated_file(tmp_path):
    save_huggingface(tmp_path / "m", build(LATENT), max_shard_bytes=40_000)
    path = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    last = max((item["data_offsets"][1], name) for name, item in header.items() if name != "__metadata__")[1]
    path.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=f"{path} is truncated: tensor {last} ends at"):
        load_huggingface(tmp_path / "m")
    for cut in (4, 100):
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=f"{path} is truncated or no safetensors file"):
            load_huggingface(tmp_path / "m")
    path.write_bytes(whole[:8] + b"{" * length + whole[8 + length :])
    with pytest.raises(ValueError, match=f"{path} has a damaged header"):
        load_huggingface(tmp_path / "m")


def test_index_pointing_nowhere(tmp_path):
    folder = tmp_path / "m"
    save_huggingface(folder, build(LATENT), max_shard_bytes=40_000)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    rename_in_index(folder, NORM, "model-00099-of-00099.safetensors")
    with pytest.raises(ValueError, match=f"puts tensor {NORM} into model-00099-of-00099.safetensors, which is no file"):
        load_huggingface(folder)
    rename_in_index(folder, NORM, "../m/" + files[-1])
    with pytest.raises(ValueError, match=f"puts tensor {NORM} into"):
        load_huggingface(folder)
    rename_in_index(folder, NORM, files[0])
    with pytest.raises(ValueError, match=f"{files[0]} lacks tensor {NORM}"):
        load_huggingface(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json is damaged"):
        load_huggingface(folder)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(FileNotFoundError, match="holds neither"):
        load_huggingface(folder)


def test_a_bias_without_a_place_is_refused(tmp_path):
    config = dataclasses.replace(GROUPED, first_k_dense_replace=0, scoring_func="softmax", tie_word_embeddings=False)
    model = build(config)
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.gate\.e_score_correction_bias is not zero"):
        save_huggingface(tmp_path / "m", model)


def test_a_full_disk_leaves_the_old_directory(tmp_path, monkeypatch):
    model = build(LATENT)
    save_huggingface(tmp_path / "m", model)

    def full(*args, **kwargs):
        raise OSError("no space left")

    monkeypatch.setattr(huggingface, "write_shards", full)
    with pytest.raises(OSError, match="what was there before is whole"):
        save_huggingface(tmp_path / "m", build(LATENT, seed=3))
    assert same(load_huggingface(tmp_path / "m"), model)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
