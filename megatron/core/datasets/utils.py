"""Parses --data-path and --split into blends of datasets and parts of a corpus. Reads no data."""

import math
import re
from enum import Enum

# Prefixes of .bin/.idx pairs, and their weights or None.
Blend = tuple[list[str], list[float] | None]

# The default of Megatron for --data-path without --split.
DEFAULT_SPLIT = "969,30,1"


class Split(Enum):
    """The three parts of a corpus, in the order of --split."""

    train = 0
    valid = 1
    test = 2


def compile_helpers() -> None:
    """Does nothing, because NumPy computes the indices here. Megatron Core compiles C++ helpers instead."""


def get_blend_from_list(blend: list[str] | None) -> Blend | None:
    """Parses --data-path: ["0.3", "a", "0.7", "b"] to (prefixes, weights), and ["a", "b"] to (prefixes, None).

    Raises ValueError if only some datasets have a weight.
    """
    if blend is None:
        return None
    weights = [_as_number(word) for word in blend[0::2]]
    # A single word is a prefix even if it is a number.
    if len(blend) == 1 or all(weight is None for weight in weights):
        return [prefix.strip() for prefix in blend], None
    if len(blend) % 2 or any(weight is None for weight in weights):
        raise ValueError(
            f"data_path is {' '.join(blend)}: must be WEIGHT PREFIX pairs, or only prefixes (a prefix that looks "
            "like a number: ./1)"
        )
    return [prefix.strip() for prefix in blend[1::2]], [weight for weight in weights if weight is not None]


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def parse_split(split: str) -> list[float]:
    """Parses --split into three shares that sum to 1. Raises ValueError unless it is 1 to 3 numbers >= 0, not all 0.

    As in Megatron-LM, commas, blanks, slashes or colons separate the numbers, which may be in brackets.
    """
    try:
        # Launch scripts that keep their flags in arrays often include quotes: '99,1,0'.
        weights = [float(word) for word in re.split(r"\s*[,/:]\s*|\s+", split.strip("'\"[]() "))]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= len(Split) or any(not math.isfinite(w) or w < 0 for w in weights) or not sum(weights):
        raise ValueError(
            f"--split is {split!r}: must be up to three numbers for train,valid,test, not all 0, such as 949,50,1"
        )
    weights += [0.0] * (len(Split) - len(weights))
    return [weight / sum(weights) for weight in weights]


def split_documents(split: str, num_documents: int) -> list[range | None]:
    """Splits documents into one range for each part of --split. The range of a part with weight 0 is None."""
    ranges: list[range | None] = []
    begin = 0.0
    for share in parse_split(split):
        end = begin + share
        ranges.append(range(round(begin * num_documents), round(end * num_documents)) if share > 0 else None)
        begin = end
    return ranges
