"""Seeded faults of the device model. Each fault changes one place of the project, and the model has to detect it.

    PYTHONPATH=. .venv/bin/python -m tests.device_model.faults [PART OF A NAME ...]

patches each fault of faults.yaml into the running functions, trains the row that the fault names, and prints whether
the model detected it. A fault of the kind LOSSES makes the program compute with old data, which is in order and alive:
it is detected if losses differ from those without the fault.
"""

import argparse
import gc
import importlib
import sys
import types
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron.tools.gate.fault import Fault
from tests.device_model.host import on_modelled_gpus
from tests.device_model.rows import Modelled, Row, all_rows, train

ROOT = Path(__file__).resolve().parents[2]
LOSSES = "LOSSES"
FAULTS = Path(__file__).with_name("faults.yaml")


@dataclass(frozen=True)
class DeviceFault(Fault):
    """A fault that the model must detect.

    kind: expected kind of alarm, or LOSSES. row: name of the row to train. flags: additional flags. eager: train
    without graphs. steps: number of steps.
    """

    row: str
    flags: str = ""
    eager: bool = False
    steps: int = 2

    def chosen_row(self) -> Row:
        """Returns the row to train with the fault. With graphs, all steps but the first are replays."""
        row = all_rows()[self.row]
        row = row.without_graphs() if self.eager else row
        return Row((*row.argv, *self.flags.split()), row.ranks, num_steps=self.steps)

    def is_detected(self, records: Sequence[Modelled], sound: Sequence[Modelled]) -> bool:
        """Returns whether the records of all ranks show the fault. sound: records without it."""
        if self.kind == LOSSES:
            return any(one.losses != other.losses for one, other in zip(records, sound, strict=True))
        return any(self.kind in record.kinds for record in records)


def read_faults() -> list[DeviceFault]:
    """Returns the faults of faults.yaml. Raises TypeError for an entry with unknown or missing keys."""
    return [DeviceFault(**entry) for entry in yaml.safe_load(FAULTS.read_text(encoding="utf-8"))]


@contextmanager
def put_in(fault: Fault) -> Iterator[None]:
    """Patches a fault into the loaded functions while the context is active. Raises ValueError if it changes none."""
    path = ROOT / fault.file
    text = path.read_text(encoding="utf-8")
    changed = _codes(compile(fault.changed(text), str(path), "exec"))
    sound = _codes(compile(text, str(path), "exec"))
    wanted = {
        name: code
        for name, code in changed.items()
        if code.co_code != sound[name].co_code
        or code.co_consts != sound[name].co_consts
        or code.co_names != sound[name].co_names
    }
    gc.unfreeze()  # the server has frozen all objects that it loaded
    found = [
        one
        for one in gc.get_objects()
        if isinstance(one, types.FunctionType)
        and one.__code__.co_filename == str(path)
        and one.__code__.co_qualname in wanted
    ]
    functions = [one for one in found if one.__code__.co_freevars == wanted[one.__code__.co_qualname].co_freevars]
    if not functions:
        raise ValueError(f"fault {fault.name!r} changes no function that is loaded")
    before = [one.__code__ for one in functions]
    for one in functions:
        one.__code__ = wanted[one.__code__.co_qualname]
    try:
        yield
    finally:
        for one, code in zip(functions, before, strict=True):
            one.__code__ = code


def _codes(code: types.CodeType) -> dict[str, types.CodeType]:
    """Returns the code objects of all functions by qualified name, without nested functions."""
    found = {}
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            if "<" not in one.co_name and one.co_flags & 0x2:  # CO_NEWLOCALS: a function, not a class body
                found[one.co_qualname] = one
            else:
                found |= _codes(one)
    return found


def train_with_faults(faults: Sequence[tuple[DeviceFault, Row]]) -> list[Modelled]:
    """Trains each row with its fault on this rank, and returns the records."""
    records = []
    for fault, row in faults:
        with put_in(fault):
            try:
                records += train([(fault.name, row)])
            except Exception as error:
                records.append(_broken(fault.name, error))
    return records


def _broken(name: str, error: Exception) -> Modelled:
    from tests.device_model.cuda_api import install

    alarms = install().alarms
    return Modelled(
        name,
        alarms=[f"{count} x {alarm}" for alarm, count in alarms.found.items()],
        kinds=sorted(kind.name for kind in alarms.kinds()),
        error=f"{type(error).__name__}: {error}",
    )


def results_of(faults: Sequence[DeviceFault]) -> dict[str, list[Modelled]]:
    """Returns every rank's record for each fault. Faults with the same number of ranks share processes."""
    by_ranks: dict[int, list[tuple[DeviceFault, Row]]] = defaultdict(list)
    for fault in faults:
        row = fault.chosen_row()
        by_ranks[row.ranks].append((fault, row))
    found: dict[str, list[Modelled]] = {}
    for ranks, chosen in by_ranks.items():
        try:
            results = on_modelled_gpus(train_with_faults, ranks, chosen)
        except (RuntimeError, OSError):  # a rank whose peers have ended fails, or does not end
            # A fault that ends one rank leaves the others waiting. Each fault then runs in separate processes.
            for one in chosen if len(chosen) > 1 else ():
                found |= results_of([one[0]])
            if len(chosen) == 1:
                raise
            continue
        for records in zip(*results, strict=True):
            found[records[0].name] = list(records)
    return found


def main() -> None:
    """Prints which faults the model detects."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    options = parser.parse_args()
    faults = [one for one in read_faults() if one.is_named(options.names or None)]
    missed = 0
    for fault in faults:
        try:
            (records,) = results_of([fault]).values()
        except Exception as error:
            records = [Modelled(fault.name, error=f"{type(error).__name__}: {error}")]
        row = fault.chosen_row()
        sound = (
            [one for (one,) in on_modelled_gpus(train, row.ranks, [(fault.name, row)])] if fault.kind == LOSSES else []
        )
        is_found = fault.is_detected(records, sound)
        missed += not is_found
        print(f"{'found ' if is_found else 'MISSED'} {fault.name}: {fault.kind} in {fault.row}", flush=True)
        for record in records:
            for line in [*record.alarms[:3], *([record.error] if record.error else [])]:
                print(f"    {line[:300]}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} found")
    sys.exit(missed > 0)


if __name__ == "__main__":
    importlib.import_module("tests.device_model.faults").main()
