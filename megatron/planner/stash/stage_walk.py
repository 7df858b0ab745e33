"""One stage of a planned run, from step to step: what its ranks learned of rows, their pools and what these decide.

All of it by the functions of the paged stash itself; expert_memory.py does the same of one rank that runs. What all
stages do together, as growing, is walk.py's.
"""

from dataclasses import replace

import numpy as np

from megatron.core.transformer.moe.paged_stash import PoolLayout, Priority
from megatron.core.transformer.moe.paged_stash.arithmetic import ReserveRow, reserve_table, resident_groups
from megatron.core.transformer.moe.paged_stash.page_layout import PagesByPriority, pages_for
from megatron.core.transformer.moe.paged_stash.sizing import (
    HEADROOM,
    RESERVE_STEPS,
    LearnedSizes,
    StepNeeds,
    expected_share,
    grown_sizes,
    pool_layout,
)
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey, layer_of
from megatron.planner.stash.pools import PoolOutcomes, PoolSizes, Reserves, simulate_pools
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stages import PlannedRun, StashFlags


class StageWalk:
    """The ranks of one stage, N of them, from a run's start.

    1. plan: the pools for steps of so many micro-batches.
    2. outcomes: what these would meet in some steps. Nothing is learned from them yet.
    3. learn: the rows of steps that were not void; or lack: what a void one asks for.
    Attribute layouts: the pool of each rank; None where nothing is stashed.
    """

    def __init__(self, run: PlannedRun, flags: StashFlags, *, stage: int, num_ranks: int) -> None:
        self._run, self._stage, self._flags, self._num_ranks = run, stage, flags, num_ranks
        self.layers = run.stages[stage].layers
        self.layouts: list[PoolLayout] | None = None
        # Of each layer and rank, the most rows that a pass had, over the balanced case.
        self._shares = np.zeros((len(self.layers), num_ranks))
        # Of each recent step and rank, and of attempts at the next step, the most rows of a pass of any layer.
        self._recent = np.zeros((0, num_ranks))
        self._attempted = np.zeros(num_ranks)
        self._has_learned = np.zeros(num_ranks, dtype=bool)
        self._is_measured = False

    @property
    def measures_first_step(self) -> bool:
        """Whether the first step decides how large pools are."""
        flags = self._flags
        factors = flags.moe_paged_stash_buffer_size_factor_cuda, flags.moe_paged_stash_buffer_size_factor_cpu
        return not self._is_measured and min(factors) < 0

    def plan(self, num_microbatches: int, *, grown: LearnedSizes, capacity_factor: float) -> None:
        """Pools for steps of so many micro-batches; those that are large enough stay. grown: the growth so far."""
        self._capacity_factor, self._num_microbatches = capacity_factor, num_microbatches
        self.needs = self._run.needs(
            self._flags, self._stage, num_microbatches=num_microbatches, max_rows=self._max_rows
        )
        if not self.needs.events:
            return
        # Ranks differ only where the first step is measured.
        alike = not self._has_learned.any() or not self._counts_rows
        ranks = range(1 if alike else self._num_ranks)
        made = [pool_layout(self._flags, self.needs, learned=self._learned(rank, grown)) for rank in ranks]
        layouts = [layout for layout in made if layout is not None]
        if not layouts:
            return
        layouts = layouts * self._num_ranks if alike else layouts
        old = self.layouts or layouts
        self.layouts = [_larger(one, other) for one, other in zip(layouts, old, strict=True)]

    def outcomes(self, part: RoutingSpan) -> PoolOutcomes | None:
        """Simulates the pools in these steps, with the planned number of micro-batches each; None without a stash."""
        if self.layouts is None:
            return None
        specs = self.needs.specs
        if not self._flags.has_rungs:
            specs = [replace(spec, priority=Priority.INPUT) for spec in specs]
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
            reserves=self._reserves(part) if self._flags.has_rungs else None,
        )

    def wanted_pages(self, part: RoutingSpan) -> np.ndarray:
        """[S, N], int64: the most pages held at once, had every tensor got its own."""
        if self.layouts is None:
            return np.zeros((part.num_steps, self._num_ranks), dtype=np.int64)
        held = peak = np.zeros((part.num_steps, self._num_ranks), dtype=np.int64)
        pages: dict[GroupKey, np.ndarray] = {}
        for move in self._run.stages[self._stage].moves(self._num_microbatches, 0):
            if move.is_taken:
                live = part.rows[layer_of(move.group[0])][move.group[1]].astype(np.int64)
                pages[move.group] = sum(-(-live * spec.row_bytes // self.needs.page_bytes) for spec in self.needs.specs)
                held = held + pages[move.group]
                peak = np.maximum(peak, held)
            else:
                held = held - pages.pop(move.group)
        return peak

    def learn(self, part: RoutingSpan) -> None:
        """Records the rows of steps that were not void."""
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

    def lack(self, step: RoutingSpan, rank: int, *, used_share: float) -> LearnedSizes:
        """Returns the sizes that a rank asks for whose pool was too small in this one step, and learns the step's rows.

        used_share: the share for which pages were reserved in it.
        """
        assert self.layouts is not None, "its pool was too small"
        rows = {layer: step.rows[layer][:, 0, rank] for layer in self.layers}
        wanted = self.needs.pages(
            lambda group: int(rows[layer_of(group[0])][group[1]]),
            up_to=Priority.INPUT if self._flags.has_rungs else Priority.ACT,
        )
        shares = self._shares_of(step)[0, rank]
        self._shares[:, rank] = np.maximum(self._shares[:, rank], shares)
        self._attempted[rank] = max(self._attempted[rank], shares.max())
        self._has_learned[rank] = True
        layout = self.layouts[rank]
        is_short = float(self.shares(step)[0, rank]) > used_share
        if self._flags.has_rungs and is_short and wanted * HEADROOM <= layout.num_pages:
            return LearnedSizes()
        return grown_sizes(layout, self.needs, wanted_pages=wanted) or LearnedSizes()

    def shares(self, part: RoutingSpan) -> np.ndarray:
        """Returns the share of C that each of these steps reserves pages for, if none is void: [S, N]."""
        seen = np.concatenate([self._recent, self._shares_of(part).max(axis=2)])
        first = len(self._recent)
        most = np.stack(
            [
                seen[max(0, step - RESERVE_STEPS) : step].max(axis=0, initial=0.0)
                for step in range(first, first + part.num_steps)
            ]
        )
        # Attempts count until their step is done.
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
        """[S, N, layers]: the most rows of each layer's passes, over the balanced case."""
        most = np.stack([part.rows[layer].max(axis=0) for layer in self.layers], axis=2)
        shares: np.ndarray = most.astype(np.int64) / self._run.ranks.balanced_rows
        return shares

    def _share_of(self, most_share: float) -> float:
        return expected_share(most_share, balanced_rows=self._run.ranks.balanced_rows, max_rows=self._max_rows)

    def _reserves(self, part: RoutingSpan) -> Reserves:
        rows = (self.shares(part) * self._max_rows).astype(np.int64)  # as Reserve rounds them
        distinct, which = np.unique(rows, return_inverse=True)
        tables = np.array([_reserve(self.needs, int(count)) for count in distinct], dtype=np.int64)
        return Reserves(tables.reshape(len(distinct), -1, len(Priority)), which.reshape(rows.shape))


def _reserve(needs: StepNeeds, num_rows: int) -> list[ReserveRow]:
    """Returns the pages that each forward of the step leaves free if passes have that many rows."""
    own, resident = (
        pages_for(needs.specs, num_rows, layout=PoolLayout(needs.page_bytes, 1)),
        resident_groups(needs.events),
    )

    def pages(group: GroupKey) -> PagesByPriority:
        return PagesByPriority() if group in resident else own

    return reserve_table(needs.events, pages, at_least=pages)


def _larger(one: PoolLayout, other: PoolLayout) -> PoolLayout:
    device, host = max(one.device_pages, other.device_pages), max(one.host_pages, other.host_pages)
    return PoolLayout(one.page_bytes, device, host)
