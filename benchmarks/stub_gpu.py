"""Runs the host side of GPU steps without a GPU. host_cost.py measures with it.

[Note: what is real] Triton compiles every kernel for an H200 and launches it through its own driver and launcher. They
call a stub of libcuda, which counts the launches and runs nothing. Torch's operators run on CPU tensors, which should
be tiny. Kernels write nothing, so values are arbitrary, and only counts and host time are meaningful.

Operators of this project run their launchers, as on a GPU. `gpu_paths` selects the paths that product code reserves for
GPU tensors. Streams and events, the pinned memory of the stash, the optimizer, and the embedding and loss remain those
of the CPU.
"""

import contextlib
import ctypes
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

# The fields of a compiled kernel that the driver asks for; attributes of the device are those of an H200.
_STUB = """
#include <stdint.h>
static long launches = 0;
long stub_launches(void) { return launches; }
int cuLaunchKernel() { launches++; return 0; }
int cuLaunchKernelEx() { launches++; return 0; }
int cuPointerGetAttribute(uint64_t *value, int attribute, uint64_t pointer) { *value = pointer; return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stub of libcuda"; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)1; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
/* 16: multiprocessors; 97: shared memory of a block in bytes. */
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 16 ? 132 : attribute == 97 ? 232448 : 1;
    return 0;
}
int cuModuleLoadData(void **module, const void *image) { *module = (void *)1; return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = (void *)1; return 0; }
/* 0: threads of a block; others: registers and spills. */
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
"""
_NAMESPACES = ("activation", "paged_stash", "static_rows", "router", "rope", "block_scaled")


def missing_requirement() -> str | None:
    """Returns what this machine lacks to build the stub, or None."""
    if find_spec("triton") is None:
        return "Triton is not installed: pip install triton"
    if _compiler() is None:
        return "no C compiler: install cc or gcc, or set CC"
    return None


def build_stub(folder: Path) -> None:
    """Compiles the stub to folder/libcuda.so.1 and makes Triton use it in processes started from now on.

    Triton's compiled kernels and launchers are cached in the same folder.
    """
    import triton

    folder.mkdir(parents=True, exist_ok=True)
    source = (Path(triton.__file__).parent / "backends/nvidia/driver.c").read_text()
    # Functions of which the driver only requires that they succeed.
    others = sorted(set(re.findall(r"\b(cu[A-Z]\w+)(?=\()", source)) - set(re.findall(r"\b(cu[A-Z]\w+)\(", _STUB)))
    code = folder / "stub.c"
    code.write_text(_STUB + "".join(f"int {name}() {{ return 0; }}\n" for name in others))
    compiler = _compiler()
    assert compiler is not None, "missing_requirement reports this"
    library = folder / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-w", "-std=gnu11", f"-Wl,-soname,{library.name}"]
    subprocess.run([compiler, *options, "-o", library, code], check=True)
    os.environ.update(TRITON_LIBCUDA_PATH=str(folder), TRITON_CACHE_DIR=str(folder / "triton"), CUDA_VISIBLE_DEVICES="")
    # Launchers are linked with "-l:libcuda.so.1" or, by other versions, "-lcuda".
    shutil.copy(library, folder / "libcuda.so")


def _compiler() -> str | None:
    named = os.environ.get("CC")
    return next((found for name in (named, "cc", "gcc") if name and (found := shutil.which(name))), None)


@contextlib.contextmanager
def stub_gpu() -> Iterator[Callable[[], int]]:
    """Context manager that launches kernels on the stub and selects GPU paths. Yields a function that counts launches.

    Build models inside the context, because they choose their kernels when they are built. Operators keep their
    launchers afterwards, so a process can do nothing else.
    """
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import driver

    class StubDriver(CudaDriver):
        """Triton's driver, without asking torch for the device."""

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    library = ctypes.CDLL(str(Path(os.environ["TRITON_LIBCUDA_PATH"]) / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
    active = StubDriver()
    active.get_current_device = _device
    active.get_current_stream = _stream
    driver.set_active(active)
    properties = SimpleNamespace(multi_processor_count=132)
    with (
        # Launchers ask for the device of their tensors, and for its size.
        mock.patch.object(torch.Tensor, "get_device", lambda tensor: 0),
        mock.patch.object(torch.accelerator, "device_index", lambda index: contextlib.nullcontext()),
        mock.patch.object(torch.cuda, "get_device_properties", lambda device: properties),
        gpu_paths(),
        _launched_operators(),
    ):
        yield library.stub_launches


def _device() -> int:
    return 0


def _stream(device: int) -> int:
    return 7


@contextlib.contextmanager
def _launched_operators() -> Iterator[None]:
    """Context manager in which the operators of this project run their launchers on CPU tensors."""
    from benchmarks.kernel_launches import MODULES

    launchers = {
        f"{module.__name__.split('.')[-1]}.{name}": value for module in MODULES for name, value in vars(module).items()
    }
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.split("::")[0] in _NAMESPACES]
    assert names, "operators are registered when their modules are imported"
    with contextlib.ExitStack() as stack:
        for name in names:
            namespace, own = name.split("::")
            launcher = next(
                value
                for place, value in launchers.items()
                if place.endswith(f".{own}") and getattr(value, "__module__", "").endswith(place.split(".")[0])
            )
            library = stack.enter_context(torch.library._scoped_library(namespace, "IMPL"))
            library.impl(own, _launched(launcher), "CPU", allow_override=True)
        torch_library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        # A half-precision GEMM that adds to fp32 exists only on GPUs.
        torch_library.impl("addmm.dtype_out", _add_product, "CPU")
        yield


def _launched(launcher: Callable[..., Any]) -> Callable[..., Any]:
    if launcher.__name__ != "order_slots":
        return launcher

    @functools.wraps(launcher)
    def order_slots(*args: Any, **named: Any) -> tuple[Tensor, ...]:
        # The host reads counts: torch's grouped GEMM on the CPU, and a step that checks whether its buffers overflowed.
        results: tuple[Tensor, ...] = launcher(*args, **named)
        for counts in results[3:]:
            counts.zero_()
        return results

    return order_slots


def _add_product(x: Tensor, left: Tensor, right: Tensor, dtype: torch.dtype, *, out: Tensor, **scales: float) -> Tensor:
    return out


@contextlib.contextmanager
def gpu_paths() -> Iterator[None]:
    """Context manager that selects the paths of half-precision training on an H200, for tensors on the CPU."""
    from megatron.core.fusions import gated_activation
    from megatron.core.tensor_parallel import weight_grads
    from megatron.core.transformer import norms
    from megatron.core.transformer.moe import dispatch_static, expert_function, grouped_gemm
    from megatron.core.transformer.moe.grouped_gemm import ProductKernel

    def product_kernel(*_: object, is_recomputed: bool = False, **__: object) -> ProductKernel:
        return ProductKernel.STASH if is_recomputed else ProductKernel.TORCH

    def rms_norm(x: Tensor, weight: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(x.dtype, weight.dtype)
        return F.rms_norm(x.to(wide), weight.shape, weight.to(wide), eps).to(dtype)

    def layout(_: torch.device) -> dispatch_static.RankRowLayout:
        return dispatch_static.padded_rank_rows

    with (
        mock.patch.object(gated_activation, "has_kernel", lambda _: True),
        mock.patch.object(expert_function, "product_kernel", product_kernel),
        mock.patch.object(grouped_gemm, "product_kernel", product_kernel),
        mock.patch.object(grouped_gemm, "_adds_in_kernel", lambda _: True),
        mock.patch.object(dispatch_static, "rank_row_layout", layout),
        mock.patch.object(weight_grads, "is_half_on_gpu", lambda tensor: tensor.dtype == torch.bfloat16),
        mock.patch.object(norms, "rms_norm", rms_norm),
    ):
        yield
