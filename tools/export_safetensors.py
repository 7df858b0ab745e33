"""Weights of a canonical checkpoint as safetensors files, by the names that checkpoints have: no layout, no padding.

Shards and their index are named as Hugging Face names them. A model of transformers has other names: see convert.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing import folder as folders
from megatron.training.checkpoint_folder import find_checkpoint

INDEX_FILE = "model.safetensors.index.json"
# Optimizer and generators; everything else is the model's.
_NOT_WEIGHTS = ("optimizer.", "rng.")
_Kinds = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def export_safetensors(load: Path, save: Path, *, step: int | None = None, max_shard_bytes: int) -> Path:
    """Writes the weights of a checkpoint into the new folder `save`, which appears when all is in it; returns it.

    No more than one shard is in memory. Raises ValueError where there is no checkpoint, it is damaged, or `save` is
    there already.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ValueError("--to safetensors needs a package: pip install 'megatron-stash[safetensors]'") from error
    found = find_checkpoint(str(load), step=step)
    if found is None:
        raise ValueError(f"--load is {load}: there is no checkpoint in it; give a folder that --save wrote")
    if save.exists():
        raise ValueError(f"--save is {save}: it is there already, and is not overwritten; give a new folder")
    checkpoint = dist_checkpointing.verify(found.path)
    kinds = {key: kind for key, kind in checkpoint.tensors.items() if not key.startswith(_NOT_WEIGHTS)}
    shards = _shards(kinds, max_shard_bytes)
    save.parent.mkdir(parents=True, exist_ok=True)
    temporary = folders.incomplete_folder(save, folders.new_id())
    temporary.mkdir()
    names: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {key: torch.empty(kinds[key][0], dtype=kinds[key][1]) for key in keys}
        dist_checkpointing.load([ShardedTensor.whole(key, tensor) for key, tensor in tensors.items()], checkpoint)
        save_file(tensors, temporary / name, metadata={"format": "pt", "iteration": str(found.iteration)})
        names |= dict.fromkeys(keys, name)
    total = sum(_num_bytes(*kind) for kind in kinds.values())
    index = {"metadata": {"total_size": total, "iteration": found.iteration}, "weight_map": names}
    (temporary / INDEX_FILE).write_text(json.dumps(index, indent=1))
    temporary.rename(save)
    return save


def _shards(kinds: _Kinds, max_bytes: int) -> list[list[str]]:
    """Keys in order, each shard of at most so many bytes, or of one tensor."""
    shards: list[list[str]] = []
    room = 0
    for key in sorted(kinds):
        size = _num_bytes(*kinds[key])
        if not shards or size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(key)
        room -= size
    return shards


def _num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize
