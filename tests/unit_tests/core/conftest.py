"""Fixtures for tests of Triton kernels: interpreted kernels that run on the CPU, and results of compiled kernels."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch

from tests.conftest import COMPILED

STASH = "megatron.core.transformer.moe.paged_stash"
# Modules with functions that kernels of several packages call.
_SHARED = (
    "megatron.core.device.triton_pages",
    "megatron.core.device.triton_tiles",
    "megatron.core.fusions.triton_activations",
)


@pytest.fixture
def compiled_kernels(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Resource usage of compiled kernels by architecture, as lines that are printed at the end of the run."""
    return request.config.stash.setdefault(COMPILED, {})


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """Yields a function that loads a copy of a kernel module that Triton's interpreter runs on the CPU.

    `interpreted("triton_kernels")` loads a module of the stash. Modules of other packages are given by full name. The
    triton_* modules of the same package that it imports are copied too, and those with functions of several packages.
    sys.modules and the packages store no copy.
    During the test, functions of Triton's language are interpreted. The end of the test restores them.
    """
    triton = pytest.importorskip("triton")
    language = triton.language
    places = (language, language.core, language.math, language.standard, language.tensor)
    before = [dict(vars(place)) for place in places]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # read by triton.jit when it decorates a function
    for place in places[:-1]:
        # tl.sum and similar functions were decorated before the variable was set, so they would be compiled.
        for name, value in list(vars(place).items()):
            if isinstance(value, triton.runtime.jit.JITFunction):
                function = triton.jit(value.fn)
                setattr(place, name, function)
                if name in vars(language.tensor):
                    setattr(language.tensor, name, _method(function))
    _let_loops_count(monkeypatch)
    _let_bfloat16_be_converted(monkeypatch)
    _let_bfloat16_be_multiplied(monkeypatch)
    yield _load_copy
    # Rewritten functions use names that the interpreter patched in and that are removed below.
    triton.runtime.interpreter.InterpretedFunction.rewritten_fn.clear()
    for place, values in zip(places, before):
        for name in vars(place).keys() - values.keys():
            delattr(place, name)
        for name, value in values.items():
            # Functions called from elsewhere would otherwise remain the interpreter's versions.
            if vars(place)[name] is not value:
                setattr(place, name, value)


def _method(function: Callable) -> Callable:
    return lambda *args, **named: function(*args, **named)


def _let_loops_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes tensors usable as loop bounds: Triton 3.6 converts a one-element array to int, which NumPy 2.4+ rejects."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: object) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def _let_bfloat16_be_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes conversions of bf16 those of GPUs and torch: exact to fp32, and rounded to nearest even from it.

    Triton 3.6's interpreter changes subnormal numbers in one direction and truncates in the other.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    convert = interpreter._convert_float

    def converted(source: numpy.ndarray, source_type: object, target_type: object, rounding: object) -> numpy.ndarray:
        if (source_type, target_type) == (language.bfloat16, language.float32):
            return numpy.ascontiguousarray(source).view(numpy.uint16).astype(numpy.uint32) << 16
        if (source_type, target_type) != (language.float32, language.bfloat16):
            return convert(source, source_type, target_type, rounding)
        values = torch.from_numpy(numpy.ascontiguousarray(source)).bfloat16()
        return values.view(torch.int16).numpy().view(numpy.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def _let_bfloat16_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes products of bf16 matrices exact up to their sums. Triton 3.6's interpreter multiplies their bits."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    create_dot = interpreter.InterpreterBuilder.create_dot

    def dot(self: object, a: Any, b: Any, *rest: object) -> object:
        wide = [
            interpreter.TensorHandle((one.data.astype(numpy.uint32) << 16).view(numpy.float32), language.float32)
            if one.dtype.scalar == language.bfloat16
            else one
            for one in (a, b)
        ]
        return create_dot(self, *wide, *rest)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _load_copy(name: str, *, of: str = STASH) -> ModuleType:
    prefixes = (f"{of}.triton_", *_SHARED)
    kept = {path: module for path, module in sys.modules.items() if path.startswith(prefixes)}
    _forget(prefixes)
    try:
        return importlib.import_module(f"{of}.{name}")
    finally:
        _forget(prefixes)
        for path, module in kept.items():
            sys.modules[path] = module
            package, _, last = path.rpartition(".")
            setattr(sys.modules[package], last, module)


def _forget(prefixes: tuple[str, ...]) -> None:
    for path in [path for path in sys.modules if path.startswith(prefixes)]:
        del sys.modules[path]
        package, _, last = path.rpartition(".")
        vars(sys.modules[package]).pop(last, None)
