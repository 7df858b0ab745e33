"""Three index arrays that define a fixed, shuffled list of samples of a corpus. Pure functions, without files.

A part of a corpus is read as one long stream: its documents in shuffled order, epoch after epoch. Sample i consists of
the S + 1 tokens from stream position i * S. Its last token is the first token of sample i + 1. Orders and arrays are
identical to Megatron's for the same seed.
  document index [epochs * D]: the document at each place of the stream.
  sample index [N + 1, 2]: (place, offset in the document at that place) of stream position i * S.
  shuffle index [N]: the sample that is returned for index i of the dataset.

[Note: appended epochs] Megatron's order depends on the planned number of samples, because that number decides which
epochs are shuffled together. A longer run must not reorder samples that were already read. It therefore keeps the
arrays of the planned number and appends epochs to the same stream. Appended epoch e is shuffled separately, by a
generator that depends only on the seed and e, so every later length has the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# If less than this share of the last epoch's samples is used, the last epoch is shuffled separately and follows the
# others. Otherwise its few documents would be repeated early in training.
SEPARATE_EPOCH_BELOW = 0.80


@dataclass(frozen=True)
class GPTIndices:
    """The three index arrays, which the top of this file describes.

    document: [epochs * D], int32. sample: [N + 1, 2], int32 or int64. shuffle: [N], uint32 or int64.
    """

    document: np.ndarray
    sample: np.ndarray
    shuffle: np.ndarray


@dataclass(frozen=True)
class EpochPlan:
    """Number of epochs and samples of an index.

    num_planned_samples: samples of the planned epochs. num_samples_before_last: samples of all planned epochs except
    the last. separate_last: whether the last planned epoch is shuffled separately. appended: for each appended epoch,
    the number of samples up to its end.
    """

    num_epochs: int
    num_samples: int
    num_planned_samples: int
    num_samples_before_last: int
    separate_last: bool
    appended: tuple[int, ...] = ()

    @property
    def num_planned_epochs(self) -> int:
        """Number of epochs before the appended ones."""
        return self.num_epochs - len(self.appended)


def plan_epochs(
    tokens_per_epoch: int, seq_length: int, *, num_samples: int | None, planned_samples: int | None = None
) -> EpochPlan:
    """Plans the smallest number of epochs that yields at least `num_samples` samples. None means one epoch.

    planned_samples: the number of samples that fixed the order; epochs beyond it are appended. None means num_samples.
    Raises ValueError if an epoch is too short for a sample.
    """
    if tokens_per_epoch <= seq_length:
        raise ValueError(f"{tokens_per_epoch} tokens are too few for one sample of {seq_length} + 1 tokens")
    planned = num_samples if planned_samples is None else planned_samples
    num_epochs = 1 if planned is None else -(-(planned * seq_length + 1) // tokens_per_epoch)
    per_epoch = (tokens_per_epoch - 1) // seq_length
    before_last = ((num_epochs - 1) * tokens_per_epoch - 1) // seq_length if num_epochs > 1 else 0
    wanted_from_last = (planned or 0) - before_last
    with_appended = max(num_epochs, -(-((num_samples or 0) * seq_length + 1) // tokens_per_epoch))
    ends = [(epochs * tokens_per_epoch - 1) // seq_length for epochs in range(num_epochs, with_appended + 1)]
    return EpochPlan(
        num_epochs=with_appended,
        num_samples=ends[-1],
        num_planned_samples=ends[0],
        num_samples_before_last=before_last,
        separate_last=num_epochs > 1 and wanted_from_last < int(SEPARATE_EPOCH_BELOW * per_epoch),
        appended=tuple(ends[1:]),
    )


def build_gpt_indices(
    lengths: np.ndarray,
    documents: np.ndarray,
    *,
    seq_length: int,
    num_samples: int | None,
    seed: int,
    planned_samples: int | None = None,
) -> GPTIndices:
    """Builds the index arrays of one part of a corpus.

    lengths: number of tokens of every document in the corpus, integers. documents: [D], integers, the documents of the
    part. planned_samples: as in plan_epochs. Raises ValueError if one epoch is too short for a sample.
    """
    tokens = int(lengths[documents].sum(dtype=np.int64))
    plan = plan_epochs(tokens, seq_length, num_samples=num_samples, planned_samples=planned_samples)
    rng = np.random.RandomState(seed)
    # One generator for both arrays of an epoch, as Megatron has one for both arrays of all epochs.
    later = [np.random.RandomState([seed, plan.num_planned_epochs + k]) for k in range(len(plan.appended))]
    document = build_document_index(documents, plan, rng=rng, later=later)
    sample = build_sample_index(lengths, document, seq_length=seq_length, num_samples=plan.num_samples)
    return GPTIndices(document=document, sample=sample, shuffle=build_shuffle_index(plan, rng=rng, later=later))


def check_gpt_indices(
    indices: GPTIndices,
    lengths: np.ndarray,
    *,
    documents: np.ndarray,
    seq_length: int,
    num_samples: int | None,
    planned_samples: int | None = None,
) -> None:
    """Raises ValueError if shapes, dtypes or value ranges of `indices` do not match a result of build_gpt_indices.

    Reads each element once. Does not check the order of elements, because that would require rebuilding the arrays.
    """
    tokens = int(lengths[documents].sum(dtype=np.int64))
    plan = plan_epochs(tokens, seq_length, num_samples=num_samples, planned_samples=planned_samples)
    if indices.sample.shape[1:] != (2,):
        raise ValueError(f"sample index has shape {indices.sample.shape}: must be [N, 2]")
    places = plan.num_epochs * len(documents)
    expected = {
        "document": (indices.document, (places,), "i", int(documents.min()), int(documents.max())),
        "place": (indices.sample[..., 0], (plan.num_samples + 1,), "i", 0, places - 1),
        "offset": (indices.sample[..., 1], (plan.num_samples + 1,), "i", 0, int(lengths.max())),
        "shuffle": (indices.shuffle, (plan.num_samples,), "ui", 0, plan.num_samples - 1),
    }
    for name, (array, shape, kinds, least, most) in expected.items():
        if array.shape != shape or array.dtype.kind not in kinds:
            raise ValueError(f"{name} index is {array.dtype} of shape {array.shape}: must be integers of shape {shape}")
        if array.min() < least or array.max() > most:
            raise ValueError(f"{name} index contains {array.min()} to {array.max()}: must be {least} to {most}")


def build_document_index(
    documents: np.ndarray,
    plan: EpochPlan,
    *,
    rng: np.random.RandomState,
    later: Sequence[np.random.RandomState] = (),
) -> np.ndarray:
    """Returns the documents of all epochs in shuffled order: [num_epochs * D], int32.

    With plan.separate_last, the last planned epoch is shuffled separately and follows the others. later: one generator
    for each appended epoch.
    """
    planned = plan.num_planned_epochs
    parts = [(planned - 1, rng), (1, rng)] if plan.separate_last else [(planned, rng)]
    shuffled = []
    for num_epochs, generator in [*parts, *((1, generator) for generator in later)]:
        part = np.tile(documents.astype(np.int32), num_epochs)
        generator.shuffle(part)
        shuffled.append(part)
    return np.concatenate(shuffled)


def build_sample_index(
    lengths: np.ndarray, document_index: np.ndarray, *, seq_length: int, num_samples: int
) -> np.ndarray:
    """Returns (place, offset) of the stream positions 0, S, 2S ...: [num_samples + 1, 2], int32 or int64.

    lengths: number of tokens of every document in the corpus, integers. document_index: [places], integers.
    """
    ends = np.cumsum(lengths[document_index], dtype=np.int64)
    small = max(len(document_index), int(lengths.max(initial=0))) < np.iinfo(np.int32).max
    index = np.empty((num_samples + 1, 2), dtype=np.int32 if small else np.int64)
    # Number of positions before the end of each document. An empty document repeats the previous count and is skipped.
    counts = np.minimum(-(-ends // seq_length), num_samples + 1)
    places = np.repeat(np.arange(len(ends)), np.diff(counts, prepend=0))
    # Megatron's first entry is the first document even if it is empty, which yields the same tokens.
    places[0] = 0
    index[:, 0] = places
    starts = ends - lengths[document_index]
    index[:, 1] = np.arange(num_samples + 1, dtype=np.int64) * seq_length - starts[places]
    return index


def build_shuffle_index(
    plan: EpochPlan, *, rng: np.random.RandomState, later: Sequence[np.random.RandomState] = ()
) -> np.ndarray:
    """Returns all samples in shuffled order: [num_samples], uint32 or int64.

    With plan.separate_last, the last planned epoch's samples are shuffled separately and follow the others. later: the
    generators of the appended epochs, after build_document_index.
    """
    dtype = np.uint32 if plan.num_samples < np.iinfo(np.uint32).max - 1 else np.int64
    order = np.arange(plan.num_samples, dtype=dtype)
    planned = plan.num_planned_samples
    border = plan.num_samples_before_last if plan.separate_last else planned
    rng.shuffle(order[:border])
    rng.shuffle(order[border:planned])
    for generator, begin, end in zip(later, [planned, *plan.appended], plan.appended):
        generator.shuffle(order[begin:end])
    return order
