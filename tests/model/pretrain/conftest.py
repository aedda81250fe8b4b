"""A model of thirty thousand parameters and a corpus of counting sequences."""

import numpy as np
import pytest

from composer2.model.config import ModelConfig
from composer2.model.pretrain.data import TokenisedCorpus, TokenStream
from composer2.model.transformer import Transformer, init_weights

TINY = ModelConfig(
    vocab_size=48,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=48,
    moe_intermediate_size=16,
    n_routed_experts=4,
    num_attention_heads=2,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture
def tiny_config() -> ModelConfig:
    return TINY


@pytest.fixture
def make_model():
    def make(seed: int = 0, config: ModelConfig = TINY) -> Transformer:
        model = Transformer(config)
        init_weights(model, seed)
        return model

    return make


def counting_stream(seed: int, num_documents: int) -> TokenStream:
    """Documents that count upwards by 1, modulo the vocabulary, from a random start."""
    rng = np.random.default_rng(seed)
    documents = [(rng.integers(48) + np.arange(rng.integers(5, 30))) % 48 for _ in range(num_documents)]
    starts = np.cumsum([0] + [len(document) for document in documents[:-1]])
    return TokenStream(token_ids=np.concatenate(documents).astype(np.int32), document_starts=starts.astype(np.int64))


@pytest.fixture
def corpus() -> TokenisedCorpus:
    return TokenisedCorpus(train=(counting_stream(0, 60),), heldout=counting_stream(1, 10), weights=(1.0,), pad_id=0)
