"""The job of test_expert_parallel.py: what number formats and the transport do to tokens, experts and gradients."""

import json
import sys
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from composer2.dist.deepep import DeepEPExchange, make_buffer
from composer2.dist.expert_parallel import ExpertExchange
from composer2.dist.transfer import Transfer
from composer2.kernels.dispatch import combine_tokens, pack_tokens
from composer2.kernels.linear import Recipe, expert_linear
from composer2.model.config import ModelConfig
from composer2.model.moe import Experts

E, D, N, T = 8, 128, 64, 70


def tokens(rank: int, *, chosen=2, spread=0.0, first=0, last=E):
    """Tokens of one rank, their experts out of `first` .. `last` - 1, and gate weights."""
    generator = torch.Generator().manual_seed(100 + rank)
    x = torch.randn(T + 3 * rank, D, generator=generator)
    x = (x * (spread * torch.randn(x.shape, generator=generator)).exp()).bfloat16()
    ids = torch.stack([first + torch.randperm(last - first, generator=generator)[:chosen] for _ in x])
    return x, ids, torch.rand(ids.shape, generator=generator)


def upstream(rank: int, shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(500 + rank))


def matrices():
    return (torch.randn(E, N, D, generator=torch.Generator().manual_seed(9)) / 11).bfloat16()


def visit(exchange, parts, own, *, dtype, recipe):
    """(output, dgrad, wgrad, gradient of gate weights) of one product with the experts `own` through `exchange`."""
    x, ids, weights = parts
    x, weights = x.to(dtype).requires_grad_(), weights.clone().requires_grad_()
    w = matrices()[own].to(dtype).requires_grad_()

    def experts(rows, offsets, codes=None):
        return expert_linear(rows, w, offsets, recipe=recipe, wire=codes)

    out = exchange(x, ids, weights, experts)
    out.backward(upstream(dist.get_rank(), out.shape).to(out.dtype))
    return out.detach(), x.grad, w.grad, weights.grad


def local_exchange(wire):
    def run(x, ids, weights, experts):
        packed = pack_tokens(x, ids, E, wire=wire)
        return combine_tokens(experts(packed.rows_RD, packed.offsets_E, packed.codes), packed, weights)

    return run


def rounded_twice(rank_parts, dtype):
    """The wgrad of every expert in float64: tokens rounded along D, then tokens and gradients along the expert's rows.

    Rows of an expert in the order of rank, then of token."""
    grads = []
    for expert in range(E):
        rows, upstreams = [], []
        for rank, (x, ids, weights) in enumerate(rank_parts):
            for t, k in (ids == expert).nonzero().tolist():
                rows.append(mxfp8(x[t].double()[None])[0])
                upstreams.append((upstream(rank, (len(x), N))[t] * weights[t, k]).bfloat16().double())
        grad = torch.zeros(N, D, dtype=torch.float64)
        if rows:
            seen, given = (along_rows(torch.stack(part)) for part in (rows, upstreams))
            grad = given.T @ seen
        grads.append(grad)
    return torch.stack(grads)


def mxfp8(x):
    """Blocks of 32 along the last axis, a power of two a block so that nothing saturates, nearest-even E4M3."""
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-30) / 448))), 1.0)
    return ((blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn).double() * scale).flatten(-2)


def along_rows(x):
    padded = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 32))
    return mxfp8(padded.T.contiguous()).T[: len(x)]


def gathered(tensor):
    """The parts of all ranks, one after the other, on every rank; they may differ in length."""
    parts: list = [None] * dist.get_world_size()
    dist.all_gather_object(parts, tensor)
    return torch.cat(parts)


def formats(spread: float, dtype: torch.dtype, last: int) -> dict:
    """The wires through `ExpertExchange`, against each other, one process, and the double-rounding reference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    recipe = Recipe(name="mxfp8")
    own = slice(rank * E // world, (rank + 1) * E // world)
    parts = tokens(rank, spread=spread, last=last)
    everyone = [tokens(r, spread=spread, last=last) for r in range(world)]
    wired, plain = (
        visit(ExpertExchange(dist.group.WORLD, E, wire), parts, own, dtype=dtype, recipe=recipe)
        for wire in ("mxfp8", "bf16")
    )
    found = {
        f"{name}_equal": bool(torch.equal(gathered(a), gathered(b)))
        for name, a, b in zip(("out", "dgrad", "wgrad", "gate"), wired, plain, strict=True)
    }
    wgrad, plain_wgrad = gathered(wired[2]).double(), gathered(plain[2]).double()
    reference = rounded_twice(everyone, dtype)
    found["wgrad_error"] = float((wgrad - reference).abs().max() / reference.abs().max())
    found["wgrad_gap"] = float((wgrad - plain_wgrad).norm() / plain_wgrad.norm())
    found["rows_without"] = sum(
        int((ids == e).sum()) == 0 for e in range(E) for ids in [torch.cat([p[1] for p in everyone])]
    )
    return found


def experts_module(dtype: torch.dtype) -> dict:
    """The whole feed-forward of an MoE layer: MXFP8 experts behind an MXFP8 wire against a BF16 wire."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for wire in ("mxfp8", "bf16"):
        config = ModelConfig(
            hidden_size=D, moe_intermediate_size=32, n_routed_experts=E, expert_recipe="mxfp8", dispatch_wire=wire
        )
        module = Experts(config).to(dtype)
        generator = torch.Generator().manual_seed(4)
        own = slice(rank * E // world, (rank + 1) * E // world)
        for name, parameter in list(module.named_parameters()):
            whole = torch.randn(parameter.shape, generator=generator) / 8
            module.register_parameter(name, torch.nn.Parameter(whole[own].to(dtype)))
        module.exchange = ExpertExchange(dist.group.WORLD, E, wire)
        x, ids, weights = tokens(rank, spread=1.5)
        x, weights = x.to(dtype).requires_grad_(), weights.requires_grad_()
        out = module(x, ids, weights)
        out.backward(upstream(rank, out.shape).to(out.dtype))
        results.append((out.detach(), x.grad, weights.grad, module.down_proj.grad))
    return {
        f"{name}_equal": bool(torch.equal(gathered(a), gathered(b)))
        for name, a, b in zip(("out", "dgrad", "gate", "down"), *results, strict=True)
    }


def native() -> dict:
    """Float64 tokens and matrices over a native wire against one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, ids, weights = tokens(rank)
    own = slice(rank * E // world, (rank + 1) * E // world)
    results = []
    for exchange, here in ((ExpertExchange(dist.group.WORLD, E), own), (local_exchange("native"), slice(0, E))):
        tokens_TD, w = x.double().requires_grad_(), matrices().double()[here].requires_grad_()

        def experts(rows, offsets, codes=None, w=w):
            bounds = [0, *offsets.tolist()]
            return torch.cat([rows[a:b] @ m.T for a, b, m in zip(bounds, bounds[1:], w, strict=False)])

        out = exchange(tokens_TD, ids, weights.double(), experts)
        out.backward(upstream(rank, out.shape).double())
        wgrad = w.grad
        if here != own:
            dist.all_reduce(wgrad)
            wgrad = wgrad[own]
        results.append((out.detach(), tokens_TD.grad, wgrad))
    return {
        f"{name}_error": float((gathered(a) - gathered(b)).abs().max())
        for name, a, b in zip(("out", "dgrad", "wgrad"), *results, strict=True)
    }


def in_parts(num_parts: int) -> dict:
    """Float64 over a native wire, in parts against whole; and what was started, waited for and computed, in order."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x, ids, weights = tokens(rank)
    own = slice(rank * E // world, (rank + 1) * E // world)
    results, events = [], []
    real_start, real_wait = Transfer.start, Transfer.wait

    def start(self, rows, splits):
        events.append("start")
        real_start(self, rows, splits)

    def wait(self):
        events.append("wait")
        return real_wait(self)

    for parts in (1, num_parts):
        rows_TD, w = x.double().requires_grad_(), matrices().double()[own].requires_grad_()

        def experts(rows, offsets, codes=None, w=w):
            events.append("experts")
            rows.register_hook(lambda grad: events.append("experts"))
            bounds = [0, *offsets.tolist()]
            return torch.cat([rows[a:b] @ m.T for a, b, m in zip(bounds, bounds[1:], w, strict=False)])

        events.clear()
        Transfer.start, Transfer.wait = start, wait
        out = ExpertExchange(dist.group.WORLD, E, num_parts=parts)(rows_TD, ids, weights.double(), experts)
        forward = len(events)
        out.backward(upstream(rank, out.shape).double())
        Transfer.start, Transfer.wait = real_start, real_wait
        results.append((out.detach(), rows_TD.grad, w.grad))
    found = {
        f"{name}_error": float((gathered(a) - gathered(b)).abs().max())
        for name, a, b in zip(("out", "dgrad", "wgrad"), *results, strict=True)
    }
    return found | {"forward": events[:forward], "backward": events[forward:]}


class GlooBuffer:
    """A stand-in for `deep_ep.Buffer`, from its documentation: tokens go once to each rank, combine adds plainly."""

    def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0):
        self.group, self.group_size = group, dist.get_world_size(group)
        self.sizes = (num_nvl_bytes, num_rdma_bytes)

    class Config:
        def get_nvl_buffer_size_hint(self, hidden_bytes, ranks):
            return hidden_bytes * ranks

        def get_rdma_buffer_size_hint(self, hidden_bytes, ranks):
            return 0

    @classmethod
    def get_dispatch_config(cls, ranks):
        return cls.Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx, num_experts):
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts)
        rank_of = topk_idx // (num_experts // self.group_size)
        in_rank = torch.stack([(rank_of == r).any(1) for r in range(self.group_size)], dim=1)
        return in_rank.sum(0), None, per_expert, in_rank, None

    def _to_ranks(self, rows, in_rank):
        parts: list = [None] * self.group_size
        dist.all_gather_object(parts, [rows[in_rank[:, r]] for r in range(self.group_size)], group=self.group)
        return [part[dist.get_rank(self.group)] for part in parts]

    def dispatch(self, x, handle=None, topk_idx=None, topk_weights=None, num_tokens_per_rank=None,
                 num_tokens_per_rdma_rank=None, is_token_in_rank=None, num_tokens_per_expert=None):  # fmt: skip
        if handle is not None:
            assert topk_idx is None
            return torch.cat(self._to_ranks(x, handle[0])), None, None, None, None, None
        if isinstance(x, tuple):
            assert x[0].dtype == torch.float8_e4m3fn
            assert x[1].dtype == torch.float32
            assert x[1].shape == (len(x[0]), x[0].shape[1] // 128)
            words = x[1].view(torch.int32)  # moved, never computed with
            moved = [torch.cat(self._to_ranks(part, is_token_in_rank)) for part in (x[0].view(torch.uint8), words)]
            arrived = (moved[0].view(torch.float8_e4m3fn), moved[1].view(torch.float32))
        else:
            assert x.dtype == torch.bfloat16
            arrived = torch.cat(self._to_ranks(x, is_token_in_rank))
        ids = self._to_ranks(topk_idx, is_token_in_rank)
        per_rank = len(num_tokens_per_expert) // self.group_size
        here = torch.cat(ids) - dist.get_rank(self.group) * per_rank
        here = torch.where((here >= 0) & (here < per_rank), here, -1)
        weights = torch.cat(self._to_ranks(topk_weights, is_token_in_rank)).masked_fill(here < 0, 0.0)
        counts = [int((here == e).sum()) for e in range(per_rank)]
        return arrived, here, weights, counts, (is_token_in_rank, [len(part) for part in ids]), None

    def combine(self, x, handle, topk_weights=None):
        assert x.dtype == torch.bfloat16
        in_rank, counts = handle
        results = []
        for rows in (x, topk_weights):
            if rows is None:
                results.append(None)
                continue
            parts: list = [None] * self.group_size
            dist.all_gather_object(parts, list(rows.split(counts)), group=self.group)
            total = torch.zeros(len(in_rank), *rows.shape[1:])
            for r, part in enumerate(parts):
                total[in_rank[:, r]] += part[dist.get_rank(self.group)].float()
            results.append(total.to(rows.dtype))
        return results[0], results[1], None


def deepep(wire: str) -> dict:
    """`DeepEPExchange` over the stand-in against `ExpertExchange`, the same wire."""
    sys.modules["deep_ep"] = ModuleType("deep_ep")
    sys.modules["deep_ep"].Buffer = GlooBuffer
    rank, world = dist.get_rank(), dist.get_world_size()
    own = slice(rank * E // world, (rank + 1) * E // world)
    buffer = make_buffer(dist.group.WORLD, D)
    assert buffer.sizes == (2 * D * world, 0)
    recipe = Recipe(name="mxfp8" if wire == "mxfp8" else "bf16")
    ours, theirs = (
        visit(exchange, tokens(rank, chosen=3), own, dtype=torch.float32, recipe=recipe)
        for exchange in (DeepEPExchange(buffer, E, wire), ExpertExchange(dist.group.WORLD, E, wire))
    )
    return {
        f"{name}_error": float((gathered(a) - gathered(b)).norm() / gathered(b).norm())
        for name, a, b in zip(("out", "dgrad", "wgrad", "gate"), ours, theirs, strict=True)
    }


def job(folder: Path) -> None:
    found = {"native": native(), "parts_2": in_parts(2), "parts_100": in_parts(100)}
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        for spread in (0.0, 4.0):
            found[f"{name}_{spread}"] = formats(spread, dtype, E)
        found[f"{name}_few"] = formats(4.0, dtype, 3)
        found[f"{name}_module"] = experts_module(dtype)
    found |= {f"deepep_{wire}": deepep(wire) for wire in ("bf16", "mxfp8")}
    if dist.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(found))
