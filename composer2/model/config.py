"""Shape of the policy: in go the sizes, out comes one frozen `ModelConfig`, checked, with its parameter counts.

Source: report §3 (an MoE decoder) and §6.1 (multi-head latent attention); rows M1-M5 M7 M8 M10. Field names are
those of the published DeepSeek-V3 family configurations, so that a published file reads without a dictionary; those of
grouped-query attention are the names of Qwen3 and MiniMax-M2. families.py holds the published sizes.
Choice: counts are arithmetic here and are tested against a model on the meta device, so that planning needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

SCORING_FUNCS = ("sigmoid", "softmax")
EXPERT_RECIPES = ("native", "bf16", "mxfp8", "nvfp4", "nvfp4-tensor")
DISPATCH_WIRES = ("native", "bf16", "mxfp8")
ATTENTION_KINDS = ("latent", "grouped")
QK_NORMS = ("none", "head", "flat")
NVFP4_ORDERS = ("exact", "divide_outer", "reciprocal", "te")
MX_BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class YarnConfig:
    """YaRN context extension with the two magnitude constants of DeepSeek (row M4)."""

    factor: float
    """How many times longer than the original context; at least 1."""
    original_max_position_embeddings: int
    """Context length before the extension."""
    beta_fast: float = 32.0
    """Dimensions that turn more often than this within the original context keep their frequency."""
    beta_slow: float = 1.0
    """Dimensions that turn less often than this are interpolated by `factor`."""
    mscale: float = 1.0
    """Numerator constant of the cos/sin magnitude."""
    mscale_all_dim: float = 0.0
    """Denominator constant of the cos/sin magnitude; when not 0 it also multiplies the softmax scale, squared."""

    def __post_init__(self) -> None:
        for name in (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ):
            _require(_is_number(getattr(self, name)), name, getattr(self, name), "a number")
        _require(self.factor >= 1, "factor", self.factor, "a number >= 1")
        _require(
            self.original_max_position_embeddings >= 1,
            "original_max_position_embeddings",
            self.original_max_position_embeddings,
            "an integer >= 1",
        )
        _require(self.beta_slow > 0, "beta_slow", self.beta_slow, "a number > 0")
        _require(self.beta_fast >= self.beta_slow, "beta_fast", self.beta_fast, f"at least beta_slow {self.beta_slow}")
        _require(self.mscale >= 0, "mscale", self.mscale, "a number >= 0")
        _require(self.mscale_all_dim >= 0, "mscale_all_dim", self.mscale_all_dim, "a number >= 0")

    def magnitude(self, constant: float) -> float:
        """0.1 * constant * ln(factor) + 1."""
        return 0.1 * constant * math.log(self.factor) + 1.0

    @property
    def cos_sin_scale(self) -> float:
        """Factor on cos and sin: the RATIO of the two magnitudes, 1 when both constants are equal."""
        return self.magnitude(self.mscale) / self.magnitude(self.mscale_all_dim)

    @property
    def softmax_scale(self) -> float:
        """Factor on the softmax scale 1/sqrt(d): the squared magnitude of `mscale_all_dim`."""
        return self.magnitude(self.mscale_all_dim) ** 2


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a `Transformer`. The defaults are the tiny preset: CPU, minutes."""

    vocab_size: int = 1024
    """Rows of the embedding and of the head."""
    hidden_size: int = 128
    """Width of the residual stream."""
    num_hidden_layers: int = 4
    """Decoder layers of the trunk, dense ones included, MTP modules not."""
    first_k_dense_replace: int = 1
    """The first k layers have a dense feed-forward; all others are MoE layers."""
    intermediate_size: int = 384
    """Feed-forward width of the dense layers."""
    moe_intermediate_size: int = 96
    """Feed-forward width of one routed expert."""
    n_routed_experts: int = 8
    """Experts a router chooses from."""
    num_experts_per_tok: int = 2
    """Routed experts that see a token (K)."""
    n_shared_experts: int = 1
    """Experts every token passes, fused into one feed-forward; 0 for none."""
    n_group: int = 1
    """Groups of consecutive experts; only the best `topk_group` of them may be chosen from."""
    topk_group: int = 1
    """Groups a token may use."""
    norm_topk_prob: bool = True
    """Divide the gate weights of a token by their sum."""
    routed_scaling_factor: float = 1.0
    """Factor on the gate weights, after the normalisation."""
    scoring_func: str = "sigmoid"
    """`sigmoid` or `softmax` of the router logits."""
    num_attention_heads: int = 4
    """Attention heads (H)."""
    q_lora_rank: int | None = None
    """Rank of the query projection, or None for one full matrix."""
    kv_lora_rank: int = 64
    """Width of the latent that keys and values are expanded from."""
    qk_nope_head_dim: int = 32
    """Query/key width without position, per head."""
    qk_rope_head_dim: int = 16
    """Query/key width with rotary position; the key part is shared by all heads. Even."""
    v_head_dim: int = 32
    """Value width per head."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the block norms and the final norm (latent norms use 1e-6 always)."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    max_position_embeddings: int = 512
    """Longest context; a position at or beyond it is refused by the caches built from it."""
    rope_scaling: YarnConfig | None = None
    """YaRN, or None for plain rotary positions."""
    attention: Literal["latent", "grouped"] = "latent"
    """`latent` (MLA, row M2: the ranks and widths above) or `grouped` (GQA, row M3: the fields below instead)."""
    num_key_value_heads: int | None = None
    """Grouped: heads of keys and values, a divisor of `num_attention_heads`; None for one per query head."""
    head_dim: int | None = None
    """Grouped: width of a head; None for hidden_size // num_attention_heads."""
    rotary_dim: int | None = None
    """Grouped: leading part of a head that turns with position, even; None for all of it."""
    qk_norm: Literal["none", "head", "flat"] = "none"
    """Grouped: RMSNorm of queries and keys: `none`, one weight shared by all heads (`head`, Qwen3), or over the whole
    projection before it is cut into heads (`flat`, MiniMax-M2)."""
    sliding_window: int | None = None
    """Grouped, row M10: a windowed layer sees this many latest tokens, its own included. None: every layer sees all."""
    full_attention_every: int = 1
    """Of this many consecutive layers the last sees everything and the others are windowed; 0: all are windowed."""
    num_sink_tokens: int = 0
    """First tokens of a document that windowed layers always see."""
    tie_word_embeddings: bool = False
    """The head is the embedding matrix."""
    num_nextn_predict_layers: int = 1
    """MTP modules behind the trunk; module j predicts the token j + 2 places ahead (j from 0)."""
    initializer_range: float = 0.02
    """Standard deviation of the normal initialisation of every matrix."""
    expert_recipe: Literal["native", "bf16", "mxfp8", "nvfp4", "nvfp4-tensor"] = "native"
    """Number formats of the routed experts' products: `native` (the model's own dtype), `bf16`, `mxfp8` (forward and
    backward), `nvfp4` (a scale per token forward, MXFP8 backward), `nvfp4-tensor` (one scale a tensor, to compare). All
    but `native` and `bf16` want `hidden_size` and `moe_intermediate_size` to be multiples of 32."""
    dispatch_wire: Literal["native", "bf16", "mxfp8"] = "native"
    """What a token is sent to its experts as: `native`, `bf16`, or `mxfp8`; all but `native` come back as bf16."""
    nvfp4_order: Literal["exact", "divide_outer", "reciprocal", "te"] = "exact"
    """Order of the NVFP4 quantiser's operations: `exact`, or one an inference engine uses (`divide_outer`,
    `reciprocal`, `te`)."""

    def __post_init__(self) -> None:
        positive = "vocab_size hidden_size num_hidden_layers intermediate_size moe_intermediate_size n_routed_experts"
        positive += " num_experts_per_tok n_group topk_group num_attention_heads kv_lora_rank qk_nope_head_dim"
        positive += " qk_rope_head_dim v_head_dim max_position_embeddings"
        for name in positive.split():
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 1, name, value, "an integer >= 1")
        for name in ("n_shared_experts", "num_nextn_predict_layers"):
            value = getattr(self, name)
            _require(isinstance(value, int) and value >= 0, name, value, "an integer >= 0")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range", "routed_scaling_factor"):
            value = getattr(self, name)
            _require(_is_number(value) and value > 0, name, value, "a number > 0")
        fits = self.rope_scaling is None or self.rope_theta > 1
        _require(fits, "rope_theta", self.rope_theta, "with rope_scaling a number > 1")
        for name in ("norm_topk_prob", "tie_word_embeddings"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "true or false")
        layers, experts, groups = self.num_hidden_layers, self.n_routed_experts, self.n_group
        dense = self.first_k_dense_replace
        fits = isinstance(dense, int) and 0 <= dense <= layers
        _require(fits, "first_k_dense_replace", dense, f"0 .. num_hidden_layers {layers}")
        _require(self.scoring_func in SCORING_FUNCS, "scoring_func", self.scoring_func, f"one of {SCORING_FUNCS}")
        rank = self.q_lora_rank
        _require(rank is None or (isinstance(rank, int) and rank >= 1), "q_lora_rank", rank, "None or an integer >= 1")
        _require(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "an even number")
        _require(experts % groups == 0, "n_group", groups, f"a divisor of n_routed_experts {experts}")
        _require(self.topk_group <= groups, "topk_group", self.topk_group, f"at most n_group {groups}")
        _require(experts <= 32767, "n_routed_experts", experts, "at most 32767 (routes are int16)")
        reachable = experts // groups * self.topk_group
        chosen = self.num_experts_per_tok
        _require(chosen <= reachable, "num_experts_per_tok", chosen, f"at most {reachable}, the experts of topk_group")
        self._check_attention()
        self._check_formats()

    def _check_attention(self) -> None:
        """The fields of grouped-query attention, which latent attention leaves alone."""
        _require(self.attention in ATTENTION_KINDS, "attention", self.attention, f"one of {ATTENTION_KINDS}")
        _require(self.qk_norm in QK_NORMS, "qk_norm", self.qk_norm, f"one of {QK_NORMS}")
        if self.attention == "latent":
            for name in ("num_key_value_heads", "head_dim", "rotary_dim", "sliding_window"):
                _require(getattr(self, name) is None, name, getattr(self, name), "None with attention 'latent'")
            _require(self.qk_norm == "none", "qk_norm", self.qk_norm, "'none' with attention 'latent'")
            return
        heads, shared = self.num_attention_heads, self.num_key_value_heads
        fits = shared is None or (shared >= 1 and heads % shared == 0)
        _require(fits, "num_key_value_heads", shared, f"a divisor of num_attention_heads {heads}")
        head_fits = self.head_dim is None and self.hidden_size % heads == 0
        accepted = f"an integer >= 1, or None with hidden_size a multiple of {heads}"
        _require(head_fits or (self.head_dim or 0) >= 1, "head_dim", self.head_dim, accepted)
        _require(self.rope_dim % 2 == 0 and 2 <= self.rope_dim <= self.grouped_head_dim, "rotary_dim", self.rotary_dim,
            f"an even number up to head_dim {self.grouped_head_dim}")  # fmt: skip
        window = self.sliding_window
        _require(window is None or window >= 1, "sliding_window", window, "None or an integer >= 1")
        _require(self.full_attention_every >= 0, "full_attention_every", self.full_attention_every, "an integer >= 0")
        _require(self.num_sink_tokens >= 0, "num_sink_tokens", self.num_sink_tokens, "an integer >= 0")
        scale = 0.0 if self.rope_scaling is None else self.rope_scaling.mscale_all_dim
        _require(scale == 0, "mscale_all_dim", scale, "0 with attention 'grouped', whose softmax scale YaRN leaves")

    def _check_formats(self) -> None:
        """Number formats, and the widths their blocks need."""
        recipe, wire = self.expert_recipe, self.dispatch_wire
        _require(recipe in EXPERT_RECIPES, "expert_recipe", recipe, f"one of {EXPERT_RECIPES}")
        _require(wire in DISPATCH_WIRES, "dispatch_wire", wire, f"one of {DISPATCH_WIRES}")
        _require(self.nvfp4_order in NVFP4_ORDERS, "nvfp4_order", self.nvfp4_order, f"one of {NVFP4_ORDERS}")
        accepted = f"a multiple of {MX_BLOCK} with expert_recipe {recipe!r} and dispatch_wire {wire!r}"
        if recipe not in ("native", "bf16"):
            for name in ("hidden_size", "moe_intermediate_size"):
                _require(getattr(self, name) % MX_BLOCK == 0, name, getattr(self, name), accepted)
        if wire == "mxfp8":
            _require(self.hidden_size % MX_BLOCK == 0, "hidden_size", self.hidden_size, accepted)

    @property
    def num_moe_layers(self) -> int:
        """MoE layers of the trunk: the L of every route array."""
        return self.num_hidden_layers - self.first_k_dense_replace

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def grouped_head_dim(self) -> int:
        """Width of a head of grouped-query attention."""
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim

    @property
    def grouped_kv_heads(self) -> int:
        """Heads of keys and values of grouped-query attention."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def rope_dim(self) -> int:
        """Width that turns with position: two per rotary frequency."""
        if self.attention == "latent":
            return self.qk_rope_head_dim
        return self.grouped_head_dim if self.rotary_dim is None else self.rotary_dim

    @property
    def cache_dim(self) -> int:
        """Values a token a layer in the decode cache: latent and rope key (row M2), or keys and values (row M3)."""
        if self.attention == "latent":
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.grouped_kv_heads * self.grouped_head_dim

    def is_windowed(self, layer: int) -> bool:
        """Layer `layer` of the trunk (from 0) sees the window and the sinks only."""
        every = self.full_attention_every
        return self.sliding_window is not None and (every == 0 or (layer + 1) % every != 0)

    @property
    def num_parameters(self) -> int:
        """Parameters of the trunk, embedding and head included, MTP modules and correction-bias buffers not."""
        return self._count(self.n_routed_experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters one token uses, embedding and head included."""
        return self._count(self.num_experts_per_tok)

    @property
    def num_mtp_parameters(self) -> int:
        """Parameters the MTP modules add (embedding and head are shared)."""
        hidden = self.hidden_size
        return self.num_nextn_predict_layers * (2 * hidden * hidden + 3 * hidden + self._layer(self.n_routed_experts))

    def _count(self, experts: int) -> int:
        hidden = self.hidden_size
        dense = self.first_k_dense_replace * (self._attention() + 2 * hidden + 3 * hidden * self.intermediate_size)
        tables = 1 if self.tie_word_embeddings else 2
        return tables * self.vocab_size * hidden + hidden + dense + self.num_moe_layers * self._layer(experts)

    def _layer(self, experts: int) -> int:
        """One MoE decoder layer of which `experts` routed experts count."""
        hidden = self.hidden_size
        feed_forward = 3 * hidden * self.moe_intermediate_size * (experts + self.n_shared_experts)
        return self._attention() + 2 * hidden + hidden * self.n_routed_experts + feed_forward

    def _attention(self) -> int:
        hidden, heads, rank = self.hidden_size, self.num_attention_heads, self.kv_lora_rank
        if self.attention == "grouped":
            width, shared = heads * self.grouped_head_dim, self.grouped_kv_heads * self.grouped_head_dim
            norms = {"none": 0, "head": 2 * self.grouped_head_dim, "flat": width + shared}[self.qk_norm]
            return hidden * (2 * width + 2 * shared) + norms
        width = heads * self.qk_head_dim
        query = hidden * width
        if self.q_lora_rank is not None:
            query = self.q_lora_rank * (hidden + 1 + width)
        latent = hidden * self.cache_dim + rank + rank * heads * (self.qk_nope_head_dim + self.v_head_dim)
        return query + latent + heads * self.v_head_dim * hidden


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require(holds: bool, name: str, value: object, accepted: str | Sequence[str]) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}, accepted is {accepted}")
