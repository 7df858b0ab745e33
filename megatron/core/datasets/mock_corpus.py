"""A made-up corpus that needs no files and that a model can learn; it stands in for an IndexedDataset."""

from typing import Any

import numpy as np

from megatron.core.datasets.blended_megatron_dataset_config import Vocabulary

NUM_DOCUMENTS = 20_000
MEAN_LENGTH = 512
STRIDES = (1, 2, 3, 5)


class MockGPTLowLevelDataset:
    """Documents that count upwards from a random token in a stride of their own, wrap around, and end with eod.

    Two tokens tell the stride, hence all that follows; starts crowd at low ids, so that token frequencies can be
    learned first. Equal for equal tokenizers, on every rank and in every run.
    """

    def __init__(self, tokenizer: Vocabulary, num_documents: int = NUM_DOCUMENTS) -> None:
        if tokenizer.vocab_size < 2:
            raise ValueError(f"{tokenizer.name} has {tokenizer.vocab_size} ids: made-up data needs 2 or more")
        rng = np.random.RandomState(0)
        self._eod = tokenizer.eod
        self._num_words = tokenizer.vocab_size - 1
        self.sequence_lengths = rng.randint(2, 2 * MEAN_LENGTH, size=num_documents).astype(np.int32)
        self._starts = (self._num_words * rng.random_sample(num_documents) ** 3).astype(np.int64)
        self._strides = np.asarray(STRIDES)[rng.randint(len(STRIDES), size=num_documents)]

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, idx: int) -> np.ndarray:
        return self.get(idx)

    def get(self, idx: int, offset: int = 0, length: int | None = None) -> Any:
        """[length] int64 tokens of document `idx` from token `offset` on (None: to its end)."""
        total = int(self.sequence_lengths[idx])
        end = total if length is None else offset + length
        words = (self._starts[idx] + self._strides[idx] * np.arange(offset, end)) % self._num_words
        tokens = words + (words >= self._eod)  # every id but eod
        if end == total and end > offset:
            tokens[-1] = self._eod
        return tokens
