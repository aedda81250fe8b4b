"""Fault 46: packed rows leak across documents; resetting positions alone does not stop it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from composer2.model.config import ModelConfig
from composer2.model.pretrain.data import PretrainBatch, TokenStream, pack_examples
from composer2.model.pretrain.loop import to_tensors
from composer2.model.pretrain.mtp import draft_weights
from composer2.model.transformer import Transformer, init_weights

CONFIG = ModelConfig(
    vocab_size=32,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=32,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
A, OTHER_A, B = np.arange(7), np.arange(7)[::-1] + 12, np.arange(5) * 3


def from_stream(first: np.ndarray) -> PretrainBatch:
    stream = TokenStream(
        token_ids=np.concatenate([first, B]).astype(np.int32), document_starts=np.array([0, 7], dtype=np.int64)
    )
    return stream.rows([0], 16, pad_id=0)


def from_examples(first: np.ndarray) -> PretrainBatch:
    return pack_examples([(first, np.ones(7)), (B, np.ones(5))], row_len=16, pad_id=0)


def logits_of_both(pack, config: ModelConfig, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    """(main, draft) logits of the row with A and of the row with the other A."""
    model = Transformer(config)
    init_weights(model, 0)
    model.to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5.0)  # far from uniform attention
    found = []
    for first in (A, OTHER_A):
        batch = to_tensors(pack(first), torch.device("cpu"))
        assert batch.position_ids_BT[0, :12].tolist() == [*range(7), *range(5)]
        places = {"position_ids_BT": batch.position_ids_BT, "document_ids_BT": batch.document_ids_BT}
        output = model(batch.token_ids_BT, **places)
        drafts = model.mtp_logits(output.hidden_BTD, batch.token_ids_BT, **places)
        found.append((output.logits_BTV[0], *(logits[0] for logits in drafts)))
    return found


@pytest.mark.parametrize("pack", [from_stream, from_examples])
def test_changing_a_leaves_the_logits_of_b_bitwise_unchanged(pack):
    """Dense layers: the matrix products have one shape, so not a bit may differ."""
    dense = replace(CONFIG, first_k_dense_replace=2, num_nextn_predict_layers=0)
    for mine, other in zip(*logits_of_both(pack, dense, torch.float32), strict=True):
        assert torch.equal(mine[7:12], other[7:12])
        assert not torch.equal(mine[:7], other[:7])


@pytest.mark.parametrize("pack", [from_stream, from_examples])
def test_changing_a_moves_b_by_rounding_at_most_with_experts(pack):
    """With experts A decides how many rows an expert multiplies, which may pick another kernel and another rounding."""
    for mine, other in zip(*logits_of_both(pack, CONFIG, torch.float64), strict=True):
        torch.testing.assert_close(mine[7:12], other[7:12], atol=1e-12, rtol=1e-12)
        assert (mine[:7] - other[:7]).abs().max() > 0.1


def test_no_loss_crosses_a_boundary():
    batch = to_tensors(from_examples(A), torch.device("cpu"))
    assert batch.weights_BT[0].tolist() == [0, *[1] * 6, 0, *[1] * 4]
    # the first MTP layer predicts two ahead: five such pairs inside A, three inside B
    assert draft_weights(batch, 1)[0].tolist() == [1, 1, 1, 1, 1, 0, 0, 1, 1, 1]
