"""Reads the project's Python files and measures their functions, complexity and lines. Defines no rules."""

import ast
import io
import math
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("megatron", "tools", "pretrain_gpt.py", "model_provider.py", "gpt_builders.py")
AROUND = ("benchmarks", "examples")

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case, ast.comprehension)


@dataclass(frozen=True)
class Function:
    """A function or method, with its qualified name and enclosing class."""

    node: FunctionNode
    qualname: str
    in_class: str | None
    nested: bool

    @property
    def lines(self) -> int:
        """Number of lines from `def` to the end, including signature and docstring."""
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def public(self) -> bool:
        """Whether the function is public: it is not nested, and neither its name nor its class's begins with `_`."""
        return not self.nested and not any(part.startswith("_") for part in self.qualname.split("."))

    @property
    def complexity(self) -> int:
        """Cyclomatic complexity: 1 + branches, loops, handlers, cases, comprehension clauses, `and`/`or`."""
        return 1 + sum(_decisions(node) for node in _own_nodes(self.node))

    @property
    def parameters(self) -> list[ast.arg]:
        """All named parameters, except self, cls or ctx."""
        arguments = [*self.node.args.posonlyargs, *self.node.args.args]
        bound = self.in_class is not None and arguments and arguments[0].arg in ("self", "cls", "ctx", "mcs")
        return [*(arguments[1:] if bound else arguments), *self.node.args.kwonlyargs]


@dataclass(frozen=True)
class Source:
    """A Python file of the project."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """Path from the repository root."""
        return self.path.as_posix()

    @property
    def module(self) -> str:
        """Module name; for an __init__.py, the package's name. tools/ is imported as megatron.tools through a link."""
        parts = self.path.with_suffix("").parts
        parts = ("megatron", *parts) if parts[0] == "tools" else parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.name)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, in the order of ast.walk."""
        return list(ast.walk(self.tree))

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @cached_property
    def functions(self) -> list[Function]:
        return list(_functions(self.tree, (), in_class=None, nested=False))

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    @cached_property
    def documented(self) -> list[ast.Module | ast.ClassDef | FunctionNode]:
        """Modules, classes and functions with a docstring."""
        return [node for node in self.nodes if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node)]

    @cached_property
    def comments(self) -> dict[int, str]:
        """Comments by line number, without directives for tools (noqa, type:)."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        found = {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}
        return {line: text for line, text in found.items() if not text.startswith(("#!", "# noqa", "# type:"))}

    @cached_property
    def num_explaining_lines(self) -> int:
        """Number of docstring lines with text, not counting the first line of each docstring."""
        texts = [ast.get_docstring(node) or "" for node in self.documented]
        return sum(bool(line.strip()) for text in texts for line in text.splitlines()[1:])

    @cached_property
    def num_code_lines(self) -> int:
        """Number of lines with code, without blank lines, docstrings, and lines with only a comment."""
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        held: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skipped and token.type != tokenize.ENDMARKER:
                held.update(range(token.start[0], token.end[0] + 1))
        return len(held - _docstring_lines(self.tree))


def read_sources(*places: str) -> list[Source]:
    """Returns the Python files at these paths, relative to the repository root. Paths that do not exist are skipped."""
    paths: list[Path] = []
    for place in places:
        start = ROOT / place
        paths += sorted(start.rglob("*.py")) if start.is_dir() else [start] * start.is_file()
    return [Source(path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in paths]


def percentile(values: Iterable[float], fraction: float) -> float:
    """Returns the smallest value that at least `fraction` of the values do not exceed, or 0 without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else 0


def imported_modules(source: Source, known: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Yields (module, line) of every import, including imports in functions.

    `from package import name` yields package.name if it is a module in `known`, else package.
    """
    for node in source.nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, source)
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield (inner if inner in known else base), node.lineno


def words(node: ast.AST | None) -> set[str]:
    """Returns every identifier in an annotation, including annotations written as strings."""
    found: set[str] = set()
    for child in ast.walk(node) if node is not None else ():
        if isinstance(child, ast.Name):
            found.add(child.id)
        elif isinstance(child, ast.Attribute):
            found.add(child.attr)
        elif isinstance(child, ast.Constant) and isinstance(child.value, str):
            found.update(child.value.replace("[", " ").replace("]", " ").replace(".", " ").replace(",", " ").split())
    return found


def dotted(node: ast.AST) -> str:
    """Returns a name or attribute chain as `a.b.c`, or an empty string for any other node."""
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _functions(tree: ast.AST, around: tuple[str, ...], *, in_class: str | None, nested: bool) -> Iterator[Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, (*around, node.name), in_class=node.name, nested=nested)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            path = (*around, node.name)
            yield Function(node, ".".join(path), in_class, nested)
            yield from _functions(node, path, in_class=None, nested=True)
        else:
            yield from _functions(node, around, in_class=in_class, nested=nested)


def _own_nodes(function: FunctionNode) -> Iterator[ast.AST]:
    """Yields the nodes of a function's body, without nested functions and classes."""
    todo: list[ast.AST] = list(function.body)
    while todo:
        node = todo.pop()
        yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            todo.extend(ast.iter_child_nodes(node))


def _decisions(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return int(isinstance(node, _DECISIONS))


_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _absolute(node: ast.ImportFrom, source: Source) -> str:
    if not node.level:
        return node.module or ""
    package = source.module.split(".")
    keep = len(package) - node.level + (source.path.name == "__init__.py")
    return ".".join([*package[:keep], *([node.module] if node.module else [])])
