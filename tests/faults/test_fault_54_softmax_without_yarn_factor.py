"""Fault 54: the softmax of latent attention misses the YaRN factor; position 0 agrees, later ones do not."""

import dataclasses
from itertools import pairwise

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.transformer import Transformer, init_weights

YARN = YarnConfig(factor=40, original_max_position_embeddings=16, mscale=0.707, mscale_all_dim=0.707)
CONFIG = ModelConfig(
    vocab_size=32, hidden_size=16, num_hidden_layers=2, first_k_dense_replace=2, kv_lora_rank=8, rope_scaling=YARN
)


def build(config):
    model = Transformer(config)
    init_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(20)
    return model


def reference(model):
    rope = {"rope_type": "yarn", "rope_theta": CONFIG.rope_theta, **dataclasses.asdict(YARN)}
    names = "vocab_size hidden_size num_hidden_layers first_k_dense_replace intermediate_size q_lora_rank kv_lora_rank"
    names += " num_attention_heads qk_nope_head_dim qk_rope_head_dim v_head_dim rms_norm_eps max_position_embeddings"
    sizes = {name: getattr(CONFIG, name) for name in names.split()}
    heads = CONFIG.num_attention_heads
    config = DeepseekV3Config(**sizes, num_key_value_heads=heads, rope_parameters=rope, pad_token_id=None)
    twin = DeepseekV3ForCausalLM(config)
    state = {n if n.startswith("lm_head") else f"model.{n}": t for n, t in model.state_dict().items() if "mtp" not in n}
    twin.load_state_dict(state)
    return twin


def test_position_zero_and_later_ones_equal_the_reference():
    model = build(CONFIG)
    tokens = torch.randint(0, 32, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = reference(model)(tokens).logits
        error = (model(tokens).logits_BTV - expected).abs().amax(dim=(0, 2))
        without = build(dataclasses.replace(CONFIG, rope_scaling=dataclasses.replace(YARN, mscale=0, mscale_all_dim=0)))
        fault = (without(tokens).logits_BTV - expected).abs().amax(dim=(0, 2))
    scale = expected.abs().max().item()
    assert error.max().item() <= 1e-4 * scale
    # what the fault looks like: right at position 0, wrong from 8 on
    assert fault[0].item() <= 1e-4 * scale
    assert fault[8:].min().item() > 1e-2 * scale


def test_the_cached_form_has_the_factor_too():
    model = build(CONFIG)
    tokens = torch.randint(0, 32, (1, 40), generator=torch.Generator().manual_seed(0))
    cache = model.new_cache(1, 40)
    parts = []
    for start, end in pairwise((0, 20, 39, 40)):
        positions = torch.arange(start, end)[None]
        chunk = tokens[:, start:end]
        out = model.forward_cached(chunk, positions, cache=cache, slot_ids_B=torch.tensor([0]))
        parts.append(model.lm_head(out.hidden_BSD))
    expected = model(tokens).logits_BTV
    assert (torch.cat(parts, dim=1) - expected).abs().max().item() <= 1e-5 * expected.abs().max().item()
