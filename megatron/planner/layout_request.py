"""From the words of a command line to what layouts are compared for: what the user has fixed, and what is left open."""

import argparse
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.datasets.data_config import DataConfig
from megatron.core.pipeline_split import layers_per_part
from megatron.planner.layer_facts import layer_kinds
from megatron.planner.layer_flops import layer_flops
from megatron.planner.layout_space import Recompute, Space
from megatron.planner.quick_plan import check_counted
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.command_line.config_builder import config_from_args
from megatron.training.command_line.errors import CommandLineError
from megatron.training.command_line.flags import flag_table
from megatron.training.command_line.parser import build_parser
from megatron.training.setup import setup_tokenizer

# Sequences of a step for each GPU where the user says nothing: large runs have about as many.
_SAMPLES_PER_GPU = 8
_SEQ_LENGTH = 4096
_SIZES = {
    "tensor": "tensor_model_parallel_size",
    "stages": "pipeline_model_parallel_size",
    "context": "context_parallel_size",
    "expert": "expert_model_parallel_size",
    "expert_tensor": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size",
}
_CUTS = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
# What the user has said of these is not varied, whatever it is.
_AS_GIVEN = {
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


@dataclass(frozen=True)
class Request:
    """words: the flags of every layout, without those that choose one. args: what they come to on one rank, validated.

    assumed: the words that the user did not give.
    """

    words: tuple[str, ...]
    args: argparse.Namespace
    space: Space
    assumed: tuple[str, ...]


def read_request(words: Sequence[str], *, world_size: int, devices_per_node: int) -> Request:
    """Returns what a pretrain_gpt.py command line leaves open. Raises CommandLineError for invalid words."""
    given = _given(words)
    parsed = parse_args(argv=list(words))
    assumed = _assumed(parsed, given=given, world_size=world_size)
    every = [*words, *assumed]
    args = _alone(parse_args(argv=every))
    check_counted(args)
    setup_tokenizer(args)  # which says how large the vocabulary is
    fixed: dict[str, Any] = {name: vars(parsed)[dest] for name, dest in _SIZES.items() if dest in given}
    fixed |= {name: None for name, dests in _AS_GIVEN.items() if given & set(dests)}
    cuts = [name for name in _CUTS if name in given]
    if cuts:
        fixed |= _fixed_cut(every, fixed, flag=f"--{cuts[0].replace('_', '-')}")
    kinds = layer_kinds(args)
    flops, end = layer_flops(args, kinds)
    space = Space(
        world_size,
        num_layers=args.num_layers,
        num_heads=args.num_attention_heads,
        num_experts=args.num_experts,
        seq_length=args.seq_length,
        global_batch=args.global_batch_size,
        devices_per_node=devices_per_node,
        layer_costs=tuple(flops[kind] for kind in kinds),
        end_cost=end,
        recompute_modules=recompute_modules(args),
        further_layers=args.mtp_num_layers or 0,
        fixed=fixed,
    )
    return Request(tuple(every), args, space, tuple(assumed))


def _given(words: Sequence[str]) -> set[str]:
    """Names in the arguments of the flags that are among the words, whatever their values."""
    parser, *_ = build_parser(flag_table(), None)
    unset = object()
    names = [action.dest for action in parser._actions]
    found, _ = parser.parse_known_args(list(words), argparse.Namespace(**dict.fromkeys(names, unset)))
    return {name for name in names if vars(found).get(name, unset) is not unset}


def _assumed(args: argparse.Namespace, *, given: set[str], world_size: int) -> list[str]:
    """Returns flags that a run needs and the user did not give."""
    longest = args.max_position_embeddings or _SEQ_LENGTH
    wanted: Mapping[str, tuple[bool, tuple[str, ...]]] = {
        "bf16": (not (args.bf16 or args.fp16), ()),
        "seq_length": (args.seq_length is None, (str(min(_SEQ_LENGTH, longest)),)),
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
        "moe_token_dispatcher_type": (
            args.num_experts is not None and "moe_token_dispatcher_type" not in given,
            ("alltoall",),
        ),
    }
    return [
        word
        for name, (is_missing, values) in wanted.items()
        if is_missing and name not in given
        for word in (f"--{name.replace('_', '-')}", *values)
    ]


def _alone(args: argparse.Namespace, *, stages: int = 1) -> argparse.Namespace:
    """Validated for as few ranks as the stages need: what is wrong apart from layouts is found here."""
    args = copy.copy(args)
    for dest in _SIZES.values():
        vars(args)[dest] = 1
    args.pipeline_model_parallel_size = args.world_size = stages
    if stages == 1:
        vars(args).update({name: False if name.startswith("account") else None for name in _CUTS})
    args.sequence_parallel = False
    return validate_args(args)


def _fixed_cut(words: Sequence[str], fixed: Mapping[str, Any], *, flag: str) -> dict[str, Any]:
    if "stages" not in fixed:
        raise CommandLineError(f"{flag} is given: give --pipeline-model-parallel-size as well, or drop it")
    args = _alone(parse_args(argv=list(words)), stages=fixed["stages"])
    counts = layers_per_part(core_transformer_config_from_args(args), num_layers=args.num_layers)
    return {"counts": tuple(counts), "chunks": args.virtual_pipeline_model_parallel_size or 1}


def recompute_modules(args: argparse.Namespace) -> dict[Recompute, tuple[str, ...]]:
    """Returns the parts of this model's layers that each choice recomputes."""
    has_dense = any(not kind.has_experts for kind in layer_kinds(args))
    cheap = {
        "layernorm": True,
        "moe_act": args.num_experts is not None and args.moe_grouped_gemm,
        "mla_up_proj": args.multi_latent_attention,
    }
    whole = {"mlp": has_dense, "moe": args.num_experts is not None}
    return {
        Recompute.CHEAP: tuple(name for name, there in cheap.items() if there),
        Recompute.FEED_FORWARD: tuple(name for name, there in whole.items() if there),
    }
