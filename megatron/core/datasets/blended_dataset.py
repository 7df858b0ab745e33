"""Several datasets mixed by weight into one; which sample comes from where is decided here, samples are not made."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig


class BlendedDataset(Dataset[dict[str, Any]]):
    """`size` samples of which each dataset gives its share by weight, at every point of the order to within one.

    size None: as many as the datasets have together. Raises ValueError where a dataset has too few samples.
    config: what the builder was given; samples need nothing of it.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[dict[str, Any]]],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        lengths = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
        self.datasets = datasets
        self._dataset_index, self._sample_index = blend_indices(weights, sum(lengths) if size is None else size)
        for number, count in enumerate(np.bincount(self._dataset_index, minlength=len(datasets))):
            if count > lengths[number]:
                raise ValueError(f"dataset {number} of the blend has {lengths[number]} samples: must have {count}")

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return self.datasets[self._dataset_index[idx]][int(self._sample_index[idx])]


def blend_indices(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """For each of `size` samples: the dataset (int16) and the number of the sample in that dataset (int64).

    Megatron's order: each sample comes from the dataset that is furthest behind its share, the first one on a tie.
    """
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum()
    given = np.zeros(len(shares), dtype=np.float64)
    dataset_index = np.empty(size, dtype=np.int16)
    sample_index = np.empty(size, dtype=np.int64)
    for i in range(size):
        dataset = int(np.argmax(shares * max(i, 1) - given))
        dataset_index[i], sample_index[i] = dataset, given[dataset]
        given[dataset] += 1
    return dataset_index, sample_index
