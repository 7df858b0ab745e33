"""Finalizes gradients and updates parameters after the passes of a step, eagerly or in a CUDA graph.

step_runner.py decides whether a step is discarded. megatron.core.distributed implements the finalization, and
megatron.core.optimizer the update.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device import default_device
from megatron.core.distributed import finalize_model_grads
from megatron.core.distributed.data_parallel_base import _BaseDataParallel, require_wrapped
from megatron.core.distributed.finalize_model_grads import complete_model_grads, end_model_step
from megatron.core.graphs.capture import GraphParticipant
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer import DeviceStep
from megatron.core.process_groups_config import group_size
from megatron.core.timers import Timers
from megatron.training.step.statistics import Reports, total_reports


class DeferredFinalizer:
    """Replaces finalize_model_grads in the schedule. Defers its work until all losses are known to be finite."""

    def __init__(self, finalize: Callable[..., None] | None) -> None:
        """Creates the finalizer. finalize: a script's function; None means finalize_model_grads."""
        self._finalize, self.is_default = finalize or finalize_model_grads, finalize is None
        self._handed_over: tuple[Any, ...] | None = None

    def __call__(self, *arguments: Any) -> None:
        """Stores the arguments that the schedule passes after the last backward: chunks and number of tokens."""
        self._handed_over = arguments

    def forget(self) -> None:
        """Drops the stored arguments, because the gradients of the last backward are discarded."""
        self._handed_over = None

    def replayed(self, handed_over: tuple[Any, ...]) -> None:
        """Restores the arguments after a CUDA graph has replayed the passes, which reuses the same tensors."""
        self._handed_over = handed_over

    @property
    def handed_over(self) -> tuple[Any, ...]:
        """Arguments that the schedule passed after the last backward."""
        assert self._handed_over is not None, "no backward pass since the last step"
        return self._handed_over

    def finish(self) -> None:
        """Finalizes the gradients of the last backward. Collective."""
        self._finalize(*self.take())

    def take(self) -> tuple[Any, ...]:
        """Returns and drops the stored arguments, for callers that finalize gradients themselves."""
        arguments, self._handed_over = self.handed_over, None
        return arguments


class StepUpdate:
    """Finalizes gradients and updates parameters eagerly."""

    def __init__(self, finalize: DeferredFinalizer, optimizer: MegatronOptimizer, *, timers: Timers) -> None:
        self._finalize, self._optimizer, self._timers = finalize, optimizer, timers

    def run_sync(self) -> tuple[bool, float, float | None]:
        """Finalizes gradients and returns the result of MegatronOptimizer.step. Collective. NOTE: reads the device."""
        with self._timers("all-grads-sync", log_level=1):
            self._finalize.finish()
        with self._timers("optimizer", log_level=1):
            return self._optimizer.step()

    def forget(self) -> None:
        """Drops the state of discarded passes: arguments of gradient finalization, and attention scores."""
        self._finalize.forget()
        self._optimizer.forget_attention_logits()


class GraphedUpdate(StepUpdate, GraphParticipant):
    """Captures the update in the graph of the passes. The device decides whether the update is applied.

    `follow` is the follow_up of FullCudaGraphWrapper. State that may change only once the host knows that the step is
    not discarded, such as router biases, is updated outside the graph.
    overflow_flags: see StepMemory; None if nothing can overflow. checks_losses: whether a non-finite loss also discards
    the step, because it ends the run before the update.
    """

    def __init__(
        self,
        finalize: DeferredFinalizer,
        optimizer: MegatronOptimizer,
        *,
        timers: Timers,
        overflow_flags: Callable[[], Tensor] | None,
        checks_losses: bool,
    ) -> None:
        super().__init__(finalize, optimizer, timers=timers)
        self._overflow_flags, self._checks_losses = overflow_flags, checks_losses
        # Of the captured update.
        self._chunks: list[_BaseDataParallel] = []
        self._captured: DeviceStep | None = None
        self._done: DeviceStep | None = None  # set by a replay until run_sync completes it

    def run_sync(self) -> tuple[bool, float, float | None]:
        """Completes the update of a replayed graph, or runs the update eagerly. Collective.

        Returns the result of MegatronOptimizer.step. NOTE: reads the device.
        """
        if self._done is None:
            return super().run_sync()
        done, self._done = self._done, None
        with self._timers("all-grads-sync", log_level=1):
            chunks = [require_wrapped(chunk) for chunk in self._finalize.take()[0]]
            for chunk in chunks:
                # The graph has reduced the gradients. Ranks must still agree on whether all gradients were finite.
                chunk.finish_grad_sync()
            end_model_step(chunks, chunks[0].pg_collection)
        with self._timers("optimizer", log_level=1):
            return self._optimizer.settle_step_sync(done)

    def forget(self) -> None:
        """Drops the state of a discarded step, whose update the device has not applied."""
        super().forget()
        self._done = None

    def follow(self, reports: Reports) -> None:
        """Captures gradient finalization and the optimizer's update, after the passes. Collective.

        reports: for each microbatch, maps a name to a tensor [], or [2] for (sum, count), fp32.
        """
        model, num_tokens = self._finalize.handed_over
        self._chunks = [require_wrapped(chunk) for chunk in model]
        self._check_hooks()
        complete_model_grads(self._chunks, num_tokens, groups=self._chunks[0].pg_collection)
        self._captured = self._optimizer.step_on_device(self._discard(reports))

    def _discard(self, reports: Reports) -> Tensor:
        """Returns a value above 0 if any rank overflowed or has a non-finite loss, to discard the step: [], fp64."""
        discard = torch.zeros((), dtype=torch.float64, device=default_device())
        if self._overflow_flags is not None:
            discard = self._overflow_flags().sum()
        if self._checks_losses:
            for total in total_reports(reports).values():
                discard = discard + total.isfinite().all().logical_not()
        if group_size(dist.group.WORLD) > 1:
            dist.all_reduce(discard, op=dist.ReduceOp.MAX)
        return discard

    def _check_hooks(self) -> None:
        """Raises RuntimeError if hooks on reduced gradients would run after the graph has updated the parameters."""
        if any(chunk.has_grad_hooks for chunk in self._chunks):
            raise RuntimeError(
                "hooks on reduced gradients are registered, but with --optimizer-cuda-graph a graph updates the "
                "parameters before these hooks would run: remove the hooks, or omit --optimizer-cuda-graph"
            )

    def prepare(self) -> None:
        """Writes the learning rates to the device, where the graph reads them.

        Raises RuntimeError if hooks on reduced gradients were registered after the capture.
        """
        self._check_hooks()
        self._optimizer.prepare_device_step()

    def captured(self) -> DeviceStep:
        """Returns the tensors that each replay fills and the host reads."""
        captured, self._captured = self._captured, None
        assert captured is not None, "follow ran in the capture"
        return captured

    def dropped(self) -> None:
        self._optimizer.forget_broken_capture()

    def replayed(self, account: DeviceStep) -> None:
        self._done = account
