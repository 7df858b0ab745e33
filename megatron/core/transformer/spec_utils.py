"""Specs: which module to build, with which parameters and submodules; the modules themselves live elsewhere."""

import importlib
import types
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """A module by class or (import path, name), keyword arguments for it, and the specs of its submodules."""

    module: tuple[str, str] | type | types.FunctionType
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None


def import_module(module_path: tuple[str, str]) -> Any:
    """The object `name` of the module at `path`, for module_path = (path, name); ValueError if it has none."""
    path, name = module_path
    module = importlib.import_module(path)
    if name not in vars(module):
        raise ValueError(f"{path} has no {name!r}: a spec must name a class or function of that module")
    return vars(module)[name]


def get_module(spec_or_module: Any) -> Any:
    """The class or function that a spec names; anything else is returned as it is."""
    if isinstance(spec_or_module, ModuleSpec):
        spec_or_module = spec_or_module.module
    return import_module(spec_or_module) if isinstance(spec_or_module, tuple) else spec_or_module


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds what a spec or class describes: the spec's params join `kwargs` (which win), submodules are passed on.

    A function is returned as it is, not called. Raises what the constructor raises, saying which module it was.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        # What the builder knows (sizes, groups) wins over what the spec wishes.
        kwargs = {**spec_or_module.params, **kwargs}
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **kwargs)
    except (TypeError, ValueError) as error:
        # The message names an argument; which of a hundred modules it was is lost without this.
        error.add_note(f"while building {module.__module__}.{module.__qualname__}")
        raise
