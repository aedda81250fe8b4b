"""Fault 25: replay armed on routers that are not the ones that run, so that it silently does nothing."""

import torch

from composer2.model.config import ModelConfig
from composer2.model.moe import Router
from composer2.model.transformer import Transformer, init_weights


def test_wrong_routes_change_the_output_in_every_layer_and_no_router_is_left_over():
    config = ModelConfig(vocab_size=32, hidden_size=16, kv_lora_rank=8, num_nextn_predict_layers=0)
    model = Transformer(config)
    init_weights(model, 0)
    tokens = torch.arange(12)[None]
    free = model(tokens)
    own = free.routing.expert_ids_BTLK
    for layer in range(config.num_moe_layers):
        routes = own.clone()
        routes[:, :, layer] = (own[:, :, layer] + 1) % config.n_routed_experts
        wrong = model(tokens, routes_BTLK=routes)
        assert torch.equal(wrong.routing.expert_ids_BTLK[:, :, layer], routes[:, :, layer])
        assert (wrong.logits_BTV - free.logits_BTV).abs().max().item() > 1e-5
    routers = [module for module in model.modules() if isinstance(module, Router)]
    assert routers == [layer.gate for layer in model.moe_layers()]
    assert len(routers) == config.num_moe_layers
