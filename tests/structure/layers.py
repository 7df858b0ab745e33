"""The import order of the packages, lowest first, and checks for upward imports and for cycles."""

import re
from dataclasses import dataclass

from tests.structure.measure import Source, imported_modules


@dataclass(frozen=True)
class Layer:
    """The position in the import order of all modules whose names match `pattern`.

    A module may import from earlier lines. On the same line, it may import only from the same package, and there only
    from the same or a lower step. never: packages of earlier lines that the module still must not import.
    """

    line: int
    package: str
    pattern: str
    step: int = 0
    never: tuple[str, ...] = ()


# The first pattern that matches a module's full name applies.
LAYERS = (
    Layer(0, "package", r"megatron"),  # the version; imports nothing
    Layer(0, "kernels", r"megatron\.core\.(activations|autograd|operator_library|paged_rows)"),  # torch alone
    # torch and triton alone
    Layer(
        0,
        "kernels",
        r"megatron\.core\.device\.(pinned_memory|streams|torch_internals|triton_compile|triton_launch|triton_pages"
        r"|triton_tiles)",
    ),
    Layer(0, "kernels", r"megatron\.core\.fusions\.(gated_activation|triton_activations)", step=1),
    Layer(0, "kernels", r"megatron\.core\.block_scaled(\..+)?", step=2),
    Layer(0, "kernels", r"megatron\.core\.transformer\.moe\.paged_stash(\..+)?", step=3),
    Layer(1, "base", r"megatron\.core\.((\w+\.)*enums|pipeline_placement)"),
    Layer(
        1,
        "base",
        r"megatron\.core\.(absent_features|config_field|dense_memory|device(\..+)?|files"
        r"|graphs(\..+)?|logical_tensors|num_microbatches_calculator|packed_seq_params|rerun_state_machine|timers)",
    ),
    Layer(1, "base", r"megatron\.(version_flag|core\.package_info)"),
    Layer(1, "base", r"megatron\.core\.datasets\.utils"),  # values of --split and --data-path
    Layer(1, "base", r"megatron\.core\.transformer\.layer_pattern"),  # and those of --moe-layer-freq
    Layer(2, "config", r"megatron\.core\.(\w+\.)*\w+_config"),
    Layer(
        2,
        "config",
        r"megatron\.core\.(parallel_state|group_collectives|utils|transformer\.pipeline_split)",
    ),
    Layer(3, "dist_checkpointing", r"megatron\.core\.dist_checkpointing(\..+)?"),
    Layer(4, "full_cuda_graph", r"megatron\.core\.full_cuda_graph"),
    Layer(4, "tensor_parallel", r"megatron\.core\.tensor_parallel(\..+)?"),
    Layer(4, "datasets", r"megatron\.core\.datasets(\..+)?"),
    Layer(4, "tokenizers", r"megatron\.core\.tokenizers(\..+)?"),
    Layer(4, "fusions", r"megatron\.core\.fusions(\..+)?"),
    Layer(5, "transformer", r"megatron\.core\.transformer\.moe(\..+)?", step=1),
    Layer(5, "transformer", r"megatron\.core\.transformer(\..+)?"),
    Layer(5, "extensions", r"megatron\.core\.extensions(\..+)?"),
    Layer(5, "distributed", r"megatron\.core\.distributed(\..+)?"),
    Layer(5, "pipeline_parallel", r"megatron\.core\.pipeline_parallel(\..+)?"),
    Layer(6, "models", r"megatron\.core\.models(\..+)?"),
    Layer(6, "optimizer", r"megatron\.core\.optimizer(_param_scheduler|\..+)?", never=("transformer",)),
    Layer(7, "core", r"megatron\.core"),  # re-exports for users; nothing inside imports from it
    Layer(7, "training", r"megatron\.training(\..+)?"),
    Layer(7, "pages", r"megatron\.pages(\..+)?"),
    Layer(8, "planner", r"megatron\.planner(\..+)?"),
    Layer(9, "programs", r"(pretrain_gpt|model_provider|gpt_builders|benchmarks|examples)(\..+)?"),
    Layer(9, "programs", r"megatron\.(__main__|tools)(\..+)?"),
)


def layer_of(module: str) -> Layer | None:
    """Returns the layer of a module of this project, or None if no pattern matches it."""
    return next((layer for layer in LAYERS if re.fullmatch(layer.pattern, module)), None)


def may_import(importer: Layer, imported: Layer) -> bool:
    """Returns whether a module of the layer `importer` may import a module of the layer `imported`."""
    if importer.package == imported.package:
        return imported.step <= importer.step
    return imported.line < importer.line and imported.package not in importer.never


def upward_imports(sources: list[Source]) -> list[tuple[Source, int, str]]:
    """Returns (file, line, imported module) of each import against the order, and line 1 of modules without a layer."""
    known = frozenset(source.module for source in sources)
    found = []
    for source in sources:
        importer = layer_of(source.module)
        if importer is None:
            found.append((source, 1, "not in the table LAYERS of tests/structure/layers.py"))
            continue
        for module, line in sorted(set(imported_modules(source, known))):
            imported = layer_of(module)
            if imported is not None and not may_import(importer, imported):
                found.append((source, line, module))
    return found


def import_cycles(sources: list[Source]) -> list[list[str]]:
    """Returns the groups of modules that import each other in a cycle, directly or indirectly."""
    known = frozenset(source.module for source in sources)
    return _circles(
        {source.module: {name for name, _ in imported_modules(source, known)} & known for source in sources}
    )


def folder_cycles(sources: list[Source]) -> list[list[str]]:
    """Returns the groups of folders below megatron/ whose files import each other in a cycle, also indirectly."""
    inside = [source for source in sources if source.name.startswith("megatron/")]
    folder_of = {source.module: source.path.parent.as_posix() for source in inside}
    graph: dict[str, set[str]] = {folder: set() for folder in folder_of.values()}
    for source in inside:
        imported = {name for name, _ in imported_modules(source, frozenset(folder_of))} & folder_of.keys()
        graph[folder_of[source.module]] |= {folder_of[name] for name in imported} - {folder_of[source.module]}
    return _circles(graph)


def _circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Returns the strongly connected components with a cycle. graph: for each node, the nodes that it points to."""
    reach = {node: _reachable(graph, node) for node in graph}
    circles = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [list(circle) for circle in sorted(circles)]


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Returns the nodes reachable from `start`. They include `start` only if it is part of a cycle."""
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo.extend(graph[node])
    return seen
