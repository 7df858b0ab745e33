"""Prints the machine's versions, tools, memory and approximate rates, and checks that its GPU works."""

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.checks.reporting import end_without_gpu, expect, report

PACKAGES = ("triton", "numpy", "pytest", "hypothesis", "pyyaml", "rich", "tokenizers", "tensorboard", "safetensors")
TOOLS = ("nvidia-smi", "compute-sanitizer", "ncu", "nvcc", "cuobjdump", "git")
SETTINGS = ("CUDA", "NCCL", "TORCH", "PYTORCH", "TRITON", "OMP")


def main() -> None:
    """Reports the machine. Starts with the host, so that it is known even if the GPU does not respond."""
    report(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        kernel=f"{platform.system()} {platform.release()}",
        processors=os.cpu_count(),
        host_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        packages={name: version_of(name) for name in PACKAGES},
        tools={name: shutil.which(name) or in_cuda(name) for name in TOOLS},
        shared_memory_gib=shutil.disk_usage("/dev/shm").free / 2**30 if Path("/dev/shm").exists() else None,
        locked_memory_limit=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        settings={name: value for name, value in os.environ.items() if name.startswith(SETTINGS)},
    )
    if shutil.which("nvidia-smi"):
        asked = subprocess.run(["nvidia-smi"], capture_output=True, text=True, check=False, timeout=20)
        print(asked.stdout, flush=True)
    if torch.cuda.is_available():
        report_gpu()
    began = time.monotonic()
    import_the_program()
    report(import_seconds=time.monotonic() - began)
    if not torch.cuda.is_available():
        end_without_gpu("torch sees no GPU")


def report_gpu() -> None:
    """Reports the GPU's properties and rates, and checks a result."""
    began = time.monotonic()
    properties = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info()
    report(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        processors_of_gpu=properties.multi_processor_count,
        cache_mib=getattr(properties, "L2_cache_size", 0) / 2**20,
        free_gib=free / 2**30,
        total_gib=total / 2**30,
        nccl=".".join(map(str, torch.cuda.nccl.version())),
        cudnn=torch.backends.cudnn.version(),
        first_use_seconds=time.monotonic() - began,
    )
    ones = torch.ones(1 << 20, device="cuda")
    expect(ones.sum().item() == 1 << 20, "a sum on the GPU is correct")
    memory = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_() for _ in range(2)]
    matrices = [torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(3)]
    report(
        copy_gb_s=2 * (1 << 30) / seconds_of(lambda: memory[0].copy_(memory[1])) / 1e9,
        product_tflop_s=2 * 8192**3 / seconds_of(lambda: torch.mm(*matrices[:2], out=matrices[2])) / 1e12,
    )


def seconds_of(work: Callable[[], object], turns: int = 10) -> float:
    """Returns the GPU's mean seconds per call, excluding the first calls."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for turn in range(turns + 3):
        if turn == 3:
            start.record()
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / turns


def import_the_program() -> None:
    """Imports the training program in a separate process, so that a missing package fails before all checks do."""
    subprocess.run([sys.executable, "-c", "import pretrain_gpt, tests.harness"], check=True, timeout=30)


def version_of(package: str) -> str | None:
    """Returns the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def in_cuda(tool: str) -> str | None:
    """Returns the path of a tool in CUDA's folder, or None if it is not there."""
    path = Path("/usr/local/cuda/bin") / tool
    return str(path) if path.exists() else None


if __name__ == "__main__":
    main()
