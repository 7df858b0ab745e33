"""Traces a walk: this project's functions that a piece of work enters, in order of first entry. Holds no tests.

The walks are batch_walk.py (a batch to its loss), gradient_walk.py (a gradient to an updated parameter), token_walk.py
(a token through an expert layer and back, a saved activation into pages and back) and flag_walk.py (a flag to its use).
"""

import ast
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import megatron.core

CORE = Path(str(megatron.core.__file__)).parent
ROOT = CORE.parents[1]
# Public names that begin with an underscore, as in Megatron.
MEGATRON_CLASSES = {"_ParamAndGradBuffer", "_ParamAndGradBucket", "_ParamAndGradBucketGroup"}
# Decorators of many functions that only forward calls.
_PASSED_THROUGH = (CORE / "device" / "trace_ranges.py", CORE / "autograd.py")
# Unnamed functions are counted as their enclosing function.
_UNNAMED = ("<lambda>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")


@dataclass(frozen=True)
class Entered:
    """A function that was entered.

    path: relative to the repository. qualname: Python's qualified name, `Class.method`.
    """

    path: str
    qualname: str

    @property
    def owner(self) -> str | None:
        """The class whose method the function, or its enclosing function, is."""
        outermost = self.qualname.partition(".<locals>")[0]
        return outermost.rpartition(".")[0] or None

    def __str__(self) -> str:
        return f"{Path(self.path).stem}: {self.qualname}"


@contextmanager
def traced(packages: Iterable[Path]) -> Iterator[list[Entered]]:
    """Yields a list that collects the functions of `packages` entered inside the context, once each.

    A package is a folder, including its subfolders, or a file.
    """
    entered: list[Entered] = []
    seen: set[CodeType] = set()
    found: set[Entered] = set()
    folders = tuple(packages)

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event != "call" or code in seen:
            return
        seen.add(code)
        one = entered_function(code, folders)
        if one is not None and one not in found:
            found.add(one)
            entered.append(one)

    before = sys.getprofile()
    # Traces threads that start inside as well. On a CPU, autograd runs backward on the thread that calls it.
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield entered
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def paths(entered: Iterable[Entered]) -> list[str]:
    """Returns the files that were entered, once each, in order of first entry."""
    return list(dict.fromkeys(one.path for one in entered))


def lines(entered: Iterable[Entered]) -> list[str]:
    """Returns `file: qualname` of each function that was entered, once each, in order of first entry."""
    return list(dict.fromkeys(map(str, entered)))


def public_classes(entered: Iterable[Entered]) -> list[str]:
    """Returns the public classes that own a function that was entered, once each, in order of first entry."""
    owners = dict.fromkeys(one.owner for one in entered if one.owner)
    return [owner for owner in owners if not owner.startswith("_") or owner in MEGATRON_CLASSES]


def count_statements(files: Iterable[Path]) -> int:
    """Counts the statements of Python files, excluding docstrings."""
    nodes = [node for path in files for node in ast.walk(ast.parse(path.read_text()))]
    return sum(isinstance(node, ast.stmt) and not _is_docstring(node) for node in nodes)


def count_lines(files: Iterable[Path]) -> int:
    """Counts the total number of lines of files."""
    return sum(len(path.read_text().splitlines()) for path in files)


def entered_function(code: CodeType, packages: tuple[Path, ...]) -> Entered | None:
    """Returns the function of `packages` to which code belongs, or None for other code."""
    # Bodies of modules and classes run on import.
    if not code.co_flags & CO_OPTIMIZED:
        return None
    path = Path(code.co_filename)
    if path in _PASSED_THROUGH or not any(path.is_relative_to(package) for package in packages):
        return None
    qualname = code.co_qualname
    while qualname.endswith(_UNNAMED):
        qualname = qualname.rpartition(".")[0].removesuffix(".<locals>")
    return Entered(path.relative_to(ROOT).as_posix(), qualname)


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
