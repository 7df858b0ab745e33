"""Costs of each kind of layer on a rank, found once by building a short model of them without memory.

The code of the run builds it, as for a dry run (plan.py); how layers add up to stages is stage_memory.py's.
"""

import argparse
import copy
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor, nn

from megatron.core.distributed.param_and_grad_buffer import BufferKind, buffer_kind
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.param_attributes import param_facts
from megatron.core.transformer.attention_config import AttentionConfig
from megatron.core.transformer.moe.aux_losses import AuxLossRecorder
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher
from megatron.core.transformer.moe.moe_config import layers_with_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.rope import RotaryEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import get_model_config, unwrap_model
from megatron.planner.activations import kind_of_module
from megatron.planner.plan import ForwardStep, as_rank, pipeline_of, saved_by, with_known_rows
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.setup import get_model

_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\b")
EMBEDDING, END = "embedding", "end"


@dataclass(frozen=True)
class LayerKind:
    """The properties in which a model's layers differ."""

    has_experts: bool = False
    has_window: bool = False


@dataclass(frozen=True)
class Place:
    """A parameter that is trained. buffer: of which flat buffer it is, if experts' are reduced apart. own_bucket: it
    shares its bucket with no other.
    """

    numel: int
    buffer: BufferKind
    own_bucket: bool = False


@dataclass(frozen=True)
class PartFacts:
    """Sizes of one part of a model chunk. params: in their order.

    other: bytes of frozen parameters and of modules' buffers. saved: bytes that a microbatch saves for backward, by
    kind.
    """

    params: tuple[Place, ...] = ()
    other: int = 0
    saved: Mapping[str, int] | None = None

    @cached_property
    def weights(self) -> dict[bool, tuple[int, int]]:
        """Bytes of parameters and of gradients, of experts and of the rest, without padding."""
        found: dict[bool, tuple[int, int]] = {}
        for place in self.params:
            params, grads = found.get(place.buffer.is_expert, (0, 0))
            dtypes = place.buffer.param_dtype, place.buffer.grad_dtype
            params, grads = params + place.numel * dtypes[0].itemsize, grads + place.numel * dtypes[1].itemsize
            found[place.buffer.is_expert] = params, grads
        return found


@dataclass(frozen=True)
class StaticRows:
    """Rows of static expert buffers. max_rows: of a buffer; balanced: received if all ranks get the same number."""

    max_rows: int
    balanced: int


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of one rank's model in a layout, by part.

    embedding: of the first chunk; copies: of the last one's own copy of it, if it has one; end: norm, layers of
    multi-token prediction and output layer; chunk: what each chunk has once. rows: None where experts are dropless.
    """

    config: TransformerConfig
    embedding: PartFacts
    copies: PartFacts
    layers: Mapping[LayerKind, PartFacts]
    end: PartFacts
    chunk: PartFacts
    mtp_expert_layers: int
    rows: StaticRows | None

    def chunk_parts(self, layers: Sequence[LayerKind], *, is_first: bool, is_last: bool) -> list[PartFacts]:
        """The parts of a chunk with these layers, in the order of its parameters."""
        # A pipeline of one stage has no second table.
        start = [self.embedding] if is_first else [self.copies] if is_last else []
        return [*start, *(self.layers[kind] for kind in layers), *([self.end] if is_last else []), self.chunk]


def layer_kinds(args: argparse.Namespace) -> list[LayerKind]:
    """Returns the kind of each layer of the model, in order, without layers of multi-token prediction."""
    experts = layers_with_experts(args.num_experts, args.moe_layer_freq, num_layers=args.num_layers)
    attention = config_from_args(AttentionConfig, args)
    windows = [attention.window_of_layer(number) is not None for number in range(1, args.num_layers + 1)]
    return [LayerKind(bool(has), window) for has, window in zip(experts, windows, strict=True)]


def distinct_kinds(args: argparse.Namespace) -> list[LayerKind]:
    """Returns each kind of layer once; the last layer's kind, which layers of multi-token prediction share, is last."""
    every = layer_kinds(args)
    return [*(kind for kind in dict.fromkeys(every) if kind != every[-1]), every[-1]]


def model_facts(
    args: argparse.Namespace,
    model_provider: Callable[..., nn.Module],
    *,
    forward_step: ForwardStep,
    of_each_kind: int = 2,
) -> ModelFacts:
    """Builds a short model of validated args without memory and returns its sizes.

    Raises ValueError as the run would for a layer that cannot be built, and for a script's model that is no GPTModel.
    of_each_kind: layers that are built; of two, the second shows what its chunk saves once for all layers, 1 is faster.
    """
    kinds = distinct_kinds(args)
    probe = with_known_rows(probe_args(args, [kind for kind in kinds for _ in range(of_each_kind)]))
    pipeline = pipeline_of(probe, 0)
    parts: dict[str, PartFacts] = {}
    for stage, rank in enumerate(pipeline):
        with as_rank(probe, rank):
            # Wrapped: layers whose weight gradients are added where they are computed save other tensors.
            model = get_model(model_provider, ModelType.encoder_or_decoder, args=probe)[0]
            if not isinstance(unwrap_model(model), GPTModel):
                raise ValueError(f"the model is a {type(unwrap_model(model)).__name__}: must be a GPTModel")
            found = _parts_of(model, probe, forward_step=forward_step)
            rows = _static_rows(model, probe)
            # Short of the table that stages with an embedding share, everything is alike in all of them.
            names = {EMBEDDING: "copies"} if stage > 0 else {}
            parts |= {names.get(name, name): part for name, part in found.items()}
    inner = unwrap_model(model)
    mtp = sum(isinstance(part, MoELayer) for part in inner.mtp.modules()) if inner.mtp is not None else 0
    numbers = [(number + 1) * of_each_kind - 1 for number in range(len(kinds))]
    layers = {kind: parts[f"layer {number}"] for kind, number in zip(kinds, numbers, strict=True)}
    return ModelFacts(
        get_model_config(model),
        parts[EMBEDDING],
        parts.get("copies", PartFacts()),
        layers,
        parts[END],
        _chunk(parts, inner, args=args, probe=probe, numbers=numbers if of_each_kind > 1 else ()),
        mtp_expert_layers=mtp,
        rows=rows,
    )


def scaled_facts(facts: ModelFacts, *, experts: tuple[int, int], saved: tuple[int, int]) -> ModelFacts:
    """Scales a model's sizes to other numbers of experts and samples.

    Each rank then has experts[0] / experts[1] times as many experts, and a microbatch saves saved[0] / saved[1] times
    as much. This is approximate, as some of what is saved depends on neither.
    """

    def scaled(part: PartFacts) -> PartFacts:
        params = tuple(
            replace(place, numel=place.numel * experts[0] // experts[1]) if place.buffer.is_expert else place
            for place in part.params
        )
        kept = {kind: size * saved[0] // saved[1] for kind, size in (part.saved or {}).items()}
        return replace(part, params=params, saved=kept)

    rows = facts.rows
    if rows is not None:
        rows = StaticRows(rows.max_rows * saved[0] // saved[1], rows.balanced * saved[0] // saved[1])
    return replace(
        facts,
        embedding=scaled(facts.embedding),
        layers={kind: scaled(part) for kind, part in facts.layers.items()},
        end=scaled(facts.end),
        chunk=scaled(facts.chunk),
        rows=rows,
    )


def probe_args(
    args: argparse.Namespace, pattern: Sequence[LayerKind], *, has_all_replicas: bool = False
) -> argparse.Namespace:
    """Returns the arguments of a short model with layers of these kinds.

    It runs on as few ranks as the layout can have, or with all that share parameters. With stages the first has the
    embedding alone.
    """
    args = copy.copy(args)
    args.ddp_debug = False
    args.num_layers = len(pattern)
    if args.num_experts is not None:
        args.moe_layer_freq = [int(kind.has_experts) for kind in pattern]
    if args.window_size is not None:
        args.window_attn_skip_freq = [int(kind.has_window) for kind in pattern]
    if args.position_embedding_type == "rope":
        # Long tables take a while to compute, and their size is known.
        args.max_position_embeddings = args.seq_length
    if args.recompute_num_layers is not None:
        args.recompute_num_layers = min(args.recompute_num_layers, args.num_layers)
    stages = min(2, args.pipeline_model_parallel_size)
    further = "m" * (args.mtp_num_layers or 0)
    args.pipeline_model_parallel_layout = f"E|{'t' * len(pattern)}{further}L" if stages > 1 else None
    of_stage = args.world_size // args.pipeline_model_parallel_size
    args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size = stages, None
    args.decoder_first_pipeline_num_layers = args.decoder_last_pipeline_num_layers = None
    args.account_for_embedding_in_pipeline_split = args.account_for_loss_in_pipeline_split = False
    tp, cp = args.tensor_model_parallel_size, args.context_parallel_size
    expert_ranks = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tp)
    args.world_size = stages * (of_stage if has_all_replicas else math.lcm(tp * cp, expert_ranks))
    args.data_parallel_size = args.world_size // (stages * tp * cp)
    args.num_distributed_optimizer_instances = 1
    args.rampup_batch_size = args.step_batch_size_schedule = None
    args.global_batch_size = args.micro_batch_size * args.data_parallel_size
    return args


def _parts_of(model: nn.Module, args: argparse.Namespace, *, forward_step: ForwardStep) -> dict[str, PartFacts]:
    """Returns the sizes by part: the embedding, each layer by its number, and the end."""
    params: dict[str, list[Place]] = {}
    other: Counter[str] = Counter()
    for name, param in model.named_parameters():
        part = part_of_name(name) or END
        if param.requires_grad:
            params.setdefault(part, []).append(_place(param, args))
        else:
            other[part] += _bytes(param)
    for name, buffer in model.named_buffers():
        if not _is_of_chunk(model, name):
            other[part_of_name(name) or END] += _bytes(buffer)
    saved: dict[str, dict[str, int]] = {}
    for label, size in _saved(model, args, forward_step=forward_step).items():
        part, _, kind = label.partition(": ")
        saved.setdefault(part, {})[kind] = size
    return {
        part: PartFacts(tuple(params.get(part, ())), other[part], saved.get(part, {}))
        for part in {EMBEDDING, END, *params, *other, *saved}
    }


def _saved(model: nn.Module, args: argparse.Namespace, *, forward_step: ForwardStep) -> Counter[str]:
    """Saved bytes by "part: kind"; what is saved between two layers, as by recompute, is the later one's."""
    layers = list(unwrap_model(model).decoder.layers)
    reached = [0]
    handles = [layer.register_forward_pre_hook(lambda *_: reached.append(len(reached))) for layer in layers]

    def label(name: str) -> str:
        return f"{part_at(name, reached[-1], num_layers=len(layers))}: {kind_of_module(name)}"

    try:
        return saved_by(model, args, forward_step=forward_step, kind_of=label).by_kind
    finally:
        for handle in handles:
            handle.remove()


def part_at(name: str, entered: int, *, num_layers: int) -> str:
    """Returns the part that a module ("" outside of all) belongs to, given how many of num_layers have been entered."""
    part = part_of_name(name)
    if part is None:
        return f"layer {entered}" if entered < num_layers else END
    # The embedding of tokens further ahead.
    return END if part == EMBEDDING and entered else part


def part_of_name(name: str) -> str | None:
    """Returns the part that a module or tensor of this name belongs to; None for what is outside of the layers."""
    layer = _LAYER.search(name)
    if layer is not None:
        return f"layer {layer[1]}"
    if re.search(r"\bembedding\b", name):
        return EMBEDDING
    return END if re.search(r"\b(mtp|final_layernorm|output_layer)\b", name) else None


def _place(param: nn.Parameter, args: argparse.Namespace) -> Place:
    kind = buffer_kind(param, grad_reduce_in_fp32=not args.grad_reduce_in_bf16, experts_apart=True)
    return Place(param.numel(), kind, own_bucket=param_facts(param).shared_embedding)


def _is_of_chunk(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), (AuxLossRecorder, RotaryEmbedding))


def _chunk(
    parts: Mapping[str, PartFacts],
    model: nn.Module,
    *,
    args: argparse.Namespace,
    probe: argparse.Namespace,
    numbers: Sequence[int],
) -> PartFacts:
    """Returns the sizes that a chunk has once, whatever its layers. numbers: of the layers whose own share is known."""
    saved: Counter[str] = Counter()
    for number in numbers:
        first, own = parts[f"layer {number - 1}"].saved or {}, parts[f"layer {number}"].saved or {}
        saved.update({kind: first.get(kind, 0) - own.get(kind, 0) for kind in {**first, **own}})
    other, further = 0, args.mtp_num_layers or 0
    for part in model.modules():
        size = sum(_bytes(buffer) for buffer in part.buffers(recurse=False))
        if isinstance(part, RotaryEmbedding):
            other += size * args.max_position_embeddings // probe.max_position_embeddings
        elif isinstance(part, AuxLossRecorder):
            # Tables with a row for each layer of the model, and one number.
            alone = _bytes(part.backward_scale)
            other += alone + (size - alone) // (probe.num_layers + further) * (args.num_layers + further)
    return PartFacts((), other, {kind: size for kind, size in saved.items() if size})


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _static_rows(model: nn.Module, args: argparse.Namespace) -> StaticRows | None:
    dispatchers = [part.token_dispatcher for part in model.modules() if isinstance(part, MoELayer)]
    if not dispatchers:
        return None
    assert isinstance(dispatchers[0], MoEStaticTokenDispatcher), "a plan counts rows in buffers of a fixed size"
    budget = dispatchers[0].budget
    shared = args.context_parallel_size * (args.tensor_model_parallel_size if args.sequence_parallel else 1)
    tokens = args.seq_length * args.micro_batch_size // shared
    balanced = tokens * budget.topk * (args.expert_tensor_parallel_size or args.tensor_model_parallel_size)
    return StaticRows(budget.rows_of_rank(tokens), balanced)
