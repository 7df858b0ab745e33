"""Which factor a pool needs for a share of recorded steps: order statistics of their peaks, for tools and users."""

from collections.abc import Sequence

from megatron.core.transformer.moe.paged_stash.step_needs import StepNeeds, multiple


def factor_at(quantile: float, peaks: Sequence[float]) -> float:
    """The smallest of the observed peaks that at least this share of them do not exceed; quantile: above 0, at most 1.

    peaks: of each step, what it needed over the balanced case. Of n steps nothing is known beyond 1 - 1/n: the answer
    then is the largest. Raises ValueError for no peaks and for other quantiles.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile is {quantile}: must be above 0 and at most 1")
    if not peaks:
        raise ValueError("peaks is empty: a quantile needs a step at least")
    return sorted(peaks)[multiple(quantile, len(peaks)) - 1]


def peaks_of_trace(needs: StepNeeds, steps: Sequence[Sequence[int]]) -> list[float]:
    """Of each recorded step, pages of its peak over those of the balanced step, as factor_at takes them.

    steps: live rows of each forward of the needs' events, in their order. Raises ValueError for another number.
    """
    groups = list(dict.fromkeys(event.group for event in needs.events))
    peaks = []
    for number, rows in enumerate(steps):
        if len(rows) != len(groups):
            raise ValueError(f"step {number} has {len(rows)} passes: must have {len(groups)}, one a forward")
        peaks.append(needs.pages(dict(zip(groups, rows)).__getitem__) / max(needs.balanced_pages, 1))
    return peaks
