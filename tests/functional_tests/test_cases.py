"""Runs every case of cases/*.yaml. case.py documents the format, and expectations.py the expectations."""

from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.functional_tests.case import FOLDER, Case, read_bases, read_cases
from tests.functional_tests.expectations import EXPECTATIONS, Runner

# Instead of the six steps of bases.yaml: two warm-up steps, one that evaluates and at which most cases resume, and one
# after it.
STEPS = 4


def _cases() -> list[ParameterSet]:
    bases = {
        name: flags | ({"train-iters": STEPS} if "train-iters" in flags else {}) for name, flags in read_bases().items()
    }
    found = []
    for path in sorted((FOLDER / "cases").glob("*.yaml")):
        for case in read_cases(path, bases, set(EXPECTATIONS)):
            marks = [*([pytest.mark.slow] if case.slow else []), *([pytest.mark.soak] if case.soak else [])]
            found.append(pytest.param(case, id=f"{path.stem}-{case.name}", marks=marks))
    return found


@pytest.mark.parametrize("case", _cases())
def test_case(case: Case, tmp_path: Path) -> None:
    Runner(case, tmp_path).check()
