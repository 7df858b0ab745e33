"""Errors that every rank learns of: a failure on one rank raises on all, so that nobody waits in a collective.

No recovery here; who calls decides what to do with the error.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


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
