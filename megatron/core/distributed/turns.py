"""Turns: keeps the collectives of several schedulers over the same process groups in one order on all ranks.

[Note: several schedulers] Two wrappers, or two optimizers, may use the same process groups, each with its own
scheduler. Gradients of both may become ready in one backward, in a different order on each rank. Therefore two
schedulers whose iterations overlap in time both defer their launches. Persistent gradients are then reduced in
`finish`, in the order in which the program calls it. Gradients that are reduced in each backward are reduced at its
end, in the order in which schedulers were built, so each rank's backward must reach both. Gathers are launched together
with the optimizer's update, not in forward. When an iteration begins, the deferred gathers of the other schedulers are
launched. Schedulers whose iterations do not overlap, or that use different process groups, launch early as usual.

They are not joined into one launch order when they are built, because their iterations are independent: they may
alternate, or one may accumulate gradients over several iterations of the other, whose `finish` must not reduce them.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from functools import partial
from weakref import WeakMethod

import torch.distributed as dist

from megatron.core.device.torch_internals import call_after_backward, current_backward_id, is_in_backward
from megatron.core.distributed.iteration import Iteration
from megatron.core.parallel_state import add_sender, remove_sender, senders_beside
from megatron.core.process_groups_config import group_rank

logger = logging.getLogger(__name__)


class Turns(ABC):
    """Base of a scheduler: its state among the schedulers that share process groups; see [Note: several schedulers].

    overlaps: whether it launches during backward. sends_over: the process groups of all its buckets. is_open: between
    the beginning of an iteration and `finish`. is_deferred: whether launches wait for the end of a backward.
    num_backwards: after an error, the number of backward passes that the other ranks have completed.
    """

    stage_group: dist.ProcessGroup | None
    iteration: Iteration

    def __init__(self, *, overlaps: bool, sends_over: Iterable[dist.ProcessGroup | None]) -> None:
        self.is_open = self.is_deferred = False
        self.num_backwards = 1
        self._overlaps = overlaps
        self._has_warned = False
        # Weak references, because the end of a backward refers to an optimizer, which must be freed when it is no
        # longer used.
        self._ends: list[WeakMethod[Callable[[], None]]] = []
        # Autograd's graph task of the backward in which the last gradient became ready, and whether it has ended.
        self._task: int | None = None
        self._has_ended = False
        add_sender(self, sends_over)

    def leave(self) -> None:
        """Unregisters the scheduler, which must not launch anything afterwards."""
        remove_sender(self)

    # An iteration.

    def open(self) -> None:
        """Marks the iteration as in progress; all ranks of the groups call it at the same point of the program."""
        if self.is_open:
            return
        self.is_open = True
        others: list[Turns] = senders_beside(self)
        for other in others:
            other.launch_due_gathers()
        # A list, so that all of them defer: any() over a generator would stop at the first.
        answers = [other._make_way(self) for other in others if other.is_open]
        self.is_deferred = any(answers)

    def _note_gradient(self) -> None:
        """Records that a gradient became ready, perhaps in a backward."""
        task = current_backward_id()
        if task != self._task:
            self._task, self._has_ended = task, False
            if task != -1:
                # After the functions of complete_backward, which may produce gradients.
                call_after_backward(partial(call_after_backward, self._note_end))

    @property
    def _must_gather_now(self) -> bool:
        """Whether an update must be followed by its gathers at once, because forward may not launch them.

        During forward, each rank might need a different scheduler's gather first.
        """
        return self.is_deferred or any(other.is_open for other in senders_beside(self))

    def _note_end(self) -> None:
        self._has_ended = True

    def _make_way(self, other: "Turns") -> bool:
        """Defers launches, because `other` begins an iteration over the same process groups.

        If ranks may already have launched some groups, the remaining groups are launched first. Returns False if an
        error has aborted this iteration, True otherwise. Raises RuntimeError if one backward produces gradients of both
        schedulers after launches of this one have begun.
        """
        if self.is_deferred:
            return True
        if self._overlaps and self._may_have_launched:
            # If each backward reduces, the current backward has not ended.
            if is_in_backward() and (self._reduces_each_backward or not self._has_ended):
                raise RuntimeError(
                    f"gradients of {self._first_name()} and of {other._first_name()} are produced in one backward, but "
                    "belong to two wrappers or optimizers over the same process groups, whose collectives could be "
                    f"mismatched. Call {self.iteration.words.zero} of the first and {other.iteration.words.zero} of "
                    "the second before the backward, or give them separate process groups"
                )
            if not self._has_ended:
                # An error has aborted this scheduler's backward. The scheduler will be reset, or is no longer used.
                return False
            # Ranks may have launched different prefixes, so the rest is launched before the other scheduler launches.
            # Gradients that become ready after this are late.
            self._launch_remaining()
        self.is_deferred = True
        if self._overlaps and not self._has_warned and group_rank(self.stage_group) == 0:
            self._has_warned = True
            logger.warning(
                "two wrappers or optimizers, of %s and of %s, run iterations at the same time over the same process "
                "groups: neither overlaps communication with forward and backward; give each of them separate process "
                "groups, or pass one launch_order to all chunks",
                self._first_name(),
                other._first_name(),
            )
        return True

    # What a scheduler implements.

    @abstractmethod
    def launch_due_gathers(self) -> None:
        """Launches the gathers of all stale parameters, so that forward launches none. Collective."""

    @abstractmethod
    def _launch_remaining(self) -> None:
        """Launches the reductions that were not launched yet. Collective."""

    @abstractmethod
    def _make_up(self, num_backwards: int) -> None:
        """Launches the collectives of `num_backwards` backward passes that only other ranks have run. Collective."""

    @abstractmethod
    def _first_name(self) -> str:
        """Returns the name of the first parameter, for use in messages."""

    @property
    @abstractmethod
    def _may_have_launched(self) -> bool:
        """Whether any rank may have launched reductions of this iteration before its end."""

    @property
    @abstractmethod
    def _reduces_each_backward(self) -> bool:
        """Whether each backward pass reduces its gradients."""

    # The end of a backward, in the order in which schedulers were built.

    def add_end(self, close: Callable[[], None]) -> None:
        """Adds a method, held by a weak reference, that runs the pending callback of a backward that has ended."""
        self._ends.append(WeakMethod(close))

    def end_earlier(self) -> None:
        """Runs the pending callbacks of deferred schedulers that were built earlier."""
        for other in senders_beside(self, earlier=True):
            for close in filter(None, [end() for end in other._ends]) if other.is_deferred else ():
                close()

    # After an error on this rank.

    def catch_up_earlier(self) -> None:
        """Launches, after an error on this rank, the deferred collectives of schedulers built earlier.

        Other ranks launch these collectives at the end of each backward, before they learn of the error.
        """
        self._catch_up(senders_beside(self, earlier=True))

    def _catch_up_later(self) -> None:
        """Launches, after an error on this rank, the deferred collectives of schedulers built later."""
        earlier = senders_beside(self, earlier=True)
        self._catch_up([other for other in senders_beside(self) if other not in earlier])

    def _catch_up(self, others: "Iterable[Turns]") -> None:
        for other in others if self.is_deferred else ():
            if other.is_open and other.is_deferred:
                other._make_up(self.num_backwards)
