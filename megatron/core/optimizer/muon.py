"""MuonRule: orthogonalized updates of matrices, including matrices that a sharded optimizer splits over ranks.

A plan assigns each matrix to one rank, which receives it whole. Modules describe the matrices of their parameters
(megatron/core/tensor_parallel/param_attributes.py).
"""

import dataclasses
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dense_memory import dense_strides
from megatron.core.distributed.layout import BufferLayout, FlatBuffer, ParamRange, ParamSlot, Span
from megatron.core.logical_tensors import LogicalPiece, range_views
from megatron.core.optimizer.adam import GradScale
from megatron.core.optimizer.flat_params import FlatParamRange
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.param_groups import GroupKey
from megatron.core.optimizer.stored_floats import Plain, StoredFloats
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import MatrixWindow

# Keller Jordan's coefficients, which bring singular values close to 1 within five steps.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_EPS = 1e-7
# Number of bf16 elements that a rank sends at a time; it receives the same number back.
_SENT_AT_ONCE = 1 << 24


@dataclass(frozen=True)
class _MatrixUnit:
    """Matrices that one rank processes together: elements [start, end) of a flattened parameter.

    No matrix crosses these boundaries. place: index of the parameter's first element in its buffer.
    """

    name: str
    place: int
    start: int
    end: int
    windows: tuple[MatrixWindow, ...]

    @property
    def cost(self) -> int:
        """Approximate number of multiplications in one Newton-Schulz step of these matrices."""
        shapes = [window.matrix_shape for window in self.windows]
        return sum(min(shape) ** 2 * (2 * max(shape) + min(shape)) for shape in shapes)


@dataclass(frozen=True)
class _Part:
    """This rank's part of a unit: elements [first, last) of a flat range's tensors.

    start: index in the flattened parameter of the element at `first`.
    """

    unit: _MatrixUnit
    param_range: FlatParamRange
    start: int
    first: int
    last: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns the part's elements from a tensor of its flat range: [N], any dtype -> [last - first], a view."""
        return flat[self.first : self.last]


@dataclass(frozen=True)
class _Batch:
    """Units whose parts are sent together and whose updates are returned together.

    sends: this rank's parts, by the rank that processes them. receives: units that this rank processes, with ranges of
    their parameters, by the rank that owns them.
    """

    group: dist.ProcessGroup | None
    device: torch.device
    sends: list[list[_Part]]
    receives: list[list[tuple[_MatrixUnit, int, int]]]

    @property
    def parts(self) -> list[_Part]:
        """All parts of this rank, in the order of sending."""
        return [part for parts in self.sends for part in parts]


class MuonRule:
    """Muon (Keller Jordan, 2024): momentum orthogonalized matrix by matrix, with decoupled weight decay.

    A matrix is the weight of an expert, of a projection, or of an attention's q, k or v. Each rank stores the momenta
    of its ranges. In a step each rank receives some whole matrices in bf16, the dtype of Newton-Schulz, and returns
    their updates to the owners. buffers: all buffers of the model. keys: the group of every parameter in them.
    matrices: windows by parameter name; a parameter without an entry is one matrix.
    """

    is_collective = True

    def __init__(
        self,
        config: OptimizerConfig,
        ranges: Sequence[FlatParamRange],
        *,
        buffers: Sequence[FlatBuffer],
        keys: Mapping[nn.Parameter, GroupKey],
        matrices: Mapping[str, list[MatrixWindow]],
    ) -> None:
        self.ranges = list(ranges)
        self._config = config
        self._momenta = {param_range: torch.zeros_like(param_range.stepped) for param_range in ranges}
        placed = [slot for buffer in buffers for slot in buffer.slots if keys[slot.param].is_matrix]
        windows = {slot: matrices.get(slot.name, [_whole(slot.param)]) for slot in placed}
        self._batches = [batch for buffer in buffers for batch in _plan(buffer, windows, ranges=self.ranges)]
        # By parameter name and matrix.
        self._group_of: dict[tuple[str, MatrixWindow], dict[str, Any]] = {}
        self.optimizer = torch.optim.Optimizer(self._torch_groups(windows, keys), {"lr": config.lr})
        self._groups_of: dict[str, list[dict[str, Any]]] = {}
        for (name, _), group in self._group_of.items():
            self._groups_of.setdefault(name, []).append(group)

    def _torch_groups(
        self, windows: Mapping[ParamSlot, list[MatrixWindow]], keys: Mapping[nn.Parameter, GroupKey]
    ) -> list[dict[str, Any]]:
        """Builds a group for each matrix shape and group key, on all ranks, so that schedules find the same groups."""
        groups: dict[tuple[GroupKey, tuple[int, int]], dict[str, Any]] = {}
        for slot, window in ((slot, window) for slot, of_slot in windows.items() for window in of_slot):
            key = keys[slot.param]
            group = {**_values(key, window, config=self._config), "params": []}
            self._group_of[slot.name, window] = groups.setdefault((key, window.matrix_shape), group)
        for part in (part for batch in self._batches for part in batch.parts):
            for window in part.unit.windows:
                self._group_of[part.unit.name, window]["params"] += _views(
                    part, window, flat=part.of(part.param_range.stepped)
                )
        # torch keeps these dictionary objects, and rejects an empty list.
        return list(groups.values()) or [{"params": []}]

    def refresh_rates(self) -> None:
        """Does nothing, because `update` reads the learning rates from the groups."""

    def update(self, scale: GradScale, ranges: Set[FlatParamRange]) -> None:
        """Updates all ranges in one call. Collective over the ranks that own shards."""
        assert ranges >= set(self.ranges), "matrices cross range boundaries, so all ranges must be updated together"
        divisor = scale.divisor
        assert isinstance(divisor, float), "Muon requires a host decision: see OptimizerConfig.validate_device_step"
        with torch.no_grad():
            grads = {}
            for param_range in self.ranges:
                # 16-bit gradients are converted, which copies them; others are divided in place.
                grad = param_range.grad.to(self._momenta[param_range].dtype)
                grads[param_range] = grad.div_(divisor) if divisor != 1.0 else grad
                self._momenta[param_range].lerp_(grad, 1 - self._config.muon_momentum)
            for batch in self._batches:
                directions = [[self._direction(part, grads[part.param_range]) for part in to] for to in batch.sends]
                sizes = [[last - first for _, first, last in ranges] for ranges in batch.receives]
                received = _exchange(batch, directions, sizes=sizes)
                self._orthogonalize(batch, received)
                returned = _exchange(batch, received, sizes=[[t.numel() for t in sent] for sent in directions])
                self._apply(batch, returned)
            for param_range in self.ranges:
                param_range.write_model()

    def _direction(self, part: _Part, grad: torch.Tensor) -> torch.Tensor:
        """Returns a part's update before orthogonalization, its momentum or Nesterov momentum: [n], bf16."""
        momentum = part.of(self._momenta[part.param_range])
        if self._config.muon_nesterov:
            momentum = part.of(grad).lerp(momentum, self._config.muon_momentum)
        return momentum.bfloat16()

    def _orthogonalize(self, batch: _Batch, received: list[list[torch.Tensor]]) -> None:
        """Replaces received parts of this rank's units, [n], bf16 each, by their orthogonalized values."""
        held: dict[_MatrixUnit, list[tuple[int, torch.Tensor]]] = {}
        for ranges, tensors in zip(batch.receives, received, strict=True):
            for (unit, first, _), tensor in zip(ranges, tensors, strict=True):
                held.setdefault(unit, []).append((first - unit.start, tensor))
        for unit, pieces in held.items():
            whole = torch.empty(unit.end - unit.start, dtype=torch.bfloat16, device=batch.device)
            for first, tensor in pieces:
                whole[first : first + tensor.numel()] = tensor
            for window in unit.windows:
                view = dataclasses.replace(window, offset=window.offset - unit.start).view_of(whole)
                matrix = newton_schulz(view.flatten(0, -2), steps=self._config.muon_num_ns_steps)
                view.copy_(matrix.reshape(view.shape))
            for first, tensor in pieces:
                tensor.copy_(whole[first : first + tensor.numel()])

    def _apply(self, batch: _Batch, returned: list[list[torch.Tensor]]) -> None:
        """Changes this rank's parts by their orthogonalized updates, [n], bf16 each, from each processing rank."""
        for part, update in zip(batch.parts, (t for of_rank in returned for t in of_rank), strict=True):
            for window in part.unit.windows:
                group = self._group_of[part.unit.name, window]
                rate = group["lr"] * _torch_factor(window.matrix_shape)
                weights = _views(part, window, flat=part.of(part.param_range.stepped))
                for weight, change in zip(weights, _views(part, window, flat=update), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(change, alpha=-rate)

    def flat_state(self, run: FlatParamRange) -> dict[str, StoredFloats]:
        return {"momentum_buffer": Plain(self._momenta[run])}

    def settings_in(self, run: FlatParamRange) -> list[tuple[Span, Mapping[str, Any]]]:
        """Returns the group settings of each parameter in a range.

        For a parameter with matrices in several groups, returns the settings shared by these groups.
        """
        ends = [member.span.start for member in run.params[1:]] + [run.span.numel]
        parts = [Span(one.span.start, end - one.span.start) for one, end in zip(run.params, ends, strict=True)]
        return [(part, self._settings_of(member.name)) for part, member in zip(parts, run.params, strict=True)]

    def _settings_of(self, name: str) -> Mapping[str, Any]:
        first, *others = self._groups_of[name]
        shared = (key for key in first if key != "params")
        return {key: first[key] for key in shared if all(other[key] == first[key] for other in others)}

    def step_counts(self) -> list[torch.Tensor]:
        """Returns an empty list instead of counters, [], fp32, because Muon counts no steps."""
        return []


def newton_schulz(matrix: torch.Tensor, *, steps: int) -> torch.Tensor:
    """Approximates the nearest orthogonal matrix, with singular values around 1, by Muon's quintic iteration.

    matrix: [rows, columns], bf16, may be overwritten -> [rows, columns], bf16.
    """
    rows, columns = matrix.shape
    wide = matrix.T if rows > columns else matrix
    # The iteration converges from a spectral norm of at most 1.
    wide.div_(wide.norm().clamp(min=_EPS))
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), wide, beta=_A)
    return wide.T if rows > columns else wide


# The plan, which assigns matrices to ranks if a sharded optimizer splits them.


def _plan(
    buffer: FlatBuffer, windows: Mapping[ParamSlot, list[MatrixWindow]], *, ranges: Sequence[FlatParamRange]
) -> Iterator[_Batch]:
    """Yields the batches that this rank sends and receives for the matrices of a buffer."""
    of_slots = (_units_of(e.name, windows.get(e, []), place=e.span.start) for e in buffer.slots)
    units = sorted((unit for of_slot in of_slots for unit in of_slot), key=lambda unit: unit.place)
    group = buffer.data_parallel_group if buffer.is_sharded else None
    ranks, own_rank = group_size(group), group_rank(group)
    members = [(one, member) for one in ranges if one.buffer is buffer for member in one.params]
    for batch in _batches_of(units, max_elements=_SENT_AT_ONCE * ranks):
        sends: list[list[_Part]] = [[] for _ in range(ranks)]
        receives: list[list[tuple[_MatrixUnit, int, int]]] = [[] for _ in range(ranks)]
        for unit, owner in zip(batch, _owners_of(batch, ranks)):
            for rank, first, last in _ranges_of(unit, buffer.layout, is_sharded=group is not None):
                if owner == own_rank:
                    receives[rank].append((unit, first, last))
                if rank == own_rank:
                    sends[owner].append(_part_of(unit, members, first=first, last=last))
        yield _Batch(group, buffer.param_data.device, sends, receives)


def _units_of(name: str, windows: Iterable[MatrixWindow], *, place: int) -> list[_MatrixUnit]:
    """Returns the matrices of a parameter as units, sorted by position; interleaved matrices share a unit."""
    units: list[_MatrixUnit] = []
    for window in sorted(windows, key=lambda window: window.offset):
        reach = sum((n - 1) * s for n, s in zip(window.shape, window.stride, strict=True))
        start, end = window.offset, window.offset + reach + 1
        inside: tuple[MatrixWindow, ...] = (window,)
        if units and units[-1].end > start:
            last = units.pop()
            start, end, inside = last.start, max(end, last.end), (*last.windows, window)
        units.append(_MatrixUnit(name, place, start, end, inside))
    return units


def _owners_of(units: Sequence[_MatrixUnit], num_ranks: int) -> list[int]:
    """Assigns a rank to each unit greedily, the most expensive first, each to the rank with the least load."""
    loads = [(0, rank) for rank in range(num_ranks)]
    owners = [0] * len(units)
    for index in sorted(range(len(units)), key=lambda index: -units[index].cost):
        load, rank = heapq.heappop(loads)
        owners[index] = rank
        heapq.heappush(loads, (load + units[index].cost, rank))
    return owners


def _batches_of(units: Sequence[_MatrixUnit], *, max_elements: int) -> Iterator[list[_MatrixUnit]]:
    """Yields neighboring units to send together: a single unit, or several with at most max_elements in total."""
    batch: list[_MatrixUnit] = []
    size = 0
    for unit in units:
        if batch and size + unit.end - unit.start > max_elements:
            yield batch
            batch, size = [], 0
        batch.append(unit)
        size += unit.end - unit.start
    if batch:
        yield batch


def _ranges_of(unit: _MatrixUnit, layout: BufferLayout, *, is_sharded: bool) -> list[tuple[int, int, int]]:
    """Returns each rank's range of a unit: (rank, start and end in the flattened parameter), in order."""
    if not is_sharded:
        return [(0, unit.start, unit.end)]
    first, last = unit.place + unit.start, unit.place + unit.end
    bucket = next(bucket for bucket in layout.buckets if bucket.span.start <= first < bucket.span.end)
    size = bucket.span.numel // layout.num_shards
    ranks = range((first - bucket.span.start) // size, (last - 1 - bucket.span.start) // size + 1)
    shards = [(rank, layout.shard(bucket.index, rank)) for rank in ranks]
    return [(rank, max(shard.start, first) - unit.place, min(shard.end, last) - unit.place) for rank, shard in shards]


def _part_of(
    unit: _MatrixUnit, members: Sequence[tuple[FlatParamRange, ParamRange]], *, first: int, last: int
) -> _Part:
    param_range, member = next(
        (one, m) for one, m in members if m.name == unit.name and m.start <= first < m.start + m.span.numel
    )
    place = member.span.start + first - member.start
    return _Part(unit, param_range, first, place, place + last - first)


# Communication, views and settings.


def _exchange(batch: _Batch, sends: list[list[torch.Tensor]], *, sizes: list[list[int]]) -> list[list[torch.Tensor]]:
    """Exchanges tensors, [n], bf16 each, between all ranks in one all-to-all.

    sends: the tensors for each rank. sizes: sizes of the tensors to receive from each rank.
    """
    if group_size(batch.group) == 1:
        return sends
    nothing = torch.empty(0, dtype=torch.bfloat16, device=batch.device)
    sent = torch.cat([nothing, *(tensor for tensors in sends for tensor in tensors)])
    lengths = [sum(of_rank) for of_rank in sizes]
    received = sent.new_empty(sum(lengths))
    dist.all_to_all_single(received, sent, lengths, [sum(t.numel() for t in of) for of in sends], group=batch.group)
    return [list(part.split(of_rank)) for part, of_rank in zip(received.split(lengths), sizes)]


def _views(part: _Part, window: MatrixWindow, *, flat: torch.Tensor) -> list[torch.Tensor]:
    """Returns views, of any shape, of a matrix's elements in a part's tensor. flat: [n], any dtype."""
    zeros = (0,) * len(window.shape)
    piece = LogicalPiece(part.unit.name, window.shape, window.stride, window.offset, window.shape, zeros)
    return range_views([piece], flat, start=part.start)


def _whole(param: torch.Tensor) -> MatrixWindow:
    rows, columns = param.shape
    return MatrixWindow((rows, columns), (columns, 1) if param.is_contiguous() else dense_strides(param), 0)


def _torch_factor(shape: tuple[int, int]) -> float:
    """Returns torch.optim.Muon's factor of the learning rate, so that learning rates have the same meaning."""
    rows, columns = shape
    return math.sqrt(max(1, rows / columns))


def _values(key: GroupKey, window: MatrixWindow, *, config: OptimizerConfig) -> dict[str, Any]:
    """Returns a torch group for matrices of one shape, with a scaled learning rate.

    Weight decay is divided by the same factor, because the learning rate multiplies it.
    """
    rows, columns = window.matrix_shape
    wanted = {
        "spectral": math.sqrt(max(rows, columns)),
        "unit_rms_norm": math.sqrt(rows / columns),
        "shape_scaling": _torch_factor((rows, columns)),
    }[config.muon_scale_mode]
    factor = config.muon_extra_scale_factor * wanted / _torch_factor((rows, columns))
    values = key.values(config)
    scaled = {name: values[name] * factor for name in ("lr", "lr_mult")}
    return {**values, **scaled, **{name: values[name] / factor for name in ("weight_decay", "wd_mult")}}
