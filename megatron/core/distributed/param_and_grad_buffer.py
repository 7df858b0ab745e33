"""_ParamAndGradBuffer: flat tensors of one kind of parameters and of their gradients, split into buckets.

layout.py computes the positions of parameters, and bucket_storage.py stores a bucket's gradients. Users of Megatron
import buckets and bucket groups from this file.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.config_field import require_defaults
from megatron.core.dense_memory import shaped_view
from megatron.core.device import OffloadedMemory
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import (
    BufferSettings,
    GradStorage,
    PersistentGrads,
    _ParamAndGradBucket,
)
from megatron.core.distributed.collectives import ReductionPolicy
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.layout import BufferLayout, ParamSlot, Span, lay_out
from megatron.core.logical_tensors import canonical_name
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.tensor_parallel.param_attributes import is_quantized, param_facts

__all__ = [
    "BufferKind",
    "BufferType",
    "_ParamAndGradBucket",
    "_ParamAndGradBucketGroup",
    "_ParamAndGradBuffer",
    "buffer_kind",
    "partition_buckets",
    "shard_buffer",
]


class BufferType(Enum):
    """Content of a buffer's flat tensor."""

    PARAM = 1
    GRAD = 2


BOTH = frozenset(BufferType)


@dataclass(frozen=True)
class BufferKind:
    """Properties that all parameters of a buffer share.

    is_expert: whether gradients are reduced over expert-data-parallel ranks. completed_later: set only for released
    gradients that change after their reduction (is_completed_later in grad_hooks.py) and are therefore kept until that
    change. is_packed: whether the parameters are gathered in 8 bits (packed_params.py).
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool
    completed_later: bool = False
    is_packed: bool = False


class _ParamAndGradBuffer:
    """Parameters of one kind and their gradients, each in one flat tensor; see FlatBuffer.

    The constructor is for scripts; DistributedDataParallel calls of_kind, which also chooses the storage of gradients.

    ddp_config: determines sharding, reduction and padding. params_with_names: (parameter, name) in the model's order.
    data_parallel_group: the ranks over which gradients are summed and shards are distributed. bucket_size: in elements;
    None means a single bucket. param_to_name: the names in messages and patterns; the same as in params_with_names.
    param_indices: unused, because parameters are found by name. nccl_ub: must be False. pg_collection: must contain
    inter_dist_opt if there are several optimizer instances. param_layout: None, or this buffer's layout, as returned by
    compute_full_param_layout.

    param_data: [numel], the parameters' dtype. grad_data: [numel], the gradients' dtype. Padding is zero in both and
    does not affect updates and norms. slots: in the order of named_params. storage: builds each bucket's gradient
    memory. flats: the flat tensors that are allocated; the others are on the meta device and only specify a size and a
    dtype. Without PARAM, parameters keep their own memory until `move_in`; without GRAD, storages allocate their own
    memory.
    """

    ddp_config: DistributedDataParallelConfig | None

    def __init__(
        self,
        ddp_config: DistributedDataParallelConfig,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params_with_names: Sequence[tuple[nn.Parameter, str]],
        data_parallel_group: ProcessGroup | None,
        bucket_size: int | None,
        param_to_name: Mapping[nn.Parameter, str],
        gradient_scaling_factor: float,
        param_indices: Sequence[int],
        nccl_ub: bool = False,
        pg_collection: ProcessGroupCollection | None = None,
        param_layout: BufferLayout | None = None,
    ) -> None:
        why = "buffers are not registered with NCCL"
        require_defaults("_ParamAndGradBuffer", why, nccl_ub=(nccl_ub, False))
        if not params_with_names:
            raise ValueError("params_with_names is empty: must contain at least one parameter")
        several = ddp_config.num_distributed_optimizer_instances > 1
        if several and (pg_collection is None or pg_collection.inter_dist_opt is None):
            raise ValueError(
                "DistributedDataParallelConfig.num_distributed_optimizer_instances is "
                f"{ddp_config.num_distributed_optimizer_instances}: pg_collection.inter_dist_opt must be the group "
                "of these instances"
            )
        settings = BufferSettings(
            group=data_parallel_group,
            bucket_size=bucket_size,
            is_sharded=ddp_config.use_distributed_optimizer,
            scale=gradient_scaling_factor,
            policy=ReductionPolicy(
                average=ddp_config.average_in_collective,
                fp32_accumulation=ddp_config.reduce_scatter_with_fp32_accumulation,
                instances_group=pg_collection.inter_dist_opt if several and pg_collection is not None else None,
            ),
            high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
            fp32_patterns=tuple(ddp_config.param_name_patterns_for_fp32_local_accumulation),
            packs=ddp_config.fp8_param_gather and all(is_quantized(param) for param, _ in params_with_names),
        )
        is_expert = param_facts(params_with_names[0][0]).is_expert
        named = [(param_to_name.get(param, name), param) for param, name in params_with_names]
        self._build(BufferKind(param_dtype, grad_dtype, is_expert), named, settings, PersistentGrads, BOTH)
        self.ddp_config = ddp_config
        require_same_layout("param_layout", param_layout, self.layout)

    @classmethod
    def of_kind(
        cls,
        kind: BufferKind,
        named_params: Sequence[tuple[str, nn.Parameter]],
        *,
        settings: BufferSettings,
        storage: Callable[[_ParamAndGradBucket], GradStorage] = PersistentGrads,
        flats: Collection[BufferType] = BOTH,
        ddp_config: DistributedDataParallelConfig | None = None,
    ) -> "_ParamAndGradBuffer":
        """Builds a buffer with the given settings and gradient storage; ddp_config: stored for scripts that read it."""
        buffer = cls.__new__(cls)
        buffer._build(kind, named_params, settings, storage, flats)
        buffer.ddp_config = ddp_config
        return buffer

    def _build(
        self,
        kind: BufferKind,
        named_params: Sequence[tuple[str, nn.Parameter]],
        settings: BufferSettings,
        storage: Callable[[_ParamAndGradBucket], GradStorage],
        flats: Collection[BufferType],
    ) -> None:
        self.kind, self.settings = kind, settings
        self.layout = lay_out_params([param for _, param in named_params], settings, group_size(settings.group))
        self._offloaded: dict[BufferType, OffloadedMemory] = {}
        meta, device = torch.device("meta"), named_params[0][1].device
        self.param_data = torch.zeros(self.numel, dtype=kind.param_dtype, device=meta)
        self.grad_data = torch.zeros(
            self.numel, dtype=kind.grad_dtype, device=device if BufferType.GRAD in flats else meta
        )
        self.slots = [
            self._slot(name, param, span) for (name, param), span in zip(named_params, self.layout.spans, strict=True)
        ]
        self.slot_of = {slot.param: slot for slot in self.slots}
        self.buckets = [
            _ParamAndGradBucket(
                self, layout, [self.slots[index] for index in layout.params], settings=settings, storage=storage
            )
            for layout in self.layout.buckets
        ]
        self._owned = [bucket.owned for bucket in self.buckets]
        # Attributes that Megatron's users read.
        self.params = [slot.param for slot in self.slots]
        self.param_to_name = {slot.param: slot.name for slot in self.slots}
        self.param_index_map = {
            param: place for bucket in self.buckets for param, place in bucket.param_index_map.items()
        }
        self.param_to_bucket = {slot.param: bucket for bucket in self.buckets for slot in bucket.slots}
        self.bucket_indices = [(bucket.layout.span.start, bucket.layout.span.end) for bucket in self.buckets]
        self.param_dtype, self.grad_dtype, self.gradient_scaling_factor = (
            kind.param_dtype,
            kind.grad_dtype,
            settings.scale,
        )
        self.data_parallel_world_size = group_size(settings.group)
        self.numel_unpadded = sum(bucket.numel_unpadded for bucket in self.buckets)
        self._is_moved_in = False
        if BufferType.PARAM in flats:
            self.move_in()

    @torch.no_grad()
    def move_in(self) -> None:
        """Allocates param_data, makes parameters views of it and frees their previous memory one by one.

        Peak memory is two copies of all parameters.
        """
        self.param_data = torch.zeros(self.numel, dtype=self.kind.param_dtype, device=self.slots[0].param.device)
        for slot in self.slots:
            # In the parameter's memory order, so that a memory format such as channels_last is preserved.
            place = shaped_view(self.param_data[slot.span.start : slot.span.end], slot.param)
            place.copy_(slot.param.detach())
            # The parameter object stays the same, so hooks, ties and other references remain valid.
            slot.param.data = place
        for bucket in self.buckets:
            bucket.move_in(self.param_data[bucket.layout.span.start : bucket.layout.span.end])
        self._is_moved_in = True

    def offload_to_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Moves the parameters, their gradients, or both, to the host and frees their device memory.

        Must be called between two steps. The tensors must not be used until reload_from_cpu.
        """
        grads = [*self.persistent_grads, *(slot.main_grad for slot in self.slots if not slot.main_grad.is_meta)]
        wanted = {BufferType.PARAM: (move_params, self.persistent_params), BufferType.GRAD: (move_grads, grads)}
        for content, (is_wanted, tensors) in wanted.items():
            if is_wanted and content not in self._offloaded:
                self._offloaded[content] = OffloadedMemory(tensors)

    def reload_from_cpu(self, move_params: bool = True, move_grads: bool = True) -> None:
        """Moves parameters, gradients, or both, back to the device after offload_to_cpu; values are bit-identical."""
        for content, is_wanted in ((BufferType.PARAM, move_params), (BufferType.GRAD, move_grads)):
            if is_wanted and content in self._offloaded:
                self._offloaded.pop(content).restore()

    @property
    def is_offloaded(self) -> bool:
        """Whether parameters or gradients are on the host after offload_to_cpu."""
        return bool(self._offloaded)

    @property
    def numel(self) -> int:
        """Number of elements in each flat tensor, including padding."""
        return self.layout.numel

    @property
    def persistent_params(self) -> list[torch.Tensor]:
        """Memory of parameters that persists between steps: [N] each, their dtype; empty before `move_in`."""
        return [self.param_data] if self._is_moved_in else []

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """Memory of gradients that persists between steps: [N] each, their dtype."""
        return [flat for bucket in self.buckets for flat in bucket.grads.persistent]

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """Ranks over which shards are distributed and gradients are summed; None means this rank alone.

        If there are several optimizer instances, a second sum over the instances follows.
        """
        return self.settings.group

    @property
    def model_dtype(self) -> torch.dtype:
        """Dtype in which modules compute."""
        return self.kind.param_dtype

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns one shard of every bucket and receives only the gradient sums of that shard."""
        return self.settings.is_sharded

    @property
    def is_expert(self) -> bool:
        """Whether the buffer contains expert parameters, whose gradients are reduced over separate ranks."""
        return self.kind.is_expert

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer updates, in order: its shard of each bucket, or everything."""
        return self._owned

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns views of the parts of a parameter's reduced gradient that this rank owns: [N], gradient dtype."""
        parts = [(bucket, slot.span.intersection(bucket.owned)) for bucket in self.buckets]
        return [bucket.reduced_grad()[part.within(bucket.owned)] for bucket, part in parts if part.numel]

    def grad_of(self, bucket: int) -> torch.Tensor:
        """Returns the reduced gradients of a bucket's owned span: [elements of the span], the gradients' dtype."""
        return self.buckets[bucket].reduced_grad()

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of the flattened parameter is stored at memory address `address`."""
        # Compares addresses, which does not synchronize with the device. The address of an empty tensor is meaningless.
        return not param.numel() or param.data_ptr() + start * param.element_size() == address

    def reset(self) -> None:
        """Drops all gradients; persistent gradients become exactly zero."""
        for bucket in self.buckets:
            bucket.grads.zero()
        for slot in self.slots:
            # Still set if an error prevented the hook from clearing it.
            slot.param.grad = None

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `scaling_factor`, a number or a tensor [] of any float dtype."""
        for bucket in self.buckets:
            bucket.grads.scale_(scaling_factor)

    def _slot(self, name: str, param: nn.Parameter, span: Span) -> ParamSlot:
        assert param.dtype == self.kind.param_dtype, f"parameter {name} is {param.dtype}: the buffer is {self.kind}"
        name, patterns = canonical_name(name), self.settings.fp32_patterns
        comm_view = shaped_view(self.grad_data[span.start : span.end], param)
        is_chosen = "all" in patterns or any(fnmatch(name, pattern) for pattern in patterns)
        is_wider = is_chosen and comm_view.dtype.itemsize < 4
        main_grad = torch.zeros_like(comm_view, dtype=torch.float32) if is_wider else comm_view
        return ParamSlot(name, param, span, main_grad, comm_view)


def buffer_kind(
    param: nn.Parameter,
    *,
    grad_reduce_in_fp32: bool,
    experts_apart: bool,
    completed_later: bool = False,
    packs: bool = False,
) -> BufferKind:
    """Returns the kind of the buffer to which a parameter belongs.

    experts_apart: whether expert gradients are reduced over different ranks than dense gradients. completed_later: see
    BufferKind. packs: whether weights of experts that compute in 8 bits are gathered in 8 bits.
    """
    # Gradients of fp64 parameters, used for exact references, stay in fp64.
    wide = torch.float32 if grad_reduce_in_fp32 and param.dtype.itemsize < 4 else param.dtype
    is_expert, is_packed = experts_apart and param_facts(param).is_expert, packs and is_quantized(param)
    return BufferKind(param.dtype, wide, is_expert, completed_later, is_packed)


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """Returns the shards of a bucket's flat tensor, by rank: [N], any dtype -> [N / ranks] each, views.

    Raises ValueError if the number of ranks does not divide N.
    """
    if data_parallel_world_size < 1 or buffer.numel() % data_parallel_world_size:
        raise ValueError(
            f"buffer has {buffer.numel()} elements: must be a multiple of the {data_parallel_world_size} ranks"
        )
    return list(buffer.view(data_parallel_world_size, -1))


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer],
    force_single_bucket_group: bool = False,
    reduce_scatter_with_fp32_accumulation: bool = False,
) -> list[_ParamAndGradBucketGroup]:
    """Returns bucket groups of the buffers' buckets: one bucket per group, or all in one group.

    reduce_scatter_with_fp32_accumulation: must match the buffers' setting if True, otherwise ValueError. It does not
    affect the grouping, because a group reduces its buckets one by one.
    """
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    if reduce_scatter_with_fp32_accumulation and not all(one.settings.policy.fp32_accumulation for one in buckets):
        raise ValueError(
            "partition_buckets: reduce_scatter_with_fp32_accumulation is True but not set in the "
            "DistributedDataParallelConfig of all buffers: must match"
        )
    parts = [[bucket] for bucket in buckets]
    if force_single_bucket_group:
        parts = [buckets] if buckets else []
    config = buffers[0].ddp_config if buffers else None
    return [_ParamAndGradBucketGroup(part, config, name=f"group {index}") for index, part in enumerate(parts)]


def lay_out_params(params: Sequence[nn.Parameter], settings: BufferSettings, num_shards: int) -> BufferLayout:
    """Returns the layout of a buffer of parameters of one dtype, sharded over `num_shards` ranks."""
    return lay_out(
        [param.numel() for param in params],
        num_shards=num_shards,
        bucket_size=settings.bucket_size,
        num_buckets=settings.num_buckets,
        # The first and last stage both store this weight. In a separate bucket, it has the same shards on both.
        own_bucket={index for index, param in enumerate(params) if param_facts(param).shared_embedding},
        high_busbw=settings.high_busbw,
        split=settings.split,
    )


def full_param_layout(
    params: Sequence[nn.Parameter],
    bucket_size: int | None,
    data_parallel_world_size: int,
    ddp_config: DistributedDataParallelConfig,
    expert_data_parallel_world_size: int | None = None,
) -> dict[BufferKind, BufferLayout]:
    """Returns the layout of each buffer that DistributedDataParallel would build for `params`, by kind.

    params: in the model's order; frozen parameters are excluded. bucket_size: in elements; None means a single bucket.
    expert_data_parallel_world_size: number of ranks over which expert gradients are reduced; None if these are the same
    ranks as for dense gradients.
    """
    apart = expert_data_parallel_world_size is not None
    by_kind: dict[BufferKind, list[nn.Parameter]] = {}
    for param in params:
        if param.requires_grad:
            kind = buffer_kind(
                param,
                grad_reduce_in_fp32=ddp_config.grad_reduce_in_fp32,
                experts_apart=apart,
                packs=ddp_config.fp8_param_gather,
            )
            by_kind.setdefault(kind, []).append(param)
    settings = BufferSettings(
        group=None,
        bucket_size=bucket_size,
        num_buckets=ddp_config.num_buckets if ddp_config.cuts_buckets else None,
        high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
    )
    ranks = {False: data_parallel_world_size, True: expert_data_parallel_world_size or data_parallel_world_size}
    return {kind: lay_out_params(some, settings, ranks[kind.is_expert]) for kind, some in by_kind.items()}


def require_same_layout(name: str, given: object, own: object) -> None:
    """Raises ValueError if the layout passed as argument `name` differs from the layout that was built."""
    if given is not None and given != own:
        raise ValueError(
            f"{name} is {given}: must be None, or the result of compute_full_param_layout for the same parameters, "
            f"ranks and bucket size, which is {own}"
        )
