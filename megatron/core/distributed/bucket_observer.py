"""BucketObserver: who looks on while bucket groups fill, are sent and are waited for. Nobody looks on by default.

CollectiveScheduler tells its observers of all chunks of a stage. What is noted of times is in event_log.py, what is
checked while debugging in ddp_debug.py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

import torch.distributed as dist
from torch import nn

from megatron.core.distributed.flat_buffer import Entry, _ParamAndGradBucket


class Traffic(Enum):
    """Kinds of traffic. LATE: a second round, for gradients added after the first had started.

    AGREE: the few numbers at the end of an iteration, which belong to no group.
    """

    REDUCE = "reduce"
    LATE = "late"
    GATHER = "gather"
    AGREE = "agree"


class ObservedGroup(Protocol):
    """The view of a bucket group that an observer gets."""

    name: str
    buckets: list[_ParamAndGradBucket]
    entries: list[Entry]

    @property
    def can_repeat(self) -> bool:
        """Whether gradients under reduction keep the values that were sent until the wait."""
        ...

    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The collectives in flight."""
        ...


class BucketObserver(Protocol):
    """The moments of an iteration, in this order for each bucket group; those of several groups interleave.

    An observer that raises ends the iteration before the event that it objects to.
    """

    def attach(self, groups: Sequence[ObservedGroup], module: nn.Module) -> None:
        """Adds the groups of another model chunk with this module to the observed ones."""
        ...

    def begin_iteration(self) -> None:
        """Called once a chunk before the first gradient of any chunk: gradients are about to be dropped."""
        ...

    def before_grad(self, group: ObservedGroup, param: nn.Parameter) -> None:
        """Called when a gradient is ready, before it moves to `param.main_grad`, or elsewhere if it is late."""
        ...

    def after_grad(self, group: ObservedGroup, param: nn.Parameter) -> None:
        """Called when a gradient was moved."""
        ...

    def before_launch(self, traffic: Traffic, group: ObservedGroup) -> None:
        """Called before collectives over the group's buckets are launched."""
        ...

    def after_launch(self, traffic: Traffic, group: ObservedGroup) -> None:
        """Called when these collectives are in flight."""
        ...

    def before_wait(self, traffic: Traffic, group: ObservedGroup) -> None:
        """Called before a wait for the result; more than once where a collective has several parts."""
        ...

    def after_wait(self, traffic: Traffic, group: ObservedGroup) -> None:
        """Called after that wait."""
        ...

    def before_agreement(self) -> None:
        """Called when everything is launched, before the ranks of the stage wait for each other."""
        ...

    def after_agreement(self) -> None:
        """Called when the ranks of the stage have agreed."""
        ...

    def end_iteration(self) -> None:
        """Called when all groups of all chunks are reduced; the optimizer may step."""
        ...

    def gather_due(self, group: ObservedGroup) -> None:
        """Called when this rank's parameter shards are new; the others are stale until the wait for the next gather."""
        ...


class Observers:
    """The observers of one CollectiveScheduler, called in the order they were added."""

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
