"""Fault 29: a replayed expert outside the live top-k gets gate weight 0 and the router no gradient."""

import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.moe import Router


@pytest.mark.parametrize("groups", [(1, 1), (4, 1)])
@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
def test_expert_ranked_next_gets_weight_and_the_router_gradient(groups, scoring):
    config = ModelConfig(hidden_size=6, n_group=groups[0], topk_group=groups[1], scoring_func=scoring)
    router = Router(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 6, generator=generator))
    x = torch.randn(1, 6, generator=generator, dtype=torch.float64)
    scores = router.scores(x).detach()[0]
    _, own = router.rank(router.scores(x))
    outside = next(e for e in scores.argsort(descending=True).tolist() if e not in own[0].tolist())
    selection, weights = router(x, torch.tensor([[int(own[0, 0]), outside]]))
    assert selection.expert_ids_TK.tolist() == [[int(own[0, 0]), outside]]
    first, second = scores[int(own[0, 0])], scores[outside]
    assert weights[0].tolist() == pytest.approx([float(first / (first + second)), float(second / (first + second))])
    weights[0, 1].backward()
    assert router.weight.grad[outside].abs().sum().item() > 0
    assert router.weight.grad[int(own[0, 0])].abs().sum().item() > 0
