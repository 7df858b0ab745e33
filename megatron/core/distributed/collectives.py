"""Collectives over the flat tensors of a gradient or parameter buffer: asynchronous, in place.

Stateless; who owns the tensors, and in which order they are launched, is decided elsewhere. A group of None or of
this rank alone: nothing is sent.

[Note: rank order] A back end may add the ranks' numbers in any order, and gloo's order changes with the size of the
tensor. Where bits matter each rank receives what all ranks hold of its share (all-to-all) and adds them up in rank
order, in fp32 or wider. Each element's sum is then the same whatever the bucket it lies in and whoever adds it, so
that the all-reduce has the bits of the reduce-scatter.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch.profiler import record_function

from megatron.core.device import SideStream
from megatron.core.distributed.layout import round_up
from megatron.core.group_collectives import all_gather_single, reduce_scatter_single
from megatron.core.process_groups_config import group_rank, group_size

# Elements of one all-to-all; what a rank-ordered sum holds besides its input is at most _IN_FLIGHT times this.
_SLICE_ELEMENTS = 1 << 24
_IN_FLIGHT = 2


class Handle(Protocol):
    """A collective under way. All ranks of its group call the same methods in the same order."""

    def advance(self) -> None:
        """Starts what had to wait for the first messages (a gather of totals, a second level), so that several
        handles may do it side by side. Changes the tensor; `wait` does it too. Blocks the host on the CPU.
        """
        ...

    def wait(self) -> None:
        """Returns when the tensor holds the result; on a GPU the current stream waits, not the host."""
        ...

    def advance_early(self) -> bool:
        """`advance`, where it need not wait for `wait` and would not block the host; whether it is not needed any more.

        Ranks may differ in when they call it, but not in the order of handles.
        """
        ...

    def is_sent(self) -> bool:
        """Whether `wait` would not block the host; asks a GPU."""
        ...

    def works(self) -> list[dist.Work]:
        """The messages launched so far that may still be under way, for who wants to know when they end."""
        ...

    def discard(self) -> None:
        """Ends it without a result: the tensor stays what this rank gave. Instead of advance and wait, and only
        where ReductionPolicy.can_repeat.
        """
        ...


@dataclass(frozen=True)
class ReductionPolicy:
    """How gradients are summed over ranks; chosen once for all buckets.

    deterministic: see [Note: rank order]. average: the mean instead of the sum. fp32_accumulation: 16-bit tensors are
    sent as they are and added in fp32, which wider tensors are anyway. instances_group: the ranks that hold the same
    shard of other optimizer instances; they add up their shards once each instance has its own. side: where a GPU's
    second level waits for the first; without it, for both levels to be under way, someone must come back to it.
    """

    deterministic: bool = False
    average: bool = False
    fp32_accumulation: bool = False
    instances_group: dist.ProcessGroup | None = None
    side: SideStream | None = None

    @property
    def can_repeat(self) -> bool:
        """Whether a tensor under reduction is whole until advance or wait, so that it can be reduced once more."""
        return self.deterministic


def reduce_bucket_(
    flat: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    sharded: bool,
    policy: ReductionPolicy,
    into: torch.Tensor | None = None,
) -> Handle:
    """Starts to sum `flat`, [N], floating point, contiguous, over `group`, in place.

    sharded: only this rank's shard, the rank-th of equal parts, gets the sum, and N divides by the ranks; the others
    hold anything afterwards. Else all of `flat` gets it. into: where this shard's sum goes instead, [N / ranks], the
    same dtype, contiguous; all of `flat` may then hold anything. Do not write to either before `wait`.
    """
    assert sharded or into is None, "only a shard can go elsewhere"
    first = _reduce(flat, group, sharded=sharded, policy=policy, into=into)
    if group_size(policy.instances_group) == 1:
        return first
    if into is not None:
        part = into
    else:
        part = shard_of(flat, group) if sharded else flat

    def across_instances() -> Handle:
        return _reduce(part, policy.instances_group, sharded=False, policy=policy)

    # What can be repeated must stay whole until someone waits.
    if policy.can_repeat or policy.side is None:
        return _Chain(first, across_instances)
    chain = _Following(first, across_instances)
    with policy.side.current() as is_beside:
        if is_beside:
            chain.advance()
    return chain


@record_function("gather_shards_")
def gather_shards_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Starts to fill `flat`, [N], any dtype, contiguous, in place: its r-th of equal parts comes from rank r."""
    if group_size(group) == 1:
        return _Done()
    if not _is_on_host(flat):
        return _Launched(all_gather_single(flat, shard_of(flat, group), group=group, async_op=True))
    # gloo's own all-gather goes through a copy of the whole: 5 times the CPU time, and the memory of `flat` once more.
    shards = flat.view(group_size(group), -1)
    return _Launched(
        *[dist.broadcast(shard, group=group, group_src=rank, async_op=True) for rank, shard in enumerate(shards)]
    )


def shard_of(flat: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's of as many equal parts of `flat`, [N], any dtype, as `group` has ranks: [N / ranks], a view."""
    return flat.view(group_size(group), -1)[group_rank(group)]


def _shard_place(flat: torch.Tensor, *, group: dist.ProcessGroup, into: torch.Tensor | None) -> torch.Tensor:
    return shard_of(flat, group) if into is None else into


def all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat`, any shape, contiguous, floating point, in place; the back end chooses the order."""
    reduce_bucket_(flat.view(-1), group, sharded=False, policy=ReductionPolicy()).wait()


def rank_ordered_all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat`, any shape, contiguous, floating point, in place; see [Note: rank order]."""
    reduce_bucket_(flat.view(-1), group, sharded=False, policy=ReductionPolicy(deterministic=True)).wait()


def _reduce(
    flat: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    sharded: bool,
    policy: ReductionPolicy,
    into: torch.Tensor | None = None,
) -> Handle:
    """One level of reduce_bucket_."""
    ranks = group_size(group)
    if ranks == 1:
        return _alone(flat, into)
    assert group is not None
    in_fp32 = policy.fp32_accumulation and flat.dtype.itemsize == 2
    # gloo's own reduce-scatter is an all-reduce of a copy: 1.7 times the CPU time.
    if policy.deterministic or in_fp32 or (sharded and _is_on_host(flat)):
        if not sharded and flat.numel() % ranks:
            return _ordered_of_any_size(flat, group, policy=policy)
        scatter = _OrderedReduceScatter(flat, group, average=policy.average, into=into)
        return scatter if sharded else _Chain(scatter, lambda: gather_shards_(flat, group))
    # Only NCCL takes the mean while it sums; elsewhere a pass over the result does.
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
    # Not whether it is on a GPU: a plan's tensors, which have no memory, are sent as a GPU's.
    return flat.device.type == "cpu"


def _is_over_nccl(flat: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return flat.is_cuda and "cuda:nccl" in dist.get_backend_config(group)


def _ordered_of_any_size(flat: torch.Tensor, group: dist.ProcessGroup, *, policy: ReductionPolicy) -> Handle:
    """Pads a tensor to a multiple of the ranks and reduces it in rank order; for tensors that are no bucket."""
    padded = flat.new_zeros(round_up(flat.numel(), group_size(group)))
    padded[: flat.numel()] = flat

    def copy_back() -> Handle:
        flat.copy_(padded[: flat.numel()])
        return _Done()

    return _Chain(_reduce(padded, group, sharded=False, policy=policy), copy_back)


class _Handle:
    """Base class of handles whose collectives have no second stage."""

    def advance(self) -> None:
        pass

    def advance_early(self) -> bool:
        return True


class _Done(_Handle):
    """The handle of a collective that sends nothing, or is complete."""

    def wait(self) -> None:
        pass

    def is_sent(self) -> bool:
        return True

    def works(self) -> list[dist.Work]:
        return []

    def discard(self) -> None:
        pass


class _Launched(_Handle):
    """Messages of the back end."""

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
        raise AssertionError("a collective that writes while it runs cannot be discarded: see can_repeat")


class _Chain(_Handle):
    """A collective after another, or a pass over its result."""

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
        assert self._second is None, "discard is instead of advance and wait"
        self._first.discard()


class _Following(_Chain):
    """A collective that starts as soon as the one before it has ended."""

    def advance_early(self) -> bool:
        if self._second is None and self._first.is_sent():
            self.advance()
        return self._second is not None


@dataclass(frozen=True)
class _Slice:
    """What the ranks hold of some columns of this rank's shard; columns: of the tensor seen as one row a rank.

    by_rank: [columns] each; this rank's own is its shard itself. kept: what is being sent.
    """

    columns: slice
    works: list[dist.Work]
    by_rank: list[torch.Tensor]
    kept: torch.Tensor | None = None


class _OrderedReduceScatter(_Handle):
    """Sums in rank order, each rank its own shard of `flat`, in its place or elsewhere; see [Note: rank order].

    Sent in slices, so that the memory for what is received is bounded: two are under way from the start, the others
    follow in `wait`.
    """

    @record_function("_OrderedReduceScatter")
    def __init__(
        self, flat: torch.Tensor, group: dist.ProcessGroup, *, average: bool, into: torch.Tensor | None = None
    ) -> None:
        self._rows = flat.view(group_size(group), -1)
        self._total = _shard_place(flat, group=group, into=into)
        self._group, self._average = group, average
        self._width = max(1, _SLICE_ELEMENTS // self._rows.shape[0])
        self._sent = 0  # columns
        self._under_way: deque[_Slice] = deque()
        for _ in range(_IN_FLIGHT):
            self._send()

    def is_sent(self) -> bool:
        # What is left would come between launches of ranks that are not that far.
        is_all = self._sent == self._rows.shape[1]
        return is_all and all(work.is_completed() for work in self.works())

    def wait(self) -> None:
        while self._under_way:
            piece = self._under_way.popleft()
            for work in piece.works:
                work.wait()
            _sum_in_order(
                piece.by_rank, into=self._total[piece.columns], divisor=len(self._rows) if self._average else 1
            )
            self._send()

    def works(self) -> list[dist.Work]:
        return [work for piece in self._under_way for work in piece.works]

    def discard(self) -> None:
        # What was not sent yet stays so, on all ranks.
        while self._under_way:
            for work in self._under_way.popleft().works:
                work.wait()

    @record_function("_OrderedReduceScatter._send")
    def _send(self) -> None:
        start, end = self._sent, min(self._sent + self._width, self._rows.shape[1])
        if start < end:
            self._sent = end
            exchange = _exchange_pairwise if _is_on_host(self._rows) else _exchange_at_once
            self._under_way.append(exchange(self._rows, slice(start, end), group=self._group))


def _exchange_at_once(rows: torch.Tensor, columns: slice, *, group: dist.ProcessGroup) -> _Slice:
    """Starts to send each rank its row's columns, in one message."""
    # A copy, unless all columns go at once.
    sent = rows[:, columns].contiguous()
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=group, async_op=True)
    return _Slice(columns, [work], list(received), kept=sent)


def _exchange_pairwise(rows: torch.Tensor, columns: slice, *, group: dist.ProcessGroup) -> _Slice:
    """Starts to exchange columns straight from `rows`; gloo's all-to-all would copy what a rank sends to itself."""
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
    """Sum of the terms, [N] each, in fp32, or in their dtype if wider, divided and then rounded; may overwrite them."""
    # One addition at a time: a reduction kernel over rows may pair them as it likes.
    first, *middle, last = terms
    total = first.float() if first.dtype.itemsize == 2 else first
    for term in middle:
        total.add_(term)
    # Straight to its place, unless it has yet to be rounded.
    total = torch.add(total, last, out=into if total.dtype == into.dtype else total)
    if divisor > 1:
        total.div_(divisor)
    if total is not into:
        into.copy_(total)
