"""Turns text into token files: `python tools/preprocess_data.py --input corpus.jsonl --output-prefix my ...`.

Writes PREFIX_text_document.bin and .idx; the same bytes for any number of workers. Trains nothing.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.config_field import field_spec  # noqa: E402
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path  # noqa: E402
from megatron.core.datasets.text_files import (  # noqa: E402
    BadLine,
    RawDocument,
    decode_document,
    find_text_files,
    read_raw_documents,
)
from megatron.core.tokenizers import Tokenizer, TokenizerConfig, build_tokenizer  # noqa: E402

TOKENIZER_FIELDS = {field.name: spec for field in fields(TokenizerConfig) if (spec := field_spec(field)) is not None}
CHUNK_BYTES = 256 << 10  # of text, for one worker at a time
CHUNKS_IN_FLIGHT = 4  # per worker: bounds memory, and keeps workers busy while one has a slow chunk
NAMED_BAD_LINES = 10


@dataclass(frozen=True)
class EncodeSettings:
    """What a worker has to know; small, since it goes along with every chunk."""

    tokenizer: tuple[tuple[str, Any], ...]  # fields of its TokenizerConfig
    append_eod: bool
    json_key: str


@dataclass
class EncodedChunk:
    """Tokens of consecutive documents, in the dtype of the output file, and what was left out."""

    tokens: np.ndarray
    lengths: list[int] = field(default_factory=list)
    bad_lines: list[BadLine] = field(default_factory=list)
    num_empty: int = 0
    num_bytes: int = 0


@dataclass
class Summary:
    """What became of the input."""

    num_documents: int = 0
    num_tokens: int = 0
    num_empty: int = 0
    num_bad: int = 0
    first_bad: list[BadLine] = field(default_factory=list)

    def add(self, chunk: EncodedChunk) -> None:
        self.num_documents += len(chunk.lengths)
        self.num_tokens += len(chunk.tokens)
        self.num_empty += chunk.num_empty
        self.num_bad += len(chunk.bad_lines)
        self.first_bad += chunk.bad_lines[: NAMED_BAD_LINES - len(self.first_bad)]


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0 also where lines were skipped, 1 where nothing could be written."""
    options = parse_options(argv)
    start = time.perf_counter()
    prefix = f"{options.output_prefix}_{options.json_keys[0]}_document"
    try:
        with terminate_as_interrupt():
            summary = preprocess(options, prefix)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print("error: a worker process was killed (memory?): try fewer --workers", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    report(summary, prefix, seconds=time.perf_counter() - start)
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help=".jsonl or .txt files, or folders of them")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="key of the text in JSON lines (default: text)")
    for name, spec in TOKENIZER_FIELDS.items():
        kind = int if spec.at_least is not None else str
        add(
            "--" + name.replace("_", "-"),
            type=kind,
            choices=spec.choices,
            required=name == "tokenizer_type",
            help=spec.help,
        )
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--output-prefix", required=True, help="writes PREFIX_text_document.bin and .idx")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    options = parser.parse_args(argv)
    if len(options.json_keys) > 1:
        parser.error("several --json-keys are not available yet: give one")
    if not options.output_prefix:
        parser.error("--output-prefix is empty: give the path that the names of the files begin with")
    if options.workers < 1:
        parser.error(f"--workers is {options.workers}: must be at least 1")
    return options


def preprocess(options: argparse.Namespace, prefix: str) -> Summary:
    """Encodes all input into PREFIX.bin and .idx. Raises ValueError or OSError; then neither file is touched."""
    settings = EncodeSettings(
        tokenizer=tuple((name, vars(options)[name]) for name in TOKENIZER_FIELDS),
        append_eod=options.append_eod,
        json_key=options.json_keys[0],
    )
    # Made before workers are forked: they inherit it and need not read its file again.
    dtype = DType.optimal_dtype(tokenizer_for(settings).vocab_size)
    files = find_text_files(options.input)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    summary = Summary()
    encode = functools.partial(encode_chunk, settings)
    with IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype) as builder, progress_bar(files) as advance:
        for chunk in map_in_order(encode, chunks(files), workers=options.workers):
            builder.add_documents(chunk.tokens, chunk.lengths)
            summary.add(chunk)
            advance(chunk.num_bytes)
        if summary.num_documents == 0:
            raise ValueError(nothing_found(summary, options.input))
        builder.finalize(get_idx_path(prefix))
    return summary


def chunks(files: Iterable[Path]) -> Iterator[list[RawDocument]]:
    """The documents of all files in order, in lists of about 256 KiB."""
    chunk: list[RawDocument] = []
    size = 0
    for document in itertools.chain.from_iterable(map(read_raw_documents, files)):
        chunk.append(document)
        size += len(document.data)
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def map_in_order(
    encode: Callable[[list[RawDocument]], EncodedChunk], items: Iterable[list[RawDocument]], *, workers: int
) -> Iterator[EncodedChunk]:
    """`map` over processes; results in the order of the items, only a few of which are read ahead."""
    if workers == 1:
        yield from map(encode, items)
        return
    fork = multiprocessing.get_context("fork")
    waiting: deque[Future[EncodedChunk]] = deque()
    with ProcessPoolExecutor(workers, mp_context=fork, initializer=follow_parent) as pool:
        for item in items:
            waiting.append(pool.submit(encode, item))
            if len(waiting) >= CHUNKS_IN_FLIGHT * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def follow_parent() -> None:
    """A worker outlives signals to the whole job, and ends when its parent has ended, however that was."""
    # Ctrl-C reaches every process of the terminal; the parent alone reacts, and ends the pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "runs in a worker"
    parent.join()
    # The pool's queue never ends: its writing end is open in every worker.
    os._exit(1)


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Lets SIGTERM, with which batch systems end a job, clean up as Ctrl-C does."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def encode_chunk(settings: EncodeSettings, documents: list[RawDocument]) -> EncodedChunk:
    """Tokens of the documents that have text. Runs in a worker."""
    tokenizer = tokenizer_for(settings)
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    pieces: list[np.ndarray] = []
    chunk = EncodedChunk(tokens=np.empty(0, dtype))
    for raw in documents:
        chunk.num_bytes += len(raw.data)
        text, bad_lines = decode_document(raw, json_key=settings.json_key)
        chunk.bad_lines += bad_lines
        if not text.strip():
            chunk.num_empty += not bad_lines
            continue
        try:
            tokens = tokenizer.tokenize(text)
        except ValueError as error:
            chunk.bad_lines.append(BadLine(raw.path, raw.line, str(error)))
            continue
        pieces.append(np.asarray(tokens + [tokenizer.eod] if settings.append_eod else tokens, dtype=dtype))
    chunk.lengths = [len(piece) for piece in pieces]
    chunk.tokens = np.concatenate(pieces) if pieces else chunk.tokens
    return chunk


@functools.cache
def tokenizer_for(settings: EncodeSettings) -> Tokenizer:
    """One tokenizer per process."""
    return build_tokenizer(TokenizerConfig(**dict(settings.tokenizer)))


@contextmanager
def progress_bar(files: Iterable[Path]) -> Iterator[Callable[[int], None]]:
    """A bar over the bytes of `files` on standard error where that is a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    total = sum(path.stat().st_size for path in files)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("preprocess", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def nothing_found(summary: Summary, inputs: list[str]) -> str:
    bad = "".join(f"\n  {line}" for line in summary.first_bad)
    return f"no document in {', '.join(inputs)}: {summary.num_bad} bad lines, {summary.num_empty} empty documents{bad}"


def report(summary: Summary, prefix: str, *, seconds: float) -> None:
    """One line on what was written, with the flag that reads it; skipped lines on standard error."""
    for line in summary.first_bad:
        print(f"skipped {line}", file=sys.stderr)
    if summary.num_bad:
        print(f"skipped {summary.num_bad:,} bad lines in all", file=sys.stderr)
    empty = f", {summary.num_empty:,} empty ones left out" if summary.num_empty else ""
    size = Path(get_bin_path(prefix)).stat().st_size / 1e6
    print(
        f"{summary.num_documents:,} documents{empty}, {summary.num_tokens:,} tokens, {size:.1f} MB, {seconds:.1f} s: "
        f"--data-path {prefix}"
    )


if __name__ == "__main__":
    sys.exit(main())
