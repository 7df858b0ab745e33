"""_ParamAndGradBuffer: flat tensors of one kind of parameters and of their gradients, cut into buckets.

layout.py places the parameters, and bucket_storage.py holds a bucket's gradients. Megatron's users import buckets and
bucket groups from here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.dense_memory import shaped_view
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import (
    BufferSettings,
    GradStorage,
    PersistentGrads,
    _ParamAndGradBucket,
)
from megatron.core.distributed.layout import ParamSlot, Span, lay_out, locate
from megatron.core.logical_tensors import canonical_name
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.param_attributes import param_facts

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
    """The content of a buffer's flat tensor."""

    PARAM = 1
    GRAD = 2


@dataclass(frozen=True)
class BufferKind:
    """Properties that all parameters of a buffer share. is_expert: reduced over the experts' own ranks.

    completed_later: set only for released gradients that change after their reduction (is_completed_later in
    grad_hooks.py), and are therefore kept until then.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool
    completed_later: bool = False


class _ParamAndGradBuffer:
    """Parameters of one kind and their gradients, each in one flat tensor; see FlatBuffer.

    param_data: [numel], the parameters' dtype. grad_data: [numel], the gradients' dtype. Padding is zero in both and
    has no effect on updates and norms. slots: in the order of named_params. storage: builds each bucket's gradient
    memory. flats: the tensors that have memory; others are on the meta device and only hold a size and a dtype.
    Without PARAM, parameters keep their own memory until `move_in`; without GRAD, storages allocate their own memory.
    """

    def __init__(
        self,
        kind: BufferKind,
        named_params: Sequence[tuple[str, nn.Parameter]],
        *,
        settings: BufferSettings,
        storage: Callable[[_ParamAndGradBucket], GradStorage] = PersistentGrads,
        flats: Collection[BufferType] = frozenset(BufferType),
    ) -> None:
        self.kind, self.settings = kind, settings
        self.layout = lay_out(
            [param.numel() for _, param in named_params],
            num_shards=group_size(settings.group),
            bucket_size=settings.bucket_size,
            num_buckets=settings.num_buckets,
            # The first and last stage both hold this weight; alone in its bucket it has the same shards on both.
            own_bucket={i for i, (_, param) in enumerate(named_params) if param_facts(param).shared_embedding},
            high_busbw=settings.high_busbw,
            split=settings.split,
        )
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
        self.param_dtype, self.grad_dtype, self.gradient_scaling_factor = (
            kind.param_dtype,
            kind.grad_dtype,
            settings.scale,
        )
        self._is_moved_in = False
        if BufferType.PARAM in flats:
            self.move_in()

    @torch.no_grad()
    def move_in(self) -> None:
        """Allocates param_data, makes parameters views of it and frees their previous memory one by one.

        At the peak, memory holds two copies of all parameters.
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

    @property
    def numel(self) -> int:
        """Elements of each flat tensor, with padding."""
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
        """The ranks over which shards are distributed, and gradients summed first; None means this rank alone."""
        return self.settings.group

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype in which modules compute."""
        return self.kind.param_dtype

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of every bucket, and receives only that shard's sums."""
        return self.settings.is_sharded

    @property
    def is_expert(self) -> bool:
        """Whether these are expert parameters, reduced over the experts' own ranks."""
        return self.kind.is_expert

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer steps, in order: its shard of each bucket, or all."""
        return self._owned

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns views of the parts of a parameter's reduced gradient that this rank owns: [N], gradient dtype."""
        parts = [slot.span.intersection(owned) for owned in self._owned]
        return [self.grad_of(part) for part in parts if part.numel]

    def grad_of(self, span: Span) -> torch.Tensor:
        """Returns the reduced gradients of one owned span, a view: [span.numel], the gradients' dtype."""
        index, part = locate(span, self._owned)
        return self.buckets[index].grads.owned_grad()[part]

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of a flattened parameter, any shape, is at a memory address."""
        # Compares addresses, which does not read the device. The address of an empty tensor is meaningless.
        return not param.numel() or param.data_ptr() + start * param.element_size() == address

    def reset(self) -> None:
        """Drops all gradients; persistent gradients become exactly zero."""
        for bucket in self.buckets:
            bucket.grads.zero()
        for slot in self.slots:
            # Remains set if an error prevented the hook.
            slot.param.grad = None

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies all gradients; scaling_factor: a number or a tensor [], any float dtype."""
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
    param: nn.Parameter, *, grad_reduce_in_fp32: bool, experts_apart: bool, completed_later: bool = False
) -> BufferKind:
    """Returns the kind of buffer for a parameter, any shape and dtype.

    experts_apart: expert gradients are reduced over other ranks than dense gradients. completed_later: see BufferKind.
    """
    # Gradients of fp64 parameters, used for exact references, stay in fp64.
    wide = torch.float32 if grad_reduce_in_fp32 and param.dtype.itemsize < 4 else param.dtype
    return BufferKind(param.dtype, wide, experts_apart and param_facts(param).is_expert, completed_later)


def shard_buffer(buffer: torch.Tensor, data_parallel_world_size: int) -> list[torch.Tensor]:
    """Returns the shards of a bucket's flat tensor, by rank: [N], any dtype -> [N / ranks] each, views.

    Raises ValueError if the ranks do not divide N.
    """
    if data_parallel_world_size < 1 or buffer.numel() % data_parallel_world_size:
        raise ValueError(
            f"buffer has {buffer.numel()} elements: must be a multiple of {data_parallel_world_size} ranks"
        )
    return list(buffer.view(data_parallel_world_size, -1))


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer], force_single_bucket_group: bool = False
) -> list[list[_ParamAndGradBucket]]:
    """Returns the buckets of each bucket group: one bucket per group, or all in one group.

    DistributedDataParallel builds the groups, which need its scheduler.
    """
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    if force_single_bucket_group:
        return [buckets] if buckets else []
    return [[bucket] for bucket in buckets]
