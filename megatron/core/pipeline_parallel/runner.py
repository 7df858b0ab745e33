"""Executes a schedule: forward steps, loss scaling, backward passes, and gradient finalisation at the end.

Which actions run in which order is schedule.py's decision.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.loss_scaling import scaled_loss
from megatron.core.pipeline_parallel.schedule import Action, ActionKind, validate_schedule

LossFunction = Callable[[torch.Tensor], tuple[Any, ...]]
ForwardStep = Callable[[Any, nn.Module], tuple[torch.Tensor, LossFunction]]


@dataclass(kw_only=True)
class ScheduleRunner:
    """Runs one step's actions over `model` and collects what the loss function reports of each microbatch.

    cp_group: the ranks that hold parts of the same sequences.
    """

    forward_step: ForwardStep
    data_iterator: Iterator[Any] | None
    model: nn.Module
    config: ModelParallelConfig
    num_microbatches: int
    cp_group: ProcessGroup | None = None
    reports: list[dict[str, torch.Tensor]] = field(init=False, default_factory=list)
    num_tokens: torch.Tensor | None = field(init=False, default=None)
    _losses: dict[int, torch.Tensor] = field(init=False, default_factory=dict)

    def run(self, actions: list[Action]) -> list[dict[str, torch.Tensor]]:
        """Executes `actions`; returns one report a microbatch: name to a tensor [] or [2] (sum, count), fp32.

        Raises ValueError, with nothing executed, where the actions cannot run in this order.
        """
        # Before the first of them: half a step would leave gradients behind.
        validate_schedule(actions)
        last = max((i for i, action in enumerate(actions) if action.kind is ActionKind.BACKWARD), default=None)
        with ExitStack() as deferred_sync:
            if self.config.no_sync_func is not None and last is not None:
                deferred_sync.enter_context(self.config.no_sync_func())
            for index, action in enumerate(actions):
                if index == last:
                    # Gradients of the last microbatch complete the sums, so reduction may start during its backward.
                    deferred_sync.close()
                self._execute(action)
        if last is not None and self.config.finalize_model_grads_func is not None:
            self.config.finalize_model_grads_func([self.model], self.num_tokens)
        return self.reports

    def _execute(self, action: Action) -> None:
        if action.kind is ActionKind.FORWARD:
            with self.config.timers("forward-compute", log_level=2):
                self._losses[action.microbatch] = self._forward()
        else:
            with self.config.timers("backward-compute", log_level=2):
                self._backward(self._losses.pop(action.microbatch))

    @record_function("ScheduleRunner._forward")
    def _forward(self) -> torch.Tensor:
        self._set_aux_loss_scale()
        output, loss_function = self.forward_step(self.data_iterator, self.model)
        scaled = scaled_loss(
            loss_function(output),
            per_token=self.config.calculate_per_token_loss,
            num_microbatches=self.num_microbatches,
            cp_group=self.cp_group,
        )
        self.reports.append(scaled.report)
        if scaled.num_tokens is not None:
            # finalize_model_grads divides by the tokens of all ranks and microbatches together.
            self.num_tokens = scaled.num_tokens if self.num_tokens is None else self.num_tokens + scaled.num_tokens
        return scaled.loss

    def _set_aux_loss_scale(self) -> None:
        if self.config.aux_loss_scale_func is None or not torch.is_grad_enabled():
            return
        # fp64, or models in fp64 would get a third of a loss with the digits of fp32.
        scale = torch.ones((), dtype=torch.float64)
        if self.config.grad_scale_func is not None:
            scale = self.config.grad_scale_func(scale)
        # The losses of single tokens are added up then, as the router adds up its own.
        parts = 1 if self.config.calculate_per_token_loss else self.num_microbatches
        self.config.aux_loss_scale_func(scale / parts)

    @record_function("ScheduleRunner._backward")
    def _backward(self, loss: torch.Tensor) -> None:
        if self.config.grad_scale_func is not None:
            loss = self.config.grad_scale_func(loss)
        loss.backward()
