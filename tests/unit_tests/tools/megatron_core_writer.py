"""Writes distributed checkpoints like Megatron-Core's, boxes of stacked tensors, with torch, and reads them."""

import argparse
import io
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from megatron.core.dist_checkpointing import ShardedTensor, StreamReader, VerifiedCheckpoint
from megatron.training.checkpointing.megatron_core_files import MegatronCoreFiles

Boxes = list[tuple[tuple[int, ...], tuple[int, ...]]]  # offset and shape of each box


class _BoxPlanner(SavePlanner):
    """Plans writes of boxes. tensors: whole tensors and their boxes; objects: bytes by key."""

    def __init__(self, tensors: dict[str, tuple[Tensor, Boxes]], objects: dict[str, bytes]) -> None:
        self._tensors, self._objects = tensors, objects

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        pass

    def create_local_plan(self) -> SavePlan:
        items = [
            WriteItem(
                MetadataIndex(key, torch.Size(offset)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)),
                    TensorProperties(dtype=tensor.dtype),
                    tensor.shape,
                ),
            )
            for key, (tensor, boxes) in self._tensors.items()
            for offset, shape in boxes
        ]
        return SavePlan(items + [WriteItem(MetadataIndex(key), WriteItemType.BYTE_IO) for key in self._objects])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        # Like Megatron-Core, which compares them with the plans of the next save.
        metadata.all_local_plans = all_plans
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        key, data = write_item.index.fqn, write_item.tensor_data
        if data is None:
            return io.BytesIO(self._objects[key])
        window = tuple(slice(o, o + n) for o, n in zip(data.chunk.offsets, data.chunk.sizes, strict=True))
        return self._tensors[key][0][window].clone()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Returns the weights and optimizer states of a checkpoint, by key: any shape and dtype."""
    files = MegatronCoreFiles.open(folder)
    raw = VerifiedCheckpoint(folder, {}, files.metadata, files.checked())
    found = {key: torch.empty(shape, dtype=dtype) for key, (shape, dtype) in raw.tensors.items()}
    StreamReader(raw).fill([ShardedTensor.whole(key, tensor) for key, tensor in found.items()])
    return found


def saved(value: Any) -> bytes:
    """Returns the output of torch.save."""
    content = io.BytesIO()
    torch.save(value, content)
    return content.getvalue()


def write_entries(folder: Path, tensors: dict[str, Tensor], objects: dict[str, bytes]) -> None:
    """Writes tensors, each in one box, and the bytes of objects, without common.pt."""
    boxes: dict[str, tuple[Tensor, Boxes]] = {
        key: (tensor, [((0,) * tensor.ndim, tuple(tensor.shape))]) for key, tensor in tensors.items()
    }
    _write(folder, boxes, objects)


def _write(folder: Path, tensors: dict[str, tuple[Tensor, Boxes]], objects: dict[str, bytes]) -> None:
    dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=_BoxPlanner(tensors, objects))
    (folder / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def write_megatron_core(
    folder: Path, tensors: dict[str, tuple[Tensor, Boxes]], *, args: dict[str, Any] | None, iteration: int | None
) -> None:
    """Writes a checkpoint into `folder`, with data that a run stores in addition to weights."""
    objects = {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": b"", "rng_state/shard_0_1": b"state"}
    # Only one parameter has a moment, and there is no step count, so the optimizer state cannot be resumed.
    moment = {
        f"optimizer.state.exp_avg.{key}": tensors[key] for key in ("decoder.final_layernorm.weight",) if key in tensors
    }
    _write(folder, {**tensors, **moment}, objects)
    common = {} if iteration is None else {"iteration": iteration}
    torch.save(common if args is None else {**common, "args": argparse.Namespace(**args)}, folder / "common.pt")
