"""Reads the walks of docs/tour.md and compares them with traced function calls. Contains no tests.

A walk is a level-2 section. Its code blocks tagged `walk` list the functions that are called, in order of their first
call, with one file per line: `file: Class.method, .another_method_of_Class, function`. tests/distributed/print_walk.py
prints a traced walk in this form, to be pasted between the sentences of the page.

`python -m tests.structure.tour` rewrites the page's last section, which links the file of each name.
"""

import ast
import difflib
import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"
FILES_HEADING = "The files"


def listed_functions(heading: str) -> list[str]:
    """Returns `file: qualname` of each function in the walk below a level-2 heading, in the order of the page."""
    blocks = re.findall(r"^```walk\n(.*?)^```$", _section(heading), re.MULTILINE | re.DOTALL)
    assert blocks, f"{PAGE.name}: no block tagged walk below '## {heading}'"
    return [function for block in blocks for line in block.splitlines() if line.strip() for function in _expand(line)]


def listed_nouns(heading: str) -> list[list[str]]:
    """Returns the names in backticks in the first column of each table below a level-2 heading of the page."""
    rows = re.findall(r"^\|([^|]*`[^|]*)\|", _section(heading), re.MULTILINE)
    return [re.findall(r"`(\w+)`", row) for row in rows]


def listed_files(heading: str) -> list[str]:
    """Returns the distinct files of a walk of the page."""
    return list(dict.fromkeys(_split(function)[0] for function in listed_functions(heading)))


def page_with_links() -> str:
    """Returns the page with a regenerated last section, which links each name of the walks to its file."""
    text = PAGE.read_text(encoding="utf-8")
    entered: dict[str, set[str]] = {}
    for block in re.findall(r"^```walk\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        for function in (function for line in block.splitlines() for function in _expand(line)):
            file, name = _split(function)
            entered.setdefault(file, set()).add(name.partition(".")[0])
    rows = []
    for file, names in sorted(entered.items()):
        paths = [path for path in _sources().get(file, []) if names & _definitions(path)]
        assert paths and names <= set().union(*map(_definitions, paths)), f"{file}: {sorted(names)} not found"
        links = (f"[{path.relative_to(ROOT)}](../{path.relative_to(ROOT)})" for path in paths)
        rows.append(f"| `{file}` | {', '.join(links)} |\n")
    kept = text.partition(f"\n## {FILES_HEADING}\n")[0].rstrip("\n")
    return f"{kept}\n\n## {FILES_HEADING}\n\n| name | file |\n|---|---|\n{''.join(rows)}"


def differences(heading: str, entered: Iterable[str]) -> str:
    """Returns a diff of the page's walk and the traced functions (`file: qualname`), or '' if they are equal."""
    return "\n".join(
        difflib.unified_diff(
            as_lines(listed_functions(heading)), as_lines(entered), "docs/tour.md", "traced", n=1, lineterm=""
        )
    )


def as_lines(entered: Iterable[str]) -> list[str]:
    """Formats functions, given as `file: qualname`, as the lines of a walk block."""
    split = [_split(function) for function in entered]
    return [_line(file, [name for _, name in parts]) for file, parts in groupby(split, key=lambda one: one[0])]


@cache
def _sources() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in (*sorted(ROOT.glob("*.py")), *sorted((ROOT / "megatron").rglob("*.py"))):
        if path.resolve().is_relative_to(ROOT / "tools"):
            continue
        found.setdefault(path.parent.name if path.name == "__init__.py" else path.stem, []).append(path)
    return found


@cache
def _definitions(path: Path) -> set[str]:
    """Returns the names of a file's classes and functions, without methods."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    methods = {id(node) for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef) for node in owner.body}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return {node.name for node in found if id(node) not in methods}


def _section(heading: str) -> str:
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"{PAGE.name}: no section '## {heading}'"
    return found.group(1)


def _split(function: str) -> tuple[str, str]:
    file, _, name = function.partition(": ")
    return file, name


def _line(file: str, names: list[str]) -> str:
    written, owner = [], ""
    for name in names:
        before, _, last = name.rpartition(".")
        written.append(f".{last}" if before and before == owner else name)
        owner = before or owner
    return f"{file}: {', '.join(written)}"


def _expand(line: str) -> Iterator[str]:
    file, names = _split(line.strip())
    owner = ""
    for name in names.split(", "):
        full = f"{owner}{name}" if name.startswith(".") else name
        owner = full.rpartition(".")[0] or owner
        yield f"{file}: {full}"


if __name__ == "__main__":
    PAGE.write_text(page_with_links(), encoding="utf-8")
