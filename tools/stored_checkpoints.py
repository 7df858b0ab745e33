"""Finds, verifies and compares checkpoints on disk, and selects checkpoints to delete.

Requires no process group and no model. tools/checkpoint.py is the command line.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing import ShardedTensor, StreamReader, VerifiedCheckpoint, load_items
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.manifest import (
    MANIFEST_FILE,
    FileEntry,
    Piece,
    read_manifest,
    verify_part,
    verify_size,
)
from megatron.training.checkpointing.folder import (
    FoundCheckpoint,
    complete_iterations,
    find_checkpoint,
    iteration_folder,
    iteration_of_text,
    read_tracker,
)

# Prefixes of checkpoint entries that are not weights of the model.
NOT_WEIGHTS = ("optimizer.", "rng.")
# Number of bytes of each tensor that are compared at a time.
_WINDOW_BYTES = 64 << 20


def named_checkpoint(path: Path, step: int | None) -> Path:
    """Returns `path` if it is a checkpoint, else the checkpoint of --ckpt-step, or the latest, in the folder `path`.

    Raises ValueError if there is none.
    """
    if step is None and (path / MANIFEST_FILE).is_file():
        return path
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder: give a checkpoint, or the folder that --save wrote")
    found = find_checkpoint(str(path), step=step)
    if found is None:
        raise ValueError(f"{path} contains no checkpoint")
    return found.path


def checkpoint_of_load(load: Path, step: int | None) -> FoundCheckpoint:
    """Returns the checkpoint of --ckpt-step, or the latest, in the folder of --load.

    Raises ValueError if there is none.
    """
    found = find_checkpoint(str(load), step=step)
    if found is None:
        raise ValueError(f"--load is {load}: no checkpoint found; give a folder that --save wrote")
    return found


def checkpoints_in(path: Path, step: int | None) -> list[Path]:
    """Returns `path` if it is a checkpoint, else the checkpoints in the folder `path`, oldest first.

    step: return only the checkpoint of this iteration. Raises ValueError if there is none.
    """
    if step is not None or (path / MANIFEST_FILE).is_file():
        return [named_checkpoint(path, step)]
    iterations = set(complete_iterations(path))
    tracked = tracked_iteration(path)
    # Includes the tracked iteration even if it is missing.
    every = sorted(iterations if tracked is None else iterations | {tracked})
    release = [path / "release"] if (path / "release" / MANIFEST_FILE).is_file() else []
    if not every and not release:
        raise ValueError(f"{path} contains no checkpoint")
    return release + [iteration_folder(path, iteration) for iteration in every]


def tracked_iteration(root: Path) -> int | None:
    """Returns the iteration in a folder's tracker file, or None."""
    return iteration_of_text(read_tracker(root) or "")


# Section: damage.


def damages(folder: Path) -> Iterator[str]:
    """Describes each damaged or missing file and tensor of a checkpoint. Reads all data."""
    try:
        folder = folders.find_checkpoint(folder)
        files = read_manifest(folder)
    except (ValueError, OSError) as error:
        yield str(error)
        return
    for name, entry in files.items():
        yield from _damages_of_file(folder, name, entry=entry)


def _damages_of_file(folder: Path, name: str, *, entry: FileEntry) -> Iterator[str]:
    try:
        verify_size(folder, name, expected=entry)
    except ValueError as error:
        yield str(error)
        if not (folder / name).is_file():
            yield from (f"{folder / name} is missing: {piece}" for piece in entry.pieces)
            return
    for part in entry.checked_parts():
        try:
            verify_part(folder, name, expected=entry, part=part)
        except (ValueError, OSError) as error:
            yield str(error)


# Section: contents.


def all_tensors(checkpoint: VerifiedCheckpoint) -> Iterator[ShardedTensor]:
    """Yields the stored tensors, any shape, in the stored dtype, with only one in memory at a time."""
    reader = StreamReader(checkpoint)
    for key, (shape, dtype) in checkpoint.tensors.items():
        tensor = ShardedTensor.whole(key, torch.empty(shape, dtype=dtype))
        reader.fill([tensor])
        yield tensor
        del tensor  # would otherwise remain allocated until the next torch.empty has returned


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor and the pieces of files that contain it."""

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[str, Piece], ...]

    @property
    def num_elements(self) -> int:
        """Number of elements of the whole tensor."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Size of its elements in bytes."""
        return self.num_elements * self.dtype.itemsize

    @property
    def part(self) -> str:
        """Part of the checkpoint that the tensor belongs to: weights, generators, or an optimizer state."""
        words = self.key.split(".")
        return {"optimizer": ".".join(words[:2]), "rng": "rng"}.get(words[0], "weights")


def stored_tensors(checkpoint: VerifiedCheckpoint) -> list[StoredTensor]:
    """Returns all tensors of a checkpoint, sorted by key."""
    return [
        StoredTensor(key, shape, dtype, tuple(checkpoint.pieces[key]))
        for key, (shape, dtype) in sorted(checkpoint.tensors.items())
    ]


def opened(folder: Path) -> VerifiedCheckpoint:
    """Opens a checkpoint after checking that its files exist with the right sizes.

    Verifies the checksums of small files only.
    """
    folder = folders.find_checkpoint(folder)
    files = read_manifest(folder)
    for name, entry in files.items():
        verify_size(folder, name, expected=entry)
        if not entry.pieces:
            verify_part(folder, name, expected=entry, part=None)
    return VerifiedCheckpoint.read(folder, files)


def values_named(name: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the dict stored under a name in the JSON part, or an empty dict if there is none."""
    found = common.get(name)
    return found if isinstance(found, dict) else {}


# Section: differences.


@dataclass(frozen=True)
class TensorDifference:
    """The difference of one tensor between two checkpoints.

    what: describes a difference other than values, else "". num_different: number of different elements (a complex
    element counts twice). largest: largest absolute difference. relative: largest difference relative to the larger
    value.
    """

    key: str
    what: str = ""
    num_different: int = 0
    num_elements: int = 0
    largest: float = 0.0
    relative: float = 0.0


def differences(a: VerifiedCheckpoint, b: VerifiedCheckpoint, *, ignored: list[str]) -> Iterator[TensorDifference]:
    """Yields a difference for each tensor that is not bitwise equal in both. ignored: patterns of keys to skip."""
    in_a, in_b = a.tensors, b.tensors
    for key in sorted(in_a.keys() | in_b.keys()):
        if any(fnmatchcase(key, pattern) for pattern in ignored):
            continue
        if key not in in_a or key not in in_b:
            yield TensorDifference(key, f"only in {'A' if key in in_a else 'B'}")
        elif in_a[key] != in_b[key]:
            yield TensorDifference(key, f"{_words(*in_a[key])} in A, {_words(*in_b[key])} in B")
        else:
            difference = _difference(key, a, other=b)
            if difference.num_different:
                yield difference


def _words(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{list(shape)} {str(dtype).removeprefix('torch.')}"


def _difference(key: str, a: VerifiedCheckpoint, *, other: VerifiedCheckpoint) -> TensorDifference:
    shape, dtype = a.tensors[key]
    num_different, num_elements, largest, relative = 0, 0, 0.0, 0.0
    for offset, window in _windows(shape, dtype):
        one, two = (_as_real(_read(checkpoint, key, offset=offset, window=window)) for checkpoint in (a, other))
        num_elements += one.numel()
        parted = _as_bits(one) != _as_bits(two)
        if not parted.any():
            continue
        x, y = one.double(), two.double()
        # Bit-identical NaNs are equal. NaN on one side only is an infinite difference.
        apart = torch.where(parted, (x - y).abs(), 0.0).nan_to_num(nan=torch.inf)
        scale = torch.maximum(x.abs(), y.abs())
        share = torch.where(parted & (apart > 0), apart / scale, 0.0).nan_to_num(nan=torch.inf)
        num_different += _to_host_sync(parted.sum())
        largest = max(largest, _to_host_sync(apart.max()))
        relative = max(relative, _to_host_sync(share.max()))
    return TensorDifference(key, "", num_different, num_elements, largest, relative)


def _to_host_sync(value: torch.Tensor) -> Any:
    """Reads a value, [], any dtype, on the host."""
    return value.item()


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Views a complex tensor as real, [*shape, 2]. Returns a tensor of any other dtype and any shape unchanged."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Views a tensor, any shape and real dtype, as integers of the same size and shape."""
    widths = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(widths[tensor.dtype.itemsize])


def _windows(shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yields the offset and shape of consecutive groups of rows of a tensor of `shape`."""
    if not shape:
        yield (), ()
        return
    if not math.prod(shape):
        return
    rows = max(1, _WINDOW_BYTES // (math.prod(shape[1:]) * dtype.itemsize))
    for start in range(0, shape[0], rows):
        yield (start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:])


def _read(
    checkpoint: VerifiedCheckpoint, key: str, *, offset: tuple[int, ...], window: tuple[int, ...]
) -> torch.Tensor:
    shape, dtype = checkpoint.tensors[key]
    target = torch.empty(window, dtype=dtype)
    load_items([ShardedTensor.at(key, target, shape, offset)], checkpoint)
    return target


# Section: retention.


def removable(root: Path, *, keep_latest: int, keep_interval: int | None) -> tuple[list[int], list[int]]:
    """Returns the iterations to delete and to keep.

    Keeps the latest ones, the tracked one, and every multiple of `keep_interval`. Raises ValueError if there is no
    complete checkpoint, or if iterations would be deleted while the newest is damaged.
    """
    if (root / MANIFEST_FILE).is_file():
        raise ValueError(f"{root} is a single checkpoint: give its parent folder")
    iterations = complete_iterations(root)
    if not iterations:
        raise ValueError(f"{root} contains no complete checkpoint")
    stay = set(iterations[-keep_latest:])
    stay |= {one for one in iterations if keep_interval is not None and one % keep_interval == 0}
    stay |= {one for one in iterations if one == tracked_iteration(root)}
    gone = [one for one in iterations if one not in stay]
    if gone:
        for problem in damages(iteration_folder(root, iterations[-1])):
            raise ValueError(f"{problem}: nothing is deleted while the newest checkpoint is damaged")
    return gone, sorted(stay)
