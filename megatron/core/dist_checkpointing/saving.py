"""begin_save: a checkpoint is planned and copied at once, and written beside training; collective, atomic.

`save` and `load` are in serialization.py, the data files in storage.py, the folder in folder.py.

[Note: Parts] Threads use no collectives, which belong to the training step. Each rank that has anything to write puts
a small file, its part, beside its data file when that is on disk: the list of its pieces. Rank 0's thread waits for
the parts of all, sums them up in the manifest and renames the folder.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.boxes import Box
from megatron.core.dist_checkpointing.group_errors import CheckpointError, every_rank, one_error_everywhere
from megatron.core.dist_checkpointing.manifest import FileEntry, Manifest, read_json, write_manifest
from megatron.core.dist_checkpointing.mapping import ShardedState, flatten
from megatron.core.dist_checkpointing.planner import HeldItems, ReplicaWriters, assign_writes
from megatron.core.dist_checkpointing.staging import StagingMemory
from megatron.core.dist_checkpointing.storage import METADATA_FILE, data_file, write_metadata, write_pieces
from megatron.core.process_groups_config import group_rank, group_size

_POLL_SECONDS = 0.01
_PART_SECONDS = 3600.0  # from the end of rank 0's own writing; a rank that was killed never has a part
_Content = tuple[str, Box | None, torch.Tensor | bytes]


def begin_save(
    state: ShardedState,
    checkpoint_dir: str | Path,
    *,
    common: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
    staging: StagingMemory | None = None,
    on_commit: Callable[[], None] | None = None,
    replicas: ReplicaWriters = ReplicaWriters.SPREAD,
) -> "PendingSave":
    """Starts to write the boxes and objects that all ranks of the group hold, and `common` (JSON, rank 0's).

    Collective. With `staging` a thread writes a copy of what this rank writes, and the state may change at once; else
    nothing is written before `finish`, until which the state must stay as it is. Raises CheckpointError on every rank
    where the folder cannot be made. process_group: None is every rank. on_commit: called on rank 0, by the thread where
    there is one, when the checkpoint is complete; its errors are the save's.
    """
    target, group = Path(checkpoint_dir), every_rank(process_group)
    held = HeldItems(list(flatten(state)))
    # The name must be the same on all ranks, so it is rank 0's.
    temporary = folders.incomplete_folder(target, _from_rank_0(folders.new_id(), group))
    rank, what = group_rank(group), f"cannot save checkpoint {target}"
    try:
        plan = _plan(held, group, what=what, replicas=replicas, temporary=temporary, target=target)
        with one_error_everywhere(what, group):
            if not temporary.is_dir():
                raise ValueError(f"rank 0 made {temporary}, this rank does not see it: save to a shared file system")
            contents = [held.content(item) for item in plan.writes]
            summary = None
            if rank == 0:
                summary = _Summary(disk.json_bytes(folders.COMMON_FILE, common), plan.metadata, plan.writers, on_commit)
            copies = contents if staging is None else _staged(contents, staging)
    except (ValueError, OSError, RuntimeError):
        # All ranks are here, whoever failed. Other exceptions leave a folder that the next save removes.
        if rank == 0:
            folders.discard(temporary)
        raise
    writing = _Writing(target, temporary, rank=rank, contents=copies, staging=staging, summary=summary)
    return PendingSave(writing, group, what=what, in_background=staging is not None)


class PendingSave:
    """A save under way on this rank; `finish` on every rank ends it."""

    def __init__(self, writing: "_Writing", group: dist.ProcessGroup | None, *, what: str, in_background: bool) -> None:
        self._writing, self._group, self._what = writing, group, what
        self._thread: threading.Thread | None = None
        self._is_finished = False
        if in_background:
            # A daemon: a process that ends by an error may end in the middle of a save, as by a kill.
            self._thread = threading.Thread(target=writing.run, name="checkpoint save", daemon=True)
            self._thread.start()

    def is_done(self) -> bool:
        """Whether this rank has no more to do, or has failed; on rank 0 then the checkpoint is complete. Local."""
        return self._thread is not None and not self._thread.is_alive()

    def ranks_are_done(self) -> bool:
        """Whether `finish` would not wait: all ranks are done, or one has failed. Collective."""
        reports: list[tuple[bool, bool]] = [(self.is_done(), self._writing.error is not None)] * group_size(self._group)
        if len(reports) > 1:
            dist.all_gather_object(reports, reports[0], group=self._group)
        return all(done for done, _ in reports) or any(failed for _, failed in reports)

    def finish(self) -> None:
        """Returns on every rank when the checkpoint is complete and on disk. Collective; a second call does nothing.

        Raises CheckpointError on every rank where it cannot be written: all is then as it was before the save.
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
            # No rank writes any more: all have been through the first of the two.
            self.abandon(seconds=0.0)
            writing.discard()
            raise

    def abandon(self, *, seconds: float) -> None:
        """Ends this rank's thread: where other ranks cannot be asked any more. Local.

        What this rank is writing gets that long to be complete, and the other ranks' parts to come.
        """
        if self._thread is not None:
            self._thread.join(seconds)
            self._writing.gives_up.set()
            if seconds == 0.0:
                self._thread.join()


@dataclass(frozen=True)
class _Plan:
    """The writes of this rank; on rank 0 also what is stored and which ranks write anything."""

    writes: list[WriteItem]
    metadata: Metadata | None
    writers: list[int]


@dataclass(frozen=True)
class _Summary:
    """Rank 0's additions to the files of all ranks."""

    common: bytes
    metadata: Metadata | None
    writers: list[int]
    on_commit: Callable[[], None] | None


@dataclass
class _Writing:
    """One rank's work, without collectives; what ends it is in `error`."""

    target: Path
    temporary: Path
    rank: int = field(kw_only=True)
    contents: Sequence[_Content] = field(kw_only=True)
    staging: StagingMemory | None = field(kw_only=True)
    summary: _Summary | None = field(kw_only=True)  # rank 0's
    error: BaseException | None = None
    written: threading.Event = field(default_factory=threading.Event)
    gives_up: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """All of it: what the thread does."""
        try:
            self.write()
            if self.error is None:
                self.commit()
        finally:
            # Also what the two do not expect, as too little memory: a thread tells nobody, and the save would count.
            self.error = self.error or sys.exception()

    def write(self) -> None:
        """This rank's data file, and the part that tells rank 0 of it. See [Note: Parts]"""
        try:
            if self.staging is not None:
                self.staging.host_waits_sync()
            # A rank whose boxes others write has no file.
            if self.contents:
                contents = ((key, box, _on_host_sync(content)) for key, box, content in self.contents)
                # Beside training no second thread: its processor is the step's.
                with nullcontext() if self.staging else ThreadPoolExecutor(1, "checkpoint sums") as helper:
                    entry = write_pieces(self.temporary / data_file(self.rank), contents, helper=helper)
                content = disk.json_bytes("part", entry.to_json(), indent=None)
                disk.hand_over(_part(self.temporary, self.rank), content, temporary=self._unfinished_part())
        except (OSError, RuntimeError, ValueError) as error:
            self.error = error
        finally:
            # What the thread was given is not kept until the next save.
            self.contents = ()
            self.written.set()

    def commit(self) -> None:
        """On rank 0: waits for the parts of all ranks, then makes the folder a checkpoint."""
        if self.summary is None:
            return
        try:
            files = self._files(self.summary.writers)
            if files is None:
                return
            files = dict(sorted(files.items()))
            if self.summary.metadata is not None:
                files[METADATA_FILE] = write_metadata(self.temporary, self.summary.metadata, files=files)
            checksum = disk.write_file(self.temporary / folders.COMMON_FILE, self.summary.common)
            files[folders.COMMON_FILE] = FileEntry(len(self.summary.common), checksum)
            write_manifest(self.temporary, files)
            folders.commit(self.temporary, self.target)
            if self.summary.on_commit is not None:
                self.summary.on_commit()
        except (OSError, RuntimeError, ValueError) as error:
            self.error = error

    def discard(self) -> None:
        """Removes what a failed save has left."""
        if self.summary is not None:
            folders.discard(self.temporary)

    def raise_error(self) -> None:
        """Raises what ended this rank's work, if anything did."""
        if self.error is not None:
            raise self.error

    def _unfinished_part(self) -> Path:
        return self.temporary / f"part-{self.rank}.new"

    def _files(self, writers: list[int]) -> Manifest | None:
        """The data files of all ranks, once they are on disk; None where nobody waits for that any more."""
        missing, deadline = set(writers), time.monotonic() + _PART_SECONDS
        while True:
            # By listing the folder: a network file system may answer from memory that a single name is not there.
            names = set(os.listdir(self.temporary))
            missing = {rank for rank in missing if _part(self.temporary, rank).name not in names}
            if not missing:
                break
            if time.monotonic() > deadline:
                raise CheckpointError(f"rank {', '.join(map(str, sorted(missing)))} has not written its file")
            if self.gives_up.wait(_POLL_SECONDS):
                return None
        files = {}
        for rank in writers:
            part = _part(self.temporary, rank)
            files[data_file(rank)] = FileEntry.from_json(read_json(part))
            disk.remove_file(part)
        return files


def _plan(
    held: HeldItems,
    group: dist.ProcessGroup | None,
    *,
    what: str,
    replicas: ReplicaWriters,
    temporary: Path,
    target: Path,
) -> _Plan:
    """Who writes what; rank 0 makes the temporary folder meanwhile."""
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


def _staged(contents: list[_Content], staging: StagingMemory) -> list[_Content]:
    tensors = [content for _, _, content in contents if isinstance(content, torch.Tensor)]
    copies = iter(staging.copy(tensors))
    return [(key, box, next(copies) if isinstance(held, torch.Tensor) else held) for key, box, held in contents]


def _on_host_sync(content: torch.Tensor | bytes) -> torch.Tensor | bytes:
    """An object's bytes, or a tensor of any shape and dtype, contiguous and on the host: itself or a copy."""
    return content if isinstance(content, bytes) else content.cpu().contiguous()


def _part(temporary: Path, rank: int) -> Path:
    return temporary / f"part-{rank}.json"


def _from_rank_0(value: str, group: dist.ProcessGroup | None) -> str:
    values = [value]
    if group_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]
