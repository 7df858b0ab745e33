"""The folder of a checkpoint: manifest with sizes and checksums, atomic appearance, recovery after a kill.

What the tensors are is not known here.

[Note: Atomic folders] `iter_0000100.incomplete-<id>` is being written and may be deleted; it gets its final name
by one rename, when everything in it is on disk. To replace a checkpoint, the old folder steps aside as
`.replaced-<id>` just before that rename; if the run is killed in between, readers use it and the next save puts it
back. At every moment one of the two names holds a whole checkpoint.
"""

import json
import os
import re
import shutil
import uuid
import zlib
from pathlib import Path
from typing import Any

from megatron.core.checksum import file_crc32

MANIFEST_FILE = "manifest.json"
COMMON_FILE = "common.json"
FORMAT_VERSION = 1
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
    """Raises ValueError if something that is no checkpoint has the place of `folder`: a save must not replace it."""
    # The manifest is what tells a checkpoint from a user's folder that happens to have its name.
    if folder.is_dir() and not (folder / MANIFEST_FILE).is_file() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something that is not a checkpoint of this format: not overwritten")
    # Also above: making folders below a file fails with words that name neither.
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(f"{path} is a file: not overwritten")


def begin(temporary: Path, folder: Path) -> None:
    """Cleans up after killed saves of `folder` and makes the temporary folder for a new one."""
    refuse_foreign(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # First back, then away: what lies aside may be the only whole checkpoint.
    _put_back(folder)
    remove_incomplete(folder.parent, name=re.escape(folder.name))
    temporary.mkdir()


def commit(temporary: Path, folder: Path) -> None:
    """Gives the finished temporary folder its final name, replacing a checkpoint of that name."""
    save_id = temporary.name.rpartition("-")[2]
    aside = folder.with_name(f"{folder.name}{_REPLACED}{save_id}")
    # Names before the rename, or a power cut could leave a folder without its files.
    _sync_folder(temporary)
    if (folder / MANIFEST_FILE).is_file():
        folder.rename(aside)
    # From here on the new checkpoint counts; an empty folder of that name is replaced as well.
    temporary.rename(folder)
    _sync_folder(folder.parent)
    if aside.exists():
        # Deleting takes time; under this name a half deleted folder is recognised.
        aside.rename(temporary)
        shutil.rmtree(temporary)


def discard(temporary: Path) -> None:
    """Removes a temporary folder after a failed save, as far as the file system lets us."""
    shutil.rmtree(temporary, ignore_errors=True)


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
            entry.unlink() if entry.is_file() else shutil.rmtree(entry)


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
        raise ValueError(f"{folder} is no complete checkpoint: it has no {MANIFEST_FILE}")
    return folder


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON and waits until it is on disk; raises ValueError if JSON cannot hold it."""
    try:
        text = json.dumps(value, indent=1)
    except TypeError as error:
        raise ValueError(f"{path.name}: {error}") from error
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def replace_text(path: Path, text: str) -> None:
    """Writes a small file so that readers see the old or the new text, never a part."""
    temporary = path.with_name(f"{path.name}{_INCOMPLETE}{new_id()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    # Atomic on POSIX, unlike writing into the file that readers may have open.
    os.replace(temporary, path)
    _sync_folder(path.parent)


def describe_files(folder: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """Manifest entries (bytes, crc32) of the named files."""
    return {name: {"bytes": (folder / name).stat().st_size, "crc32": file_crc32(folder / name)} for name in names}


def write_manifest(folder: Path, files: dict[str, dict[str, int]]) -> None:
    """Writes the manifest: the last file of a checkpoint, its presence says that the others are whole."""
    # The manifest vouches for the others, so its own checksum is inside.
    body = {"version": FORMAT_VERSION, "files": files}
    write_json(folder / MANIFEST_FILE, body | {"crc32": _crc32_of_json(body)})


def read_manifest(folder: Path) -> dict[str, dict[str, int]]:
    """The manifest entries by file name; raises ValueError if the manifest itself is damaged or of another format."""
    path = folder / MANIFEST_FILE
    body = read_json(path)
    if not isinstance(body, dict) or body.pop("crc32", None) != _crc32_of_json(body):
        raise ValueError(f"{path} is corrupt: its checksum does not match")
    if body["version"] != FORMAT_VERSION:
        raise ValueError(f"{path} has format version {body['version']}: this program reads {FORMAT_VERSION}")
    return body["files"]


def verify_file(folder: Path, name: str, *, expected: dict[str, int]) -> None:
    """Raises ValueError naming the file if it is missing, truncated or changed since the save."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{path} is missing")
    # Size first: it is free, and "truncated" says more than a wrong checksum.
    num_bytes = path.stat().st_size
    if num_bytes != expected["bytes"]:
        raise ValueError(f"{path} is truncated or changed: {num_bytes} bytes, {expected['bytes']} were saved")
    if file_crc32(path) != expected["crc32"]:
        raise ValueError(f"{path} is corrupt: its checksum does not match")


def read_json(path: Path) -> Any:
    """The value of a JSON file; raises ValueError naming the file if it is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} is corrupt: {error}") from error


def _aside(folder: Path) -> Path | None:
    found = sorted(folder.parent.glob(f"{folder.name}{_REPLACED}*")) if folder.parent.is_dir() else []
    # More than one only if several saves were killed; the ids have no order, and each is whole.
    whole = [entry for entry in found if (entry / MANIFEST_FILE).is_file()]
    return whole[0] if whole else None


def _put_back(folder: Path) -> None:
    aside = None if folder.exists() else _aside(folder)
    if aside is not None:
        aside.rename(folder)


def _crc32_of_json(body: dict[str, Any]) -> int:
    # Sorted, because what is read back need not keep the order in which it was written.
    return zlib.crc32(json.dumps(body, sort_keys=True).encode())


def _sync_folder(folder: Path) -> None:
    # A rename is durable only when the folder that holds the name is on disk.
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
