"""Finds the step at which the losses of two runs diverge: `python tools/compare_runs.py A B`.

A and B are folders with steps.jsonl. Exit status: 0 if no common step differs by more than --rtol (0: bitwise), 1 if
one does or there is no common step, 2 if a log cannot be read. Time and memory are not compared.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.tools.run_log import TIMINGS, RunLog, Series, read_run
from megatron.version_flag import PrintVersions

# In the order in which a step computes them, because a difference in one field explains differences in later fields.
CAUSES = ("consumed_samples", "global_batch_size", "learning_rate", "weight_decay", "loss_scale", "lm_loss")
LAST = ("grad_norm", "num_zeros", "params_norm", "skipped", "validation_loss", "test_loss")
NUM_INTERVALS = 8
NOT_SET = "not set"


@dataclass(frozen=True)
class Difference:
    """The difference of one field over the steps that both runs contain.

    steps: [n] int64. a, b: values, [n] float64. parted: [n] bool, true where the values are not bitwise equal.
    relative: [n] float64, |a - b| / max(|a|, |b|), infinite if only one of them is a number.
    """

    name: str
    steps: np.ndarray
    a: np.ndarray
    b: np.ndarray
    parted: np.ndarray
    relative: np.ndarray

    @property
    def first(self) -> int | None:
        """The first step whose values are not bitwise equal, or None."""
        return int(self.steps[self.parted.argmax()]) if self.parted.any() else None

    @property
    def largest(self) -> float:
        """The largest relative difference, or 0 without common steps."""
        return float(self.relative.max(initial=0.0))


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status."""
    options = parse_options(argv)
    try:
        a, b = read_run(options.a), read_run(options.b)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differences = compare(a, b)
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False)
    console.print(f"A: {a.path}: {steps_text(a.steps)}\nB: {b.path}: {steps_text(b.steps)}", soft_wrap=True)
    console.print(headline(a, b, differences=differences), style="bold", soft_wrap=True)
    print_sizes(console, differences)
    print_only_in_one(console, {"A": a, "B": b})
    print_records(console, {"A": a.record, "B": b.record})
    if not np.intersect1d(a.steps, b.steps).size:
        return 1
    return int(any(one.largest > options.rtol or (options.rtol == 0 and one.parted.any()) for one in differences))


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("a", type=Path, metavar="A", help="folder of a run (--tensorboard-dir or --save), or its log")
    parser.add_argument("b", type=Path, metavar="B", help="the other run")
    parser.add_argument(
        "--rtol", type=float, default=0.0, help="relative difference up to which runs count as equal (default: 0)"
    )
    options = parser.parse_args(argv)
    if not 0 <= options.rtol < float("inf"):
        parser.error(f"--rtol is {options.rtol}: must be 0 or more")
    return options


def compare(a: RunLog, b: RunLog) -> list[Difference]:
    """Compares all fields that occur in both logs, except times, in the order in which a step computes them."""
    common = [name for name in a.series if name in b.series and not name.startswith(TIMINGS)]
    return [_difference(name, a.series[name], other=b.series[name]) for name in sorted(common, key=_place_in_step)]


def _place_in_step(name: str) -> tuple[int, str]:
    if name in CAUSES:
        return CAUSES.index(name), name
    return len(CAUSES) + (1 + LAST.index(name) if name in LAST else 0), name


def _difference(name: str, one: Series, *, other: Series) -> Difference:
    steps, at_one, at_other = np.intersect1d(one.steps, other.steps, assume_unique=True, return_indices=True)
    a, b = one.values[at_one], other.values[at_other]
    both_nan = np.isnan(a) & np.isnan(b)
    parted = (a.view(np.int64) != b.view(np.int64)) & ~both_nan
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        relative = np.where(parted, np.abs(a - b) / np.maximum(np.abs(a), np.abs(b)), 0.0)
    relative[(a == b) | both_nan] = 0.0
    relative[np.isnan(relative)] = np.inf
    return Difference(name, steps, a, b, parted, relative)


def headline(a: RunLog, b: RunLog, *, differences: list[Difference]) -> str:
    """Describes where the runs diverge: one sentence, followed by a line for each field that differs at that step."""
    common = np.intersect1d(a.steps, b.steps)
    if not common.size:
        return "The logs have no step in common."
    parted = [(first, one) for one in differences if (first := one.first) is not None]
    if not parted:
        return f"All {len(common):,} common steps are bitwise equal."
    step = min(first for first, _ in parted)
    there = [one for first, one in parted if first == step]
    before = int((common < step).sum())
    lines = [
        f"The runs diverge at iteration {step}, first in {there[0].name}; the {before:,} common steps before "
        "it are equal."
    ]
    for one in there:
        at = int(one.parted.argmax())
        lines.append(f"  {one.name}: {one.a[at]!s} | {one.b[at]!s} (relative {one.relative[at]:.1e})")
    return "\n".join(lines)


def print_sizes(console: Console, differences: list[Difference]) -> None:
    """Prints the largest relative difference of each field, and how the difference of the loss grows over the run."""
    parted = [one for one in differences if one.parted.any()]
    if not parted:
        return
    table = _table("field", "first differs at", "steps that differ", "largest relative", "at step", "at the last step")
    for one in parted:
        largest = int(one.steps[one.relative.argmax()])
        count = f"{int(one.parted.sum()):,} of {len(one.steps):,}"
        table.add_row(
            one.name, str(one.first), count, f"{one.largest:.2e}", str(largest), f"{float(one.relative[-1]):.2e}"
        )
    console.print(table)
    loss = next((one for one in parted if one.name == "lm_loss"), None)
    if loss is not None and len(loss.steps) > NUM_INTERVALS:
        table = _table("steps", "largest relative difference of lm_loss", "mean")
        for part in np.array_split(np.arange(len(loss.steps)), NUM_INTERVALS):
            values = loss.relative[part]
            span = f"{loss.steps[part[0]]} to {loss.steps[part[-1]]}"
            table.add_row(span, f"{values.max():.2e}", f"{values.mean():.2e}")
        console.print(table)


def print_only_in_one(console: Console, runs: dict[str, RunLog]) -> None:
    """Prints the steps and fields that only one log contains, and the number of unreadable lines."""
    for name, other_name in (("A", "B"), ("B", "A")):
        run, other = runs[name], runs[other_name]
        only = np.setdiff1d(run.steps, other.steps)
        if only.size:
            console.print(f"Only in {name}: {steps_text(only)}", soft_wrap=True)
        fields = sorted(set(run.series) - set(other.series))
        if fields:
            console.print(f"Fields only in {name}: {', '.join(fields)}", soft_wrap=True)
        if run.num_unreadable:
            console.print(f"Unreadable lines in {name}: {run.num_unreadable}")


def steps_text(steps: np.ndarray) -> str:
    """Formats step numbers as ranges. steps: [n], int64, increasing."""
    if not steps.size:
        return "no steps"
    pieces = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    spans = [f"{piece[0]}" if len(piece) == 1 else f"{piece[0]} to {piece[-1]}" for piece in pieces]
    shown = ", ".join(spans if len(spans) <= 6 else [*spans[:3], "...", *spans[-2:]])
    return f"{steps.size:,} steps ({shown})"


def print_records(console: Console, records: dict[str, dict[str, Any]]) -> None:
    """Prints how flags, environment and model differ between the two run.json files."""
    missing = [name for name, record in records.items() if not record]
    if missing:
        console.print(f"No run.json in {' and '.join(missing)}: flags and environment are not compared.")
        return
    table = _table("", "name", "A", "B")
    for part in ("flags", "environment", "model"):
        parts = [record.get(part) or {} for record in records.values()]
        for name in sorted({name for values in parts for name in values}):
            values = [settings.get(name, NOT_SET) for settings in parts]
            if values[0] != values[1]:
                table.add_row(part, name, *map(str, values))
    console.print(table if table.row_count else "Flags, environment and model are the same.")


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), title_justify="left")
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


if __name__ == "__main__":
    sys.exit(main())
