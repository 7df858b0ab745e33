"""What a state dict of Adam must have to be loaded, and its parameter groups, under the names of torch.optim.

Values are looked at from outside alone; which elements a rank needs of them is adam_state_dict.py's.
"""

import numbers
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.core.dist_checkpointing.spread_tensor import SpreadTensor
from megatron.core.optimizer.state_keys import MASTERS

STEP, EXP_AVG, EXP_AVG_SQ = "step", "exp_avg", "exp_avg_sq"
BIAS_CORRECTION = "bias_correction"
# The values by kind: [] of the step, else [*parameter's shape], any float dtype.
Entry = dict[str, torch.Tensor]
Groups = Sequence[Mapping[str, Any]]

_REQUIRED = ("lr", "betas", "eps", "weight_decay")
_DECOUPLED = "decoupled_weight_decay"
# Settings of torch's optimizers alone, and what leaves it to them how they calculate.
_TORCH_SETTINGS = {
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


def descriptions(groups: Groups) -> list[str]:
    """Number, name if there is one, and shape of each parameter, for messages."""
    named = [
        (name, param)
        for group in groups
        for name, param in zip(group.get("param_names", [""] * len(group["params"])), group["params"])
    ]
    return [
        " ".join(filter(None, ["parameter", str(index), name, str(list(param.shape))]))
        for index, (name, param) in enumerate(named)
    ]


def groups_to_save_sync(groups: Groups, *, adam_w_mode: bool) -> list[dict[str, Any]]:
    """The groups with numbers for parameters and for tensors, and with all that torch.optim.Adam looks for."""
    saved, first = [], 0
    for group in groups:
        numbers_of = list(range(first, first + len(group["params"])))
        first += len(numbers_of)
        own = {key: _plain_sync(value) for key, value in group.items() if key != "params"}
        saved.append({**_TORCH_SETTINGS, _DECOUPLED: adam_w_mode, **own, "params": numbers_of})
    return saved


def checked_groups_sync(groups: Groups, state_dict: Any, *, adam_w_mode: bool) -> list[dict[str, Any]]:
    """The hyper-parameters that each group is to take; raises ValueError for other groups than these."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        has = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ValueError(f"state_dict is {has}: must have 'state' and 'param_groups', on every rank")
    saved, state = state_dict["param_groups"], state_dict["state"]
    if not isinstance(saved, (list, tuple)):
        raise ValueError(f"param_groups of the state dict is a {type(saved).__name__}: must be a list of dicts")
    if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
        raise ValueError("state of the state dict must be a dict with a dict for each parameter")
    for number, group in enumerate(saved):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(f"param group {number} of the state dict is {group}: must be a dict with 'params'")
    sizes, saved_sizes = ([len(group["params"]) for group in some] for some in (groups, saved))
    if sizes != saved_sizes:
        raise ValueError(f"param_groups of the state dict have {saved_sizes} parameters: must be {sizes}, as here")
    return [_checked_group_sync(number, new, adam_w_mode=adam_w_mode) for number, new in enumerate(saved)]


def checked_entries(
    groups: Groups, state_dict: Mapping[str, Any], *, without_state: Collection[int] = ()
) -> dict[int, Entry]:
    """The entry of each parameter by its number here, masters in all or in none; raises ValueError for others.

    without_state: numbers of those that may have none. An optimizer of torch that has never stepped has no entries:
    they are zeros, as it would begin with.
    """
    params = [param for group in groups for param in group["params"]]
    saved_numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    state = state_dict["state"]
    known = set(saved_numbers)
    unknown = [key for key in state if key not in known]
    if unknown:
        raise ValueError(f"state has {unknown[0]!r}: must be one of the {len(params)} parameters of its param_groups")
    kinds = {STEP, EXP_AVG, EXP_AVG_SQ}
    if any(MASTERS in entry for entry in state.values()):
        kinds.add(MASTERS)
    entries = {}
    for index, (param, number, name) in enumerate(zip(params, saved_numbers, descriptions(groups), strict=True)):
        if index in without_state and number not in state:
            continue
        if not state:
            entries[index] = _entry_of_a_start(param)
        elif number not in state:
            raise ValueError(
                f"state lacks {name}: must have {sorted(kinds)} of it; if torch's optimizer never had a gradient of "
                "it, the step of the others and zeros"
            )
        else:
            entries[index] = _checked_entry(state[number], kinds, param=param, name=name)
    return entries


def take_groups(groups: Sequence[dict[str, Any]], new_values: Sequence[Mapping[str, Any]]) -> None:
    """Gives each group its hyper-parameters; tensors keep their memory, as graphs read it."""
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
            raise ValueError(f"{where} has {key} {plain.get(key)!r}: must be given, in numbers")
    for key in ("amsgrad", "maximize"):
        if plain.get(key):
            raise ValueError(f"{where} has {key} {plain[key]}: must be False")
    decoupled = plain.get(_DECOUPLED, adam_w_mode)
    if decoupled != adam_w_mode and plain["weight_decay"] != 0:
        raise ValueError(
            f"{where} has {_DECOUPLED} {decoupled} with weight_decay {plain['weight_decay']}: must be {adam_w_mode}, "
            "as adam_w_mode here"
        )
    left_out = {*_TORCH_SETTINGS, _DECOUPLED, "params", "param_names"}
    return {key: value for key, value in plain.items() if key not in left_out}


def _entry_of_a_start(param: nn.Parameter) -> Entry:
    # One number, seen as all of them.
    zeros = torch.zeros((), dtype=param.dtype).expand(param.shape)
    return {STEP: torch.zeros((), dtype=torch.float32), EXP_AVG: zeros, EXP_AVG_SQ: zeros}


def _checked_entry(entry: Mapping[str, Any], kinds: set[str], *, param: nn.Parameter, name: str) -> Entry:
    if entry.keys() != kinds:
        raise ValueError(f"state of {name} has {sorted(entry)}: must have {sorted(kinds)}")
    # Torch's optimizers once counted in plain numbers.
    step = entry[STEP]
    values = {**entry, STEP: torch.tensor(float(step), dtype=torch.float32) if isinstance(step, numbers.Real) else step}
    for kind, value in values.items():
        # Of other kinds of tensors, as of DTensor, no box could be copied.
        if type(value) not in (torch.Tensor, nn.Parameter, SpreadTensor):
            raise ValueError(f"{kind} of {name} is a {type(value).__name__}: must be a tensor, whole or as saved here")
        shape = [] if kind == STEP else list(param.shape)
        if list(value.shape) != shape or not value.dtype.is_floating_point:
            raise ValueError(f"{kind} of {name} is {list(value.shape)}, {value.dtype}: must be {shape}, of floats")
    return values


def _plain_sync(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value
