"""Fault 32: routes recorded for a different number of tokens are broadcast or cut instead of refused."""

import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights


@pytest.mark.parametrize("length", [0, 1, 5, 7])
def test_routes_of_another_length_are_an_error(length):
    config = ModelConfig(vocab_size=32, hidden_size=16, kv_lora_rank=8)
    model = Transformer(config)
    init_weights(model, 0)
    routes = torch.tensor([0, 1]).expand(1, length, 3, 2)
    with pytest.raises(ValueError, match=rf"routes have shape \(1, {length}, 3, 2\), accepted is .* \(1, 6, 3, 2\)"):
        model(torch.arange(6)[None], routes_BTLK=routes)
