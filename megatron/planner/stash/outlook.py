"""How often the steps of a run reach each outcome with given factors, and which factors suffice for most of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron.core.transformer.moe.paged_stash import Counter
from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stages import PlannedRun, StashFlags
from megatron.planner.stash.walk import Rung, Walk, factors_needed, walk

# Factors are looked for in steps of this.
_STEP = 0.01


@dataclass(frozen=True)
class Needs:
    """Each step's needs over the balanced case, on the rank that needs most: [S], fp64. rows: the capacity factor.

    pages: the factor of a stage's pools; 0 for steps where nothing is stashed.
    """

    rows: np.ndarray
    pages: np.ndarray


@dataclass(frozen=True)
class Outlook:
    """The steps of a run with these flags, whose buffers and pools do not grow. shares: of the steps, by rung.

    device_bytes, host_bytes: of the largest pools. spilled_bytes, largest_spill: that go to the host in a step, on the
    rank with most of them: the mean, and the most of a step.
    """

    flags: StashFlags
    shares: dict[Rung, float]
    device_bytes: int
    host_bytes: int
    spilled_bytes: float
    largest_spill: int
    walk: Walk

    def share_up_to(self, rung: Rung) -> float:
        """Returns the share of steps that reach this rung or a lower one."""
        return self.walk.share_up_to(rung)


def needs_of_steps(run: PlannedRun, spans: Sequence[RoutingSpan]) -> Needs:
    """Returns the needs of all steps, which do not depend on the factors."""
    found = walk(run, run.flags, spans=spans, grows=False)
    pages = [stage.pages_wanted.max(axis=1) / max(1, stage.balanced_pages) for stage in found.stages]
    rows = np.concatenate([factors_needed(span, run) for span in spans])
    return Needs(rows, np.max(pages, axis=0))


def outlook(run: PlannedRun, flags: StashFlags, *, spans: Sequence[RoutingSpan]) -> Outlook:
    """Simulates the steps with these flags."""
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
    shares = {rung: found.share(rung) for rung in Rung}
    return Outlook(flags, shares, device, host, mean, largest, found)


def enough_capacity(needs: Needs, wanted: float) -> float:
    """A capacity factor for all steps but half of those that may go wrong: pages may lack in the other half."""
    return max(1.0, rounded_up(factor_at((1 + wanted) / 2, needs.rows.tolist())))


def recommended(
    run: PlannedRun, needs: Needs, *, spans: Sequence[RoutingSpan], flags: StashFlags, wanted: float
) -> dict[Rung, Outlook]:
    """The smallest pools with which that share of the steps comes to no rung above each one, found by the same walks.

    Up to HOST the device has pages for half of the steps, and the host for what the others need. Flags are taken over
    but for the factors. A rung that no factor reaches, as buffers lose rows, is left out.
    """
    found: dict[Rung, Outlook | None] = {}
    # Above what any step needs, a reserve alone may withhold pages.
    top = 1.05 * float(needs.pages.max()) + _STEP
    alone = replace(flags, moe_paged_stash_buffer_size_factor_cpu=0.0, moe_paged_stash_buffer_bytes=None)
    usual = max(_STEP, rounded_up(factor_at(0.5, needs.pages.tolist())))

    def on_device(factor: float) -> Outlook:
        return outlook(run, replace(alone, moe_paged_stash_buffer_size_factor_cuda=factor), spans=spans)

    def on_both(factor: float) -> Outlook:
        flags = replace(alone, moe_paged_stash_buffer_size_factor_cuda=usual)
        return outlook(run, replace(flags, moe_paged_stash_buffer_size_factor_cpu=factor), spans=spans)

    for rung in (Rung.DEVICE, Rung.ACT, Rung.GATE_UP) if flags.has_rungs else (Rung.DEVICE,):
        found[rung] = _smallest(on_device, rung, wanted=wanted, top=top)
    found[Rung.HOST] = _smallest(on_both, Rung.HOST, wanted=wanted, top=top)
    return {rung: best for rung, best in sorted(found.items()) if best is not None}


def _smallest(of: Callable[[float], Outlook], rung: Rung, *, wanted: float, top: float) -> Outlook | None:
    """With the smallest factor, in hundredths, that is enough; None if four times the top is not."""
    low, high, best = 0, max(1, round(top / _STEP)), None
    while best is None:
        tried = of(round(high * _STEP, 2))
        if tried.share_up_to(rung) >= wanted:
            best = tried
        elif high > 2 * top / _STEP:
            return None
        else:
            low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        tried = of(round(middle * _STEP, 2))
        if tried.share_up_to(rung) >= wanted:
            high, best = middle, tried
        else:
            low = middle
    return best
