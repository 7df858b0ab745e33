"""CheckpointError, and a context manager that raises one rank's I/O error on every rank of a group.

Programming and user errors keep their type; see all_ranks_agree.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError, gather_objects


class CheckpointError(OSError):
    """Raised on every rank, with the same text, if a checkpoint cannot be written or read."""


@contextmanager
def one_error_everywhere(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Raises CheckpointError on every rank of `group` if the body raises OSError on any rank. Collective.

    The text is `what`, followed by the error of the lowest rank with an OSError. Other errors are handled as in
    all_ranks_agree. The body must not wait for other ranks. group: None means all ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        failure = error
    own = None if failure is None else (isinstance(failure, OSError), str(failure))
    failures = [(rank, *report) for rank, report in enumerate(gather_objects(own, every_rank(group))) if report]
    for rank, is_io_error, text in failures:
        if is_io_error:
            raise CheckpointError(f"{what}: rank {rank}: {text}") from failure
    if failure is not None:
        raise failure
    for rank, _, text in failures:
        raise RemoteRankError(f"rank {rank}: {text}")


def every_rank(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Maps None to the default group if torch.distributed is initialized. Returns all other arguments unchanged."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group
