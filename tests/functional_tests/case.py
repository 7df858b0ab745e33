"""Reads functional cases from YAML files, with clear errors for unknown keys and wrong types. Runs nothing.

- name: dense_resumes
  base: dense                  # flags of bases.yaml, or a list of bases; later ones win
  flags: {bf16: true, lr: 0.1, split: null}   # true: bare flag; null: drop the base's flag; list: several words
  processes: 2
  corpora: {a: {}}             # writes token files {tmp}/a.bin and {tmp}/a.idx first; options: corpora.py
  slow: true                   # left out by `make test-fast`
  soak: true                   # runs only under `make soak`; a comment names the case that tests the property
  expect: {resume_at: 3}       # expectations.py defines the names and values
"""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

Flags = dict[str, Any]
FOLDER = Path(__file__).parent


class CaseError(ValueError):
    """Raised for a case file with an unknown key or a value of the wrong type."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of a YAML file, with the flags of its bases merged in."""

    name: str
    expect: dict[str, Any]
    base: list[str] = field(default_factory=list)
    flags: Flags = field(default_factory=dict)
    processes: int = 1
    corpora: dict[str, dict[str, Any]] = field(default_factory=dict)
    slow: bool = False
    soak: bool = False


def read_cases(path: Path, bases: dict[str, Flags], expectations: set[str]) -> list[Case]:
    """Reads the cases of a file. Raises CaseError, naming the file, the case and the key, for an invalid case."""
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(entries, list):
        raise CaseError(f"{path.name}: must be a list of cases, is {type(entries).__name__}")
    cases = [_case(entry, f"{path.name}, case {index}", bases, expectations) for index, entry in enumerate(entries, 1)]
    names = [case.name for case in cases]
    for name in names:
        if names.count(name) > 1:
            raise CaseError(f"{path.name}: {names.count(name)} cases are named {name}")
    return cases


def read_bases(path: Path = FOLDER / "bases.yaml") -> dict[str, Flags]:
    """Returns the flags of each base by its name. The file uses YAML anchors to derive bases from each other."""
    bases: dict[str, Flags] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return bases


def command_line(flags: Flags) -> list[str]:
    """Returns command line words: `{"bf16": True, "split": ["a", 1], "lr": None}` gives --bf16 --split a 1."""
    words: list[str] = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, values)]
    return words


def _case(entry: Any, where: str, bases: dict[str, Flags], expectations: set[str]) -> Case:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        raise CaseError(f"{where}: must be a mapping with a name")
    where = f"{where} ({entry['name']})"
    _check_keys(entry, {one.name for one in fields(Case)}, where)
    _check_types(entry, where)
    _check_keys(entry["expect"], expectations, f"{where}: expect")
    for name, value in entry["expect"].items():
        if name in _KEYS_OF:
            _check_inner_keys(value, *_KEYS_OF[name], where=f"{where}: {name}")
    names = entry.get("base", [])
    names = [names] if isinstance(names, str) else names
    _check_keys(dict.fromkeys(names), set(bases), f"{where}: base")
    flags: Flags = {}
    for one in (*(bases[name] for name in names), entry.get("flags", {})):
        flags |= one
    return Case(**{**entry, "base": names, "flags": flags})


# For each expectation, the required and the optional keys of its mapping. `same_as: {}` repeats the run unchanged.
_VARIANT = {"flags", "processes"}
_KEYS_OF: dict[str, tuple[set[str], set[str]]] = {
    "failure": ({"exit_code", "error"}, set()),
    "refused_load": ({"saved_with", "exit_code", "error"}, set()),
    "loads": ({"saved_with", "steps"}, set()),
    "same_as": (set(), _VARIANT),
    "close_to": ({"rtol"}, _VARIANT),
    "differs_from": (set(), _VARIANT),
}


def _check_inner_keys(value: Any, needed: set[str], more: set[str], *, where: str) -> None:
    if not isinstance(value, dict):
        raise CaseError(f"{where} is {value!r}: must be a mapping")
    _check_keys(value, needed | more, where)
    if missing := sorted(needed - value.keys()):
        raise CaseError(f"{where} has {', '.join(value) or 'no key'}: needs {', '.join(missing)}")


def _check_types(entry: dict[str, Any], where: str) -> None:
    expected: dict[str, type | tuple[type, ...]] = {
        "expect": dict,
        "flags": dict,
        "corpora": dict,
        "processes": int,
        "slow": bool,
        "soak": bool,
        "base": (str, list),
    }
    if not entry.get("expect"):
        raise CaseError(f"{where}: needs expect, a mapping that is not empty")
    for key, kind in expected.items():
        if key in entry and not isinstance(entry[key], kind):
            raise CaseError(f"{where}: {key} is {entry[key]!r}, of type {type(entry[key]).__name__}")
    if not 1 <= entry.get("processes", 1) <= 8:
        raise CaseError(f"{where}: processes is {entry['processes']}, must be 1 to 8")


def _check_keys(found: dict[str, Any], known: set[str], where: str) -> None:
    for key in found:
        if key not in known:
            raise CaseError(f"{where}: {key!r} is not one of {', '.join(sorted(known))}")
