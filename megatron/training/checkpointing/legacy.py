"""Loads Megatron-LM's older checkpoints by presenting the per-rank files as a checkpoint in this project's format.

A run loads the result like its own checkpoint, in any layout, without optimizer state. Nothing is copied: the model
part of each rank determines which boxes of logical tensors its stored parameters fill. legacy_files.py reads the
files, and tools/convert_legacy.py writes the result to disk.
"""

import math
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata

from megatron.core.dist_checkpointing import VerifiedCheckpoint
from megatron.core.dist_checkpointing.errors import every_rank
from megatron.core.dist_checkpointing.manifest import Piece
from megatron.core.dist_checkpointing.storage import ReadsPieces, StoredPieces
from megatron.core.group_collectives import all_ranks_agree, gather_objects
from megatron.core.logical_tensors import Box, LogicalPiece, disjoint_parts, model_logical_pieces, pieces_of_tensor
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.checkpointing.folder import LEGACY_FILE
from megatron.training.checkpointing.legacy_files import (
    ChunkFacts,
    LegacyFiles,
    LegacyRank,
    check_legacy,
    read_legacy,
    to_names_here,
)
from megatron.training.checkpointing.megatron_core import tensors_of
from megatron.training.checkpointing.megatron_objects import values_without_state
from megatron.training.config import RunConfig


class BuildParts(Protocol):
    """Builds one rank's model parts in a given layout, on the meta device, in fp32 or a 16-bit dtype."""

    def __call__(
        self,
        run_config: RunConfig,
        *,
        padded_vocab_size: int,
        layout: dict[str, Any] | None = None,
        tensor: int = 0,
        pipeline: int = 0,
        expert: int = 0,
    ) -> list[Any]: ...


def legacy_values(folder: Path) -> dict[str, Any]:
    """Reads the values that a native checkpoint stores in its common file.

    Raises the same errors as LegacyFiles.open, and ValueError naming the argument if the model is not supported.
    """
    first = LegacyFiles.open(folder).first
    try:
        return values_without_state(first.args, iteration=first.iteration)
    except ValueError as error:
        raise ValueError(f"{first.path}: {error}") from error


def as_checkpoint(
    files: LegacyFiles,
    run_config: RunConfig,
    build_parts: BuildParts,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> VerifiedCheckpoint:
    """Presents the weights of all files under native keys. Each file is read once, by one of the ranks. Collective.

    run_config: settings of the model, with unpadded_vocab_size. process_group: None means all ranks, or this process
    alone. Raises ValueError on every rank, naming the file, if a file is missing or damaged, or if a weight is missing,
    has an unexpected shape, or belongs to no parameter.
    """
    group = every_rank(process_group)
    with all_ranks_agree(group):
        rows = files.vocabulary_rows(num_tokens=run_config.values["unpadded_vocab_size"])
        layout = files.layout
        own: list[_StoredPart] = []
        for number, rank in enumerate(files.ranks()):
            if number % group_size(group) != group_rank(group):
                continue
            place = {"tensor": rank.tensor, "pipeline": rank.pipeline, "expert": rank.expert}
            chunks = build_parts(run_config, padded_vocab_size=rows, layout=layout, **place)
            own += _stored_parts(files, rank, chunks, run_config.transformer)
    parts = [part for of_rank in gather_objects(own, group) for part in of_rank]
    with all_ranks_agree(group):
        return _view(files, parts)


@dataclass(frozen=True)
class _StoredPart:
    """One part of a logical tensor, stored as a window of a parameter in a file.

    file: file name in the checkpoint's folder. chunk: virtual stage. name: the parameter's name in this project.
    """

    file: str
    chunk: int
    facts: ChunkFacts
    name: str
    piece: LogicalPiece
    dtype: torch.dtype

    @property
    def box(self) -> Box:
        """Box of the logical tensor that this part fills."""
        return Box(self.piece.global_offset, self.piece.shape)


def _stored_parts(
    files: LegacyFiles, rank: LegacyRank, chunks: list[nn.Module], config: TransformerConfig
) -> Iterator[_StoredPart]:
    """Checks the file of a rank, and yields all parts of logical tensors that it stores."""
    path = files.path(rank)
    file = read_legacy(path)
    check_legacy(path)
    if len(chunks) != len(file.chunks):
        raise ValueError(f"{path} holds {len(file.chunks)} model chunks: must be {len(chunks)}")
    num_experts = (config.num_moe_experts or 0) // int(files.layout.get("expert_model_parallel_size", 1))
    for number, (chunk, stored) in enumerate(zip(chunks, file.chunks, strict=True)):
        facts = facts_of(chunk, num_experts=num_experts, hidden_size=config.hidden_size)
        state = to_names_here(stored, facts)
        wanted, logical = tensors_of(chunk), model_logical_pieces(chunk)
        _check_names_and_shapes(wanted, state, path=path)
        for name, tensor in wanted.items():
            for piece in pieces_of_tensor(name, tensor, logical):
                yield _StoredPart(f"{path.parent.name}/{LEGACY_FILE}", number, facts, name, piece, state[name].dtype)


def facts_of(chunk: nn.Module, *, num_experts: int, hidden_size: int) -> ChunkFacts:
    """Collects the facts about a model part that renaming requires. num_experts: number of local experts."""
    layers = [int(found[1]) for name in chunk.state_dict() if (found := re.match(r"decoder\.layers\.(\d+)\.", name))]
    return ChunkFacts(min(layers, default=0), num_experts, hidden_size)


def _check_names_and_shapes(wanted: dict[str, Tensor], state: dict[str, Tensor], *, path: Path) -> None:
    for name, tensor in wanted.items():
        if name not in state:
            raise ValueError(f"{path} has no {name}, which its arguments require")
        if state[name].shape != tensor.shape:
            raise ValueError(
                f"{path} has {name} with shape {list(state[name].shape)}: must be {list(tensor.shape)} according "
                "to its arguments"
            )
    unknown = sorted(state.keys() - wanted.keys())
    if unknown:
        raise ValueError(f"{path} has {unknown[0]}, which does not belong to the model that its arguments describe")


def _view(files: LegacyFiles, parts: list[_StoredPart]) -> VerifiedCheckpoint:
    """Combines the parts of all ranks into a checkpoint. Reads only the first of identical parts, such as replicas."""
    by_key: dict[str, list[_StoredPart]] = {}
    for part in parts:
        by_key.setdefault(part.piece.key, []).append(part)
    entries: dict[str, Any] = {}
    pieces: StoredPieces = {}
    sources: dict[tuple[str, Piece], _StoredPart] = {}
    for key, of_key in by_key.items():
        shape, dtype = of_key[0].piece.global_shape, of_key[0].dtype
        for part in of_key:
            if (part.piece.global_shape, part.dtype) != (shape, dtype):
                raise ValueError(
                    f"{files.folder} holds {key} as {list(part.piece.global_shape)} of {part.dtype} in "
                    f"{part.file}: must be {list(shape)} of {dtype} as in {of_key[0].file}"
                )
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks=[])
        found = disjoint_parts([part.box for part in of_key])
        num_elements = sum(box.volume for _, box in found)
        if num_elements != math.prod(shape):
            raise ValueError(f"{files.folder} holds {num_elements} elements of {key}: must be {math.prod(shape)}")
        for index, box in found:
            piece = Piece(key, box, start=0, num_bytes=box.volume * dtype.itemsize, data_start=None, crc32=None)
            pieces.setdefault(key, []).append((of_key[index].file, piece))
            sources[of_key[index].file, piece] = of_key[index]
    return _LegacyCheckpoint(files.folder, {}, Metadata(entries), pieces, sources)


@dataclass(frozen=True)
class _LegacyCheckpoint(VerifiedCheckpoint):
    """A checkpoint with native keys, backed by per-rank files. sources: maps each piece to the part of a file."""

    sources: dict[tuple[str, Piece], _StoredPart]

    @property
    def common(self) -> dict[str, Any]:
        """Values of the common file, as returned by `legacy_values`."""
        return legacy_values(self.folder)

    def open_file(self, name: str) -> AbstractContextManager[ReadsPieces]:
        """Maps a rank's file into memory. Raises ValueError if it can no longer be read."""
        return nullcontext(_MappedFile(self, name, read_legacy(self.folder / name).chunks))


@dataclass(frozen=True)
class _MappedFile:
    """The memory-mapped file of one rank, with its virtual stages. Tensors remain on disk until they are read."""

    checkpoint: _LegacyCheckpoint
    name: str
    chunks: list[dict[str, Tensor]]

    def read(self, piece: Piece, window: Box, *, dtype: torch.dtype, target: Tensor) -> None:
        """Fills `target`, [*window shape], any strides, dtype and device, with the elements of `window`.

        dtype: dtype of the stored elements, which was checked when the files were opened.
        """
        source = self.checkpoint.sources[self.name, piece]
        tensor = to_names_here(self.chunks[source.chunk], source.facts)[source.name]
        assert tensor.dtype == dtype, "all files have been checked"
        # Stacked experts are stored transposed.
        target.detach().copy_(source.piece.view_of(tensor.contiguous())[window.relative_to(source.box)])
