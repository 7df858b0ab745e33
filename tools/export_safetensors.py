"""Weights of a canonical checkpoint as safetensors files, by the names that checkpoints have: no layout, no padding.

Shards and their index are named as Hugging Face names them. A model of transformers has other names: see
hugging_face/convert.py.
"""

from pathlib import Path

import torch

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, StreamReader
from tools.safetensors_files import TensorKind, new_folder, write_tensor_files
from tools.stored_checkpoints import checkpoint_of_load

# Optimizer and generators; everything else is the model's.
NOT_WEIGHTS = ("optimizer.", "rng.")


def export_safetensors(load: Path, save: Path, *, step: int | None = None, max_shard_bytes: int) -> Path:
    """Writes the weights of a checkpoint into the new folder `save`, which appears when all is in it; returns it.

    One tensor at a time is in memory. Raises ValueError where there is no checkpoint, it is damaged, or `save` is
    there already.
    """
    found = checkpoint_of_load(load, step)
    with new_folder(save) as temporary:
        checkpoint = dist_checkpointing.verify(found.path)
        stored = {key: kind for key, kind in sorted(checkpoint.tensors.items()) if not key.startswith(NOT_WEIGHTS)}
        kinds = {key: TensorKind(*kind) for key, kind in stored.items()}
        reader = StreamReader(checkpoint)

        def read(key: str) -> torch.Tensor:
            tensor = torch.empty(kinds[key].shape, dtype=kinds[key].dtype)
            reader.fill([ShardedTensor.whole(key, tensor)])
            return tensor

        write_tensor_files(
            temporary,
            kinds,
            read=read,
            max_shard_bytes=max_shard_bytes,
            metadata={"iteration": found.iteration},
            always_index=True,
        )
    return save
