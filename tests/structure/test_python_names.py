"""docs/python_names.md lists no name as missing that exists, and no difference in a name that does not exist."""

import importlib
import inspect
import re

import pytest

from tests.structure.measure import ROOT

PAGE = (ROOT / "docs" / "python_names.md").read_text(encoding="utf-8")
DIFFERENT, MISSING = PAGE.partition("## Differences in a call\n")[2].split("## Missing names\n")


@pytest.mark.parametrize(("section", "exists"), [(DIFFERENT, True), (MISSING, False)], ids=["different", "missing"])
def test_the_listed_names_are_as_the_page_says(section: str, exists: bool) -> None:
    rows = [row for row in section.splitlines() if row.startswith("| `")]
    names = [name for row in rows for name in re.findall(r"`([\w.]+)`", row.partition(" | ")[0])]
    assert names
    assert [name for name in names if _exists(f"megatron.core.{name}") != exists] == []


def _exists(path: str) -> bool:
    """Returns whether a module, or a class of a module, has this function, class, method or field.

    Raises ImportError if the module does not exist.
    """
    owner_path, _, name = path.rpartition(".")
    module_path, _, class_name = owner_path.rpartition(".")
    if class_name[0].isupper() or class_name.startswith("_"):
        owner = getattr(importlib.import_module(module_path), class_name)
        return hasattr(owner, name) or name in inspect.get_annotations(owner)
    return hasattr(importlib.import_module(owner_path), name)
