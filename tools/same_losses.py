"""Checks that a change leaves all results bitwise equal: `python tools/same_losses.py BASE_COMMIT`.

Trains with two versions. The base is that commit, and the head is this working tree or the commit of --head. Both run
the small cases of tools/gate/cases.py at the same time, with the same Python. All logged and saved values must be
bitwise equal, also when both resume a checkpoint of the base. Exit status: 0 if they are, 1 if not, 2 if a commit
cannot be read.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(ROOT))

from megatron.tools.gate.cases import RESULT, Case, cases_named  # noqa: E402
from megatron.tools.gate.jobs import (  # noqa: E402
    Tree,
    ends_on_signals,
    export,
    main_folder,
    resumed_folder,
    run_trees,
    write_corpora,
)
from megatron.tools.gate.verdict import Verdict, judge, judge_new  # noqa: E402

BASE, HEAD = "base", "head"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases with both versions, prints a table and returns the exit status."""
    options = parse_options(argv)
    cases = list(dict.fromkeys(case for text in options.only or [""] for case in cases_named(text)))
    started_at = time.monotonic()
    with ExitStack() as stack:
        stack.enter_context(ends_on_signals())
        folder = options.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="same_losses_")))
        try:
            base = export(options.base, folder / "trees" / BASE)
            head = export(options.head, folder / "trees" / HEAD) if options.head else ROOT
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        write_corpora(folder / "data")
        run_trees([Tree(BASE, base, cases), Tree(HEAD, head, cases)], folder=folder, base=BASE)
        verdicts = [verdict_on(case, folder, base=BASE, head=HEAD) for case in cases]
        seconds = [seconds_of(main_folder(case, HEAD, folder=folder)) for case in cases]
    print_table(cases, verdicts, seconds=seconds)
    num_same = sum(verdict.is_same for verdict in verdicts)
    minutes = (time.monotonic() - started_at) / 60
    print(f"{num_same} of {len(cases)} cases are equal to {options.base} ({minutes:.1f} minutes)")
    return int(num_same < len(cases))


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", metavar="BASE_COMMIT", help="reference version")
    parser.add_argument("--head", metavar="COMMIT", help="version to check; default: the files of this working tree")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run only the case with this name, or all cases whose names contain it; repeatable",
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="new folder for the runs, kept afterwards")
    options = parser.parse_args(argv)
    for text in options.only or ():
        if not any(cases_named(text)):
            parser.error(f"--only is {text!r}: no case name contains it")
    if options.keep is not None:
        options.keep = options.keep.resolve()
        if options.keep.exists():
            parser.error(f"--keep is {options.keep}: the folder already exists")
    return options


def verdict_on(case: Case, folder: Path, *, base: str, head: str) -> Verdict:
    """Compares a case's runs in two trees: the runs from scratch, then the runs from the base's checkpoint."""
    if case.is_new:
        return judge_new(*(main_folder(case, tree, folder=folder) for tree in (base, head)))
    verdict = judge(*(main_folder(case, tree, folder=folder) for tree in (base, head)))
    if case.resume_at is None or not verdict.is_same:
        return verdict
    resumed = judge(*(resumed_folder(case, tree, folder=folder) for tree in (base, head)))
    if resumed.is_same:
        return Verdict(True, f"{verdict.text}, resumed from the base's step {case.resume_at}")
    return Verdict(False, f"resumed from the base's step {case.resume_at}: {resumed.text}")


def seconds_of(place: Path) -> float:
    """Returns the duration of the run in a folder in seconds, or 0 if there was none."""
    result = place / RESULT
    content: Mapping[str, float] = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    return content.get("seconds", 0.0)


def print_table(cases: Sequence[Case], verdicts: Sequence[Verdict], *, seconds: Sequence[float]) -> None:
    """Prints a row for each case."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("case", "ranks", "seconds", "result"):
        table.add_column(title, overflow="fold")
    for case, verdict, time_taken in zip(cases, verdicts, seconds, strict=True):
        text = verdict.text if verdict.is_same else f"DIFFERENT: {verdict.text}"
        table.add_row(case.name, str(case.ranks), f"{time_taken:.1f}", text)
    Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
