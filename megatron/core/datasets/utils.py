"""The names that scripts import from here, Split and get_blend_from_list, and what they return; nothing else."""

from enum import Enum

# Prefixes of .bin/.idx pairs, and a weight for each or None.
Blend = tuple[list[str], list[float] | None]


class Split(Enum):
    """The three parts of a corpus, in the order of `--split`."""

    train = 0
    valid = 1
    test = 2


def get_blend_from_list(blend: list[str] | None) -> Blend | None:
    """`["0.3", "a", "0.7", "b"]` to (prefixes, weights); `["a", "b"]` to (prefixes, None); None to None.

    Raises ValueError where some datasets have a weight and others do not.
    """
    if blend is None:
        return None
    weights = [_as_number(word) for word in blend[0::2]]
    # One word alone is a prefix even if it looks like a number.
    if len(blend) == 1 or all(weight is None for weight in weights):
        return blend, None
    if len(blend) % 2 or any(weight is None for weight in weights):
        raise ValueError(
            f"data_path is {' '.join(blend)}: must be WEIGHT PREFIX pairs, or prefixes alone "
            "(a prefix that looks like a number: ./1)"
        )
    return [prefix.strip() for prefix in blend[1::2]], [weight for weight in weights if weight is not None]


def _as_number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
