"""Computes memory and work of each pipeline stage as sums of the costs of single layers (layer_costs.py).

Builds no model, but calls the functions that size buffers, optimizer states, schedules and the stash in a run. A dry
run (plan.py) builds whole stages instead. Both give the same number of bytes if all layers of a kind are identical
(tests/unit_tests/planner/test_stage_costs.py), which excludes recompute and offloading that depend on the position.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.layout import ALIGNMENT, BufferLayout, lay_out, resolve_bucket_size, round_up
from megatron.core.distributed.param_and_grad_buffer import BufferKind
from megatron.core.optimizer.flat_params import host_elements
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.state_memory import state_bytes
from megatron.core.pipeline_parallel.expansion import expand, kept_events
from megatron.core.pipeline_parallel.schedule import (
    ONE_F_ONE_B,
    Action,
    ActionKind,
    Orders,
    Pair,
    Pipeline,
    Schedule,
    configured_schedule,
    pipeline_of,
    stage_orders,
)
from megatron.core.transformer.moe.paged_stash.sizing import (
    LearnedSizes,
    PoolBytes,
    largest_of_layers,
    pool_bytes,
    pool_layout,
    step_needs,
)
from megatron.core.transformer.pipeline_split import layers_per_part
from megatron.planner.activations import ChunkSaved, Moment, SavedSizes, fullest, moments, rows_in_buffers
from megatron.planner.layer_costs import (
    LayerKind,
    ModelCosts,
    ParamSize,
    PartCost,
    kernels_of,
    layer_kinds,
    total_work,
)
from megatron.planner.plan import ModelStates, RankMemory, pace_of_backward
from megatron.planner.step_time import short_step
from megatron.planner.work import (
    BACKWARD,
    EMBEDDING,
    END,
    EXPERTS,
    FORWARD,
    GRADS,
    PARAMS,
    Kernels,
    StageLoad,
    Traffic,
    merged,
)
from megatron.training.command_line.errors import CommandLineError
from megatron.training.config import RunConfig
from megatron.training.step.expert_memory import stash_events

# Optimizers whose states can be sized without building them.
_OPTIMIZERS = ("adam", "sgd", "distributed_fused_adam")


# Stages in the middle of a pipeline have the same sizes.
_cached_layout = lru_cache(maxsize=1 << 12)(lay_out)


@dataclass(frozen=True)
class Shape:
    """Sizes of a layout that determine the costs of its stages.

    layers: kinds of the layers in each part of the model. num_microbatches: microbatches of a step. schedule: order of
    its passes, which also determines the parts of each stage.
    """

    world_size: int
    tensor: int
    stages: int
    chunks: int
    context: int
    expert: int
    expert_tensor: int
    layers: tuple[tuple[LayerKind, ...], ...]
    num_microbatches: int
    schedule: Schedule = ONE_F_ONE_B

    def __post_init__(self) -> None:
        assert len(self.layers) == self.stages * self.chunks, "one entry per chunk of each stage"

    @property
    def dense_ranks(self) -> int:
        """Number of ranks that share dense parameters, over data and context parallelism."""
        return self.world_size // (self.tensor * self.stages)

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that share an expert."""
        return self.world_size // (self.expert * self.expert_tensor * self.stages)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline's stages and chunks."""
        return pipeline_of(self.schedule, self.stages, self.chunks)

    @property
    def round_size(self) -> int:
        """Number of microbatches after which the schedule repeats its order."""
        return self.schedule.group_size or self.stages


def shape_of(run_config: RunConfig) -> Shape:
    """Extracts the layout's sizes from the settings of a run."""
    transformer = run_config.transformer
    kinds = iter(layer_kinds(transformer))
    counts = layers_per_part(transformer, num_layers=transformer.num_layers)
    return Shape(
        world_size=run_config.launch.world_size,
        tensor=transformer.tensor_model_parallel_size,
        stages=transformer.pipeline_model_parallel_size,
        chunks=transformer.virtual_pipeline_model_parallel_size or 1,
        context=transformer.context_parallel_size,
        expert=transformer.expert_model_parallel_size,
        expert_tensor=transformer.expert_tensor_parallel_size,
        layers=tuple(tuple(islice(kinds, count)) for count in counts),
        num_microbatches=run_config.batch_sizes().final_num_microbatches,
        schedule=configured_schedule(transformer),
    )


def check_counted(run_config: RunConfig) -> None:
    """Raises CommandLineError for flags whose memory only a dry run can compute."""
    if run_config.sharded_parameters.use_torch_fsdp2:
        raise CommandLineError(
            "--use-torch-fsdp2 is given: shard sizes are unknown without building the model; use --dry-run"
        )
    name = run_config.optimizer.optimizer
    if name not in _OPTIMIZERS:
        raise CommandLineError(
            f"--optimizer is {name}: the sizes of its states are unknown without building it; must be one of "
            f"{', '.join(_OPTIMIZERS)}, or use --dry-run"
        )
    if run_config.training.skip_train:
        raise CommandLineError("--skip-train is given: layouts can be compared only for training; drop it")


def quick_stages(run_config: RunConfig, costs: ModelCosts) -> list[RankMemory]:
    """Returns the memory of the first rank of each stage, without temporary memory and offloaded activations.

    costs: measured for these settings. Raises CommandLineError for flags whose memory only a dry run
    can compute.
    """
    check_counted(run_config)
    shape, ddp, optimizer = shape_of(run_config), run_config.ddp, run_config.optimizer
    stages = []
    for stage in range(shape.stages):
        pages = stash_bytes(costs, shape, stage=stage)
        stages.append(
            RankMemory(
                model_states(costs, shape, stage=stage, ddp_config=ddp, optimizer_config=optimizer),
                pages,
                peak_activations(costs, shape, stage=stage, pages=pages),
            )
        )
    return stages


def stage_chunks(costs: ModelCosts, shape: Shape, *, stage: int) -> list[list[PartCost]]:
    """Returns the costs of the parts of each model chunk of a stage."""
    return [
        costs.chunk_parts(shape.layers[part], is_first=part == 0, is_last=part == len(shape.layers) - 1)
        for part in shape.pipeline.parts_of(stage)
    ]


def model_states(
    costs: ModelCosts,
    shape: Shape,
    *,
    stage: int,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
) -> ModelStates:
    """Returns the model states of the first rank of a stage, which owns the largest shards of the stage.

    Includes the run's buffer padding. States in fp16 have one scale per block of elements. Blocks are counted over all
    elements of a buffer, which undercounts by less than one block per contiguous range.
    """
    chunks = stage_chunks(costs, shape, stage=stage)
    parameters = sum(part.other_bytes + part.quantized_bytes for parts in chunks for part in parts)
    gradients = 0
    masters = moments = host_states = 0.0
    for number, parts in enumerate(chunks):
        for kind, layout in chunk_buffers(parts, shape, is_first=number + stage == 0, ddp_config=ddp_config):
            ranks = layout.num_shards
            stepped, on_host = _stepped_elements(
                layout, is_sharded=ddp_config.use_distributed_optimizer, host_fraction=optimizer_config.host_fraction
            )
            of_kind = partial(state_bytes, params_dtype=kind.param_dtype, grads_dtype=kind.grad_dtype)
            states = of_kind(stepped - on_host, optimizer_config)
            # Masters on the host have at least fp32 precision, whatever their dtype on the device.
            wide = torch.promote_types(kind.param_dtype, torch.float32).itemsize
            host_states += on_host * wide + of_kind(on_host, optimizer_config).moments
            owned = layout.numel // ranks if ddp_config.shard_gradients else layout.numel
            parameters += layout.numel * kind.param_dtype.itemsize
            gradients += 0 if ddp_config.release_gradients else owned * kind.grad_dtype.itemsize
            masters, moments = masters + states.masters, moments + states.moments
    return ModelStates(parameters, gradients, int(masters), int(moments), int(host_states))


def chunk_buffers(
    parts: Sequence[PartCost], shape: Shape, *, is_first: bool, ddp_config: DistributedDataParallelConfig
) -> Iterator[tuple[BufferKind, BufferLayout]]:
    """Yields the kind and layout of each buffer of a chunk. is_first: whether it is the first stage's first chunk."""
    is_whole = (not is_first and not ddp_config.has_bucket_lifetime_grads) or not ddp_config.cuts_buckets
    for kind, params in _by_buffer(parts, apart=shape.dense_ranks != shape.expert_ranks).items():
        ranks = shape.expert_ranks if kind.is_expert else shape.dense_ranks
        ranks //= ddp_config.num_distributed_optimizer_instances
        yield (
            kind,
            _cached_layout(
                tuple(param.numel for param in params),
                num_shards=ranks,
                bucket_size=resolve_bucket_size(
                    ddp_config.bucket_size, ddp_config.num_buckets, num_ranks=ranks, single_bucket=is_whole
                ),
                own_bucket=tuple(index for index, param in enumerate(params) if param.own_bucket),
                num_buckets=None if is_whole else ddp_config.num_buckets,
                high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
            ),
        )


def _by_buffer(parts: Sequence[PartCost], *, apart: bool) -> dict[BufferKind, list[ParamSize]]:
    found: dict[BufferKind, list[ParamSize]] = {}
    for part in parts:
        for param in part.params:
            found.setdefault(param.buffer if apart else replace(param.buffer, is_expert=False), []).append(param)
    return found


def _stepped_elements(layout: BufferLayout, *, is_sharded: bool, host_fraction: float) -> tuple[int, int]:
    """Returns the number of elements that the first rank updates, and how many of them have states in host memory.

    The rank updates its shard of each bucket, excluding the padding at the bucket's end.
    """
    stepped = on_host = 0
    for bucket in layout.buckets:
        owned = bucket.span.numel // (layout.num_shards if is_sharded else 1)
        own = min(round_up(bucket.numel_unpadded, ALIGNMENT), owned)
        stepped, on_host = stepped + own, on_host + min(own, host_elements(owned, host_fraction))
    return stepped, on_host


def stash_bytes(costs: ModelCosts, shape: Shape, *, stage: int) -> PoolBytes:
    """Returns the bytes of a stage's stash pages, as allocated at the start of a run."""
    if costs.rows is None or not costs.config.moe_paged_stash:
        return PoolBytes()
    layers = _expert_layer_numbers(costs, shape, stage=stage)
    order = _orders(shape.pipeline, shape.num_microbatches, shape.schedule)[stage]
    late_layers = {number for of_chunk in layers for number in of_chunk}
    events = stash_events(kept_events(expand(order, layers)), late_layers=late_layers)
    max_rows = costs.rows.max_rows if events else 0
    needs = step_needs(costs.config, events, max_rows=max_rows, balanced_rows=costs.rows.balanced)
    layout = pool_layout(costs.config, needs, learned=LearnedSizes())
    return pool_bytes(costs.config, needs, layout)


def _expert_layer_numbers(costs: ModelCosts, shape: Shape, *, stage: int) -> list[list[int]]:
    """Returns the numbers of the MoE layers in each chunk of a stage, counted from 1 over the whole model."""
    numbers, first = [], 1
    for part, kinds in enumerate(shape.layers):
        found = [first + index for index, kind in enumerate(kinds) if kind.has_experts]
        first += len(kinds)
        further = costs.mtp_expert_layers if part == len(shape.layers) - 1 else 0
        numbers.append([*found, *range(first, first + further)])
    return [numbers[part] for part in shape.pipeline.parts_of(stage)]


def saved_by_chunk(costs: ModelCosts, shape: Shape, *, stage: int) -> list[ChunkSaved]:
    """Returns the bytes that a microbatch saves for backward in each chunk of a stage."""
    found, last = [], len(shape.layers) - 1
    pace = pace_of_backward(costs.config)
    chunks = stage_chunks(costs, shape, stage=stage)
    for number, parts in zip(shape.pipeline.parts_of(stage), chunks, strict=True):
        kinds, is_last = shape.layers[number], number == last
        # What is saved once per chunk is saved by its first layer.
        start, end = [*parts[: len(parts) - 1 - len(kinds) - is_last], parts[-1]], [costs.end] if is_last else []
        by_part: dict[str, Mapping[str, int]] = {EMBEDDING: _saved_by(start)}
        by_part |= {f"layer {index}": costs.layers[kind].saved for index, kind in enumerate(kinds)}
        by_part[END] = _saved_by(end)
        experts = {f"layer {index}": int(kind.has_experts) for index, kind in enumerate(kinds)}
        experts[END] = costs.mtp_expert_layers if is_last else 0
        saved = ChunkSaved(by_part, experts, pace=pace)
        # Without a traced backward, a microbatch is assumed to hold all that it saved until its weight pass.
        found.append(replace(saved, held=saved.by_kind))
    return found


def _saved_by(parts: Iterable[PartCost]) -> Counter[str]:
    saved: Counter[str] = Counter()
    for part in parts:
        saved.update(part.saved)
    return saved


def peak_activations(costs: ModelCosts, shape: Shape, *, stage: int, pages: PoolBytes) -> SavedSizes:
    """Returns the device bytes of activations at the peak of a stage's schedule, outside of the stash's pages."""
    saved = saved_by_chunk(costs, shape, stage=stage)
    found = fullest_moments(
        shape.pipeline,
        stage,
        num_microbatches=shape.num_microbatches,
        schedule=shape.schedule,
    )
    if not pages.total:
        return SavedSizes(fullest(found, saved))
    layers = _expert_layer_numbers(costs, shape, stage=stage)
    rows = 0 if costs.rows is None else costs.rows.max_rows
    of_layer = max(
        largest_of_layers(one.by_kind[EXPERTS], costs.config, layers=own, rows=rows)
        for one, own in zip(saved, layers, strict=True)
    )
    paired = any(moment.pair is not None for moment in found)
    in_buffers = rows_in_buffers(of_layer, one_group=pages.one_group, paired=paired)
    return SavedSizes(Counter({**fullest(found, [one.without(EXPERTS) for one in saved]), EXPERTS: in_buffers}))


@lru_cache(maxsize=1 << 14)
def fullest_moments(pipeline: Pipeline, stage: int, *, num_microbatches: int, schedule: Schedule) -> tuple[Moment, ...]:
    """Returns the moments of a step at which a stage may reach its memory peak.

    They are Pareto-maximal in the microbatches that each chunk saves or holds, among moments with the same pair. A
    long step is replaced by a shorter one with the same peak (see short_step).
    """
    order = _orders(pipeline, num_microbatches, schedule)[stage]
    found = set(moments(order, pipeline.num_chunks))
    return tuple(one for one in found if not any(_exceeds(other, one) for other in found))


def _exceeds(one: Moment, other: Moment) -> bool:
    held = all(map(int.__ge__, one.held, other.held))
    return one != other and one.pair == other.pair and held and all(map(int.__ge__, one.whole, other.whole))


def num_pairs(shape: Shape, *, stage: int) -> int:
    """Returns the number of pairs of passes of a stage in a step."""
    if not shape.schedule.paired:
        return 0
    short = short_step(shape.num_microbatches, shape.round_size)
    order = _orders(shape.pipeline, short, shape.schedule)[stage]
    # Each further microbatch adds one pair of each chunk.
    return sum(isinstance(step, Pair) for step in order) + (shape.num_microbatches - short) * shape.chunks


@lru_cache(maxsize=256)
def _orders(pipeline: Pipeline, num_microbatches: int, schedule: Schedule) -> Orders:
    """Returns each stage's passes in order, for a step of at most short_step microbatches."""
    length = short_step(num_microbatches, schedule.group_size or pipeline.num_stages)
    return stage_orders(pipeline, length, schedule)


def stage_load(
    costs: ModelCosts,
    shape: Shape,
    *,
    stage: int,
    ddp_config: DistributedDataParallelConfig,
    hidden_bytes: int,
    state_bytes: float,
) -> StageLoad:
    """Returns the work of a rank of the stage in one step.

    hidden_bytes: bytes of a microbatch's hidden states, sent between stages. state_bytes: bytes of the rank's
    optimizer states.
    """
    step, times, pipeline = costs.step, shape.num_microbatches, shape.pipeline
    traffic = [*_data_messages(costs, shape, stage=stage, ddp_config=ddp_config), *step.traffic]
    if pipeline.loss_stage > 0 and stage in (0, pipeline.loss_stage):
        traffic += [replace(one, group="embd", group_size=2) for one in step.tied]
    chunks, once = [], Kernels()
    experts = _expert_layer_numbers(costs, shape, stage=stage)
    for chunk, parts in enumerate(stage_chunks(costs, shape, stage=stage)):
        work = total_work(part.work for part in parts)
        chunks.append(replace(work.chunk(), expert_layers=len(experts[chunk])))
        once.update(kernels_of(work.once))
        traffic += work.times(times).traffic
        for kind, phase in ((ActionKind.FORWARD, FORWARD), (ActionKind.BACKWARD, BACKWARD)):
            if pipeline.receiver(stage, Action(kind, chunk, 0)) is not None:
                traffic.append(Traffic("pp", shape.stages, "send", phase, times, times * hidden_bytes))
    share = state_bytes / max(1, step.state_bytes)
    update = Kernels()
    for kernel, count in step.update.items():
        update[replace(kernel, flops=kernel.flops * share, num_bytes=kernel.num_bytes * share)] += count
    update.update(once)
    return StageLoad(tuple(chunks), merged(traffic), update)


def _data_messages(
    costs: ModelCosts, shape: Shape, *, stage: int, ddp_config: DistributedDataParallelConfig
) -> tuple[Traffic, ...]:
    """Returns the messages that reduce a stage's gradients and gather its parameters in a step, one per bucket."""
    found = []
    times = shape.num_microbatches if ddp_config.has_bucket_lifetime_grads else 1
    for number, parts in enumerate(stage_chunks(costs, shape, stage=stage)):
        for kind, layout in chunk_buffers(parts, shape, is_first=number + stage == 0, ddp_config=ddp_config):
            if layout.num_shards < 2:
                continue
            name = "edp" if kind.is_expert else "dp_cp" if shape.context > 1 else "dp"
            group, count = (name, layout.num_shards), len(layout.buckets)
            grads = layout.numel * kind.grad_dtype.itemsize
            if not ddp_config.use_distributed_optimizer:
                found.append(Traffic(*group, "all-reduce", GRADS, times * count, times * grads))
                continue
            found.append(Traffic(*group, "reduce-scatter", GRADS, times * count, times * grads))
            params, form = layout.numel * kind.param_dtype.itemsize, costs.config.block_format
            if kind.is_packed and form is not None:
                params = layout.numel + form.num_scales(layout.numel)  # rows are wide, so their padding is ignored
            found.append(Traffic(*group, "all-gather", PARAMS, count, params))
    return merged(found)


def in_node_ranks(shape: Shape, devices_per_node: int) -> dict[str, int]:
    """Returns, for each process group, how many of its ranks are on one node."""
    tp, etp = shape.tensor, shape.expert_tensor
    groups = {
        "tp": (1, tp),
        "cp": (tp, shape.context),
        "tp_cp": (1, tp * shape.context),
        "dp": (tp * shape.context, shape.dense_ranks // shape.context),
        "dp_cp": (tp, shape.dense_ranks),
        "pp": (shape.world_size // shape.stages, shape.stages),
        "etp": (1, etp),
        "ep": (etp, shape.expert),
        "tp_ep": (1, etp * shape.expert),
        "edp": (etp * shape.expert, shape.expert_ranks),
        "embd": (shape.world_size // shape.stages * max(1, shape.stages - 1), 2),
        "stage": (1, shape.world_size // shape.stages),
        "world": (1, shape.world_size),
    }
    return {name: max(1, min(size, devices_per_node // stride)) for name, (stride, size) in groups.items()}
