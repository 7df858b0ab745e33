"""The order of a run's samples in plain Python, on small corpora with unique tokens. Contains no tests.

A sample is identified by its first token. Only the writer of files and NumPy's generator are shared with the product.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

S = 8
# Documents of each corpus. Token t of a corpus appears once in it.
CORPORA = {"a": [13, 9, 30, 1, 22], "b": [40, 7, 18, 25], "c": [11, 11, 11, 50, 5, 3], "d": [60, 60]}
SEED = 5


def write(folder: Path, names: Sequence[str] = tuple(CORPORA)) -> None:
    for number, name in enumerate(CORPORA):
        if name in names:
            tokens = np.arange(sum(CORPORA[name]), dtype=np.uint16) + 200 * number
            with IndexedDatasetBuilder(f"{folder / name}.bin", dtype=np.uint16) as builder:
                builder.add_concatenated(tokens, CORPORA[name])
                builder.finalize(f"{folder / name}.idx")


def plain_source(name: str, planned: int, count: int, seed: int = SEED, seq_length: int = S) -> list[int]:
    """Returns the first tokens of the first `count` samples of a corpus whose order was planned for `planned`."""
    documents, starts = CORPORA[name], np.cumsum([0, *CORPORA[name]]).tolist()
    per_epoch, first = sum(documents), 200 * list(CORPORA).index(name)
    epochs = 1
    while epochs * per_epoch < planned * seq_length + 1:
        epochs += 1
    ends = [(epoch * per_epoch - 1) // seq_length for epoch in range(1, 200)]
    before_last = ends[epochs - 2] if epochs > 1 else 0
    apart = epochs > 1 and planned - before_last < int(0.8 * ends[0])
    generator = np.random.RandomState(seed)
    groups = [(epochs - 1, generator), (1, generator)] if apart else [(epochs, generator)]
    borders = [before_last, ends[epochs - 1]] if apart else [ends[epochs - 1]]
    while borders[-1] < count:
        groups.append((1, np.random.RandomState([seed, epochs])))
        borders.append(ends[epochs])
        epochs += 1
    stream: list[int] = []
    for repeats, one in groups[: len(groups)]:
        part = np.array(list(range(len(documents))) * repeats, dtype=np.int32)
        one.shuffle(part)
        for document in part:
            stream += range(first + starts[document], first + starts[document + 1])
    order: list[int] = []
    for begin, end, (_, one) in zip([0, *borders], borders, groups):
        part = np.arange(begin, end)
        one.shuffle(part)
        order += part.tolist()
    return [stream[sample * seq_length] for sample in order[:count]]


def plain_capacity(name: str, planned: int) -> int:
    """Returns the number of samples of whole epochs that contain the planned samples."""
    tokens = sum(CORPORA[name])
    return (-(-(planned * S + 1) // tokens) * tokens - 1) // S


def plain_greedy(
    weights: Sequence[float], size: int, given_counts: list[int] | None = None, done: int = 0
) -> list[int]:
    shares, counts, chosen = np.array(weights) / np.sum(weights), given_counts or [0] * len(weights), []
    for i in range(done, done + size):
        behind = [share * max(i, 1) - count for share, count in zip(shares, counts)]
        best = behind.index(max(behind))
        counts[best] += 1
        chosen.append(best)
    return chosen


def plain_blend(weights: Sequence[float], planned: int, size: int) -> list[int]:
    """Returns the source of each sample. Sources without a planned sample leave theirs to the others."""
    chosen = plain_greedy(weights, planned)
    used = [n for n in range(len(weights)) if n in chosen]
    chosen = [used[n] for n in plain_greedy([weights[n] for n in used], planned)]
    counts = [chosen.count(n) for n in range(len(weights))]
    return (chosen + plain_greedy(weights, max(size - planned, 0), counts, planned))[:size]


@dataclass
class PlainRun:
    """A run of several processes in plain Python: the first token of each sample it reads."""

    blend: dict[str, float]
    planned: int
    seed: int = SEED
    start: int = 0
    offsets: dict[str, int] = field(default_factory=dict)
    planned_of: dict[str, int] = field(default_factory=dict)

    def read(self, begin: int, end: int) -> list[int]:
        names, weights = list(self.blend), list(self.blend.values())
        chosen = plain_blend(weights, self.planned, end - self.start) if len(names) > 1 else [0] * (end - self.start)
        within = [0] * len(names)
        plans = dict.fromkeys(names, self.planned)
        if len(names) > 1:
            # The order of a set is planned with the samples of sets that are not read only if it cannot do without.
            counts = [plain_greedy(weights, self.planned).count(number) for number in range(len(names))]
            finals = [plain_blend(weights, self.planned, self.planned).count(number) for number in range(len(names))]
            plans = {
                name: final if final > plain_capacity(name, count) else count
                for name, count, final in zip(names, counts, finals)
            }
        found = []
        for number in chosen:
            name = names[number]
            place = self.offsets.get(name, 0) + within[number]
            planned = self.planned_of.get(name, plans[name])
            found.append(plain_source(name, planned, place + 1, self.seed)[place])
            within[number] += 1
        return found[begin - self.start :]
