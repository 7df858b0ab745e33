"""When units are given out that torch's fully_shard has reduced: all at the end of an iteration, or in its backward.

Who gets them is hand_out.py's; where gradients have memory, sharded_flat_buffer.py's.

[Note: units in backward] A unit is given out when torch has launched the reduction of the next one, so that on a GPU
the sums of one are sent while the next is computed; what is left is given out by `give`. By then its parameters are
not needed any more in this backward, so they may be updated: it had as many backwards as forwards. Backwards that
recomputation runs are those of forwards that are counted, and what it runs again is not. A forward without a backward
makes its unit wait for the end. Parameters that are gathered ahead are of units whose backward is to come; if torch
gathers others by mistake it throws them away, and nobody has a gradient of them: one that comes is refused, and the
iteration after that gives out nothing in backward, and counts.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from torch.distributed.fsdp import FSDPModule

from megatron.core.distributed.backward_end import is_in_backward
from megatron.core.distributed.fsdp_hand_out import UnitGroup
from megatron.core.distributed.fsdp_units import Unit
from megatron.core.distributed.fully_shard_state import wait_for_sums, watch_passes
from megatron.core.distributed.grad_checks import GradChecks
from megatron.core.distributed.hand_out import HandOut
from megatron.core.distributed.sharded_flat_buffer import ShardedFlatBuffer


class UnitsGiven(Protocol):
    """Decides when units are released. error: of a hook or an optimizer in backward, kept for the end; None without.

    is_evaluating: whether a forward of the whole model runs that has no backward.
    """

    is_last_backward: bool
    is_evaluating: bool

    @property
    def error(self) -> Exception | None: ...
    def begin(self) -> None:
        """Begins an iteration; all gradients are zeros."""
        ...

    def settle(self) -> None:
        """Waits after the last backward until all gradients that were not released are in place, and checks them."""
        ...

    def give(self) -> None:
        """Releases all units that were not released yet."""
        ...


class GivenAtEnd:
    """Releases all units at the end of an iteration; gradients are persistent."""

    error = None

    def __init__(self, buffers: Sequence[ShardedFlatBuffer], *, hand_out: HandOut, checks: GradChecks | None) -> None:
        self.is_last_backward, self.is_evaluating = True, False
        self._buffers, self._hand_out, self._checks = buffers, hand_out, checks

    def begin(self) -> None:
        for buffer in self._buffers:
            buffer.zero_grads()
        self._hand_out.begin()

    def settle(self) -> None:
        for buffer in self._buffers:
            buffer.attach_grads()
            if self._checks is not None:
                self._checks.measure([(entry.name, entry.main_grad) for entry in buffer.entries])

    def give(self) -> None:
        for group in self._hand_out.groups:
            self._hand_out.reduced(group)


class GivenInBackward:
    """Releases each unit in the last backward of an iteration and then frees its gradients.

    See [Note: units in backward]. An error of a hook or an optimizer is kept until the end of the iteration, when all
    ranks agree on it; before that the other ranks are in torch's collectives. units: the groups released of each
    trained unit.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[UnitGroup]],
        buffers: Sequence[ShardedFlatBuffer],
        *,
        hand_out: HandOut,
        checks: GradChecks | None,
    ) -> None:
        self.is_last_backward, self.is_evaluating = True, False
        self._buffers, self._hand_out, self._checks = buffers, hand_out, checks
        self._units = [_WatchedUnit(unit, groups, owner=self) for unit, groups in units.items()]
        # Reduced as often as they will be, and not given out yet.
        self._reduced: deque[_WatchedUnit] = deque()
        # Whether this iteration shows how often units are reduced, and gives out nothing before.
        self._is_counting = False
        self._kept = _KeptError()

    @property
    def error(self) -> Exception | None:
        return self._kept.error

    def begin(self) -> None:
        self._reduced.clear()
        self._kept.error = None
        for unit in self._units:
            unit.begin()
        for buffer in self._buffers:
            buffer.zero_grads()
        self._hand_out.begin()

    def settle(self) -> None:
        for unit in self._units:
            if not unit.is_given:
                unit.settle(self._checks)

    def give(self) -> None:
        for unit in self._units:
            if self._is_counting:
                unit.expected = max(unit.expected, unit.num_reductions)
            if not unit.is_given:
                unit.give(self._hand_out)
        self._is_counting = False
        self._reduced.clear()

    def _refuse(self, unit: "_WatchedUnit") -> None:
        """Raises RuntimeError for a gradient that nobody waits for."""
        self._is_counting = True
        raise RuntimeError(
            f"a gradient of {unit.groups[0].name}, as of {unit.groups[0].entries[0].name}, came after it was reduced "
            "and given to hooks and optimizer (DistributedDataParallelConfig.release_gradients): put all backwards of "
            "a step but the last in accumulate(). If both are of one backward, they are waited for after "
            "reset_iteration(); hooks and optimizer may have updated parameters in this iteration, so load a "
            "checkpoint then"
        )

    def _is_reduced(self, unit: "_WatchedUnit") -> None:
        if not self.is_last_backward:
            return
        unit.num_reductions += 1
        if self._is_counting or unit.num_to_come > 0 or unit.num_reductions < unit.expected or unit in self._reduced:
            return
        self._reduced.append(unit)
        if len(self._reduced) > 1:
            self._give_in_backward(self._reduced.popleft())

    def _give_in_backward(self, unit: "_WatchedUnit") -> None:
        unit.settle(self._checks)
        if self._kept.error is None:
            with self._kept:
                unit.give(self._hand_out)
        if self._kept.error is not None:
            # Nobody gets it any more, nor those that come.
            unit.drop()


class _WatchedUnit:
    """A unit and where it is in an iteration. expected: how often it is reduced in the last backward, at least."""

    def __init__(self, unit: Unit, groups: Sequence[UnitGroup], *, owner: GivenInBackward) -> None:
        assert isinstance(unit.module, FSDPModule), "fully_shard has made it one"
        self._owner, self._module, self.groups = owner, unit.module, groups
        self.expected = 1
        self.begin()
        watch_passes(unit.module, self)

    def begin(self) -> None:
        # Forwards whose backward is to come; reductions in the last backward.
        self.num_to_come = self.num_reductions = 0
        self.is_given = False

    def settle(self, checks: GradChecks | None) -> None:
        """Makes the current stream wait for the unit's sums and checks them; missing gradients are zeros."""
        wait_for_sums(self._module)
        for group in self.groups:
            group.open()
            if checks is not None:
                checks.measure(group.named_grads())

    def give(self, hand_out: HandOut) -> None:
        self.is_given = True
        for group in self.groups:
            hand_out.reduced(group)

    def drop(self) -> None:
        self.is_given = True
        for group in self.groups:
            group.close()

    # For torch's passes.

    def forward_begins(self) -> None:
        if not is_in_backward() and not self._owner.is_evaluating:
            self.num_to_come += 1

    def reduction_begins(self) -> None:
        if self.is_given:
            self._owner._refuse(self)
        for group in self.groups:
            group.open()

    def backward_ends(self, *, is_reduced: bool) -> None:
        self.num_to_come = max(0, self.num_to_come - 1)
        if is_reduced:
            self._owner._is_reduced(self)


class _KeptError:
    """Keeps an error that comes in a block, for who raises it later."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None
