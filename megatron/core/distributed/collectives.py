"""Collectives over the flat tensors of a gradient or parameter buffer: asynchronous, in place, stateless.

Buffers own the tensors, and scheduler.py orders the launches. Nothing is sent if the group is None or has one rank.

[Note: rank order] A backend may add the ranks' values in any order, and gloo's order depends on the size of the tensor.
If results must not depend on this order, each rank receives the contributions of all ranks to its shard (all-to-all)
and adds them in rank order, in fp32 or wider. An element's sum then depends neither on its bucket nor on the rank that
computes it, so an all-reduce is bit-identical to a reduce-scatter.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from megatron.core.device import SideStream
from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.layout import round_up
from megatron.core.group_collectives import all_gather_single, reduce_scatter_single
from megatron.core.process_groups_config import group_rank, group_size

# Maximum number of elements of one all-to-all. A rank-ordered sum allocates at most _IN_FLIGHT times as many in
# addition to its input.
_SLICE_ELEMENTS = 1 << 24
_IN_FLIGHT = 2


class Handle(Protocol):
    """A collective in flight. All ranks of its group must call the same methods in the same order."""

    def advance(self) -> None:
        """Waits for the first stage and starts the second, if any.

        The second stage is the gather after a reduce-scatter, or the sum over optimizer instances. Call `advance` of
        several handles before the first `wait`, so that their second stages overlap; `wait` calls it if necessary.
        Modifies the tensor, and blocks the host if the tensor is on the CPU.
        """
        ...

    def wait(self) -> None:
        """Waits until the tensor holds the result; on a GPU the current stream waits, not the host."""
        ...

    def advance_early(self) -> bool:
        """Starts the second stage if the first has ended, and returns whether nothing is left to start early.

        Applies only to sums over several optimizer instances with ReductionPolicy.side and without can_repeat; other
        handles return True and do nothing. Never blocks the host. Ranks may call it at different times, but must
        advance their handles in the same order.
        """
        ...

    def is_sent(self) -> bool:
        """Returns whether `wait` would return without blocking the host; queries the device on a GPU."""
        ...

    def works(self) -> list[dist.Work]:
        """Returns torch's work handles of the launches that may still be in flight, for measurements."""
        ...

    def discard(self) -> None:
        """Ends the collective without a result, so that the tensor keeps this rank's input.

        Called instead of `advance` and `wait`; allowed only with ReductionPolicy.can_repeat.
        """
        ...


@dataclass(frozen=True)
class ReductionPolicy:
    """Settings of gradient reductions over ranks, shared by all buckets.

    deterministic: see [Note: rank order]. average: computes the mean instead of the sum. fp32_accumulation: sends
    16-bit tensors unconverted and adds them in fp32; wider tensors are added in their dtype. instances_group: the ranks
    that own the same shard in all optimizer instances. After the sum within each instance, a second level sums shards
    over this group. side: the stream on which a GPU's second level waits for the first. Without it, the second level
    starts in `advance` or `wait`.
    """

    deterministic: bool = False
    average: bool = False
    fp32_accumulation: bool = False
    instances_group: dist.ProcessGroup | None = None
    side: SideStream | None = None

    @property
    def can_repeat(self) -> bool:
        """Whether a tensor in flight keeps its input until `advance` or `wait`, so that the reduction can be repeated.

        If so, PersistentGrads.launch_second_round discards the first reduction and repeats it with the late gradients,
        and `abandon` discards it instead of waiting for its result.
        """
        return self.deterministic


def reduce_bucket_(
    flat: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    sharded: bool,
    policy: ReductionPolicy,
    into: torch.Tensor | None = None,
) -> Handle:
    """Launches the in-place sum of `flat` over `group`.

    flat: [N], floating point, contiguous. sharded: only this rank's shard, the rank-th of equal parts, receives the
    sum, and the other parts become undefined; N must be a multiple of the number of ranks. If not sharded, all of
    `flat` receives the sum. into: receives the shard's sum instead of `flat`, which becomes undefined: [N / ranks],
    flat's dtype, contiguous. Neither tensor may be written before `wait`.
    """
    assert sharded or into is None, (
        "into is given without sharded: only the sum of a shard can be written to a separate tensor"
    )
    first = _reduce(flat, group, sharded=sharded, policy=policy, into=into)
    if group_size(policy.instances_group) == 1:
        return first
    if into is not None:
        part = into
    else:
        part = shard_of(flat, group) if sharded else flat

    def across_instances() -> Handle:
        return _reduce(part, policy.instances_group, sharded=False, policy=policy)

    # A reduction that can be repeated must not change the tensor before `advance` or `wait`.
    if policy.can_repeat or policy.side is None:
        return _Chain(first, across_instances)
    chain = _Following(first, across_instances)
    with policy.side.current() as is_on_side:
        if is_on_side:
            chain.advance()
    return chain


@trace_range("gather_shards_")
def gather_shards_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Launches an in-place all-gather of `flat`, to which rank r contributes the r-th of equal parts.

    flat: [N], any dtype, contiguous. Used for parameters, and for gradient sums after the reduce-scatter of a
    rank-ordered all-reduce.
    """
    if group_size(group) == 1:
        return _Done()
    if not _is_on_host(flat):
        return _Launched(all_gather_single(flat, shard_of(flat, group), group=group, async_op=True))
    # gloo's all-gather copies the whole tensor, which takes 5 times the CPU time and doubles the memory.
    shards = flat.view(group_size(group), -1)
    return _Launched(
        *[dist.broadcast(shard, group=group, group_src=rank, async_op=True) for rank, shard in enumerate(shards)]
    )


def shard_of(flat: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Returns this rank's shard of `flat`, one of equal parts: [N], any dtype -> [N / ranks], a view."""
    return flat.view(group_size(group), -1)[group_rank(group)]


def _shard_place(flat: torch.Tensor, *, group: dist.ProcessGroup, into: torch.Tensor | None) -> torch.Tensor:
    return shard_of(flat, group) if into is None else into


def all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat` over `group` in place, in an order chosen by the backend.

    flat: any shape, floating point, contiguous.
    """
    reduce_bucket_(flat.view(-1), group, sharded=False, policy=ReductionPolicy()).wait()


def rank_ordered_all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat` over `group` in place, in rank order; see [Note: rank order].

    flat: any shape, floating point, contiguous.
    """
    reduce_bucket_(flat.view(-1), group, sharded=False, policy=ReductionPolicy(deterministic=True)).wait()


def _reduce(
    flat: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    sharded: bool,
    policy: ReductionPolicy,
    into: torch.Tensor | None = None,
) -> Handle:
    """Launches one level of reduce_bucket_, that is, the sum over a single group."""
    ranks = group_size(group)
    if ranks == 1:
        return _alone(flat, into)
    assert group is not None
    in_fp32 = policy.fp32_accumulation and flat.dtype.itemsize == 2
    # gloo's reduce-scatter all-reduces a copy, which takes 1.7 times the CPU time.
    if policy.deterministic or in_fp32 or (sharded and _is_on_host(flat)):
        if not sharded and flat.numel() % ranks:
            return _ordered_of_any_size(flat, group, policy=policy)
        scatter = _OrderedReduceScatter(flat, group, average=policy.average, into=into)
        return scatter if sharded else _Chain(scatter, lambda: gather_shards_(flat, group))
    # Only NCCL can average; with other backends the sum is divided afterwards.
    op = dist.ReduceOp.AVG if policy.average and _is_over_nccl(flat, group) else dist.ReduceOp.SUM
    if sharded:
        return _Launched(
            reduce_scatter_single(_shard_place(flat, group=group, into=into), flat, op=op, group=group, async_op=True)
        )
    work = dist.all_reduce(flat, op=op, group=group, async_op=True)
    if op == dist.ReduceOp.AVG or not policy.average:
        return _Launched(work)

    def divide() -> Handle:
        flat.div_(ranks)
        return _Done()

    return _Chain(_Launched(work), divide)


def _alone(flat: torch.Tensor, into: torch.Tensor | None) -> Handle:
    if into is not None:
        into.copy_(flat)
    return _Done()


def _is_on_host(flat: torch.Tensor) -> bool:
    # Meta tensors of a dry run must take the same path as a GPU's, so `not flat.is_cuda` would be wrong.
    return flat.device.type == "cpu"


def _is_over_nccl(flat: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return flat.is_cuda and "cuda:nccl" in dist.get_backend_config(group)


def _ordered_of_any_size(flat: torch.Tensor, group: dist.ProcessGroup, *, policy: ReductionPolicy) -> Handle:
    """Reduces a tensor of any size in rank order, by padding it to a multiple of the number of ranks."""
    padded = flat.new_zeros(round_up(flat.numel(), group_size(group)))
    padded[: flat.numel()] = flat

    def copy_back() -> Handle:
        flat.copy_(padded[: flat.numel()])
        return _Done()

    return _Chain(_reduce(padded, group, sharded=False, policy=policy), copy_back)


class _Handle:
    """Base class of handles. By default, a collective has no second stage."""

    def advance(self) -> None:
        pass

    def advance_early(self) -> bool:
        return True


class _Done(_Handle):
    """Handle of a collective that is complete or sends nothing."""

    def wait(self) -> None:
        pass

    def is_sent(self) -> bool:
        return True

    def works(self) -> list[dist.Work]:
        return []

    def discard(self) -> None:
        pass


class _Launched(_Handle):
    """Handle of collectives launched by the backend, without a second stage."""

    def __init__(self, *works: dist.Work) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()

    def is_sent(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def works(self) -> list[dist.Work]:
        return list(self._works)

    def discard(self) -> None:
        raise AssertionError("a collective that writes to its input cannot be discarded: see can_repeat")


class _Chain(_Handle):
    """Handle of a collective followed by a second one, or by local work on its result."""

    def __init__(self, first: Handle, then: Callable[[], Handle]) -> None:
        self._first, self._then = first, then
        self._second: Handle | None = None

    def advance(self) -> None:
        if self._second is None:
            self._first.wait()
            self._second = self._then()

    def wait(self) -> None:
        self.advance()
        assert self._second is not None
        self._second.wait()

    def is_sent(self) -> bool:
        return self._second is not None and self._second.is_sent()

    def works(self) -> list[dist.Work]:
        return self._first.works() if self._second is None else self._second.works()

    def discard(self) -> None:
        assert self._second is None, "discard was called after advance or wait"
        self._first.discard()


class _Following(_Chain):
    """Handle of two collectives whose second one may be started early, as soon as the first has ended."""

    def advance_early(self) -> bool:
        if self._second is None and self._first.is_sent():
            self.advance()
        return self._second is not None


@dataclass(frozen=True)
class _Slice:
    """All ranks' contributions to a slice of this rank's shard.

    columns: the slice; the reduced tensor is viewed as one row per rank. by_rank: the contributions, [columns] each;
    this rank's contribution may be a view of its shard. kept: the tensor that was sent, which must stay alive until
    `works` are complete.
    """

    columns: slice
    works: list[dist.Work]
    by_rank: list[torch.Tensor]
    kept: torch.Tensor | None = None


class _OrderedReduceScatter(_Handle):
    """Sums this rank's shard of `flat` in rank order, in place or into a separate tensor; see [Note: rank order].

    Every reduce-scatter over gloo on the CPU uses this class, not only deterministic ones. The exchange is split into
    slices to bound the memory for received values. Two slices are in flight from the start, and `wait` sends the
    others.
    """

    @trace_range("_OrderedReduceScatter")
    def __init__(
        self, flat: torch.Tensor, group: dist.ProcessGroup, *, average: bool, into: torch.Tensor | None = None
    ) -> None:
        self._rows = flat.view(group_size(group), -1)
        self._total = _shard_place(flat, group=group, into=into)
        self._group, self._average = group, average
        self._width = max(1, _SLICE_ELEMENTS // self._rows.shape[0])
        self._sent = 0  # columns
        self._in_flight: deque[_Slice] = deque()
        for _ in range(_IN_FLIGHT):
            self._send()

    def is_sent(self) -> bool:
        # Remaining slices are sent only in `wait`, so that all ranks launch them in the same order.
        is_all = self._sent == self._rows.shape[1]
        return is_all and all(work.is_completed() for work in self.works())

    def wait(self) -> None:
        while self._in_flight:
            piece = self._in_flight.popleft()
            for work in piece.works:
                work.wait()
            _sum_in_order(
                piece.by_rank, into=self._total[piece.columns], divisor=len(self._rows) if self._average else 1
            )
            self._send()

    def works(self) -> list[dist.Work]:
        return [work for piece in self._in_flight for work in piece.works]

    def discard(self) -> None:
        # Slices that were not sent yet are never sent, on any rank.
        while self._in_flight:
            for work in self._in_flight.popleft().works:
                work.wait()

    @trace_range("_OrderedReduceScatter._send")
    def _send(self) -> None:
        start, end = self._sent, min(self._sent + self._width, self._rows.shape[1])
        if start < end:
            self._sent = end
            exchange = _exchange_pairwise if _is_on_host(self._rows) else _exchange_all
            self._in_flight.append(exchange(self._rows, slice(start, end), group=self._group))


def _exchange_all(rows: torch.Tensor, columns: slice, *, group: dist.ProcessGroup) -> _Slice:
    """Launches one all-to-all that sends each rank the columns of its row."""
    # Copies unless the slice has all columns.
    sent = rows[:, columns].contiguous()
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    return _Slice(columns, [work], list(received), kept=sent)


def _exchange_pairwise(rows: torch.Tensor, columns: slice, *, group: dist.ProcessGroup) -> _Slice:
    """Launches pairwise exchanges of columns without a copy; one gloo all-to-all would copy this rank's columns."""
    ranks, own = group_size(group), group_rank(group)
    parts = [row[columns] for row in rows]
    works, by_rank = [], list(parts)
    for distance in range(1, ranks):
        target, source = (own + distance) % ranks, (own - distance) % ranks
        by_rank[source] = torch.empty_like(parts[own])
        from_ranks, to_ranks = (
            [len(parts[own]) * (rank == peer) for rank in range(ranks)] for peer in (source, target)
        )
        works.append(
            dist.all_to_all_single(by_rank[source], parts[target], from_ranks, to_ranks, group=group, async_op=True)
        )
    return _Slice(columns, works, by_rank)


def _sum_in_order(terms: Sequence[torch.Tensor], *, into: torch.Tensor, divisor: int) -> None:
    """Adds terms, [N] each, in order and in fp32 or wider, divides and then rounds; may overwrite the terms."""
    # One addition at a time, because a reduction kernel over rows may add them in any order.
    first, *others = terms
    total = first.float() if first.dtype.itemsize == 2 else first
    for term in others[:-1]:
        total.add_(term)
    if others:
        # The last addition writes to its destination, unless the total must be rounded first.
        total = torch.add(total, others[-1], out=into if total.dtype == into.dtype else total)
    if divisor > 1:
        total.div_(divisor)
    if total is not into:
        into.copy_(total)
