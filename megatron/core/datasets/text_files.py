"""Reads raw documents of .txt and .jsonl files, one at a time, and reports bad lines. Does not tokenize.

Each line of a .jsonl or .json file is an object with a document under one of its keys. A .txt file is split at blank
lines into documents of at least 4 KiB. Text without blank lines is split after the line that reaches 64 KiB. The
concatenated documents of a .txt file equal the file. All files may be gzip-compressed (.gz).
"""

import glob
import gzip
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)
COMPRESSED = ".gz"
SHORTEST_TEXT = 4 << 10
LONGEST_TEXT = 64 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawDocument:
    """Undecoded bytes of a document. line: counted from 1 after byte `begin` of the file."""

    path: Path
    line: int
    data: bytes
    begin: int = 0


@dataclass(frozen=True)
class BadLine:
    """A line without valid text, and the reason. line, begin: as in RawDocument."""

    path: Path
    line: int
    reason: str
    begin: int = 0

    def __str__(self) -> str:
        """Returns the message with the line number in the whole file; reads the file up to `begin` to count lines."""
        before = 0 if self.begin == 0 else 1 + _count_lines(self.path, self.begin - 1)
        return f"{self.path}:{before + self.line}: {self.reason}"


def find_text_files(inputs: Iterable[str]) -> list[Path]:
    """Returns the files that are named, match a pattern, or are inside a folder. Raises OSError or ValueError."""
    files: list[Path] = []
    for name in inputs:
        # Path("") is the current folder, which may contain text files.
        if not name:
            raise ValueError("an input is empty: must be a file or a folder")
        # The name of a file may look like a pattern.
        matching = [] if Path(name).exists() else sorted(glob.glob(name))
        for path in map(Path, matching or [name]):
            files += _files_of(path)
    return files


def is_json(path: Path) -> bool:
    """Returns whether a file has one document per line; otherwise it is one text."""
    return _kind(path) in JSON_SUFFIXES


def can_be_cut(path: Path) -> bool:
    """Returns whether parts of a file can be read separately, which requires visible document borders and no
    compression.
    """
    return path.suffix in JSON_SUFFIXES


def read_raw_documents(path: Path, *, begin: int = 0, end: int | None = None) -> Iterator[RawDocument]:
    """Yields the documents of a file that start in bytes `begin` to `end` (None means its end), in order.

    Skips blank lines of a .jsonl file. begin, end: only for files that `can_be_cut`. Raises ValueError for a damaged
    compressed file.
    """
    try:
        yield from _read_raw_documents(path, begin=begin, end=end)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path} is truncated or not a gzip file: {error}") from error


def _read_raw_documents(path: Path, *, begin: int, end: int | None) -> Iterator[RawDocument]:
    with cast(BinaryIO, gzip.open(path) if path.suffix == COMPRESSED else open(path, "rb")) as file:
        if begin > 0:
            # The line that contains the previous byte belongs to the reader of the previous part, and may end there.
            file.seek(begin - 1)
            position = begin - 1 + len(file.readline())
        elif file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK:
            position = len(_BYTE_ORDER_MARK)
        else:
            position = file.seek(0)
        if not is_json(path):
            yield from _cut_text(file, path)
            return
        for line, data in enumerate(file, 1):
            if end is not None and position >= end:
                return
            position += len(data)
            if data.strip():
                yield RawDocument(path, line, data, begin)


def decode_document(raw: RawDocument, *, json_key: str) -> tuple[str, list[BadLine]]:
    """Returns the text of a document without bad lines, and the bad lines."""
    texts, bad_lines = decode_texts(raw, (json_key,))
    return texts[0], bad_lines


def decode_texts(raw: RawDocument, keys: Sequence[str]) -> tuple[list[str], list[BadLine]]:
    """Decodes several keys of a line like decode_document. A text file has no keys, so `keys` must have length 1."""
    if not is_json(raw.path):
        text, bad_lines = _decode_text(raw)
        return [text], bad_lines
    try:
        record = decode_record(raw, keys)
        return [_text_of(record, key) for key in keys], []
    except ValueError as error:
        return [""] * len(keys), [BadLine(raw.path, raw.line, str(error), raw.begin)]


def decode_record(raw: RawDocument, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the object of a .jsonl line. Raises ValueError unless it is an object with `keys`."""
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
    kinds = JSON_SUFFIXES + TEXT_SUFFIXES
    if path.is_dir():
        inside = sorted(file for file in path.rglob("*") if _kind(file) in kinds)
        if not inside:
            raise ValueError(f"{path} contains no file that ends in {', '.join(kinds)}")
        return inside
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist")
    if _kind(path) not in kinds:
        raise ValueError(f"{path} must end in {', '.join(kinds)}, optionally followed by {COMPRESSED}")
    return [path]


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == COMPRESSED else path.suffix


def _count_lines(path: Path, end: int) -> int:
    count = 0
    with open(path, "rb") as file:
        while end > 0 and (data := file.read(min(end, 1 << 20))):
            count += data.count(b"\n")
            end -= len(data)
    return count


def _cut_text(file: BinaryIO, path: Path) -> Iterator[RawDocument]:
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


def _read_piece(file: BinaryIO) -> bytes:
    """Reads a line, or about 64 KiB of a longer one up to the end of a character."""
    piece = file.readline(LONGEST_TEXT)
    if len(piece) < LONGEST_TEXT or piece.endswith(b"\n"):
        return piece
    rest = file.read(3)  # a UTF-8 character has at most 3 bytes after its first
    wanted = next((count for count, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))
    file.seek(wanted - len(rest), 1)
    return piece + rest[:wanted]


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
    if not isinstance(text, str):
        raise ValueError(f"key {key!r} is {type(text).__name__}: must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start} of {key!r}") from error
    return text


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
