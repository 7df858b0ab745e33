"""Runs every case of cases/*.yaml. How a case is written: case.py; what it may expect: expectations.py."""

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.functional_tests.case import FOLDER, Case, read_bases, read_cases
from tests.functional_tests.expectations import EXPECTATIONS, Runner


def _cases() -> list[ParameterSet]:
    found = []
    for path in sorted((FOLDER / "cases").glob("*.yaml")):
        for case in read_cases(path, read_bases(), set(EXPECTATIONS)):
            marks = [*([pytest.mark.slow] if case.slow else []), *([pytest.mark.soak] if case.soak else [])]
            found.append(pytest.param(case, id=f"{path.stem}-{case.name}", marks=marks))
    return found


@pytest.mark.parametrize("case", _cases())
def test_case(case: Case, tmp_path: Path) -> None:
    Runner(case, tmp_path).check()
