"""State dicts of Adam whose state is spread over ranks: by parameter, in logical order, the same at every layout.

What a state dict must have to be loaded is adam_state_checks.py's; torch.optim's own format is written by
torch_adam_state.py.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.agreement import all_ranks_agree
from megatron.core.dist_checkpointing.boxes import Box, BoxIndex, intersection, whole
from megatron.core.dist_checkpointing.flat_ranges import boxes_of_range, range_tensors
from megatron.core.dist_checkpointing.logical import memory_piece
from megatron.core.dist_checkpointing.spread_tensor import HeldBox, SpreadTensor
from megatron.core.distributed.layout import round_up
from megatron.core.optimizer.adam_state_checks import (
    EXP_AVG,
    EXP_AVG_SQ,
    STEP,
    Entry,
    checked_entries,
    checked_groups_sync,
    descriptions,
    groups_to_save_sync,
    take_groups,
)
from megatron.core.optimizer.flat_adam import FlatAdam
from megatron.core.optimizer.state_keys import MASTERS
from megatron.core.optimizer.stored_floats import BLOCK, StoredFloats

# Elements of a box that is saved: who reads a file has so much of it in memory at a time, and reads it once for each
# part that it needs. 64 MiB of fp32.
_SAVED_ELEMENTS = 1 << 24
# Elements that are loaded at a time.
_LOADED_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class OwnedRange:
    """Elements [start, start + numel) of a parameter, in the order of its memory, that this rank keeps the state of.

    index: the parameter's number, counted through the groups as torch's optimizers do. offset: of its first element in
    the flat tensors of `adam`, a multiple of 64; what lies between its end and the next multiple is nobody's.
    """

    index: int
    param: nn.Parameter
    start: int
    numel: int
    adam: FlatAdam
    offset: int


@dataclass(frozen=True)
class AdamShard:
    """One rank's part of an optimizer, built whenever it is needed.

    ranges: all that this rank owns, in any order. Of every parameter each element is in a range of some rank, or in
    the same range of several ranks. param_groups: the optimizer's own. process_group: all ranks that own some of its
    parameters, or copies of it; None only where torch.distributed is not initialised. without_state: the numbers of
    parameters that nobody steps, which are in no range, the same on all ranks.
    """

    ranges: Sequence[OwnedRange]
    param_groups: Sequence[dict[str, Any]]
    adam_w_mode: bool
    process_group: dist.ProcessGroup | None
    without_state: frozenset[int] = frozenset()

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters, any shapes and dtypes, in the order of their numbers."""
        return [param for group in self.param_groups for param in group["params"]]


def adam_state_dict(shard: AdamShard) -> dict[str, Any]:
    """Returns the state that torch.distributed.checkpoint saves at any number of ranks, and fills at any other.

    {"state": {index: {"step", "exp_avg", "exp_avg_sq", "fp32_param"}}, "param_groups": [...]} as of torch.optim, with
    the masters besides; the same keys on all ranks. The values have the parameters' shapes and are fp32 (fp64 where
    states are computed so); each rank has some boxes of them, and reads these when they are saved. Nothing is copied
    and no other rank waited for. Hyper-parameters that are tensors become numbers, for which the device is waited for.
    """
    by_index: dict[int, list[OwnedRange]] = defaultdict(list)
    for part in shard.ranges:
        by_index[part.index].append(part)
    return {
        "state": {
            index: _spread_state(param, by_index[index])
            for index, param in enumerate(shard.params)
            if index not in shard.without_state
        },
        "param_groups": groups_to_save_sync(shard.param_groups, adam_w_mode=shard.adam_w_mode),
    }


@torch.no_grad()
def load_adam_state_dict(shard: AdamShard, state_dict: Mapping[str, Any]) -> None:
    """Takes what adam_state_dict gave: filled by torch.distributed.checkpoint.load, or of the same layout, copied or
    pickled; or a state dict of torch.optim.Adam or AdamW, full tensors of any float dtype.

    Collective. The groups take the hyper-parameters; a learning rate that is a tensor keeps its memory. Without masters
    in it, masters become what the parameters are, so these must be whole. With them it is the parameters that must
    change: call flat_adam's write_parameters for each run and gather them as after a step.
    Raises ValueError or RemoteRankError, on every rank and with nothing changed, naming parameter, value and what would
    be right: for other groups, for entries that are missing, unknown or of another shape, for elements that this rank
    needs and the value lacks, and for step counts that differ among parameters of one run.
    """
    with all_ranks_agree(shard.process_group):
        groups = checked_groups_sync(shard.param_groups, state_dict, adam_w_mode=shard.adam_w_mode)
        entries = checked_entries(shard.param_groups, state_dict, without_state=shard.without_state)
        names = descriptions(shard.param_groups)
        owned = {part.index for part in shard.ranges}
        loaded = {index: _Loaded(entries[index], names[index]) for index in sorted(owned)}
        for part in shard.ranges:
            loaded[part.index].check_has(part)
        _check_steps_sync(shard.ranges, loaded)
    for part in shard.ranges:
        part.adam.step.copy_(loaded[part.index].step)
        for kind, stored in _stored(part.adam).items():
            _write(part, stored, source=loaded[part.index].sources.get(kind))
    take_groups(shard.param_groups, groups)


def range_values(part: OwnedRange, stored: StoredFloats) -> torch.Tensor:
    """The numbers of a range in the order of memory: [numel], fp32 or fp64, perhaps a view."""
    return _read(stored, part.offset, shape=(part.numel,), stride=(1,))


def _stored(adam: FlatAdam) -> dict[str, StoredFloats]:
    return {MASTERS: adam.main, EXP_AVG: adam.exp_avg, EXP_AVG_SQ: adam.exp_avg_sq}


def _spread_state(param: nn.Parameter, parts: Sequence[OwnedRange]) -> dict[str, torch.Tensor]:
    """The state of one parameter, [*parameter's shape] each, and the step count, [], fp32."""
    dtype = parts[0].adam.wide if parts else torch.promote_types(param.dtype, torch.float32)
    if param.numel() == 0:
        # Nobody owns any of it, and a checkpoint has its key all the same.
        nothing = {kind: torch.zeros(param.shape, dtype=dtype) for kind in (EXP_AVG, EXP_AVG_SQ, MASTERS)}
        return {STEP: torch.zeros((), dtype=torch.float32), **nothing}
    state: dict[str, torch.Tensor] = {}
    state[STEP] = SpreadTensor((), [HeldBox(whole(()), partial(_step_of, p)) for p in parts[:1]], dtype=torch.float32)
    for kind in (EXP_AVG, EXP_AVG_SQ, MASTERS):
        held = [one for part in parts for one in _held_boxes(part, _stored(part.adam)[kind])]
        state[kind] = SpreadTensor(param.shape, held, dtype=dtype)
    return state


def _step_of(part: OwnedRange) -> torch.Tensor:
    return part.adam.step


def _held_boxes(part: OwnedRange, stored: StoredFloats) -> Iterator[HeldBox]:
    piece = memory_piece("", part.param)
    end = part.start + part.numel
    for first in range(part.start, end, _SAVED_ELEMENTS):
        for box in boxes_of_range(piece, start=first, end=min(first + _SAVED_ELEMENTS, end)):
            # A box of a range is one piece of the memory of a parameter.
            place = sum(o * s for o, s in zip(box.offset, piece.stride, strict=True)) - part.start + part.offset
            yield HeldBox(box, partial(_read, stored, place, shape=box.shape, stride=piece.stride))


def _read(stored: StoredFloats, place: int, *, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Neighbouring numbers from `place` on, as a box: [*shape], fp32 or fp64."""
    first = place // BLOCK * BLOCK
    flat = stored.read(first, round_up(place + math.prod(shape), BLOCK))[place - first :]
    return flat.as_strided(shape, stride)


class _Source:
    """Where the elements of a loaded tensor are; value: [*parameter's shape], any float dtype, or some boxes of it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        self._boxes = value.boxes if isinstance(value, SpreadTensor) else [whole(tuple(value.shape))]
        self._places = BoxIndex(self._boxes)

    def num_missing(self, box: Box) -> int:
        """How many elements of a box it lacks."""
        return box.volume - sum(common.volume for _, common in self._common(box))

    def fill(self, target: torch.Tensor, box: Box) -> None:
        """Copies a box of which it has every element: [*box shape], any float dtype."""
        for held, common in self._common(box):
            values = self._value.read(held) if isinstance(self._value, SpreadTensor) else self._value
            target[common.relative_to(box)].copy_(values[common.relative_to(held)])

    def _common(self, box: Box) -> Iterator[tuple[Box, Box]]:
        for position in self._places.touching(box):
            common = intersection(self._boxes[position], box)
            assert common is not None, "boxes that touch share elements"
            yield self._boxes[position], common


class _Loaded:
    """The entry of one parameter. sources: by kind, without masters where these are to be the parameters."""

    def __init__(self, entry: Entry, name: str) -> None:
        self.sources = {kind: _Source(value) for kind, value in entry.items()}
        self._name = name

    @property
    def step(self) -> torch.Tensor:
        """[], fp32, on the host."""
        count = torch.zeros((), dtype=torch.float32)
        self.sources[STEP].fill(count, whole(()))
        return count

    def check_has(self, part: OwnedRange) -> None:
        """Raises ValueError unless all is there of what a range needs."""
        boxes = boxes_of_range(memory_piece("", part.param), start=part.start, end=part.start + part.numel)
        for kind, source in self.sources.items():
            missing = sum(source.num_missing(box) for box in ([whole(())] if kind == STEP else boxes))
            if missing:
                raise ValueError(
                    f"{kind} of {self._name} lacks {missing} elements that this rank owns: it is of a rank of another "
                    "layout; torch.distributed.checkpoint.save and load take a state from any layout to any other"
                )


def _check_steps_sync(ranges: Sequence[OwnedRange], loaded: Mapping[int, _Loaded]) -> None:
    seen: dict[int, tuple[float, int]] = {}
    for part in ranges:
        step = loaded[part.index].step.item()
        other, index = seen.setdefault(id(part.adam), (step, part.index))
        if other != step:
            raise ValueError(
                f"step of parameter {part.index} is {step:g} and that of parameter {index} is {other:g}: must be equal "
                "as they were taken over together and are stepped so; give those of each count to init_params on their "
                "own, before state_dict and load_state_dict"
            )


def _write(part: OwnedRange, stored: StoredFloats, *, source: _Source | None) -> None:
    """Fills what is kept of a range; source: None for the parameter itself."""
    assert part.offset % BLOCK == 0, f"offset is {part.offset}: ranges start on the grid of {BLOCK}"
    piece, like = memory_piece("", part.param), stored.read(0, 0)
    for first in range(0, part.numel, _LOADED_ELEMENTS):
        count, start = min(_LOADED_ELEMENTS, part.numel - first), part.start + first
        padded = like.new_zeros(round_up(count, BLOCK))
        values = padded[:count]
        if source is None:
            memory = part.param.detach().as_strided((part.param.numel(),), (1,))
            values.copy_(memory[start : start + count])
        else:
            for one in range_tensors([piece], values, start=start):
                source.fill(one.data, one.box)
        stored.write(part.offset + first, padded)
