"""A planned run from step to step: which rung of the ladder each step comes to, and how the run grows where it is void.

What one stage does is stage_walk.py's. Growth follows expert_memory.py's grow_sync.
"""

import enum
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron.core.transformer.moe.paged_stash import Counter, PoolLayout, Priority
from megatron.core.transformer.moe.paged_stash.sizing import HEADROOM, LearnedSizes, capacity_factor
from megatron.planner.stash.pools import PoolOutcomes
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stage_walk import StageWalk
from megatron.planner.stash.stages import PlannedRun, StashFlags

# Most attempts at one step. A run gives up earlier, but the growth of a plan is estimated and may need more attempts.
_MAX_VOIDS = 64
# Numbers that are worked on at once: what fits into a core's cache.
_NUMBERS_AT_ONCE = 1 << 16


class Rung(enum.IntEnum):
    """The outcome of a step, on the rank that is worst off."""

    DEVICE = 0  # every tensor has its pages on the device
    HOST = 1  # some pages are on the host
    ACT = 2  # some act is recomputed
    GATE_UP = 3  # some gate_up is
    NO_PAGES = 4  # void: an x, or with another policy any tensor, found no pages
    OVER_CAPACITY = 5  # void: more rows came than a buffer, or what one rank sends another, has room for


@dataclass(frozen=True)
class StageSteps:
    """The results of one stage, for all steps S and its N expert ranks.

    layouts: of each step, the ranks' pools; () without a stash. counters: as the pool's own, none without a stash;
    dropped_rows: of groups whose gate_up or act was dropped; pages_wanted: the peak, had every tensor got its own.
    Arrays: [S, N], int64. balanced_pages: the need of the run's last step, of which factors are multiples.
    """

    balanced_pages: int
    page_bytes: int
    layouts: list[tuple[PoolLayout, ...]]
    counters: dict[Counter, np.ndarray]
    dropped_rows: dict[Priority, np.ndarray]
    pages_wanted: np.ndarray


@dataclass(frozen=True)
class Walk:
    """A run's steps. rungs: [S], int64, Rung of each. voids: [S], int64: how often it was void before. stages: of each.

    capacity_factor, grown: what the run has grown to at its end. ended_at: the step in which the policy "error" ended
    the run, None if it did not: later ones are left out.
    """

    rungs: np.ndarray
    voids: np.ndarray
    stages: list[StageSteps]
    capacity_factor: float
    grown: LearnedSizes
    ended_at: int | None

    def share(self, rung: Rung) -> float:
        """Returns the share of steps that reach exactly this rung."""
        return float((self.rungs == rung).mean())

    def share_up_to(self, rung: Rung) -> float:
        """Returns the share of steps that reach this rung or a lower one."""
        return float((self.rungs <= rung).mean())


def walk(run: PlannedRun, flags: StashFlags, *, spans: Sequence[RoutingSpan], grows: bool) -> Walk:
    """The steps of a run with these flags. grows: as runs do, buffers and pools that were too small in a step grow, and
    it counts as they meet it then; else sizes stay, and what lacks is counted in each step.

    Where a buffer was too small, a run's routing in that attempt was another than the recorded one, from the layer on
    whose rows were lost: how far it grows then is an estimate. Everything else is what the run would do.
    """
    walker = _Walker(run, flags, grows=grows, num_ranks=next(iter(spans[0].rows.values())).shape[2])
    return walker.walk(spans)


@dataclass
class _Walker:
    run: PlannedRun
    flags: StashFlags
    grows: bool
    num_ranks: int
    _stages: list[StageWalk] = field(init=False)
    _found: "list[_Found]" = field(default_factory=list)
    _grown: LearnedSizes = LearnedSizes()
    _capacity_factor: float = field(init=False)
    _planned: int | None = None  # for steps of so many micro-batches; None: sizes may have changed since

    def __post_init__(self) -> None:
        assert self.flags.moe_expert_rank_capacity_factor is not None, "the run has buffers of a fixed size"
        self._capacity_factor = self.flags.moe_expert_rank_capacity_factor
        self._stages = [
            StageWalk(self.run, self.flags, stage=stage, num_ranks=self.num_ranks)
            for stage in range(len(self.run.stages))
        ]

    def walk(self, spans: Sequence[RoutingSpan]) -> Walk:
        self._plan(self.run.num_microbatches)
        first = 0
        voids = np.zeros(sum(span.num_steps for span in spans), dtype=np.int64)
        for span in spans:
            begin = 0
            while begin < span.num_steps:
                self._plan(span.num_microbatches)
                found = self._attempt(span.part(begin, begin + self._steps_at_once))
                stop = found.first_void if self.grows else None
                done = found if stop is None else found.until(stop)
                self._take(done)
                begin += done.span.num_steps
                if stop is None:
                    continue
                voids[first + begin] += 1
                assert voids[first + begin] <= _MAX_VOIDS, (
                    f"step {first + begin} still overflows after {_MAX_VOIDS} attempts"
                )
                if self.flags.moe_paged_stash_overflow_policy == "error":
                    return self._result(voids[: first + begin], ended_at=first + begin)
                self._grow(found, stop)
            first += span.num_steps
        return self._result(voids, ended_at=None)

    @property
    def _steps_at_once(self) -> int:
        if any(stage.measures_first_step for stage in self._stages):
            return 1
        return max(1, _NUMBERS_AT_ONCE // self.num_ranks)

    def _plan(self, num_microbatches: int) -> None:
        if num_microbatches == self._planned:
            return
        for stage in self._stages:
            stage.plan(num_microbatches, grown=self._grown, capacity_factor=self._capacity_factor)
        self._planned = num_microbatches

    def _attempt(self, part: RoutingSpan) -> "_Found":
        ranks, budget = self.run.ranks, replace(self.run.ranks.budget, factor=self._capacity_factor)
        over = part.most_rows > budget.rows_of_rank(ranks.tokens)
        if ranks.counts_pairs:
            over = over | (part.most_of_pair > budget.rows_of_pair(ranks.tokens))
        # No routing overflows the largest buffers, but blocks that were split at random may have more rows than any.
        over = over & (self._capacity_factor < budget.largest_factor)
        outcomes = [stage.outcomes(part) for stage in self._stages]
        layouts = [tuple(stage.layouts or ()) for stage in self._stages]
        wanted = [stage.wanted_pages(part) for stage in self._stages]
        return _Found(part, over, outcomes, layouts, wanted)

    def _take(self, found: "_Found") -> None:
        self._found.append(found)
        measures = any(stage.measures_first_step for stage in self._stages)
        for stage in self._stages:
            stage.learn(found.span)
        if measures and found.span.num_steps:
            self._planned = None

    def _grow(self, found: "_Found", step: int) -> None:
        """More rows or pages for everyone, after a step that was void."""
        part = found.span.part(step, step + 1)
        # What else lacked in an attempt that lost rows is not known, as later layers had other rows in it.
        sizes = [self._more_rows(part)] if found.over_capacity[step] else self._more_pages(found, step)
        self._grown = functools.reduce(LearnedSizes.merged, sizes, self._grown)
        self._capacity_factor = capacity_factor(self._capacity_factor, self._grown)
        self._planned = None

    def _more_pages(self, found: "_Found", step: int) -> list[LearnedSizes]:
        part, sizes = found.span.part(step, step + 1), []
        for stage, outcome in zip(self._stages, found.outcomes, strict=True):
            if outcome is not None:
                # Those that it was attempted with: what a rank lacks, it also learns from.
                shares = stage.shares(part)[0]
                lacking = np.flatnonzero(outcome.counters[Counter.VOID][step])
                sizes += [stage.lack(part, int(rank), used_share=float(shares[rank])) for rank in lacking]
        return sizes

    def _more_rows(self, step: RoutingSpan) -> LearnedSizes:
        ranks = self.run.ranks
        needed = float(factors_needed(step, self.run)[0])
        largest = ranks.budget.largest_factor
        return LearnedSizes(capacity_factor=max(needed, min(needed * float(HEADROOM), largest)))

    def _result(self, voids: np.ndarray, *, ended_at: int | None) -> Walk:
        stages = [self._steps_of(number) for number in range(len(self._stages))]
        rungs = np.concatenate([found.rungs() for found in self._found])
        return Walk(rungs, voids, stages, self._capacity_factor, self._grown, ended_at)

    def _steps_of(self, number: int) -> StageSteps:
        needs = self.run.needs(
            self.flags,
            number,
            num_microbatches=self.run.num_microbatches,
            max_rows=self.run.ranks.max_rows(self._capacity_factor),
        )
        # A stage has a pool from the first step on, or never.
        outcomes = [one for found in self._found if (one := found.outcomes[number]) is not None]
        counters, dropped = (outcomes[0].counters, outcomes[0].dropped_rows) if outcomes else ({}, {})
        return StageSteps(
            balanced_pages=needs.balanced_pages,
            page_bytes=needs.page_bytes,
            layouts=[found.layouts[number] for found in self._found for _ in range(found.span.num_steps)],
            counters={name: np.concatenate([one.counters[name] for one in outcomes]) for name in counters},
            dropped_rows={name: np.concatenate([one.dropped_rows[name] for one in outcomes]) for name in dropped},
            pages_wanted=np.concatenate([found.wanted[number] for found in self._found]),
        )


@dataclass(frozen=True)
class _Found:
    """An attempt at some steps. over_capacity: [S], bool. outcomes, layouts, wanted: of each stage."""

    span: RoutingSpan
    over_capacity: np.ndarray
    outcomes: list[PoolOutcomes | None]
    layouts: list[tuple[PoolLayout, ...]]
    wanted: list[np.ndarray]

    @property
    def first_void(self) -> int | None:
        """The first of the steps that is void."""
        void = np.flatnonzero(self.rungs() >= Rung.NO_PAGES)
        return int(void[0]) if len(void) else None

    def rungs(self) -> np.ndarray:
        """[S], int64: of each step, the highest Rung of any rank."""
        highest = np.where(self.over_capacity, int(Rung.OVER_CAPACITY), int(Rung.DEVICE))
        for outcome, layouts in zip(self.outcomes, self.layouts, strict=True):
            if outcome is None:
                continue
            # Where the device has no pages, the host is where they are meant to be.
            spills = Counter.SPILLED_PAGES if layouts[0].device_pages else None
            for rung, counter in (
                (Rung.HOST, spills),
                (Rung.ACT, Counter.DROPPED_ACT),
                (Rung.GATE_UP, Counter.DROPPED_GATE_UP),
                (Rung.NO_PAGES, Counter.VOID),
            ):
                if counter is not None:
                    has = outcome.counters[counter].any(axis=1)
                    highest = np.maximum(highest, np.where(has, int(rung), 0))
        return highest

    def until(self, stop: int) -> "_Found":
        """The steps before that one."""
        outcomes = [
            None
            if one is None
            else PoolOutcomes(
                {name: of_all[:stop] for name, of_all in one.counters.items()},
                {name: of_all[:stop] for name, of_all in one.dropped_rows.items()},
            )
            for one in self.outcomes
        ]
        wanted = [of_stage[:stop] for of_stage in self.wanted]
        return _Found(self.span.part(0, stop), self.over_capacity[:stop], outcomes, self.layouts, wanted)


def factors_needed(span: RoutingSpan, run: PlannedRun) -> np.ndarray:
    """[S], fp64: the least capacity factor with which each step would have lost no row."""
    ranks = run.ranks
    pairs = span.most_of_pair * ranks.num_sharing
    needed: np.ndarray = np.maximum(span.most_rows, pairs) / max(1, ranks.balanced_rows)
    return needed
