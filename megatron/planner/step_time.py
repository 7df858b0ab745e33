"""Estimates the time of a step: passes on the run's schedule, overlapped communication, and the optimizer.

work.py estimates the time of a single kernel or message.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Order,
    Pair,
    Schedule,
    ScheduleKind,
    configured_schedule,
    held_backwards,
    passes,
    pipeline_of,
    stage_orders,
)
from megatron.core.pipeline_parallel.timeline import Interval, Timeline, timeline
from megatron.planner.pair_time import Part, PassWork, backward_parts, forward_parts, waits
from megatron.planner.plan import Plan
from megatron.planner.work import (
    AGREEMENT,
    BACKWARD,
    EMBEDDING,
    EXPERTS,
    FORWARD,
    GRADS,
    OPTIMIZER,
    OUTPUT,
    PARAMS,
    PIPELINE,
    STATISTICS,
    ChunkWork,
    Kernels,
    StageLoad,
    Traffic,
    Unit,
    compute_seconds,
    message_seconds,
    ranks_in_node,
    seconds_by_kind,
)
from megatron.training.compute.devices import Device
from megatron.training.config import RunConfig

# Shown with every estimated time.
ASSUMPTIONS = (
    "each kernel takes the longer of its arithmetic and its memory traffic, at the rates of configs/devices.yaml",
    "kernels are those that torch calls, one after the other: only attention, norms and activations are fused",
    "messages do not share links; nodes hold consecutive ranks, with one network port per rank",
    "all ranks of a stage take the same time; no step waits for data",
)
# Shown in addition if the stash has pages.
STASH_ASSUMPTION = "copies to and from the stash's pages are not included; tools/plan_stash.py estimates them"
# Shown in addition if passes run in pairs.
PAIR_ASSUMPTION = (
    "passes of a pair take turns on one stream, with equal layers; their exchanges of expert rows use one link"
)
# Messages of losses and norms count as messages of the optimizer.
_SCALAR_PHASES = (AGREEMENT, STATISTICS)
_PIPELINE_GROUP = "pp"
_PHASES = {ActionKind.FORWARD: FORWARD, ActionKind.BACKWARD: BACKWARD}
# Groups over which attention exchanges heads, by cp_comm_type.
_HEAD_GROUPS = {"a2a": "cp", "a2a+p2p": "hcp_0"}
_TERA = 1e12
# Rounds of microbatches after which a schedule only repeats, until its end.
_ROUNDS = 3


@dataclass(frozen=True)
class Overlap:
    """Communication that overlaps with computation.

    gradients, parameters: whether bucket reductions and gathers overlap. in_every_pass: phases (GRADS, PARAMS) that
    send messages in every microbatch, not only in the last or the first. transfers: whether transfers between stages
    overlap. overlapped_by: maps a group to the kinds of modules that run during its messages. head_groups: groups that
    exchange heads in all-to-alls; those of other groups exchange rows of experts. holds_expert_grads, holds_grads:
    whether weight gradients of experts, or of other modules, are computed during the next exchange of rows.
    counts_rows: whether layers in pairs also hand over for row counts, see PassWork. recompute_in_turns: whether
    recomputed forwards hand over, too.
    """

    gradients: bool = False
    parameters: bool = False
    in_every_pass: frozenset[str] = frozenset()
    transfers: bool = True
    overlapped_by: dict[str, tuple[str, ...]] = field(default_factory=dict)
    head_groups: frozenset[str] = frozenset()
    holds_expert_grads: bool = False
    holds_grads: bool = False
    counts_rows: bool = False
    recompute_in_turns: bool = False


@dataclass(frozen=True)
class StageTime:
    """Time of one rank of a stage in a step, in seconds.

    forward, recompute, backward, exposed, optimizer and bubble sum to the time of the step. exposed: communication that
    is not overlapped, by phase. backward: includes weight passes. bubble: waits for other stages. hidden: overlapped
    communication, not part of the sum. by_kind: seconds of all passes, by kind of module.
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
        """Computation time of all passes, in seconds."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True)
class StepTime:
    """Estimated time of a step. spans: start and end of each stage's passes, in seconds.

    mfu: FLOP/s of the model, excluding recompute, divided by the device's bf16 peak, as in the log of a run. None if
    the device's peak is unknown.
    """

    device: str
    seconds: float
    tokens_per_second: float
    tflops: float
    mfu: float | None
    stages: tuple[StageTime, ...]
    spans: Timeline

    def split(self) -> dict[str, float]:
        """Returns the time of a step in seconds by cause, as a mean over stages. The values sum to the step's time."""
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


def run_time(plan: Plan, run_config: RunConfig, *, device: Device) -> StepTime | None:
    """Estimates the time of a step of the planned run. Returns None if the run trains nothing.

    Raises ValueError for a matmul dtype that the device does not support.
    """
    if not all(stage.load.chunks for stage in plan.stages):
        return None
    return _time_with(plan, run_config, device=device, schedule=configured_schedule(run_config.transformer))


@dataclass(frozen=True)
class ScheduleTime:
    """Estimated step with one of the schedules of a layout.

    bubble: share of the step, as a mean over stages. num_bytes: model states, and activations at the peak of the
    schedule, of each stage, on the device and outside of a stash's pages.
    """

    kind: ScheduleKind
    seconds: float
    bubble: float
    num_bytes: tuple[int, ...]


def schedule_times(
    plan: Plan, run_config: RunConfig, *, device: Device, moved: tuple[Plan, RunConfig] | None = None
) -> list[ScheduleTime]:
    """Compares the schedules that the run's layout could use, by their timelines. Empty if it has no choice.

    moved: the plan and the settings of the run with other model chunks, whose schedules are compared, too. Raises
    ValueError for a matmul dtype that the device does not support.
    """
    found = []
    for one, settings in ((plan, run_config), *([] if moved is None else [moved])):
        kinds = [kind for kind in ScheduleKind if all(kind in stage.activations_by_schedule for stage in one.stages)]
        for kind in kinds:
            schedule = configured_schedule(settings.transformer)._replace(kind=kind)
            time = _time_with(one, settings, device=device, schedule=schedule)
            num_bytes = tuple(stage.memory.states.total + stage.activations_by_schedule[kind] for stage in one.stages)
            found.append(ScheduleTime(kind, time.seconds, time.split()["bubble"] / time.seconds, num_bytes))
    return found if len(found) > 1 else []


def _time_with(plan: Plan, run_config: RunConfig, *, device: Device, schedule: Schedule) -> StepTime:
    stages = [stage.load for stage in plan.stages]
    samples = plan.num_microbatches * run_config.training.micro_batch_size * run_config.launch.data_parallel_size
    return estimate_step(
        stages,
        plan.num_microbatches,
        schedule,
        device=device,
        overlap=overlap_of(run_config),
        in_node=ranks_per_node(plan, device),
        tokens=samples * run_config.data.seq_length,
        flops_per_rank=plan.flops_per_sample * samples / run_config.launch.world_size,
    )


def overlap_of(run_config: RunConfig) -> Overlap:
    """Determines from the flags which communication overlaps with computation."""
    ddp, transformer = run_config.ddp, run_config.transformer
    overlapped_by: dict[str, tuple[str, ...]] = {}
    if transformer.moe_shared_expert_overlap:
        overlapped_by["ep"] = ("shared experts",)
    if transformer.cp_comm_type in ("p2p", ["p2p"]):
        # Ring attention computes on one block while the next one is sent.
        overlapped_by["cp"] = ("attention",)
    elif transformer.cp_comm_type in ("a2a+p2p", ["a2a+p2p"]):
        # Only the ring overlaps; heads are exchanged before and after attention.
        overlapped_by["hcp_1"] = ("attention",)
    kinds = {transformer.cp_comm_type_of_layer(number + 1) for number in range(transformer.num_layers)}
    in_every_pass: frozenset[str] = frozenset()
    if run_config.sharded_parameters.use_torch_fsdp2:
        # FSDP2 gathers units ahead of their layer, in both passes of each microbatch.
        in_every_pass = frozenset((GRADS, PARAMS))
    elif ddp.overlap_grad_reduce and ddp.has_bucket_lifetime_grads:
        # Every microbatch reduces its buckets during its own backward.
        in_every_pass = frozenset((GRADS,))
    # Of what is recomputed together with an exchange: whole layers draw numbers for dropout, and routers for jitter.
    drops = transformer.recompute_granularity == "full" and (
        transformer.attention_dropout or transformer.hidden_dropout
    )
    counts_rows = transformer.overlap_moe_expert_parallel_comm and transformer.exchanges_dropless_rows
    holds_grads = transformer.delay_wgrad_compute or counts_rows
    return Overlap(
        gradients=ddp.overlap_grad_reduce,
        parameters=ddp.overlap_param_gather,
        in_every_pass=in_every_pass,
        transfers=transformer.overlap_p2p_comm,
        overlapped_by=overlapped_by,
        head_groups=frozenset(group for kind, group in _HEAD_GROUPS.items() if kind in kinds),
        holds_expert_grads=holds_grads or transformer.overlap_dispatch_backward_with_experts_wgrad,
        holds_grads=holds_grads,
        counts_rows=counts_rows,
        recompute_in_turns=not (drops or transformer.moe_input_jitter_eps),
    )


def ranks_per_node(plan: Plan, device: Device) -> dict[str, int]:
    """Returns, for each group, the number of its ranks on one node, as the minimum over stages."""
    found: dict[str, int] = {}
    for stage in plan.stages:
        for name, ranks in stage.groups.items():
            shared = ranks_in_node(ranks, device.devices_per_node)
            found[name] = min(shared, found.get(name, shared))
    return found


def estimate_step(
    stages: Sequence[StageLoad],
    num_microbatches: int,
    schedule: Schedule,
    *,
    device: Device,
    overlap: Overlap,
    in_node: Mapping[str, int],
    tokens: int,
    flops_per_rank: float,
) -> StepTime:
    """Estimates the time of a pipeline's step of num_microbatches, given the load of each stage.

    in_node: number of ranks of each group on one node. tokens: tokens of the step. flops_per_rank: the model's FLOPs
    as counted by num_floating_point_operations. Raises ValueError for a matmul dtype that the device does not support.
    """
    pipeline = pipeline_of(schedule, len(stages), len(stages[0].chunks))
    orders = stage_orders(pipeline, num_microbatches, schedule)
    clocks = [
        StageClock(load, order, rates=Rates(device, in_node), overlap=overlap)
        for load, order in zip(stages, orders, strict=True)
    ]
    free = timeline(orders, pipeline, seconds=lambda stage, step: clocks[stage].seconds(step))
    delays = [clock.gather_delays(spans) for clock, spans in zip(clocks, free)]

    def seconds(stage: int, step: Action | Pair) -> float:
        # A chunk's first forward is never in a pair.
        return clocks[stage].seconds(step) + (delays[stage].get(step, 0.0) if isinstance(step, Action) else 0.0)

    transfer = max(clock.transfer for clock in clocks)
    spans = timeline(orders, pipeline, seconds=seconds, transfer=transfer, overlap=overlap.transfers)
    passed = _end(spans)
    # Every rank waits for the last reduction, because the gradient norm is over all ranks.
    reduced = max(clock.reduced_at(own) for clock, own in zip(clocks, spans))
    updated = max(clock.update for clock in clocks)
    waited = {PIPELINE: passed - _end(timeline(orders, pipeline, seconds=seconds)), GRADS: reduced - passed}
    total = reduced + updated
    parts = tuple(clock.parts(total, waited=waited, gather=sum(delay.values())) for clock, delay in zip(clocks, delays))
    tflops = flops_per_rank / total / _TERA
    mfu = None if device.bf16_tflops is None else tflops / device.bf16_tflops
    return StepTime(device.name, total, tokens / total, tflops, mfu, parts, spans)


def _end(spans: Timeline) -> float:
    return max((span.end for stage in spans for span in stage.values()), default=0.0)


@dataclass(frozen=True)
class Rates:
    """Computes the time of messages on a device. in_node: number of ranks of each group on one node."""

    device: Device
    in_node: Mapping[str, int]

    def of_messages(self, messages: Iterable[Traffic]) -> float:
        """Returns the time of the messages, sent one after the other, in seconds."""
        return sum(
            message_seconds(one, self.device, in_node=self.in_node.get(one.group, one.group_size)) for one in messages
        )


@dataclass(frozen=True)
class _Pass:
    """Time of one pass of a chunk, in seconds.

    compute: all kernels. recompute: kernels of recomputed forwards, included in compute. exposed: messages that the
    pass waits for. hidden: messages that overlap with the pass. rows_exposed: the part of exposed that exchanges rows
    of experts.
    """

    compute: float
    recompute: float
    exposed: float
    hidden: float
    by_kind: Mapping[str, float]
    rows_exposed: float = 0.0

    def waiting_for_rows(self, seconds: float) -> "_Pass":
        """Returns the pass with this time of row exchanges exposed, and the rest of them hidden."""
        more = seconds - self.rows_exposed
        return replace(self, exposed=self.exposed + more, hidden=self.hidden - more, rows_exposed=seconds)


class StageClock:
    """Computes the times of one rank of a stage: passes, waits for parameters, reductions, and the update."""

    def __init__(self, load: StageLoad, order: Order, *, rates: Rates, overlap: Overlap) -> None:
        self._load, self._order, self._rates, self._overlap = load, order, rates, overlap
        self._passes, self._split = passes(order), held_backwards(order)
        self._reduction, self._reductions = self._phase(GRADS)
        self._gather, self._gathers = self._phase(PARAMS)
        sends = [one for one in load.traffic if _is_transfer(one) and one.count]
        self.transfer = max((rates.of_messages([one]) / one.count for one in sends), default=0.0)
        self._messages = {kind: self._messages_of(kind) for kind in ActionKind}
        self._alone = {kind: [self._pass_of(kind, chunk) for chunk in load.chunks] for kind in ActionKind}
        # Backwards whose weight gradients are a pass of their own.
        self._alone_split = [self._pass_of(ActionKind.BACKWARD, chunk, is_split=True) for chunk in load.chunks]
        if overlap.holds_expert_grads:
            self._alone[ActionKind.BACKWARD] = [
                one.waiting_for_rows(min(one.rows_exposed, *waits(self._backward_parts(number))))
                for number, one in enumerate(self._alone[ActionKind.BACKWARD])
            ]
        pairs = {(step.backward.chunk, step.forward.chunk) for step in order if isinstance(step, Pair)}
        self._in_turns = {chunks: self._pair_of(*chunks) for chunks in pairs}
        self._step = compute_seconds(load.update, rates.device)
        self._step_messages = self._phase(OPTIMIZER)[0] + sum(self._phase(phase)[0] for phase in _SCALAR_PHASES)
        self._late_gather = 0.0 if overlap.parameters or PARAMS in overlap.in_every_pass else self._gather
        self.update = self._step + self._step_messages + self._late_gather

    def seconds(self, step: Action | Pair) -> float:
        """Returns the time of a pass or of a pair, excluding waits for parameters, in seconds."""
        return sum(one.compute + one.exposed for one in self._times(step))

    def _times(self, step: Action | Pair) -> Sequence[_Pass]:
        """Returns the times of the passes of a step, in their order."""
        if isinstance(step, Pair):
            return self._in_turns[step.backward.chunk, step.forward.chunk]
        return (self._alone_split[step.chunk] if step in self._split else self._alone[step.kind][step.chunk],)

    def gather_delays(self, spans: Mapping[Action, Interval]) -> dict[Action, float]:
        """Returns the delay of each chunk's first pass by parameter gathers, in seconds."""
        if not self._overlap.parameters or PARAMS in self._overlap.in_every_pass or not self._gather:
            return {}
        found, clock = {}, 0.0
        for chunk in range(len(self._load.chunks)):
            action = Action(ActionKind.FORWARD, chunk, 0)
            start, end = spans[action]
            buckets, each = self._buckets(self._gather, self._gathers)
            # A pass is divided into one part per bucket, which runs once the bucket is gathered.
            part, at = (end - start) / buckets, start
            for _ in range(buckets):
                clock += each
                at = max(at, clock) + part
            # The sum of the parts may differ from the whole by rounding.
            found[action] = at - end if at - end > 1e-9 * (end - start) else 0.0
        return found

    def reduced_at(self, spans: Mapping[Action, Interval]) -> float:
        """Returns the time in the step at which the last gradient reduction completes, in seconds."""
        end = max(span.end for span in spans.values())
        if GRADS in self._overlap.in_every_pass or not self._reduction:
            return end
        if not self._overlap.gradients:
            return end + self._reduction
        buckets, each = self._buckets(self._reduction, self._reductions)
        # The chunk's last backward, or its weight pass.
        lasts = {action.chunk: span for action, span in spans.items() if action.kind is not ActionKind.FORWARD}
        clock = 0.0
        for span in sorted(lasts.values()):
            for number in range(1, buckets + 1):
                clock = max(clock, span.start + (span.end - span.start) * number / buckets) + each
        return max(end, clock)

    def parts(self, total: float, *, waited: Mapping[str, float], gather: float) -> StageTime:
        """Splits a step of `total` seconds by cause.

        waited: seconds that all stages wait for transfers and the last reduction. gather: delay of the first passes.
        """
        forward, backward = self._sum(ActionKind.FORWARD), self._sum(ActionKind.BACKWARD, ActionKind.WEIGHT)
        exposed = {
            FORWARD: forward.exposed,
            BACKWARD: backward.exposed,
            PIPELINE: waited[PIPELINE],
            GRADS: waited[GRADS],
            PARAMS: self._late_gather + gather,
            OPTIMIZER: self._step_messages,
        }
        hidden = forward.hidden + backward.hidden
        if GRADS not in self._overlap.in_every_pass:
            hidden += max(0.0, self._reduction - waited[GRADS])
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
            # A difference of sums may be negative by rounding.
            bubble=max(0.0, total - compute - sum(exposed.values()) - self._step),
            by_kind={kind: forward.by_kind.get(kind, 0.0) + s for kind, s in backward.by_kind.items()},
        )

    def _phase(self, phase: str) -> tuple[float, int]:
        """Returns the total time and the number of a phase's messages, excluding transfers between stages."""
        messages = [one for one in self._load.traffic if one.phase == phase and not _is_transfer(one)]
        return self._rates.of_messages(messages), sum(one.count for one in messages)

    def _buckets(self, seconds: float, count: int) -> tuple[int, float]:
        """Returns the number of buckets of a chunk, and the time of one bucket, from totals over all chunks."""
        chunks = len(self._load.chunks)
        buckets = max(1, count // chunks)
        return buckets, seconds / chunks / buckets

    def _messages_of(self, kind: ActionKind) -> dict[tuple[str, bool], float]:
        """Returns the time of a pass's messages, by group and by whether they exchange rows of experts."""
        # Weight passes send no messages of their own.
        phase, found = _PHASES.get(kind), dict[tuple[str, bool], float]()
        for one in self._load.traffic:
            if one.phase == phase and not _is_transfer(one):
                key = one.group, one.operation == "all-to-all" and one.group not in self._overlap.head_groups
                found[key] = found.get(key, 0.0) + self._rates.of_messages([one]) / self._number_of(kind)
        return found

    def _number_of(self, kind: ActionKind) -> int:
        return max(1, sum(action.kind is kind for action in self._passes))

    def _pass_of(self, kind: ActionKind, chunk: ChunkWork, *, is_split: bool = False) -> _Pass:
        """Returns the time of a pass that runs alone. is_split: whether it leaves weight gradients to a later pass."""
        messages = self._messages[kind]
        again = chunk.recompute if kind is ActionKind.BACKWARD else Kernels()
        kernels = Kernels(
            {
                ActionKind.FORWARD: chunk.forward,
                ActionKind.BACKWARD: chunk.split_backward if is_split else chunk.backward,
                ActionKind.WEIGHT: chunk.weights,
            }[kind]
        )
        kernels.update(again)
        by_kind = seconds_by_kind(kernels, self._rates.device)
        compute, hidden, rows_hidden = sum(by_kind.values()), 0.0, 0.0
        for (group, exchanges_rows), seconds in messages.items():
            covered = min(seconds, sum(by_kind.get(one, 0.0) for one in self._overlap.overlapped_by.get(group, ())))
            hidden += covered
            rows_hidden += covered if exchanges_rows else 0.0
        exposed = sum(messages.values()) - hidden
        streamed = self._streamed(kind, is_split=is_split)
        return _Pass(
            compute,
            recompute=compute_seconds(again, self._rates.device),
            exposed=exposed + max(0.0, streamed - compute),
            hidden=hidden + min(streamed, compute),
            by_kind=by_kind,
            rows_exposed=self._rows(kind) - rows_hidden,
        )

    def _pair_of(self, backward: int, forward: int) -> tuple[_Pass, _Pass]:
        """Returns the times of a backward and a forward that take turns. backward, forward: numbers of their chunks."""
        own = waits(self._backward_parts(backward), self._forward_parts(forward))
        alone = self._alone[ActionKind.BACKWARD][backward], self._alone[ActionKind.FORWARD][forward]
        return alone[0].waiting_for_rows(own[0]), alone[1].waiting_for_rows(own[1])

    def _forward_parts(self, number: int) -> list[Part]:
        chunk, rows = self._load.chunks[number], self._rows(ActionKind.FORWARD)
        work = self._work_of(chunk, chunk.forward, rows, others=self._others(ActionKind.FORWARD, number))
        return forward_parts(work)

    def _backward_parts(self, number: int) -> list[Part]:
        chunk, rows = self._load.chunks[number], self._rows(ActionKind.BACKWARD)
        others, again = self._others(ActionKind.BACKWARD, number), self._repeated_rows(chunk)
        kernels = chunk.backward if again else chunk.backward + chunk.recompute
        work = self._work_of(chunk, kernels, rows - again, others=others)
        # Half of the products of a backward are weight gradients, the others gradients of their inputs.
        experts = self._products(chunk.backward, of_experts=True) / 2 if self._overlap.holds_expert_grads else 0.0
        rest = self._products(chunk.backward, of_experts=False) / 2 if self._overlap.holds_grads else 0.0
        work = replace(
            work,
            experts=work.experts - experts,
            rest=work.rest - rest,
            held_experts=experts,
            held_rest=rest,
        )
        if not again:
            return backward_parts(work)
        repeated = self._work_of(chunk, chunk.recompute, again, others=0.0)
        return backward_parts(work, repeated, repeats_in_turns=self._overlap.recompute_in_turns)

    def _work_of(self, chunk: ChunkWork, kernels: Kernels, rows: float, *, others: float) -> PassWork:
        """Returns the work of some kernels of a chunk. rows: exchanges of rows. others: other exposed messages."""
        by_kind = seconds_by_kind(kernels, self._rates.device)
        overlapped = {
            kind
            for (group, is_rows) in self._messages[ActionKind.FORWARD]
            if is_rows
            for kind in self._overlap.overlapped_by.get(group, ())
        }
        experts, first, last = (by_kind.pop(kind, 0.0) for kind in (EXPERTS, EMBEDDING, OUTPUT))
        in_transit = sum(by_kind.pop(kind, 0.0) for kind in overlapped)
        return PassWork(
            max(1, chunk.expert_layers),
            experts=experts,
            rest=sum(by_kind.values()) + others,
            exchanged=rows,
            first=first,
            last=last,
            in_transit=in_transit,
            counts_rows=self._overlap.counts_rows,
        )

    def _rows(self, kind: ActionKind) -> float:
        """Returns the time of a pass's exchanges of rows."""
        return sum(seconds for (_, exchanges_rows), seconds in self._messages[kind].items() if exchanges_rows)

    def _others(self, kind: ActionKind, number: int) -> float:
        """Returns the time for which a pass of a chunk waits for other messages than its exchanges of rows."""
        return self._alone[kind][number].exposed - self._alone[kind][number].rows_exposed

    def _repeated_rows(self, chunk: ChunkWork) -> float:
        """Returns the time of a backward's exchanges of rows that belong to recomputed forwards of experts."""
        again, before = (self._products(kernels, of_experts=True) for kernels in (chunk.recompute, chunk.forward))
        return self._rows(ActionKind.FORWARD) * min(1.0, again / before) if again else 0.0

    def _products(self, kernels: Kernels, *, of_experts: bool) -> float:
        """Returns the time of the matrix multiplications of experts, or of the other modules between exchanges."""
        ends = () if of_experts else (EMBEDDING, OUTPUT)
        found = Kernels(
            {
                one: count
                for one, count in kernels.items()
                if one.unit is Unit.MATMUL and (one.kind == EXPERTS) == of_experts and one.kind not in ends
            }
        )
        return compute_seconds(found, self._rates.device)

    def _streamed(self, kind: ActionKind, *, is_split: bool) -> float:
        """Returns the time of parameter gathers and gradient reductions that occur in every pass of a kind."""
        phases = self._overlap.in_every_pass
        gathers = self._gather / len(self._passes) if PARAMS in phases else 0.0
        # A split backward leaves its reductions to its weight pass.
        is_reduced = GRADS in phases and kind is not ActionKind.FORWARD and not is_split
        sums = self._reduction / self._number_of(ActionKind.BACKWARD) if is_reduced else 0.0
        return gathers + sums

    def _sum(self, *kinds: ActionKind) -> _Pass:
        times = [
            time
            for step in self._order
            for action, time in zip(step.passes, self._times(step), strict=True)
            if action.kind in kinds
        ]
        by_kind: dict[str, float] = {}
        for one in times:
            for name, seconds in one.by_kind.items():
                by_kind[name] = by_kind.get(name, 0.0) + seconds
        return _Pass(
            sum(one.compute for one in times),
            recompute=sum(one.recompute for one in times),
            exposed=sum(one.exposed for one in times),
            hidden=sum(one.hidden for one in times),
            by_kind=by_kind,
        )


def _is_transfer(traffic: Traffic) -> bool:
    """Returns whether the messages are transfers between stages, which the schedule's timeline counts separately."""
    return traffic.group == _PIPELINE_GROUP and traffic.operation in ("send", "receive")


def long_step(estimate: Callable[[int], StepTime], num_microbatches: int, *, group_size: int) -> StepTime:
    """Extrapolates the time of a long step from two short steps, which differ by one round of microbatches.

    estimate: maps a number of microbatches to an estimated step. group_size: microbatches of one round. The result
    contains the spans of the shorter step.
    """
    short = short_step(num_microbatches, group_size)
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
    # Rates grow with the tokens and shrink with the seconds of the step.
    share = (num_microbatches / short) * (first.seconds / seconds)
    return replace(
        first,
        seconds=seconds,
        tokens_per_second=first.tokens_per_second * share,
        tflops=first.tflops * share,
        mfu=None if first.mfu is None else first.mfu * share,
        stages=stages,
    )


def short_step(num_microbatches: int, group_size: int) -> int:
    """Returns the microbatches of the shortest step that fills the pipeline and ends in the same way as a long step."""
    return min(num_microbatches, full_rounds(group_size) + num_microbatches % group_size)


def full_rounds(group_size: int) -> int:
    """Returns the number of microbatches after which the pipeline has reached its steady state."""
    return _ROUNDS * group_size


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
