"""Small corpora for the tests of this folder. Contains no tests."""

from pathlib import Path

import numpy as np

from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.tokenizers.tokenizer import NullTokenizer

VOCABULARY = NullTokenizer(1000)


def write_corpus(prefix: Path, num_documents: int = 40, longest: int = 30, seed: int = 0) -> list[np.ndarray]:
    """Writes a .bin/.idx pair of random documents and returns the documents."""
    rng = np.random.default_rng(seed)
    documents = [rng.integers(0, 999, rng.integers(0, longest + 1)) for _ in range(num_documents)]
    with IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16) as builder:
        builder.add_concatenated(np.concatenate(documents), [len(document) for document in documents])
        builder.finalize(f"{prefix}.idx")
    return documents


def dataset_config(prefix: Path | None, **changes) -> GPTDatasetConfig:
    """Returns a configuration for one .bin/.idx pair, or for mock data."""
    blend = None if prefix is None else ([str(prefix)], None)
    values = {"sequence_length": 8, "blend": blend, "split": "8,1,1", "tokenizer": VOCABULARY}
    return GPTDatasetConfig(**{**values, **changes})
