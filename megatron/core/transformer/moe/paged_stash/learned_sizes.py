"""LearnedSizes: what a run's steps taught about sizes, as ranks merge it and a checkpoint carries it.

What follows from it is sizing.py's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class LearnedSizes:
    """What steps taught about sizes, the same on all ranks; a checkpoint carries it.

    capacity_factor: what moe_expert_rank_capacity_factor grew to. device_factor, host_factor: what pools grew to, of
    the balanced need. None: did not grow. rows_share: layer (from 1) -> the most rows that a pass of it had on any
    rank, over the balanced case. expert_ranks: how many ranks shared the experts then; 0: unknown.
    """

    capacity_factor: float | None = None
    device_factor: float | None = None
    host_factor: float | None = None
    rows_share: Mapping[int, float] = field(default_factory=dict)
    expert_ranks: int = 0

    def merged(self, other: "LearnedSizes") -> "LearnedSizes":
        """The larger of each size, as of two ranks or of two moments of one run."""
        layers = sorted({*self.rows_share, *other.rows_share})
        shares = {layer: max(self.rows_share.get(layer, 0.0), other.rows_share.get(layer, 0.0)) for layer in layers}
        return LearnedSizes(
            _larger(self.capacity_factor, other.capacity_factor),
            _larger(self.device_factor, other.device_factor),
            _larger(self.host_factor, other.host_factor),
            shares,
            max(self.expert_ranks, other.expert_ranks),
        )

    def for_expert_ranks(self, expert_ranks: int) -> "LearnedSizes":
        """Returns the sizes that still apply where that many ranks share the experts.

        Ranks that take over others' experts get the mean of their shares, at most the largest. Of experts that are
        spread further nothing is known of the single rank: rows are measured again.
        """
        is_known = 0 < expert_ranks <= self.expert_ranks
        shares = self.rows_share if is_known else {}
        return LearnedSizes(self.capacity_factor, self.device_factor, self.host_factor, shares, expert_ranks)

    def to_json(self) -> dict[str, Any]:
        """Returns the sizes as JSON values."""
        return {**vars(self), "rows_share": {str(layer): share for layer, share in self.rows_share.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> "LearnedSizes":
        """Returns the sizes from to_json's values; None, as in a checkpoint without sizes, gives empty ones.

        Raises ValueError for anything else.
        """
        if values is None:
            return cls()
        if not isinstance(values, Mapping) or not isinstance(values.get("rows_share", {}), Mapping):
            raise ValueError(f"learned_sizes is {values!r:.80}: must hold sizes by name")
        known = {name: values[name] for name in vars(cls()) if name in values}
        shares = {_layer(layer): share for layer, share in values.get("rows_share", {}).items()}
        factors = [known.get(name) for name in ("capacity_factor", "device_factor", "host_factor")]
        for number in (*shares.values(), *factors):
            _check_size(number)
        ranks = known.get("expert_ranks", 0)
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 0:
            raise ValueError(f"learned_sizes.expert_ranks is {ranks!r:.80}: must be an integer, 0 or more")
        return cls(**{**known, "rows_share": shares})


def _larger(one: float | None, other: float | None) -> float | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _check_size(number: Any) -> None:
    """Raises ValueError unless the number is a valid size; None is a factor that did not grow."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if number is not None and not (is_number and 0 <= number < math.inf):
        raise ValueError(f"learned_sizes holds {number!r:.80}: must be a number, 0 or more")


def _layer(text: Any) -> int:
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"learned_sizes.rows_share has the layer {text!r:.80}: must be a number from 1 on")
    return int(text)
