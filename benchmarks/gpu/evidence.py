"""Reads what GPU checks recorded, and decides what it says about each claim. Runs, measures and writes nothing.

checks.jsonl has lines of results and verdicts, written by the runner. gpu_evidence.yaml has what no program knows: the
claims with the checks that test them, and the causes of failures. Neither torch nor the list of checks is imported, so
that results of earlier lists remain evidence.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import yaml

JOURNAL, EVIDENCE = "checks.jsonl", "gpu_evidence.yaml"
DECIDING = ("passed", "failed", "timed out")  # verdicts that say something about a claim
OTHER = "Other checks"
TESTS_FAILED = 1  # pytest's exit status if all tests ran and some failed


class Outcome(Enum):
    """The verdict on a claim. The page shows the value as it stands here."""

    PASSED = "passed"
    RERUN = "passed when rerun"
    PARTLY = "passed in part"
    TEST_WRONG = "test was wrong, not rerun yet"
    FAILED = "**failed**"
    TIMED_OUT = "**timed out**"
    NOT_YET = "not yet"

    @property
    def is_open(self) -> bool:
        """Whether the claim was not shown to hold on a GPU."""
        return self not in (Outcome.PASSED, Outcome.RERUN)


@dataclass(frozen=True, eq=False)  # compared by identity: results are dictionaries
class Run:
    """One execution of a check.

    verdict: "" if its runner was killed. results: of the check as a whole. sides: results by side. is_whole: whether a
    run of tests came to its end, so that those of its tests that it does not list as failed have passed.
    """

    check: str
    verdict: str
    date: str
    device: str
    torch: str
    commit: str
    is_dry: bool
    results: Mapping[str, Any] = field(default_factory=dict)
    sides: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    is_whole: bool = True

    @property
    def lists_tests(self) -> bool:
        """Whether its sides are tests. Runs before 2026-11-28 list only those that failed."""
        return bool(self.sides) and all("::" in side for side in self.sides)

    @property
    def tests(self) -> list[str]:
        """Ids of the tests that ran, rather than were skipped, if it lists them."""
        return [test for test, values in self.sides.items() if values.get("outcome") != "skipped"]

    @property
    def failures(self) -> Mapping[str, str]:
        """Failed tests with the end of their output; empty if the check runs no tests or ended before it reported."""
        found = self.results.get("failures")
        return found if isinstance(found, dict) else {}


class Item(NamedTuple):
    """Evidence for a claim: a check, or those of its tests whose ids match a pattern."""

    check: str
    pattern: str | None

    @classmethod
    def parse(cls, text: str) -> "Item":
        """Reads `check` or `check::pattern`."""
        check, _, pattern = text.partition("::")
        return cls(check, pattern or None)

    def matches(self, test: str | None) -> bool:
        """Whether it covers the test with this id. test: None stands for the whole check."""
        return self.pattern is None or (test is not None and fnmatchcase(test, self.pattern))


@dataclass(frozen=True)
class Claim:
    """A property to show on a GPU. id: name for programs. known: evidence without a GPU."""

    claim: str
    area: str
    items: tuple[Item, ...] = ()
    kernels: tuple[str, ...] = ()
    known: str = ""
    id: str = ""


@dataclass(frozen=True)
class Rerun:
    """A run by hand, which no journal contains, after the cause of a failure was removed.

    ran: the tests that were run. commit: "" if unknown.
    """

    verdict: str
    ran: str
    date: str
    commit: str = ""


@dataclass(frozen=True)
class Cause:
    """Why checks failed or timed out at some commits.

    kind: test, code or machine. seen: how it was seen, if the journal does not say it.
    """

    items: tuple[Item, ...]
    commits: tuple[str, ...]
    kind: str
    cause: str
    rerun: Rerun | None = None
    seen: str = ""

    def explains(self, run: Run, test: str | None) -> bool:
        """Whether it is the cause of a failure of this test in this run. test: None stands for the whole check."""
        return self.is_of(run) and any(item.check == run.check and item.matches(test) for item in self.items)

    def is_of(self, run: Run) -> bool:
        """Whether the run was of one of its commits."""
        return any(run.commit.startswith(commit) for commit in self.commits)


@dataclass(frozen=True)
class Decision:
    """The verdict on a claim.

    run: its newest evidence. causes: of its last failure and of earlier ones, with their runs.
    """

    claim: Claim
    outcome: Outcome
    run: Run | None = None
    causes: tuple[tuple[Run, Cause], ...] = ()

    @property
    def rerun(self) -> Rerun | None:
        """The rerun that decided, if one did."""
        if self.outcome not in (Outcome.RERUN, Outcome.PARTLY):
            return None
        return next((cause.rerun for run, cause in self.causes if run is self.run and cause.rerun), None)


@dataclass(frozen=True)
class Side:
    """One measured way to train a shape. values: ms, tokens_s, mfu, reserved_gib, error, kernels and others."""

    check: str
    shape: str
    name: str
    date: str
    device: str
    commit: str
    values: Mapping[str, Any]
    note: str = ""

    @property
    def ms(self) -> float | None:
        """Milliseconds of a step; None if the side failed."""
        return self.values.get("ms")

    @property
    def error(self) -> str:
        """Why it failed; "" if it did not, or if it needs more memory than there is, which may be expected."""
        return "" if self.is_too_large else str(self.values.get("error") or "")

    @property
    def is_skipped(self) -> bool:
        """Whether it was never started, for lack of time."""
        return "skipped" in self.values

    @property
    def is_too_large(self) -> bool:
        """Whether the device's memory was exhausted."""
        return bool(self.values.get("out_of_memory"))


@dataclass(frozen=True)
class Evidence:
    """The contents of one folder of results.

    tests_of_unlisted_runs: by check, the tests (ids without parameters) of runs that list failed tests only. Such a run
    is evidence for these tests alone. headlines: shapes of the README. numbers: by check, titles of checks whose
    numbers are on the page. measurements: other checks without a claim. on_gpu: runs that were not dry.
    """

    runs: Sequence[Run]
    claims: Sequence[Claim] = ()
    causes: Sequence[Cause] = ()
    by_hand: Sequence[Side] = ()
    tests_of_unlisted_runs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    headlines: Sequence[str] = ()
    numbers: Mapping[str, str] = field(default_factory=dict)
    measurements: Sequence[str] = ()
    on_gpu: Sequence[Run] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_gpu", [run for run in self.runs if not run.is_dry])

    def decisions(self) -> list[Decision]:
        """Returns the verdicts on all claims. A check that no claim names is a claim of its own, so none is lost."""
        named = {item.check for claim in self.claims for item in claim.items} | {*self.numbers, *self.measurements}
        named |= {side.check for side in self.sides()}
        others = [run.check for run in self.on_gpu if run.check not in named and run.verdict in DECIDING]
        added = [Claim(f"`{name}`", OTHER, (Item(name, None),)) for name in dict.fromkeys(others)]
        return [self.decide(claim) for claim in [*self.claims, *added]]

    def decide(self, claim: Claim) -> Decision:
        """Returns the verdict of the newest run that says something about the claim."""
        decided = Decision(claim, Outcome.NOT_YET)
        for run in self.on_gpu:
            items = [item for item in claim.items if item.check == run.check]
            outcome, tests = _verdict_of(run, items) if items else (None, [])
            if outcome is Outcome.PASSED and not self._contains(run, items):
                continue  # no test of the claim failed, because none of them ran
            if outcome is not None:
                found = self._causes_of(run, items, outcome, tests)
                # A cause shows once, with the last run that it explains.
                last = {cause: of for of, cause in decided.causes} | {cause: run for cause in found if cause}
                causes = tuple((of, cause) for cause, of in last.items())
                decided = Decision(claim, _joined(outcome, found), run, causes)
        return decided

    def _contains(self, run: Run, items: Sequence[Item]) -> bool:
        """Returns whether a run is known to have run one of these tests, rather than only skipped them."""
        tests = run.tests if run.lists_tests else self.tests_of_unlisted_runs.get(run.check, ())
        return any(item.matches(test) for item in items for test in (None, *tests))

    def _causes_of(
        self, run: Run, items: Sequence[Item], outcome: Outcome, tests: Sequence[str | None]
    ) -> list[Cause | None]:
        """Returns the cause of each failure, None for an unknown one."""
        if outcome is Outcome.TIMED_OUT:
            # No id tells which test did not end. A cause of exactly these tests comes before one of the whole check.
            own = [cause for cause in self.causes if cause.is_of(run) and {*items} & {*cause.items}]
            whole = [cause for cause in self.causes if cause.explains(run, None)]
            return [next(iter([*own, *whole]), None)]
        return [next((cause for cause in self.causes if cause.explains(run, test)), None) for test in tests]

    def sides(self) -> list[Side]:
        """Returns the latest measurement of each side of a shape, by check, without unfinished ones.

        Times taken by hand come first, of shapes that no check has measured.
        """
        found: dict[str, dict[tuple[str, str], Side]] = {}
        for run in self.on_gpu:
            for name, values in run.sides.items():
                of_check, key = found.setdefault(run.check, {}), (values.get("shape", ""), name)
                # A side that was not started does not replace an earlier measurement.
                if "shape" in values and (
                    {"ms", "error"} & values.keys() or ("skipped" in values and key not in of_check)
                ):
                    of_check.pop(key, None)  # in the order of the last run
                    of_check[key] = Side(run.check, *key, run.date, run.device, run.commit, values)
        measured = [side for sides in found.values() for side in sides.values()]
        shapes = {side.shape for side in measured}
        return [*(side for side in self.by_hand if side.shape not in shapes), *measured]

    def targets(self) -> list[tuple[Run, Mapping[str, Any]]]:
        """Returns the latest value of each target, with its run."""
        found = {
            (run.check, target["name"]): (run, target)
            for run in self.on_gpu
            for target in run.results.get("targets") or ()
        }
        return [*found.values()]

    def last(self, check: str, result: str = "") -> Run | None:
        """Returns the last run of a check on a GPU that reported something. result: name of one that it must have."""
        runs = [run for run in self.on_gpu if run.check == check and (run.results or run.sides)]
        return next((run for run in reversed(runs) if not result or result in run.results), None)


def read(results: Path) -> Evidence:
    """Returns the evidence in a folder of results. Without a gpu_evidence.yaml there, this project's is used."""
    own = results / EVIDENCE
    path = own if own.exists() else Path(__file__).resolve().parent.parent / "results" / EVIDENCE
    written = yaml.safe_load(path.read_text(encoding="utf-8"))
    claims = [
        Claim(
            one["claim"], area["name"], _items(one["checks"]), tuple(one.get("kernels", ())), one.get("known", ""),
            one.get("id", ""),
        )
        for area in written["areas"]
        for one in area["claims"]
    ]  # fmt: skip
    causes = [
        Cause(
            _items(one["of"]), tuple(map(str, one["commits"])), one["kind"], one["cause"], _rerun(one.get("rerun")),
            one.get("seen", ""),
        )
        for one in written["causes"]
    ]  # fmt: skip
    by_hand = [
        Side(
            "", one["shape"], side["side"], str(one["date"]), one["device"], one.get("commit", ""), side,
            one.get("note", ""),
        )
        for one in (written["by_hand"] if own.exists() else ())  # not of results in other folders
        for side in one["sides"]
    ]  # fmt: skip
    names = ("tests_of_unlisted_runs", "headlines", "numbers", "measurements")
    lists = {name: written[name] for name in names}
    return Evidence(runs_of(results / JOURNAL), claims, causes, by_hand, **lists)


def runs_of(path: Path) -> list[Run]:
    """Returns the executions in a journal, in the order of their first lines.

    A line is a result, a verdict, or, until 2026-11-28, an execution with both. Damaged lines are skipped.
    """
    runs: dict[str, Run] = {}
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1] if path.exists() else []
    for number, text in enumerate(texts):
        try:
            values = json.loads(text)
            where, check = values["where"], values["check"]
            key = values.get("run") or f"line {number}"
            date, device, torch, commit = (str(where.get(name) or "") for name in ("date", "device", "torch", "commit"))
            run = runs.get(key) or Run(check, "", date, device, torch, commit, is_dry=bool(where.get("dry_run")))
            runs[key] = _with_line(run, values)
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # damaged by a power failure, or of another version
    return [*runs.values()]


def _with_line(run: Run, values: Mapping[str, Any]) -> Run:
    """Returns the run with the results and the verdict of one more line."""
    results, side = values.get("results") or {}, values.get("side")
    if "verdict" in values:
        is_whole = values.get("exit_status") in (0, TESTS_FAILED)
        run = replace(run, verdict=str(values["verdict"]), is_whole=is_whole)
    if side is not None:
        return replace(run, sides={**run.sides, side: {**run.sides.get(side, {}), **results}})
    return replace(run, results={**run.results, **results})


def _items(texts: Iterable[str]) -> tuple[Item, ...]:
    return tuple(Item.parse(text) for text in texts)


def _rerun(values: Mapping[str, Any] | None) -> Rerun | None:
    if values is None:
        return None
    return Rerun(values["verdict"], values["ran"], str(values["date"]), str(values.get("commit", "")))


def _verdict_of(run: Run, items: Sequence[Item]) -> tuple[Outcome | None, list[str | None]]:
    """Returns what a run says about these tests of its check, and the failed ones; [None] if it does not list them."""
    if run.lists_tests and not any(item.matches(test) for item in items for test in run.tests):
        return None, []
    match run.verdict:
        case "passed":
            return Outcome.PASSED, []
        case "timed out":
            return Outcome.TIMED_OUT, [None]
        case "failed" if not run.failures or not run.is_whole:
            return Outcome.FAILED, [None]
        case "failed":
            failed: list[str | None] = [test for test in run.failures if any(item.matches(test) for item in items)]
            return (Outcome.FAILED, failed) if failed else (Outcome.PASSED, [])
    return None, []


def _joined(outcome: Outcome, causes: Sequence[Cause | None]) -> Outcome:
    """Returns the outcome of a run in view of the causes of its failures and of what was run again."""
    known = [cause for cause in causes if cause is not None]
    if outcome is Outcome.PASSED or len(known) < len(causes):
        return outcome
    verdicts = {cause.rerun.verdict if cause.rerun else "" for cause in known}
    if verdicts == {"passed"}:
        return Outcome.RERUN
    if verdicts <= {"passed", "partly"}:
        return Outcome.PARTLY
    is_tests = all(cause.kind == "test" for cause in known) and "failed" not in verdicts
    return Outcome.TEST_WRONG if is_tests else outcome
