"""Bytes that one rank keeps from the forward to the backward pass: a model config and token counts go in.

A sum over what the autograd engine saves, each stored tensor once. Per token, with a bytes a value, in this order:

    norm(w)      fused kernel: a w (its input) + 4;   in plain steps: 8 w + 4 (input and normed value in FP32)
    attention    norm(D) + a D + queries a H d + keys, values 2 a H d for every *gathered* token + out a H d + 4 H
    dense        norm(D) + a D + 4 a F
    MoE          norm(D) + FP32 input 4 D + gates 4 E + per chosen expert: row a D, hidden 4 a F, out a D, weighed 4 D
    head         norm(D) + a D + logits 4 V

Under context parallelism a rank has queries for its own tokens and expands keys and values of all tokens of its row:
hence two token counts. Under expert parallelism a rank is taken to receive as many rows as it sends (balanced experts).
With `block` checkpointing a block keeps its input only, and one block at a time is computed again.

Source: report §6.1 (parallelism); rows D2 D3 D6. The lines follow `model/block.py`, `attention.py`, `gqa.py`, `moe.py`.
Choice: the attention core is a fused one, which keeps out and one FP32 number a query and head; the dense document mask
of the CPU path (a byte a token pair) is no part of a plan. Experts in quantised recipes keep less than is counted here.

Letters: D model, H heads, d head width, F ffn, E experts, K experts a token, V vocabulary, G heads of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from composer2.model.config import ModelConfig

Checkpointing = Literal["none", "block"]
CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "block")


@dataclass(frozen=True, kw_only=True)
class ActivationShape:
    """What a rank runs in one micro-batch."""

    tokens: int
    """Tokens of the rank: rows * sequence length / cp."""
    gathered_tokens: int
    """Tokens whose keys and values the rank expands: rows * sequence length."""
    compute_bytes: int
    """Bytes of a value: 2 for bfloat16, 4 for float32."""
    expert_ranks: int = 1
    """Ranks the experts are split over; with more than one, rows that came back are kept once more, in their order."""
    fused_norm: bool = True
    """The norm keeps its input and one number a row (GPU kernel); False: the plain steps of the CPU path."""

    def norm(self, width: int, rows: int | None = None) -> int:
        """Bytes an RMSNorm over `width` values keeps for `rows` rows (default: the rank's tokens)."""
        value = self.compute_bytes * width if self.fused_norm else 8 * width
        return (self.tokens if rows is None else rows) * (value + 4)


def activation_bytes(config: ModelConfig, shape: ActivationShape, checkpointing: Checkpointing) -> int:
    """Bytes kept at the widest point of one micro-batch: trunk and head, MTP modules not.

    ValueError for an unknown `checkpointing`."""
    if checkpointing not in CHECKPOINTING:
        raise ValueError(f"checkpointing is {checkpointing!r}, accepted is one of {CHECKPOINTING}")
    blocks = [
        block_bytes(config, shape, is_moe=i >= config.first_k_dense_replace) for i in range(config.num_hidden_layers)
    ]
    shared = shape.tokens * (8 + 4 * config.rope_dim)  # token ids, rotary tables
    head = head_bytes(config, shape)
    if checkpointing == "none":
        return shared + sum(blocks) + head
    inputs = config.num_hidden_layers * shape.tokens * shape.compute_bytes * config.hidden_size
    return shared + inputs + max(*blocks, head)


def block_bytes(config: ModelConfig, shape: ActivationShape, *, is_moe: bool) -> int:
    """Bytes one decoder layer keeps."""
    attention = _latent(config, shape) if config.attention == "latent" else _grouped(config, shape)
    feed_forward = _moe(config, shape) if is_moe else _dense(config, shape)
    return 2 * shape.norm(config.hidden_size) + attention + feed_forward


def _latent(config: ModelConfig, shape: ActivationShape) -> int:
    """Attention of row M2 behind its norm."""
    a, tokens, gathered = shape.compute_bytes, shape.tokens, shape.gathered_tokens
    heads, rank = config.num_attention_heads, config.kv_lora_rank
    width = max(config.qk_head_dim, config.v_head_dim)  # the core wants queries, keys and values of one width
    kept = tokens * a * config.hidden_size
    if config.q_lora_rank is not None:
        kept += shape.norm(config.q_lora_rank) + tokens * a * config.q_lora_rank
    kept += shape.norm(rank) + gathered * a * rank
    value = width if config.v_head_dim < width else config.qk_nope_head_dim + config.v_head_dim  # padded, or a view
    kept += gathered * a * heads * (width + value)
    kept += 2 * tokens * a * heads * width + 4 * tokens * heads
    if config.v_head_dim != config.qk_head_dim:  # padding makes the output projection read a copy
        kept += tokens * a * heads * config.v_head_dim
    return kept


def _grouped(config: ModelConfig, shape: ActivationShape) -> int:
    """Attention of row M3 behind its norm; keys and values are repeated to H heads before the core."""
    a, tokens, gathered = shape.compute_bytes, shape.tokens, shape.gathered_tokens
    heads, shared, width = config.num_attention_heads, config.grouped_kv_heads, config.grouped_head_dim
    kept = tokens * a * config.hidden_size
    if config.qk_norm == "head":
        kept += shape.norm(width, tokens * (heads + shared))
    elif config.qk_norm == "flat":
        kept += shape.norm(width * heads) + shape.norm(width * shared)
    return kept + 2 * gathered * a * heads * width + 2 * tokens * a * heads * width + 4 * tokens * heads


def _dense(config: ModelConfig, shape: ActivationShape) -> int:
    return shape.tokens * shape.compute_bytes * (config.hidden_size + 4 * config.intermediate_size)


def _moe(config: ModelConfig, shape: ActivationShape) -> int:
    """Router, routed experts and shared experts behind their norm."""
    a, tokens = shape.compute_bytes, shape.tokens
    hidden, width, chosen = config.hidden_size, config.moe_intermediate_size, config.num_experts_per_tok
    router = tokens * 4 * hidden + tokens * (4 * config.n_routed_experts + 12 * chosen + 4)
    if a != 4:
        router += 4 * hidden * config.n_routed_experts  # the router's matrix in FP32
    rows = tokens * chosen * (2 * a * hidden + 4 * a * width + 4 * hidden + 20)
    if shape.expert_ranks > 1:
        rows += tokens * chosen * (a * hidden + 8)
    shared = config.n_shared_experts * width
    if shared:
        # At four bytes a value the shared experts read what the router has kept already.
        rows += tokens * a * (4 * shared + (hidden if a != 4 else 0))
    return router + rows


def head_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """Final norm, its output, and FP32 logits of every token with what the log-probability keeps beside them."""
    values = shape.compute_bytes * config.hidden_size + 4 * config.vocab_size + 12
    return shape.norm(config.hidden_size) + shape.tokens * values


def logits_working_bytes(config: ModelConfig, shape: ActivationShape) -> int:
    """What the backward pass of the head allocates on top: the logits' gradient, in FP32 and in the compute dtype."""
    return shape.tokens * config.vocab_size * (4 + shape.compute_bytes)
