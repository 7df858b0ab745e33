"""Finds document files, yields their raw documents one at a time, and reports invalid ones. Does not tokenize.

A line of a .jsonl or .json file is an object that stores a document under one of its keys. A row of a Parquet or Arrow
file is treated as an object whose keys are the column names. A .txt or .md file is split at blank lines into documents
of at least 4 KiB. Text without blank lines is split after the line that reaches 64 KiB. The concatenated documents of
such a file equal the file. Files other than tables may be compressed.
"""

import glob
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.datasets.compressed_files import COMPRESSIONS, PeekableFile, named_damage, open_file
from megatron.core.datasets.hugging_face_datasets import HUB_PREFIX, hub_dataset_files, saved_dataset_files
from megatron.core.datasets.table_files import PARQUET, TABLE_SUFFIXES, Columns, check_columns, read_rows

JSON_SUFFIXES = (".jsonl", ".json")
MARKDOWN = ".md"
TEXT_SUFFIXES = (".txt", MARKDOWN)
INPUT_HELP = (
    ".jsonl, .txt and .md files, also compressed (.gz, .bz2, .xz, .zst), .parquet and .arrow files, folders of these, "
    "saved datasets, patterns, or hf:NAME[:[CONFIG:]SPLIT] for a Hugging Face dataset"
)
SHORTEST_TEXT = 4 << 10
LONGEST_TEXT = 64 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawDocument:
    """Undecoded bytes of a document.

    line: line number, counted from 1 after byte `begin` of the file; in a table, the row number. damage: reason why a
    row could not be read, in which case `data` is empty.
    """

    path: Path
    line: int
    data: bytes
    begin: int = 0
    damage: str = ""


@dataclass(frozen=True)
class BadLine:
    """Line or row whose text is invalid, with the reason. line, begin: as in RawDocument."""

    path: Path
    line: int
    reason: str
    begin: int = 0

    def __str__(self) -> str:
        """Returns the message with the line number in the file. Reads the file up to `begin` to count its lines."""
        if is_table(self.path):
            return f"{self.path}: row {self.line}: {self.reason}"
        before = 0 if self.begin == 0 else 1 + _count_lines(self.path, self.begin - 1)
        return f"{self.path}:{before + self.line}: {self.reason}"


def find_text_files(inputs: Iterable[str]) -> list[Path]:
    """Returns all files for a list of files, patterns, folders and names of hub datasets.

    Raises OSError or ValueError if an input does not exist or is not supported.
    """
    files: list[Path] = []
    for name in inputs:
        # Path("") is the current folder, which may contain text files.
        if not name:
            raise ValueError("an input is empty: must be a file or a folder")
        # The name of a file may look like a pattern, or like the name of a dataset.
        exists = Path(name).exists()
        if name.startswith(HUB_PREFIX) and not exists:
            files += hub_dataset_files(name)
            continue
        matching = [] if exists else sorted(glob.glob(name, recursive=True))
        for path in map(Path, matching or [name]):
            files += _files_of(path)
    return files


def has_keys(path: Path) -> bool:
    """Returns whether each line or row of a file is an object with keys. Other files are plain text."""
    return _kind(path) in JSON_SUFFIXES or is_table(path)


def is_table(path: Path) -> bool:
    """Returns whether a file is a Parquet or Arrow table, whose documents are rows."""
    return path.suffix in TABLE_SUFFIXES


def can_be_cut(path: Path) -> bool:
    """Returns whether parts of a file can be read separately. This requires clear document borders in raw bytes."""
    return path.suffix in (*JSON_SUFFIXES, PARQUET)


def check_tables(files: Iterable[Path], columns: Columns) -> None:
    """Raises ValueError for the first table that is damaged at its start or lacks a column."""
    for path in filter(is_table, files):
        check_columns(path, columns)


def read_raw_documents(
    path: Path, columns: Columns, *, begin: int = 0, end: int | None = None
) -> Iterator[RawDocument]:
    """Yields the documents of a file that start in the byte range [begin, end), in order. end: None means its end.

    Skips blank lines of a .jsonl file. begin, end: only for files that `can_be_cut`; a Parquet file is split between
    row groups. Raises ValueError for a damaged compressed file or table.
    """
    if is_table(path):
        for row in read_rows(path, columns, begin=begin, end=end):
            damage = _not_utf8(row.error) if isinstance(row.error, UnicodeDecodeError) else str(row.error or "")
            yield RawDocument(path, row.number, row.line, damage=damage)
        return
    with named_damage(path):
        yield from _read_lines(path, begin=begin, end=end)


def _read_lines(path: Path, *, begin: int, end: int | None) -> Iterator[RawDocument]:
    with open_file(path) as file:
        has_mark = file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK
    with open_file(path) as file:
        if begin > 0:
            # The line that contains the previous byte belongs to the previous part, even if it ends at that byte.
            file.seek(begin - 1)
            position = begin - 1 + len(file.readline())
        else:
            position = len(file.read(len(_BYTE_ORDER_MARK))) if has_mark else 0
        if not has_keys(path):
            yield from _cut_text(file, path)
            return
        for line, data in enumerate(file, 1):
            if end is not None and position >= end:
                return
            position += len(data)
            if data.strip():
                yield RawDocument(path, line, data, begin)


def decode_document(raw: RawDocument, *, json_key: str) -> tuple[str, list[BadLine]]:
    """Returns the text of a document without its invalid lines, and the list of invalid lines."""
    texts, bad_lines = decode_texts(raw, (json_key,))
    return texts[0], bad_lines


def decode_texts(raw: RawDocument, keys: Sequence[str]) -> tuple[list[str], list[BadLine]]:
    """Returns the text under each key of a document, and the list of invalid lines.

    A plain text file has no keys, so `keys` must then have length 1.
    """
    if not has_keys(raw.path):
        text, bad_lines = _decode_text(raw)
        return [text], bad_lines
    try:
        record = decode_record(raw, keys)
        return [_text_of(record, key) for key in keys], []
    except ValueError as error:
        return [""] * len(keys), [BadLine(raw.path, raw.line, str(error), raw.begin)]


def decode_record(raw: RawDocument, keys: Sequence[str]) -> dict[str, Any]:
    """Parses the object in a .jsonl line or table row. Raises ValueError if it is invalid or lacks one of `keys`."""
    if raw.damage:
        raise ValueError(raw.damage)
    try:
        record = json.loads(raw.data.decode().strip())
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}: must be an object with key {keys[0]!r}")
    for key in keys:
        if key not in record:
            raise ValueError(f"no key {key!r}; found {', '.join(map(repr, list(record)[:5])) or 'none'}")
    return record


def _files_of(path: Path) -> list[Path]:
    if path.is_dir():
        inside = _files_inside(path)
        if not inside:
            raise ValueError(f"{path} contains no file that ends in {_suffixes()}")
        # The README.md of a dataset is not part of its text.
        return [file for file in inside if _kind(file) != MARKDOWN] or inside
    if not path.is_file():
        is_pattern = glob.escape(str(path)) != str(path)
        raise FileNotFoundError(f"{path} matches no file" if is_pattern else f"{path} does not exist")
    if not _is_usable(path):
        raise ValueError(f"{path} must end in {_suffixes()}")
    return [path]


def _files_inside(folder: Path) -> list[Path]:
    """Returns the usable files of a folder and its subfolders, sorted by path."""
    saved = saved_dataset_files(folder)
    if saved is not None:
        return saved
    files: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            files += [] if path.is_symlink() else _files_inside(path)
        elif _is_usable(path):
            files.append(path)
    return files


def _is_usable(path: Path) -> bool:
    return _kind(path) in JSON_SUFFIXES + TEXT_SUFFIXES or is_table(path)


def _suffixes() -> str:
    texts = ", ".join(JSON_SUFFIXES + TEXT_SUFFIXES)
    return f"{texts} (optionally followed by {', '.join(COMPRESSIONS)}), {', '.join(TABLE_SUFFIXES)}"


def _kind(path: Path) -> str:
    """Returns the suffix of a file, without a compression suffix."""
    return Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix


def _count_lines(path: Path, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(end, 1 << 20))):
            count += data.count(b"\n")
            end -= len(data)
    return count


def _cut_text(file: PeekableFile, path: Path) -> Iterator[RawDocument]:
    pieces: list[bytes] = []
    size, line, next_line = 0, 1, 1
    while piece := _read_piece(file):
        pieces.append(piece)
        size += len(piece)
        next_line += piece.endswith(b"\n")
        if size >= LONGEST_TEXT or (size >= SHORTEST_TEXT and not piece.strip()):
            yield RawDocument(path, line, b"".join(pieces))
            pieces, size, line = [], 0, next_line
    if pieces:
        yield RawDocument(path, line, b"".join(pieces))


def _read_piece(file: PeekableFile) -> bytes:
    """Reads a line, or about 64 KiB of a longer line. Never ends within a UTF-8 character."""
    piece = file.readline(LONGEST_TEXT)
    if len(piece) < LONGEST_TEXT or piece.endswith(b"\n"):
        return piece
    for _ in range(3):  # a UTF-8 character has at most 3 bytes after the first
        following = file.peek(1)[:1]
        if not following or following[0] & 0xC0 != 0x80:
            break
        piece += file.read(1)
    return piece


def _decode_text(raw: RawDocument) -> tuple[str, list[BadLine]]:
    try:
        return raw.data.decode(), []
    except UnicodeDecodeError:
        pass  # Decodes line by line, so that only the lines with invalid bytes are lost.
    good, bad = [], []
    for line, data in enumerate(io.BytesIO(raw.data), raw.line):
        try:
            good.append(data.decode())
        except UnicodeDecodeError as error:
            bad.append(BadLine(raw.path, line, _not_utf8(error)))
    return "".join(good), bad


def _text_of(record: dict[str, Any], key: str) -> str:
    text = record[key]
    if text is None:
        raise ValueError(f"key {key!r} is null: must be text")
    if not isinstance(text, str):
        raise ValueError(f"key {key!r} is {type(text).__name__}: must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"unpaired surrogate at character {error.start} of {key!r}") from error
    return text


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
