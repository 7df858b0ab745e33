"""Comparison of public names: reading the list of names, and verdicts on calls, fields and classes."""

import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.core.absent_features import AbsentState, absent_features
from megatron.tools.compare_api import (
    UNKNOWN,
    Comparison,
    Verdict,
    absent_field,
    compare,
    compare_all,
    counts,
    is_described_field,
    load_names,
    read_names,
)
from megatron.tools.write_migration_docs import MARK, PAGE, shown_reason, with_table

LIST = """
# A comment
## there/calls.py
same(first, second=2, *, third='x')
renamed(first, other=None)
moved(first, second=2)
default(first=1, flag=True)
by_name(first, second=2)
needs_more(first)
absent()
class Thing(Base)
    __init__(size, dtype=torch.float32)
    size (property)
    grow(by=2 ** 4)
    shrink()
    build(number)
class Options() dataclass
    width: int = 0
    scale: Optional[float] = 1.5
    names: list[str] = field(default_factory=list)
    depth: int = field(default=4, metadata={'argparse_meta': {'arg_na
    lost: bool = False
## elsewhere.py
thing()
"""


class Thing:
    """A class with a constructor, a property and a method."""

    def __init__(self, size: int, dtype: Any = None, *, ours: int = 3) -> None:
        self._size = size

    @property
    def size(self) -> int:
        """Current size."""
        return self._size

    def grow(self, by: int = 16) -> None:
        """Adds to the size."""
        self._size += by

    @staticmethod
    def build(cls: type, number: int) -> None:
        """Has a first parameter named cls, which the list of names omits as in class methods."""


@dataclass(kw_only=True)
class Options:
    """Has a field of each kind."""

    width: int = 0
    scale: float | None = 2.5
    names: tuple[str, ...] = ()
    depth: int = 4


def _calls() -> dict[str, Any]:
    def same(first: int, second: int = 2, *, third: str = "x", ours: int = 0) -> None: ...
    def renamed(first: int, another: int | None = None) -> None: ...
    def moved(second: int = 2, first: int = 0) -> None: ...
    def default(first: int = 1, flag: int = 1) -> None: ...
    def by_name(first: int, *, second: int = 2) -> None: ...
    def needs_more(first: int, second: int) -> None: ...

    return {**locals(), "Thing": Thing, "Options": Options}


@pytest.fixture
def verdicts(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Verdict, str]]:
    module = ModuleType("there.calls")
    vars(module).update(_calls())
    monkeypatch.setitem(sys.modules, "there", ModuleType("there"))
    monkeypatch.setitem(sys.modules, "there.calls", module)
    rows = compare_all(read_names(LIST))
    return {row.name.path.removeprefix("there.calls."): (row.verdict, row.why) for row in rows}


@pytest.mark.parametrize(
    ("name", "verdict", "why"),
    [
        ("same", Verdict.SAME, ""),
        ("renamed", Verdict.THIN, "no other"),
        ("moved", Verdict.THIN, "first is at a different position; second is at a different position"),
        ("default", Verdict.THIN, "flag=1 instead of True"),
        ("by_name", Verdict.THIN, "second is keyword-only"),
        ("needs_more", Verdict.THIN, "second is required"),
        ("absent", Verdict.MISSING, "does not exist here"),
        ("Thing", Verdict.SAME, ""),
        ("Thing.__init__", Verdict.THIN, "dtype=None instead of torch.float32"),
        ("Thing.size", Verdict.SAME, ""),
        ("Thing.grow", Verdict.SAME, ""),
        ("Thing.shrink", Verdict.MISSING, "does not exist here"),
        ("Thing.build", Verdict.SAME, ""),
        ("Options.width", Verdict.SAME, ""),
        ("Options.scale", Verdict.THIN, "scale=2.5 instead of 1.5"),
        ("Options.names", Verdict.SAME, ""),
        ("Options.depth", Verdict.SAME, ""),
        ("Options.lost", Verdict.MISSING, "does not exist here"),
        ("elsewhere.thing", Verdict.MISSING, "its module or class does not exist here"),
    ],
)  # fmt: skip
def test_verdicts(verdicts: dict[str, tuple[Verdict, str]], name: str, verdict: Verdict, why: str) -> None:
    assert verdicts[name] == (verdict, why)


def test_names_of_what_we_lack_do_not_count() -> None:
    (name,) = read_names("## megatron/core/parallel_state.py\nget_gtp_weight_remat_rank()\n")
    row = compare(name)
    assert row.unsupported.startswith("generalized tensor parallelism")
    assert sum(counts([row]).values()) == 0


def test_every_pattern_of_what_we_lack_matches_a_name_that_is_no_configuration_field() -> None:
    unmatched = {row.pattern for row in absent_features().names}
    for name in load_names():
        if absent_field(name) is None and not is_described_field(name):
            unmatched = {pattern for pattern in unmatched if not fnmatchcase(name.path, pattern)}
    assert unmatched == set()


def test_the_page_says_of_a_field_what_its_row_says() -> None:
    states = set()
    for row in compare_all():
        absent = absent_field(row.name)
        if absent is None:
            assert not is_described_field(row.name) or "default: " not in shown_reason(row), row.name.path
            continue
        phrase = shown_reason(row)
        assert ("only with its default" in phrase) == (absent.state is AbsentState.REFUSED), row.name.path
        assert ("accepted without effect" in phrase) == (absent.state is AbsentState.NO_EFFECT), row.name.path
        assert absent.advice.replace("|", "\\|") in phrase, row.name.path
        states.add(absent.state)
    assert states == {AbsentState.REFUSED, AbsentState.NO_EFFECT}


def test_fields_that_configurations_accept_without_having_them_are_compared_by_default() -> None:
    path = "megatron/core/transformer/transformer_config.py"
    right, other = read_names(
        f"## {path}\nclass TransformerConfig() dataclass\n    fp8_margin: int = 0\n    fp4: str = 'x'"
    )[1:]
    assert compare(right).verdict is Verdict.SAME
    assert (compare(other).verdict, compare(other).why) == (Verdict.THIN, "fp4=None instead of 'x'")


def test_a_broken_module_of_ours_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_here.py").write_text("import not_installed_anywhere\n", encoding="utf-8")
    (tmp_path / "wrong_here.py").write_text("from os import no_such_name\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for module, message in (("broken_here", "not_installed_anywhere"), ("wrong_here", "no_such_name")):
        with pytest.raises(ImportError, match=message):
            compare_all(read_names(f"## {module}.py\nthing()\n"))


@pytest.mark.parametrize(
    ("text", "default"),
    [("2 ** 4", 16), ("4 * 8", 32), ("1 + 2", UNKNOWN), ("1 / 3", UNKNOWN), ("2 * N", UNKNOWN), ("-1", -1)],
)
def test_defaults_are_values_or_unknown(text: str, default: object) -> None:
    (name,) = read_names(f"## there/calls.py\nf(by={text})\n")
    assert name.parameters[0].default == default


def test_names_with_one_verdict_for_one_reason_share_a_row() -> None:
    names = read_names("## a/b.py\nclass C()\n    one()\n    two()\n    three()\n")
    rows = [
        Comparison(name, Verdict.THIN, "no x|y") if name.name == "two" else Comparison(name, Verdict.SAME)
        for name in names
    ]
    table = with_table(f"By hand.\n{MARK}old", rows)
    assert table.startswith(
        f"By hand.\n{MARK}\nOf 4 names, 0 belong to unsupported features. Of the other 4, 3 (75.0%)"
    )
    assert "| `C`: `the class`, `one`, `three` | same |  |\n| `C`: `two` | thin | no x\\|y |\n" in table


def test_a_page_without_the_mark_is_refused() -> None:
    with pytest.raises(ValueError, match="does not contain the line"):
        with_table("By hand.", [])


def test_the_page_has_the_table_of_the_code() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, compare_all()) == text, "run python -m tools.write_migration_docs"


def test_most_names_whose_capability_is_here_are_the_same() -> None:
    """Requires that most of Megatron-LM's public calls with a counterpart here work unchanged."""
    found = counts(compare_all())
    assert found[Verdict.SAME] / sum(found.values()) >= 0.95
