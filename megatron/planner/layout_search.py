"""Finds the layouts in which a model fits that are Pareto-optimal in memory and step time.

layout_space.py lists the candidates. Each candidate is estimated from the measured costs of a similar layout, and the
best candidates are measured on models built for them.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from itertools import islice

from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.pipeline_parallel.schedule import (
    Pipeline,
    Schedule,
    ScheduleKind,
    configured_schedule,
    pipeline_of,
    stage_orders,
)
from megatron.planner.layer_costs import (
    LayerKind,
    ModelCosts,
    PartCost,
    PartWork,
    Scale,
    layer_kinds,
    measure_memory,
    measure_work,
)
from megatron.planner.layout_space import Layout, Sharding, Space
from megatron.planner.plan import ForwardStep, ModelStates, RankMemory, hidden_bytes
from megatron.planner.stage_costs import (
    Shape,
    in_node_ranks,
    model_states,
    num_pairs,
    peak_activations,
    quick_stages,
    shape_of,
    stage_chunks,
    stage_load,
    stash_bytes,
)
from megatron.planner.step_time import (
    Overlap,
    Rates,
    StageClock,
    StepTime,
    estimate_step,
    full_rounds,
    long_step,
    overlap_of,
)
from megatron.planner.work import (
    EMBEDDING,
    END,
    GRADS,
    PARAMS,
    StageLoad,
    Traffic,
    compute_seconds,
    message_seconds,
)
from megatron.training.arguments import read_run_config
from megatron.training.command_line.errors import CommandLineError
from megatron.training.compute.devices import Device
from megatron.training.compute.flops import num_floating_point_operations
from megatron.training.config import RunConfig
from megatron.training.setup import setup_tokenizer

# Number of rejected layouts of one kind after which the search skips the kind.
_MAX_REFUSALS = 4
# Number of layouts that are measured to find the smallest accepted one if none fits.
_MAX_TRIED = 12
# A slower layout joins the front only if it needs less than this share of memory, because estimates are inexact.
_FRONT_MEMORY_SHARE = 0.98
# An update reads and writes masters and moments.
_ACCESSES_PER_UPDATE = 2
_GIGA = 1e9
# Bytes of parameters and of gradients, for experts (True) and dense layers (False).
Weights = dict[bool, tuple[int, int]]
# Layer kinds of each part of the pipeline, the stages of `_distinct`, and counts of kinds by stage.
_Layers = tuple[tuple[tuple[LayerKind, ...], ...], list[int], list[Counter[LayerKind | str]]]
# Receives a status line for each layout, and may print only some of them.
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Cost:
    """Estimated bytes of the fullest rank and seconds per step of a layout, from scaled costs."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Advice:
    """A layout that the run accepts, with its measured costs.

    words: its command line. stages: memory of each stage's first rank. alone: the step without pairs of passes; None if
    its schedule has no pairs.
    """

    layout: Layout
    words: tuple[str, ...]
    stages: tuple[RankMemory, ...]
    time: StepTime
    alone: StepTime | None = None

    @property
    def num_bytes(self) -> int:
        """Peak bytes of the fullest rank."""
        return max(stage.total for stage in self.stages)

    @property
    def fullest(self) -> int:
        """Number of the stage that contains the fullest rank."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)


@dataclass(frozen=True)
class Found:
    """Result of a search. front: the Pareto-optimal layouts that fit, fastest first.

    nearest: the layout with the least memory, if none fits. compared, fitting: number of layouts that were compared and
    that fit.
    """

    front: tuple[Advice, ...]
    nearest: Advice | None
    compared: int
    fitting: int


@dataclass(frozen=True)
class PassSeconds:
    """Time of one microbatch's passes, in seconds.

    exposed: time of messages that are not overlapped. in_pairs: the same if a backward and a forward take turns.
    weights: the part of backward that weight passes run, if the schedule has them.
    """

    forward: float
    backward: float
    exposed: float
    in_pairs: float
    weights: float = 0.0

    @property
    def total(self) -> float:
        """Time of passes that run alone."""
        return self.forward + self.backward + self.exposed


def search(space: Space, costs: "LayoutCosts", *, limit: int, most: int, progress: Progress) -> Found:
    """Searches for layouts that fit into `limit` bytes, and returns at most `most` Pareto-optimal ones.

    Raises CommandLineError if no layout is possible.
    """
    _check_micro_batch(space)
    compared, known = _costs(space, costs, limit=limit, progress=progress)
    if not compared:
        raise CommandLineError(
            f"no layout uses {space.world_size} GPUs: tensor x pipeline x context must divide this number, and the "
            f"remaining data-parallel ranks must divide the global batch of {space.global_batch}; given sizes: "
            f"{', '.join(f'{name} {value}' for name, value in space.fixed.items() if value is not None) or 'none'}"
        )
    fitting = [one for one in known if one[0].num_bytes <= limit]
    front = _front(fitting, costs, limit=limit, most=most, progress=progress)
    if front:
        return Found(tuple(front), None, compared, len(fitting))
    if known and not fitting:
        # costs.cost skips layouts whose parameters exceed twice the limit. With the memory of the smallest known layout
        # as the limit, it skips no layout that uses less.
        _, known = _costs(space, costs, limit=min(cost.num_bytes for cost, _ in known), progress=progress)
    nearest = _nearest(sorted(known, key=lambda one: one[0].num_bytes), costs)
    if nearest is None:
        too_large = "the parameters of a rank alone exceed twice the memory"
        why = costs.last_refusal.replace("\n", "; ") or too_large
        raise CommandLineError(f"none of {compared} layouts is possible: {why}")
    return Found((), nearest, compared, len(fitting))


def _check_micro_batch(space: Space) -> None:
    micro_batch = space.fixed.get("micro_batch")
    if micro_batch and space.global_batch % micro_batch:
        raise CommandLineError(
            f"--global-batch-size is {space.global_batch}: must be a multiple of --micro-batch-size ({micro_batch})"
        )


def _costs(
    space: Space, costs: "LayoutCosts", *, limit: int, progress: Progress
) -> tuple[int, list[tuple[Cost, Layout]]]:
    """Estimates all layouts. Returns their number, and the layouts with an estimate."""
    total = sum(1 for _ in space.layouts())
    compared = 0
    known: list[tuple[Cost, Layout]] = []
    for layout in space.layouts():
        progress(f"{compared} of {total} layouts compared")
        compared += 1
        cost = costs.cost(layout, limit=limit)
        if cost is not None:
            known.append((cost, layout))
    return compared, known


def _front(
    fitting: list[tuple[Cost, Layout]], costs: "LayoutCosts", *, limit: int, most: int, progress: Progress
) -> list[Advice]:
    """Measures the best layouts, and returns those that the run accepts and that fit."""
    found: list[Advice] = []
    smallest = float("inf")
    for cost, layout in sorted(fitting, key=lambda one: (one[0].seconds, one[0].num_bytes)):
        if len(found) == most:
            break
        if cost.num_bytes > smallest * _FRONT_MEMORY_SHARE:
            continue
        progress(f"{len(fitting)} layouts fit, {len(found)} of the best measured")
        advice = costs.advice(layout)
        if advice is not None and advice.num_bytes <= limit:
            found.append(advice)
            smallest = min(cost.num_bytes, advice.num_bytes)
    return sorted(found, key=lambda one: one.time.seconds)


def _nearest(candidates: Iterable[tuple[Cost, Layout]], costs: "LayoutCosts") -> Advice | None:
    tried = [costs.advice(layout) for _, layout in islice(candidates, _MAX_TRIED)]
    return min((advice for advice in tried if advice is not None), key=lambda one: one.num_bytes, default=None)


class LayoutCosts:
    """Estimates and measures layouts of one command line.

    words: its flags, excluding layout flags. run_config: the settings of these flags on one rank. last_refusal: error
    message of the last layout that the run rejected.
    """

    def __init__(
        self,
        words: Sequence[str],
        run_config: RunConfig,
        *,
        space: Space,
        device: Device,
        model_provider: Callable[..., nn.Module],
        forward_step: ForwardStep,
    ) -> None:
        self._words, self._run_config, self._space, self._device = tuple(words), run_config, space, device
        self._provider, self._forward_step = model_provider, forward_step
        self._kinds = layer_kinds(run_config.transformer)
        self._given_sharding = _sharding_of(run_config.ddp)
        self._refusals: Counter[tuple[object, ...]] = Counter()
        # Measured costs and the layout they belong to: memory by kind, latest memory by tensor sizes, and work by kind.
        self._measured_memory: dict[tuple[object, ...], tuple[ModelCosts, Layout]] = {}
        self._latest_memory: dict[tuple[int, int], tuple[ModelCosts, Layout]] = {}
        self._measured_work: dict[tuple[object, ...], tuple[ModelCosts, Layout]] = {}
        # By kind. The settings on one rank exchange no rows that computation could overlap with.
        self._overlaps: dict[tuple[object, ...], Overlap] = {}
        # Caches, each keyed by the sizes that its values depend on.
        self._scaled: dict[tuple[object, ...], ModelCosts] = {}
        self._states: dict[tuple[object, ...], ModelStates] = {}
        self._seconds: dict[tuple[object, ...], dict[LayerKind | str, PassSeconds]] = {}
        self._weights: dict[tuple[object, ...], dict[int, Weights]] = {}
        self._activations: dict[tuple[object, ...], dict[int, int]] = {}
        self._layers: dict[tuple[object, ...], _Layers] = {}
        self.last_refusal = ""

    def words_of(self, layout: Layout) -> tuple[str, ...]:
        """Returns the complete command line of a layout."""
        return (*self._words, *self._space.flags(layout))

    def cost(self, layout: Layout, *, limit: int) -> Cost | None:
        """Estimates a layout. Returns None if the run rejects it, or if its parameters exceed twice the limit.

        If the layout exceeds the limit, seconds are infinite, and the bytes may exclude activations.
        """
        if not self._may_fit(layout, limit=limit):
            return None
        costs = self._memory_costs(layout)
        if costs is None:
            return None
        shape, distinct = self._shape(layout), self._distinct(layout)
        weights = self._weights_of(layout, costs, shape=shape)
        states = {stage: self._states_of(layout, costs, shape=shape, stage=stage) for stage in distinct}
        num_bytes = max(one.total for one in states.values())
        if num_bytes > limit:
            return Cost(num_bytes, math.inf)
        activations = self._activations_of(layout, costs, shape=shape)
        num_bytes = max(states[stage].total + layout.micro_batch * activations[stage] for stage in distinct)
        if num_bytes > limit:
            return Cost(num_bytes, math.inf)
        updated = max(self._update_bytes(one) for one in states.values()) / self._memory_rate
        return Cost(num_bytes, self._quick_seconds(layout, shape=shape, weights=weights, updated=updated))

    def advice(self, layout: Layout) -> Advice | None:
        """Measures a layout on a model built for it, or returns None if the run rejects the layout."""
        try:
            run_config = self._validated(layout)
            costs = measure_memory(run_config, self._provider, forward_step=self._forward_step)
            stages = tuple(quick_stages(run_config, costs))
            costs = measure_work(costs, run_config, self._provider, forward_step=self._forward_step)
        except ValueError as error:
            self.last_refusal = str(error)
            return None
        schedule = configured_schedule(run_config.transformer)
        alone = self._step_time(run_config, costs, schedule._replace(paired=False), stages=stages)
        if not schedule.paired:
            return Advice(layout, self.words_of(layout), stages, alone)
        time = self._step_time(run_config, costs, schedule, stages=stages)
        return Advice(layout, self.words_of(layout), stages, time, alone)

    def _may_fit(self, layout: Layout, *, limit: int) -> bool:
        """Returns whether parameters occupy at most twice the limit.

        Returns True if no layer of this tensor-parallel size has been measured yet.
        """
        known = self._latest_memory.get((layout.tensor, layout.expert_tensor))
        if known is None:
            return True
        if self._weights_key(layout) not in self._weights:
            costs = known[0].scaled(Scale(experts=Fraction(known[1].expert, layout.expert)))
            self._weights_of(layout, costs, shape=self._shape(layout))
        weights = self._weights[self._weights_key(layout)]
        return max(sum(params for params, _ in one.values()) for one in weights.values()) <= 2 * limit

    @staticmethod
    def _weights_key(layout: Layout) -> tuple[object, ...]:
        sizes = (layout.tensor, layout.expert, layout.expert_tensor, layout.stages)
        return *sizes, layout.counts

    def _memory_costs(self, layout: Layout) -> ModelCosts | None:
        """Returns memory costs with one sample per microbatch, or None if the run rejects this kind of layout.

        The costs are scaled from the first measured layout of the same kind.
        """
        kind = self._kind_of(layout)
        key = (*kind, layout.expert)
        if key not in self._scaled:
            if kind not in self._measured_memory and not self._find_costs(layout, kind):
                return None
            costs, base = self._measured_memory[kind]
            self._scaled[key] = costs.scaled(
                Scale(samples=Fraction(1, base.micro_batch), experts=Fraction(base.expert, layout.expert))
            )
        return self._scaled[key]

    @staticmethod
    def _kind_of(layout: Layout) -> tuple[object, ...]:
        """Returns a key shared by layouts that differ only in the number of samples and experts."""
        sizes = (layout.tensor, layout.context, layout.expert_tensor, layout.expert > 1, layout.stages > 1)
        return *sizes, layout.recompute, layout.experts

    def _find_costs(self, layout: Layout, kind: tuple[object, ...]) -> bool:
        if self._refusals[kind] >= _MAX_REFUSALS:
            return False
        try:
            run_config = self._validated(layout)
            costs = measure_memory(run_config, self._provider, forward_step=self._forward_step, of_each_kind=1)
        except ValueError as error:
            self._refusals[kind] += 1
            self.last_refusal = str(error)
            return False
        self._overlaps[kind] = overlap_of(run_config)
        self._measured_memory[kind] = self._latest_memory[layout.tensor, layout.expert_tensor] = costs, layout
        return True

    def _validated(self, layout: Layout) -> RunConfig:
        words = [*self.words_of(layout), "--dry-run", "--world-size", str(self._space.world_size)]
        return read_run_config(words)

    def _shape(self, layout: Layout) -> Shape:
        key = (layout.stages, layout.counts)
        schedule = self._space.schedule
        if key not in self._layers:
            kinds = iter(self._kinds)
            layers = tuple(tuple(islice(kinds, count)) for count in layout.counts)
            pipeline = pipeline_of(schedule, layout.stages, layout.chunks)
            # A later stage may hold more for its weight passes than an equal one before it.
            has_weight_passes = schedule.kind is not ScheduleKind.ONE_F_ONE_B
            distinct = [*range(layout.stages)] if has_weight_passes else _distinct_stages(layers, pipeline)
            self._layers[key] = layers, distinct, _stage_kinds(layers, pipeline)
        data = self._space.world_size // layout.model_ranks
        return Shape(
            self._space.world_size,
            layout.tensor,
            layout.stages,
            layout.chunks,
            layout.context,
            layout.expert,
            layout.expert_tensor,
            self._layers[key][0],
            num_microbatches=self._space.global_batch // (data * layout.micro_batch),
            schedule=schedule,
        )

    def _distinct(self, layout: Layout) -> list[int]:
        """Returns the stages of which one uses the most memory: of equal stages only the first, if it always does."""
        return self._layers[layout.stages, layout.counts][1]

    def _weights_of(self, layout: Layout, costs: ModelCosts, *, shape: Shape) -> dict[int, Weights]:
        key = self._weights_key(layout)
        if key not in self._weights:
            self._weights[key] = {stage: _weights(costs, shape, stage=stage) for stage in self._distinct(layout)}
        return self._weights[key]

    def _states_of(self, layout: Layout, costs: ModelCosts, *, shape: Shape, stage: int) -> ModelStates:
        sizes = (layout.tensor, layout.context, layout.expert, layout.expert_tensor, layout.stages, layout.chunks)
        key = (*sizes, layout.sharding, layout.counts, stage)
        if key not in self._states:
            run_config = self._with_sharding(layout.sharding)
            self._states[key] = model_states(
                costs,
                shape,
                stage=stage,
                ddp_config=run_config.ddp,
                optimizer_config=run_config.optimizer,
            )
        return self._states[key]

    def _with_sharding(self, sharding: Sharding | None) -> RunConfig:
        if sharding is None:
            return self._run_config
        shards, of_gradients = sharding is not Sharding.NOTHING, sharding is Sharding.GRADIENTS
        return self._run_config.changed(
            use_distributed_optimizer=shards,
            overlap_grad_reduce=shards,
            overlap_param_gather=shards,
            shard_gradients=of_gradients,
            optimizer="distributed_fused_adam" if of_gradients else "adam",
        )

    def _activations_of(self, layout: Layout, costs: ModelCosts, *, shape: Shape) -> dict[int, int]:
        """Returns the bytes of activations and pages of each distinct stage, with one sample per microbatch."""
        sizes = (layout.tensor, layout.context, layout.expert_tensor, layout.stages, layout.counts)
        group = shape.round_size
        # Whole rounds suffice, because the end of a step does not change the peak.
        shape = replace(shape, num_microbatches=min(shape.num_microbatches, full_rounds(group)))
        key = (*sizes, layout.recompute, layout.experts, shape.num_microbatches)
        if key not in self._activations:
            self._activations[key] = {}
            for stage in self._distinct(layout):
                pages = stash_bytes(costs, shape, stage=stage)
                kept = peak_activations(costs, shape, stage=stage, pages=pages)
                self._activations[key][stage] = pages.device + kept.by_kind.total()
        return self._activations[key]

    @staticmethod
    def _update_bytes(states: ModelStates) -> float:
        return float(_ACCESSES_PER_UPDATE * (states.masters + states.moments + states.host_states))

    @cached_property
    def _memory_rate(self) -> float:
        return self._device.memory_gb_s * _GIGA * self._device.attainable_memory

    def _quick_seconds(
        self,
        layout: Layout,
        *,
        shape: Shape,
        weights: Mapping[int, Weights],
        updated: float,
    ) -> float:
        in_node = in_node_ranks(shape, self._device.devices_per_node)
        own = self._seconds_of_parts(layout, in_node=in_node)
        stages = []
        for parts in self._layers[layout.stages, layout.counts][2]:
            passes = [(own[part], count) for part, count in parts.items()]
            stages.append(
                PassSeconds(
                    sum(one.forward * count for one, count in passes),
                    sum(one.backward * count for one, count in passes),
                    sum(one.exposed * count for one, count in passes),
                    sum(one.in_pairs * count for one, count in passes),
                    sum(one.weights * count for one, count in passes),
                )
            )
        sharding, reduced, gathered = layout.sharding or self._given_sharding, 0.0, 0.0
        for of_stage in weights.values():
            seconds = {GRADS: 0.0, PARAMS: 0.0}
            for one in data_traffic(of_stage, shape, sharding=sharding):
                seconds[one.phase] += message_seconds(one, self._device, in_node=in_node[one.group])
            reduced, gathered = max(reduced, seconds[GRADS]), max(gathered, seconds[PARAMS])
        return quick_seconds(
            stages,
            shape,
            reduced=reduced,
            gathered=gathered,
            updated=updated,
            sharding=sharding,
        )

    def _seconds_of_parts(self, layout: Layout, *, in_node: Mapping[str, int]) -> dict[LayerKind | str, PassSeconds]:
        """Returns the time of one microbatch in a layer of each kind, in the embedding, and in the model's end."""
        key = (self._kind_of(layout), layout.expert, layout.micro_batch)
        if key not in self._seconds:
            costs = self._work_of(layout)
            parts: list[tuple[LayerKind | str, PartCost]] = [*costs.layers.items()]
            parts += [(EMBEDDING, costs.embedding), (END, costs.end)]
            experts = {kind: int(kind.has_experts) for kind in costs.layers} | {END: costs.mtp_expert_layers}
            self._seconds[key] = {
                name: seconds_of(
                    part.work,
                    Rates(self._device, in_node),
                    overlap=self._overlaps[self._kind_of(layout)],
                    expert_layers=experts.get(name, 0),
                )
                for name, part in parts
            }
        return self._seconds[key]

    def _work_of(self, layout: Layout) -> ModelCosts:
        """Returns the work of a layout, scaled from a measured layout of the same kind.

        If a group of expert ranks equals a group of dense ranks, messages are recorded under the dense group's name,
        and their group size cannot be scaled. Such layouts are scaled only from the same expert-parallel size.
        """
        shared = layout.expert if _share_ranks(layout) else None
        kind = (*self._kind_of(layout), shared)
        if kind not in self._measured_work:
            known = self._measured_memory[self._kind_of(layout)][1]
            base = known if not _share_ranks(known) and shared is None else layout
            if base.sharding is Sharding.GRADIENTS:
                # The copies of sharded gradients scale neither with the tokens nor with a layer's weights.
                base = replace(base, sharding=Sharding.STATES)
            costs = measure_work(
                self._measured_memory[self._kind_of(layout)][0],
                self._validated(base),
                self._provider,
                forward_step=self._forward_step,
                of_each_kind=1,
                has_all_replicas=False,
            )
            self._measured_work[kind] = costs, base
        costs, base = self._measured_work[kind]
        return costs.scaled(
            Scale(
                samples=Fraction(layout.micro_batch, base.micro_batch),
                experts=Fraction(base.expert, layout.expert),
                expert_ranks=Fraction(layout.expert, base.expert),
            )
        )

    def _step_time(
        self, run_config: RunConfig, costs: ModelCosts, schedule: Schedule, *, stages: Sequence[RankMemory]
    ) -> StepTime:
        setup_tokenizer(run_config)  # pads the vocabulary for the layout
        shape, seq_length = shape_of(run_config), run_config.data.seq_length
        samples = run_config.training.micro_batch_size * run_config.launch.data_parallel_size
        flops = num_floating_point_operations(run_config, 1)

        def estimate(num_microbatches: int) -> StepTime:
            short = replace(shape, num_microbatches=num_microbatches)
            loads = [
                stage_load(
                    costs,
                    short,
                    stage=stage,
                    ddp_config=run_config.ddp,
                    hidden_bytes=hidden_bytes(run_config),
                    state_bytes=memory.states.masters + memory.states.moments,
                )
                for stage, memory in enumerate(stages)
            ]
            return estimate_step(
                loads,
                num_microbatches,
                schedule,
                device=self._device,
                overlap=overlap_of(run_config),
                in_node=in_node_ranks(shape, self._device.devices_per_node),
                tokens=num_microbatches * samples * seq_length,
                flops_per_rank=flops * num_microbatches * samples / shape.world_size,
            )

        time = long_step(estimate, shape.num_microbatches, group_size=shape.round_size)
        return replace(time, spans=[])  # unused, and large for many layouts


def _sharding_of(ddp_config: DistributedDataParallelConfig) -> Sharding:
    if ddp_config.shard_gradients:
        return Sharding.GRADIENTS
    return Sharding.STATES if ddp_config.use_distributed_optimizer else Sharding.NOTHING


def _distinct_stages(layers: Sequence[tuple[LayerKind, ...]], pipeline: Pipeline) -> list[int]:
    found: dict[tuple[object, ...], int] = {}
    last = len(layers) - 1
    for stage in range(pipeline.num_stages):
        found.setdefault(tuple((layers[n], n == 0, n == last) for n in pipeline.parts_of(stage)), stage)
    return list(found.values())


def _stage_kinds(layers: Sequence[tuple[LayerKind, ...]], pipeline: Pipeline) -> list[Counter[LayerKind | str]]:
    """Counts, for each stage, the layers of each kind, the embeddings and the model ends."""
    found: list[Counter[LayerKind | str]] = []
    for stage in range(pipeline.num_stages):
        parts = pipeline.parts_of(stage)
        kinds: Counter[LayerKind | str] = Counter(kind for part in parts for kind in layers[part])
        kinds[EMBEDDING], kinds[END] = int(0 in parts), int(len(layers) - 1 in parts)
        found.append(kinds)
    return found


def _weights(costs: ModelCosts, shape: Shape, *, stage: int) -> Weights:
    """Returns the bytes of a stage's parameters and gradients, for experts and dense layers."""
    found: dict[bool, tuple[int, int]] = {}
    for parts in stage_chunks(costs, shape, stage=stage):
        for part in parts:
            for is_expert, (params, grads) in part.weights.items():
                before = found.get(is_expert, (0, 0))
                found[is_expert] = before[0] + params, before[1] + grads
    return found


def _share_ranks(layout: Layout) -> bool:
    """Returns whether a group of expert ranks has the same stride and size as a group of dense ranks."""
    tp, cp, ep, etp = layout.tensor, layout.context, layout.expert, layout.expert_tensor
    of_layers = {(1, tp), (tp, cp), (1, tp * cp)}
    return any(size > 1 and (stride, size) in of_layers for stride, size in ((etp, ep), (1, etp * ep)))


def seconds_of(work: PartWork, rates: Rates, *, overlap: Overlap, expert_layers: int) -> PassSeconds:
    """Estimates the time of one microbatch's passes through a part with this number of layers with experts."""
    chunk = replace(work.chunk(), expert_layers=expert_layers)
    (order,) = stage_orders(Pipeline(1), 2, Schedule(paired=True))
    clock = StageClock(StageLoad((chunk,), work.times(2).traffic), order, rates=rates, overlap=overlap)
    forward, pair, backward = (clock.seconds(step) for step in order)
    of_forward = compute_seconds(chunk.forward, rates.device)
    of_backward = compute_seconds(chunk.backward + chunk.recompute, rates.device)
    computed = of_forward + of_backward
    of_weights = compute_seconds(chunk.weights, rates.device)
    return PassSeconds(of_forward, of_backward, forward + backward - computed, pair - computed, of_weights)


def quick_seconds(
    stages: Sequence[PassSeconds],
    shape: Shape,
    *,
    reduced: float,
    gathered: float,
    updated: float,
    sharding: Sharding,
) -> float:
    """Estimates the time of a step, in which the slowest stage runs all microbatches once the pipeline is filled.

    All times are in seconds. stages: one microbatch in each stage. reduced, gathered, updated: the slowest rank's
    gradient reductions, parameter gathers and update. Reductions overlap with the last backward, gathers with the first
    forward.
    """
    slowest = max(stages, key=lambda one: one.total)
    filling = (sum(_idle_time(one, shape) for one in stages) - _idle_time(slowest, shape)) / shape.chunks
    times = shape.num_microbatches if sharding is Sharding.GRADIENTS else 1
    late = max(0.0, reduced - times * slowest.backward) + max(0.0, gathered - slowest.forward)
    in_pairs = num_pairs(shape, stage=stages.index(slowest)) / shape.chunks
    hidden = in_pairs * (slowest.exposed - slowest.in_pairs)
    return shape.num_microbatches * slowest.total - hidden + filling + late + updated


def _idle_time(stage: PassSeconds, shape: Shape) -> float:
    """Returns the time for which other stages wait for the passes of a stage, before division by its chunks."""
    kind, few = shape.schedule.kind, 2 * shape.stages - 1
    if kind is ScheduleKind.ONE_F_ONE_B:
        return stage.total
    if kind is ScheduleKind.ZB_H1:
        # Weight passes of other microbatches fill the time of two of them: F + B + W - 2 W remains.
        return max(0.0, stage.total - 2 * stage.weights)
    if kind is ScheduleKind.DUALPIPEV and shape.num_microbatches > few:
        return max(0.0, stage.total + stage.backward - 3 * stage.weights)
    # ZBV, which DualPipeV runs with few microbatches. Stages wait for the first microbatch, and in addition for
    # backwards that are longer than the weight passes that fill the time, as in the timelines of stages with equal
    # chunks. Half of the exposed messages are taken to be in forwards.
    forward, backward = stage.forward + stage.exposed / 2, stage.backward - stage.weights + stage.exposed / 2
    return max(forward, backward) + max(0.0, backward - (1 if shape.num_microbatches < few else 2) * stage.weights)


def data_traffic(weights: Mapping[bool, tuple[int, int]], shape: Shape, *, sharding: Sharding) -> tuple[Traffic, ...]:
    """Returns the messages of a step that reduce gradients and gather parameters. weights: bytes of a stage."""
    found = []
    times = shape.num_microbatches if sharding is Sharding.GRADIENTS else 1
    for is_expert, (params, grads) in weights.items():
        name, size = ("edp", shape.expert_ranks) if is_expert else ("dp_cp", shape.dense_ranks)
        if size < 2:
            continue
        if sharding is Sharding.NOTHING:
            found.append(Traffic(name, size, "all-reduce", GRADS, times, grads))
            continue
        found.append(Traffic(name, size, "reduce-scatter", GRADS, times, times * grads))
        found.append(Traffic(name, size, "all-gather", PARAMS, 1, params))
    return tuple(found)
