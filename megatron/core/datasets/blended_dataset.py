"""BlendedDataset: several datasets mixed by weight, and the order of their samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig

BlendOrder = tuple[np.ndarray, np.ndarray]
# Number of samples for which shares are computed together; fits a core's cache for a few hundred datasets.
_STEPS_AT_ONCE = 4096


class BlendedDataset(Dataset[dict[str, Any]]):
    """Dataset of `size` samples that mixes several datasets in proportion to their weights.

    After any number of samples, each dataset's contribution is within one sample of its share. size: None means the sum
    of the dataset sizes. config: unused. order: the result of blend_indices(weights, size), if already computed. Raises
    ValueError if a dataset has too few samples.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset[dict[str, Any]]],
        weights: Sequence[float],
        size: int | None,
        config: BlendedMegatronDatasetConfig,
        *,
        order: BlendOrder | None = None,
    ) -> None:
        lengths = [len(dataset) for dataset in datasets]  # type: ignore[arg-type]
        self.datasets = datasets
        self._dataset_index, self._sample_index = order or blend_indices(
            weights, sum(lengths) if size is None else size
        )
        for number, count in enumerate(np.bincount(self._dataset_index, minlength=len(datasets))):
            if count > lengths[number]:
                raise ValueError(
                    f"dataset {number} of the blend has {lengths[number]} samples: must have at least {count}"
                )

    @property
    def dataset_index(self) -> np.ndarray:
        """Dataset number of each sample: [size], int16, read-only."""
        return self._dataset_index

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return self.datasets[self._dataset_index[idx]][int(self._sample_index[idx])]


def blend_indices(weights: Sequence[float], size: int) -> BlendOrder:
    """Returns the dataset number (int16) of each of `size` samples, and the index in that dataset (int64).

    As in Megatron, each sample is taken from the dataset that is furthest behind its share; ties go to the first
    dataset. Takes about a second per million samples, regardless of the number of datasets.
    """
    shares = np.asarray(weights, dtype=np.float64)
    shares = shares / shares.sum()
    # inf excludes datasets of weight 0, which would otherwise win ties at 0 when no dataset is behind its share.
    given, behind = np.where(shares > 0, 0.0, np.inf), np.empty(len(shares))
    dataset_index = np.empty(size, dtype=np.int16)
    for first in range(0, size, _STEPS_AT_ONCE):
        steps = np.maximum(np.arange(first, min(first + _STEPS_AT_ONCE, size), dtype=np.float64), 1.0)
        chosen = []
        for due in steps[:, None] * shares:
            np.subtract(due, given, out=behind)
            dataset = behind.argmax()
            given[dataset] += 1
            chosen.append(dataset)
        dataset_index[first : first + len(chosen)] = chosen
    return dataset_index, _number_within_each(dataset_index, num_datasets=len(shares))


def _number_within_each(dataset_index: np.ndarray, *, num_datasets: int) -> np.ndarray:
    """Returns, for each sample, the number of earlier samples from the same dataset: [size], int64."""
    counts = np.bincount(dataset_index, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(dataset_index), dtype=np.int64)
    numbers[np.argsort(dataset_index, kind="stable")] = np.arange(len(dataset_index)) - firsts
    return numbers
