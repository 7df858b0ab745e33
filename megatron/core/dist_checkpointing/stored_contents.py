"""What a checkpoint stores, as its manifest and torch's metadata say together; refused where they contradict.

Both have passed their checksums: what is wrong here, no save of ours has written. No tensor is read.
"""

import math
import re

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron.core.dist_checkpointing.boxes import Box, whole
from megatron.core.dist_checkpointing.manifest import Manifest, Piece

StoredPieces = dict[str, list[tuple[str, Piece]]]
# Elements that lie one after the other as they are; not quantized ones, which have a scale beside them.
_PLAIN_DTYPE = re.compile(r"torch\.(b?float\w+|complex\d+|u?int(8|16|32|64)|bool)")


def check_metadata(metadata: object) -> Metadata:
    """`metadata`, if it says of each key what torch says of a tensor or an object; else raises ValueError."""
    if type(metadata) is not Metadata or not isinstance(vars(metadata).get("state_dict_metadata"), dict):
        raise ValueError(f"holds a {type(metadata).__name__} that lists no tensors")
    for key, entry in metadata.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, (TensorStorageMetadata, BytesStorageMetadata)):
            raise ValueError(f"{key!r:.80} is neither a tensor nor an object")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(key, entry)
    return metadata


def _check_tensor(key: str, entry: TensorStorageMetadata) -> None:
    facts = vars(entry)
    if not _is_shape(facts.get("size")) or math.prod(entry.size) >= 1 << 60:
        raise ValueError(f"{key} has the size {facts.get('size')!r:.80}")
    properties = facts.get("properties")
    dtype = vars(properties).get("dtype") if isinstance(properties, TensorProperties) else None
    if not isinstance(dtype, torch.dtype) or not _PLAIN_DTYPE.fullmatch(str(dtype)):
        raise ValueError(f"{key} has the dtype {dtype}, which is not stored here")


def stored_pieces(files: Manifest, metadata: Metadata) -> StoredPieces:
    """File and piece of everything stored, by key; metadata: checked.

    Raises ValueError where a piece lies outside its tensor or its file, or too few elements are stored.
    """
    pieces = [(name, piece) for name, entry in files.items() for piece in entry.pieces]
    if not pieces:
        # Format version 1: torch's metadata alone knows.
        pieces = _pieces_of_metadata(files, metadata)
    by_key: StoredPieces = {key: [] for key in metadata.state_dict_metadata}
    for name, piece in pieces:
        if piece.key not in by_key:
            raise ValueError(f"{name} holds {piece}, which the metadata does not list")
        by_key[piece.key].append((name, piece))
    for key, held in by_key.items():
        entry = metadata.state_dict_metadata[key]
        if isinstance(entry, TensorStorageMetadata):
            _check_pieces(entry, held, key=key)
        elif not held or any(piece.box is not None for _, piece in held):
            raise ValueError(f"the object {key} is not stored")
    return by_key


def _check_pieces(entry: TensorStorageMetadata, held: list[tuple[str, Piece]], *, key: str) -> None:
    box, itemsize, num_elements = whole(tuple(entry.size)), entry.properties.dtype.itemsize, 0
    for name, piece in held:
        if piece.box is None or len(piece.box.shape) != len(box.shape) or not piece.box.is_inside(box):
            raise ValueError(f"{name} holds {piece}, which is no part of a tensor of {list(entry.size)}")
        begin = piece.start if piece.data_start is None else piece.data_start
        if begin < piece.start or begin + piece.box.volume * itemsize > piece.end:
            raise ValueError(f"{name} has no room for the elements of {piece} in its {piece.num_bytes} bytes")
        num_elements += piece.box.volume
    if num_elements != math.prod(entry.size):
        raise ValueError(f"{num_elements} elements of {key} are stored, which has {math.prod(entry.size)}")


def _pieces_of_metadata(files: Manifest, metadata: Metadata) -> list[tuple[str, Piece]]:
    stored = vars(metadata).get("storage_data")
    if not isinstance(stored, dict):
        raise ValueError("the metadata does not say where tensors are")
    pieces = []
    for index, info in stored.items():
        is_index = isinstance(index, MetadataIndex) and isinstance(index.fqn, str)
        if not is_index or not isinstance(info, _StorageInfo):
            raise ValueError(f"{index!r:.80} is stored as {info!r:.80}")
        place = vars(info)
        name, start, num_bytes = place.get("relative_path"), place.get("offset", -1), place.get("length", -1)
        if name not in files or not _is_shape((start, num_bytes)) or start + num_bytes > files[name].num_bytes:
            raise ValueError(
                f"{index.fqn} is in {name!r:.80}, bytes {start!r:.20} + {num_bytes!r:.20}: no file has these"
            )
        pieces.append((name, Piece(index.fqn, _chunk_box(metadata, index), start, num_bytes, None, None)))
    return pieces


def _chunk_box(metadata: Metadata, index: MetadataIndex) -> Box | None:
    if index.offset is None:
        return None
    entry = metadata.state_dict_metadata.get(index.fqn)
    chunks = vars(entry).get("chunks") if isinstance(entry, TensorStorageMetadata) else None
    for chunk in chunks if isinstance(chunks, list) else ():
        facts = vars(chunk) if isinstance(chunk, ChunkStorageMetadata) else {}
        offset, shape = facts.get("offsets", ()), facts.get("sizes", ())
        if offset == index.offset and _is_shape(offset) and _is_shape(shape) and len(offset) == len(shape):
            return Box(tuple(offset), tuple(shape))
    raise ValueError(f"{index.fqn} has no piece at {index.offset!r:.80}")


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)
