"""The order of a run's samples: what fixes it, how a checkpoint stores it, and how a resumed run continues it.

The datasets build the arrays; no files are read here.

[Note: data order of a run] The order belongs to the run. Its first process fixes it by the seed, the documents, the
weights and the planned numbers of samples, all of which are in SplitOrder. A resumed run continues it, whatever its own
seed and length are: samples beyond the planned ones follow in further epochs ([Note: appended epochs] in
gpt_indices.py), and blends continue their greedy choice. If the resumed run has other data, weights or sequence
lengths, a new order starts at its data position. Sets that both have continue after their samples that were read.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

# Dataset number and index in that dataset of each sample.
BlendOrder = tuple[np.ndarray, np.ndarray]
# Number of samples for which shares are computed together; fits a core's cache for a few hundred datasets.
_STEPS_AT_ONCE = 4096


@dataclass(frozen=True)
class SourceOrder:
    """Order of one data set of a split.

    name: the last part of its prefix, for messages. facts: numbers that identify its documents. weight: its weight in
    the blend. planned: number of samples that fixed its order; 0 means one epoch. first: its next sample at the start
    of the split's order.
    """

    name: str
    facts: Mapping[str, int]
    weight: float
    planned: int = 0
    first: int = 0


@dataclass(frozen=True)
class SplitOrder:
    """Order of the samples of a training, validation or test set, as far as a resumed run must know it.

    planned: number of samples for which the order was planned, from `start`. sources: its data sets; None if unknown,
    in orders reconstructed from the arguments of an old checkpoint. seq_length: tokens per sample; None if unknown.
    start: number of samples of the run before this order. retired: earlier data sets that are not read any more.
    length: size of a dataset that a script built without BlendedMegatronDatasetBuilder, or that is read in cyclic
    order. cyclic: whether it is read in --dataloader-type cyclic. notes: differences from the checkpoint, for the log;
    not stored. choices: the result of planned_choices for the sources, while the datasets are built.
    """

    seed: int
    planned: int
    seq_length: int | None = None
    sources: tuple[SourceOrder, ...] | None = None
    start: int = 0
    retired: tuple[SourceOrder, ...] = ()
    length: int | None = None
    cyclic: bool = False
    notes: tuple[str, ...] = ()
    choices: np.ndarray | None = field(default=None, compare=False, repr=False)

    @property
    def origin(self) -> int:
        """The sample of the run that is sample 0 of the dataset."""
        # The samples of a blend are counted from the start, those of a single data set from its first one.
        is_single = self.sources is not None and len(self.sources) == 1
        return self.start - self.sources[0].first if self.sources is not None and is_single else self.start

    def indices(self, size: int) -> BlendOrder:
        """Returns the number of the data set of each of `size` samples from `start`, and the index in that set."""
        assert self.sources is not None, "the data sets are known once the datasets are built"
        weights = [one.weight for one in self.sources]
        numbers, within = continued_blend_indices(weights, size, planned=self.planned, choices=self.choices)
        return numbers, within + np.array([one.first for one in self.sources], dtype=np.int64)[numbers]

    def sources_after(self, consumed: int) -> tuple[SourceOrder, ...]:
        """Returns all data sets, with `first` as it is after `consumed` samples of the run."""
        if self.sources is None or self.cyclic:
            return ()
        counts = np.bincount(self.indices(max(consumed - self.start, 0))[0], minlength=len(self.sources)).tolist()
        read = (replace(one, first=one.first + count) for one, count in zip(self.sources, counts))
        return (*read, *self.retired)

    def to_json(self) -> dict[str, Any]:
        """Returns the order as JSON values."""
        sources = None if self.sources is None else [vars(one) | {"facts": dict(one.facts)} for one in self.sources]
        retired = [vars(one) | {"facts": dict(one.facts)} for one in self.retired]
        stored = {name: value for name, value in vars(self).items() if name not in ("notes", "choices")}
        return {**stored, "sources": sources, "retired": retired}

    @classmethod
    def from_json(cls, values: Any) -> "SplitOrder":
        """Builds the order from the result of to_json. Raises ValueError for other values."""
        if not isinstance(values, Mapping):
            raise ValueError(f"data_order is {values!r:.80}: must contain orders by name")
        for name, least in (("seed", 0), ("planned", 0), ("start", 0)):
            _require_count(name, values.get(name), least=least)
        for name in ("seq_length", "length"):
            if values.get(name) is not None:
                _require_count(name, values[name], least=1)
        if not isinstance(values.get("cyclic"), bool):
            raise ValueError(f"data_order.cyclic is {values.get('cyclic')!r:.80}: must be true or false")
        sources = values.get("sources")
        return cls(
            seed=values["seed"],
            planned=values["planned"],
            seq_length=values.get("seq_length"),
            sources=None if sources is None else _sources_from_json("sources", sources),
            start=values["start"],
            retired=_sources_from_json("retired", values.get("retired", [])),
            length=values.get("length"),
            cyclic=values["cyclic"],
        )


# The orders of training, validation and test data, by the names of Split. Several only for several validation sets.
DataOrder = Mapping[str, tuple[SplitOrder, ...]]


def data_order_to_json(order: DataOrder | None) -> dict[str, Any] | None:
    """Returns the orders of a run as JSON values."""
    return None if order is None else {name: [one.to_json() for one in sets] for name, sets in order.items()}


def data_order_from_json(values: Any) -> DataOrder | None:
    """Builds the orders from the result of data_order_to_json. Raises ValueError for other values."""
    if values is None:
        return None
    if not isinstance(values, Mapping) or not all(isinstance(sets, list) for sets in values.values()):
        raise ValueError(f"data_order is {values!r:.80}: must contain lists of orders for train, valid and test")
    return {name: tuple(map(SplitOrder.from_json, sets)) for name, sets in values.items()}


def _sources_from_json(name: str, values: Any) -> tuple[SourceOrder, ...]:
    if not isinstance(values, list) or not all(isinstance(one, Mapping) for one in values):
        raise ValueError(f"data_order.{name} is {values!r:.80}: must be a list of data sets")
    return tuple(map(_source_from_json, values))


def _source_from_json(values: Mapping[str, Any]) -> SourceOrder:
    facts, weight = values.get("facts"), values.get("weight")
    if not isinstance(facts, Mapping) or not isinstance(values.get("name"), str):
        raise ValueError(f"data_order: a data set is {dict(values)!r:.80}: must have a name and facts")
    if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not 0 <= weight < math.inf:
        raise ValueError(f"data_order.weight is {weight!r:.80}: must be a number, 0 or more")
    for name in ("planned", "first"):
        _require_count(name, values.get(name), least=0)
    for name, number in facts.items():
        _require_count(f"facts.{name}", number, least=0)
    return SourceOrder(values["name"], dict(facts), float(weight), values["planned"], values["first"])


def _require_count(name: str, value: Any, *, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 63:
        raise ValueError(f"data_order.{name} is {value!r:.80}: must be an integer, at least {least}")


@dataclass(frozen=True, kw_only=True)
class SplitSize:
    """Number of samples that a run reads from a split, with the order to continue.

    size: samples of the dataset, counted from the start of the run; None means one epoch. planned: number of samples
    that fixes the order of a new run. consumed: samples that the run has read. stored: the checkpoint's orders.
    """

    size: int | None
    planned: int | None
    consumed: int = 0
    stored: tuple[SplitOrder, ...] = ()
    cyclic: bool = False


class SplitSizes(list[int | None]):
    """Numbers of train, valid and test samples, with the order in which the run reads them.

    It is a list, because scripts pass the numbers that a dataset provider receives to BlendedMegatronDatasetBuilder.
    """

    def __init__(self, sizes: Sequence[SplitSize]) -> None:
        super().__init__(one.size for one in sizes)
        self.splits = tuple(sizes)


def split_sizes_of(sizes: Sequence[int | None]) -> SplitSizes:
    """Returns the sizes with their order. Plain numbers are the sizes of a new run."""
    return sizes if isinstance(sizes, SplitSizes) else SplitSizes([SplitSize(size=n, planned=n) for n in sizes])


# Section: begin or continue an order.

# Maps the number of a data set and a number of samples to the number of samples of the dataset that would be built.
Capacity = Callable[[int, int], int]


def begin_order(
    sources: Sequence[SourceOrder], planned: int, *, seed: int, seq_length: int, capacity: Capacity
) -> SplitOrder:
    """Fixes the order of a new run of `planned` samples. sources: with names, facts and weights."""
    order = SplitOrder(seed, planned, seq_length, tuple(sources))
    return _with_planned_sources(order, capacity, known=())


def _with_planned_sources(order: SplitOrder, capacity: Capacity, *, known: Sequence[int]) -> SplitOrder:
    """Plans the samples of each data set, except for the numbers in `known`, whose order is fixed."""
    assert order.sources is not None
    choices, counts = planned_choices([one.weight for one in order.sources], order.planned)
    finals = np.bincount(choices, minlength=len(order.sources)).tolist()
    planned = []
    for number, (one, count, final) in enumerate(zip(order.sources, counts.tolist(), finals)):
        if number in known or not final:
            planned.append(one)
            continue
        # The samples of data sets that are not read are shared by the others, which may require one more sample.
        planned.append(replace(one, planned=final if final > capacity(number, count) else count))
    return replace(order, sources=tuple(planned), choices=choices)


def continue_order(
    stored: Sequence[SplitOrder],
    split: SplitSize,
    *,
    set_number: int,
    sets: Sequence[Sequence[SourceOrder]],
    seq_length: int,
    capacity: Capacity,
) -> SplitOrder:
    """Continues the order of a checkpoint, or starts a new order whose notes name the differences.

    stored: the orders of the split's sets, at least one. sets: the sources of all sets of the split, several only for
    several validation sets. set_number: the one to continue.
    """
    sources, num_sets = sets[set_number], len(sets)
    same = [one for one in stored if one.sources is not None and not _differences(one, sources, split, seq_length)]
    by_number = stored[set_number] if len(stored) == num_sets else stored[0]
    order = same[0] if same else by_number
    if order.sources is None and order.seq_length in (None, seq_length) and order.cyclic == split.cyclic:
        begun = begin_order(sources, order.planned, seed=order.seed, seq_length=seq_length, capacity=capacity)
        return replace(begun, cyclic=order.cyclic)
    if same:
        matched = match_sources(order.sources or (), sources)
        named = [sources[number].name for number in matched if number is not None]
        known = (replace(one, name=name) for one, name in zip(order.sources or (), named))
        return replace(order, sources=tuple(known))
    if len(stored) == num_sets == 1:
        notes = _differences(order, sources, split, seq_length)
    else:
        notes = _differences_of_sets(stored, order, sources, sets, split, seq_length)
    return _start_again(stored, order, sources, split, notes=notes, seq_length=seq_length, capacity=capacity)


def _start_again(
    stored: Sequence[SplitOrder],
    order: SplitOrder,
    sources: Sequence[SourceOrder],
    split: SplitSize,
    *,
    notes: Sequence[str],
    seq_length: int,
    capacity: Capacity,
) -> SplitOrder:
    # Samples are counted in another unit, or read in another order, so the read ones are unknown.
    are_unknown = split.cyclic or order.seq_length not in (None, seq_length)
    # With several validation sets, each of them has read its own samples.
    carried = [] if are_unknown else [source for one in stored for source in one.sources_after(split.consumed)]
    matched = match_sources(sources, carried)
    begun = [
        one if number is None else replace(one, planned=carried[number].planned, first=carried[number].first)
        for one, number in zip(sources, matched)
    ]
    kept = {number for number in matched if number is not None}
    new = SplitOrder(
        order.seed,
        max((split.size or 0) - split.consumed, 0),
        seq_length,
        tuple(begun),
        start=split.consumed,
        retired=tuple(one for number, one in enumerate(carried) if number not in kept),
        cyclic=split.cyclic,
        notes=tuple(notes),
    )
    known = [place for place, number in enumerate(matched) if number is not None]
    return _with_planned_sources(new, capacity, known=known)


def match_sources(wanted: Sequence[SourceOrder], among: Sequence[SourceOrder]) -> list[int | None]:
    """Returns, for each data set, the number of the same set in `among`, each used once, or None.

    Copies of a set are matched by their weights, because a blend may list them in another order.
    """
    places: dict[str, list[int]] = {}
    for number in _by_weight(among):
        places.setdefault(json.dumps(dict(among[number].facts), sort_keys=True), []).append(number)
    found: dict[int, int] = {}
    for number in _by_weight(wanted):
        numbers = places.get(json.dumps(dict(wanted[number].facts), sort_keys=True))
        if numbers:
            found[number] = numbers.pop(0)
    return [found.get(number) for number in range(len(wanted))]


def _by_weight(sources: Sequence[SourceOrder]) -> list[int]:
    return sorted(range(len(sources)), key=lambda number: sources[number].weight)


def _differences(order: SplitOrder, sources: Sequence[SourceOrder], split: SplitSize, seq_length: int) -> list[str]:
    """Describes why `sources` do not continue `order`. Returns an empty list if they do."""
    found = []
    if order.cyclic != split.cyclic:
        here, there = (("cyclic" if cyclic else "single") for cyclic in (split.cyclic, order.cyclic))
        found.append(f"--dataloader-type is {here} here, {there} in the checkpoint")
    if order.seq_length not in (None, seq_length):
        return [*found, f"--seq-length is {seq_length} here, {order.seq_length} in the checkpoint"]
    before = order.sources or ()
    matched = match_sources(before, sources)
    for one, number in zip(before, matched):
        if number is None:
            found.append(f"the documents of {one.name} are missing or changed")
            continue
        share_before, share = _share(one, before), _share(sources[number], sources)
        # Scaled weights are the same shares up to rounding. The order continues with the stored weights.
        if not math.isclose(share_before, share, rel_tol=1e-9):
            found.append(f"the share of {one.name} is {share:.4g} here, {share_before:.4g} in the checkpoint")
    names = [one.name for number, one in enumerate(sources) if number not in matched]
    return found + [f"the documents of {name} are new" for name in names]


def _differences_of_sets(
    stored: Sequence[SplitOrder],
    order: SplitOrder,
    sources: Sequence[SourceOrder],
    sets: Sequence[Sequence[SourceOrder]],
    split: SplitSize,
    seq_length: int,
) -> list[str]:
    """Describes why `sources` continue none of several stored orders, or are one of several sets."""
    found = _differences(replace(order, sources=()), (), split, seq_length)
    if found:
        return found
    before = [one for each in stored for one in each.sources or ()]
    matched = match_sources(before, [one for each in sets for one in each])
    found = [f"the documents of {one.name} are missing or changed" for one, n in zip(before, matched) if n is None]
    matched = match_sources(sources, before)
    found += [f"the documents of {one.name} are new" for one, number in zip(sources, matched) if number is None]
    return found or ["the validation sets are blended on one side and separate on the other"]


def _share(source: SourceOrder, among: Sequence[SourceOrder]) -> float:
    return source.weight / sum(one.weight for one in among)


# Section: the data set of each sample of a blend.


def blend_indices(weights: Sequence[float], size: int) -> BlendOrder:
    """Returns the dataset number (int16) of each of `size` samples, and the index in that dataset (int64).

    As in Megatron, each sample is taken from the dataset that is furthest behind its share; ties go to the first
    dataset. Takes about a second per million samples, regardless of the number of datasets.
    """
    dataset_index = _GreedyChoices(weights).take(size)
    return dataset_index, _number_within_each(dataset_index, num_datasets=len(weights))


def continued_blend_indices(
    weights: Sequence[float], size: int, *, planned: int, choices: np.ndarray | None = None
) -> BlendOrder:
    """Returns the order of blend_indices for a run that was planned for `planned` samples and now reads `size`.

    Every `size` has the same first samples. choices: the dataset numbers of planned_choices, if already computed.
    """
    if choices is None:
        choices = planned_choices(weights, planned)[0]
    if size > planned:
        continued = _GreedyChoices(weights)
        continued.count(choices)
        choices = np.concatenate([choices, continued.take(size - planned)])
    return choices[:size], _number_within_each(choices[:size], num_datasets=len(weights))


def planned_choices(weights: Sequence[float], planned: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the dataset number of each planned sample: [planned], int16.

    If a dataset has no sample among the planned ones, its share is distributed to the others, because its files are not
    read. It takes part in the samples after them. Also returns the counts before that: [datasets], int64.
    """
    dataset_index = _GreedyChoices(weights).take(planned)
    counts = np.bincount(dataset_index, minlength=len(weights))
    used = np.flatnonzero(counts)
    if 0 < len(used) < len(weights):
        among_used = _GreedyChoices([weights[number] for number in used.tolist()])
        dataset_index = used[among_used.take(planned)].astype(np.int16)
    return dataset_index, counts


class _GreedyChoices:
    """Chooses the dataset of each next sample: the one that is furthest behind its share."""

    def __init__(self, weights: Sequence[float]) -> None:
        shares = np.asarray(weights, dtype=np.float64)
        self._shares = shares / shares.sum()
        # inf excludes datasets of weight 0, which would otherwise win ties at 0 when no dataset is behind its share.
        self._given = np.where(self._shares > 0, 0.0, np.inf)
        self._taken = 0

    def take(self, size: int) -> np.ndarray:
        """Returns the dataset numbers of the next `size` samples: [size], int16."""
        if len(self._shares) == 1:
            self._given += size
            self._taken += size
            return np.zeros(size, dtype=np.int16)
        given, behind = self._given, np.empty(len(self._shares))
        dataset_index = np.empty(size, dtype=np.int16)
        for first in range(0, size, _STEPS_AT_ONCE):
            begin, end = self._taken + first, self._taken + min(first + _STEPS_AT_ONCE, size)
            steps = np.maximum(np.arange(begin, end, dtype=np.float64), 1.0)
            chosen = []
            for due in steps[:, None] * self._shares:
                np.subtract(due, given, out=behind)
                dataset = behind.argmax()
                given[dataset] += 1
                chosen.append(dataset)
            dataset_index[first : first + len(chosen)] = chosen
        self._taken += size
        return dataset_index

    def count(self, dataset_index: np.ndarray) -> None:
        """Replaces the choices so far. dataset_index: [n], int16, the dataset number of each sample."""
        counts = np.bincount(dataset_index, minlength=len(self._shares))
        self._given = np.where(self._shares > 0, counts, np.inf).astype(np.float64)
        self._taken = len(dataset_index)


def _number_within_each(dataset_index: np.ndarray, *, num_datasets: int) -> np.ndarray:
    """Returns, for each sample, the number of earlier samples from the same dataset: [size], int64."""
    counts = np.bincount(dataset_index, minlength=num_datasets)
    firsts = np.repeat(np.cumsum(counts) - counts, counts)
    numbers = np.empty(len(dataset_index), dtype=np.int64)
    numbers[np.argsort(dataset_index, kind="stable")] = np.arange(len(dataset_index)) - firsts
    return numbers
