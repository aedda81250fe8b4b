"""What the benchmark of the engine says about itself: spans, medians, and that both sides do the same work."""

import pytest
import torch
from transformers import DeepseekV3ForCausalLM

from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.transformer import Transformer, init_weights


@pytest.fixture
def script(load_script):
    return load_script("bench_engine")


def test_sides_alternate_and_medians_leave_the_first_call_out(script):
    order = []

    def side(name, values):
        left = iter(values)

        def call():
            order.append(name)
            value = next(left)
            return [script.Seconds(value, 10 * value)]

        return call

    found = script.alternate((side("a", [99, 1, 5, 2]), side("b", [99, 7, 3, 3])), 3)
    assert found == [[script.Seconds(2, 20)], [script.Seconds(3, 30)]]
    assert order == ["b", "a", "a", "b", "b", "a", "a", "b"]
    assert script.ratio("x", *(spans[0] for spans in found)) == {"x": 1.5, "x_wall": 1.5}


def test_both_sides_decode_the_same_tokens(script, tmp_path):
    torch.set_num_threads(1)
    model = Transformer(script.CONFIG)
    init_weights(model, 0)
    save_huggingface(tmp_path / "model", model)
    peer = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    peer.generation_config.eos_token_id = None
    figures = script.bench_decode(model, peer, 1, 3)
    assert figures["greedy_identical"] == 1
    assert figures["greedy_tokens_compared"] == script.NUM_PROMPTS * 3
    with torch.no_grad():
        peer.lm_head.weight[:] = peer.lm_head.weight.flip(0)
    assert script.bench_decode(model, peer, 1, 3)["greedy_identical"] == 0
    assert script.bench_prefix(model, 1, 40)["prefix_cache_same_tokens"] == 1
    acceptance = script.bench_speculative(model, 1, 8)["speculative_acceptance"]
    assert 0 < acceptance < 1


def test_both_sides_train_on_the_same_loss(script, tmp_path):
    model = Transformer(script.CONFIG)
    init_weights(model, 1)
    save_huggingface(tmp_path / "model", model)
    peer = DeepseekV3ForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert script.bench_train(model, peer, 2, 1, 32)["train_loss_difference"] < 1e-5
