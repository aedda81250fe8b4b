"""Fault 71: the trained MTP module never reached the engine, which went on drafting with the old one."""

import torch

from composer2.model.config import ModelConfig
from composer2.model.engine.engine import Engine
from composer2.model.engine.sequence import Request
from composer2.model.transformer import Transformer, init_weights
from composer2.rl.system.weight_sync import FolderSink, read_weights
from composer2.types import SamplingParams

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, intermediate_size=32, moe_intermediate_size=16,
    max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


def run(engine: Engine) -> tuple[list[list[int]], int]:
    """Greedy tokens of eight prompts, and how many drafts were taken."""
    before = engine.stats.accepted_tokens
    params = SamplingParams(max_tokens=20, temperature=0)
    for i in range(8):
        engine.submit(Request(token_ids=(1, 2, 3 + i), params=params, session=f"{i}", group="g", seed=i))
    done = []
    while engine.has_work:
        done += engine.step()
    for i in range(8):
        engine.release(f"{i}")
    tokens = [f.generation.token_ids.tolist() for f in sorted(done, key=lambda f: f.session)]
    return tokens, engine.stats.accepted_tokens - before


def test_a_push_of_nothing_but_mtp_weights_changes_the_drafts_only(tmp_path) -> None:
    model = Transformer(CONFIG)
    init_weights(model, 0)
    engine = Engine(model, num_slots=8, max_len=64, speculative=True, dtype=torch.float64)
    tokens, num_accepted = run(engine)
    names = [name for name in model.state_dict() if name.startswith("mtp.")]
    held = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}

    other = Transformer(CONFIG)
    init_weights(other, 1)
    state = model.state_dict() | {name: other.state_dict()[name] for name in names}
    sink = FolderSink(tmp_path)
    engine.load_weights(read_weights(sink.publish(1, state)), 1)

    now = engine.model.state_dict()
    for name, tensor in now.items():
        assert torch.equal(tensor, state[name].to(tensor.dtype)), name
    drawn = [name for name in names if not torch.equal(model.state_dict()[name], other.state_dict()[name])]
    assert len(drawn) > 5  # the norms start equal
    for name in now:
        assert torch.equal(now[name], held[name]) == (name not in drawn)
    tokens_after, num_accepted_after = run(engine)
    assert tokens_after == tokens  # greedy tokens are the trunk's, whatever drafts them
    fresh = Transformer(CONFIG)
    fresh.load_state_dict(state)
    expected = Engine(fresh, num_slots=8, max_len=64, speculative=True, dtype=torch.float64)
    assert run(expected) == (tokens_after, num_accepted_after)
    assert num_accepted_after != num_accepted
