"""Optimizer state in checkpoints: its keys, and the state dict of an Adam whose state is sharded over ranks.

An entry contains the state of one parameter in logical order, independent of the layout.
megatron/core/dist_checkpointing writes and reads checkpoints; adam.py defines the state.
"""

import math
import numbers
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.dist_checkpointing.mapping import ShardedTensor, range_tensors
from megatron.core.dist_checkpointing.spread_tensor import HeldBox, SpreadTensor
from megatron.core.distributed.layout import ParamRange, round_up
from megatron.core.group_collectives import all_ranks_agree, gather_objects, message_device
from megatron.core.logical_tensors import Box, BoxIndex, boxes_of_range, intersection, memory_piece, whole
from megatron.core.optimizer.adam import EXP_AVG, EXP_AVG_SQ, FlatAdam
from megatron.core.optimizer.stored_floats import BLOCK, StoredFloats

# The kind of state that contains the fp32 masters of 16-bit parameters.
MASTERS = "fp32_param"
STEP = "step"
_BIAS_CORRECTION = "bias_correction"
_DECOUPLED = "decoupled_weight_decay"
_REQUIRED = ("lr", "betas", "eps", "weight_decay")
# Settings that only torch's optimizers support, with their default values.
_TORCH_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}
# Elements of a saved box, 64 MiB of fp32. A reader keeps a whole box in memory and reads it once for each part that it
# requires.
_SAVED_ELEMENTS = 1 << 24
# Elements loaded per iteration.
_LOADED_ELEMENTS = 1 << 22

# Values by kind: the step, [], and tensors of the parameter's shape, any float dtype.
_Entry = dict[str, torch.Tensor]
_Groups = Sequence[Mapping[str, Any]]


# Keys in checkpoints, `optimizer.KIND.KEY OF THE PARAMETER`, and initial state.


def state_prefix(kind: str) -> str:
    """Returns the key prefix of one kind of state. kind: MASTERS, or torch's name, such as exp_avg."""
    return f"optimizer.{kind}."


def is_state(key: str) -> bool:
    """Returns whether a checkpoint key belongs to optimizer state."""
    return key.startswith("optimizer.")


def parameter_key(key: str) -> str:
    """Extracts the parameter's key from a key of optimizer state."""
    return key.split(".", 2)[2]


def fresh_state(weights: Sequence[ShardedTensor], state: Iterable[tuple[str, torch.dtype]]) -> list[ShardedTensor]:
    """Builds initial state: masters are copies of the weights, everything else is zero.

    weights: boxes of parameters, any shapes and dtypes. state: keys and dtypes of all state, possibly including other
    parameters. Returns one box for each weight and each kind of state of its parameter.
    """
    by_parameter: dict[str, list[tuple[str, torch.dtype]]] = {}
    for key, dtype in sorted(state, key=str):
        by_parameter.setdefault(parameter_key(key), []).append((key, dtype))
    return [
        weight.with_data(key, _fresh(weight.data, dtype, is_master=key.startswith(state_prefix(MASTERS))))
        for weight in weights
        for key, dtype in by_parameter.get(weight.key, [])
    ]


def _fresh(weight: torch.Tensor, dtype: torch.dtype, *, is_master: bool) -> torch.Tensor:
    return weight.to(dtype) if is_master else torch.zeros_like(weight, dtype=dtype)


# Saving and loading the Adam state of one rank.


@dataclass(frozen=True, eq=False)
class StateRange:
    """A contiguous range of a parameter's memory whose Adam state belongs to this rank.

    index: the parameter's number, counted across the groups as in torch's optimizers. range: the range of the
    parameter. Its span is the position in the flat tensors of `adam` and starts at a multiple of 64; padding up to the
    next multiple belongs to no parameter.
    """

    index: int
    range: ParamRange
    adam: FlatAdam


@dataclass(frozen=True)
class AdamShard:
    """One rank's part of an optimizer's state, used for a single save or load.

    ranges: all ranges of this rank, in any order. Each element of a parameter with state belongs to a range of one
    rank, or to the same range on several ranks. param_groups: the optimizer's groups. process_group: all ranks that own
    ranges of the parameters, or replicas of these ranges; None only without torch.distributed. without_state: numbers
    of parameters that are not updated and have no ranges, the same on all ranks.
    """

    ranges: Sequence[StateRange]
    param_groups: Sequence[dict[str, Any]]
    adam_w_mode: bool
    process_group: dist.ProcessGroup | None
    without_state: frozenset[int] = frozenset()

    @property
    def params(self) -> list[nn.Parameter]:
        """All parameters in the order of their numbers."""
        return [param for group in self.param_groups for param in group["params"]]


def adam_state_dict(shard: AdamShard) -> dict[str, Any]:
    """Returns a state dict that torch.distributed.checkpoint can save, and load on any number of ranks.

    The format equals torch.optim's with masters added: {"state": {index: {"step", "exp_avg", "exp_avg_sq",
    "fp32_param"}}, "param_groups": [...]}, with the same keys on all ranks. Values have the parameters' shapes, in fp32
    (fp64 if states are computed in it). Each rank provides some boxes of each value, which are read only when they are
    saved. Not collective, and copies no state. NOTE: waits for the device if hyper-parameters are tensors, because they
    are converted to numbers.
    """
    by_index: dict[int, list[StateRange]] = defaultdict(list)
    for part in shard.ranges:
        by_index[part.index].append(part)
    return {
        "state": {
            index: _spread_state(param, by_index[index])
            for index, param in enumerate(shard.params)
            if index not in shard.without_state
        },
        "param_groups": _groups_to_save_sync(shard.param_groups, adam_w_mode=shard.adam_w_mode),
    }


@torch.no_grad()
def load_adam_state_dict(shard: AdamShard, state_dict: Mapping[str, Any]) -> None:
    """Loads a state dict of adam_state_dict, filled by torch.distributed.checkpoint.load or saved in the same layout.

    Also loads state dicts of torch.optim.Adam and AdamW, with full tensors of any float dtype. Collective.

    Sets the groups' hyper-parameters; a learning rate that is a tensor is updated in place. If the state dict has no
    masters, they are copied from the parameters, which must already be gathered. If it has masters, the caller updates
    the parameters: FlatParamRange.write_model, and a gather as after a step.

    Raises ValueError or RemoteRankError, on every rank and before anything changes, if groups differ, if entries are
    missing, unknown or have the wrong shape, if elements that this rank owns are missing, or if step counts differ
    among parameters of one flat range.
    """
    with all_ranks_agree(shard.process_group):
        groups = _checked_groups_sync(shard.param_groups, state_dict, adam_w_mode=shard.adam_w_mode)
        entries = _checked_entries(shard.param_groups, state_dict, without_state=shard.without_state)
        names = _descriptions(shard.param_groups)
        owned = {part.index for part in shard.ranges}
        loaded = {index: _Loaded(entries[index], names[index]) for index in sorted(owned)}
        for part in shard.ranges:
            loaded[part.index].check_has(part)
        _check_steps_sync(shard.ranges, loaded)
    for part in shard.ranges:
        part.adam.step.copy_(loaded[part.index].step)
        for kind, stored in _by_kind(part.adam).items():
            _write(part, stored, source=loaded[part.index].sources.get(kind))
    _update_groups(shard.param_groups, groups)


@torch.no_grad()
def gather_torch_state_sync(shard: AdamShard) -> dict[str, Any] | None:
    """Gathers a state dict for torch.optim.AdamW (Adam without adam_w_mode) on rank 0; returns None on other ranks.

    Collective. Moments are on the host, [*parameter's shape] in its memory format, fp32 (fp64 if states are computed in
    it); step counts are [], fp32. Only rank 0 allocates whole tensors. Torch's optimizers store no masters, so the
    parameters must be saved as well. Raises ValueError for bias_correction=False, which torch's optimizers do not
    support.
    """
    groups = _groups_to_save_sync(shard.param_groups, adam_w_mode=shard.adam_w_mode)
    for number, group in enumerate(groups):
        if not group.pop(_BIAS_CORRECTION, True):
            raise ValueError(
                f"{_BIAS_CORRECTION} of param group {number} is False: must be True for torch.optim's Adam"
            )
    mine = [
        _Claim(part.index, part.range.start, part.range.span.numel, part.adam.step.item(), part.adam.wide)
        for part in shard.ranges
    ]
    claims = gather_objects(mine, shard.process_group)
    # Replicas announce the same range, and the first replica sends it.
    senders: dict[int, dict[int, tuple[int, _Claim]]] = {}
    for rank, of_rank in enumerate(claims):
        for claim in of_rank:
            senders.setdefault(claim.index, {}).setdefault(claim.start, (rank, claim))
    transfer = _Transfer({(part.index, part.range.start): part for part in shard.ranges}, shard.process_group)
    state = {}
    for index, param in enumerate(shard.params):
        if index in shard.without_state:
            continue
        of_param = sorted(senders.get(index, {}).values(), key=lambda pair: pair[1].start)
        moments = {kind: transfer.whole(param, kind, senders=of_param) for kind in (EXP_AVG, EXP_AVG_SQ)}
        step = of_param[0][1].step if of_param else 0.0
        state[index] = {STEP: torch.tensor(step, dtype=torch.float32), **moments}
    return {"state": state, "param_groups": groups} if transfer.rank == 0 else None


# Saving.


def range_values(part: StateRange, stored: StoredFloats) -> torch.Tensor:
    """Reads one stored tensor of a range in the order of memory: [numel], fp32 or fp64, possibly a view."""
    return _read(stored, part.range.span.start, shape=(part.range.span.numel,), stride=(1,))


def _by_kind(adam: FlatAdam) -> dict[str, StoredFloats]:
    return {MASTERS: adam.main, **adam.moments}


def _spread_state(param: nn.Parameter, parts: Sequence[StateRange]) -> dict[str, torch.Tensor]:
    """Returns the sharded state of one parameter: the step count, [], fp32, and tensors of [*parameter's shape]."""
    dtype = parts[0].adam.wide if parts else torch.promote_types(param.dtype, torch.float32)
    if param.numel() == 0:
        # No rank owns a range of an empty parameter, but a checkpoint must contain its key.
        nothing = {kind: torch.zeros(param.shape, dtype=dtype) for kind in (EXP_AVG, EXP_AVG_SQ, MASTERS)}
        return {STEP: torch.zeros((), dtype=torch.float32), **nothing}
    state: dict[str, torch.Tensor] = {}
    state[STEP] = SpreadTensor((), [HeldBox(whole(()), partial(_step_of, p)) for p in parts[:1]], dtype=torch.float32)
    for kind in (EXP_AVG, EXP_AVG_SQ, MASTERS):
        held = [one for part in parts for one in _held_boxes(part, _by_kind(part.adam)[kind])]
        state[kind] = SpreadTensor(param.shape, held, dtype=dtype)
    return state


def _step_of(part: StateRange) -> torch.Tensor:
    return part.adam.step


def _held_boxes(part: StateRange, stored: StoredFloats) -> Iterator[HeldBox]:
    held = part.range
    piece = memory_piece("", held.param)
    end = held.start + held.span.numel
    for first in range(held.start, end, _SAVED_ELEMENTS):
        for box in boxes_of_range(piece, start=first, end=min(first + _SAVED_ELEMENTS, end)):
            # A box of a range is one contiguous piece of the parameter's memory.
            place = sum(o * s for o, s in zip(box.offset, piece.stride, strict=True)) - held.start + held.span.start
            yield HeldBox(box, partial(_read, stored, place, shape=box.shape, stride=piece.stride))


def _read(stored: StoredFloats, place: int, *, shape: tuple[int, ...], stride: tuple[int, ...]) -> torch.Tensor:
    """Reads stored numbers from `place` on and views them as a box: [*shape], fp32 or fp64."""
    first = place // BLOCK * BLOCK
    flat = stored.read(first, round_up(place + math.prod(shape), BLOCK))[place - first :]
    return flat.as_strided(shape, stride)


# Loading.


class _Source:
    """A loaded tensor that is read box by box. value: [*parameter's shape], any float dtype, or some boxes of it."""

    def __init__(self, value: torch.Tensor) -> None:
        self._value = value
        self._boxes = value.boxes if isinstance(value, SpreadTensor) else [whole(tuple(value.shape))]
        self._places = BoxIndex(self._boxes)

    def num_missing(self, box: Box) -> int:
        """Returns the number of elements of a box that the tensor does not contain."""
        return box.volume - sum(common.volume for _, common in self._common(box))

    def fill(self, target: torch.Tensor, box: Box) -> None:
        """Copies a box, which the tensor must fully contain, to `target`: [*box shape], any float dtype."""
        for held, common in self._common(box):
            values = self._value.read(held) if isinstance(self._value, SpreadTensor) else self._value
            target[common.relative_to(box)].copy_(values[common.relative_to(held)])

    def _common(self, box: Box) -> Iterator[tuple[Box, Box]]:
        for position in self._places.overlapping(box):
            common = intersection(self._boxes[position], box)
            assert common is not None, "overlapping boxes must share elements"
            yield self._boxes[position], common


class _Loaded:
    """The loaded state of one parameter. sources: its values by kind.

    `sources` lacks MASTERS if the state dict has no masters. They are then copied from the parameters.
    """

    def __init__(self, entry: _Entry, name: str) -> None:
        self.sources = {kind: _Source(value) for kind, value in entry.items()}
        self._name = name

    @property
    def step(self) -> torch.Tensor:
        """The step count: [], fp32, on the host."""
        count = torch.zeros((), dtype=torch.float32)
        self.sources[STEP].fill(count, whole(()))
        return count

    def check_has(self, part: StateRange) -> None:
        """Raises ValueError unless the loaded values cover a range."""
        held = part.range
        boxes = boxes_of_range(memory_piece("", held.param), start=held.start, end=held.start + held.span.numel)
        for kind, source in self.sources.items():
            missing = sum(source.num_missing(box) for box in ([whole(())] if kind == STEP else boxes))
            if missing:
                raise ValueError(
                    f"{kind} of {self._name} lacks {missing} elements that this rank owns: it was saved by one rank "
                    "of a different layout. Use torch.distributed.checkpoint.save and load to change the layout"
                )


def _check_steps_sync(ranges: Sequence[StateRange], loaded: Mapping[int, _Loaded]) -> None:
    seen: dict[int, tuple[float, int]] = {}
    for part in ranges:
        step = loaded[part.index].step.item()
        other, index = seen.setdefault(id(part.adam), (step, part.index))
        if other != step:
            raise ValueError(
                f"step of parameter {part.index} is {step:g} and step of parameter {index} is {other:g}: must be "
                "equal for parameters that are updated together. Call init_params separately for the parameters of "
                "each step count, before state_dict and load_state_dict"
            )


def _write(part: StateRange, stored: StoredFloats, *, source: _Source | None) -> None:
    """Writes one kind of state of a range from a source; None copies the parameter itself."""
    held = part.range
    offset, numel = held.span.start, held.span.numel
    assert offset % BLOCK == 0, f"span.start is {offset}: ranges must start at a multiple of {BLOCK}"
    piece, like = memory_piece("", held.param), stored.read(0, 0)
    for first in range(0, numel, _LOADED_ELEMENTS):
        count, start = min(_LOADED_ELEMENTS, numel - first), held.start + first
        padded = like.new_zeros(round_up(count, BLOCK))
        values = padded[:count]
        if source is None:
            memory = held.param.detach().as_strided((held.param.numel(),), (1,))
            values.copy_(memory[start : start + count])
        else:
            for one in range_tensors([piece], values, start=start):
                source.fill(one.data, one.box)
        stored.write(offset + first, padded)


# Checks of parameter groups and entries in the format of torch.optim, by keys, shapes and dtypes.


def _descriptions(groups: _Groups) -> list[str]:
    """Describes each parameter by number, name if available, and shape, for messages."""
    named = [
        (name, param)
        for group in groups
        for name, param in zip(group.get("param_names", [""] * len(group["params"])), group["params"])
    ]
    return [
        " ".join(filter(None, ["parameter", str(index), name, str(list(param.shape))]))
        for index, (name, param) in enumerate(named)
    ]


def _groups_to_save_sync(groups: _Groups, *, adam_w_mode: bool) -> list[dict[str, Any]]:
    """Returns the groups in torch.optim.Adam's format: numbers replace parameters, plain values replace tensors."""
    saved, first = [], 0
    for group in groups:
        numbers_of = list(range(first, first + len(group["params"])))
        first += len(numbers_of)
        own = {key: _plain_sync(value) for key, value in group.items() if key != "params"}
        saved.append({**_TORCH_SETTINGS, _DECOUPLED: adam_w_mode, **own, "params": numbers_of})
    return saved


def _checked_groups_sync(groups: _Groups, state_dict: Any, *, adam_w_mode: bool) -> list[dict[str, Any]]:
    """Returns the loaded hyper-parameters of each group; raises ValueError if groups do not match this optimizer."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        has = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"state_dict is {has}: must contain 'state' and 'param_groups', on every rank")
    saved, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(saved, (list, tuple)):
        raise ValueError(f"param_groups of the state dict is a {type(saved).__name__}: must be a list of dicts")
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise ValueError("state of the state dict must be a dict with one dict per parameter")
    for number, group in enumerate(saved):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"param group {number} of the state dict is {group}: must be a dict with 'params'")
    sizes, saved_sizes = ([len(group["params"]) for group in some] for some in (groups, saved))
    if sizes != saved_sizes:
        raise ValueError(
            f"param_groups of the state dict have {saved_sizes} parameters: must be {sizes}, as in this optimizer"
        )
    return [_checked_group_sync(number, new, adam_w_mode=adam_w_mode) for number, new in enumerate(saved)]


def _checked_entries(
    groups: _Groups, state_dict: Mapping[str, Any], *, without_state: Collection[int] = ()
) -> dict[int, _Entry]:
    """Returns the loaded state of each parameter by its number in this optimizer; raises ValueError if it is invalid.

    Masters must be present in all entries or in none. without_state: numbers of parameters that may lack an entry. If
    there are no entries at all, as in a torch optimizer that has never stepped, returns zeros.
    """
    params = [param for group in groups for param in group["params"]]
    saved_numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = state_dict["state"]
    known = set(saved_numbers)
    unknown = [key for key in state if key not in known]
    if unknown:
        raise ValueError(
            f"state contains key {unknown[0]!r}: must be one of the {len(params)} parameters of its param_groups"
        )
    kinds = {STEP, EXP_AVG, EXP_AVG_SQ}
    if any(MASTERS in entry for entry in state.values()):
        kinds.add(MASTERS)
    entries = {}
    for index, (param, number, name) in enumerate(zip(params, saved_numbers, _descriptions(groups), strict=True)):
        if index in without_state and number not in state:
            continue
        if not state:
            entries[index] = _initial_entry(param)
        elif number not in state:
            raise ValueError(
                f"state lacks {name}: must contain its {sorted(kinds)}; for a parameter that never had a gradient "
                "in torch's optimizer, add zeros and the step count of the other parameters"
            )
        else:
            entries[index] = _checked_entry(state[number], kinds, param=param, name=name)
    return entries


def _update_groups(groups: Sequence[dict[str, Any]], new_values: Sequence[Mapping[str, Any]]) -> None:
    """Sets each group's hyper-parameters; tensors are updated in place, because CUDA graphs read them."""
    for group, new in zip(groups, new_values, strict=True):
        for key, value in new.items():
            if isinstance(group.get(key), torch.Tensor):
                group[key].fill_(value)
            else:
                group[key] = value


def _checked_group_sync(number: int, new: Mapping[str, Any], *, adam_w_mode: bool) -> dict[str, Any]:
    plain = {key: _plain_sync(value) for key, value in new.items()}
    where = f"param group {number} of the state dict"
    for key in _REQUIRED:
        values = plain.get(key) if key == "betas" else [plain.get(key)]
        if not isinstance(values, (tuple, list)) or not all(isinstance(value, numbers.Real) for value in values):
            kind = "two numbers" if key == "betas" else "a number"
            raise ValueError(f"{where} has {key} {plain.get(key)!r}: must be {kind}")
    for key in ("amsgrad", "maximize"):
        if plain.get(key):
            raise ValueError(f"{where} has {key} {plain[key]}: must be False")
    decoupled = plain.get(_DECOUPLED, adam_w_mode)
    if decoupled != adam_w_mode and plain["weight_decay"] != 0:
        raise ValueError(
            f"{where} has {_DECOUPLED} {decoupled} with weight_decay {plain['weight_decay']}: must be {adam_w_mode}, "
            "like adam_w_mode of this optimizer"
        )
    left_out = {*_TORCH_SETTINGS, _DECOUPLED, "params", "param_names"}
    return {key: value for key, value in plain.items() if key not in left_out}


def _initial_entry(param: nn.Parameter) -> _Entry:
    # A single zero, expanded to the shape.
    zeros = torch.zeros((), dtype=param.dtype).expand(param.shape)
    return {STEP: torch.zeros((), dtype=torch.float32), EXP_AVG: zeros, EXP_AVG_SQ: zeros}


def _checked_entry(entry: Mapping[str, Any], kinds: set[str], *, param: nn.Parameter, name: str) -> _Entry:
    if entry.keys() != kinds:
        raise ValueError(f"state of {name} has {sorted(entry)}: must have {sorted(kinds)}")
    # Old versions of torch's optimizers store step counts as plain numbers.
    step = entry[STEP]
    values = {**entry, STEP: torch.tensor(float(step), dtype=torch.float32) if isinstance(step, numbers.Real) else step}
    for kind, value in values.items():
        # Boxes cannot be copied from other subclasses of tensor, such as DTensor.
        if type(value) not in (torch.Tensor, nn.Parameter, SpreadTensor):
            raise ValueError(
                f"{kind} of {name} is a {type(value).__name__}: must be a torch.Tensor, or a value of this optimizer's "
                "state_dict"
            )
        shape = [] if kind == STEP else list(param.shape)
        if list(value.shape) != shape or not value.dtype.is_floating_point:
            raise ValueError(
                f"{kind} of {name} has shape {list(value.shape)} and dtype {value.dtype}: must be "
                f"{shape}, floating point"
            )
    return values


def _plain_sync(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# Full tensors on one rank, for torch.optim's format.


@dataclass(frozen=True)
class _Claim:
    """Metadata of an owned range, sent to the other ranks."""

    index: int
    start: int
    numel: int
    step: float
    dtype: torch.dtype


class _Transfer:
    """Sends ranges to rank 0 of a group, one after another in the same order on all ranks."""

    def __init__(self, mine: dict[tuple[int, int], StateRange], group: dist.ProcessGroup | None) -> None:
        self._mine, self._group = mine, group
        self._device = message_device([group])
        self.rank = 0 if group is None else dist.get_rank(group)

    def whole(self, param: nn.Parameter, kind: str, *, senders: Sequence[tuple[int, _Claim]]) -> torch.Tensor | None:
        """Gathers one moment of a parameter on rank 0; returns None on other ranks.

        The result is [*parameter's shape], fp32 or fp64, on the host.
        """
        for rank, claim in senders:
            if rank == self.rank != 0:
                dist.send(self._values(claim, kind).to(self._device), group=self._group, group_dst=0)
        if self.rank != 0:
            return None
        dtype = senders[0][1].dtype if senders else torch.promote_types(param.dtype, torch.float32)
        full = torch.empty_strided(param.shape, param.stride(), dtype=dtype)
        flat = full.as_strided((param.numel(),), (1,))
        for rank, claim in senders:
            flat[claim.start : claim.start + claim.numel].copy_(
                self._values(claim, kind) if rank == 0 else self._received(rank, claim)
            )
        return full

    def _values(self, claim: _Claim, kind: str) -> torch.Tensor:
        part = self._mine[claim.index, claim.start]
        return range_values(part, part.adam.moments[kind])

    def _received(self, rank: int, claim: _Claim) -> torch.Tensor:
        values = torch.empty(claim.numel, dtype=claim.dtype, device=self._device)
        dist.recv(values, group=self._group, group_src=rank)
        return values
