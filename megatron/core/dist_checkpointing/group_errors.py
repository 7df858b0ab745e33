"""CheckpointError, and how every rank of a group comes to raise the same one.

Errors that are mistakes of a program or of its user stay what they are: see core/agreement.py.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError, gather_objects


class CheckpointError(OSError):
    """Writing or reading a checkpoint failed; raised on every rank with the same text."""


@contextmanager
def one_error_everywhere(what: str, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Runs the body on each rank; if any has an OSError, all raise CheckpointError with the lowest such rank's text.

    Otherwise as all_ranks_agree. The body must not wait for other ranks.
    """
    failure: Exception | None = None
    try:
        yield
    except (ValueError, OSError, RuntimeError) as error:
        failure = error
    own = None if failure is None else (isinstance(failure, OSError), str(failure))
    failures = [(rank, *report) for rank, report in enumerate(gather_objects(own, every_rank(group))) if report]
    for rank, is_refused, text in failures:
        if is_refused:
            raise CheckpointError(f"{what}: rank {rank}: {text}") from failure
    if failure is not None:
        raise failure
    for rank, _, text in failures:
        raise RemoteRankError(f"rank {rank}: {text}")


def every_rank(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The group itself, or for None all ranks of torch.distributed; None where that is not initialised."""
    return dist.group.WORLD if group is None and dist.is_initialized() else group
