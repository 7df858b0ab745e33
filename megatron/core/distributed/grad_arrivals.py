"""GradArrivals: takes every gradient that autograd has, or is about to compute, to the scheduler of a wrapper.

What is reduced when is scheduler.py's; where a gradient goes, its group's.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.core.distributed.backward_end import OutermostBackward
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.grad_hooks import GradHookRunner
from megatron.core.distributed.scheduler import CollectiveScheduler
from megatron.core.distributed.synced_group import SyncedGroup
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.param_attributes import clear_main_grad, gradient_of, mark_gradients_pass
from megatron.core.tensor_parallel.weight_grads import GradOwner, WeightGrad, set_grad_owner


class GradArrivals:
    """Registers gradient hooks on one wrapper's parameters, until `release`. group_of: their bucket groups."""

    def __init__(
        self,
        group_of: Mapping[nn.Parameter, SyncedGroup],
        order: CollectiveScheduler,
        *,
        hook_runner: GradHookRunner,
        config: ModelParallelConfig,
        ddp_config: DistributedDataParallelConfig,
    ) -> None:
        self._group_of, self._order, self._hook_runner = group_of, order, hook_runner
        self._groups = list(dict.fromkeys(group_of.values()))
        self._releases = ddp_config.release_gradients
        self._end, self._outermost = order.backward_end(self._end_pass), OutermostBackward()
        is_transient = ddp_config.gradients_are_transient
        # Added in place, gradients that come in time have other last digits than those that come late; and those that
        # are transient stand nowhere.
        is_fused = config.gradient_accumulation_fusion and not config.deterministic_mode and not is_transient
        for param in group_of:
            set_grad_owner(param, self._owner_of(param) if is_fused else None)
            if is_transient:
                mark_gradients_pass(param)
        take = self._take_in_pass if is_transient else self._take
        # Hooks of the tensor, unlike those of its autograd node, survive a move of the parameter.
        self._handles = [param.register_post_accumulate_grad_hook(take) for param in group_of]

    def watch_backward_of(self, outputs: Any) -> None:
        """Call it with what forward returns: tensors of any shape and dtype, in any structure."""
        if self._releases and not self._hook_runner.knows_counts:
            self._outermost.watch(outputs)

    def forget(self) -> None:
        """Resets the state of the backward that is in progress."""
        self._end.forget()

    def release(self) -> None:
        """Gradients stay where autograd leaves them."""
        for handle in self._handles:
            handle.remove()
        for param in self._group_of:
            clear_main_grad(param)
            set_grad_owner(param, None)

    def _take(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        self._order.accumulate(self._group_of[param], param)

    def _take_in_pass(self, param: torch.Tensor) -> None:
        assert isinstance(param, nn.Parameter)
        group = self._group_of[param]
        if group.is_closed:
            # What else comes more often than before is learnt in an iteration that waits for all.
            self._hook_runner.knows_counts = False
            raise RuntimeError(
                f"a gradient of {group.name_of(param)} came after its bucket was reduced and given to hooks and "
                "optimizer (DistributedDataParallelConfig.release_gradients): put all backwards of a step but the last "
                "in accumulate(). If both are of one backward, they are waited for after reset_iteration(); hooks and "
                "optimizer may have updated parameters in this iteration, so load a checkpoint then"
            )
        if group.is_last_microbatch:
            self._end.note()
            if self._releases and group.is_last_backward:
                self._hold_if_inside()
        self._order.accumulate(group, param)
        # The bucket has a copy.
        param.grad = None

    def _hold_if_inside(self) -> None:
        # See [Note: several gradients].
        if not self._hook_runner.knows_counts and not self._outermost.is_here():
            for group in self._groups:
                group.hold()

    @torch.no_grad()
    def _end_pass(self) -> None:
        self._order.end_pass(self._groups)
        self._hook_runner.end_backward()

    def _owner_of(self, param: nn.Parameter) -> GradOwner:
        main_grad = gradient_of(param)
        assert main_grad is not None, "buffers give each of their parameters one"
        return GradOwner(main_grad, self._add)

    def _add(self, param: nn.Parameter, new: WeightGrad) -> None:
        self._order.add_gradient(self._group_of[param], param, new=new)
