"""Defines TrainState, the counters that a training run advances and a checkpoint stores.

run_state.py handles weights and optimizer state, and rng_state.py random-number state.
"""

import dataclasses
from typing import Any

from megatron.core.datasets.data_order import DataOrder, data_order_from_json, data_order_to_json
from megatron.core.datasets.padding import NO_PADDING, PaddingCount
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Progress of a run. Every field is equal on all ranks.

    iteration: completed training steps. consumed_train_samples, consumed_valid_samples: data position over all ranks.
    skipped_iterations: steps without an update (loss-scale overflow), since step 0. nan_iterations: steps with a
    non-finite loss. evaluated_iteration: step after which the validation split was last evaluated. learned_sizes: sizes
    to which the run has grown expert buffers and pages. num_floating_point_operations_so_far: counted by scripts with a
    custom training loop. recent_losses: losses with which loss spikes are detected. consumed_padding: padding of the
    samples that training steps have read; 0 for steps before a checkpoint without it. data_order: the order of the
    data; None before the datasets are built, and in checkpoints without it.
    """

    iteration: int = 0
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    skipped_iterations: int = 0
    nan_iterations: int = 0
    evaluated_iteration: int = 0
    num_floating_point_operations_so_far: float = 0.0
    recent_losses: list[float] = dataclasses.field(default_factory=list)
    learned_sizes: LearnedSizes = LearnedSizes()
    consumed_padding: PaddingCount = NO_PADDING
    data_order: DataOrder | None = None

    def state_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON values."""
        return {
            **vars(self),
            "learned_sizes": self.learned_sizes.to_json(),
            "consumed_padding": dataclasses.asdict(self.consumed_padding),
            "data_order": data_order_to_json(self.data_order),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the result of state_dict. Fields that are absent from `state` keep their values.

        Raises ValueError, and changes nothing, for a value that state_dict cannot produce.
        """
        restored: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            if field.name in state:
                value = state[field.name]
                if field.name == "learned_sizes":
                    restored[field.name] = LearnedSizes.from_json(value)
                elif field.name == "data_order":
                    restored[field.name] = data_order_from_json(value)
                elif field.name == "consumed_padding":
                    restored[field.name] = _padding(field.name, value)
                elif field.name == "recent_losses":
                    restored[field.name] = _list_of_numbers(field.name, value)
                elif field.name == "num_floating_point_operations_so_far":
                    restored[field.name] = float(_list_of_numbers(field.name, [value])[0])
                else:
                    restored[field.name] = _count(field.name, value)
        vars(self).update(restored)


def is_count(value: Any) -> bool:
    """Returns whether a value is an integer in the range of a counter: non-negative, at most 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _count(name: str, value: Any) -> int:
    if not is_count(value):
        raise ValueError(f"train_state.{name} is {value!r:.80}: must be an integer, 0 or more")
    found: int = value
    return found


def _padding(name: str, value: Any) -> PaddingCount:
    if not isinstance(value, dict) or value.keys() != {"tokens", "squares"} or not all(map(is_count, value.values())):
        raise ValueError(f"train_state.{name} is {value!r:.80}: must contain the numbers tokens and squares, 0 or more")
    return PaddingCount(**value)


def _list_of_numbers(name: str, value: Any) -> list[float]:
    if not isinstance(value, list) or not all(isinstance(one, (int, float)) for one in value):
        raise ValueError(f"train_state.{name} is {value!r:.80}: must be a list of numbers")
    return value
