"""Specs, which describe the module to build, its parameters and its submodules. The modules themselves are in other
files.
"""

import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """A module by class or (import path, name), keyword arguments for it, and the specs of its submodules.

    metainfo: additional information for the author of the spec; building ignores it.
    """

    module: tuple[str, str] | type | types.FunctionType
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)


def import_module(module_path: tuple[str, str]) -> Any:
    """Returns the object `name` of the module at `path`, for module_path = (path, name); ValueError if it has none."""
    path, name = module_path
    module = importlib.import_module(path)
    if name not in vars(module):
        raise ValueError(f"{path} has no {name!r}: a spec must name a class or function of that module")
    return vars(module)[name]


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """Returns the class or function that a spec names; anything else is returned unchanged.

    additional_kwargs: ignored; some callers pass their build arguments here.
    """
    if isinstance(spec_or_module, ModuleSpec):
        spec_or_module = spec_or_module.module
    return import_module(spec_or_module) if isinstance(spec_or_module, tuple) else spec_or_module


def get_submodules(spec: Any) -> Any:
    """Returns the submodule specs of a spec, or of a functools.partial of a builder.

    Raises ValueError for anything else.
    """
    if isinstance(spec, ModuleSpec):
        return spec.submodules
    if isinstance(spec, functools.partial) and "submodules" in spec.keywords:
        return spec.keywords["submodules"]
    raise ValueError(f"{spec!r} has no submodules: must be a ModuleSpec, or a functools.partial with submodules")


def accepted_by(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `keywords` that a function or class accepts by name, according to its signature.

    A class that takes any keyword (**kwargs) is assumed to pass them to its base class, so the first base class that
    lists its parameters decides. All keywords are accepted if no signature lists them.
    """
    classes = inspect.getmro(function)[:-1] if isinstance(function, type) else ()
    constructors = [vars(cls)["__init__"] for cls in classes if "__init__" in vars(cls)]
    names: set[str] = set()
    for signature in map(inspect.signature, constructors or [function]):
        parameters = signature.parameters.values()
        names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return {name: value for name, value in keywords.items() if name in names}
    return dict(keywords)


def needed_by(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `keywords` that a function takes by name and has no default for."""
    parameters = inspect.signature(function).parameters
    return {
        name: value
        for name, value in keywords.items()
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    }


def build_offering(spec_or_module: Any, offered: Mapping[str, Any], **kwargs: Any) -> Any:
    """Builds a module with `kwargs`, like build_module, and with the entries of `offered` that its constructor accepts.

    External modules therefore need not accept arguments that only some modules use.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    return build_module(spec_or_module, **accepted_by(module, offered), **kwargs)


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds the module described by a spec or class. `kwargs` override the spec's params, and submodules are passed
    on.

    A function is returned unchanged, not called. Raises the constructor's errors, with a note naming the module.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        # Values from the builder (sizes, groups) override the spec's.
        kwargs = {**spec_or_module.params, **kwargs}
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **kwargs)
    except (TypeError, ValueError) as error:
        # The message names only an argument; without this note, the module among hundreds would be unknown.
        error.add_note(f"while building {_name_of(module)}")
        raise


def _name_of(module: Any) -> str:
    return f"{module.__module__}.{module.__qualname__}" if isinstance(module, type) else repr(module)
