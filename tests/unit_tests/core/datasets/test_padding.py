"""Padding masks of data sets, blends, batches and packed chats, compared with plain loops over tokens."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.data_iterators import BatchPlan, build_data_iterators
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.indexed_dataset import DataError, IndexedDataset
from megatron.core.datasets.padding import PaddingCount, count_padding_sync, marks_padding
from megatron.core.datasets.utils import Split
from megatron.tools import preprocess_data
from tests.harness import launch_on_ranks
from tests.padded_corpus import write_packed, write_tokens
from tests.unit_tests.core.datasets.corpora import dataset_config

Row = tuple[list[int], list[int]]  # padding and loss of each token of a document


def _dataset(prefix: str, count: int, length: int, **options: Any) -> GPTDataset:
    config = dataset_config(Path(prefix), sequence_length=length, tokenizer=None, **options)
    corpus = GPTDataset.build_low_level_dataset(prefix, config)
    return GPTDataset(corpus, prefix, np.arange(count), None, Split.train, config)


def _write(prefix: Path, rows: Sequence[Row], *, has_loss: bool, first: int = 0) -> str:
    """Writes documents of distinct ids from `first` upwards, so that an id names its token."""
    ends = np.cumsum([0, *(len(padding) for padding, _ in rows)]) + first
    write_tokens(f"{prefix}_padding_mask", [padding for padding, _ in rows], np.uint8)
    if has_loss:
        write_tokens(f"{prefix}_loss_mask", [loss for _, loss in rows], np.uint8)
    return write_tokens(prefix, [list(range(*ends[i : i + 2])) for i in range(len(rows))], np.int32)


def _rows(*documents: tuple[str, str]) -> list[Row]:
    """documents: texts of padding and loss, such as ("0011", "0100")."""
    return [([int(c) for c in padding], [int(c) for c in loss]) for padding, loss in documents]


# Documents as padding and loss, sequence length, whether there are loss masks.
INPUTS: dict[str, tuple[list[Row], int, bool]] = {
    "at the end": (_rows(("00000011", "00011100"), ("00001111", "01110000"), ("00000000", "00111111")), 8, True),
    "at the start": (_rows(("11100000", "00001111"), ("10000000", "00000111")), 4, True),
    "inside": (_rows(("00110011", "01000100"), ("01010101", "10101010")), 4, True),
    "whole documents": (_rows(("1111", "0000"), ("0000", "1111"), ("1111", "0000"), ("0000", "0111")), 4, True),
    "a loss on padding is dropped": (_rows(("00001111", "11111111"), ("00000001", "11111111")), 5, True),
    "without loss masks": (_rows(("00000111", ""), ("00000000", ""), ("01111111", "")), 6, False),
    "prompts are data": (_rows(("00000000", "00000000"), ("00000011", "00000100")), 4, True),
    "samples across documents": (
        _rows(("001", "110"), ("00011", "01100"), ("0", "1"), ("0000001", "1111110")),
        4,
        True,
    ),
    "one token each": (_rows(("0", "1"), ("1", "0"), ("0", "1"), ("1", "0"), ("0", "1")), 2, True),
    "no padding at all": (_rows(("00000000", "00001111"), ("00000000", "11110000")), 8, True),
}


@pytest.mark.parametrize("name", INPUTS)
def test_samples_mark_the_tokens_that_the_masks_mark(tmp_path: Path, name: str) -> None:
    rows, length, has_loss = INPUTS[name]
    _compare_with_loop(tmp_path, rows, length, has_loss=has_loss)


@given(data=st.data())
def test_any_masks_give_the_samples_of_a_loop(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    bits = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    rows = [
        (row, data.draw(st.lists(st.integers(0, 1), min_size=len(row), max_size=len(row))))
        for row in data.draw(st.lists(bits, min_size=2, max_size=6))
    ]
    total = sum(len(row) for row, _ in rows)
    if total > 2:
        length = data.draw(st.integers(1, min(6, total - 1)))
        _compare_with_loop(tmp_path_factory.mktemp("any"), rows, length, has_loss=data.draw(st.booleans()))


def _compare_with_loop(folder: Path, rows: list[Row], length: int, *, has_loss: bool) -> None:
    padding = [bit for row, _ in rows for bit in row]
    loss = [bit for _, row in rows for bit in row] if has_loss else [1] * len(padding)
    dataset = _dataset(_write(folder / "a", rows, has_loss=has_loss), len(rows), length)
    assert marks_padding(dataset) and len(dataset) > 0
    for index in range(len(dataset)):
        item = dataset[index]
        tokens, labels = item["tokens"].tolist(), item["labels"].tolist()
        assert item["padding_mask"].dtype is torch.bool
        assert item["padding_mask"].tolist() == [padding[token] == 1 for token in tokens]
        is_data = [padding[token] == padding[label] == 0 for token, label in zip(tokens, labels, strict=True)]
        assert item["loss_mask"].tolist() == [loss[label] * one for label, one in zip(labels, is_data, strict=True)]
        count = count_padding_sync({"padding_mask": item["padding_mask"].unsqueeze(0)})
        real = length - sum(padding[token] for token in tokens)
        assert count == PaddingCount(length - real, length**2 - real**2)


def test_data_without_masks_marks_nothing(tmp_path: Path) -> None:
    dataset = _dataset(write_tokens(tmp_path / "a", [[1, 2, 3, 4, 5]] * 3), 3, 4)
    assert not marks_padding(dataset) and "padding_mask" not in dataset[0]
    assert count_padding_sync(dataset[0]) == count_padding_sync([1]) == PaddingCount()


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([[0, 0, 2, 0, 0], [0] * 5], "the padding mask of .*a .train. contains 2: must be 0 or 1"),
        ([[0] * 5], "a_padding_mask.idx has 1 documents: must have 2"),
        ([[0] * 5, [0] * 4], "document 1 has 4 values for 5 tokens"),
    ],
)
def test_padding_masks_of_other_data_are_refused(tmp_path: Path, masks: list[list[int]], message: str) -> None:
    write_tokens(tmp_path / "a_padding_mask", masks, np.uint8)
    with pytest.raises(DataError, match=message):
        for index in (0, 1):
            _dataset(write_tokens(tmp_path / "a", [[1, 2, 3, 4, 5]] * 2), 2, 4)[index]


def test_padding_masks_of_other_types_are_refused(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a_padding_mask", [[0] * 5] * 2, np.int32)
    with pytest.raises(DataError, match="contains int32: padding masks must be uint8"):
        _dataset(write_tokens(tmp_path / "a", [[1, 2, 3, 4, 5]] * 2), 2, 4)


def test_packed_data_without_a_padding_mask_is_named(tmp_path: Path) -> None:
    packed: dict[str, Any] = {"length": 8, "eod": 9, "fill": 9}
    for name, lengths, mark, is_named in (
        ("old", [[8], [3], [4, 4]], False, True),
        ("new", [[8], [3], [4, 4]], True, False),
        ("full", [[8], [8]], False, False),
    ):
        prefix = write_packed(tmp_path / name, lengths, **packed, mark=mark)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            _dataset(prefix, len(lengths), 8)
        texts = [str(one.message) for one in found if "look like padding" in str(one.message)]
        assert len(texts) == int(is_named), name
        if is_named:
            assert "document 1 ends" in texts[0] and f"{prefix}_padding_mask.bin" in texts[0]


# Blends


def test_a_blend_marks_padding_in_all_samples_if_some_of_its_data_has_masks(tmp_path: Path) -> None:
    masked = _write(tmp_path / "a", _rows(("00000011", "11111100")) * 6, has_loss=False)
    plain = write_tokens(tmp_path / "b", [list(range(100 + 8 * i, 108 + 8 * i)) for i in range(6)], np.int32)
    config = dataset_config(None, blend=([masked, plain], [0.5, 0.5]), split="100,0,0", tokenizer=None)
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [8, 0, 0], lambda: True, config).build()
    assert marks_padding(train)
    (iterator, _, _) = build_data_iterators([train, None, None], BatchPlan(micro_batch_size=2))
    assert iterator is not None and marks_padding(iterator)
    seen = set()
    for _ in range(4):
        batch = next(iterator)
        assert batch["padding_mask"].tolist() == [
            [t < 100 and t % 8 >= 6 for t in row] for row in batch["tokens"].tolist()
        ]
        seen |= {token >= 100 for token in batch["tokens"].flatten().tolist()}
    assert seen == {False, True}


@pytest.mark.parametrize(("size", "micro", "ranks"), [(5, 2, 1), (3, 1, 2), (1, 4, 1), (4, 2, 1)])
def test_samples_that_fill_the_last_round_of_a_validation_are_padding(
    tmp_path: Path, size: int, micro: int, ranks: int
) -> None:
    prefix = write_tokens(tmp_path / "a", [list(range(5 * i, 5 * i + 5)) for i in range(size + 1)], np.int32)
    dataset = _dataset(prefix, size + 1, 5)
    assert len(dataset) == size
    is_padded = size % (micro * ranks) > 0
    num_real = 0
    for rank in range(ranks):
        plan = BatchPlan(micro_batch_size=micro, dp_rank=rank, dp_size=ranks, full_validation=True)
        (iterator,) = build_data_iterators([None, dataset, None], plan)[1]
        assert iterator is not None and marks_padding(iterator) == is_padded
        for _ in range(plan.full_rounds(dataset)):
            batch = next(iterator)
            assert ("padding_mask" in batch) == is_padded
            masks = batch["padding_mask"] if is_padded else torch.zeros(micro, 5, dtype=torch.bool)
            assert masks.all(dim=1).tolist() == masks.any(dim=1).tolist()
            assert torch.equal(batch["loss_mask"], (~masks).float())
            num_real += int((~masks).all(dim=1).sum())
    assert num_real == size


def _build_with_masks_on_one_rank(folder: str) -> None:
    config = dataset_config(Path(folder) / ("b" if dist.get_rank() == 1 else "a"), tokenizer=None)
    BlendedMegatronDatasetBuilder(GPTDataset, [4, 0, 0], lambda: True, config).build()


@pytest.mark.slow
def test_padding_masks_on_some_nodes_only_are_refused(tmp_path: Path) -> None:
    for name in "ab":
        write_tokens(tmp_path / name, [[1, 2, 3, 4, 5]] * 20)
    write_tokens(tmp_path / "b_padding_mask", [[0] * 5] * 20, np.uint8)
    for end in launch_on_ranks(_build_with_masks_on_one_rank, 2, str(tmp_path)):
        assert isinstance(end.error, DataError) and "ranks 0 found no padding masks" in str(end.error)


# Packed chats


def _tokenizer(folder: Path, *, eos: str, pad: str | None) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["ab"], trainers.BpeTrainer(vocab_size=256, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in ("<eos>", "<end>", "<pad>")])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}{% if m['role'] == 'assistant' %}<end>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, **({} if pad is None else {"pad_token": pad})}))
    return str(folder)


# The tokenizer's eos and pad, the questions, and the length of documents.
CHATS: dict[str, tuple[str, str | None, list[str], int]] = {
    "another pad": ("<eos>", "<pad>", ["x" * 10, "x" * 3], 18),
    "filled with eos": ("<eos>", None, ["x" * 10, "x" * 3, "x"], 24),
    "the pad is the eos": ("<eos>", "<eos>", ["x" * 4] * 5, 20),
    "pad tokens in a question are data": ("<eos>", "<pad>", ["<pad><pad>xx", "x"], 12),
    "exact fit": ("<eos>", "<pad>", ["x" * 8, "x" * 8], 15),
    "two in a document": ("<eos>", "<pad>", ["x" * 2, "x" * 2, "x" * 2], 20),
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("partitions", ["1", "2"])
def test_packed_chats_come_with_the_mask_of_their_filling(tmp_path: Path, name: str, partitions: str) -> None:
    eos, pad, questions, length = CHATS[name]
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "b"}]} for q in questions]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ["--input", str(tmp_path / "c.jsonl"), "--output-prefix", str(tmp_path / "c"), "--chat-key", "messages"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model"]
    words += [_tokenizer(tmp_path / "tok", eos=eos, pad=pad), "--workers", "1", "--partitions", partitions]
    # Masks of an earlier run must not remain.
    write_tokens(tmp_path / "c_messages_document_padding_mask", [[1]], np.uint8)
    assert preprocess_data.main([*words, "--pack-length", str(length)]) == 0
    prefix = str(tmp_path / "c_messages_document")
    tokens = IndexedDataset(prefix)
    # u : question a : b <end> <eos>, and a special token of a question is one token.
    real = sum(len(q.replace("<pad>", "p")) + 7 for q in questions)
    missing = len(tokens) * length - real
    assert IndexedDataset.exists(f"{prefix}_padding_mask") == (missing > 0)
    if missing:
        masks = IndexedDataset(f"{prefix}_padding_mask")
        assert sum(int(mask.sum()) for mask in masks[:]) == missing
        losses = IndexedDataset(f"{prefix}_loss_mask")
        for text, mask, loss in zip(tokens[:], masks[:], losses[:], strict=True):
            # Padding is at the end, after the eos of the last chat, and has no loss.
            assert mask.tolist() == sorted(mask.tolist()) and not (mask & loss).any()
            assert text[np.flatnonzero(mask == 0)[-1]] == 256
    # Without packing nothing is padded.
    assert preprocess_data.main(words) == 0
    assert not IndexedDataset.exists(f"{prefix}_padding_mask")
