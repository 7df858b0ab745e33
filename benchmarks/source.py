"""Identifies the version of the code that a measurement belongs to: the commit, and digests of a program's code.

Does not import torch, so that it works even if torch fails.

[Note: digest of code] The digest of a program covers the files that it can import, including imports in functions. It
is computed from syntax trees without docstrings, comments and layout, and without the text of messages: string literals
in `raise` statements, in the messages of assertions and in calls of MESSAGE_CALLS. A reworded message does not void a
measurement, and a test that compares its text fails on a CPU. All versions of Python give the same digest, because
empty fields of a tree, which differ between versions, are skipped.
"""

import ast
import hashlib
import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from tests.structure.measure import Source, imported_modules

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("megatron", "tools", "benchmarks", "tests", "pretrain_gpt.py", "model_provider.py", "gpt_builders.py")
MESSAGE_CALLS = {"print", "warn", "warning", "info", "debug", "error", "critical", "exception", "exit", "fail", "skip"}


def commit_of_tree() -> str:
    """Returns the commit of these files.

    In a copy without a repository, returns the variable COMMIT or an empty string.
    """
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        return os.environ.get("COMMIT", "")
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return head.stdout.strip()


class CodeBase:
    """The Python files of this project in one version.

    besides: modules whose own text does not influence results. Their imports count.
    """

    def __init__(self, sources: Sequence[Source], *, besides: Collection[str] = ()) -> None:
        self._sources = {source.module: source for source in sources}
        self._known = frozenset(self._sources)
        self._besides = frozenset(besides)
        self._digests: dict[str, str] = {}

    @classmethod
    def of_tree(cls, root: Path = ROOT, *, besides: Collection[str] = ()) -> "CodeBase":
        """Returns the files of a working tree, committed or not."""
        paths = [path for place in PLACES for path in _python_files(root / place)]
        return cls(
            [Source(path.relative_to(root), path.read_text(encoding="utf-8")) for path in paths], besides=besides
        )

    @classmethod
    def at_commit(cls, commit: str, root: Path = ROOT, *, besides: Collection[str] = ()) -> "CodeBase":
        """Returns the files of a commit. Raises subprocess.CalledProcessError if the repository does not have it."""
        words = ["git", "archive", "--format=tar", commit]
        archive = subprocess.run(words, cwd=root, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            return cls(
                [
                    Source(Path(member.name), stream.read().decode())
                    for member in files
                    if member.name.startswith(PLACES) and member.name.endswith(".py")
                    if (stream := files.extractfile(member)) is not None
                ],
                besides=besides,
            )

    def digest(self, program: str, *more: str) -> str:
        """Returns the digest of a module and all that it can import. more: further texts on which a result depends.

        Arguments that name a Python file, as for pytest, count as modules. See [Note: digest of code].
        """
        found = hashlib.blake2b(" ".join(more).encode(), digest_size=8)
        for module in sorted(self.reached(program, *more) - self._besides):
            found.update(f"\0{module}\0{self._digest_of(module)}".encode())
        return found.hexdigest()

    def reached(self, program: str, *more: str) -> set[str]:
        """Returns the names of the modules that a program can import, including itself."""
        files = [Path(word) for text in more for word in text.split() if word.endswith(".py")]
        roots = [program, *(Source(path, "").module for path in files)]
        # pytest imports the conftest.py of all folders of a test file.
        roots += [".".join([*path.parts[:depth], "conftest"]) for path in files for depth in range(1, len(path.parts))]
        met: set[str] = set()
        while roots:
            module = roots.pop()
            if module in self._known and module not in met:
                met.add(module)
                roots += self._imports(module)
        return met

    def _imports(self, module: str) -> Iterator[str]:
        for name, _ in imported_modules(self._sources[module], self._known):
            yield name
            # Importing a module imports its packages.
            yield from (".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1))

    def _digest_of(self, module: str) -> str:
        if module not in self._digests:
            found = hashlib.blake2b(digest_size=8)
            for part in _parts(self._sources[module].tree, is_message=False):
                found.update(f"{part}\0".encode())
            self._digests[module] = found.hexdigest()
        return self._digests[module]


def _python_files(place: Path) -> list[Path]:
    return sorted(place.rglob("*.py")) if place.is_dir() else [place] * place.is_file()


def _parts(node: ast.AST, *, is_message: bool) -> Iterator[str]:
    """Yields the parts of a syntax tree that count, in order. See [Note: digest of code]."""
    if isinstance(node, ast.Constant):
        yield "text" if is_message and isinstance(node.value, str) else repr(node.value)
        return
    is_message = is_message or isinstance(node, ast.Raise) or (isinstance(node, ast.Call) and _is_message_call(node))
    yield type(node).__name__
    for name in node._fields:
        value = getattr(node, name, None)
        if value in (None, []) or name in ("ctx", "kind", "type_comment", "type_ignores"):
            continue
        yield name
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, ast.AST):
                # Python 3.12 adds empty texts to f-strings.
                is_empty = isinstance(node, ast.JoinedStr) and isinstance(one, ast.Constant) and one.value == ""
                if not is_empty and not _is_lone_text(one):
                    yield from _parts(one, is_message=is_message or (isinstance(node, ast.Assert) and name == "msg"))
            else:
                yield repr(one)
    yield "end"


def _is_message_call(call: ast.Call) -> bool:
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return name in MESSAGE_CALLS


def _is_lone_text(node: ast.AST) -> bool:
    """Returns whether a statement is only a string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
