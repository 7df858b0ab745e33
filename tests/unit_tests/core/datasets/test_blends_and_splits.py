"""Blends keep their proportions at every prefix, splits cover the corpus, and the builder agrees on all ranks."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import (
    BlendedMegatronDatasetConfig,
    convert_split_vector_to_split_matrix,
)
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_iterators import build_train_valid_test_datasets
from megatron.core.datasets.data_order import blend_indices
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split, get_blend_from_list, parse_split, split_documents
from megatron.core.group_collectives import RemoteRankError
from tests.harness import launch_on_ranks, run_on_ranks
from tests.unit_tests.core.datasets.corpora import VOCABULARY, dataset_config, write_corpus


def build(config, sizes=(50, 10, 0), is_built=lambda: True):
    return BlendedMegatronDatasetBuilder(GPTDataset, list(sizes), is_built, config).build()


@given(weights=st.lists(st.floats(0.05, 5), min_size=1, max_size=5), size=st.integers(1, 200))
def test_a_blend_is_megatrons_greedy_choice_and_stays_near_its_shares(weights, size) -> None:
    dataset_index, sample_index = blend_indices(weights, size)
    shares = np.array(weights) / sum(weights)
    counts = [0] * len(weights)
    for i in range(size):
        behind = [share * max(i, 1) - count for share, count in zip(shares, counts)]
        chosen = behind.index(max(behind))
        assert (dataset_index[i], sample_index[i]) == (chosen, counts[chosen])
        counts[chosen] += 1
        assert all(abs(count - share * (i + 1)) < len(weights) for share, count in zip(shares, counts))


def test_a_blend_that_runs_out_of_samples_is_refused() -> None:
    config = BlendedMegatronDatasetConfig(sequence_length=1)
    with pytest.raises(ValueError, match="dataset 1 of the blend has 3 samples: must have at least 5"):
        BlendedDataset([range(5), range(3)], [1.0, 1.0], 10, config)  # type: ignore[list-item]
    assert [BlendedDataset([range(4), range(10, 14)], [3, 1], 5, config)[i] for i in range(5)] == [0, 10, 1, 2, 3]


def test_weights_and_token_counts_decide_what_is_read(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    write_corpus(Path(prefixes[0]), num_documents=300)
    write_corpus(Path(prefixes[1]), num_documents=100, seed=1)
    for weights, share in (([0.9, 0.1], 0.9), (None, 0.75)):
        train, valid, test = build(dataset_config(None, blend=(prefixes, weights)), sizes=(2000, None, 0))
        assert len(train) == 2000 and test is None
        assert np.bincount(train.dataset_index)[0] / 2000 == pytest.approx(share, abs=0.05)
        assert train[1999]["tokens"].shape == (8,) and len(valid) >= 70


def test_shares_without_weights_follow_tokens_not_documents(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    short = sum(map(len, write_corpus(Path(prefixes[0]), num_documents=200, longest=10)))
    long = sum(map(len, write_corpus(Path(prefixes[1]), num_documents=200, longest=90, seed=1)))
    train, _, _ = build(dataset_config(None, blend=(prefixes, None), split="1,0,0"), sizes=(1000, 0, 0))
    assert np.bincount(train.dataset_index)[0] == pytest.approx(1000 * short / (short + long), abs=1)


def test_data_of_weight_0_is_not_read_nor_missed(tmp_path: Path) -> None:
    assert blend_indices([0.0, 1.0, 0.0], 5)[0].tolist() == [1] * 5
    write_corpus(tmp_path / "a", num_documents=100)
    blend = ([str(tmp_path / name) for name in ("missing", "a", "missing")], [0.0, 2.0, 0.0])
    for fields in ({"blend": blend}, {"blend_per_split": [blend, blend, None], "split": None}):
        train, valid, _ = build(dataset_config(None, **fields))
        assert train.dataset_path == valid.dataset_path == blend[0][1]


def test_parts_named_apart_are_read_whole_each_by_its_own_blend(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    documents = [write_corpus(Path(prefix), seed=seed) for seed, prefix in enumerate(prefixes)]
    flags = {"train_data_path": ["0.2", prefixes[0], "0.8", prefixes[1]], "valid_data_path": prefixes[:1]}
    config = DataConfig(seq_length=8, **flags)
    train, valid, test = build_train_valid_test_datasets(config, VOCABULARY, sizes=[200, None, 50], seed=7)
    assert np.bincount(train.dataset_index).tolist() == [40, 160] and test is None
    for dataset in (train.datasets[0], valid):
        assert set(dataset.document_index.tolist()) == set(range(40))
    assert len(valid) == (sum(map(len, documents[0])) - 1) // 8
    (tmp_path / "blend.txt").write_bytes(b"\xff")
    listed = DataConfig(seq_length=8, data_args_path=str(tmp_path / "blend.txt"))
    with pytest.raises(ValueError, match="blend.txt is not UTF-8 text"):
        listed.read_blend()
    (tmp_path / "blend.txt").write_text(f"1 {prefixes[0]}\n3 {prefixes[1]}\n")
    train = build_train_valid_test_datasets(listed, VOCABULARY, sizes=[200, 10, 0], seed=7)[0]
    assert np.bincount(train.dataset_index).tolist() == [50, 150]


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"train_data_path": ["a"], "split": "9,1"}, "--train-data-path a conflicts with --split 9,1"),
        ({"valid_data_path": ["a"], "data_path": ["b"]}, "--data-path b conflicts with --valid-data-path a"),
        ({"test_data_path": ["a"], "mock_data": True}, "--mock-data conflicts with --test-data-path a"),
        ({"data_args_path": "f", "data_path": ["b"]}, "--data-path b conflicts with --data-args-path f"),
        ({"train_data_path": []}, "--train-data-path has no value"),
        ({"train_data_path": ["1", "a", "b", "c"]}, "must be WEIGHT PREFIX pairs"),
    ],
)
def test_one_source_of_data_is_enough(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**fields)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"blend": (["a"], None), "blend_per_split": [(["a"], None), None, None]}, "give only one of them"),
        ({"blend_per_split": [(["a"], None)]}, "has 1 parts: must have three"),
        ({"blend_per_split": [(["a"], [-1.0]), None, None]}, r"weights \[-1.0\]"),
        ({"blend": ([], None)}, "has 0 datasets: must have 1 to 32767"),
    ],
)
def test_blends_that_contradict_themselves_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlendedMegatronDatasetConfig(sequence_length=1, **fields)
    BlendedMegatronDatasetConfig(sequence_length=1, blend_per_split=[None] * 3, split="9,1")


def test_training_without_data_of_its_own_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    config = dataset_config(None, split=None, blend_per_split=[None, ([str(tmp_path / "a")], None), None])
    with pytest.raises(ValueError, match="no training data"):
        build(config)
    assert [dataset is None for dataset in build(config, sizes=(0, 20, 20))] == [True, False, True]


@pytest.mark.slow
def test_sources_without_a_sample_leave_their_share_to_the_others(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "abc"]
    for prefix in prefixes:
        write_corpus(Path(prefix), num_documents=8, longest=9)
    rng = np.random.default_rng(0)
    for weights in rng.random((60, 3)) * [1, 1, 0.005]:
        size = int(rng.integers(20, 150))
        config = dataset_config(None, split="1,0,0", blend=(prefixes, weights.tolist()))
        train = build(config, sizes=(size, 0, 0))[0]
        used = np.flatnonzero(np.bincount(blend_indices(weights, size)[0], minlength=3))
        assert np.array_equal(train.dataset_index, blend_indices(weights[used], size)[0])
        assert all(item["tokens"].shape == (8,) for item in (train[i] for i in range(size)))


def test_blend_words() -> None:
    assert get_blend_from_list(None) is None
    assert get_blend_from_list(["a"]) == (["a"], None)
    assert get_blend_from_list(["a", "b"]) == (["a", "b"], None)
    assert get_blend_from_list(["0.3", "a", "7", " b"]) == (["a", "b"], [0.3, 7.0])
    for wrong in (["0.3", "a", "b", "c"], ["0.3", "a", "0.7"]):
        with pytest.raises(ValueError, match="must be WEIGHT PREFIX pairs"):
            get_blend_from_list(wrong)


@given(weights=st.lists(st.integers(0, 9), min_size=1, max_size=3), num_documents=st.integers(0, 500))
def test_a_split_gives_every_document_to_one_part(weights: list[int], num_documents: int) -> None:
    text = ",".join(map(str, weights))
    if not sum(weights):
        with pytest.raises(ValueError, match="must be up to three numbers"):
            parse_split(text)
        return
    ranges = split_documents(text, num_documents)
    assert [number for part in ranges for number in part or []] == list(range(num_documents))
    for part, weight in zip(ranges, weights):
        assert (part is None) == (weight == 0)
        if part is not None:
            assert abs(len(part) - num_documents * weight / sum(weights)) <= 1


@pytest.mark.parametrize("split", ["a,b", "1,2,3,4", "-1,2", "nan,1", "inf,1", "0,0,0"])
def test_a_split_that_says_nothing_is_refused(split: str) -> None:
    with pytest.raises(ValueError, match="split is .*949,50,1"):
        DataConfig(split=split)


def test_a_part_without_documents_is_named(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", num_documents=40)
    message = r"--split 969,30,1 leaves no document for test: .*a has 40 documents; increase the share of test"
    with pytest.raises(ValueError, match=message):
        build(dataset_config(tmp_path / "a", split=None), sizes=(10, 10, 10))
    assert build(dataset_config(tmp_path / "a", split=None), sizes=(10, 10, 0))[2] is None


@pytest.mark.parametrize(
    "fields, expected",
    [
        ({}, ("single", False)),
        ({"dataloader_type": "cyclic", "reset_attention_mask": True}, ("cyclic", True)),
        ({"reset_attention_mask": True, "create_attention_mask_in_dataloader": False}, ("single", False)),
    ],
)
def test_order_and_masks_follow_from_the_other_fields(fields: dict, expected: tuple[str, bool]) -> None:
    config = DataConfig(**fields)
    assert (config.dataloader_type, config.create_attention_mask_in_dataloader) == expected


def test_contradictory_and_missing_sources_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--mock-data conflicts with --data-path a"):
        DataConfig(mock_data=True, data_path=["a"])
    with pytest.raises(ValueError, match="--data-path has no value"):
        DataConfig(data_path=[])
    with pytest.raises(FileNotFoundError, match="no_such.idx does not exist"):
        build(dataset_config(tmp_path / "no_such"))


def test_an_empty_corpus_is_named(tmp_path: Path) -> None:
    with IndexedDatasetBuilder(str(tmp_path / "a.bin")) as builder:
        builder.finalize(str(tmp_path / "a.idx"))
    with pytest.raises(ValueError, match="a.idx has no documents: must have at least one"):
        build(dataset_config(tmp_path / "a"))


def build_on_rank(folder: str, shared: bool) -> tuple[list[list[int]], list[str]]:
    rank = dist.get_rank()
    cache = Path(folder) / ("cache" if shared else f"cache-{rank}")
    config = dataset_config(Path(folder) / "a", path_to_cache=str(cache))
    train = build(config, is_built=lambda: rank != 1)[0]
    return [] if train is None else [train[i]["tokens"].tolist() for i in range(50)], sorted(os.listdir(cache.parent))


@pytest.mark.parametrize("shared", [True, False])
def test_ranks_agree_on_samples_with_one_cache_and_with_one_each(tmp_path: Path, shared: bool) -> None:
    write_corpus(tmp_path / "a")
    (first, _), (not_built, _), (last, _) = run_on_ranks(build_on_rank, 3, str(tmp_path), shared)
    assert first == last and len(first) == 50 and not_built == []
    caches = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert len(caches) == (1 if shared else 2)
    assert all(len(os.listdir(cache)) == 8 for cache in caches)


def build_without_waiting(folder: str) -> list[int]:
    config = dataset_config(Path(folder) / "a", path_to_cache=str(Path(folder) / "cache"))
    dist.barrier()
    for _ in range(5):  # all ranks build, damage and read the same files concurrently
        corpus = GPTDataset.build_low_level_dataset(str(Path(folder) / "a"), config)
        dataset = GPTDataset(corpus, str(Path(folder) / "a"), np.arange(30), 40, Split.train, config)
        tokens = dataset[7]["tokens"].tolist()
        for path in (Path(folder) / "cache").glob("*-manifest.json"):
            path.unlink(missing_ok=True)
    return tokens


def test_a_race_for_the_cache_harms_nobody(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a")
    results = run_on_ranks(build_without_waiting, 3, str(tmp_path))
    assert results[0] == results[1] == results[2]
    assert not list((tmp_path / "cache").glob("*partial*"))


def build_with_a_broken_rank(folder: str, broken_rank: int) -> None:
    rank = dist.get_rank()
    prefix = Path(folder) / ("missing" if rank == broken_rank else "a")
    build(dataset_config(prefix, path_to_cache=str(Path(folder) / f"cache-{rank}")))


@pytest.mark.parametrize("broken_rank", [0, 2])
def test_a_file_that_one_rank_lacks_fails_every_rank(tmp_path: Path, broken_rank: int) -> None:
    write_corpus(tmp_path / "a")
    outcomes = launch_on_ranks(build_with_a_broken_rank, 3, str(tmp_path), broken_rank)
    for outcome in outcomes:
        kind = FileNotFoundError if outcome.rank == broken_rank else RemoteRankError
        assert type(outcome.error) is kind and "missing.idx does not exist" in str(outcome.error)


def test_splits_are_shares_and_ranges_of_a_corpus() -> None:
    assert parse_split("9,1") == pytest.approx([0.9, 0.1, 0.0])
    assert convert_split_vector_to_split_matrix([0.5, 0.25, 0.25]) == [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)]
    assert convert_split_vector_to_split_matrix([1.0, 0.0, 0.0]) == [(0.0, 1.0), None, None]
    # A part contains only documents that both splits assign to it.
    common = convert_split_vector_to_split_matrix([0.5, 0.5, 0.0], [0.75, 0.0, 0.25])
    assert common == [(0.0, 0.5), None, None]


class Numbers(MegatronDataset):
    """A user-defined dataset: sample i is the index of document i, times three."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: BlendedMegatronDatasetConfig) -> range:
        return range(int(dataset_path))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: range) -> int:
        return len(low_level_dataset)

    def __len__(self) -> int:
        return self.num_samples or len(self.indices)

    def __getitem__(self, idx: int) -> dict[str, int]:
        return {"number": 3 * self.dataset[int(self.indices[idx % len(self.indices)])]}


def test_a_dataset_class_of_a_script_is_split_and_blended() -> None:
    config = BlendedMegatronDatasetConfig(random_seed=1, sequence_length=4, blend=(["10"], None), split="8,2")
    train, valid, test = BlendedMegatronDatasetBuilder(Numbers, [None, 2, None], lambda: True, config).build()
    assert [train[i]["number"] for i in range(len(train))] == [0, 3, 6, 9, 12, 15, 18, 21]
    assert [valid[i]["number"] for i in range(len(valid))] == [24, 27] and test is None


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("is_full", [False, True])
def test_validation_sets_of_a_blend_are_built_as_each_would_be_alone(
    tmp_path: Path, separate: bool, is_full: bool
) -> None:
    prefixes = [str(tmp_path / name) for name in "abc"]
    for seed, prefix in enumerate(prefixes):
        write_corpus(Path(prefix), num_documents=80 + 20 * seed, seed=seed)

    def config(names, **changes):
        weights = [0.6, 0.4, 0.0][: len(names)] if len(names) > 1 else None
        blend = (names, weights)
        data = {"blend": None, "split": None, "blend_per_split": [blend, blend, None]} if separate else {"blend": blend}
        return dataset_config(None, **{"split": "6,4,0", **data, **changes})

    changes = {"full_validation": True} if is_full else {}
    train, valid, test = build(config(prefixes, multiple_validation_sets=True, **changes), sizes=(50, 400, 0))
    plain = build(config(prefixes), sizes=(50, 400, 0))
    assert isinstance(train, BlendedDataset) and test is None
    assert all(torch.equal(train[i]["tokens"], plain[0][i]["tokens"]) for i in range(50))
    # The third dataset has weight 0.
    assert isinstance(valid, list) and len(valid) == 2
    for own, prefix in zip(valid, prefixes):
        alone = build(config([prefix]), sizes=(50, None if is_full else 400, 0))[1]
        assert len(own) == len(alone) and (len(own) < 400) == is_full
        assert all(torch.equal(own[i]["tokens"], alone[i]["tokens"]) for i in range(len(own)))


def test_full_validation_of_a_blend_is_the_epochs_of_all(tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    for seed, prefix in enumerate(prefixes):
        write_corpus(Path(prefix), num_documents=80, seed=seed)
    valid = build(dataset_config(None, blend=(prefixes, [0.9, 0.1]), full_validation=True), sizes=(50, 3, 0))[1]
    each = [build(dataset_config(Path(prefix)), sizes=(50, None, 0))[1] for prefix in prefixes]
    assert len(valid) == sum(map(len, each))
    samples = sorted(valid[i]["tokens"].tolist() for i in range(len(valid)))
    assert samples == sorted(one[i]["tokens"].tolist() for one in each for i in range(len(one)))


def test_split_matrix_and_mock_follow_from_the_data_that_is_named() -> None:
    config = BlendedMegatronDatasetConfig(sequence_length=1, blend=(["a"], None), split="2,1,1")
    assert config.split_matrix == [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)] and not config.mock
    assert BlendedMegatronDatasetConfig(sequence_length=1, split="1").split_matrix == [(0.0, 1.0), None, None]
    separate = BlendedMegatronDatasetConfig(sequence_length=1, blend_per_split=[(["a"], None), None, None])
    assert separate.split_matrix is None and not separate.mock
    assert BlendedMegatronDatasetConfig(sequence_length=1).mock
    with pytest.raises(TypeError, match="mock"):
        BlendedMegatronDatasetConfig(sequence_length=1, mock=True)


@pytest.mark.parametrize("surplus", [0.0, 0.5])
def test_a_surplus_changes_no_sample_of_a_blend(surplus: float, tmp_path: Path) -> None:
    for number, name in enumerate("ab"):
        write_corpus(tmp_path / name, seed=number)
    blend = ([str(tmp_path / name) for name in "ab"], [3.0, 1.0])
    found, expected = (
        BlendedMegatronDatasetBuilder(
            GPTDataset, [50, 0, 0], lambda: True, dataset_config(None, blend=blend, **changes)
        ).build()[0]
        for changes in ({"mid_level_dataset_surplus": surplus}, {})
    )
    assert len(found) == len(expected) == 50
    assert all(found[i]["tokens"].equal(expected[i]["tokens"]) for i in range(50))
