"""Converts Megatron-Core's own distributed checkpoints to canonical checkpoints, one tensor at a time.

megatron.training.checkpointing.megatron_core presents their tensors under native keys, and --load also uses it
directly.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import save_stream
from megatron.tools.convert_legacy import common_of_weights, model_args
from megatron.tools.stored_checkpoints import all_tensors, checkpoint_of_load
from megatron.training.arguments import parse_args
from megatron.training.checkpointing.folder import (
    MEGATRON_CORE_FILE,
    RELEASE,
    CheckpointFormat,
    iteration_folder,
    write_release_tracker,
    write_tracker,
)
from megatron.training.checkpointing.megatron_core import (
    EMBEDDING,
    as_checkpoint,
    values_of_files,
    vocabulary_rows,
)
from megatron.training.checkpointing.megatron_core_files import MegatronCoreFiles
from megatron.training.checkpointing.megatron_objects import json_values
from megatron.training.checkpointing.run_values import check_arguments
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.gpt_builder import whole_gpt


@dataclass(frozen=True)
class Converted:
    """A written checkpoint.

    num_left: number of stored entries that were not converted. unknown: names of entries and values that no reader here
    knows. why_no_state: why the optimizer state was not converted, None if it was.
    """

    folder: Path
    num_left: int
    unknown: tuple[str, ...]
    why_no_state: str | None


def from_megatron_core(
    load: Path, save: Path, *, step: int | None = None, vocab_size: int | None = None, model_config: Path | None = None
) -> Converted:
    """Converts weights, and optimizer state if its step count is stored, to a canonical checkpoint.

    vocab_size: vocabulary size of the tokenizer, if the arguments do not contain it. model_config: YAML file with the
    model's flags, if the files contain no arguments. Raises ValueError naming the file, tensor or argument that is
    missing or does not fit.
    """
    files = MegatronCoreFiles.open(find_megatron_core(load, step=step))
    folder = save / RELEASE if files.iteration is None else iteration_folder(save, files.iteration)
    if folder.exists():
        raise ValueError(f"--save is {save}: {folder} already exists and is not overwritten; give a new folder")
    values = values_of_files(files)
    args = _args_of_files(files, vocab_size=vocab_size, model_config=model_config)
    has_masters = bool(values["args"].get("bf16") or values["args"].get("fp16"))
    model = whole_gpt(run_config_of(args), padded_vocab_size=args.padded_vocab_size)
    has_state = values["contents"]["optimizer"]
    checkpoint = as_checkpoint(files, model, values=values, with_masters=has_masters, with_state=has_state)
    save_stream(all_tensors(checkpoint), folder, common=_common(args, files, values))
    if files.iteration is None:
        write_release_tracker(str(save))
    else:
        write_tracker(str(save), files.iteration)
    num_left = files.num_left + (0 if has_state else files.num_states)
    return Converted(folder, num_left, files.unknown, values["not_read"].get("optimizer"))


def _common(args: argparse.Namespace, files: MegatronCoreFiles, values: dict[str, Any]) -> dict[str, Any]:
    common = common_of_weights(args, files.args or {}, iteration=files.iteration or 0)
    if not values["contents"]["optimizer"]:
        return common
    return {**common, **{name: values[name] for name in ("optimizer", "scheduler", "contents")}}


def find_megatron_core(folder: Path, *, step: int | None) -> Path:
    """Returns `folder` if it is a checkpoint itself, else the folder of iteration `step` in it.

    step: None means the iteration in the tracker file. Raises ValueError if the folder is not in Megatron-Core's
    format.
    """
    if step is None and (folder / MEGATRON_CORE_FILE).is_file():
        return folder
    found = checkpoint_of_load(folder, step)
    if found.format is not CheckpointFormat.MEGATRON_CORE:
        raise ValueError(
            f"{found.path} has no {MEGATRON_CORE_FILE}: it is not a distributed checkpoint of Megatron-Core"
        )
    return found.path


def _args_of_files(
    files: MegatronCoreFiles, *, vocab_size: int | None, model_config: Path | None
) -> argparse.Namespace:
    where = files.common_place
    if model_config is not None:
        where, found = str(model_config), vars(parse_args(argv=["--config", str(model_config)]))
    elif files.args is not None:
        found = files.args
    else:
        raise ValueError(f"{where} contains no arguments: give --model-config, a YAML file with the flags of the model")
    stored = json_values(found)
    try:
        check_arguments(stored)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
    args = model_args(stored)
    if EMBEDDING not in files.weights:
        raise ValueError(f"{files.folder} has no {EMBEDDING}")
    tokens = vocab_size or stored.get("vocab_size")
    if tokens is None:
        raise ValueError(f"{where} does not contain the tokenizer's vocabulary size: give --vocab-size")
    rows = vocabulary_rows(files, num_tokens=tokens)
    args.padded_vocab_size, args.unpadded_vocab_size = rows, tokens
    return args
