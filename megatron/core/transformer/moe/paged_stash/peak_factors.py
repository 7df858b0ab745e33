"""Which factor a pool needs for a share of recorded steps: order statistics of their peaks, for tools and users."""

import math
from collections.abc import Sequence

from megatron.core.transformer.moe.paged_stash.step_needs import multiple


def factor_at(quantile: float, peaks: Sequence[float]) -> float:
    """The smallest of the observed peaks that at least this share of them do not exceed; quantile: above 0, at most 1.

    peaks: of each step, what it needed over the balanced case. Of n steps nothing is known beyond 1 - 1/n: the answer
    then is the largest. Raises ValueError for no peaks and for other quantiles.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile is {quantile}: must be above 0 and at most 1")
    if not peaks:
        raise ValueError("peaks is empty: a quantile needs a step at least")
    return sorted(peaks)[max(multiple(quantile, len(peaks)), 1) - 1]


def rounded_up(factor: float, *, decimals: int = 2) -> float:
    """A factor that is enough, for a user to copy; what a quotient is off by, 1e-6 of the last decimal, is ignored."""
    units = 10**decimals
    return math.ceil(factor * units - 1e-6) / units
