"""Checkpoint folders: atomic creation, recovery after a kill, and removal.

The contents are opaque to this file, except that the presence of a manifest means that a checkpoint is complete.

[Note: Atomic folders] A save writes to `iter_0000100.incomplete-<id>`, which may be deleted at any time. One rename
gives the folder its final name once everything in it is on disk. To replace a checkpoint, the old folder is renamed to
`.replaced-<id>` just before. If the run is killed between the two renames, readers use the renamed folder and the next
save restores it. At any moment, one of the two names refers to a complete checkpoint.
"""

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.core.dist_checkpointing import disk
from megatron.core.dist_checkpointing.manifest import MANIFEST_FILE

COMMON_FILE = "common.json"
_OWN_FILES = r"common\.json|\.metadata|__\d+_0\.distcp"
# Files of Megatron's own formats, and the formats' names in tools/checkpoint.py.
_FOREIGN_FORMATS = {"metadata.json": "torch_dist_mcore", "mp_rank_*": "torch"}
_DCP_INDEX = ".metadata"
_INCOMPLETE = ".incomplete-"
_REPLACED = ".replaced-"
_ID = r"[0-9a-f]{12}"


def new_id() -> str:
    """Returns a new random id for the temporary folders of a save."""
    return uuid.uuid4().hex[:12]


def incomplete_folder(folder: Path, save_id: str) -> Path:
    """Returns the path of the temporary folder that a save fills before it is renamed to `folder`."""
    return folder.with_name(f"{folder.name}{_INCOMPLETE}{save_id}")


def refuse_foreign(folder: Path) -> None:
    """Raises FileExistsError if `folder` exists but is not a checkpoint, so that a save never overwrites it."""
    # An OSError, like a full disk: training continues, and the user can move the folder before the next save.
    if folder.is_dir() and _is_foreign({entry.name for entry in folder.iterdir()}):
        raise FileExistsError(f"{folder} contains something other than a checkpoint of this format: not overwritten")
    # Checks parents too, because mkdir below a file fails with a message that names neither.
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file: not overwritten")


def begin(temporary: Path, folder: Path) -> None:
    """Cleans up after killed saves of `folder`, and creates the temporary folder of a new save."""
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Restore before cleaning up, because the folder set aside may be the only complete checkpoint.
    aside = None if folder.exists() else _aside(folder)
    if aside is not None:
        disk.rename(aside, folder)
    remove_incomplete(folder.parent, name=re.escape(folder.name))
    disk.make_folder(temporary)


def commit(temporary: Path, folder: Path) -> None:
    """Renames the completed temporary folder to its final name, and replaces an existing checkpoint of that name.

    Raises FileExistsError if anything other than a checkpoint has appeared under that name since `begin`.
    """
    refuse_foreign(folder)
    save_id = temporary.name.rpartition("-")[2]
    aside = folder.with_name(f"{folder.name}{_REPLACED}{save_id}")
    # Sync the file names before the rename, or a power failure could leave a folder without its files.
    disk.sync(temporary)
    if folder.is_dir() and any(folder.iterdir()):
        disk.rename(folder, aside)
    # From here on, the new checkpoint is valid. The rename also replaces an empty folder of that name.
    disk.rename(temporary, folder)
    disk.sync(folder.parent)
    if aside.exists():
        # Deletion takes time, and this name marks a half-deleted folder as removable.
        disk.rename(aside, temporary)
        disk.remove_tree(temporary)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which is renamed to `folder` after the body. For content other than a checkpoint.

    The content is synced to disk before the rename. `folder` must not exist yet. If the body fails, nothing remains.
    Raises OSError.
    """
    temporary = incomplete_folder(folder, new_id())
    disk.make_folder(temporary)
    try:
        yield temporary
        disk.sync_tree(temporary)
        disk.rename(temporary, folder)
        disk.sync(folder.parent)
    finally:
        if temporary.exists():
            discard(temporary)


def remove(folder: Path) -> None:
    """Deletes a checkpoint. If the process is killed midway, the next save removes the rest."""
    # Deletion takes time, and this name marks a half-deleted folder as removable.
    doomed = incomplete_folder(folder, new_id())
    disk.rename(find_checkpoint(folder), doomed)
    disk.remove_tree(doomed)


def discard(temporary: Path) -> None:
    """Removes the temporary folder of a failed save, and ignores errors."""
    disk.try_to_remove_tree(temporary)


def remove_incomplete(parent: Path, *, name: str) -> None:
    """Deletes temporary folders of killed saves in `parent`. name: regular expression for names of checkpoints."""
    pattern = re.compile(f"(?P<name>{name})(?P<kind>{re.escape(_INCOMPLETE)}|{re.escape(_REPLACED)}){_ID}")
    for entry in list(parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None:
            continue
        # Delete a replaced checkpoint only once its successor exists.
        folder = parent / match["name"]
        if match["kind"] == _INCOMPLETE or (folder / MANIFEST_FILE).is_file():
            disk.remove_file(entry) if entry.is_file() else disk.remove_tree(entry)


def find_checkpoint(folder: Path) -> Path:
    """Returns the folder that contains the checkpoint: `folder`, or the copy set aside by a killed replacement.

    Raises ValueError if there is no checkpoint or it is not complete.
    """
    if not folder.exists():
        aside = _aside(folder)
        if aside is not None:
            return aside
        # Explains the missing last save of a killed run.
        left = folder.parent.is_dir() and any(folder.parent.glob(f"{folder.name}{_INCOMPLETE}*"))
        raise ValueError(f"checkpoint {folder} {'was never completed' if left else 'does not exist'}")
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(f"{folder} is not a complete checkpoint: it has no {MANIFEST_FILE}{_hint(folder)}")
    return folder


def _hint(folder: Path) -> str:
    """Returns advice if a characteristic file shows that Megatron wrote the checkpoint, otherwise ""."""
    for pattern, kind in _FOREIGN_FORMATS.items():
        if any(folder.glob(pattern)):
            return f"; Megatron wrote it: convert it with tools/checkpoint.py convert --from {kind} --to torch_dist"
    names = {entry.name for entry in folder.iterdir()}
    if _DCP_INDEX in names and COMMON_FILE not in names:
        return (
            "; a program wrote it with torch.distributed.checkpoint alone, such as Megatron-LM with --ckpt-format "
            "torch_dcp or fsdp_dtensor, which is not read: save it there with --ckpt-format torch_dist"
        )
    return ""


def is_complete(folder: Path) -> bool:
    """Returns whether find_checkpoint finds a complete checkpoint for `folder`."""
    try:
        find_checkpoint(folder)
    except ValueError:
        return False
    return True


def name_of(entry: Path) -> str:
    """Returns the name of the checkpoint in a folder, without the suffix that a killed replacement may have added."""
    return re.sub(f"{re.escape(_REPLACED)}{_ID}$", "", entry.name)


def replace_text(path: Path, text: str) -> None:
    """Replaces a small file atomically. Readers see the old or the new text, never a mix."""
    disk.replace_file(path, text.encode(), temporary=path.with_name(f"{path.name}{_INCOMPLETE}{new_id()}"))


def _is_foreign(names: set[str]) -> bool:
    # The manifest distinguishes a checkpoint from a user's folder of the same name. A checkpoint that lost its manifest
    # is recognized by the names of its files, and may be replaced like any damaged one.
    if MANIFEST_FILE in names or not names:
        return False
    return COMMON_FILE not in names or not all(re.fullmatch(_OWN_FILES, name) for name in names)


def _aside(folder: Path) -> Path | None:
    found = sorted(folder.parent.glob(f"{folder.name}{_REPLACED}*")) if folder.parent.is_dir() else []
    # There are several only if several saves were killed. Each is complete, and ids have no order.
    whole = [entry for entry in found if (entry / MANIFEST_FILE).is_file()]
    return whole[0] if whole else None
