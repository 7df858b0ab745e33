"""What one layout costs, bytes and seconds: quickly from facts that many layouts share, or exactly from its own.

Which layouts there are is layout_space.py's, which are best layout_search.py's.
"""

import argparse
import copy
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

from torch import nn

from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.pipeline_parallel.schedule import stage_orders
from megatron.planner.layer_facts import (
    EMBEDDING,
    END,
    LayerKind,
    ModelFacts,
    layer_kinds,
    model_facts,
    scaled_facts,
)
from megatron.planner.layout_space import Layout, Sharding, Space
from megatron.planner.long_steps import long_step
from megatron.planner.model_work import ModelWork, model_work
from megatron.planner.part_work import PartWork
from megatron.planner.plan import ForwardStep
from megatron.planner.quick_plan import quick_stages, shape_of
from megatron.planner.rates import message_seconds
from megatron.planner.run_time import overlap_of
from megatron.planner.stage_load import (
    PassSeconds,
    data_messages,
    data_traffic,
    in_node_ranks,
    quick_seconds,
    seconds_of,
    stage_load,
)
from megatron.planner.stage_memory import (
    Shape,
    StageMemory,
    Standing,
    full_rounds,
    peak_activations,
    stage_chunks,
    standing_bytes,
    stash_bytes,
)
from megatron.planner.step_time import GRADS, PARAMS, StepTime, estimate_step
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.compute.devices import Device
from megatron.training.compute.flops import num_floating_point_operations
from megatron.training.data_parallel import ddp_config_of
from megatron.training.setup import setup_tokenizer

# By whether they are experts': bytes of parameters and of gradients.
Weights = dict[bool, tuple[int, int]]
# Kinds by part of the pipeline, the first stage of each content, and numbers of kinds by stage.
_Layers = tuple[tuple[tuple[LayerKind, ...], ...], list[int], list[Counter[LayerKind | str]]]
# Of a kind of layouts that the run refuses; then none of the kind is tried any more.
_MOST_REFUSALS = 4
# An update reads masters and moments and writes them.
_TOUCHES = 2
_GIGA = 1e9


@dataclass(frozen=True)
class Cost:
    """The estimated cost of a step of a layout, from scaled facts: bytes of the fullest rank, and seconds."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Advice:
    """A layout that the run does not refuse. words: its command line. stages: what the first rank of each holds."""

    layout: Layout
    words: tuple[str, ...]
    stages: tuple[StageMemory, ...]
    time: StepTime

    @property
    def num_bytes(self) -> int:
        """Bytes on the fullest rank."""
        return max(stage.total for stage in self.stages)

    @property
    def fullest(self) -> int:
        """The stage whose ranks hold most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].total)


class LayoutCosts:
    """Estimates the layouts of one command line. words: its flags without those that choose a layout.

    args: the validated arguments of these flags on one rank. last_refusal: why the run refused the last refused layout.
    """

    def __init__(
        self,
        words: Sequence[str],
        args: argparse.Namespace,
        *,
        space: Space,
        device: Device,
        model_provider: Callable[..., nn.Module],
        forward_step: ForwardStep,
    ) -> None:
        self._words, self._args, self._space, self._device = tuple(words), args, space, device
        self._provider, self._forward_step = model_provider, forward_step
        self._kinds = layer_kinds(args)
        self._behind = overlap_of(args).behind
        self._given_sharding = _sharding_of(args)
        self._known: dict[tuple[object, ...], tuple[ModelFacts, Layout]] = {}
        self._works: dict[tuple[object, ...], tuple[ModelWork, Layout]] = {}
        self._cut_alike: dict[tuple[int, int], tuple[ModelFacts, Layout]] = {}
        self._scaled: dict[tuple[object, ...], ModelFacts] = {}
        self._refusals: Counter[tuple[object, ...]] = Counter()
        self._standing: dict[tuple[object, ...], Standing] = {}
        # By what each depends on: layouts that differ in nothing of it share what was found.
        self._seconds: dict[tuple[object, ...], dict[LayerKind | str, PassSeconds]] = {}
        self._weights: dict[tuple[object, ...], dict[int, Weights]] = {}
        self._waiting: dict[tuple[object, ...], dict[int, int]] = {}
        self._layers: dict[tuple[object, ...], _Layers] = {}
        self.last_refusal = ""

    def words_of(self, layout: Layout) -> tuple[str, ...]:
        """Returns the complete command line of a layout."""
        return (*self._words, *self._space.flags(layout))

    def cost(self, layout: Layout, *, limit: int) -> Cost | None:
        """Returns an estimate; None where the run refuses such layouts, or parameters take more than twice the limit.

        Where persistent memory alone exceeds the limit, only that is counted, and seconds are infinite.
        """
        if not self._may_fit(layout, limit=limit):
            return None
        facts = self._facts(layout)
        if facts is None:
            return None
        shape, heads = self._shape(layout), self._heads(layout)
        weights = self._weights_of(layout, facts, shape=shape)
        standing = {stage: self._standing_of(layout, facts, shape=shape, stage=stage) for stage in heads}
        num_bytes = max(one.total for one in standing.values())
        if num_bytes > limit:
            return Cost(num_bytes, math.inf)
        waiting = self._waiting_of(layout, facts, shape=shape)
        num_bytes = max(standing[stage].total + layout.micro_batch * waiting[stage] for stage in heads)
        if num_bytes > limit:
            return Cost(num_bytes, math.inf)
        updated = max(self._update_bytes(one) for one in standing.values()) / self._memory_rate
        return Cost(num_bytes, self._about_seconds(layout, shape=shape, weights=weights, updated=updated))

    def advice(self, layout: Layout) -> Advice | None:
        """Returns exact figures of a layout, from a model built for it; None where the run refuses it."""
        try:
            args = self._validated(layout)
            facts = model_facts(args, self._provider, forward_step=self._forward_step)
            stages = tuple(quick_stages(args, facts))
            work = model_work(args, self._provider, forward_step=self._forward_step)
        except ValueError as error:
            self.last_refusal = str(error)
            return None
        time = self._step_time(args, facts, work=work, stages=stages)
        return Advice(layout, self.words_of(layout), stages, time)

    def _facts(self, layout: Layout) -> ModelFacts | None:
        """Returns sizes for microbatches of one sample; None where the run refuses this kind of layout.

        They are scaled from those of the first layout of the same kind.
        """
        kind = self._kind_of(layout)
        key = (*kind, layout.expert)
        if key not in self._scaled:
            if kind not in self._known and not self._find_facts(layout, kind):
                return None
            facts, base = self._known[kind]
            self._scaled[key] = scaled_facts(facts, experts=(base.expert, layout.expert), saved=(1, base.micro_batch))
        return self._scaled[key]

    @staticmethod
    def _kind_of(layout: Layout) -> tuple[object, ...]:
        """Equal for layouts whose layers differ in the numbers of samples and of experts alone."""
        sizes = (layout.tensor, layout.context, layout.expert_tensor, layout.expert > 1, layout.stages > 1)
        return *sizes, layout.recompute, layout.experts

    def _work_of(self, layout: Layout) -> ModelWork:
        """Scaled from that of a layout of its kind in which experts' messages have their own name.

        Ranks that share experts may be those that share layers too: then messages are named after the latter, and do
        not say how many ranks with other numbers of experts send them.
        """
        shared = layout.expert if _share_ranks(layout) else None
        kind = (*self._kind_of(layout), shared)
        if kind not in self._works:
            known = self._known[self._kind_of(layout)][1]
            base = known if not _share_ranks(known) and shared is None else layout
            if base.sharding is Sharding.GRADIENTS:
                # What it copies of gradients follows neither tokens nor weights of one layer.
                base = replace(base, sharding=Sharding.STATES)
            work = model_work(
                self._validated(base),
                self._provider,
                forward_step=self._forward_step,
                of_each_kind=1,
                has_all_replicas=False,
            )
            self._works[kind] = work, base
        work, base = self._works[kind]
        return work.scaled(
            samples=layout.micro_batch / base.micro_batch,
            experts=base.expert / layout.expert,
            expert_ranks=layout.expert / base.expert,
        )

    def _may_fit(self, layout: Layout, *, limit: int) -> bool:
        """Whether parameters alone take no more than twice the limit, where layers cut alike are known already."""
        alike = self._cut_alike.get((layout.tensor, layout.expert_tensor))
        if alike is None:
            return True
        if self._weights_key(layout) not in self._weights:
            facts = scaled_facts(alike[0], experts=(alike[1].expert, layout.expert), saved=(1, 1))
            self._weights_of(layout, facts, shape=self._shape(layout))
        weights = self._weights[self._weights_key(layout)]
        return max(sum(params for params, _ in one.values()) for one in weights.values()) <= 2 * limit

    def _find_facts(self, layout: Layout, kind: tuple[object, ...]) -> bool:
        if self._refusals[kind] >= _MOST_REFUSALS:
            return False
        try:
            args = self._validated(layout)
            facts = model_facts(args, self._provider, forward_step=self._forward_step, of_each_kind=1)
        except ValueError as error:
            self._refusals[kind] += 1
            self.last_refusal = str(error)
            return False
        self._known[kind] = self._cut_alike[layout.tensor, layout.expert_tensor] = facts, layout
        return True

    def _validated(self, layout: Layout) -> argparse.Namespace:
        words = [*self.words_of(layout), "--dry-run", "--world-size", str(self._space.world_size)]
        return validate_args(parse_args(argv=words))

    def _shape(self, layout: Layout) -> Shape:
        key = (layout.stages, layout.counts)
        if key not in self._layers:
            kinds = iter(self._kinds)
            layers = tuple(tuple(islice(kinds, count)) for count in layout.counts)
            self._layers[key] = layers, _distinct_stages(layers, layout.stages), _stage_kinds(layers, layout.stages)
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
            group_size=self._args.microbatch_group_size_per_vp_stage,
        )

    def _heads(self, layout: Layout) -> list[int]:
        """The first stage of each content; later ones hold fewer microbatches, and no more than it."""
        return self._layers[layout.stages, layout.counts][1]

    def _weights_of(self, layout: Layout, facts: ModelFacts, *, shape: Shape) -> dict[int, Weights]:
        key = self._weights_key(layout)
        if key not in self._weights:
            self._weights[key] = {stage: _weights(facts, shape, stage=stage) for stage in self._heads(layout)}
        return self._weights[key]

    @staticmethod
    def _weights_key(layout: Layout) -> tuple[object, ...]:
        sizes = (layout.tensor, layout.expert, layout.expert_tensor, layout.stages)
        return *sizes, layout.counts

    def _waiting_of(self, layout: Layout, facts: ModelFacts, *, shape: Shape) -> dict[int, int]:
        """Bytes of activations and pages of each distinct stage, of microbatches of one sample."""
        sizes = (layout.tensor, layout.context, layout.expert_tensor, layout.stages, layout.counts)
        group = shape.group_size or shape.stages
        # Whole rounds: how a step ends makes no difference here.
        shape = replace(shape, num_microbatches=min(shape.num_microbatches, full_rounds(group)))
        key = (*sizes, layout.recompute, layout.experts, shape.num_microbatches)
        if key not in self._waiting:
            self._waiting[key] = {}
            for stage in self._heads(layout):
                pages = stash_bytes(facts, shape, stage=stage)
                kept = peak_activations(facts, shape, stage=stage, stashes=sum(pages) > 0)
                self._waiting[key][stage] = pages[0] + sum(kept.values())
        return self._waiting[key]

    def _standing_of(self, layout: Layout, facts: ModelFacts, *, shape: Shape, stage: int) -> Standing:
        sizes = (layout.tensor, layout.context, layout.expert, layout.expert_tensor, layout.stages, layout.chunks)
        key = (*sizes, layout.sharding, layout.counts, stage)
        if key not in self._standing:
            args = self._sharded_args(layout.sharding)
            self._standing[key] = standing_bytes(
                facts,
                shape,
                stage=stage,
                ddp_config=ddp_config_of(args),
                optimizer_config=config_from_args(OptimizerConfig, args),
            )
        return self._standing[key]

    def _sharded_args(self, sharding: Sharding | None) -> argparse.Namespace:
        args = copy.copy(self._args)
        if sharding is not None:
            shards = sharding is not Sharding.NOTHING
            args.use_distributed_optimizer = args.overlap_grad_reduce = args.overlap_param_gather = shards
            args.shard_gradients = sharding is Sharding.GRADIENTS
            args.optimizer = "distributed_fused_adam" if args.shard_gradients else "adam"
        return args

    def _about_seconds(
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
                )
            )
        sharding, reduced, gathered = layout.sharding or self._given_sharding, 0.0, 0.0
        for of_stage in weights.values():
            seconds = {GRADS: 0.0, PARAMS: 0.0}
            for one in data_traffic(of_stage, shape, sharding=sharding):
                seconds[one.phase] += message_seconds(one, self._device, in_node=in_node[one.group])
            reduced, gathered = max(reduced, seconds[GRADS]), max(gathered, seconds[PARAMS])
        return quick_seconds(stages, shape, reduced=reduced, gathered=gathered, updated=updated, sharding=sharding)

    def _seconds_of_parts(self, layout: Layout, *, in_node: Mapping[str, int]) -> dict[LayerKind | str, PassSeconds]:
        """Returns one microbatch's times in a layer of each kind, in the embedding, and after the layers."""
        key = (self._kind_of(layout), layout.expert, layout.micro_batch)
        if key not in self._seconds:
            work = self._work_of(layout)
            parts: list[tuple[LayerKind | str, PartWork]] = [*work.layers.items()]
            parts += [(EMBEDDING, work.embedding), (END, work.end)]
            self._seconds[key] = {
                name: seconds_of(part, self._device, in_node=in_node, behind=self._behind) for name, part in parts
            }
        return self._seconds[key]

    def _step_time(
        self, args: argparse.Namespace, facts: ModelFacts, *, work: ModelWork, stages: Sequence[StageMemory]
    ) -> StepTime:
        setup_tokenizer(args)  # the vocabulary is padded for the layout
        shape, ddp_config = shape_of(args), ddp_config_of(args)
        tokens = args.micro_batch_size * args.seq_length // (shape.tensor * shape.context)
        samples = args.micro_batch_size * args.data_parallel_size

        def estimate(num_microbatches: int) -> StepTime:
            short = replace(shape, num_microbatches=num_microbatches)
            loads = [
                stage_load(
                    short,
                    work,
                    stage=stage,
                    hidden_bytes=tokens * args.hidden_size * args.params_dtype.itemsize,
                    own=data_messages(facts, short, stage=stage, ddp_config=ddp_config),
                    state_bytes=memory.standing.masters + memory.standing.moments,
                )
                for stage, memory in enumerate(stages)
            ]
            return estimate_step(
                loads,
                stage_orders(shape.pipeline, num_microbatches, group_size=shape.group_size),
                device=self._device,
                overlap=overlap_of(args),
                in_node=in_node_ranks(shape, self._device.devices_per_node),
                tokens=num_microbatches * samples * args.seq_length,
                flops_per_rank=num_floating_point_operations(args, 1) * num_microbatches * samples / shape.world_size,
            )

        time = long_step(estimate, shape.num_microbatches, group_size=shape.group_size or shape.stages)
        return replace(time, spans=[])  # which nobody reads, of many layouts

    @staticmethod
    def _update_bytes(standing: Standing) -> float:
        return float(_TOUCHES * (standing.masters + standing.moments + standing.host_states))

    @cached_property
    def _memory_rate(self) -> float:
        return self._device.memory_gb_s * _GIGA * self._device.attainable_memory


def _sharding_of(args: argparse.Namespace) -> Sharding:
    ddp_config = ddp_config_of(args)
    if ddp_config.shard_gradients:
        return Sharding.GRADIENTS
    return Sharding.STATES if ddp_config.use_distributed_optimizer else Sharding.NOTHING


def _distinct_stages(layers: Sequence[tuple[LayerKind, ...]], stages: int) -> list[int]:
    found: dict[tuple[object, ...], int] = {}
    last = len(layers) - 1
    for stage in range(stages):
        numbers = range(stage, len(layers), stages)
        found.setdefault(tuple((layers[n], n == 0, n == last) for n in numbers), stage)
    return list(found.values())


def _stage_kinds(layers: Sequence[tuple[LayerKind, ...]], stages: int) -> list[Counter[LayerKind | str]]:
    """Returns for each stage how many layers of each kind it has, and whether it has the embedding and the end."""
    found: list[Counter[LayerKind | str]] = []
    for stage in range(stages):
        kinds: Counter[LayerKind | str] = Counter(kind for part in layers[stage::stages] for kind in part)
        kinds[EMBEDDING], kinds[END] = int(stage == 0), int(stage == stages - 1)
        found.append(kinds)
    return found


def _weights(facts: ModelFacts, shape: Shape, *, stage: int) -> Weights:
    """Bytes of parameters and of gradients of a stage, of experts and of the rest."""
    found: dict[bool, tuple[int, int]] = {}
    for parts in stage_chunks(facts, shape, stage=stage):
        for part in parts:
            for is_expert, (params, grads) in part.weights.items():
                before = found.get(is_expert, (0, 0))
                found[is_expert] = before[0] + params, before[1] + grads
    return found


def _share_ranks(layout: Layout) -> bool:
    """Whether a group of experts has the ranks of a group of layers: stride and size of both are the same."""
    tp, cp, ep, etp = layout.tensor, layout.context, layout.expert, layout.expert_tensor
    of_layers = {(1, tp), (tp, cp), (1, tp * cp)}
    return any(size > 1 and (stride, size) in of_layers for stride, size in ((etp, ep), (1, etp * ep)))
