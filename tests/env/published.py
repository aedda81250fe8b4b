"""Small random models as Hugging Face directories, and configs of runs that begin with them."""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from composer2.model.checkpoint.huggingface import save_huggingface
from composer2.model.config import ModelConfig
from composer2.model.transformer import Transformer, init_weights
from composer2.recipes import RunConfig, tiny

TEMPLATES = Path(__file__).parent / "chat_templates"
LENGTH = 2048
SIZES = {
    "episode": {"context_budget": LENGTH, "max_tokens_per_turn": 32, "max_turns": 2},
    "engine": {"max_len": LENGTH, "num_slots": 16},
    "rl": {"num_steps": 2, "prompts_per_step": 2, "group_size": 4, "checkpoint_every": 1, "row_length": LENGTH},
}
FLAGS = [
    *(f"--{part}.{name.replace('_', '-')}={value}" for part, sizes in SIZES.items() for name, value in sizes.items()),
    *("--rl.max-staleness=0", "--rl.reward.components.3.weight=-1", "--eval.mismatch-tasks=1"),
    *(f"--eval.sets.{n}.{field}" for n in range(3) for field in ("num-tasks=1", "num-samples=2")),
]
"""Two steps of RL whose reward counts malformed calls: the one thing on which random models differ."""


def tokenizer_into(folder, chat, template):
    chat.backend().save(str(folder / "tokenizer.json"))
    shutil.copy(TEMPLATES / template, folder / "chat_template.jinja")
    return folder


def qwen3(folder, chat, dtype=torch.float32, **changes):
    """A random Qwen3 with tied embeddings, as transformers writes it; more rows than tokens, as published ones have."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": chat.tokenizer().vocab_size + 5,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": chat.tokenizer().special_id("<|im_end|>"),
    }
    Qwen3ForCausalLM(Qwen3Config(**(fields | changes))).to(dtype).save_pretrained(folder)
    return tokenizer_into(folder, chat, "qwen3.jinja")


def kimi(folder, chat):
    """A random model of the DeepSeek-V3 family with an MTP module, two MoE layers and Kimi K2's marks."""
    config = ModelConfig(
        vocab_size=chat.tokenizer().vocab_size, hidden_size=32, num_hidden_layers=3, intermediate_size=64,
        moe_intermediate_size=16, n_routed_experts=4, num_attention_heads=2, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=8, max_position_embeddings=4096,
    )  # fmt: skip
    model = Transformer(config)
    init_weights(model, 0)
    save_huggingface(folder, model, eos_ids=[chat.tokenizer().special_id("<|im_end|>")])
    return tokenizer_into(folder, chat, "kimi-k2.jinja")


def config_of(place: Path | str, **changes) -> RunConfig:
    """The preset `tiny` from `place` on; a change is a value, or a dict of fields of a part."""
    base = replace(tiny(), start=str(place))
    parts = {part: replace(getattr(base, part), **(sizes | changes.pop(part, {}))) for part, sizes in SIZES.items()}
    return replace(base, **parts, **changes)
