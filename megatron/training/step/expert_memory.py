"""Defines ExpertMemory, which plans, checks and grows the buffers and pages of a rank's static expert layers.

expert_step.py implements the work of a layer within a step, sizing.py computes sizes, and step_runner.py decides on
retries.
"""

import copy
import functools
from collections import Counter as Multiset
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.device import default_device, keep_cpu_heap
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.pipeline_parallel.expansion import EventKind as ExpertEventKind
from megatron.core.pipeline_parallel.expansion import ExpertEvent, expand, kept_events
from megatron.core.pipeline_parallel.schedule import configured_schedule, pipeline_of, stage_orders
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher
from megatron.core.transformer.moe.expert_step import ExpertStep
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, takes_order
from megatron.core.transformer.moe.paged_stash import (
    Counter,
    EventKind,
    PagedStash,
    PagePool,
    PoolLayout,
    Priority,
    StashEvent,
    StashStreams,
    TensorSpec,
    layer_name,
)
from megatron.core.transformer.moe.paged_stash.arithmetic import ReserveRow
from megatron.core.transformer.moe.paged_stash.group_memory import copy_programs
from megatron.core.transformer.moe.paged_stash.page_layout import LEAST_IMPORTANT, Tier
from megatron.core.transformer.moe.paged_stash.page_pool import TierMemoryError
from megatron.core.transformer.moe.paged_stash.sizing import (
    HEADROOM,
    RESERVE_STEPS,
    LearnedSizes,
    PoolBytes,
    StepNeeds,
    capacity_factor,
    check_effect,
    check_encoding,
    expected_share,
    gain_line,
    grown_sizes,
    learned_lines,
    mean_row_bytes,
    page_size_on_gpu,
    pool_bytes,
    pool_layout,
    prefetch_groups,
    rounded_up,
    scratch_pages,
    scratch_sets,
    stash_footprint,
    step_needs,
)
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlock
from megatron.core.transformer.paged_stash_config import PagedStashConfig
from megatron.core.transformer.recompute import Recomputed
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.command_line.config_builder import flags_named_in_errors
from megatron.training.step.step_runner import ExpertOverflowError

# Maximum number of cached plans, one per number of microbatches. Sufficient for numbers that alternate. The numbers of
# a batch-size ramp-up never recur.
_MAX_PLANS = 8


@dataclass(frozen=True)
class StepFigures:
    """Measurements of a complete training step on this rank, in host memory. meters/stash.py gathers them over ranks.

    rows: live rows of each expert forward, in order. passes: layer numbers of these forwards, from 1. balanced_rows:
    live rows of a forward under balanced routing; 0 on a stage without experts. Live rows include padding.
    capacity_factor: factor of this step's buffers. factor_needed: smallest sufficient factor. buffer_rows: C; 0 on a
    stage without experts. num_discards: number of discarded attempts at the step.

    With a stash: layout: sizes of the pool. counters: values at the end of the step. tail_bytes: unused bytes in pages
    that the step allocated. pages_wanted: peak number of pages if every tensor is stashed. balanced_pages: this peak
    for the longest step planned so far, with balanced_rows in every forward. events: passes of expert groups, in order.
    specs: tensors that a group stashes, by its name. reserve: pages that each forward leaves free; () for none.
    prefetch_groups: number of groups that release their pages ahead of their backward. Without a stash, layout is None
    and the other fields are empty or 0.
    """

    layout: PoolLayout | None
    counters: dict[Counter, int]
    tail_bytes: int
    rows: tuple[int, ...]
    passes: tuple[int, ...]
    balanced_rows: int
    pages_wanted: int
    balanced_pages: int
    capacity_factor: float
    factor_needed: float
    num_discards: int
    events: tuple[StashEvent, ...]
    specs: Mapping[str, Sequence[TensorSpec]]
    buffer_rows: int
    reserve: tuple[ReserveRow, ...]
    prefetch_groups: int


def rows_by_group(passes: Sequence[int], rows: Sequence[int]) -> dict[GroupKey, int]:
    """Maps each expert forward of a step to its live rows.

    passes: layer numbers of the forwards, in order. rows: rows of the forwards; further elements are ignored.
    """
    forwards: Multiset[int] = Multiset()
    found = {}
    for layer, count in zip(passes, rows):
        found[layer_name(layer), forwards[layer]] = count
        forwards[layer] += 1
    return found


class Shortfall(NamedTuple):
    """Required and available size on a rank whose step overflowed: capacity factors, or numbers of pages.

    pages_for: description of the tensors without pages; None for capacity factors.
    """

    needed: float
    given: float
    pages_for: str | None = None


class ExpertSchedule:
    """The MoE layers of a rank's model chunks, and their order in a step."""

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        groups: ProcessGroupCollection,
        *,
        config: TransformerConfig,
    ) -> None:
        """Finds the MoE layers of the chunks. config: chooses the order of the step's passes, and the stash."""
        self.layers = [[part for part in chunk.modules() if isinstance(part, MoELayer)] for chunk in chunks]
        self._layer_map = [[layer.router.layer_number for layer in layers] for layers in self.layers]
        self._segments = _recomputed_segments(chunks)
        self._stage, self._order = group_rank(groups.pp), configured_schedule(config)
        self._pipeline = pipeline_of(self._order, group_size(groups.pp), len(chunks))
        self.events = lru_cache(maxsize=16)(self._events)

    def _events(self, num_microbatches: int) -> tuple[StashEvent, ...]:
        """Returns the passes of a training step whose tensors are saved for backward, in order."""
        orders = stage_orders(self._pipeline, num_microbatches, self._order)
        recompute = {layer: number for number, (layers, _) in enumerate(self._segments) for layer in layers}
        without_turns = {layer for layers, run in self._segments if run.draws_numbers for layer in layers}
        events = expand(orders[self._stage], self._layer_map, recompute=recompute, recomputed_alone=without_turns)
        return stash_events(kept_events(events), late_layers=self._late_layers())

    def _late_layers(self) -> set[int]:
        """Returns the numbers of the layers whose rows remain in pages until their weight pass, which reads them.

        Other modules than GroupedMLP read in backward whatever they have saved.
        """
        layers = [layer for of_chunk in self.layers for layer in of_chunk]
        return {
            layer.router.layer_number
            for layer in layers
            if isinstance(layer.experts, GroupedMLP) and layer.experts.trains_on_rows
        }


def stash_events(events: Sequence[ExpertEvent], *, late_layers: Collection[int] = ()) -> tuple[StashEvent, ...]:
    """Converts expert events of a schedule to stash events.

    events: the result of kept_events. late_layers: numbers of the layers whose pages are released in weight passes.
    """
    return tuple(
        StashEvent(EventKind(one.kind.value), layer_name(one.layer), one.instance)
        for one in events
        if one.kind is not ExpertEventKind.WEIGHT or one.layer in late_layers
    )


def _recomputed_segments(chunks: Sequence[nn.Module]) -> list[tuple[list[int], Recomputed]]:
    """Lists the segments of layers that backward recomputes as a whole: numbers of their layers, and their run."""
    blocks = [part for chunk in chunks for part in chunk.modules() if isinstance(part, TransformerBlock)]
    segments = [
        ([block.layers.offset + index + 1 for index in segment.layers], segment.run)
        for block in blocks
        for segment in block.arrangement.segments
        if isinstance(segment.run, Recomputed)
    ]
    further = [part for chunk in chunks for part in chunk.modules() if isinstance(part, MultiTokenPredictionBlock)]
    return segments + [([layer], run) for block in further for layer, run in block.recomputed_layers().items()]


def build_expert_memory(
    model: Sequence[nn.Module], *, seq_length: int, micro_batch_size: int, groups: ProcessGroupCollection
) -> "ExpertMemory | None":
    """Builds the expert memory of this rank's model chunks. Returns None if experts are dropless."""
    config: TransformerConfig = get_model_config(model[0])
    if config.num_moe_experts is None or config.moe_expert_rank_capacity_factor is None:
        return None
    chunks = unwrap_model(list(model))
    schedule = ExpertSchedule(chunks, groups, config=config)
    shared = group_size(groups.cp) * (group_size(groups.tp) if config.sequence_parallel else 1)
    tokens = seq_length * micro_batch_size // shared
    return ExpertMemory(schedule, config, tokens_per_rank=tokens, expert_ranks=group_size(groups.tp_ep))


@dataclass(frozen=True)
class _Plan:
    """The stash plan for steps with a certain number of microbatches. stash: None if nothing is stashed."""

    needs: StepNeeds
    stash: PagedStash | None


class ExpertMemory:
    """The expert buffers and the stash of one rank. Exists also on ranks whose stage has no experts.

    1. prepare: allocates pages for a step of the run, after a checkpoint with learned sizes was loaded.
    2. begin_step: sets the order of the step's passes, and clears buffers and pages.
    3. overflow_flags: whether rows or pages were missing. If so on any rank, call grow_sync and repeat from begin_step.
    4. end_step: reads and records the row and page requirements of the step.

    step: the ExpertStep that the layers share. last_step: measurements of the last complete training step.
    release_graphs: called before pages or buffers are replaced, to drop the graphs that use them. epoch: increases when
    captured steps can no longer be replayed, because shapes, the pool, the stash for a number of microbatches, or the
    order of that stash changed. A change of the reserve does not increase it. Read it after begin_step. Ranks may have
    different epochs.
    """

    def __init__(
        self, schedule: ExpertSchedule, config: TransformerConfig, *, tokens_per_rank: int, expert_ranks: int
    ) -> None:
        """Creates the expert memory without pages, and connects it to the layers of the schedule.

        tokens_per_rank: T of a microbatch. expert_ranks: number of ranks that share experts.
        """
        self.last_step: StepFigures | None = None
        self.epoch = 0
        self.release_graphs: Callable[[], None] = lambda: None
        layers = [layer for of_chunk in schedule.layers for layer in of_chunk]
        if config.moe_paged_stash:
            # Ranks may have different layers.
            with all_ranks_agree(), flags_named_in_errors():
                config = _without_pages_for_others(config, layers)
                if default_device().type == "cuda":
                    # A copy that is not validated again, because its other values are derived already.
                    page_size, config = page_size_on_gpu(config), copy.copy(config)
                    config.moe_paged_stash_page_size = page_size
        assert config.moe_expert_rank_capacity_factor is not None, "dropless experts have no buffers of a fixed size"
        self._schedule, self._config, self._tokens = schedule, config, tokens_per_rank
        self._device = default_device()
        self.step = ExpertStep(self._device)
        self._streams = StashStreams.on(self._device)  # shared by all stashes, of which one is active
        self._dispatchers: list[MoEStaticTokenDispatcher] = []
        for layer in layers:
            layer.expert_step = self.step
            assert isinstance(layer.token_dispatcher, MoEStaticTokenDispatcher), "chosen by the capacity factor"
            self._dispatchers.append(layer.token_dispatcher)
        # Live rows of a balanced forward; 0 on a stage without experts, which has no buffers.
        self._balanced_rows = self._dispatchers[0].budget.balanced_live_rows(tokens_per_rank) if layers else 0
        with flags_named_in_errors():
            check_encoding(config)
        self._learned = LearnedSizes(expert_ranks=expert_ranks, row_bytes=mean_row_bytes(config))
        # Largest number of rows of a forward, relative to balanced routing: in each recent step, in the discarded
        # attempts at the current step, and in the steps before the loaded checkpoint.
        self._recent_shares: deque[float] = deque(maxlen=RESERVE_STEPS)
        self._attempted_share = self._share_before = 0.0
        self._capacity_factor = config.moe_expert_rank_capacity_factor
        self._is_measured = False  # whether a training step has completed
        # Whether steps run expert groups in the schedule's order.
        self._is_planned = True
        self._is_training = True
        self._num_discards = 0
        # Number of microbatches for which the stash is planned; None if sizes may have changed since.
        self._num_microbatches: int | None = None
        self._plans: dict[int, _Plan] = {}  # by number of microbatches, latest last; all use the same pool
        # Peak number of pages in the longest planned step with balanced routing. Pool factors are multiples of it.
        self._longest_pages = 0
        self.needs = self._needs(None)

    @property
    def stash(self) -> PagedStash | None:
        """The stash in which this rank's experts save rows for backward; None if whole buffers are saved."""
        return self.step.stash

    def prepare(self, learned: LearnedSizes, *, num_microbatches: int, pp_group: dist.ProcessGroup | None) -> list[str]:
        """Allocates the pool for steps of num_microbatches. learned: sizes from a checkpoint. Collective.

        Returns log lines with the memory that the stash saves on each stage. Raises ValueError on all ranks if the
        stash could never have an effect, or if a rank does not have enough memory for it.
        """
        valid = learned.valid_for(expert_ranks=self._learned.expert_ranks, row_bytes=self._learned.row_bytes)
        lines = learned_lines(self._config, learned, valid=valid)
        self.adopt(valid)
        self._share_before = max(self._learned.rows_share.values(), default=0.0)
        if not self._config.moe_paged_stash:
            return lines
        self._plan(num_microbatches)
        own = "no expert group is stashed here"
        if self.stash is not None:
            layout = self.stash.pool.layout
            footprint = stash_footprint(self._config, self.needs, layout=layout)
            own = gain_line(footprint, layout, config=self._config)
        stages = gather_objects((self.needs.events, own), pp_group)
        with flags_named_in_errors():
            check_effect(events for events, _ in stages)
        if len(stages) == 1:
            return [*lines, own]
        return lines + [f"stage {stage}: {line}" for stage, (_, line) in enumerate(stages)]

    def pool_bytes_for(self, num_microbatches: int) -> PoolBytes:
        """Returns the bytes of the pool that `prepare` would allocate without learned sizes."""
        self.needs = self._needs(num_microbatches)
        return pool_bytes(self._config, self.needs, self._layout(None))

    def begin_step(self, *, num_microbatches: int, forward_only: bool) -> None:
        """Prepares buffers and stash for the passes of a step, including retries and steps after an error."""
        self.step.begin()
        self._is_training = not forward_only
        if self._is_training and num_microbatches != self._num_microbatches:
            self._plan(num_microbatches)
        if self.stash is not None:
            order = self.stash.order.events
            self.stash.reset(enabled=self._is_training)
            self.epoch += self.stash.order.events is not order

    def overflow_flags(self) -> Tensor:
        """Returns whether experts and whether the stash overflowed on this rank: [2], fp64, 0 or 1, on the device."""
        expert = self.step.rows_missing > 0
        stash = torch.zeros_like(expert) if self.stash is None else self.stash.void.view(1) > 0
        return torch.cat([expert, stash]).double()

    def end_step(self) -> None:
        """Records the requirements of a training step that did not overflow. Does nothing after an evaluation."""
        if self._is_training:
            self.last_step = self._figures_sync()
            self._remember(self.last_step)
            self._num_discards = 0
            if self.stash is not None:
                self._follow(self.stash)

    def _follow(self, stash: PagedStash) -> None:
        """Adapts the stash if the step departed from the planned order, and updates the reserve otherwise."""
        if self._is_planned and stash.order.departed:
            # Some layers save nothing, such as frozen layers below all trained layers. The stash then learns the order.
            self._is_planned = False
            self._forget_plans()
            # _plan is collective, and on other ranks the order may not have departed.
            self._keep_plan(self._stash_over(stash.pool))
        else:
            stash.set_reserved_share(self._expected_share())

    def grow_sync(self, *, iteration: int) -> str:
        """Grows buffers or pools on all ranks after any rank overflowed, and returns a line for the log. Collective.

        Raises ExpertOverflowError on all ranks under the policy "error". NOTE: reads the device.
        """
        # Discarded evaluations are not counted.
        self._num_discards += self._is_training
        everyone = gather_objects(self._needed_sizes_sync(), dist.group.WORLD)
        shortfalls = describe_shortfalls([shortfall for shortfall, _ in everyone])
        grown = functools.reduce(LearnedSizes.merged, (sizes for _, sizes in everyone))
        if self._config.moe_paged_stash_overflow_policy == "error":
            raise ExpertOverflowError(
                f"iteration {iteration} overflowed: {shortfalls}. --moe-paged-stash-overflow-policy is error: give "
                f"{_as_flags(grown, self._config)}, or choose another policy"
            )
        self.adopt(grown)
        growth = _as_flags(grown, self._config) or "more pages are reserved for the experts' inputs"
        return f"from now on {growth}; {shortfalls}"

    def adopt(self, sizes: LearnedSizes) -> None:
        """Adopts sizes learned by earlier steps, other ranks or a checkpoint. No size becomes smaller. Collective."""
        self._learned = self._learned.merged(sizes)
        before, self._capacity_factor = self._capacity_factor, capacity_factor(self._capacity_factor, self._learned)
        if self._capacity_factor != before:
            self._forget_plans()
        for dispatcher in self._dispatchers:
            dispatcher.set_capacity_factor(self._capacity_factor)
            # If the factor has grown, graphs that used the old memory have already been dropped.
            dispatcher.reserve(self._tokens, row_bytes=self._config.hidden_size * self._config.params_dtype.itemsize)
        self._num_microbatches = None

    def learned_sync(self) -> LearnedSizes:
        """Returns the sizes that all ranks have learned so far, for a checkpoint. Collective."""
        return functools.reduce(LearnedSizes.merged, gather_objects(self._learned, dist.group.WORLD))

    @property
    def max_rows(self) -> int:
        """C, the number of rows of an expert buffer, the same for every layer; 0 on a stage without experts."""
        return self._dispatchers[0].budget.rows_of_rank(self._tokens) if self._dispatchers else 0

    def _needs(self, num_microbatches: int | None) -> StepNeeds:
        planned = self._config.moe_paged_stash and num_microbatches is not None
        events = self._schedule.events(num_microbatches) if planned else ()
        rows = self.max_rows if events else 0
        return step_needs(self._config, events, max_rows=rows, balanced_rows=self._balanced_rows)

    def _plan(self, num_microbatches: int) -> None:
        """Builds the stash for steps of num_microbatches. Reuses the pool and its stashes if the pool is large enough.

        Collective, even if this rank already has the plan, because other ranks may have dropped their plans.
        """
        plan = self._plans.get(num_microbatches)
        self._num_microbatches, self.needs = num_microbatches, plan.needs if plan else self._needs(num_microbatches)
        self._longest_pages = max(self._longest_pages, self.needs.balanced_pages)
        if not self._config.moe_paged_stash:
            return
        pool = None
        if self.stash is not None:
            pool = self.stash.pool
            # The next stash resets the pool, and no release of this one may run after that.
            self.stash.join()
        old, scratch = None if pool is None else pool.layout, scratch_pages(self._config, self.needs)
        with all_ranks_agree(), flags_named_in_errors():
            layout = self._layout(old)
        if layout != old or (pool is not None and scratch > pool.scratch_pages):
            if self._plans:
                self._forget_plans()
            self.step.stash = plan = None
            if pool is not None and not pool.is_in_graphs:
                # Closed before the new pool is allocated, because memory may not suffice for both pools. A pool that
                # graphs still use is freed with the last of these graphs.
                pool.close_sync()
            sets = scratch_sets(self._config)
            sizes = {"scratch_pages": scratch, "scratch_sets": sets} if sets else {}
            pool = open_pool(self._device, layout, config=self._config, **sizes)
        else:
            # Participates in the collective, because other ranks may allocate pools.
            open_pool(self._device, None, config=self._config)
        if plan is None:
            stash = None if pool is None else self._stash_over(pool)
        else:
            stash = plan.stash
            if stash is not None:
                stash.set_reserved_share(self._expected_share())
        self._keep_plan(stash)

    def _keep_plan(self, stash: PagedStash | None) -> None:
        assert self._num_microbatches is not None, "planned, or in a step"
        self.step.stash = stash
        self._plans.pop(self._num_microbatches, None)
        self._plans[self._num_microbatches] = _Plan(self.needs, stash)
        if len(self._plans) > _MAX_PLANS:
            del self._plans[next(iter(self._plans))]
            self.epoch += 1

    def _forget_plans(self) -> None:
        self._plans.clear()
        self.epoch += 1
        # Graphs keep their own memory, their stash and its pages alive. The growth that follows needs this memory.
        self.release_graphs()

    def _layout(self, old: PoolLayout | None) -> PoolLayout | None:
        """Returns the pool layout for the current needs, at least as large as `old` on each tier. None if unneeded."""
        layout = pool_layout(self._config, self.needs, learned=self._learned)
        if layout is None or old is None:
            return layout
        device, host = max(layout.device_pages, old.device_pages), max(layout.host_pages, old.host_pages)
        return PoolLayout(layout.page_bytes, device, host)

    def _stash_over(self, pool: PagePool) -> PagedStash:
        return PagedStash(
            pool,
            prefetch_groups=prefetch_groups(self._config),
            num_programs=copy_programs(self._device, self._config.moe_paged_stash_copy_sms),
            events=self.needs.events if self._is_planned else None,
            reserved_share=self._expected_share(),
            has_rungs=self._config.stash_recomputes,
            specs=self.needs.specs if self._is_planned else None,
            streams=self._streams,
            computes_in_pages=self._config.stash_computes_in_pages,
            dtype=self._config.moe_paged_stash_dtype,
        )

    def _expected_share(self) -> float:
        """Returns the share of a buffer's C rows that a forward is expected to fill."""
        # In the first steps of a resumed run, the share is based on the steps before its checkpoint.
        before = self._share_before if len(self._recent_shares) < RESERVE_STEPS else 0.0
        most = max(before, self._attempted_share, *self._recent_shares)
        return expected_share(most, balanced_rows=self._balanced_rows, max_rows=self.max_rows)

    def _needed_sizes_sync(self) -> tuple[Shortfall | None, LearnedSizes]:
        """Returns this rank's shortfall, and sizes that would have sufficed. NOTE: reads the device.

        Missing rows increase the capacity factor, and missing pages the pool.
        """
        needed = float(self.step.factor_needed)
        if int(self.step.rows_missing) > 0:
            # Beyond largest_factor, no routing requires more rows, and buffers would not become larger.
            largest = self._dispatchers[0].budget.largest_factor
            grown = LearnedSizes(capacity_factor=max(needed, min(needed * float(HEADROOM), largest)))
            return Shortfall(needed, self._capacity_factor), grown
        if self.stash is None or not self.stash.is_void_sync():
            return None, LearnedSizes()
        rows = rows_by_group(self.step.passes, self.step.rows.tolist())
        must_have_pages = Priority.INPUT if self._config.stash_recomputes else LEAST_IMPORTANT
        wanted = self.needs.pages(lambda group: rows.get(group, 0), up_to=must_have_pages)
        layout = self.stash.pool.layout
        what = "the experts' inputs" if self._config.stash_recomputes else "all tensors that are saved for backward"
        shortfall = Shortfall(wanted, layout.num_pages, pages_for=what)
        self._attempted_share = max(self._attempted_share, self._learn_rows(rows.values()))
        is_short = self._expected_share() > self.stash.reserved_share
        if self._config.stash_recomputes and is_short and wanted * HEADROOM <= layout.num_pages:
            # The pool is large enough, but gate_up used too many pages, because fewer rows were expected. The reserve
            # for the rows just learned is sufficient.
            return shortfall, LearnedSizes()
        return shortfall, grown_sizes(layout, self.needs, wanted_pages=wanted) or LearnedSizes()

    def _figures_sync(self) -> StepFigures:
        """Reads the measurements of the step. NOTE: reads the device, which has finished the step."""
        needs, rows = self.needs, rows_by_group(self.step.passes, self.step.rows.tolist())
        occupancy = None if self.stash is None else self.stash.pool.occupancy_sync()
        return StepFigures(
            layout=None if self.stash is None else self.stash.pool.layout,
            counters={} if occupancy is None else occupancy.counters,
            tail_bytes=0 if occupancy is None else occupancy.tail_bytes,
            rows=tuple(rows.values()),
            passes=tuple(self.step.passes),
            balanced_rows=self._balanced_rows,
            buffer_rows=self.max_rows,
            pages_wanted=needs.pages(lambda group: rows.get(group, 0)),
            balanced_pages=self._longest_pages,
            capacity_factor=self._capacity_factor,
            # Buffer sizes are rounded up, so a factor may suffice for slightly more rows than it states.
            factor_needed=min(float(self.step.factor_needed), self._capacity_factor),
            num_discards=self._num_discards,
            events=tuple(needs.events),
            specs=needs.specs,
            reserve=self.stash.reserve
            if self.stash is not None and self._config.stash_recomputes and self._is_planned
            else (),
            prefetch_groups=prefetch_groups(self._config),
        )

    def _remember(self, figures: StepFigures) -> None:
        """Records each layer's largest number of rows. With negative factors, drops the plans after the first step."""
        self._recent_shares.append(self._learn_rows(figures.rows))
        self._attempted_share = 0.0
        config = self._config
        if (
            not self._is_measured
            and min(config.moe_paged_stash_buffer_size_factor_cuda, config.moe_paged_stash_buffer_size_factor_cpu) < 0
        ):
            # The next step allocates a pool for the peak of this step.
            self._forget_plans()
            if self.stash is not None:
                self.stash.join()
                if not self.stash.pool.is_in_graphs:
                    self.stash.pool.close_sync()
            self.step.stash = self._num_microbatches = None
        self._is_measured = True

    def _learn_rows(self, rows: Iterable[int]) -> float:
        """Records each layer's largest number of rows, relative to balanced routing, and returns the step's maximum.

        rows: live rows of each expert forward of the step, in order. Returns 0 for a step without forwards.
        """
        shares: dict[int, float] = {}
        for layer, live in zip(self.step.passes, rows):
            shares[layer] = max(shares.get(layer, 0.0), live / self._balanced_rows)
        self._learned = self._learned.merged(LearnedSizes(rows_share=shares))
        return max(shares.values(), default=0.0)


def _as_flags(sizes: LearnedSizes, config: TransformerConfig) -> str:
    """Formats the flags with which a run starts with these sizes."""
    in_bytes = config.moe_paged_stash_buffer_bytes is not None
    factors = (
        ("--moe-expert-rank-capacity-factor", sizes.capacity_factor, ""),
        (
            "--moe-paged-stash-buffer-size-factor-cuda",
            sizes.device_factor,
            " instead of --moe-paged-stash-buffer-bytes" if in_bytes else "",
        ),
        ("--moe-paged-stash-buffer-size-factor-cpu", sizes.host_factor, ""),
    )
    return ", ".join(
        f"{flag} {rounded_up(factor, decimals=3):.3f}{rest}" for flag, factor, rest in factors if factor is not None
    )


def _without_pages_for_others(config: TransformerConfig, layers: Sequence[MoELayer]) -> TransformerConfig:
    """Returns a configuration in which rows are copied if a layer's experts cannot compute in pages.

    Raises ValueError if the configuration requests pages for them.
    """
    other = next((layer.experts for layer in layers if not takes_order(layer.experts)), None)
    if other is None or not config.stash_computes_in_pages:
        return config
    if config.moe_paged_stash_compute == "pages":
        raise ValueError(
            f"moe_paged_stash_compute is 'pages', but the experts of a layer are {type(other).__name__}, whose forward "
            "takes rows: must be 'copies', or experts whose forward takes an order, such as GroupedMLP"
        )
    copied = copy.copy(config)
    copied.moe_paged_stash_compute = "copies"
    return copied


_CUDA, _CPU = "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"


def open_pool(
    device: torch.device, layout: PoolLayout | None, *, config: PagedStashConfig, **scratch: int
) -> PagePool | None:
    """Allocates this rank's pool. Returns None without a layout, on stages that stash nothing. Collective.

    scratch: scratch_pages and scratch_sets of the pool; nothing if rows are copied.

    Raises on every rank if a rank has too little memory: a ValueError naming the flag to change on that rank, and a
    RemoteRankError on the others.
    """
    pool = None
    with all_ranks_agree(), flags_named_in_errors():
        try:
            if layout is not None:
                # Setup has already called keep_cpu_heap. Here only its result matters.
                is_kept = device.type == "cpu" and keep_cpu_heap()
                pool = PagePool(device, layout, keeps_restored=not is_kept, **scratch)
        except TierMemoryError as error:
            assert layout is not None, "allocated"
            sets = scratch.get("scratch_sets", 0)
            raise ValueError(_advice(error, config, page_bytes=layout.page_bytes, scratch_sets=sets)) from error
    return pool


def _advice(error: TierMemoryError, config: PagedStashConfig, *, page_bytes: int, scratch_sets: int) -> str:
    wanted = (
        f"{error.num_bytes} bytes ({error.num_bytes / 2**30:.2f} GiB), in pages of {page_bytes} bytes "
        f"(moe_paged_stash_page_size {config.moe_paged_stash_page_size}),"
    )
    if error.tier is Tier.HOST:
        return (
            f"{_CPU} is {config.moe_paged_stash_buffer_size_factor_cpu}: {wanted} of page-locked host memory cannot be "
            "allocated; use a smaller factor or pages, run fewer ranks on this machine, or raise its limit of locked "
            "memory (ulimit -l)"
        )
    given = config.moe_paged_stash_buffer_bytes
    name = _CUDA if given is None else "moe_paged_stash_buffer_bytes"
    asked = config.moe_paged_stash_buffer_size_factor_cuda if given is None else given
    scratch = ""
    if config.stash_computes_in_pages:
        scratch = ", or moe_paged_stash_compute copies, which needs no scratch of a whole expert buffer"
    if scratch_sets > 1:
        scratch = (
            ", or moe_paged_stash_prefetch_layers 0, which needs one scratch of a whole expert buffer less" + scratch
        )
    return (
        f"{name} is {asked}: {wanted} cannot be allocated on the device; use a smaller value or smaller pages, and "
        f"{_CPU} for pages on the host{scratch}"
    )


def describe_shortfalls(ranks: Sequence[Shortfall | None]) -> str:
    """Describes the shortfalls of all ranks: one clause for each kind, with its ranks and the largest need.

    ranks: shortfall of each rank, in rank order; None for ranks without a shortfall.
    """
    clauses = []
    for pages_for in dict.fromkeys(shortfall.pages_for for shortfall in ranks if shortfall is not None):
        found = {
            rank: shortfall
            for rank, shortfall in enumerate(ranks)
            if shortfall is not None and shortfall.pages_for == pages_for
        }
        needed, given, _ = max(found.values(), key=lambda shortfall: shortfall.needed / max(1, shortfall.given))
        who = f"{'rank' if len(found) == 1 else 'ranks'} {', '.join(map(str, found))}"
        up_to = "" if len(found) == 1 else "up to "
        if pages_for is None:
            clauses.append(f"{who}: experts needed a capacity factor of {up_to}{needed:.3f}, not {given:.3f}")
        else:
            pages = f"{up_to}{needed} are needed at the same time, of {given} in the pool"
            if needed <= given:
                pages += ", where gate_up of earlier layers had too many"
            clauses.append(f"{who}: no pages for {pages_for}: {pages}")
    return "; ".join(clauses)
