"""Runs steps of a wrapped model on the meta device and records a rank's kernels, messages and allocations.

Steps of one and of two microbatches are sufficient, because each further microbatch sends the same messages as the
second. recorders.py defines the recorders, and plan.py builds the model.

[Note: FSDP2 on the meta device] A unit of fully_shard allocates on its `device`, here the meta device. It takes streams
and events from the runtime module of that device type. The meta device has none, so the CPU's module is registered for
it, whose streams do nothing. A unit also rejects parameters on the meta device in its first forward. No option of torch
disables this check, so that each unit's method is replaced.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron.core.device.torch_internals import TorchDispatchMode
from megatron.core.group_collectives import Pending
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.runner import ScheduleRunner
from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Schedule,
    ScheduleKind,
    configured_schedule,
    passes,
    pipeline_of,
    stage_orders,
)
from megatron.core.pipeline_parallel.transfers import Post, Program, Step, pipeline_programs
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.timers import Timers
from megatron.core.transformer.moe.dispatch_allgather import MoEAllGatherTokenDispatcher
from megatron.core.transformer.moe.dispatch_alltoall import MoEAlltoAllTokenDispatcher, RowSplits
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from megatron.planner.activations import AsFusedKernels
from megatron.planner.recorders import (
    HeldBytes,
    LiveBytes,
    MessageRecorder,
    PassBytes,
    SplitRecorder,
    TurnRecorder,
    WorkRecorder,
    noted_by,
)
from megatron.planner.work import BACKWARD, FORWARD, OTHER, PIPELINE, STATISTICS, StageLoad, Traffic, merged
from megatron.training.config import RunConfig
from megatron.training.setup import setup_steps
from megatron.training.step.exit_conditions import LOCAL_REASONS
from megatron.training.step.statistics import StatisticsExchange, Totals
from megatron.training.step.step_runner import StepRunner

# Name of the part of a step that follows its passes.
_UPDATE = "update"


@dataclass(frozen=True)
class TurnTrace:
    """Live bytes of the passes of one microbatch, turn by turn. Fields as in TurnRecorder, by pass of microbatch 0."""

    passes: Mapping[Action, PassBytes]
    messages: Mapping[Action, PassBytes]
    rest: int


@dataclass(frozen=True)
class StepTrace:
    """Record of a rank's step, empty by default.

    names: names of the reported losses, which determine the size of the statistics exchange. peak: bytes allocated at
    the peak of the passes, in addition to persistent memory and including saved tensors, in a step of two microbatches,
    or of one if the run has only one. update_peak: bytes allocated at the peak of the update. messages_peak: largest
    number of bytes that collectives hold at one time. turns: passes turn by turn; None if the run has no pairs. The
    traced steps have no pairs. held: bytes by kind that a microbatch of each chunk holds between its backward and its
    weight pass; empty if weight passes are not traced.
    """

    load: StageLoad = field(default_factory=StageLoad)
    names: frozenset[str] = frozenset()
    peak: int = 0
    update_peak: int = 0
    messages_peak: int = 0
    turns: TurnTrace | None = None
    held: tuple[Mapping[str, int], ...] = ()


class _NamedStatistics(StatisticsExchange):
    """Statistics exchange that records the names of the values that this rank contributes."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__(group)
        self.found: set[str] = set()

    def _sum_sync(self, totals: Totals, required: Collection[str], **rest: Any) -> list[float]:
        self.found |= totals.keys()
        return super()._sum_sync(totals, required, **rest)


class _TracedMemory:
    """StepMemory of a traced step, in which experts never overflow."""

    def __init__(self, layers: Sequence[MoELayer]) -> None:
        self._layers = layers

    def begin_step(self, *, num_microbatches: int, forward_only: bool) -> None:
        for layer in self._layers:
            assert layer.expert_step is not None
            layer.expert_step.begin()

    def overflow_flags(self) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)

    def grow_sync(self, *, iteration: int) -> str:
        raise AssertionError("a planned step never overflows")

    def end_step(self) -> None:
        pass


@dataclass(frozen=True)
class TracedSteps:
    """Runs training steps on the meta device. statistics: records the names of losses. config: the model's."""

    steps: StepRunner
    optimizer: MegatronOptimizer
    statistics: _NamedStatistics
    config: TransformerConfig

    def step(
        self,
        num_microbatches: int,
        *,
        batch: dict[str, Tensor],
        modes: Sequence[TorchDispatchMode],
        live: LiveBytes | None = None,
        holds_grads: bool = False,
        in_turns: bool = False,
        schedule: ScheduleKind | None = None,
        whole_backwards: bool = False,
    ) -> None:
        """Runs a step of num_microbatches equal microbatches under dispatch modes, of which the last is the innermost.

        batch: tensors [B, S], int64 or fp32, as in trace_step. live: a memory counter, entered as the innermost mode,
        which counts the update as a separate part. holds_grads: whether weight gradients are computed during exchanges,
        if the run does so; otherwise immediately, within the backward of their module. in_turns: whether passes hand
        over, if the run has pairs. A step of one microbatch has no pairs. schedule: replaces the run's.
        whole_backwards: whether backwards compute all gradients, and weight passes are left out.
        """
        assert num_microbatches == 1 or not in_turns, "a pair runs on two threads, which recorders do not follow"
        with ExitStack() as entered:
            entered.enter_context(_expert_overlap(self.config, holds_grads=holds_grads, in_turns=in_turns))
            if schedule is not None:
                entered.enter_context(_changed(self.config, pipeline_schedule=schedule.value))
            if whole_backwards:
                entered.enter_context(_without_weight_passes())
            for mode in (*modes, *([] if live is None else [live])):
                entered.enter_context(mode)
            self.optimizer.zero_grad()
            self.steps.train_sync(
                repeat(batch),
                num_microbatches=num_microbatches,
                iteration=1,
                exit_reasons=lambda: [False] * len(LOCAL_REASONS),
            )
            if live is not None:
                live.begin(_UPDATE)
            self.steps.update_sync()


@contextmanager
def _expert_overlap(config: TransformerConfig, *, holds_grads: bool, in_turns: bool) -> Iterator[None]:
    """Context in which exchanges of rows overlap only as selected, in steps that begin inside it."""
    pairs, delays, delays_experts = (
        "overlap_moe_expert_parallel_comm",
        "delay_wgrad_compute",
        "overlap_dispatch_backward_with_experts_wgrad",
    )
    given = {name: getattr(config, name) for name in (pairs, delays)}
    # Stages with pairs and dropless layers hold weight gradients in passes that run alone, too.
    is_held = given[delays] or (given[pairs] and config.exchanges_dropless_rows)
    changed = {
        pairs: given[pairs] and in_turns,
        delays: is_held and holds_grads,
        delays_experts: getattr(config, delays_experts) and holds_grads,
    }
    with _changed(config, **changed):
        yield


@contextmanager
def _without_weight_passes() -> Iterator[None]:
    """Context in which schedules run without their weight passes, so that each backward computes all gradients."""
    run = ScheduleRunner.run

    def run_others(runner: ScheduleRunner, steps: Sequence[Step]) -> list[Any]:
        return run(runner, [one for one in steps if not (isinstance(one, Action) and one.kind is ActionKind.WEIGHT)])

    # No schedule with two chunks in a V has only whole backwards, and another one would need other chunks.
    with patch.object(ScheduleRunner, "run", run_others):
        yield


@contextmanager
def _changed(config: TransformerConfig, **values: Any) -> Iterator[None]:
    """Context in which a model's config has other values."""
    given = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(given)


def trace_step(
    run_config: RunConfig,
    model: list[nn.Module],
    *,
    optimizer: MegatronOptimizer,
    forward_step: Callable[..., Any],
    groups: ProcessGroupCollection,
    num_microbatches: int,
    batch: dict[str, Tensor],
    weight_passes: ScheduleKind | None = None,
) -> StepTrace:
    """Records a rank's step of num_microbatches, as it occurs in a run of equal steps.

    model: the rank's wrapped chunks, on the meta device. batch: one microbatch in the format of forward_step, meta
    tensors [B, S], int64 or fp32. weight_passes: a schedule of the layout whose weight passes are recorded, too.
    """
    recorder, live, turns = MessageRecorder(groups), LiveBytes(), TurnRecorder()
    work, held = WorkRecorder(model, live_rows=live_rows(model, run_config)), HeldBytes()
    split = SplitRecorder(model, live_rows=live_rows(model, run_config), held=held)
    with traced_steps(
        run_config, model, optimizer=optimizer, forward_step=forward_step, groups=groups, note=noted_by(work, split)
    ) as traced:
        # Discards the first step's messages, because gathers deferred from a previous step are missing.
        with work.recording():
            traced.step(1, batch=batch, modes=[recorder], whole_backwards=True)
        recorder.take()
        if weight_passes is not None:
            with split.recording():
                traced.step(1, batch=batch, modes=[], live=held, schedule=weight_passes)
        is_short = num_microbatches == 1
        traced.step(1, batch=batch, modes=[recorder], live=live if is_short else None, holds_grads=True)
        one = recorder.take()
        traced.step(2, batch=batch, modes=[recorder], live=None if is_short else live, holds_grads=True)
        two = recorder.take()
        paired = traced.config.overlap_moe_expert_parallel_comm
        if paired:
            traced.step(1, batch=batch, modes=[], live=turns, holds_grads=True, in_turns=True, whole_backwards=True)
    schedule, stage = configured_schedule(get_model_config(model[0])), group_rank(groups.pp)
    pipeline = pipeline_of(schedule, group_size(groups.pp), len(model))
    of_one = passes(stage_orders(pipeline, 1, schedule._replace(paired=False))[stage])
    whole = [action for action in of_one if action.kind is not ActionKind.WEIGHT]
    program = pipeline_programs(pipeline, num_microbatches, schedule)[stage]
    traffic = by_pass(_extrapolated(one, two, num_microbatches=num_microbatches), program)
    experts = [sum(isinstance(part, MoELayer) for part in chunk.modules()) for chunk in model]
    chunks = tuple(
        replace(chunk, expert_layers=number) for chunk, number in zip(work.chunks(whole), experts, strict=True)
    )
    held_by_chunk: tuple[Mapping[str, int], ...] = ()
    if weight_passes is not None:
        split_order = passes(stage_orders(pipeline, 1, Schedule(weight_passes))[stage])
        held_by_chunk = held.by_chunk(split_order)
        chunks = tuple(
            replace(chunk, weights=chunk.backward - one.backward)
            for chunk, one in zip(chunks, split.chunks(split_order), strict=True)
        )
    return StepTrace(
        StageLoad(chunks, merged(traffic), work.update),
        frozenset(traced.statistics.found),
        peak=live.peaks[""],
        update_peak=live.peaks[_UPDATE],
        messages_peak=live.messages_peak,
        turns=_turn_trace(turns, whole, expert_layers=experts) if paired else None,
        held=held_by_chunk,
    )


def _turn_trace(turns: TurnRecorder, actions: Sequence[Action], *, expert_layers: Sequence[int]) -> TurnTrace:
    """Returns the recorded passes of a step. actions: its passes. expert_layers: numbers of such layers by chunk."""
    found = dict(zip(actions, turns.passes, strict=True))
    for action, recorded in found.items():
        has_turns = len(recorded.turns) > 1
        assert has_turns == (expert_layers[action.chunk] > 0), f"{action} hands over in layers with experts"
    return TurnTrace(found, dict(zip(actions, turns.messages, strict=True)), turns.rest)


def live_rows(model: Iterable[nn.Module], run_config: RunConfig) -> float:
    """Returns the share of the expert buffers' rows that are live if routing is balanced; 1 if they are dropless.

    Buffers are never larger than the most uneven routing requires, whatever their factor. A rank with all experts, for
    example, always receives the same number of rows.
    """
    layers = (part for chunk in model for part in chunk.modules() if isinstance(part, MoELayer))
    dispatchers = (layer.token_dispatcher for layer in layers)
    budget = next((one.budget for one in dispatchers if isinstance(one, MoEStaticTokenDispatcher)), None)
    if budget is None:
        return 1.0
    tokens = run_config.data.seq_length * run_config.training.micro_batch_size // run_config.transformer.sequence_parts
    return budget.balanced_live_rows(tokens) / budget.rows_of_rank(tokens)


@contextmanager
def traced_steps(
    run_config: RunConfig,
    model: list[nn.Module],
    *,
    optimizer: MegatronOptimizer,
    forward_step: Callable[..., Any],
    groups: ProcessGroupCollection,
    note: Callable[..., None],
) -> Iterator[TracedSteps]:
    """Prepares the model for traced steps, in place, and yields an object that runs them.

    model: wrapped chunks on the meta device, which can run only traced steps afterwards. note: called for each fused
    kernel, like WorkRecorder.note.
    """
    steps = setup_steps(
        run_config,
        model,
        forward_step_func=forward_step,
        optimizer=optimizer,
        timers=Timers(0, "minmax"),
        memory=None,
        graphs=None,
    )
    layers = [part for chunk in unwrap_model(model) for part in chunk.modules() if isinstance(part, MoELayer)]
    static = [layer for layer in layers if layer.expert_step is not None]
    config = run_config.transformer
    if config.num_moe_experts is not None and config.moe_expert_rank_capacity_factor is not None:
        # Also set on stages without experts, because all ranks exchange the same number of flags.
        steps.memory = _TracedMemory(static)
    steps.statistics = statistics = _NamedStatistics(dist.group.WORLD)
    # Only the first step of a run compares masters with parameters. The plan is for the later steps.
    optimizer.reload_model_params()
    _run_fsdp_on_meta(model)
    _route_evenly(run_config, layers, groups=groups)
    with NoValues(_even_share(config, layers, groups=groups)), AsFusedKernels(note):
        yield TracedSteps(steps, optimizer, statistics, get_model_config(model[0]))


def _run_fsdp_on_meta(model: Sequence[nn.Module]) -> None:
    """Makes the FSDP units of a model allocate on the meta device, in place. See [Note: FSDP2 on the meta device]."""
    meta = torch.device("meta")
    parts = [part for chunk in model for part in chunk.modules() if isinstance(part, FSDPModule)]
    units: list[Any] = [unit for part in parts for unit in part._get_fsdp_state()._fsdp_param_groups]
    if units and not hasattr(torch, meta.type):
        torch._register_device_module(meta.type, torch.cpu)
    for unit in units:
        unit._validate_no_meta_params = lambda: None
        for owner in (unit, *unit.fsdp_params):
            owner.device = meta


def _route_evenly(run_config: RunConfig, layers: Sequence[MoELayer], *, groups: ProcessGroupCollection) -> None:
    """Makes MoE layers use the row counts of even routing instead of reading them from the device, in place."""
    config, ranks_of_sample = run_config.transformer, group_size(groups.cp) * group_size(groups.tp)
    tokens = run_config.training.micro_batch_size * run_config.data.seq_length // ranks_of_sample
    num_rows = round(_kept_share(config) * tokens * config.moe_router_topk) * group_size(groups.expt_tp)

    def even_splits(counts: Tensor, arriving: Pending) -> RowSplits:
        ranks, own = group_size(groups.tp_ep), group_rank(groups.tp_ep)
        send = [num_rows // ranks + (rank < num_rows % ranks) for rank in range(ranks)]
        return RowSplits(arriving.wait(), ranks * send[own], send, [send[own]] * ranks)

    for layer in layers:
        if isinstance(layer.token_dispatcher, MoEAlltoAllTokenDispatcher):
            layer.token_dispatcher.row_splits_sync = even_splits
        for part in layer.modules():
            if isinstance(part, SequentialMLP):
                part.register_forward_pre_hook(_with_even_counts)


def _kept_share(config: TransformerConfig) -> float:
    """Returns the share of its rows that an expert keeps under even routing, limited by its capacity."""
    return min(1.0, config.moe_expert_capacity_factor or 1.0)


def _even_share(config: TransformerConfig, layers: Sequence[MoELayer], *, groups: ProcessGroupCollection) -> float:
    """Returns the share of set elements in the masks of dispatchers under even routing (see NoValues)."""
    gathers = any(isinstance(layer.token_dispatcher, MoEAllGatherTokenDispatcher) for layer in layers)
    return _kept_share(config) / (group_size(groups.ep) if gathers else 1)


def _with_even_counts(experts: SequentialMLP, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the inputs with counts that divide the rows evenly among experts.

    inputs: the arguments of SequentialMLP.forward: rows [R, H], counts [e] and probabilities [R].
    """
    rows, counts, probs = inputs
    of_expert = [len(rows) // len(counts) + (index < len(rows) % len(counts)) for index in range(len(counts))]
    return rows, torch.tensor(of_expert, dtype=torch.int64, device="cpu"), probs


class NoValues(TorchDispatchMode):
    """Dispatch mode that answers reads of meta tensors with zeros, and skips fused optimizer kernels.

    even_share: share of the mask elements that `nonzero` treats as set, under even routing to one rank's experts.
    """

    def __init__(self, even_share: float = 1.0) -> None:
        super().__init__()
        self._even_share = even_share
        self._answers: dict[Any, Callable[..., Any]] = {
            torch.ops.aten._local_scalar_dense.default: _zero,
            torch.ops.aten._to_copy.default: _on_host,
            torch.ops.aten.equal.default: lambda *tensors: True,
            torch.ops.aten.nonzero.default: self._even_rows,
            torch.ops.aten._grouped_mm.default: _grouped_product,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answers reads of meta tensors, skips fused optimizer kernels, and runs other operators unchanged."""
        kwargs = kwargs or {}
        if args and isinstance(args[0], Tensor) and args[0].is_meta:
            answer = self._answers.get(func)
            result = NotImplemented if answer is None else answer(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        if func.namespace == "aten" and func._schema.name.startswith("aten::_fused_"):
            return None
        return func(*args, **kwargs)

    def _even_rows(self, mask: Tensor) -> Tensor:
        return mask.new_empty(round(mask.numel() * self._even_share), mask.dim(), dtype=torch.int64)


def _zero(number: Tensor) -> float | int:
    return 0.0 if number.is_floating_point() else 0


def _on_host(tensor: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> Any:
    """Returns zeros for a copy to the CPU, and NotImplemented for copies to other devices."""
    if device is None or torch.device(device).type != "cpu":
        return NotImplemented
    return torch.zeros(tensor.shape, dtype=dtype or tensor.dtype, device="cpu")


def _grouped_product(left: Tensor, right: Tensor, *more: Any, **rest: Any) -> Tensor:
    """Returns the empty result of a grouped GEMM, because torch infers its shape only for bf16.

    The operands are rows and one matrix per expert, or two tables of rows, which yield one matrix per expert.
    """
    shape = left.shape[-2], right.shape[-1]
    ends = more[0] if more else rest["offs"]
    return left.new_empty(shape if left.dim() != right.dim() else (len(ends), *shape))


def _extrapolated(one: Sequence[Traffic], two: Sequence[Traffic], *, num_microbatches: int) -> tuple[Traffic, ...]:
    """Extrapolates the messages of a step of num_microbatches from steps of one and two microbatches."""
    first = {(t.group, t.operation, t.phase): t for t in one}
    found = []
    for later in two:
        before = first.get((later.group, later.operation, later.phase), replace(later, count=0, num_bytes=0))
        further = num_microbatches - 2
        count = later.count + further * (later.count - before.count)
        num_bytes = later.num_bytes + further * (later.num_bytes - before.num_bytes)
        if count and later.phase != OTHER:
            found.append(replace(later, count=count, num_bytes=num_bytes))
    return tuple(found)


def by_pass(links: Iterable[Traffic], program: Program) -> Iterator[Traffic]:
    """Splits transfers between stages into forward and backward transfers, with the counts of the schedule.

    Other messages are returned unchanged. All transfers must have the same size.
    """
    transfers = [transfer for step in program if isinstance(step, Post) for transfer in step.transfers]
    kinds = Counter((transfer.direction.value, transfer.action.kind) for transfer in transfers)
    for one in links:
        if one.phase != PIPELINE:
            yield one
            continue
        for phase, kind in ((FORWARD, ActionKind.FORWARD), (BACKWARD, ActionKind.BACKWARD)):
            count = kinds[one.operation, kind]
            if count:
                yield replace(one, phase=phase, count=count, num_bytes=one.num_bytes // one.count * count)


def with_names(load: StageLoad, num_names: int) -> StageLoad:
    """Returns the load, with the statistics exchange enlarged to num_names losses (see StatisticsExchange)."""
    exchange = ("world", "all-reduce", STATISTICS)
    # Each loss adds three fp64 numbers: whether the rank requires it, its sum, and its count.
    num_bytes = 24 * num_names
    traffic = (
        replace(one, num_bytes=one.num_bytes + num_bytes) if (one.group, one.operation, one.phase) == exchange else one
        for one in load.traffic
    )
    return replace(load, traffic=tuple(traffic))
