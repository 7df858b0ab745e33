"""Safetensors files in a folder, one or several with their index: read and written a tensor at a time.

Names and meanings of tensors are the caller's. The format: eight bytes with the length of a JSON header, the header,
which says for each tensor type, shape and place, and the tensors without gaps.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.storage import bytes_of

ONE_FILE = "model.safetensors"
INDEX_FILE = f"{ONE_FILE}.index.json"
_METADATA = "__metadata__"  # of a header: not a tensor
_LENGTH_BYTES = 8
_CHUNK_BYTES = 1 << 20
# Readers refuse longer headers, so that a file of another kind is not taken for a huge one.
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TensorKind:
    """Shape and type of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    """Where a tensor's elements begin."""

    path: Path
    start: int


class TensorFiles:
    """The tensors of a folder's safetensors files: `kinds` by name, and their values one at a time."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError naming the file that is missing, cut off or of another kind; reads headers alone."""
        self.folder = folder
        self.kinds: dict[str, TensorKind] = {}
        self._places: dict[str, _Place] = {}
        for name in _file_names(folder):
            self._add(folder / name)
        self._check_index()

    def read(self, name: str) -> torch.Tensor:
        """A tensor of the files: any shape and dtype, as `kinds` says, on the host, in memory of its own."""
        kind, place = self.kinds[name], self._places[name]
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        with open(place.path, "rb", buffering=0) as file:
            left, start = bytes_of(tensor), place.start
            while len(left):
                count = os.preadv(file.fileno(), [left], start)
                if not count:
                    raise ValueError(f"{place.path} has become shorter: {name} is cut off")
                left, start = left[count:], start + count
        return tensor

    def have_same(self, name: str, other: str) -> bool:
        """Whether two tensors have the same shape, type and bytes."""
        if self.kinds[name] != self.kinds[other]:
            return False
        pairs = zip(self._chunks(name), self._chunks(other), strict=True)
        return all(one == two for one, two in pairs)

    def _chunks(self, name: str) -> Iterator[bytes]:
        place, left = self._places[name], self.kinds[name].num_bytes
        with open(place.path, "rb") as file:
            file.seek(place.start)
            while left > 0:
                chunk = file.read(min(left, _CHUNK_BYTES))
                left -= len(chunk) or left
                yield chunk

    def file_of(self, name: str) -> Path:
        """The file that a tensor lies in."""
        return self._places[name].path

    def _add(self, path: Path) -> None:
        header, begin = _read_header(path)
        size = path.stat().st_size
        end, entries = (
            0,
            {name: _read_entry(entry, name, path=path) for name, entry in header.items() if name != _METADATA},
        )
        for name, (kind, first) in sorted(entries.items(), key=lambda item: (item[1][1], item[1][0].num_bytes)):
            if first != end:
                raise ValueError(f"{path} is corrupt: {name} begins at byte {first} of the tensors: must be {end}")
            end += kind.num_bytes
            if begin + end > size:
                raise ValueError(f"{path} is truncated: {size} bytes, {name} ends at {begin + end}")
            self.kinds[name], self._places[name] = kind, _Place(path, begin + first)
        if begin + end < size:
            raise ValueError(f"{path} is corrupt: {size} bytes, its tensors end at {begin + end}")

    def _check_index(self) -> None:
        for name, file in _index(self.folder).items():
            if name not in self._places:
                raise ValueError(f"{self.folder / file} has no {name}, which {INDEX_FILE} says is in it")


def write_tensor_files(
    folder: Path,
    kinds: Mapping[str, TensorKind],
    *,
    read: Callable[[str], torch.Tensor],
    max_shard_bytes: int,
    metadata: Mapping[str, Any],
    always_index: bool = False,
) -> None:
    """Writes the tensors of `kinds` into a folder that is there: one file, or shards of at most that many bytes.

    read: gives each when its turn has come: any shape and dtype, as in `kinds`. metadata: of the index. always_index:
    with one file too.
    """
    shards = _shards(kinds, max_shard_bytes)
    numbered = always_index or len(shards) > 1
    names: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if numbered else ONE_FILE
        _write_file(folder / file, {key: kinds[key] for key in keys}, read=read)
        names |= dict.fromkeys(keys, file)
    if numbered:
        total = sum(kind.num_bytes for kind in kinds.values())
        index = {
            "metadata": {"total_size": total, **metadata},
            "weight_map": {key: names[key] for key in sorted(names)},
        }
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


@contextmanager
def new_folder(save: Path) -> Iterator[Path]:
    """A folder to fill, which becomes that of --save at the end of the body, and is removed where that fails.

    Raises ValueError where `save` is there already.
    """
    if save.exists():
        raise ValueError(f"--save is {save}: it is there already, and is not overwritten; give a new folder")
    save.parent.mkdir(parents=True, exist_ok=True)
    with folders.atomic_folder(save) as temporary:
        yield temporary


def _file_names(folder: Path) -> Iterable[str]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the one that holds config.json and *.safetensors")
    names = sorted(set(_index(folder).values())) or [ONE_FILE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        found = sorted(path.name for path in folder.glob("*.safetensors")) or "none"
        raise ValueError(f"{folder} has no {', '.join(missing)}; its safetensors files: {found}")
    return names


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        files = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is no index of safetensors files: {error}") from error
    for name, file in files.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise ValueError(f"{path}: {name} is in {file!r}: must be the name of a file beside it")
    return files


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file, and where what follows it begins."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 0 < length <= min(_MAX_HEADER_BYTES, path.stat().st_size - _LENGTH_BYTES):
            raise ValueError(f"{path} is no safetensors file, or is truncated")
        try:
            return dict(json.loads(file.read(length))), _LENGTH_BYTES + length
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error


def _read_entry(entry: Any, name: str, *, path: Path) -> tuple[TensorKind, int]:
    """What a header says of a tensor: its kind, and where it begins behind the header."""
    try:
        code, shape, (first, last) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is corrupt: the header has no type, shape and place of {name}") from error
    if code not in _DTYPES:
        raise ValueError(f"{path}: {name} is {code}: must be one of {', '.join(_DTYPES)}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, first, last)):
        raise ValueError(f"{path} is corrupt: {name} has shape {list(shape)} and lies at {[first, last]}")
    kind = TensorKind(shape, _DTYPES[code])
    if last - first != kind.num_bytes:
        raise ValueError(f"{path} is corrupt: {name} has {last - first} bytes for {list(shape)}")
    return kind, first


def _shards(kinds: Mapping[str, TensorKind], max_bytes: int) -> list[list[str]]:
    """Names in order, each shard of at most so many bytes, or of one tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, kind in kinds.items():
        if not shards or kind.num_bytes > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= kind.num_bytes
    return shards


def _write_file(path: Path, kinds: Mapping[str, TensorKind], *, read: Callable[[str], torch.Tensor]) -> None:
    # Wide elements first: then each begins at a multiple of its width, as readers that map files want it.
    order = sorted(kinds, key=lambda name: -kinds[name].dtype.itemsize)
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    offset = 0
    for name in order:
        kind, end = kinds[name], offset + kinds[name].num_bytes
        header[name] = {"dtype": _CODES[kind.dtype], "shape": list(kind.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with open(path, "xb", buffering=0) as file:
        _write_all(file.fileno(), len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name in order:
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == (kinds[name].shape, kinds[name].dtype), name
            _write_all(file.fileno(), bytes_of(tensor))
            # Before the next one is made.
            del tensor
        os.fsync(file.fileno())


def _write_all(descriptor: int, content: bytes | memoryview) -> None:
    left = memoryview(content)
    while len(left):
        left = left[os.write(descriptor, left) :]
