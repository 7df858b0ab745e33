"""Finds the tests that notice faults: puts each fault of faults.yaml into a copy of a commit, and runs its tests.

    python -m tests.mutants RECORD [--only TEXT] [--again NAME]
    python -m tests.mutants --base COMMIT [--whole-suite]
    python -m tests.mutants --table

RECORD: a folder written by tests/recording, which lists the tests that run a fault's lines. Results are stored in
results.json as soon as they are known, so an interrupted run can continue. Tables are written to results.txt.
--base runs the faults that no test noticed with the tests of an older commit. --table prints the stored results.
Exit status: 0 if every fault was noticed, 1 if a fault was missed, 2 if a fault cannot be put in or a commit cannot be
read, 130 if Ctrl-C stopped the run.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from megatron.tools.gate.jobs import ends_on_signals, export
from tests.mutants.pytest_runs import EVERYTHING, Limits, run_tests
from tests.mutants.results import Mutant, Result, Results, Version, print_tables, read_mutants, written_tables
from tests.mutants.selection import Record, choose_all, choose_without_record
from tests.mutants.trials import Trials

ROOT = Path(__file__).resolve().parents[2]
COLLECTION_SECONDS = 600.0
LIMIT = 300.0  # seconds per fault
BASE_LIMIT = 1800.0


def main(argv: Sequence[str] | None = None, *, root: Path = ROOT) -> int:
    """Runs the command line and returns the exit status. root: the repository whose commits are tested."""
    options = _parse(argv)
    results = Results.read(options.results)
    try:
        faults = read_mutants(options.faults)
        named = [fault for fault in faults if fault.is_named(options.only)]
        if not options.table:
            with ends_on_signals(), tempfile.TemporaryDirectory(prefix="mutants_") as place:
                run = _run_base if options.base else _run
                run(named, results, options, folder=Path(place), root=root)
            options.results.with_suffix(".txt").write_text(written_tables(faults, results, root), encoding="utf-8")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"stopped; the results so far are in {options.results}, run again to go on", file=sys.stderr)
        return 130
    print_tables(named, results, root)
    return int(any(fault.name not in results.faults or not results.faults[fault.name].noticed_by for fault in named))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("record", nargs="?", type=Path)
    parser.add_argument("--record-commit", metavar="COMMIT", help="version that was recorded; default: RECORD/commit")
    parser.add_argument("--commit", default="HEAD", help="version that faults are put into")
    parser.add_argument("--only", action="append", metavar="TEXT", help="faults with this in name, kind or file")
    parser.add_argument("--again", action="append", default=[], metavar="NAME", help="run this fault once more")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument(
        "--limit", type=float, metavar="SECONDS", help=f"for one fault; {LIMIT:.0f}, with --base {BASE_LIMIT:.0f}"
    )
    parser.add_argument("--test-limit", type=float, default=60.0, metavar="SECONDS", help="the least for one test")
    parser.add_argument("--base", metavar="COMMIT", help="run faults that were not noticed with this commit's tests")
    parser.add_argument("--whole-suite", action="store_true", help="with --base: every test, the module's first")
    parser.add_argument("--table", action="store_true", help="print the stored results")
    parser.add_argument("--faults", type=Path, default=here / "faults.yaml", metavar="FILE")
    parser.add_argument("--results", type=Path, default=here / "results.json", metavar="FILE")
    options = parser.parse_args(argv)
    if options.record is None and not options.base and not options.table:
        parser.error("RECORD is missing: RECORD_TESTS=FOLDER makes one, see docs/testing.md")
    return options


def _run(named: list[Mutant], results: Results, options: argparse.Namespace, *, folder: Path, root: Path) -> None:
    """Tries the faults without a valid result. Raises ValueError if a fault cannot be put in."""
    version = Version.at(root, options.commit)
    sound = export(version.commit, folder / "sound", root=root)
    for fault in named:
        path = sound / fault.file
        fault.changed(path.read_text(encoding="utf-8") if path.exists() else "")
    limit = options.limit or LIMIT
    known = {fault.name for fault in named if results.is_known(fault, version, limit=limit, tree=sound)}
    due = [fault for fault in named if fault.name in options.again or fault.name not in known]
    if not due:
        return
    record_commit = options.record_commit or _commit_of(options.record)
    places = {"folder": options.record, "root": root, "record_commit": record_commit, "commit": version.commit}
    chosen, record = choose_all(due, sound, **places)
    results.slow = _slow_tests(sound, folder / "collection", record)
    limits = Limits(test=options.test_limit, recorded=record.seconds)
    trials = Trials(sound, version, chosen, limit, limits)
    trials.run(due, options.jobs, lambda fault, result: _store(fault, result, results, results.faults))


def _run_base(named: list[Mutant], results: Results, options: argparse.Namespace, *, folder: Path, root: Path) -> None:
    """Tries the faults that no test noticed with the product and the tests of an older commit."""
    version = Version.at(root, options.base)
    sound = export(version.commit, folder / "sound", root=root)
    limit = options.limit or BASE_LIMIT
    missed = [fault for fault in named if fault.name in results.faults and not results.faults[fault.name].noticed_by]
    due = [
        fault
        for fault in missed
        if fault.name in options.again or not results.is_known(fault, version, limit=limit, base=True)
    ]
    chosen = {
        fault.name: choose_without_record(fault.file, sound, whole_suite=options.whole_suite)
        for fault in due
        if (sound / fault.file).exists()
    }
    trials = Trials(sound, version, chosen, limit, Limits(test=options.test_limit))
    trials.run(due, options.jobs, lambda fault, result: _store(fault, result, results, results.base))


def _commit_of(record: Path) -> str:
    path = record / "commit"
    if not path.exists():
        raise ValueError(f"{path} does not exist: --record-commit must say which commit was recorded")
    return path.read_text(encoding="utf-8").strip()


def _slow_tests(sound: Path, work: Path, record: Record) -> dict[str, float]:
    """Collects every test of the sound tree, and returns the slow tests with their recorded seconds."""
    run = run_tests(sound, EVERYTHING, work=work, seconds=COLLECTION_SECONDS, marks="not soak", collect_only=True)
    if run.failures or run.out_of_time:
        raise ValueError(f"the tests cannot be collected without a fault: {run.failures or 'out of time'}")
    return {test: round(record.seconds.get(test, 0.0), 1) for test, is_slow in run.chosen.items() if is_slow}


def _store(fault: Mutant, result: Result, results: Results, into: dict[str, Result]) -> None:
    into[fault.name] = result
    results.write()
    by = f"{result.tier}: {result.noticed_by}" if result.noticed_by else "not noticed"
    print(f"{fault.name}: {by} ({result.num_tests} tests, {result.seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(main())
