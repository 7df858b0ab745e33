"""The device model detects every seeded fault of faults.yaml by an alarm of the expected kind, or by other losses.

`python -m tests.device_model.faults NAME` prints the alarms of one fault.
"""

from collections import defaultdict
from functools import cache

import pytest

from tests.device_model.alarms import Kind
from tests.device_model.faults import LOSSES, ROOT, DeviceFault, read_faults, results_of
from tests.device_model.host import on_modelled_gpus
from tests.device_model.rows import Modelled, Row, train

FAULTS = {fault.name: fault for fault in read_faults()}


@cache
def records(ranks: int) -> dict[str, list[Modelled]]:
    """Trains each row of this number of ranks with its fault, and returns the records by fault."""
    return results_of([fault for fault in FAULTS.values() if fault.chosen_row().ranks == ranks])


@cache
def sound_records(ranks: int) -> dict[Row, list[Modelled]]:
    """Trains the faults' rows of this number of ranks without a fault, and returns the records."""
    rows = list(dict.fromkeys(row for one in FAULTS.values() if (row := one.chosen_row()).ranks == ranks))
    by_rank = on_modelled_gpus(train, ranks, [(f"row {index}", row) for index, row in enumerate(rows)])
    return {row: [found[index] for found in by_rank] for index, row in enumerate(rows)}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=lambda fault: fault.name)
def test_a_seeded_fault_is_found(fault: DeviceFault) -> None:
    row = fault.chosen_row()
    sound = sound_records(row.ranks)[row]
    assert all(record.alarms == [] and record.error is None for record in sound)
    found = records(row.ranks)[fault.name]
    assert fault.is_detected(found, sound), [record.error for record in found]
    assert fault.kind != LOSSES or all(len(record.losses) == fault.steps for record in found), "the fault ends the run"


def test_every_fault_has_its_place_in_these_files() -> None:
    for fault in FAULTS.values():
        text = (ROOT / fault.file).read_text(encoding="utf-8")
        assert text.count(fault.old) == 1, f"{fault.name}: move it in faults.yaml, {fault.file} has changed"


def test_there_are_faults_of_every_kind_that_a_program_can_cause() -> None:
    by_kind = defaultdict(list)
    for fault in FAULTS.values():
        by_kind[fault.kind].append(fault.name)
    assert by_kind.keys() == {LOSSES, *(kind.name for kind in Kind)}
    assert len(FAULTS) >= 40
