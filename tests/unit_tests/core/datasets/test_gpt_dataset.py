"""Samples compared with the token stream that they are taken from, the index cache, and mock data."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import MOCK_STRIDES, GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import DataError
from megatron.core.files import file_crc32
from megatron.core.tokenizers.tokenizer import NullTokenizer
from tests.functional_tests.corpora import CODES, write_corpora
from tests.unit_tests.core.datasets.corpora import dataset_config, write_corpus


def build(config: GPTDatasetConfig, sizes=(50, 10, 0), cls: type[GPTDataset] = GPTDataset):
    return BlendedMegatronDatasetBuilder(cls, list(sizes), lambda: True, config).build()


@pytest.mark.parametrize("mmap", [True, False])
def test_every_sample_is_its_piece_of_the_stream_of_its_own_documents(tmp_path: Path, mmap: bool) -> None:
    documents = write_corpus(tmp_path / "a")
    train, valid, test = build(dataset_config(tmp_path / "a", mmap_bin_files=mmap), sizes=(200, None, 0))
    assert test is None
    for dataset, part in ((train, range(32)), (valid, range(32, 36))):
        assert set(dataset.document_index.tolist()) == set(part)
        stream = np.concatenate([documents[document] for document in dataset.document_index])
        assert sorted(dataset.shuffle_index.tolist()) == list(range(len(dataset)))
        for request, sample in enumerate(dataset.shuffle_index):
            expected = stream[int(sample) * 8 : int(sample) * 8 + 9].tolist()
            item = dataset[request]
            assert (item["tokens"].tolist(), item["labels"].tolist()) == (expected[:-1], expected[1:])
    assert len(train) >= 200


def test_items_have_the_documented_types(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    item = build(dataset_config(tmp_path / "a"))[0][0]
    mask = item.pop("attention_mask")
    assert torch.equal(mask, torch.ones(1, 8, 8, dtype=torch.bool).triu(1))
    plain = build(dataset_config(tmp_path / "a", create_attention_mask=False))[0][0]
    assert set(item) == set(plain)
    assert {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in item.items()} == {
        "tokens": (torch.int64, (8,)),
        "labels": (torch.int64, (8,)),
        "loss_mask": (torch.float32, (8,)),
        "position_ids": (torch.int64, (8,)),
    }
    assert item["position_ids"].tolist() == list(range(8)) and item["loss_mask"].tolist() == [1.0] * 8


def test_writing_to_an_item_changes_no_other(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    dataset = build(dataset_config(tmp_path / "a"))[0]
    before = {key: tensor.clone() for key, tensor in dataset[3].items()}
    for tensor in dataset[3].values():
        tensor.zero_()
    assert all(torch.equal(before[key], tensor) for key, tensor in dataset[3].items())
    dataset[3]["tokens"].zero_()


@pytest.mark.parametrize("token, sequence", [(1000, 0), (65535, 39)])
def test_data_of_another_tokenizer_is_found_at_start_up(tmp_path: Path, token: int, sequence: int) -> None:
    documents = write_corpus(tmp_path / "a", num_documents=40, longest=30)
    raw = np.concatenate(documents).astype(np.uint16)
    raw[sum(map(len, documents[:sequence]))] = token
    (tmp_path / "a.bin").write_bytes(raw.tobytes())
    with pytest.raises(ValueError, match=rf"contains token {token}: NullTokenizer of 1000 ids has ids 0 to 999"):
        build(dataset_config(tmp_path / "a"), sizes=(10, 10, 10))


def test_a_wrong_token_that_start_up_missed_is_found_when_read(tmp_path: Path) -> None:
    documents = write_corpus(tmp_path / "a", num_documents=400)
    dataset = build(dataset_config(tmp_path / "a"), sizes=(None, 0, 0))[0]
    raw = np.full(sum(map(len, documents)), 5000, dtype=np.uint16)
    with open(tmp_path / "a.bin", "r+b") as file:
        file.write(raw.tobytes())
    with pytest.raises(ValueError, match=r"a \(train\) contains token 5000"):
        dataset[0]


@pytest.mark.parametrize("split, part", [("1,1,0", "train"), ("99,1,0", "valid")])
def test_too_little_text_names_the_part(tmp_path: Path, split: str, part: str) -> None:
    write_corpus(tmp_path / "a", num_documents=100, longest=10)
    length = 4000 if part == "train" else 100
    with pytest.raises(ValueError, match=rf"a \({part}\) has \d+ documents with \d+ tokens: .* = {length + 1};"):
        build(dataset_config(tmp_path / "a", split=split, sequence_length=length))


def cache_files(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {name: (os.stat(folder / name).st_ino, (folder / name).read_bytes()) for name in sorted(os.listdir(folder))}


def test_indices_are_built_once_and_then_read(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    first = build(dataset_config(tmp_path / "a"))
    folder = tmp_path / "cache" / "GPTDataset_indices"
    files = cache_files(folder)
    assert len(files) == 8 and not [name for name in files if "partial" in name]
    again = build(dataset_config(tmp_path / "a"))
    assert cache_files(folder) == files
    assert [first[0][i]["tokens"].tolist() for i in range(50)] == [again[0][i]["tokens"].tolist() for i in range(50)]


@pytest.mark.parametrize(
    "change", [{"random_seed": 5}, {"sequence_length": 9}, {"split": "6,2,2"}, {"sizes": (200, 10, 0)}, {"seed": 3}]
)
def test_other_settings_or_other_data_do_not_meet_old_indices(tmp_path: Path, change: dict) -> None:
    write_corpus(tmp_path / "a")
    build(dataset_config(tmp_path / "a"))
    if "seed" in change:
        write_corpus(tmp_path / "a", seed=change.pop("seed"))
    sizes = change.pop("sizes", (50, 10, 0))
    changed = build(dataset_config(tmp_path / "a", **change), sizes)[0]
    fresh = build(dataset_config(tmp_path / "a", path_to_cache=str(tmp_path / "other"), **change), sizes)[0]
    assert np.array_equal(fresh.document_index, changed.document_index)
    assert np.array_equal(fresh.shuffle_index, changed.shuffle_index)
    for one, other in zip(
        (fresh[i] for i in range(len(fresh))), (changed[i] for i in range(len(changed))), strict=True
    ):
        assert torch.equal(one["tokens"], other["tokens"])


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
@pytest.mark.parametrize("name", ["document", "sample", "shuffle", "manifest"])
def test_a_damaged_cache_is_built_again(tmp_path: Path, name: str, damage: str) -> None:
    write_corpus(tmp_path / "a")
    config = dataset_config(tmp_path / "a", path_to_cache=str(tmp_path / "cache"))
    expected = build(config, sizes=(50, 0, 0))[0]
    good = {file: data for file, (_, data) in cache_files(tmp_path / "cache").items()}
    (file,) = (path for path in (tmp_path / "cache").iterdir() if f"-{name}." in path.name)
    data = file.read_bytes()
    file.unlink()
    if damage != "remove":
        middle = len(data) // 2
        flipped = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
        file.write_bytes({"flip": flipped, "cut": data[:-1], "empty": b""}[damage])
    dataset = build(config, sizes=(50, 0, 0))[0]
    assert [dataset[i]["tokens"].tolist() for i in range(50)] == [expected[i]["tokens"].tolist() for i in range(50)]
    assert {file: data for file, (_, data) in cache_files(tmp_path / "cache").items()} == good


@pytest.mark.parametrize(
    "change",
    [
        lambda array: array[:-1],
        lambda array: array.astype(np.float32),
        lambda array: array.astype(object),
        lambda array: array[None],
        lambda array: np.array(3),
        lambda array: array + 10**6,
        lambda array: -1 - array.astype(np.int64),
    ],
    ids=["shorter", "floats", "pickled", "more dimensions", "none", "too large", "negative"],
)
@pytest.mark.parametrize("name", ["document", "sample", "shuffle"])
def test_a_cache_of_other_arrays_is_built_again_though_its_checksums_are_right(
    tmp_path: Path, name: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    write_corpus(tmp_path / "a")
    config = dataset_config(tmp_path / "a", path_to_cache=str(tmp_path / "cache"))
    build(config, sizes=(50, 0, 0))
    good = {file: data for file, (_, data) in cache_files(tmp_path / "cache").items()}
    (file,) = (path for path in (tmp_path / "cache").iterdir() if f"-{name}." in path.name)
    (manifest,) = (path for path in (tmp_path / "cache").iterdir() if "-manifest." in path.name)
    array = change(np.load(file))
    file.unlink()
    np.save(file, array, allow_pickle=True)
    values = json.loads(manifest.read_text())
    values["arrays"][name] = {"bytes": file.stat().st_size, "crc32": file_crc32(file)}
    manifest.write_text(json.dumps(values))
    build(config, sizes=(50, 0, 0))
    assert {file: data for file, (_, data) in cache_files(tmp_path / "cache").items()} == good


def test_an_unwritable_cache_names_folder_and_flag(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/cache cannot be written \(Not a directory\): .* --data-cache-path"):
        build(dataset_config(tmp_path / "a", path_to_cache=str(tmp_path / "file" / "cache")))


@pytest.mark.parametrize("vocab_size, eod", [(2, None), (7, 3), (50000, 0)])
def test_made_up_data_is_the_same_everywhere_and_follows_from_two_tokens(vocab_size: int, eod: int | None) -> None:
    tokenizer = NullTokenizer(vocab_size, eod)
    config = dataset_config(None, tokenizer=tokenizer, sequence_length=64)
    first, again = (build(config, (300, 5, 5), MockGPTDataset)[0] for _ in range(2))
    predictable = 0
    for i in range(0, 300, 10):
        text = first.sample_tokens(i)
        assert np.array_equal(text, again.sample_tokens(i)) and 0 <= text.min() and text.max() < vocab_size
        words = text - (text > tokenizer.eod)
        steps = np.diff(words) % (vocab_size - 1)
        predictable += int(np.isin(steps, np.array(MOCK_STRIDES) % (vocab_size - 1)).sum())
    assert predictable > 0.95 * 30 * 64


@pytest.mark.parametrize("dtype", CODES)
def test_tokens_of_every_integer_type_are_read_and_no_others(tmp_path: Path, dtype: str) -> None:
    write_corpora(tmp_path, {"a": {"dtype": dtype}, "b": {}})
    if dtype.startswith("float"):
        with pytest.raises(DataError, match=f"declares elements of type {dtype}: tokens must be integers"):
            build(dataset_config(tmp_path / "a"))
        return
    found, expected = (build(dataset_config(tmp_path / name))[0] for name in "ab")
    assert [found.sample_tokens(i).tolist() for i in range(50)] == [
        expected.sample_tokens(i).tolist() for i in range(50)
    ]


@pytest.mark.parametrize(
    "field",
    [
        {"drop_last_partial_validation_sequence": False},
        {"add_extra_token_to_sequence": False},
        {"object_storage_cache_path": "s3://a"},
        {"hybrid_context_parallel": True},
        {"sequences_per_dataset": {"a": 1}},
        {"inter_document_masking": True},
        {"varlen_sbhd_validation": True},
        {"allow_ambiguous_pad_tokens": True},
    ],
)
def test_fields_of_what_is_not_here_are_refused_by_name(field: dict) -> None:
    with pytest.raises(ValueError, match=f"GPTDatasetConfig.{next(iter(field))} is .*; keep the default"):
        GPTDatasetConfig(random_seed=1, sequence_length=8, **field)


def test_options_that_are_none_are_off_and_layouts_change_nothing() -> None:
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=8, data_parallel_size=4, sequence_parallel_size=2, context_parallel_size=2
    )
    assert (config.reset_position_ids, config.reset_attention_mask, config.eod_mask_loss) == (None, None, None)


def _samples(dataset: GPTDataset) -> list[list[int]]:
    return [dataset.sample_tokens(i).tolist() for i in range(len(dataset))]


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("defer", [False, True])
def test_samples_do_not_depend_on_how_cached_indices_are_opened(fast: bool, defer: bool, tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    expected = _samples(build(dataset_config(tmp_path / "a", path_to_cache=str(tmp_path / "other")))[0])
    config = dataset_config(tmp_path / "a", fast_cache_load=fast, defer_npy_index_mmap=defer)
    assert [_samples(build(config)[0]) for _ in ("built", "cached")] == [expected, expected]


def test_deferred_indices_are_opened_by_the_first_sample(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    config = dataset_config(tmp_path / "a", defer_npy_index_mmap=True)
    expected = _samples(build(config)[0])
    dataset = build(config)[0]
    assert len(dataset) == len(expected)
    # A cache file damaged after startup is rebuilt when it is read.
    for path in (tmp_path / "cache").rglob("*-train-shuffle.npy"):
        path.write_bytes(b"x" * path.stat().st_size)
    assert _samples(dataset) == expected


def test_fast_loads_use_files_of_the_right_size_unread_and_build_others(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    config = dataset_config(tmp_path / "a", fast_cache_load=True)
    expected = build(config)[0].shuffle_index.tolist()
    [path] = (tmp_path / "cache").rglob("*-train-shuffle.npy")
    content = path.read_bytes()
    first, second = (np.uint32(number).tobytes() for number in expected[:2])
    swapped = content[: -4 * len(expected)] + second + first + content[-4 * (len(expected) - 2) :]
    path.write_bytes(swapped)
    assert build(config)[0].shuffle_index.tolist() == [expected[1], expected[0], *expected[2:]]
    path.write_bytes(content[:-1])
    assert build(config)[0].shuffle_index.tolist() == expected
