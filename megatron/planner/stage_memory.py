"""What a rank of each pipeline stage holds, added up from the facts of single layers; see layer_facts.py.

The same arithmetic that buffers, optimizers, schedules and the stash use themselves; no model is built here.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.layout import ALIGNMENT, BufferLayout, lay_out, resolve_bucket_size, round_up
from megatron.core.distributed.param_and_grad_buffer import BufferKind
from megatron.core.optimizer.flat_params import host_elements
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.state_memory import state_bytes
from megatron.core.pipeline_parallel.expansion import expand, kept_events
from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Pipeline, stage_orders
from megatron.core.transformer.moe.paged_stash.sizing import LearnedSizes, pool_layout, step_needs
from megatron.planner.activations import EXPERTS
from megatron.planner.layer_facts import LayerKind, ModelFacts, PartFacts, Place
from megatron.training.step.expert_memory import stash_events

# Rounds of microbatches after which a schedule only repeats itself, until its end.
_ROUNDS = 3


@dataclass(frozen=True)
class Shape:
    """The sizes that stages follow from. layers: of each part of the pipeline, chunk c of stage s at c * stages + s.

    num_microbatches: of a step. group_size: of interleaved schedules; None: as many as stages.
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
    group_size: int | None = None

    def __post_init__(self) -> None:
        assert len(self.layers) == self.stages * self.chunks, "one entry a chunk of each stage"

    @property
    def dense_ranks(self) -> int:
        """Ranks that share dense parameters: data-parallel and context-parallel ones."""
        return self.world_size // (self.tensor * self.stages)

    @property
    def expert_ranks(self) -> int:
        """Ranks that share an expert."""
        return self.world_size // (self.expert * self.expert_tensor * self.stages)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline's stages and chunks."""
        return Pipeline(self.stages, self.chunks)


@dataclass(frozen=True)
class Standing:
    """Bytes that the first rank of a stage holds from step to step, as RankPlan has them."""

    parameters: int
    gradients: int
    masters: int
    moments: int
    host_states: int = 0

    @property
    def total(self) -> int:
        """All that is on the device."""
        return self.parameters + self.gradients + self.masters + self.moments


@dataclass(frozen=True)
class StageMemory:
    """Bytes of the first rank of a stage, as RankPlan has them."""

    standing: Standing
    pages: int
    host_pages: int
    activations: Mapping[str, int]

    @property
    def total(self) -> int:
        """All that is on the device."""
        return self.standing.total + self.pages + sum(self.activations.values())


def stage_chunks(facts: ModelFacts, shape: Shape, *, stage: int) -> list[list[PartFacts]]:
    """The parts of each chunk of a stage."""
    numbers = range(stage, len(shape.layers), shape.stages)
    return [
        facts.chunk_parts(shape.layers[number], is_first=number == 0, is_last=number == len(shape.layers) - 1)
        for number in numbers
    ]


def standing_bytes(
    facts: ModelFacts,
    shape: Shape,
    *,
    stage: int,
    ddp_config: DistributedDataParallelConfig,
    optimizer_config: OptimizerConfig,
) -> Standing:
    """Returns the persistent bytes of the first rank of a stage, whose parts are the largest of the stage.

    Padding is that of the run's own buffers. States in fp16 have a scale for each block of elements, which is counted
    over all of them: less than a block a run of neighbours too few.
    """
    chunks = stage_chunks(facts, shape, stage=stage)
    parameters = sum(part.other for parts in chunks for part in parts)
    gradients = 0
    masters = moments = host_states = 0.0
    for number in range(len(chunks)):
        for kind, layout in chunk_buffers(chunks[number], shape, is_first=number + stage == 0, ddp_config=ddp_config):
            ranks = layout.num_shards
            stepped, on_host = _stepped_elements(
                layout, is_sharded=ddp_config.use_distributed_optimizer, host_fraction=optimizer_config.host_fraction
            )
            of_kind = partial(state_bytes, params_dtype=kind.param_dtype, grads_dtype=kind.grad_dtype)
            states = of_kind(stepped - on_host, optimizer_config)
            # There masters are whole numbers of fp32 or wider, whatever they are on the device.
            wide = torch.promote_types(kind.param_dtype, torch.float32).itemsize
            host_states += on_host * wide + of_kind(on_host, optimizer_config).moments
            owned = layout.numel // ranks if ddp_config.shard_gradients else layout.numel
            parameters += layout.numel * kind.param_dtype.itemsize
            gradients += 0 if ddp_config.release_gradients else owned * kind.grad_dtype.itemsize
            masters, moments = masters + states.masters, moments + states.moments
    return Standing(parameters, gradients, int(masters), int(moments), int(host_states))


def chunk_buffers(
    parts: Sequence[PartFacts], shape: Shape, *, is_first: bool, ddp_config: DistributedDataParallelConfig
) -> Iterator[tuple[BufferKind, BufferLayout]]:
    """Yields the buffer layouts of a chunk's parameters; is_first: whether it is the first of the first stage."""
    is_whole = (not is_first and not ddp_config.has_bucket_lifetime_grads) or not ddp_config.cuts_buckets
    for kind, places in _by_buffer(parts, apart=shape.dense_ranks != shape.expert_ranks).items():
        ranks = shape.expert_ranks if kind.is_expert else shape.dense_ranks
        ranks //= ddp_config.num_distributed_optimizer_instances
        yield (
            kind,
            _laid_out(
                tuple(place.numel for place in places),
                tuple(index for index, place in enumerate(places) if place.own_bucket),
                ranks=ranks,
                bucket_size=resolve_bucket_size(
                    ddp_config.bucket_size, ddp_config.num_buckets, num_ranks=ranks, single_bucket=is_whole
                ),
                num_buckets=None if is_whole else ddp_config.num_buckets,
                high_busbw=ddp_config.pad_buckets_for_high_nccl_busbw,
            ),
        )


def saved_by_chunk(facts: ModelFacts, shape: Shape, *, stage: int) -> list[Counter[str]]:
    """Bytes that a microbatch of each chunk of a stage leaves for its backward, by kind."""
    found = []
    for parts in stage_chunks(facts, shape, stage=stage):
        saved: Counter[str] = Counter()
        for part in parts:
            saved.update(part.saved or {})
        found.append(saved)
    return found


def peak_activations(facts: ModelFacts, shape: Shape, *, stage: int, stashes: bool) -> dict[str, int]:
    """Returns the bytes at the fullest moment of the stage's schedule, by kind. stashes: whether experts stash."""
    saved = saved_by_chunk(facts, shape, stage=stage)
    in_buffers = 0
    if stashes:
        layers = [expert_layers(facts, shape, part=number) for number in range(stage, len(shape.layers), shape.stages)]
        # One layer's rows are outside of pages, between its experts and its copy.
        in_buffers = max(kinds[EXPERTS] // max(1, count) for kinds, count in zip(saved, layers, strict=True))
        saved = [Counter({**kinds, EXPERTS: 0}) for kinds in saved]
    moments = fullest_moments(
        shape.pipeline, stage, num_microbatches=shape.num_microbatches, group_size=shape.group_size
    )
    sizes = [sum(kinds.values()) for kinds in saved]
    fullest = max(moments, key=lambda alive: sum(map(int.__mul__, alive, sizes)))
    peak: Counter[str] = Counter()
    for count, kinds in zip(fullest, saved, strict=True):
        peak.update({kind: size * count for kind, size in kinds.items()})
    return {**peak, EXPERTS: in_buffers} if stashes else dict(peak)


def expert_layers(facts: ModelFacts, shape: Shape, *, part: int) -> int:
    """Returns how many layers with experts a part of the pipeline has, including multi-token prediction."""
    further = facts.mtp_expert_layers if part == len(shape.layers) - 1 else 0
    return sum(kind.has_experts for kind in shape.layers[part]) + further


@lru_cache(maxsize=1 << 14)
def fullest_moments(
    pipeline: Pipeline, stage: int, *, num_microbatches: int, group_size: int | None
) -> tuple[tuple[int, ...], ...]:
    """Returns the microbatches of each chunk between forward and backward, at the moments that no other exceeds.

    A long step is replaced by a shorter one, which has as many rounds as it takes to fill the pipeline.
    """
    alive = [0] * pipeline.num_chunks
    found: set[tuple[int, ...]] = set()
    for action in _orders(pipeline, num_microbatches, group_size=group_size)[stage]:
        alive[action.chunk] += 1 if action.kind is ActionKind.FORWARD else -1
        if action.kind is ActionKind.FORWARD:
            found.add(tuple(alive))
    return tuple(one for one in found if not any(one != other and all(map(int.__le__, one, other)) for other in found))


def short_step(num_microbatches: int, group_size: int) -> int:
    """Microbatches of the shortest step that fills the pipeline as much, and ends alike."""
    return min(num_microbatches, full_rounds(group_size) + num_microbatches % group_size)


def full_rounds(group_size: int) -> int:
    """Microbatches after which the pipeline is as full as it ever is."""
    return _ROUNDS * group_size


@lru_cache(maxsize=256)
def _orders(pipeline: Pipeline, num_microbatches: int, *, group_size: int | None) -> list[list[Action]]:
    """Returns the order of passes of each stage, in a step no longer than it takes to fill the pipeline."""
    length = short_step(num_microbatches, group_size or pipeline.num_stages)
    return stage_orders(pipeline, length, group_size=group_size)


def stash_bytes(facts: ModelFacts, shape: Shape, *, stage: int) -> tuple[int, int]:
    """Bytes of the stash's pages of a stage, on the device and on the host, before anything is learned."""
    if facts.rows is None or not facts.config.moe_paged_stash:
        return 0, 0
    layers = _expert_layer_numbers(facts, shape)[stage :: shape.stages]
    order = _orders(shape.pipeline, shape.num_microbatches, group_size=shape.group_size)[stage]
    events = stash_events(kept_events(expand(order, layers)))
    max_rows = facts.rows.max_rows if events else 0
    needs = step_needs(facts.config, events, max_rows=max_rows, balanced_rows=facts.rows.balanced)
    layout = pool_layout(facts.config, needs, learned=LearnedSizes())
    if layout is None:
        return 0, 0
    return layout.device_pages * layout.page_bytes, layout.host_pages * layout.page_bytes


def _expert_layer_numbers(facts: ModelFacts, shape: Shape) -> list[list[int]]:
    """Returns for each part of the pipeline the numbers of its layers with experts, from 1 over the model."""
    numbers, first = [], 1
    for part, kinds in enumerate(shape.layers):
        found = [first + index for index, kind in enumerate(kinds) if kind.has_experts]
        first += len(kinds)
        further = facts.mtp_expert_layers if part == len(shape.layers) - 1 else 0
        numbers.append([*found, *range(first, first + further)])
    return numbers


def _by_buffer(parts: Sequence[PartFacts], *, apart: bool) -> dict[BufferKind, list[Place]]:
    found: dict[BufferKind, list[Place]] = {}
    for part in parts:
        for place in part.params:
            found.setdefault(place.buffer if apart else replace(place.buffer, is_expert=False), []).append(place)
    return found


# Stages in the middle of a pipeline have the same sizes.
@lru_cache(maxsize=1 << 12)
def _laid_out(
    sizes: tuple[int, ...],
    own_bucket: tuple[int, ...],
    *,
    ranks: int,
    bucket_size: int | None,
    num_buckets: int | None,
    high_busbw: bool,
) -> BufferLayout:
    return lay_out(
        sizes,
        num_shards=ranks,
        bucket_size=bucket_size,
        own_bucket=own_bucket,
        num_buckets=num_buckets,
        high_busbw=high_busbw,
    )


def _stepped_elements(layout: BufferLayout, *, is_sharded: bool, host_fraction: float) -> tuple[int, int]:
    """Elements that the first rank steps, its shard of each bucket up to the padding at the end; and how many of them
    are kept in the host's memory.
    """
    stepped = on_host = 0
    for bucket in layout.buckets:
        owned = bucket.span.numel // (layout.num_shards if is_sharded else 1)
        own = min(round_up(bucket.numel_unpadded, ALIGNMENT), owned)
        stepped, on_host = stepped + own, on_host + min(own, host_elements(owned, host_fraction))
    return stepped, on_host
