"""_BaseDataParallel: what training loops, optimizers and users' hooks ask of a chunk wrapped for data parallelism."""

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from megatron.core.dense_memory import check_apart
from megatron.core.device import default_device
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.grad_hooks import (
    BucketHook,
    GradConsumer,
    GradHookRunner,
    ParamHook,
    PostBackwardHook,
    StateProvider,
)
from megatron.core.distributed.iteration import Iteration
from megatron.core.distributed.layout import FlatBuffer
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import is_wrapped
from megatron.core.utils import ModelWrapper

# What optimizers step and all back ends add up.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WrapperOrder(Protocol):
    """The part of a CollectiveScheduler, or of FSDP2's iteration, that an optimizer uses."""

    iteration: Iteration

    def step(self) -> None: ...


class _BaseDataParallel(ModelWrapper):
    """Wraps a module whose gradients are reduced over data-parallel ranks.

    In a step: `zero_grad_buffer`, forward and backward of each microbatch, `finish_grad_sync`, the optimizer's update,
    `note_update`.

    Hooks on reduced gradients fire once in an iteration, on all ranks, after the backward that reduces (never in
    `no_sync`); docs/hooks.md says when and in which order. Hooks that are on a parameter when it is wrapped are taken
    over, for its reduced gradient.
    """

    config: ModelParallelConfig
    ddp_config: DistributedDataParallelConfig
    pg_collection: ProcessGroupCollection
    launch_order: WrapperOrder
    _hook_runner: GradHookRunner

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        return self.module(*inputs, **kwargs)

    @property
    @abstractmethod
    def all_buffers(self) -> Sequence[FlatBuffer]:
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

    # Hooks on reduced gradients.

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """Returns this rank's part of a parameter, any shape and dtype; always the same object.

        Its `.grad` is set during post-accumulate hooks. It is the parameter itself without shards, a view, [n], under
        ZeRO-1 and ZeRO-2, and the sharded parameter, a DTensor, under FSDP2.
        """
        return self._hook_runner.owned_shard(param)

    def set_consumer(self, consumer: GradConsumer | None) -> None:
        """Attaches an optimizer that takes each bucket after the hooks; None: takes it off."""
        self._hook_runner.consumer = consumer

    def set_state_provider(self, provider: StateProvider) -> None:
        """Sets the bound method that `ReadyBucket.states` calls, the last one given, while its object is in use."""
        self._hook_runner.set_state_provider(provider)

    def notify_grads_final(self) -> None:
        """Releases gradients that were not final when they were reduced to hooks; complete_model_grads calls it."""
        self._hook_runner.release_queued()

    def register_post_accumulate_grad_hook(self, param: nn.Parameter, hook: ParamHook) -> RemovableHandle:
        """Calls `hook(owned_shard(param))` when the gradient of a parameter, any shape and dtype, is reduced."""
        return self._hook_runner.hooks.register_post_accumulate_grad_hook(param, hook)

    def register_bucket_ready_hook(self, hook: BucketHook) -> RemovableHandle:
        """Calls `hook` with each bucket when it is reduced, as a ReadyBucket."""
        return self._hook_runner.hooks.register_bucket_ready_hook(hook)

    def register_post_backward_hook(
        self, params: nn.Parameter | Iterable[nn.Parameter], hook: PostBackwardHook
    ) -> RemovableHandle:
        """Calls `hook` when all of `params`, any shapes and dtypes, are reduced, with a list of ReadyBucket that hold
        these alone.
        """
        return self._hook_runner.hooks.register_post_backward_hook(params, hook)


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


def check_params(module: nn.Module) -> None:
    """Raises ValueError where parameters that require grad are in no dtype or place that can be wrapped."""
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name} is a DTensor: the module was given to fully_shard, as by "
                "TorchFullyShardedDataParallel, before; wrap another one that is not, once"
            )
    check_apart([*module.named_parameters(), *module.named_buffers()])
    trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    for name, param in trained:
        if param.dtype not in _DTYPES:
            raise ValueError(f"parameter {name} is {param.dtype} and requires grad: must be one of {list(_DTYPES)}")
        if param.device != trained[0][1].device:
            raise ValueError(
                f"parameter {name} is on {param.device} where {trained[0][0]} is on {trained[0][1].device}: all that "
                "require grad must be on one device"
            )
        # Two wrappers would each reduce a part of its gradient, and the first one's buffer be nobody's parameter.
        if is_wrapped(param):
            raise ValueError(
                f"parameter {name} is in another DistributedDataParallel: call that one's release() before the module "
                "is wrapped again; two chunks cannot share a parameter"
            )


def gradient_scale(
    group: dist.ProcessGroup | None,
    groups: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
) -> float:
    """Factor of every gradient before its sum over `group`, all ranks that hold the parameter."""
    if config.calculate_per_token_loss:
        return 1.0
    # An expert's gradient has its share of every rank's tokens already, so the number of replicas is that of the dense
    # layers for both.
    replicas = group_size(groups.dp_cp)
    return group_size(group) / replicas if ddp_config.average_in_collective else 1.0 / replicas


def expert_ranks_differ(groups: ProcessGroupCollection) -> bool:
    """Whether experts are reduced over other ranks than the rest."""
    return _ranks(groups.expt_dp) != _ranks(groups.dp_cp)


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    # A group of this rank alone is None, or one of a grid.
    return None if group is None or group_size(group) == 1 else dist.get_process_group_ranks(group)
