"""Enumerates the layouts in which a model can be trained on a number of GPUs, and their flags.

layout_search.py estimates their memory and time. The rules in this file only shorten the list, which still includes
layouts that the run's checks reject.
"""

import argparse
import copy
import enum
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from functools import lru_cache
from itertools import product
from typing import Any

from megatron.core.datasets.data_config import DataConfig
from megatron.core.model_parallel_config import ExpertOverlapConfig, ModelParallelConfig
from megatron.core.pipeline_parallel.schedule import ONE_F_ONE_B, Schedule, ScheduleKind, configured_schedule
from megatron.core.pipeline_placement import V_SCHEDULES
from megatron.core.transformer.pipeline_split import layers_per_part
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planner.layer_costs import LayerKind, layer_kinds
from megatron.planner.stage_costs import check_counted
from megatron.training.arguments import parse_args, validate_args
from megatron.training.command_line.config_builder import config_from_args, run_config_of
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import flag_table
from megatron.training.command_line.parser import COMMAND_LINE, given_arguments
from megatron.training.compute.flops import model_operations
from megatron.training.config import RunConfig
from megatron.training.setup import setup_tokenizer

# Minimum length of a rank's part of a sequence under context parallelism. Shorter parts favor tensor parallelism.
_MIN_CONTEXT_PART = 4096
_MAX_STAGES = 64
_MAX_CHUNKS = 4
_MICRO_BATCHES = (1, 2, 4, 8)
# Default number of sequences per GPU in a step, similar to large runs.
_SAMPLES_PER_GPU = 8
_DEFAULT_SEQ_LENGTH = 4096
# A backward has twice the FLOPs of a forward.
_FORWARDS_IN_TRAINING = 3
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "stages": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size",
}
_SPLIT_FLAGS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
# If the user sets one of these flags, the search does not vary the corresponding choice.
_NOT_VARIED = {
    "sequence": ("sequence_parallel",),
    "sharding": ("use_distributed_optimizer", "optimizer", "overlap_grad_reduce", "overlap_param_gather"),
    "recompute": (
        "recompute_granularity",
        "recompute_method",
        "recompute_num_layers",
        "recompute_modules",
        "recompute_activations",
        "moe_layer_recompute",
    ),
    "experts": ("moe_expert_rank_capacity_factor", "moe_paged_stash", "moe_expert_capacity_factor"),
}


class Sharding(enum.Enum):
    """States that data-parallel ranks shard."""

    NOTHING = "plain"
    STATES = "ZeRO-1"
    GRADIENTS = "ZeRO-2"


class Experts(enum.Enum):
    """Memory for expert rows: allocated per forward for the routed rows, or static buffers with a paged stash."""

    DYNAMIC = "dynamic"
    PAGED = "paged"


class Recompute(enum.Enum):
    """Parts that backward recomputes: none, cheap modules, feed-forward layers and experts, or whole layers."""

    NOTHING = "none"
    CHEAP = "cheap"
    FEED_FORWARD = "ffn"
    LAYERS = "full"


SHARDING_FLAGS: Mapping[Sharding, tuple[str, ...]] = {
    Sharding.NOTHING: (),
    Sharding.STATES: ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"),
    Sharding.GRADIENTS: ("--optimizer", "distributed_fused_adam", "--overlap-grad-reduce", "--overlap-param-gather"),
}
EXPERT_FLAGS: Mapping[Experts, tuple[str, ...]] = {
    Experts.DYNAMIC: (),
    Experts.PAGED: ("--moe-expert-rank-capacity-factor", "2", "--moe-paged-stash"),
}


@dataclass(frozen=True)
class Layout:
    """Sizes of one layout.

    counts: number of layers in each part of the pipeline, in model order. chunks: model chunks per stage. sharding,
    recompute, experts: None keeps the user's flags.
    """

    tensor: int
    stages: int
    chunks: int
    context: int
    expert: int
    expert_tensor: int
    micro_batch: int
    counts: tuple[int, ...]
    sharding: Sharding | None = None
    recompute: Recompute | None = None
    experts: Experts | None = None

    @property
    def model_ranks(self) -> int:
        """Number of ranks that process a microbatch together."""
        return self.tensor * self.stages * self.context


@dataclass(frozen=True)
class Space:
    """The model and the ranks for which layouts are compared.

    layer_costs, end_cost: relative costs of each layer and of the model's end, for an even split. recompute_modules:
    arguments of --recompute-modules by choice. further_layers: number of multi-token prediction layers. fixed: maps
    fields of Layout to their only allowed value; None means that the user's flags decide and no flags are added.
    schedule: schedule of all layouts.
    """

    world_size: int
    num_layers: int
    num_heads: int
    num_experts: int | None
    seq_length: int
    global_batch: int
    devices_per_node: int
    layer_costs: tuple[float, ...]
    end_cost: float
    recompute_modules: Mapping[Recompute, tuple[str, ...]]
    further_layers: int = 0
    fixed: Mapping[str, Any] = field(default_factory=dict)
    schedule: Schedule = ONE_F_ONE_B

    def layouts(self) -> Iterator[Layout]:
        """Yields every layout whose sizes evenly divide the ranks, batch, layers and experts."""
        for tensor, stages, context in product(self._tensor_sizes(), self._stage_sizes(), self._context_sizes()):
            if self.world_size % (tensor * stages * context):
                continue
            data = self.world_size // (tensor * stages * context)
            shardings = self._choices("sharding", self._shardings(data * context))
            for chunks, micro_batch in product(self._chunk_sizes(stages), self._micro_batches(data)):
                counts = self._counts(stages * chunks)
                if counts is None or not self._fills(stages, chunks, samples=data * micro_batch):
                    continue
                for expert, expert_tensor in self._expert_sizes(tensor, stages):
                    for sharding, (experts, recompute) in product(shardings, self._activations()):
                        yield Layout(
                            *(tensor, stages, chunks, context, expert, expert_tensor, micro_batch),
                            counts=counts,
                            sharding=sharding,
                            recompute=recompute,
                            experts=experts,
                        )

    def flags(self, layout: Layout) -> list[str]:
        """Returns the flags that select the layout, except flags that the user has set."""
        found = {
            "tensor": _size("--tensor-model-parallel-size", layout.tensor),
            "sequence": ["--sequence-parallel"] if layout.tensor > 1 else [],
            "stages": _size("--pipeline-model-parallel-size", layout.stages),
            "counts": self._split_flags(layout),
            "context": _size("--context-parallel-size", layout.context),
            "expert": _size("--expert-model-parallel-size", layout.expert),
            "expert_tensor": []
            if layout.tensor == 1 or self.num_experts is None
            else ["--expert-tensor-parallel-size", str(layout.expert_tensor)],
            "micro_batch": ["--micro-batch-size", str(layout.micro_batch)],
            "sharding": SHARDING_FLAGS[layout.sharding] if layout.sharding else (),
            "experts": EXPERT_FLAGS[layout.experts] if layout.experts else (),
            "recompute": recompute_flags(layout.recompute, self.recompute_modules.get(layout.recompute, ()))
            if layout.recompute
            else (),
        }
        return [word for name, words in found.items() if name not in self.fixed for word in words]

    def _split_flags(self, layout: Layout) -> list[str]:
        if layout.stages == 1:
            return []
        if len(set(layout.counts)) == 1:
            # A V has two chunks without a flag.
            is_flagged = layout.chunks > 1 and not self._is_v
            return ["--num-virtual-stages-per-pipeline-rank", str(layout.chunks)] if is_flagged else []
        return ["--pipeline-model-parallel-layout", layout_text(layout.counts, further_layers=self.further_layers)]

    def _counts(self, parts: int) -> tuple[int, ...] | None:
        given = self.fixed.get("counts")
        if isinstance(given, tuple):
            return given if len(given) == parts else None
        return even_parts(self.layer_costs, end_cost=self.end_cost, parts=parts)

    def _choices(self, name: str, usual: Sequence[Any]) -> Sequence[Any]:
        return [self.fixed[name]] if name in self.fixed else usual

    def _sizes(self, name: str, usual: Sequence[int]) -> list[int]:
        return [int(size) for size in self._choices(name, usual)]

    def _tensor_sizes(self) -> list[int]:
        largest = min(self.devices_per_node, self.num_heads)
        return self._sizes("tensor", [size for size in powers_of_2(largest) if self.num_heads % size == 0])

    def _stage_sizes(self) -> list[int]:
        largest = min(self.num_layers, _MAX_STAGES)
        return self._sizes("stages", [n for n in range(1, largest + 1) if self.world_size % n == 0])

    def _context_sizes(self) -> list[int]:
        return self._sizes("context", powers_of_2(max(1, self.seq_length // _MIN_CONTEXT_PART)))

    def _chunk_sizes(self, stages: int) -> list[int]:
        if stages == 1:
            return self._sizes("chunks", [1])
        if self._is_v:
            return [2] if self.num_layers >= 2 * stages else []
        most = 1 if self.schedule.kind is ScheduleKind.ZB_H1 else min(_MAX_CHUNKS, self.num_layers // stages)
        return self._sizes("chunks", powers_of_2(most))

    @property
    def _is_v(self) -> bool:
        return self.schedule.kind.value in V_SCHEDULES

    def _micro_batches(self, data: int) -> list[int]:
        sizes = self._sizes("micro_batch", _MICRO_BATCHES)
        return [size for size in sizes if self.global_batch % (size * data) == 0]

    def _fills(self, stages: int, chunks: int, *, samples: int) -> bool:
        # With fewer microbatches than stages, some stages are always idle.
        return self.global_batch // samples >= stages or chunks == 1

    def _expert_sizes(self, tensor: int, stages: int) -> list[tuple[int, int]]:
        if self.num_experts is None:
            return [(1, tensor)]
        divisors = [n for n in range(1, self.num_experts + 1) if self.num_experts % n == 0]
        pairs = product(self._sizes("expert", divisors), self._sizes("expert_tensor", sorted({1, tensor})))
        return [(expert, own) for expert, own in pairs if self.world_size % (expert * own * stages) == 0]

    def _shardings(self, ranks: int) -> list[Sharding]:
        # With several ranks, unsharded states use more memory without saving communication.
        return [Sharding.STATES, Sharding.GRADIENTS] if ranks > 1 else [Sharding.NOTHING]

    def _activations(self) -> Iterator[tuple[Any, Any]]:
        experts = self._choices("experts", [*Experts] if self.num_experts else [None])
        recompute = self._choices("recompute", [Recompute.NOTHING, *self.recompute_modules, Recompute.LAYERS])
        for pair in product(experts, recompute):
            # These choices recompute all tensors that a stash would store.
            if not (pair[0] is Experts.PAGED and pair[1] in (Recompute.FEED_FORWARD, Recompute.LAYERS)):
                yield pair


@dataclass(frozen=True)
class Request:
    """A command line without a layout.

    words: flags common to all layouts. run_config: their settings on one rank. assumed: required words that the
    user did not give and that were added.
    """

    words: tuple[str, ...]
    run_config: RunConfig
    space: Space
    assumed: tuple[str, ...]


def read_request(words: Sequence[str], *, world_size: int, devices_per_node: int) -> Request:
    """Parses a pretrain_gpt.py command line without a layout. Raises CommandLineError for invalid words."""
    parsed = parse_args(argv=list(words))
    if parsed.hierarchical_context_parallel_sizes is not None:
        raise CommandLineError(
            f"--hierarchical-context-parallel-sizes is {parsed.hierarchical_context_parallel_sizes}: the search "
            "supports only one level of context parallelism; drop it, or use --dry-run"
        )
    given = {name for name, source in given_arguments(parsed).items() if source == COMMAND_LINE}
    assumed = _assumed(parsed, given=given, world_size=world_size)
    completed = _with_assumed(parsed, assumed)
    run_config = _on_one_rank_per_stage(completed)
    check_counted(run_config)
    setup_tokenizer(run_config)  # sets the size of the vocabulary
    added = [word for name, value in assumed.items() for word in (f"--{name.replace('_', '-')}", *value)]
    space = _space_of(
        run_config,
        world_size=world_size,
        devices_per_node=devices_per_node,
        fixed={**_fixed_choices(completed, given), **_fixed_split(completed, given)},
        schedule=configured_schedule(config_from_args(ModelParallelConfig, completed)),
    )
    return Request((*words, *added), run_config, space, tuple(added))


def _assumed(args: argparse.Namespace, *, given: Set[str], world_size: int) -> dict[str, tuple[str, ...]]:
    """Returns assumed values, as words, of the arguments that a run requires and that the user did not give."""
    longest = args.max_position_embeddings or _DEFAULT_SEQ_LENGTH
    wanted: Mapping[str, tuple[bool, tuple[str, ...]]] = {
        "bf16": (not (args.bf16 or args.fp16), ()),
        "seq_length": (args.seq_length is None, (str(min(_DEFAULT_SEQ_LENGTH, longest)),)),
        "global_batch_size": (
            args.global_batch_size is None and args.step_batch_size_schedule is None,
            (str(_SAMPLES_PER_GPU * world_size),),
        ),
        "lr": (args.lr is None, ("3e-4",)),
        "train_iters": (args.train_iters is None and args.train_samples is None, ("1000",)),
        "mock_data": (not config_from_args(DataConfig, args).names_data(), ()),
        "tokenizer_type": (
            args.tokenizer_type is None and args.vocab_file is None and args.tokenizer_model is None,
            ("NullTokenizer",),
        ),
        "moe_grouped_gemm": (args.num_experts is not None and not args.moe_grouped_gemm, ()),
        "moe_token_dispatcher_type": (args.num_experts is not None, ("alltoall",)),
    }
    return {name: value for name, (is_missing, value) in wanted.items() if is_missing and name not in given}


def _with_assumed(args: argparse.Namespace, assumed: Mapping[str, tuple[str, ...]]) -> argparse.Namespace:
    """Returns the arguments as if the command line had also contained the assumed values."""
    args, flags = copy.copy(args), flag_table().by_dest
    for name, value in assumed.items():
        setattr(args, name, flags[name].value_of_word(value[0]) if value else flags[name].constant)
    args.given = {**given_arguments(args), **dict.fromkeys(assumed, COMMAND_LINE)}
    return args


def _on_one_rank_per_stage(args: argparse.Namespace, *, stages: int = 1) -> RunConfig:
    """Validates the arguments for one rank per stage, to report errors that do not depend on the layout."""
    args = copy.copy(args)
    for name in _SIZES.values():
        setattr(args, name, 1)
    args.pipeline_model_parallel_size = args.world_size = stages
    if stages == 1:
        for name in _SPLIT_FLAGS:
            setattr(args, name, False if name.startswith("account") else None)
    # These flags require several ranks.
    args.sequence_parallel = False
    for one in fields(ExpertOverlapConfig):
        setattr(args, one.name, False)
    if args.pipeline_schedule == ScheduleKind.DUALPIPEV.value:
        # The same chunks, without exchanges that overlap.
        args.pipeline_schedule = ScheduleKind.ZBV.value
    return run_config_of(validate_args(args))


def _fixed_choices(args: argparse.Namespace, given: Set[str]) -> dict[str, Any]:
    """Returns the sizes that the command line gives, and None for each choice that it determines otherwise."""
    fixed: dict[str, Any] = {name: getattr(args, flag) for name, flag in _SIZES.items() if flag in given}
    return fixed | {name: None for name, flags in _NOT_VARIED.items() if given & set(flags)}


def _fixed_split(args: argparse.Namespace, given: Set[str]) -> dict[str, Any]:
    """Returns the split of the layers that the command line gives, if any."""
    flags = [name for name in _SPLIT_FLAGS if name in given]
    if not flags:
        return {}
    if _SIZES["stages"] not in given:
        flag = f"--{flags[0].replace('_', '-')}"
        raise CommandLineError(f"{flag} is given: give --pipeline-model-parallel-size as well, or drop it")
    transformer = _on_one_rank_per_stage(args, stages=args.pipeline_model_parallel_size).transformer
    counts = layers_per_part(transformer, num_layers=transformer.num_layers)
    return {"counts": tuple(counts), "chunks": transformer.virtual_pipeline_model_parallel_size or 1}


def _space_of(
    run_config: RunConfig, *, world_size: int, devices_per_node: int, fixed: Mapping[str, Any], schedule: Schedule
) -> Space:
    kinds = layer_kinds(run_config.transformer)
    transformer = run_config.transformer
    flops, end = layer_flops(run_config, kinds)
    return Space(
        world_size,
        num_layers=transformer.num_layers,
        num_heads=transformer.num_attention_heads,
        num_experts=transformer.num_moe_experts,
        seq_length=run_config.data.seq_length,
        global_batch=run_config.batch_sizes().schedule.final_size,
        devices_per_node=devices_per_node,
        layer_costs=tuple(flops[kind] for kind in kinds),
        end_cost=end,
        recompute_modules=recompute_modules(transformer),
        further_layers=transformer.mtp_num_layers or 0,
        fixed=fixed,
        schedule=schedule,
    )


def recompute_modules(config: TransformerConfig) -> dict[Recompute, tuple[str, ...]]:
    """Returns, for each choice, the modules of this model that it recomputes."""
    has_dense = any(not kind.has_experts for kind in layer_kinds(config))
    cheap = {
        "layernorm": True,
        "mla_up_proj": config.multi_latent_attention,
    }
    whole = {"mlp": has_dense, "moe": config.num_moe_experts is not None}
    return {
        Recompute.CHEAP: tuple(name for name, there in cheap.items() if there),
        Recompute.FEED_FORWARD: tuple(name for name, there in whole.items() if there),
    }


def layer_flops(run_config: RunConfig, kinds: Sequence[LayerKind]) -> tuple[dict[LayerKind, float], float]:
    """Returns the forward FLOPs of one sample in each kind of layer and in the model's end.

    The end includes multi-token prediction.
    """
    found = {
        kind: _forward_flops(run_config, [kind, kind]) - _forward_flops(run_config, [kind])
        for kind in dict.fromkeys(kinds)
    }
    with_end = _forward_flops(run_config, [kinds[-1]], mtp_num_layers=run_config.transformer.mtp_num_layers)
    return found, with_end - found[kinds[-1]]


def _forward_flops(run_config: RunConfig, kinds: Sequence[LayerKind], *, mtp_num_layers: int | None = None) -> float:
    # Changed without checks, because other settings, such as the number of recomputed layers, are for the whole model.
    config = copy.copy(run_config.transformer)
    # Without LoRA, because the forward has a third of the FLOPs only if all weights are trained.
    config.num_layers, config.mtp_num_layers, config.lora_rank = len(kinds), mtp_num_layers, None
    if config.num_moe_experts is not None:
        config.moe_layer_freq = [int(kind.has_experts) for kind in kinds]
    tokens = run_config.data.seq_length
    operations = model_operations(
        config, vocab_size=run_config.gpt.padded_vocab_size, seq_length=tokens, tokens=tokens, scored=tokens
    )
    return operations / _FORWARDS_IN_TRAINING


def _size(flag: str, size: int) -> list[str]:
    return [flag, str(size)] if size > 1 else []


def recompute_flags(choice: Recompute, modules: Sequence[str]) -> tuple[str, ...]:
    """Returns the flags of a recompute choice. modules: recomputed modules, for CHEAP and FEED_FORWARD."""
    if choice is Recompute.NOTHING:
        return ()
    if choice is Recompute.LAYERS:
        return ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
    return ("--recompute-granularity", "selective", "--recompute-modules", *modules)


def layout_text(counts: Sequence[int], *, further_layers: int) -> str:
    """Formats a split for --pipeline-model-parallel-layout. further_layers: number of multi-token prediction layers."""
    parts = [f"{'t' * count}" for count in counts]
    parts[0], parts[-1] = "E" + parts[0], parts[-1] + "m" * further_layers + "L"
    words: list[tuple[str, int]] = []
    for part in parts:
        if words and words[-1][0] == part:
            words[-1] = (part, words[-1][1] + 1)
        else:
            words.append((part, 1))
    return "|".join("|".join([part] * times) if times <= 2 else f"({part}|)*{times - 1}{part}" for part, times in words)


def powers_of_2(largest: int) -> list[int]:
    """Returns the powers 1, 2, 4 and so on up to `largest`."""
    return [1 << power for power in range(largest.bit_length())]


@lru_cache(maxsize=256)
def even_parts(costs: tuple[float, ...], *, end_cost: float, parts: int) -> tuple[int, ...] | None:
    """Splits layers into consecutive parts with the smallest maximum cost, and returns the number of layers per part.

    costs: cost of each layer. end_cost: additional cost of the last part, which may contain no layer. The parts before
    the last are also as even as possible. Among equal splits, early parts receive fewer layers, because they hold
    activations longest. Returns None if there are too few layers.
    """
    if parts == 1:
        return (len(costs),)
    if len(costs) < parts - 1:
        return None
    limit = _least_limit(costs, end_cost=end_cost, parts=parts)
    if len(costs) % parts == 0:
        equal = (len(costs) // parts,) * parts
        # Equal parts need no layout flag.
        if _costliest(costs, equal, end_cost=end_cost) <= limit:
            return equal
    filled = _filled(costs, limit, end_cost=end_cost, parts=parts)
    assert filled is not None, "the least limit is feasible"
    first = len(costs) - filled[-1]
    # The end alone may cost more than any part. The parts before the end are still split evenly.
    inner = costs[:first]
    before = _filled(inner, _least_limit(inner, end_cost=0.0, parts=parts - 1), end_cost=0.0, parts=parts - 1)
    assert before is not None, "each part before the last has a layer"
    return (*before, filled[-1])


def _least_limit(costs: Sequence[float], *, end_cost: float, parts: int) -> float:
    low, high = max([end_cost, *costs]), sum(costs) + end_cost
    if _filled(costs, low, end_cost=end_cost, parts=parts) is not None:
        return low
    for _ in range(50):
        middle = (low + high) / 2
        fits = _filled(costs, middle, end_cost=end_cost, parts=parts) is not None
        low, high = (low, middle) if fits else (middle, high)
    # Allows for rounding errors in the sums.
    return high * (1 + 1e-9)


def _costliest(costs: Sequence[float], counts: Sequence[int], *, end_cost: float) -> float:
    sums, first = [], 0
    for count in counts:
        sums.append(sum(costs[first : first + count]))
        first += count
    sums[-1] += end_cost
    return max(sums)


def _filled(costs: Sequence[float], limit: float, *, end_cost: float, parts: int) -> tuple[int, ...] | None:
    """Fills parts with layers up to the cost `limit`, from the last part to the first.

    Returns the number of layers per part, or None if some layers fit into no part.
    """
    counts, left, room = [], len(costs), limit - end_cost
    for part in reversed(range(parts)):
        count = 0
        # Each earlier part needs a layer.
        while left - count > part and costs[left - count - 1] <= room:
            room -= costs[left - count - 1]
            count += 1
        if count == 0 and part < parts - 1:
            return None
        counts.append(count)
        left, room = left - count, limit
    return tuple(reversed(counts)) if left == 0 else None
