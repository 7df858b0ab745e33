"""Reads the rows of Parquet and Arrow files in small batches, and converts each row to a line of JSON.

Requires pyarrow. text_files.py converts the lines to documents.
"""

import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

PARQUET, ARROW = ".parquet", ".arrow"
TABLE_SUFFIXES = (PARQUET, ARROW)
CHAT_COLUMNS = ("system", "tools", "chat_template_kwargs")  # of a record, in addition to the messages
BATCH_BYTES = 4 << 20  # approximate size of the decoded values in memory
MOST_BATCH_ROWS = 1024
READ_SIZE = 1 << 20
# The two Arrow formats: a file starts with the magic bytes, and a stream ends with an end mark.
_ARROW_MAGIC = b"ARROW1"
_END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


@dataclass(frozen=True)
class Columns:
    """Columns to read. flag: for error messages.

    hold_chats: they contain chats, so CHAT_COLUMNS are also read.
    """

    keys: tuple[str, ...]
    hold_chats: bool = False
    flag: str = "--json-keys"


@dataclass(frozen=True)
class Row:
    """Row as a line of JSON, or the error that prevented its conversion. number: number in the file, from 1."""

    number: int
    line: bytes = b""
    error: Exception | None = None


def check_columns(path: Path, columns: Columns) -> None:
    """Raises ValueError unless a file can be opened and contains the columns with supported types."""
    with _named_errors(path), _open(path) as file:
        _selected(file.schema_arrow if path.suffix == PARQUET else file.schema, path, columns)


def read_rows(path: Path, columns: Columns, *, begin: int, end: int | None) -> Iterator[Row]:
    """Yields the rows of a file in order.

    Of a Parquet file, yields only the rows of row groups that start in the byte range [begin, end). end: None means the
    end of the file.
    """
    batches = _parquet_batches(path, columns, begin=begin, end=end)
    for first, batch in batches if path.suffix == PARQUET else _arrow_batches(path, columns):
        try:
            records = _records(batch, columns)
        except UnicodeDecodeError:
            # Decodes row by row, so that only rows with invalid bytes are lost.
            for index in range(batch.num_rows):
                yield _row_alone(batch.slice(index, 1), first + index, columns)
            continue
        for number, record in enumerate(records, first):
            yield _row(record, number, columns)


def _parquet_batches(path: Path, columns: Columns, *, begin: int, end: int | None) -> Iterator[tuple[int, Any]]:
    """Yields (number of the first row, record batch)."""
    with _named_errors(path), _open(path) as file:
        names = _selected(file.schema_arrow, path, columns)
        groups = [file.metadata.row_group(index) for index in range(file.num_row_groups)]
        starts = itertools.accumulate((_start(group) for group in groups), max)
        number = 1
        for index, (group, start) in enumerate(zip(groups, starts)):
            if begin <= start and (end is None or start < end):
                batches = file.iter_batches(
                    _batch_rows(group, names), row_groups=[index], columns=names, use_threads=False
                )
                with _named_errors(path, f": row group {index} (rows from {number})"):
                    first = number
                    for batch in batches:
                        yield first, batch.select(names)
                        first += batch.num_rows
            number += group.num_rows


def _arrow_batches(path: Path, columns: Columns) -> Iterator[tuple[int, Any]]:
    with _named_errors(path), _open(path) as reader:
        names = _selected(reader.schema, path, columns)
        is_stream = isinstance(reader, _import_pyarrow(path).ipc.RecordBatchStreamReader)
        batches = reader if is_stream else map(reader.get_batch, range(reader.num_record_batches))
        number = 1
        for batch in batches:
            chosen = batch.select(names)
            step = _rows_of(chosen.nbytes, chosen.num_rows)
            for begin in range(0, chosen.num_rows, step):
                yield number + begin, chosen.slice(begin, step)
            number += batch.num_rows
    with open(path, "rb") as file:
        file.seek(-len(_END_OF_STREAM), 2)
        if is_stream and file.read() != _END_OF_STREAM:
            raise ValueError(f"{path} is truncated: the end mark of the Arrow stream is missing")


def _start(row_group: Any) -> int:
    """Returns the offset of a row group's first page in the file."""
    column = row_group.column(0)
    start: int = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
    return start


def _batch_rows(row_group: Any, names: list[str]) -> int:
    columns = [row_group.column(index) for index in range(row_group.num_columns)]
    chosen = [column for column in columns if any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names)]
    return _rows_of(sum(column.total_uncompressed_size for column in chosen), row_group.num_rows)


def _rows_of(num_bytes: int, num_rows: int) -> int:
    return max(1, min(MOST_BATCH_ROWS, BATCH_BYTES * num_rows // max(1, num_bytes)))


def _selected(schema: Any, path: Path, columns: Columns) -> list[str]:
    """Returns the names of the columns to read. Raises ValueError if a column is missing or its type unsupported."""
    shown = ", ".join(map(repr, schema.names)) or "none"
    for key in columns.keys:
        if schema.names.count(key) != 1:
            lack = "several columns" if key in schema.names else "no column"
            raise ValueError(f"{path} has {lack} {key!r}; its columns: {shown}. Choose with {columns.flag}")
        if not columns.hold_chats and not _is_text(schema.field(key).type):
            texts = [field.name for field in schema if _is_text(field.type)]
            raise ValueError(
                f"{path}: column {key!r} is {schema.field(key).type}: must be text; columns of text: "
                f"{', '.join(map(repr, texts)) or 'none'}. Choose with {columns.flag}"
            )
    others = [name for name in CHAT_COLUMNS if name in schema.names and name not in columns.keys]
    return [*columns.keys, *(others if columns.hold_chats else [])]


def _is_text(kind: Any) -> bool:
    """Returns whether an Arrow type represents strings. Accepts the null type of columns that contain only nulls."""
    types = _import_pyarrow().types
    if types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return any(test(kind) for test in (types.is_string, types.is_large_string, types.is_string_view, types.is_null))


def _records(batch: Any, columns: Columns) -> list[dict[str, Any]]:
    names = batch.schema.names
    values = [column.to_pylist(maps_as_pydicts="lossy") for column in batch.columns]
    if columns.hold_chats:
        kinds = [field.type for field in batch.schema]
        values = [[_plain(value, kind) for value in column] for column, kind in zip(values, kinds)]
    return [dict(zip(names, row)) for row in zip(*values)]


def _row_alone(batch: Any, number: int, columns: Columns) -> Row:
    try:
        return _row(_records(batch, columns)[0], number, columns)
    except UnicodeDecodeError as error:
        return Row(number, error=error)


def _row(record: dict[str, Any], number: int, columns: Columns) -> Row:
    try:
        # Chats may contain lone surrogates, which can be written only as escapes.
        return Row(number, json.dumps(record, ensure_ascii=columns.hold_chats).encode())
    except TypeError as error:  # dates or bytes within a chat
        return Row(number, error=error)


def _plain(value: Any, kind: Any) -> Any:
    """Returns a value without the null keys that its table added.

    In a table, every object of a column contains the keys of all objects. Only a message's content may be null.
    """
    pyarrow = _import_pyarrow()
    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        found = {field.name: _plain(value[field.name], field.type) for field in kind}
        is_kept = "content" if "role" in found else None
        return {name: one for name, one in found.items() if one is not None or name == is_kept}
    if pyarrow.types.is_map(kind):
        return {key: _plain(one, kind.item_type) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, kind.value_type) for one in value]
    return value


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Opens a Parquet file, or the record batch reader of an Arrow file."""
    pyarrow = _import_pyarrow(path)
    if path.suffix == PARQUET:
        from pyarrow import parquet

        # Reads single pages. Without these options, a whole column of a row group would be in memory.
        options = {"buffer_size": READ_SIZE, "pre_buffer": False, "page_checksum_verification": True}
        with parquet.ParquetFile(path, **options) as file:
            yield file
        return
    with open(path, "rb") as start:
        is_stream = start.read(len(_ARROW_MAGIC)) != _ARROW_MAGIC
    with pyarrow.memory_map(str(path)) as file:
        with (pyarrow.ipc.open_stream if is_stream else pyarrow.ipc.open_file)(file) as reader:
            yield reader


@contextmanager
def _named_errors(path: Path, place: str = "") -> Iterator[None]:
    """Converts pyarrow errors to ValueErrors that name the file."""
    pyarrow = _import_pyarrow(path)
    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # from the operating system, not the content
            raise
        format_name = "Parquet" if path.suffix == PARQUET else "Arrow"
        text = " ".join(str(error).split())
        raise ValueError(f"{path}{place} is damaged or not in {format_name} format: {text}") from error


def _import_pyarrow(path: Path | None = None) -> ModuleType:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"{path} requires the package pyarrow: pip install 'megatron-stash[data]'") from error
    module: ModuleType = pyarrow
    return module
