"""Builds training, validation and test datasets on all ranks, without races.

One rank of the group builds first and fills the index cache, which the other ranks then read. If the files are not
visible to them, because each node has a separate cache folder, they build identical indices themselves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.core.datasets.blended_dataset import BlendedDataset, blend_indices
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, TokenSequences
from megatron.core.datasets.indexed_dataset import DataError
from megatron.core.datasets.utils import DEFAULT_SPLIT, Blend, Split, split_documents
from megatron.core.group_collectives import all_ranks_agree

# Training, validation and test data. With multiple_validation_sets, validation data is a list.
Datasets = list[GPTDataset | BlendedDataset | list[GPTDataset] | None]


class BlendedMegatronDatasetBuilder:
    """Builds training, validation and test datasets, with Megatron's interface.

    Usage: `BlendedMegatronDatasetBuilder(GPTDataset, sizes, is_built_on_rank, config).build()`. sizes: numbers of
    train, valid and test samples; None means one epoch, and 0 means no dataset. group: the ranks that call `build`;
    None means all ranks.
    """

    def __init__(
        self,
        cls: type[GPTDataset],
        sizes: Sequence[int | None],
        is_built_on_rank: Callable[[], bool],
        config: GPTDatasetConfig,
        *,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if len(sizes) != len(Split):
            raise ValueError(
                f"sizes is {list(sizes)}: must contain three numbers of samples, for train, valid and test"
            )
        # The description of cached indices contains the split, so the default is filled in here.
        split = None if config.blend_per_split is not None else config.split or DEFAULT_SPLIT
        self.config = replace(config, split=split)
        self.cls = cls
        self.sizes = sizes
        self.is_built_on_rank = is_built_on_rank
        self.group = group

    def build(self) -> Datasets:
        """Builds [train, valid, test]. Collective.

        An entry is None if its size or weight is 0. All entries are None on ranks where is_built_on_rank() is False.
        With multiple_validation_sets, the validation entry of a blend is a list with a dataset of the full size for
        each prefix. With full_validation, validation datasets contain one epoch.

        If any rank fails, every rank raises: ValueError or OSError on the failed ranks, RemoteRankError on the others.
        """
        datasets: Datasets = [None] * len(Split)
        is_first = not dist.is_initialized() or dist.get_rank(self.group) == 0
        for is_my_turn in (is_first, not is_first):
            with all_ranks_agree(self.group):
                if is_my_turn and self.is_built_on_rank():
                    datasets = self._build_splits()
        self._require_same_loss_masks(datasets)
        return datasets

    @staticmethod
    def build_generic_dataset(
        cls: Callable[..., Any], is_built_on_rank: Callable[[], bool], synchronize_ranks: bool, *args: Any
    ) -> Any:
        """Returns cls(*args), or None if is_built_on_rank() is False. Collective if synchronize_ranks is set.

        With synchronize_ranks, the first rank builds before the others, which then find its cached files. If any rank
        fails, every rank raises, as in `build`. Otherwise each rank builds independently.
        """
        if not synchronize_ranks:
            return cls(*args) if is_built_on_rank() else None
        is_first, built = not dist.is_initialized() or dist.get_rank() == 0, None
        for is_my_turn in (is_first, not is_first):
            with all_ranks_agree():
                if is_my_turn and is_built_on_rank():
                    built = cls(*args)
        return built

    def _require_same_loss_masks(self, datasets: Datasets) -> None:
        """Raises DataError on every rank if loss masks are missing on some ranks. Training would not detect this."""
        parts = [part for whole in datasets for part in _parts(whole)]
        mine = [part.has_loss_mask for part in parts if isinstance(part, GPTDataset)]
        found: list[list[bool]] = [mine]
        if dist.is_initialized():
            found = [[]] * dist.get_world_size(self.group)
            dist.all_gather_object(found, mine, group=self.group)
        built = [masks for masks in found if masks]
        without = [rank for rank, masks in enumerate(found) if masks and masks != [any(some) for some in zip(*built)]]
        if without:
            raise DataError(
                f"ranks {', '.join(map(str, without))} found no loss masks, but other ranks did: "
                "PREFIX_loss_mask.bin and .idx must be next to the data on every node, or on none"
            )

    def _build_splits(self) -> Datasets:
        if self.config.blend_per_split is not None:
            return self._build_separate_splits(self.config.blend_per_split)
        prefixes, weights = _sets_to_read(self.config.blend)
        corpora = [self.cls.build_low_level_dataset(prefix, self.config) for prefix in prefixes]
        parts = [self._split(prefix, corpus) for prefix, corpus in zip(prefixes, corpora)]
        datasets: Datasets = []
        for split, size in zip(Split, self.sizes):
            documents = [part[split.value] for part in parts]
            sources = [_Source(*source) for source in zip(prefixes, corpora, documents)]
            datasets.append(self._build_split(split, sources, size=size, weights=weights))
        return datasets

    def _build_separate_splits(self, blends: list[Blend | None]) -> Datasets:
        if blends[Split.train.value] is None and self.sizes[Split.train.value] != 0:
            raise ValueError("there is no training data: blend_per_split must start with a blend for training")
        datasets: Datasets = []
        for split, size, blend in zip(Split, self.sizes, blends):
            prefixes, weights = ([], None) if blend is None or size == 0 else _sets_to_read(blend)
            sources = [self._whole_corpus(prefix) for prefix in prefixes]
            datasets.append(self._build_split(split, sources, size=size, weights=weights) if sources else None)
        return datasets

    def _whole_corpus(self, prefix: str | None) -> "_Source":
        corpus = self.cls.build_low_level_dataset(prefix, self.config)
        return _Source(prefix, corpus, range(self._num_documents(prefix, corpus)))

    def _num_documents(self, prefix: str | None, corpus: TokenSequences) -> int:
        num_documents = self.cls.numel_low_level_dataset(corpus)
        if num_documents == 0:
            raise ValueError(f"{prefix}.idx has no documents: must have at least one")
        return num_documents

    def _split(self, prefix: str | None, corpus: TokenSequences) -> list[range | None]:
        num_documents = self._num_documents(prefix, corpus)
        split = self.config.split
        assert split is not None
        ranges = split_documents(split, num_documents)
        # Validation data is optional, but training data is required.
        if ranges[Split.train.value] is None and self.sizes[Split.train.value] != 0:
            raise ValueError(f"--split {split} has no training data: the first number must be above 0")
        for part, documents, size in zip(Split, ranges, self.sizes):
            if size != 0 and documents is not None and len(documents) == 0:
                raise ValueError(
                    f"--split {split} leaves no document for {part.name}: {prefix} has {num_documents} documents; "
                    f"increase the share of {part.name}, or set it to 0 for no {part.name} data"
                )
        return ranges

    def _build_split(
        self, split: Split, sources: list["_Source"], *, size: int | None, weights: list[float] | None
    ) -> GPTDataset | BlendedDataset | list[GPTDataset] | None:
        if size == 0 or any(source.documents is None for source in sources):
            return None
        if split is Split.valid and self.config.full_validation:
            size = None
        if len(sources) == 1:
            return self._build_one(split, sources[0], num_samples=size)
        if split is Split.valid and self.config.multiple_validation_sets:
            return [self._build_one(split, source, num_samples=size) for source in sources]
        weights = weights or [source.num_tokens() for source in sources]
        if size is None:
            whole = [self._build_one(split, source, num_samples=None) for source in sources]
            return BlendedDataset(whole, [len(dataset) for dataset in whole], None, self.config)
        return self._build_blend(split, sources, size=size, weights=weights)

    def _build_blend(
        self, split: Split, sources: list["_Source"], *, size: int, weights: list[float]
    ) -> BlendedDataset:
        order = blend_indices(weights, size)
        counts = np.bincount(order[0], minlength=len(sources))
        used = np.flatnonzero(counts).tolist()
        weights = [weights[number] for number in used]
        datasets = [self._build_one(split, sources[number], num_samples=int(counts[number])) for number in used]
        if len(used) < len(sources):
            order = blend_indices(weights, size)
            # The shares of sources without samples are redistributed to the others, which may then require one more
            # sample.
            for place, count in enumerate(np.bincount(order[0], minlength=len(used)).tolist()):
                if count > len(datasets[place]):
                    datasets[place] = self._build_one(split, sources[used[place]], num_samples=count)
        return BlendedDataset(datasets, weights, size, self.config, order=order)

    def _build_one(self, split: Split, source: "_Source", *, num_samples: int | None) -> GPTDataset:
        assert source.documents is not None
        documents = np.arange(source.documents.start, source.documents.stop, dtype=np.int32)
        return self.cls(source.corpus, source.prefix, documents, num_samples, split, self.config)


def _parts(whole: GPTDataset | BlendedDataset | list[GPTDataset] | None) -> Sequence[Any]:
    if isinstance(whole, BlendedDataset):
        return whole.datasets
    return whole if isinstance(whole, list) else [whole]


def _sets_to_read(blend: Blend | None) -> tuple[Sequence[str | None], list[float] | None]:
    """Returns the prefixes and weights of a blend, without datasets of weight 0, whose files need not exist.

    A prefix of None means mock data.
    """
    if blend is None:
        return [None], None
    prefixes, weights = blend
    if weights is None:
        return prefixes, None
    used = [(prefix, weight) for prefix, weight in zip(prefixes, weights) if weight > 0]
    return [prefix for prefix, _ in used], [weight for _, weight in used]


@dataclass(frozen=True)
class _Source:
    """Corpus of a blend, with the range of its documents that belong to the split being built."""

    prefix: str | None
    corpus: TokenSequences
    documents: range | None

    def num_tokens(self) -> int:
        assert self.documents is not None
        lengths: Any = self.corpus.sequence_lengths[self.documents.start : self.documents.stop]
        return int(lengths.sum(dtype=np.int64))
