"""Units of fully_shard, and flat tensors with this rank's shards of their parameters and gradients.

A unit is a module that fully_shard is applied to, whose parameters are gathered and reduced together. ShardedFlatBuffer
stores the parameter shards of many units in one flat tensor, and their gradient shards in another; in a
ReleasedShardBuffer, gradients have memory only while they are needed. UnitGroup and ShardHookRunner present reduced
units to hooks and optimizers as buckets. torch gathers and reduces; its private state is in torch_fsdp2_state.py.

A shard along the first dimension of a contiguous parameter is a range of the flattened parameter.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megatron.core.device import default_device, host_bytes
from megatron.core.distributed.grad_hooks import GradHookRunner, not_wrapped
from megatron.core.distributed.layout import (
    ALIGNMENT,
    BucketLayout,
    BufferLayout,
    ParamRange,
    ParamSlot,
    Span,
    locate,
    round_up,
)
from megatron.core.distributed.torch_fsdp2_state import ParamShard
from megatron.core.logical_tensors import canonical_name
from megatron.core.tensor_parallel.param_attributes import mark_gradients_pass, param_facts

# Units.


@dataclass(frozen=True)
class UnitKind:
    """Properties that all parameters of a unit share: the compute dtype, and the ranks over which they are sharded."""

    dtype: torch.dtype
    is_expert: bool


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters, except the parameters of units inside it, are gathered together."""

    name: str
    module: nn.Module
    kind: UnitKind

    @property
    def dtype_of_half(self) -> torch.dtype | None:
        """The 16-bit compute dtype of a unit whose shards are fp32; None if shards have the compute dtype."""
        return self.kind.dtype if self.kind.dtype.itemsize < 4 else None


def find_units(root: nn.Module, layers: Sequence[nn.Module], *, experts_apart: bool) -> list[Unit]:
    """Returns the units of `root`: one per layer, and one for the rest; inner units first, the root unit last.

    Experts that are reduced over different ranks, and parameters of a minority dtype, form separate units. Raises
    ValueError if one module has its own parameters of two kinds, or if two units share a parameter.
    """

    def kind_of(param: nn.Parameter) -> UnitKind:
        return UnitKind(param.dtype, experts_apart and param_facts(param).is_expert)

    names = {module: name for name, module in root.named_modules()}
    cut = set(layers)
    units: list[Unit] = []
    for outer in [*layers, root]:
        inside = [(n, p) for n, p in outer.named_parameters() if not _is_below(n, outer, cut=cut - {outer})]
        kind = _main_kind([kind_of(param) for _, param in inside], [param.numel() for _, param in inside])
        if kind is None:
            kind = UnitKind(torch.float32, is_expert=False)
        units += [
            Unit(canonical_name(names[module]), module, kind_inside)
            for module, kind_inside in _apart(outer, kind, kind_of=kind_of, stop=cut)
        ]
        units.append(Unit(canonical_name(names[outer]), outer, kind))
    _check_not_shared(root, units)
    return units


def in_order_of_backward(units: Sequence[Unit], layers: Sequence[nn.Module]) -> list[Unit]:
    """Sorts the units of find_units by the end of their backward: the last layer first, the root unit last.

    Units inside a layer precede the layer.
    """
    outer = set(layers)
    of_layers: list[list[Unit]] = [[]]
    for unit in units:
        of_layers[-1].append(unit)
        if unit.module in outer:
            of_layers.append([])
    *inner, of_root = of_layers
    return [unit for of_layer in (*reversed(inner), of_root) for unit in of_layer]


def repeated_layers(root: nn.Module) -> list[nn.Module]:
    """Returns the members of the outermost ModuleLists, and of lists inside them: the layers of a model."""
    found: list[nn.Module] = []
    for child in root.children():
        if isinstance(root, nn.ModuleList) and _has_forward(child):
            found.append(child)
        else:
            found += repeated_layers(child)
    return [layer for layer in found if any(True for _ in layer.parameters())]


def _is_below(name: str, outer: nn.Module, *, cut: set[nn.Module]) -> bool:
    """Returns whether a parameter of `outer` is inside one of the modules of `cut`."""
    module = outer
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        if module in cut:
            return True
    return False


def _main_kind(kinds: Sequence[UnitKind], sizes: Sequence[int]) -> UnitKind | None:
    """Returns the dense kind with the most elements or, without dense parameters, an expert kind; None if empty."""
    elements: dict[UnitKind, int] = {}
    for kind, size in zip(kinds, sizes, strict=True):
        elements[kind] = elements.get(kind, 0) + size
    return max(elements, key=lambda kind: (not kind.is_expert, elements[kind]), default=None)


def _apart(
    module: nn.Module,
    main: UnitKind,
    *,
    kind_of: Callable[[nn.Parameter], UnitKind],
    stop: set[nn.Module],
) -> Iterator[tuple[nn.Module, UnitKind]]:
    """Yields the outermost submodules whose parameters are all of one kind different from `main`, with that kind."""
    for name, param in module.named_parameters(recurse=False):
        if kind_of(param) != main:
            raise ValueError(
                f"parameter {name} of {type(module).__name__} is {_words(kind_of(param))} among others that are "
                f"{_words(main)}: with TorchFullyShardedDataParallel the parameters of a module, and of lists and "
                "dicts in it, must be of one kind. Move it to a separate module whose forward is called"
            )
    for child in module.children():
        if child in stop:
            continue
        kinds = {kind_of(param) for name, param in child.named_parameters() if not _is_below(name, child, cut=stop)}
        if len(kinds) == 1 and kinds != {main} and _has_forward(child):
            yield child, kinds.pop()
        elif kinds - {main}:
            yield from _apart(child, main, kind_of=kind_of, stop=stop)


def _has_forward(module: nn.Module) -> bool:
    """Returns whether a module has a forward, before which its parameters are gathered; lists and dicts have none."""
    return type(module).forward is not nn.Module.forward


def _check_not_shared(root: nn.Module, units: Sequence[Unit]) -> None:
    by_module = {unit.module: unit for unit in units}
    found: dict[nn.Parameter, tuple[str, Unit]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        module, unit = root, by_module[root]
        for part in name.split(".")[:-1]:
            module = module.get_submodule(part)
            unit = by_module.get(module, unit)
        first, other = found.setdefault(param, (name, unit))
        if other is not unit:
            raise ValueError(
                f"parameter {canonical_name(name)} is shared with {canonical_name(first)}, which is gathered at "
                f"a different time: remove {unit.name or 'the model'} or {other.name or 'the model'} from "
                "sub_modules_to_wrap, or untie them (--untie-embeddings-and-output-weights)"
            )


def _words(kind: UnitKind) -> str:
    return f"{'an expert in ' if kind.is_expert else ''}{str(kind.dtype).removeprefix('torch.')}"


# Shards in flat tensors.


@dataclass(frozen=True, eq=False)
class UnitShards:
    """Trained parameters of a unit that are released together: their names and this rank's shards."""

    name: str
    shards: list[tuple[str, ParamShard]]

    def split(self, is_second: Callable[[nn.Parameter], bool]) -> "list[UnitShards]":
        """Splits the unit in two by a predicate on parameters; either part may be empty."""
        first = [(name, shard) for name, shard in self.shards if not is_second(shard.param)]
        second = [(name, shard) for name, shard in self.shards if is_second(shard.param)]
        return [UnitShards(self.name, first), UnitShards(self.name, second)]


class ShardedFlatBuffer:
    """Shards of parameters of one kind; a shard and its gradient are views of the same span in two flat tensors.

    param_data, grad_data: [numel], fp32 or fp64, zero in the padding. model_dtype: the compute dtype of modules. Each
    unit is one bucket, and this rank owns all buckets. slots: `main_grad` is the shard of the gradient, into which
    torch reduces.
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
        self.slots: list[ParamSlot] = []
        self.rebuild()

    def rebuild(self) -> None:
        """Reallocates the flat tensors in the current dtype and on the current device of shards; zeroes gradients."""
        shards = list(self._shards.values())
        # An empty tensor, because shards on the meta device will be allocated on a different device.
        like = torch.empty(0, dtype=shards[0].local.dtype, device=shards[0].device)
        # Modules compute in the shards' dtype, unless shards are wider.
        self.model_dtype = like.dtype if self.model_dtype.itemsize >= 4 else self.model_dtype
        self.param_data = self._zeros(self.layout.numel, like)
        self.grad_data = self._new_grads(like)
        self.slots.clear()
        for name, shard, sent in zip(self._names, shards, self.layout.spans, strict=True):
            own = Span(sent.start, shard.numel)
            grad = self.grad_data[own.start : own.end]
            shard.param.grad = None
            self.slots.append(ParamSlot(name, shard.param, own, grad, grad, start=shard.start))
        self._slot_of = {slot.param: slot for slot in self.slots}
        self.attach()

    @property
    def persistent_params(self) -> list[torch.Tensor]:
        """Memory of this rank's shards that persists between steps: [N] each, param_data's dtype."""
        return [self.param_data]

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """Memory of the shards' gradients that persists between steps: [N] each, grad_data's dtype."""
        return [self.grad_data]

    def owned_spans(self) -> list[Span]:
        """Returns the spans that this rank's optimizer updates: the whole buffer, unit by unit."""
        return [bucket.span for bucket in self.layout.buckets]

    def owned_grads(self, slot: ParamSlot) -> list[torch.Tensor]:
        """Returns a view of this rank's shard of a parameter's gradient, if not empty: [N], grad_data's dtype."""
        return [self._place_of(slot)] if slot.span.numel else []

    def grad_of(self, bucket: int) -> torch.Tensor:
        """Returns the gradients of a bucket, a view: [elements of its span], grad_data's dtype."""
        span = self.layout.buckets[bucket].span
        return self.grad_data[span.start : span.end]

    def is_attached(self, param: nn.Parameter, *, start: int, address: int) -> bool:
        """Returns whether element `start` of the flattened parameter is stored at memory address `address`."""
        local, first = self._shards[param].local, self._shards[param].start
        return not local.numel() or local.data_ptr() + (start - first) * local.element_size() == address

    def attach(self) -> None:
        """Moves shards stored elsewhere into the buffer, for example after a load with assign=True."""
        for shard, sent in zip(self._shards.values(), self.layout.spans, strict=True):
            shard.move_to(self.param_data[sent.start : sent.end])
        self.attach_grads()

    def attach_grads(self) -> None:
        """Makes torch reduce into grad_data; copies gradients that it reduced elsewhere after `.grad = None`."""
        for slot in self.slots:
            self._attach_grad(slot)

    def collect_grads(self) -> None:
        """Attaches gradients after the last backward; gradients cleared by a hook (`.grad = None`) become zero."""
        self._zero_cleared(self.slots)
        self.attach_grads()

    def attach_grad_of(self, param: nn.Parameter) -> None:
        """Makes torch reduce one parameter's gradient into grad_data."""
        self._attach_grad(self._slot_of[param])

    def open_grads(self, bucket: int) -> None:
        """Makes torch reduce the gradients of a bucket into grad_data."""
        for slot in self._slots_of(bucket):
            self._attach_grad(slot)

    def close_grads(self, bucket: int) -> None:
        """Ends hooks' use of a bucket's gradients; copies gradients that hooks have replaced back to grad_data."""
        self.open_grads(bucket)

    def named_grads(self, bucket: int) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, view of the gradient shard) of a bucket's parameters: [n] each, grad_data's dtype."""
        return [(slot.name, self._place_of(slot)) for slot in self._slots_of(bucket)]

    def may_hold_grads(self) -> bool:
        """Returns whether there are gradients, as far as is known without waiting for a device."""
        is_on_host = self.grad_data.device.type == "cpu" and default_device().type == "cpu"
        return is_on_host and bool(self.grad_data.count_nonzero())

    def zero_grads(self) -> None:
        """Drops all gradients and sets them to zero."""
        for shard in self._shards.values():
            shard.drop_unreduced_grad()
        self.attach_grads()
        self.grad_data.zero_()

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `factor`, a number or a tensor [] of any float dtype."""
        self.grad_data.mul_(factor)

    def unreduced(self) -> list[str]:
        """Returns the names of parameters with gradients that were not reduced."""
        pairs = zip(self.slots, self._shards.values(), strict=True)
        return [slot.name for slot, shard in pairs if shard.has_unreduced_grad]

    # Internals.

    def _zeros(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """Allocates zeros in persistent memory: [numel], dtype and device of `like`."""
        if self._pin_memory:
            return host_bytes(numel * like.itemsize, default_device()).view(like.dtype).zero_()
        return torch.zeros(numel, dtype=like.dtype, device=like.device)

    def _new_grads(self, like: torch.Tensor) -> torch.Tensor:
        return self._zeros(self.layout.numel, like)

    def _slots_of(self, bucket: int) -> list[ParamSlot]:
        return [self.slots[index] for index in self.layout.buckets[bucket].params]

    def _place_of(self, slot: ParamSlot) -> torch.Tensor:
        return slot.main_grad

    def _zero_cleared(self, slots: Sequence[ParamSlot]) -> None:
        """Zeroes gradients that are None, because a hook on the parameter has consumed them."""
        for slot in slots:
            if slot.param.grad is None:
                self._place_of(slot).zero_()

    def _attach_grad(self, slot: ParamSlot) -> None:
        grad, place = slot.param.grad, self._place_of(slot)
        if isinstance(grad, DTensor):
            local = grad._local_tensor
            if not local.numel() or local.data_ptr() == place.data_ptr():
                return
            place.copy_(local.reshape(-1))
        slot.param.grad = self._shards[slot.param].grad_in(place)


class ReleasedShardBuffer(ShardedFlatBuffer):
    """A buffer whose gradients have memory only from `open_grads` to `close_grads` of their bucket.

    grad_data, and `main_grad` of slots, are on the meta device and only specify size and dtype.
    """

    def __init__(
        self, kind: UnitKind, units: Sequence[UnitShards], *, group: dist.ProcessGroup | None, pin_memory: bool
    ) -> None:
        # Gradients of open buckets, and the buckets that were closed in this iteration.
        self._grads: dict[int, torch.Tensor] = {}
        self._closed: set[int] = set()
        super().__init__(kind, units, group=group, pin_memory=pin_memory)
        for slot in self.slots:
            mark_gradients_pass(slot.param)

    @property
    def persistent_grads(self) -> list[torch.Tensor]:
        """An empty list, because no gradient memory ([N], grad_data's dtype) is persistent."""
        return []

    def open_grads(self, bucket: int) -> None:
        """Allocates a bucket's gradients as zeros, once in an iteration, and lets torch reduce into them."""
        assert bucket not in self._closed, f"the gradients of {self.unit_names[bucket]} were already released"
        if bucket in self._grads:
            self._zero_cleared(self._slots_of(bucket))
        else:
            # From torch's allocator even if pinned, because it reuses short-lived buffers without a wait.
            numel, like = self.layout.buckets[bucket].span.numel, self.param_data
            pinned = self._pin_memory
            self._grads[bucket] = torch.zeros(numel, dtype=like.dtype, device=like.device, pin_memory=pinned)
        super().open_grads(bucket)

    def close_grads(self, bucket: int) -> None:
        """Drops a bucket's gradients. Tensors that `grad_of` has returned remain valid."""
        self._grads.pop(bucket, None)
        self._closed.add(bucket)
        for slot in self._slots_of(bucket):
            slot.param.grad = None

    def attach_grads(self) -> None:
        """Makes torch reduce into the gradients of open buckets."""
        for bucket in self._grads:
            super().open_grads(bucket)

    def grad_of(self, bucket: int) -> torch.Tensor:
        """Returns the gradients of an open bucket: [elements of its span], grad_data's dtype."""
        return self._grads[bucket]

    def zero_grads(self) -> None:
        """Frees all gradients and allows every bucket to be opened again."""
        self._grads.clear()
        self._closed.clear()
        for param, shard in self._shards.items():
            shard.drop_unreduced_grad()
            param.grad = None

    def scale_grads(self, factor: float | torch.Tensor) -> None:
        """Multiplies all gradients by `factor`, a number or a tensor [] of any float dtype.

        Raises RuntimeError if hooks have already received some of the gradients.
        """
        missing = next((bucket for bucket in range(len(self.layout.buckets)) if bucket not in self._grads), None)
        if missing is not None:
            raise RuntimeError(
                "scale_gradients was called with DistributedDataParallelConfig.release_gradients: hooks and the "
                f"optimizer have already received the gradient of {self._slots_of(missing)[0].name}; scale the loss "
                "instead"
            )
        for grad in self._grads.values():
            grad.mul_(factor)

    def may_hold_grads(self) -> bool:
        """Returns whether any gradients were reduced in this iteration."""
        return bool(self._grads or self._closed)

    def _new_grads(self, like: torch.Tensor) -> torch.Tensor:
        self._grads.clear()
        return torch.zeros(self.layout.numel, dtype=like.dtype, device="meta")

    def _place_of(self, slot: ParamSlot) -> torch.Tensor:
        # A parameter without elements may lie after the last bucket.
        if not slot.span.numel:
            return self.param_data.new_zeros(0)
        bucket, part = locate(slot.span, self._owned)
        return self._grads[bucket][part]


def _lay_out(sizes_of_units: Sequence[Sequence[int]]) -> BufferLayout:
    """Lays out shards, with their communication padding, at consecutive aligned offsets; one bucket per unit."""
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


# Reduced units for hooks and optimizers.


@dataclass(frozen=True, eq=False)
class UnitBucket:
    """The part of a unit that lies in one buffer."""

    buffer: ShardedFlatBuffer
    layout: BucketLayout
    slots: list[ParamSlot]

    def reduced_grad(self) -> torch.Tensor:
        """Returns this rank's shards of the unit's gradient: [n], fp32 or fp64, a view."""
        return self.buffer.grad_of(self.layout.index)


class UnitGroup:
    """Presents a unit, or a part of it that is released separately, as a group of one bucket.

    name: the same on all ranks.
    """

    def __init__(self, bucket: UnitBucket, *, name: str) -> None:
        self.name, self.buckets, self.slots = name, [bucket], bucket.slots
        self._buffer, self._index = bucket.buffer, bucket.layout.index

    def open(self) -> None:
        """Prepares the gradients for reduction and hooks; see open_grads of the buffer."""
        self._buffer.open_grads(self._index)

    def close(self) -> None:
        """Ends hooks' use of the gradients; see close_grads of the buffer."""
        self._buffer.close_grads(self._index)

    def named_grads(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, view of this rank's gradient shard) of the parameters: [n] each, fp32 or fp64."""
        return self._buffer.named_grads(self._index)

    def copy_from_comm(self) -> None:
        """Ends hooks' use of the gradients, and copies gradients that hooks have replaced back to grad_data."""
        self.close()


def unit_groups(buffers: Sequence[ShardedFlatBuffer], units: Sequence[Unit]) -> dict[Unit, list[UnitGroup]]:
    """Returns the groups of each trained unit, in the order of the units.

    A unit has one group, or two if a part of its gradients is completed later (is_completed_later in grad_hooks.py).
    """
    found: dict[str, list[UnitGroup]] = {}
    for buffer in buffers:
        for layout, name in zip(buffer.layout.buckets, buffer.unit_names, strict=True):
            bucket = UnitBucket(buffer, layout, [buffer.slots[index] for index in layout.params])
            of_unit = found.setdefault(name, [])
            rest = ", completed later" if of_unit else ""
            of_unit.append(UnitGroup(bucket, name=f"unit {name or 'root'}{rest}"))
    return {unit: found[unit.name] for unit in units if unit.name in found}


class ShardHookRunner(GradHookRunner):
    """Passes reduced units to hooks. The owned part of a parameter is the sharded parameter.

    The gradient is in its `.grad`. sharded: maps a gathered parameter to its sharded parameter.
    """

    def __init__(
        self,
        groups: Sequence[UnitGroup],
        *,
        is_later: Callable[[nn.Parameter], bool],
        sharded: Callable[[nn.Parameter], nn.Parameter],
    ) -> None:
        super().__init__(groups, is_later=is_later)
        self._buffers = {slot.param: group.buckets[0].buffer for group in groups for slot in group.slots}
        self._sharded = sharded

    def owned_shard(self, param: nn.Parameter) -> nn.Parameter:
        """Returns the sharded parameter, a DTensor; param: sharded or gathered."""
        owned = self._sharded(param)
        if owned not in self._buffers:
            raise not_wrapped(param)
        return owned

    def _fire_param(self, one: ParamRange, flat: torch.Tensor) -> None:
        self.hooks.fire_param(one.name, one.param)
        # A tensor that a hook assigns to `.grad` becomes the gradient for all later hooks.
        self._buffers[one.param].attach_grad_of(one.param)
