"""All-to-all of rows with its gradient: start and wait are two calls, forward and backward, so that others run between.

Which rows go where is the dispatchers' matter; gathers are in tensor_parallel/mappings.py. What carries them is a
RowTransport: torch's collectives here, memory that ranks share in symmetric_rows.py.
"""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.core.group_collectives import arriving


@dataclass(frozen=True)
class RowsUnderWay:
    """sent: [R, *], received: [R', *], any dtype; the second is full, on the current stream, after each of `works`."""

    sent: Tensor
    received: Tensor
    works: tuple[dist.Work, ...] = ()


class RowTransport(Protocol):
    """Carries rows between the ranks of a group."""

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """rows: [R, *], any dtype, contiguous, by receiver. send, receive: rows to and from each rank; None: as many
        for each. Collective.
        """


@dataclass(frozen=True)
class CollectiveTransport:
    """torch's all-to-all over `group`."""

    group: dist.ProcessGroup

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Starts an asynchronous all-to-all of rows: [R, *], any dtype."""
        shape = len(rows) if receive is None else sum(receive), *rows.shape[1:]
        received = arriving(shape, self.group, dtype=rows.dtype, device=rows.device)
        work = dist.all_to_all_single(received, rows, receive, send, group=self.group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        return RowsUnderWay(rows, received, (work,))


@dataclass
class RowExchange:
    """One all-to-all of rows, forward and backward: `start` launches, `wait` completes, on any side work between them.

    send, receive: rows to and from each rank; None: as many for each.
    """

    transport: RowTransport
    send: list[int] | None = None
    receive: list[int] | None = None
    # With the rows sent: without this reference their memory could be reused while they are still being sent.
    _running: RowsUnderWay | None = field(init=False, default=None)

    def start(self, rows: Tensor) -> Tensor:
        """Launches the exchange of rows: [R, *], float, by receiver. Returns what `wait` wants. Collective."""
        return _Start.apply(rows, self)

    def wait(self, started: Tensor) -> Tensor:
        """The received rows, by sender: [R', *], the rows' dtype."""
        return _Wait.apply(started, self)

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> Tensor:
        """Starts one direction; rows: [R, *], any dtype. Returns the buffer that `finish` will find full: [R', *]."""
        assert self._running is None, "an exchange was started twice"
        self._running = self.transport.launch(rows.contiguous(), send=send, receive=receive)
        return self._running.received

    def finish(self) -> Tensor:
        """Waits for what was launched; returns the received rows: [R', *], any dtype."""
        assert self._running is not None, "an exchange was not started"
        running, self._running = self._running, None
        for work in running.works:
            work.wait()
        return running.received


def exchange_counts(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Row i of the result is what rank i has for this rank in its row; counts: [ranks, e], int64. Collective."""
    received = arriving(counts.shape, group, dtype=counts.dtype, device=counts.device)
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
