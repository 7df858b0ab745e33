"""Executes a stage's list: forward steps, loss scaling, backward passes, transfers, and gradient finalisation.

Which steps run in which order is decided in schedule.py and transfers.py.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from megatron.core.device import default_device
from megatron.core.device.trace_ranges import trace_range
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.loss_scaling import scaled_loss
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Pipeline, validate_schedule
from megatron.core.pipeline_parallel.sync_callables import SyncCallables
from megatron.core.pipeline_parallel.transfers import Await, Direction, Post, Step, Transfer
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

LossFunction = Callable[..., Any]
ForwardStep = Callable[[Any, nn.Module], tuple[torch.Tensor, LossFunction]]


@runtime_checkable
class ScalesAuxLosses(Protocol):
    """A model with losses that hang inside it, as routers' do: they have no part in what the loss function returns."""

    def set_aux_loss_scale(self, scale: torch.Tensor) -> None:
        """scale: [], fp64, what their gradients are multiplied with in this step."""
        ...


class _Kept(NamedTuple):
    """A forward's state for its backward: the input, and the end of its graph.

    An edge, not the output: once it is sent, a stage's output is needed for nothing, and its memory is free.
    """

    given: torch.Tensor | None
    edge: GradientEdge | torch.Tensor | None


@dataclass(kw_only=True)
class ScheduleRunner:
    """Runs one step's list over the chunks of `model` and collects what the loss function reports of each microbatch.

    data_iterators: one a chunk. cp_group: the ranks that hold parts of the same sequences. non_loss_data: the loss
    function is called with non_loss_data=True, and what it returns is collected as it is.
    """

    forward_step: ForwardStep
    data_iterators: Sequence[Iterator[Any] | None]
    model: Sequence[nn.Module]
    config: ModelParallelConfig
    num_microbatches: int
    communicator: P2PCommunicator
    cp_group: ProcessGroup | None = None
    non_loss_data: bool = False
    reports: list[Any] = field(init=False, default_factory=list)
    num_tokens: torch.Tensor | None = field(init=False, default=None)
    _kept: dict[Action, _Kept] = field(init=False, default_factory=dict)
    _inputs: dict[Action, torch.Tensor] = field(init=False, default_factory=dict)
    _outputs: dict[Transfer, torch.Tensor] = field(init=False, default_factory=dict)

    def run(self, steps: Sequence[Step]) -> list[Any]:
        """Executes `steps`; returns one report a microbatch: name to a tensor [] or [2] (sum, count), fp32.

        Stages that compute no loss return none. Raises ValueError, with nothing executed, where the passes cannot run
        in this order.
        """
        actions = [step for step in steps if isinstance(step, Action)]
        # Before the first of them: half a step would leave gradients behind.
        validate_schedule(actions)
        has_backward = any(action.kind is ActionKind.BACKWARD for action in actions)
        if has_backward:
            self._set_aux_loss_scale()
        sync = SyncCallables(self.config, self.model, actions=actions)
        sync.begin()
        try:
            for step in steps:
                self._take(step, sync)
        finally:
            sync.end()
        self.communicator.finish()
        if has_backward and self.config.finalize_model_grads_func is not None:
            self.config.finalize_model_grads_func(list(self.model), self.num_tokens)
        return self.reports

    @property
    def _pipeline(self) -> Pipeline:
        return Pipeline(self.communicator.num_stages, len(self.model))

    def _take(self, step: Step, sync: SyncCallables) -> None:
        if isinstance(step, Post):
            self.communicator.post(step.transfers, self._outputs, device=default_device())
            for transfer in step.transfers:
                self._outputs.pop(transfer, None)
        elif isinstance(step, Await):
            source = self._pipeline.source(self.communicator.stage, step.action)
            assert source is not None, f"{step} has no sender"
            arrived = self.communicator.receive(Transfer(Direction.RECEIVE, step.action, source.stage))
            self._inputs[step.action] = arrived
        else:
            sync.before(step)
            if step.kind is ActionKind.FORWARD:
                with self.config.timers("forward-compute", log_level=2):
                    self._forward(step)
            else:
                with self.config.timers("backward-compute", log_level=2):
                    self._backward(step)
            sync.after(step)

    @trace_range("ScheduleRunner._forward")
    def _forward(self, action: Action) -> None:
        model = self.model[action.chunk]
        given = self._inputs.pop(action, None)
        if given is not None:
            # A leaf: the gradient that goes to the stage before ends here.
            given.requires_grad_(torch.is_grad_enabled())
            get_attr_wrapped_model(model, "set_input_tensor")(given)
        output, loss_function = self.forward_step(self.data_iterators[action.chunk], model)
        target = self._pipeline.target(self.communicator.stage, action)
        if target is not None:
            self._outputs[Transfer(Direction.SEND, action, target.stage)] = output.detach()
            edge = get_gradient_edge(output) if output.requires_grad else None
            self._keep(action, _Kept(given, edge))
        elif self.non_loss_data:
            self.reports.append(loss_function(output, non_loss_data=True))
        else:
            self._keep(action, _Kept(given, self._loss(output, loss_function)))

    def _keep(self, action: Action, kept: _Kept) -> None:
        if torch.is_grad_enabled():
            self._kept[action._replace(kind=ActionKind.BACKWARD)] = kept

    def _loss(self, output: torch.Tensor, loss_function: LossFunction) -> torch.Tensor:
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
        # Once a step: all of its microbatches have the same.
        scaled = [chunk for chunk in unwrap_model(list(self.model)) if isinstance(chunk, ScalesAuxLosses)]
        if not scaled:
            return
        # fp64, or models in fp64 would get a third of a loss with the digits of fp32.
        scale = torch.ones((), dtype=torch.float64)
        if self.config.grad_scale_func is not None:
            scale = self.config.grad_scale_func(scale)
        # The losses of single tokens are added up then, as the router adds up its own.
        parts = 1 if self.config.calculate_per_token_loss else self.num_microbatches
        for chunk in scaled:
            chunk.set_aux_loss_scale(scale / parts)

    @trace_range("ScheduleRunner._backward")
    def _backward(self, action: Action) -> None:
        given, edge = self._kept.pop(action)
        gradient = self._inputs.pop(action, None)
        if isinstance(edge, torch.Tensor):
            loss = edge if self.config.grad_scale_func is None else self.config.grad_scale_func(edge)
            loss.backward()
        elif edge is not None:
            torch.autograd.backward([edge], [gradient])
        target = self._pipeline.target(self.communicator.stage, action)
        if target is not None:
            assert given is not None, f"{action} has no input to send a gradient of"
            if given.grad is None:
                # Python shows it once. The loss does not depend on that input: its gradient is zero.
                warnings.warn(
                    f"what stage {self.communicator.stage} computes does not depend on the hidden states it is given: "
                    "the earlier stages get gradients of zero. forward_step should use what set_input_tensor gave the "
                    "model",
                    RuntimeWarning,
                    stacklevel=2,
                )
            gradient_of_input = torch.zeros_like(given) if given.grad is None else given.grad
            self._outputs[Transfer(Direction.SEND, action, target.stage)] = gradient_of_input
