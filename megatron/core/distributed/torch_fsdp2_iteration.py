"""Begin and end of an iteration whose gradients torch's fully_shard reduces, and the release of its units.

FsdpIteration ends an iteration with one agreement between ranks. Hooks and optimizer receive reduced units either all
at that end (EndOfBackwardRelease), or one by one in the last backward (StreamingRelease). The memory of gradients is in
torch_fsdp2_shards.py.

[Note: units in backward] A unit is released when torch has launched the reduction of the next unit, so that on a GPU
the gradients of one unit are reduced while the next is computed. `release` releases the remaining units.

A unit is released only after as many backwards as forwards. Its parameters are then no longer needed by backward and
may be updated. Forwards that backward recomputes are not counted, because each shares its backward with the forward
that it repeats. A unit with a forward that has no backward is released at the end. Torch may gather the parameters of a
unit ahead of time; the unit's backward is then still pending, or torch discards the gathered parameters.

A gradient that becomes ready after its unit was released is rejected. The next iteration then releases all units at its
end, and counts how often each is reduced.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import nn

from megatron.core.device.torch_internals import is_in_backward, tree_leaves
from megatron.core.distributed.consistency import GradChecks
from megatron.core.distributed.grad_hooks import GradHookRunner
from megatron.core.distributed.iteration import RESET, Iteration, IterationOutcome, stage_group_of
from megatron.core.distributed.torch_fsdp2_shards import ShardedFlatBuffer, Unit, UnitGroup
from megatron.core.distributed.torch_fsdp2_state import as_fsdp, wait_for_sums, watch_passes
from megatron.core.process_groups_config import ProcessGroupCollection


class UnitRelease(Protocol):
    """Policy for the release of units to hooks and optimizer.

    error: an error that a hook or an optimizer raised in backward, deferred to the end of the iteration. is_evaluating:
    whether the whole model is running a forward that has no backward.
    """

    is_last_backward: bool
    is_evaluating: bool

    @property
    def error(self) -> Exception | None: ...
    def begin(self) -> None:
        """Begins an iteration and sets all gradients to zero."""
        ...

    def settle(self) -> None:
        """Completes and checks gradients that were not released yet; called after the last backward."""
        ...

    def release(self) -> None:
        """Releases all units that were not released yet."""
        ...


class FsdpIteration:
    """An iteration from zero_grad_buffer to finish_grad_sync, after which an optimizer may step.

    The optimizer uses it like the scheduler of DistributedDataParallel. checks: applied to the gradients of units; None
    disables checking. find_change: describes a change since wrapping that makes the module unusable, or returns None.
    """

    def __init__(
        self,
        buffers: Sequence[ShardedFlatBuffer],
        checks: GradChecks | None,
        *,
        groups: ProcessGroupCollection,
        hook_runner: GradHookRunner,
        units: UnitRelease,
        find_change: Callable[[], str | None],
    ) -> None:
        self._hook_runner, self._units, self._find_change = hook_runner, units, find_change
        self._buffers, self._checks = buffers, checks
        self.iteration = Iteration(
            stage_group_of(groups), pp_group=groups.pp, stage_host=groups.tp_dp_cp_host, pp_host=groups.pp_host
        )

    def watch(self, module: nn.Module) -> None:
        """Rejects backwards of `module` after the end of an iteration, and detects forwards without a backward."""
        # Runs before fully_shard's own hook, so that the error is raised before anything is gathered.
        module.register_forward_hook(self._watch_outputs, prepend=True)
        module.register_forward_pre_hook(self._note_evaluation, prepend=True)
        module.register_forward_hook(self._end_evaluation, always_call=True)

    def tell(self, *, is_last_backward: bool) -> None:
        """Sets whether each following backward is the last of an iteration."""
        self._units.is_last_backward = is_last_backward

    def begin(self) -> None:
        """Drops all gradients. Collective after `finish` if an optimizer was expected to step but did not.

        Raises the error of a hook or an optimizer in backward, if it was not raised yet.
        """
        if self.iteration.is_collecting and self._units.error is not None:
            raise self._units.error
        self.iteration.end_finished_sync(is_reset=False)
        self._start()

    def reset(self) -> None:
        """Aborts an iteration after an error: notifies the other ranks, drops all gradients and begins a new iteration.

        Collective, unless the optimizer's step has begun, or `finish` has raised another rank's reset.
        """
        if self.iteration.is_collecting:
            self._agree_sync(is_aborted=True, is_non_finite=False)
            self.iteration.abort_sync(RESET)
        self.iteration.end_finished_sync(is_reset=True)
        self._start()

    def finish(self) -> None:
        """Completes the gradients, and verifies that all are reduced and, if checked, finite. Collective.

        If any rank fails, all ranks raise an error: NonFiniteGradientError, this rank's ValueError, this rank's error
        in a hook or an optimizer in backward, or RemoteRankError for another rank's error.
        """
        if self.iteration.is_finished:
            self._hook_runner.check_whole()
            return
        self.iteration.check_usable()
        problem, error = self._find_change() or self._find_unreduced(), self._units.error
        if error is None:
            self._units.settle()
        # NOTE: reads the device, once a step.
        found = [] if self._checks is None else self._checks.non_finite_sync()
        outcome = self._agree_sync(is_aborted=error is not None or problem is not None, is_non_finite=bool(found))
        if outcome.has_failed:
            in_backward = self._hook_runner.consumer is not None
            self.iteration.raise_aborted_sync(
                outcome, problem=problem if error is None else error, non_finite=found, in_backward=in_backward
            )
        self.iteration.finish()
        self._units.release()

    def step(self) -> None:
        """Records that the optimizer is about to update; once per iteration. Collective after `finish`.

        Raises RuntimeError if there are gradients without a `finish`, or if a hook failed in it; RemoteRankError if
        another rank has called `reset` since.
        """
        if self.iteration.is_collecting:
            if any(buffer.may_hold_grads() for buffer in self._buffers) or self._find_unreduced():
                raise RuntimeError(
                    "the optimizer steps without finish_grad_sync: call finish_grad_sync after the last microbatch"
                )
        self.iteration.check_usable()
        self._hook_runner.check_whole()
        self.iteration.step()
        # Even if there was nothing to reduce, because a later gradient does not belong to the same iteration.
        self.iteration.mark_stepped()

    def _start(self) -> None:
        self.iteration.begin()
        if self._checks is not None:
            self._checks.forget()
        self._units.begin()

    def _watch_outputs(self, *of_forward: Any) -> None:
        *_, outputs = of_forward
        if torch.is_grad_enabled() and not is_in_backward():
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(self._check_collecting)

    def _note_evaluation(self, module: nn.Module, *of_forward: Any) -> None:
        # In training mode, this may be the forward of a reentrant checkpoint, which has a backward.
        self._units.is_evaluating = not (module.training or torch.is_grad_enabled() or is_in_backward())

    def _end_evaluation(self, *of_forward: Any) -> None:
        self._units.is_evaluating = False

    def _check_collecting(self, grad: torch.Tensor) -> None:
        if not self.iteration.is_collecting:
            self.iteration.refuse_gradient("a gradient of the wrapped module")

    def _find_unreduced(self) -> str | None:
        left = [name for buffer in self._buffers for name in buffer.unreduced()]
        if not left:
            return None
        return (
            f"finish_grad_sync: gradients of {left[0]} and {len(left) - 1} more were not reduced, because the last "
            "backward was in no_sync: run the last microbatch outside it, or call reset_iteration. A unit that is "
            "called several times inside reentrant checkpoints is reduced only once: set use_reentrant=False there"
        )

    def _agree_sync(self, *, is_aborted: bool, is_non_finite: bool) -> IterationOutcome:
        local = IterationOutcome(is_aborted, is_non_finite, is_reordered=False, late=[])
        return self.iteration.agree_sync(local, of_all_stages=self._checks is not None)


# Release of units.


class EndOfBackwardRelease:
    """Releases all units at the end of an iteration; gradients are persistent."""

    error = None

    def __init__(
        self, buffers: Sequence[ShardedFlatBuffer], *, hook_runner: GradHookRunner, checks: GradChecks | None
    ) -> None:
        self.is_last_backward, self.is_evaluating = True, False
        self._buffers, self._hook_runner, self._checks = buffers, hook_runner, checks

    def begin(self) -> None:
        for buffer in self._buffers:
            buffer.zero_grads()
        self._hook_runner.begin()

    def settle(self) -> None:
        for buffer in self._buffers:
            buffer.collect_grads()
            if self._checks is not None:
                self._checks.measure([(slot.name, slot.main_grad) for slot in buffer.slots])

    def release(self) -> None:
        for group in self._hook_runner.groups:
            self._hook_runner.release(group)


class StreamingRelease:
    """Releases each unit in the last backward of an iteration and then frees its gradients.

    See [Note: units in backward]. An error in a hook or an optimizer is deferred to the end of the iteration, when all
    ranks agree on it; before that the other ranks are in torch's collectives. units: the groups of each trained unit.
    """

    def __init__(
        self,
        units: Mapping[Unit, Sequence[UnitGroup]],
        buffers: Sequence[ShardedFlatBuffer],
        *,
        hook_runner: GradHookRunner,
        checks: GradChecks | None,
    ) -> None:
        self.is_last_backward, self.is_evaluating = True, False
        self._buffers, self._hook_runner, self._checks = buffers, hook_runner, checks
        self._units = [_WatchedUnit(unit, groups, owner=self) for unit, groups in units.items()]
        # Units whose last reduction is launched and that are not released yet.
        self._launched: deque[_WatchedUnit] = deque()
        # Whether this iteration counts how often units are reduced, and releases none in backward.
        self._is_counting = False
        self._deferred = _DeferredError()

    @property
    def error(self) -> Exception | None:
        return self._deferred.error

    def begin(self) -> None:
        self._launched.clear()
        self._deferred.error = None
        for unit in self._units:
            unit.begin()
        for buffer in self._buffers:
            buffer.zero_grads()
        self._hook_runner.begin()

    def settle(self) -> None:
        for unit in self._units:
            if not unit.is_released:
                unit.settle(self._checks)

    def release(self) -> None:
        for unit in self._units:
            if self._is_counting:
                unit.expected = max(unit.expected, unit.num_reductions)
            if not unit.is_released:
                unit.release(self._hook_runner)
        self._is_counting = False
        self._launched.clear()

    def _refuse(self, unit: "_WatchedUnit") -> None:
        """Raises RuntimeError for a gradient of a unit that was already released."""
        self._is_counting = True
        raise RuntimeError(
            f"backward produced a gradient of {unit.groups[0].name} (with {unit.groups[0].slots[0].name}) after the "
            "unit had been released to hooks and the optimizer (DistributedDataParallelConfig.release_gradients): wrap "
            "all backwards of a step but the last in accumulate(). If a single backward reduces the unit several "
            "times, call reset_iteration() and load a checkpoint, because parameters may have been updated already; "
            "the next iteration waits for all of these reductions"
        )

    def _mark_launched(self, unit: "_WatchedUnit") -> None:
        """Records that torch has launched a reduction of a unit, and releases the previous unit."""
        if not self.is_last_backward:
            return
        unit.num_reductions += 1
        if self._is_counting or unit.num_pending > 0 or unit.num_reductions < unit.expected or unit in self._launched:
            return
        self._launched.append(unit)
        if len(self._launched) > 1:
            self._release_in_backward(self._launched.popleft())

    def _release_in_backward(self, unit: "_WatchedUnit") -> None:
        unit.settle(self._checks)
        if self._deferred.error is None:
            with self._deferred:
                unit.release(self._hook_runner)
        if self._deferred.error is not None:
            # Neither this unit nor later ones reach hooks and optimizer.
            unit.drop()


class _WatchedUnit:
    """A unit and its progress in an iteration. expected: the minimum number of reductions in the last backward."""

    def __init__(self, unit: Unit, groups: Sequence[UnitGroup], *, owner: StreamingRelease) -> None:
        self._owner, self._module, self.groups = owner, as_fsdp(unit.module), groups
        self.expected = 1
        self.begin()
        watch_passes(
            self._module,
            forward_begins=self._forward_begins,
            reduction_begins=self._reduction_begins,
            backward_ends=self._backward_ends,
        )

    def begin(self) -> None:
        # Forwards whose backward is pending; reductions in the last backward.
        self.num_pending = self.num_reductions = 0
        self.is_released = False

    def settle(self, checks: GradChecks | None) -> None:
        """Makes the current stream wait for the reduced gradients, and checks them; missing gradients are zero."""
        wait_for_sums(self._module)
        for group in self.groups:
            group.open()
            if checks is not None:
                checks.measure(group.named_grads())

    def release(self, hook_runner: GradHookRunner) -> None:
        self.is_released = True
        for group in self.groups:
            hook_runner.release(group)

    def drop(self) -> None:
        self.is_released = True
        for group in self.groups:
            group.close()

    # Called by torch_fsdp2_state.watch_passes.

    def _forward_begins(self) -> None:
        if not is_in_backward() and not self._owner.is_evaluating:
            self.num_pending += 1

    def _reduction_begins(self) -> None:
        if self.is_released:
            self._owner._refuse(self)
        for group in self.groups:
            group.open()

    def _backward_ends(self, is_launched: bool) -> None:
        self.num_pending = max(0, self.num_pending - 1)
        if is_launched:
            self._owner._mark_launched(self)


class _DeferredError:
    """Context manager that stores an error raised in its block as `error`, to be raised later."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.error = error
        return self.error is not None
