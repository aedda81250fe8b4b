"""`composer2 generate` and `inspect model` on a Hugging Face directory."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from composer2.cli import main
from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.use import generate


def directory(place: Path, **changes) -> tuple[Path, Transformer]:
    """A tiny Qwen3 MoE model with a tokenizer of bytes."""
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(place / "tokenizer.json"))
    fields = {"vocab_size": 256, "n_shared_experts": 0, "num_nextn_predict_layers": 0, "scoring_func": "softmax"}
    model = Transformer(ModelConfig(**fields, attention="grouped", num_key_value_heads=2, qk_norm="head", **changes))
    init_weights(model, 0)
    save_huggingface(place / "m", model, eos_ids=[3], tokenizer=place / "tokenizer.json")
    return place / "m", model


def test_generate_continues_with_the_most_likely_token(tmp_path):
    folder, model = directory(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode("def f(x):").ids
    prompt = len(ids)
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model(torch.tensor([ids])).logits_BTV[0, -1].argmax()))
    expected = tokenizer.decode(ids[prompt:])
    assert 3 not in ids[prompt:]
    assert generate(folder, "def f(x):", max_tokens=6, temperature=0, seed=0) == expected


def test_a_directory_without_a_tokenizer_is_refused(tmp_path):
    folder, _ = directory(tmp_path)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json"):
        generate(folder, "x", max_tokens=1, temperature=0, seed=0)


def test_inspect_model(tmp_path, capsys):
    folder, model = directory(tmp_path)
    assert main(["inspect", "model", str(folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["total"] == sum(parameter.numel() for parameter in model.parameters())
    assert record["family"] == "qwen3_moe"
    assert record["kv_values_per_token_per_layer"] == 2 * 2 * 32
