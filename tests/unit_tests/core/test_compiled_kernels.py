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
from megatron.core.transformer import moe
from megatron.core.transformer.moe import paged_stash
from tests.counts import long_count

triton = pytest.importorskip("triton")
ARCHITECTURES = (80, 90, 100)
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"


def kernel_files() -> Iterator[ModuleType]:
    for package in (paged_stash, moe, optimizer):
        for module in pkgutil.iter_modules(package.__path__):
            if module.name.startswith("triton_"):
                yield importlib.import_module(f"{package.__name__}.{module.name}")


CASES = [case for module in kernel_files() if "compile_cases" in vars(module) for case in module.compile_cases()]


def operator_of(case: Any) -> str:
    """What its name begins with."""
    return str(case.name).partition(",")[0]


def architectures_of(index: int) -> tuple[int, ...]:
    """Those that a case is compiled for: all for the first case of each operator, for the others one in turn."""
    is_first = all(operator_of(case) != operator_of(CASES[index]) for case in CASES[:index])
    turn = index % len(ARCHITECTURES)
    return ARCHITECTURES if is_first or long_count(0, soak=1) else ARCHITECTURES[turn : turn + 1]


@functools.cache
def compiled(index: int, architecture: int) -> Any:
    target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
    return triton.compile(CASES[index].source, target=target, options=dict(CASES[index].options))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_a_kernel_keeps_to_its_registers(index: int, tmp_path: Path, compiled_kernels: dict[str, list[str]]) -> None:
    takes = dict.fromkeys(ARCHITECTURES, "-".rjust(24))
    for architecture in architectures_of(index):
        cubin = compiled(index, architecture).asm["cubin"]
        (tmp_path / "cubin").write_bytes(cubin)
        command = [BINARIES / "cuobjdump", "--dump-resource-usage", tmp_path / "cubin"]
        usage = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        # Functions that are not inlined have lines of their own; the kernel's registers are enough for them.
        used = {
            kind: max(map(int, re.findall(rf"{kind}:(\d+)", usage))) for kind in ("REG", "STACK", "SHARED", "LOCAL")
        }
        shared = max(used["SHARED"], compiled(index, architecture).metadata.shared)
        takes[architecture] = f"{used['REG']:4} {used['STACK']:3} {shared:7} {len(cubin):7}"
        assert used["STACK"] + used["LOCAL"] == 0, usage
    compiled_kernels[CASES[index].name] = list(takes.values())


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
    codes = {
        (index, architecture): compiled(index, architecture).asm["ptx"]
        for index in indices
        for architecture in architectures_of(index)
    }
    assert {architecture for _, architecture in codes} == set(ARCHITECTURES)
    assert all(instruction in code for instruction in instructions for code in codes.values())


def test_every_launched_kernel_is_compiled_here_for_every_architecture() -> None:
    calls = [node for module in kernel_files() for node in ast.walk(ast.parse(inspect.getsource(module)))]
    launches = [
        node.func.value for node in calls if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    ]
    launched = {node.id for node in launches if isinstance(node, ast.Name)}
    for architecture in ARCHITECTURES:
        here = [case for index, case in enumerate(CASES) if architecture in architectures_of(index)]
        assert len(launched) >= 3 and launched == {case.source.fn.__name__ for case in here}
