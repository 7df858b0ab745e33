"""Whether the ranks' shards of a buffer are a partition of it: every element owned, none twice."""

from collections.abc import Sequence

from megatron.core.distributed.flat_buffer import _ParamAndGradBuffer
from megatron.core.distributed.layout import ALIGNMENT, Span
from megatron.core.group_collectives import gather_objects


def check_coverage(buffer: _ParamAndGradBuffer) -> None:
    """Raises ValueError on all ranks that share `buffer`, naming a parameter, unless each element has one owner.

    Collective over buffer.data_parallel_group.
    """
    of_ranks = gather_objects(buffer.owned_spans(), buffer.data_parallel_group)
    problem = find_problem(of_ranks, numel=buffer.numel)
    if problem is not None:
        element, what = problem
        names = [entry.name for entry in buffer.entries if entry.span.start <= element < entry.span.padded_end]
        raise ValueError(f"element {element} of the buffer, of parameter {', '.join(names) or '(padding)'}, {what}")


def find_problem(spans_of_ranks: Sequence[Sequence[Span]], *, numel: int) -> tuple[int, str] | None:
    """The first element that has no owner, or several, or begins a shard off the grid, and what is wrong with it."""
    owned = sorted((span.start, span.end, rank) for rank, spans in enumerate(spans_of_ranks) for span in spans)
    end, last = 0, -1
    for start, its_end, rank in owned:
        if start % ALIGNMENT or its_end % ALIGNMENT:
            return start, f"is in a shard of rank {rank}, {start} to {its_end}, that is off the grid of {ALIGNMENT}"
        if start > end:
            return end, "is owned by no rank"
        if start < end:
            return start, f"is owned by rank {last} and by rank {rank}"
        end, last = its_end, rank
    return None if end == numel else (min(end, numel), "is owned by no rank" if end < numel else "is past the end")
