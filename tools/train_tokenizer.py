"""Trains a byte-level BPE tokenizer: `python tools/train_tokenizer.py --input corpus.jsonl --output tokenizer.json`.

Writes a tokenizer.json for --tokenizer-type HuggingFaceTokenizer. Equal input produces an equal file.
"""

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.datasets.table_files import Columns
from megatron.core.datasets.text_files import (
    INPUT_HELP,
    BadLine,
    check_tables,
    decode_document,
    find_text_files,
    read_raw_documents,
)
from megatron.core.files import replaced_file
from megatron.version_flag import PrintVersions

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = len(pre_tokenizers.ByteLevel.alphabet()) + 1
NAMED_BAD_LINES = 10


def main(argv: list[str] | None = None) -> int:
    """Trains and writes the tokenizer, and returns the exit status."""
    options = parse_options(argv)
    try:
        bad_lines: list[BadLine] = []
        files = find_text_files(options.input)
        columns = Columns((options.json_key,), flag="--json-key")
        check_tables(files, columns)
        texts = read_texts(files, columns, bad_lines=bad_lines)
        tokenizer = train(texts, vocab_size=options.vocab_size)
        write(tokenizer, output_file(options.output))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for line in bad_lines[:NAMED_BAD_LINES]:
        print(f"skipped {line}", file=sys.stderr)
    if bad_lines:
        print(f"skipped {len(bad_lines):,} bad lines in total", file=sys.stderr)
    print(f"{tokenizer.get_vocab_size():,} tokens: --tokenizer-model {output_file(options.output)}")
    return 0


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help=INPUT_HELP)
    parser.add_argument("--json-key", default="text", help="key of the text in lines or rows (default: text)")
    parser.add_argument(
        "--vocab-size", type=int, default=8192, help="number of ids, including the end of text (default: 8192)"
    )
    parser.add_argument("--output", required=True, metavar="PATH", help="a .json file, or a folder for tokenizer.json")
    options = parser.parse_args(argv)
    if not options.output:
        parser.error("--output is empty: give a .json file, or a folder")
    if options.vocab_size < SMALLEST_VOCAB:
        parser.error(f"--vocab-size is {options.vocab_size}: must be at least {SMALLEST_VOCAB}, the bytes and one more")
    return options


def read_texts(files: Iterable[Path], columns: Columns, *, bad_lines: list[BadLine]) -> Iterator[str]:
    """Yields the texts of all files in order. Appends bad lines to `bad_lines`.

    Raises ValueError if there are no texts.
    """
    found = False
    for raw in itertools.chain.from_iterable(read_raw_documents(path, columns) for path in files):
        text, bad = decode_document(raw, json_key=columns.keys[0])
        bad_lines += bad
        if text:
            found = True
            yield text
    if not found:
        raise ValueError("the input contains no text" + "".join(f"\n  {line}" for line in bad_lines[:NAMED_BAD_LINES]))


def train(texts: Iterator[str], *, vocab_size: int) -> Tokenizer:
    """Trains a byte-level BPE tokenizer. It contains all 256 bytes, so that any text can be tokenized.

    Short texts produce fewer ids than requested.
    """
    first = next(texts)  # here, because the library hides errors of iterators
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # The library's set is unordered. Sorting makes ids independent of hash seeds.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    return tokenizer


def output_file(output: str) -> Path:
    path = Path(output)
    return path if path.suffix == ".json" else path / "tokenizer.json"


def write(tokenizer: Tokenizer, path: Path) -> None:
    """Writes tokenizer.json atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced_file(path) as file:
        file.write(tokenizer.to_str(pretty=True).encode())


if __name__ == "__main__":
    sys.exit(main())
