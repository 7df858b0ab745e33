"""Converts weights between canonical checkpoints and Megatron's legacy checkpoints, which store one file per rank.

megatron.training.checkpointing.legacy presents legacy tensors under native keys, and --load also uses it directly.
To write a rank's file, this module builds the part of the model that the rank would build, which knows its shards.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing import save_stream, sharded_tensors
from megatron.core.logical_tensors import model_logical_pieces, pieces_of_tensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tokenizers import vocab_size_with_padding
from megatron.tools.legacy_checkpoint import to_legacy_names, write_legacy
from megatron.tools.stored_checkpoints import all_tensors, checkpoint_of_load
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import (
    LEGACY_FILE,
    RELEASE,
    TRACKER_FILE,
    iteration_folder,
    iteration_of_text,
    read_tracker,
    write_tracker,
)
from megatron.training.checkpointing.legacy import as_checkpoint, facts_of
from megatron.training.checkpointing.legacy_files import LAYOUT, LegacyFiles, LegacyRank, ranks_of_layout
from megatron.training.checkpointing.megatron_core import tensors_of
from megatron.training.checkpointing.megatron_objects import SAMPLE_COUNTS, json_values, values_without_state
from megatron.training.checkpointing.run_values import args_to_json, check_arguments, load_run_values, model_arguments
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.gpt_builder import parts_of_gpt

# Arguments from which other arguments in LAYOUT are derived.
_SOURCES_OF_LAYOUT = (
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "expert_tensor_parallel_size",
)
# Stored arguments that are not copied, because they belong to the conversion or to the program that wrote the file.
_OWN = ("load", "save", "rank", "world_size", "local_rank", "ckpt_format", "params_dtype", "moe_grouped_gemm")


@dataclass(frozen=True)
class TargetLayout:
    """Parallel sizes of the written files. fused: whether to use the parameter names of Transformer Engine's layers."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    fused: bool = True


def to_canonical(load: Path, save: Path, *, step: int | None = None, vocab_size: int | None = None) -> Path:
    """Writes the weights of a legacy checkpoint as a canonical checkpoint and returns its folder.

    vocab_size: vocabulary size of the tokenizer, if the arguments in the files do not contain it. Raises ValueError
    naming the file, tensor or argument that is missing or does not fit, or the folder if it exists already. Raises
    OSError if a file cannot be read or written.
    """
    files = LegacyFiles.open(find_legacy(load, step=step))
    first = files.first
    folder = iteration_folder(save, first.iteration)
    if folder.exists():
        # The folder may belong to a run with optimizer states, which legacy files do not contain.
        raise ValueError(f"--save is {save}: {folder} already exists and is not overwritten; give a new folder")
    args = _args_of_files(files, vocab_size)
    if first.unknown:
        print(f"not converted, because it is unknown: {', '.join(first.unknown)}")
    checkpoint = as_checkpoint(files, run_config_of(args), parts_of_gpt)
    save_stream(all_tensors(checkpoint), folder, common=common_of_weights(args, first.args, iteration=first.iteration))
    write_tracker(str(save), first.iteration)
    return folder


def find_legacy(folder: Path, *, step: int | None) -> Path:
    """Returns the folder of an iteration. step: iteration; None means the one in the tracker file.

    Raises ValueError if the tracker file is missing or invalid.
    """
    if step is not None:
        found = iteration_folder(folder, step)
    else:
        text = read_tracker(folder)
        if text is None:
            raise ValueError(
                f"--load is {folder}: it contains no {TRACKER_FILE}; give the parent folder of iter_..., or --ckpt-step"
            )
        iteration = iteration_of_text(text)
        if text == RELEASE:
            found = folder / RELEASE
        elif iteration is not None:
            found = iteration_folder(folder, iteration)
        else:
            raise ValueError(
                f"{folder / TRACKER_FILE} contains {text[:40]!r}: must be an iteration number or {RELEASE!r}"
            )
    return found


def from_canonical(load: Path, save: Path, *, layout: TargetLayout, step: int | None = None) -> Path:
    """Writes the weights of a canonical checkpoint as legacy files of a layout and returns their folder.

    Raises ValueError if the model does not fit the layout or files of this iteration exist, and OSError if a file
    cannot be written. Leaves no files after an error.
    """
    found = checkpoint_of_load(load, step)
    run = load_run_values(found.path)
    stored = run["args"]
    args = _args_for_layout(stored, layout)
    target = iteration_folder(save, found.iteration)
    if target.exists():
        raise ValueError(f"--save is {save}: {target} already exists and is not overwritten; give a new folder")
    save.mkdir(parents=True, exist_ok=True)
    values = {
        **stored,
        **{name: vars(args)[name] for name in (*LAYOUT, *_SOURCES_OF_LAYOUT, "padded_vocab_size")},
        **{name: run["train_state"][name] for name in SAMPLE_COUNTS},
    }
    with folders.atomic_folder(target) as temporary:
        for rank in ranks_of_layout(tensor=layout.tensor, pipeline=layout.pipeline, expert=layout.expert):
            chunks = [_filled(part, found.path, args, layout=layout) for part in _parts_of_rank(args, rank)]
            name = rank.folder(num_stages=layout.pipeline, num_expert_ranks=layout.expert)
            write_legacy(temporary / name / LEGACY_FILE, values, iteration=found.iteration, chunks=chunks)
    write_tracker(str(save), found.iteration)
    return target


def common_of_weights(args: argparse.Namespace, found: Mapping[str, Any], *, iteration: int) -> dict[str, Any]:
    """Returns the common part of a weights-only checkpoint. found: arguments of the run that trained the weights."""
    values, stored = values_without_state(found, iteration=iteration), args_to_json(vars(args))
    stored |= {name: value for name, value in values["args"].items() if name in stored and name not in _OWN}
    return {**values, "args": stored}


def _parts_of_rank(args: argparse.Namespace, rank: LegacyRank) -> list[GPTModel]:
    """Builds the model chunks that a rank's file contains, without allocating memory."""
    place = {"tensor": rank.tensor, "pipeline": rank.pipeline, "expert": rank.expert}
    layout = {name: vars(args)[name] for name in LAYOUT}
    return parts_of_gpt(run_config_of(args), padded_vocab_size=args.padded_vocab_size, layout=layout, **place)


def _filled(part: nn.Module, source: Path, args: argparse.Namespace, *, layout: TargetLayout) -> dict[str, Tensor]:
    """Loads the tensors of a part of the model from a checkpoint and returns them by Megatron's names."""
    state = {name: torch.zeros_like(tensor, device="cpu") for name, tensor in tensors_of(part).items()}
    logical = model_logical_pieces(part)
    wanted = [
        box
        for name, tensor in state.items()
        for box in sharded_tensors(pieces_of_tensor(name, tensor, logical), tensor)
    ]
    dist_checkpointing.load_items(wanted, source)
    facts = facts_of(part, num_experts=(args.num_experts or 0) // layout.expert, hidden_size=args.hidden_size)
    return to_legacy_names({name: tensor.detach() for name, tensor in state.items()}, facts, fused=layout.fused)


def _args_of_files(files: LegacyFiles, vocab_size: int | None) -> argparse.Namespace:
    file = files.first
    stored = json_values(file.args)
    try:
        check_arguments(stored)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    args = model_args(stored)
    args.unpadded_vocab_size = vocab_size or stored.get("vocab_size")
    if args.unpadded_vocab_size is None:
        raise ValueError(f"{file.path} does not contain the tokenizer's vocabulary size: give --vocab-size")
    args.padded_vocab_size = files.vocabulary_rows(num_tokens=args.unpadded_vocab_size)
    return args


def _args_for_layout(stored: Mapping[str, Any], layout: TargetLayout) -> argparse.Namespace:
    args = model_args(stored)
    args.tensor_model_parallel_size = layout.tensor
    args.pipeline_model_parallel_size = layout.pipeline
    args.expert_model_parallel_size = layout.expert
    args.unpadded_vocab_size = stored["unpadded_vocab_size"]
    args.padded_vocab_size = vocab_size_with_padding(
        args.unpadded_vocab_size, divisible_by=args.make_vocab_size_divisible_by, tensor_parallel_size=layout.tensor
    )
    args.sequence_parallel = layout.tensor > 1 and args.num_experts is not None
    args.params_dtype = torch.bfloat16 if stored.get("bf16") else torch.float16 if stored.get("fp16") else torch.float32
    return args


def model_args(stored: Mapping[str, Any]) -> argparse.Namespace:
    """Returns model arguments for one process with sequential experts, whose names every format can express."""
    args = parse_args(argv=[])
    vars(args).update(model_arguments(stored, here=vars(args)))
    args.params_dtype, args.moe_grouped_gemm = torch.float32, False
    # Validation derives it from other flags.
    args.virtual_pipeline_model_parallel_size = None
    return args
