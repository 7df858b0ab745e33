"""What a run remembers of steps that went wrong in their numbers, and when it may leave one out; recovery.py acts."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron.training.fault_config import FaultConfig

# Steps that are left out one after the other say that the model is broken, not the data.
_MOST_SKIPPED_IN_A_ROW = 10
# So many losses make a median, and a median that a spike may be told by.
WINDOW, _FEWEST = 100, 20


class LossSpikeError(RuntimeError):
    """A loss is far above those before it, and the run may not go back once more; raised on every rank."""


@dataclass
class Recovery:
    """What a run remembers of its bad steps; the same on all ranks.

    left_out: data positions, in samples, whose batches are left out when they come. num_skipped_in_a_row: bad steps
    since the last good one.
    """

    config: FaultConfig = field(default_factory=FaultConfig)
    num_rewinds: int = 0
    num_skipped_in_a_row: int = 0
    left_out: set[int] = field(default_factory=set)

    def may_skip(self) -> bool:
        """Whether the last of the bad steps in a row, which is counted already, may be left out."""
        return self.config.non_finite_policy == "skip" and self.num_skipped_in_a_row <= _MOST_SKIPPED_IN_A_ROW

    def may_go_back(self) -> bool:
        """Whether the run may go back once more."""
        return self.num_rewinds < self.config.max_rewinds


def is_spike(loss: float, recent: Sequence[float], *, factor: float) -> bool:
    """Whether a loss is more than `factor` times the median of the recent ones, of which there must be enough."""
    return len(recent) >= _FEWEST and loss > factor * statistics.median(recent)
