"""Collectives along a tensor's first dimension, under one name for every version of torch, and of small objects.

No autograd here. A group of None is this rank alone: nothing is sent.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.utils import divide

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:
    # torch 2.13 gave them these names and warns about the old ones, which are all that 2.11 and 2.12 have.
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

__all__ = [
    "Pending",
    "RemoteRankError",
    "all_gather_rows",
    "all_gather_single",
    "all_ranks_agree",
    "all_reduce_sum",
    "any_rank_sync",
    "arriving",
    "gather_objects",
    "is_fake",
    "message_device",
    "reduce_scatter_rows",
    "reduce_scatter_single",
    "union_over_model",
]


_Item = TypeVar("_Item")


class Pending:
    """The result of a collective that may still run; `wait` before anything reads it.

    kept: what the collective reads, which must not be freed before it ends.
    """

    def __init__(self, result: Tensor, work: dist.Work | None, *, kept: Tensor | None = None) -> None:
        self._result, self._work, self._kept = result, work, kept

    def wait(self) -> Tensor:
        """The finished result: any shape and dtype."""
        if self._work is not None:
            self._work.wait()
        self._work = self._kept = None
        return self._result


def all_gather_rows(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Starts to join the ranks' [N, *] in rank order: [ranks * N, *], same dtype; N equal on all ranks."""
    if group_size(group) == 1:
        return Pending(x, None)
    x = x.contiguous()
    shape = group_size(group) * x.shape[0], *x.shape[1:]
    result = arriving(shape, group, dtype=x.dtype, device=x.device)
    return Pending(result, all_gather_single(result, x, group=group, async_op=True), kept=x)


def reduce_scatter_rows(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Starts to sum the ranks' [ranks * N, *]; each rank gets its part in rank order: [N, *], same dtype.

    Raises ValueError where the first dimension does not divide by the ranks.
    """
    if group_size(group) == 1:
        return Pending(x, None)
    x = x.contiguous()
    shape = divide(x.shape[0], group_size(group)), *x.shape[1:]
    result = arriving(shape, group, dtype=x.dtype, device=x.device)
    return Pending(result, reduce_scatter_single(result, x, group=group, async_op=True), kept=x)


def all_reduce_sum(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Starts to sum `x`, any shape and dtype, over the ranks; the result may be x itself, overwritten."""
    if group_size(group) == 1:
        return Pending(x, None)
    x = x.contiguous()
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Every rank's `value`, in rank order. Collective. Values are pickled, which is slow: for starts and errors."""
    if group_size(group) == 1 or is_fake(group):
        return [value] * group_size(group)
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def is_fake(group: ProcessGroup | None) -> bool:
    """Whether the group's other ranks do not exist: what they would answer is this rank's own word."""
    return group_size(group) > 1 and "fake" in dist.get_backend(group)


def arriving(shape: Sequence[int], group: ProcessGroup | None, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for what other ranks send, [*shape], any dtype: zeros where they do not exist, as nothing fills it."""
    make = torch.zeros if is_fake(group) else torch.empty
    return make(tuple(shape), dtype=dtype, device=device)


def message_device(groups: Iterable[ProcessGroup | None]) -> torch.device:
    """Where numbers must be to be sent over these groups: on the host, if all of several ranks can send from there.

    What is sent from the host waits for other hosts alone, and not for what their GPUs have yet to do.
    """
    sending = [group for group in groups if group_size(group) > 1]
    on_host = all("cpu:" in dist.get_backend_config(group) for group in sending)
    return torch.device("cpu") if on_host else default_device()


def any_rank_sync(*holds: bool) -> list[bool]:
    """Returns whether each of these holds on any rank of torch.distributed, or here where that is not initialised.

    Collective: one all-reduce of one int64 for each. NOTE: reads the device where WORLD cannot send from the host.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(holds)
    flags = torch.tensor(holds, dtype=torch.int64, device=message_device([dist.group.WORLD]))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def union_over_model(items: Iterable[_Item], groups: ProcessGroupCollection) -> set[_Item]:
    """The items of all ranks that hold parts of this rank's model, the same on each of them. Collective."""
    known = set(items)
    # Dense layers lie over the first, expert layers over the second: one after the other they reach every part.
    for group in (groups.mp, groups.tp_ep_pp):
        known = set().union(*gather_objects(known, group))
    return known


class RemoteRankError(RuntimeError):
    """Raised on the ranks that were fine when another rank failed inside `all_ranks_agree`."""


@contextmanager
def all_ranks_agree(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Runs the body on each rank of `group`, then compares: if it raised on any rank, every rank raises. The failing
    rank raises its own error; the others raise RemoteRankError with the lowest failing rank's text. Costs one small
    all-gather; the body itself must not wait for other ranks.

    group: None is every rank of torch.distributed, or this process alone where that is not initialised.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # of any kind: a rank that left without a word would keep the others waiting
        failure = error
    reports: list[str | None] = [None] * _group_size(group)
    if len(reports) > 1:
        dist.all_gather_object(reports, None if failure is None else _text(failure), group=group)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise RemoteRankError(f"rank {rank}: {report}")


def _text(failure: Exception) -> str:
    is_told = isinstance(failure, (ValueError, OSError, RuntimeError))
    return str(failure) if is_told else f"{type(failure).__name__}: {failure}"


def _group_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1
