"""Measures the usage of static expert buffers and of the paged stash over all ranks, at log lines.

step/expert_memory.py provides the measurements of each step on a rank.
"""

from collections import Counter as Multiset
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from megatron.core.group_collectives import all_gather_rows, is_fake
from megatron.core.transformer.moe.paged_stash import Counter, EventKind, Priority
from megatron.core.transformer.moe.paged_stash.arithmetic import PoolModel, page_moves
from megatron.core.transformer.moe.paged_stash.page_layout import pages_for
from megatron.core.transformer.moe.paged_stash.sizing import rounded_up
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey, layer_of
from megatron.training.callbacks import PoolReport, StashReport, StepReport
from megatron.training.config import RunConfig
from megatron.training.step.expert_memory import StepFigures, rows_by_group

# Number of steps at the start of a run without advice, because routers change most in these steps.
_UNTYPICAL_STEPS = 50


class KnowsLastStep(Protocol):
    """Interface of an object that provides the measurements of the last step."""

    last_step: StepFigures | None


class _Totals(NamedTuple):
    """Sums of one rank's counters over steps."""

    planned_pages: int = 0
    spilled_pages: int = 0
    live_bytes: int = 0
    tail_bytes: int = 0
    dropped_gate_up: int = 0


class _LevelCounts(NamedTuple):
    """Counts of a rank's reactions to missing pages or rows in one step, cheapest first: spill, recompute, discard."""

    spilled_pages: int = 0
    dropped_gate_up: int = 0
    void_steps: int = 0


class _Pool(NamedTuple):
    """Sizes and high-water marks of a pool in its fullest step; all 0 on a rank without a pool."""

    device_pages: int = 0
    host_pages: int = 0
    page_bytes: int = 0
    device_high_water: int = 0
    host_high_water: int = 0
    balanced_pages: int = 0

    @property
    def fullness(self) -> float:
        """Share of the pages that were in use at the tiers' high-water marks, which may be at different moments."""
        return (self.device_high_water + self.host_high_water) / max(1, self.device_pages + self.host_pages)

    @property
    def plan(self) -> "_Pool":
        """This pool without high-water marks. Equal for steps with the same pool and number of microbatches."""
        return self._replace(device_high_water=0, host_high_water=0)


class _Buffers(NamedTuple):
    """Sizes of expert buffers, and the number of discarded steps."""

    capacity_factor: float = 0.0
    balanced_rows: int = 0
    buffer_rows: int = 0
    num_discards: int = 0


@dataclass
class _Interval:
    """One rank's measurements since the last log line: totals, one number per layer, and six numbers per step."""

    totals: _Totals = _Totals()
    factor_to_keep_all: float = 0.0
    pool: _Pool = _Pool()
    buffers: _Buffers = _Buffers()
    fullest: StepFigures | None = None
    most_rows: dict[int, int] = field(default_factory=dict)
    rows_factors: list[float] = field(default_factory=list)
    level_counts: list[_LevelCounts] = field(default_factory=list)
    pages_factors: list[float] = field(default_factory=list)

    def add(self, step: StepFigures) -> None:
        """Adds the measurements of one step."""
        counters = Multiset(step.counters)
        own = _Totals(
            planned_pages=counters[Counter.PLANNED_PAGES],
            # Without device pages, host pages do not count as spilled.
            spilled_pages=counters[Counter.SPILLED_PAGES] if step.layout and step.layout.device_pages else 0,
            live_bytes=counters[Counter.LIVE_BYTES],
            tail_bytes=step.tail_bytes,
            dropped_gate_up=counters[Counter.DROPPED_GATE_UP],
        )
        self.totals = _Totals(*(sum(pair) for pair in zip(self.totals, own, strict=True)))
        self.buffers = _Buffers(
            step.capacity_factor,
            step.balanced_rows,
            step.buffer_rows,
            self.buffers.num_discards + step.num_discards,
        )
        for layer, rows in zip(step.passes, step.rows, strict=True):
            self.most_rows[layer] = max(rows, self.most_rows.get(layer, 0))
        self.rows_factors.append(step.factor_needed)
        self.pages_factors.append(step.pages_wanted / max(1, step.balanced_pages))
        self.level_counts.append(_LevelCounts(own.spilled_pages, own.dropped_gate_up, step.num_discards))
        self._keep_fullest(step, counters)
        if own.dropped_gate_up:
            self.factor_to_keep_all = max(self.factor_to_keep_all, _factor_to_keep_all(step))

    def _keep_fullest(self, step: StepFigures, counters: Multiset[Counter]) -> None:
        if step.layout is None:
            return
        pool = _Pool(
            step.layout.device_pages,
            step.layout.host_pages,
            step.layout.page_bytes,
            counters[Counter.HIGH_WATER_DEVICE],
            counters[Counter.HIGH_WATER_HOST],
            step.balanced_pages,
        )
        if self.fullest is None or pool.fullness >= self.pool.fullness:
            self.pool, self.fullest = pool, step

    def numbers(self, num_layers: int) -> list[float]:
        """Returns all measurements except `fullest` as a flat list, whose length is equal on all ranks."""
        rows = [self.most_rows.get(layer, 0) for layer in range(1, num_layers + 1)]
        return [
            self.factor_to_keep_all,
            *self.totals,
            *self.pool,
            *self.buffers,
            *rows,
            *self.rows_factors,
            *self.pages_factors,
            *sum(self.level_counts, ()),
        ]


@dataclass(frozen=True)
class _Rank:
    """The measurements gathered from one rank."""

    factor_to_keep_all: float
    totals: _Totals
    pool: _Pool
    buffers: _Buffers
    most_rows: list[int]
    rows_factors: list[float]
    pages_factors: list[float]
    level_counts: list[_LevelCounts]

    @classmethod
    def of(cls, numbers: list[float], num_layers: int) -> "_Rank":
        """Parses a list returned by _Interval.numbers."""
        rest = iter(numbers)

        def take(count: int) -> list[int]:
            return [int(next(rest)) for _ in range(count)]

        factor = next(rest)
        totals, pool = _Totals(*take(len(_Totals._fields))), _Pool(*take(len(_Pool._fields)))
        buffers = _Buffers(next(rest), *take(len(_Buffers._fields) - 1))
        rows, by_step = take(num_layers), list(rest)
        width = len(_LevelCounts._fields)
        steps = len(by_step) // (2 + width)
        counts = [int(count) for count in by_step[2 * steps :]]
        levels = [_LevelCounts(*counts[start : start + width]) for start in range(0, len(counts), width)]
        return cls(factor, totals, pool, buffers, rows, by_step[:steps], by_step[steps : 2 * steps], levels)


class StashMeter:
    """Accumulates the measurements of each step, and gathers them from all ranks at log lines and the last step."""

    def __init__(
        self, memory: KnowsLastStep, run_config: RunConfig, *, device: torch.device, has_notes: bool = True
    ) -> None:
        """Prepares an empty interval. has_notes: whether advice is added to the report."""
        self._memory, self._run_config, self._device = memory, run_config, device
        self._since = _Interval()
        # Plan of the last logged timeline: the ranks' pools, and the fullness of the fullest pool.
        self._shown: tuple[list[_Pool], float] = [], 0.0
        self._may_advise = has_notes

    def measure(self, report: StepReport) -> StepReport:
        """Sets stash at log lines. After the first steps, adds advice once if at least half of the steps recompute."""
        step = self._memory.last_step
        assert step is not None, "a step has ended"
        self._since.add(step)
        # The last step of a run counts as a log line, so that the factors of every step are logged.
        if report.iteration % self._run_config.logging.log_interval and not report.is_last:
            return report
        since, self._since = self._since, _Interval()
        stash = self._gather_sync(since)
        is_typical = report.iteration - stash.steps >= _UNTYPICAL_STEPS
        notes = report.notes
        if is_typical and self._may_advise and stash.pool is not None and _recomputes_often(stash):
            self._may_advise = False
            in_bytes = self._run_config.transformer.moe_paged_stash_buffer_bytes is not None
            notes = (*notes, advice_line(stash.pool, steps=stash.steps, in_bytes=in_bytes))
        return replace(report, stash=stash, notes=notes)

    def _gather_sync(self, since: _Interval) -> StashReport:
        """Gathers the interval's measurements from all ranks. Collective. NOTE: reads the device once per interval."""
        num_layers = self._run_config.transformer.num_layers + (self._run_config.transformer.mtp_num_layers or 0)
        own = torch.tensor([since.numbers(num_layers)], dtype=torch.float64, device=self._device)
        group = dist.group.WORLD if dist.is_initialized() else None
        ranks = [_Rank.of(row, num_layers) for row in all_gather_rows(own, group).wait().tolist()]
        buffers = max(rank.buffers for rank in ranks)
        most_rows = [max(rows) for rows in zip(*(rank.most_rows for rank in ranks), strict=True)]
        return StashReport(
            steps=len(since.rows_factors),
            void_steps=max(rank.buffers.num_discards for rank in ranks),  # the same on all ranks, which retry together
            capacity_factor=buffers.capacity_factor,
            factors_needed=_most_by_step([rank.rows_factors for rank in ranks]),
            balanced_rows=buffers.balanced_rows,
            buffer_rows=buffers.buffer_rows,
            rungs=_counts_by_level([rank.level_counts for rank in ranks]),
            rows={layer: rows for layer, rows in enumerate(most_rows, 1) if rows},
            pool=self._with_timeline(_pool_report(ranks), ranks, own=since.fullest),
        )

    def _with_timeline(
        self, pool: PoolReport | None, ranks: list[_Rank], *, own: StepFigures | None
    ) -> PoolReport | None:
        """Adds a timeline to the report if the plan is new, or if a step was fuller than all logged ones. Collective.

        own: the fullest step on this rank.
        """
        if pool is None:
            return None
        shown_plan, shown_fullness = self._shown
        plan, fullness = [rank.pool.plan for rank in ranks], ranks[pool.rank].pool.fullness
        if plan == shown_plan and fullness <= shown_fullness:
            return pool
        self._shown = plan, fullness
        return replace(pool, timeline=_timeline_of(pool.rank, own))


def _recomputes_often(stash: StashReport) -> bool:
    """Returns whether at least half of the steps recomputed tensors, and more pages would have avoided this."""
    if stash.pool is None or not stash.pool.factor_to_keep_all:
        return False
    counts = stash.rungs.get("dropped_gate_up", [])
    return 2 * sum(count > 0 for count in counts) >= stash.steps


def advice_line(pool: PoolReport, *, steps: int, in_bytes: bool) -> str:
    """Formats a line about the cost of recomputation, and the flag that would have avoided it in these steps.

    in_bytes: whether a flag specifies the size of device pages in bytes, which overrides the factor.
    """
    tier = "cuda" if pool.device_pages else "cpu"
    instead = " instead of --moe-paged-stash-buffer-bytes" if in_bytes and pool.device_pages else ""
    return (
        "  paged stash: recomputing gate_up does not change results, but costs time; "
        f"--moe-paged-stash-buffer-size-factor-{tier} {rounded_up(pool.factor_to_keep_all):.2f}{instead} would "
        f"have kept all tensors of the last {steps} steps; later steps may need more"
    )


def _most_by_step(ranks: list[list[float]]) -> tuple[float, ...]:
    """Returns the maximum over ranks for each step, rounded to seven digits to keep log lines short."""
    return tuple(float(f"{max(step):.7g}") for step in zip(*ranks, strict=True))


def _counts_by_level(ranks: list[list[_LevelCounts]]) -> dict[str, list[int]]:
    """Returns the counts of each reaction by step, summed over ranks, without reactions that never occurred.

    All ranks retry a discarded step together, so discards are not summed.
    """
    steps = [
        _LevelCounts(*map(sum, zip(*step, strict=True)))._replace(void_steps=max(one.void_steps for one in step))
        for step in zip(*ranks, strict=True)
    ]
    kinds = {name: list(counts) for name, counts in zip(_LevelCounts._fields, zip(*steps, strict=True), strict=True)}
    return {name: counts for name, counts in kinds.items() if any(counts)}


def _factor_to_keep_all(step: StepFigures) -> float:
    """Returns the size factor with which the step would have recomputed nothing.

    It applies to device pages, or to host pages if the device has none. Returns 0 if more pages would not have helped,
    because the order of the step was not known yet.
    """
    assert step.layout is not None, "a pool dropped tensors"
    num_pages = pages_to_keep_all(step)
    if not step.reserve or num_pages <= step.layout.device_pages + step.layout.host_pages:
        return 0.0
    on_host = step.layout.host_pages if step.layout.device_pages else 0
    return (num_pages - on_host) / max(1, step.balanced_pages)


def _pool_report(ranks: list[_Rank]) -> PoolReport | None:
    with_pool = [number for number, rank in enumerate(ranks) if rank.pool.page_bytes]
    if not with_pool:
        return None
    fullest = max(with_pool, key=lambda number: ranks[number].pool.fullness)
    pool = ranks[fullest].pool
    totals = _Totals(*map(sum, zip(*(rank.totals for rank in ranks), strict=True)))
    pools = [ranks[number].pool for number in with_pool]
    return PoolReport(
        rank=fullest,
        **{name: value for name, value in pool._asdict().items() if name != "balanced_pages"},
        **totals._asdict(),
        factor=min(one.device_pages / max(1, one.balanced_pages) for one in pools),
        factors_needed=_most_by_step([ranks[number].pages_factors for number in with_pool]),
        factor_to_keep_all=max(rank.factor_to_keep_all for rank in ranks),
    )


def _timeline_of(rank: int, own: StepFigures | None) -> dict[str, Any]:
    """Broadcasts the timeline of a rank's fullest step to all ranks. Collective.

    rank: the rank with the timeline. own: the fullest step on this rank.
    """
    found: list[Any] = [None]
    if not dist.is_initialized() or dist.get_rank() == rank or is_fake(dist.group.WORLD):
        assert own is not None, "this rank has a pool"
        found = [stash_timeline(own)]
    if dist.is_initialized() and not is_fake(dist.group.WORLD):
        dist.broadcast_object_list(found, src=rank)
    timeline: dict[str, Any] = found[0]
    return timeline


def stash_timeline(step: StepFigures) -> dict[str, Any]:
    """Simulates from a step's live rows when the step allocated and released pages, with the pool's rules.

    "passes": the number of the layer that ran forward, or its negative for backward and weight gradients, in order.
    "weights", if there are any: the indices in passes of weight gradients that are computed later than their backward.
    "changes": a list of [index in passes, layer, device pages, host pages], in the order of page_moves. Numbers of
    released pages are negative.
    """
    assert step.layout is not None, "without a pool there are no pages"
    pool, rows, changes = PoolModel(step.layout), rows_by_group(step.passes, step.rows), []
    for move in page_moves(step.events, prefetch_groups=step.prefetch_groups):
        group = move.group
        if move.is_taken:
            reserve = step.reserve[move.forward_index] if step.reserve else (0, 0, 0)
            pool.plan(group, step.specs[group[0]], num_rows=rows.get(group, 0), reserve=reserve)
            changes.append([move.place, *_pages_of(group, pool, sign=1)])
        else:
            changes.append([move.place, *_pages_of(group, pool, sign=-1)])
            pool.release(group)
    passes = [layer_of(one.name) * (1 if one.kind is EventKind.FORWARD else -1) for one in step.events]
    weights = [place for place, one in enumerate(step.events) if one.kind is EventKind.WEIGHT]
    return {"passes": passes, "changes": changes} | ({"weights": weights} if weights else {})


def pages_to_keep_all(step: StepFigures) -> int:
    """Returns the size of the smallest pool, in pages of both tiers, with which the step would recompute nothing.

    The size may exceed pages_wanted, because gate_up leaves the reserved pages free.
    """
    assert step.layout is not None, "without a pool there are no pages"
    rows = rows_by_group(step.passes, step.rows)
    held: dict[GroupKey, int] = {}
    num_held = most = 0
    for move in page_moves(step.events, prefetch_groups=step.prefetch_groups):
        if not move.is_taken:
            num_held -= held.pop(move.group)
            continue
        reserve = step.reserve[move.forward_index] if step.reserve else (0, 0, 0)
        own = pages_for(step.specs[move.group[0]], rows.get(move.group, 0), layout=step.layout)
        most = max([most, *(num_held + own.up_to(kind) + reserve[kind] for kind in Priority if own[kind])])
        held[move.group] = sum(own)
        num_held += held[move.group]
    return most


def _pages_of(group: GroupKey, pool: PoolModel, *, sign: int) -> tuple[int, int, int]:
    tensors = pool.held[group]
    return layer_of(group[0]), sign * sum(one.device for one in tensors), sign * sum(one.host for one in tensors)
