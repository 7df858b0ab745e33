"""_ParamAndGradBuffer: flat tensors of one kind of parameters and of their gradients, cut into buckets.

Where each parameter lies is layout.py's. What a bucket does with gradients is bucket_storage.py's. Megatron's users
import buckets and bucket groups from here.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.dense_memory import shaped_view
from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.distributed.bucket_group import _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import (
    BufferSettings,
    GradStorage,
    PersistentGrads,
    _ParamAndGradBucket,
)
from megatron.core.distributed.collectives import shard_of
from megatron.core.distributed.layout import ParamSlot, Span, lay_out, locate
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
    """Properties that all parameters of a buffer share. is_expert: they are reduced over the experts' own ranks.

    completed_later: their gradients, which do not persist, are changed after they are reduced, and so kept until then.
    """

    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    is_expert: bool
    completed_later: bool = False


class _ParamAndGradBuffer:
    """Parameters of one kind and their gradients, each flat; see FlatBuffer.

    param_data: [numel], the parameters' dtype. grad_data: [numel], the gradients'. Padding is zero in both, and no
    step or norm sees it. slots: in the order of named_params. storage: builds what each bucket's gradients accumulate
    in. flats: the tensors that have memory. Without PARAM, parameters keep their own memory until `move_in`; without
    GRAD, storages have memory of their own. Such a tensor is only a size and a dtype, on the meta device.
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
            # Both ends of a pipeline have this weight: alone in its bucket, its shards are the same elements on both.
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
        # What Megatron's users read.
        self.params = [slot.param for slot in self.slots]
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
        """Allocates param_data and makes parameters views of it; each frees the memory it had.

        A second copy of all parameters has memory while they are moved.
        """
        self.param_data = torch.zeros(self.numel, dtype=self.kind.param_dtype, device=self.slots[0].param.device)
        for slot in self.slots:
            # In the order of its own memory: a layout such as channels_last stays.
            place = shaped_view(self.param_data[slot.span.start : slot.span.end], slot.param)
            place.copy_(slot.param.detach())
            # The parameter object stays, and with it hooks, ties and whoever holds it.
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
        """Memory of parameters that persists between steps: [N] each, their dtype; none where they keep their own."""
        return [self.param_data] if self._is_moved_in else []

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """Memory of gradients that persists between steps: [N] each, their dtype."""
        return [flat for bucket in self.buckets for flat in bucket.grads.persistent]

    @property
    def data_parallel_group(self) -> ProcessGroup | None:
        """The ranks that shards are spread over, and gradients summed over first; None is this rank alone."""
        return self.settings.group

    @property
    def model_dtype(self) -> torch.dtype:
        """The dtype in which modules compute."""
        return self.kind.param_dtype

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of every bucket, and gets the sums of no other elements."""
        return self.settings.is_sharded

    @property
    def is_expert(self) -> bool:
        """Whether the parameters are experts', reduced over ranks of their own."""
        return self.kind.is_expert

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer steps, in order: its shard of each bucket, or all."""
        return self._owned

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns the parts of a parameter's gradient whose sum this rank gets: [N] each, their dtype, views."""
        parts = [slot.span.intersection(owned) for owned in self._owned]
        return [self.grad_of(part) for part in parts if part.numel]

    def grad_of(self, span: Span) -> torch.Tensor:
        """Returns the reduced gradients of elements of one owned span, a view: [span.numel], their dtype."""
        index, part = locate(span, self._owned)
        return self.buckets[index].grads.owned_grad()[part]

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of a flattened parameter, any shape, lies at that address."""
        # By address: a comparison of two numbers, no read of the device. An empty tensor's pointer means nothing.
        return not param.numel() or param.data_ptr() + start * param.element_size() == address

    def reset(self) -> None:
        """Drops all gradients: those that persist are exact zeros."""
        for bucket in self.buckets:
            bucket.grads.zero()
        for slot in self.slots:
            # Left behind where an error kept the hook from running.
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
    """The buffer that a parameter, any shape and dtype, belongs to. experts_apart: experts are reduced over other ranks
    than the rest. completed_later: see BufferKind.
    """
    # fp64 for comparisons with exact references: nothing narrower holds its gradients.
    wide = torch.float32 if grad_reduce_in_fp32 and param.dtype.itemsize < 4 else param.dtype
    return BufferKind(param.dtype, wide, experts_apart and param_facts(param).is_expert, completed_later)


def shard_buffer(buffer: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """This rank's shard of a bucket's flat tensor: [N], any dtype -> [N / ranks], a view."""
    return shard_of(buffer, group)


def partition_buckets(
    buffers: Sequence[_ParamAndGradBuffer], force_single_bucket_group: bool = False
) -> list[list[_ParamAndGradBucket]]:
    """The buckets of each bucket group: one each, or all together."""
    buckets = [bucket for buffer in buffers for bucket in buffer.buckets]
    if force_single_bucket_group:
        return [buckets] if buckets else []
    return [[bucket] for bucket in buckets]
