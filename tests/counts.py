"""Repeat counts that grow under `make soak`, and parameter marks for slow and soak-only cases."""

import os
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def long_count(usual: int, *, soak: int) -> int:
    """Returns `usual`, or `soak` under `make soak`."""
    return soak if os.environ.get("SOAK") else usual


def slow(*values: Any) -> ParameterSet:
    """Marks a parameter whose test takes more than about a second; `make test-fast` skips it."""
    return pytest.param(*values, marks=pytest.mark.slow)


def soak_only(*values: Any) -> ParameterSet:
    """Marks a parameter that runs only under `make soak`."""
    return pytest.param(*values, marks=pytest.mark.soak)
