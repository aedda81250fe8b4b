"""An all-to-all of rows that computation runs beside: started at one point, waited for at another, both ways.

    forward     begin(rows) ... finish()          what is called in between runs while rows travel
    backward    finish starts the way back of the gradient, begin waits for it

Autograd runs backward nodes in the reverse order of their forwards. Begins and finishes that are interleaved with
computation, as in `expert_parallel.py`, are therefore interleaved in the backward pass, too.
Source: report §6.1 (communication beside computation); row D3. NCCL runs a collective that was started asynchronously
on a stream of its own; gloo in a thread.
Choice: between its two nodes a transfer keeps its buffer to itself, and autograd is handed a placeholder without
memory: the buffer is not to be touched before it is waited for.

Shape letters: R rows sent, A rows that arrive, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

Splits = tuple[list[int], list[int]]
"""Rows sent to, and received from, each rank of the group, in rank order."""


class Transfer:
    """One exchange of rows and, in the backward pass, that of their gradients."""

    def __init__(self, splits: Splits, group: dist.ProcessGroup) -> None:
        self.splits, self.group = splits, group
        self._work: Any = None
        self._buffer: torch.Tensor | None = None
        self._anchor: torch.Tensor | None = None

    def begin(self, rows: torch.Tensor, payload_RB: torch.Tensor | None = None) -> None:
        """Send `rows` [R, ...], or `payload_RB` in their place; the gradient then still belongs to `rows`."""
        self._anchor = _Begin.apply(rows, self, rows if payload_RB is None else payload_RB)

    def finish(self, decode: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """What arrived, [A, ...]; with `decode`, what that makes of it."""
        assert self._anchor is not None, "finish without begin"
        arrived: torch.Tensor = _Finish.apply(self._anchor, self, decode)
        self._anchor = None
        return arrived

    def start(self, rows: torch.Tensor, splits: Splits) -> None:
        """Begin to exchange; no gradient."""
        sent, received = splits
        self._buffer = rows.new_empty(sum(received), *rows.shape[1:])
        self._work = dist.all_to_all_single(
            self._buffer, rows.contiguous(), received, sent, group=self.group, async_op=True
        )

    def wait(self) -> torch.Tensor:
        """The rows that were exchanged."""
        assert self._buffer is not None, "wait without start"
        self._work.wait()
        rows, self._buffer, self._work = self._buffer, None, None
        return rows


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, transfer: Transfer, sent: torch.Tensor) -> torch.Tensor:
        ctx.transfer = transfer
        transfer.start(sent.detach(), transfer.splits)
        return rows.new_zeros(1).expand(sum(transfer.splits[1]), *rows.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.transfer.wait(), None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, transfer: Transfer, decode: Callable[[torch.Tensor], torch.Tensor] | None
    ) -> torch.Tensor:
        ctx.transfer = transfer
        arrived = transfer.wait()
        return arrived if decode is None else decode(arrived)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.transfer.start(grads[0], ctx.transfer.splits[::-1])
        return grads[0].new_zeros(1).expand(grads[0].shape), None, None
