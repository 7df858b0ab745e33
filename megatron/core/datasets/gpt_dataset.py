"""GPT datasets: fixed-length samples for next-token training, read from indexed documents. Uses gpt_indices.py."""

import os
import warnings
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from megatron.core.config_field import config_field
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig, Vocabulary
from megatron.core.datasets.document_borders import (
    cumulative_lengths,
    document_masks,
    document_starts,
    marked_starts,
    open_document_starts,
    restarted_positions,
)
from megatron.core.datasets.gpt_indices import GPTIndices, build_gpt_indices, check_gpt_indices, plan_epochs
from megatron.core.datasets.index_cache import IndexCache
from megatron.core.datasets.indexed_dataset import (
    DataError,
    IndexedDataset,
    check_loss_mask,
    get_bin_path,
    get_idx_path,
    open_loss_mask,
)
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.padding import (
    check_padding_mask,
    exclude_padding,
    open_padding_mask,
    padding_mask_prefix,
)
from megatron.core.datasets.utils import Split

# Documents, and tokens per document, that are checked at startup to detect data from a different tokenizer. Training
# checks every sample.
_PROBED_DOCUMENTS = 64
_PROBED_TOKENS = 65536
# Incremented when gpt_indices.py returns different arrays for the same description, which invalidates old caches.
_INDICES_VERSION = 1
# The corpus of --mock-data.
MOCK_DOCUMENTS = 20_000
MOCK_MEAN_LENGTH = 512
MOCK_STRIDES = (1, 2, 3, 5)


class TokenSequences(Protocol):
    """Interface of the data source of a GPTDataset, such as an IndexedDataset."""

    @property
    def sequence_lengths(self) -> np.ndarray: ...

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any: ...


@dataclass(kw_only=True)
class GPTDatasetConfig(BlendedMegatronDatasetConfig):
    """Options of GPT samples, mainly at document borders, which the tokenizer's eod marks."""

    reset_position_ids: bool | None = config_field(None, help="Restart positions after each eod; None means no.")
    reset_attention_mask: bool | None = config_field(
        None, help="Limit attention to the tokens of one document; None means no."
    )
    eod_mask_loss: bool | None = config_field(
        None, help="Exclude positions whose input is eod from the loss; None means no."
    )
    create_attention_mask: bool = config_field(
        True,
        help="Add S x S masks to samples. If False, add document borders with reset_attention_mask, otherwise nothing.",
    )
    # No effect, because a sample is the same for every layout, and is split over ranks after it is read.
    data_parallel_size: int = 1
    sequence_parallel_size: int = 0
    context_parallel_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.validate_document_borders()

    def validate_document_borders(self) -> None:
        for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
            if vars(self)[name] and self.tokenizer is None:
                raise ValueError(f"{name} is True: requires a tokenizer, whose eod marks the end of documents")


class GPTDataset(MegatronDataset):
    """Dataset of fixed-length samples from the documents `indexed_indices`, in an order that depends on the seed.

    Each item contains tokens, labels (the next tokens) and position_ids: [S], int64, and loss_mask: [S], float32. With
    create_attention_mask it also contains attention_mask: [1, S, S], bool, where True means masked out. Otherwise, with
    reset_attention_mask, it contains cu_seqlens: [n + 1], int32. If the pair PREFIX_loss_mask.bin/.idx exists, it
    selects the targets that contribute to the loss; otherwise all targets do. If the pair PREFIX_padding_mask.bin/.idx
    exists, items contain padding_mask: [S], bool, where True means padding, which has no loss. Documents end with the
    tokenizer's eod, or begin where the pair PREFIX_document_starts.bin/.idx says so.

    num_samples: None means one epoch. len() may be slightly larger. config.planned_samples fixes the order of a resumed
    run (see [Note: appended epochs] in gpt_indices.py). Indices are cached on disk. Raises ValueError if the documents
    are too short for one sample or contain tokens outside the tokenizer's vocabulary, and OSError if the cache is not
    writable.
    """

    config: GPTDatasetConfig
    unnamed = "data without a path"  # the name used in errors if dataset_path is None

    def __init__(
        self,
        indexed_dataset: TokenSequences,
        dataset_path: str | None,
        indexed_indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(indexed_dataset, dataset_path, indexed_indices, num_samples, index_split, config)
        self._where = f"{dataset_path or self.unnamed} ({index_split.name})"
        self._vocab_size = None if config.tokenizer is None else config.tokenizer.vocab_size
        # Without a tokenizer no option uses eod, and no token is negative.
        self._eod = -1 if config.tokenizer is None else config.tokenizer.eod
        self._learned = open_loss_mask(dataset_path, indexed_dataset.sequence_lengths, mmap=config.mmap_bin_files)
        self._padding = open_padding_mask(dataset_path, indexed_dataset.sequence_lengths, mmap=config.mmap_bin_files)
        self._starts = open_document_starts(dataset_path, indexed_dataset.sequence_lengths, mmap=config.mmap_bin_files)
        self._adds_empty_mask = False
        self._warn_of_unmarked_padding()
        self._check_enough_text()
        self._probe_vocabulary()
        self._cache = self._index_cache()
        # Ranks that do not build first rely on the files, so the files must exist even if they are opened later.
        is_deferred = config.defer_npy_index_mmap and self._cache is not None and self._cache.holds_files()
        self._opened_indices = None if is_deferred else self._load_or_build_indices()
        # Equal for all samples, and copied into each.
        self._loss_mask = torch.ones(config.sequence_length, dtype=torch.float32)
        self._position_ids = torch.arange(config.sequence_length, dtype=torch.int64)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> TokenSequences:
        if dataset_path is None:
            raise ValueError(
                "dataset_path is None: must be the prefix of a .bin/.idx pair; only MockGPTDataset accepts None"
            )
        dataset = IndexedDataset(dataset_path, mmap=config.mmap_bin_files)
        if not np.issubdtype(dataset.index.dtype, np.integer):
            kind = np.dtype(dataset.index.dtype).name
            raise DataError(f"{dataset_path}.idx declares elements of type {kind}: tokens must be integers")
        return dataset

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: TokenSequences) -> int:
        """Returns the number of documents, which is the number of sequences."""
        return len(low_level_dataset.sequence_lengths)

    @property
    def _gpt_indices(self) -> GPTIndices:
        if self._opened_indices is None:
            self._opened_indices = self._load_or_build_indices()
        return self._opened_indices

    @property
    def document_index(self) -> np.ndarray:
        """Documents in reading order: [epochs * documents], int32, read-only."""
        return self._gpt_indices.document

    @property
    def shuffle_index(self) -> np.ndarray:
        """Number of the stream's sample that each index returns: [samples], uint32 or int64, read-only."""
        return self._gpt_indices.shuffle

    def __len__(self) -> int:
        if self._opened_indices is not None:
            return len(self._opened_indices.shuffle)
        return plan_epochs(
            self._num_tokens(),
            self.config.sequence_length,
            num_samples=self.num_samples,
            planned_samples=self.config.planned_samples,
        ).num_samples

    @property
    def has_loss_mask(self) -> bool:
        """Whether loss masks exist for the data."""
        return self._learned is not None

    @property
    def has_padding_mask(self) -> bool:
        """Whether items contain a padding_mask."""
        return self._padding is not None or self._adds_empty_mask

    def add_empty_padding_mask(self) -> None:
        """Adds a padding_mask without padding to later items if the data has none, as for blends with other data."""
        self._adds_empty_mask = True

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        """Returns a dict with tokens, labels, position_ids: [S], int64; loss_mask: [S], float32; see the class."""
        text = self.sample_tokens(idx)
        item = {
            "tokens": torch.from_numpy(text[:-1]),
            # A copy, because writing to tokens must not change labels.
            "labels": torch.from_numpy(text[1:].copy()),
            "loss_mask": self._loss_mask.clone(),
            "position_ids": self._position_ids.clone(),
        }
        if self._learned is not None:
            learned = self._read(self._learned, idx, dtype=np.float32)[1:]
            check_loss_mask(learned, self._where)
            item["loss_mask"] = torch.from_numpy(learned)
        if self.config.eod_mask_loss:
            item["loss_mask"][item["tokens"] == self._eod] = 0.0
        if self.has_padding_mask:
            exclude_padding(item, self._padding_of(idx))
        if self.config.reset_position_ids or self.config.reset_attention_mask or self.config.create_attention_mask:
            item |= self._border_items(self._document_starts_of(idx, text[:-1]), num_tokens=len(text) - 1)
        return item

    def _padding_of(self, idx: int) -> np.ndarray:
        """Returns which of the tokens of sample `idx` are padding: [S + 1], bool."""
        if self._padding is None:
            return np.zeros(self.config.sequence_length + 1, dtype=np.bool_)
        mask = self._read(self._padding, idx, dtype=np.uint8)
        check_padding_mask(mask, self._where)
        return mask.astype(np.bool_)

    def sample_tokens(self, idx: int) -> np.ndarray:
        """Returns the S tokens of sample `idx` and the token that follows: [S + 1], int64."""
        text = self._read(self.dataset, idx, dtype=np.int64)
        self._check_vocabulary(text)
        return text

    def _document_starts_of(self, idx: int, tokens: np.ndarray) -> np.ndarray:
        """Returns the start position of each document in sample `idx`: [n], int64. tokens: [S], int64."""
        if self._starts is None:
            return document_starts(tokens, self._eod)
        return marked_starts(self._read(self._starts, idx, dtype=np.uint8)[:-1], self._where)

    def _border_items(self, starts: np.ndarray, *, num_tokens: int) -> dict[str, torch.Tensor]:
        """Returns the entries of an item that depend on document borders; see the class. starts: [n], int64."""
        items = {}
        if self.config.reset_position_ids:
            items["position_ids"] = restarted_positions(starts, num_tokens=num_tokens)
        # Without the option, attention treats a sample as one document.
        separate = starts if self.config.reset_attention_mask else starts[:1]
        borders = cumulative_lengths(separate, num_tokens=num_tokens)
        if self.config.create_attention_mask:
            items["attention_mask"] = document_masks(borders, seq_length=num_tokens)[0]
        elif self.config.reset_attention_mask:
            items["cu_seqlens"] = borders
        return {name: torch.from_numpy(array) for name, array in items.items()}

    def _read(self, source: TokenSequences, idx: int, *, dtype: type[np.number]) -> np.ndarray:
        """Reads the elements of sample `idx` from `source`: [S + 1], `dtype`."""
        indices = self._gpt_indices
        sample = indices.shuffle[idx]
        (first, begin), (last, end) = indices.sample[sample : sample + 2].tolist()
        text = np.empty(self.config.sequence_length + 1, dtype=dtype)
        filled = 0
        for place in range(first, last + 1):
            offset = begin if place == first else 0
            length = end + 1 - offset if place == last else None
            piece = source.get(int(indices.document[place]), offset, length)
            text[filled : filled + len(piece)] = piece
            filled += len(piece)
        assert filled == len(text), f"{self._where}: sample {idx} has {filled} tokens of {len(text)}"
        return text

    def _check_enough_text(self) -> None:
        tokens = self._num_tokens()
        if tokens <= self.config.sequence_length:
            raise ValueError(
                f"{self._where} has {len(self.indices)} documents with {tokens} tokens: one sample requires "
                f"seq_length + 1 = {self.config.sequence_length + 1}; give more text, a shorter --seq-length "
                f"{'or a larger share in --split' if self.config.split else 'or other files'}"
            )

    def _num_tokens(self) -> int:
        return int(self.dataset.sequence_lengths[self.indices].sum(dtype=np.int64))

    def _probe_vocabulary(self) -> None:
        if self._vocab_size is None:
            return
        step = max(1, len(self.indices) // _PROBED_DOCUMENTS)
        for document in self.indices[::step]:
            length = min(int(self.dataset.sequence_lengths[document]), _PROBED_TOKENS)
            self._check_vocabulary(np.asarray(self.dataset.get(int(document), 0, length), dtype=np.int64))

    def _warn_of_unmarked_padding(self) -> None:
        """Warns about packed documents without a padding mask, as written by older versions of preprocess_data.py."""
        if self._learned is None or self._padding is not None:
            return
        lengths = self.dataset.sequence_lengths[self.indices]
        if not len(lengths) or (lengths != lengths[0]).any():
            return  # documents of packed chats have one length
        for document in self.indices[:: max(1, len(self.indices) // _PROBED_DOCUMENTS)].tolist():
            end = int(self.dataset.sequence_lengths[document]) - 2
            if end < 0 or np.asarray(self._learned.get(document, end, 2)).any():
                continue
            last = np.asarray(self.dataset.get(document, end, 2))
            if last[0] == last[1]:
                warnings.warn(
                    f"{self._where}: document {document} ends with equal tokens without a loss, which look like "
                    f"padding, but {padding_mask_prefix(str(self.dataset_path))}.bin and .idx do not exist: routers "
                    "and reports count these tokens as data; run preprocess_data.py again to mark padding",
                    stacklevel=2,
                )
                return

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        # As unsigned integers, negative tokens become large, so one comparison detects both kinds of invalid tokens.
        if self._vocab_size is None or not len(tokens) or tokens.view(np.uint64).max() < self._vocab_size:
            return
        wrong = tokens[(tokens < 0) | (tokens >= self._vocab_size)][0]
        assert self.config.tokenizer is not None
        raise DataError(
            f"{self._where} contains token {wrong}: {self.config.tokenizer.name} has ids 0 to "
            f"{self._vocab_size - 1}; the data was created with a different tokenizer"
        )

    def _load_or_build_indices(self) -> GPTIndices:
        if self._cache is None:
            return self._build_indices()
        return GPTIndices(**self._cache.load_or_build(lambda: vars(self._build_indices()), check=self._check_cached))

    def _index_cache(self) -> IndexCache | None:
        folder = self._cache_folder()
        if folder is None:
            return None
        label = f"{type(self).__name__}-{self.index_split.name}"
        return IndexCache(folder, label=label, description=self._description(), trusted=self.config.fast_cache_load)

    def _check_cached(self, arrays: Mapping[str, np.ndarray]) -> None:
        check_gpt_indices(
            GPTIndices(**arrays),
            self.dataset.sequence_lengths,
            documents=self.indices,
            seq_length=self.config.sequence_length,
            num_samples=self.num_samples,
            planned_samples=self.config.planned_samples,
        )

    def _build_indices(self) -> GPTIndices:
        return build_gpt_indices(
            self.dataset.sequence_lengths,
            self.indices,
            seq_length=self.config.sequence_length,
            num_samples=self.num_samples,
            planned_samples=self.config.planned_samples,
            seed=self.config.random_seed,
        )

    def _cache_folder(self) -> Path | None:
        if self.dataset_path is None:
            return None
        if self.config.path_to_cache is not None:
            return Path(self.config.path_to_cache)
        return Path(self.dataset_path).parent / "cache" / "GPTDataset_indices"

    def _description(self) -> Mapping[str, Any]:
        """Returns all inputs of the indices. File sizes and times detect rewritten files with the same name."""
        assert self.dataset_path is not None
        idx = os.stat(get_idx_path(self.dataset_path))
        return {
            "version": _INDICES_VERSION,
            "path": os.path.abspath(self.dataset_path),
            "idx_bytes": idx.st_size,
            "idx_written": idx.st_mtime_ns,
            "bin_bytes": os.stat(get_bin_path(self.dataset_path)).st_size,
            "split": self.config.split,
            "documents": [len(self.indices), zlib.crc32(np.ascontiguousarray(self.indices).data)],
            "seq_length": self.config.sequence_length,
            "num_samples": self.num_samples,
            "seed": self.config.random_seed,
            # Left out of other runs, so that caches of earlier versions remain valid.
            **({} if self.config.planned_samples is None else {"planned_samples": self.config.planned_samples}),
        }


class MockGPTLowLevelDataset:
    """Synthetic documents that a model can learn. Each document counts up from a random token by a random stride.

    Ids wrap around, and a document ends with eod. Two tokens determine the stride, and therefore the rest of the
    document. Low ids are more frequent as first tokens, so that a model can learn token frequencies first. Equal
    tokenizers yield equal documents on every rank and in every run.
    """

    def __init__(self, tokenizer: Vocabulary, num_documents: int = MOCK_DOCUMENTS) -> None:
        if tokenizer.vocab_size < 2:
            raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids: synthetic data requires at least 2")
        rng = np.random.RandomState(0)
        self._eod = tokenizer.eod
        self._num_words = tokenizer.vocab_size - 1
        self.sequence_lengths = rng.randint(2, 2 * MOCK_MEAN_LENGTH, size=num_documents).astype(np.int32)
        self._starts = (self._num_words * rng.random_sample(num_documents) ** 3).astype(np.int64)
        self._strides = np.asarray(MOCK_STRIDES)[rng.randint(len(MOCK_STRIDES), size=num_documents)]

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> np.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """Returns the tokens of document `idx` from `offset`: [length], int64. length: None means up to its end."""
        total = int(self.sequence_lengths[idx])
        end = total if length is None else offset + length
        words = (self._starts[idx] + self._strides[idx] * np.arange(offset, end)) % self._num_words
        tokens = words + (words >= self._eod)  # every id but eod
        if end == total and end > offset:
            tokens[-1] = self._eod
        return tokens


class MockGPTDataset(GPTDataset):
    """GPTDataset of synthetic documents, without files. Requires config.tokenizer."""

    unnamed = "synthetic data"

    def __init__(
        self,
        dataset: TokenSequences,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)

    @staticmethod
    def build_low_level_dataset(dataset_path: str | None, config: GPTDatasetConfig) -> TokenSequences:
        if config.tokenizer is None:
            raise ValueError(
                "synthetic data requires a tokenizer in its configuration, because it is generated from the vocabulary"
            )
        return MockGPTLowLevelDataset(config.tokenizer)
