"""Checks that the gate detects faults: inserts each fault of tools/gate/faults.yaml into a copy of the committed HEAD.

Runs the cases named by the fault with this copy and with an unchanged one. At least one case must differ. Exit status:
0 if every fault was detected, 1 if one was not, 2 if a fault cannot be inserted or its cases do not exist.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(ROOT))

from megatron.tools.gate.cases import CASES, Case  # noqa: E402
from megatron.tools.gate.fault import Fault  # noqa: E402
from megatron.tools.gate.jobs import Tree, ends_on_signals, export, main_folder, run_trees, write_corpora  # noqa: E402
from megatron.tools.gate.verdict import Verdict, failure_of  # noqa: E402
from megatron.tools.same_losses import verdict_on  # noqa: E402

FAULTS = ROOT / "tools" / "gate" / "faults.yaml"
SOUND = "sound"


@dataclass(frozen=True)
class GateFault(Fault):
    """A fault that the gate must detect. cases: names of gate cases, at least one of which must differ."""

    cases: tuple[str, ...]

    def chosen_cases(self) -> list[Case]:
        """Returns the cases named by the fault.

        Raises ValueError for a case that does not exist, or is new and therefore not compared.
        """
        by_name = {case.name: case for case in CASES}
        unknown = [name for name in self.cases if name not in by_name]
        if unknown:
            raise ValueError(f"fault {self.name!r} names cases that do not exist: {', '.join(unknown)}")
        new = [name for name in self.cases if by_name[name].is_new]
        if new:
            raise ValueError(f"fault {self.name!r} names cases of NEW_CASES, which are not compared: {', '.join(new)}")
        return [by_name[name] for name in self.cases]


def read_faults(path: Path = FAULTS) -> list[GateFault]:
    """Reads the faults of a YAML file. Raises TypeError for an entry with unknown or missing keys."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [GateFault(**{**entry, "cases": tuple(entry["cases"])}) for entry in entries]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the seeded faults through the gate and returns the exit status."""
    options = parse_options(argv)
    faults = [fault for fault in read_faults() if fault.is_named(options.only)]
    with ends_on_signals(), tempfile.TemporaryDirectory(prefix="seeded_faults_") as place:
        folder = Path(place)
        try:
            sound = export(options.head, folder / "trees" / SOUND)
            trees = [faulty_tree(fault, sound, name=f"fault_{number:02d}") for number, fault in enumerate(faults)]
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        write_corpora(folder / "data")
        cases = list(dict.fromkeys(case for tree in trees for case in tree.cases))
        run_trees([Tree(SOUND, sound, cases)], folder=folder, base=SOUND)
        # One worker per core at a time: each worker imports its tree.
        at_once = os.cpu_count() or 1
        for first in range(0, len(trees), at_once):
            run_trees(trees[first : first + at_once], folder=folder, base=SOUND)
        broken = [text for case in cases if (text := failure_of(main_folder(case, SOUND, folder=folder)))]
        if broken:
            print(f"error: a case fails without a fault: {broken[0]}", file=sys.stderr)
            return 2
        found = [noticed(tree, folder) for tree in trees]
    print_table(faults, found)
    num_noticed = sum(is_difference(verdict) for _, verdict in found)
    print(f"{num_noticed} of {len(faults)} faults were noticed")
    return int(num_noticed < len(faults))


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--head", default="HEAD", metavar="COMMIT", help="version into which faults are inserted")
    parser.add_argument(
        "--only",
        action="append",
        metavar="TEXT",
        help="run only faults whose name, kind or file contains this; repeatable",
    )
    options = parser.parse_args(argv)
    for text in options.only or ():
        if not any(fault.is_named([text]) for fault in read_faults()):
            parser.error(f"--only is {text!r}: no fault's name, kind or file contains it")
    return options


def faulty_tree(fault: GateFault, sound: Path, *, name: str) -> Tree:
    """Copies the sound tree to its sibling folder `name` and inserts the fault.

    Raises ValueError if the fault cannot be inserted or its cases do not exist.
    """
    folder = sound.with_name(name)
    shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("tests", "docs", "benchmarks", "__pycache__"))
    fault.put_into(folder)
    return Tree(name, folder, fault.chosen_cases())


def noticed(tree: Tree, folder: Path) -> tuple[str, Verdict]:
    """Returns the first case that differs from the sound tree, with its verdict.

    If no case differs, returns the names of all cases and the verdict of the first one.
    """
    verdicts = [(case.name, verdict_on(case, folder, base=SOUND, head=tree.name)) for case in tree.cases]
    different = [(name, verdict) for name, verdict in verdicts if is_difference(verdict)]
    return different[0] if different else (", ".join(name for name, _ in verdicts), verdicts[0][1])


def is_difference(verdict: Verdict) -> bool:
    """Returns whether both runs succeeded and differ. A failing run would be noticed without the gate."""
    return not verdict.is_same and not verdict.is_failure


def print_table(faults: Sequence[GateFault], found: Sequence[tuple[str, Verdict]]) -> None:
    """Prints a row for each fault."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("fault", "kind", "case", "result"):
        table.add_column(title, overflow="fold")
    for fault, (case, verdict) in zip(faults, found, strict=True):
        text = verdict.text if is_difference(verdict) else f"NOT NOTICED: {verdict.text}"
        table.add_row(fault.name, fault.kind, case, text)
    Console(width=None if sys.stdout.isatty() else 240, highlight=False, markup=False).print(table)


if __name__ == "__main__":
    sys.exit(main())
