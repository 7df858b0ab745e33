"""Simulates a planned run step by step: page pools of every rank, overflows, and growth after discarded steps.

Uses the paged stash's own functions for sizes and decisions. outlook.py summarizes outcomes.
"""

import enum
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron.core.transformer.moe.paged_stash import Counter, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.arithmetic import PageMove, ReserveRow, reserve_table, resident_groups
from megatron.core.transformer.moe.paged_stash.page_layout import (
    LEAST_IMPORTANT,
    PageAccount,
    PagesByPriority,
    pages_for,
    planning_order,
)
from megatron.core.transformer.moe.paged_stash.sizing import (
    HEADROOM,
    RESERVE_STEPS,
    LearnedSizes,
    StepNeeds,
    capacity_factor,
    expected_share,
    grown_sizes,
    pool_layout,
)
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey, layer_of
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stages import PlannedRun, StashFlags

# Maximum number of attempts at one step. A run gives up earlier, but a plan's growth is estimated and may require more
# attempts.
_MAX_ATTEMPTS = 64
# Number of array elements that are processed together, so that they fit into a core's cache.
_BLOCK_NUMBERS = 1 << 16
_COUNTED = (
    Counter.VOID,
    Counter.HIGH_WATER_DEVICE,
    Counter.HIGH_WATER_HOST,
    Counter.PLANNED_PAGES,
    Counter.SPILLED_PAGES,
    Counter.LIVE_BYTES,
    Counter.DROPPED_GATE_UP,
)
# Maps a group to its live rows [S, N], int64.
RowsOf = Callable[[GroupKey], np.ndarray]


class StepLevel(enum.IntEnum):
    """Outcome of a step: the worst outcome of all ranks."""

    DEVICE = 0  # every tensor has its pages on the device
    HOST = 1  # some pages are on the host
    GATE_UP = 2  # some gate_up is recomputed
    NO_PAGES = 3  # stash overflow: no pages for an x (under policies other than recompute, for any tensor)
    OVER_CAPACITY = 4  # expert overflow: too many rows for a buffer, or from one rank to another


@dataclass(frozen=True)
class PoolSizes:
    """Numbers of pages of each pool. device_pages, host_pages: [N], int64."""

    page_bytes: int
    device_pages: np.ndarray
    host_pages: np.ndarray


@dataclass(frozen=True)
class Reserves:
    """Pages that each forward leaves free.

    tables: results of reserve_table, [K, forwards, 3], int64. which: index of the table that applies to each step and
    rank, [S, N], int64.
    """

    tables: np.ndarray
    which: np.ndarray

    def of(self, forward_index: int) -> np.ndarray:
        """Returns the number of pages that a forward leaves free for each priority, [3, S, N], int64."""
        rows: np.ndarray = np.moveaxis(self.tables[:, forward_index][self.which], -1, 0)
        return rows


@dataclass(frozen=True)
class PoolOutcomes:
    """Outcome of each step on each rank.

    counters: counters of the pools, [S, N], int64. dropped_rows: live rows of the groups whose gate_up was dropped,
    [S, N], int64.
    """

    counters: dict[Counter, np.ndarray]
    dropped_rows: np.ndarray


@dataclass(frozen=True)
class StageSteps:
    """Results of one stage, for all S steps and its N expert ranks. Arrays are [S, N], int64.

    balanced_pages: pages for the run's last step under balanced routing, the unit of the size factors. layouts: pools
    of the ranks in each step, () without a stash. counters: counters of the pools, empty without a stash. dropped_rows:
    live rows of groups whose gate_up was dropped. pages_wanted: peak number of pages if every tensor is stashed.
    """

    balanced_pages: int
    page_bytes: int
    layouts: list[tuple[PoolLayout, ...]]
    counters: dict[Counter, np.ndarray]
    dropped_rows: np.ndarray
    pages_wanted: np.ndarray


@dataclass(frozen=True)
class Walk:
    """Results of a simulated run.

    levels: StepLevel of each step, [S], int64. discards: number of discarded attempts at each step, [S], int64. stages:
    results of each stage. capacity_factor, grown: sizes at the end of the run. ended_at: the step at which the policy
    "error" ended the run, whose later steps are left out; None if the run completed.
    """

    levels: np.ndarray
    discards: np.ndarray
    stages: list[StageSteps]
    capacity_factor: float
    grown: LearnedSizes
    ended_at: int | None

    def share(self, level: StepLevel) -> float:
        """Returns the share of steps whose outcome is `level`."""
        return float((self.levels == level).mean())

    def share_up_to(self, level: StepLevel) -> float:
        """Returns the share of steps whose outcome is at most `level`."""
        return float((self.levels <= level).mean())


def walk(run: PlannedRun, flags: StashFlags, *, spans: Sequence[RoutingSpan], grows: bool) -> Walk:
    """Simulates the steps of a run with the given flags.

    grows: whether buffers and pools grow after an overflow, as in a run. The outcome of a step is then the outcome of
    its last attempt. Otherwise sizes remain constant, and every overflow counts.

    Growth after an expert overflow is an estimate: an attempt that loses rows in one layer is routed differently in
    later layers, which the trace does not record. Everything else is exact.
    """
    walker = _Walker(run, flags, grows=grows, num_ranks=next(iter(spans[0].rows.values())).shape[2])
    return walker.walk(spans)


@dataclass
class _Walker:
    """State of a simulated run: the stages' pools, the attempts so far, and the growth.

    The simulation repeats four actions: it plans pools, attempts a block of steps, learns from the steps before the
    first discarded step, and grows.
    """

    run: PlannedRun
    flags: StashFlags
    grows: bool
    num_ranks: int
    _stages: "list[StageWalk]" = field(init=False)
    _found: "list[_Attempt]" = field(default_factory=list)
    _grown: LearnedSizes = LearnedSizes()
    _capacity_factor: float = field(init=False)
    _planned: int | None = None  # microbatches of the planned pools; None if sizes may have changed since

    def __post_init__(self) -> None:
        assert self.flags.moe_expert_rank_capacity_factor is not None, "the run has static buffers"
        self._capacity_factor = self.flags.moe_expert_rank_capacity_factor
        self._stages = [
            StageWalk(self.run, self.flags, stage=stage, num_ranks=self.num_ranks)
            for stage in range(len(self.run.stages))
        ]

    def walk(self, spans: Sequence[RoutingSpan]) -> Walk:
        self._plan(self.run.num_microbatches)
        first = 0
        discards = np.zeros(sum(span.num_steps for span in spans), dtype=np.int64)
        for span in spans:
            begin = 0
            while begin < span.num_steps:
                self._plan(span.num_microbatches)
                found = self._attempt(span.part(begin, begin + self._steps_per_attempt))
                stop = found.first_discarded if self.grows else None
                done = found if stop is None else found.until(stop)
                self._complete(done)
                begin += done.span.num_steps
                if stop is None:
                    continue
                discards[first + begin] += 1
                assert discards[first + begin] <= _MAX_ATTEMPTS, (
                    f"step {first + begin} still overflows after {_MAX_ATTEMPTS} attempts"
                )
                if self.flags.moe_paged_stash_overflow_policy == "error":
                    return self._result(discards[: first + begin], ended_at=first + begin)
                self._grow(found, stop)
            first += span.num_steps
        return self._result(discards, ended_at=None)

    @property
    def _steps_per_attempt(self) -> int:
        if any(stage.measures_first_step for stage in self._stages):
            return 1
        return max(1, _BLOCK_NUMBERS // self.num_ranks)

    def _plan(self, num_microbatches: int) -> None:
        if num_microbatches == self._planned:
            return
        for stage in self._stages:
            stage.plan(num_microbatches, grown=self._grown, capacity_factor=self._capacity_factor)
        self._planned = num_microbatches

    def _attempt(self, part: RoutingSpan) -> "_Attempt":
        ranks, budget = self.run.ranks, replace(self.run.ranks.budget, factor=self._capacity_factor)
        over = part.most_rows > budget.rows_of_rank(ranks.tokens)
        if ranks.limits_pairs:
            over = over | (part.most_of_pair > budget.rows_of_pair(ranks.tokens))
        # Real routing cannot overflow the largest buffers, but blocks that were split at random can.
        over = over & (self._capacity_factor < budget.largest_factor)
        outcomes = [stage.outcomes(part) for stage in self._stages]
        layouts = [tuple(stage.layouts or ()) for stage in self._stages]
        wanted = [stage.wanted_pages(part) for stage in self._stages]
        return _Attempt(part, over, outcomes, layouts, wanted)

    def _complete(self, found: "_Attempt") -> None:
        self._found.append(found)
        measures = any(stage.measures_first_step for stage in self._stages)
        for stage in self._stages:
            stage.learn(found.span)
        if measures and found.span.num_steps:
            self._planned = None

    def _grow(self, found: "_Attempt", step: int) -> None:
        """Grows the buffers or the pools of all ranks after a discarded step."""
        part = found.span.part(step, step + 1)
        # After an expert overflow, the number of required pages is unknown, because later layers had different rows.
        sizes = [self._more_rows(part)] if found.over_capacity[step] else self._more_pages(found, step)
        self._grown = functools.reduce(LearnedSizes.merged, sizes, self._grown)
        self._capacity_factor = capacity_factor(self._capacity_factor, self._grown)
        self._planned = None

    def _more_pages(self, found: "_Attempt", step: int) -> list[LearnedSizes]:
        part, sizes = found.span.part(step, step + 1), []
        for stage, outcome in zip(self._stages, found.outcomes, strict=True):
            if outcome is not None:
                # Read before stage.requested_sizes, which learns the step's rows.
                shares = stage.shares(part)[0]
                short_ranks = np.flatnonzero(outcome.counters[Counter.VOID][step])
                sizes += [
                    stage.requested_sizes(part, int(rank), used_share=float(shares[rank])) for rank in short_ranks
                ]
        return sizes

    def _more_rows(self, step: RoutingSpan) -> LearnedSizes:
        ranks = self.run.ranks
        needed = float(factors_needed(step, self.run)[0])
        largest = ranks.budget.largest_factor
        return LearnedSizes(capacity_factor=max(needed, min(needed * float(HEADROOM), largest)))

    def _result(self, discards: np.ndarray, *, ended_at: int | None) -> Walk:
        stages = [self._steps_of(number) for number in range(len(self._stages))]
        levels = np.concatenate([found.levels() for found in self._found])
        return Walk(levels, discards, stages, self._capacity_factor, self._grown, ended_at)

    def _steps_of(self, number: int) -> StageSteps:
        needs = self.run.needs(
            self.flags,
            number,
            num_microbatches=self.run.num_microbatches,
            max_rows=self.run.ranks.max_rows(self._capacity_factor),
        )
        # A stage has pools in all steps or in none.
        outcomes = [one for found in self._found if (one := found.outcomes[number]) is not None]
        counters = outcomes[0].counters if outcomes else {}
        wanted = np.concatenate([found.wanted[number] for found in self._found])
        dropped = np.concatenate([one.dropped_rows for one in outcomes]) if outcomes else np.zeros_like(wanted)
        return StageSteps(
            balanced_pages=needs.balanced_pages,
            page_bytes=needs.page_bytes,
            layouts=[found.layouts[number] for found in self._found for _ in range(found.span.num_steps)],
            counters={name: np.concatenate([one.counters[name] for one in outcomes]) for name in counters},
            dropped_rows=dropped,
            pages_wanted=wanted,
        )


@dataclass(frozen=True)
class _Attempt:
    """An attempt at S steps. over_capacity: expert overflows, [S], bool. outcomes, layouts, wanted: one per stage."""

    span: RoutingSpan
    over_capacity: np.ndarray
    outcomes: list[PoolOutcomes | None]
    layouts: list[tuple[PoolLayout, ...]]
    wanted: list[np.ndarray]

    @property
    def first_discarded(self) -> int | None:
        """Index of the first discarded step, or None."""
        discarded = np.flatnonzero(self.levels() >= StepLevel.NO_PAGES)
        return int(discarded[0]) if len(discarded) else None

    def levels(self) -> np.ndarray:
        """Returns the highest StepLevel of any rank in each step, [S], int64."""
        highest = np.where(self.over_capacity, int(StepLevel.OVER_CAPACITY), int(StepLevel.DEVICE))
        for outcome, layouts in zip(self.outcomes, self.layouts, strict=True):
            if outcome is None:
                continue
            # Pages on the host do not count as spilled if the device has none.
            spills = Counter.SPILLED_PAGES if layouts[0].device_pages else None
            for level, counter in (
                (StepLevel.HOST, spills),
                (StepLevel.GATE_UP, Counter.DROPPED_GATE_UP),
                (StepLevel.NO_PAGES, Counter.VOID),
            ):
                if counter is not None:
                    has = outcome.counters[counter].any(axis=1)
                    highest = np.maximum(highest, np.where(has, int(level), 0))
        return highest

    def until(self, stop: int) -> "_Attempt":
        """Returns the attempt restricted to the steps before `stop`."""
        outcomes = [
            None
            if one is None
            else PoolOutcomes({name: of_all[:stop] for name, of_all in one.counters.items()}, one.dropped_rows[:stop])
            for one in self.outcomes
        ]
        wanted = [of_stage[:stop] for of_stage in self.wanted]
        return _Attempt(self.span.part(0, stop), self.over_capacity[:stop], outcomes, self.layouts, wanted)


def factors_needed(span: RoutingSpan, run: PlannedRun) -> np.ndarray:
    """Returns each step's smallest capacity factor without an expert overflow, [S], fp64."""
    ranks = run.ranks
    pairs = span.most_of_pair * ranks.num_sharing / max(1, ranks.budget.balanced_rows(ranks.tokens))
    needed: np.ndarray = np.maximum(ranks.budget.factor_for(span.most_rows, ranks.tokens), pairs)
    return needed


class StageWalk:
    """Simulates the pools of one stage's N ranks, from the start of a run.

    1. plan: sizes the pools for steps with a number of microbatches.
    2. outcomes: simulates the pools in some steps, without learning from them.
    3. learn: learns the rows of completed steps. requested_sizes: returns the sizes that a discarded step requires.

    layouts: the pool of each rank, None without a stash.
    """

    def __init__(self, run: PlannedRun, flags: StashFlags, *, stage: int, num_ranks: int) -> None:
        self._run, self._stage, self._flags, self._num_ranks = run, stage, flags, num_ranks
        self.layers = run.stages[stage].layers
        self.layouts: list[PoolLayout] | None = None
        # Largest number of rows of a forward for each layer and rank, relative to balanced routing.
        self._shares = np.zeros((len(self.layers), num_ranks))
        # The maximum over all layers, in each recent step and in attempts at the next step.
        self._recent = np.zeros((0, num_ranks))
        self._attempted = np.zeros(num_ranks)
        self._has_learned = np.zeros(num_ranks, dtype=bool)
        self._is_measured = False

    @property
    def measures_first_step(self) -> bool:
        """Whether pools will be sized from the first step, which has not run yet."""
        flags = self._flags
        factors = flags.moe_paged_stash_buffer_size_factor_cuda, flags.moe_paged_stash_buffer_size_factor_cpu
        return not self._is_measured and min(factors) < 0

    def plan(self, num_microbatches: int, *, grown: LearnedSizes, capacity_factor: float) -> None:
        """Sizes the pools for steps of num_microbatches. Pools never shrink. grown: growth so far."""
        self._capacity_factor, self._num_microbatches = capacity_factor, num_microbatches
        self.needs = self._run.needs(
            self._flags, self._stage, num_microbatches=num_microbatches, max_rows=self._max_rows
        )
        if not self.needs.events:
            return
        # Ranks differ only if pools are sized from the first step.
        are_equal = not self._has_learned.any() or not self._counts_rows
        ranks = range(1 if are_equal else self._num_ranks)
        made = [pool_layout(self._flags, self.needs, learned=self._learned(rank, grown)) for rank in ranks]
        layouts = [layout for layout in made if layout is not None]
        if not layouts:
            return
        layouts = layouts * self._num_ranks if are_equal else layouts
        old = self.layouts or layouts
        self.layouts = [_larger(one, other) for one, other in zip(layouts, old, strict=True)]

    def outcomes(self, part: RoutingSpan) -> PoolOutcomes | None:
        """Simulates the pools in steps with the planned number of microbatches. Returns None without a stash."""
        if self.layouts is None:
            return None
        specs = self.needs.specs
        if not self._flags.stash_recomputes:
            specs = {
                name: [replace(spec, priority=Priority.INPUT) for spec in of_group] for name, of_group in specs.items()
            }
        most = self._max_rows
        rows = {layer: np.minimum(part.rows[layer], most).astype(np.int64) for layer in self.layers}

        def rows_of(group: GroupKey) -> np.ndarray:
            of_pass: np.ndarray = rows[layer_of(group[0])][group[1]]
            return of_pass

        return simulate_pools(
            self._run.stages[self._stage].moves(self._num_microbatches, self._run.prefetch_groups),
            rows_of,
            specs=specs,
            sizes=PoolSizes(
                self.needs.page_bytes,
                np.array([layout.device_pages for layout in self.layouts]),
                np.array([layout.host_pages for layout in self.layouts]),
            ),
            num_steps=part.num_steps,
            reserves=self._reserves(part) if self._flags.stash_recomputes else None,
        )

    def wanted_pages(self, part: RoutingSpan) -> np.ndarray:
        """Returns the peak number of pages if every tensor is stashed, [S, N], int64."""
        if self.layouts is None:
            return np.zeros((part.num_steps, self._num_ranks), dtype=np.int64)
        held = peak = np.zeros((part.num_steps, self._num_ranks), dtype=np.int64)
        pages: dict[GroupKey, np.ndarray] = {}
        for move in self._run.stages[self._stage].moves(self._num_microbatches, 0):
            if move.is_taken:
                live = part.rows[layer_of(move.group[0])][move.group[1]].astype(np.int64)
                specs = self.needs.specs[move.group[0]]
                pages[move.group] = sum(-(-live * spec.row_bytes // self.needs.page_bytes) for spec in specs)
                held = held + pages[move.group]
                peak = np.maximum(peak, held)
            else:
                held = held - pages.pop(move.group)
        return peak

    def learn(self, part: RoutingSpan) -> None:
        """Records the rows of completed steps, from which later pools and reserves are sized."""
        if not part.num_steps or not self.layers:
            return
        shares = self._shares_of(part)
        self._shares = np.maximum(self._shares, shares.max(axis=0).T)
        self._recent = np.concatenate([self._recent, shares.max(axis=2)])[-RESERVE_STEPS:]
        self._attempted = np.zeros(self._num_ranks)
        if self.measures_first_step:
            self.layouts = None
        self._is_measured = True
        self._has_learned[:] = True

    def requested_sizes(self, step: RoutingSpan, rank: int, *, used_share: float) -> LearnedSizes:
        """Records the rows of a step that overflowed a rank's pool, and returns the sizes that the rank requests.

        used_share: share of C for which the step reserved pages.
        """
        assert self.layouts is not None, "its pool was too small"
        rows = {layer: step.rows[layer][:, 0, rank] for layer in self.layers}
        wanted = self.needs.pages(
            lambda group: int(rows[layer_of(group[0])][group[1]]),
            up_to=Priority.INPUT if self._flags.stash_recomputes else LEAST_IMPORTANT,
        )
        shares = self._shares_of(step)[0, rank]
        self._shares[:, rank] = np.maximum(self._shares[:, rank], shares)
        self._attempted[rank] = max(self._attempted[rank], shares.max())
        self._has_learned[rank] = True
        layout = self.layouts[rank]
        is_short = float(self.shares(step)[0, rank]) > used_share
        if self._flags.stash_recomputes and is_short and wanted * HEADROOM <= layout.num_pages:
            return LearnedSizes()
        return grown_sizes(layout, self.needs, wanted_pages=wanted) or LearnedSizes()

    def shares(self, part: RoutingSpan) -> np.ndarray:
        """Returns the share of C for which each step reserves pages, if no step is discarded, [S, N]."""
        seen = np.concatenate([self._recent, self._shares_of(part).max(axis=2)])
        first = len(self._recent)
        most = np.stack(
            [
                seen[max(0, step - RESERVE_STEPS) : step].max(axis=0, initial=0.0)
                for step in range(first, first + part.num_steps)
            ]
        )
        # Attempts count until their step completes.
        most[0] = np.maximum(most[0], self._attempted)
        found: np.ndarray = np.vectorize(self._share_of)(most)
        return found

    @property
    def _max_rows(self) -> int:
        return self._run.ranks.max_rows(self._capacity_factor)

    @property
    def _counts_rows(self) -> bool:
        flags = self._flags
        return min(flags.moe_paged_stash_buffer_size_factor_cuda, flags.moe_paged_stash_buffer_size_factor_cpu) < 0

    def _learned(self, rank: int, grown: LearnedSizes) -> LearnedSizes:
        shares = self._shares[:, rank].tolist() if self._has_learned[rank] else []
        return replace(grown, rows_share=dict(zip(self.layers, shares)))

    def _shares_of(self, part: RoutingSpan) -> np.ndarray:
        """Returns the largest number of rows of a forward, relative to balanced routing, [S, N, layers]."""
        most = np.stack([part.rows[layer].max(axis=0) for layer in self.layers], axis=2)
        shares: np.ndarray = most.astype(np.int64) / self._run.ranks.balanced_rows
        return shares

    def _share_of(self, most_share: float) -> float:
        return expected_share(most_share, balanced_rows=self._run.ranks.balanced_rows, max_rows=self._max_rows)

    def _reserves(self, part: RoutingSpan) -> Reserves:
        rows = (self.shares(part) * self._max_rows).astype(np.int64)  # rounds down, as Reserve does
        distinct, which = np.unique(rows, return_inverse=True)
        tables = np.array([_reserve(self.needs, int(count)) for count in distinct], dtype=np.int64)
        return Reserves(tables.reshape(len(distinct), -1, len(Priority)), which.reshape(rows.shape))


def _reserve(needs: StepNeeds, num_rows: int) -> list[ReserveRow]:
    """Returns the pages that each forward of a step leaves free, given that each forward has num_rows rows."""
    layout = PoolLayout(needs.page_bytes, 1)
    own = {name: pages_for(specs, num_rows, layout=layout) for name, specs in needs.specs.items()}
    resident = resident_groups(needs.events)

    def pages(group: GroupKey) -> PagesByPriority:
        return PagesByPriority() if group in resident else own[group[0]]

    return reserve_table(needs.events, pages, at_least=pages)


def _larger(one: PoolLayout, other: PoolLayout) -> PoolLayout:
    device, host = max(one.device_pages, other.device_pages), max(one.host_pages, other.host_pages)
    return PoolLayout(one.page_bytes, device, host)


def simulate_pools(
    moves: Sequence[PageMove],
    rows: RowsOf,
    *,
    specs: Mapping[str, Sequence[TensorSpec]],
    sizes: PoolSizes,
    num_steps: int,
    reserves: Reserves | None = None,
) -> PoolOutcomes:
    """Simulates S = num_steps steps with the given page moves. Each step starts with empty pools.

    specs: tensors of Priority.INPUT and GATE_UP of each group, by its name. No group may have more rows than its
    buffers.
    """
    shape = num_steps, len(sizes.device_pages)
    tiers = tuple(np.broadcast_to(pages, shape).astype(np.int64) for pages in (sizes.device_pages, sizes.host_pages))
    counters: dict[Counter, np.ndarray] = {counter: np.zeros(shape, dtype=np.int64) for counter in _COUNTED}
    account = PageAccount(sizes.page_bytes, (tiers[0], tiers[1]), list(tiers), counters)
    held: dict[GroupKey, tuple[np.ndarray, np.ndarray]] = {}
    dropped_rows = np.zeros(shape, dtype=np.int64)
    by_priority = {name: [own[index] for index in planning_order(own)] for name, own in specs.items()}
    for move in moves:
        if not move.is_taken:
            pages, on_host = held.pop(move.group)
            account.release(pages, on_host=on_host)
            continue
        left_free = None if reserves is None else reserves.of(move.forward_index)
        pages, on_host = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        live = rows(move.group)
        for spec in by_priority[move.group[0]]:
            got = account.allocate(
                live,
                row_bytes=spec.row_bytes,
                tokens_per_row=spec.tokens_per_row,
                priority=spec.priority,
                reserve=0 if left_free is None or spec.priority is Priority.INPUT else left_free[spec.priority],
            )
            pages, on_host = pages + got.pages, on_host + got.on_host
            if spec.priority is Priority.GATE_UP:
                dropped_rows += live * got.is_dropped
        account.end_plan()
        held[move.group] = pages, on_host
    return PoolOutcomes(counters, dropped_rows)
