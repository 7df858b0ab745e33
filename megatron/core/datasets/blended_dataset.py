"""BlendedDataset: several datasets mixed by weight. data_order.py chooses the dataset of each sample."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.data_order import BlendOrder, SplitOrder, blend_indices
from megatron.core.datasets.padding import marks_padding


class BlendedDataset(Dataset[dict[str, Any]]):
    """Dataset of `size` samples that mixes several datasets in proportion to their weights.

    After any number of samples, each dataset's contribution is within one sample of its share. size: None means the sum
    of the dataset sizes. config: unused. order: the dataset number and index in that dataset of each sample, instead of
    blend_indices(weights, size). Raises ValueError if a dataset has too few samples.
    """

    order: SplitOrder | None = None  # set by the builder

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
        required = np.zeros(len(datasets), dtype=np.int64)
        np.maximum.at(required, self._dataset_index, self._sample_index + 1)
        for number, count in enumerate(required.tolist()):
            if count > lengths[number]:
                raise ValueError(
                    f"dataset {number} of the blend has {lengths[number]} samples: must have at least {count}"
                )

    @property
    def dataset_index(self) -> np.ndarray:
        """Dataset number of each sample: [size], int16, read-only."""
        return self._dataset_index

    @property
    def has_padding_mask(self) -> bool:
        """Whether samples contain a padding_mask."""
        return any(marks_padding(dataset) for dataset in self.datasets)

    def __len__(self) -> int:
        return len(self._dataset_index)

    def __getitem__(self, idx: int) -> dict[str, Any]:
        return self.datasets[self._dataset_index[idx]][int(self._sample_index[idx])]
