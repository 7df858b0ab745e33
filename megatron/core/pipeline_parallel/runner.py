"""Executes a stage's program: forward steps, loss scaling, backward passes, transfers, and gradient finalization.

schedule.py and transfers.py decide which steps run in which order.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed import ProcessGroup

from megatron.core.device import default_device
from megatron.core.device.trace_ranges import trace_range
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.expert_overlap import ExpertOverlap, expert_overlap
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Neighbor,
    Pair,
    Pipeline,
    configured_schedule,
    held_backwards,
    passes,
    pipeline_of,
    validate_schedule,
)
from megatron.core.pipeline_parallel.sync_callables import SyncCallables
from megatron.core.pipeline_parallel.transfers import Await, Direction, Post, Step, Transfer
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.weight_grads import SplitBackward, WeightGradQueue
from megatron.core.utils import get_attr_wrapped_model, unwrap_model

LossFunction = Callable[..., Any]
ForwardStep = Callable[[Any, nn.Module], tuple[torch.Tensor, LossFunction]]


@runtime_checkable
class ScalesAuxLosses(Protocol):
    """A model with auxiliary losses, such as router losses, that are not part of the loss function."""

    def set_aux_loss_scale(self, scale: torch.Tensor) -> None:
        """Sets the gradient factor of the auxiliary losses in this step. scale: [], fp64."""
        ...


class _Kept(NamedTuple):
    """State of a forward that its backward requires. given: the chunk's input. edge: the autograd edge of the output.

    A GradientEdge does not reference the output tensor, so its memory can be freed once the output has been sent.
    """

    given: torch.Tensor | None
    edge: GradientEdge | torch.Tensor | None


@contextmanager
def _served(model: Sequence[nn.Module]) -> Iterator[WeightGradQueue]:
    """Context in which a queue may hold the weight gradients of all chunks.

    Raises ValueError for a parameter or a wrapper whose hooks would find incomplete gradients.
    """
    if any(isinstance(chunk, nn.parallel.DistributedDataParallel) for chunk in model):
        raise ValueError(
            "a chunk is wrapped in torch's DistributedDataParallel, which reduces gradients in each backward, but "
            "--pipeline-schedule computes some of them later: use DistributedDataParallel of megatron.core.distributed"
        )
    queue = WeightGradQueue("--pipeline-schedule")
    try:
        for chunk in model:
            queue.serve(chunk.named_parameters())
        yield queue
    finally:
        queue.release()


@dataclass(kw_only=True)
class ScheduleRunner:
    """Executes the program of a step on the chunks of `model` and collects the loss report of each microbatch.

    data_iterators: one per chunk. cp_group: the ranks that hold parts of the same sequences. non_loss_data: calls the
    loss function with non_loss_data=True and collects its results unchanged.
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
    _overlap: ExpertOverlap | None = field(init=False, default=None)
    # Backwards that hold their weight gradients, the queue that holds them, and what it holds, by weight pass.
    _held_backwards: frozenset[Action] = field(init=False, default=frozenset())
    _weights: WeightGradQueue | None = field(init=False, default=None)
    _splits: dict[Action, SplitBackward] = field(init=False, default_factory=dict)
    _kept: dict[Action, _Kept] = field(init=False, default_factory=dict)
    _inputs: dict[Action, torch.Tensor] = field(init=False, default_factory=dict)
    _outputs: dict[Transfer, torch.Tensor] = field(init=False, default_factory=dict)

    def run(self, steps: Sequence[Step]) -> list[Any]:
        """Executes `steps` and returns one report per microbatch: names to tensors, [] or [2] (sum, count), fp32.

        Stages that compute no loss return an empty list. Raises ValueError, before anything is executed, if the passes
        cannot run in this order.
        """
        order = [step for step in steps if isinstance(step, (Action, Pair))]
        # Checked before anything is executed, because half a step would leave gradients behind.
        validate_schedule(order)
        actions = passes(order)
        has_backward = any(action.kind is ActionKind.BACKWARD for action in actions)
        if has_backward:
            self._set_aux_loss_scale()
        sync = SyncCallables(self.config, self.model, actions=actions)
        self._held_backwards = held_backwards(order)
        with ExitStack() as stack:
            # Ends last: after an interrupt, a backward may run until the overlap is closed.
            stack.callback(sync.end)
            sync.begin()
            if self._held_backwards:
                self._weights = stack.enter_context(_served(self.model))
            if has_backward:
                self._overlap = stack.enter_context(expert_overlap(self.config, self.model, queue=self._weights))
            for step in steps:
                self._take(step, sync)
        self.communicator.finish()
        if has_backward and self.config.finalize_model_grads_func is not None:
            self.config.finalize_model_grads_func(list(self.model), self.num_tokens)
        return self.reports

    @cached_property
    def _pipeline(self) -> Pipeline:
        return pipeline_of(configured_schedule(self.config), self.communicator.num_stages, len(self.model))

    def _take(self, step: Step, sync: SyncCallables) -> None:
        if isinstance(step, Post):
            self.communicator.post(step.transfers, self._outputs, device=default_device())
            for transfer in step.transfers:
                self._outputs.pop(transfer, None)
        elif isinstance(step, Await):
            source = self._pipeline.sender(self.communicator.stage, step.action)
            assert source is not None, f"{step} has no sender"
            arrived = self.communicator.receive(Transfer(Direction.RECEIVE, step.action, source.stage))
            self._inputs[step.action] = arrived
        else:
            for action in step.passes:
                sync.before(action)
            self._run(step)
            for action in step.passes:
                sync.after(action)

    def _run(self, step: Action | Pair) -> None:
        if isinstance(step, Pair):
            assert self._overlap is not None, "schedules have pairs only if passes overlap"
            with self.config.timers("pair-compute", log_level=2):
                self._overlap.run_pair(partial(self._backward, step.backward), partial(self._forward, step.forward))
        elif step.kind is ActionKind.FORWARD:
            with self.config.timers("forward-compute", log_level=2):
                self._forward(step)
        elif step.kind is ActionKind.WEIGHT:
            with self.config.timers("weight-compute", log_level=2):
                self._weight(step)
        else:
            with self.config.timers("backward-compute", log_level=2):
                if step in self._held_backwards:
                    self._split_backward(step)
                elif self._overlap is None:
                    self._backward(step)
                else:
                    self._overlap.run_backward(partial(self._backward, step))

    @trace_range("ScheduleRunner._forward")
    def _forward(self, action: Action) -> None:
        model = self.model[action.chunk]
        given = self._inputs.pop(action, None)
        if given is not None:
            # A leaf, which accumulates the gradient for the previous stage.
            given.requires_grad_(torch.is_grad_enabled())
            get_attr_wrapped_model(model, "set_input_tensor")(given)
        output, loss_function = self.forward_step(self.data_iterators[action.chunk], model)
        target = self._pipeline.target(self.communicator.stage, action)
        if target is not None:
            self._hand_over(action, target, output.detach())
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
        """Records the report of a microbatch and returns its loss for backward: [], any float dtype, on the device.

        The loss function returns (summed loss, number of tokens, report) for this rank's part of the sequences, or
        (loss, report) with this rank's share of the mean loss of whole sequences. Gradients are averaged over data- and
        context-parallel ranks later; with per-token loss they are summed, and finalize_model_grads divides by all
        tokens. Collective over cp_group.
        """
        returned = loss_function(output)
        self.reports.append(returned[-1])
        ranks = group_size(self.cp_group)
        if len(returned) == 2:
            # The average over ranks then equals the sum of the shares.
            return returned[0] * ranks / self.num_microbatches
        loss, num_tokens, _ = returned
        if self.config.calculate_per_token_loss:
            self.num_tokens = num_tokens if self.num_tokens is None else self.num_tokens + num_tokens
            return loss
        if ranks > 1:
            # Parts with fewer tokens would have a larger weight if each rank divided by its local number. A copy,
            # because the loss function also reports its count.
            num_tokens = num_tokens.detach().clone()
            dist.all_reduce(num_tokens, group=self.cp_group)
            loss = loss * ranks
        # A microbatch in which every token is masked has zero gradients instead of NaN.
        return loss / num_tokens.clamp(min=1) / self.num_microbatches

    def _set_aux_loss_scale(self) -> None:
        # Once per step, because it is equal for all microbatches.
        scaled = [chunk for chunk in unwrap_model(list(self.model)) if isinstance(chunk, ScalesAuxLosses)]
        if not scaled:
            return
        # fp64, because fp32 would round factors such as 1/3 for models in fp64.
        scale = torch.ones((), dtype=torch.float64)
        if self.config.grad_scale_func is not None:
            scale = self.config.grad_scale_func(scale)
        # With per-token loss, the losses of tokens are summed, and the router likewise sums its losses.
        parts = 1 if self.config.calculate_per_token_loss else self.num_microbatches
        for chunk in scaled:
            chunk.set_aux_loss_scale(scale / parts)

    def _split_backward(self, action: Action) -> None:
        assert self._weights is not None, "orders with weight passes have a queue"
        with self._weights.splitting() as split:
            self._backward(action)
        self._splits[action.of_kind(ActionKind.WEIGHT)] = split

    @trace_range("ScheduleRunner._weight")
    def _weight(self, action: Action) -> None:
        self._splits.pop(action).complete()

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
                # Python shows this warning once. The loss does not depend on that input, so its gradient is zero.
                warnings.warn(
                    f"the output of stage {self.communicator.stage} does not depend on the hidden states that it "
                    "receives: earlier stages receive zero gradients. forward_step should use the tensor passed to the "
                    "model by set_input_tensor",
                    RuntimeWarning,
                    stacklevel=2,
                )
            gradient_of_input = torch.zeros_like(given) if given.grad is None else given.grad
            self._hand_over(action, target, gradient_of_input)

    def _hand_over(self, action: Action, target: Neighbor, tensor: torch.Tensor) -> None:
        """Keeps the output of a pass for the pass that consumes it, or for the transfer to its stage."""
        transfer = Transfer(Direction.SEND, action, target.stage)
        if target.stage == self.communicator.stage:
            self._inputs[target.action] = self.communicator.checked(tensor, transfer)
        else:
            self._outputs[transfer] = tensor
