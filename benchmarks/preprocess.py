"""Compares the speed of tools/preprocess_data.py with the tokenizer alone, interleaved in one run on one core.

    python benchmarks/preprocess.py [--rounds 9] [--megabytes 2] [--json FILE]

Prints documents and megabytes per CPU second of three sides, as medians over the rounds: the tool from JSON lines to
token files, `encode` of each text by the tokenizers library alone, and its batch call, which the tool uses. The texts
are the documentation and source code included in Python, and the tokenizer is a byte-level BPE trained on them.
"""

import argparse
import contextlib
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.tools import preprocess_data, python_corpus, train_tokenizer  # noqa: E402

TARGET = 0.9  # documents per second relative to the tokenizer alone


def main() -> None:
    """Measures the sides and prints the table."""
    options = parse_options()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        sides, num_documents, num_bytes = make_sides(Path(folder), options.megabytes)
        rounds: dict[str, list[float]] = {name: [] for name in sides}
        for number in range(options.rounds + 1):
            for name, side in sides.items():
                begin = time.process_time()
                side()
                if number > 0:  # the first round warms up
                    rounds[name].append(time.process_time() - begin)
    report(rounds, options=options, num_documents=num_documents, num_bytes=num_bytes)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds per side (default: 9)")
    parser.add_argument("--megabytes", type=float, default=2, help="size of the text (default: 2)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def make_sides(folder: Path, megabytes: float) -> tuple[dict[str, Callable[[], object]], int, int]:
    """Returns the measured sides by name, the number of documents, and the size of their text in bytes."""
    text, model = folder / "text.jsonl", folder / "tokenizer.json"
    python_corpus.main(["--output", str(text), "--max-bytes", str(int(megabytes * 1e6))])
    train_tokenizer.main(["--input", str(text), "--output", str(model), "--vocab-size", "4096"])
    texts = [json.loads(line)["text"] for line in text.read_text().splitlines()]
    library = Tokenizer.from_file(str(model))
    words = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(model), "--append-eod"]
    words += ["--input", str(text), "--output-prefix", str(folder / "out"), "--workers", "1"]
    sides: dict[str, Callable[[], object]] = {
        "the tool": lambda: preprocess_data.main(words),
        "encode alone": lambda: [library.encode(one).ids for one in texts],
        "batch encode alone": lambda: [found.ids for found in library.encode_batch_fast(texts)],
    }
    return sides, len(texts), sum(len(one.encode()) for one in texts)


def report(rounds: dict[str, list[float]], *, options: argparse.Namespace, num_documents: int, num_bytes: int) -> None:
    """Prints the table and, if requested, writes it as JSON."""
    medians = {name: statistics.median(seconds) for name, seconds in rounds.items()}
    print(f"{num_documents} documents, {num_bytes / 1e6:.1f} MB, {options.rounds} rounds, CPU seconds of one core")
    print(f"{'':20} {'documents/s':>12} {'MB/s':>8} {'of encode':>10}")
    ratios = {name: medians["encode alone"] / seconds for name, seconds in medians.items()}
    for name, seconds in medians.items():
        print(f"{name:20} {num_documents / seconds:12.0f} {num_bytes / seconds / 1e6:8.2f} {ratios[name]:10.2f}")
    print(f"target: {TARGET} of encode alone")
    if options.json is not None:
        facts = {
            "figures": {
                "documents_per_second": {name: num_documents / seconds for name, seconds in medians.items()},
                "of encode alone": ratios,
                "target": TARGET,
            },
            "rounds": rounds,
            "input": {"documents": num_documents, "bytes": num_bytes},
            "environment": {"python": platform.python_version(), "cores": os.cpu_count()},
        }
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
