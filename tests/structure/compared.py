"""Measures the product's code, next to values of other code bases. No measure is a limit.

A measure is a reason to read code, not to split or join it: see docs/testing.md#structure-rules.
"""

import ast
from collections import Counter
from collections.abc import Iterable

from rich.table import Table

from tests.structure.layers import folder_cycles
from tests.structure.measure import PRODUCT, Source, imported_modules, percentile, read_sources, words
from tests.structure.tour import listed_files, listed_nouns

# Sections of docs/tour.md and their goals (docs/testing.md#structure-rules).
WALKS = (
    ("A batch to its loss", "-"),
    ("A token through an expert layer and back", "18 files; torchtitan 16"),
    ("A saved activation into pages and back", "8 files"),
    ("A gradient to an updated parameter", "14 files; FSDP2 10, picotron 2"),
    ("A flag to its use", "10 files"),
)
# Measures in the table of docs/architecture.md, and their values in other code bases of the field.
ANCHORS = {
    "files entered by a token through an expert layer and back": "Megatron-LM 31 (45,800 lines), torchtitan 16 (7,600)",
    "files entered by a saved activation into pages and back": "goal 8",
    "files entered by a gradient to an updated parameter": "FSDP2 10, picotron 2; goal 14",
    "files entered by a flag to its use": "goal 10",
    "public classes between gradient and update": "FSDP2 10",
    "import cycles between folders": "Megatron-LM: one of 29 packages, hidden by 250 imports inside functions",
    "files of megatron/ with one importer and under 80 lines": "goal: at most 15",
    "Protocols with one implementer": "0",
    "fields of the largest config class": "Megatron-LM 247 of its own and 73 inherited",
}


def table() -> Table:
    """Returns a table with one line per measure: its name, this project's value, and a value to compare with."""
    printed = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("measure", "here", "to compare with"):
        printed.add_column(title, overflow="fold")
    for row in rows(read_sources(*PRODUCT)):
        printed.add_row(*row)
    return printed


def anchors() -> str:
    """Returns the table of docs/architecture.md: measures that change only with the structure, next to ANCHORS."""
    here = {name: value for name, value, _ in rows(read_sources(*PRODUCT))}
    lines = ["| measure | here | others |", "|---|---|---|"]
    lines += [f"| {name} | {here[name]} | {others} |" for name, others in ANCHORS.items()]
    return "\n".join(lines) + "\n"


def rows(sources: list[Source]) -> list[tuple[str, str, str]]:
    """Returns (measure, value here, value to compare with) for these files."""
    sources = [source for source in sources if source.tree.body]
    lengths = [len(source.lines) for source in sources]
    functions = [function for source in sources for function in source.functions]
    complexity = [function.complexity for function in functions]
    importers = _importers(sources)
    one_importer = [source for source in sources if len(importers[source.module]) == 1]
    small = [s for s in one_importer if len(s.lines) < 80 and s.name.startswith("megatron/")]
    small = [source for source in small if source.path.stem != "__init__"]
    statements = sum(isinstance(node, ast.stmt) for source in sources for node in source.nodes)
    classes, protocols = _with_one_subclass(sources)
    config, own, inherited = max(_config_fields(sources), key=lambda row: row[1] + row[2], default=("none", 0, 0))
    comments, docs = sum(len(source.comments) for source in sources), sum(s.num_explaining_lines for s in sources)
    code = max(1, sum(source.num_code_lines for source in sources))
    nouns = len(listed_nouns("Nouns on the way of a gradient"))
    return [
        ("files", f"{len(sources)}, {sum(lengths)} lines", "477 when files had limits"),
        ("statements", str(statements), "fewer after each rebuild"),
        ("files under 61 lines", str(sum(length < 61 for length in lengths)), "few: a file is a noun"),
        ("lines a file, median", f"{percentile(lengths, 0.5):.0f}", "FSDP2 about 400, torchtitan 150, picotron 90"),
        ("files with one importer", str(len(one_importer)), "few: a second room needs it"),
        ("files of megatron/ with one importer and under 80 lines", str(len(small)), "at most 15"),
        ("import cycles between folders", str(len(folder_cycles(sources))), "0"),
        ("base classes with one subclass", str(classes), "0"),
        ("Protocols with one implementer", str(protocols), "0"),
        *_walks(),
        ("public classes between gradient and update", str(nouns), "FSDP2: 10 concepts"),
        ("function lines, median/p90/max", _spread([f.lines for f in functions]), "12/42/254"),
        ("complexity, p90/max", "/".join(_spread(complexity).split("/")[1:]), "6/17 when functions had limits"),
        (
            "fields of the largest config class",
            f"{own} of its own and {inherited} inherited ({config})",
            "TransformerConfig of Megatron: 247 of its own and 73 inherited",
        ),
        ("comment lines of code lines", f"{comments / code:.1%}", "Megatron 11%"),
        ("docstring lines of code lines", f"{docs / code:.1%}, first lines not counted", "-"),
    ]


def _walks() -> Iterable[tuple[str, str, str]]:
    """Yields a row for each walk: the number of files that it enters, as listed in docs/tour.md."""
    for heading, goal in WALKS:
        yield f"files entered by {heading[0].lower()}{heading[1:]}", str(len(listed_files(heading))), goal


def _importers(sources: list[Source]) -> dict[str, set[str]]:
    known = frozenset(source.module for source in sources)
    importers: dict[str, set[str]] = {source.module: set() for source in sources}
    for source in sources:
        for module, _ in imported_modules(source, known):
            if module in importers and module != source.module:
                importers[module].add(source.module)
    return importers


def implementers(sources: list[Source]) -> dict[str, list[str]]:
    """Returns the classes that implement each Protocol of the project, by the Protocol's name.

    A class implements a Protocol if it names it as a base class, or defines or inherits all of its members.
    """
    nodes = {node.name: node for source in sources for node in source.classes}
    protocols = {name for name, node in nodes.items() if any("Protocol" in words(base) for base in node.bases)}
    members = {name: _members(name, nodes) for name in nodes}
    return {
        name: [
            other
            for other, node in nodes.items()
            if other not in protocols
            and (any(name in words(base) for base in node.bases) or (members[name] and members[name] <= members[other]))
        ]
        for name in protocols
    }


def _members(name: str, nodes: dict[str, ast.ClassDef]) -> set[str]:
    """Returns the names of a class's methods and attributes, including names inherited from the project's classes."""
    inside = list(ast.walk(nodes[name]))
    found = {node.name for node in inside if isinstance(node, ast.FunctionDef)}
    stored = [node for node in inside if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)]
    found |= {node.id if isinstance(node, ast.Name) else node.attr for node in stored}
    bases = {base for node in nodes[name].bases for base in words(node) & nodes.keys()} - {name}
    return found.union(*(_members(base, nodes) for base in bases))


def _with_one_subclass(sources: list[Source]) -> tuple[int, int]:
    """Returns the number of base classes with exactly one subclass, and of Protocols with exactly one implementer."""
    nodes = [node for source in sources for node in source.classes]
    protocols = implementers(sources)
    own = {node.name for node in nodes}
    children = Counter(name for node in nodes for base in node.bases for name in words(base) & own)
    single = {name for name, count in children.items() if count == 1}
    return len(single - protocols.keys()), sum(len(found) == 1 for found in protocols.values())


def _config_fields(sources: list[Source]) -> Iterable[tuple[str, int, int]]:
    """Yields the name of each configuration class with the numbers of its own and of its inherited fields."""
    nodes = {node.name: node for source in sources for node in source.classes}
    for name, node in nodes.items():
        if name.endswith("Config"):
            own = _fields(node)
            inherited = set().union(*(_with_inherited(base, nodes) for base in _bases(node, nodes)))
            yield name, len(own), len(inherited - own)


def _with_inherited(node: ast.ClassDef, nodes: dict[str, ast.ClassDef]) -> set[str]:
    return _fields(node).union(*(_with_inherited(base, nodes) for base in _bases(node, nodes)))


def _bases(node: ast.ClassDef, nodes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    return [nodes[name] for base in node.bases for name in words(base) if name in nodes and name != node.name]


def _fields(node: ast.ClassDef) -> set[str]:
    declared = (item for item in node.body if isinstance(item, ast.AnnAssign))
    return {ast.unparse(item.target) for item in declared if "ClassVar" not in words(item.annotation)}


def _spread(values: list[int]) -> str:
    return "/".join(f"{percentile(values, fraction):.0f}" for fraction in (0.5, 0.9, 1.0))
