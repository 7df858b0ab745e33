"""Raw text documents of .txt and .jsonl files, one at a time, each bad line named; no tokenizer here.

A line of a .jsonl file (.json is read the same way) is an object with a document in one of its keys. A .txt file is
cut at blank lines: a document is as many paragraphs as reach 4 KiB. Text without blank lines is cut behind the line
that reaches 64 KiB. The documents of a .txt file put together are the file, byte for byte.
"""

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

JSON_SUFFIXES = (".jsonl", ".json")
TEXT_SUFFIXES = (".txt",)
SHORTEST_TEXT = 4 << 10
LONGEST_TEXT = 64 << 10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class RawDocument:
    """Undecoded bytes and where they stand: `line` counts from 1."""

    path: Path
    line: int
    data: bytes


@dataclass(frozen=True)
class BadLine:
    """A line that gives no text, and why."""

    path: Path
    line: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.reason}"


def find_text_files(inputs: Iterable[str]) -> list[Path]:
    """The files named, and those inside the folders named (sorted by path). Raises OSError or ValueError."""
    files: list[Path] = []
    for name in inputs:
        # Path("") is the current folder, with whatever text it holds.
        if not name:
            raise ValueError("an input is empty: must be a file or a folder")
        path = Path(name)
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix in JSON_SUFFIXES + TEXT_SUFFIXES)
            if not inside:
                raise ValueError(f"{path} has no file that ends in {', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)}")
            files += inside
        elif not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        elif path.suffix not in JSON_SUFFIXES + TEXT_SUFFIXES:
            raise ValueError(f"{path} must end in {', '.join(JSON_SUFFIXES + TEXT_SUFFIXES)}")
        else:
            files.append(path)
    return files


def read_raw_documents(path: Path) -> Iterator[RawDocument]:
    """The documents of one file in order; holds one at a time in memory. Blank lines of a .jsonl file are left out."""
    with open(path, "rb") as file:
        if file.read(len(_BYTE_ORDER_MARK)) != _BYTE_ORDER_MARK:
            file.seek(0)
        if path.suffix in TEXT_SUFFIXES:
            yield from _cut_text(file, path)
            return
        for line, data in enumerate(file, 1):
            if data.strip():
                yield RawDocument(path, line, data)


def decode_document(raw: RawDocument, *, json_key: str) -> tuple[str, list[BadLine]]:
    """The text of a document, "" where it has none, and its bad lines, which the text leaves out."""
    if raw.path.suffix in TEXT_SUFFIXES:
        return _decode_text(raw)
    try:
        return _json_text(raw.data, json_key), []
    except ValueError as error:
        return "", [BadLine(raw.path, raw.line, str(error))]


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
    """A line, or 64 KiB of a longer one, never cut inside a character."""
    piece = file.readline(LONGEST_TEXT)
    if len(piece) < LONGEST_TEXT or piece.endswith(b"\n"):
        return piece
    rest = file.read(3)  # the most that a character of UTF-8 has behind its first byte
    wanted = next((count for count, byte in enumerate(rest) if byte & 0xC0 != 0x80), len(rest))
    file.seek(wanted - len(rest), 1)
    return piece + rest[:wanted]


def _decode_text(raw: RawDocument) -> tuple[str, list[BadLine]]:
    try:
        return raw.data.decode(), []
    except UnicodeDecodeError:
        pass  # now line by line: one wrong byte shall not cost the whole document
    good, bad = [], []
    for line, data in enumerate(io.BytesIO(raw.data), raw.line):
        try:
            good.append(data.decode())
        except UnicodeDecodeError as error:
            bad.append(BadLine(raw.path, line, _not_utf8(error)))
    return "".join(good), bad


def _json_text(data: bytes, key: str) -> str:
    try:
        value = json.loads(data.decode().strip())
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from error
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}: must be an object with key {key!r}")
    if key not in value:
        raise ValueError(f"no key {key!r}; found {', '.join(map(repr, list(value)[:5])) or 'none'}")
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"key {key!r} is {type(text).__name__}: must be text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a surrogate pair at character {error.start} of {key!r}") from error
    return text


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"not UTF-8: byte 0x{error.object[error.start]:02x} at column {error.start + 1}"
