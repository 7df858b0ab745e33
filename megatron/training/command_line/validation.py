"""Completes and checks arguments of several configuration classes: sizes, layout, batches, model, schedules, launcher.

Each configuration class checks and derives its own fields when it is built, at the end of validate_args. conflicts.py
checks modes that exclude other flags.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields
from functools import partial
from typing import Any

import torch

from megatron.core.device import without_memory
from megatron.core.model_parallel_config import check_multiple
from megatron.core.num_microbatches_calculator import NumMicroBatches
from megatron.core.optimizer.optimizer_config import OptimizerConfig, check_whole_matrices
from megatron.core.parallel_state import DEFAULT_ORDER, rank_grids
from megatron.core.pipeline_placement import V_SCHEDULES
from megatron.core.transformer.moe.dispatch_flex import require_flex_backend
from megatron.core.transformer.moe_config import MoEConfig, validate_moe_layer_freq
from megatron.core.transformer.offload_config import recomputed_parts
from megatron.core.transformer.pipeline_split import num_parts_in_layout
from megatron.training.command_line.checkpoint_rules import changes_results
from megatron.training.command_line.config_builder import (
    build_areas,
    config_from_args,
    flags_named_in_errors,
    invalid_values,
    problems_of_call,
)
from megatron.training.command_line.conflicts import (
    check_expert_overlap,
    check_faults,
    check_fully_sharded,
    check_graphs,
    check_optimizer,
)
from megatron.training.command_line.errors import CommandLineError, is_first_rank
from megatron.training.command_line.flags import flag_table, flags_of_class
from megatron.training.command_line.parser import CHECKPOINT, COMMAND_LINE, given_arguments
from megatron.training.config import BatchScheduleConfig, RunConfig

_MOST_PLANNED_RANKS = 1 << 18


def validate_args(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> argparse.Namespace:
    """Completes and checks the arguments in place. defaults: values for arguments that are None.

    Raises CommandLineError (a ValueError) with one line per problem, which names the flags and the correction. Every
    rank raises the same error. After an error, the arguments must not be used.
    """
    _apply_defaults(args, defaults or {})
    invalid = invalid_values(args)
    needed = _needed(args)
    small = [name for name in needed if vars(args)[name] is None or vars(args)[name] < 1]
    problems = [*check_required(args), *(problem for name, problem in invalid.items() if name not in small)]
    replaced = _replace(args, {name: 1 if name in needed else None for name in (*invalid, *small)})
    found = _derive_and_check(args)
    # Configurations are built last, because they depend on the derived values.
    try:
        run_config = build_areas(args)
        check_flex_backend(run_config)
    except CommandLineError as error:
        found += str(error).splitlines()
    problems += [problem for problem in found if not _names_any(replaced, problem)]
    if problems:
        raise CommandLineError("\n".join(dict.fromkeys(problems)))
    for area, names in _DERIVED.items():
        run_config.write_back(area, *names)
    return args


# Fields that their classes derive, and that scripts of Megatron-LM read from the arguments.
_DERIVED = {
    "data": ("dataloader_type", "create_attention_mask_in_dataloader"),
    "tokenizer": ("tokenizer_type",),
    "transformer": ("kv_channels", "ffn_hidden_size"),
}


def _apply_defaults(args: argparse.Namespace, defaults: Mapping[str, Any]) -> None:
    """Sets arguments that are None to a script's defaults, and prints a note about other defaults that do not apply."""
    given, kept = given_arguments(args), []
    for name, value in defaults.items():
        here = vars(args).get(name)
        if here is None:
            vars(args)[name] = value
        elif here != value and changes_results(name):
            flag, source = flag_table().by_dest.get(name), given.get(name, "the flag's default")
            kept.append(f"{name if flag is None else flag.flags[0]} is {here} ({source}) instead of {value}")
    if kept and is_first_rank():
        print(f"note: defaults of the script are not used: {', '.join(kept)}", file=sys.stderr, flush=True)


def _replace(args: argparse.Namespace, values: Mapping[str, int | None]) -> list[str]:
    """Replaces invalid arguments, so that other checks can continue, and returns their flags.

    values: new value by argument name; None resets the argument to its default.
    """
    table = flag_table()
    for name, value in values.items():
        vars(args)[name] = table.by_dest[name].default if value is None else value
    return [flag for name in values for flag in table.by_dest[name].flags]


def _names_any(flags: Iterable[str], problem: str) -> bool:
    return not set(flags).isdisjoint(re.findall(r"--[\w-]+", problem))


def _derive_and_check(args: argparse.Namespace) -> list[str]:
    """Sets derived arguments, and returns an error message for each conflict."""
    problems = [*check_checkpoints(args), *check_data(args), *_check_sizes(args)]
    settle_meanings(args)
    checks = (
        derive_rotation,
        derive_max_positions,
        check_attention,
        check_experts,
        check_schedule,
        check_logging,
        check_expert_overlap,
        check_optimizer,
        check_fully_sharded,
        check_graphs,
        check_faults,
        derive_run_state,
    )
    for check in checks:
        problems += check(args)
    return problems


def _is_set(args: argparse.Namespace, name: str) -> bool:
    # A value equal to the default may come from a file written by --print-config.
    return bool(vars(args)[name] != flag_table().by_dest[name].default)


# Section: required sizes, data and tokenizer.


def check_required(args: argparse.Namespace) -> Iterator[str]:
    """Yields errors for missing model, sequence and batch sizes and, in training runs, length and learning rate."""
    needed = _needed(args)
    all_needed = needed if args.skip_train else [*needed, "lr"]
    missing = [f"--{name.replace('_', '-')}" for name in all_needed if vars(args)[name] is None]
    if missing:
        hint = " (or --use-checkpoint-args with --load)" if "--num-layers" in missing else ""
        hint += " (or --train-samples)" if "--train-iters" in missing else ""
        yield f"missing {', '.join(missing)}: give a value for each{hint}"
    for name in needed:
        if vars(args)[name] is not None and vars(args)[name] < 1:
            hint = "; --skip-train only evaluates" if name == "train_iters" else ""
            yield f"--{name.replace('_', '-')} is {vars(args)[name]}: must be at least 1{hint}"


def _needed(args: argparse.Namespace) -> list[str]:
    """Returns the names of required arguments that must be positive integers."""
    sizes = ["num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"]
    return sizes if args.skip_train or args.train_samples is not None else [*sizes, "train_iters"]


def check_data(args: argparse.Namespace) -> Iterator[str]:
    """Yields an error if a run has no data to train on, or no data at all. DataConfig accepts both."""
    sources = (args.data_path, args.data_args_path, args.train_data_path)
    # A script that provides the data requires no data flags.
    if args.dataloader_type == "external" or args.mock_data or any(source is not None for source in sources):
        return
    if args.valid_data_path is None and args.test_data_path is None:
        yield "no data: give --data-path PREFIX, or --mock-data to train on synthetic tokens"
    elif not args.skip_train:
        yield "--valid-data-path and --test-data-path need --train-data-path: add it, or --skip-train"


# Section: layout, batches and length.


def _check_sizes(args: argparse.Namespace) -> list[str]:
    """Checks layout, batches and length, which depend on each other. Returns the errors of the first failing check."""
    return [*check_layout(args)] or check_batches(args) or [*derive_length(args)]


def check_layout(args: argparse.Namespace) -> Iterator[str]:
    """Derives data_parallel_size and virtual_pipeline_model_parallel_size, and yields errors about parallel sizes.

    After an error, the former is 1 or the latter is None, so that other checks can continue.
    """
    tensor_size, context_size = args.tensor_model_parallel_size, args.context_parallel_size
    # As in Megatron-LM, scripts may leave --sequence-parallel on when they set the tensor-parallel size to 1. Not
    # derived by TransformerConfig, whose size of 1 may be replaced by the size of the model's groups.
    args.sequence_parallel = args.sequence_parallel and tensor_size > 1
    yield from problems_of_call(partial(_derive_replicas, args))
    if context_size > 1:
        # Each rank holds an early and a late chunk, so that all ranks attend to the same number of keys.
        yield from _uneven("seq_length", args.seq_length, of="2 x context_parallel_size", size=2 * context_size)
    if args.sequence_parallel:
        parts = "context_parallel_size x tensor_model_parallel_size"
        yield from _uneven("seq_length", args.seq_length, of=parts, size=context_size * tensor_size)
    if args.padded_vocab_size is not None:
        yield from _uneven(
            "padded_vocab_size", args.padded_vocab_size, of="tensor_model_parallel_size", size=tensor_size
        )
    if context_size > 1 and args.reset_attention_mask and args.create_attention_mask_in_dataloader:
        yield (
            "--reset-attention-mask creates masks of whole sequences, but --context-parallel-size is "
            f"{context_size}: add --no-create-attention-mask-in-dataloader, which passes document boundaries "
            "instead"
        )
    yield from problems_of_call(
        partial(
            check_whole_matrices,
            args.optimizer,
            tensor_model_parallel_size=tensor_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size or tensor_size,
        )
    )
    yield from derive_virtual_stages(args)


def _derive_replicas(args: argparse.Namespace) -> None:
    args.data_parallel_size = 1
    dense, _ = rank_grids(args.world_size, layout_sizes(args), order=DEFAULT_ORDER)
    args.data_parallel_size = dense.name_to_size["dp"]


def _uneven(name: str, value: int, *, of: str, size: int) -> list[str]:
    return problems_of_call(lambda: check_multiple(name, value, of=of, size=size))


def layout_sizes(args: argparse.Namespace) -> dict[str, int]:
    """Returns the parallel sizes by the argument names of initialize_model_parallel."""
    tensor_size = args.tensor_model_parallel_size
    return {
        "tensor_model_parallel_size": tensor_size,
        "context_parallel_size": args.context_parallel_size,
        "pipeline_model_parallel_size": args.pipeline_model_parallel_size,
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "expert_tensor_parallel_size": args.expert_tensor_parallel_size or tensor_size,
    }


def derive_virtual_stages(args: argparse.Namespace) -> Iterator[str]:
    """Derives the virtual pipeline size from one of its flags. Sets None without virtual stages, or after an error."""
    layers, pieces = args.num_layers_per_virtual_pipeline_stage, args.num_virtual_stages_per_pipeline_rank
    stages, layout = args.pipeline_model_parallel_size, args.pipeline_model_parallel_layout
    args.virtual_pipeline_model_parallel_size = None
    if layers is not None and pieces is not None:
        return  # an error of VirtualStagesConfig
    if layout is not None:
        if layers is not None or pieces is not None:
            flag = (
                "--num-layers-per-virtual-pipeline-stage"
                if pieces is None
                else "--num-virtual-stages-per-pipeline-rank"
            )
            yield f"--pipeline-model-parallel-layout already defines the layers of every virtual stage: drop {flag}"
            layers = None
        wrong = problems_of_call(lambda: _check_stages_of_layout(layout, stages))
        if wrong:
            yield from wrong
            return
        pieces = num_parts_in_layout(layout) // stages
    if layers is not None:
        if args.num_layers % (stages * layers):
            yield (
                f"--num-layers is {args.num_layers}: must be a multiple of --pipeline-model-parallel-size x "
                f"--num-layers-per-virtual-pipeline-stage ({stages * layers})"
            )
            return
        pieces = args.num_layers // (stages * layers)
    if args.pipeline_schedule in V_SCHEDULES and stages > 1:
        if pieces not in (None, 2):
            yield (
                f"--pipeline-schedule is {args.pipeline_schedule}: its stages have 2 virtual stages each, not {pieces}"
            )
            return
        pieces = 2
    if pieces is not None and pieces > 1:
        if stages == 1:
            yield f"--pipeline-model-parallel-size is 1: {pieces} virtual stages per rank need at least 2"
            return
        args.virtual_pipeline_model_parallel_size = pieces


def _check_stages_of_layout(layout: str, stages: int) -> None:
    parts = num_parts_in_layout(layout)
    check_multiple("pipeline_model_parallel_layout's stages", parts, of="pipeline_model_parallel_size", size=stages)


def check_batches(args: argparse.Namespace) -> list[str]:
    """Sets the global batch size if it is unset, and returns errors about the batch sizes of the run."""

    def derive() -> None:
        if args.global_batch_size is None and args.step_batch_size_schedule is None:
            args.global_batch_size = args.micro_batch_size * args.data_parallel_size
        args.global_batch_size = _batch_sizes(args).schedule.final_size

    return problems_of_call(derive) or [*_check_evaluation_batch(args)]


def _check_evaluation_batch(args: argparse.Namespace) -> Iterator[str]:
    size, samples_per_round = args.eval_global_batch_size, args.micro_batch_size * args.data_parallel_size
    if size is not None and size % samples_per_round:
        yield (
            f"--eval-global-batch-size is {size}: must be a multiple of --micro-batch-size ({args.micro_batch_size}) x "
            f"data-parallel size ({args.data_parallel_size})"
        )


def _batch_sizes(args: argparse.Namespace) -> NumMicroBatches:
    return config_from_args(BatchScheduleConfig, args).batch_sizes(
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=args.data_parallel_size,
        seq_length=args.seq_length,
    )


def derive_length(args: argparse.Namespace) -> Iterator[str]:
    """Sets --train-iters from --train-samples, and yields errors for schedules in a different unit than the length."""
    if args.train_samples is not None:
        iterations = _batch_sizes(args).running.iterations_within(args.train_samples)
        # Both are set and consistent if the same arguments were validated before.
        if args.train_iters not in (None, iterations):
            yield (
                f"--train-iters is {args.train_iters} and --train-samples is {args.train_samples}: give only one "
                "of them"
            )
        if iterations < 1:
            yield f"--train-samples is {args.train_samples}: must be at least one global batch"
        args.train_iters = iterations
        yield from check_units(args, other="iters", unit="samples")
    elif args.train_iters is not None:
        yield from check_units(args, other="samples", unit="iters")


def check_units(args: argparse.Namespace, *, other: str, unit: str) -> Iterator[str]:
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        if vars(args)[f"{name}_{other}"]:
            flag = f"--{name.replace('_', '-')}"
            yield (
                f"{flag}-{other} is {vars(args)[f'{name}_{other}']}, but the length of the run is --train-{unit}: "
                f"use {flag}-{unit}"
            )


# Section: flags whose value follows from other flags.


def settle_meanings(args: argparse.Namespace) -> None:
    """Sets arguments whose values follow from other flags, and prints notes about changed and ineffective flags."""
    settled = (
        _settle_recompute,
        _settle_recompute_modules,
        _settle_offload,
        _settle_context,
        _settle_positions,
        _settle_unused,
        _settle_unneeded,
    )
    notes = [note for settle in settled if (note := settle(args))]
    if notes and is_first_rank():
        print("\n".join(f"note: {note}" for note in notes), file=sys.stderr, flush=True)


def _settle_recompute(args: argparse.Namespace) -> str | None:
    number = args.recompute_num_layers
    if number is None or args.recompute_granularity == "full" or args.recompute_method is not None:
        return None
    args.recompute_num_layers = None
    return f"--recompute-num-layers {number} has no effect without --recompute-granularity full"


def _settle_recompute_modules(args: argparse.Namespace) -> str | None:
    if "moe_act" not in (args.recompute_modules or []):
        return None
    return "--recompute-modules moe_act has no effect: backward computes the result of the experts' activation anyway"


def _settle_offload(args: argparse.Namespace) -> str | None:
    dropped = recomputed_parts(args.recompute_modules or [], args.offload_modules)
    kept = [part for part in args.offload_modules if part not in dropped]
    if not dropped or not kept:
        return None
    args.offload_modules = kept
    parts = ", ".join(f"{part} (recomputed with {outer})" for part, outer in dropped.items())
    return f"--offload-modules drops {parts}"


def _settle_context(args: argparse.Namespace) -> str | None:
    size, heads = args.context_parallel_size, args.num_attention_heads // args.tensor_model_parallel_size
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    shared = (groups or 1) // args.tensor_model_parallel_size
    splits = heads % size == 0 and shared % size == 0 and shared > 0
    if size == 1 or args.attention_dropout == 0 or _is_set(args, "cp_comm_type") or not splits:
        return None
    args.cp_comm_type = "a2a"
    return (
        f"--cp-comm-type is set to a2a, because p2p has no dropout and --attention-dropout is {args.attention_dropout}"
    )


def _settle_positions(args: argparse.Namespace) -> str | None:
    if not args.multi_latent_attention or _is_set(args, "position_embedding_type"):
        return None
    before, args.position_embedding_type = args.position_embedding_type, "rope"
    if args.use_rotary_position_embeddings:
        return None
    return (
        "--position-embedding-type is set to rope, because --multi-latent-attention uses rotary positions; "
        f"{before} does not apply"
    )


def _settle_unused(args: argparse.Namespace) -> str | None:
    """Returns a note about given flags that other flags leave without an effect."""
    given = {name for name, source in given_arguments(args).items() if source != CHECKPOINT}
    increases = args.weight_decay_incr_style != "constant"
    both_decays = args.start_weight_decay is not None and args.end_weight_decay is not None
    unused = {
        "without --fp16": not args.fp16 and _LOSS_SCALES,
        f"with --optimizer {args.optimizer}": _settings_of_other_optimizers(args.optimizer),
        "without --lr-decay-style WSD": args.lr_decay_style != "WSD" and ("lr_wsd_decay_style",),
        "with --lr-decay-style constant": args.lr_decay_style == "constant" and ("min_lr",),
        "with --start-weight-decay and --end-weight-decay": increases and both_decays and ("weight_decay",),
        "with --multi-latent-attention": args.multi_latent_attention and ("kv_channels",),
        "with --init-method-xavier-uniform": args.init_method_xavier_uniform and ("init_method_std",),
        "without warm-up (--lr-warmup-iters, -samples or -fraction)": (
            not (args.lr_warmup_iters or args.lr_warmup_samples or args.lr_warmup_fraction) and ("lr_warmup_init",)
        ),
    }
    notes = []
    for reason, names in unused.items():
        # Scripts pass many flags with their default values, which require no message.
        flags = [flag_table().by_dest[name].flags[0] for name in names or () if name in given and _is_set(args, name)]
        notes += [f"{', '.join(flags)} has no effect {reason}"] if flags else []
    return "\nnote: ".join(notes) or None


_LOSS_SCALES = ("loss_scale", "min_loss_scale", "initial_loss_scale", "loss_scale_window", "hysteresis")


def _settings_of_other_optimizers(optimizer: str) -> list[str]:
    """Returns the names of the optimizer settings that this optimizer does not use. Muon updates vectors with Adam."""
    unused = {"muon_": ("muon",), "sgd_": ("sgd",), "adam_": ("adam", "muon", "distributed_fused_adam")}
    prefixes = tuple(prefix for prefix, users in unused.items() if optimizer not in users)
    return [field.name for field in fields(OptimizerConfig) if field.name.startswith(prefixes)] if prefixes else []


def _settle_unneeded(args: argparse.Namespace) -> str | None:
    """Returns a note about details of features that are off, wherever the details come from."""
    wandb, adapters = ("wandb_exp_name", "wandb_save_dir", "wandb_entity"), ("lora_alpha", "lora_target_modules")
    needed = (
        ("wandb_project", wandb, "nothing is logged to Weights & Biases"),
        # Checkpoints of merged adapters store these flags.
        ("lora_rank", adapters, "there are no adapters, and all weights are trained"),
    )
    notes = []
    for needs, names, why in needed:
        flags = [flag_table().by_dest[name].flags[0] for name in names if _is_set(args, name)]
        if flags and vars(args)[needs] is None:
            notes.append(f"{', '.join(flags)} has no effect without {flag_table().by_dest[needs].flags[0]}: {why}")
    return "\nnote: ".join(notes) or None


# Section: the model.


def derive_rotation(args: argparse.Namespace) -> Iterator[str]:
    """Sets position_embedding_type and rope_type from their other names, and yields errors for contradictions."""
    if args.use_rotary_position_embeddings:
        yield from _rotate(args)
    if args.position_embedding_type == "yarn":
        if args.rope_type == "rope":
            yield "--position-embedding-type is yarn and --rope-type is rope: drop one of them"
        args.position_embedding_type, args.rope_type = "rope", "yarn"
    if args.rope_type == "yarn" and args.use_rope_scaling:
        yield (
            "--use-rope-scaling and --rope-type yarn both scale the frequencies: give only one of them; yarn uses "
            "--rotary-scaling-factor"
        )
    if args.position_embedding_type == "rope":
        return
    for name in ("rotary_interleaved", "rope_type"):
        if _is_set(args, name):
            flag = f"--{name.replace('_', '-')}"
            yield f"{flag} needs --position-embedding-type rope: add it, or drop {flag}"


def _rotate(args: argparse.Namespace) -> Iterator[str]:
    """Applies --use-rotary-position-embeddings, and yields an error if --position-embedding-type contradicts it."""
    kind = args.position_embedding_type
    # The default may also come from a file of --print-config.
    is_default = kind == "learned_absolute" and given_arguments(args).get("position_embedding_type") != COMMAND_LINE
    if kind not in ("rope", "yarn") and not is_default:
        yield f"--position-embedding-type is {kind} and --use-rotary-position-embeddings is given: drop one of them"
    elif kind != "yarn":
        args.position_embedding_type = "rope"


def derive_max_positions(args: argparse.Namespace) -> Iterator[str]:
    """Sets max_position_embeddings to the sequence length if unset, and yields an error if it is too small."""
    if args.max_position_embeddings is None:
        # The table of learned positions is a weight, so its size must not depend on a run's --seq-length.
        if args.position_embedding_type == "learned_absolute":
            yield (
                "--position-embedding-type learned_absolute needs --max-position-embeddings: "
                f"give at least --seq-length ({args.seq_length}), or use --position-embedding-type rope"
            )
        args.max_position_embeddings = args.seq_length
    if args.seq_length > args.max_position_embeddings:
        yield (
            f"--seq-length is {args.seq_length}: must be at most --max-position-embeddings "
            f"({args.max_position_embeddings})"
        )


def check_attention(args: argparse.Namespace) -> Iterator[str]:
    """Yields errors about heads, latent attention and norms. Sets num_query_groups with --group-query-attention."""
    if args.multi_latent_attention and args.position_embedding_type != "rope":
        yield (
            "--multi-latent-attention uses rotary positions, but --position-embedding-type is "
            f"{args.position_embedding_type}: use --position-embedding-type rope"
        )
    if args.multi_latent_attention and args.rotary_percent != 1:
        yield (
            f"--rotary-percent is {args.rotary_percent}: drop it, because --multi-latent-attention applies rotary "
            "embeddings to all dimensions of --qk-pos-emb-head-dim"
        )
    if args.apply_wd_to_qk_layernorm and not args.qk_layernorm:
        yield "--apply-wd-to-qk-layernorm needs --qk-layernorm: add it, or drop --apply-wd-to-qk-layernorm"
    # 1 is Megatron-LM's default, which scripts that print their arguments pass along. It means "not given".
    if args.group_query_attention:
        args.num_query_groups = args.num_query_groups or 1
    elif args.num_query_groups not in (None, 1):
        yield (
            f"--num-query-groups is {args.num_query_groups} without --group-query-attention: add it, or drop "
            "--num-query-groups"
        )


def check_experts(args: argparse.Namespace) -> Iterator[str]:
    """Yields errors for expert flags of a dense model, for layer patterns, and for a router that cannot learn.

    Resets arguments with an error, so that other checks can continue and do not report them again.
    """
    if args.num_experts is not None:
        moe = config_from_args(MoEConfig, args)
        wrong = problems_of_call(partial(validate_moe_layer_freq, moe, args.num_layers))
        if wrong:
            yield from wrong
            args.moe_layer_freq = 1
        # Accepted by TransformerConfig, because only training needs a router that learns.
        if moe.has_constant_weights:
            yield (
                "--moe-router-topk is 1: the weight of a single expert is always 1, so its router cannot learn; "
                "use at least 2, or add --moe-router-pre-softmax or --moe-router-score-function sigmoid"
            )
        return
    # Not errors of MoEConfig, because Python code may build a dense model with settings of experts.
    for flag in flags_of_class(MoEConfig):
        if _is_set(args, flag.dest):
            yield f"{flag.flags[0]} needs --num-experts: add it, or drop {flag.flags[0]}"
            vars(args)[flag.dest] = flag.default
    if args.moe_use_upcycling:
        yield "--moe-use-upcycling needs --num-experts: add it, or drop --moe-use-upcycling"


def check_flex_backend(run_config: RunConfig) -> None:
    """Raises CommandLineError if the token dispatcher's backend is unavailable.

    Checked on all ranks, because ranks without experts would otherwise wait forever for ranks that fail.
    """
    with flags_named_in_errors(), without_memory() if run_config.dry_run.dry_run else nullcontext():
        require_flex_backend(run_config.transformer)


# Section: schedules, logs and checkpoints.


def check_schedule(args: argparse.Namespace) -> Iterator[str]:
    if args.lr is not None and args.lr_warmup_init > args.lr:
        yield f"--lr-warmup-init is {args.lr_warmup_init}: must be at most --lr, which is {args.lr}"
    for unit in ("iters", "samples"):
        warmup, length = vars(args)[f"lr_warmup_{unit}"], vars(args)[f"train_{unit}"]
        # The scheduler checks warm-up against --lr-decay. Without it, the schedule has the run's length, checked here.
        if args.lr_warmup_fraction is None and vars(args)[f"lr_decay_{unit}"] is None and length:
            if warmup >= length and warmup > 0:
                yield (
                    f"--lr-warmup-{unit} is {warmup}: must be less than --train-{unit} ({length}) or --lr-decay-{unit}"
                )


def check_logging(args: argparse.Namespace) -> Iterator[str]:
    if args.wandb_project is not None and args.wandb_save_dir is None and args.save is None:
        yield (f"--wandb-project is {args.wandb_project}: needs --wandb-save-dir or --save as the folder for its files")
    if args.log_progress and args.save is None:
        yield "--log-progress needs --save: progress.txt is written to that folder"
    if args.record_routing is not None and args.num_experts is None:
        yield (f"--record-routing is {args.record_routing} but --num-experts is not set: a dense model has no routing")
    absent = [rank for rank in args.profile_ranks if rank >= args.world_size]
    if args.profile and absent:
        yield f"--profile-ranks has {absent[0]}: must be below the number of processes ({args.world_size})"


def check_checkpoints(args: argparse.Namespace) -> Iterator[str]:
    if args.finetune and args.use_checkpoint_opt_param_scheduler:
        yield (
            "--use-checkpoint-opt-param-scheduler with --finetune: training starts at iteration 0 with a schedule of "
            "its own; drop one of them"
        )
    if args.skip_train and args.load is None and args.pretrained_checkpoint is None:
        yield "--skip-train evaluates the checkpoint of --load: give the folder of the checkpoint"
    elif args.skip_train:
        # An evaluation of random weights is meaningless.
        args.exit_on_missing_checkpoint = True


def derive_run_state(args: argparse.Namespace) -> Iterator[str]:
    """Sets params_dtype and the counters at which the run starts, and yields errors for conflicting precisions."""
    # Accepted by TransformerConfig, where it has no effect on a model in fp32.
    if args.fp32_residual_connection and not (args.fp16 or args.bf16):
        yield (
            "--fp32-residual-connection needs --bf16 or --fp16: in fp32 training the residual stream is always "
            "fp32; remove it"
        )
    args.params_dtype = torch.float16 if args.fp16 else torch.bfloat16 if args.bf16 else torch.float32
    # Loading a checkpoint sets these counters. Training does not change them.
    args.iteration = 0
    args.consumed_train_samples = 0
    args.consumed_valid_samples = 0


# Section: the launcher, read before validation.


def read_launcher(args: argparse.Namespace) -> None:
    """Sets rank and world size from the launcher's environment. Without a launcher, the process is rank 0 of 1."""
    args.rank = _launcher_number("RANK", default=0)
    started = _launcher_number("WORLD_SIZE", default=1)
    if args.world_size not in (None, started) and not (args.dry_run or args.fake_process_group):
        raise CommandLineError(
            f"--world-size is {args.world_size} but {started} ranks were started: use --world-size only with "
            "--dry-run or --fake-process-group, because torchrun sets the number of training ranks"
        )
    # Checked first, because building the tables of all ranks would take minutes for more ranks.
    if args.world_size is not None and not 1 <= args.world_size <= _MOST_PLANNED_RANKS:
        raise CommandLineError(f"--world-size is {args.world_size}: must be from 1 to {_MOST_PLANNED_RANKS}")
    args.world_size = args.world_size or started
    if args.fake_process_group:
        check_fake_rank(args)
    args.local_rank = _launcher_number("LOCAL_RANK", default=0)


def check_fake_rank(args: argparse.Namespace) -> None:
    """Checks the flags of --fake-process-group, and disables the check for NaN in losses and gradients.

    Raises CommandLineError if the process cannot act as the rank, or if it would save or load a checkpoint.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise CommandLineError(
            "--fake-process-group runs a single process as one of many ranks: start it with python, not with torchrun"
        )
    if args.rank >= args.world_size:
        raise CommandLineError(f"RANK is {args.rank}: must be below --world-size ({args.world_size})")
    for name in ("save", "load", "pretrained_checkpoint"):
        if vars(args)[name] is not None:
            raise CommandLineError(
                f"--{name.replace('_', '-')} and --fake-process-group are both given: a single rank has no "
                "complete checkpoint, and its weights are invalid without the other ranks"
            )
    # Without the contributions of other ranks, sums are wrong and may be NaN.
    args.check_for_nan_in_loss_and_grad = False


def _launcher_number(name: str, *, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not (text.isascii() and text.isdigit()):
        raise CommandLineError(
            f"{name} is {text!r} in the environment: must be a whole number of at least 0; torchrun sets it"
        )
    return int(text)
