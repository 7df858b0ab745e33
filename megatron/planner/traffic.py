"""What one rank sends in one training step, by group, operation and phase, as data; what is sent is recorder.py's.

[Note: payload] num_bytes counts a collective's payload on this rank, the larger of what it is given and what it gives:
the tensor of an all-reduce, a broadcast, a send or a receive, the result of an all-gather, the input of a
reduce-scatter, and of an all-to-all what this rank gives, its part for itself with it. What crosses a link depends on
the algorithm: see link_bytes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

# Shares of the payload that leave a rank, and reach it, where ranks form a ring; per rank of n: share * (n - 1) / n.
RING_SHARES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1, "all-to-all": 1}


@dataclass(frozen=True)
class Traffic:
    """Messages of one kind of one rank in one training step, over all of its microbatches.

    group: its name, as in ProcessGroupCollection, but etp, edp, stage and world in short. operation: all-reduce,
    all-gather, reduce-scatter, all-to-all, broadcast, send or receive. phase: forward, backward, grad reduce, param
    gather, optimizer, or the few numbers of agreement and statistics. count: how many. num_bytes: of all of them
    together, see [Note: payload].
    """

    group: str
    group_size: int
    operation: str
    phase: str
    count: int
    num_bytes: int


def link_bytes(traffic: Traffic) -> float:
    """Bytes that leave this rank, and as many that reach it, where collectives run as rings (Patarasu and Yuan, 2009):
    2 (n - 1) / n of an all-reduce, (n - 1) / n of an all-gather, reduce-scatter or all-to-all among n ranks. Of a send,
    a receive or a broadcast all, one way.
    """
    share = RING_SHARES.get(traffic.operation)
    if share is None:
        return float(traffic.num_bytes)
    return traffic.num_bytes * share * (traffic.group_size - 1) / traffic.group_size


def merged(messages: Iterable[Traffic]) -> tuple[Traffic, ...]:
    """The same with one entry for each group, operation and phase, in the order of these words."""
    found: dict[tuple[str, int, str, str], Traffic] = {}
    for one in messages:
        key = (one.group, one.group_size, one.operation, one.phase)
        known = found.get(key)
        count, num_bytes = (0, 0) if known is None else (known.count, known.num_bytes)
        found[key] = replace(one, count=count + one.count, num_bytes=num_bytes + one.num_bytes)
    return tuple(found[key] for key in sorted(found))
