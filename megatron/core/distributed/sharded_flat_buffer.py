"""ShardedFlatBuffer: this rank's shards of many parameters, and of their gradients, each in one flat tensor; and with
gradients that do not stand, ReleasedShardBuffer.

A shard along the first dimension of a contiguous parameter is a range of the flattened one. Who gathers and reduces is
torch's fully_shard; what it keeps to itself is fully_shard_state.py's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.device import default_device
from megatron.core.distributed.flat_buffer import Entry
from megatron.core.distributed.fsdp_units import UnitKind
from megatron.core.distributed.fully_shard_state import ParamShard
from megatron.core.distributed.layout import ALIGNMENT, BucketLayout, BufferLayout, Span, locate, round_up
from megatron.core.tensor_parallel.param_attributes import mark_gradients_pass


@dataclass(frozen=True, eq=False)
class UnitShards:
    """Trained parameters of a unit that are released together: names and this rank's shards of them."""

    name: str
    shards: list[tuple[str, ParamShard]]

    def split(self, is_second: Callable[[nn.Parameter], bool]) -> "list[UnitShards]":
        """Splits the unit in two by a predicate on parameters, any shape and dtype; either part may be empty."""
        first = [(name, shard) for name, shard in self.shards if not is_second(shard.param)]
        second = [(name, shard) for name, shard in self.shards if is_second(shard.param)]
        return [UnitShards(self.name, first), UnitShards(self.name, second)]


class ShardedFlatBuffer:
    """Shards of parameters of one kind; a shard and its gradient are views, at the same place of both.

    param_data, grad_data: [numel], fp32 or fp64, padding is zero. model_dtype: what modules compute in. Each of `units`
    lies in one bucket, all of which this rank owns. entries: `main_grad` is the shard of the gradient, which torch
    reduces straight into.
    """

    is_sharded = True

    def __init__(
        self, kind: UnitKind, units: Sequence[UnitShards], *, group: dist.ProcessGroup | None, pin_memory: bool
    ) -> None:
        self.is_expert, self.model_dtype = kind.is_expert, kind.dtype
        self.data_parallel_group = group
        self.unit_names = [unit.name for unit in units]
        placed = [pair for unit in units for pair in unit.shards]
        self.layout = _lay_out([[shard.padded_numel for _, shard in unit.shards] for unit in units])
        self._owned = self.owned_spans()
        self._pin_memory = pin_memory
        self._shards = {shard.param: shard for _, shard in placed}
        self._names = [name for name, _ in placed]
        self.entries: list[Entry] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Reallocates the flat tensors in the dtype and on the device that shards have now; gradients are zeros."""
        shards = list(self._shards.values())
        # Of no elements: those on the meta device are to lie elsewhere.
        like = torch.empty(0, dtype=shards[0].local.dtype, device=shards[0].device)
        # What modules compute in is the shards' own, unless these are wider.
        self.model_dtype = like.dtype if self.model_dtype.itemsize >= 4 else self.model_dtype
        self.param_data = self._zeros(self.layout.numel, like)
        self.grad_data = self._new_grads(like)
        self.entries.clear()
        for name, shard, sent in zip(self._names, shards, self.layout.spans, strict=True):
            own = Span(sent.start, shard.numel)
            grad = self.grad_data[own.start : own.end]
            shard.param.grad = None
            self.entries.append(Entry(name, shard.param, own, grad, grad, start=shard.start))
        self._entry_of = {entry.param: entry for entry in self.entries}
        self.attach()

    @property
    def standing_params(self) -> list[torch.Tensor]:
        """Memory that this rank's shards lie in from step to step: [N] each, param_data's dtype."""
        return [self.param_data]

    @property
    def standing_grads(self) -> list[torch.Tensor]:
        """Memory that their gradients lie in from step to step: [N] each, grad_data's dtype."""
        return [self.grad_data]

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer steps: the whole buffer, unit by unit."""
        return [bucket.span for bucket in self.layout.buckets]

    def owned_grads(self, entry: Entry) -> list[torch.Tensor]:
        """This rank's shard of a parameter's gradient: [N], grad_data's dtype, a view of it, if it has any."""
        return [self._place_of(entry)] if entry.span.numel else []

    def grad_of(self, span: Span) -> torch.Tensor:
        """The gradients of elements of one owned span, a view: [span.numel], grad_data's dtype."""
        return self.grad_data[span.start : span.end]

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Whether element `start` of a flattened parameter, any shape, lies at that address."""
        local, first = self._shards[param].local, self._shards[param].start
        return not local.numel() or local.data_ptr() + (start - first) * local.element_size() == address

    def attach(self) -> None:
        """Moves shards into the buffer that lie elsewhere, such as those loaded with assign=True."""
        for shard, sent in zip(self._shards.values(), self.layout.spans, strict=True):
            shard.move_to(self.param_data[sent.start : sent.end])
        self.attach_grads()

    def attach_grads(self) -> None:
        """Lets torch reduce into grad_data, and copies what it has reduced elsewhere, after a `.grad = None`."""
        for entry in self.entries:
            self._attach_grad(entry)

    def attach_grad_of(self, param: nn.Parameter) -> None:
        """Lets torch reduce one parameter's gradient, any shape and dtype, into grad_data."""
        self._attach_grad(self._entry_of[param])

    def open_grads(self, bucket: int) -> None:
        """Lets torch reduce the gradients of a bucket into their places."""
        for entry in self._entries_of(bucket):
            self._attach_grad(entry)

    def close_grads(self, bucket: int) -> None:
        """Ends the use of a bucket's gradients by hooks; gradients that these replaced are copied to their places."""
        self.open_grads(bucket)

    def named_grads(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        """Names of a bucket's parameters, and the shards of their gradients: [n] each, grad_data's dtype, views."""
        return [(entry.name, self._place_of(entry)) for entry in self._entries_of(bucket)]

    def may_hold_grads(self) -> bool:
        """Whether there are gradients, where that is known without waiting for a device."""
        is_on_host = self.grad_data.device.type == "cpu" and default_device().type == "cpu"
        return is_on_host and bool(self.grad_data.count_nonzero())

    def zero_grads(self) -> None:
        """Drops all gradients and sets them to zero."""
        for shard in self._shards.values():
            shard.drop_unreduced_grad()
        self.attach_grads()
        self.grad_data.zero_()

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients; factor: a number or a tensor [], any float dtype."""
        self.grad_data.mul_(factor)

    def unreduced(self) -> list[str]:
        """Names of parameters that have gradients which were not reduced."""
        pairs = zip(self.entries, self._shards.values(), strict=True)
        return [entry.name for entry, shard in pairs if shard.has_unreduced_grad]

    # Inside.

    def _zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(numel, dtype=like.dtype, device=like.device, pin_memory=self._pin_memory)

    def _new_grads(self, like: torch.Tensor) -> torch.Tensor:
        return self._zeros(self.layout.numel, like)

    def _entries_of(self, bucket: int) -> list[Entry]:
        return [self.entries[index] for index in self.layout.buckets[bucket].params]

    def _place_of(self, entry: Entry) -> torch.Tensor:
        return entry.main_grad

    def _attach_grad(self, entry: Entry) -> None:
        grad, place = entry.param.grad, self._place_of(entry)
        if isinstance(grad, DTensor):
            local = grad._local_tensor
            if not local.numel() or local.data_ptr() == place.data_ptr():
                return
            place.copy_(local.reshape(-1))
        entry.param.grad = self._shards[entry.param].grad_in(place)


class ReleasedShardBuffer(ShardedFlatBuffer):
    """A buffer whose gradients have memory only from `open_grads` to `close_grads`, for one bucket at a time.

    grad_data, and `main_grad` of entries, are only sizes and dtypes, on the meta device.
    """

    def __init__(
        self, kind: UnitKind, units: Sequence[UnitShards], *, group: dist.ProcessGroup | None, pin_memory: bool
    ) -> None:
        # Of open buckets; what was closed in this iteration.
        self._grads: dict[int, torch.Tensor] = {}
        self._closed: set[int] = set()
        super().__init__(kind, units, group=group, pin_memory=pin_memory)
        for entry in self.entries:
            mark_gradients_pass(entry.param)

    @property
    def standing_grads(self) -> list[torch.Tensor]:
        """An empty list of [N], grad_data's dtype: no gradient memory is persistent."""
        return []

    def open_grads(self, bucket: int) -> None:
        """Allocates a bucket's gradients as zeros, once in an iteration, and lets torch reduce into them."""
        assert bucket not in self._closed, f"the gradients of {self.unit_names[bucket]} were given away"
        if bucket not in self._grads:
            self._grads[bucket] = self._zeros(self.layout.buckets[bucket].span.numel, self.param_data)
        super().open_grads(bucket)

    def close_grads(self, bucket: int) -> None:
        """Drops a bucket's gradients; a tensor of `grad_of` that someone still holds stays valid."""
        self._grads.pop(bucket, None)
        self._closed.add(bucket)
        for entry in self._entries_of(bucket):
            entry.param.grad = None

    def attach_grads(self) -> None:
        """Lets torch reduce into the gradients of open buckets."""
        for bucket in self._grads:
            super().open_grads(bucket)

    def grad_of(self, span: Span) -> torch.Tensor:
        """Returns the gradients of one owned span of an open bucket, a view: [span.numel], grad_data's dtype."""
        bucket, part = locate(span, self._owned)
        return self._grads[bucket][part]

    def zero_grads(self) -> None:
        """Frees all gradients and lets every bucket be opened again."""
        self._grads.clear()
        self._closed.clear()
        for param, shard in self._shards.items():
            shard.drop_unreduced_grad()
            param.grad = None

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by a number or a tensor [], any float dtype.

        Raises RuntimeError where hooks have already received some of them.
        """
        missing = next((bucket for bucket in range(len(self.layout.buckets)) if bucket not in self._grads), None)
        if missing is not None:
            raise RuntimeError(
                "scale_gradients with DistributedDataParallelConfig.release_gradients: hooks and optimizer have had "
                f"the gradient of {self._entries_of(missing)[0].name} by then; scale the loss"
            )
        for grad in self._grads.values():
            grad.mul_(factor)

    def may_hold_grads(self) -> bool:
        """Returns whether any gradients were reduced in this iteration."""
        return bool(self._grads or self._closed)

    def _new_grads(self, like: torch.Tensor) -> torch.Tensor:
        self._grads.clear()
        return torch.zeros(self.layout.numel, dtype=like.dtype, device="meta")

    def _place_of(self, entry: Entry) -> torch.Tensor:
        # Behind the last one for those without elements.
        return self.grad_of(entry.span) if entry.span.numel else self.param_data.new_zeros(0)


def _lay_out(sizes_of_units: Sequence[Sequence[int]]) -> BufferLayout:
    """Places shards, as sent, one behind the other on the grid; a bucket a unit."""
    spans: list[Span] = []
    buckets: list[BucketLayout] = []
    for index, sizes in enumerate(sizes_of_units):
        start = end = buckets[-1].span.end if buckets else 0
        first = len(spans)
        for size in sizes:
            spans.append(Span(end, size))
            end = round_up(end + size, ALIGNMENT)
        members = tuple(range(first, len(spans)))
        buckets.append(BucketLayout(index, Span(start, end - start), spans[-1].end - start, members))
    return BufferLayout(tuple(spans), tuple(buckets), num_shards=1)
