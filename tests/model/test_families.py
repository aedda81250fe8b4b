"""Published families: logits and gradients against transformers, both directions of the conversion, cached decoding.

Random tiny configs of transformers' own classes; rows are longer than the context YaRN starts from.
"""

import logging
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from composer2.model.checkpoint.huggingface import load_huggingface, save_huggingface

logging.getLogger("transformers").setLevel(logging.ERROR)

VOCAB = 40
YARN_LENGTH = 16
"""Context before the extension: the tests' rows are longer."""
CLASSES = {
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "minimax_m2": (MiniMaxM2Config, MiniMaxM2ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


@st.composite
def shared(draw):
    theta = draw(st.sampled_from([100.0, 10_000.0, 5e6]))
    rope = {"rope_type": "default", "rope_theta": theta}
    if draw(st.booleans()):
        rope |= {"rope_type": "yarn", "factor": draw(st.sampled_from([2.0, 8.0]))}
        rope |= {"original_max_position_embeddings": YARN_LENGTH, "beta_fast": 4.0, "beta_slow": 1.0}
    return {
        "vocab_size": VOCAB,
        "hidden_size": draw(st.sampled_from([12, 20])),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "rms_norm_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "rope_parameters": rope,
        "max_position_embeddings": 64,
        "attn_implementation": "eager",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


@st.composite
def grouped(draw):
    kv_heads = draw(st.integers(1, 3))
    return {
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * draw(st.integers(1, 3)),
        "head_dim": 2 * draw(st.integers(2, 5)),
    }


@st.composite
def experts(draw, name):
    count = draw(st.integers(2, 9))
    return {
        name: count,
        "num_experts_per_tok": draw(st.integers(1, min(count, 4))),
        "moe_intermediate_size": draw(st.integers(3, 9)),
        "norm_topk_prob": draw(st.booleans()),
    }


@st.composite
def deepseek_v3(draw):
    fields = draw(shared()) | draw(experts("n_routed_experts"))
    if draw(st.booleans()):
        groups = draw(st.integers(2, 4))
        fields |= {"n_group": groups, "n_routed_experts": groups * draw(st.integers(2, 4))}
        fields |= {"topk_group": draw(st.integers(1, groups))}
        reachable = fields["n_routed_experts"] // groups * fields["topk_group"]
        fields |= {"num_experts_per_tok": draw(st.integers(1, min(reachable, 4)))}
    else:
        fields |= {"n_group": 1, "topk_group": 1}
    if fields["rope_parameters"]["rope_type"] == "yarn":
        mscale, all_dim = draw(st.sampled_from([(1.0, 1.0), (0.7, 1.0), (None, None)]))
        if mscale is not None:
            fields["rope_parameters"] |= {"mscale": mscale, "mscale_all_dim": all_dim}
    heads = draw(st.integers(1, 4))
    return fields | {
        "first_k_dense_replace": draw(st.integers(0, fields["num_hidden_layers"])),
        "intermediate_size": draw(st.integers(3, 20)),
        "n_shared_experts": draw(st.integers(1, 2)),
        "routed_scaling_factor": draw(st.sampled_from([1.0, 2.5])),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": draw(st.none() | st.integers(2, 9)),
        "kv_lora_rank": draw(st.integers(2, 12)),
        "qk_nope_head_dim": draw(st.integers(1, 8)),
        "qk_rope_head_dim": 2 * draw(st.integers(1, 4)),
        "v_head_dim": draw(st.integers(1, 10)),
    }


@st.composite
def minimax_m2(draw):
    fields = draw(shared()) | draw(grouped()) | draw(experts("num_local_experts"))
    fields["intermediate_size"] = fields.pop("moe_intermediate_size")
    del fields["norm_topk_prob"]
    return fields | {"rotary_dim": 2 * draw(st.integers(1, fields["head_dim"] // 2))}


@st.composite
def qwen3_moe(draw):
    fields = draw(shared()) | draw(grouped()) | draw(experts("num_experts"))
    dense = draw(st.integers(0, fields["num_hidden_layers"] - 1))
    return fields | {"intermediate_size": draw(st.integers(3, 20)), "mlp_only_layers": list(range(dense))}


@st.composite
def qwen3(draw):
    fields = draw(shared()) | draw(grouped())
    return fields | {"intermediate_size": draw(st.integers(3, 20)), "tie_word_embeddings": draw(st.booleans())}


CONFIGS = {"deepseek_v3": deepseek_v3, "minimax_m2": minimax_m2, "qwen3_moe": qwen3_moe, "qwen3": qwen3}


def build(family, fields, seed=0):
    """Their model with weights far from zero, so that routing, positions and norms all matter."""
    config_class, model_class = CLASSES[family]
    twin = model_class(config_class(**fields)).eval()
    twin.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in twin.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * draw if parameter.ndim == 1 else draw * parameter.shape[-1] ** -0.5)
        for name, buffer in twin.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return twin


def some(count):
    """The same examples in every run: near ties of a router in float32 must not fail by chance."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def tokens_of(seed, length=2 * YARN_LENGTH + 8):
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(seed))


def close(ours, theirs, bound=1e-4):
    scale = float(theirs.detach().abs().max())
    return float((ours - theirs).detach().abs().max()) <= bound * scale


def converted(twin):
    """Their model through a directory of theirs, as ours."""
    with tempfile.TemporaryDirectory() as folder:
        twin.save_pretrained(folder)
        return load_huggingface(folder)


@pytest.mark.parametrize("family", CONFIGS)
@some(8)
@given(data=st.data())
def test_logits_and_gradients_equal_transformers(family, data):
    twin = build(family, data.draw(CONFIGS[family]()))
    model = converted(twin)
    tokens = tokens_of(1)
    ours, theirs = model(tokens).logits_BTV, twin(tokens).logits
    assert close(ours, theirs)
    labels = tokens.roll(-1, dims=1).flatten()
    for logits in (ours, theirs):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    gradients = {name: parameter.grad for name, parameter in twin.named_parameters()}
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in gradients.values())  # a gradient may be exactly 0
    compared = 0
    for name, parameter in model.named_parameters():
        expected = gradients[name if name.startswith("lm_head.") else f"model.{name}"]
        difference = float((parameter.grad - expected).abs().max())
        assert difference <= 1e-4 * float(expected.abs().max()) + noise, name
        compared += 1
    assert compared == len(gradients)


@pytest.mark.parametrize("family", CONFIGS)
@some(3)
@given(data=st.data())
def test_what_is_saved_is_loaded_by_transformers(family, data):
    twin = build(family, data.draw(CONFIGS[family]()), seed=5)
    model = converted(twin)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "saved"
        save_huggingface(path, model, max_shard_bytes=data.draw(st.sampled_from([5_000, 10**9])))
        back, report = CLASSES[family][1].from_pretrained(path, output_loading_info=True, attn_implementation="eager")
        again = load_huggingface(path)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    back.set_experts_implementation("eager")
    state = back.state_dict()
    for name, tensor in twin.state_dict().items():
        assert torch.equal(state[name], tensor), name
    tokens = tokens_of(2)
    assert close(back.eval()(tokens).logits, twin(tokens).logits)
    assert again.config == model.config
    assert torch.equal(again(tokens).logits_BTV, model(tokens).logits_BTV)


@pytest.mark.parametrize("family", CONFIGS)
@some(4)
@given(data=st.data(), cut=st.integers(1, 30))
def test_cached_decoding_equals_the_full_forward(family, data, cut):
    model = converted(build(family, data.draw(CONFIGS[family]()))).double()
    tokens = tokens_of(3)
    with torch.no_grad():
        full = model(tokens).logits_BTV
    length = tokens.shape[1]
    cache = model.new_cache(3, length)
    slots = torch.tensor([2, 0])
    parts = []
    for start, end in ((0, cut), (cut, cut + 1), (cut + 1, length)):
        positions = torch.arange(start, end).expand(2, -1)
        out = model.forward_cached(tokens[:, start:end], positions, cache=cache, slot_ids_B=slots)
        parts.append(model.lm_head(out.hidden_BSD))
    assert close(torch.cat(parts, dim=1), full, 1e-9)
