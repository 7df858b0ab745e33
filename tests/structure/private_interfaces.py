"""Finds the private interfaces of torch and Triton that the code uses, and reads the list of them in the documentation.

A name is private if a part of it begins with one underscore. The code does not tell which class an attribute of an
object belongs to: a private attribute counts as torch's if nothing in this project has that name.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.structure.measure import ROOT, Source, dotted

PAGE = ROOT / "docs" / "torch_versions.md"
LIBRARIES = ("torch", "triton")
# Private by their name only: Python documents named tuples, argparse's actions, and the others.
DOCUMENTED = {"_actions", "_asdict", "_fields"}
# Of torch's modules, except in files that define one of the same name.
OF_MODULES = {"_buffers", "_modules", "_parameters"}
# Their second argument is the name of an attribute.
BY_NAME = ("getattr", "setattr", "delattr", "hasattr")


def listed_interfaces(*, in_cpu_builds: bool = False) -> dict[str, set[str]]:
    """Returns the files of each interface in the tables of the page: the third and the first cell of their rows.

    in_cpu_builds: leave out the interfaces that only CUDA builds of torch have, according to the second cell.
    """
    rows = re.findall(r"^\| (`.+?) \| (.+?) \| (`.+?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return {
        name: set(re.findall(r"`([^`]+)`", files))
        for names, versions, files in rows
        for name in re.findall(r"`([^`]+)`", names)
        if not (in_cpu_builds and versions.endswith("CUDA"))
    }


def private_interfaces(sources: list[Source]) -> dict[str, set[str]]:
    """Returns the files that use each private interface: a dotted name, or `.name` for an attribute of an object."""
    own = (DOCUMENTED | {name for source in sources for name in _defined(source)}) - OF_MODULES
    files: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        used = set(_used(source, own | OF_MODULES & {*_defined(source)}))
        for name in used:
            # A module that is imported, or passed on the way to a longer name, is no use of its own.
            if not any(longer.startswith(f"{name}.") for longer in used):
                files[name].add(source.name)
    return dict(files)


def _defined(source: Source) -> Iterator[str]:
    for node in source.nodes:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(ast.Name("self" | "cls"), name, ast.Store()):
                yield name


def _used(source: Source, own: set[str]) -> Iterator[str]:
    modules = dict(_imported(source))
    yield from (shown for full in modules.values() if (shown := _shown(full)))
    for node in source.nodes:
        if isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first in modules:
                if shown := _shown(f"{modules[first]}.{rest}" if modules[first] else ""):
                    yield shown
                continue
        name = _attribute(node)
        if name is not None and _is_private(name) and name not in own:
            yield f".{name}"


def _imported(source: Source) -> Iterator[tuple[str, str]]:
    """Yields (name in the file, full name) of what a file imports. The full name is empty for other libraries."""
    for node in source.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                full = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or full, full if alias.name.split(".")[0] in LIBRARIES else ""
        elif isinstance(node, ast.ImportFrom) and (module := node.module or "") and module != "__future__":
            for alias in node.names:
                full = f"{module}.{alias.name}" if module.split(".")[0] in LIBRARIES else ""
                if full or module.split(".")[0] != "megatron":
                    yield alias.asname or alias.name, full


def _shown(full: str) -> str:
    """Returns a private name as the page lists it: up to what follows its last private part, or an empty string.

    torch._C._autograd._profiler_enabled and torch.utils._pytree.tree_map are whole; an operator has no overload.
    """
    parts = full.split(".")
    private = [number for number, part in enumerate(parts) if _is_private(part)]
    if not private:
        return ""
    end = private[-1] + (1 if full.startswith("torch.ops.") else 2)
    return ".".join(parts[:end])


def _is_private(part: str) -> bool:
    return re.match(r"_[^_]", part) is not None


def _attribute(node: ast.AST) -> str | None:
    """Returns the name in x.name, getattr(x, "name"), attrgetter("name"), vars(x)["name"] or vars(x).get("name")."""
    match node:
        case ast.Attribute(attr=name):
            return name
        case ast.Call(func=ast.Name(id=function), args=[_, ast.Constant(value=str(name)), *_]) if function in BY_NAME:
            return name
        case ast.Call(func=ast.Name(id="attrgetter"), args=[ast.Constant(value=str(name))]):
            return name
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")), slice=ast.Constant(value=str(name))):
            return name
        case ast.Call(
            func=ast.Attribute(ast.Call(func=ast.Name(id="vars")), "get"), args=[ast.Constant(str(name)), *_]
        ):
            return name
    return None
