"""The .bin/.idx format: golden bytes, round trips, and errors for damaged files."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder
from tests.counts import long_count


def write_pair(
    prefix: Path, documents: list[list[list[int]]], dtype: type = np.uint16, multimodal: bool = False
) -> str:
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal) as builder:
        for document in documents:
            for number, sequence in enumerate(document):
                builder.add_item(np.array(sequence, dtype=dtype), mode=number)
            builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def test_a_small_pair_has_the_bytes_of_the_published_layout(tmp_path: Path) -> None:
    write_pair(tmp_path / "a", [[[1, 2, 3]], [[4], [5, 6]]], multimodal=True)
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<6H", 1, 2, 3, 4, 5, 6)
    expected = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 3, 3)
    expected += struct.pack("<3i", 3, 1, 2) + struct.pack("<3q", 0, 6, 8) + struct.pack("<3q", 0, 1, 3)
    assert (tmp_path / "a.idx").read_bytes() == expected + struct.pack("<3b", 0, 0, 1)


def test_dtype_codes_and_sizes_are_megatrons() -> None:
    codes = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
    for code, name in codes.items():
        assert DType.dtype_from_code(code) is np.dtype(name).type
        assert DType.code_from_dtype(np.dtype(name).type) == code
        assert DType.size(code) == DType.size(np.dtype(name).type) == np.dtype(name).itemsize
    assert [DType.optimal_dtype(size) for size in (257, 65499, 65500, None)] == [np.uint16] * 2 + [np.int32] * 2


DOCUMENTS = st.lists(st.lists(st.lists(st.integers(0, 250), max_size=9), max_size=4), max_size=6)


@given(documents=DOCUMENTS, dtype=st.sampled_from([np.uint8, np.int32, np.int64, np.float32]), mmap=st.booleans())
def test_what_is_written_is_read_in_whole_and_in_part(tmp_path_factory, documents, dtype, mmap) -> None:
    prefix = write_pair(tmp_path_factory.mktemp("pair") / "a", documents, dtype=dtype)
    dataset = IndexedDataset(prefix, mmap=mmap)
    sequences = [sequence for document in documents for sequence in document]
    assert [item.tolist() for item in dataset[:]] == sequences
    assert dataset.sequence_lengths.tolist() == list(map(len, sequences))
    assert dataset.document_indices.tolist() == np.cumsum([0] + list(map(len, documents))).tolist()
    for number, sequence in enumerate(sequences):
        assert dataset[number].dtype == dtype
        middle = len(sequence) // 2
        assert dataset.get(number, middle).tolist() == sequence[middle:]
        assert dataset.get(number, 0, middle).tolist() == sequence[:middle]


def test_modes_travel_with_multimodal_sequences(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path / "a", [[[1, 2], [3]]], multimodal=True), multimodal=True)
    array, mode = dataset[1]
    assert (array.tolist(), mode, dataset[0:2][1].tolist()) == ([3], 1, [0, 1])


def test_appended_pairs_read_like_one(tmp_path: Path) -> None:
    first, second = [[[1, 2]], [[3], [4, 5]]], [[[6]], [[], [7, 8]]]
    whole = write_pair(tmp_path / "whole", first + second)
    with IndexedDatasetBuilder(str(tmp_path / "sum.bin"), dtype=np.uint16) as builder:
        builder.add_index(write_pair(tmp_path / "a", first))
        builder.add_index(write_pair(tmp_path / "b", second))
        builder.finalize(str(tmp_path / "sum.idx"))
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"sum{suffix}").read_bytes() == Path(whole + suffix).read_bytes()
    with IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.int32) as builder:
        with pytest.raises(ValueError, match="contains uint16: must be int32"):
            builder.add_index(whole)


def test_bytes_after_the_last_sequence_of_a_pair_are_not_appended(tmp_path: Path) -> None:
    longer = write_pair(tmp_path / "longer", [[[1, 2]]])
    with open(f"{longer}.bin", "ab") as file:
        file.write(b"\1\2\3\4")
    with IndexedDatasetBuilder(str(tmp_path / "sum.bin"), dtype=np.uint16) as builder:
        builder.add_index(longer)
        builder.add_index(write_pair(tmp_path / "b", [[[3], [4, 5]]]))
        builder.finalize(str(tmp_path / "sum.idx"))
    assert [part.tolist() for part in IndexedDataset(str(tmp_path / "sum"))[0:3]] == [[1, 2], [3], [4, 5]]


def test_a_dataset_pickles_without_its_data(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path / "a", [[list(range(1000))]]), mmap=False)
    data = pickle.dumps(dataset)
    assert len(data) < 500
    assert pickle.loads(data)[0].tolist() == list(range(1000))


@pytest.mark.parametrize("offset, length", [(-1, 1), (2, 2), (4, None), (0, -1)])
def test_reading_outside_a_sequence_is_refused(tmp_path: Path, offset: int, length: int | None) -> None:
    dataset = IndexedDataset(write_pair(tmp_path / "a", [[[1, 2, 3]], [[4]]]))
    with pytest.raises(IndexError, match="sequence 0 has 3 elements"):
        dataset.get(0, offset, length)


@pytest.mark.parametrize("value", [-1, 65536])
def test_values_that_the_dtype_cannot_hold_are_refused_not_wrapped(tmp_path: Path, value: int) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "a.bin"), dtype=np.uint16) as builder:
        with pytest.raises(ValueError, match=f"values {min(0, value)} to {max(0, value)} do not fit uint16"):
            builder.add_item(np.array([0, value]))
    assert os.listdir(tmp_path) == []


def test_every_truncation_is_noticed_when_the_pair_is_opened(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    for suffix in (".idx", ".bin"):
        file = Path(prefix + suffix)
        whole = file.read_bytes()
        for size in range(0, len(whole), long_count(3, soak=1)):
            file.write_bytes(whole[:size])
            with pytest.raises(ValueError, match="truncated") as error:
                IndexedDataset(prefix)
            assert str(file) in str(error.value)
        file.write_bytes(whole)


@pytest.mark.parametrize(
    "offset, value, message",
    [
        (0, b"XX", "starts with b'XXIDIDX"),
        (9, b"\x02", "version 2: must be 1"),
        (17, b"\x09", "dtype code 9: must be 1 to 8"),
        (18, b"\x03", "truncated or damaged"),
        (34, struct.pack("<i", 4000), "sequence 0 has 4000 elements of 2 bytes at byte 0, but .*a.bin has 10 bytes"),
        (34, struct.pack("<i", -1), "sequence 0 has -1 elements"),
        (42, struct.pack("<q", 1 << 62), "at byte 4611686018427387904"),
        (42, struct.pack("<q", -2), "at byte -2"),
        (74, struct.pack("<q", 5), "borders must increase from 0 to 2"),
    ],
)
def test_a_damaged_index_says_what_is_wrong(tmp_path: Path, offset: int, value: bytes, message: str) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2, 3]], [[4, 5]]])
    data = bytearray(Path(prefix + ".idx").read_bytes())
    data[offset : offset + len(value)] = value
    Path(prefix + ".idx").write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(prefix)
    assert "a.idx" in str(error.value)


@pytest.mark.parametrize("missing", [".bin", ".idx"])
def test_a_missing_half_is_named(tmp_path: Path, missing: str) -> None:
    prefix = write_pair(tmp_path / "a", [[[1]]])
    assert IndexedDataset.exists(prefix)
    os.unlink(prefix + missing)
    assert not IndexedDataset.exists(prefix)
    with pytest.raises(FileNotFoundError, match=f"a{missing} does not exist"):
        IndexedDataset(prefix)


def test_an_interrupted_write_leaves_the_old_pair(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2, 3]]])
    with pytest.raises(KeyboardInterrupt), IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_item(np.array([9], dtype=np.uint16))
        raise KeyboardInterrupt
    assert IndexedDataset(prefix)[0].tolist() == [1, 2, 3]
    assert sorted(os.listdir(tmp_path)) == ["a.bin", "a.idx"]


def test_a_crash_while_files_are_renamed_leaves_no_pair_that_opens(tmp_path: Path, monkeypatch) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2, 3]]])
    replace = os.replace

    def crash_at_the_index(source: Path, target: Path) -> None:
        if str(target).endswith(".idx"):
            raise SystemExit
        replace(source, target)

    monkeypatch.setattr(os, "replace", crash_at_the_index)
    with pytest.raises(SystemExit):
        write_pair(tmp_path / "a", [[[9]]])
    with pytest.raises(FileNotFoundError, match="a.idx does not exist"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
def test_documents_of_an_iterator_are_written_in_chunks(tmp_path: Path, chunk_size: int) -> None:
    documents = [[1, 2, 3], [4], [], [5, 6]]
    with IndexedDatasetBuilder(f"{tmp_path}/a.bin", dtype=np.uint16, multimodal=True) as builder:
        builder.add_documents(iter(documents), modes=[1, 0, 2, 3], eod_token=9, chunk_size=chunk_size)
        builder.finalize(f"{tmp_path}/a.idx")
    dataset = IndexedDataset(f"{tmp_path}/a", multimodal=True)
    assert [dataset[i][0].tolist() for i in range(4)] == [[1, 2, 3, 9], [4, 9], [9], [5, 6, 9]]
    assert dataset.sequence_modes.tolist() == [1, 0, 2, 3] and dataset.document_indices.tolist() == [0, 1, 2, 3, 4]


def test_borders_of_documents_are_replaced_in_the_object_alone(tmp_path: Path) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]], [[3]], [[4]]])
    dataset = IndexedDataset(prefix)
    dataset.set_document_indices(np.array([0, 2, 3]))
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert one.document_indices.tolist() == [0, 2, 3] and one[2].tolist() == [4]
    assert IndexedDataset(prefix).document_indices.tolist() == [0, 1, 2, 3]


def test_initialize_opens_other_files(tmp_path: Path) -> None:
    dataset = IndexedDataset(write_pair(tmp_path / "a", [[[1, 2]]]))
    dataset.initialize(write_pair(tmp_path / "b", [[[7]]]), False, False)
    assert dataset[0].tolist() == [7] and dataset.mmap is False


@pytest.mark.parametrize(
    "argument",
    [
        {"object_storage_config": object()},
        {"s3_config": object()},
        {"fast_cache_load": True},
        {"sequences_per_dataset": {}},
        {"dtype_code": 4},
    ],
)
def test_other_ways_to_open_are_refused_by_name(tmp_path: Path, argument: dict) -> None:
    prefix = write_pair(tmp_path / "a", [[[1, 2]]])
    with pytest.raises(ValueError, match=f"{next(iter(argument))} is .*; keep the default"):
        IndexedDataset(prefix, **argument)
