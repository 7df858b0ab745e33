"""Flat buffers of parameters and gradients, and the buckets they are cut into; gradients are moved in here.

Sends nothing: bucket_group.py does, when scheduler.py says so. Where what lies is layout.py's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatch
from functools import partial

import torch
from torch import nn
from torch.distributed import ProcessGroup

from megatron.core.dense_memory import shaped_view
from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.distributed.collectives import ReductionPolicy, shard_of
from megatron.core.distributed.layout import BucketLayout, ParamSlot, Span, lay_out
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import (
    added_to_main_grad,
    clear_added_to_main_grad,
    has_grad_beside_main_grad,
    param_facts,
    set_main_grad,
)
from megatron.core.tensor_parallel.weight_grads import WeightGrad


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


@dataclass(frozen=True, eq=False)
class BufferSettings:
    """Settings by which a buffer is cut and reduced.

    group: the ranks that shards are spread over, and gradients summed over; None is this rank alone. is_sharded: each
    of them owns its shard of every bucket, else everything. scale: factor of every gradient before reduction.
    fp32_patterns: names, or `all`, of parameters whose gradients add up in fp32 beside a narrower buffer. split:
    buckets cut parameters.
    """

    group: ProcessGroup | None
    bucket_size: int | None
    num_buckets: int | None = None
    is_sharded: bool = False
    scale: float = 1.0
    policy: ReductionPolicy = ReductionPolicy()
    high_busbw: bool = False
    fp32_patterns: tuple[str, ...] = ()
    split: bool = False


@dataclass(frozen=True, eq=False)
class _ParamAndGradBucket:
    """Neighbours in a buffer that are reduced and gathered together; grad_data: [N], a view."""

    buffer: "_ParamAndGradBuffer"
    layout: BucketLayout
    slots: list[ParamSlot]
    grad_data: torch.Tensor

    @property
    def param_data(self) -> torch.Tensor:
        """The parameters: [N], their dtype, a view of what the buffer has them in by now."""
        return self.buffer.param_data[self.layout.span.start : self.layout.span.end]


class _ParamAndGradBuffer:
    """Parameters of one kind and their gradients, each flat; `param.data` and `param.main_grad` become views.

    param_data: [numel], the parameters' dtype. grad_data: [numel], the gradients'. Padding is zero in both, and no
    step or norm sees it. slots: in the order of named_params. `take` moves autograd's gradients in.
    """

    def __init__(
        self, kind: BufferKind, named_params: Sequence[tuple[str, nn.Parameter]], *, settings: BufferSettings
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
        self.param_data, self.grad_data = self._new_flats(named_params[0][1].device)
        self.slots = [
            self._move_in(name, param, span=span)
            for (name, param), span in zip(named_params, self.layout.spans, strict=True)
        ]
        self.buckets = [self._bucket(layout) for layout in self.layout.buckets]
        # For the hook, which autograd hands the parameter alone.
        self.slot_of = {slot.param: slot for slot in self.slots}
        # Both since `zero_grads`: what has a gradient, and of that what kernels added to main_grad, without our scale.
        self._filled: set[nn.Parameter] = set()
        self._unscaled: set[nn.Parameter] = set()

    @property
    def numel(self) -> int:
        """Elements of each flat tensor, with padding."""
        return self.layout.numel

    @property
    def persistent_params(self) -> list[torch.Tensor]:
        """Memory that parameters lie in from step to step: [N] each, their dtype."""
        return [self.param_data]

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """Memory that gradients lie in from step to step: [N] each, their dtype."""
        return [self.grad_data]

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
        if self.is_sharded:
            return self.layout.owned(group_rank(self.settings.group))
        return [bucket.span for bucket in self.layout.buckets]

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """The parts of a parameter's gradient that hold its sum after reduction: each [N], views of grad_data."""
        parts = [slot.span.intersection(owned) for owned in self.owned_spans()]
        return [self.grad_data[part.start : part.end] for part in parts if part.numel]

    def grad_of(self, span: Span) -> torch.Tensor:
        """The gradients of elements of one owned span, a view: [span.numel]."""
        return self.grad_data[span.start : span.end]

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Whether element `start` of a flattened parameter, any shape, lies at that address."""
        # By address: a comparison of two numbers, no read of the device. An empty tensor's pointer means nothing.
        return not param.numel() or param.data_ptr() + start * param.element_size() == address

    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Lets a gradient be added to main_grad, scaled, where it is computed; `take` follows."""
        is_zero = param not in self._filled and not added_to_main_grad(param)
        new.add_to(self.slot_of[param].main_grad, scale=self._scale_of(param), is_zero=is_zero)
        self._filled.add(param)

    def take(self, param: nn.Parameter) -> None:
        """Moves `param.grad` into main_grad, scaled, and frees autograd's own tensor.

        The first since `zero_grads` overwrites, later ones add. Of a parameter whose kernel has added its gradient to
        main_grad already, only what else there is.
        """
        slot = self.slot_of[param]
        grad = plain_grad(param)
        if added_to_main_grad(param):
            self._take_beside(slot, grad)
        elif grad is not None:
            self._move(slot, grad)
        self._filled.add(param)
        # While it is still in the cache, for the next one to take its place.
        param.grad = None

    def note_added(self, param: nn.Parameter) -> None:
        """Records that a caller added a gradient to main_grad, without the scale."""
        self._check_unscaled(self.slot_of[param])
        self._filled.add(param)

    def unfilled(self, slots: Sequence[ParamSlot]) -> list[str]:
        """Names of parameters without a gradient since `zero_grads`."""
        return [slot.name for slot in slots if slot.param not in self._filled]

    def complete(self, slots: Sequence[ParamSlot]) -> None:
        """Makes what is reduced right for good: scales what kernels added, and rounds what adds up beside."""
        for slot in slots:
            if slot.param in self._unscaled and self.settings.scale != 1.0:
                slot.main_grad.mul_(self.settings.scale)
            if slot.comm_view is not slot.main_grad:
                slot.comm_view.copy_(slot.main_grad)

    def zero_grads(self) -> None:
        """Forgets all gradients: they are exact zeros."""
        self.grad_data.zero_()
        for slot in self.slots:
            if slot.comm_view is not slot.main_grad:
                slot.main_grad.zero_()
            # Left behind where an error kept the hook from running.
            slot.param.grad = None
        for param in self._unscaled:
            clear_added_to_main_grad(param)
        self._filled.clear()
        self._unscaled.clear()

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients; factor: a number or a tensor [], any float dtype."""
        self.grad_data.mul_(factor)
        for slot in self.slots:
            if slot.comm_view is not slot.main_grad:
                slot.main_grad.mul_(factor)

    def named_grads(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's name and main_grad."""
        return ((slot.name, slot.main_grad) for slot in self.slots)

    def _new_flats(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        zeros = partial(torch.zeros, self.layout.numel, device=device)
        return zeros(dtype=self.kind.param_dtype), zeros(dtype=self.kind.grad_dtype)

    def _move_in(self, name: str, param: nn.Parameter, *, span: Span) -> ParamSlot:
        assert param.dtype == self.kind.param_dtype, f"parameter {name} is {param.dtype}: the buffer is {self.kind}"
        # In the order of its own memory: a layout such as channels_last stays.
        place = shaped_view(self.param_data[span.start : span.end], param)
        place.copy_(param.detach())
        # The parameter object stays, and with it hooks, ties and whoever holds it.
        param.data = place
        comm_view = shaped_view(self.grad_data[span.start : span.end], param)
        patterns = self.settings.fp32_patterns
        beside = "all" in patterns or any(fnmatch(canonical_name(name), pattern) for pattern in patterns)
        is_wider = beside and comm_view.dtype.itemsize < 4
        main_grad = torch.zeros_like(comm_view, dtype=torch.float32) if is_wider else comm_view
        set_main_grad(param, main_grad)
        return ParamSlot(canonical_name(name), param, span, main_grad, comm_view)

    def _bucket(self, layout: BucketLayout) -> _ParamAndGradBucket:
        slots = [self.slots[index] for index in layout.params]
        return _ParamAndGradBucket(self, layout, slots, self.grad_data[layout.span.start : layout.span.end])

    def _move(self, slot: ParamSlot, new: torch.Tensor) -> None:
        grad, scale = slot.main_grad, self._scale_of(slot.param)
        if slot.param in self._filled:
            grad.add_(new, alpha=scale)
        elif new.dtype == grad.dtype:
            torch.mul(new, scale, out=grad)
        else:
            # mul would round the product to the narrower type first.
            grad.copy_(new).mul_(scale)

    def _scale_of(self, param: nn.Parameter) -> float:
        return 1.0 if param in self._unscaled else self.settings.scale

    def _take_beside(self, slot: ParamSlot, grad: torch.Tensor | None) -> None:
        self._check_unscaled(slot)
        if grad is not None and has_grad_beside_main_grad(slot.param):
            slot.main_grad.add_(grad)

    def _check_unscaled(self, slot: ParamSlot) -> None:
        # What autograd gave has the scale in it already, and the two cannot be told apart in the sum.
        if slot.param in self._filled and slot.param not in self._unscaled and self.settings.scale != 1.0:
            raise RuntimeError(
                f"parameter {slot.name} has gradients of autograd and others that were added to main_grad in one "
                "iteration: must be of one kind"
            )
        self._unscaled.add(slot.param)


def plain_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Returns `param.grad` strided and without a graph: [*parameter shape], the parameter's dtype; None without one."""
    grad = param.grad
    if grad is None or not (grad.requires_grad or grad.is_sparse):
        return grad
    # Of backward(create_graph=True), which would go on through main_grad; of embeddings with sparse gradients.
    grad = grad.detach()
    return grad.to_dense() if grad.is_sparse else grad


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
