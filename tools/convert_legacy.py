"""Converts weights between Megatron's older checkpoints, with one file per rank, and canonical checkpoints.

Reads and writes each rank's file through the model that this rank would build, which knows its shards.
"""

import argparse
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, model_sharded_tensors
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.process_groups_config import group_rank
from megatron.core.tokenizers import vocab_size_with_padding
from megatron.planner.fake_ranks import fake_rank
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import iteration_folder, write_tracker
from megatron.training.checkpointing.run_values import args_to_json, check_arguments, load_run_values, model_arguments
from megatron.training.checkpointing.train_state import TrainState
from megatron.training.gpt_builder import build_gpt
from megatron.training.setup import model_parts
from tools.legacy_checkpoint import (
    MODEL_FILE,
    ChunkFacts,
    LegacyFile,
    LegacyRank,
    find_legacy,
    legacy_files,
    read_legacy,
    to_legacy_names,
    to_names_here,
    write_legacy,
)
from tools.stored_checkpoints import checkpoint_of_load

# Arguments of the layout of a file's model.
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "num_layers_per_virtual_pipeline_stage",
    "num_virtual_stages_per_pipeline_rank",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "pipeline_model_parallel_layout",
)
# Arguments in a file that are not copied: they belong to the conversion, or to the other program.
_OWN = ("load", "save", "rank", "world_size", "local_rank", "ckpt_format", "params_dtype", "moe_grouped_gemm")


@dataclass(frozen=True)
class TargetLayout:
    """Parallel sizes of the written files. fused: parameter names of Transformer Engine's layers."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    fused: bool = True


def to_canonical(load: Path, save: Path, *, step: int | None = None, vocab_size: int | None = None) -> Path:
    """Writes the weights of older files as a canonical checkpoint; returns its folder.

    vocab_size: number of tokens of the tokenizer, if the arguments in the files lack it. Raises ValueError naming a
    file, tensor or argument that is missing or does not fit, and the folder if it exists; OSError if a file cannot be
    read or written.
    """
    files = legacy_files(find_legacy(load, step=step))
    first = read_legacy(next(iter(files.values())))
    folder = iteration_folder(save, first.iteration)
    if folder.exists():
        # The folder may be of a run, with optimizer states, which older files lack.
        raise ValueError(f"--save is {save}: {folder} is there already, and is not overwritten; give a new folder")
    args = _args_of_files(first, vocab_size)
    # Before process groups of the number of ranks in these files are created.
    for name in _names_of_files(args):
        if name not in files:
            raise ValueError(f"{load} has no {name}/{MODEL_FILE}, of the {_layout_in_words(args)}")
    tensors: list[ShardedTensor] = []
    for rank in range(_num_files(args)):
        with _rank_of_files(args, rank) as (name, parts):
            file = first if files[name] == first.path else read_legacy(files[name])
            if len(parts) != len(file.chunks):
                raise ValueError(f"{file.path} holds {len(file.chunks)} chunks of the model: must be {len(parts)}")
            for part, chunk in zip(parts, file.chunks, strict=True):
                _fill(part, to_names_here(chunk, _facts(part, args)), path=file.path)
                # Views of memory-mapped files: data is read when it is written.
                tensors += model_sharded_tensors(part)
    dist_checkpointing.save_items(
        tensors, folder, common=common_of_weights(args, first.args, iteration=first.iteration)
    )
    write_tracker(str(save), first.iteration)
    return folder


def from_canonical(load: Path, save: Path, *, layout: TargetLayout, step: int | None = None) -> Path:
    """Writes the weights of a canonical checkpoint as older files of a layout; returns their folder.

    Raises ValueError if the model does not fit the layout or files of this iteration exist; OSError if one cannot be
    written. Leaves no files after an error.
    """
    found = checkpoint_of_load(load, step)
    stored = load_run_values(found.path)["args"]
    args = _args_for_layout(stored, layout)
    target = iteration_folder(save, found.iteration)
    if target.exists():
        raise ValueError(f"--save is {save}: {target} is there already, and is not overwritten; give a new folder")
    save.mkdir(parents=True, exist_ok=True)
    values = {**stored, **{name: vars(args)[name] for name in (*_LAYOUT, "padded_vocab_size", "sequence_parallel")}}
    with folders.atomic_folder(target) as temporary:
        for rank in range(_num_files(args)):
            with _rank_of_files(args, rank) as (name, parts):
                tensors = [tensor for part in parts for tensor in model_sharded_tensors(part)]
            dist_checkpointing.load_items(tensors, found.path)
            chunks = [to_legacy_names(_state(part), _facts(part, args), fused=layout.fused) for part in parts]
            write_legacy(temporary / name / MODEL_FILE, values, iteration=found.iteration, chunks=chunks)
    write_tracker(str(save), found.iteration)
    return target


def common_of_weights(args: argparse.Namespace, found: Mapping[str, Any], *, iteration: int) -> dict[str, Any]:
    """Returns the common part of a checkpoint with weights only. found: arguments of the program that trained them."""
    state = TrainState(iteration=iteration)
    state.load_state_dict({name: found.get(name) or 0 for name in ("consumed_train_samples", "consumed_valid_samples")})
    stored = args_to_json(args)
    stored |= {name: value for name, value in json_values(found).items() if name in stored and name not in _OWN}
    return {
        "iteration": iteration,
        "train_state": state.state_dict(),
        "args": stored,
        "contents": {"optimizer": False, "rng": False},
        "frozen": [],
    }


def _names_of_files(args: argparse.Namespace) -> Iterator[str]:
    """Yields the folder names of all ranks that have a file. Lazy, because callers stop at the first missing file."""
    stages, num_expert_ranks = args.pipeline_model_parallel_size, args.expert_model_parallel_size
    for tensor in range(args.tensor_model_parallel_size):
        for stage in range(stages):
            for expert in range(num_expert_ranks):
                place = LegacyRank(tensor, stage, expert)
                yield place.folder(num_stages=stages, num_expert_ranks=num_expert_ranks)


def _num_files(args: argparse.Namespace) -> int:
    return math.prod(vars(args)[f"{name}_model_parallel_size"] for name in ("tensor", "pipeline", "expert"))


@contextmanager
def _rank_of_files(args: argparse.Namespace, rank: int) -> Iterator[tuple[str, list[nn.Module]]]:
    """Makes this process one of the ranks that have a file; yields its folder name and its model chunks."""
    with fake_rank(args, rank, world_size=_num_files(args)) as groups:
        place = LegacyRank(group_rank(groups.tp), group_rank(groups.pp), group_rank(groups.ep))
        sizes = args.pipeline_model_parallel_size, args.expert_model_parallel_size
        parts = [part for part, _ in model_parts(partial(build_gpt, args), args)]
        yield place.folder(num_stages=sizes[0], num_expert_ranks=sizes[1]), parts


def _facts(part: nn.Module, args: argparse.Namespace) -> ChunkFacts:
    layers = [int(found[1]) for name in part.state_dict() if (found := re.match(r"decoder\.layers\.(\d+)\.", name))]
    num_experts = (args.num_experts or 0) // args.expert_model_parallel_size
    return ChunkFacts(min(layers, default=0), num_experts, args.hidden_size)


def _fill(part: nn.Module, state: Mapping[str, Tensor], *, path: Path) -> None:
    """Copies the tensors of a file, of any shape and dtype, into a part of the model."""
    wanted = part.state_dict()
    for name, tensor in wanted.items():
        if name not in state:
            raise ValueError(f"{path} has no {name}, which the model of its arguments has")
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{path} has {name} with shape {list(state[name].shape)}: must be {list(tensor.shape)} by its arguments"
            )
    unknown = sorted(state.keys() - wanted.keys())
    if unknown:
        raise ValueError(f"{path} has {unknown[0]}, which the model of its arguments has not")
    part.load_state_dict(dict(state), assign=True)


def _state(part: nn.Module) -> dict[str, Tensor]:
    """Returns copies of tensors of any shape and dtype. A view would be saved with its whole storage."""
    return {name: tensor.detach().clone() for name, tensor in part.state_dict().items()}


def _args_of_files(file: LegacyFile, vocab_size: int | None) -> argparse.Namespace:
    stored = json_values(file.args)
    try:
        check_arguments(stored)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error
    args = model_args(stored)
    vars(args).update({name: stored[name] for name in (*_LAYOUT, "sequence_parallel") if name in stored})
    expert_split = args.expert_tensor_parallel_size or args.tensor_model_parallel_size
    if expert_split != args.tensor_model_parallel_size:
        raise ValueError(
            f"{file.path}: expert_tensor_parallel_size is {expert_split}: must be that of other layers, "
            f"{args.tensor_model_parallel_size}"
        )
    padded, unpadded = stored.get("padded_vocab_size"), vocab_size or stored.get("vocab_size")
    if padded is None or unpadded is None:
        raise ValueError(f"{file.path} does not say how many tokens the tokenizer has: give --vocab-size")
    if not 0 < unpadded <= padded:
        raise ValueError(f"--vocab-size is {unpadded}: must be 1 to the {padded} rows of the embedding in {file.path}")
    args.padded_vocab_size, args.unpadded_vocab_size = padded, unpadded
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
    """Returns arguments of the model for one process, with sequential experts, because every format has their names."""
    args = parse_args(argv=[])
    vars(args).update(model_arguments(stored, here=vars(args)))
    args.params_dtype, args.moe_grouped_gemm = torch.float32, False
    # Validated flags derive it from others.
    args.virtual_pipeline_model_parallel_size = None
    return args


def json_values(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that are numbers, strings, or lists and dicts of them."""
    return {name: value for name, value in args.items() if _is_json(value)}


def _is_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_json, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_json(one) for key, one in value.items())
    return value is None or isinstance(value, (bool, int, float, str))


def _layout_in_words(args: argparse.Namespace) -> str:
    return (
        f"tensor {args.tensor_model_parallel_size} x pipeline {args.pipeline_model_parallel_size} x expert "
        f"{args.expert_model_parallel_size} ranks of its arguments"
    )
