"""What tests of Triton kernels share: kernels that run on the CPU, beside compiled ones."""

import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy
import pytest
import torch

from tests.conftest import COMPILED

STASH = "megatron.core.transformer.moe.paged_stash"


@pytest.fixture
def compiled_kernels(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What kernels take on each architecture, as lines for the end of the run."""
    return request.config.stash.setdefault(COMPILED, {})


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ModuleType]]:
    """`interpreted("triton_kernels")`: a second copy of that module of the stash, whose kernels Triton interprets.

    Other packages are given by their whole names. Modules of one that are named triton_* and that it imports are copies
    too; neither sys.modules nor the package keeps any of them.
    Triton's language is as before when the test ends; within the test its functions are the interpreter's alone.
    """
    triton = pytest.importorskip("triton")
    language = triton.language
    places = (language, language.core, language.math, language.standard, language.tensor)
    before = [dict(vars(place)) for place in places]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # what triton.jit looks at when it decorates
    for place in places[:-1]:
        # tl.sum and its like are there as functions to compile, decorated before the line above.
        for name, value in list(vars(place).items()):
            if isinstance(value, triton.runtime.jit.JITFunction):
                function = triton.jit(value.fn)
                setattr(place, name, function)
                if name in vars(language.tensor):
                    setattr(language.tensor, name, _method(function))
    _let_loops_count(monkeypatch)
    _let_bfloat16_be_rounded(monkeypatch)
    yield _load_copy
    # Functions that it has rewritten use names that it put beside them and that go now.
    triton.runtime.interpreter.InterpretedFunction.rewritten_fn.clear()
    for place, values in zip(places, before):
        for name in vars(place).keys() - values.keys():
            delattr(place, name)
        for name, value in values.items():
            # The interpreter's own versions of functions stay where they were called by others.
            if vars(place)[name] is not value:
                setattr(place, name, value)


def _method(function: Callable) -> Callable:
    return lambda *args, **named: function(*args, **named)


def _let_loops_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 turns a loop's bound, an array of one number, into an int as NumPy 2.4 and later refuse to."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: type, scope: object) -> None:
        patch_tensor(tensor, scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)


def _let_bfloat16_be_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 cuts fp32 off where GPUs and torch round it to bf16, halves to even."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    language = importlib.import_module("triton.language")
    convert = interpreter._convert_float

    def rounded(source: numpy.ndarray, source_type: object, target_type: object, rounding: object) -> numpy.ndarray:
        if (source_type, target_type) != (language.float32, language.bfloat16):
            return convert(source, source_type, target_type, rounding)
        values = torch.from_numpy(numpy.ascontiguousarray(source)).bfloat16()
        return values.view(torch.int16).numpy().view(numpy.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


def _load_copy(name: str, *, of: str = STASH) -> ModuleType:
    package = importlib.import_module(of)
    prefix = f"{package.__name__}.triton_"
    kept = {path: module for path, module in sys.modules.items() if path.startswith(prefix)}
    _forget(package, prefix)
    try:
        return importlib.import_module(f"{package.__name__}.{name}")
    finally:
        _forget(package, prefix)
        sys.modules.update(kept)
        vars(package).update({path.rpartition(".")[2]: module for path, module in kept.items()})


def _forget(package: ModuleType, prefix: str) -> None:
    for path in [path for path in sys.modules if path.startswith(prefix)]:
        del sys.modules[path]
        vars(package).pop(path.rpartition(".")[2], None)
