"""The structure rules (docs/testing.md#structure-rules). Each rule is a function that yields its violations.

Lengths, counts and complexity have no limits. compared.py prints them next to values of other code bases.
"""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeGuard

from tests.structure.layers import folder_cycles, import_cycles, upward_imports
from tests.structure.measure import AROUND, PRODUCT, Function, Source, dotted, imported_modules, read_sources, words

GLOBAL_HOLDERS = {
    "megatron/core/parallel_state.py",
    "megatron/core/process_groups_config.py",
    "megatron/training/command_line/published.py",
}
SHAPE = re.compile(r"\[[^\]]*\]|scalar|any shape")
DTYPE = re.compile(r"\b([bu]?f(loat|p)?(8|16|32|64)|u?int(8|16|32|64)?|integer|float(ing)?|bool|any dtype|dtype)\b")
# Files on the path of a training step, where a read of the device makes the host wait.
STEP_PATH = re.compile(
    r"(?!.*/cpu_kernels\.py)"
    r"megatron/core/(transformer|models|tensor_parallel|optimizer|distributed|pipeline_parallel|fusions|block_scaled)/.+"
    r"|megatron/core/(full_cuda_graph|graphs/capture|group_collectives)\.py"
    r"|megatron/training/(training|step/\w+|error_broadcast)\.py"
    r"|pretrain_gpt\.py"
)
# Tensor methods and torch functions that wait for the device.
DEVICE_READS = {"item", "tolist", "cpu", "numpy", "nonzero", "masked_select", "unique", "synchronize"}
CONTAINERS = {"list", "dict", "set", "defaultdict", "deque", "OrderedDict", "Counter", "count", "cycle"}
CONTAINERS |= {"WeakKeyDictionary", "WeakValueDictionary", "WeakSet"}
FACTORIES = {
    f"torch.{name}" for name in ("empty", "eye", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros")
}
MUTATORS = {"append", "add", "clear", "extend", "insert", "pop", "popitem", "popleft", "remove", "setdefault", "update"}
MUTATORS |= {"appendleft", "difference_update", "discard", "extendleft", "intersection_update", "reverse", "sort"}

# A rule yields (file, line, description of the violation).
Broken = tuple[str, int, str]
Rule = Callable[[list[Source]], Iterable[Broken]]
PRODUCT_RULES: dict[str, Rule] = {}
ANY_CODE_RULES: dict[str, Rule] = {}  # also applied to tests, benchmarks and examples


@dataclass(frozen=True)
class Finding:
    """A violation of a rule."""

    rule: str
    path: str
    line: int
    wrong: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.wrong} [{self.rule}]"


def findings() -> list[Finding]:
    """Returns all violations in the project, in the order of the rules."""
    product, tests = read_sources(*PRODUCT, *AROUND), read_sources("tests", "setup.py")
    return [
        Finding(rule, path, line, wrong)
        for rules, sources in ((PRODUCT_RULES, product), (ANY_CODE_RULES, [*product, *tests]))
        for rule, check in rules.items()
        for path, line, wrong in check(sources)
    ]


def product_rule(check: Rule) -> Rule:
    PRODUCT_RULES[check.__name__] = check
    return check


def any_code_rule(check: Rule) -> Rule:
    ANY_CODE_RULES[check.__name__] = check
    return check


# Imports between modules.


@product_rule
def import_direction(sources: list[Source]) -> Iterator[Broken]:
    """Modules import only from layers below them, in the order of tests/structure/layers.py."""
    for source, line, module in upward_imports(sources):
        yield source.name, line, f"{source.module} imports {module}, which is not below it"


@product_rule
def import_cycle(sources: list[Source]) -> Iterator[Broken]:
    """Modules do not import each other in a cycle, including imports inside functions."""
    for circle in import_cycles(sources):
        yield circle[0], 1, f"import cycle: {' <-> '.join(circle)}"


@product_rule
def folder_cycle(sources: list[Source]) -> Iterator[Broken]:
    """Folders below megatron/ do not import each other in a cycle."""
    for circle in folder_cycles(sources):
        yield circle[0], 1, f"import cycle of folders: {' <-> '.join(circle)}"


@any_code_rule
def tools_import(sources: list[Source]) -> Iterator[Broken]:
    """Code imports the programs of tools/ from megatron.tools, as in the wheel, since `tools` would load them twice."""
    for source in sources:
        for module, line in imported_modules(source, frozenset()):
            if module.split(".")[0] == "tools":
                yield source.name, line, f"imports {module} instead of megatron.{module}"


# State and errors.


@product_rule
def module_state(sources: list[Source]) -> Iterator[Broken]:
    """Functions do not change module-level state, except in the modules of process groups and in published.py."""
    for source in sources:
        if source.name in GLOBAL_HOLDERS:
            continue
        for node in source.nodes:
            if isinstance(node, ast.Global):
                yield source.name, node.lineno, f"`global {', '.join(node.names)}`"
        yield from _containers_to_fill(source)


@any_code_rule
def bare_except(sources: list[Source]) -> Iterator[Broken]:
    """Handlers of all exceptions bind the exception to a name. Without a name, they could only swallow it."""
    for source in sources:
        for node in source.nodes:
            if isinstance(node, ast.ExceptHandler):
                takes_all = node.type is None or words(node.type) & {"Exception", "BaseException"}
                if takes_all and node.name is None:
                    yield source.name, node.lineno, f"`except {ast.unparse(node.type) if node.type else ''}` swallows"


@product_rule
def host_sync(sources: list[Source]) -> Iterator[Broken]:
    """Code on the path of a training step reads the device only in functions with `sync` in their names."""
    for source in sources:
        if not STEP_PATH.fullmatch(source.name):
            continue
        named = [function.node for function in source.functions if "sync" in function.node.name.split("_")]
        allowed = {inner for node in named for inner in ast.walk(node)}
        for node in source.nodes:
            if _reads_device(node) and node not in allowed:
                yield source.name, node.lineno, f"`{ast.unparse(node)}` waits for the device outside *_sync_*"


@product_rule
def stated_dtype(sources: list[Source]) -> Iterator[Broken]:
    """The library passes a dtype for new tensors. Otherwise their dtype would depend on torch.set_default_dtype."""
    for source in sources:
        for node in source.nodes if source.name.startswith("megatron/") else ():
            if isinstance(node, ast.Call) and dotted(node.func) in FACTORIES:
                if not any(keyword.arg in ("dtype", None) for keyword in node.keywords):
                    yield source.name, node.lineno, f"`{dotted(node.func)}` without dtype="


# Words.


@product_rule
def tensor_docstring(sources: list[Source]) -> Iterator[Broken]:
    """Docstrings of public functions that take or return tensors state the shapes and dtypes of the tensors."""
    for source in sources:
        for function in source.functions:
            if not function.public or not _mentions_tensor(function):
                continue
            text = ast.get_docstring(function.node) or ""
            missing = [word for word, pattern in (("shape", SHAPE), ("dtype", DTYPE)) if not pattern.search(text)]
            if missing:
                yield source.name, function.node.lineno, f"{function.qualname}: docstring lacks {' and '.join(missing)}"


@any_code_rule
def docstring_start(sources: list[Source]) -> Iterator[Broken]:
    """Docstrings do not begin with `See`, `Of`, `That of` or `Those of`."""
    for source in sources:
        for node in source.documented:
            text = (ast.get_docstring(node) or "").strip()
            if re.match(r"(See|Of|That of|Those of)\b", text):
                line = 1 if isinstance(node, ast.Module) else node.lineno
                yield source.name, line, f"docstring begins with `{' '.join(text.split()[:4])}`"


@any_code_rule
def todo(sources: list[Source]) -> Iterator[Broken]:
    """TODO comments name an issue, as in TODO(#12)."""
    for source in sources:
        for line, text in source.comments.items():
            if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text) and not re.search(r"TODO\(#\d+\)", text):
                yield source.name, line, f"`{text}` names no issue"


# Helpers.


def _containers_to_fill(source: Source) -> Iterator[Broken]:
    """Yields module-level containers that the module's functions change, or that are empty, to be filled elsewhere."""
    bound: dict[str, ast.Assign | ast.AnnAssign] = {}
    for node in source.tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None and _is_container(node.value):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                bound[dotted(target)] = node
    changed = {name for function in source.functions for name in _changed_names(function.node)}
    for name, node in bound.items():
        if name in changed or (node.value is not None and _is_empty(node.value)):
            yield source.name, node.lineno, f"`{name}` is a container of the module that is filled later"


def _is_container(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return dotted(value.func).split(".")[-1] in CONTAINERS
    return isinstance(value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp))


def _is_empty(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return not value.keywords and (not value.args or dotted(value.func).endswith("defaultdict"))
    return isinstance(value, (ast.List, ast.Dict)) and not ast.unparse(value).strip("[]{}")


def _changed_names(function: ast.AST) -> set[str]:
    """Returns the names that a function changes in place, except for names that the function itself binds."""
    nodes = list(ast.walk(function))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    changed = set()
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            changed.add(dotted(node.func.value))
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            changed.add(dotted(node.value))
    return changed - own


def _reads_device(node: ast.AST) -> TypeGuard[ast.Call]:
    called = node.func if isinstance(node, ast.Call) else None
    return isinstance(called, ast.Attribute) and called.attr in DEVICE_READS


def _mentions_tensor(function: Function) -> bool:
    """Returns whether a function takes or returns tensors. Arguments named `params` or the like do not count."""
    arguments = function.node.args
    annotations = [
        argument.annotation
        for argument in (*function.parameters, arguments.vararg, arguments.kwarg)
        if argument and not re.match(r"params?(eters?)?$", argument.arg)
    ]
    return any("Tensor" in words(annotation) for annotation in (*annotations, function.node.returns))
