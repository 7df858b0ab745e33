"""Every Triton kernel compiles for three generations of GPUs; what each takes stands at the end of the run."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megatron.core import optimizer
from megatron.core.transformer.moe import paged_stash, static_rows

triton = pytest.importorskip("triton")
ARCHITECTURES = (80, 90, 100)
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


def kernel_files() -> Iterator[ModuleType]:
    for package in (paged_stash, static_rows, optimizer):
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.startswith("triton_"):
                yield importlib.import_module(f"{package.__name__}.{module.name}")


CASES = [case for module in kernel_files() if "compile_cases" in vars(module) for case in module.compile_cases()]


@functools.cache
def compiled(index: int, architecture: int) -> Any:
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    return triton.compile(CASES[index].source, target=target, options=dict(CASES[index].options))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_kernel_keeps_to_its_registers(index: int, tmp_path: Path, compiled_kernels: dict[str, list[str]]) -> None:
    takes = compiled_kernels.setdefault(CASES[index].name, [])
    for architecture in ARCHITECTURES:
        cubin = compiled(index, architecture).asm["cubin"]
        (tmp_path / "cubin").write_bytes(cubin)
        command = [BINARIES / "cuobjdump", "--dump-resource-usage", tmp_path / "cubin"]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        # Functions that are not inlined have lines of their own; the kernel's registers are enough for them.
        used = {
            kind: max(map(int, re.findall(rf"{kind}:(\d+)", usage))) for kind in ("REG", "STACK", "SHARED", "LOCAL")
        }
        shared = max(used["SHARED"], compiled(index, architecture).metadata.shared)
        takes.append(f"{used['REG']:4} {used['STACK']:3} {shared:7} {len(cubin):7}")
        assert used["STACK"] + used["LOCAL"] == 0, usage


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "instructions"),
    [
        ("plan", ["ld.global.gpu.acquire.b64"]),
        ("release", ["atom.global.gpu.release.exch.b64"]),
        ("stash", ["ld.global.v2.b64", "st.global.v2.b64"]),  # 16 bytes at a time
        ("restore", ["ld.global.v2.b64", "st.global.v2.b64"]),
        # 16 bytes of fp32, and of four halves 8; one rounding an operation.
        ("adam", ["ld.global.v4.b32", "st.global.v4.b32", "mul.rn.f32", "add.rn.f32", "div.rn.f32", "sqrt.rn.f32"]),
    ],
)
def test_a_kernel_has_the_instructions_that_it_counts_on(name: str, instructions: list[str]) -> None:
    indices = [index for index, case in enumerate(CASES) if case.name.startswith(name)]
    codes = [compiled(index, architecture).asm["ptx"] for index in indices for architecture in ARCHITECTURES]
    assert codes and all(instruction in code for instruction in instructions for code in codes)


def test_every_launched_kernel_is_compiled_here() -> None:
    calls = [node for module in kernel_files() for node in ast.walk(ast.parse(inspect.getsource(module)))]
    launches = [
        node.func.value for node in calls if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    launched = {node.id for node in launches if isinstance(node, ast.Name)}
    assert len(launched) >= 3 and launched == {case.source.fn.__name__ for case in CASES}
