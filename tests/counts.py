"""How often a test repeats, and which of its cases run only in `make test` or only in `make soak`. No test here."""

import os
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def long_count(usual: int, *, soak: int) -> int:
    """`usual` repetitions in an ordinary run, `soak` under `make soak`."""
    return soak if os.environ.get("SOAK") else usual


def slow(*values: Any) -> ParameterSet:
    """A case of pytest.mark.parametrize that `make test-fast` leaves out, where another shows the same in less time."""
    return pytest.param(*values, marks=pytest.mark.slow)


def soak_only(*values: Any) -> ParameterSet:
    """A case of pytest.mark.parametrize that runs under `make soak` alone."""
    return pytest.param(*values, marks=pytest.mark.soak)
