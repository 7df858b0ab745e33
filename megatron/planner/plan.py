"""Plans a run on one process without training it: memory, messages and kernels of one rank of each pipeline stage.

The run's own code builds the rank's model, buffers and optimizer, over process groups that send nothing and on a device
that has no memory; see fake_ranks.py and without_memory of megatron/core/device. How a plan is printed is in report.py.
"""

import argparse
import copy
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.device import without_memory
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.enums import ModelType
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.core.pipeline_parallel.schedule import Action, Pipeline, stage_orders
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.rank_generator import DEFAULT_ORDER, RankGenerator
from megatron.core.timers import Timers
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.paged_stash.sizing import check_effect
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import get_model_config, unwrap_model
from megatron.planner.activations import AsFusedKernels, SavedBytes, SavedSizes, peak_bytes
from megatron.planner.fake_ranks import fake_rank
from megatron.planner.recorders import ranks_by_name
from megatron.planner.traced_step import StepTrace, trace_step, with_names
from megatron.planner.work import EXPERTS, ChunkWork, Kernels, Traffic
from megatron.training.command_line.config_builder import flags_named_in_errors
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.validation import batch_sizes
from megatron.training.expert_memory import build_expert_memory
from megatron.training.flops import count_of, num_floating_point_operations, parameters_by_key
from megatron.training.global_vars import publish_run, publish_timers, publish_tokenizer
from megatron.training.held_memory import bytes_of, gradient_tensors, parameter_tensors
from megatron.training.initialize import seed_ranks
from megatron.training.setup import get_model, setup_batches, setup_model_and_optimizer, setup_tokenizer

# What a plan does not know, said wherever one is shown.
NOT_PLANNED = "what the allocator keeps, and data"
_PLAIN = (int, float, bool, str, type(None), Enum, torch.dtype, torch.Size)
# What tells stages apart that are otherwise alike.
_OWN_NAMES = {"layer_number", "offset", "_init_seed"}
ForwardStep = Callable[..., Any]


@dataclass(frozen=True)
class BufferLayout:
    """One buffer of a model chunk. kind: dense or expert. param_dtype, grad_dtype: names without "torch.".

    bucket_bytes: of each bucket's gradients, with padding, in the order of the buffer. num_bytes: parameters and
    gradients of the whole buffer, with padding; padding_bytes: of these, what belongs to no parameter. bucket_ends: of
    each bucket the names of the parameters that lie first and last in it.
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
        """The share of the buffer that is padding, 0 to 1."""
        return self.padding_bytes / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class RankPlan:
    """The memory of one rank by kind, in bytes. layers: the numbers of its layers, from 1 over the model.

    parameters, gradients: of the buffers they lie in, with padding. masters, moments: the optimizer's. pages: of the
    paged stash, on the device. activations: at the fullest moment of the schedule. host_pages, host_states,
    host_activations: pages, masters and moments, and what is offloaded for backward, in the host's memory. sizes:
    elements of each logical tensor that the rank has a part of, as parameters_by_key. links: what it sends in a step.
    buffers: how its parameters lie. chunks: what a microbatch computes in each of its model chunks; update: the
    optimizer's kernels. groups: the ranks of those groups that links name. working: what passes allocate at their
    fullest moment in addition to all this and free again, as logits, gradients in flight and messages; updating: what
    the update allocates, when no activations are left; messages: of both, what collectives hold at one time, persistent
    gradients and parameters not counted. All 0 where nothing is trained.
    """

    rank: int
    stage: int
    layers: tuple[int, ...]
    parameters: int
    gradients: int
    masters: int
    moments: int
    pages: int
    host_pages: int
    activations: dict[str, int]
    sizes: dict[str, int]
    links: tuple[Traffic, ...] = ()
    buffers: tuple[BufferLayout, ...] = ()
    chunks: tuple[ChunkWork, ...] = ()
    update: Kernels = field(default_factory=Kernels)
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    working: int = 0
    updating: int = 0
    messages: int = 0
    host_states: int = 0
    host_activations: int = 0

    @property
    def host(self) -> dict[str, int]:
        """Bytes in the host's memory, by kind."""
        return {"pages": self.host_pages, "states": self.host_states, "activations": self.host_activations}

    @property
    def persistent(self) -> int:
        """Persistent bytes on the device."""
        return self.parameters + self.gradients + self.masters + self.moments + self.pages

    @property
    def total(self) -> int:
        """Persistent bytes on the device, and activations at the fullest moment of the schedule."""
        return self.persistent + sum(self.activations.values())

    @property
    def peak(self) -> int:
        """The most that is on the device at once: with what passes, or the update, take for a while."""
        return max(self.total + self.working, self.persistent + self.updating)


@dataclass(frozen=True)
class Plan:
    """A RankPlan for one rank of each pipeline stage. num_microbatches: of the last, largest step.

    is_balanced: whether activations assume that all experts are chosen equally often, as the number of their rows is
    not fixed. flops_per_sample: of the model, as num_floating_point_operations counts them. substitutions: see
    substitutions.py.
    """

    stages: list[RankPlan]
    num_parameters: int
    active_parameters: int
    num_microbatches: int
    is_balanced: bool
    flops_per_sample: float = 0.0
    substitutions: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageTrace:
    """What a microbatch of each of a stage's chunks keeps for backward, and bytes of the experts of the fullest layer;
    what a step sends, None where nothing is trained.
    """

    saved: tuple[SavedSizes, ...]
    experts_of_layer: int
    step: StepTrace | None

    def working(self, actions: Sequence[Action]) -> int:
        """Bytes that passes take beside what waits for backward; actions: of the step that was step."""
        kept = peak_bytes(actions, [one.by_kind for one in self.saved]).total()
        return 0 if self.step is None else max(0, self.step.peak - kept)


# By what tells stages apart.
_Known = dict[Hashable, StageTrace]


def plan_run(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step_func: ForwardStep,
    config_overrides: ConfigOverrides | None = None,
    rank_in_stage: int = 0,
    only_stages: Collection[int] | None = None,
) -> Plan:
    """Plans the run of validated args, whose world_size says how many ranks there are.

    forward_step_func: the script's, which is given made-up batches without memory. rank_in_stage: which rank of each
    stage; the first holds most, as the last parts of what ranks share may be shorter. only_stages: unset, all; else the
    parameters are counted of these alone. Raises as the run itself would, for sizes that do not fit and for models
    that cannot be built.
    """
    stages, is_balanced, known = [], False, _Known()
    stashed: list[Sequence[StashEvent]] = []
    args = copy.copy(args)
    args.ddp_debug = False  # it watches what is sent
    for stage, rank in enumerate(pipeline_of(args, rank_in_stage)):
        if only_stages is not None and stage not in only_stages:
            continue
        with as_rank(args, rank) as groups:
            build = _Build(args, model_provider, config_overrides=config_overrides)
            stages.append(build.plan(rank, stage=stage, groups=groups, forward_step=forward_step_func, known=known))
            is_balanced = is_balanced or build.is_balanced
            stashed.append(build.stash_events)
    if args.moe_paged_stash and not args.skip_train and only_stages is None:
        with flags_named_in_errors():
            check_effect(stashed)
    # Every rank sends a place for each name of a loss, its own or not.
    names = {name for passes in known.values() if passes.step is not None for name in passes.step.names}
    stages = [replace(one, links=with_names(one.links, len(names))) for one in stages]
    total, active = count_of({key: size for stage in stages for key, size in stage.sizes.items()}, args)
    num_microbatches = batch_sizes(args).final_num_microbatches
    flops = num_floating_point_operations(args, 1)
    return Plan(stages, total, active, num_microbatches, is_balanced, flops, substitutions(args))


def place_of(args: argparse.Namespace, rank: int) -> int:
    """Which of the pipelines the rank is in. Raises CommandLineError for one that there is not."""
    if not 0 <= rank < args.world_size:
        raise CommandLineError(
            f"RANK is {rank} in the environment: must be from 0 to {args.world_size - 1}, of --world-size"
        )
    return next(number for number, ranks in enumerate(_pipelines(args)) if rank in ranks)


def pipeline_of(args: argparse.Namespace, number: int) -> list[int]:
    """The ranks of one pipeline, stage by stage; number: which of the pipelines that the layout has."""
    return _pipelines(args)[number]


def _pipelines(args: argparse.Namespace) -> list[list[int]]:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else DEFAULT_ORDER
    return RankGenerator(tp, 1, args.world_size // (tp * pp * cp), pp, cp, order).get_ranks("pp")


@contextmanager
def as_rank(args: argparse.Namespace, rank: int) -> Iterator[ProcessGroupCollection]:
    """Makes this process act as that rank, without memory, and publishes the run's arguments and timers."""
    with fake_rank(args, rank, world_size=args.world_size) as groups, without_memory(), torch.device("meta"):
        try:
            _publish(args)
            setup_batches(args)
            seed_ranks(args.seed, groups)
            yield groups
        finally:
            publish_run(None)
            destroy_num_microbatches_calculator()


def _publish(args: argparse.Namespace) -> None:
    publish_run(args)
    publish_timers(Timers(0, "minmax"))
    publish_tokenizer(setup_tokenizer(args))


class _Build:
    """One rank's model, wrapper and optimizer, and what they hold."""

    def __init__(
        self,
        args: argparse.Namespace,
        model_provider: Callable[..., nn.Module],
        *,
        config_overrides: ConfigOverrides | None,
    ) -> None:
        self._args, self._provider = args, model_provider
        optimizer: MegatronOptimizer | None = None
        if args.skip_train:
            model = get_model(model_provider, ModelType.encoder_or_decoder, args=args)
        else:
            model, optimizer, _ = setup_model_and_optimizer(
                model_provider, ModelType.encoder_or_decoder, args=args, config_overrides=config_overrides
            )
        self.model, self._optimizer = model, optimizer
        # The number of rows of an expert is known in advance where buffers have a fixed size.
        self.is_balanced = args.num_experts is not None and args.moe_expert_rank_capacity_factor is None
        self.stash_events: Sequence[StashEvent] = ()

    def plan(
        self, rank: int, *, stage: int, groups: ProcessGroupCollection, forward_step: ForwardStep, known: _Known
    ) -> RankPlan:
        """Plans the rank's memory and messages; stage: the rank's. known: results of other stages; grows."""
        chunks = unwrap_model(self.model)
        num_microbatches = batch_sizes(self._args).final_num_microbatches
        pages = self._pages(groups, num_microbatches)
        state = Counter[str]() if self._optimizer is None else self._optimizer.state_bytes
        config = get_model_config(self.model[0])
        orders_of = partial(
            stage_orders,
            Pipeline(self._args.pipeline_model_parallel_size, len(chunks)),
            group_size=config.microbatch_group_size_per_vp_stage,
        )
        orders = orders_of(num_microbatches)
        place = stage == 0, stage == self._args.pipeline_model_parallel_size - 1
        alike = structure_of(self.model), *place
        if alike not in known:
            known[alike] = self._passes(groups, forward_step, num_microbatches=num_microbatches)
        passes = known[alike]
        return RankPlan(
            rank,
            stage,
            layers=tuple(
                sorted(m.layer_number for c in chunks for m in c.modules() if isinstance(m, TransformerLayer))
            ),
            parameters=bytes_of(parameter_tensors(self.model)),
            gradients=bytes_of(gradient_tensors(self.model)),
            masters=state["masters"],
            moments=state["moments"],
            pages=pages[0],
            host_pages=pages[1],
            activations=_activations(orders[stage], passes, stashes=sum(pages) > 0),
            sizes=parameters_by_key(self.model),
            buffers=tuple(buffer_layouts(self.model)),
            links=() if passes.step is None else passes.step.links,
            chunks=() if passes.step is None else passes.step.chunks,
            update=Kernels() if passes.step is None else passes.step.update,
            groups={} if passes.step is None else ranks_by_name(groups, passes.step.links),
            working=passes.working(orders_of(min(2, num_microbatches))[stage]),
            updating=0 if passes.step is None else passes.step.update_peak,
            messages=0 if passes.step is None else passes.step.messages_peak,
            host_states=state["host_states"],
            host_activations=peak_bytes(orders[stage], [Counter(host=kept.on_host) for kept in passes.saved]).total(),
        )

    def _pages(self, groups: ProcessGroupCollection, num_microbatches: int) -> tuple[int, int]:
        """Bytes of the stash's pages, on the device and on the host; an evaluation has none."""
        if self._optimizer is None:
            return 0, 0
        memory = build_expert_memory(self.model, self._args, groups=groups)
        layout = None if memory is None else memory.pool_layout_for(num_microbatches)
        self.stash_events = () if memory is None else memory.needs.events
        if layout is None:
            return 0, 0
        return layout.device_pages * layout.page_bytes, layout.host_pages * layout.page_bytes

    def _passes(
        self, groups: ProcessGroupCollection, forward_step: ForwardStep, *, num_microbatches: int
    ) -> StageTrace:
        args, model = self._args, self.model
        if self._optimizer is None:
            # Nothing waits for a backward.
            return StageTrace(tuple(SavedSizes(Counter()) for _ in model), 0, None)
        if self.is_balanced or args.use_torch_fsdp2:
            args = with_known_rows(args)
            _publish(args)
            model = get_model(self._provider, ModelType.encoder_or_decoder, args=args)
        saved = [saved_by(chunk, args, forward_step=forward_step) for chunk in model]
        of_layers = [
            kept.by_kind[EXPERTS] // max(1, sum(isinstance(part, MoELayer) for part in chunk.modules()))
            for chunk, kept in zip(model, saved, strict=True)
        ]
        _publish(self._args)
        step = trace_step(
            self._args,
            self.model,
            optimizer=self._optimizer,
            forward_step=forward_step,
            groups=groups,
            num_microbatches=num_microbatches,
            batch=batch_of(self._args),
        )
        return StageTrace(tuple(saved), max(of_layers), step)


def structure_of(model: Sequence[nn.Module]) -> Hashable:
    """Equal for chunks with equal modules, settings and parameters, whatever the numbers of their layers."""
    return tuple(_module(chunk) for chunk in model)


def _module(part: nn.Module) -> tuple[Any, ...]:
    parameters = tuple(
        (name, one.shape, one.dtype, one.requires_grad) for name, one in part.named_parameters(recurse=False)
    )
    settings = tuple((name, _setting(value)) for name, value in vars(part).items() if name not in _OWN_NAMES)
    # A list of layers names them by their numbers in the whole model.
    children = tuple((None if name.isdecimal() else name, _module(child)) for name, child in part.named_children())
    return type(part), parameters, settings, children


def _setting(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)):
        return tuple(_setting(one) for one in value)
    return type(value)


def _activations(actions: Sequence[Action], passes: StageTrace, *, stashes: bool) -> dict[str, int]:
    """Returns the bytes at the fullest moment, by kind. stashes: whether what experts save is stashed in pages."""
    if stashes:
        # One layer's rows are outside of pages, between its experts and its copy.
        peak = peak_bytes(actions, [Counter({**kept.by_kind, EXPERTS: 0}) for kept in passes.saved])
        return {**peak, EXPERTS: passes.experts_of_layer}
    return dict(peak_bytes(actions, [kept.by_kind for kept in passes.saved]))


def with_known_rows(args: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments of the same run with sizes that the host knows.

    Parameters are whole, as passes save the same of gathered ones. Where the number of rows would be read from the
    device, buffers hold just the rows of experts that are all chosen equally often.
    """
    args = copy.copy(args)
    args.use_torch_fsdp2 = False
    if args.num_experts is not None and args.moe_expert_rank_capacity_factor is None:
        # Where experts drop what they have no room for there are fewer rows; where they are padded, perhaps more.
        room = args.moe_expert_capacity_factor if args.moe_pad_expert_input_to_capacity else None
        args.moe_expert_rank_capacity_factor, args.moe_grouped_gemm = max(1.0, room or 1.0), True
        args.moe_expert_capacity_factor, args.moe_pad_expert_input_to_capacity = None, False
    return args


def saved_by(
    chunk: nn.Module,
    args: argparse.Namespace,
    *,
    forward_step: ForwardStep,
    kind_of: Callable[[str], str] | None = None,
) -> SavedSizes:
    """Returns the bytes that a microbatch of the chunk saves for backward; kind_of: as SavedBytes has it."""
    inner = unwrap_model(chunk)
    for part in inner.modules():
        if isinstance(part, MoELayer) and part.expert_step is not None:
            part.expert_step.begin()
    if not inner.pre_process:
        parts = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
        shape = args.seq_length // parts, args.micro_batch_size, args.hidden_size
        inner.set_input_tensor(torch.zeros(shape, dtype=args.params_dtype, requires_grad=True))
    saved = SavedBytes(chunk, persistent=[*parameter_tensors([chunk]), *gradient_tensors([chunk])], kind_of=kind_of)
    with saved.counting(), AsFusedKernels():
        output, loss_function = forward_step(repeat(batch_of(args)), chunk)
        kept = loss_function(output) if inner.post_process else output
    found = SavedSizes(saved.by_kind(), saved.on_host())
    del kept
    return found


def batch_of(args: argparse.Namespace) -> dict[str, Tensor]:
    """A microbatch as datasets give it: tokens, labels, position_ids [B, S] int64, loss_mask [B, S] fp32, no memory."""
    shape = args.micro_batch_size, args.seq_length
    batch = {name: torch.zeros(shape, dtype=torch.int64) for name in ("tokens", "labels", "position_ids")}
    return {**batch, "loss_mask": torch.zeros(shape, dtype=torch.float32)}


def buffer_layouts(model: Sequence[nn.Module]) -> Iterator[BufferLayout]:
    """The buffers of a rank's wrapped chunks, chunk by chunk; none of modules that hold parameters one by one."""
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


def substitutions(args: argparse.Namespace) -> tuple[str, ...]:
    """In words, for the validated arguments of a run; see build_flex_dispatcher."""
    if args.num_experts is None or args.moe_token_dispatcher_type != "flex":
        return ()
    return (
        f"--moe-flex-dispatcher-backend {args.moe_flex_dispatcher_backend} is planned with the rows of "
        "--moe-token-dispatcher-type alltoall, which fills the same buffers: what the library keeps for itself, and "
        "what it does not send twice, is not known without it",
    )
