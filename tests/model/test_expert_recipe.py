"""The number formats of a model's experts: chosen by its config, the default untouched, every recipe learns."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from composer2.kernels.dispatch import WIRES
from composer2.kernels.linear import ORDERS, RECIPES, Recipe
from composer2.model import config as model_config
from composer2.model.checkpoint.native import load_config, save_model
from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.moe import MoE
from composer2.model.transformer import Transformer, init_weights
from composer2.recipes import tiny, tiny_smoke

SMALL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "num_attention_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "num_nextn_predict_layers": 0,
}  # fmt: skip


def layer(seed=0, **fields):
    config = ModelConfig(hidden_size=64, moe_intermediate_size=32, n_routed_experts=4, **fields)
    moe = MoE(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    x = torch.randn(2, 30, 64, generator=generator)
    return moe, x


def test_names_agree_with_those_of_the_kernels():
    assert ("native", *RECIPES) == model_config.EXPERT_RECIPES
    assert model_config.DISPATCH_WIRES == WIRES
    assert model_config.NVFP4_ORDERS == ORDERS


def test_default_rounds_nothing():
    assert ModelConfig().expert_recipe == ModelConfig().dispatch_wire == "native"
    moe, x = layer()
    out, selection = moe(x)
    x_TD, experts = x.flatten(0, 1).double(), moe.experts
    weights_TK = moe.gate(x.flatten(0, 1))[1]
    expected = moe.shared_experts(x).double().flatten(0, 1)
    for token, vector in enumerate(x_TD):
        for k, expert in enumerate(selection.expert_ids_TK[token].tolist()):
            gate, up = (experts.gate_up_proj[expert].double() @ vector).chunk(2)
            expected[token] += weights_TK[token, k] * (experts.down_proj[expert].double() @ (F.silu(gate) * up))
    torch.testing.assert_close(out.flatten(0, 1).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("recipe", model_config.EXPERT_RECIPES)
def test_every_recipe_and_wire_stays_near_the_default(recipe, wire):
    """Output and gradients of the layer; four-bit products are within 25 %, all others within 8 %."""
    found = []
    for fields in ({}, {"expert_recipe": recipe, "dispatch_wire": wire}):
        moe, x = layer(**fields)
        x.requires_grad_()
        out, _ = moe(x)
        out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(1)))
        assert out.dtype == torch.float32
        found.append([out.detach(), x.grad, moe.experts.gate_up_proj.grad, moe.experts.down_proj.grad])
    bound = 0.25 if recipe.startswith("nvfp4") else 0.08
    for plain, got in zip(*found, strict=True):
        error = float((got - plain).norm() / plain.norm())
        assert error < bound
        assert (error == 0) == (recipe == wire == "native")


@pytest.mark.parametrize("recipe", model_config.EXPERT_RECIPES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_learns_under_every_recipe(recipe, autocast):
    """Sixty Adam steps on four fixed rows."""
    model = Transformer(ModelConfig(**SMALL, expert_recipe=recipe))
    init_weights(model, 0)
    tokens = torch.randint(0, 64, (4, 24), generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(tokens).logits_BTV
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(4.16, abs=0.15)  # ln 64
    assert losses[-1] < 1.0


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_sampler_of_a_model_multiplies_in_its_recipe(recipe):
    model = Transformer(ModelConfig(**SMALL, expert_recipe=recipe, dispatch_wire="mxfp8"))
    init_weights(model, 0)
    engine = Engine(model, num_slots=2, max_len=32)
    experts = [module for module in engine.model.modules() if isinstance(module, MoE)]
    assert experts
    assert all(moe.experts.recipe == Recipe(name=recipe) and moe.experts.wire == "mxfp8" for moe in experts)


def test_widths_that_do_not_fit_the_blocks_are_refused_by_the_config():
    for field, value in (("hidden_size", 48), ("moe_intermediate_size", 80)):
        for recipe in ("mxfp8", "nvfp4", "nvfp4-tensor"):
            with pytest.raises(ValueError, match=f"{field} is {value}.*multiple of 32.*{recipe}"):
                ModelConfig(**{field: value}, expert_recipe=recipe)
        ModelConfig(**{field: value}, expert_recipe="bf16")
    with pytest.raises(ValueError, match="hidden_size is 48"):
        ModelConfig(hidden_size=48, dispatch_wire="mxfp8")
    for field in ("expert_recipe", "dispatch_wire", "nvfp4_order"):
        with pytest.raises(ValueError, match=f"{field} is 'fp4'"):
            ModelConfig(**{field: "fp4"})


@pytest.mark.parametrize("preset", [tiny, tiny_smoke])
def test_presets_fit_every_recipe(preset):
    for recipe in model_config.EXPERT_RECIPES:
        replace(preset().model, expert_recipe=recipe, dispatch_wire="mxfp8")


def test_a_checkpoint_keeps_its_recipe_and_an_older_one_is_native(tmp_path):
    """Trainer and sampler read one file; NeMo RL#3566 was two sides that were configured apart."""
    model = Transformer(ModelConfig(**SMALL, expert_recipe="nvfp4", nvfp4_order="te"))
    save_model(tmp_path / "new", model)
    assert load_config(tmp_path / "new") == model.config
    path = tmp_path / "new" / "config.json"
    data = json.loads(path.read_text())
    for field in ("expert_recipe", "dispatch_wire", "nvfp4_order"):
        del data[field]
    path.write_text(json.dumps(data))
    assert load_config(tmp_path / "new") == ModelConfig(**SMALL)
    path.write_text(json.dumps(data | {"expert_recipe": "nvfp4/token"}))
    with pytest.raises(ValueError, match="expert_recipe"):
        load_config(tmp_path / "new")
