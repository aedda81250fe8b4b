"""The policy: token ids go in, hidden states, logits and the experts used come out. Plain, on one device.

Two forwards of the same function: `forward` over whole (packed) rows for training, `forward_cached` over new tokens
with the latents (or keys and values) of earlier ones in a cache, for sampling.

    x = Emb(t);  x = Block_l(x) for every layer;  logits = Head(norm(x))

Source: report §3 (the base model, Kimi K2.5), DeepSeek-V3 paper; rows M1 M2 M3 M5 M6 M7 M10.
One decoder for all families: the config chooses its parts
when it is built, and no forward asks for a family's name.
Choice: replayed routes, documents and positions are arguments of forward, and what was routed is part of its result:
nothing is armed, hooked or remembered between calls (fault 25).
Choice: attention core and grouped-GEMM backend are constructor arguments, the seams a scaled-out build replaces.

Shape letters: B batch, T tokens, S new tokens, D model, V vocab, L MoE layers, K experts a token, E experts, N slots,
M cache positions, C cache width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from composer2.model.attention import Attend, CacheView, KeyView, cache_view, document_mask, sdpa_attend, tree_mask
from composer2.model.block import Block
from composer2.model.config import ModelConfig
from composer2.model.gqa import window_mask
from composer2.model.layers import RMSNorm, rope_tables
from composer2.model.moe import MoE
from composer2.model.mtp import MTPModule, MTPOutput, same_document, shift_left
from composer2.model.router_replay import ReplayConfig, Selection, check_routes


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """What the routers did in one forward. Counts are int64 scalars on the model's device; padding is never counted."""

    expert_ids_BTLK: torch.Tensor
    """int16: the experts used."""
    tokens_per_expert_LE: torch.Tensor
    """int64."""
    num_replayed: torch.Tensor
    """(token, layer) pairs whose experts came from recorded routes."""
    num_free: torch.Tensor
    """(token, layer) pairs the router decided, those with a -1 route included."""
    num_replaced: torch.Tensor
    """Expert slots in which the plausibility filter dropped the recorded expert; of num_replayed * K."""
    num_tokens: torch.Tensor
    """Tokens that are not padding."""
    num_tokens_differing: torch.Tensor
    """Tokens with, in any layer, a recorded set of experts that is not the router's own."""


@dataclass(frozen=True, kw_only=True)
class ModelOutput:
    """Result of `Transformer.forward`."""

    hidden_BTD: torch.Tensor
    """After the final norm: what the head and the MTP modules read."""
    logits_BTV: torch.Tensor
    """[B, T, V]; empty ([B, T, 0]) when they were not asked for."""
    routing: RoutingStats


@dataclass(frozen=True, kw_only=True)
class CachedOutput:
    """Result of `Transformer.forward_cached`; rows of padding tokens hold nothing of meaning."""

    hidden_BSD: torch.Tensor
    """After the final norm: what the head and `mtp_cached` read."""
    routes_BSLK: torch.Tensor
    """int16: the experts used."""


class Transformer(nn.Module):
    """Decoder with dense and mixture-of-experts layers. Call `init_weights` (or load) before use."""

    def __init__(self, config: ModelConfig, *, attend: Attend = sdpa_attend, grouped_backend: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        dense = config.first_k_dense_replace
        self.layers: Sequence[Block] = nn.ModuleList(  # type: ignore[assignment]
            Block(
                config,
                is_moe=index >= dense,
                attend=attend,
                grouped_backend=grouped_backend,
                is_windowed=config.is_windowed(index),
            )
            for index in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.mtp: Sequence[MTPModule] = nn.ModuleList(  # type: ignore[assignment]
            MTPModule(config, attend=attend, grouped_backend=grouped_backend)
            for _ in range(config.num_nextn_predict_layers)
        )
        self.tie_weights()

    def tie_weights(self) -> None:
        """With `tie_word_embeddings`, let head and embedding be one parameter (again, after tensors were assigned)."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        token_ids_BT: torch.Tensor,
        *,
        position_ids_BT: torch.Tensor | None = None,
        document_ids_BT: torch.Tensor | None = None,
        routes_BTLK: torch.Tensor | None = None,
        replay: ReplayConfig | None = None,
        with_logits: bool = True,
        visible_until_BT: torch.Tensor | None = None,
        key_view: KeyView | None = None,
    ) -> ModelOutput:
        """Whole rows. Without documents a row is one document; without positions each document counts from 0.

        Attention is causal within equal document ids; -1 is padding. With `visible_until_BT` rows are prefix trees in
        depth-first order: token i sees j when j <= i < visible_until[j], and positions have to be given. `routes_BTLK`
        replays recorded experts (rows of -1 route freely); without them `replay` is not read. `with_logits=False` saves
        the head: apply `lm_head` to the hidden states you need. `key_view` replaces the masks where rows are spread
        over processes: the arguments then describe the tokens that lie here, positions have to be given, and documents
        only tell padding. ValueError for token ids that are no integers, and for routes that do not fit.
        """
        if token_ids_BT.is_floating_point():
            raise ValueError(f"token_ids_BT has dtype {token_ids_BT.dtype}, accepted is an integer one")
        token_ids_BT = token_ids_BT.long()
        routes = None if routes_BTLK is None else check_routes(routes_BTLK, token_ids_BT, self.config)
        tau = 0.0 if replay is None else replay.tau
        x_BTD, rope, masks = self._open(token_ids_BT, position_ids_BT, document_ids_BT, visible_until_BT, key_view)
        selections: list[Selection] = []
        for layer in self.layers:
            layer_routes = None  # a dense layer takes none, and a dense model has none
            if routes is not None and len(selections) < routes.shape[2]:
                layer_routes = routes[:, :, len(selections)]
            x_BTD, selection = layer(x_BTD, rope, masks[layer.is_windowed], layer_routes, tau)
            if selection is not None:
                selections.append(selection)
        hidden_BTD = self.norm(x_BTD)
        logits = self.lm_head(hidden_BTD) if with_logits else hidden_BTD.new_zeros(*token_ids_BT.shape, 0)
        real_BT = None if document_ids_BT is None else document_ids_BT >= 0
        routing = self._routing_stats(selections, routes, token_ids_BT, real_BT)
        return ModelOutput(hidden_BTD=hidden_BTD, logits_BTV=logits, routing=routing)

    @torch.no_grad()
    def forward_cached(
        self,
        token_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor,
        *,
        cache: Sequence[torch.Tensor],
        slot_ids_B: torch.Tensor,
    ) -> CachedOutput:
        """New tokens at their positions; a token sees the positions up to its own in its slot. No gradient.

        `cache` holds one contiguous [N, M, C] tensor a layer, written in place. Position -1 is padding: nothing is
        written and the output row is to be ignored. `slot_ids_B` has one row of the cache a sequence, or, int64 [B, X],
        a page table: position t then lies in row table[t // M].
        """
        view = self._cache_view(position_ids_BS, cache, slot_ids_B, len(self.layers))
        x_BSD = self.embed_tokens(token_ids_BS.long())
        rope = rope_tables(position_ids_BS.clamp_min(0), self.config, x_BSD.dtype)
        routes = []
        for layer, cache_NMC in zip(self.layers, cache, strict=True):
            x_BSD, selection = layer.forward_cached(x_BSD, rope, cache_NMC, view)
            if selection is not None:
                routes.append(selection.expert_ids_TK)
        return CachedOutput(
            hidden_BSD=self.norm(x_BSD),
            routes_BSLK=_stack_routes(routes, token_ids_BS, self.config.num_experts_per_tok),
        )

    @torch.no_grad()
    def mtp_cached(
        self,
        trunk_BSD: torch.Tensor,
        next_token_ids_BS: torch.Tensor,
        position_ids_BS: torch.Tensor,
        *,
        cache_NMC: torch.Tensor,
        slot_ids_B: torch.Tensor,
    ) -> torch.Tensor:
        """The first MTP module over new positions, given trunk outputs and the token after each: [B, S, D] for the
        head, which then predicts the token after that. `cache_NMC` is a layer of its own; see `forward_cached`."""
        view = self._cache_view(position_ids_BS, [cache_NMC], slot_ids_B, 1)
        rope = rope_tables(position_ids_BS.clamp_min(0), self.config, trunk_BSD.dtype)
        return self.mtp[0].forward_cached(trunk_BSD, self.embed_tokens(next_token_ids_BS.long()), rope, cache_NMC, view)

    def new_cache(self, num_slots: int, max_len: int) -> list[torch.Tensor]:
        """A zeroed cache for `forward_cached`, in the dtype and on the device of the embedding."""
        shape = (num_slots, max_len, self.config.cache_dim)
        return [self.embed_tokens.weight.new_zeros(shape) for _ in self.layers]

    def mtp_forward(
        self,
        trunk_BTD: torch.Tensor,
        token_ids_BT: torch.Tensor,
        *,
        position_ids_BT: torch.Tensor | None = None,
        document_ids_BT: torch.Tensor | None = None,
        detach_trunk: bool = False,
    ) -> MTPOutput:
        """Run the MTP modules on `ModelOutput.hidden_BTD` (see mtp.py); their routes are never replayed.

        With `detach_trunk` no gradient reaches anything but the MTP modules.
        """
        token_ids_BT = token_ids_BT.long()
        embedding, head = self.embed_tokens.weight, self.lm_head.weight
        hidden = trunk_BTD
        if detach_trunk:
            hidden, embedding, head = hidden.detach(), embedding.detach(), head.detach()
        rope, (mask, _) = self._geometry(token_ids_BT, position_ids_BT, document_ids_BT, trunk_BTD.dtype)
        documents = torch.zeros_like(token_ids_BT) if document_ids_BT is None else document_ids_BT
        logits, loads = [], []
        for index, module in enumerate(self.mtp):
            next_embedding = F.embedding(shift_left(token_ids_BT, index + 1, 0), embedding)
            hidden, normed, expert_ids_TK = module(hidden, next_embedding, rope, mask)
            logits.append(F.linear(normed, head))
            known = expert_ids_TK[same_document(documents, index + 1).flatten()]
            loads.append(torch.bincount(known.flatten(), minlength=self.config.n_routed_experts))
        load_NE = torch.stack(loads) if loads else token_ids_BT.new_zeros(0, self.config.n_routed_experts)
        return MTPOutput(logits=logits, tokens_per_expert_NE=load_NE)

    def mtp_logits(
        self,
        trunk_BTD: torch.Tensor,
        token_ids_BT: torch.Tensor,
        *,
        position_ids_BT: torch.Tensor | None = None,
        document_ids_BT: torch.Tensor | None = None,
        detach_trunk: bool = False,
    ) -> list[torch.Tensor]:
        """Logits [B, T, V] of every MTP module: index i of module j predicts token i + j + 2."""
        return self.mtp_forward(
            trunk_BTD,
            token_ids_BT,
            position_ids_BT=position_ids_BT,
            document_ids_BT=document_ids_BT,
            detach_trunk=detach_trunk,
        ).logits

    def update_router_bias(
        self, tokens_per_expert_LE: torch.Tensor, rate: float, *, mtp_tokens_per_expert_NE: torch.Tensor | None = None
    ) -> None:
        """Move every selection bias by the sign rule (moe.py), from the load of the batch just trained."""
        self._update_biases(self.moe_layers(), tokens_per_expert_LE, rate)
        if mtp_tokens_per_expert_NE is not None:
            self._update_biases(
                [m.block.mlp for m in self.mtp if isinstance(m.block.mlp, MoE)], mtp_tokens_per_expert_NE, rate
            )

    def moe_layers(self) -> list[MoE]:
        """The MoE layers of the trunk, in the order of the L axis of every route array."""
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, MoE)]

    def _update_biases(self, layers: Sequence[MoE], load: torch.Tensor, rate: float) -> None:
        expected = (len(layers), self.config.n_routed_experts)
        if tuple(load.shape) != expected:
            raise ValueError(f"tokens_per_expert has shape {tuple(load.shape)}, accepted is {expected}")
        for layer, load_E in zip(layers, load, strict=True):
            layer.gate.update_bias(load_E, rate)

    def _open(
        self,
        token_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None,
        visible_until_BT: torch.Tensor | None,
        key_view: KeyView | None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]:
        x_BTD = self.embed_tokens(token_ids_BT)
        rope, masks = self._geometry(
            token_ids_BT, position_ids_BT, document_ids_BT, x_BTD.dtype, visible_until_BT, key_view
        )
        return x_BTD, rope, masks

    def _geometry(
        self,
        token_ids_BT: torch.Tensor,
        position_ids_BT: torch.Tensor | None,
        document_ids_BT: torch.Tensor | None,
        dtype: torch.dtype,
        visible_until_BT: torch.Tensor | None = None,
        key_view: KeyView | None = None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Rotary tables, and the attention masks of full and of windowed layers."""
        named = {"position_ids": position_ids_BT, "document_ids": document_ids_BT, "visible_until": visible_until_BT}
        for name, given in named.items():
            if given is not None and given.shape != token_ids_BT.shape:
                raise ValueError(f"{name} has shape {tuple(given.shape)}, accepted is {tuple(token_ids_BT.shape)}")
        if (visible_until_BT is not None or key_view is not None) and position_ids_BT is None:
            raise ValueError("position_ids is None, accepted with visible_until or key_view are depths of tokens")
        if key_view is not None and self.config.sliding_window is not None:
            raise ValueError("key_view is given, accepted is None with windowed layers")
        if position_ids_BT is None:
            position_ids_BT = positions_of(document_ids_BT if document_ids_BT is not None else token_ids_BT[:1] * 0)
        mask: torch.Tensor | None
        if key_view is not None:
            mask = key_view.mask()
        elif visible_until_BT is not None:
            mask = tree_mask(visible_until_BT)
        else:
            mask = None if document_ids_BT is None else document_mask(document_ids_BT)
        masks = (mask, window_mask(mask, position_ids_BT, self.config))
        return rope_tables(position_ids_BT, self.config, dtype), masks

    def _cache_view(
        self,
        position_ids_BS: torch.Tensor,
        cache: Sequence[torch.Tensor],
        slot_ids_B: torch.Tensor,
        num_layers: int,
    ) -> CacheView:
        if cache[0].shape[-1] != self.config.cache_dim or len(cache) != num_layers:
            raise ValueError(
                f"cache is {len(cache)} x {tuple(cache[0].shape)}, accepted is {num_layers} x "
                f"[N, M, {self.config.cache_dim}]"
            )
        return cache_view(position_ids_BS, cache[0], slot_ids_B, self.embed_tokens.weight.dtype)

    @torch.no_grad()
    def _routing_stats(
        self,
        selections: Sequence[Selection],
        routes_BTLK: torch.Tensor | None,
        token_ids_BT: torch.Tensor,
        real_BT: torch.Tensor | None,
    ) -> RoutingStats:
        config = self.config
        if real_BT is None:
            real_BT = torch.ones_like(token_ids_BT, dtype=torch.bool)
        ids_BTLK = _stack_routes([s.expert_ids_TK for s in selections], token_ids_BT, config.num_experts_per_tok)
        layers, experts = config.num_moe_layers, config.n_routed_experts
        first = torch.arange(layers, device=token_ids_BT.device)[:, None] * experts
        keys = ids_BTLK[real_BT].long() + first
        load_LE = torch.bincount(keys.flatten(), minlength=layers * experts).view(layers, experts)
        num_tokens = real_BT.sum()
        zero = torch.zeros_like(num_tokens)
        replayed = replaced = differing = zero
        if routes_BTLK is not None and selections:
            real_T = real_BT.flatten()
            replayed = ((routes_BTLK[..., 0] >= 0) & real_BT[..., None]).sum()
            replaced = torch.stack([s.replaced_T for s in selections if s.replaced_T is not None])[:, real_T].sum()
            differs = torch.stack([s.differs_T for s in selections if s.differs_T is not None])
            differing = (differs.any(0) & real_T).sum()
        return RoutingStats(
            expert_ids_BTLK=ids_BTLK,
            tokens_per_expert_LE=load_LE,
            num_replayed=replayed,
            num_free=num_tokens * layers - replayed,
            num_replaced=replaced,
            num_tokens=num_tokens,
            num_tokens_differing=differing,
        )


def positions_of(document_ids_BT: torch.Tensor) -> torch.Tensor:
    """int64 [B, T]: place of each token within its run of equal document ids."""
    columns = torch.arange(document_ids_BT.shape[1], device=document_ids_BT.device).expand(document_ids_BT.shape)
    starts = torch.ones_like(document_ids_BT, dtype=torch.bool)
    starts[:, 1:] = document_ids_BT[:, 1:] != document_ids_BT[:, :-1]
    return columns - torch.where(starts, columns, 0).cummax(dim=1).values


def _stack_routes(routes_TK: Sequence[torch.Tensor], token_ids_BT: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """int16 [B, T, L, K] of per-layer choices [B * T, K]."""
    if not routes_TK:
        return torch.zeros(*token_ids_BT.shape, 0, num_chosen, dtype=torch.int16, device=token_ids_BT.device)
    return torch.stack(list(routes_TK), dim=1).to(torch.int16).view(*token_ids_BT.shape, len(routes_TK), num_chosen)


@torch.no_grad()
def init_weights(model: Transformer, seed: int) -> None:
    """Normal matrices (std `initializer_range`), norms 1, buffers 0. Drawn on the CPU: equal on every device."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(draw * model.config.initializer_range)
    for buffer in model.buffers():
        buffer.zero_()
