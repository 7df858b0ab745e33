"""Reads absent_features.json: the flags, values of flags and configuration fields that only Megatron-LM has.

The command line, configurations, tools/translate_flags.py and the generated docs/flags.md read it. When a feature is
added, delete its rows there, and nowhere else. Rows of flags that work move to tests/structure/megatron_flags.json.

An entry of the file is a feature. Its keys:

- advice: why the feature is not supported, and what to do instead. It ends messages about flags and fields.
- in_python: the same for fields, if the advice applies only to flags.
- no_effect: for flags and fields that are accepted without effect, the end of a sentence that starts with their name.
- changes_speed: whether these flags change the speed or memory of a Megatron-LM run.
- in_scripts: what a launch script's flags become, as rules of tools/translations.yaml without `flags`. The first rule
  that matches applies. Without a rule, a flag is omitted, and the advice is the reason.
- flags, values, fields: the rows. values are those of working flags. A row has its own advice or in_scripts where those
  of the feature would be wrong.

Rows omit common values: state `refused`, action `store`, type `str`, default None of a flag, a `dest` that argparse
would derive, and the default of a switch, which is the opposite of the value that it stores.
"""

import copy
import enum
import functools
import json
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any

import torch

FEATURES_FILE = Path(__file__).with_name("absent_features.json")


class AbsentState(enum.Enum):
    """Treatment of a flag or field.

    REFUSED flags are rejected with any value, DEFAULT_ONLY flags unless they have their default value. Fields are never
    DEFAULT_ONLY, because configurations accept all defaults.
    """

    REFUSED = "refused"
    DEFAULT_ONLY = "default only"
    NO_EFFECT = "no effect"


@dataclass(frozen=True, kw_only=True)
class AbsentFlag:
    """A flag. flags: its spellings. action: `store`, `store_true`, `store_false` or `boolean_optional`, as in argparse.

    advice: the reason and the alternative; with NO_EFFECT the end of a sentence that starts with the flag. hint: the
    replacement of a flag without effect. The top of this file describes changes_speed and in_scripts.
    """

    flags: tuple[str, ...]
    dest: str
    group: str
    state: AbsentState
    advice: str
    action: str
    type: str
    default: Any
    choices: tuple[Any, ...] | None
    nargs: str | int | None
    hint: str | None
    changes_speed: bool
    in_scripts: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class AbsentValue:
    """Values of a working flag. flag: its first spelling. advice: None means one of the flag's other values."""

    flag: str
    values: tuple[str, ...]
    advice: str | None


@dataclass(frozen=True)
class AbsentField:
    """A configuration field. config: name of the class. hint: type of its values, which is checked with NO_EFFECT.

    stored_default: the default itself, not a copy.
    """

    config: str
    name: str
    hint: Any
    stored_default: Any
    state: AbsentState
    advice: str

    @property
    def default(self) -> Any:
        """The default. A list is copied, because a caller may change it."""
        return copy.copy(self.stored_default)


@dataclass(frozen=True)
class AbsentFeatures:
    """All rows, in file order."""

    flags: tuple[AbsentFlag, ...]
    values: tuple[AbsentValue, ...]
    fields: tuple[AbsentField, ...]


@functools.cache
def absent_features() -> AbsentFeatures:
    """Reads absent_features.json once per process."""
    # ASCII, because other characters in the name of a flag would be hard to type.
    entries = json.loads(FEATURES_FILE.read_text(encoding="ascii"))
    return AbsentFeatures(
        tuple(_flag(row, entry) for entry in entries for row in entry.get("flags", ())),
        tuple(
            AbsentValue(row["flag"], tuple(row["values"]), row.get("advice"))
            for entry in entries
            for row in entry.get("values", ())
        ),
        tuple(_field(row, entry) for entry in entries for row in entry.get("fields", ())),
    )


def flag_of_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the attributes of AbsentFlag that describe the flag in Megatron-LM: spellings, dest, type, default ..."""
    action = row.get("action", "store")
    return {
        "flags": (row["flag"], *row.get("also", ())),
        "dest": row.get("dest", row["flag"].removeprefix("--").replace("-", "_")),
        "group": row["group"],
        "action": action,
        "type": row.get("type", "str"),
        "default": row.get("default", {"store_true": False, "store_false": True}.get(action)),
        "choices": tuple(row["choices"]) if "choices" in row else None,
        "nargs": row.get("nargs"),
    }


def _flag(row: Mapping[str, Any], entry: Mapping[str, Any]) -> AbsentFlag:
    rules: Sequence[Mapping[str, Any]] = row.get("in_scripts", entry.get("in_scripts", ()))
    return AbsentFlag(
        **flag_of_row(row),
        **_treatment(row, entry, advice=entry.get("advice", "")),
        hint=row.get("hint"),
        changes_speed=entry.get("changes_speed", False),
        in_scripts=tuple(rules),
    )


def _treatment(row: Mapping[str, Any], entry: Mapping[str, Any], *, advice: str) -> dict[str, Any]:
    state = AbsentState(row.get("state", "refused"))
    shared = entry.get("no_effect", "") if state is AbsentState.NO_EFFECT else advice
    return {"state": state, "advice": row.get("advice", shared)}


_KINDS = {
    "any": Any,
    "bool": bool,
    "dict": dict,
    "dtype": torch.dtype,
    "float": float,
    "int": int,
    "list": list,
    "None": NoneType,
    "str": str,
}


def _field(row: Mapping[str, Any], entry: Mapping[str, Any]) -> AbsentField:
    kinds = [_KINDS[name] for name in row["type"].split(" | ")]
    default = row["default"]
    # JSON has no dtypes and no infinity.
    if isinstance(default, str) and torch.dtype in kinds:
        default = vars(torch)[default]
    elif isinstance(default, str) and float in kinds:
        default = float(default)
    hint = functools.reduce(operator.or_, kinds)
    treatment = _treatment(row, entry, advice=entry.get("in_python") or entry.get("advice", ""))
    return AbsentField(row["config"], row["field"], hint, default, **treatment)
