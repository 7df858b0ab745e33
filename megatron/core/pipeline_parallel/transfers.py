"""Transfers between stages as data: the positions at which each stage posts and awaits them in its list of passes.

[Note: one order for all transfers] Every transfer has a position in one total order, and every stage posts its
transfers in that order. Then no choice of passes, batches and blocking waits can deadlock. Consider the first
incomplete transfer in the order. Both of its ends are already posted, or posted next, because everything that a stage
posts or awaits before it comes earlier in the order. This holds if a backend runs a stage's transfers one batch after
the other (NCCL), and therefore also if they run independently (gloo). validation.py proves it for a program by
simulating it.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from megatron.core.pipeline_parallel.schedule import (
    ONE_F_ONE_B,
    Action,
    ActionKind,
    Orders,
    Pair,
    Pipeline,
    Schedule,
    forward_only,
    passes,
    stage_orders,
)
from megatron.core.pipeline_parallel.timeline import timeline


class Direction(enum.Enum):
    """Role of this stage in a transfer: sender or receiver."""

    SEND = "send"
    RECEIVE = "receive"

    __hash__ = object.__hash__


class Transfer(NamedTuple):
    """This stage's end of a transfer.

    action: the pass of this stage whose output is sent, or whose input is received.
    """

    direction: Direction
    action: Action
    peer: int

    def __str__(self) -> str:
        word = "to" if self.direction is Direction.SEND else "from"
        return f"{self.direction.value} {self.action} {word} {self.peer}"


@dataclass(frozen=True)
class Post:
    """Starts these transfers together, without waiting."""

    transfers: tuple[Transfer, ...]

    def __str__(self) -> str:
        return f"[{', '.join(str(transfer) for transfer in self.transfers)}]"


@dataclass(frozen=True)
class Await:
    """Blocks until the input of `action`, whose transfer was posted, has arrived."""

    action: Action

    def __str__(self) -> str:
        return f"await {self.action}"


Step = Action | Pair | Post | Await
# The whole program of one stage.
Program = tuple[Step, ...]


@lru_cache(maxsize=8)
def pipeline_programs(
    pipeline: Pipeline,
    num_microbatches: int,
    schedule: Schedule = ONE_F_ONE_B,
    *,
    without_backward: bool = False,
    overlap: bool = True,
) -> tuple[Program, ...]:
    """Returns the program of each stage; arguments as in stage_orders and with_transfers.

    without_backward: omits all passes but forwards, and therefore pairs. Cached, because every step requests the same
    programs.
    """
    orders: Orders = stage_orders(pipeline, num_microbatches, schedule)
    if without_backward:
        orders = [forward_only(order) for order in orders]
    return with_transfers(orders, pipeline, overlap=overlap)


def with_transfers(orders: Orders, pipeline: Pipeline, *, overlap: bool) -> tuple[Program, ...]:
    """Inserts into each stage's passes the points at which it posts and awaits its transfers.

    See [Note: one order for all transfers]. overlap: whether a receive is posted before the pass during which it
    arrives, and awaited before the pass that requires it. Otherwise it is posted when the tensor has been sent, and
    awaited immediately. Sends are posted after their pass. A pair awaits the inputs of both passes, and both outputs
    are sent after it.
    """
    spans = timeline(orders, pipeline)
    programs = []
    for stage, order in enumerate(orders):
        # In the common order: by the time at which the sending pass ends, then by the sending stage. A pair sends the
        # output of its backward first.
        keyed: list[tuple[_Key, Transfer]] = []
        for action in passes(order):
            is_forward = action.kind is ActionKind.FORWARD
            source, target = pipeline.sender(stage, action), pipeline.receiver(stage, action)
            if source is not None:
                sent = (spans[source.stage][source.action].end, source.stage, is_forward)
                keyed.append((sent, Transfer(Direction.RECEIVE, action, source.stage)))
            if target is not None:
                sent = (spans[stage][action].end, stage, is_forward)
                keyed.append((sent, Transfer(Direction.SEND, action, target.stage)))
        queue = _Queue(sorted(keyed, key=lambda entry: entry[0]))
        steps: list[Step] = []
        for step in order:
            span = spans[stage][step.passes[0]]
            arrived = queue.take((span.start, len(orders)))
            steps += _posted(arrived)
            if overlap:
                steps += [Await(action) for action in step.passes if pipeline.sender(stage, action) is not None]
                # Excludes the outputs of this step, which do not exist yet.
                steps += _posted(queue.take((span.end, stage)))
            else:
                steps += [Await(t.action) for t in arrived if t.direction is Direction.RECEIVE]
            steps.append(step)
        programs.append((*steps, *_posted(queue.take((float("inf"), 0)))))
    return tuple(programs)


# Place of a transfer in the common order: end of the sending pass, sending stage, and whether a forward sends it. A
# limit precedes all transfers that begin with it.
_Key = tuple[float, int, bool]
_Limit = tuple[float, int]


class _Queue:
    """Transfers in the common order, from the first that is not posted yet."""

    def __init__(self, keyed: Sequence[tuple[_Key, Transfer]]) -> None:
        self._keyed = keyed
        self._next = 0

    def take(self, limit: _Limit) -> list[Transfer]:
        """Removes and returns the transfers before `limit`."""
        taken = []
        while self._next < len(self._keyed) and self._keyed[self._next][0] < limit:
            taken.append(self._keyed[self._next][1])
            self._next += 1
        return taken


def _posted(transfers: list[Transfer]) -> list[Step]:
    return [Post(tuple(transfers))] if transfers else []
