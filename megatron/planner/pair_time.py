"""Estimates how long passes wait for the exchanges of expert rows: a pass that runs alone, or a pair that takes turns.

All functions are pure. step_time.py sums up the time of a step, and pipeline_parallel/pass_turns.py runs pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Doing(Enum):
    """Kind of a part of a pass.

    A pass continues after SEND has launched a message. It stops at WAIT until its messages have ended, and at HAND_OVER
    until the other pass of its pair hands over.
    """

    COMPUTE = "compute"
    SEND = "send"
    WAIT = "wait"
    HAND_OVER = "hand over"


class Part(NamedTuple):
    """A part of a pass. seconds: duration of a computation or of a message; 0 for others."""

    doing: Doing
    seconds: float = 0.0


WAIT, HAND_OVER = Part(Doing.WAIT), Part(Doing.HAND_OVER)


def waits(*passes: Sequence[Part]) -> list[float]:
    """Returns the seconds that each pass waits for its messages, if the passes take turns and the first one begins.

    All computations run on one stream. Messages use one link, one after the other: a message ends its own duration
    after it is sent and all earlier messages have ended. When a pass has ended, the others continue without it.
    """
    clock = link = 0.0
    remaining = {number: iter(parts) for number, parts in enumerate(passes)}
    arrived, waited = [0.0] * len(passes), [0.0] * len(passes)
    while remaining:
        for number in range(len(passes)):
            for part in remaining.get(number, ()):
                if part.doing is Doing.HAND_OVER:
                    break
                if part.doing is Doing.COMPUTE:
                    clock += part.seconds
                elif part.doing is Doing.SEND:
                    arrived[number] = link = max(clock, link) + part.seconds
                else:
                    waited[number] += max(0.0, arrived[number] - clock)
                    clock = max(clock, arrived[number])
            else:
                remaining.pop(number, None)
    return waited


@dataclass(frozen=True)
class PassWork:
    """Work of one pass, in seconds over all of its layers with experts, which are assumed to be equal.

    layers: number of layers with experts. experts: computation between the two exchanges of a layer. rest: computation
    between layers, such as attention and the router. exchanged: messages, of which each layer sends two of equal
    duration. first, last: computation before and after all layers in forward order, such as the embedding and the loss.
    in_transit: computation while rows are sent to experts, such as an overlapped shared expert. held_experts and
    held_rest: weight gradients of experts and of the rest that a backward computes after it has launched its next
    exchange. counts_rows: whether each layer hands over once more: a forward until the host can read row counts, a
    backward before it computes the held gradients of the rest.
    """

    layers: int
    experts: float
    rest: float
    exchanged: float
    first: float = 0.0
    last: float = 0.0
    in_transit: float = 0.0
    held_experts: float = 0.0
    held_rest: float = 0.0
    counts_rows: bool = False

    @property
    def message(self) -> Part:
        """The launch of one exchange."""
        return Part(Doing.SEND, self.exchanged / self.layers / 2)

    def in_layer(self, seconds: float) -> Part:
        """Returns the computation in one layer. seconds: in all layers."""
        return Part(Doing.COMPUTE, seconds / self.layers)


def forward_parts(work: PassWork) -> list[Part]:
    """Returns the parts of a forward, which hands over whenever it is about to wait for an exchange."""
    return [Part(Doing.COMPUTE, work.first), *(_forward_layer(work) * work.layers), Part(Doing.COMPUTE, work.last)]


def _forward_layer(work: PassWork) -> list[Part]:
    return [
        work.in_layer(work.rest),
        *([HAND_OVER] if work.counts_rows else ()),
        work.message,
        work.in_layer(work.in_transit),
        HAND_OVER,
        WAIT,
        work.in_layer(work.experts),
        work.message,
        HAND_OVER,
        WAIT,
    ]


def backward_parts(work: PassWork, repeated: PassWork | None = None, *, repeats_in_turns: bool = True) -> list[Part]:
    """Returns the parts of a backward, which hands over whenever it is about to wait for an exchange.

    repeated: forward work of the same layers, which the backward of each layer repeats first. repeats_in_turns: whether
    it hands over there too.
    """
    again = () if repeated is None else _forward_layer(repeated)
    layer = [
        *(part for part in again if repeats_in_turns or part is not HAND_OVER),
        work.message,
        *([HAND_OVER] if work.counts_rows else ()),
        # Those that the next layer has held, whose backward ran before. The last layer's are taken to be as many.
        work.in_layer(work.held_rest),
        HAND_OVER,
        WAIT,
        work.in_layer(work.experts),
        work.message,
        work.in_layer(work.in_transit),
        work.in_layer(work.held_experts),
        HAND_OVER,
        WAIT,
        work.in_layer(work.rest),
    ]
    return [Part(Doing.COMPUTE, work.last), *(layer * work.layers), Part(Doing.COMPUTE, work.first)]
