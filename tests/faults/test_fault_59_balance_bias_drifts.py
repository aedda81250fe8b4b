"""Fault 59: the load-balance bias drifts as a whole unless its mean is removed."""

import torch

from composer2.model.config import ModelConfig
from composer2.model.moe import Router


def test_mean_stays_zero_and_centring_changes_no_choice():
    config = ModelConfig(hidden_size=8)
    router = Router(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.copy_(torch.randn(8, 8, generator=generator))
    x = torch.randn(64, 8, generator=generator)
    plain = torch.zeros(8, dtype=torch.float64)  # the same rule without centring
    for _ in range(1000):
        load = torch.poisson(torch.tensor([400.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]), generator=generator)
        router.update_bias(load, rate=0.001)
        plain += 0.001 * torch.sign(load.double().mean() - load.double())
    bias = router.e_score_correction_bias
    assert abs(bias.mean().item()) < 1e-6
    assert plain.mean().item() > 0.5  # the drift that is removed
    assert torch.allclose(bias.double(), plain - plain.mean(), atol=1e-4)
    scores = router.scores(x)
    uncentred = (scores + plain.float()).topk(2, dim=1).indices
    assert torch.equal(router.rank(scores)[1], uncentred)
