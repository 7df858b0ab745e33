"""Specs, which describe a module to build by its class, its arguments and the specs of its submodules."""

import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class ModuleSpec:
    """Describes a module to build: its class or (import path, name), its keyword arguments, and its submodules' specs.

    metainfo: notes for the author of the spec, which building ignores.
    """

    module: tuple[str, str] | type | types.FunctionType
    params: dict[str, Any] = field(default_factory=dict)
    submodules: Any = None
    metainfo: dict[str, Any] = field(default_factory=dict)


def import_module(module_path: tuple[str, str]) -> Any:
    """Imports an object by (import path, name). Raises ValueError if the Python module does not define the name."""
    path, name = module_path
    module = importlib.import_module(path)
    if name not in vars(module):
        raise ValueError(f"{path} has no {name!r}: a spec must name a class or function of that module")
    return vars(module)[name]


def get_module(spec_or_module: Any, **additional_kwargs: Any) -> Any:
    """Returns the class or function that a spec names. Returns any other object unchanged.

    additional_kwargs: ignored. Some callers pass their build arguments.
    """
    if isinstance(spec_or_module, ModuleSpec):
        spec_or_module = spec_or_module.module
    return import_module(spec_or_module) if isinstance(spec_or_module, tuple) else spec_or_module


def accepted_by(function: Callable[..., Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of `keywords` that the signature of a function or class accepts by name.

    A class with **kwargs is assumed to pass them on to its base class, so base classes are searched up to the first one
    without **kwargs. If every signature has **kwargs, all keywords are accepted.
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
    """Returns the entries of `keywords` that are parameters of a function without a default value."""
    parameters = inspect.signature(function).parameters
    return {
        name: value
        for name, value in keywords.items()
        if name in parameters and parameters[name].default is inspect.Parameter.empty
    }


def build_offering(spec_or_module: Any, offered: Mapping[str, Any], **kwargs: Any) -> Any:
    """Builds a module like build_module, and also passes the entries of `offered` that its constructor accepts.

    Modules of other projects therefore need not accept arguments that only some modules use.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    return build_module(spec_or_module, **accepted_by(module, offered), **kwargs)


def build_module(spec_or_module: Any, *args: Any, **kwargs: Any) -> Any:
    """Builds the module described by a spec or class. `kwargs` override the params of the spec.

    The submodules of the spec are passed to the constructor. A function is returned uncalled. A TypeError or ValueError
    of the constructor is raised with a note that names the module.
    """
    module = get_module(spec_or_module)
    if isinstance(module, types.FunctionType):
        return module
    if isinstance(spec_or_module, ModuleSpec):
        # Values from the builder, such as sizes and groups, override the values in the spec.
        kwargs = {**spec_or_module.params, **kwargs}
        if spec_or_module.submodules is not None:
            kwargs["submodules"] = spec_or_module.submodules
    try:
        return module(*args, **kwargs)
    except (TypeError, ValueError) as error:
        # The error names only an argument. The note tells which of the many modules it belongs to.
        error.add_note(f"while building {_name_of(module)}")
        raise


def _name_of(module: Any) -> str:
    return f"{module.__module__}.{module.__qualname__}" if isinstance(module, type) else repr(module)
