"""The limits of the house style as rules over measured files. What a file measures is in measure.py; exemptions are
in allow_list.py.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from tests.structure.layers import import_cycles, upward_imports
from tests.structure.measure import (
    AROUND,
    PRODUCT,
    Function,
    Source,
    dotted,
    imported_modules,
    percentile,
    read_sources,
    words,
)

# Packages that an import inside a function may name: they are not there on every machine.
OPTIONAL_PACKAGES = {
    "deep_ep",
    "deepspeed",
    "triton",
    "transformer_engine",
    "safetensors",
    "sentencepiece",
    "tiktoken",
    "transformers",
    "matplotlib",
    "jinja2",
}
OPTIONAL_MODULES = {"torch.utils.tensorboard"}  # needs the package tensorboard
# Methods whose parameters torch decides: nn.Module, autograd.Function, torch.distributed.checkpoint's planners.
FRAMEWORK_SIGNATURES = {"forward", "backward", "setup_context", "set_up_planner"}
FILE_LIMITS = {"pretrain_gpt.py": 150}
FUNCTION_LIMITS = {"train_step": 60}
GLOBAL_HOLDERS = {"megatron/core/parallel_state.py", "megatron/training/global_vars.py"}
SHAPE = re.compile(r"\[[^\]]*\]|scalar|any shape")
DTYPE = re.compile(
    r"\b([bu]?f(loat|p)?(8|16|32|64)|u?int(8|16|32|64)?|integer|float(ing)?|bool|long|any dtype|dtype)\b"
)


@dataclass(frozen=True)
class Finding:
    """One place that breaks one rule; `measured` and `limit` are words for the message."""

    rule: str
    path: str
    line: int
    name: str
    measured: str
    limit: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What the allow-list names: no line number, so that it survives edits."""
        return (self.rule, self.path, self.name)

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.name}: {self.measured}, limit {self.limit} [{self.rule}]"


# Where a training step runs: a read of the device there makes the host wait.
STEP_PATH = re.compile(
    r"megatron/core/(transformer|models|tensor_parallel|optimizer|distributed|pipeline_parallel)/.+"
    r"|megatron/training/(training|step_statistics|evaluation)\.py"
)

# A rule yields (file, line, name, measured, limit).
Broken = tuple[str, int, str, object, object]
Rule = Callable[[list[Source]], Iterable[Broken]]
PRODUCT_RULES: dict[str, Rule] = {}
ANY_CODE_RULES: dict[str, Rule] = {}  # tests, benchmarks and examples keep to these too


def findings() -> list[Finding]:
    """Every place of the project that breaks a rule, allowed or not, in the order of the rules."""
    product, tests = read_sources(*PRODUCT, *AROUND), read_sources("tests", "setup.py")
    found = []
    for rules, sources in ((PRODUCT_RULES, product), (ANY_CODE_RULES, [*product, *tests])):
        for rule, check in rules.items():
            for path, line, name, measured, limit in check(sources):
                found.append(Finding(rule, path, line, name, str(measured), str(limit)))
    return found


def product_rule(check: Rule) -> Rule:
    PRODUCT_RULES[check.__name__] = check
    return check


def any_code_rule(check: Rule) -> Rule:
    ANY_CODE_RULES[check.__name__] = check
    return check


# Files.


@any_code_rule
def file_length(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        limit = FILE_LIMITS.get(source.name, 500)
        if len(source.lines) > limit:
            yield source.name, limit, "file", f"{len(source.lines)} lines", limit


@any_code_rule
def module_docstring(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        if source.tree.body and not ast.get_docstring(source.tree):
            yield source.name, 1, "file", "no docstring", "one sentence what lives here, one what does not"


@any_code_rule
def ascii_only(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        for line, text in enumerate(source.lines, 1):
            if not text.isascii():
                yield source.name, line, "text", ascii("".join(c for c in text if not c.isascii())), "ASCII"


@any_code_rule
def todo(sources: list[Source]) -> Iterator[Broken]:
    marked = [
        (source, line, text)
        for source in sources
        for line, text in source.comments.items()
        if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)
    ]
    allowed = sum(source.num_code_lines for source in sources) // 1000
    for count, (source, line, text) in enumerate(marked, 1):
        if count > allowed or not re.search(r"TODO\(#\d+\)", text):
            yield source.name, line, text, "to do", f"1 per 1000 lines ({allowed}), written TODO(#issue)"


@product_rule
def folder_depth(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        depth = len(source.path.parts) - len(("megatron", "core", "file"))
        if source.name.startswith("megatron/core/") and depth > 3:
            yield source.name, 1, "file", f"{depth} folders under megatron/core", 3


# Functions.


@any_code_rule
def function_length(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        limit = FUNCTION_LIMITS.get(function.node.name, 80)
        if function.lines > limit:
            yield *_at(source, function), f"{function.lines} lines", limit


@any_code_rule
def complexity(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        if function.complexity > 15:
            yield *_at(source, function), f"complexity {function.complexity}", 15


@product_rule
def parameters(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        if not _framework_decides(function) and len(function.parameters) > 10:
            yield *_at(source, function), f"{len(function.parameters)} parameters", 10


@product_rule
def keyword_only(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        if not _framework_decides(function) and len(function.positional) > 2:
            yield *_at(source, function), f"{len(function.positional)} positional parameters", "2, then keyword-only"


@product_rule
def return_values(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        most = max((_num_returned(node) for node in ast.walk(function.node)), default=0)
        if function.node.name != "backward" and most >= 4:
            yield *_at(source, function), f"returns {most} values", "3 (a dataclass from 4)"


@product_rule
def tensor_docstring(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        if not function.public or not _mentions_tensor(function):
            continue
        text = ast.get_docstring(function.node) or ""
        missing = [what for what, found in (("shape", SHAPE.search(text)), ("dtype", DTYPE.search(text))) if not found]
        if missing:
            yield *_at(source, function), f"docstring lacks {' and '.join(missing)}", "shape, dtype of tensors"


@product_rule
def import_in_function(sources: list[Source]) -> Iterator[Broken]:
    inner = [(source, *found) for source in sources for found in _inner_imports(source)]
    for count, (source, line, module) in enumerate(inner, 1):
        if module.split(".")[0] not in OPTIONAL_PACKAGES and module not in OPTIONAL_MODULES:
            yield source.name, line, module, "imported inside a function", "optional packages alone"
        elif count > 10:
            yield source.name, line, module, f"import {count} inside a function", 10


# Classes.


@product_rule
def config_fields(sources: list[Source]) -> Iterator[Broken]:
    for source, node in _config_classes(sources):
        fields = [
            item for item in node.body if isinstance(item, ast.AnnAssign) and "ClassVar" not in words(item.annotation)
        ]
        if len(fields) > 25:
            yield source.name, node.lineno, node.name, f"{len(fields)} own fields", 25


@product_rule
def post_init(sources: list[Source]) -> Iterator[Broken]:
    for source, function in _each_function(sources):
        if function.node.name == "__post_init__" and function.lines > 30:
            yield *_at(source, function), f"{function.lines} lines", 30
    for source, node in _config_classes(sources):
        for item in node.body:
            if isinstance(item, ast.FunctionDef) and item.name == "__post_init__" and not _calls_validation(item):
                yield source.name, item.lineno, f"{node.name}.__post_init__", "no validate_* call", "one at least"


# State, errors, devices.


@product_rule
def global_names(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        statements = [node for node in ast.walk(source.tree) if isinstance(node, ast.Global)]
        names = sorted({name for node in statements for name in node.names})
        limit = int(source.name in GLOBAL_HOLDERS)
        if len(names) > limit:
            yield source.name, statements[0].lineno, ", ".join(names), f"{len(names)} global names", limit


@product_rule
def module_state(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        for node in source.tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _is_empty(node.value):
                yield source.name, node.lineno, ast.unparse(node), "empty container in a module", "no mutable state"


@any_code_rule
def broad_except(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and words(node.type) & {"Exception", "BaseException"}:
                yield source.name, node.lineno, ast.unparse(node.type or node), "broad except", "errors named"
            elif isinstance(node, ast.ExceptHandler) and node.type is None:
                yield source.name, node.lineno, "except", "bare except", "errors named"


@product_rule
def torch_cuda(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        if source.name == "megatron/core/device.py":
            continue
        nodes = [node for node in ast.walk(source.tree) if isinstance(node, ast.Attribute)]
        uses = [node.lineno for node in nodes if dotted(node) == "torch.cuda"]
        uses += [line for name, line in imported_modules(source, frozenset({"torch.cuda"})) if name == "torch.cuda"]
        for line in sorted(set(uses)):
            yield source.name, line, "torch.cuda", "used here", "megatron/core/device.py alone"


@product_rule
def registry_in_megatron(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and source.name.startswith("megatron/"):
                called = dotted(node.func).split(".")[-1]
                # With an argument it is typing.get_args.
                if called in ("get_args", "get_tokenizer") and not node.args:
                    yield source.name, node.lineno, called, "called in megatron/", "for users' scripts alone"


@product_rule
def device_read(sources: list[Source]) -> Iterator[Broken]:
    for source in sources:
        if not STEP_PATH.fullmatch(source.name):
            continue
        named = [function.node for function in source.functions if function.node.name.endswith("_sync")]
        allowed = {inner for node in named for inner in ast.walk(node)}
        for node in ast.walk(source.tree):
            if _reads_device(node) and node not in allowed:
                yield source.name, node.lineno, ast.unparse(node), "reads the device", "functions named *_sync"


# Imports between modules.


@product_rule
def import_direction(sources: list[Source]) -> Iterator[Broken]:
    for source, line, module in upward_imports(sources):
        yield source.name, line, module, f"imported by {source.module}", "lines above it in megatron/core/README.md"


@product_rule
def import_cycle(sources: list[Source]) -> Iterator[Broken]:
    for circle in import_cycles(sources):
        yield circle[0], 1, " <-> ".join(circle), "import cycle", "none"


# Statistics of the product as a whole.


@product_rule
def statistics(sources: list[Source]) -> Iterator[Broken]:
    product = [source for source in sources if source.path.parts[0] in PRODUCT]
    functions = [function for _, function in _each_function(product)]
    own = [function for function in functions if not _framework_decides(function)]
    lengths = [function.lines for function in functions]
    for name, values, fraction, limit in (
        ("file length, median", [len(source.lines) for source in product if source.tree.body], 0.5, 200),
        ("function length, median", lengths, 0.5, 12),
        ("function length, p90", lengths, 0.9, 40),
        ("complexity, p90", [function.complexity for function in functions], 0.9, 7),
        ("parameters, p90", [len(function.parameters) for function in own], 0.9, 5),
    ):
        if percentile(values, fraction) > limit:
            yield "megatron", 1, name, percentile(values, fraction), limit


@product_rule
def comment_ratio(sources: list[Source]) -> Iterator[Broken]:
    # A docstring's first line names the thing; the lines after it explain, as comments do.
    product = [source for source in sources if source.path.parts[0] in PRODUCT]
    num_comments = sum(len(source.comments) + source.num_explaining_lines for source in product)
    num_lines = max(1, sum(source.num_code_lines for source in product))
    if not 0.08 <= num_comments / num_lines <= 0.15:
        yield "megatron", 1, "comments", f"{num_comments} on {num_lines} code lines", "8 to 15%"


@product_rule
def attribute_by_name(sources: list[Source]) -> Iterator[Broken]:
    calls = [(source, node) for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    uses = [(source, node) for source, node in calls if dotted(node.func) in ("getattr", "hasattr", "setattr")]
    allowed = 2 * sum(source.num_code_lines for source in sources) // 1000
    if len(uses) > allowed:
        for source, node in uses:
            yield source.name, node.lineno, ast.unparse(node), f"one of {len(uses)}", f"{allowed} (2 per 1000 lines)"


@product_rule
def test_ratio(sources: list[Source]) -> Iterator[Broken]:
    code = sum(source.num_code_lines for source in sources if source.path.parts[0] != "examples")
    tests = sum(source.num_code_lines for source in read_sources("tests"))
    if not 0.4 <= tests / max(1, code) <= 0.8:
        yield "tests", 1, "test lines", f"{tests} for {code} lines of code", "40 to 80%"


# Helpers.


def _each_function(sources: list[Source]) -> Iterator[tuple[Source, Function]]:
    return ((source, function) for source in sources for function in source.functions)


def _at(source: Source, function: Function) -> tuple[str, int, str]:
    return source.name, function.node.lineno, function.qualname


def _framework_decides(function: Function) -> bool:
    """Whether nn.Module, autograd, Python or Triton fixes the parameters."""
    name = function.node.name
    dunder = name.startswith("__") and name.endswith("__") and name != "__init__"
    kernel = any("jit" in _attributes(decorator) for decorator in function.node.decorator_list)
    return kernel or (function.in_class is not None and (name in FRAMEWORK_SIGNATURES or dunder))


def _attributes(decorator: ast.expr) -> list[str]:
    """The parts of its dotted name, called or not: triton.jit(...) gives triton and jit."""
    return dotted(decorator.func if isinstance(decorator, ast.Call) else decorator).split(".")


def _mentions_tensor(function: Function) -> bool:
    arguments = function.node.args
    annotations = [
        argument.annotation for argument in (*function.parameters, arguments.vararg, arguments.kwarg) if argument
    ]
    return any("Tensor" in words(annotation) for annotation in (*annotations, function.node.returns))


def _num_returned(node: ast.AST) -> int:
    return len(node.value.elts) if isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) else 0


def _inner_imports(source: Source) -> list[tuple[int, str]]:
    nodes = {node for function in source.functions for node in ast.walk(function.node)}
    found = [(node.lineno, alias.name) for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [(node.lineno, node.module or ".") for node in nodes if isinstance(node, ast.ImportFrom)]
    return sorted(found)


def _config_classes(sources: list[Source]) -> Iterator[tuple[Source, ast.ClassDef]]:
    for source in sources:
        for node in source.classes:
            if any("dataclass" in words(decorator) for decorator in node.decorator_list) and node.name.endswith(
                "Config"
            ):
                yield source, node


def _calls_validation(function: ast.FunctionDef) -> bool:
    called = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    names = {node.attr if isinstance(node, ast.Attribute) else dotted(node) for node in called}
    return "__post_init__" in names or any(name.lstrip("_").startswith("validate") for name in names)


def _reads_device(node: ast.AST) -> TypeGuard[ast.Call]:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in ("item", "tolist", "cpu")


def _is_empty(value: ast.expr) -> bool:
    """An empty list, dict or set, which can only be there to be filled."""
    if isinstance(value, ast.Call):
        made = dotted(value.func).split(".")[-1]
        return made in ("list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter") and not value.keywords
    return isinstance(value, (ast.List, ast.Dict)) and not ast.unparse(value).strip("[]{}")
