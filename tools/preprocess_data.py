"""Tokenizes text into token files: `python tools/preprocess_data.py --input corpus.jsonl --output-prefix my ...`.

Writes PREFIX_text_document.bin and .idx. Their bytes do not depend on the number of workers and partitions.
"""

import argparse
import bisect
import functools
import itertools
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.config_field import field_spec
from megatron.core.datasets.document_borders import document_starts_prefix
from megatron.core.datasets.indexed_dataset import (
    IndexedDataset,
    IndexedDatasetBuilder,
    get_bin_path,
    get_idx_path,
    loss_mask_prefix,
)
from megatron.core.datasets.padding import padding_mask_prefix
from megatron.core.datasets.text_files import INPUT_HELP, check_tables, find_text_files, has_keys
from megatron.core.files import file_crc32
from megatron.core.tokenizers import TokenizerConfig
from megatron.core.tokenizers.chat_template import find_templates
from megatron.tools.partitions import Piece, Workspace, cut, documents, publish
from megatron.tools.show_samples import show_samples
from megatron.tools.token_chunks import (
    EncodedChunk,
    EncodeSettings,
    chunks,
    encode_chunk,
    map_in_order,
    template_for,
    tokenizer_for,
)
from megatron.version_flag import PrintVersions

TOKENIZER_FIELDS = {field.name: spec for field in fields(TokenizerConfig) if (spec := field_spec(field)) is not None}
NAMED_BAD_LINES = 10
COUNT_WORDS = {
    "empty": "empty documents skipped",
    "cut": "longer chats truncated",
    "cut loss": "truncated tokens with a loss",
    "filling": "padding tokens",
}
TOO_LONG = "without an answer within --pack-length"
# Largest share of chats that may be dropped, unless --max-dropped-share says otherwise.
MAX_DROPPED_SHARE = 0.1
# Number of chats that are packed together. With a few thousand, documents are filled to 99%.
WINDOW = 4096
# Increase this when equal input and settings produce different bytes, so that older finished partitions are not used.
VERSION = 2


@dataclass
class Summary:
    """Counts of the processed input.

    num_chats: chats that were kept. dropped: chats that were not, by reason. counts: further counts, by the names of
    COUNT_WORDS. first_bad: positions of the first bad lines.
    """

    num_documents: int = 0
    num_chats: int = 0
    num_tokens: int = 0
    num_bad: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    first_bad: list[str] = field(default_factory=list)

    def add(self, other: "Summary") -> None:
        self.num_documents += other.num_documents
        self.num_chats += other.num_chats
        self.num_tokens += other.num_tokens
        self.num_bad += other.num_bad
        self.dropped = dict(Counter(self.dropped) + Counter(other.dropped))
        self.counts = dict(Counter(self.counts) + Counter(other.counts))
        self.first_bad += other.first_bad[: NAMED_BAD_LINES - len(self.first_bad)]

    @property
    def num_dropped(self) -> int:
        return sum(self.dropped.values())

    @property
    def drop_words(self) -> str:
        """The number of chats that were kept, dropped, and the reasons, the most frequent first."""
        total = self.num_chats + self.num_dropped
        share = f" ({self.num_dropped / total:.1%})" if self.num_dropped else ""
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in Counter(self.dropped).most_common())
        return f"{self.num_chats:,} kept, {self.num_dropped:,} dropped{share}{': ' if reasons else ''}{reasons}"

    def add_chunk(self, chunk: EncodedChunk, *, holds_chats: bool) -> None:
        # Only for the lines that are shown, because finding the number of a line may require reading its file.
        named = [str(line) for line in chunk.bad_lines[: NAMED_BAD_LINES - len(self.first_bad)]]
        count = len(chunk.lengths[0])
        self.add(
            Summary(
                num_documents=count,
                num_chats=count if holds_chats else 0,
                num_tokens=chunk.num_tokens,
                num_bad=len(chunk.bad_lines),
                dropped=dict(chunk.dropped),
                counts=dict(chunk.counts),
                first_bad=named,
            )
        )


@dataclass(frozen=True)
class Chat:
    """A tokenized chat, or several packed ones.

    tokens and mask: [L] integers; the mask is 1 for tokens in the loss. num_padding: number of padding tokens at the
    end. starts: positions of the first tokens of chats, and of the padding.
    """

    tokens: np.ndarray
    mask: np.ndarray
    num_padding: int = 0
    starts: tuple[int, ...] = (0,)


def main(argv: list[str] | None = None) -> int:
    """Preprocesses the input and returns the exit status.

    Returns 0 even if lines were skipped, 1 if nothing could be written or too many chats were dropped, and 130 if
    interrupted.
    """
    options = parse_options(argv)
    # Disables the threads that the tokenizers library would start in each worker process.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    start = time.perf_counter()
    try:
        with terminate_as_interrupt():
            settings = encode_settings(options)
            summary = preprocess(options, settings)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenProcessPool:
        print("error: a worker process was killed (out of memory?): try fewer --workers", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = workspace_folder(options).exists()
        print(f"interrupted: {'run the same command to continue' if kept else 'nothing was written'}", file=sys.stderr)
        return 130
    prefixes = [f"{options.output_prefix}_{name}" for name in settings.names]
    seconds = time.perf_counter() - start
    if options.show is not None:
        show_samples(
            prefixes[0], tokenizer_for(settings.tokenizer), count=options.show, console=Console(highlight=False)
        )
    report(summary, prefixes, options=options, seconds=seconds)
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--version", action=PrintVersions)
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    add(
        "--json-keys",
        nargs="+",
        metavar="KEY",
        help="keys of texts in lines or rows; each writes a pair of files (text)",
    )
    add("--chat-key", metavar="KEY", help="key of the chats in lines or rows; writes tokens and loss masks")
    add("--chat-template", metavar="FILE", help="Jinja template of the chats (default: the tokenizer's)")
    add("--pack-length", type=int, metavar="TOKENS", help="pack whole chats into documents of this length")
    add("--show", type=int, metavar="N", help="print the first N samples of chats with their loss masks")
    add(
        "--max-dropped-share",
        type=float,
        metavar="SHARE",
        help=f"fail if more than this share of the chats is dropped, 0 to 1 ({MAX_DROPPED_SHARE})",
    )
    for name, spec in TOKENIZER_FIELDS.items():
        flag, kind = "--" + name.replace("_", "-"), str if spec.at_least is None else int
        add(flag, type=kind, choices=spec.choices, required=name == "tokenizer_type", help=spec.help)
    add("--append-eod", action="store_true", help="end every document with the end-of-document token")
    add("--output-prefix", required=True, help="writes PREFIX_KEY_document.bin and .idx")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    add("--partitions", type=int, default=1, help="parts of the input, after each of which a run can continue (1)")
    add("--keep-sequential-samples", action="store_true", help="accepted: documents always keep their order")
    add("--log-interval", type=int, help="accepted for compatibility: no progress lines are printed")
    add("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    add("--keep-newlines", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    problem = wrong_options(options)
    if problem is not None:
        parser.error(problem)
    return options


def wrong_options(options: argparse.Namespace) -> str | None:
    """Returns an error message for the command line, or None if it is valid."""
    for name in ("workers", "partitions", "pack_length", "show"):
        value = vars(options)[name]
        if value is not None and value < 1:
            return f"--{name.replace('_', '-')} is {value}: must be at least 1"
    if not options.output_prefix:
        return "--output-prefix is empty: give the path prefix of the written files"
    if options.split_sentences or options.keep_newlines:
        return "--split-sentences and --keep-newlines are for BERT, which is not supported: remove them"
    share = options.max_dropped_share
    if share is not None and not 0 <= share <= 1:
        return f"--max-dropped-share is {share}: must be 0 to 1"
    of_chats = ("chat_template", "pack_length", "show", "max_dropped_share")
    given = [f"--{name.replace('_', '-')}" for name in of_chats if vars(options)[name] is not None]
    if options.chat_key is None and given:
        return f"{' and '.join(given)} apply only to chats: give the key of the chats with --chat-key"
    if options.chat_key is not None and options.json_keys is not None:
        return f"--chat-key {options.chat_key} contradicts --json-keys: give only one of them"
    return wrong_keys(options.json_keys or [options.chat_key or "text"])


def wrong_keys(keys: Sequence[str]) -> str | None:
    """Returns an error message for the keys of texts or chats, or None if they are valid."""
    unusable = next((key for key in keys if not key or "/" in key), None)
    if unusable is not None:
        return f"the key {unusable!r} is used in file names: must not be empty or contain /"
    if len(set(keys)) < len(keys):
        return f"--json-keys {' '.join(keys)} names a key twice"
    return None


def encode_settings(options: argparse.Namespace) -> EncodeSettings:
    """Returns the settings for the workers. Raises ValueError or OSError for an unusable tokenizer or template."""
    tokenizer = tuple((name, vars(options)[name]) for name in TOKENIZER_FIELDS)
    if options.chat_key is None:
        return EncodeSettings(tokenizer, options.append_eod, tuple(options.json_keys or ("text",)))
    templates = find_templates(tokenizer_for(tokenizer), options.chat_template)
    # In packed documents only the end-of-document tokens separate chats.
    append_eod = options.append_eod or options.pack_length is not None
    settings = EncodeSettings(tokenizer, append_eod, (options.chat_key,), templates)
    template_for(settings)  # raises for a template that is not valid Jinja
    template_for(settings, tools=[])
    return settings


def preprocess(options: argparse.Namespace, settings: EncodeSettings) -> Summary:
    """Encodes all input into PREFIX_*.bin and .idx and returns the counts.

    Raises ValueError or OSError without changing existing files.
    """
    # Built before the workers are forked, so that they inherit it.
    tokenizer_for(settings.tokenizer)
    files = find_text_files(options.input)
    text_file = next((path for path in files if not has_keys(path)), None)
    if text_file is not None and len(settings.names) > 1:
        raise ValueError(f"{text_file} has no keys: --chat-key and several --json-keys require .jsonl files or tables")
    check_tables(files, settings.columns)
    plan = plan_of(options, settings, files=files)
    with Workspace(workspace_folder(options), plan, names=settings.names) as space, progress_bar(files) as advance:
        summary = encode_partitions(
            space, cut(files, options.partitions), settings=settings, options=options, advance=advance
        )
        if summary.num_documents == 0:
            raise ValueError(nothing_found(summary, options))
        part, names = "0", settings.names
        if options.partitions > 1 or options.pack_length:
            part = "merged"
            names = merge(space, settings, options=options, summary=summary)
        check_dropped(summary, options)
        outputs = {name: f"{options.output_prefix}_{name}" for name in names}
        masks = (loss_mask_prefix, padding_mask_prefix, document_starts_prefix)
        stale = [mask_of(path) for path in outputs.values() for mask_of in masks]
        # Masks first, because without masks all tokens would count in the loss.
        publish(
            [(space.prefix(part, name), path) for name, path in reversed(outputs.items())],
            stale=[path for path in stale if path not in outputs.values()],
        )
    return summary


def workspace_folder(options: argparse.Namespace) -> Path:
    return Path(f"{options.output_prefix}_{options.chat_key or (options.json_keys or ['text'])[0]}.partitions")


def plan_of(options: argparse.Namespace, settings: EncodeSettings, *, files: Iterable[Path]) -> dict[str, Any]:
    """Returns all inputs that determine the tokens, as JSON values."""
    return {
        "version": VERSION,
        "settings": asdict(settings),
        "tokenizer_files": [[str(path), file_crc32(path)] for path in tokenizer_files(options)],
        "partitions": options.partitions,
        "files": [[str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns] for path in files],
    }


def tokenizer_files(options: argparse.Namespace) -> list[Path]:
    """Returns the files that the tokenizer reads."""
    given = [Path(path) for path in (options.tokenizer_model, options.vocab_file, options.merge_file) if path]
    inside = [path for folder in given if folder.is_dir() for path in folder.glob("*.json")]
    beside = [path.with_name("tokenizer_config.json") for path in given if path.is_file()]
    return sorted(path for path in {*given, *inside, *beside} if path.is_file())


def encode_partitions(
    space: Workspace,
    partitions: list[list[Piece]],
    *,
    settings: EncodeSettings,
    options: argparse.Namespace,
    advance: Callable[[int], None],
) -> Summary:
    """Encodes the unfinished partitions and returns the counts over all partitions."""
    finished = space.finished()
    if finished:
        print(f"continuing: {len(finished)} of {len(partitions)} partitions are done", file=sys.stderr)
    summary = Summary()
    for number, pieces in enumerate(partitions):
        if number in finished:
            summary.add(Summary(**finished[number]))
            continue
        prefixes = [space.prefix(str(number), name) for name in settings.names]
        done = encode_pieces(pieces, prefixes, settings=settings, workers=options.workers, advance=advance)
        space.finish(number, asdict(done))
        summary.add(done)
    return summary


def encode_pieces(
    pieces: list[Piece],
    prefixes: list[str],
    *,
    settings: EncodeSettings,
    workers: int,
    advance: Callable[[int], None],
) -> Summary:
    """Writes the .bin/.idx pairs of one partition and returns its counts."""
    summary = Summary()
    encode = functools.partial(encode_chunk, settings)
    with ExitStack() as stack:
        builders = [
            stack.enter_context(IndexedDatasetBuilder(get_bin_path(prefix), dtype=dtype))
            for prefix, dtype in zip(prefixes, settings.dtypes)
        ]
        for chunk in map_in_order(encode, chunks(documents(pieces, settings.columns)), workers=workers):
            for builder, tokens, lengths in zip(builders, chunk.arrays, chunk.lengths):
                builder.add_concatenated(tokens, lengths)
            summary.add_chunk(chunk, holds_chats=settings.chat_templates is not None)
            advance(chunk.num_bytes)
        for builder, prefix in zip(builders, prefixes):
            builder.finalize(get_idx_path(prefix))
    return summary


def merge(
    space: Workspace, settings: EncodeSettings, *, options: argparse.Namespace, summary: Summary
) -> tuple[str, ...]:
    """Merges the .bin/.idx pairs of all partitions into the pair "merged", and packs chats if requested.

    Returns the names of the outputs, which include the padding masks of packed chats if there is any padding, and the
    starts of chats if they contain the end-of-document token, which otherwise separates them.
    """
    names, dtypes = settings.names, settings.dtypes
    padding, starts = padding_mask_prefix(names[0]), document_starts_prefix(names[0])
    if options.pack_length is not None:
        names, dtypes = (*names, padding, starts), (*dtypes, np.uint8, np.uint8)
    with ExitStack() as stack:
        builders = {
            name: stack.enter_context(IndexedDatasetBuilder(get_bin_path(space.prefix("merged", name)), dtype=dtype))
            for name, dtype in zip(names, dtypes)
        }
        if options.pack_length is not None:
            chats = stored_chats(space, settings.names, count=options.partitions)
            pack(chats, list(builders.values()), length=options.pack_length, settings=settings, summary=summary)
        else:
            for name, builder in builders.items():
                for number in range(options.partitions):
                    builder.add_index(space.prefix(str(number), name))
        for name, builder in builders.items():
            builder.finalize(get_idx_path(space.prefix("merged", name)))
    counts = {padding: summary.counts.get("filling"), starts: summary.counts.get("eod inside")}
    return tuple(name for name in names if counts.get(name, 1))


def pack(
    chats: Iterator[Chat],
    builders: list[IndexedDatasetBuilder],
    *,
    length: int,
    settings: EncodeSettings,
    summary: Summary,
) -> None:
    """Packs chats into documents, and updates `summary`.

    builders: of tokens, loss masks, padding masks and starts.
    """
    tokenizer = tokenizer_for(settings.tokenizer)
    fill = tokenizer.eod if tokenizer.pad is None else tokenizer.pad
    counts: Counter[str] = Counter()
    tokens, masks, padding_masks, starts = builders
    summary.num_documents = summary.counts["with a loss"] = 0
    chats = (_ending_at(chat, tokenizer.eod) for chat in chats)
    for document in packed(chats, length=length, fill=fill, counts=counts):
        tokens.add_concatenated(document.tokens, [length])
        masks.add_concatenated(document.mask, [length])
        is_padding = np.arange(length) >= length - document.num_padding
        padding_masks.add_concatenated(is_padding.astype(np.uint8), [length])
        is_start = np.zeros(length, dtype=np.uint8)
        is_start[list(document.starts)] = 1
        starts.add_concatenated(is_start, [length])
        summary.num_documents += 1
        summary.counts["with a loss"] += int(document.mask.sum())
    if summary.num_documents == 0:
        raise ValueError(f"--pack-length is {length}: no chat has an answer that begins within this length")
    summary.num_tokens = summary.num_documents * length
    too_long = counts.pop("too long", 0)
    if too_long:
        summary.num_chats -= too_long
        summary.dropped[TOO_LONG] = too_long
    summary.counts |= counts


def stored_chats(space: Workspace, names: Sequence[str], *, count: int) -> Iterator[Chat]:
    """Yields the chats of all partitions in order."""
    for number in range(count):
        tokens, masks = (IndexedDataset(space.prefix(str(number), name)) for name in names)
        for index in range(len(tokens)):
            yield Chat(tokens[index], masks[index])


def packed(chats: Iterable[Chat], *, length: int, fill: int, counts: Counter[str]) -> Iterator[Chat]:
    """Yields documents of exactly `length` tokens: whole chats, then `fill` tokens with mask 0.

    Longer chats are truncated, or dropped if no token in the loss remains. `counts` counts both, and the fill tokens.
    """
    window: list[Chat] = []
    for chat in itertools.chain(chats, [None]):
        if chat is not None:
            window += _at_most(chat, length, counts=counts)
        if window and (chat is None or len(window) == WINDOW):
            for group in best_fit([len(one.tokens) for one in window], length):
                yield _joined([window[index] for index in group], length, fill=fill, counts=counts)
            window = []


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Returns groups of indices whose lengths sum to at most `capacity`, by best-fit decreasing.

    Groups are ordered by their first index, and indices in a group increase. No length may exceed the capacity.
    """
    groups: list[list[int]] = []
    open_groups: list[tuple[int, int]] = []  # (space left, group), sorted
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect.bisect_left(open_groups, (lengths[index], -1))
        if place < len(open_groups):
            room, group = open_groups.pop(place)
        else:
            room, group = capacity, len(groups)
            groups.append([])
        groups[group].append(index)
        if room > lengths[index]:
            bisect.insort(open_groups, (room - lengths[index], group))
    return sorted(sorted(group) for group in groups)


def _ending_at(chat: Chat, eod: int) -> Chat:
    """Cuts the blank text after a chat's last end of document, at which training separates packed chats."""
    end = int(np.flatnonzero(chat.tokens == eod)[-1]) + 1
    return Chat(chat.tokens[:end], chat.mask[:end])


def _at_most(chat: Chat, length: int, *, counts: Counter[str]) -> list[Chat]:
    if len(chat.tokens) <= length:
        return [chat]
    cut = Chat(chat.tokens[:length], chat.mask[:length])
    learns = bool(cut.mask.any())
    counts["cut" if learns else "too long"] += 1
    counts["cut loss"] += int(chat.mask[length:].sum()) if learns else 0
    return [cut] if learns else []


def _joined(chats: list[Chat], length: int, *, fill: int, counts: Counter[str]) -> Chat:
    tokens = np.full(length, fill, dtype=chats[0].tokens.dtype)
    mask = np.zeros(length, dtype=chats[0].mask.dtype)
    end, starts = 0, []
    for chat in chats:
        begin, end = end, end + len(chat.tokens)
        starts.append(begin)
        tokens[begin:end], mask[begin:end] = chat.tokens, chat.mask
    counts["filling"] += length - end
    starts += [end] if end < length else []
    return Chat(tokens, mask, num_padding=length - end, starts=tuple(starts))


@contextmanager
def terminate_as_interrupt() -> Iterator[None]:
    """Makes SIGTERM, which batch systems send to end a job, trigger the same cleanup as Ctrl-C."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def progress_bar(files: Iterable[Path]) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar over the bytes of `files` if standard error is a terminal. Yields its update function."""
    console = Console(stderr=True)
    total = sum(path.stat().st_size for path in files)
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("preprocess", total=total)
        yield lambda num_bytes: progress.advance(task, num_bytes)


def nothing_found(summary: Summary, options: argparse.Namespace) -> str:
    bad = "".join(f"\n  {line}" for line in summary.first_bad)
    inputs = ", ".join(options.input)
    if options.chat_key is not None:
        return f"no chat with a loss in {inputs}: {summary.drop_words}{bad}"
    return (
        f"no document in {inputs}: {summary.num_bad} bad lines, {summary.counts.get('empty', 0)} empty documents{bad}"
    )


def check_dropped(summary: Summary, options: argparse.Namespace) -> None:
    """Raises ValueError if more chats were dropped than --max-dropped-share allows."""
    if options.chat_key is None:
        return
    share = MAX_DROPPED_SHARE if options.max_dropped_share is None else options.max_dropped_share
    if summary.num_dropped > share * (summary.num_chats + summary.num_dropped):
        bad = "".join(f"\n  {line}" for line in summary.first_bad)
        raise ValueError(
            f"too many chats of {', '.join(options.input)} are dropped: {summary.drop_words}; nothing was written. "
            f"Correct them, or allow more than a share of {share:g} with --max-dropped-share{bad}"
        )


def report(summary: Summary, prefixes: list[str], *, options: argparse.Namespace, seconds: float) -> None:
    """Prints a summary line that ends with the --data-path flag for the files. Lists skipped lines on stderr."""
    for line in summary.first_bad:
        print(f"skipped {line}", file=sys.stderr)
    if summary.num_bad:
        kind = "bad lines" if options.chat_key is None else "chats"
        print(f"skipped {summary.num_bad:,} {kind} in total", file=sys.stderr)
    if options.pack_length is not None and summary.counts.get("eod inside"):
        print(
            f"note: {summary.counts['eod inside']:,} chats contain the end-of-document token, so the first token of "
            f"each chat is marked in {document_starts_prefix(prefixes[0])}.bin",
            file=sys.stderr,
        )
    learned, num_tokens = "", summary.num_tokens - summary.counts.get("filling", 0)
    if options.chat_key is not None:
        print(f"chats: {summary.drop_words}")
        count = summary.counts["with a loss"]
        learned = f", {count:,} with a loss ({count / num_tokens:.1%})"
    found = [(summary.counts.get(name, 0), words) for name, words in COUNT_WORDS.items()]
    counts = "".join(f", {count:,} {words}" for count, words in found if count)
    size = sum(Path(get_bin_path(prefix)).stat().st_size for prefix in prefixes) / 1e6
    flags = " ".join(prefix for prefix in prefixes if not prefix.endswith("_loss_mask"))
    print(
        f"{summary.num_documents:,} documents{counts}, {num_tokens:,} tokens{learned}, {size:.1f} MB, "
        f"{seconds:.1f} s: --data-path {flags}"
    )


if __name__ == "__main__":
    sys.exit(main())
