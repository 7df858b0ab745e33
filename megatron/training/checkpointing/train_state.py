"""TrainState: the counters that a training run moves on and a checkpoint carries over.

Weights, optimizer and random-number state are elsewhere; this is what a log line or the data order needs.
"""

import dataclasses
from typing import Any

from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """Where a run is; every field is the same on all ranks.

    iteration: training steps done. consumed_train_samples, consumed_valid_samples: the data position, over all ranks.
    skipped_iterations: steps without an update since the start (fp16 overflow); nan_iterations: those with a loss that
    was not finite. evaluated_iteration: the step after which the validation split was last evaluated. learned_sizes: to
    what the run grew buffers and pages of its experts, and why. recent_losses: those that a spike is told by.
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
        """All of it as JSON values."""
        return {**vars(self), "learned_sizes": self.learned_sizes.to_json()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes over what state_dict gave; a field that is not in `state` keeps its value.

        Raises ValueError, with nothing changed, for a value that state_dict does not give.
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
