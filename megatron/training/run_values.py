"""The JSON part of a run's checkpoint: TrainState, and checks of values that were read.

The package checkpointing writes and loads checkpoints. Weights, optimizer and generators are stored as tensors.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import load_common
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes
from megatron.training.command_line.flags import Flag, flag_table


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Counters of a run that a checkpoint stores; every field is the same on all ranks.

    iteration: completed training steps. consumed_train_samples, consumed_valid_samples: data position, over all ranks.
    skipped_iterations: steps without an update since the start (fp16 overflow). nan_iterations: steps with a loss that
    was not finite. evaluated_iteration: step after which the validation split was last evaluated. learned_sizes: sizes
    to which the run has grown buffers and pages of its experts. recent_losses: reference for loss spikes.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    evaluated_iteration: int = 0
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    learned_sizes: LearnedSizes = LearnedSizes()

    def state_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON values."""
        return {**vars(self), "learned_sizes": self.learned_sizes.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets the fields from the result of state_dict; a field that is not in `state` keeps its value.

        Raises ValueError, with nothing changed, for a value that state_dict cannot return.
        """
        taken: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.name in state:
                value = state[field.name]
                if field.name == "learned_sizes":
                    taken[field.name] = LearnedSizes.from_json(value)
                elif field.name == "recent_losses":
                    taken[field.name] = _list_of_numbers(field.name, value)
                else:
                    taken[field.name] = _count(field.name, value)
        vars(self).update(taken)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"train_state.{name} is {value!r:.80}: must be an integer, 0 or more")
    return value


def _list_of_numbers(name: str, value: Any) -> list[float]:
    if not isinstance(value, list) or not all(isinstance(one, (int, float)) for one in value):
        raise ValueError(f"train_state.{name} is {value!r:.80}: must be a list of numbers")
    return value


_KINDS: dict[str, type] = {"iteration": int, "args": dict, "train_state": dict, "contents": dict, "frozen": list}
# Derived arguments that models are built from.
_DERIVED = ("padded_vocab_size", "unpadded_vocab_size")
_NUMBERS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float)}


def load_run_values(folder: Path) -> dict[str, Any]:
    """Reads the JSON part of a run's checkpoint. Raises ValueError if another program wrote the checkpoint."""
    values = load_common(folder)
    if not values.keys() >= _KINDS.keys():
        raise ValueError(f"{folder} is a checkpoint, but not one of a training run")
    try:
        _check(values)
    except ValueError as error:
        raise ValueError(f"{folder} holds what no training run writes: {error}") from error
    return values


def _check(values: Mapping[str, Any]) -> None:
    for name, kind in _KINDS.items():
        _require(isinstance(values[name], kind), name, value=values[name], right=kind.__name__)
    for name in ("optimizer", "rng"):
        held = values["contents"].get(name)
        _require(isinstance(held, bool), f"contents.{name}", value=held, right="bool")
    for key in values["frozen"]:
        _require(isinstance(key, str), "frozen", value=key, right="names of parameters")
    if values["contents"]["optimizer"]:
        _check_optimizer(values.get("optimizer"), values.get("scheduler"))
    TrainState().load_state_dict(values["train_state"])
    check_arguments(values["args"])


def _check_optimizer(optimizer: Any, scheduler: Any) -> None:
    _require(isinstance(optimizer, dict), "optimizer", value=optimizer, right="dict")
    _require(is_count(optimizer.get("step")), "optimizer.step", value=optimizer.get("step"), right="int, 0 or more")
    scaler = optimizer.get("grad_scaler")
    is_right = scaler is None or _is_scaler(scaler)
    _require(is_right, "optimizer.grad_scaler", value=scaler, right="finite numbers by name, the scale above 0")
    is_right = scheduler is None or (isinstance(scheduler, dict) and is_count(scheduler.get("num_steps")))
    _require(is_right, "scheduler", value=scheduler, right="dict with a num_steps of 0 or more")


def _is_scaler(scaler: Any) -> bool:
    """Whether these are finite numbers with a positive scale. Trackers may be negative, as hysteresis counts down."""
    return isinstance(scaler, dict) and all(map(_is_number, scaler.values())) and scaler.get("scale", 1) > 0


def check_arguments(args: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument whose type its flag cannot produce. Ignores arguments without a flag."""
    for name, value in args.items():
        flag = flag_table().by_dest.get(name)
        if name in _DERIVED:
            is_right = value is None or (is_count(value) and value > 0)
            _require(is_right, f"args.{name}", value=value, right="int, above 0")
        elif flag is not None:
            _require(_may_be(flag, value), f"args.{name}", value=value, right=_what_may_be(flag))


def _may_be(flag: Flag, value: Any) -> bool:
    """Whether a flag can produce a value of this type. Bounds are checked by the code that uses the value."""
    if value is None:
        return True
    if flag.constant is not None:
        return isinstance(value, bool)
    # Values of other types have their own parsers, and are checked by the configuration that receives them.
    if flag.type_name not in (*_NUMBERS, "str"):
        return not isinstance(value, (dict, bool))
    items = value if flag.takes_list and isinstance(value, list) else [value]
    return all(_is_of(flag.type_name, item) for item in items)


def _what_may_be(flag: Flag) -> str:
    """Describes the values that _may_be allows, in addition to None."""
    if flag.constant is not None:
        return "bool"
    if flag.type_name not in (*_NUMBERS, "str"):
        return "neither dict nor bool"
    return f"{flag.type_name}, or a list of them" if flag.takes_list else flag.type_name


def _is_of(type_name: str, value: Any) -> bool:
    if type_name == "str":
        return isinstance(value, str)
    return isinstance(value, _NUMBERS[type_name]) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    """Whether a value is an integer from 0 to the largest int64."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(holds: bool, name: str, *, value: Any, right: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r:.80}: must be {right}")
