"""What a plan needs to know of a run: the expert passes of each pipeline stage, and who shares experts with how much
room. The run's own code says it, of a model that has no memory.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import nn

from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAlltoAllTokenDispatcher,
    MoEStaticTokenDispatcher,
    StaticBudget,
)
from megatron.core.transformer.moe.paged_stash import StashEvent
from megatron.core.transformer.moe.paged_stash.arithmetic import PageMove, page_moves
from megatron.core.transformer.moe.paged_stash.sizing import StepNeeds, step_needs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from megatron.planner.plan import as_rank, pipeline_of
from megatron.training.command_line.validation import batch_sizes
from megatron.training.setup import model_parts
from megatron.training.step.expert_memory import ExpertSchedule


@dataclass
class StashFlags:
    """The settings that pages follow from, as TransformerConfig has them; a plan tries others with dataclasses.replace.

    The run's own class checks them; see StashSettings.
    """

    hidden_size: int
    moe_ffn_hidden_size: int | None
    gated_linear_unit: bool
    expert_tensor_parallel_size: int | None
    recompute_modules: list[str] | None
    lora_rank: int | None
    lora_target_modules: list[str]
    params_dtype: torch.dtype
    moe_expert_rank_capacity_factor: float | None
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    moe_paged_stash_buffer_bytes: int | None
    moe_paged_stash_prefetch_layers: int
    moe_paged_stash_overflow_policy: str

    @classmethod
    def of(cls, config: TransformerConfig) -> "StashFlags":
        """Returns the settings of a run."""
        return cls(**{one.name: vars(config)[one.name] for one in fields(cls)})

    @property
    def has_rungs(self) -> bool:
        """Whether act and gate_up are computed again where pages are lacking."""
        return self.moe_paged_stash_overflow_policy == "recompute"


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of a stage that share experts. num_experts, topk: of a layer; tokens: of a rank's micro-batch.

    num_ranks: of the stage, of which num_sharing share all experts, and num_shards of these each expert. budget: of
    their buffers. counts_pairs: whether rows from one rank to another are limited, too.
    """

    num_experts: int
    topk: int
    tokens: int
    num_ranks: int
    num_sharing: int
    num_shards: int
    budget: StaticBudget
    counts_pairs: bool

    @property
    def num_groups(self) -> int:
        """Number of groups of ranks that share all experts with each other."""
        return self.num_ranks // self.num_sharing

    @property
    def expert_ranks(self) -> int:
        """Ranks of a group that have other experts than each other."""
        return self.num_sharing // self.num_shards

    @property
    def balanced_rows(self) -> int:
        """Live rows of a pass if all ranks get as many."""
        return self.tokens * self.topk * self.num_shards

    def max_rows(self, capacity_factor: float) -> int:
        """C with that factor."""
        return replace(self.budget, factor=capacity_factor).rows_of_rank(self.tokens)


@dataclass(frozen=True)
class PlannedStage:
    """layers: those with experts, from 1. events: of a step of so many micro-batches. moves: what they do
    to pages where the rows of so many groups come back ahead of their backward.
    """

    layers: tuple[int, ...]
    events: Callable[[int], Sequence[StashEvent]]
    moves: Callable[[int, int], Sequence[PageMove]]

    @classmethod
    def of(cls, schedule: ExpertSchedule) -> "PlannedStage":
        """Returns the stage of a rank with this schedule."""

        @lru_cache(maxsize=32)
        def moves(num_microbatches: int, prefetch_groups: int) -> Sequence[PageMove]:
            return page_moves(schedule.events(num_microbatches), prefetch_groups=prefetch_groups)

        layers = sorted(layer.router.layer_number for of_chunk in schedule.layers for layer in of_chunk)
        return cls(tuple(layers), schedule.events, moves)


@dataclass(frozen=True)
class PlannedRun:
    """prefetch_groups: whose rows come back ahead of their backward. num_microbatches: of the step that pools are made
    for, the run's last; lengths: of all its steps.
    """

    flags: StashFlags
    ranks: ExpertRanks
    stages: list[PlannedStage]
    prefetch_groups: int
    num_microbatches: int
    lengths: frozenset[int]

    @property
    def layers(self) -> list[int]:
        """All layers with experts, from 1."""
        return sorted(layer for stage in self.stages for layer in stage.layers)

    def needs(self, flags: StashFlags, stage: int, *, num_microbatches: int, max_rows: int) -> StepNeeds:
        """Returns the needs of a step of that stage with these flags and buffers of max_rows rows."""
        events = self.stages[stage].events(num_microbatches)
        return step_needs(flags, events, max_rows=max_rows if events else 0, balanced_rows=self.ranks.balanced_rows)


def planned_run(args: argparse.Namespace, model_provider: Callable[..., nn.Module]) -> PlannedRun:
    """Returns the run of validated arguments, with world_size ranks and static expert buffers."""
    stages, found = [], None
    for rank in pipeline_of(args, 0):
        with as_rank(args, rank) as groups:
            chunks = [chunk for chunk, _ in model_parts(model_provider, args)]
            config: TransformerConfig = get_model_config(chunks[0])
            schedule = ExpertSchedule(chunks, groups, microbatch_group_size=config.microbatch_group_size_per_vp_stage)
        layers = [layer for of_chunk in schedule.layers for layer in of_chunk]
        stages.append(PlannedStage.of(schedule))
        if layers and found is None:
            found = config, layers[0].token_dispatcher
    assert found is not None, "some stage has the layers with experts"
    config, dispatcher = found
    assert isinstance(dispatcher, MoEStaticTokenDispatcher), "chosen by the capacity factor"
    sizes = batch_sizes(args)
    return PlannedRun(
        StashFlags.of(config),
        _expert_ranks(args, config, dispatcher=dispatcher),
        stages,
        # A graph of one layer cannot bring back another one's rows.
        prefetch_groups=0 if config.captures_experts else config.moe_paged_stash_prefetch_layers,
        num_microbatches=sizes.final_num_microbatches,
        lengths=frozenset(size // sizes.samples_per_round for size in sizes.running.sizes),
    )


def _expert_ranks(
    args: argparse.Namespace, config: TransformerConfig, *, dispatcher: MoEStaticTokenDispatcher
) -> ExpertRanks:
    sharing_tokens = args.context_parallel_size * (args.tensor_model_parallel_size if config.sequence_parallel else 1)
    budget = dispatcher.budget
    assert config.num_moe_experts is not None, "it has experts"
    return ExpertRanks(
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        tokens=args.seq_length * args.micro_batch_size // sharing_tokens,
        num_ranks=args.world_size // args.pipeline_model_parallel_size,
        num_sharing=budget.num_ranks,
        num_shards=budget.num_shards,
        budget=budget,
        counts_pairs=isinstance(dispatcher, MoEStaticAlltoAllTokenDispatcher),
    )
