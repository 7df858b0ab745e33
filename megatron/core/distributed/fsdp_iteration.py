"""FsdpIteration: where an iteration of gradients is that torch's fully_shard reduces, and what ends it on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron.core.agreement import RemoteRankError
from megatron.core.distributed.backward_end import is_in_backward
from megatron.core.distributed.fsdp_releases import UnitsGiven
from megatron.core.distributed.grad_checks import GradChecks
from megatron.core.distributed.hand_out import HandOut
from megatron.core.distributed.iteration_phase import Phase
from megatron.core.distributed.ledger import Ledger
from megatron.core.distributed.replica_checks import raise_non_finite
from megatron.core.distributed.sharded_flat_buffer import ShardedFlatBuffer
from megatron.core.distributed.stage_groups import stage_group_of
from megatron.core.distributed.step_agreement import StepAgreement, Verdict
from megatron.core.process_groups_config import ProcessGroupCollection

_RESET = "reset_iteration() was called after an error"


class FsdpIteration:
    """Begins with the wrapper's zero_grad_buffer, ends with finish_grad_sync; then an optimizer may step.

    To the optimizer it is what LaunchOrder is for the other wrapper. checks: what units measure, None: nobody looks at
    gradients. find_change: what was done to the module since it was wrapped, if that is wrong.
    """

    def __init__(
        self,
        buffers: Sequence[ShardedFlatBuffer],
        checks: GradChecks | None,
        *,
        groups: ProcessGroupCollection,
        hand_out: HandOut,
        units: UnitsGiven,
        find_change: Callable[[], str | None],
    ) -> None:
        self.has_optimizer, self._hand_out, self._units = False, hand_out, units
        self._buffers, self._checks, self._groups = buffers, checks, groups
        self._find_change = find_change
        stage_group = stage_group_of(groups)
        self._agreement = StepAgreement(
            stage_group,
            pp_group=groups.pp,
            stage_host=groups.tp_dp_cp_host,
            pp_host=groups.pp_host,
            ledger=Ledger(stage_group),
        )
        self._phase = Phase.COLLECTING

    def watch(self, module: nn.Module) -> None:
        """Refuses backwards of `module` that come after the end of an iteration; sees which forwards have none."""
        # Before fully_shard's own, so that the error comes before anything is gathered.
        module.register_forward_hook(self._watch_outputs, prepend=True)
        module.register_forward_pre_hook(self._note_evaluation, prepend=True)
        module.register_forward_hook(self._end_evaluation, always_call=True)

    def tell(self, *, is_last_backward: bool) -> None:
        """Sets whether the following backwards are an iteration's last."""
        self._units.is_last_backward = is_last_backward

    def begin(self) -> None:
        """Forgets all gradients. Collective after `finish`, where an optimizer was to step and did not. Raises what a
        hook or an optimizer raised in backward, where nobody has seen it yet.
        """
        if self._phase is Phase.COLLECTING and self._units.error is not None:
            raise self._units.error
        self._end_finished_sync(is_reset=False)
        self._start()

    def reset(self) -> None:
        """After an error in an iteration: lets the other ranks know, drops all gradients and begins anew. Collective,
        except after the optimizer's step has begun, or `finish` told of another rank's reset.
        """
        if self._phase is Phase.COLLECTING:
            self._agree_sync(is_aborted=True, is_non_finite=False)
            self._phase = Phase.ABORTED
            self._agreement.tell_reason(_RESET)
        self._end_finished_sync(is_reset=True)
        self._start()

    def finish(self) -> None:
        """Makes sure that all gradients are in their places, reduced and, if that is checked, finite. Collective.

        Raises on all ranks: NonFiniteGradientError; or this rank's ValueError, or what a hook or an optimizer raised in
        backward, or RemoteRankError with another's.
        """
        if self._phase in (Phase.FINISHED, Phase.STEPPED):
            self._hand_out.check_whole()
            return
        self._check_usable()
        problem, error = self._find_change() or self._find_unreduced(), self._units.error
        if error is None:
            self._units.settle()
        # NOTE: reads the device, once a step.
        found = [] if self._checks is None else self._checks.non_finite_sync()
        verdict = self._agree_sync(is_aborted=error is not None or problem is not None, is_non_finite=bool(found))
        if verdict.is_aborted:
            self._phase = Phase.ABORTED
            if error is not None:
                self._agreement.tell_reason(f"{type(error).__name__} in backward: {error}")
                raise error
            self._agreement.raise_broken_off(problem)
        if verdict.is_non_finite:
            self._phase = Phase.ABORTED
            groups = [stage_group_of(self._groups), self._groups.pp]
            raise_non_finite(found, groups, in_backward=self._hand_out.consumer is not None)
        self._phase = Phase.FINISHED
        self._units.give()

    def step(self) -> None:
        """Says that the optimizer is about to update; once an iteration. Collective after `finish`.

        Raises RuntimeError where gradients came and `finish` did not, or a hook failed in it; RemoteRankError if
        another rank has called `reset` since.
        """
        if self._phase is Phase.COLLECTING:
            if any(buffer.may_hold_grads() for buffer in self._buffers) or self._find_unreduced():
                raise RuntimeError("the optimizer steps without finish_grad_sync: call it after the last microbatch")
        self._check_usable()
        self._hand_out.check_whole()
        rank = self._end_finished_sync(is_reset=False)
        if rank is not None:
            self._phase = Phase.ABORTED
            raise RemoteRankError(
                f"rank {rank} broke the iteration off: {_RESET}, after finish_grad_sync. No rank has updated: call "
                "reset_iteration() and go on"
            )
        self._phase = Phase.STEPPED

    def _start(self) -> None:
        self._phase = Phase.COLLECTING
        if self._checks is not None:
            self._checks.forget()
        self._units.begin()

    def _watch_outputs(self, *of_forward: Any) -> None:
        *_, outputs = of_forward
        if torch.is_grad_enabled() and not is_in_backward():
            for output in tree_leaves(outputs):
                if isinstance(output, torch.Tensor) and output.requires_grad:
                    output.register_hook(self._gradient_comes)

    def _note_evaluation(self, module: nn.Module, *of_forward: Any) -> None:
        # In training mode it may be one of a reentrant checkpoint, whose backward comes.
        self._units.is_evaluating = not (module.training or torch.is_grad_enabled() or is_in_backward())

    def _end_evaluation(self, *of_forward: Any) -> None:
        self._units.is_evaluating = False

    def _gradient_comes(self, grad: torch.Tensor) -> None:
        self._check_usable()
        if self._phase is not Phase.COLLECTING:
            raise RuntimeError(
                "a gradient of the wrapped module came after finish_grad_sync: call zero_grad_buffer before the first "
                "backward"
            )

    def _check_usable(self) -> None:
        if self._phase is Phase.ABORTED:
            raise RuntimeError("the iteration was broken off: call reset_iteration() or zero_grad_buffer() first")

    def _find_unreduced(self) -> str | None:
        left = [name for buffer in self._buffers for name in buffer.unreduced()]
        if not left:
            return None
        return (
            f"finish_grad_sync: gradients of {left[0]} and {len(left) - 1} more were not reduced, as the last backward "
            "was in no_sync: leave the last microbatch out of it, or call reset_iteration. A unit that is called "
            "several times inside reentrant checkpoints is reduced once alone: give these use_reentrant=False"
        )

    def _agree_sync(self, *, is_aborted: bool, is_non_finite: bool) -> Verdict:
        local = Verdict(is_aborted, is_non_finite, is_reordered=False, late=[])
        return self._agreement.agree_sync(local, of_all_stages=self._checks is not None)

    def _end_finished_sync(self, *, is_reset: bool) -> int | None:
        """Returns the highest rank that did not reach the optimizer's step after `finish`, known to all. Collective."""
        if self._phase is not Phase.FINISHED or not self.has_optimizer:
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        highest = self._agreement.highest_sync(rank + 1 if is_reset else 0)
        self._phase = Phase.STEPPED
        return highest - 1 if highest else None
