"""Saving: plans a checkpoint, optionally copies its tensors, and writes it, in the background if requested.

A save is collective and atomic. `load` and a blocking `save` are in serialization.py, data files in storage.py, and
folders in folder.py.

[Note: Parts] Background threads use no collectives, which belong to the training step. Each rank that writes anything
publishes a small file, its part, as soon as its data file is on disk. The part lists the pieces in the data file. Rank
0's thread waits for the parts of all ranks, combines them in the manifest and renames the folder.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItem

from megatron.core.device import CopyStream, default_device, host_bytes
from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.errors import CheckpointError, every_rank, one_error_everywhere
from megatron.core.dist_checkpointing.manifest import FileEntry, Manifest, read_json, write_manifest
from megatron.core.dist_checkpointing.mapping import ShardedState, ShardedTensor, flatten
from megatron.core.dist_checkpointing.planner import HeldItems, ReplicaWriters, assign_writes
from megatron.core.dist_checkpointing.storage import METADATA_FILE, data_file, write_metadata, write_pieces
from megatron.core.group_collectives import gather_objects
from megatron.core.logical_tensors import Box
from megatron.core.process_groups_config import group_rank, group_size

_POLL_SECONDS = 0.01
_PART_SECONDS = 3600.0  # measured from the end of rank 0's write; a killed rank never publishes its part
_ALIGNMENT = 64  # in bytes: suits every dtype, and achieves full copy speed
# Size at which a stream starts a new data file, so that many files can be read in parallel.
_FILE_BYTES = 16 << 30
_Content = tuple[str, Box | None, torch.Tensor | bytes]


def begin_save(
    state: ShardedState,
    checkpoint_dir: str | Path,
    *,
    common: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
    staging: "StagingMemory | None" = None,
    on_commit: Callable[[], None] | None = None,
    replicas: ReplicaWriters = ReplicaWriters.SPREAD,
) -> "PendingSave":
    """Starts a save of the boxes and objects of all ranks in the group, and of rank 0's `common` (JSON).

    Collective. With `staging`, a thread writes a copy of this rank's share, and the state may change immediately.
    Otherwise, nothing is written before `finish`, and the state must not change until then. Raises CheckpointError on
    every rank if the folder cannot be created. process_group: None means all ranks. on_commit: called on rank 0 when
    the checkpoint is complete, on the background thread if there is one. If it raises, the save fails.
    """
    target, group = Path(checkpoint_dir), every_rank(process_group)
    held = HeldItems(list(flatten(state)))
    # Rank 0 picks the name, which must be the same on all ranks.
    save_id = [folders.new_id()]
    if group_size(group) > 1:
        dist.broadcast_object_list(save_id, group=group, group_src=0)
    temporary = folders.incomplete_folder(target, save_id[0])
    rank, what = group_rank(group), f"cannot save checkpoint {target}"
    try:
        plan = _plan(held, group, what=what, replicas=replicas, temporary=temporary, target=target)
        with one_error_everywhere(what, group):
            if not temporary.is_dir():
                raise ValueError(
                    f"rank 0 created {temporary}, but this rank cannot see it: save to a shared file system"
                )
            contents = [held.content(item) for item in plan.writes]
            summary = None
            if plan.metadata is not None:
                summary = _Summary(disk.json_bytes(folders.COMMON_FILE, common), plan.metadata, plan.writers, on_commit)
            copies = contents if staging is None else _staged(contents, staging)
    except (ValueError, OSError, RuntimeError):
        # All ranks raise, regardless of which rank failed. After other exceptions, the next save removes the folder.
        if rank == 0:
            folders.discard(temporary)
        raise
    writing = _Writing(target, temporary, rank=rank, contents=copies, staging=staging, summary=summary)
    return PendingSave(writing, group, what=what, in_background=staging is not None)


class PendingSave:
    """Save in progress on this rank. Every rank must call `finish`."""

    def __init__(self, writing: "_Writing", group: dist.ProcessGroup | None, *, what: str, in_background: bool) -> None:
        self._writing, self._group, self._what = writing, group, what
        self._thread: threading.Thread | None = None
        self._is_finished = False
        if in_background:
            # A daemon thread: a process that ends with an error may end in the middle of a save, as if killed.
            self._thread = threading.Thread(target=writing.run, name="checkpoint save", daemon=True)
            self._thread.start()

    def is_done(self) -> bool:
        """Returns whether this rank's background thread has ended. Local.

        The thread of rank 0 ends when the checkpoint is complete or the save has failed.
        """
        return self._thread is not None and not self._thread.is_alive()

    def ranks_are_done(self) -> bool:
        """Returns whether `finish` would not wait, because all ranks are done or a rank has failed. Collective."""
        reports = gather_objects((self.is_done(), self._writing.error is not None), self._group)
        return all(done for done, _ in reports) or any(failed for _, failed in reports)

    def finish(self) -> None:
        """Waits until the checkpoint is complete and on disk. Collective. A second call does nothing.

        Raises CheckpointError on every rank if the checkpoint cannot be written. The target folder is then unchanged.
        """
        if self._is_finished:
            return
        self._is_finished = True
        writing = self._writing
        try:
            with one_error_everywhere(self._what, self._group):
                if self._thread is None:
                    writing.write()
                writing.written.wait()
                writing.raise_error()
            with one_error_everywhere(self._what, self._group):
                if self._thread is None:
                    writing.commit()
                else:
                    self._thread.join()
                writing.raise_error()
        except (ValueError, OSError, RuntimeError):
            # No rank is still writing, because all have passed the first of the two blocks.
            self.abandon(seconds=0.0)
            if writing.summary is not None:
                folders.discard(writing.temporary)
            raise

    def abandon(self, *, seconds: float) -> None:
        """Stops this rank's thread without communicating with other ranks, for example after an error. Local.

        seconds: time to wait for this rank's write and for the parts of other ranks to complete.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            self._writing.abandoned.set()
            if seconds == 0.0:
                self._thread.join()


@dataclass(frozen=True)
class _Plan:
    """Writes of this rank. On rank 0, also the checkpoint's metadata and the ranks that write anything."""

    writes: list[WriteItem]
    metadata: Metadata | None
    writers: list[int]


@dataclass(frozen=True)
class _Summary:
    """Files that rank 0 adds to the data files of all ranks."""

    common: bytes
    metadata: Metadata
    writers: list[int]
    on_commit: Callable[[], None] | None


@dataclass
class _Writing:
    """Writes one rank's share of a save without collectives. error: the exception that ended the write, or None."""

    target: Path
    temporary: Path
    rank: int = field(kw_only=True)
    contents: Sequence[_Content] = field(kw_only=True)
    staging: "StagingMemory | None" = field(kw_only=True)
    summary: _Summary | None = field(kw_only=True)  # only on rank 0
    error: BaseException | None = None
    written: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Writes and commits this rank's share. This is the body of the background thread."""
        try:
            self.write()
            if self.error is None:
                self.commit()
        finally:
            # Includes unexpected errors such as MemoryError. Otherwise the save would appear to have succeeded.
            self.error = self.error or sys.exception()

    def write(self) -> None:
        """Writes this rank's data file, then publishes its part for rank 0. See [Note: Parts]."""
        try:
            if self.staging is not None:
                self.staging.host_waits_sync()
            # A rank has no file if other ranks write all of its boxes.
            if self.contents:
                contents = ((key, box, _on_host_sync(content)) for key, box, content in self.contents)
                # A background save uses no second thread, which would compete with the training step for a core.
                with nullcontext() if self.staging else ThreadPoolExecutor(1, "checkpoint sums") as helper:
                    entry = write_pieces(self.temporary / data_file(self.rank), contents, helper=helper)
                content = disk.json_bytes("part", entry.to_json(), indent=None)
                unfinished = self.temporary / f"part-{self.rank}.new"
                disk.hand_over(_part(self.temporary, self.rank), content, temporary=unfinished)
        except (OSError, RuntimeError, ValueError) as error:
            self.error = error
        finally:
            # Releases the contents now, not at the next save.
            self.contents = ()
            self.written.set()

    def commit(self) -> None:
        """Waits for the parts of all ranks and completes the checkpoint. Does nothing on ranks other than 0."""
        if self.summary is None:
            return
        try:
            files = self._wait_for_parts(self.summary.writers)
            if files is None:
                return
            files = dict(sorted(files.items()))
            _complete(self.temporary, files, metadata=self.summary.metadata, common=self.summary.common)
            folders.commit(self.temporary, self.target)
            if self.summary.on_commit is not None:
                self.summary.on_commit()
        except (OSError, RuntimeError, ValueError) as error:
            self.error = error

    def raise_error(self) -> None:
        """Raises this rank's error if its write failed."""
        if self.error is not None:
            raise self.error

    def _wait_for_parts(self, writers: list[int]) -> Manifest | None:
        """Waits for all data files and returns their manifest entries, or None if the save is abandoned first."""
        missing, deadline = set(writers), time.monotonic() + _PART_SECONDS
        while True:
            # Lists the folder, because a network file system may serve a stale negative lookup for a single name.
            names = set(os.listdir(self.temporary))
            missing = {rank for rank in missing if _part(self.temporary, rank).name not in names}
            if not missing:
                break
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {', '.join(map(str, sorted(missing)))} has not written its file")
            if self.abandoned.wait(_POLL_SECONDS):
                return None
        files = {}
        for rank in writers:
            part = _part(self.temporary, rank)
            files[data_file(rank)] = FileEntry.from_json(read_json(part))
            disk.remove_file(part)
        return files


def _complete(temporary: Path, data: Manifest, *, metadata: Metadata, common: bytes) -> None:
    """Writes the files that complete a checkpoint after its data files: metadata, common values, and the manifest."""
    files = dict(data)
    files[METADATA_FILE] = write_metadata(temporary, metadata, files=data)
    files[folders.COMMON_FILE] = FileEntry(len(common), disk.write_file(temporary / folders.COMMON_FILE, common))
    write_manifest(temporary, files)


def _plan(
    held: HeldItems,
    group: dist.ProcessGroup | None,
    *,
    what: str,
    replicas: ReplicaWriters,
    temporary: Path,
    target: Path,
) -> _Plan:
    """Plans the writes of all ranks. Rank 0 also creates the temporary folder. Collective."""
    offers = [held.offers()]
    if group_size(group) > 1:
        gathered: list[Any] | None = [None] * group_size(group) if group_rank(group) == 0 else None
        dist.gather_object(offers[0], gathered, group=group, group_dst=0)
        offers = gathered or offers
    written: list[list[WriteItem]] = []
    metadata: Metadata | None = None
    with one_error_everywhere(what, group):
        if group_rank(group) == 0:
            written, metadata = assign_writes(offers, replicas)
            folders.begin(temporary, target)
    own: list[Any] = [written[0] if written else None]
    if group_size(group) > 1:
        dist.scatter_object_list(own, written or None, group=group, group_src=0)
    return _Plan(own[0], metadata, [rank for rank, items in enumerate(written) if items])


def _staged(contents: list[_Content], staging: "StagingMemory") -> list[_Content]:
    tensors = [content for _, _, content in contents if isinstance(content, torch.Tensor)]
    copies = iter(staging.copy(tensors))
    return [(key, box, next(copies) if isinstance(held, torch.Tensor) else held) for key, box, held in contents]


def _on_host_sync(content: torch.Tensor | bytes) -> torch.Tensor | bytes:
    """Returns bytes unchanged, and a tensor of any shape and dtype as a contiguous host tensor, copied if necessary."""
    return content if isinstance(content, bytes) else content.cpu().contiguous()


def _part(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank}.json"


# Staging memory.


class StagingMemory:
    """Host memory to which a save copies a rank's tensors, so that training may change the tensors immediately.

    The memory is reused between saves, because allocating it takes several times as long as a copy. It is pinned if
    there is a GPU. Only one save may use it at a time, from `copy` until its files are written.
    """

    def __init__(self) -> None:
        self._device = default_device()
        self._stream = CopyStream(self._device)
        self._memory = host_bytes(0, self._device)  # [bytes], uint8
        self._last: Any = None  # the copy stream's event after the last copy

    @property
    def num_bytes(self) -> int:
        """Size of the host allocation in bytes."""
        return self._memory.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Starts copies of `tensors` to contiguous host memory, and returns the host tensors.

        tensors: any shape and dtype. The copies may be read after `host_waits_sync`. Device work launched later runs
        after the copies.
        """
        starts, size = [], 0
        for tensor in tensors:
            starts.append(size)
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._memory.numel():
            # Release the old memory first, which no save reads any more.
            self._memory = host_bytes(0, self._device)
            self._memory = host_bytes(size, self._device)
        copies = []
        self._last = None
        for tensor, start in zip(tensors, starts, strict=True):
            held = self._memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.device.type == "cpu":
                held.copy_(tensor)
            else:
                self._last = self._stream.copy(held, tensor)
            copies.append(held)
        # Without this, the optimizer's next step could overwrite tensors that are still being copied.
        self._stream.main_waits_for(self._last)
        return copies

    def host_waits_sync(self) -> None:
        """Waits for the copies. NOTE: blocks, so call it only from a background thread, never in the training step."""
        self._stream.host_waits_for(self._last)


# Saves from one process, one tensor at a time.


def save_stream(
    tensors: Iterable[ShardedTensor],
    checkpoint_dir: Path,
    *,
    common: dict[str, Any],
    file_bytes: int = _FILE_BYTES,
    with_zip_checksums: bool = False,
) -> None:
    """Writes a checkpoint of `tensors` and `common` (JSON) from one process, one box at a time.

    tensors: [*box shape], any dtype and strides. Each box is released before the next one is requested, so that a
    conversion keeps only one tensor in memory. `checkpoint_dir` appears atomically once everything is on disk, and is
    unchanged after an error. with_zip_checksums: as in write_pieces. Raises ValueError if the boxes do not fill their
    tensors.
    """
    temporary = folders.incomplete_folder(checkpoint_dir, folders.new_id())
    folders.begin(temporary, checkpoint_dir)
    done = False
    try:
        stream = _Stream(tensors)
        files: Manifest = {}
        while not stream.is_over:
            name = data_file(len(files))
            files[name] = write_pieces(
                temporary / name, stream.until(file_bytes), with_zip_checksums=with_zip_checksums
            )
            if not files[name].pieces:
                # The previous file ended exactly at the limit.
                disk.remove_file(temporary / name)
                del files[name]
        content = disk.json_bytes(folders.COMMON_FILE, common)
        _complete(temporary, files, metadata=stream.metadata(), common=content)
        folders.commit(temporary, checkpoint_dir)
        done = True
    finally:
        if not done:
            folders.discard(temporary)


class _Stream:
    """Iterator over the remaining boxes that records the metadata of the tensors seen so far."""

    def __init__(self, tensors: Iterable[ShardedTensor]) -> None:
        self._tensors = iter(tensors)
        self._stored: dict[str, TensorStorageMetadata] = {}
        self.is_over = False

    def until(self, num_bytes: int) -> Iterator[tuple[str, Box, torch.Tensor]]:
        """Yields key, box and contiguous content of the next boxes, until they reach `num_bytes` in total."""
        left = num_bytes
        while left > 0:
            tensor = next(self._tensors, None)
            if tensor is None:
                self.is_over = True
                return
            self._record(tensor)
            left -= tensor.data.nbytes
            key, box, content = tensor.key, tensor.box, tensor.data.contiguous()
            del tensor
            yield key, box, content
            # Released before the next one is produced.
            del content

    def metadata(self) -> Metadata:
        """Returns the metadata of all tensors. Raises ValueError if boxes overlap or omit elements."""
        for key, entry in self._stored.items():
            present = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if present != entry.size.numel():
                raise ValueError(f"{key}: boxes contain {present} elements of {list(entry.size)}")
        return Metadata(dict(self._stored))

    def _record(self, tensor: ShardedTensor) -> None:
        size, dtype = torch.Size(tensor.global_shape), tensor.data.dtype
        entry = self._stored.setdefault(tensor.key, TensorStorageMetadata(TensorProperties(dtype=dtype), size, []))
        if (entry.size, entry.properties.dtype) != (size, dtype):
            raise ValueError(
                f"{tensor.key} is {list(entry.size)} of {entry.properties.dtype} in its first box, but {list(size)} of "
                f"{dtype} in a later box"
            )
        entry.chunks.append(ChunkStorageMetadata(torch.Size(tensor.global_offset), tensor.data.shape))
