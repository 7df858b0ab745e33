"""Our safetensors files are readable by the library and vice versa, and damaged files are named."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron.tools.safetensors_files import (
    INDEX_FILE,
    ONE_FILE,
    TensorFiles,
    TensorKind,
    new_folder,
    write_tensor_files,
)

TENSORS = {
    "b": torch.randn(3, 5).bfloat16(),
    "a": torch.randn(4),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(7),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "flags": torch.tensor([True, False]),
    "half": torch.randn(2, 1).half(),
}


def write(folder: Path, *, max_shard_bytes: int) -> None:
    folder.mkdir(exist_ok=True)
    kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()}
    write_tensor_files(folder, kinds, read=TENSORS.__getitem__, max_shard_bytes=max_shard_bytes, metadata={"x": 1})


@pytest.mark.parametrize("max_shard_bytes", [1, 40, 10**9])
def test_the_library_reads_what_is_written_here(tmp_path: Path, max_shard_bytes: int) -> None:
    write(tmp_path, max_shard_bytes=max_shard_bytes)
    found = {name: value for path in tmp_path.glob("*.safetensors") for name, value in load_file(path).items()}
    assert found.keys() == TENSORS.keys()
    assert all(
        value.dtype == TENSORS[name].dtype and torch.equal(value, TENSORS[name]) for name, value in found.items()
    )
    if max_shard_bytes > 40:
        assert [path.name for path in tmp_path.iterdir()] == [ONE_FILE]
    else:
        index = json.loads((tmp_path / INDEX_FILE).read_text())
        assert index["metadata"] == {"total_size": 30 + 16 + 8 + 5 + 2 + 4, "x": 1}
        assert index["weight_map"].keys() == TENSORS.keys()
    files = TensorFiles(tmp_path)
    assert all(torch.equal(files.read(name), value) for name, value in TENSORS.items())


def test_what_the_library_writes_is_read_here(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / ONE_FILE, metadata={"format": "pt"})
    files = TensorFiles(tmp_path)
    assert {name: (kind.shape, kind.dtype) for name, kind in files.kinds.items()} == {
        name: (tuple(value.shape), value.dtype) for name, value in TENSORS.items()
    }
    assert all(torch.equal(files.read(name), value) for name, value in TENSORS.items())


def test_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"does not contain {ONE_FILE}; its safetensors files: none"):
        TensorFiles(tmp_path)
    for content, error in ((b"", "header too small"), (b"\x05" + bytes(7) + b"{abcd", "invalid JSON in header")):
        (tmp_path / ONE_FILE).write_bytes(content)
        with pytest.raises(
            ValueError, match=f"{ONE_FILE} is not a safetensors file, or is truncated or corrupt: .*{error}"
        ):
            TensorFiles(tmp_path)
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (tmp_path / ONE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match="corrupt: .*invalid shape, data type, or offset"):
        TensorFiles(tmp_path)
    for code, error in (("F4X", "unknown variant `F4X`"), ("F8_E8M0", "a is F8_E8M0: must be one of F64")):
        header = json.dumps({"a": {"dtype": code, "shape": [4], "data_offsets": [0, 4]}}).encode()
        (tmp_path / ONE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        with pytest.raises(ValueError, match=f"{ONE_FILE}.*{error}"):
            TensorFiles(tmp_path)
    (tmp_path / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="is not an index of safetensors files"):
        TensorFiles(tmp_path)


@pytest.mark.parametrize(
    ("changes", "tail", "error"),
    [
        ({"dtype": ["F32"]}, b"", "invalid type: sequence"),
        ({"shape": 2}, b"", "invalid type: integer `2`"),
        ({"data_offsets": [8]}, b"", "invalid length 1"),
        ({"data_offsets": [-8, 0]}, b"", "invalid value: integer `-8`"),
        ({"data_offsets": [0, 8]}, b"", "invalid offset for tensor"),
        ({"data_offsets": [12, 20]}, bytes(4), "invalid offset for tensor `b`"),
        ({}, b"x", "file not fully covered"),
    ],
)
def test_a_header_that_cannot_be_is_named(tmp_path: Path, changes: dict[str, Any], tail: bytes, error: str) -> None:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": entry, "b": {**entry, "data_offsets": [8, 16], **changes}}).encode()
    (tmp_path / ONE_FILE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16) + tail)
    with pytest.raises(
        ValueError, match=f"{ONE_FILE} is not a safetensors file, or is truncated or corrupt: .*{error}"
    ):
        TensorFiles(tmp_path)


def test_without_the_library_an_error_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, max_shard_bytes=10**9)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ValueError, match="is not installed: pip install 'safetensors>=0.4'"):
        TensorFiles(tmp_path)


def test_changes_of_a_tensor_do_not_reach_its_file(tmp_path: Path) -> None:
    write(tmp_path, max_shard_bytes=10**9)
    files = TensorFiles(tmp_path)
    files.read("a").zero_()
    assert torch.equal(files.read("a"), TENSORS["a"])


@pytest.mark.parametrize("file", [5, None, f"../{ONE_FILE}"])
def test_an_index_names_files_beside_it(tmp_path: Path, file: object) -> None:
    write(tmp_path, max_shard_bytes=1)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    index["weight_map"]["a"] = file
    (tmp_path / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="a is in .*: must be the name of a file in the same folder"):
        TensorFiles(tmp_path)


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), new_folder(tmp_path / "new") as folder:
        write(folder, max_shard_bytes=1)
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with new_folder(tmp_path / "new") as folder:
        write(folder, max_shard_bytes=1)
        assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="it already exists"), new_folder(tmp_path / "new"):
        pass
