"""Which modules torch's fully_shard is given: what is gathered and reduced together. Shards nothing itself."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.dist_checkpointing.logical import canonical_name
from megatron.core.tensor_parallel.param_attributes import param_facts


@dataclass(frozen=True)
class UnitKind:
    """Properties that the parameters of a unit share: the compute dtype, and the ranks they are spread over."""

    dtype: torch.dtype
    is_expert: bool


@dataclass(frozen=True, eq=False)
class Unit:
    """A module whose parameters are gathered together, but for those of units inside it."""

    name: str
    module: nn.Module
    kind: UnitKind

    @property
    def dtype_of_half(self) -> torch.dtype | None:
        """The 16-bit dtype that modules compute in, while shards are fp32; None where both are one."""
        return self.kind.dtype if self.kind.dtype.itemsize < 4 else None


def find_units(root: nn.Module, layers: Sequence[nn.Module], *, experts_apart: bool) -> list[Unit]:
    """The units of `root`: one a layer, the rest in one of the root's, the inner ones first, root last.

    Experts that are reduced over other ranks, and parameters of another dtype than most, make units of their own.
    Raises ValueError where a module has parameters of two kinds itself, or two units share a parameter.
    """

    def kind_of(param: nn.Parameter) -> UnitKind:
        return UnitKind(param.dtype, experts_apart and param_facts(param).is_expert)

    names = {module: name for name, module in root.named_modules()}
    cut = set(layers)
    units: list[Unit] = []
    for outer in [*layers, root]:
        inside = [(n, p) for n, p in outer.named_parameters() if not _is_below(n, outer, cut=cut - {outer})]
        kind = _main_kind([kind_of(param) for _, param in inside], [param.numel() for _, param in inside])
        if kind is None:
            kind = UnitKind(torch.float32, is_expert=False)
        units += [
            Unit(canonical_name(names[module]), module, kind_inside)
            for module, kind_inside in _apart(outer, kind, kind_of=kind_of, stop=cut)
        ]
        units.append(Unit(canonical_name(names[outer]), outer, kind))
    _check_not_shared(root, units)
    return units


def in_order_of_backward(units: Sequence[Unit], layers: Sequence[nn.Module]) -> list[Unit]:
    """Sorts the units of find_units as backward ends with them: the last layer first, root last.

    Units inside a layer come before it.
    """
    outer = set(layers)
    of_layers: list[list[Unit]] = [[]]
    for unit in units:
        of_layers[-1].append(unit)
        if unit.module in outer:
            of_layers.append([])
    *inner, of_root = of_layers
    return [unit for of_layer in (*reversed(inner), of_root) for unit in of_layer]


def repeated_layers(root: nn.Module) -> list[nn.Module]:
    """The members of the outermost ModuleLists, and of lists in these: in a model of layers, the layers."""
    found: list[nn.Module] = []
    for child in root.children():
        if isinstance(root, nn.ModuleList) and _has_forward(child):
            found.append(child)
        else:
            found += repeated_layers(child)
    return [layer for layer in found if any(True for _ in layer.parameters())]


def _is_below(name: str, outer: nn.Module, *, cut: set[nn.Module]) -> bool:
    """Whether a parameter of `outer` lies in one of the modules of `cut`."""
    module = outer
    for part in name.split(".")[:-1]:
        module = module.get_submodule(part)
        if module in cut:
            return True
    return False


def _main_kind(kinds: Sequence[UnitKind], sizes: Sequence[int]) -> UnitKind | None:
    """The dense kind with most elements; of experts where there is nothing else; None without any."""
    elements: dict[UnitKind, int] = {}
    for kind, size in zip(kinds, sizes, strict=True):
        elements[kind] = elements.get(kind, 0) + size
    return max(elements, key=lambda kind: (not kind.is_expert, elements[kind]), default=None)


def _apart(
    module: nn.Module,
    main: UnitKind,
    *,
    kind_of: Callable[[nn.Parameter], UnitKind],
    stop: set[nn.Module],
) -> Iterator[tuple[nn.Module, UnitKind]]:
    """The largest modules inside that are all of another kind than `main`."""
    for name, param in module.named_parameters(recurse=False):
        if kind_of(param) != main:
            raise ValueError(
                f"parameter {name} of {type(module).__name__} is {_words(kind_of(param))} among others that are "
                f"{_words(main)}: with TorchFullyShardedDataParallel the parameters of a module, and of lists and "
                "dicts in it, must be of one kind; put it in a module of its own, which is called"
            )
    for child in module.children():
        if child in stop:
            continue
        kinds = {kind_of(param) for name, param in child.named_parameters() if not _is_below(name, child, cut=stop)}
        if len(kinds) == 1 and kinds != {main} and _has_forward(child):
            yield child, kinds.pop()
        elif kinds - {main}:
            yield from _apart(child, main, kind_of=kind_of, stop=stop)


def _has_forward(module: nn.Module) -> bool:
    """Whether it has a forward, before which its parameters are gathered; lists and dicts of modules have none."""
    return type(module).forward is not nn.Module.forward


def _check_not_shared(root: nn.Module, units: Sequence[Unit]) -> None:
    by_module = {unit.module: unit for unit in units}
    found: dict[nn.Parameter, tuple[str, Unit]] = {}
    for name, param in root.named_parameters(remove_duplicate=False):
        module, unit = root, by_module[root]
        for part in name.split(".")[:-1]:
            module = module.get_submodule(part)
            unit = by_module.get(module, unit)
        first, other = found.setdefault(param, (name, unit))
        if other is not unit:
            raise ValueError(
                f"parameter {canonical_name(name)} is {canonical_name(first)} as well, and the two are gathered at "
                f"different times: leave {unit.name or 'the model'} or {other.name or 'the model'} out of "
                "sub_modules_to_wrap, or untie them (--untie-embeddings-and-output-weights)"
            )


def _words(kind: UnitKind) -> str:
    return f"{'an expert in ' if kind.is_expert else ''}{str(kind.dtype).removeprefix('torch.')}"
