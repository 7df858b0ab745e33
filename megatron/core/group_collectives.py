"""Collectives for tensors and small objects, and propagation of errors to all ranks.

all_gather_single and reduce_scatter_single work with every supported version of torch. Differentiable collectives are
in tensor_parallel/mappings.py. A group of None means this rank alone and sends nothing, except in all_ranks_agree.
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

    # Whether every collective of a fake backend writes its result. Only receives from a single rank do not.
    FAKES_WRITE = True
except ImportError:
    # Torch 2.13 introduced these names and warns about the old ones; 2.11 and 2.12 have only the old ones.
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single

    FAKES_WRITE = False

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
    """The result of a collective that may still be running; call `wait` before reading it.

    kept: the input of the collective, which must not be freed before the collective has completed.
    """

    def __init__(self, result: Tensor, work: dist.Work | None, *, kept: Tensor | None = None) -> None:
        self._result, self._work, self._kept = result, work, kept

    def wait(self) -> Tensor:
        """Waits for the collective and returns its result, a tensor of any shape and dtype."""
        if self._work is not None:
            self._work.wait()
        self._work = self._kept = None
        return self._result


def all_gather_rows(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Starts an all-gather along the first dimension, in rank order.

    x: [N, *], any dtype; N must be equal on all ranks. Result: [ranks * N, *], same dtype.
    """
    ranks = group_size(group)
    if ranks == 1:
        return Pending(x, None)
    x = x.contiguous()
    shape = ranks * x.shape[0], *x.shape[1:]
    result = arriving(shape, group, dtype=x.dtype, device=x.device)
    return Pending(result, all_gather_single(result, x, group=group, async_op=True), kept=x)


def reduce_scatter_rows(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Starts a sum reduce-scatter along the first dimension, in rank order.

    x: [ranks * N, *], any dtype. Result: [N, *], same dtype. Raises ValueError if the first dimension is not divisible
    by the number of ranks.
    """
    ranks = group_size(group)
    if ranks == 1:
        return Pending(x, None)
    x = x.contiguous()
    shape = divide(x.shape[0], ranks), *x.shape[1:]
    result = arriving(shape, group, dtype=x.dtype, device=x.device)
    return Pending(result, reduce_scatter_single(result, x, group=group, async_op=True), kept=x)


def all_reduce_sum(x: Tensor, group: ProcessGroup | None) -> Pending:
    """Starts a sum all-reduce of `x`, which the result may overwrite.

    x: any shape and dtype.
    """
    if group_size(group) == 1:
        return Pending(x, None)
    x = x.contiguous()
    return Pending(x, dist.all_reduce(x, group=group, async_op=True))


def gather_objects(value: Any, group: ProcessGroup | None) -> list[Any]:
    """Returns the `value` of every rank, in rank order. Collective. Uses pickle: only for startup and error paths."""
    if group_size(group) == 1 or is_fake(group):
        return [value] * group_size(group)
    values: list[Any] = [None] * group_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def is_fake(group: ProcessGroup | None) -> bool:
    """Returns whether the group has a fake backend, whose other ranks do not exist."""
    return group_size(group) > 1 and "fake" in dist.get_backend(group)


def arriving(shape: Sequence[int], group: ProcessGroup | None, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocates the result of a collective: zeros for a fake backend that does not write it, otherwise uninitialised.

    Returns [*shape], any dtype.
    """
    make = torch.empty if FAKES_WRITE or not is_fake(group) else torch.zeros
    return make(tuple(shape), dtype=dtype, device=device)


def message_device(groups: Iterable[ProcessGroup | None]) -> torch.device:
    """Returns the device for small collectives: the CPU if every group with more than one rank supports it.

    Collectives on the CPU do not wait for pending GPU work.
    """
    sending = [group for group in groups if group_size(group) > 1]
    on_host = all("cpu:" in dist.get_backend_config(group) for group in sending)
    return torch.device("cpu") if on_host else default_device()


def any_rank_sync(*holds: bool) -> list[bool]:
    """Returns, for each condition, whether it holds on at least one rank of WORLD.

    Collective: one all-reduce with one int64 per condition. Returns the conditions unchanged if torch.distributed is
    not initialized. NOTE: synchronizes with the device if WORLD has no CPU backend.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return list(holds)
    flags = torch.tensor(holds, dtype=torch.int64, device=message_device([dist.group.WORLD]))
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in flags.tolist()]


def union_over_model(items: Iterable[_Item], groups: ProcessGroupCollection) -> set[_Item]:
    """Returns the union of `items` over all ranks that store parts of this rank's model replica. Collective."""
    known = set(items)
    # The ranks of the first group store the dense layers, the ranks of the second store the expert layers.
    for group in (groups.mp, groups.tp_ep_pp):
        known = set().union(*gather_objects(known, group))
    return known


class RemoteRankError(RuntimeError):
    """Raised by `all_ranks_agree` on ranks without an error if a different rank failed."""


@contextmanager
def all_ranks_agree(group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Raises on every rank of `group` if the body raises on any rank, so that no rank hangs in a later collective.

    Ranks that failed raise their original errors; the others raise RemoteRankError with the message of the lowest
    failed rank. Collective: one small all-gather. The body itself must not wait for other ranks. group: None means all
    ranks, or only this process if torch.distributed is not initialized.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # any error, because the other ranks wait for this rank
        failure = error
    reports = gather_objects(None if failure is None else _message(failure), group or dist.group.WORLD)
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise RemoteRankError(f"rank {rank}: {report}")


def _message(failure: Exception) -> str:
    is_complete = isinstance(failure, (ValueError, OSError, RuntimeError))
    return str(failure) if is_complete else f"{type(failure).__name__}: {failure}"
