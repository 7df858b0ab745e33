"""Results by fault: the test that noticed it. Stored in results.json and printed as tables. Runs no tests."""

import hashlib
import io
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import yaml
from rich.console import Console
from rich.table import Table

from megatron.tools.gate.fault import Fault
from tests.recording.table import statements_of

PRODUCT = ("megatron", "pretrain_gpt.py")
NUM_DEAREST = 60  # rows of the list of slow tests


@dataclass(frozen=True)
class Mutant(Fault):
    """A fault that a test must notice. breaks: the property that the fault violates, in one sentence."""

    breaks: str

    @property
    def text_hash(self) -> str:
        """Hash of the fault's file, old text and new text."""
        return hashlib.sha256("\0".join((self.file, self.old, self.new)).encode()).hexdigest()[:16]

    @property
    def package(self) -> str:
        """Folder of the changed file."""
        return self.file.rpartition("/")[0] or "."


def read_mutants(path: Path) -> list[Mutant]:
    """Reads faults. Raises TypeError for an entry with unknown or missing keys, ValueError for a duplicate name."""
    faults = [Mutant(**entry) for entry in yaml.safe_load(path.read_text(encoding="utf-8")) or ()]
    twice = [name for name, count in Counter(fault.name for fault in faults).items() if count > 1]
    if twice:
        raise ValueError(f"{path}: faults need different names, these are used twice: {', '.join(twice)}")
    return faults


@dataclass(frozen=True)
class Version:
    """A commit, and hashes of the files that results depend on: the product, and the tests outside tests/mutants."""

    commit: str
    product: str
    tests: str

    @classmethod
    def at(cls, root: Path, commit: str) -> "Version":
        """Reads the version `commit` of the repository `root`. Raises ValueError if there is no such commit."""
        full = _git(root, "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
        tests = _git(root, "ls-tree", "-r", full, "--", "tests").splitlines()
        tests = [line for line in tests if "\ttests/mutants/" not in line]
        return cls(full[:12], _hash(_git(root, "ls-tree", "-r", full, "--", *PRODUCT)), _hash("\n".join(tests)))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _git(root: Path, *words: str) -> str:
    run = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
    if run.returncode:
        raise ValueError(f"git {' '.join(words)} in {root}: {run.stderr.strip()}")
    return run.stdout


@dataclass
class Result:
    """The outcome of a fault in a version. tier: fast or slow, the tier of the first test that noticed the fault.

    also: a second test, if only slow tests noticed the fault. fits: False if the version lacks the fault's text.
    out_of_time: whether chosen tests were left after `limit` seconds. broken: tests that fail without the fault.
    """

    text: str
    commit: str
    product: str
    tests: str
    limit: float
    noticed_by: str | None = None
    tier: str | None = None
    how: str = ""
    why: str = ""
    also: str | None = None
    num_tests: int = 0
    seconds: float = 0.0
    out_of_time: bool = False
    fits: bool = True
    broken: list[str] = field(default_factory=list)


@dataclass
class Results:
    """Results by the fault's name. faults: of the current suite. base: of an older suite, for faults that it missed."""

    path: Path
    faults: dict[str, Result] = field(default_factory=dict)
    base: dict[str, Result] = field(default_factory=dict)
    slow: dict[str, float] = field(default_factory=dict)  # recorded seconds of every slow test

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Reads the results of an earlier run, or returns empty results if there are none."""
        stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        parts = {name: {key: Result(**one) for key, one in stored.get(name, {}).items()} for name in ("faults", "base")}
        return cls(path, **parts, slow=stored.get("slow", {}))

    def write(self) -> None:
        """Stores the results, so that an interrupted run can continue."""
        tried = {"faults": self.faults, "base": self.base}
        parts = {name: {key: asdict(one) for key, one in found.items()} for name, found in tried.items()}
        written = self.path.with_suffix(".part")
        written.write_text(json.dumps({**parts, "slow": self.slow}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        written.replace(self.path)

    def is_known(
        self, fault: Mutant, version: Version, *, limit: float, tree: Path | None = None, base: bool = False
    ) -> bool:
        """Returns whether a stored result is still valid, which requires the same fault text and product.

        If a test noticed the fault, `tree` must still contain the test. If no test did, the tests must be unchanged,
        and all of them must have run unless the limit was already `limit` seconds or more.
        """
        result = (self.base if base else self.faults).get(fault.name)
        if result is None or (result.text, result.product) != (fault.text_hash, version.product):
            return False
        all_tried = not result.out_of_time or result.limit >= limit
        if result.noticed_by is not None:
            return tree is None or _has_test(tree, result.noticed_by)
        return result.tests == version.tests and all_tried


def _has_test(tree: Path, test: str) -> bool:
    file, _, name = test.partition("::")
    path = tree / file
    function = name.partition("[")[0].rpartition("::")[2]
    return path.exists() and (not function or f"def {function}(" in path.read_text(encoding="utf-8"))


# Tables.


def print_tables(faults: Sequence[Mutant], results: Results, tree: Path, *, file: IO[str] | None = None) -> None:
    """Prints all faults, sums by package and kind, shares, and slow tests that were never needed to notice a fault."""
    width = 230 if file is not None or not sys.stdout.isatty() else None
    console = Console(width=width, file=file, highlight=False, markup=False)
    known = [fault for fault in faults if fault.name in results.faults]
    console.print(_table_of_faults(known, results))
    console.print()
    console.print(_table_by("package", known, results, lambda fault: fault.package, _shares_of_statements(tree)))
    console.print()
    console.print(_table_by("kind", known, results, lambda fault: fault.kind))
    console.print()
    for line in (*_shares(known, results), "", *_unneeded(known, results)):
        console.print(line, soft_wrap=True)


def written_tables(faults: Sequence[Mutant], results: Results, tree: Path) -> str:
    """Returns the tables as text without trailing spaces."""
    printed = io.StringIO()
    print_tables(faults, results, tree, file=printed)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().splitlines())


def _table_of_faults(faults: Sequence[Mutant], results: Results) -> Table:
    table = _table("fault", "kind", "package", "noticed by", "tier", "tests run", "seconds", right=2)
    for fault in faults:
        result = results.faults[fault.name]
        cells = [str(result.num_tests), f"{result.seconds:.0f}"]
        table.add_row(fault.name, fault.kind, fault.package, _noticed(result), result.tier or "", *cells)
        if fault.name in results.base:
            before = results.base[fault.name]
            cells = [str(before.num_tests), f"{before.seconds:.0f}"]
            table.add_row("", "", f"  at {before.commit}", _noticed(before), before.tier or "", *cells)
    return table


def _noticed(result: Result) -> str:
    if not result.fits:
        return "its text is not in this version"
    if result.noticed_by is None:
        return "NOT NOTICED" + (" within the limit" if result.out_of_time else "")
    how = "" if result.how == "failed" else f" ({result.how})"
    return result.noticed_by + how + (f"; also {result.also}" if result.also else "")


def _table_by(
    title: str,
    faults: Sequence[Mutant],
    results: Results,
    key: Callable[[Mutant], str],
    statements: Mapping[str, float] | None = None,
) -> Table:
    titles = [title, "faults", "by test-fast", "by test", *(["share of faults", "of statements"] if statements else [])]
    table = _table(*titles, right=len(titles) - 1)
    for name in sorted({*map(key, faults), *(statements or ())}):
        found = [results.faults[fault.name] for fault in faults if key(fault) == name]
        counts = [len(found), sum(one.tier == "fast" for one in found), sum(one.tier is not None for one in found)]
        shares = [f"{len(found) / max(len(faults), 1):.1%}", f"{statements.get(name, 0):.1%}"] if statements else []
        table.add_row(name, *map(str, counts), *shares)
    return table


def _shares_of_statements(tree: Path) -> dict[str, float]:
    counts: Counter[str] = Counter()
    for path in sorted(tree.glob("megatron/**/*.py")):
        counts[path.parent.relative_to(tree).as_posix()] += len(statements_of(path))
    return {name: count / counts.total() for name, count in counts.items() if count}


def _shares(faults: Sequence[Mutant], results: Results) -> Iterator[str]:
    found = [results.faults[fault.name] for fault in faults]
    fast = sum(one.tier == "fast" for one in found)
    noticed = sum(one.tier is not None for one in found)
    yield f"make test-fast notices {fast} of {len(found)} faults, make test {noticed}"
    before = {
        fault.name: results.base[fault.name]
        for fault in faults
        if fault.name in results.base and results.faults[fault.name].tier is None
    }
    if before:
        gained = noticed + sum(one.tier is not None for one in before.values())
        commits = ", ".join(sorted({one.commit for one in before.values()}))
        yield (
            f"of the {gained} faults that this suite or that of {commits} notices, make test-fast notices"
            f" {fast / max(gained, 1):.1%}, make test {noticed / max(gained, 1):.1%}"
        )
    missed = [fault for fault in faults if results.faults[fault.name].tier is None]
    for fault in missed:
        yield f"not noticed: {fault.name} ({fault.file}): {fault.breaks}"


def _unneeded(faults: Sequence[Mutant], results: Results) -> Iterator[str]:
    """Returns the slow tests that were never the only tests to notice a fault."""
    found = [results.faults[fault.name] for fault in faults]
    only = {one.noticed_by for one in found if one.tier == "slow" and one.also is None}
    noticing = Counter(test for one in found for test in (one.noticed_by, one.also))
    unneeded = sorted((test for test in results.slow if test not in only), key=lambda test: -results.slow[test])
    seconds, all_seconds = sum(results.slow[test] for test in unneeded), sum(results.slow.values())
    yield (
        f"{len(unneeded)} of {len(results.slow)} slow tests, {seconds:.0f} of {all_seconds:.0f} CPU seconds, were never"
        " the only ones to notice a fault; most did not run, since a fast test noticed the faults that they cover"
        " (CPU seconds, faults noticed first or second):"
    )
    for test in unneeded[:NUM_DEAREST]:
        yield f"{results.slow[test]:8.1f} {noticing[test]:3} {test}"
    rest = unneeded[NUM_DEAREST:]
    if rest:
        yield f"{sum(results.slow[test] for test in rest):8.1f}     {len(rest)} others"


def _table(*titles: str, right: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, title in enumerate(titles):
        table.add_column(title, overflow="fold", justify="right" if index >= len(titles) - right else "left")
    return table
