"""_BaseDataParallel: what training loops and optimizers ask of a model chunk that is wrapped for data parallelism."""

from abc import abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import default_device
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_buffer import Entry
from megatron.core.distributed.hooked_wrapper import HookedWrapper
from megatron.core.distributed.layout import BufferLayout, Span
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection


class WrappedBuffer(Protocol):
    """Parameters and gradients that lie flat; see FlatBuffer of the optimizer. model_dtype: what modules compute in."""

    param_data: torch.Tensor
    grad_data: torch.Tensor

    @property
    def standing_params(self) -> list[torch.Tensor]:
        """Memory that parameters lie in from step to step: [N] each, param_data's dtype."""
        ...

    @property
    def standing_grads(self) -> list[torch.Tensor]:
        """Memory that their gradients lie in from step to step: [N] each, grad_data's dtype."""
        ...

    @property
    def entries(self) -> Sequence[Entry]: ...
    @property
    def model_dtype(self) -> torch.dtype: ...
    @property
    def is_expert(self) -> bool: ...
    @property
    def layout(self) -> BufferLayout: ...
    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None: ...
    @property
    def is_sharded(self) -> bool: ...
    def owned_spans(self) -> list[Span]: ...
    def owned_grads(self, entry: Entry) -> list[torch.Tensor]:
        """The parts of a parameter's gradient whose sum this rank gets: each [N], grad_data's dtype, views of it."""
        ...

    def grad_of(self, span: Span) -> torch.Tensor:
        """The reduced gradients of elements of one owned span: [span.numel], their dtype, a view."""
        ...

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool: ...


class WrapperOrder(Protocol):
    """Tells the ranks' steps apart; see LaunchOrder."""

    has_optimizer: bool

    def step(self) -> None: ...


class _BaseDataParallel(HookedWrapper):
    """Wraps a module whose gradients are reduced over data-parallel ranks.

    In a step: `zero_grad_buffer`, forward and backward of each microbatch, `finish_grad_sync`, the optimizer's update,
    `note_update`.
    """

    config: ModelParallelConfig
    ddp_config: DistributedDataParallelConfig
    pg_collection: ProcessGroupCollection
    launch_order: WrapperOrder

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*inputs, **kwargs)

    @property
    @abstractmethod
    def all_buffers(self) -> Sequence[WrappedBuffer]:
        """The buffers of trained parameters and their gradients."""

    @abstractmethod
    def zero_grad_buffer(self, *, caller: Hashable = None) -> None:
        """Makes all gradients zero and begins an iteration."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Gradients that come inside add up, and nothing is reduced."""

    @abstractmethod
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduces what is left and waits for all of it. Collective."""

    @abstractmethod
    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients; scaling_factor: a number or a tensor [], any float dtype."""

    @abstractmethod
    def reset_iteration(self) -> None:
        """Discards the iteration after an error in a step that was caught; the next one begins from scratch."""

    @abstractmethod
    def note_update(self) -> None:
        """Records that an optimizer has updated the parameters."""

    @abstractmethod
    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Starts to gather what other ranks have updated, where forward does not."""

    @property
    def device(self) -> torch.device:
        """Where the module's parameters are, frozen ones too: this rank takes part in sums in any case."""
        return next((param.device for param in self.module.parameters()), default_device())


def require_wrapped(chunk: nn.Module) -> _BaseDataParallel:
    """`chunk` itself; raises ValueError if it is not wrapped for data parallelism."""
    if not isinstance(chunk, _BaseDataParallel):
        raise ValueError(
            f"model chunk is a {type(chunk).__name__}: must be wrapped in DistributedDataParallel, or in "
            "TorchFullyShardedDataParallel"
        )
    return chunk


def check_wrapper_types(wrapper: str, **given: tuple[object, type]) -> None:
    """Raises TypeError where an argument of a wrapper is of another type; given: by name, the value and its type."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"{wrapper}: {name} is {'None' if value is None else 'a ' + type(value).__name__}: must be a "
                f"{kind.__name__}"
            )


def groups_or_existing(groups: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """The groups themselves; for None those of parallel_state, or else all ranks there are."""
    groups = groups or existing_process_groups()
    if groups.dp_cp is None and dist.is_initialized():
        return ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    return groups
