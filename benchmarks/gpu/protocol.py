"""Defines how a check and the runner communicate: environment variables, exit statuses, and lines of results.

A result line has results as a JSON object. Its entry `side` names the side that they belong to, such as one of several
implementations that a check measures. Results without a side belong to the check as a whole.
"""

import json
from collections.abc import Mapping
from typing import Any

DRY_RUN = "GPU_CHECKS_DRY_RUN"  # environment variable set by a dry run; only then may a CPU replace the GPU
# Exit statuses with which a check reports that it had no time for some of its sides and that the others did not fail,
# that it needs a GPU, or that something else is missing.
INCOMPLETE, NEEDS_GPU, NOT_CHECKED = 75, 76, 77
RESULT = "RESULT "  # begins a result line
SIDE = "side"


def result_line(results: Mapping[str, Any]) -> str:
    """Returns a result line without line ends."""
    return RESULT + json.dumps(results)


def result_of(line: str) -> tuple[str | None, dict[str, Any]] | None:
    """Returns the side and the results of an output line, or None if it is not a whole result line."""
    if not line.startswith(RESULT):
        return None
    try:
        values = json.loads(line.removeprefix(RESULT))
    except ValueError:
        return None  # truncated when the check was ended
    return (values.pop(SIDE, None), values) if isinstance(values, dict) else None
