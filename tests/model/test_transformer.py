"""The whole policy: parity with transformers, packing, cached decoding, bias updates, construction."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from composer2.model.attention import PART_ROWS, reference_attend
from composer2.model.config import ModelConfig, YarnConfig
from composer2.model.transformer import Transformer, init_weights, positions_of

SMALL = {
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_attention_heads": 3,
}
YARN = YarnConfig(factor=8, original_max_position_embeddings=32, mscale=0.7, mscale_all_dim=1.0)
PARITY = {
    "plain": {},
    "yarn and low-rank queries": {"rope_scaling": YARN, "q_lora_rank": 10, "v_head_dim": 12, "rms_norm_eps": 1e-4},
    "groups": {
        "n_routed_experts": 12,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 0,
        "norm_topk_prob": False,
        "rope_theta": 50000.0,
    },
}


def build(config, seed=0, dtype=torch.float32, gain=8.0):
    """A model with weights far from zero, so that routing, positions and norms all matter."""
    model = Transformer(config)
    init_weights(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(gain)
            else:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        for buffer in model.buffers():
            buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
    return model.to(dtype)


def transformers_twin(model):
    """transformers' implementation holding the same weights."""
    config = model.config
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        yarn = config.rope_scaling
        rope |= {"rope_type": "yarn", "factor": yarn.factor, "beta_fast": yarn.beta_fast, "beta_slow": yarn.beta_slow}
        rope |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
        rope |= {"original_max_position_embeddings": yarn.original_max_position_embeddings}
    names = "vocab_size hidden_size num_hidden_layers first_k_dense_replace intermediate_size moe_intermediate_size"
    names += " n_routed_experts num_experts_per_tok n_shared_experts n_group topk_group norm_topk_prob"
    names += " routed_scaling_factor num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim"
    names += " v_head_dim rms_norm_eps max_position_embeddings"
    sizes = {name: getattr(config, name) for name in names.split()}
    theirs = DeepseekV3Config(
        **sizes,
        num_key_value_heads=config.num_attention_heads,
        rope_parameters=rope,
        tie_word_embeddings=False,
        attn_implementation="eager",
        pad_token_id=None,
        bos_token_id=0,
        eos_token_id=1,
    )
    twin = DeepseekV3ForCausalLM(theirs)
    twin.set_experts_implementation("eager")
    state = {their_name(name): t for name, t in model.state_dict().items() if not name.startswith("mtp.")}
    twin.load_state_dict(state)
    return twin


def their_name(name):
    return name if name.startswith("lm_head.") else f"model.{name}"


@pytest.mark.parametrize("name", PARITY)
def test_logits_and_gradients_equal_transformers(name):
    model = build(ModelConfig(**{**SMALL, **PARITY[name]}))
    twin = transformers_twin(model)
    tokens = torch.randint(0, 48, (2, 70), generator=torch.Generator().manual_seed(3))  # past YaRN's original length
    ours, theirs = model(tokens).logits_BTV, twin(tokens).logits
    scale = float(theirs.detach().abs().max())
    assert float((ours - theirs).detach().abs().max()) <= 1e-4 * scale

    labels = tokens.roll(-1, dims=1).flatten()
    for logits in (ours, theirs):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels).backward()
    gradients = dict(twin.named_parameters())
    compared = 0
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.startswith("mtp."):
            assert parameter.grad is None
            continue
        expected = gradients[their_name(parameter_name)].grad
        assert float(expected.abs().max()) > 0
        difference = float((parameter.grad - expected).abs().max())
        assert difference <= 1e-4 * float(expected.abs().max()), parameter_name
        compared += 1
    assert compared == len(gradients)


def pack(lengths, pads):
    """document_ids of one row with `pads` columns of padding in front, between and behind."""
    row = [-1] * pads
    for document, length in enumerate(lengths):
        row += [document] * length + [-1] * pads
    return torch.tensor([row])


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), pads=st.integers(0, 3), seed=st.integers(0, 99))
def test_packed_equals_unpacked(lengths, pads, seed):
    config = ModelConfig(**{**SMALL, **PARITY["yarn and low-rank queries"]})
    model = build(config, dtype=torch.float64)
    documents = pack(lengths, pads)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 48, documents.shape, generator=generator)
    with torch.no_grad():
        packed = model(tokens, document_ids_BT=documents)
        load = torch.zeros_like(packed.routing.tokens_per_expert_LE)
        for document in range(len(lengths)):
            inside = documents[0] == document
            alone = model(tokens[:, inside])
            bound = 1e-10 * float(alone.logits_BTV.abs().max())
            assert float((packed.logits_BTV[:, inside] - alone.logits_BTV).abs().max()) <= bound
            assert torch.equal(packed.routing.expert_ids_BTLK[:, inside], alone.routing.expert_ids_BTLK)
            load += alone.routing.tokens_per_expert_LE
    assert torch.equal(packed.routing.tokens_per_expert_LE, load)
    assert int(packed.routing.num_tokens) == sum(lengths)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_cached_decoding_equals_the_full_forward(dtype, bound):
    """Three sequences of unequal length in scattered slots: prefill in padded chunks, then one token at a time."""
    config = ModelConfig(**{**SMALL, **PARITY["yarn and low-rank queries"]})
    model = build(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 48, (length,), generator=generator) for length in (45, 38, 40)]
    slots = torch.tensor([4, 0, 2])
    cache = model.new_cache(5, 64)
    hidden = [torch.zeros(len(s), 24, dtype=dtype) for s in sequences]
    routes = [torch.zeros(len(s), 2, 2, dtype=torch.int16) for s in sequences]

    def feed(ranges, slot_ids):
        width = max(end - start for start, end in ranges)
        tokens = torch.zeros(len(ranges), width, dtype=torch.int64)
        positions = torch.full((len(ranges), width), -1)
        for row, (start, end) in enumerate(ranges):
            tokens[row, : end - start] = sequences[row][start:end]
            positions[row, : end - start] = torch.arange(start, end)
        out = model.forward_cached(tokens, positions, cache=cache, slot_ids_B=slot_ids)
        for row, (start, end) in enumerate(ranges):
            hidden[row][start:end] = out.hidden_BSD[row, : end - start]
            routes[row][start:end] = out.routes_BSLK[row, : end - start]

    feed([(0, 20), (0, 13), (0, 1)], slots)
    feed([(20, 33), (13, 13), (1, 30)], slots)  # the second row is padding only
    feed([(33, 40), (13, 33), (30, 35)], slots)
    for step in range(5):
        feed([(40 + step, 41 + step), (33 + step, 34 + step), (35 + step, 36 + step)], slots)

    for row, sequence in enumerate(sequences):
        with torch.no_grad():
            full = model(sequence[None])
        scale = float(full.logits_BTV.abs().max())
        assert float((model.lm_head(hidden[row]) - full.logits_BTV[0]).detach().abs().max()) <= bound * scale
        assert torch.equal(routes[row], full.routing.expert_ids_BTLK[0])
    assert not any(bool(layer[[1, 3]].any()) for layer in cache)  # slots of others were never written


@pytest.mark.parametrize("page_size", [3, 12])
def test_many_sequences_equal_each_alone(page_size):
    """More sequences than look at the cache together, of unequal length, one of them new."""
    model = build(ModelConfig(**SMALL), dtype=torch.float64)
    rng = np.random.default_rng(0)
    rows, pages = PART_ROWS * 2 + 3, 12 // page_size
    lengths = rng.permutation([0, *rng.integers(1, 11, rows - 1)])
    tokens = torch.from_numpy(rng.integers(0, 48, (rows, 12)))
    tables = torch.from_numpy(rng.permutation(rows * pages).reshape(rows, pages))
    cache = model.new_cache(rows * pages, page_size)
    positions = torch.arange(12).expand(rows, 12)
    lengths_T = torch.from_numpy(lengths)[:, None]
    model.forward_cached(tokens, positions.where(positions < lengths_T, -1), cache=cache, slot_ids_B=tables)
    found = model.forward_cached(tokens.gather(1, lengths_T), lengths_T, cache=cache, slot_ids_B=tables).hidden_BSD
    for row, length in enumerate(lengths):
        with torch.no_grad():
            alone = model(tokens[row : row + 1, : length + 1]).hidden_BTD[0, -1]
        assert float((found[row, 0] - alone).abs().max()) <= 1e-10


def test_cached_misfits_are_refused():
    model = build(ModelConfig(**SMALL))
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    for position, slots, message in (
        (8, torch.tensor([0, 1]), "position_ids are 8 .. 8"),
        (-2, torch.tensor([0, 1]), "position_ids are -2"),
        (0, torch.tensor([0, 1, 2]), "slot_ids hold 3"),
        (0, torch.tensor([0]), "slot_ids hold 1"),
    ):
        with pytest.raises(ValueError, match=message):
            model.forward_cached(tokens, torch.full((2, 1), position), cache=model.new_cache(4, 8), slot_ids_B=slots)
    with pytest.raises(ValueError, match="cache is 2 x"):
        model.forward_cached(tokens, tokens, cache=model.new_cache(4, 8)[:2], slot_ids_B=torch.tensor([0, 1]))


def test_shapes_that_do_not_match_the_tokens_are_refused():
    model = build(ModelConfig(**SMALL))
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="document_ids has shape"):
        model(tokens, document_ids_BT=tokens[:, :4])
    with pytest.raises(ValueError, match="position_ids has shape"):
        model(tokens, position_ids_BT=tokens[:1])


def test_positions_restart_in_every_document():
    documents = torch.tensor([[-1, -1, 3, 3, 3, 5, 6, 6], [0, 0, 0, 0, 0, 0, 0, -1]])
    expected = [[0, 1, 0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5, 6, 0]]
    assert positions_of(documents).tolist() == expected


def test_backends_and_attention_cores_are_seams():
    config = ModelConfig(**SMALL)
    tokens = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(0))
    fast = build(config)
    plain = Transformer(config, attend=reference_attend, grouped_backend="reference")
    plain.load_state_dict(fast.state_dict())
    torch.testing.assert_close(plain(tokens).logits_BTV, fast(tokens).logits_BTV, rtol=1e-5, atol=1e-5)


def test_head_on_demand():
    model = build(ModelConfig(**SMALL))
    tokens = torch.arange(6)[None]
    full, bare = model(tokens), model(tokens, with_logits=False)
    assert bare.logits_BTV.shape == (1, 6, 0)
    assert torch.equal(model.lm_head(bare.hidden_BTD), full.logits_BTV)
    assert torch.equal(bare.hidden_BTD, full.hidden_BTD)


def test_token_ids_are_never_rounded():
    with pytest.raises(ValueError, match=r"^token_ids_BT has dtype torch.float32, accepted is an integer one"):
        build(ModelConfig(**SMALL))(torch.tensor([[1.0, 2.5]]))


def test_initialisation_is_a_function_of_the_seed():
    config = ModelConfig()
    torch.manual_seed(1)
    first = Transformer(config)
    init_weights(first, 7)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second = Transformer(config).double()
    torch.set_rng_state(before)
    init_weights(second, 7)
    assert torch.equal(torch.get_rng_state(), before)
    for name, parameter in first.named_parameters():
        torch.testing.assert_close(parameter.double(), second.get_parameter(name), rtol=1e-6, atol=0)
    spread = first.layers[1].mlp.experts.gate_up_proj.detach()
    assert float(spread.std()) == pytest.approx(0.02, rel=0.02)
    assert bool((first.norm.weight == 1).all())
    init_weights(second, 8)
    assert not torch.equal(first.embed_tokens.weight.double(), second.embed_tokens.weight)


def test_bias_update_names_a_wrong_shape():
    model = build(ModelConfig(**SMALL))
    with pytest.raises(ValueError, match="tokens_per_expert has shape"):
        model.update_router_bias(torch.zeros(3, 8), 0.1)


def test_bias_updates_balance_a_skewed_router():
    """A bias that favours one expert is worked off by updates from the loads the model itself reports."""
    model = build(ModelConfig(**SMALL), gain=2.0)
    with torch.no_grad():
        for layer in model.moe_layers():
            layer.gate.e_score_correction_bias.zero_()[0] = 0.5
    tokens = torch.randint(0, 48, (4, 50), generator=torch.Generator().manual_seed(0))
    loads = []
    for _ in range(60):
        with torch.no_grad():
            load = model(tokens).routing.tokens_per_expert_LE
        loads.append(load.float())
        model.update_router_bias(load, 0.02)
    violation = [float((load.max(1).values / load.mean(1)).max()) for load in (loads[0], loads[-1])]
    assert violation[0] == pytest.approx(4.0)  # every token picks expert 0: 200 of a mean of 50
    assert violation[1] < 2.0
