"""Fault 47: left padding shifts positions between generation and scoring."""

import torch

from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights


def test_seven_left_pads_change_no_log_prob():
    model = Transformer(ModelConfig(vocab_size=64, hidden_size=32, kv_lora_rank=16))
    init_weights(model, 0)
    model = model.double()
    tokens = torch.randint(0, 64, (1, 11), generator=torch.Generator().manual_seed(0))
    padded = torch.cat((torch.zeros(1, 7, dtype=torch.int64), tokens), dim=1)
    documents = torch.tensor([[-1] * 7 + [0] * 11])
    with torch.no_grad():
        plain = model(tokens).logits_BTV.log_softmax(-1)
        left = model(padded, document_ids_BT=documents).logits_BTV[:, 7:].log_softmax(-1)
    torch.testing.assert_close(left, plain, rtol=1e-10, atol=1e-10)
