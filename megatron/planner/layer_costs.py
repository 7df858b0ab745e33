"""Measures the bytes, kernels and messages of each kind of layer on a rank, with a short model on the meta device.

The run's own code builds and runs that model, as for a dry run (plan.py). stage_costs.py sums layers to pipeline
stages.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from megatron.core.device.torch_internals import storage_id, tree_leaves
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.distributed.param_and_grad_buffer import BufferKind, buffer_kind
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.schedule import ScheduleKind, configured_schedule
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.transformer.moe.aux_losses import AuxLossRecorder
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe_config import layers_with_experts
from megatron.core.transformer.rope import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from megatron.planner.plan import (
    ForwardStep,
    as_rank,
    batch_of,
    ranks_of_pipeline,
    saved_by,
    with_known_rows,
    with_planned_device,
)
from megatron.planner.recorders import GROUPED, ONCE, RECOMPUTE, ROWS_OF_TABLES, MessageRecorder, WorkRecorder, noted_by
from megatron.planner.traced_step import live_rows, traced_steps
from megatron.planner.work import (
    BACKWARD,
    EMBEDDING,
    END,
    FORWARD,
    GRADS,
    PARAMS,
    ChunkWork,
    Kernel,
    Kernels,
    Traffic,
    merged,
    part_at,
    part_of_name,
)
from megatron.training.config import RunConfig
from megatron.training.setup import build_model, build_model_and_optimizer

# Name of the kernels that run once per step, beside the names of passes.
_ONCE = "once"
# Groups of the ranks that share all experts.
_EXPERT_GROUPS = ("ep", "tp_ep")
# Groups whose gradient and parameter messages depend on the layout of buckets.
_DATA_GROUPS = ("dp", "dp_cp", "edp")


@dataclass(frozen=True)
class LayerKind:
    """Properties in which the layers of a model may differ."""

    has_experts: bool = False
    has_window: bool = False
    is_in_8_bits: bool = False


@dataclass(frozen=True)
class ParamSize:
    """Size of a trained parameter.

    buffer: kind of its flat buffer, with separate buffers for experts. own_bucket: whether it has a separate bucket.
    """

    numel: int
    buffer: BufferKind
    own_bucket: bool = False


@dataclass(frozen=True)
class CountedKernel:
    """A kernel, and how many of its bytes belong to weights and do not scale with the number of tokens.

    weight_bytes, expert_weight_bytes: bytes of parameters and their gradients, in dense layers and in experts.
    """

    kernel: Kernel
    weight_bytes: float
    expert_weight_bytes: float


# Number of launches of each kernel.
KernelCounts = Counter[CountedKernel]


@dataclass(frozen=True)
class Scale:
    """Ratios of sizes between a similar layout and a measured one.

    samples: samples per microbatch. experts: experts per rank. expert_ranks: ranks that share all experts.
    """

    samples: Fraction = Fraction(1)
    experts: Fraction = Fraction(1)
    expert_ranks: Fraction = Fraction(1)


@dataclass(frozen=True)
class PartWork:
    """Kernels and messages of one microbatch in one part of a chunk.

    recompute: forward kernels repeated in backward. traffic: messages of the forward and backward phases. once: kernels
    of the first microbatch alone. weights: the part of backward that weight passes run, if the run's schedule has them.
    Counts may be negative in a difference between two parts.
    """

    forward: KernelCounts = field(default_factory=Counter)
    backward: KernelCounts = field(default_factory=Counter)
    recompute: KernelCounts = field(default_factory=Counter)
    traffic: tuple[Traffic, ...] = ()
    once: KernelCounts = field(default_factory=Counter)
    weights: KernelCounts = field(default_factory=Counter)

    def chunk(self) -> ChunkWork:
        """Converts the kernels to a plan's format, which does not separate the bytes of weights."""
        passes = kernels_of(self.forward), kernels_of(self.backward), kernels_of(self.recompute)
        return ChunkWork(*passes, weights=kernels_of(self.weights))

    def times(self, number: int) -> "PartWork":
        """Returns the work of this part, multiplied by `number`."""

        def counts(some: KernelCounts) -> KernelCounts:
            return Counter({one: n * number for one, n in some.items()})

        traffic = (replace(t, count=t.count * number, num_bytes=t.num_bytes * number) for t in self.traffic)
        passes = counts(self.forward), counts(self.backward), counts(self.recompute)
        return PartWork(*passes, tuple(traffic), counts(self.once), counts(self.weights))

    def scaled(self, scale: Scale) -> "PartWork":
        """Scales the work to a similar layout. Activations scale with samples, and expert weights with experts."""
        samples, experts, expert_ranks = float(scale.samples), float(scale.experts), float(scale.expert_ranks)

        def counts(some: KernelCounts) -> KernelCounts:
            found: KernelCounts = Counter()
            for one, number in some.items():
                moving = max(0.0, one.kernel.num_bytes - one.weight_bytes - one.expert_weight_bytes)
                expert_bytes = one.expert_weight_bytes * experts
                num_bytes = moving * samples + one.weight_bytes + expert_bytes
                kernel = replace(one.kernel, flops=one.kernel.flops * samples, num_bytes=num_bytes)
                found[CountedKernel(kernel, one.weight_bytes, expert_bytes)] += number
            return found

        traffic = (
            replace(
                one,
                num_bytes=round(one.num_bytes * samples),
                group_size=round(one.group_size * (expert_ranks if one.group in _EXPERT_GROUPS else 1.0)),
            )
            for one in self.traffic
        )
        passes = counts(self.forward), counts(self.backward), counts(self.recompute)
        return PartWork(*passes, tuple(traffic), counts(self.once), counts(self.weights))


@dataclass(frozen=True)
class PartCost:
    """Memory of one part of a model chunk on a rank, and its work for one microbatch.

    params: trained parameters, in order. other_bytes: bytes of frozen parameters and module buffers. saved: maps a kind
    of module to the bytes that a microbatch saves for backward. quantized_bytes: bytes of experts' weights in 8 bits.
    """

    params: tuple[ParamSize, ...] = ()
    other_bytes: int = 0
    saved: Mapping[str, int] = field(default_factory=dict)
    work: PartWork = field(default_factory=PartWork)
    quantized_bytes: int = 0

    @cached_property
    def weights(self) -> dict[bool, tuple[int, int]]:
        """Bytes of parameters and bytes of gradients, without padding, for experts (True) and dense layers (False)."""
        found: dict[bool, tuple[int, int]] = {}
        for param in self.params:
            params, grads = found.get(param.buffer.is_expert, (0, 0))
            param_size, grad_size = param.buffer.param_dtype.itemsize, param.buffer.grad_dtype.itemsize
            found[param.buffer.is_expert] = params + param.numel * param_size, grads + param.numel * grad_size
        return found

    def scaled(self, scale: Scale) -> "PartCost":
        """Scales the memory and work of the part to a similar layout."""
        params = tuple(
            replace(param, numel=_scaled(param.numel, scale.experts)) if param.buffer.is_expert else param
            for param in self.params
        )
        saved = {kind: _scaled(size, scale.samples) for kind, size in self.saved.items()}
        quantized = _scaled(self.quantized_bytes, scale.experts)
        return PartCost(params, self.other_bytes, saved, self.work.scaled(scale), quantized)


@dataclass(frozen=True)
class StaticRows:
    """Rows of static expert buffers. max_rows: rows of a buffer. balanced: rows received under balanced routing."""

    max_rows: int
    balanced: int


@dataclass(frozen=True)
class StepWork:
    """Work of a rank that occurs once per step.

    update: the optimizer's kernels, for state_bytes bytes of states. tied: messages for an embedding shared by the
    first and the last stage. traffic: other messages, except data-parallel reductions and gathers, which depend on the
    buckets of a stage.
    """

    update: Kernels = field(default_factory=Kernels)
    state_bytes: int = 0
    tied: tuple[Traffic, ...] = ()
    traffic: tuple[Traffic, ...] = ()


@dataclass(frozen=True)
class ModelCosts:
    """Costs of one rank's model in a layout, by part.

    embedding: the first chunk's embedding. embedding_copy: the last chunk's copy of the embedding, empty without one.
    end: final norm, multi-token prediction layers and output layer. chunk: costs that occur once per chunk. rows: sizes
    of the static expert buffers; None if experts are dropless. Without a pipeline, the end's work includes that of the
    embedding.
    """

    config: TransformerConfig
    embedding: PartCost
    embedding_copy: PartCost
    layers: Mapping[LayerKind, PartCost]
    end: PartCost
    chunk: PartCost
    mtp_expert_layers: int
    rows: StaticRows | None
    step: StepWork = field(default_factory=StepWork)

    def chunk_parts(self, layers: Sequence[LayerKind], *, is_first: bool, is_last: bool) -> list[PartCost]:
        """Returns the costs of a chunk's parts, in the order of its parameters. layers: kinds of the chunk's layers."""
        # A pipeline of one stage has no copy of the embedding.
        start = [self.embedding] if is_first else [self.embedding_copy] if is_last else []
        return [*start, *(self.layers[kind] for kind in layers), *([self.end] if is_last else []), self.chunk]

    def scaled(self, scale: Scale) -> "ModelCosts":
        """Scales the costs to a similar layout. Approximate, because some saved tensors scale with neither factor."""
        rows = self.rows
        if rows is not None:
            rows = StaticRows(_scaled(rows.max_rows, scale.samples), _scaled(rows.balanced, scale.samples))
        return replace(
            self,
            embedding=self.embedding.scaled(scale),
            layers={kind: part.scaled(scale) for kind, part in self.layers.items()},
            end=self.end.scaled(scale),
            chunk=self.chunk.scaled(scale),
            rows=rows,
        )


def total_work(parts: Iterable[PartWork]) -> PartWork:
    """Adds up the work of several parts."""
    forward, backward, recompute, once, weights = (KernelCounts() for _ in range(5))
    traffic: list[Traffic] = []
    for part in parts:
        forward.update(part.forward)
        backward.update(part.backward)
        recompute.update(part.recompute)
        once.update(part.once)
        weights.update(part.weights)
        traffic += part.traffic
    return PartWork(forward, backward, recompute, merged(traffic), once, weights)


def kernels_of(counts: KernelCounts) -> Kernels:
    """Converts kernels to a plan's format, which does not separate the bytes of weights."""
    found = Kernels()
    for one, number in counts.items():
        found[one.kernel] += number
    return found


def _scaled(number: int, factor: Fraction) -> int:
    return number * factor.numerator // factor.denominator


def layer_kinds(config: TransformerConfig) -> list[LayerKind]:
    """Returns the kind of each layer in the model, in order, excluding multi-token prediction layers."""
    experts = layers_with_experts(config.num_moe_experts, config.moe_layer_freq, num_layers=config.num_layers)
    return [
        LayerKind(
            bool(has),
            config.window_of_layer(number) is not None,
            bool(has) and config.block_format_of(number) is not None,
        )
        for number, has in enumerate(experts, start=1)
    ]


def distinct_kinds(config: TransformerConfig) -> list[LayerKind]:
    """Returns each kind of layer once, ending with the last layer's kind, which multi-token prediction layers share."""
    every = layer_kinds(config)
    return [*(kind for kind in dict.fromkeys(every) if kind != every[-1]), every[-1]]


def probe_config(run_config: RunConfig, pattern: Sequence[LayerKind], *, has_all_replicas: bool = False) -> RunConfig:
    """Returns the settings of a short model with layers of these kinds.

    The short run uses the fewest ranks that the layout allows, or all data-parallel ranks (has_all_replicas). If the
    run has a pipeline, the short run has two stages with one chunk each, of which the first contains only the
    embedding.
    """
    transformer = run_config.transformer
    changed: dict[str, Any] = {"num_layers": len(pattern), "ddp_debug": False}
    if transformer.num_moe_experts is not None:
        changed["moe_layer_freq"] = [int(kind.has_experts) for kind in pattern]
    if transformer.window_size is not None:
        changed["window_attn_skip_freq"] = [int(kind.has_window) for kind in pattern]
    if transformer.first_last_layers_bf16:
        # Experts in bf16 are those of the model's first and last layers, so their kinds are also first or last.
        in_8_bits = [number for number, kind in enumerate(pattern) if kind.is_in_8_bits] or [len(pattern)]
        changed["num_layers_at_start_in_bf16"] = in_8_bits[0]
        changed["num_layers_at_end_in_bf16"] = max(0, len(pattern) - 1 - in_8_bits[-1])
    if run_config.gpt.position_embedding_type == "rope":
        # Long tables take time to compute, so _chunk_cost scales their size instead.
        changed["max_position_embeddings"] = run_config.data.seq_length
    if transformer.recompute_num_layers is not None:
        changed["recompute_num_layers"] = min(transformer.recompute_num_layers, len(pattern))
    stages = min(2, transformer.pipeline_model_parallel_size)
    further = "m" * (transformer.mtp_num_layers or 0)
    tp, cp = transformer.tensor_model_parallel_size, transformer.context_parallel_size
    of_stage = run_config.launch.world_size // transformer.pipeline_model_parallel_size
    expert_ranks = transformer.expert_model_parallel_size * transformer.expert_tensor_parallel_size
    world_size = stages * (of_stage if has_all_replicas else math.lcm(tp * cp, expert_ranks))
    data_parallel_size = world_size // (stages * tp * cp)
    return run_config.changed(
        **changed,
        pipeline_model_parallel_layout=f"E|{'t' * len(pattern)}{further}L" if stages > 1 else None,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=None,
        pipeline_schedule=ScheduleKind.ONE_F_ONE_B.value,
        decoder_first_pipeline_num_layers=None,
        decoder_last_pipeline_num_layers=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        world_size=world_size,
        data_parallel_size=data_parallel_size,
        num_distributed_optimizer_instances=1,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
        global_batch_size=run_config.training.micro_batch_size * data_parallel_size,
    )


def measure_memory(
    run_config: RunConfig,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step: ForwardStep,
    of_each_kind: int = 2,
) -> ModelCosts:
    """Builds a short model of the run on the meta device, and returns the bytes of each part, without work.

    of_each_kind: number of layers of each kind to build. Two layers separate tensors saved once per chunk from tensors
    saved per layer; one layer is faster. Raises ValueError as the run would for a layer that cannot be built, and for
    models other than GPTModel.
    """
    run_config = with_planned_device(run_config)
    kinds = distinct_kinds(run_config.transformer)
    probe = with_known_rows(probe_config(run_config, [kind for kind in kinds for _ in range(of_each_kind)]))
    parts: dict[str, PartCost] = {}
    for stage, rank in enumerate(ranks_of_pipeline(probe, 0)):
        with as_rank(probe, rank):
            # Wrapped in DDP, because layers save different tensors if weight gradients accumulate into buffers.
            model = build_model(model_provider, probe)[0]
            _check_is_gpt(unwrap_model(model))
            found = _parts_of(model, probe, forward_step=forward_step)
            rows = _static_rows(model, probe)
            # The last stage's embedding is a copy.
            names = {EMBEDDING: "embedding copy"} if stage > 0 else {}
            parts |= {names.get(name, name): part for name, part in found.items()}
    inner = unwrap_model(model)
    numbers = [(number + 1) * of_each_kind - 1 for number in range(len(kinds))]
    layers = {kind: parts[f"layer {number}"] for kind, number in zip(kinds, numbers, strict=True)}
    return ModelCosts(
        # Layers have their numbers in the whole model here.
        run_config.transformer,
        parts[EMBEDDING],
        parts.get("embedding copy", PartCost()),
        layers,
        parts[END],
        _chunk_cost(parts, inner, run_config=run_config, probe=probe, numbers=numbers if of_each_kind > 1 else ()),
        mtp_expert_layers=0 if inner.mtp is None else _num_expert_layers(inner.mtp),
        rows=rows,
    )


def _check_is_gpt(model: nn.Module) -> None:
    if not isinstance(model, GPTModel):
        raise ValueError(f"the model is a {type(model).__name__}: must be a GPTModel")


def _num_expert_layers(model: nn.Module) -> int:
    return sum(isinstance(part, MoELayer) for part in model.modules())


def _parts_of(model: nn.Module, run_config: RunConfig, *, forward_step: ForwardStep) -> dict[str, PartCost]:
    """Returns the bytes of each part: the embedding, each numbered layer, and the end."""
    in_fp32 = run_config.ddp.grad_reduce_in_fp32
    params: dict[str, list[ParamSize]] = {}
    other: Counter[str] = Counter()
    for name, param in model.named_parameters():
        part = part_of_name(name) or END
        if param.requires_grad:
            packs = run_config.ddp.fp8_param_gather
            flat_buffer = buffer_kind(param, grad_reduce_in_fp32=in_fp32, experts_apart=True, packs=packs)
            param_size = ParamSize(param.numel(), flat_buffer, own_bucket=param_facts(param).shared_embedding)
            params.setdefault(part, []).append(param_size)
        else:
            other[part] += param.nbytes
    for name, buffer in model.named_buffers():
        # _chunk_cost counts the tables that exist once per chunk.
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), (AuxLossRecorder, RotaryEmbedding)):
            other[part_of_name(name) or END] += buffer.nbytes
    quantized: Counter[str] = Counter()
    for name, module in unwrap_model(model).named_modules():
        if isinstance(module, GroupedMLP):
            quantized[part_of_name(name) or END] += module.quantized_bytes
    saved = saved_by(model, run_config, forward_step=forward_step).by_part
    return {
        part: PartCost(tuple(params.get(part, ())), other[part], saved.get(part, {}), quantized_bytes=quantized[part])
        for part in {EMBEDDING, END, *params, *other, *saved}
    }


def _static_rows(model: nn.Module, run_config: RunConfig) -> StaticRows | None:
    transformer = run_config.transformer
    dispatchers = [part.token_dispatcher for part in model.modules() if isinstance(part, MoELayer)]
    if not dispatchers:
        return None
    assert isinstance(dispatchers[0], MoEStaticTokenDispatcher), "a plan counts rows in static buffers"
    budget = dispatchers[0].budget
    tokens = run_config.data.seq_length * run_config.training.micro_batch_size // transformer.sequence_parts
    return StaticRows(budget.rows_of_rank(tokens), budget.balanced_live_rows(tokens))


def _chunk_cost(
    parts: Mapping[str, PartCost],
    model: nn.Module,
    *,
    run_config: RunConfig,
    probe: RunConfig,
    numbers: Sequence[int],
) -> PartCost:
    """Returns the bytes that occur once per chunk: shared buffers, and tensors that only a kind's first layer saves.

    numbers: for each kind, the number of its second layer, which is compared with the layer before it; empty if only
    one layer of each kind was built.
    """
    saved: Counter[str] = Counter()
    for number in numbers:
        first, own = parts[f"layer {number - 1}"].saved, parts[f"layer {number}"].saved
        saved.update({kind: first.get(kind, 0) - own.get(kind, 0) for kind in {**first, **own}})
    other, further = 0, run_config.transformer.mtp_num_layers or 0
    num_layers, num_built = (config.transformer.num_layers + further for config in (run_config, probe))
    for part in model.modules():
        size = sum(buffer.nbytes for buffer in part.buffers(recurse=False))
        if isinstance(part, RotaryEmbedding):
            other += size * run_config.gpt.max_position_embeddings // probe.gpt.max_position_embeddings
        elif isinstance(part, AuxLossRecorder):
            # The recorder stores tables with a row for each layer of the model, and one number.
            alone = part.backward_scale.nbytes
            other += alone + (size - alone) // num_built * num_layers
    return PartCost((), other, {kind: size for kind, size in saved.items() if size})


def measure_work(
    costs: ModelCosts,
    run_config: RunConfig,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step: ForwardStep,
    of_each_kind: int = 2,
    has_all_replicas: bool = True,
) -> ModelCosts:
    """Traces a step of a short model of the run, and adds the work of each part to the costs.

    of_each_kind: number of layers of each kind to run, of which the last one counts. One layer is faster, but its last
    backward kernels may be attributed to the part before it. has_all_replicas: whether the short run has as many
    data-parallel ranks as the run. Raises ValueError as the run would for a layer that cannot be built.
    """
    run_config = with_planned_device(run_config)
    kinds = distinct_kinds(run_config.transformer)
    pattern = [kind for kind in kinds for _ in range(of_each_kind)]
    probe = probe_config(run_config, pattern, has_all_replicas=has_all_replicas)
    # The short model has one chunk per stage.
    has_weight_passes = configured_schedule(run_config.transformer).kind is not ScheduleKind.ONE_F_ONE_B
    is_split = has_weight_passes and probe.transformer.pipeline_model_parallel_size > 1
    stages = []
    for rank in ranks_of_pipeline(probe, 0):
        with as_rank(probe, rank) as groups:
            stages.append(
                _trace_stage(probe, model_provider, forward_step=forward_step, groups=groups, is_split=is_split)
            )
    parts, step = stages[-1]
    layers = {
        kind: parts.get(f"layer {(number + 1) * of_each_kind - 1}", PartWork()) for number, kind in enumerate(kinds)
    }
    # The end receives the remainder, so that work attributed to a neighboring part remains in the sum.
    end = total_work([*parts.values(), total_work(layers[kind] for kind in pattern).times(-1)])
    is_pipeline = len(stages) > 1
    return replace(
        costs,
        embedding=replace(costs.embedding, work=total_work(stages[0][0].values()) if is_pipeline else PartWork()),
        layers={kind: replace(part, work=layers[kind]) for kind, part in costs.layers.items()},
        end=replace(costs.end, work=end),
        step=step if is_pipeline else replace(step, tied=()),
    )


def _trace_stage(
    run_config: RunConfig,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step: ForwardStep,
    groups: ProcessGroupCollection,
    is_split: bool,
) -> tuple[dict[str, PartWork], StepWork]:
    """Runs a step of one stage of the short model. Returns the work of each part, and the work once per step.

    is_split: whether the work of weight passes is measured, too.
    """
    model, optimizer, _ = build_model_and_optimizer(model_provider, run_config)
    recorder, split = (
        _PartRecorder(model[0], live_rows=live_rows(model, run_config), spans=_param_spans(model[0])) for _ in range(2)
    )
    messages = _PartMessages(groups, recorder)
    with traced_steps(
        run_config, model, optimizer=optimizer, forward_step=forward_step, groups=groups, note=noted_by(recorder, split)
    ) as traced:
        with recorder.recording():
            traced.step(1, batch=batch_of(run_config), modes=[messages])
        if is_split:
            with split.recording():
                traced.step(1, batch=batch_of(run_config), modes=[], schedule=ScheduleKind.ZB_H1)
    once = [
        one
        for one in messages.take()
        if one.phase not in (FORWARD, BACKWARD) and one.operation not in ("send", "receive")
    ]
    parts = recorder.parts(messages.of_passes)
    if is_split:
        others = split.parts({})
        parts = {name: replace(part, weights=part.backward - others[name].backward) for name, part in parts.items()}
    return parts, StepWork(
        recorder.update,
        sum(optimizer.state_bytes.values()),
        tied=tuple(one for one in once if _is_tied(one)),
        traffic=tuple(one for one in once if not _is_tied(one) and not _is_data(one)),
    )


def _is_data(one: Traffic) -> bool:
    return one.phase == PARAMS or (one.phase == GRADS and one.group in _DATA_GROUPS)


def _is_tied(one: Traffic) -> bool:
    return one.phase == GRADS and one.group in ("pp", "embd")


@dataclass(frozen=True)
class _ParamSpan:
    """Range of elements in a storage that belongs to one parameter or its gradient. shape: the parameter's shape."""

    start: int
    end: int
    is_expert: bool
    shape: tuple[int, ...]


def _param_spans(chunk: nn.Module) -> dict[int, list[_ParamSpan]]:
    """Maps the storages of a chunk's parameters and gradients to their spans, whose layouts are equal."""
    found: dict[int, list[_ParamSpan]] = {}
    for param in chunk.parameters():
        start = int(param.storage_offset())
        span = _ParamSpan(start, start + param.numel(), param_facts(param).is_expert, tuple(param.shape))
        found.setdefault(storage_id(param.untyped_storage()), []).append(span)
    assert isinstance(chunk, _BaseDataParallel), "the chunk is wrapped as in a run"
    for buffer in chunk.all_buffers:
        of_params = found.get(storage_id(buffer.param_data.untyped_storage()), [])
        found[storage_id(buffer.grad_data.untyped_storage())] = of_params
    return found


class _PartRecorder(WorkRecorder):
    """Counts the kernels of a model chunk by part. spans: maps a storage to its spans of parameters or gradients."""

    def __init__(
        self,
        model: nn.Module,
        *,
        live_rows: float,
        spans: Mapping[int, Sequence[_ParamSpan]],
    ) -> None:
        super().__init__([model], live_rows=live_rows)
        self._layers, self._spans = list(unwrap_model(model).decoder.layers), spans
        self._parts = [f"layer {number}" for number in range(len(self._layers))]
        # Maps the shape of a weight to whether it belongs to experts.
        self._shapes = {one.shape: one.is_expert for some in spans.values() for one in some}
        self._entered, self._saved_part, self._weight_bytes = 0, "", {False: 0.0, True: 0.0}
        self._counts: dict[tuple[str, str], KernelCounts] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records kernels inside the block, and counts the layers whose forward has started."""
        handles = [
            layer.register_forward_pre_hook(self._enter_layer(number))
            for number, layer in enumerate(self._layers, start=1)
        ]
        try:
            with super().recording():
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter_layer(self, number: int) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._entered = number

        return enter

    @property
    def part(self) -> str:
        """The part whose forward or backward is running."""
        if self._running or self.pass_name in (None, FORWARD):
            return part_at(self._running.name, self._entered, layers=self._parts)
        return self._saved_part

    def _count(self, func: Any, name: str, *, args: Any, kwargs: Any, result: Any) -> None:
        if name not in ROWS_OF_TABLES:
            # A tensor changed in place is read and written.
            written = args[:1] if func._schema.is_mutable else ()
            leaves = [leaf for leaf in tree_leaves((args, kwargs, written)) if isinstance(leaf, Tensor)]
            known = [leaf for leaf in leaves if storage_id(leaf.untyped_storage()) in self._spans]
            for leaf in known:
                self._weight_bytes[self._is_of_experts(leaf)] += leaf.nbytes
            results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            if name in ONCE:
                self._weight_bytes[True] = sum(leaf.nbytes for leaf in leaves)
            elif name in GROUPED or func._overloadpacket in flop_registry:
                # Grouped GEMMs may write into an argument.
                places = [*leaves, *results] if name in GROUPED else results
                self._count_gradients([] if known else places, is_grouped=name in GROUPED)
            else:
                self._count_accumulated([*leaves, *results], known)
        super()._count(func, name, args=args, kwargs=kwargs, result=result)
        self._weight_bytes = {False: 0.0, True: 0.0}

    def _count_gradients(self, results: Iterable[Tensor], *, is_grouped: bool) -> None:
        """Counts weight gradients among the results of a matrix multiplication that reads no weight.

        A result with a weight's shape, or with one matrix per expert, is a gradient.
        """
        for leaf in results:
            if is_grouped and leaf.dim() == 3:
                self._weight_bytes[True] += leaf.nbytes
            elif not is_grouped and tuple(leaf.shape) in self._shapes:
                self._weight_bytes[self._shapes[tuple(leaf.shape)]] += leaf.nbytes

    def _count_accumulated(self, leaves: Iterable[Tensor], known: Sequence[Tensor]) -> None:
        """Counts the gradients that an operator accumulates into a buffer, identified by the shapes of its weights."""
        shapes = {tuple(leaf.shape): self._is_of_experts(leaf) for leaf in known}
        for leaf in leaves:
            if tuple(leaf.shape) in shapes and storage_id(leaf.untyped_storage()) not in self._spans:
                self._weight_bytes[shapes[tuple(leaf.shape)]] += leaf.nbytes

    def _is_of_experts(self, leaf: Tensor) -> bool:
        start = leaf.storage_offset()
        spans = self._spans[storage_id(leaf.untyped_storage())]
        return any(one.is_expert for one in spans if one.start <= start < one.end)

    def _add(self, kernel: Kernel, *, is_once: bool) -> None:
        """Counts a kernel in total and for the active part. Kernels that run once per step count for the part alone."""
        name = self.pass_name
        if not is_once:
            super()._add(kernel, is_once=False)
        if name is not None:
            counts = self._counts.setdefault((self.part, _ONCE if is_once else name), KernelCounts())
            counts[CountedKernel(kernel, self._weight_bytes[False], self._weight_bytes[True])] += 1

    def _pack(self, tensor: Tensor) -> Any:
        return self.part, super()._pack(tensor)

    def _unpack(self, kept: Any) -> Tensor:
        self._saved_part, packed = kept
        return super()._unpack(packed)

    def parts(self, messages: Mapping[str, Sequence[Traffic]]) -> dict[str, PartWork]:
        """Returns the recorded work of each part. messages: messages of each part."""
        names = {part for part, _ in self._counts} | {*messages}

        def counts(part: str, name: str) -> KernelCounts:
            return self._counts.get((part, name), KernelCounts())

        return {
            part: PartWork(
                counts(part, FORWARD),
                counts(part, BACKWARD),
                counts(part, RECOMPUTE),
                merged(messages.get(part, ())),
                counts(part, _ONCE),
            )
            for part in sorted(names)
        }


class _PartMessages(MessageRecorder):
    """Records messages, and attributes those sent in forward or backward to the active part."""

    def __init__(self, groups: ProcessGroupCollection, recorder: _PartRecorder) -> None:
        super().__init__(groups)
        self._recorder = recorder
        self.of_passes: dict[str, list[Traffic]] = {}

    def _note(self, name: str, args: Sequence[Any]) -> None:
        before = len(self._messages)
        super()._note(name, args)
        new = [one for one in self._messages[before:] if one.phase in (FORWARD, BACKWARD)]
        self.of_passes.setdefault(self._recorder.part, []).extend(new)
