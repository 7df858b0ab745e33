"""Endless iterators over microbatches, which can start after any number of consumed samples."""

import multiprocessing
import os
import select
import signal
import sys
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder, Datasets
from megatron.core.datasets.blended_megatron_dataset_config import Vocabulary
from megatron.core.datasets.data_config import DataConfig
from megatron.core.datasets.data_order import DataOrder, SplitOrder
from megatron.core.datasets.document_borders import document_masks, join_cumulative_lengths
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import DataError
from megatron.core.datasets.padding import PADDING_MASK, marks_padding
from megatron.core.datasets.utils import Split
from megatron.core.group_collectives import all_ranks_agree

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Options of the data iterators: start positions, batch size and data-parallel rank.

    consumed_*: number of samples that all ranks together have consumed, from the checkpoint. Test data starts at 0.
    pin_memory: returns pinned batches, for asynchronous copies to a GPU. create_attention_mask: converts document
    borders to masks. dataloader_type: as in DataConfig. seed: random seed of the cyclic order. data_order: the order of
    the run, whose seed then replaces `seed`. full_validation: reads validation data from its first sample, in complete
    passes that each end with a padded round.
    """

    micro_batch_size: int
    dp_rank: int = 0
    dp_size: int = 1
    consumed_train_samples: int = 0
    consumed_valid_samples: int = 0
    num_workers: int = 0
    pin_memory: bool = False
    create_attention_mask: bool = False
    dataloader_type: str = "single"
    seed: int = 0
    data_order: DataOrder = field(default_factory=dict)
    full_validation: bool = False

    @property
    def samples_per_round(self) -> int:
        """Number of samples in one micro-batch, summed over all data-parallel ranks."""
        return self.micro_batch_size * self.dp_size

    def full_rounds(self, dataset: Dataset[Any]) -> int:
        """Returns the number of micro-batches per rank in one pass over all samples of a dataset."""
        return -(-len(dataset) // self.samples_per_round)  # type: ignore[arg-type]

    def order(self, split: Split, number: int = 0) -> SplitOrder:
        """Returns the order of a split, or of one of several validation sets."""
        sets = self.data_order.get(split.name, ())
        return sets[number] if number < len(sets) else SplitOrder(self.seed, planned=0)


class DataIterator(Iterator[Batch]):
    """Endless iterator over the microbatches of this rank, on the CPU.

    Yields dicts with tokens, labels, position_ids: [B, S], int64, and loss_mask: [B, S], float32. Datasets with
    reset_attention_mask add cu_seqlens: [n + 1], int32, the borders of documents within the B * S tokens of the batch,
    row by row. With plan.create_attention_mask they add attention_mask: [B, 1, S, S], bool, instead. If
    has_padding_mask, every batch contains padding_mask: [B, S], bool; see [Note: padding is not data] in padding.py.

    Batch k depends only on the dataset, `consumed_samples` and the rank, not on workers or on earlier reads. Reading
    does not use global random generators. Worker processes start at the first `next` and end at `close`. full_passes:
    reads complete passes over the dataset, each with plan.full_rounds(dataset) batches, instead of a continuous
    sequence of samples. Samples that pad the last round have a loss_mask of 0 and are marked as padding. order: the
    order of the dataset's samples in the run; None means that sample 0 of the run is its first.
    """

    def __init__(
        self,
        dataset: Dataset[Batch],
        plan: BatchPlan,
        *,
        consumed_samples: int = 0,
        full_passes: bool = False,
        order: SplitOrder | None = None,
    ) -> None:
        num_workers = min(plan.num_workers, _num_cores())
        prepare_worker = _PrepareWorker()
        samples = _Samples(dataset, padded_by=plan.samples_per_round if full_passes else 1)
        self.has_padding_mask = samples.has_padding_mask
        self._loader = DataLoader(
            samples,
            batch_sampler=_full_pass_sampler(dataset, plan)
            if full_passes
            else _sampler(dataset, plan, consumed_samples=consumed_samples, order=order),
            num_workers=num_workers,
            collate_fn=partial(_stack_or_pass_on, create_attention_mask=plan.create_attention_mask),
            worker_init_fn=prepare_worker,
            # The default of Python 3.14 would import torch in each worker.
            multiprocessing_context="fork" if num_workers else None,
            # DataLoader draws a seed when iteration starts. Drawing it from the global generator would change the
            # dropout masks of a resumed run, which starts iterating at a different step.
            generator=torch.Generator(),
        )
        self._pin_memory = plan.pin_memory
        self._batches: Iterator[dict[str, np.ndarray] | Exception] | None = None
        # Runs also at interpreter exit, before multiprocessing terminates and joins the remaining workers.
        weakref.finalize(self, prepare_worker.let_go)

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._loader)
        arrays = next(self._batches)
        if isinstance(arrays, Exception):
            raise arrays
        batch = {key: torch.from_numpy(array) for key, array in arrays.items()}
        return {key: tensor.pin_memory() for key, tensor in batch.items()} if self._pin_memory else batch

    def close(self) -> None:
        """Stops the worker processes. A later `next` restarts at consumed_samples."""
        self._batches = None


class MegatronPretrainingSampler:
    """Endless sampler of the sample numbers in each microbatch of this data-parallel rank.

    Samples are read in dataset order, wrapping around at the end. From each group of micro_batch_size *
    data_parallel_size samples, rank r reads rows r * micro_batch_size to (r + 1) * micro_batch_size. A global batch
    therefore consists of the samples from consumed_samples to consumed_samples + global batch size for any number of
    ranks and micro-batch size, and a run that resumes with a different layout trains on the same global batches.
    """

    def __init__(
        self,
        total_samples: int,
        consumed_samples: int,
        *,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
    ) -> None:
        if total_samples <= 0:
            raise ValueError(f"total_samples is {total_samples}: must be at least 1")
        if consumed_samples < 0:
            raise ValueError(f"consumed_samples is {consumed_samples}: must be at least 0")
        if micro_batch_size <= 0:
            raise ValueError(f"micro_batch_size is {micro_batch_size}: must be at least 1")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank is {data_parallel_rank}: must be 0 to data_parallel_size - 1 = "
                f"{data_parallel_size - 1}"
            )
        self.total_samples = total_samples
        self._begin = consumed_samples + data_parallel_rank * micro_batch_size
        self._micro_batch_size = micro_batch_size
        self._stride = micro_batch_size * data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        begin = self._begin
        while True:
            yield [self._sample(number) for number in range(begin, begin + self._micro_batch_size)]
            begin += self._stride

    def _sample(self, number: int) -> int:
        """Returns the dataset index of sample `number` of the run. Samples of a run are counted from 0."""
        return number % self.total_samples


class MegatronPretrainingRandomSampler(MegatronPretrainingSampler):
    """Yields micro-batches like MegatronPretrainingSampler, but in a different random order in each epoch.

    The order of an epoch depends only on `seed`, the epoch number and total_samples. It is the same on all ranks and
    for every layout. No sample is skipped, and a micro-batch may span two epochs. The order of one epoch is kept in
    memory: [total_samples], int64. num_groups: number of groups of total_samples samples that successive epochs read.
    """

    def __init__(
        self, total_samples: int, consumed_samples: int, *, seed: int, num_groups: int = 1, **layout: int
    ) -> None:
        """Creates the sampler. layout: micro_batch_size, data_parallel_rank and data_parallel_size."""
        super().__init__(total_samples, consumed_samples, **layout)
        self._seed, self._num_groups = seed, num_groups
        self._epoch: int | None = None
        self._order = np.empty(0, dtype=np.int64)

    def _sample(self, number: int) -> int:
        epoch, place = divmod(number, self.total_samples)
        if epoch != self._epoch:
            # RandomState, because its random numbers are the same in all versions of NumPy.
            self._order = np.random.RandomState([self._seed, epoch]).permutation(self.total_samples)
            self._epoch = epoch
        return int(self._order[place]) + epoch % self._num_groups * self.total_samples


class _FullPassSampler(MegatronPretrainingSampler):
    """Yields complete passes over all samples. Indices from total_samples upwards denote padding of the last round."""

    def __init__(self, total_samples: int, **layout: int) -> None:
        super().__init__(total_samples, 0, **layout)
        self._padded = -(-total_samples // self._stride) * self._stride

    def _sample(self, number: int) -> int:
        return number % self._padded


def _full_pass_sampler(dataset: Dataset[Any], plan: BatchPlan) -> MegatronPretrainingSampler:
    return _FullPassSampler(len(dataset), **_layout(plan))  # type: ignore[arg-type]


def _sampler(
    dataset: Dataset[Any], plan: BatchPlan, *, consumed_samples: int, order: SplitOrder | None
) -> MegatronPretrainingSampler:
    order = order or SplitOrder(plan.seed, planned=0)
    total_samples: int = order.length or len(dataset)  # type: ignore[arg-type]
    consumed = consumed_samples - order.origin
    if plan.dataloader_type == "cyclic":
        # A blend that is longer than planned has further samples.
        num_groups = 1 if order.sources is None else len(dataset) // total_samples  # type: ignore[arg-type]
        return MegatronPretrainingRandomSampler(
            total_samples, consumed, seed=order.seed, num_groups=num_groups, **_layout(plan)
        )
    return MegatronPretrainingSampler(total_samples, consumed, **_layout(plan))


def _layout(plan: BatchPlan) -> dict[str, int]:
    return {
        "micro_batch_size": plan.micro_batch_size,
        "data_parallel_rank": plan.dp_rank,
        "data_parallel_size": plan.dp_size,
    }


# Validation data may consist of several sets. With --dataloader-type external, the script's iterators are used.
DataIterators = tuple[Iterator[Any] | None, list[Iterator[Any] | None], Iterator[Any] | None]


def stack_samples(samples: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Stacks samples with the same keys into a batch of arrays.

    samples: tensors [S, ...], any dtype, by name. Returns arrays [B, S, ...], same dtype. cu_seqlens, [n_i + 1], int32,
    are joined over the samples to [n + 1].
    """
    # Arrays, because workers send tensors as shared-memory files, which costs milliseconds per batch.
    columns = {key: [np.asarray(sample[key]) for sample in samples] for key in samples[0]}
    return {
        key: join_cumulative_lengths(rows) if key == "cu_seqlens" else np.stack(rows) for key, rows in columns.items()
    }


def _stack_or_pass_on(
    samples: Sequence[Batch] | Exception, *, create_attention_mask: bool
) -> dict[str, np.ndarray] | Exception:
    if isinstance(samples, Exception):
        return samples
    batch = stack_samples(samples)
    # Created for the whole batch, because the masks of single samples would have to be copied into the batch.
    if create_attention_mask and "cu_seqlens" in batch:
        batch["attention_mask"] = document_masks(batch.pop("cu_seqlens"), seq_length=batch["tokens"].shape[1])
    return batch


def build_train_valid_test_datasets(
    config: DataConfig,
    tokenizer: Vocabulary,
    *,
    sizes: Sequence[int | None],
    seed: int,
    group: dist.ProcessGroup | None = None,
) -> Datasets:
    """Builds the [train, valid, test] datasets that the data flags select. Collective over `group`.

    sizes: number of samples of each dataset; None means one epoch, and 0 means no dataset. Raises ValueError or OSError
    for an invalid file or flag. If any rank fails, every rank raises.
    """
    cls = MockGPTDataset if config.mock_data else GPTDataset
    with all_ranks_agree(group):  # the file of --data-args-path may be missing on one node
        dataset_config = gpt_dataset_config(config, tokenizer, seed=seed)
    return BlendedMegatronDatasetBuilder(cls, sizes, lambda: True, dataset_config, group=group).build()


def gpt_dataset_config(config: DataConfig, tokenizer: Vocabulary, *, seed: int) -> GPTDatasetConfig:
    """Builds the GPTDatasetConfig from the data flags. Raises ValueError if no flag selects data."""
    if config.seq_length is None:
        raise ValueError("--seq-length is missing: must be the number of tokens per sample")
    if not config.names_data():
        raise ValueError("there is no data: give --data-path PREFIX of a .bin/.idx pair, or --mock-data")
    return GPTDatasetConfig(
        random_seed=seed,
        sequence_length=config.seq_length,
        blend=config.read_blend(),
        blend_per_split=config.blend_per_split(),
        split=config.split,
        path_to_cache=config.data_cache_path,
        mmap_bin_files=config.mmap_bin_files,
        fast_cache_load=config.dataloader_fast_cache_load,
        defer_npy_index_mmap=config.dataloader_defer_npy_index_mmap,
        tokenizer=tokenizer,
        reset_position_ids=config.reset_position_ids,
        reset_attention_mask=config.reset_attention_mask,
        eod_mask_loss=config.eod_mask_loss,
        create_attention_mask=False,  # the iterators create masks of whole batches
        full_validation=config.full_validation,
        multiple_validation_sets=config.multiple_validation_sets,
    )


def build_data_iterators(datasets: Sequence[Any], plan: BatchPlan) -> DataIterators:
    """Builds iterators over [train, valid, test] datasets, as returned by a dataset provider.

    valid: one dataset, a list of datasets, or None; the second result contains one iterator for each dataset. The
    iterator of a dataset that is None is None. Validation of each set continues at consumed_valid_samples, so that
    successive evaluations use successive samples, also in a resumed run. With plan.full_validation, every evaluation
    reads all samples. With --dataloader-type external, the "datasets" are iterators, which are returned unchanged.
    """
    train, valid, test = datasets
    return (
        _iterator(train, plan, consumed_samples=plan.consumed_train_samples, order=plan.order(Split.train)),
        [
            _iterator(
                one,
                plan,
                consumed_samples=plan.consumed_valid_samples,
                order=plan.order(Split.valid, number),
                full_passes=plan.full_validation,
            )
            for number, one in enumerate(validation_sets(valid))
        ],
        _iterator(test, plan, consumed_samples=0, order=plan.order(Split.test)),
    )


def validation_sets(valid: Any) -> list[Any]:
    """Returns the validation sets as a list. valid: one dataset, a list or tuple of datasets, or None."""
    if valid is None:
        return []
    return list(valid) if isinstance(valid, (list, tuple)) else [valid]


def _iterator(
    dataset: Any, plan: BatchPlan, *, consumed_samples: int, order: SplitOrder, full_passes: bool = False
) -> Iterator[Any] | None:
    if dataset is None:
        return None
    if plan.dataloader_type == "external":
        return _external_iterator(dataset)
    return DataIterator(dataset, plan, consumed_samples=consumed_samples, full_passes=full_passes, order=order)


def _external_iterator(given: Any) -> Iterator[Any]:
    """Returns a script's iterator unchanged, or creates an iterator over an iterable such as a DataLoader."""
    if not isinstance(given, Iterable) or isinstance(given, (list, tuple)):
        raise ValueError(
            f"--dataloader-type is external and the dataset provider returned {type(given).__name__}: must be an "
            "iterator over micro-batches, a DataLoader, or None"
        )
    return iter(given)


class _Samples(Dataset[Batch]):
    """Wraps a dataset and returns data errors as values instead of raising them.

    If a worker raised the error, DataLoader would convert it to the text of a traceback, which hides the message.
    """

    def __init__(self, dataset: Dataset[Batch], *, padded_by: int = 1) -> None:
        """padded_by: number of samples of which a whole multiple is read; samples after the last one are padding."""
        self.dataset = dataset
        self._size: int = len(dataset)  # type: ignore[arg-type]
        # All batches of an iterator have the same keys, because they may be inputs of captured graphs.
        self._is_padded = self._size % padded_by > 0
        self.has_padding_mask = self._is_padded or marks_padding(dataset)

    def __getitems__(self, indices: Sequence[int]) -> list[Batch] | Exception:
        try:
            return [self._sample(index) if index < self._size else self._padding() for index in indices]
        except (DataError, OSError) as error:
            return error

    def _sample(self, index: int) -> Batch:
        sample = self.dataset[index]
        if self._is_padded and PADDING_MASK not in sample and "loss_mask" in sample:
            sample = {**sample, PADDING_MASK: _filled(sample["loss_mask"], False)}
        return sample

    def _padding(self) -> Batch:
        """Returns a sample of padding with a loss_mask of 0, which fills the last round of a full pass."""
        sample = self.dataset[self._size - 1]
        if "loss_mask" not in sample:
            raise DataError(
                f"--full-validation pads a validation set of {self._size} samples to whole micro-batches, but its "
                "samples have no loss_mask to mark padding: add a loss_mask, or use a set whose size is divisible"
            )
        loss_mask = torch.as_tensor(sample["loss_mask"])
        return {**sample, "loss_mask": torch.zeros_like(loss_mask), PADDING_MASK: _filled(loss_mask, True)}


def _filled(like: torch.Tensor, value: bool) -> torch.Tensor:
    return torch.full_like(torch.as_tensor(like), value, dtype=torch.bool)


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class _PrepareWorker:
    """Worker initialization that makes workers ignore signals sent to the whole job.

    On Ctrl-C or SIGTERM the trainer finishes its step and saves, for which it still requires its workers. They exit
    with the iterator, on SIGTERM after `let_go`, or when the trainer process has ended for any reason.
    """

    def __init__(self) -> None:
        self._trainer = os.getpid()
        # Shared memory without a lock, because a signal handler reads it.
        self._may_end = multiprocessing.RawValue("b", 0)

    def __call__(self, worker_id: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, self._on_terminate)
        # DataLoader workers check for their parent only while they wait for work, and the thread of a queue can block
        # the exit of a process forever.
        if sys.platform == "linux":
            threading.Thread(target=self._end_with_trainer, daemon=True).start()

    def let_go(self) -> None:
        self._may_end.value = 1

    def _end_with_trainer(self) -> None:
        try:
            trainer = os.pidfd_open(self._trainer)
        except ProcessLookupError:
            os._exit(1)
        # The descriptor is readable when the process has ended. Its process id may already have been reused.
        ended = select.poll()
        ended.register(trainer, select.POLLIN)
        if os.getppid() == self._trainer:
            ended.poll()
        os._exit(1)

    def _on_terminate(self, number: int, frame: FrameType | None) -> None:
        if self._may_end.value:
            os._exit(0)
