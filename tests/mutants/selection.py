"""Chooses and orders the tests for a fault by a record (tests/recording) of the lines that each test runs.

[Note: Which tests]
Tests are searched at three levels until FEW tests are found: tests that run the fault's statements, tests that run the
function around them, and tests that run any function of the fault's file or of the files that import it. Lines that run
at import or in a cached function are recorded for only one test, or for none, so such faults start at the third level.
If tests share a run (a module fixture, a cached function), its lines are recorded only for the first of them. Therefore
all tests of a file with a shared run are chosen. The same applies to a test file that has changed since the record, as
its new tests are not recorded, if it imports the fault's file or package or if one of its recorded tests is chosen.
Test files run in this order: changed files that import the fault's file; then level by level, and within a level by
(seconds of their chosen tests) x (median lines that a test runs), so that cheap tests of little code run first; then
changed files that import the package; then the rules of tests/structure.
"""

import ast
import difflib
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron.tools.gate.fault import Fault
from tests.mutants.pytest_runs import Chosen
from tests.recording.table import read_records

FEW = 5
STRUCTURE = ("tests/structure/test_flag_surface.py", "tests/structure/test_structure.py")
_SHARED = re.compile(r'scope="(module|session|package)"|^@(functools\.)?(lru_)?cache\b', re.MULTILINE)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_COMPOUND = (
    *_FUNCTIONS,
    ast.ClassDef,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.If,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
)

Lines = dict[str, set[int]]  # by file


@dataclass
class Record:
    """CPU seconds of each test, the maximum number of lines that one of its processes ran, and tests of each fault."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    num_lines: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    tests: dict[str, list[set[str]]] = field(default_factory=dict)  # for each fault, one set per level


def choose_all(
    faults: Sequence[Fault], tree: Path, *, folder: Path, root: Path, record_commit: str, commit: str
) -> tuple[dict[str, Chosen], Record]:
    """Returns the chosen tests by fault name, and the record in `folder`, which was made at `record_commit`.

    tree: a folder with the files of `commit` of the repository `root`.
    """
    changed = _git(root, "diff", "--name-only", record_commit, commit).splitlines()
    mapped = _RecordedLines(root, record_commit, set(changed))
    levels = {fault.name: [mapped.of(lines, tree) for lines in levels_of(fault, tree)] for fault in faults}
    record = read_record(folder, levels)
    new_tests = [name for name in changed if _is_test_file(name) and (tree / name).exists()]
    return {fault.name: _choose(fault, record, tree, new_tests) for fault in faults}, record


def read_record(folder: Path, levels: Mapping[str, Sequence[Lines]]) -> Record:
    """Reads the costs of all tests and the tests that run each fault's lines in a single pass over a record."""
    record = Record(tests={fault: [set() for _ in places] for fault, places in levels.items()})
    by_file: dict[str, list[tuple[set[int], set[str]]]] = defaultdict(list)
    for fault, places in levels.items():
        for place, found in zip(places, record.tests[fault], strict=True):
            for name, lines in place.items():
                by_file[name].append((lines, found))
    for entry in read_records(folder):
        test = entry["test"]
        if "::" not in test:
            continue
        if entry["kind"] != "program":  # its time is also counted as children's time of the test that waited for it
            record.seconds[test] += entry["cpu"] + entry["children"]
        record.num_lines[test] = max(record.num_lines[test], sum(map(len, entry["lines"].values())))
        for name, covered in entry["lines"].items():
            for lines, found in by_file.get(name, ()):
                if test not in found and not lines.isdisjoint(covered):
                    found.add(test)
    return record


def _choose(fault: Fault, record: Record, tree: Path, new_tests: Sequence[str]) -> Chosen:
    module = module_name(fault.file)
    files: dict[str, Sequence[str] | None] = dict.fromkeys(_importing(module, tree, new_tests))
    num_tests = 0
    for tests in record.tests[fault.name]:
        if num_tests >= FEW:
            break
        num_tests += len(tests)
        for name, ids in _ordered(tests, record):
            if name not in files and name not in STRUCTURE and (tree / name).exists():
                files[name] = None if name in new_tests or _shares_runs(name, tree) else ids
    of_package = [name for name in _importing(module.rpartition(".")[0], tree, new_tests) if name not in files]
    return files | dict.fromkeys([*of_package, *(name for name in STRUCTURE if (tree / name).exists())])


def _ordered(tests: Iterable[str], record: Record) -> Iterator[tuple[str, list[str]]]:
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in sorted(tests):
        by_file[test.partition("::")[0]].append(test)

    def cost(name: str) -> tuple[float, str]:
        seconds = sum(record.seconds[test] for test in by_file[name])
        return seconds * statistics.median(record.num_lines[test] for test in by_file[name]), name

    for name in sorted(by_file, key=cost):
        yield name, by_file[name]


def _shares_runs(name: str, tree: Path) -> bool:
    """Returns whether tests of a file share a run, defined in the file or in a test helper that it imports."""
    text = (tree / name).read_text(encoding="utf-8")
    helpers = {found.replace(".", "/") + ".py" for found in re.findall(r"^from (tests\.[\w.]+) import", text, re.M)}
    texts = [path.read_text(encoding="utf-8") for path in _existing(tree, helpers - {"tests/harness.py"})]
    return any(_SHARED.search(one) for one in (text, *texts))


def _existing(tree: Path, names: Iterable[str]) -> list[Path]:
    return [tree / name for name in sorted(names) if (tree / name).exists()]


# Lines of a fault.


def levels_of(fault: Fault, tree: Path) -> list[Lines]:
    """Returns the fault's lines in `tree`, for each applicable level of [Note: Which tests]."""
    text = (tree / fault.file).read_text(encoding="utf-8")
    syntax = ast.parse(text)
    statements: set[int] = set()
    functions: set[int] = set()
    at_import = False
    for line in changed_lines(text, fault.changed(text)):
        statements |= _statement(syntax, line)
        function = _function(syntax, line)
        at_import |= function is None or _is_cached(function)
        functions |= set() if function is None else _body(function)
    widest = {fault.file: _all_bodies(syntax)}
    for name in importers(fault.file, tree, _product_files(tree)):
        widest[name] = _all_bodies(ast.parse((tree / name).read_text(encoding="utf-8")))
    if at_import:
        return [widest]
    return [{fault.file: statements}, {fault.file: functions}, widest]


def changed_lines(before: str, after: str) -> set[int]:
    """Returns the line numbers of `before` that differ in `after`, and for insertions the surrounding lines."""
    old, new = before.splitlines(), after.splitlines()
    lines: set[int] = set()
    for kind, start, end, _, _ in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "insert":
            lines |= {start, start + 1}
        elif kind != "equal":
            lines |= set(range(start + 1, end + 1))
    return {line for line in lines if 1 <= line <= len(old) and old[line - 1].strip()}


def _statement(syntax: ast.Module, line: int) -> set[int]:
    """Returns the lines of the innermost statement at `line`. For a compound statement, returns the head's lines."""
    around = [node for node in ast.walk(syntax) if isinstance(node, ast.stmt) and _first(node) <= line <= _last(node)]
    if not around:
        return {line}
    node = min(around, key=lambda node: _last(node) - _first(node))
    return {line} | set(range(_first(node), node.body[0].lineno if isinstance(node, _COMPOUND) else _last(node) + 1))


def _function(syntax: ast.Module, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Returns the innermost function whose body contains `line`."""
    around = [node for node in ast.walk(syntax) if isinstance(node, _FUNCTIONS) and line in _body(node)]
    return min(around, key=lambda node: _last(node) - _first(node), default=None)


def _is_cached(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(re.search(r"\b(lru_)?cache\b", ast.unparse(decorator)) for decorator in function.decorator_list)


def _all_bodies(syntax: ast.Module) -> set[int]:
    return {line for node in ast.walk(syntax) if isinstance(node, _FUNCTIONS) for line in _body(node)}


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[int]:
    return set(range(_first(node.body[0]), _last(node) + 1))


def _first(node: ast.stmt) -> int:
    decorators = node.decorator_list if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) else []
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def _last(node: ast.stmt) -> int:
    return node.end_lineno or node.lineno


class _RecordedLines:
    """Maps line numbers of a tree to line numbers of the recorded version."""

    def __init__(self, root: Path, commit: str, changed: set[str]) -> None:
        self._root, self._commit, self._changed = root, commit, changed
        self._maps: dict[str, dict[int, int]] = {}

    def of(self, lines: Lines, tree: Path) -> Lines:
        """Returns the line numbers of `lines` in the recorded version, without lines that it lacks."""
        return {name: self._numbers(name, numbers, tree) for name, numbers in lines.items()}

    def _numbers(self, name: str, numbers: set[int], tree: Path) -> set[int]:
        if name not in self._changed:
            return numbers
        if name not in self._maps:
            old = file_at(self._root, self._commit, name).splitlines()
            new = (tree / name).read_text(encoding="utf-8").splitlines()
            blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
            self._maps[name] = {one.b + i + 1: one.a + i + 1 for one in blocks for i in range(one.size)}
        return {self._maps[name][number] for number in numbers if number in self._maps[name]}


def file_at(root: Path, commit: str, name: str) -> str:
    """Returns a file's text at a commit, or an empty string if the commit lacks the file."""
    shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=root, capture_output=True, text=True, check=False)
    return shown.stdout


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=True).stdout


# Imports between files.


def module_name(file: str) -> str:
    """Returns the module name of a path: megatron/core/timers.py -> megatron.core.timers."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def importers(file: str, tree: Path, among: Iterable[str]) -> list[str]:
    """Returns the files of `among` that import the module `file`."""
    return [name for name in _importing(module_name(file), tree, among) if name != file]


def _importing(module: str, tree: Path, among: Iterable[str]) -> list[str]:
    pattern = _imports(module)
    return [name for name in among if pattern.search((tree / name).read_text(encoding="utf-8"))]


def _imports(module: str) -> re.Pattern[str]:
    package, _, name = module.rpartition(".")
    whole = rf"^\s*(from|import) {re.escape(module)}\b"
    part = rf"^\s*from {re.escape(package)} import (\([^)]*\b{name}\b|.*\b{name}\b)"
    return re.compile(f"{whole}|{part}" if package else whole, re.MULTILINE)


def _product_files(tree: Path) -> list[str]:
    return sorted(path.relative_to(tree).as_posix() for path in [*tree.glob("*.py"), *tree.glob("megatron/**/*.py")])


def _is_test_file(name: str) -> bool:
    return name.startswith("tests/") and name.rpartition("/")[2].startswith("test_") and name.endswith(".py")


def choose_without_record(file: str, tree: Path, *, whole_suite: bool) -> Chosen:
    """Returns test files that import the module `file` or use its public names, then files that import an importer.

    whole_suite: whether all other test files follow. Each group is sorted by size, smallest file first.
    """
    tests = [path.relative_to(tree).as_posix() for path in sorted(tree.glob("tests/**/test_*.py"))]
    tests.sort(key=lambda name: (tree / name).stat().st_size)
    names = [
        node.name
        for node in ast.parse((tree / file).read_text(encoding="utf-8")).body
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)) and not node.name.startswith("_")
    ]
    mention = re.compile(rf"\b({'|'.join(names)})\b" if names else r"(?!)")
    direct = importers(file, tree, tests)
    mentioning = [name for name in tests if mention.search((tree / name).read_text(encoding="utf-8"))]
    through = [test for name in importers(file, tree, _product_files(tree)) for test in importers(name, tree, tests)]
    rest = tests if whole_suite else []
    return dict.fromkeys([*direct, *mentioning, *sorted(set(through), key=tests.index), *rest])
