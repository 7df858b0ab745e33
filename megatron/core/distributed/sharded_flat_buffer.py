"""ShardedFlatBuffer: this rank's shards of many parameters, and of their gradients, each in one flat tensor.

A shard along the first dimension of a contiguous parameter is a range of the flattened one. Who gathers and reduces is
torch's fully_shard; what it keeps to itself is fully_shard_state.py's.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.distributed.flat_buffer import Entry
from megatron.core.distributed.fsdp_units import UnitKind
from megatron.core.distributed.fully_shard_state import ParamShard
from megatron.core.distributed.layout import ALIGNMENT, BucketLayout, BufferLayout, Span, round_up


@dataclass(frozen=True, eq=False)
class UnitShards:
    """The trained parameters of a unit: names and this rank's shards of them."""

    name: str
    shards: list[tuple[str, ParamShard]]


class ShardedFlatBuffer:
    """Shards of parameters of one kind; a shard and its gradient are views, at the same place of both.

    param_data, grad_data: [numel], fp32 or fp64, padding is zero. model_dtype: what modules compute in. Each unit lies
    in one bucket, all of which this rank owns. entries: `main_grad` is the shard of the gradient, which torch reduces
    straight into.
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
        self._pin_memory = pin_memory
        self._shards = {shard.param: shard for _, shard in placed}
        self._names = [name for name, _ in placed]
        self.entries: list[Entry] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Makes the flat tensors anew, in the dtype and on the device that shards have now; gradients are zeros."""
        shards = list(self._shards.values())
        like = shards[0].local
        # What modules compute in is the shards' own, unless these are wider.
        self.model_dtype = like.dtype if self.model_dtype.itemsize >= 4 else self.model_dtype
        self.param_data, self.grad_data = (
            torch.zeros(self.layout.numel, dtype=like.dtype, device=like.device, pin_memory=self._pin_memory)
            for _ in range(2)
        )
        self.entries.clear()
        for name, shard, sent in zip(self._names, shards, self.layout.spans, strict=True):
            own = Span(sent.start, shard.numel)
            grad = self.grad_data[own.start : own.end]
            shard.param.grad = None
            self.entries.append(Entry(name, shard.param, own, grad, grad, start=shard.start))
        self._entry_of = {entry.param: entry for entry in self.entries}
        self.attach()

    def owned_spans(self) -> list[Span]:
        """What this rank's optimizer steps: all of it, unit by unit."""
        return [bucket.span for bucket in self.layout.buckets]

    def owned_grads(self, entry: Entry) -> list[torch.Tensor]:
        """This rank's shard of a parameter's gradient: [N], grad_data's dtype, a view of it, if it has any."""
        return [entry.main_grad] if entry.span.numel else []

    def grad_of(self, span: Span) -> torch.Tensor:
        """The gradients of elements of one owned span, a view: [span.numel], grad_data's dtype."""
        return self.grad_data[span.start : span.end]

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Whether element `start` of a flattened parameter, any shape, lies at that address."""
        local, first = self._shards[param].local, self._shards[param].start
        return not local.numel() or local.data_ptr() + (start - first) * local.element_size() == address

    def attach(self) -> None:
        """Takes in shards that lie elsewhere, as those do that were loaded with assign=True."""
        for shard, sent in zip(self._shards.values(), self.layout.spans, strict=True):
            shard.move_to(self.param_data[sent.start : sent.end])
        self.attach_grads()

    def attach_grads(self) -> None:
        """Lets torch reduce into grad_data; what it has reduced elsewhere, after a `.grad = None`, is taken in."""
        for entry in self.entries:
            self._attach_grad(entry)

    def attach_grad_of(self, param: nn.Parameter) -> None:
        """The same for one parameter, any shape and dtype."""
        self._attach_grad(self._entry_of[param])

    def _attach_grad(self, entry: Entry) -> None:
        grad = entry.param.grad
        if isinstance(grad, DTensor):
            local = grad._local_tensor
            if not local.numel() or local.data_ptr() == entry.main_grad.data_ptr():
                return
            entry.main_grad.copy_(local.reshape(-1))
        entry.param.grad = self._shards[entry.param].grad_in(entry.main_grad)

    def zero_grads(self) -> None:
        """Forgets all gradients: they are exact zeros."""
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
