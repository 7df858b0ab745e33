"""BucketObserver: who looks on while bucket groups fill, are sent and are waited for. Nobody looks on by default.

LaunchOrder tells its observers of all chunks of a stage. What is noted of times is in event_log.py, what is checked
while debugging in ddp_debug.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import torch.distributed as dist
from torch import nn

from megatron.core.distributed.flat_buffer import Entry, _ParamAndGradBucket


class Traffic(Enum):
    """What is sent. LATE: a second round, for gradients that came after the first had started. AGREE: the few numbers
    of the end of an iteration, which belong to no group.
    """

    REDUCE = "reduce"
    LATE = "late"
    GATHER = "gather"
    AGREE = "agree"


class ObservedGroup(Protocol):
    """What an observer sees of a bucket group."""

    name: str
    buckets: list[_ParamAndGradBucket]
    entries: list[Entry]

    @property
    def can_repeat(self) -> bool:
        """Whether gradients under reduction stay as they were sent until someone waits for the sums."""
        ...

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The messages under way."""
        ...


class BucketObserver(Protocol):
    """The moments of an iteration, in this order for each bucket group; those of several groups interleave.

    An observer that raises ends the iteration, before what it objects to has happened.
    """

    def attach(self, groups: Sequence[ObservedGroup], module: nn.Module) -> None:
        """These groups, of another model chunk with this module, are to be observed as well."""
        ...

    def begin_iteration(self) -> None:
        """Gradients are to be forgotten; comes once a chunk, before the first gradient of any."""
        ...

    def before_grad(self, group: ObservedGroup, param: nn.Parameter) -> None:
        """A gradient has come, and will be moved to `param.main_grad`, or aside if it is late."""
        ...

    def after_grad(self, group: ObservedGroup, param: nn.Parameter) -> None:
        """It was moved."""
        ...

    def before_launch(self, traffic: Traffic, group: ObservedGroup) -> None:
        """Collectives over the group's buckets come next."""
        ...

    def after_launch(self, traffic: Traffic, group: ObservedGroup) -> None:
        """They are under way."""
        ...

    def before_wait(self, traffic: Traffic, group: ObservedGroup) -> None:
        """Someone needs the result; may come more than once, where a collective has several parts."""
        ...

    def after_wait(self, traffic: Traffic, group: ObservedGroup) -> None:
        """The wait is over."""
        ...

    def before_agreement(self) -> None:
        """All gradients have come, and everything is launched: the ranks of the stage wait for each other."""
        ...

    def after_agreement(self) -> None:
        """They have."""
        ...

    def end_iteration(self) -> None:
        """All groups of all chunks hold their sums; the optimizer may step."""
        ...

    def gather_due(self, group: ObservedGroup) -> None:
        """This rank's shards of the parameters are new, the others' stale until the next gather is waited for."""
        ...


class Observers:
    """The observers of one LaunchOrder, called in the order they were added."""

    def __init__(self) -> None:
        self._observers: list[BucketObserver] = []

    def __iter__(self) -> Iterator[BucketObserver]:
        return iter(self._observers)

    def add(self, observer: BucketObserver) -> None:
        """Adds an observer, which is called from now on."""
        self._observers.append(observer)

    def end_iteration(self) -> None:
        """Tells every observer that the iteration has ended."""
        for observer in self._observers:
            observer.end_iteration()

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Tells every observer before and after its body, which waits for the other ranks."""
        for observer in self._observers:
            observer.before_agreement()
        yield
        for observer in self._observers:
            observer.after_agreement()

    @contextmanager
    def launching(self, traffic: Traffic, group: ObservedGroup) -> Iterator[None]:
        """Tells every observer before and after its body, which launches the group's collectives."""
        for observer in self._observers:
            observer.before_launch(traffic, group)
        yield
        for observer in self._observers:
            observer.after_launch(traffic, group)

    @contextmanager
    def waiting(self, traffic: Traffic, group: ObservedGroup) -> Iterator[None]:
        """Tells every observer before and after its body, which waits for the group's collectives."""
        for observer in self._observers:
            observer.before_wait(traffic, group)
        yield
        for observer in self._observers:
            observer.after_wait(traffic, group)
