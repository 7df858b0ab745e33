"""PlainDataParallel: replicas of any module whose gradients are averaged once, after the last microbatch.

No overlap, no sharding; where gradients are stored is grad_buffer.py's work.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import default_device
from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.distributed.collectives import all_reduce_, rank_ordered_all_reduce_
from megatron.core.distributed.grad_buffer import GradBuffer
from megatron.core.distributed.tied_weights import follow_owner
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.utils import ModelWrapper


class PlainDataParallel(ModelWrapper):
    """Wraps a module; its parameters that require grad get standing fp32 gradients (fp64 for fp64 parameters).

    In a step: `zero_grad_buffer`, any number of backward passes, `finish_grad_sync`. A parameter that backward does
    not reach has a gradient of zero, on one rank or on all; a parameter frozen before wrapping has none, and one is
    not to be frozen or thawed after it.
    `param.grad` is None between steps: read gradients through `named_main_grads` or as `param.main_grad`.

    group: data-parallel ranks; None for this rank alone. expert_group: those that hold the same experts; a module
    with expert parameters needs it. embd_group: first and last stage, which a module with a tied weight needs; wrapping
    that one waits for the other stage's (tied_weights.py), so build all chunks before the first is wrapped.
    deterministic: sum in rank order. calculate_per_token_loss: ranks are summed
    instead of averaged, for finalize_model_grads to divide by their tokens. check_for_nan_in_grad: for it to look at
    gradients before their reduction, and tell all ranks; leave it off for fp16, whose loss scaler expects overflow.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | None,
        expert_group: dist.ProcessGroup | None = None,
        embd_group: dist.ProcessGroup | None = None,
        deterministic: bool = False,
        calculate_per_token_loss: bool = False,
        check_for_nan_in_grad: bool = False,
    ):
        super().__init__(module)
        self.group = group
        self.calculate_per_token_loss = calculate_per_token_loss
        self.check_for_nan_in_grad = check_for_nan_in_grad
        # Of all parameters: the rest may be frozen, and this rank takes part in sums all the same.
        self.device = next((param.device for param in module.parameters()), default_device())
        follow_owner(module, embd_group)
        # The mean is taken by scaling while gradients are moved anyway; the sum over ranks then needs no pass after it.
        # An expert's gradient has its share of every rank's tokens already, so the number of replicas is that of the
        # dense layers for both.
        scale = 1.0 if calculate_per_token_loss else 1.0 / group_size(group)
        self.expert_group = _expert_group(module, group, expert_group=expert_group)
        self._reductions = _build_buffers(module, group, expert_group=self.expert_group, scale=scale)
        self.grad_buffers = [buffer for buffer, _ in self._reductions]
        # Chosen once: what a step does depends on no flag.
        self._reduce = rank_ordered_all_reduce_ if deterministic else all_reduce_

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*inputs, **kwargs)

    def zero_grad_buffer(self) -> None:
        """Forgets all gradients; call before the first microbatch."""
        for buffer in self.grad_buffers:
            buffer.clear()

    def fill_missing_grads(self) -> None:
        """Makes the gradients of parameters that backward did not reach zero; call after the last microbatch."""
        for buffer in self.grad_buffers:
            buffer.fill_missing()

    def finish_grad_sync(self) -> None:
        """Reduces the gradients over their groups, in place; call after the last microbatch. Collective."""
        # So that ranks which did and did not use a parameter reduce the same tensors.
        self.fill_missing_grads()
        for buffer, group in self._reductions:
            self._reduce(buffer.storage, group)

    def reduce_partial_grads(self, group: dist.ProcessGroup | None) -> None:
        """Sums over the tensor-parallel `group` the gradients of which each rank has a part. Collective.

        Those are marked sequence_parallel: of norms and biases that see a part of the tokens or heads.
        """
        if group_size(group) == 1:
            return
        for buffer in self.grad_buffers:
            grads = [entry.grad for entry in buffer.entries if param_facts(entry.param).sequence_parallel]
            if grads:
                # One message: they are many and small.
                flat = torch.cat([grad.view(-1) for grad in grads])
                self._reduce(flat, group)
                for grad, total in zip(grads, flat.split([grad.numel() for grad in grads])):
                    grad.copy_(total.view(grad.shape))

    def reduce_shared_grads(self, group: dist.ProcessGroup | None) -> None:
        """Sums over the `group` of first and last stage the gradient of a weight that both have. Collective.

        A sum of two numbers is the same in any order, so the copies stay equal to the last bit.
        """
        if group_size(group) == 1:
            return
        for buffer in self.grad_buffers:
            for entry in buffer.entries:
                if param_facts(entry.param).shared_embedding:
                    dist.all_reduce(entry.grad, group=group)

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients; factor: a number or a tensor [], any float dtype."""
        for buffer in self.grad_buffers:
            buffer.storage.mul_(factor)

    def named_main_grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and gradients of all parameters that require grad: [*parameter shape], fp32 or fp64, views."""
        return (item for buffer in self.grad_buffers for item in buffer.named_grads())

    def broadcast_params(self) -> None:
        """Gives every rank of a group the parameters of its first. Collective."""
        broadcast_params(self.module, self.group, expert_group=self.expert_group)


def broadcast_params(
    module: nn.Module, group: dist.ProcessGroup | None, *, expert_group: dist.ProcessGroup | None = None
) -> None:
    """Copies the parameters of the group's first rank to the others, in place. Collective.

    expert_group: the ranks that hold the same experts; a module with expert parameters needs it.
    """
    expert_group = _expert_group(module, group, expert_group=expert_group)
    for param in module.parameters():
        its_group = expert_group if param_facts(param).is_expert else group
        if group_size(its_group) > 1:
            # One by one: this happens once, and flat copies would need the memory twice.
            dist.broadcast(param.data, group=its_group, group_src=0)


def _expert_group(
    module: nn.Module, group: dist.ProcessGroup | None, *, expert_group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    # Without it experts would be summed with others, or with none, and nobody would notice.
    if group is not None and expert_group is None and any(param_facts(p).is_expert for p in module.parameters()):
        raise ValueError("expert_group is None: the module has expert parameters, so give the ranks that share them")
    return expert_group


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    # A group of this rank alone is None, or one of a grid.
    return None if group_size(group) == 1 or group is None else dist.get_process_group_ranks(group)


def _build_buffers(
    module: nn.Module, group: dist.ProcessGroup | None, *, expert_group: dist.ProcessGroup | None, scale: float
) -> list[tuple[GradBuffer, dist.ProcessGroup | None]]:
    """Buffers and the ranks to sum each over; of experts apart where those are other ranks."""
    apart = _ranks(expert_group) != _ranks(group)
    # One reduction a dtype and group; nearly always there is one dtype.
    by_kind: dict[tuple[bool, torch.dtype, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
    # named_parameters gives a parameter that two modules share once.
    for name, param in module.named_parameters():
        if param.requires_grad:
            # fp64 for comparisons with exact references; 16-bit sums lose microbatches.
            dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
            is_expert = apart and param_facts(param).is_expert
            by_kind.setdefault((is_expert, param.dtype, dtype), []).append((canonical_name(name), param))
    return [
        (GradBuffer(named_params, dtype, scale=scale, is_expert=is_expert), expert_group if is_expert else group)
        for (is_expert, _, dtype), named_params in by_kind.items()
    ]
