"""Collectives over the flat tensors of a gradient or parameter buffer: asynchronous, in place.

Stateless; who owns the tensors, and in which order they are launched, is decided elsewhere. A group of None or of
this rank alone: nothing is sent.

[Note: rank order] A back end may add the ranks' numbers in any order, and gloo's order changes with the size of the
tensor. Where bits matter each rank receives what all ranks hold of its share (all-to-all) and adds them up in rank
order, in fp32 or wider. Each element's sum is then the same whatever the bucket it lies in and whoever adds it, so
that the all-reduce has the bits of the reduce-scatter.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

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
    flat: torch.Tensor, group: dist.ProcessGroup | None, *, sharded: bool, policy: ReductionPolicy
) -> Handle:
    """Starts to sum `flat`, [N], floating point, contiguous, over `group`, in place.

    sharded: only this rank's shard, the rank-th of equal parts, gets the sum, and N divides by the ranks; the others
    hold anything afterwards. Else all of `flat` gets it. Do not write to `flat` before `wait`.
    """
    first = _reduce(flat, group, sharded=sharded, policy=policy)
    if group_size(policy.instances_group) == 1:
        return first
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


def gather_shards_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> Handle:
    """Starts to fill `flat`, [N], any dtype, contiguous, in place: its r-th of equal parts comes from rank r."""
    if group_size(group) == 1:
        return _Done()
    return _Launched(all_gather_single(flat, shard_of(flat, group), group=group, async_op=True))


def shard_of(flat: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's of as many equal parts of `flat`, [N], any dtype, as `group` has ranks: [N / ranks], a view."""
    return flat.view(group_size(group), -1)[group_rank(group)]


def all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat`, any shape, contiguous, floating point, in place; the back end chooses the order."""
    reduce_bucket_(flat.view(-1), group, sharded=False, policy=ReductionPolicy()).wait()


def rank_ordered_all_reduce_(flat: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sums `flat`, any shape, contiguous, floating point, in place; see [Note: rank order]."""
    reduce_bucket_(flat.view(-1), group, sharded=False, policy=ReductionPolicy(deterministic=True)).wait()


def _reduce(flat: torch.Tensor, group: dist.ProcessGroup | None, *, sharded: bool, policy: ReductionPolicy) -> Handle:
    """One level of reduce_bucket_."""
    ranks = group_size(group)
    if ranks == 1:
        return _Done()
    assert group is not None
    in_fp32 = policy.fp32_accumulation and flat.dtype.itemsize == 2
    # gloo's own reduce-scatter is an all-reduce of a copy: 1.7 times the CPU time.
    if policy.deterministic or in_fp32 or (sharded and not flat.is_cuda):
        if not sharded and flat.numel() % ranks:
            return _ordered_of_any_size(flat, group, policy=policy)
        scatter = _OrderedReduceScatter(flat, group, average=policy.average)
        return scatter if sharded else _Chain(scatter, lambda: gather_shards_(flat, group))
    # Only NCCL takes the mean while it sums; elsewhere a pass over the result does.
    op = dist.ReduceOp.AVG if policy.average and _is_over_nccl(flat, group) else dist.ReduceOp.SUM
    if sharded:
        return _Launched(reduce_scatter_single(shard_of(flat, group), flat, op=op, group=group, async_op=True))
    work = dist.all_reduce(flat, op=op, group=group, async_op=True)
    if op == dist.ReduceOp.AVG or not policy.average:
        return _Launched(work)

    def divide() -> Handle:
        flat.div_(ranks)
        return _Done()

    return _Chain(_Launched(work), divide)


def _is_over_nccl(flat: torch.Tensor, group: dist.ProcessGroup) -> bool:
    return flat.is_cuda and "cuda:nccl" in dist.get_backend_config(group)


def _ordered_of_any_size(flat: torch.Tensor, group: dist.ProcessGroup, *, policy: ReductionPolicy) -> Handle:
    """As the all-reduce of a tensor that divides by the ranks, with zeros behind it; for tensors that are no bucket."""
    padded = flat.new_zeros(round_up(flat.numel(), group_size(group)))
    padded[: flat.numel()] = flat

    def copy_back() -> Handle:
        flat.copy_(padded[: flat.numel()])
        return _Done()

    return _Chain(_reduce(padded, group, sharded=False, policy=policy), copy_back)


class _Handle:
    """What most have in common: nothing follows their messages."""

    def advance(self) -> None:
        pass

    def advance_early(self) -> bool:
        return True


class _Done(_Handle):
    """Nothing was sent, or nothing is left to do."""

    def wait(self) -> None:
        pass

    def is_sent(self) -> bool:
        return True

    def works(self) -> list[dist.Work]:
        return []

    def discard(self) -> None:
        pass


class _Launched(_Handle):
    """One message of the back end."""

    def __init__(self, work: dist.Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait()

    def is_sent(self) -> bool:
        return self._work.is_completed()

    def works(self) -> list[dist.Work]:
        return [self._work]

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
    """One all-to-all; columns: those of the tensor seen as one row a rank. sent, received: [ranks, columns]."""

    columns: slice
    work: dist.Work
    sent: torch.Tensor  # must not be freed before the end
    received: torch.Tensor


class _OrderedReduceScatter(_Handle):
    """Sums in rank order, each rank its own shard of `flat`; see [Note: rank order].

    Sent in slices, so that the memory for what is received is bounded: two are under way from the start, the others
    follow in `wait`.
    """

    def __init__(self, flat: torch.Tensor, group: dist.ProcessGroup, *, average: bool) -> None:
        self._rows = flat.view(group_size(group), -1)
        self._group, self._average = group, average
        self._width = max(1, _SLICE_ELEMENTS // self._rows.shape[0])
        self._sent = 0  # columns
        self._under_way: deque[_Slice] = deque()
        for _ in range(_IN_FLIGHT):
            self._send()

    def is_sent(self) -> bool:
        # What is left would come between launches of ranks that are not that far.
        is_all = self._sent == self._rows.shape[1]
        return is_all and all(piece.work.is_completed() for piece in self._under_way)

    def wait(self) -> None:
        shard = self._rows[group_rank(self._group)]
        while self._under_way:
            piece = self._under_way.popleft()
            piece.work.wait()
            total = _sum_in_order(piece.received)
            # Before the copy, which may round to 16 bits.
            shard[piece.columns] = total.div_(self._rows.shape[0]) if self._average else total
            self._send()

    def works(self) -> list[dist.Work]:
        return [piece.work for piece in self._under_way]

    def discard(self) -> None:
        # What was not sent yet stays so, on all ranks.
        while self._under_way:
            self._under_way.popleft().work.wait()

    def _send(self) -> None:
        start, end = self._sent, min(self._sent + self._width, self._rows.shape[1])
        if start == end:
            return
        self._sent = end
        columns = slice(start, end)
        # A copy, unless all columns go at once.
        sent = self._rows[:, columns].contiguous()
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received.view(-1), sent.view(-1), group=self._group, async_op=True)
        self._under_way.append(_Slice(columns, work, sent, received))


def _sum_in_order(rows: torch.Tensor) -> torch.Tensor:
    """Sum of rows [ranks, N] in fp32, or in their dtype if wider: [N]. Overwrites the first."""
    # One addition at a time: a reduction kernel over rows may pair them as it likes.
    total = rows[0].float() if rows.dtype.itemsize == 2 else rows[0]
    for row in rows[1:]:
        total.add_(row)
    return total
