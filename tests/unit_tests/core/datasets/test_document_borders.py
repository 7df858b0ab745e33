"""Masks and positions at document boundaries, and stored loss masks, compared with plain loops."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.data_iterators import stack_samples
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import DataError, IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.training.utils import get_ltor_masks_and_position_ids
from tests.counts import long_count
from tests.harness import launch_on_ranks
from tests.unit_tests.core.datasets.corpora import VOCABULARY, dataset_config, write_corpus

EOD = VOCABULARY.eod
OPTIONS = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}


class Tokens:
    """An in-memory corpus of one document."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens = tokens
        self.sequence_lengths = np.array([len(tokens)], dtype=np.int32)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        return self.tokens[offset:][:length]


def sample(tokens: np.ndarray, **options) -> dict[str, torch.Tensor]:
    config = dataset_config(None, sequence_length=len(tokens) - 1, **options)
    return GPTDataset(Tokens(tokens), None, np.array([0]), None, Split.train, config)[0]


def naive(tokens: list[int]) -> tuple[list[list[bool]], list[float], list[int]]:
    """Computes the attention mask [S][S], loss mask and positions token by token."""
    document, place, documents, positions = 0, 0, [], []
    for token in tokens:
        documents.append(document)
        positions.append(place)
        document, place = (document + 1, 0) if token == EOD else (document, place + 1)
    every = range(len(tokens))
    forbidden = [[key > query or documents[key] != documents[query] for key in every] for query in every]
    return forbidden, [float(token != EOD) for token in tokens], positions


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_masks_and_positions_are_those_of_a_loop_over_tokens(share: float) -> None:
    rng = np.random.default_rng(int(10 * share))
    for _ in range(long_count(250, soak=2500)):
        text = np.where(rng.random(rng.integers(2, 20)) < share, EOD, rng.integers(0, EOD, 1))
        forbidden, loss_mask, positions = naive(text[:-1].tolist())
        item = sample(text, **OPTIONS)
        assert item["attention_mask"].tolist() == [forbidden]
        assert item["loss_mask"].tolist() == loss_mask and item["position_ids"].tolist() == positions
        batch = get_ltor_masks_and_position_ids(item["tokens"][None], EOD, True, True, True)
        for found, key in zip(batch, ("attention_mask", "loss_mask", "position_ids")):
            assert torch.equal(found[0], item[key]) and found.dtype == item[key].dtype


def test_without_options_borders_are_not_seen() -> None:
    tokens = torch.tensor([[1, EOD, 2], [3, 4, EOD]])
    mask, loss_mask, positions = get_ltor_masks_and_position_ids(tokens, EOD, False, False, False)
    assert mask.tolist() == [[[[False, True, True], [False, False, True], [False, False, False]]]]
    assert loss_mask.tolist() == [[1.0] * 3] * 2 and positions.tolist() == [[0, 1, 2]] * 2


@given(rows=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_borders_of_a_batch_give_the_masks_of_its_samples(rows: list[list[bool]]) -> None:
    texts = [np.append(np.where(row, EOD, 1), 1) for row in rows]
    borders = stack_samples([sample(text, **{**OPTIONS, "create_attention_mask": False}) for text in texts])
    masks = stack_samples([sample(text, **OPTIONS) for text in texts])["attention_mask"]
    assert "attention_mask" not in borders and borders["cu_seqlens"].dtype == np.int32
    documents = np.repeat(np.arange(len(borders["cu_seqlens"]) - 1), np.diff(borders["cu_seqlens"])).reshape(-1, 6)
    later = np.triu(np.ones((6, 6), dtype=bool), 1)
    assert np.array_equal(masks[:, 0], later | (documents[:, :, None] != documents[:, None, :]))


def write_masks(prefix: Path, masks: list[np.ndarray], dtype: type = np.uint8) -> None:
    with IndexedDatasetBuilder(f"{prefix}_loss_mask.bin", dtype=dtype) as builder:
        for mask in masks:
            builder.add_document(mask, [len(mask)])
        builder.finalize(f"{prefix}_loss_mask.idx")


def dataset_of(prefix: Path, num_documents: int, **options) -> GPTDataset:
    config = dataset_config(prefix, **options)
    corpus = GPTDataset.build_low_level_dataset(str(prefix), config)
    return GPTDataset(corpus, str(prefix), np.arange(num_documents), 60, Split.train, config)


@pytest.mark.parametrize("mmap", [True, False])
def test_a_token_is_learned_where_the_mask_beside_it_says_so(tmp_path: Path, mmap: bool) -> None:
    documents = write_corpus(tmp_path / "a")
    plain = dataset_of(tmp_path / "a", 40)
    cache = sorted(path.name for path in (tmp_path / "cache").rglob("*"))
    # Only even tokens contribute to the loss, so each sample's mask follows from its labels.
    write_masks(tmp_path / "a", [1 - document % 2 for document in documents])
    dataset = dataset_of(tmp_path / "a", 40, mmap_bin_files=mmap, eod_mask_loss=True)
    assert sorted(path.name for path in (tmp_path / "cache").rglob("*")) == cache
    for idx in range(len(dataset)):
        item = dataset[idx]
        assert torch.equal(item["tokens"], plain[idx]["tokens"])
        assert torch.equal(item["loss_mask"], (1.0 - item["labels"] % 2) * (item["tokens"] != EOD))
        assert item["loss_mask"].dtype == torch.float32


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda masks: masks[:-1], "a_loss_mask.idx has 39 documents: must have 40"),
        (lambda masks: [*masks[:3], np.append(masks[3], 1), *masks[4:]], "document 3 has .* values for .* tokens"),
        (lambda masks: [mask.astype(np.int32) for mask in masks], "contains int32: loss masks must be uint8"),
        (lambda masks: [mask + 1 for mask in masks], "loss mask of .*a .train. contains 2: must be 0 or 1"),
    ],
)
def test_masks_of_other_data_are_refused(tmp_path: Path, change, message: str) -> None:
    masks = change([np.ones(len(document), dtype=np.uint8) for document in write_corpus(tmp_path / "a")])
    write_masks(tmp_path / "a", masks, dtype=masks[0].dtype.type)
    with pytest.raises(DataError, match=message):
        dataset_of(tmp_path / "a", 40)[0]


def test_half_a_pair_of_masks_is_no_pair(tmp_path: Path) -> None:
    write_masks(tmp_path / "a", write_corpus(tmp_path / "a"), dtype=np.uint16)
    (tmp_path / "a_loss_mask.bin").unlink()
    with pytest.raises(FileNotFoundError, match="a_loss_mask.bin does not exist"):
        dataset_of(tmp_path / "a", 40)


def build_with_masks_on_one_rank(folder: str) -> None:
    config = dataset_config(Path(folder) / ("b" if dist.get_rank() == 1 else "a"))
    BlendedMegatronDatasetBuilder(GPTDataset, [20, 5, 0], lambda: dist.get_rank() != 2, config).build()


def test_masks_that_one_node_lacks_fail_every_rank(tmp_path: Path) -> None:
    for name in "ab":
        documents = write_corpus(tmp_path / name)
    write_masks(tmp_path / "a", [document % 2 for document in documents])
    for outcome in launch_on_ranks(build_with_masks_on_one_rank, 3, str(tmp_path)):
        assert isinstance(outcome.error, DataError) and "ranks 1 found no loss masks" in str(outcome.error)


def test_borders_need_a_tokenizer() -> None:
    with pytest.raises(ValueError, match="eod_mask_loss is True: requires a tokenizer"):
        dataset_config(None, tokenizer=None, eod_mask_loss=True)
