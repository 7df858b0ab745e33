"""Merges the low-rank adapters of a checkpoint into its weights, one tensor at a time.

megatron/core/transformer/lora.py defines the adapters.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor, StreamReader, VerifiedCheckpoint, save_stream
from megatron.core.transformer.lora import is_adapter
from megatron.tools.stored_checkpoints import NOT_WEIGHTS, checkpoint_of_load
from megatron.training.checkpointing.folder import RELEASE, carry_companions, complete_iterations, write_release_tracker
from megatron.training.checkpointing.run_values import load_run_values

# Names of a linear layer's weights: whole, split into gate and up, or split into queries, keys and values.
_WEIGHT = re.compile(r"(.+\.)weight(?:\.(gate|up|q|k|v))?")


def merge_adapters(load: Path, save: Path, *, step: int | None = None) -> Path:
    """Writes a checkpoint to start from, with the adapters merged into the weights, and returns its folder.

    Raises ValueError if there is no checkpoint, it has no adapters, or `save` already contains checkpoints.
    """
    found = checkpoint_of_load(load, step)
    common = load_run_values(found.path)
    arguments = common["args"]
    if arguments.get("lora_rank") is None:
        raise ValueError(f"--load is {load}: its checkpoint has no adapters to merge")
    if complete_iterations(save) or (save / RELEASE).exists():
        raise ValueError(f"--save is {save}: it already contains checkpoints; give a new folder")
    merged = _Merged(dist_checkpointing.verify(found.path), arguments["lora_alpha"] / arguments["lora_rank"])
    contents = {"optimizer": False, "rng": False}
    # The remaining LoRA settings are meaningless without adapters.
    others = {name: value for name, value in arguments.items() if not name.startswith("lora_")}
    values = {**common, "args": {**others, "lora_rank": None}, "contents": contents, "frozen": []}
    values = {name: value for name, value in values.items() if name not in ("optimizer", "scheduler")}
    save_stream(merged.tensors(), save / RELEASE, common=values)
    carry_companions(str(load), str(save))
    write_release_tracker(str(save))
    return save / RELEASE


class _Merged:
    """The weights of a checkpoint with their adapters added."""

    def __init__(self, checkpoint: VerifiedCheckpoint, scale: float) -> None:
        self._kinds, self._reader, self._scale = checkpoint.tensors, StreamReader(checkpoint), scale

    def tensors(self) -> Iterator[ShardedTensor]:
        """Yields the merged weights one at a time, any shape, in the stored dtype."""
        for key in self._kinds:
            if not key.startswith(NOT_WEIGHTS) and not is_adapter(key):
                yield ShardedTensor.whole(key, self._with_adapter(key))

    def _with_adapter(self, key: str) -> Tensor:
        weight, found = self._read(key), _WEIGHT.fullmatch(key)
        if found is None or found[1] + "lora_a" not in self._kinds:
            return weight
        prefix, part = found.groups()
        rows = self._read(f"{prefix}lora_b.{part}" if part in ("gate", "up") else f"{prefix}lora_b")
        if part in ("q", "k", "v"):
            rows = self._of_heads(rows, part, prefix=prefix)
        # In fp32, so that the sum is rounded once.
        added = rows.float() @ self._read(prefix + "lora_a").float()
        return (weight.float() + self._scale * added).to(weight.dtype)

    def _of_heads(self, rows: Tensor, part: str, *, prefix: str) -> Tensor:
        """Splits rows [(q + 2) G D, r] by group into queries, key and value.

        Returns [G, q, D, r] for queries, and [G, D, r] for key and value, in the dtype of `rows`.
        """
        groups, queries, width = self._kinds[f"{prefix}weight.q"][0][:3]
        by_group = rows.view(groups, queries + 2, width, -1)
        return by_group[:, :queries] if part == "q" else by_group[:, queries + ("k", "v").index(part)]

    def _read(self, key: str) -> Tensor:
        shape, dtype = self._kinds[key]
        tensor = torch.empty(shape, dtype=dtype)
        self._reader.fill([ShardedTensor.whole(key, tensor)])
        return tensor
