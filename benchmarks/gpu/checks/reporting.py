"""Functions with which a check reports numbers to the runner, and that it needs a GPU. Checks nothing itself."""

import json
import os
import sys
from typing import NoReturn

import torch

from benchmarks.gpu.registry import DRY_RUN, NEEDS_GPU, RESULT
from megatron.core.device import CudaGraphs, default_device, prepare_device
from megatron.core.graphs.capture import GraphDevice
from megatron.core.graphs.tape import TapeGraphs


def report(**results: object) -> None:
    """Prints numbers for the record of this check. May be called several times."""
    # A program may be in the middle of a line, like pytest after each test.
    print(f"\n{RESULT}{json.dumps(results)}", flush=True)


def expect(holds: bool, claim: str) -> None:
    """Prints whether a claim holds. Raises SystemExit if it does not."""
    print(f"{'holds' if holds else 'FAILS'}: {claim}", flush=True)
    if not holds:
        sys.exit(1)


def end_without_gpu(reason: str) -> NoReturn:
    """Ends a check that is meaningless on a CPU."""
    print(f"needs a GPU: {reason}", flush=True)
    sys.exit(NEEDS_GPU)


def checked_device() -> torch.device:
    """Returns the device of the check, prepared as in a training program. In a dry run the CPU may replace the GPU.

    Otherwise ends the check if torch sees no GPU, because a machine with a broken GPU would seem to pass. For a CPU,
    Triton is told to interpret kernels, which works only before a module with kernels is imported.
    """
    device = default_device()
    if device.type == "cpu":
        if not os.environ.get(DRY_RUN):
            end_without_gpu(f"torch sees no GPU; {DRY_RUN}=1 runs the program without one")
        os.environ["TRITON_INTERPRET"] = "1"
    prepare_device(device)
    print(f"on {device}", flush=True)
    return device


def without_gpu() -> dict[str, str]:
    """Returns the environment of a process that does the same work on the CPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", DRY_RUN: "1"}


def graphs_of(device: torch.device) -> GraphDevice:
    """Returns CUDA graphs, or tapes, which replace them on a CPU."""
    return TapeGraphs() if device.type == "cpu" else CudaGraphs(device)
