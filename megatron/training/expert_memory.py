"""ExpertMemory: buffers and pages of a rank's static expert layers, from step to step: planned, watched and grown.

What a layer does in a step is expert_step.py's, sizes are sizing.py's, when a step runs again is step_runner.py's.
"""

import argparse
import functools
from collections import Counter as Multiset
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.agreement import all_ranks_agree
from megatron.core.device import default_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher
from megatron.core.transformer.moe.expert_step import ExpertStep
from megatron.core.transformer.moe.paged_stash import PagedStash, PagePool, PoolLayout, Priority
from megatron.core.transformer.moe.paged_stash.sizing import (
    LearnedSizes,
    StepNeeds,
    capacity_factor,
    expert_specs,
    grown_sizes,
    page_bytes,
    pool_layout,
)
from megatron.core.transformer.moe.paged_stash.stash_order import Group
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.console import print_rank_0
from megatron.training.expert_schedule import ExpertSchedule
from megatron.training.stash_figures import StepFigures
from megatron.training.step_runner import ExpertOverflowError

# Of what a void step needed: the next steps may need a little more.
_HEADROOM = 1.1


def build_expert_memory(
    model: Sequence[nn.Module], args: argparse.Namespace, groups: ProcessGroupCollection
) -> "ExpertMemory | None":
    """That of the model's chunks on this rank; None where experts have as many rows as come."""
    config: TransformerConfig = get_model_config(model[0])
    if config.num_moe_experts is None or config.moe_expert_rank_capacity_factor is None:
        return None
    chunks = unwrap_model(list(model))
    schedule = ExpertSchedule(chunks, groups, microbatch_group_size=config.microbatch_group_size_per_vp_stage)
    shared = group_size(groups.cp) * (group_size(groups.tp) if config.sequence_parallel else 1)
    tokens = args.seq_length * args.micro_batch_size // shared
    return ExpertMemory(schedule, config, tokens_per_rank=tokens, expert_ranks=group_size(groups.tp_ep))


class ExpertMemory:
    """Of one rank; all ranks of a run have one, whether their stages hold experts or not.

    1. prepare: pages for a step of the run, once the checkpoint has told what it learned.
    2. begin_step: the order of the step's passes is known, buffers and pages are empty.
    3. flags: whether rows or pages were lacking; if they were on any rank, grow_sync and begin_step again.
    4. end_step: what the step needed is read and remembered.
    Attributes: step, what the layers share. last_step: the figures of the last complete training step.
    """

    def __init__(
        self, schedule: ExpertSchedule, config: TransformerConfig, *, tokens_per_rank: int, expert_ranks: int
    ) -> None:
        """tokens_per_rank: T, of a microbatch. expert_ranks: how many share the experts."""
        assert config.moe_expert_rank_capacity_factor is not None
        self.last_step: StepFigures | None = None
        self._schedule, self._config, self._tokens = schedule, config, tokens_per_rank
        self._device = default_device()
        self.step = ExpertStep(self._device)
        self._layers = [layer for layers in schedule.layers for layer in layers]
        for layer in self._layers:
            layer.expert_step = self.step
        self._balanced_rows = tokens_per_rank * config.moe_router_topk * (config.expert_tensor_parallel_size or 1)
        self._learned = LearnedSizes(expert_ranks=expert_ranks)
        self._capacity_factor = config.moe_expert_rank_capacity_factor
        self._is_measured = False
        self._num_microbatches, self._voids = 0, 0
        self.needs = self._needs(0)

    @property
    def stash(self) -> PagedStash | None:
        """Where the rows of this rank's experts wait for backward; None: in their buffers."""
        return self.step.stash

    def prepare(self, num_microbatches: int) -> None:
        """Makes the pool for steps of so many microbatches. Collective: raises on all ranks where one has no memory."""
        with all_ranks_agree():
            self._plan(num_microbatches)

    def begin_step(self, *, num_microbatches: int, forward_only: bool) -> None:
        """Before the passes of a step, also before those of one that runs again, or after an error."""
        self.step.begin()
        if forward_only:
            if self.stash is not None:
                self.stash.reset(enabled=False)
            return
        if num_microbatches != self._num_microbatches:
            self._plan(num_microbatches)
        if self.stash is not None:
            self.stash.reset(events=self._schedule.events(num_microbatches))

    def flags(self) -> Tensor:
        """Whether a buffer lacked rows, and whether an x lacked pages: [2], fp64, 0 or 1, on the device."""
        missing = self.step.rows_missing > 0
        void = torch.zeros_like(missing) if self.stash is None else self.stash.void.view(1) > 0
        return torch.cat([missing, void]).double()

    def end_step(self) -> None:
        """After a training step whose verdict was that nothing was lacking."""
        self.last_step = self._figures_sync()
        self._voids = 0
        self._remember(self.last_step)

    def grow_sync(self, *, iteration: int) -> str:
        """More rows or pages on all ranks, after a verdict that any lacked them; returns a line for the log.

        Raises ExpertOverflowError on all ranks under the policy "error". Collective. NOTE: reads the device.
        """
        self._voids += 1
        own = self._lacking_sync()
        everyone: list[Any] = [own]
        if dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
        lacking = "; ".join(f"rank {rank}: {words}" for rank, (words, _) in enumerate(everyone) if words)
        grown = functools.reduce(LearnedSizes.merged, (sizes for _, sizes in everyone))
        if self._config.moe_paged_stash_overflow_policy == "error":
            raise ExpertOverflowError(
                f"iteration {iteration} is void: {lacking}. moe_paged_stash_overflow_policy is error: give "
                f"{_flags_of(grown)}, or another policy"
            )
        self.adopt(grown)
        return f"iteration {iteration} runs again with {_flags_of(grown)}: {lacking}"

    def adopt(self, sizes: LearnedSizes) -> None:
        """Takes over what earlier steps, other ranks or a checkpoint learned: nothing becomes smaller."""
        self._learned = self._learned.merged(sizes)
        self._capacity_factor = capacity_factor(self._capacity_factor, self._learned)
        for layer in self._layers:
            dispatcher = layer.token_dispatcher
            assert isinstance(dispatcher, MoEStaticTokenDispatcher)
            dispatcher.set_capacity_factor(self._capacity_factor)
        # The next step makes its pool anew.
        self._num_microbatches = 0

    def learned_sync(self) -> LearnedSizes:
        """What all ranks learned so far, for a checkpoint. Collective."""
        everyone: list[Any] = [self._learned]
        if dist.get_world_size() > 1:
            everyone = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, self._learned)
        return functools.reduce(LearnedSizes.merged, everyone)

    @property
    def _max_rows(self) -> int:
        """C, of every layer."""
        dispatcher = self._layers[0].token_dispatcher
        assert isinstance(dispatcher, MoEStaticTokenDispatcher)
        return dispatcher.budget.rows_of_rank(self._tokens)

    def _needs(self, num_microbatches: int) -> StepNeeds:
        events = self._schedule.events(num_microbatches) if self._config.moe_paged_stash else ()
        rows = self._max_rows if events else 0
        specs = expert_specs(self._config, rows=rows) if events else ()
        return StepNeeds(events, specs, self._balanced_rows, page_bytes(self._config))

    def _plan(self, num_microbatches: int) -> None:
        """The stash for steps of so many microbatches: a pool that is large enough already stays."""
        self._num_microbatches, self.needs = num_microbatches, self._needs(num_microbatches)
        layout = pool_layout(
            self._config,
            self.needs.events,
            balanced_rows=self._balanced_rows,
            specs=self.needs.specs,
            learned=self._learned,
        )
        if layout is None:
            self.step.stash = None
            return
        old = None if self.stash is None else self.stash.pool.layout
        if old is not None and self._is_measured:
            layout = PoolLayout(
                layout.page_bytes,
                max(layout.device_pages, old.device_pages),
                max(layout.host_pages, old.host_pages),
            )
        if layout != old:
            # Before the new one is made: there may not be room for both.
            self.step.stash = None
            pool = PagePool(self._device, layout)
        elif self.stash is not None:
            pool = self.stash.pool
        self.step.stash = PagedStash(
            pool,
            prefetch_groups=self._config.moe_paged_stash_prefetch_layers,
            events=self.needs.events,
            reserved_share=self._reserved_share(),
            has_rungs=self._has_rungs,
        )

    @property
    def _has_rungs(self) -> bool:
        return self._config.moe_paged_stash_overflow_policy == "recompute"

    def _reserved_share(self) -> float:
        """Of C: the rows that every pass is expected to have, with a margin for those that have more."""
        expected = max([1.0, *self._learned.rows_share.values()]) * self._balanced_rows
        return min(1.0, _HEADROOM * expected / self._max_rows)

    def _lacking_sync(self) -> tuple[str, LearnedSizes]:
        """What this rank lacked, in words, and the sizes that would have been enough. NOTE: reads the device."""
        needed = float(self.step.factor_needed)
        if int(self.step.rows_missing) > 0:
            words = f"experts needed a capacity factor of {needed:.3f}, not {self._capacity_factor:.3f}"
            return words, LearnedSizes(capacity_factor=needed * _HEADROOM)
        if self.stash is None or not self.stash.is_void_sync():
            return "", LearnedSizes()
        rows = self._rows_sync()
        wanted = self.needs.pages(rows.__getitem__, up_to=Priority.INPUT if self._has_rungs else Priority.ACT)
        layout = self.stash.pool.layout
        words = f"rows that cannot be computed again needed {wanted} pages, of {layout.num_pages}"
        return words, grown_sizes(layout, self.needs, wanted_pages=wanted) or LearnedSizes()

    def _rows_sync(self) -> dict[Group, int]:
        """Live rows of each expert forward of the step. NOTE: reads the device."""
        seen: Multiset[str] = Multiset()
        found: dict[Group, int] = {}
        for layer, rows in zip(self.step.passes, self.step.rows.tolist()):
            name = f"layer {layer}"
            found[name, seen[name]] = rows
            seen[name] += 1
        return found

    def _figures_sync(self) -> StepFigures:
        """NOTE: reads the device, which the verdict has just waited for."""
        needs, rows = self.needs, self._rows_sync()
        occupancy = None if self.stash is None else self.stash.pool.occupancy_sync()
        return StepFigures(
            layout=None if self.stash is None else self.stash.pool.layout,
            counters={} if occupancy is None else occupancy.counters,
            tail_bytes=0 if occupancy is None else occupancy.tail_bytes,
            rows=tuple(rows.values()),
            passes=tuple(self.step.passes),
            balanced_rows=self._balanced_rows,
            pages_wanted=needs.pages(rows.__getitem__),
            balanced_pages=needs.balanced_pages,
            capacity_factor=self._capacity_factor,
            factor_needed=float(self.step.factor_needed),
            voids=self._voids,
            events=tuple(needs.events),
            specs=tuple(needs.specs),
        )

    def _remember(self, figures: StepFigures) -> None:
        """The most rows that a pass of each layer had; a first measured peak makes the pool anew where it counts."""
        shares: dict[int, float] = {}
        for layer, rows in zip(figures.passes, figures.rows):
            shares[layer] = max(shares.get(layer, 0.0), rows / self._balanced_rows)
        self._learned = self._learned.merged(LearnedSizes(rows_share=shares))
        if not self._is_measured and self._config.moe_paged_stash_buffer_size_factor_cuda < 0:
            self._num_microbatches = 0
        self._is_measured = True


def _flags_of(sizes: LearnedSizes) -> str:
    """What the user would have given."""
    factors = {
        "--moe-expert-rank-capacity-factor": sizes.capacity_factor,
        "--moe-paged-stash-buffer-size-factor-cuda": sizes.device_factor,
        "--moe-paged-stash-buffer-size-factor-cpu": sizes.host_factor,
    }
    return ", ".join(f"{flag} {factor:.3f}" for flag, factor in factors.items() if factor is not None)
