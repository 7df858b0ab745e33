"""Plans a run on one process without training it: memory, messages and kernels of one rank of each pipeline stage.

The run's own code builds the rank's model, buffers and optimizer on the meta device, with fake process groups
(fake_ranks.py, and without_memory of megatron/core/device). report.py prints plans.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.device import without_memory
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.core.parallel_state import DEFAULT_ORDER, RankGenerator
from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Order,
    Pair,
    Schedule,
    ScheduleKind,
    configured_schedule,
    pipeline_of,
    stage_orders,
)
from megatron.core.pipeline_placement import V_SCHEDULES, configured_placement
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.timers import Timers
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash.sizing import (
    PoolBytes,
    check_effect,
    encoding_words,
    largest_of_layers,
    page_size_on_gpu,
    prefetch_groups,
)
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent
from megatron.core.transformer.moe_config import GPU_ROW_ALIGNMENT
from megatron.core.transformer.pipeline_split import layers_per_part
from megatron.core.transformer.transformer_config import TransformerConfig, precision_lines
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from megatron.planner.activations import (
    AsFusedKernels,
    ChunkSaved,
    SavedBytes,
    SavedSizes,
    held_in_pair,
    moments,
    peak_bytes,
    rows_in_buffers,
    turns_of_pair,
)
from megatron.planner.fake_ranks import fake_rank
from megatron.planner.recorders import ranks_by_name
from megatron.planner.traced_step import StepTrace, trace_step, with_names
from megatron.planner.work import EMBEDDING, END, EXPERTS, StageLoad, kind_of_module, part_at, part_of_name
from megatron.training.checkpointing.rng_state import seed_ranks
from megatron.training.command_line.config_builder import flags_named_in_errors
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.parser import RunArguments
from megatron.training.command_line.published import publish_run, publish_timers, publish_tokenizer
from megatron.training.compute.devices import plans_for_gpu
from megatron.training.compute.flops import count_of, num_floating_point_operations, parameters_by_key
from megatron.training.config import RunConfig
from megatron.training.meters.memory import bytes_of, gradient_tensors, parameter_bytes, parameter_tensors
from megatron.training.setup import build_model, build_model_and_optimizer, setup_batches, setup_tokenizer
from megatron.training.step.expert_memory import ExpertMemory, build_expert_memory

# Shown with every plan.
NOT_PLANNED = "memory cached by the allocator, and input data"
_COMPARED_TYPES = (int, float, bool, str, type(None), Enum, torch.dtype, torch.Size)
# Attributes that differ between layers of the same structure.
_IGNORED_NAMES = {"layer_number", "offset", "_init_seed"}
# The input of a pair's forward, two inputs of the next pair, and two outputs of the previous one. The gradient that the
# backward receives is traced.
_TRANSFERS_OF_A_PAIR = 5
ForwardStep = Callable[..., Any]


@dataclass(frozen=True)
class BufferLayout:
    """Layout of one flat buffer of a model chunk.

    kind: dense or expert. param_dtype, grad_dtype: names without "torch.". bucket_bytes: bytes of each bucket's
    gradients with padding, in buffer order. num_bytes: bytes of all parameters and gradients, with padding.
    padding_bytes: the part of num_bytes that is padding. bucket_ends: names of the first and the last parameter of each
    bucket.
    """

    chunk: int
    kind: str
    param_dtype: str
    grad_dtype: str
    bucket_bytes: tuple[int, ...]
    num_bytes: int
    padding_bytes: int
    bucket_ends: tuple[tuple[str, str], ...] = ()

    @property
    def padding_share(self) -> float:
        """Share of the buffer's bytes that are padding, from 0 to 1."""
        return self.padding_bytes / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class ModelStates:
    """Bytes of a rank's model states, which persist during training.

    parameters, gradients: sizes of their buffers, with padding. masters, moments: optimizer states on the device.
    host_states: optimizer states in host memory.
    """

    parameters: int
    gradients: int
    masters: int = 0
    moments: int = 0
    host_states: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device."""
        return self.parameters + self.gradients + self.masters + self.moments


@dataclass(frozen=True)
class TemporaryBytes:
    """Peaks of the memory that is allocated and freed within a step, all 0 if nothing is trained.

    passes: memory of the passes, such as logits, gradients in flight and communication buffers. update: memory of the
    update, which runs without activations. messages: largest memory of collectives at one time, excluding persistent
    gradients and parameters.
    """

    passes: int = 0
    update: int = 0
    messages: int = 0


@dataclass(frozen=True)
class RankMemory:
    """Memory of one rank. activations: bytes saved for backward at the peak of the schedule."""

    states: ModelStates
    pages: PoolBytes
    activations: SavedSizes
    temporary: TemporaryBytes = field(default_factory=TemporaryBytes)

    @property
    def persistent_by_kind(self) -> dict[str, int]:
        """Persistent bytes on the device, by kind."""
        return {
            "parameters": self.states.parameters,
            "gradients": self.states.gradients,
            "masters": self.states.masters,
            "moments": self.states.moments,
            "pages": self.pages.device,
        }

    @property
    def on_host(self) -> dict[str, int]:
        """Bytes in host memory, by kind."""
        return {
            "pages": self.pages.host,
            "states": self.states.host_states,
            "activations": self.activations.on_host,
        }

    @property
    def persistent(self) -> int:
        """Persistent bytes on the device."""
        return self.states.total + self.pages.device

    @property
    def total(self) -> int:
        """Sum of the persistent bytes and of the activations at the peak of the schedule."""
        return self.persistent + self.activations.by_kind.total()

    @property
    def peak(self) -> int:
        """Peak bytes on the device, including the temporary memory of passes and of the update."""
        return max(self.total + self.temporary.passes, self.persistent + self.temporary.update)


@dataclass(frozen=True)
class RankPlan:
    """Memory of one rank, and its work in a step.

    layers: numbers of the rank's layers in the model, starting at 1. sizes: elements of each logical tensor with a
    shard on the rank, as counted by parameters_by_key. groups: ranks of each group named in the messages of `load`.
    buffers: layouts of the parameter buffers. activations_by_schedule: bytes of activations on the device under each
    schedule that the layout could use.
    """

    rank: int
    stage: int
    layers: tuple[int, ...]
    sizes: dict[str, int]
    memory: RankMemory
    load: StageLoad = field(default_factory=StageLoad)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    buffers: tuple[BufferLayout, ...] = ()
    activations_by_schedule: Mapping[ScheduleKind, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """Plans of one rank of each pipeline stage.

    num_microbatches: microbatches of the last step, which is the largest. is_balanced: whether activations assume
    balanced routing, because experts have no static buffers. flops_per_sample: the model's FLOPs as counted by
    num_floating_point_operations. substitutions: sentences about parts that the plan replaces (see substitutions()).
    has_pairs: whether a backward and a forward take turns after the warm-up.
    """

    stages: list[RankPlan]
    num_parameters: int
    active_parameters: int
    num_microbatches: int
    is_balanced: bool
    flops_per_sample: float = 0.0
    substitutions: tuple[str, ...] = ()
    has_pairs: bool = False


@dataclass(frozen=True)
class StageTrace:
    """Memory and work of a pipeline stage, shared by stages of the same structure.

    saved: bytes that a microbatch saves for backward in each chunk. experts_of_layer: bytes that the experts of one
    layer save for backward. step: the traced step, empty if nothing is trained.
    """

    saved: tuple[ChunkSaved, ...]
    experts_of_layer: int
    step: StepTrace

    def activations(self, order: Order, *, pages: PoolBytes) -> SavedSizes:
        """Returns the bytes saved at the schedule's peak, outside of the stash's pages and scratch."""
        on_host = peak_bytes(order, [one.in_host_memory for one in self.saved]).total()
        if not pages.total:
            return SavedSizes(peak_bytes(order, self.saved), on_host)
        peak = peak_bytes(order, [one.without(EXPERTS) for one in self.saved])
        paired = any(isinstance(step, Pair) for step in order)
        in_buffers = rows_in_buffers(self.experts_of_layer, one_group=pages.one_group, paired=paired)
        return SavedSizes(Counter({**peak, EXPERTS: in_buffers}), on_host)

    def temporary(
        self, traced: Order, order: Order, *, pages: PoolBytes, num_prefetched: int, input_bytes: int
    ) -> TemporaryBytes:
        """Returns the temporary memory of a step.

        traced: the schedule of the traced step. order: the schedule of the run. num_prefetched: number of groups that
        a stash restores ahead of their backward. input_bytes: bytes of the hidden states that a pass receives from
        another stage.
        """
        kept = peak_bytes(traced, self.saved).total()
        passes, messages = self.step.peak - kept, self.step.messages_peak
        turns = self.step.turns
        for chunks in {one.pair for one in moments(order, len(self.saved)) if one.pair is not None}:
            assert turns is not None, "the turns of a run with pairs are traced"
            saved = self.saved[chunks[0]], self.saved[chunks[1]]
            backward, forward = Action(ActionKind.BACKWARD, chunks[0], 0), Action(ActionKind.FORWARD, chunks[1], 0)
            found = list(turns_of_pair(turns.passes[backward], turns.passes[forward], saved=saved))
            if pages.total:
                # Rows in buffers are live in the trace, and planned as activations. Groups that are restored ahead of
                # their backward are not traced.
                planned = held_in_pair(*(one.without(EXPERTS) for one in saved)).total()
                planned += rows_in_buffers(self.experts_of_layer, one_group=pages.one_group, paired=True)
                more = max(one.live - one.of_experts for one in found) - planned
                more += num_prefetched * self.experts_of_layer
            else:
                more = max(one.live for one in found) - held_in_pair(*saved).total()
            # A pair holds the input of its forward, and it overlaps with transfers of the pairs before and after it.
            passes = max(passes, more + turns.rest + _TRANSFERS_OF_A_PAIR * input_bytes)
            found = list(turns_of_pair(turns.messages[backward], turns.messages[forward], saved=saved))
            messages = max(messages, *(one.live for one in found))
        return TemporaryBytes(max(0, passes), self.step.update_peak, messages)


# Traces by the structure of a stage.
_Traces = dict[Hashable, StageTrace]


def plan_run(
    run_config: RunConfig,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step_func: ForwardStep,
    config_overrides: ConfigOverrides | None = None,
    rank_in_stage: int = 0,
    only_stages: Collection[int] | None = None,
) -> Plan:
    """Plans the run with these settings.

    forward_step_func: the training script's function, called with batches on the meta device. rank_in_stage: index of
    the planned rank within each stage. Rank 0 of a stage uses the most memory, because the last shards may be shorter.
    only_stages: stages to plan and whose parameters are counted; defaults to all. Raises the same errors as a run for
    invalid sizes and for models that cannot be built.
    """
    run_config = with_planned_device(run_config.changed(ddp_debug=False))  # a plan has no values to check
    stages: list[RankPlan] = []
    stashed: list[Sequence[StashEvent]] = []
    traces = _Traces()
    for stage, rank in enumerate(ranks_of_pipeline(run_config, rank_in_stage)):
        if only_stages is not None and stage not in only_stages:
            continue
        with as_rank(run_config, rank) as groups:
            build = _RankBuild(
                run_config, model_provider, stage=stage, groups=groups, config_overrides=config_overrides
            )
            stages.append(build.plan(rank, forward_step=forward_step_func, traces=traces))
            stashed.append(build.stash_events)
    transformer = run_config.transformer
    if transformer.moe_paged_stash and not run_config.training.skip_train and only_stages is None:
        with flags_named_in_errors():
            check_effect(stashed)
    # All ranks exchange the sums of every loss that any rank reports.
    names = {name for trace in traces.values() for name in trace.step.names}
    stages = [replace(one, load=with_names(one.load, len(names))) for one in stages]
    sizes = {key: size for stage in stages for key, size in stage.sizes.items()}
    total, active = count_of(sizes, transformer)
    return Plan(
        stages,
        num_parameters=total,
        active_parameters=active,
        num_microbatches=run_config.batch_sizes().final_num_microbatches,
        is_balanced=has_dynamic_rows(run_config),
        flops_per_sample=num_floating_point_operations(run_config, 1),
        substitutions=(*substitutions(transformer), *precision_lines(transformer), *encoding_words(transformer)),
        has_pairs=transformer.overlap_moe_expert_parallel_comm,
    )


def pipeline_number_of(run_config: RunConfig, rank: int) -> int:
    """Returns the index of the pipeline that contains the rank. Raises CommandLineError for a rank outside the run."""
    world_size = run_config.launch.world_size
    if not 0 <= rank < world_size:
        raise CommandLineError(
            f"RANK is {rank} in the environment: must be from 0 to {world_size - 1} for this --world-size"
        )
    return next(number for number, ranks in enumerate(_pipelines(run_config)) if rank in ranks)


def ranks_of_pipeline(run_config: RunConfig, number: int) -> list[int]:
    """Returns the ranks of one pipeline, in the order of stages. number: index of the pipeline in the layout."""
    return _pipelines(run_config)[number]


def _pipelines(run_config: RunConfig) -> list[list[int]]:
    transformer = run_config.transformer
    tp, cp = transformer.tensor_model_parallel_size, transformer.context_parallel_size
    pp = transformer.pipeline_model_parallel_size
    order = "tp-cp-ep-pp-dp" if run_config.distributed.use_tp_pp_dp_mapping else DEFAULT_ORDER
    return RankGenerator(tp, 1, run_config.launch.world_size // (tp * pp * cp), pp, cp, order).get_ranks("pp")


@contextmanager
def as_rank(run_config: RunConfig, rank: int) -> Iterator[ProcessGroupCollection]:
    """Makes this process act as a rank inside the block, on the meta device. Publishes the arguments to scripts."""
    world_size = run_config.launch.world_size
    with fake_rank(run_config, rank, world_size=world_size) as groups, without_memory(), torch.device("meta"):
        try:
            _publish(run_config)
            setup_batches(run_config)
            seed_ranks(run_config.training.seed, groups)
            yield groups
        finally:
            publish_run(None)
            destroy_num_microbatches_calculator()


def _publish(run_config: RunConfig) -> None:
    publish_run(RunArguments(run_config))
    publish_timers(Timers(0, "minmax"))
    publish_tokenizer(setup_tokenizer(run_config))


class _RankBuild:
    """Builds the wrapped model and optimizer of one rank of a stage, and plans their memory and work."""

    def __init__(
        self,
        run_config: RunConfig,
        model_provider: Callable[..., nn.Module],
        *,
        stage: int,
        groups: ProcessGroupCollection,
        config_overrides: ConfigOverrides | None,
    ) -> None:
        self._run_config, self._provider, self._stage, self._groups = run_config, model_provider, stage, groups
        optimizer: MegatronOptimizer | None = None
        if run_config.training.skip_train:
            model = build_model(model_provider, run_config)
        else:
            model, optimizer, _ = build_model_and_optimizer(
                model_provider, run_config, config_overrides=config_overrides
            )
        self._model, self._optimizer = model, optimizer
        # An evaluation has no stash.
        self._expert_memory: ExpertMemory | None = None
        if optimizer is not None:
            self._expert_memory = build_expert_memory(
                model,
                seq_length=run_config.data.seq_length,
                micro_batch_size=run_config.training.micro_batch_size,
                groups=groups,
            )
        self._num_microbatches = run_config.batch_sizes().final_num_microbatches

    @property
    def stash_events(self) -> Sequence[StashEvent]:
        """Events of the stash in a step of the run."""
        return () if self._expert_memory is None else self._expert_memory.needs.events

    def plan(self, rank: int, *, forward_step: ForwardStep, traces: _Traces) -> RankPlan:
        """Plans memory and work of a rank. traces: cache of stage traces, to which the trace of its stage is added."""
        trace = self._trace(forward_step, traces)
        load = trace.step.load
        return RankPlan(
            rank,
            self._stage,
            layers=self._layers(),
            sizes=parameters_by_key(self._model),
            memory=self._memory(trace),
            load=load,
            groups=ranks_by_name(self._groups, load.traffic),
            buffers=tuple(buffer_layouts(self._model)),
            activations_by_schedule=self._activations_by_schedule(trace),
        )

    def _activations_by_schedule(self, trace: StageTrace) -> dict[ScheduleKind, int]:
        pages, kinds = self._pages(), possible_schedules(self._run_config)
        schedule = configured_schedule(self._run_config.transformer)
        orders = {kind: self._passes(self._num_microbatches, schedule._replace(kind=kind)) for kind in kinds}
        return {kind: trace.activations(order, pages=pages).by_kind.total() for kind, order in orders.items()}

    def _layers(self) -> tuple[int, ...]:
        parts = (part for chunk in unwrap_model(self._model) for part in chunk.modules())
        return tuple(sorted(part.layer_number for part in parts if isinstance(part, TransformerLayer)))

    def _memory(self, trace: StageTrace) -> RankMemory:
        pages, transformer = self._pages(), self._run_config.transformer
        # An evaluation has no backward.
        schedule = configured_schedule(transformer)
        unpaired = schedule._replace(paired=False)
        order = self._passes(self._num_microbatches, unpaired if self._optimizer is None else schedule)
        traced = self._passes_of_trace()
        has_transfers = transformer.pipeline_model_parallel_size > 1
        return RankMemory(
            self._states(),
            pages,
            trace.activations(order, pages=pages),
            trace.temporary(
                traced,
                order,
                pages=pages,
                num_prefetched=prefetch_groups(transformer),
                input_bytes=hidden_bytes(self._run_config) if has_transfers else 0,
            ),
        )

    def _states(self) -> ModelStates:
        """Returns the bytes of the model states, without optimizer states for an evaluation."""
        of_optimizer = {} if self._optimizer is None else self._optimizer.state_bytes
        return ModelStates(parameter_bytes(self._model), bytes_of(gradient_tensors(self._model)), **of_optimizer)

    def _pages(self) -> PoolBytes:
        """Returns the bytes of the stash's pages, both 0 without a stash."""
        memory = self._expert_memory
        return PoolBytes() if memory is None else memory.pool_bytes_for(self._num_microbatches)

    def _passes(self, num_microbatches: int, schedule: Schedule) -> Order:
        """Returns the passes of the stage in a step of num_microbatches."""
        transformer = self._run_config.transformer
        pipeline = pipeline_of(schedule, transformer.pipeline_model_parallel_size, len(self._model))
        return stage_orders(pipeline, num_microbatches, schedule)[self._stage]

    def _passes_of_trace(self) -> Order:
        """Returns the passes of the stage in the longest traced step, which has no pairs."""
        schedule = configured_schedule(self._run_config.transformer)._replace(paired=False)
        return self._passes(min(2, self._num_microbatches), schedule)

    def _trace(self, forward_step: ForwardStep, traces: _Traces) -> StageTrace:
        """Returns the trace of the stage, which stages of the same structure, position and passes share."""
        last = self._run_config.transformer.pipeline_model_parallel_size - 1
        key = structure_of(self._model), self._stage == 0, self._stage == last, tuple(self._passes_of_trace())
        if key not in traces:
            traces[key] = self._new_trace(forward_step)
        return traces[key]

    def _new_trace(self, forward_step: ForwardStep) -> StageTrace:
        if self._optimizer is None:
            # An evaluation has no backward.
            return StageTrace(tuple(ChunkSaved() for _ in self._model), 0, StepTrace())
        saved, experts_of_layer = self._saved(forward_step)
        _publish(self._run_config)
        kinds = possible_schedules(self._run_config)
        weight_passes = next((kind for kind in kinds if kind is not ScheduleKind.ONE_F_ONE_B), None)
        step = trace_step(
            self._run_config,
            self._model,
            optimizer=self._optimizer,
            forward_step=forward_step,
            groups=self._groups,
            num_microbatches=self._num_microbatches,
            batch=batch_of(self._run_config),
            weight_passes=weight_passes,
        )
        if weight_passes is not None:
            saved = tuple(replace(chunk, held=held) for chunk, held in zip(saved, step.held, strict=True))
        return StageTrace(saved, experts_of_layer, step)

    def _saved(self, forward_step: ForwardStep) -> tuple[tuple[ChunkSaved, ...], int]:
        """Returns the bytes that a microbatch saves for backward in each chunk, and in the experts of one layer."""
        run_config, model = self._run_config, self._model
        if has_dynamic_rows(run_config) or run_config.sharded_parameters.use_torch_fsdp2:
            run_config = with_known_rows(run_config)
            _publish(run_config)
            model = build_model(self._provider, run_config)
        saved = tuple(saved_by(chunk, run_config, forward_step=forward_step) for chunk in model)
        layers = [
            [part.router.layer_number for part in chunk.modules() if isinstance(part, MoELayer)] for chunk in model
        ]
        rows = 0 if self._expert_memory is None else self._expert_memory.max_rows
        of_layers = [
            largest_of_layers(kept.by_kind[EXPERTS], run_config.transformer, layers=own, rows=rows)
            for own, kept in zip(layers, saved, strict=True)
        ]
        return saved, max(of_layers)


def structure_of(model: Sequence[nn.Module]) -> Hashable:
    """Returns a key that is equal for chunks with equal modules, settings and parameters, up to layer numbers."""
    return tuple(_module(chunk) for chunk in model)


def _module(part: nn.Module) -> tuple[Any, ...]:
    parameters = tuple(
        (name, one.shape, one.dtype, one.requires_grad) for name, one in part.named_parameters(recurse=False)
    )
    settings = tuple((name, _setting(value)) for name, value in vars(part).items() if name not in _IGNORED_NAMES)
    # Layers are named by their numbers in the whole model.
    children = tuple((None if name.isdecimal() else name, _module(child)) for name, child in part.named_children())
    return type(part), parameters, settings, children


def _setting(value: Any) -> Any:
    if isinstance(value, _COMPARED_TYPES):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_setting(one) for one in value)
    return type(value)


def has_dynamic_rows(run_config: RunConfig) -> bool:
    """Returns whether the number of an expert's rows depends on the routing, because its buffers are not static."""
    return (
        run_config.transformer.num_moe_experts is not None
        and run_config.transformer.moe_expert_rank_capacity_factor is None
    )


def possible_schedules(run_config: RunConfig) -> tuple[ScheduleKind, ...]:
    """Returns the schedules that the run could use with the same model chunks, if several stages train a model."""
    placement = configured_placement(run_config.transformer)
    if placement.num_stages == 1 or run_config.training.skip_train:
        return ()

    def is_possible(kind: ScheduleKind) -> bool:
        try:
            # Built and checked when it is read.
            changed = run_config.changed(pipeline_schedule=kind.value).transformer
        except ValueError:
            return False
        return configured_placement(changed) == placement

    return tuple(kind for kind in ScheduleKind if is_possible(kind))


def moved_to_a_v(run_config: RunConfig) -> RunConfig | None:
    """Returns the settings of the run with two chunks per stage, placed in a V.

    None if the run has other chunks than one per stage, or could not use such a schedule.
    """
    transformer = run_config.transformer
    placement = configured_placement(transformer)
    if placement.num_stages == 1 or placement.num_chunks > 1 or run_config.training.skip_train:
        return None
    for schedule in V_SCHEDULES:
        moved = run_config.changed(pipeline_schedule=schedule, virtual_pipeline_model_parallel_size=2)
        try:
            layers_per_part(moved.transformer, num_layers=transformer.num_layers)
        except ValueError:
            continue
        return moved
    return None


def with_planned_device(run_config: RunConfig) -> RunConfig:
    """Returns the run's settings, with those that it would choose on the planned device instead of on this machine."""
    transformer, on_gpu = run_config.transformer, plans_for_gpu()
    alignment = GPU_ROW_ALIGNMENT if on_gpu else 1
    is_default = transformer.moe_expert_row_alignment is None and transformer.row_alignment != alignment
    if transformer.moe_expert_rank_capacity_factor is not None and is_default:
        run_config = run_config.changed(moe_expert_row_alignment=alignment)
    if not transformer.moe_paged_stash:
        return run_config
    if transformer.moe_paged_stash_compute is None:
        is_copied = on_gpu or transformer.moe_paged_stash_dtype is not None
        run_config = run_config.changed(moe_paged_stash_compute="copies" if is_copied else "pages")
    if not on_gpu:
        return run_config
    with flags_named_in_errors():
        return run_config.changed(moe_paged_stash_page_size=page_size_on_gpu(run_config.transformer))


def with_known_rows(run_config: RunConfig) -> RunConfig:
    """Returns the run's settings, changed so that the number of expert rows does not depend on device data.

    Replaces expert buffers whose size would be read from the device by static buffers with exactly the rows of balanced
    routing, without padding. Disables FSDP, because passes save the same activations with unsharded parameters.
    """
    transformer = run_config.transformer
    changed: dict[str, Any] = {"use_torch_fsdp2": False}
    if has_dynamic_rows(run_config):
        # Padding to a capacity above 1 adds rows. Dropping without padding only removes rows, which is ignored.
        room = transformer.moe_expert_capacity_factor if transformer.moe_pad_expert_input_to_capacity else None
        changed |= {
            "moe_expert_rank_capacity_factor": max(1.0, room or 1.0),
            "moe_expert_row_alignment": 1,
            "moe_grouped_gemm": True,
            "moe_expert_capacity_factor": None,
            "moe_pad_expert_input_to_capacity": False,
        }
    return run_config.changed(**changed)


def pace_of_backward(config: TransformerConfig) -> int:
    """Returns the pace of a backward in pairs, see ChunkSaved."""
    return 2 if config.recompute_granularity == "full" or "moe" in (config.recompute_modules or ()) else 1


def saved_by(chunk: nn.Module, run_config: RunConfig, *, forward_step: ForwardStep) -> ChunkSaved:
    """Runs a forward of the chunk and returns the bytes that a microbatch saves for backward.

    Tensors saved between layers, as with recompute, count for the layer that follows.
    """
    transformer = run_config.transformer
    inner = unwrap_model(chunk)
    for part in inner.modules():
        if isinstance(part, MoELayer) and part.expert_step is not None:
            part.expert_step.begin()
    if not inner.pre_process:
        length = run_config.data.seq_length // transformer.sequence_parts
        shape = length, run_config.training.micro_batch_size, transformer.hidden_size
        inner.set_input_tensor(torch.zeros(shape, dtype=inner.config.hidden_dtype, requires_grad=True))
    layers: dict[str, nn.Module] = {}
    for name, part in inner.named_modules():
        # The parts of a layer follow it.
        if (place := part_of_name(name)) not in (None, EMBEDDING, END):
            layers.setdefault(place, part)
    reached = [0]
    handles = [layer.register_forward_pre_hook(lambda *_: reached.append(len(reached))) for layer in layers.values()]

    def label(name: str) -> str:
        return f"{part_at(name, reached[-1], layers=[*layers])}: {kind_of_module(name)}"

    saved = SavedBytes(chunk, persistent=[*parameter_tensors([chunk]), *gradient_tensors([chunk])], kind_of=label)
    try:
        with saved.counting(), AsFusedKernels():
            output, loss_function = forward_step(repeat(batch_of(run_config)), chunk)
            kept = loss_function(output) if inner.post_process else output
    finally:
        for handle in handles:
            handle.remove()
    by_part: dict[str, dict[str, int]] = {name: {} for name in (EMBEDDING, *layers, END)}
    for labels, size in saved.by_kind().items():
        name, _, kind = labels.partition(": ")
        by_part[name][kind] = size
    experts = Counter(part_of_name(name) or END for name, part in inner.named_modules() if isinstance(part, MoELayer))
    found = ChunkSaved(by_part, experts, saved.on_host(), pace=pace_of_backward(transformer))
    del kept
    return found


def hidden_bytes(run_config: RunConfig) -> int:
    """Returns the bytes of a rank's hidden states of one microbatch, as stages send them to each other."""
    transformer = run_config.transformer
    tokens = run_config.training.micro_batch_size * run_config.data.seq_length // transformer.sequence_parts
    return tokens * transformer.hidden_size * transformer.hidden_dtype.itemsize


def batch_of(run_config: RunConfig) -> dict[str, Tensor]:
    """Returns a meta-device microbatch: tokens, labels and position_ids [B, S], int64, and loss_mask [B, S], fp32."""
    shape = run_config.training.micro_batch_size, run_config.data.seq_length
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
    return {**batch, "loss_mask": torch.zeros(shape, dtype=torch.float32)}


def buffer_layouts(model: Sequence[nn.Module]) -> Iterator[BufferLayout]:
    """Yields the layout of every flat buffer of a rank's wrapped chunks. FSDP modules have no such buffers."""
    for number, chunk in enumerate(model):
        if not isinstance(chunk, _BaseDataParallel):
            continue
        for buffer in chunk.all_buffers:
            padding = buffer.layout.numel - sum(span.numel for span in buffer.layout.spans)
            param_size, grad_size = buffer.param_data.dtype.itemsize, buffer.grad_data.dtype.itemsize
            yield BufferLayout(
                number,
                "expert" if buffer.is_expert else "dense",
                str(buffer.param_data.dtype).removeprefix("torch."),
                str(buffer.grad_data.dtype).removeprefix("torch."),
                tuple(bucket.span.numel * grad_size for bucket in buffer.layout.buckets),
                num_bytes=buffer.layout.numel * (param_size + grad_size),
                padding_bytes=padding * (param_size + grad_size),
                bucket_ends=tuple(
                    (buffer.slots[bucket.params[0]].name, buffer.slots[bucket.params[-1]].name)
                    for bucket in buffer.layout.buckets
                ),
            )


def substitutions(config: TransformerConfig) -> tuple[str, ...]:
    """Returns sentences about parts of the run that the plan replaces with others, such as a dispatcher's backend."""
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "flex":
        return ()
    return (
        f"--moe-flex-dispatcher-backend {config.moe_flex_dispatcher_backend} is planned with the rows of "
        "--moe-token-dispatcher-type alltoall, which fills the same buffers; the library's own memory and its "
        "deduplication of messages are not included",
    )
