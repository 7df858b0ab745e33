"""Determines the inputs of a stash plan: expert passes of each pipeline stage, ranks that share experts, and buffers.

Reads them from the run's own model, built on the meta device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import torch
from torch import nn

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAlltoAllTokenDispatcher,
    MoEStaticTokenDispatcher,
    StaticBudget,
)
from megatron.core.transformer.moe.paged_stash import StashEvent
from megatron.core.transformer.moe.paged_stash.arithmetic import PageMove, page_moves
from megatron.core.transformer.moe.paged_stash.sizing import StepNeeds, prefetch_groups, step_needs
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config
from megatron.planner.plan import as_rank, ranks_of_pipeline, with_planned_device
from megatron.training.config import RunConfig
from megatron.training.setup import model_parts
from megatron.training.step.expert_memory import ExpertSchedule


@dataclass
class StashFlags:
    """The values of TransformerConfig that determine the stash's pages. A plan varies them with dataclasses.replace.

    In a run, StashSettings validates the values.
    """

    expert_layers: tuple[int, ...]
    block_format_of: Callable[[int | None], BlockFormat | None]
    hidden_size: int
    moe_ffn_hidden_size: int
    gated_linear_unit: bool
    expert_tensor_parallel_size: int
    lora_rank: int | None
    lora_target_modules: list[str]
    params_dtype: torch.dtype
    moe_expert_rank_capacity_factor: float | None
    moe_paged_stash: bool
    moe_paged_stash_dtype: str | None
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    moe_paged_stash_buffer_bytes: int | None
    moe_paged_stash_prefetch_layers: int
    moe_paged_stash_overflow_policy: str
    stash_computes_in_pages: bool
    stash_recomputes: bool
    captures_experts: bool

    @classmethod
    def of(cls, config: TransformerConfig) -> "StashFlags":
        """Copies the values from a run's configuration."""
        return cls(**{one.name: getattr(config, one.name) for one in fields(cls)})


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks of a pipeline stage and their experts.

    num_experts, topk: experts per layer, and experts per token. tokens: tokens of a rank's microbatch. num_ranks: ranks
    of the stage. num_sharing: ranks that together store all experts. num_shards: ranks that together store one expert.
    budget: sizes of the ranks' buffers. limits_pairs: whether the rows from one rank to another are also limited.
    """

    num_experts: int
    topk: int
    tokens: int
    num_ranks: int
    num_sharing: int
    num_shards: int
    budget: StaticBudget
    limits_pairs: bool

    @property
    def num_groups(self) -> int:
        """Number of groups of ranks that together store all experts."""
        return self.num_ranks // self.num_sharing

    @property
    def expert_ranks(self) -> int:
        """Number of ranks in a group that store different experts."""
        return self.num_sharing // self.num_shards

    @property
    def balanced_rows(self) -> int:
        """Live rows of one forward on a rank under balanced routing."""
        return self.budget.balanced_live_rows(self.tokens)

    def max_rows(self, capacity_factor: float) -> int:
        """Returns C, the number of rows of a rank's buffer, for a capacity factor."""
        return replace(self.budget, factor=capacity_factor).rows_of_rank(self.tokens)


@dataclass(frozen=True)
class PlannedStage:
    """Expert passes of a pipeline stage.

    layers: numbers of the MoE layers, starting at 1. events: maps a number of microbatches to the events of a step.
    moves: maps a number of microbatches and a number of prefetched groups to the page moves of a step.
    """

    layers: tuple[int, ...]
    events: Callable[[int], Sequence[StashEvent]]
    moves: Callable[[int, int], Sequence[PageMove]]

    @classmethod
    def of(cls, schedule: ExpertSchedule) -> "PlannedStage":
        """Builds the planned stage from the expert schedule of one of its ranks."""

        @lru_cache(maxsize=32)
        def moves(num_microbatches: int, prefetch_groups: int) -> Sequence[PageMove]:
            return page_moves(schedule.events(num_microbatches), prefetch_groups=prefetch_groups)

        layers = sorted(layer.router.layer_number for of_chunk in schedule.layers for layer in of_chunk)
        return cls(tuple(layers), schedule.events, moves)


@dataclass(frozen=True)
class PlannedRun:
    """The run for which a stash is planned.

    prefetch_groups: number of groups that are restored ahead of their backward. num_microbatches: microbatches of the
    run's last step, for which pools are sized. lengths: all numbers of microbatches that occur in the run's steps.
    """

    flags: StashFlags
    ranks: ExpertRanks
    stages: list[PlannedStage]
    prefetch_groups: int
    num_microbatches: int
    lengths: frozenset[int]

    @property
    def layers(self) -> list[int]:
        """Numbers of all MoE layers, starting at 1."""
        return sorted(layer for stage in self.stages for layer in stage.layers)

    def needs(self, flags: StashFlags, stage: int, *, num_microbatches: int, max_rows: int) -> StepNeeds:
        """Returns the page needs of a stage in one step, with the given flags and buffers of max_rows rows."""
        events = self.stages[stage].events(num_microbatches)
        return step_needs(flags, events, max_rows=max_rows if events else 0, balanced_rows=self.ranks.balanced_rows)


def planned_run(run_config: RunConfig, model_provider: Callable[..., nn.Module]) -> PlannedRun:
    """Builds the planned run from settings that select static expert buffers."""
    run_config = with_planned_device(run_config)
    stages, found = [], None
    for rank in ranks_of_pipeline(run_config, 0):
        with as_rank(run_config, rank) as groups:
            chunks = [chunk for chunk, _ in model_parts(model_provider, run_config.transformer)]
            config: TransformerConfig = get_model_config(chunks[0])
            schedule = ExpertSchedule(chunks, groups, config=config)
        layers = [layer for of_chunk in schedule.layers for layer in of_chunk]
        stages.append(PlannedStage.of(schedule))
        if layers and found is None:
            found = config, layers[0].token_dispatcher
    assert found is not None, "at least one stage has MoE layers"
    config, dispatcher = found
    assert isinstance(dispatcher, MoEStaticTokenDispatcher), "a capacity factor selects a static dispatcher"
    sizes = run_config.batch_sizes()
    return PlannedRun(
        StashFlags.of(config),
        _expert_ranks(run_config, config, dispatcher=dispatcher),
        stages,
        prefetch_groups=prefetch_groups(config),
        num_microbatches=sizes.final_num_microbatches,
        lengths=frozenset(size // sizes.samples_per_round for size in sizes.running.sizes),
    )


def _expert_ranks(
    run_config: RunConfig, config: TransformerConfig, *, dispatcher: MoEStaticTokenDispatcher
) -> ExpertRanks:
    transformer = run_config.transformer
    sharing_tokens = transformer.context_parallel_size * (
        transformer.tensor_model_parallel_size if config.sequence_parallel else 1
    )
    budget = dispatcher.budget
    assert config.num_moe_experts is not None, "the model has experts"
    return ExpertRanks(
        num_experts=config.num_moe_experts,
        topk=config.moe_router_topk,
        tokens=run_config.data.seq_length * run_config.training.micro_batch_size // sharing_tokens,
        num_ranks=run_config.launch.world_size // transformer.pipeline_model_parallel_size,
        num_sharing=budget.num_ranks,
        num_shards=budget.num_shards,
        budget=budget,
        limits_pairs=isinstance(dispatcher, MoEStaticAlltoAllTokenDispatcher),
    )
