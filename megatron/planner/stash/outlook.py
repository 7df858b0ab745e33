"""Predicts how often each outcome occurs in a run's steps for given factors, and recommends factors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.core.transformer.moe.paged_stash import Counter
from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stages import PlannedRun, StashFlags
from megatron.planner.stash.walk import StepLevel, Walk, factors_needed, walk

# Resolution of the search for factors.
_STEP = 0.01


@dataclass(frozen=True)
class Needs:
    """Factors that each step requires, relative to balanced routing, on the most loaded rank: [S], fp64.

    rows: capacity factor of the buffers. pages: size factor of a stage's pools, 0 for steps without a stash.
    """

    rows: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True)
class Outlook:
    """Predicted outcomes of a run's steps with given flags, if buffers and pools do not grow.

    shares: share of the steps at each level. device_bytes, host_bytes: sizes of the largest pools. spilled_bytes,
    largest_spill: mean and maximum over steps of the bytes spilled to the host, on the rank that spills most.
    """

    flags: StashFlags
    shares: dict[StepLevel, float]
    device_bytes: int
    host_bytes: int
    spilled_bytes: float
    largest_spill: int
    walk: Walk

    def share_up_to(self, level: StepLevel) -> float:
        """Returns the share of steps whose outcome is at most `level`."""
        return self.walk.share_up_to(level)


def needs_of_steps(run: PlannedRun, spans: Sequence[RoutingSpan]) -> Needs:
    """Returns the factors that each step requires. They do not depend on the flags' own factors."""
    found = walk(run, run.flags, spans=spans, grows=False)
    pages = [stage.pages_wanted.max(axis=1) / max(1, stage.balanced_pages) for stage in found.stages]
    rows = np.concatenate([factors_needed(span, run) for span in spans])
    return Needs(rows, np.max(pages, axis=0))


def outlook(run: PlannedRun, flags: StashFlags, *, spans: Sequence[RoutingSpan]) -> Outlook:
    """Simulates the run's steps with these flags, without growth, and summarizes their outcomes."""
    found = walk(run, flags, spans=spans, grows=False)
    device = host = largest = 0
    mean = 0.0
    for stage in found.stages:
        layouts = [layout for of_step in stage.layouts for layout in of_step]
        device = max([device, *(one.device_pages * one.page_bytes for one in layouts)])
        host = max([host, *(one.host_pages * one.page_bytes for one in layouts)])
        if layouts:
            spilled = stage.counters[Counter.SPILLED_PAGES] * stage.page_bytes
            mean, largest = max(mean, float(spilled.mean(axis=0).max())), max(largest, int(spilled.max()))
    shares = {level: found.share(level) for level in StepLevel}
    return Outlook(flags, shares, device, host, mean, largest, found)


def enough_capacity(needs: Needs, wanted: float) -> float:
    """Returns the capacity factor with which expert overflows use up half of the allowed failures.

    wanted: share of steps that must succeed. Stash overflows may use the other half of the failures.
    """
    return max(1.0, rounded_up(factor_at((1 + wanted) / 2, needs.rows.tolist())))


def recommended(
    run: PlannedRun, needs: Needs, *, spans: Sequence[RoutingSpan], flags: StashFlags, wanted: float
) -> dict[StepLevel, Outlook]:
    """Returns, for each level, the smallest pools with which a share `wanted` of the steps does not exceed the level.

    For HOST, the device has pages for the median step, and the host has pages for the rest. Changes only the factors in
    `flags`. Leaves out levels that no factor achieves because buffers overflow.
    """
    found: dict[StepLevel, Outlook | None] = {}
    # A factor above the need of every step helps only because forwards reserve pages.
    top = 1.05 * float(needs.pages.max()) + _STEP
    alone = replace(flags, moe_paged_stash_buffer_size_factor_cpu=0.0, moe_paged_stash_buffer_bytes=None)
    usual = max(_STEP, rounded_up(factor_at(0.5, needs.pages.tolist())))

    def on_device(factor: float) -> Outlook:
        return outlook(run, replace(alone, moe_paged_stash_buffer_size_factor_cuda=factor), spans=spans)

    def on_both(factor: float) -> Outlook:
        flags = replace(alone, moe_paged_stash_buffer_size_factor_cuda=usual)
        return outlook(run, replace(flags, moe_paged_stash_buffer_size_factor_cpu=factor), spans=spans)

    for level in (StepLevel.DEVICE, StepLevel.GATE_UP) if flags.stash_recomputes else (StepLevel.DEVICE,):
        found[level] = _smallest(on_device, level, wanted=wanted, top=top)
    found[StepLevel.HOST] = _smallest(on_both, StepLevel.HOST, wanted=wanted, top=top)
    return {level: best for level, best in sorted(found.items()) if best is not None}


def _smallest(of: Callable[[float], Outlook], level: StepLevel, *, wanted: float, top: float) -> Outlook | None:
    """Searches for the smallest sufficient factor, in steps of 0.01. Returns None if 4 x `top` is not sufficient.

    of: simulates a factor. A factor suffices if a share `wanted` of the steps does not exceed `level`.
    """
    low, high, best = 0, max(1, round(top / _STEP)), None
    while best is None:
        tried = of(round(high * _STEP, 2))
        if tried.share_up_to(level) >= wanted:
            best = tried
        elif high > 2 * top / _STEP:
            return None
        else:
            low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        tried = of(round(middle * _STEP, 2))
        if tried.share_up_to(level) >= wanted:
            high, best = middle, tried
        else:
            low = middle
    return best
