"""Reads megatron_flags.json: what Megatron-LM's list of flags says about the flags that work here.

megatron/core/absent_features.json lists its other flags.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.absent_features import flag_of_row

WORKING_FLAGS_FILE = Path(__file__).with_name("megatron_flags.json")


@dataclass(frozen=True, kw_only=True)
class MegatronFlag:
    """A flag of Megatron-LM that works here. owner: short name of the work item that implements it, if any.

    The other attributes are those of AbsentFlag.
    """

    flags: tuple[str, ...]
    dest: str
    group: str
    action: str
    type: str
    default: Any
    choices: tuple[Any, ...] | None
    nargs: str | int | None
    owner: str | None


@functools.cache
def working_megatron_flags() -> tuple[MegatronFlag, ...]:
    """Returns Megatron-LM's flags that work here, in the order of its list."""
    rows = json.loads(WORKING_FLAGS_FILE.read_text(encoding="ascii"))
    return tuple(MegatronFlag(**flag_of_row(row), owner=row.get("owner")) for row in rows)
