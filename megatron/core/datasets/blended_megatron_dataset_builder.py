"""Builds training, validation and test datasets on all ranks, without races.

One rank of the group builds first and fills the index cache, which the other ranks then read. If the files are not
visible to them, because each node has a separate cache folder, they build identical indices themselves.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.data_order import (
    SourceOrder,
    SplitOrder,
    SplitSize,
    begin_order,
    continue_order,
    match_sources,
    split_sizes_of,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, TokenSequences
from megatron.core.datasets.indexed_dataset import DataError
from megatron.core.datasets.utils import DEFAULT_SPLIT, Blend, Split, split_documents
from megatron.core.group_collectives import all_ranks_agree

# Documents, and tokens per document, whose checksum identifies the data of a run.
_PROBED_DOCUMENTS = 64
_PROBED_TOKENS = 1024

# Training, validation and test data. With multiple_validation_sets, validation data is a list.
Datasets = list[GPTDataset | BlendedDataset | list[GPTDataset] | None]


class BlendedMegatronDatasetBuilder:
    """Builds training, validation and test datasets, with Megatron's interface.

    Usage: `BlendedMegatronDatasetBuilder(GPTDataset, sizes, is_built_on_rank, config).build()`. sizes: numbers of
    train, valid and test samples; None means one epoch, and 0 means no dataset. If it is the SplitSizes that a dataset
    provider received, the datasets continue the order of the checkpoint. group: the ranks that call `build`; None means
    all ranks.
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
        self.sizes = split_sizes_of(sizes)
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
        self._require_same_masks(datasets)
        for whole in datasets:
            if isinstance(whole, BlendedDataset):
                _mark_padding_in_all(whole)
        return datasets

    def _require_same_masks(self, datasets: Datasets) -> None:
        """Raises DataError on every rank if masks are missing on some ranks. Training would not detect this."""
        parts = [part for whole in datasets for part in _parts(whole) if isinstance(part, GPTDataset)]
        mine = {
            "loss": [part.has_loss_mask for part in parts],
            "padding": [part.has_padding_mask for part in parts],
        }
        found = [mine]
        if dist.is_initialized():
            found = [mine] * dist.get_world_size(self.group)
            dist.all_gather_object(found, mine, group=self.group)
        for kind in mine:
            built = [masks[kind] for masks in found if masks[kind]]
            anywhere = [any(some) for some in zip(*built)]
            without = [rank for rank, masks in enumerate(found) if masks[kind] and masks[kind] != anywhere]
            if without:
                raise DataError(
                    f"ranks {', '.join(map(str, without))} found no {kind} masks, but other ranks did: "
                    f"PREFIX_{kind}_mask.bin and .idx must be next to the data on every node, or on none"
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
        is_apart = split is Split.valid and self.config.multiple_validation_sets and len(sources) > 1
        if size is None:
            # Every evaluation reads the whole epoch, or the script chooses the samples: there is no order to continue.
            seed = self.config.random_seed
            whole = [self.build_one(split, source, num_samples=None, seed=seed) for source in sources]
            if is_apart or len(whole) == 1:
                return whole if is_apart else whole[0]
            return BlendedDataset(whole, [len(dataset) for dataset in whole], None, self.config)
        request = self.sizes.splits[split.value]
        if is_apart:
            ordered = [_OrderedSet(self, split, [one], [1.0], request) for one in sources]
            sets = [one.parts for one in ordered]
            return [one.build_alone(size, number, sets) for number, one in enumerate(ordered)]
        if len(sources) == 1:
            return _OrderedSet(self, split, sources, [1.0], request).build_alone(size)
        weights = weights or [source.num_tokens() for source in sources]
        return _OrderedSet(self, split, sources, weights, request).build_blend(size)

    def build_one(
        self, split: Split, source: "_Source", *, num_samples: int | None, seed: int, planned: int | None = None
    ) -> GPTDataset:
        """Builds the dataset of a source. planned: number of samples that fixed its order; None means num_samples."""
        assert source.documents is not None
        documents = np.arange(source.documents.start, source.documents.stop, dtype=np.int32)
        config = self.config
        if seed != config.random_seed or planned is not None:
            config = replace(config, random_seed=seed, planned_samples=planned)
        return self.cls(source.corpus, source.prefix, documents, num_samples, split, config)


class _OrderedSet:
    """Builds the dataset of one or several sources, in the order of a new run or of the checkpoint's run."""

    def __init__(
        self,
        builder: BlendedMegatronDatasetBuilder,
        split: Split,
        sources: Sequence["_Source"],
        weights: Sequence[float],
        request: SplitSize,
    ) -> None:
        self._builder, self._split, self._sources, self._request = builder, split, sources, request
        self._seq_length = builder.config.sequence_length
        self._seed = request.stored[0].seed if request.stored else builder.config.random_seed
        self.parts = [source.as_part(weight) for source, weight in zip(sources, weights)]
        self._built: dict[tuple[int, int, int | None], GPTDataset] = {}
        self._has_appended = False

    def build_alone(
        self, size: int, set_number: int = 0, sets: Sequence[Sequence[SourceOrder]] | None = None
    ) -> GPTDataset:
        """Builds the dataset of the only source. set_number: its place among `sets`, if there are several."""
        order = self._order(size, set_number=set_number, sets=sets or [self.parts])
        [part] = order.sources or ()
        dataset = self._dataset(0, part, required=part.first + self._num_samples(order, size))
        dataset.order = self._order_of(dataset, order)
        return dataset

    def build_blend(self, size: int) -> BlendedDataset:
        """Builds the blend of the sources, without those that have no sample."""
        order = self._order(size, set_number=0, sets=[self.parts])
        assert order.sources is not None
        # The order keeps the sequence of the sources in the checkpoint's run.
        numbers = [number for number in match_sources(order.sources, self.parts) if number is not None]
        num_samples = self._num_samples(order, size)
        part_index, sample_index = order.indices(num_samples)
        required = np.zeros(len(numbers), dtype=np.int64)
        np.maximum.at(required, part_index, sample_index + 1)
        used = np.unique(part_index)
        datasets = [self._dataset(numbers[n], order.sources[n], required=int(required[n])) for n in used]
        weights = [order.sources[n].weight for n in used]
        compact = np.searchsorted(used, part_index).astype(np.int16), sample_index
        blended = BlendedDataset(datasets, weights, num_samples, self._builder.config, order=compact)
        blended.order = self._order_of(blended, order)
        return blended

    def _order(self, size: int, *, set_number: int, sets: Sequence[Sequence[SourceOrder]]) -> SplitOrder:
        request = self._request
        if not request.stored:
            planned = size if request.planned is None else request.planned
            order = begin_order(
                self.parts, planned, seed=self._seed, seq_length=self._seq_length, capacity=self._capacity
            )
            return replace(order, cyclic=request.cyclic)
        return continue_order(
            request.stored,
            request,
            set_number=set_number,
            sets=sets,
            seq_length=self._seq_length,
            capacity=self._capacity,
        )

    def _num_samples(self, order: SplitOrder, size: int) -> int:
        """Returns the number of samples from the start of the order, at least one.

        A cyclic order permutes groups of as many samples as planned. It repeats those of a single data set, which are
        whole epochs; a blend has a group for every repetition.
        """
        required = max(size - order.start, 1)
        if not order.cyclic:
            return required
        planned = max(order.planned, 1)
        return planned * -(-required // planned) if len(self.parts) > 1 else planned

    def _order_of(self, dataset: GPTDataset | BlendedDataset, order: SplitOrder) -> SplitOrder:
        """Completes the order that is stored. Only a GPTDataset appends epochs to the order that it was planned for."""
        notes = order.notes
        if self._has_appended and not issubclass(self._builder.cls, GPTDataset):
            notes = *notes, f"{self._builder.cls.__name__} may read more samples than planned in a different order"
        length = order.length
        if order.cyclic and length is None:
            length = max(order.planned, 1) if len(self.parts) > 1 else len(dataset)
        return replace(order, length=length, notes=notes, choices=None)

    def _capacity(self, number: int, count: int) -> int:
        return len(self._build(number, count, None))

    def _dataset(self, number: int, part: SourceOrder, *, required: int) -> GPTDataset:
        # Without appended epochs, the dataset and its cached indices are those of the run that planned the order.
        if required <= part.planned:
            return self._build(number, part.planned, None)
        self._has_appended = True
        return self._build(number, required, part.planned)

    def _build(self, number: int, num_samples: int, planned: int | None) -> GPTDataset:
        key = (number, num_samples, planned)
        if key not in self._built:
            self._built[key] = self._builder.build_one(
                self._split, self._sources[number], num_samples=num_samples, seed=self._seed, planned=planned
            )
        return self._built[key]


def _mark_padding_in_all(blend: BlendedDataset) -> None:
    """Adds padding masks to all samples of a blend if some of its data has them, because batches must be uniform."""
    parts = [part for part in blend.datasets if isinstance(part, GPTDataset)]
    if any(part.has_padding_mask for part in parts):
        for part in parts:
            part.add_empty_padding_mask()


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

    def as_part(self, weight: float) -> SourceOrder:
        """Describes the source for the run's order, with facts that identify its documents."""
        assert self.documents is not None
        facts = {"documents": len(self.documents)}
        # Corpora of a script's dataset class may have documents of another form.
        if hasattr(self.corpus, "sequence_lengths"):
            lengths = np.asarray(self.corpus.sequence_lengths)[self.documents.start : self.documents.stop]
            facts["tokens"] = int(lengths.sum(dtype=np.int64))
            facts["lengths"] = zlib.crc32(np.ascontiguousarray(lengths, dtype=np.int32).data)
            facts["content"] = self._probe(lengths)
        return SourceOrder(Path(self.prefix or "synthetic data").name, facts, float(weight))

    def _probe(self, lengths: np.ndarray) -> int:
        """Returns a checksum of a part of the tokens, independent of their type in the file."""
        assert self.documents is not None
        checksum = 0
        for place in range(0, len(lengths), max(1, len(lengths) // _PROBED_DOCUMENTS)):
            length = min(int(lengths[place]), _PROBED_TOKENS)
            tokens = np.asarray(self.corpus.get(self.documents.start + place, 0, length), dtype=np.int64)
            checksum = zlib.crc32(np.ascontiguousarray(tokens).data, checksum)
        return checksum
