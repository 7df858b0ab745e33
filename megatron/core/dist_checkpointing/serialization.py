"""save and load of canonical checkpoints: collective, atomic, verified, the same on every rank.

A `process_group` of None is every rank of torch.distributed, or this process alone where that is not initialised.
Which boxes go where is in planner.py, the data files in storage.py, the folder and its manifest in folder.py.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron.core.agreement import all_ranks_agree
from megatron.core.dist_checkpointing import folder as folders
from megatron.core.dist_checkpointing.mapping import ShardedState, flatten
from megatron.core.dist_checkpointing.planner import BoxLoadPlanner, BoxSavePlanner, check_wanted
from megatron.core.dist_checkpointing.storage import METADATA_FILE, CheckpointReader, CheckpointWriter, read_metadata


class CheckpointError(OSError):
    """Writing or reading a checkpoint failed; raised on every rank with the same text."""


def save(
    state: ShardedState,
    checkpoint_dir: str | Path,
    *,
    common: dict[str, Any],
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Writes the boxes and objects that all ranks of the group hold, and `common` (JSON, rank 0's), as a checkpoint.

    Collective. `checkpoint_dir` appears, or is replaced, at once when everything is on disk (see [Note: Atomic
    folders]); after a failure, which all ranks report, it is as before. Boxes that several ranks hold are written once.
    process_group: None is every rank.
    """
    target = Path(checkpoint_dir)
    items = list(flatten(state))
    # The name must be the same on all ranks, so it is rank 0's.
    temporary = folders.incomplete_folder(target, _from_rank_0(folders.new_id(), process_group))
    try:
        _begin(temporary, target, common=common, group=process_group)
        with _one_error_everywhere(f"cannot save checkpoint {target}"):
            writer = CheckpointWriter(temporary)
            dcp_save({}, storage_writer=writer, planner=BoxSavePlanner(items), process_group=process_group)
        _finish(temporary, target, group=process_group)
    except (ValueError, OSError, RuntimeError):
        # All ranks are here, whoever failed. Other exceptions leave a folder that the next save removes.
        if _rank(process_group) == 0:
            folders.discard(temporary)
        raise


def load(
    state: ShardedState, checkpoint_dir: str | Path, *, process_group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Fills the tensors of `state` in place, replaces the data of its objects, and returns the saved `common`.

    Collective. Ranks may hold other boxes than those saved, and any subset of the keys. All files are verified first,
    by the ranks together. Raises on every rank, with nothing changed, if a file is damaged (ValueError) or a key is
    missing or has another shape or dtype (ValueError naming key, stored and wanted). process_group: None is every rank.
    """
    items = list(flatten(state))
    # Everything that can be wrong is looked for before the first tensor is touched.
    folder = _verified_folder(Path(checkpoint_dir), process_group)
    with all_ranks_agree(process_group):
        check_wanted(items, read_metadata(folder))
    with torch.no_grad(), _one_error_everywhere(f"cannot load checkpoint {folder}"):
        reader = CheckpointReader(folder)
        dcp_load({}, storage_reader=reader, planner=BoxLoadPlanner(items), process_group=process_group)
    return load_common(folder)


def load_common(checkpoint_dir: str | Path) -> dict[str, Any]:
    """The `common` of a checkpoint, after verifying that one file; any rank alone may ask."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, folders.COMMON_FILE)
    return folders.read_json(folder / folders.COMMON_FILE)


def list_tensors(checkpoint_dir: str | Path) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Global shape and dtype of every stored tensor by key; any rank alone may ask."""
    folder = folders.find_checkpoint(Path(checkpoint_dir))
    _verify_one(folder, METADATA_FILE)
    stored = read_metadata(folder).state_dict_metadata
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in stored.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def _begin(temporary: Path, target: Path, *, common: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Rank 0 makes the temporary folder with the common values; every rank must see it."""
    with all_ranks_agree(group):
        if _rank(group) == 0:
            folders.begin(temporary, target)
            folders.write_json(temporary / folders.COMMON_FILE, common)
    # A second agreement: nobody looks before rank 0 is done.
    with all_ranks_agree(group):
        if not temporary.is_dir():
            raise ValueError(f"rank 0 made {temporary}, this rank does not see it: save to a shared file system")


def _finish(temporary: Path, target: Path, *, group: dist.ProcessGroup | None) -> None:
    """Manifest and rename: the ranks together sum up the files, rank 0 writes the manifest and renames."""
    part: dict[str, dict[str, int]] = {}
    with all_ranks_agree(group):
        part = folders.describe_files(temporary, _share(sorted(p.name for p in temporary.iterdir()), group))
    # Read back right after writing, the files are still in the page cache.
    parts = _from_all(part, group)
    with all_ranks_agree(group):
        if _rank(group) == 0:
            folders.write_manifest(temporary, {name: entry for part in parts for name, entry in part.items()})
            folders.commit(temporary, target)


def _verified_folder(checkpoint_dir: Path, group: dist.ProcessGroup | None) -> Path:
    """The folder to read, after the ranks together have verified every file of its manifest."""
    with all_ranks_agree(group):
        folder = folders.find_checkpoint(checkpoint_dir)
        manifest = folders.read_manifest(folder)
        # Each file is read once by somebody, not once by everybody.
        for name in _share(sorted(manifest), group):
            folders.verify_file(folder, name, expected=manifest[name])
    return folder


def _verify_one(folder: Path, name: str) -> None:
    manifest = folders.read_manifest(folder)
    if name not in manifest:
        raise ValueError(f"{folder / folders.MANIFEST_FILE} does not list {name}")
    folders.verify_file(folder, name, expected=manifest[name])


@contextmanager
def _one_error_everywhere(what: str) -> Iterator[None]:
    """Turns torch's report of all ranks' tracebacks into one line, the same on every rank."""
    try:
        with warnings.catch_warnings():
            # Saving and loading in one process is an ordinary case here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as report:
        # The tracebacks of all ranks, which torch prints, hide the one line that a user needs.
        rank = min(report.failures)
        error = report.failures[rank][0]
        raise CheckpointError(f"{what}: rank {rank}: {error}") from error


def _share(names: list[str], group: dist.ProcessGroup | None) -> list[str]:
    return names[_rank(group) :: _world_size(group)]


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _world_size(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _from_rank_0(value: str, group: dist.ProcessGroup | None) -> str:
    values = [value]
    if _world_size(group) > 1:
        dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def _from_all(value: dict[str, Any], group: dist.ProcessGroup | None) -> list[dict[str, Any]]:
    values = [value] * _world_size(group)
    if len(values) > 1:
        dist.all_gather_object(values, value, group=group)
    return values
