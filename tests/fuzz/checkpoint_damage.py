"""Damages the files of a checkpoint, or replaces contents and updates the checksums. Does not load checkpoints."""

import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from megatron.core.dist_checkpointing.manifest import MANIFEST_FILE
from megatron.training.checkpointing.folder import TRACKER_FILE
from tests.fuzz.values import ODD_INTS, ODD_WORDS, Choices, mutate_json

# The checkpoint to damage.
LATEST = "iter_0000002"


class Harm:
    """An object whose pickle runs code when it is loaded: creates the folder `harm`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("harm",)


@dataclass
class Damaged:
    """A description of the damage to a --save folder, and the action that reads it.

    is_content_changed: whether tensor bytes may have changed under valid checksums. is_plain: whether files have
    changed but checksums have not, so that verification must find the damage.
    """

    kind: str
    action: str
    words: list[str]
    notes: list[str] = field(default_factory=list)
    is_content_changed: bool = False
    is_plain: bool = False


Damage = Callable[[Choices, Path, Damaged], str]


def _bytes(choices: Choices, saved: Path, case: Damaged) -> str:
    # May also damage the previous checkpoint, in which case the later one is loaded.
    files = sorted(path for path in saved.glob("*/*") if path.is_file() and path.stat().st_size)
    path = choices.one(files)
    content = path.read_bytes()
    place = choices.below(len(content))
    flipped = content[:place] + bytes([content[place] ^ 1 << choices.below(8)]) + content[place + 1 :]
    match what := choices.one(["flip", "flip", "cut", "longer", "empty", "gone", "folder", "other"]):
        case "gone" | "folder":
            path.unlink()
            if what == "folder":
                path.mkdir()
        case "other":
            path.write_bytes(choices.one(files).read_bytes() + b" ")
        case _:
            path.write_bytes({"flip": flipped, "cut": content[:place], "longer": content + b"\0", "empty": b""}[what])
    # Extra whitespace does not change JSON, and readers of the later checkpoint do not notice damage to the other one.
    is_looked_at = path.parent.name == LATEST or "--ckpt-step" not in case.words
    case.is_plain = path.name != MANIFEST_FILE and is_looked_at
    return f"{what} {path.name} at {place}"


def data_files(saved: Path) -> list[Path]:
    """Returns the non-empty data files of both checkpoints. Files of the later one are listed twice, to favor them."""
    found = [*(saved / LATEST).glob("*.distcp"), *saved.glob("*/*.distcp")]
    return sorted(path for path in found if path.is_file() and path.stat().st_size)


def _pieces(choices: Choices, saved: Path, case: Damaged) -> str:
    """Changes bytes inside a data file and updates the checksums."""
    path = choices.one(data_files(saved))
    content = bytearray(path.read_bytes())
    for _ in range(choices.integer(1, 30)):
        content[choices.below(len(content))] = choices.below(256)
    path.write_bytes(content)
    case.is_content_changed = True
    vouch(saved / LATEST)
    return path.name


def _hostile_pieces(choices: Choices, saved: Path, case: Damaged) -> str:
    """Stores a value that is not a tensor with a valid checksum. Only pieces of format version 1 are read by torch."""
    path = choices.one(data_files(saved))
    size = path.stat().st_size
    with open(path, "wb") as file:
        torch.save(choices.one([Harm(), {"a": torch.ones(2)}, [1], torch.ones(1), "x"]), file)
    os.truncate(path, max(size, path.stat().st_size))
    case.is_content_changed = True
    vouch(saved / LATEST)
    return path.name


def _manifest(choices: Choices, saved: Path, case: Damaged) -> str:
    value = _json(saved / LATEST / MANIFEST_FILE)
    value.pop("crc32", None)
    pieces = [piece for entry in _entries(value) for piece in entry.get("pieces", [])]
    if pieces and choices.chance(0.6):
        note = mutate_json(choices, {"piece": choices.one(pieces)})
    else:
        note = mutate_json(choices, value)
    _write_manifest(saved / LATEST, value)
    case.is_content_changed = True
    return note


def _common(choices: Choices, saved: Path, case: Damaged) -> str:
    path = saved / LATEST / "common.json"
    value = _json(path)
    inner = value.get(choices.one(["args", "train_state", "scheduler", "optimizer", "frozen", "contents"]))
    note = mutate_json(choices, inner if inner and choices.chance(0.8) else value)
    path.write_text(choices.one([json.dumps(value)] * 9 + ["[" * 100_000, "[]", "1", "", '{"a": 1, "a": 2}', "NaN"]))
    vouch(saved / LATEST)
    return note


def _metadata(choices: Choices, saved: Path, case: Damaged) -> str:
    path = saved / LATEST / ".metadata"
    try:
        # The file is trusted: this process has just written it, unless other damage came first.
        metadata = pickle.loads(path.read_bytes())
        assert metadata.state_dict_metadata and metadata.storage_data
    except (OSError, pickle.UnpicklingError, EOFError, ValueError, AttributeError, AssertionError):
        return "gone"
    note = choices.one(_METADATA_CHANGES)(choices, metadata)
    content = pickle.dumps(metadata) if isinstance(note, str) else note[1]
    path.write_bytes(content)
    vouch(saved / LATEST)
    case.is_content_changed = True
    return str(note)[:300]


def _tracker(choices: Choices, saved: Path, case: Damaged) -> str:
    path = saved / TRACKER_FILE
    if path.is_dir():
        path.rmdir()
    words = ["1", "2", "3", "-1", "0", "release", "9" * 5000, "2.0", "\u0662", "0002", " 2\n", "1e3", *ODD_WORDS]
    match what := choices.one(["text", "text", "gone", "folder", "bytes"]):
        case "text":
            path.write_text(what := choices.one(words), encoding="utf-8", errors="surrogateescape")
        case "bytes":
            path.write_bytes(choices.bytes(9))
        case _:
            path.unlink(missing_ok=True)
            if what == "folder":
                path.mkdir()
    return what[:50]


def _folders(choices: Choices, saved: Path, case: Damaged) -> str:
    """Adds or changes folders next to the checkpoint."""
    name = choices.one(
        ["iter_0000009", "iter_00000000000000000002", f"iter_{'9' * 200}", "iter_\u0660000002", "release"]
    )
    match what := choices.one(["empty", "file", "copy", "incomplete", "replaced", "loop"]):
        case "empty":
            (saved / name).mkdir(exist_ok=True)
        case "file":
            (saved / name).write_text("x")
        case "copy":
            shutil.copytree(saved / LATEST, saved / name, dirs_exist_ok=True)
        case "incomplete":
            (saved / f"{LATEST}.incomplete-0123456789ab").mkdir(exist_ok=True)
        case "replaced":
            (saved / LATEST).rename(saved / f"{LATEST}.replaced-0123456789ab")
        case _:
            (saved / f"{name}x").symlink_to(saved)
            (saved / name).symlink_to(saved / name)
    return f"{what} {name[:30]}"


# Kinds of damage with more variants are drawn more often.
DAMAGES: list[Damage] = [
    _bytes,
    _pieces,
    _hostile_pieces,
    _manifest,
    _manifest,
    _common,
    _common,
    _metadata,
    _metadata,
    _metadata,
    _tracker,
    _folders,
]


# Changes of torch's metadata. Each function changes it in place and returns a description, or returns a new file.


def _sized(choices: Choices, metadata: Any) -> str:
    entries = [
        (key, one) for key, one in metadata.state_dict_metadata.items() if isinstance(one, TensorStorageMetadata)
    ]
    key, entry = choices.one(entries)
    odd = [torch.Size([]), torch.Size([1] * 9), (3, -1), [2], None, "x", torch.Size([2**62, 2**62]), (2**70,), (1.5,)]
    match what := choices.one(
        ["size", "size", "dtype", "chunk", "chunk", "chunks", "properties", "kind", "key", "drop"]
    ):
        case "size":
            entry.size = choices.one(
                [*odd, torch.Size([n + 1 for n in entry.size]), torch.Size(list(entry.size)[::-1])]
            )
        case "dtype":
            kinds = [
                torch.float64,
                torch.int8,
                torch.bool,
                torch.complex64,
                torch.float8_e4m3fn,
                torch.quint8,
                None,
                "x",
            ]
            entry.properties.dtype = choices.one(kinds)
        case "chunk" if entry.chunks:
            name = choices.one(["offsets", "sizes"])
            setattr(
                choices.one(entry.chunks),
                name,
                choices.one([*odd, torch.Size([choices.one(ODD_INTS[:5]) for _ in entry.size])]),
            )
        case "chunks":
            entry.chunks = choices.one([[], entry.chunks * 2, None, [None], "x"])
        case "properties":
            entry.properties = choices.one([None, 1, {}])
        case "kind":
            metadata.state_dict_metadata[key] = choices.one([BytesStorageMetadata(), None, 1, "x", {}, (1, 2)])
        case "key":
            metadata.state_dict_metadata[choices.one([1, None, "x", ("a",), ""])] = entry
        case _:
            del metadata.state_dict_metadata[key]
    return f"{what} of {key}"


def _stored(choices: Choices, metadata: Any) -> str:
    storage = metadata.storage_data or {}
    index = choices.one(list(storage))
    info = storage[index]
    match what := choices.one(["path", "offset", "length", "drop", "index", "info", "none", "double"]):
        case "path":
            info.relative_path = choices.one(
                ["/etc/passwd", "../../saved/x", "x", "", 1, None, "common.json", ".", "a\0b"]
            )
        case "offset" | "length":
            setattr(info, what, choices.one([*ODD_INTS, None, "x", 1.5, 3]))
        case "drop":
            del storage[index]
        case "index":
            odd = [
                ("x", None),
                (1, None),
                (index.fqn, torch.Size([99])),
                (index.fqn, None),
                (index.fqn, (-1,)),
                (None, None),
            ]
            fqn, offset = choices.one(odd)
            storage[replace(index, fqn=fqn, offset=offset)] = storage.pop(index)
        case "info":
            storage[index] = choices.one([None, 1, "x", {}])
        case "none":
            metadata.storage_data = choices.one([None, {}, [], 1])
        case _:
            storage[replace(index, index=77)] = info
    return f"{what} of {index}"


def _around(choices: Choices, metadata: Any) -> str:
    name = choices.one(["state_dict_metadata", "planner_data", "storage_meta", "storage_data"])
    setattr(metadata, name, choices.one([None, {}, [], 1, "x", {1: 2}]))
    return name


def _other_pickle(choices: Choices, metadata: Any) -> tuple[str, bytes]:
    """Returns a name and bytes that no save writes, to test the restricted unpickler."""
    whole = pickle.dumps(metadata)
    place = choices.below(len(whole))
    others = {
        "harm": pickle.dumps(Harm()),
        "harm inside": pickle.dumps([metadata, Harm()]),
        "other": pickle.dumps(choices.one([1, None, {}, [metadata], torch.float32, print, torch.Size])),
        "flip": whole[:place] + bytes([choices.below(256)]) + whole[place + 1 :],
        "cut": whole[:place],
        "big string": b"\x80\x04\x8e" + (1 << 60).to_bytes(8, "little") + b"x.",
        "big text": b"\x80\x04\x8d" + (1 << 40).to_bytes(8, "little") + b"x.",
        "big int": b"\x80\x04\x8b" + (1 << 30).to_bytes(4, "little") + b"x.",
        "big frame": b"\x80\x04\x95" + (1 << 50).to_bytes(8, "little") + b"N.",
        "deep": b"\x80\x04" + b"(" * 100_000 + b"l" * 100_000 + b".",
        "global": b"cos\nsystem\n(S'mkdir harm'\ntR.",
        "dotted": b"\x80\x04\x8c\x05torch\x8c\x0fserialization.os\x93.",
        "getattr": b"ctorch.serialization\n_get_layout\n(S'torch.strided'\ntR.",
        "size": b"ctorch\nSize\n(I-5\ntR.",
        "new": b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81}\x8c\x01xK\x01sb.",
        "protocol": b"\x80\x63N.",
        "persistent": b"P1\n.",
        "ext": b"\x80\x02\x82\x01.",
        "empty": b"",
        "text": b"MMIDIDX",
    }
    name = choices.one(list(others))
    return name, others[name]


_METADATA_CHANGES: list[Callable[[Choices, Any], Any]] = [_sized, _sized, _stored, _around, _other_pickle]


# Checksums.


def vouch(folder: Path) -> None:
    """Updates the checksum of each file that has an entry in the manifest."""
    value = _json(folder / MANIFEST_FILE)
    names = list(value["files"]) if isinstance(value.get("files"), dict) else []
    for name, entry in ((name, value["files"][name]) for name in names):
        path = folder / name
        if isinstance(entry, dict) and path.is_file():
            content = path.read_bytes()
            if "crc32" in entry:
                entry["crc32"] = zlib.crc32(content)
            entry["bytes"] = len(content)
            for piece in entry.get("pieces") or []:
                # Other damage may have removed the numbers.
                if isinstance(piece, dict) and {type(piece.get(name)) for name in ("start", "bytes")} == {int}:
                    piece["crc32"] = zlib.crc32(content[piece["start"] : piece["start"] + piece["bytes"]])
    _write_manifest(folder, value)


def _entries(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the manifest's entries that earlier damage has left intact."""
    files = manifest.get("files")
    entries = files.values() if isinstance(files, dict) else ()
    return [entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("pieces", []), list)]


def _write_manifest(folder: Path, value: dict[str, Any]) -> None:
    value.pop("crc32", None)
    checksum = zlib.crc32(json.dumps(value, sort_keys=True).encode())
    (folder / MANIFEST_FILE).write_text(json.dumps({**value, "crc32": checksum}))


def _json(path: Path) -> Any:
    """Returns the JSON object in a file, or a placeholder if earlier damage has left none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {"x": 1}
    return value if isinstance(value, dict) and value else {"x": 1}
