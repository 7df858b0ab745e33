"""Prints tables of a recorded test run (recorder.py): costs, coverage, lines that lost coverage, tests of a line.

    python -m tests.recording.table costs FOLDER [--by test] [--write tests/recording/costs.txt]
    python -m tests.recording.table coverage FOLDER [--write tests/recording/coverage.json]
    python -m tests.recording.table lost BASE_FOLDER FOLDER --base COMMIT [--of megatron/core/optimizer ...]
    python -m tests.recording.table tests FOLDER megatron/core/timers.py:40

`lost` compares with a record made at COMMIT. It prints lines that exist in both versions and were covered only then.
`tests` prints the tests that run a line.
"""

import argparse
import difflib
import io
import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from coverage.python import PythonParser
from rich.console import Console
from rich.table import Table

from tests.structure.measure import PRODUCT, ROOT

PROGRAMS = "programs"  # Python programs that tests start, including ranks of torchrun
BROWSERS = "browsers and killed programs"  # processes that ended without a record


def main(argv: list[str] | None = None) -> int:
    """Runs the command line. Returns the exit status, which is 1 if lines lost their coverage."""
    options = _parse(argv)
    if options.command == "costs":
        rows = costs(read_records(options.folder), by_test=options.by == "test")
        _print(rows)
        if options.write:
            printed = io.StringIO()
            _print(rows, file=printed)
            lines = (line.rstrip() for line in printed.getvalue().splitlines())
            options.write.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return 0
    if options.command == "coverage":
        summary = summarize(covered_lines(read_records(options.folder)), read_records(options.folder))
        print(f"{summary['covered']} of {summary['statements']} statements, {summary['tests']} tests")
        if options.write:
            options.write.write_text(json.dumps(summary, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    if options.command == "tests":
        name, line = options.line
        print("\n".join(sorted(tests_of_lines(read_records(options.folder), name).get(line, ()))))
        return 0
    before, now = covered_lines(read_records(options.base_folder)), covered_lines(read_records(options.folder))
    lost = lost_lines(before, now, base=options.base, prefixes=options.of)
    for name, line, text in lost:
        print(f"{name}:{line} {text}")
    print(f"{len(lost)} lines are no longer covered")
    return int(bool(lost))


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    costs_of = commands.add_parser("costs")
    costs_of.add_argument("folder", type=Path)
    costs_of.add_argument("--by", choices=("file", "test"), default="file")
    costs_of.add_argument("--write", type=Path)
    coverage_of = commands.add_parser("coverage")
    coverage_of.add_argument("folder", type=Path)
    coverage_of.add_argument("--write", type=Path)
    lost = commands.add_parser("lost")
    lost.add_argument("base_folder", type=Path)
    lost.add_argument("folder", type=Path)
    lost.add_argument("--base", required=True, metavar="COMMIT")
    lost.add_argument("--of", nargs="*", default=[""], metavar="PREFIX")
    tests_of = commands.add_parser("tests")
    tests_of.add_argument("folder", type=Path)
    tests_of.add_argument("line", type=_file_and_line, metavar="FILE:LINE")
    return parser.parse_args(argv)


def _file_and_line(text: str) -> tuple[str, int]:
    name, _, line = text.rpartition(":")
    return name, int(line)


def read_records(folder: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a folder (format: recorder.py)."""
    paths = sorted(folder.glob("*.jsonl"))
    if not paths:
        raise SystemExit(f"error: {folder} holds no record: RECORD_TESTS={folder} makes one, see docs/testing.md")
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            yield json.loads(line)


def covered_lines(records: Iterable[dict[str, Any]]) -> dict[str, set[int]]:
    """Maps each file of the product to the lines that some test runs."""
    covered: dict[str, set[int]] = defaultdict(set)
    for record in records:
        for name, lines in record["lines"].items():
            covered[name].update(lines)
    return dict(covered)


def tests_of_lines(records: Iterable[dict[str, Any]], name: str) -> dict[int, set[str]]:
    """Maps each line of a file to the ids of the tests that run it."""
    tests: dict[int, set[str]] = defaultdict(set)
    for record in records:
        for line in record["lines"].get(name, ()):
            tests[line].add(record["test"])
    return dict(tests)


def costs(records: Iterable[dict[str, Any]], *, by_test: bool) -> list[list[str]]:
    """Returns rows of CPU seconds: a header, the sum, and one row per file or test, the most expensive first.

    Columns: number of tests, number of ranks forked for them, total seconds, and seconds by mechanism.
    """
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    tests: dict[str, set[str]] = defaultdict(set)
    ranks: Counter[str] = Counter()
    for record in records:
        name = record["test"] if by_test else record["test"].partition("::")[0]
        row = seconds[name]
        tests[name].add(record["test"])
        ranks[name] += record["kind"] == "rank"
        if record["kind"] == "program":
            # The program's time is also counted as children's time of the test that waited for it.
            row[PROGRAMS] += record["cpu"]
            row[BROWSERS] -= record["cpu"]
        else:
            row.update(record["seconds"])
            row[BROWSERS] += record["children"]
    total: Counter[str] = Counter()
    for row in seconds.values():
        total.update(row)  # adding Counters would drop negative values
    columns = [name for name, _ in total.most_common()]
    head = ["", "tests", "ranks", "seconds", *columns]
    rows = sorted(seconds, key=lambda name: -seconds[name].total())
    listed = [("all", sum(map(len, tests.values())), ranks.total(), total)]
    listed += [(name, len(tests[name]), ranks[name], seconds[name]) for name in rows]
    return [
        head,
        *(
            [name, str(num_tests), str(num_ranks), f"{row.total():.1f}", *(f"{row[column]:.1f}" for column in columns)]
            for name, num_tests, num_ranks, row in listed
        ),
    ]


def summarize(covered: dict[str, set[int]], records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Returns the numbers of tests and statements, and for each file the lines of statements that no test runs."""
    paths = [path for place in PRODUCT for path in _python_files(ROOT / place)]
    statements = {str(path.relative_to(ROOT)): statements_of(path) for path in paths}
    missing = {name: sorted(lines - covered.get(name, set())) for name, lines in statements.items()}
    return {
        "tests": len({record["test"] for record in records if "::" in record["test"]}),
        "statements": sum(map(len, statements.values())),
        "covered": sum(len(lines) - len(missing[name]) for name, lines in statements.items()),
        "not covered": {name: _ranges(lines) for name, lines in missing.items() if lines},
    }


def lost_lines(
    before: dict[str, set[int]], now: dict[str, set[int]], *, base: str, prefixes: list[str]
) -> list[tuple[str, int, str]]:
    """Returns (file, line, text), as of now, of lines that exist in both versions but are covered only in the base."""
    lost = []
    for name in sorted(before):
        path = ROOT / name
        if not name.startswith(tuple(prefixes)) or not path.exists():
            continue
        old = subprocess.run(
            ["git", "show", f"{base}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        new = path.read_text(encoding="utf-8").splitlines()
        statements = statements_of(path)
        for block in difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks():
            for offset in range(block.size):
                was, line = block.a + offset + 1, block.b + offset + 1
                if was in before[name] and line in statements and line not in now.get(name, set()):
                    lost.append((name, line, new[line - 1].strip()))
    return lost


def _python_files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place]


def statements_of(path: Path) -> set[int]:
    """Returns the first lines of a file's statements, as coverage counts them."""
    parser = PythonParser(text=path.read_text(encoding="utf-8"), exclude=r"if TYPE_CHECKING:|raise NotImplementedError")
    parser.parse_source()
    return set(parser.statements)


def _ranges(lines: list[int]) -> str:
    """Formats line numbers as ranges: [1, 2, 3, 7] -> "1-3 7"."""
    groups: list[list[int]] = []
    for line in lines:
        if groups and groups[-1][-1] == line - 1:
            groups[-1].append(line)
        else:
            groups.append([line])
    return " ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _print(rows: list[list[str]], file: IO[str] | None = None) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, title in enumerate(rows[0]):
        table.add_column(title, justify="right" if index else "left", no_wrap=not title or len(title) < 12)
    for row in rows[1:]:
        table.add_row(*row)
    width = None if file is None and sys.stdout.isatty() else 250
    Console(width=width, file=file, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
