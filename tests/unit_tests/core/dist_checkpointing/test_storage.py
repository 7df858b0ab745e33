"""Partial reads of stored tensors, and checkpoints with correct checksums and contradictory contents."""

import io
import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from megatron.core.dist_checkpointing import (
    ShardedObject,
    ShardedTensor,
    list_tensors,
    load_common,
    load_items,
    save_items,
    storage,
)
from megatron.core.dist_checkpointing.manifest import FileEntry
from megatron.core.logical_tensors import Box, whole
from tests.fuzz.checkpoint_damage import Harm, vouch

FORMAT_1 = Path(__file__).parent / "format_1"


# Partial reads.


@pytest.fixture
def reads(monkeypatch):
    """Records the size in bytes of each memory region that is read into, in order."""
    sizes, bytes_of = [], storage.bytes_of

    def note(tensor):
        sizes.append(tensor.nbytes)
        return bytes_of(tensor)

    monkeypatch.setattr(storage, "bytes_of", note)
    return sizes


ROWS, COLUMNS = 1024, 512  # 2 MiB of fp32
BOUND = 64 << 10


@pytest.mark.parametrize(
    ("box", "dtype", "most_bytes"),
    [
        # Rows are read directly into a contiguous target of the same dtype.
        (Box((100, 0), (300, COLUMNS)), torch.float32, 300 * COLUMNS * 4),
        (Box((100, 0), (300, COLUMNS)), torch.float64, 300 * COLUMNS * 4),
        # A window of columns requires reading whole rows, a few at a time.
        (Box((0, 17), (ROWS, 3)), torch.float32, ROWS * COLUMNS * 4),
        (Box((7, 17), (20, 30)), torch.bfloat16, 20 * COLUMNS * 4),
    ],
)
def test_a_slice_is_read_without_a_copy_of_the_tensor(tmp_path, monkeypatch, reads, box, dtype, most_bytes):
    monkeypatch.setattr(storage, "_READ_BYTES", BOUND)
    values = torch.randn(ROWS, COLUMNS)
    save_items(ShardedTensor.whole("w", values), tmp_path / "c", common={})
    reads.clear()
    target = torch.zeros(box.shape, dtype=dtype)
    load_items(ShardedTensor.at("w", target, (ROWS, COLUMNS), box.offset, allow_cast=True), tmp_path / "c")
    assert torch.equal(target, values[box.relative_to(whole((ROWS, COLUMNS)))].to(dtype))
    assert sum(reads) <= most_bytes
    beside = [size for size in reads if size != target.nbytes or dtype != torch.float32]
    assert max(beside, default=0) <= BOUND


def test_an_expert_of_a_stack_is_read_alone_where_one_is_larger_than_the_bound(tmp_path, monkeypatch, reads):
    monkeypatch.setattr(storage, "_READ_BYTES", BOUND)
    stack = torch.randn(4, 128, 256)  # an expert occupies 128 KiB
    save_items(ShardedTensor.whole("experts", stack), tmp_path / "c", common={})
    reads.clear()
    target = torch.zeros(2, 64, 200)
    load_items(ShardedTensor.at("experts", target, (4, 128, 256), (1, 10, 30)), tmp_path / "c")
    assert torch.equal(target, stack[1:3, 10:74, 30:230])
    assert max(reads) <= BOUND and sum(reads) == 2 * 64 * 256 * 4


class MovedFile(io.FileIO):
    """A file whose position another thread moves before each read."""

    def read(self, size=-1):
        self.seek(0)
        return super().read(size)

    def readinto(self, buffer):
        self.seek(0)
        return super().readinto(buffer)


def test_threads_that_share_a_file_do_not_move_the_reads_of_others(tmp_path, monkeypatch):
    values = [torch.full((5, 7), float(number)) for number in range(4)]
    save_items([ShardedTensor.whole(f"w{n}", value) for n, value in enumerate(values)], tmp_path / "c", common={})
    monkeypatch.setattr(storage, "open", lambda path, mode, buffering: MovedFile(path, mode), raising=False)
    found = [torch.zeros(5, 7) for _ in values]
    load_items([ShardedTensor.whole(f"w{n}", target) for n, target in enumerate(found)], tmp_path / "c")
    assert all(map(torch.equal, found, values))


# Contradictory contents.


def wanted():
    return [ShardedTensor.whole("w", torch.zeros(4, 3)), ShardedObject("o", None)]


@pytest.fixture
def folder(tmp_path):
    state = [ShardedTensor.at("w", torch.ones(2, 3), (4, 3), (row, 0)) for row in (0, 2)]
    save_items([*state, ShardedObject("o", {"a": 1})], tmp_path / "c", common={})
    return tmp_path / "c"


def change_piece(folder, number, **changes):
    """Changes the manifest's fields of one piece of w."""
    value = json.loads((folder / "manifest.json").read_text())
    pieces = [piece for piece in value["files"]["__0_0.distcp"]["pieces"] if piece["key"] == "w"]
    pieces[number].update(changes)
    (folder / "manifest.json").write_text(json.dumps(value))
    vouch(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"offset": [1, 0]}, "the pieces of w leave gaps or overlap"),
        ({"offset": [0, 0]}, "the pieces of w leave gaps or overlap"),
        ({"offset": [3, 0]}, r"w\[3:5, 0:3\], which is not part of a tensor of \[4, 3\]"),
        ({"shape": [1, 3]}, "9 elements of w are stored, out of 12"),
        ({"shape": [2]}, "does not describe a piece of a tensor"),
        ({"shape": [2, -3]}, "is not a number of bytes or elements"),
        ({"offset": [2.0, 0]}, "is not a number of bytes or elements"),
        ({"data": 1 << 40}, r"bytes for w\[2:4, 0:3\]: too few for its elements"),
        ({"key": "v"}, "which the metadata does not list"),
        ({"key": 3}, "does not describe a piece of a tensor"),
    ],
)
def test_pieces_that_do_not_make_up_their_tensor_are_named(folder, changes, message):
    change_piece(folder, 1, **changes)
    with pytest.raises(ValueError, match=message):
        load_items(wanted(), folder)


def change_metadata(folder, change):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder / ".metadata").write_bytes(pickle.dumps(change(metadata) or metadata))
    vouch(folder)


def test_pieces_with_gaps_are_no_checksum_of_a_file():
    piece = {"key": "w", "start": 4, "bytes": 8, "crc32": 1}
    with pytest.raises(ValueError, match="pieces do not cover the whole file"):
        FileEntry.from_json({"bytes": 12, "pieces": [piece]})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: vars(m).update(state_dict_metadata=None), "without a list of tensors"),
        (lambda m: m.state_dict_metadata.update(w=1), "'w' is neither a tensor nor an object"),
        (lambda m: m.state_dict_metadata.update({3: None}), "3 is neither"),
        (lambda m: vars(m.state_dict_metadata["w"]).update(size=(4, -3)), "w has the size"),
        (lambda m: vars(m.state_dict_metadata["w"]).update(size=torch.Size([2**62, 2**62])), "w has the size"),
        (lambda m: vars(m.state_dict_metadata["w"].properties).update(dtype=torch.quint8), "which is not supported"),
        (lambda m: vars(m.state_dict_metadata["w"]).update(properties=None), "w has the dtype None"),
        (lambda m: [m, Harm()], "refers to posix.mkdir"),
    ],
)
def test_metadata_that_torch_does_not_write_is_named(folder, change, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    change_metadata(folder, change)
    for read in (list_tensors, lambda path: load_items(wanted(), path)):
        with pytest.raises(ValueError, match=message):
            read(folder)
    assert not (tmp_path / "harm").exists()


def test_a_pickle_that_names_more_bytes_than_it_has_gets_no_memory_for_them(folder):
    (folder / ".metadata").write_bytes(b"\x80\x04\x8e" + (1 << 45).to_bytes(8, "little") + b"x.")
    vouch(folder)
    with pytest.raises(ValueError, match="metadata is corrupt"):
        list_tensors(folder)


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "9" * 5000])
def test_json_that_is_no_dict_of_values_is_named(folder, text):
    (folder / "common.json").write_text(text)
    vouch(folder)
    with pytest.raises(ValueError, match="common.json is corrupt"):
        load_common(folder)


def of_format_1():
    return [ShardedTensor.whole("decoder.layers.0.weight", torch.zeros(8, 6))]


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "common.json", None])
def test_the_first_format_reads_no_file_that_is_not_in_the_checkpoint(tmp_path, name):
    shutil.copytree(FORMAT_1, tmp_path / "c")
    change_metadata(
        tmp_path / "c", lambda m: [vars(info).update(relative_path=name) for info in m.storage_data.values()][:0]
    )
    with pytest.raises(ValueError, match="no file contains this range"):
        load_items(of_format_1(), tmp_path / "c")


def test_the_first_format_runs_nothing_and_takes_no_other_tensor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, content in enumerate((Harm(), {"a": 1}, torch.ones(2), torch.ones(8, 6).to_sparse())):
        folder = tmp_path / str(number)
        shutil.copytree(FORMAT_1, folder)
        for path in folder.glob("*.distcp"):
            with open(path, "r+b") as file:
                torch.save(content, file)
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        for info in metadata.storage_data.values():
            info.offset, info.length = 0, min(path.stat().st_size for path in folder.glob("*.distcp"))
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        vouch(folder)
        with pytest.raises(ValueError, match=r"cannot be read|contains a different tensor"):
            load_items(of_format_1(), folder)
    assert not (tmp_path / "harm").exists()
