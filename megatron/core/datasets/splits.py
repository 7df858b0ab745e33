"""`--split 949,50,1`: which documents of a corpus are for training, validation and test. Reads no data."""

import math

from megatron.core.datasets.utils import Split

# What Megatron uses when --data-path comes without --split.
DEFAULT_SPLIT = "969,30,1"


def parse_split(split: str) -> list[float]:
    """Three shares that add up to 1. Raises ValueError for anything but one to three numbers >= 0, not all 0."""
    try:
        weights = [float(word) for word in split.split(",")]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= len(Split) or any(not math.isfinite(w) or w < 0 for w in weights) or not sum(weights):
        raise ValueError(
            f"--split is {split!r}: must be up to three numbers for train,valid,test, not all 0, such as 949,50,1"
        )
    weights += [0.0] * (len(Split) - len(weights))
    return [weight / sum(weights) for weight in weights]


def split_documents(split: str, num_documents: int) -> list[range | None]:
    """The documents of each part, as consecutive ranges rounded to whole documents; None for a part of weight 0."""
    ranges: list[range | None] = []
    begin = 0.0
    for share in parse_split(split):
        end = begin + share
        ranges.append(range(round(begin * num_documents), round(end * num_documents)) if share > 0 else None)
        begin = end
    return ranges
