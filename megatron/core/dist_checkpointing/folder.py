"""The folder of a checkpoint: atomic appearance, recovery after a kill, removal.

What is in it is not known here, but for the manifest, whose presence says that a checkpoint is whole.

[Note: Atomic folders] `iter_0000100.incomplete-<id>` is being written and may be deleted; it gets its final name
by one rename, when everything in it is on disk. To replace a checkpoint, the old folder steps aside as
`.replaced-<id>` just before that rename; if the run is killed in between, readers use it and the next save puts it
back. At every moment one of the two names holds a whole checkpoint.
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
# Files of Megatron's own formats, and what tools/checkpoint.py calls them.
_OF_OTHERS = {"metadata.json": "torch_dist_mcore", "mp_rank_*": "torch"}
_INCOMPLETE = ".incomplete-"
_REPLACED = ".replaced-"
_ID = r"[0-9a-f]{12}"


def new_id() -> str:
    """A fresh id for one save's temporary folders."""
    return uuid.uuid4().hex[:12]


def incomplete_folder(folder: Path, save_id: str) -> Path:
    """Where the save with that id writes before `folder` appears."""
    return folder.with_name(f"{folder.name}{_INCOMPLETE}{save_id}")


def refuse_foreign(folder: Path) -> None:
    """Raises FileExistsError if what has the place of `folder` is no checkpoint: a save must not replace it."""
    # As a full disk, no reason to end a run: who put it there may take it away before the next save.
    if folder.is_dir() and _is_foreign({entry.name for entry in folder.iterdir()}):
        raise FileExistsError(f"{folder} holds something that is not a checkpoint of this format: not overwritten")
    # Also above: making folders below a file fails with words that name neither.
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise FileExistsError(f"{path} is a file: not overwritten")


def begin(temporary: Path, folder: Path) -> None:
    """Cleans up after killed saves of `folder` and makes the temporary folder for a new one."""
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # First back, then away: what lies aside may be the only whole checkpoint.
    _put_back(folder)
    remove_incomplete(folder.parent, name=re.escape(folder.name))
    disk.make_folder(temporary)


def commit(temporary: Path, folder: Path) -> None:
    """Gives the finished temporary folder its final name, replacing a checkpoint of that name, and nothing else.

    Raises FileExistsError where something else has come to have that name since `begin`, which may be minutes ago.
    """
    refuse_foreign(folder)
    save_id = temporary.name.rpartition("-")[2]
    aside = folder.with_name(f"{folder.name}{_REPLACED}{save_id}")
    # Names before the rename, or a power cut could leave a folder without its files.
    disk.sync(temporary)
    if folder.is_dir() and any(folder.iterdir()):
        disk.rename(folder, aside)
    # From here on the new checkpoint counts; an empty folder of that name is replaced as well.
    disk.rename(temporary, folder)
    disk.sync(folder.parent)
    if aside.exists():
        # Deleting takes time; under this name a half deleted folder is recognised.
        disk.rename(aside, temporary)
        disk.remove_tree(temporary)


@contextmanager
def written_beside(folder: Path) -> Iterator[Path]:
    """A folder to fill with what is no checkpoint of this format, which is not there yet: it appears after the body.

    Then all of it is on disk. Where the body fails nothing is left. Raises OSError.
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
    """Deletes a checkpoint; killed in between, it leaves what the next save removes."""
    # Deleting takes time; under this name a half deleted folder is recognised.
    doomed = incomplete_folder(folder, new_id())
    disk.rename(find_checkpoint(folder), doomed)
    disk.remove_tree(doomed)


def discard(temporary: Path) -> None:
    """Removes a temporary folder after a failed save, as far as the file system lets us."""
    disk.try_to_remove_tree(temporary)


def remove_incomplete(parent: Path, *, name: str) -> None:
    """Deletes what killed saves left in `parent` for checkpoints and files whose name matches the pattern `name`."""
    pattern = re.compile(f"(?P<name>{name})(?P<kind>{re.escape(_INCOMPLETE)}|{re.escape(_REPLACED)}){_ID}")
    for entry in list(parent.iterdir()):
        match = pattern.fullmatch(entry.name)
        if match is None:
            continue
        # A replaced checkpoint goes only when its successor is in place.
        folder = parent / match["name"]
        if match["kind"] == _INCOMPLETE or (folder / MANIFEST_FILE).is_file():
            disk.remove_file(entry) if entry.is_file() else disk.remove_tree(entry)


def find_checkpoint(folder: Path) -> Path:
    """The folder to read for `folder`: itself, or what a killed replacement left aside.

    Raises ValueError if there is none or it is not complete.
    """
    if not folder.exists():
        aside = _aside(folder)
        if aside is not None:
            return aside
        # Tells a user who looks for the last save of a killed run what became of it.
        left = folder.parent.is_dir() and any(folder.parent.glob(f"{folder.name}{_INCOMPLETE}*"))
        raise ValueError(f"checkpoint {folder} {'was never completed' if left else 'does not exist'}")
    if not (folder / MANIFEST_FILE).is_file():
        raise ValueError(f"{folder} is no complete checkpoint: it has no {MANIFEST_FILE}{_hint(folder)}")
    return folder


def _hint(folder: Path) -> str:
    """Returns advice for a checkpoint of another program, recognized by a file that each of its kind has."""
    for pattern, kind in _OF_OTHERS.items():
        if any(folder.glob(pattern)):
            return f"; Megatron wrote it: tools/checkpoint.py convert --from {kind} --to torch_dist makes one of it"
    return ""


def is_complete(folder: Path) -> bool:
    """Whether there is a whole checkpoint to read for `folder`."""
    try:
        find_checkpoint(folder)
    except ValueError:
        return False
    return True


def name_of(entry: Path) -> str:
    """The name of the checkpoint that a folder holds: also of one that a killed replacement left aside."""
    return re.sub(f"{re.escape(_REPLACED)}{_ID}$", "", entry.name)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that readers see the old or the new text, never a part."""
    disk.replace_file(path, text.encode(), temporary=path.with_name(f"{path.name}{_INCOMPLETE}{new_id()}"))


def _is_foreign(names: set[str]) -> bool:
    # The manifest tells a checkpoint from a user's folder that happens to have its name. A checkpoint that has lost it
    # is told by a file that nobody else writes, and has to make way as any damaged one.
    if MANIFEST_FILE in names or not names:
        return False
    return COMMON_FILE not in names or not all(re.fullmatch(_OWN_FILES, name) for name in names)


def _aside(folder: Path) -> Path | None:
    found = sorted(folder.parent.glob(f"{folder.name}{_REPLACED}*")) if folder.parent.is_dir() else []
    # More than one only if several saves were killed; the ids have no order, and each is whole.
    whole = [entry for entry in found if (entry / MANIFEST_FILE).is_file()]
    return whole[0] if whole else None


def _put_back(folder: Path) -> None:
    aside = None if folder.exists() else _aside(folder)
    if aside is not None:
        disk.rename(aside, folder)
