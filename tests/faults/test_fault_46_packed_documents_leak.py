"""Fault 46: a packed row ignores document boundaries; positions that restart do not stop the leak."""

import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights


def run(model, first, second, routes=None):
    tokens = torch.cat((first, second))[None]
    documents = torch.tensor([[0] * len(first) + [1] * len(second)])
    positions = torch.cat((torch.arange(len(first)), torch.arange(len(second))))[None]
    out = model(tokens, document_ids_BT=documents, position_ids_BT=positions, routes_BTLK=routes)
    drafts = model.mtp_logits(out.hidden_BTD, tokens, document_ids_BT=documents, position_ids_BT=positions)
    inside = [out.logits_BTV, *drafts]
    return [logits[:, len(first) :].detach() for logits in inside], out.routing.expert_ids_BTLK


def build(**changes):
    model = Transformer(ModelConfig(vocab_size=64, hidden_size=32, kv_lora_rank=16, **changes))
    init_weights(model, 0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)
    return model


@pytest.mark.parametrize("dense", [True, False])
def test_another_first_document_leaves_the_second_bitwise_unchanged(dense):
    """In the MoE model the experts are held by replay: tokens share a matrix product with those that chose the same
    expert, and products of another height may round differently."""
    model = build(first_k_dense_replace=4, num_nextn_predict_layers=0) if dense else build(num_nextn_predict_layers=0)
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(0, 64, (n,), generator=generator) for n in (9, 9, 13))
    _, routes = run(model, first, second)
    (before,), _ = run(model, first, second, None if dense else routes)
    (after,), _ = run(model, other, second, None if dense else routes)
    assert torch.equal(before, after)


def test_free_routing_and_mtp_do_not_leak_either():
    model = build(num_nextn_predict_layers=2)
    generator = torch.Generator().manual_seed(0)
    first, other, second = (torch.randint(0, 64, (n,), generator=generator) for n in (9, 9, 13))
    before, routes_before = run(model, first, second)
    after, routes_after = run(model, other, second)
    assert not torch.equal(routes_before[:, :9], routes_after[:, :9])
    assert torch.equal(routes_before[:, 9:], routes_after[:, 9:])
    for a, b in zip(before, after, strict=True):
        assert (a - b).abs().max().item() <= 1e-5 * a.abs().max().item()
