"""Loads Megatron-LM's older checkpoints: shows the weights in its ranks' files as those of a checkpoint of ours.

A run loads the result like its own checkpoint, in any layout, without optimizer state. Nothing is copied: the part of
the model that each file's rank has says which boxes of logical tensors its parameters fill. legacy_files.py reads the
files, and tools/convert_legacy.py writes the result to disk.
"""

import argparse
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


class BuildParts(Protocol):
    """Builds the parts of the model of `args` that a rank of a layout has, without memory and in fp32 or 16 bits."""

    def __call__(
        self,
        args: argparse.Namespace,
        *,
        padded_vocab_size: int,
        layout: dict[str, Any] | None = None,
        tensor: int = 0,
        pipeline: int = 0,
        expert: int = 0,
    ) -> list[Any]: ...


def legacy_values(folder: Path) -> dict[str, Any]:
    """Reads what the common file of one of our checkpoints would hold; raises as LegacyFiles.open does.

    Also raises ValueError naming the value for a model that does not exist here.
    """
    first = LegacyFiles.open(folder).first
    try:
        return values_without_state(first.args, iteration=first.iteration)
    except ValueError as error:
        raise ValueError(f"{first.path}: {error}") from error


def as_checkpoint(
    files: LegacyFiles,
    args: argparse.Namespace,
    build_parts: BuildParts,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> VerifiedCheckpoint:
    """Reads all files once, shared among the ranks, and returns their weights under our keys. Collective.

    args: those of the model, with unpadded_vocab_size. process_group: None is all ranks, or this process alone. Raises
    ValueError on every rank, naming the file, if it is missing or damaged, or if a weight of the model is missing, has
    another shape, or belongs to no parameter.
    """
    group = every_rank(process_group)
    with all_ranks_agree(group):
        rows = files.vocabulary_rows(num_tokens=args.unpadded_vocab_size)
        layout = files.layout
        own: list[_StoredPart] = []
        for number, rank in enumerate(files.ranks()):
            if number % group_size(group) != group_rank(group):
                continue
            place = {"tensor": rank.tensor, "pipeline": rank.pipeline, "expert": rank.expert}
            chunks = build_parts(args, padded_vocab_size=rows, layout=layout, **place)
            own += _stored_parts(files, rank, chunks, args)
    parts = [part for of_rank in gather_objects(own, group) for part in of_rank]
    with all_ranks_agree(group):
        return _view(files, parts)


@dataclass(frozen=True)
class _StoredPart:
    """A part of a logical tensor: a window of a parameter in a file.

    file: name in the checkpoint's folder. chunk: virtual stage. name: parameter's name here.
    """

    file: str
    chunk: int
    facts: ChunkFacts
    name: str
    piece: LogicalPiece
    dtype: torch.dtype

    @property
    def box(self) -> Box:
        """The box of the logical tensor."""
        return Box(self.piece.global_offset, self.piece.shape)


def _stored_parts(
    files: LegacyFiles, rank: LegacyRank, chunks: list[nn.Module], args: argparse.Namespace
) -> Iterator[_StoredPart]:
    """Checks the file of a rank, and yields all parts in it."""
    path = files.path(rank)
    file = read_legacy(path)
    check_legacy(path)
    if len(chunks) != len(file.chunks):
        raise ValueError(f"{path} holds {len(file.chunks)} chunks of the model: must be {len(chunks)}")
    num_experts = (args.num_experts or 0) // int(files.layout.get("expert_model_parallel_size", 1))
    for number, (chunk, stored) in enumerate(zip(chunks, file.chunks, strict=True)):
        facts = facts_of(chunk, num_experts=num_experts, hidden_size=args.hidden_size)
        state = to_names_here(stored, facts)
        wanted, logical = tensors_of(chunk), model_logical_pieces(chunk)
        _check_names_and_shapes(wanted, state, path=path)
        for name, tensor in wanted.items():
            for piece in pieces_of_tensor(name, tensor, logical):
                yield _StoredPart(f"{path.parent.name}/{LEGACY_FILE}", number, facts, name, piece, state[name].dtype)


def facts_of(chunk: nn.Module, *, num_experts: int, hidden_size: int) -> ChunkFacts:
    """Returns the facts of a part of the model. num_experts: of its rank."""
    layers = [int(found[1]) for name in chunk.state_dict() if (found := re.match(r"decoder\.layers\.(\d+)\.", name))]
    return ChunkFacts(min(layers, default=0), num_experts, hidden_size)


def _check_names_and_shapes(wanted: dict[str, Tensor], state: dict[str, Tensor], *, path: Path) -> None:
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


def _view(files: LegacyFiles, parts: list[_StoredPart]) -> VerifiedCheckpoint:
    """Returns the checkpoint of all ranks' parts. Of equal parts, as replicas have, it reads the first."""
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
                    f"{files.folder} holds {key} as {list(part.piece.global_shape)} of {part.dtype} in {part.file}: "
                    f"must be {list(shape)} of {dtype} as in {of_key[0].file}"
                )
        entries[key] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks=[])
        found = disjoint_parts([part.box for part in of_key])
        num_elements = sum(box.volume for _, box in found)
        if num_elements != math.prod(shape):
            raise ValueError(f"{num_elements} elements of {key} are in {files.folder}, out of {math.prod(shape)}")
        for index, box in found:
            piece = Piece(key, box, start=0, num_bytes=box.volume * dtype.itemsize, data_start=None, crc32=None)
            pieces.setdefault(key, []).append((of_key[index].file, piece))
            sources[of_key[index].file, piece] = of_key[index]
    return _LegacyCheckpoint(files.folder, {}, Metadata(entries), pieces, sources)


@dataclass(frozen=True)
class _LegacyCheckpoint(VerifiedCheckpoint):
    """A checkpoint under our keys, whose files are of ranks. sources: the part of the file for each piece."""

    sources: dict[tuple[str, Piece], _StoredPart]

    @property
    def common(self) -> dict[str, Any]:
        """The values of `legacy_values`."""
        return legacy_values(self.folder)

    def open_file(self, name: str) -> AbstractContextManager[ReadsPieces]:
        """Maps a rank's file into memory. Raises ValueError if it cannot be read any more."""
        return nullcontext(_MappedFile(self, name, read_legacy(self.folder / name).chunks))


@dataclass(frozen=True)
class _MappedFile:
    """A file of a rank, by virtual stages, whose tensors stay on disk until they are read."""

    checkpoint: _LegacyCheckpoint
    name: str
    chunks: list[dict[str, Tensor]]

    def read(self, piece: Piece, window: Box, *, dtype: torch.dtype, target: Tensor) -> None:
        """Fills `target`, [*window shape], any strides, dtype and device, with the elements of `window`.

        The file must hold them in `dtype`, as when it was checked.
        """
        source = self.checkpoint.sources[self.name, piece]
        tensor = to_names_here(self.chunks[source.chunk], source.facts)[source.name]
        assert tensor.dtype == dtype, "all files have been checked"
        # Stacked experts are stored transposed.
        target.detach().copy_(source.piece.view_of(tensor.contiguous())[window.relative_to(source.box)])
