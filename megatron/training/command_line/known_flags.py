"""The flags that Megatron users know: names, types, defaults and how firmly we promise them, from known_flags.json.

Which of them work is not recorded there: flag_table.py finds a configuration field for those.
"""

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KNOWN_FLAGS_FILE = Path(__file__).with_name("known_flags.json")


@dataclass(frozen=True, kw_only=True)
class KnownFlag:
    """One row of known_flags.json.

    tier: 1 works, 2 is accepted, 3 is refused. owner: short name of the issue that makes a tier-1
    flag work. action: `store`, `store_true`, `store_false` or `boolean_optional`, as argparse has them.
    """

    flags: tuple[str, ...]
    dest: str
    tier: int
    group: str
    owner: str | None = None
    action: str = "store"
    type: str = "str"
    default: Any = None
    choices: tuple[Any, ...] | None = None
    nargs: str | int | None = None


@dataclass(frozen=True)
class KnownFlags:
    """All rows in file order."""

    flags: tuple[KnownFlag, ...]


@functools.cache
def load_known_flags() -> KnownFlags:
    """Reads known_flags.json, once per process."""
    # ASCII on purpose: one stray character in a name would make a flag that nobody can type.
    content = json.loads(KNOWN_FLAGS_FILE.read_text(encoding="ascii"))
    return KnownFlags(tuple(known_flag(row) for row in content["flags"]))


def known_flag(row: dict[str, Any]) -> KnownFlag:
    """The typed form of one JSON row."""
    # JSON has no tuples; rows are compared and hashed.
    lists = {key: tuple(row[key]) for key in ("flags", "choices") if row.get(key) is not None}
    return KnownFlag(**{**row, **lists})
