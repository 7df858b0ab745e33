"""Reads and writes the safetensors files of a folder, one tensor at a time: one file, or shards and their index.

Reading requires the package safetensors. Does not interpret the tensors.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.storage import bytes_of

ONE_FILE = "model.safetensors"
INDEX_FILE = f"{ONE_FILE}.index.json"
_LENGTH_BYTES = 8
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
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFiles:
    """The tensors in a folder's safetensors files. `kinds` describes them by name, and read() returns one."""

    def __init__(self, folder: Path) -> None:
        """Reads only the headers.

        Raises ValueError naming a file that is missing, damaged or does not match the index.
        """
        self.folder = folder
        self.kinds: dict[str, TensorKind] = {}
        self._paths: dict[str, Path] = {}
        index = _index(folder)
        for file in _file_names(folder, index):
            path = folder / file
            with _opened(path) as tensors:
                for name in tensors.keys():
                    header = tensors.get_slice(name)
                    code, shape = header.get_dtype(), tuple(header.get_shape())
                    if code not in _DTYPES:
                        raise ValueError(f"{path}: {name} is {code}: must be one of {', '.join(_DTYPES)}")
                    # The index decides between copies, and must name a file that has one.
                    if index.get(name, file) == file:
                        self.kinds[name], self._paths[name] = TensorKind(shape, _DTYPES[code]), path
        for name, file in index.items():
            if name not in self._paths:
                raise ValueError(f"{folder / file} does not contain {name}, which {INDEX_FILE} lists for this file")

    def read(self, name: str) -> torch.Tensor:
        """Returns a tensor on the host, any shape and dtype, as described by `kinds`.

        Its memory is a private mapping of the file: pages are read on first use, and writes do not change the file.
        """
        with _opened(self._paths[name]) as tensors:
            return cast(torch.Tensor, tensors.get_tensor(name))

    def have_same(self, name: str, other: str) -> bool:
        """Returns whether two tensors have the same shape, dtype and bytes."""
        if self.kinds[name] != self.kinds[other]:
            return False
        one, two = (self.read(key).reshape(-1).view(torch.uint8) for key in (name, other))
        return torch.equal(one, two)

    def file_of(self, name: str) -> Path:
        """Returns the file that contains a tensor."""
        return self._paths[name]


def write_tensor_files(
    folder: Path,
    kinds: Mapping[str, TensorKind],
    *,
    read: Callable[[str], torch.Tensor],
    max_shard_bytes: int,
    metadata: Mapping[str, Any],
    always_index: bool = False,
) -> None:
    """Writes the tensors of `kinds` to an existing folder, as one file or as shards of at most max_shard_bytes.

    read: returns a tensor, any shape and dtype, as described by `kinds`. It is called just before the tensor is
    written, so that only one tensor is in memory at a time. metadata: additional entries of the index. always_index:
    write an index even for a single file.
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
    """Yields a temporary folder, which is renamed to `save` after the body, or removed if the body fails.

    Raises ValueError if `save` exists.
    """
    if save.exists():
        raise ValueError(f"--save is {save}: it already exists and is not overwritten; give a new folder")
    save.parent.mkdir(parents=True, exist_ok=True)
    with folders.atomic_folder(save) as temporary:
        yield temporary


def _opened(path: Path) -> Any:
    """Opens a file with safetensors. The result is a context manager."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ValueError(
            "safetensors is not installed: pip install 'safetensors>=0.4', or this project's extra safetensors"
        ) from error
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is truncated or corrupt: {error}") from error


def _file_names(folder: Path, index: Mapping[str, str]) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give the folder of config.json and *.safetensors")
    names = sorted(set(index.values())) or [ONE_FILE]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        found = sorted(path.name for path in folder.glob("*.safetensors")) or "none"
        raise ValueError(f"{folder} does not contain {', '.join(missing)}; its safetensors files: {found}")
    return names


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX_FILE
    if not path.is_file():
        return {}
    try:
        files = dict(json.loads(path.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error}") from error
    for name, file in files.items():
        if not isinstance(file, str) or file != Path(file).name:
            raise ValueError(f"{path}: {name} is in {file!r}: must be the name of a file in the same folder")
    return files


def _shards(kinds: Mapping[str, TensorKind], max_bytes: int) -> list[list[str]]:
    """Returns the tensor names of each shard, in order. A shard has at most max_bytes, or a single larger tensor."""
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
    """Writes one file: the length of the header, the header as JSON, and the tensors without gaps.

    The library requires all tensors of a file in memory: 2050 MiB for a file of 2 GiB with tensors of 32 MiB, where
    this function requires 35 MiB. A shard has 5 GB by default.
    """
    # Wide elements first, so that each tensor is aligned for readers that map the file.
    order = sorted(kinds, key=lambda name: -kinds[name].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in order:
        kind, end = kinds[name], offset + kinds[name].num_bytes
        header[name] = {"dtype": _CODES[kind.dtype], "shape": list(kind.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(_LENGTH_BYTES, "little") + text)
        for name in order:
            tensor = read(name)
            assert (tuple(tensor.shape), tensor.dtype) == (kinds[name].shape, kinds[name].dtype), name
            file.write(bytes_of(tensor))
            # Freed before the next tensor is created.
            del tensor
        file.flush()
        os.fsync(file.fileno())
