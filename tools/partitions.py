"""Splits the input of a tokenization into partitions, and stores finished partitions in a folder.

Partitions are encoded one after the other, so that an interrupted run can be continued. This file encodes no documents.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from megatron.core.datasets.table_files import Columns
from megatron.core.datasets.text_files import RawDocument, can_be_cut, read_raw_documents
from megatron.core.files import replaced_file

PLAN, LOCK = "plan.json", "lock"


@dataclass(frozen=True)
class Piece:
    """The documents of a file that start in bytes `begin` to `end`. end: None means the end of the file."""

    path: Path
    begin: int = 0
    end: int | None = None


def cut(files: Sequence[Path], count: int) -> list[list[Piece]]:
    """Splits files into `count` partitions of about the same size in bytes, in file order. Some may be empty.

    Compressed, .txt and .arrow files cannot be split. They belong to the partition in which they start.
    """
    sizes = [path.stat().st_size for path in files]
    total = max(1, sum(sizes))
    partitions: list[list[Piece]] = [[] for _ in range(count)]
    start = 0
    for path, size in zip(files, sizes):
        first, last = (min(count - 1, place * count // total) for place in (start, start + max(0, size - 1)))
        if not can_be_cut(path) or first == last:
            partitions[first].append(Piece(path))
        else:
            borders = [0, *(-(-number * total // count) - start for number in range(first + 1, last + 1)), None]
            for number, begin, end in zip(range(first, last + 1), borders, borders[1:]):
                partitions[number].append(Piece(path, begin or 0, end))
        start += size
    return partitions


def documents(pieces: Sequence[Piece], columns: Columns) -> Iterator[RawDocument]:
    """Yields the documents of a partition in order."""
    for piece in pieces:
        yield from read_raw_documents(piece.path, columns, begin=piece.begin, end=piece.end)


class Workspace:
    """A folder of finished partitions with a .bin/.idx pair for every name. Only one process may use it at a time.

    Opening it removes partitions that were made with a different `plan` (any JSON value).
    """

    def __init__(self, folder: Path, plan: dict[str, Any], *, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = tuple(names)
        # Normalized like stored JSON: tuples become lists.
        self._plan = json.loads(json.dumps(plan))
        self._lock: TextIO | None = None

    def __enter__(self) -> "Workspace":
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.folder / LOCK, "w", encoding="utf-8")
        try:
            # lockf, because workers would inherit a flock and may briefly outlive a killed parent.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ValueError(f"{self.folder} is in use by another run with the same --output-prefix") from error
        if self._stored(PLAN) != self._plan:
            for path in self.folder.iterdir():
                if path.name != LOCK:
                    path.unlink()
            self._store(PLAN, self._plan)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._lock is not None
        # Deletes results that the next run would discard or does not need.
        if kind is None or not self.finished() or issubclass(kind, ValueError):
            shutil.rmtree(self.folder)
        self._lock.close()

    def prefix(self, part: str, name: str) -> str:
        """Returns the path prefix of the .bin and .idx files of one output of a partition."""
        return str(self.folder / f"{part}.{name}")

    def finish(self, number: int, facts: dict[str, Any]) -> None:
        """Marks a partition whose files are complete as finished, and stores its facts."""
        self._store(f"{number}.json", facts)

    def finished(self) -> dict[int, dict[str, Any]]:
        """Returns the facts of finished, not yet published partitions by number, in order."""
        numbers = sorted(int(path.stem) for path in self.folder.glob("[0-9]*.json"))
        return {number: self._stored(f"{number}.json") for number in numbers if self._is_whole(str(number))}

    def _is_whole(self, part: str) -> bool:
        return all(IndexedDataset.exists(self.prefix(part, name)) for name in self.names)

    def _stored(self, name: str) -> Any:
        path = self.folder / name
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None

    def _store(self, name: str, facts: Any) -> None:
        with replaced_file(self.folder / name) as file:
            file.write(json.dumps(facts).encode())


def publish(pairs: Sequence[tuple[str, str]], *, stale: Sequence[str] = ()) -> None:
    """Moves .bin/.idx pairs to their final names. pairs: (from, to) prefixes.

    The last pair becomes readable last, and no pair before its .bin exists. Between the first and the last move no pair
    is readable under its final name, so that old and new files never mix. stale: prefixes of pairs to delete, because
    they do not match the new ones.
    """
    # The pair that becomes readable last becomes unreadable first.
    for prefix in (*(target for _, target in reversed(pairs)), *stale):
        Path(get_idx_path(prefix)).unlink(missing_ok=True)
    for prefix in stale:
        Path(get_bin_path(prefix)).unlink(missing_ok=True)
    for path_of in (get_bin_path, get_idx_path):
        for source, target in pairs:
            os.replace(path_of(source), path_of(target))
