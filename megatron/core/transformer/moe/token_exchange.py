"""All-to-all of rows with its gradient: start and wait are two calls, forward and backward, so that others run between.

Which rows go where is the dispatchers' matter; gathers are in tensor_parallel/mappings.py.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass
class RowExchange:
    """One all-to-all of rows, forward and backward: `start` launches, `wait` completes, on any side work between them.

    send, receive: rows to and from each rank; None: as many for each.
    """

    group: dist.ProcessGroup
    send: list[int] | None = None
    receive: list[int] | None = None
    _running: tuple[dist.Work, Tensor, Tensor] | None = field(init=False, default=None)

    def start(self, rows: Tensor) -> Tensor:
        """Launches the exchange of rows: [R, *], float, by receiver. Returns what `wait` wants. Collective."""
        return _Start.apply(rows, self)

    def wait(self, started: Tensor) -> Tensor:
        """The received rows, by sender: [R', *], the rows' dtype."""
        return _Wait.apply(started, self)

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> Tensor:
        """Starts one direction; rows: [R, *], any dtype. Returns the buffer that `finish` will find full: [R', *]."""
        assert self._running is None, "an exchange was started twice"
        rows = rows.contiguous()
        received = rows.new_empty(len(rows) if receive is None else sum(receive), *rows.shape[1:])
        work = dist.all_to_all_single(received, rows, receive, send, group=self.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        # The rows too: without this reference their memory could be reused while they are still being sent.
        self._running = work, received, rows
        return received

    def finish(self) -> Tensor:
        """Waits for what was launched; returns the received rows: [R', *], any dtype."""
        assert self._running is not None, "an exchange was not started"
        work, received, _ = self._running
        work.wait()
        self._running = None
        return received


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row i of the result is what rank i has for this rank in its row; counts: [ranks, e], int64. Collective."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


class _Start(torch.autograd.Function):
    """Forward launches; backward completes what _Wait's backward launched."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.launch(rows, send=exchange.send, receive=exchange.receive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.finish(), None


class _Wait(torch.autograd.Function):
    """Forward completes; backward launches the way back and leaves completing it to _Start's backward.

    Whatever autograd runs between the two, as a shared expert's backward, runs beside the exchange.
    """

    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: RowExchange) -> Tensor:
        ctx.exchange = exchange
        exchange.finish()
        return started.view_as(started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.launch(grad, send=exchange.receive, receive=exchange.send)
        # Only the shape of this one counts: the gradient itself is on its way.
        return grad, None
