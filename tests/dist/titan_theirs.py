"""One state dict in composer2's model and in torchtitan's own DeepSeek-V3: logits and gradients of both.

torchtitan's model is built from its own parts and loaded through its own adapter from the published names. Two of its
parts have no float32 CPU form: its attention core gets one from `create_mask` and SDPA, its experts leave out the cast
to BF16."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_mask
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.deepseek_v3 import DeepSeekV3Model, build_mla_moe_layers
from torchtitan.models.deepseek_v3.state_dict_adapter import DeepSeekV3StateDictAdapter

from composer2.model.checkpoint.names import pieces
from composer2.model.config import ModelConfig


class MaskedAttention(FlexAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        pass

    def forward(self, q, k, v, *, attention_masks, scale=None, enable_gqa=False, **kwargs):
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = create_mask(attention_masks.mask_mod, q.shape[0], 1, q.shape[2], k.shape[2], device="cpu")
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2)


class WideExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD, num_tokens_per_expert_E):
        rows = x_RD.split(num_tokens_per_expert_E.tolist())
        matrices = zip(rows, self.w1_EFD, self.w3_EFD, self.w2_EDF, strict=True)
        return torch.cat([(F.silu(x @ gate.T) * (x @ up.T)) @ down.T for x, gate, up, down in matrices])


def config_of_theirs(sizes: ModelConfig) -> DeepSeekV3Model.Config:
    init = {"weight": nn.init.zeros_, "bias": nn.init.zeros_}
    experts = {name: nn.init.zeros_ for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
    layers = build_mla_moe_layers(
        n_layers=sizes.num_hidden_layers,
        n_dense_layers=sizes.first_k_dense_replace,
        dim=sizes.hidden_size,
        n_heads=sizes.num_attention_heads,
        q_lora_rank=sizes.q_lora_rank,
        kv_lora_rank=sizes.kv_lora_rank,
        qk_nope_head_dim=sizes.qk_nope_head_dim,
        qk_rope_head_dim=sizes.qk_rope_head_dim,
        v_head_dim=sizes.v_head_dim,
        mscale=1.0,
        dense_hidden_dim=sizes.intermediate_size,
        moe_hidden_dim=sizes.moe_intermediate_size,
        num_experts=sizes.n_routed_experts,
        num_shared_experts=sizes.n_shared_experts,
        router_top_k=sizes.num_experts_per_tok,
        router_score_func="sigmoid",
        router_route_scale=sizes.routed_scaling_factor,
        router_route_norm=True,
        attn_backend="flex",
        moe_comm_backend="standard",
        non_blocking_capacity_factor=None,
        linear_init=init,
        norm_init=init,
        depth_init=lambda layer: init,
        depth_experts_init=lambda layer: experts,
        rope=ComplexRoPE.Config(dim=sizes.qk_rope_head_dim, max_seq_len=64, theta=sizes.rope_theta),
    )
    config = DeepSeekV3Model.Config(
        vocab_size=sizes.vocab_size,
        dim=sizes.hidden_size,
        tok_embeddings=Embedding.Config(num_embeddings=sizes.vocab_size, embedding_dim=sizes.hidden_size),
        norm=RMSNorm.Config(normalized_shape=sizes.hidden_size),
        lm_head=Linear.Config(in_features=sizes.hidden_size, out_features=sizes.vocab_size),
        layers=layers,
        mtp_layers=[],
    )
    swap(config, FlexAttention.Config, lambda old: MaskedAttention.Config())
    swap(
        config,
        GroupedExperts.Config,
        lambda old: WideExperts.Config(dim=old.dim, hidden_dim=old.hidden_dim, num_experts=old.num_experts),
    )
    for _, norm, _, _ in config.traverse(RMSNorm.Config):
        norm.eps = sizes.rms_norm_eps
    return config


def swap(config, kind, replacement) -> None:
    for _, old, parent, name in list(config.traverse(kind)):
        setattr(parent, name, replacement(old))


def compare(parity) -> dict:
    """Largest relative differences of logits and of every gradient, own routing, packed documents."""
    set_spmd_backend("partial_dtensor")
    torch.compiler.set_stance("force_eager")  # the mask is only asked for its rule
    sizes = parity.CONFIG
    ours, batch = parity.build_model(torch.float32), parity.build_batch()
    config = config_of_theirs(sizes)
    theirs, adapter = config.build(), DeepSeekV3StateDictAdapter(config, None)
    parts = list(pieces(ours.state_dict(), sizes, "deepseek_v3"))
    state = ours.state_dict()
    published = {p.theirs: state[p.ours][p.where] if p.where else state[p.ours] for p in parts}
    missing = theirs.load_state_dict(adapter.from_hf(published), strict=False)

    token_ids, positions = batch.token_ids, batch.position_ids
    real = batch.document_ids >= 0
    labels = torch.where(real, token_ids, 0)
    documents = torch.where(real, batch.document_ids, 10_000 + torch.arange(token_ids.shape[1]))
    out_ours = ours(token_ids, position_ids_BT=positions, document_ids_BT=documents).logits_BTV
    masks = theirs.get_attention_masks(positions=torch.where(real, positions, 0))
    out_theirs = theirs(token_ids, positions=torch.where(real, positions, 0), attention_masks=masks)
    loss = partial(F.cross_entropy, reduction="sum")
    for out in (out_ours, out_theirs):
        loss(out[real], labels[real]).backward()
    gradients = {name: p.grad for name, p in ours.named_parameters()}
    trained = [p for p in parts if p.ours in gradients]
    expected = adapter.from_hf(
        {p.theirs: gradients[p.ours][p.where] if p.where else gradients[p.ours] for p in trained}
    )
    found = {name: p.grad for name, p in theirs.named_parameters()}
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - g).abs().max() / g.abs().max()) for name, g in expected.items()}
    return {
        "logits": float((out_ours - out_theirs).detach()[real].abs().max() / out_theirs.detach()[real].abs().max()),
        "gradients": errors,
        "missing": list(missing.missing_keys),
        "unexpected": list(missing.unexpected_keys),
    }
