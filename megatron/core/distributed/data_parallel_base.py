"""_BaseDataParallel: the interface of a model chunk wrapped for data parallelism.

Training loops, optimizers and users' hooks use it; distributed_data_parallel.py and torch_fsdp2.py implement it. The
file also contains the checks that both wrappers share, and gradient_scale, the factor applied to gradients before they
are summed.
"""

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
from megatron.core.dist_checkpointing import canonical_name
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
from megatron.core.tensor_parallel.kept_dtypes import KeepsDtypes
from megatron.core.tensor_parallel.param_attributes import is_wrapped
from megatron.core.utils import ModelWrapper

# Dtypes that all optimizers can update and all backends can sum.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class WrapperOrder(Protocol):
    """The interface of CollectiveScheduler and FsdpIteration that an optimizer uses."""

    iteration: Iteration

    def step(self) -> None: ...


class _BaseDataParallel(ModelWrapper, KeepsDtypes):
    """Base class of wrappers that reduce a module's gradients over data-parallel ranks.

    A step consists of `zero_grad_buffer`, forward and backward of each microbatch, `finish_grad_sync`, the optimizer's
    update and `note_update`.

    Hooks on reduced gradients fire once per iteration, on all ranks, after the backward pass that reduces them (never
    in `no_sync`); docs/hooks.md documents their order. Hooks already registered on a parameter when it is wrapped are
    subsequently called with its reduced gradient.
    """

    config: ModelParallelConfig
    ddp_config: DistributedDataParallelConfig
    pg_collection: ProcessGroupCollection
    launch_order: WrapperOrder
    _hook_runner: GradHookRunner

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the wrapped module's forward."""
        return self.module(*inputs, **kwargs)

    @property
    @abstractmethod
    def all_buffers(self) -> Sequence[FlatBuffer]:
        """The buffers of trained parameters and their gradients."""

    @abstractmethod
    def zero_grad_buffer(self, *, caller: Hashable = None) -> None:
        """Zeroes all gradients and begins an iteration."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Returns a context in which gradients accumulate without being reduced."""

    @abstractmethod
    def finish_grad_sync(self, force_all_reduce: bool = False) -> None:
        """Reduces gradients that were not reduced during backward and waits for all reductions. Collective."""

    @abstractmethod
    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `scaling_factor`, a number or a tensor [] of any float dtype."""

    @abstractmethod
    def reset_iteration(self) -> None:
        """Discards the iteration after a caught error, so that the next iteration starts from a clean state."""

    @abstractmethod
    def note_update(self) -> None:
        """Records that an optimizer has updated the parameters."""

    @abstractmethod
    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Launches the gathers of parameters that other ranks have updated, unless forward gathers them."""

    @property
    def device(self) -> torch.device:
        """Device of the module's parameters, or the default device if it has none.

        Frozen parameters count too, because this rank takes part in collectives even if all of them are frozen.
        """
        return next((param.device for param in self.module.parameters()), default_device())

    # Hooks on reduced gradients.

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """Returns this rank's part of a parameter, always as the same object.

        Its `.grad` is set only while post-accumulate hooks run; with FSDP2 it remains until gradients are freed. The
        part is the parameter itself without sharding, a view [n] under ZeRO-1 and ZeRO-2, and the sharded parameter, a
        DTensor, under FSDP2. Raises ValueError for a parameter that is not wrapped.
        """
        return self._hook_runner.owned_shard(param)

    def set_consumer(self, consumer: GradConsumer | None) -> None:
        """Attaches an optimizer that receives each reduced bucket after the hooks; None detaches it."""
        self._hook_runner.consumer = consumer

    @property
    def has_grad_hooks(self) -> bool:
        """Whether any hook on reduced gradients is registered."""
        return not self._hook_runner.hooks.is_empty

    def set_state_provider(self, provider: StateProvider) -> None:
        """Sets the bound method that `ReadyBucket.states` calls; only a weak reference to its object is kept."""
        self._hook_runner.set_state_provider(provider)

    def notify_grads_final(self) -> None:
        """Runs the deferred hooks of gradients that complete_model_grads, its caller, has completed."""
        self._hook_runner.release_queued()

    def register_post_accumulate_grad_hook(self, param: nn.Parameter, hook: ParamHook) -> RemovableHandle:
        """Registers a hook that is called as `hook(owned_shard(param))` when the parameter's gradient is reduced."""
        return self._hook_runner.hooks.register_post_accumulate_grad_hook(param, hook)

    def register_bucket_ready_hook(self, hook: BucketHook) -> RemovableHandle:
        """Registers a hook that is called with each bucket, as a ReadyBucket, when it is reduced."""
        return self._hook_runner.hooks.register_bucket_ready_hook(hook)

    def register_post_backward_hook(
        self, params: nn.Parameter | Iterable[nn.Parameter], hook: PostBackwardHook
    ) -> RemovableHandle:
        """Registers a hook that is called once per iteration, when the gradients of all `params` are reduced.

        The hook receives a list of ReadyBucket objects that contain only these parameters.
        """
        return self._hook_runner.hooks.register_post_backward_hook(params, hook)


def require_wrapped(chunk: nn.Module) -> _BaseDataParallel:
    """Returns `chunk`; raises ValueError if it is not wrapped for data parallelism."""
    if not isinstance(chunk, _BaseDataParallel):
        raise ValueError(
            f"model chunk is a {type(chunk).__name__}: must be wrapped in DistributedDataParallel or "
            "TorchFullyShardedDataParallel"
        )
    return chunk


def check_wrapper_types(wrapper: str, **given: tuple[object, type]) -> None:
    """Raises TypeError if an argument has the wrong type; given: the value and required type of each, by name."""
    for name, (value, kind) in given.items():
        if not isinstance(value, kind):
            raise TypeError(
                f"{wrapper}: {name} is {'None' if value is None else 'a ' + type(value).__name__}: must be a "
                f"{kind.__name__}"
            )


def groups_or_existing(groups: ProcessGroupCollection | None) -> ProcessGroupCollection:
    """Returns `groups`; None means the groups of parallel_state or, without them, one group of all ranks."""
    groups = groups or existing_process_groups()
    if groups.dp_cp is None and dist.is_initialized():
        return ProcessGroupCollection(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    return groups


def check_params(module: nn.Module) -> None:
    """Raises ValueError if a parameter cannot be wrapped.

    Parameters must not be DTensors, and no two parameters or buffers may overlap in memory. Parameters that require
    grad must have a dtype in _DTYPES, be on one device and not belong to another wrapper.
    """
    for name, param in module.named_parameters():
        if isinstance(param, DTensor):
            raise ValueError(
                f"parameter {name} is a DTensor: fully_shard, as in TorchFullyShardedDataParallel, has already "
                "sharded the module. Wrap a module that is not sharded yet, and only once"
            )
    check_apart([*module.named_parameters(), *module.named_buffers()])
    trained = [(name, param) for name, param in module.named_parameters() if param.requires_grad]
    for name, param in trained:
        if param.dtype not in _DTYPES:
            raise ValueError(f"parameter {name} is {param.dtype} and requires grad: must be one of {list(_DTYPES)}")
        if param.device != trained[0][1].device:
            raise ValueError(
                f"parameter {name} is on {param.device} but {trained[0][0]} is on {trained[0][1].device}: all "
                "parameters that require grad must be on one device"
            )
        # Two wrappers would each reduce a part of its gradient, and the first wrapper's buffer would no longer contain
        # the parameter.
        if is_wrapped(param):
            raise ValueError(
                f"parameter {name} is in another DistributedDataParallel: call release() on that wrapper before "
                "wrapping the module again; two chunks cannot share a parameter"
            )


def changed_after_wrapping(name: str, what: str, *, wrapper: str, allowed: str) -> str:
    """Returns the error message for a parameter that was changed while a wrapper managed it.

    what: the change, such as `replaced`. wrapper: the wrapper's class name. allowed: a phrase stating when such changes
    are allowed.
    """
    return (
        f"parameter {canonical_name(name)} was {what} after the module was wrapped in {wrapper}: make such changes "
        f"{allowed}, and build the optimizer afterwards"
    )


def gradient_scale(
    reduce_group: dist.ProcessGroup | None,
    pg_collection: ProcessGroupCollection,
    *,
    config: ModelParallelConfig,
    ddp_config: DistributedDataParallelConfig,
) -> float:
    """Returns the factor by which every gradient is multiplied before it is summed over ranks.

    reduce_group: the ranks that hold the parameter, over which its gradients are summed: dp_cp, or expt_dp for experts.
    pg_collection: all process groups of this rank.

    The sum is divided by the size of dp_cp, for experts too, which makes it the mean over data-parallel ranks. With
    average_in_collective the collective itself divides by the size of reduce_group, and the factor is the remaining
    ratio. With per-token loss the factor is 1: _divide_by_tokens (finalize_model_grads.py) divides the sum later, and
    is_completed_later (grad_hooks.py) defers hooks until then.
    """
    if config.calculate_per_token_loss:
        return 1.0
    # Not the size of expt_dp for experts. With expert parallelism the experts of a rank process the tokens of all ranks
    # of the expert-parallel group, so their gradient is already the sum over these ranks.
    replicas = group_size(pg_collection.dp_cp)
    return group_size(reduce_group) / replicas if ddp_config.average_in_collective else 1.0 / replicas


def expert_ranks_differ(groups: ProcessGroupCollection) -> bool:
    """Returns whether expert gradients are reduced over different ranks than dense gradients."""
    return _ranks(groups.expt_dp) != _ranks(groups.dp_cp)


def _ranks(group: dist.ProcessGroup | None) -> list[int] | None:
    # The group of a single rank may be None or a group of a grid.
    return None if group is None or group_size(group) == 1 else dist.get_process_group_ranks(group)
