"""Base class of the datasets that BlendedMegatronDatasetBuilder builds, for dataset classes written for Megatron."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.data_order import SplitOrder
from megatron.core.datasets.utils import Split


class MegatronDataset(ABC, Dataset[dict[str, torch.Tensor]]):
    """Dataset of samples from the documents `indices` of a low-level dataset. Subclasses implement the four methods.

    num_samples: number of samples that the run requires; None means one epoch. index_split: the part of the corpus.
    """

    order: SplitOrder | None = None  # set by the builder

    def __init__(
        self,
        dataset: Any,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: BlendedMegatronDatasetConfig,
    ) -> None:
        self.dataset = dataset
        self.dataset_path = dataset_path
        self.indices = indices
        self.num_samples = num_samples
        self.index_split = index_split
        self.config = config

    @staticmethod
    @abstractmethod
    def numel_low_level_dataset(low_level_dataset: Any) -> int:
        """Returns the number of documents that --split divides."""

    @staticmethod
    @abstractmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        """Opens the documents at `dataset_path`."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]: ...
