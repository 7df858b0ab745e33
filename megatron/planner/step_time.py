"""Estimated time of a step: passes on the run's schedule, communication that overlaps hide, the optimizer.

The time of one kernel or message is in work.py.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Orders, Pipeline, stage_orders
from megatron.core.pipeline_parallel.timeline import Span, timeline
from megatron.planner.plan import Plan
from megatron.planner.work import (
    AGREEMENT,
    BACKWARD,
    FORWARD,
    GRADS,
    OPTIMIZER,
    PARAMS,
    PIPELINE,
    STATISTICS,
    ChunkWork,
    Kernels,
    Traffic,
    compute_seconds,
    message_seconds,
    ranks_in_node,
    seconds_by_kind,
)
from megatron.training.data_parallel import ddp_config_of
from megatron.training.device_table import Device

# Said wherever a time is shown.
ASSUMPTIONS = (
    "each kernel takes the longer of its arithmetic and its bytes, at the shares of peaks of the table of devices",
    "kernels are those that torch calls, one after the other: nothing is fused beside attention and norms",
    "messages have links to themselves; ranks lie on nodes in their order, one network port for each",
    "all ranks of a stage take equally long; data come in time",
)
# Ranks tell each other of losses and norms: counted to the optimizer's messages.
_SCALAR_PHASES = (AGREEMENT, STATISTICS)
_PIPELINE_GROUP = "pp"
_TERA = 1e12
# Rounds of the shorter step: as many as it takes to fill the pipeline.
_ROUNDS = 3
Spans = list[dict[Action, Span]]


@dataclass(frozen=True)
class StageLoad:
    """The work of a stage's rank in a step. traffic: all its messages, with phases as traffic.py names them.

    Messages of forward and backward are spread over its passes evenly. update: the optimizer's kernels.
    """

    chunks: tuple[ChunkWork, ...]
    traffic: tuple[Traffic, ...] = ()
    update: Kernels = field(default_factory=Kernels)


@dataclass(frozen=True)
class Overlap:
    """Communication that overlaps with computation. gradients, parameters: their buckets.

    in_every_pass: the phases, of these two, whose messages all microbatches send, not the last and the first.
    transfers: between stages. behind: by group, the kinds of modules that run while a pass's messages are in flight.
    """

    gradients: bool = False
    parameters: bool = False
    in_every_pass: frozenset[str] = frozenset()
    transfers: bool = True
    behind: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class StageTime:
    """Seconds of one stage's rank in a step; they add up to the step. exposed: communication that nothing hides, by
    phase; hidden: what computation does hide, which is in none of the others' seconds. by_kind: forward, recompute and
    backward once more, by kind of module. bubble: waits for other stages.
    """

    forward: float
    recompute: float
    backward: float
    exposed: dict[str, float]
    hidden: float
    optimizer: float
    bubble: float
    by_kind: dict[str, float]

    @property
    def compute(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True)
class StepTime:
    """An estimate of a step. spans: when each stage runs which pass, in seconds. mfu: None where the peak is not known;
    as the log of the run counts it: of the model's operations, without recompute, by the peak of bf16.
    """

    device: str
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    stages: tuple[StageTime, ...]
    spans: Spans

    def split(self) -> dict[str, float]:
        """Seconds of a step by what they go into, mean over stages: they add up to it."""
        parts = [
            {
                "compute": one.compute,
                "exposed communication": sum(one.exposed.values()),
                "bubble": one.bubble,
                "optimizer": one.optimizer,
            }
            for one in self.stages
        ]
        return {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]}


def run_time(plan: Plan, args: argparse.Namespace, *, device: Device) -> StepTime | None:
    """Estimates a step of the plan; None for runs that train nothing.

    Raises ValueError for products that the device does not compute.
    """
    if not all(stage.chunks for stage in plan.stages):
        return None
    stages = [StageLoad(stage.chunks, stage.links, stage.update) for stage in plan.stages]
    orders = stage_orders(
        Pipeline(len(stages), len(stages[0].chunks)),
        plan.num_microbatches,
        group_size=args.microbatch_group_size_per_vp_stage,
    )
    samples = plan.num_microbatches * args.micro_batch_size * args.data_parallel_size
    return estimate_step(
        stages,
        orders,
        device=device,
        overlap=overlap_of(args),
        in_node=places(plan, device),
        tokens=samples * args.seq_length,
        flops_per_rank=plan.flops_per_sample * samples / args.world_size,
    )


def overlap_of(args: argparse.Namespace) -> Overlap:
    """Returns the communication that the flags overlap with computation."""
    behind: dict[str, tuple[str, ...]] = {"ep": ("shared experts",)} if args.moe_shared_expert_overlap else {}
    if args.cp_comm_type in ("p2p", ["p2p"]):
        # Blocks go round while attention works on the one before.
        behind["cp"] = ("attention",)
    in_every_pass: frozenset[str] = frozenset()
    if args.use_torch_fsdp2:
        # Its units are gathered ahead of their layer, in both passes of each microbatch.
        in_every_pass = frozenset((GRADS, PARAMS))
    elif args.overlap_grad_reduce and ddp_config_of(args).has_bucket_lifetime_grads:
        # Buckets are sent while the backward that filled them goes on, of every microbatch.
        in_every_pass = frozenset((GRADS,))
    return Overlap(
        gradients=args.overlap_grad_reduce,
        parameters=args.overlap_param_gather,
        in_every_pass=in_every_pass,
        transfers=args.overlap_p2p_comm,
        behind=behind,
    )


def places(plan: Plan, device: Device) -> dict[str, int]:
    """Returns for each group how many of its ranks share a node, in the stage where they are fewest."""
    found: dict[str, int] = {}
    for stage in plan.stages:
        for name, ranks in stage.groups.items():
            shared = ranks_in_node(ranks, device.devices_per_node)
            found[name] = min(shared, found.get(name, shared))
    return found


def estimate_step(
    stages: Sequence[StageLoad],
    orders: Orders,
    *,
    device: Device,
    overlap: Overlap,
    in_node: Mapping[str, int],
    tokens: int,
    flops_per_rank: float,
) -> StepTime:
    """The step of a pipeline, one load and one list of passes a stage.

    in_node: by group, how many of its ranks share a node. tokens: of the whole step. flops_per_rank: of the model, as
    num_floating_point_operations counts them. Raises ValueError for products that the device does not compute.
    """
    pipeline = Pipeline(len(stages), len(stages[0].chunks))
    clocks = [
        _StageClock(load, order, rates=_Rates(device, in_node), overlap=overlap)
        for load, order in zip(stages, orders, strict=True)
    ]
    free = timeline(orders, pipeline, seconds=lambda stage, action: clocks[stage].seconds(action))
    delays = [clock.gather_delays(spans) for clock, spans in zip(clocks, free)]

    def seconds(stage: int, action: Action) -> float:
        return clocks[stage].seconds(action) + delays[stage].get(action, 0.0)

    transfer = max(clock.transfer for clock in clocks)
    spans = timeline(orders, pipeline, seconds=seconds, transfer=transfer, overlap=overlap.transfers)
    passed = _end(spans)
    # The norm of all gradients makes every rank wait for the last reduction.
    reduced = max(clock.reduced_at(own) for clock, own in zip(clocks, spans))
    updated = max(clock.update for clock in clocks)
    waits = {PIPELINE: passed - _end(timeline(orders, pipeline, seconds=seconds)), GRADS: reduced - passed}
    total = reduced + updated
    parts = tuple(clock.parts(total, waits=waits, gather=sum(delay.values())) for clock, delay in zip(clocks, delays))
    tflops = flops_per_rank / total / _TERA
    mfu = None if device.bf16_tflops is None else tflops / device.bf16_tflops
    return StepTime(device.name, total, tokens / total, tflops, mfu, parts, spans)


def _end(spans: Spans) -> float:
    return max((span.end for stage in spans for span in stage.values()), default=0.0)


@dataclass(frozen=True)
class _Rates:
    """Seconds of messages, with the device and the places of groups at hand."""

    device: Device
    in_node: Mapping[str, int]

    def of_messages(self, messages: Iterable[Traffic]) -> float:
        """One after the other."""
        return sum(
            message_seconds(one, self.device, in_node=self.in_node.get(one.group, one.group_size)) for one in messages
        )


@dataclass(frozen=True)
class _Pass:
    """Seconds of one pass of a chunk: computed, of that computed again, waited for messages, and of messages hidden."""

    compute: float
    recompute: float
    exposed: float
    hidden: float
    by_kind: Mapping[str, float]


class _StageClock:
    """Times of one stage's rank."""

    def __init__(self, load: StageLoad, order: Sequence[Action], *, rates: _Rates, overlap: Overlap) -> None:
        self._load, self._order, self._rates, self._overlap = load, order, rates, overlap
        self._reduction, self._reductions = self._phase(GRADS)
        self._gather, self._gathers = self._phase(PARAMS)
        sends = [one for one in load.traffic if _is_transfer(one) and one.count]
        self.transfer = max((rates.of_messages([one]) / one.count for one in sends), default=0.0)
        self.passes = {kind: self._passes_of(kind) for kind in ActionKind}
        self._step = compute_seconds(load.update, rates.device)
        self._step_messages = self._phase(OPTIMIZER)[0] + sum(self._phase(phase)[0] for phase in _SCALAR_PHASES)
        self._late_gather = 0.0 if overlap.parameters or PARAMS in overlap.in_every_pass else self._gather
        self.update = self._step + self._step_messages + self._late_gather

    def seconds(self, action: Action) -> float:
        """Returns the time of a pass, without waits for parameters."""
        its = self.passes[action.kind][action.chunk]
        return its.compute + its.exposed

    def gather_delays(self, spans: Mapping[Action, Span]) -> dict[Action, float]:
        """Returns the delay of each chunk's first pass by parameters that are gathered during it."""
        if not self._overlap.parameters or PARAMS in self._overlap.in_every_pass or not self._gather:
            return {}
        found, clock = {}, 0.0
        for chunk in range(len(self._load.chunks)):
            action = Action(ActionKind.FORWARD, chunk, 0)
            start, end = spans[action]
            buckets, each = self._buckets(self._gather, self._gathers)
            # A pass goes on with each bucket's part of it when that has come.
            part, at = (end - start) / buckets, start
            for _ in range(buckets):
                clock += each
                at = max(at, clock) + part
            # Sums of parts end a rounding beside the whole.
            found[action] = at - end if at - end > 1e-9 * (end - start) else 0.0
        return found

    def reduced_at(self, spans: Mapping[Action, Span]) -> float:
        """Returns the time at which the last gradients are reduced."""
        end = max(span.end for span in spans.values())
        if GRADS in self._overlap.in_every_pass or not self._reduction:
            return end
        if not self._overlap.gradients:
            return end + self._reduction
        buckets, each = self._buckets(self._reduction, self._reductions)
        lasts = {action.chunk: span for action, span in spans.items() if action.kind is ActionKind.BACKWARD}
        clock = 0.0
        for span in sorted(lasts.values()):
            for number in range(1, buckets + 1):
                clock = max(clock, span.start + (span.end - span.start) * number / buckets) + each
        return max(end, clock)

    def parts(self, total: float, *, waits: Mapping[str, float], gather: float) -> StageTime:
        """Splits a step of that length into its parts. waits: of all stages, for transfers and the last reduction."""
        sums = {kind: self._sum(kind) for kind in ActionKind}
        forward, backward = sums[ActionKind.FORWARD], sums[ActionKind.BACKWARD]
        exposed = {
            FORWARD: forward.exposed,
            BACKWARD: backward.exposed,
            PIPELINE: waits[PIPELINE],
            GRADS: waits[GRADS],
            PARAMS: self._late_gather + gather,
            OPTIMIZER: self._step_messages,
        }
        hidden = forward.hidden + backward.hidden
        if GRADS not in self._overlap.in_every_pass:
            hidden += max(0.0, self._reduction - waits[GRADS])
        if PARAMS not in self._overlap.in_every_pass:
            hidden += max(0.0, self._gather - exposed[PARAMS])
        compute = forward.compute + backward.compute
        return StageTime(
            forward.compute,
            recompute=backward.recompute,
            backward=backward.compute - backward.recompute,
            exposed=exposed,
            hidden=hidden,
            optimizer=self._step,
            # Differences of sums may end a rounding below nothing.
            bubble=max(0.0, total - compute - sum(exposed.values()) - self._step),
            by_kind={kind: forward.by_kind.get(kind, 0.0) + s for kind, s in backward.by_kind.items()},
        )

    def _phase(self, phase: str) -> tuple[float, int]:
        """Seconds and number of the messages of a phase, without those between stages."""
        messages = [one for one in self._load.traffic if one.phase == phase and not _is_transfer(one)]
        return self._rates.of_messages(messages), sum(one.count for one in messages)

    def _buckets(self, seconds: float, count: int) -> tuple[int, float]:
        """Returns the number of buckets of a chunk, and the seconds of each."""
        chunks = len(self._load.chunks)
        buckets = max(1, count // chunks)
        return buckets, seconds / chunks / buckets

    def _passes_of(self, kind: ActionKind) -> list[_Pass]:
        phase = FORWARD if kind is ActionKind.FORWARD else BACKWARD
        number = max(1, sum(action.kind is kind for action in self._order))
        messages = [one for one in self._load.traffic if one.phase == phase and not _is_transfer(one)]
        by_group: dict[str, float] = {}
        for one in messages:
            by_group[one.group] = by_group.get(one.group, 0.0) + self._rates.of_messages([one]) / number
        found = []
        for chunk in self._load.chunks:
            again = chunk.recompute if kind is ActionKind.BACKWARD else Kernels()
            by_kind = seconds_by_kind(
                (chunk.forward if kind is ActionKind.FORWARD else chunk.backward) + again, self._rates.device
            )
            compute, hidden = sum(by_kind.values()), 0.0
            for group, seconds in by_group.items():
                hidden += min(seconds, sum(by_kind.get(one, 0.0) for one in self._overlap.behind.get(group, ())))
            exposed = sum(by_group.values()) - hidden
            streamed = self._streamed(kind, number)
            hidden, exposed = hidden + min(streamed, compute), exposed + max(0.0, streamed - compute)
            found.append(_Pass(compute, compute_seconds(again, self._rates.device), exposed, hidden, by_kind))
        return found

    def _streamed(self, kind: ActionKind, number: int) -> float:
        """Returns the time of messages about parameters and gradients in each pass of a kind."""
        phases = self._overlap.in_every_pass
        gathers = self._gather / len(self._order) if PARAMS in phases else 0.0
        sums = self._reduction / number if GRADS in phases and kind is ActionKind.BACKWARD else 0.0
        return gathers + sums

    def _sum(self, kind: ActionKind) -> _Pass:
        passes = [self.passes[kind][action.chunk] for action in self._order if action.kind is kind]
        by_kind: dict[str, float] = {}
        for one in passes:
            for name, seconds in one.by_kind.items():
                by_kind[name] = by_kind.get(name, 0.0) + seconds
        return _Pass(
            sum(one.compute for one in passes),
            recompute=sum(one.recompute for one in passes),
            exposed=sum(one.exposed for one in passes),
            hidden=sum(one.hidden for one in passes),
            by_kind=by_kind,
        )


def _is_transfer(traffic: Traffic) -> bool:
    """Whether it goes from stage to stage, which the schedule's times tell of."""
    return traffic.group == _PIPELINE_GROUP and traffic.operation in ("send", "receive")


def long_step(estimate: Callable[[int], StepTime], num_microbatches: int, *, group_size: int) -> StepTime:
    """A step of so many microbatches; spans are those of a short one. estimate: of a step of a number of microbatches.

    group_size: microbatches of one round of the schedule, by which the two short steps differ.
    """
    short = _ROUNDS * group_size + num_microbatches % group_size
    if num_microbatches <= short + group_size:
        return estimate(num_microbatches)
    first, second = estimate(short), estimate(short + group_size)
    rounds = (num_microbatches - short) // group_size

    def grown(before: float, after: float) -> float:
        return before + rounds * (after - before)

    stages = tuple(
        _grown(before, after, grown=grown) for before, after in zip(first.stages, second.stages, strict=True)
    )
    seconds = grown(first.seconds, second.seconds)
    # Of a step that takes so long and has so many times the short one's tokens.
    share = (num_microbatches / short) * (first.seconds / seconds)
    return replace(
        first,
        seconds=seconds,
        tokens_per_second=first.tokens_per_second * share,
        tflops=first.tflops * share,
        mfu=None if first.mfu is None else first.mfu * share,
        stages=stages,
    )


def _grown(before: StageTime, after: StageTime, *, grown: Callable[[float, float], float]) -> StageTime:
    def of_kinds(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
        return {kind: grown(one.get(kind, 0.0), other.get(kind, 0.0)) for kind in {**one, **other}}

    return StageTime(
        grown(before.forward, after.forward),
        recompute=grown(before.recompute, after.recompute),
        backward=grown(before.backward, after.backward),
        exposed=of_kinds(before.exposed, after.exposed),
        hidden=grown(before.hidden, after.hidden),
        optimizer=before.optimizer,
        bubble=grown(before.bubble, after.bubble),
        by_kind=of_kinds(before.by_kind, after.by_kind),
    )
