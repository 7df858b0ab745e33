"""How a check tells the runner its numbers, and that it needs a GPU. Checks nothing itself."""

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
    """Prints numbers for the record of this check; it may be called several times."""
    # A program may be in the middle of a line, as pytest is after each test.
    print(f"\n{RESULT}{json.dumps(results)}", flush=True)


def expect(holds: bool, claim: str) -> None:
    """Prints whether a claim holds. Raises SystemExit where it does not."""
    print(f"{'holds' if holds else 'FAILS'}: {claim}", flush=True)
    if not holds:
        sys.exit(1)


def end_without_gpu(reason: str) -> NoReturn:
    """Ends a check that shows nothing on a CPU."""
    print(f"needs a GPU: {reason}", flush=True)
    sys.exit(NEEDS_GPU)


def checked_device() -> torch.device:
    """The device of the check, prepared as a training program does. In a dry run the CPU may stand in for the GPU.

    It ends the check where torch sees no GPU otherwise, or a machine whose GPU does not work would seem to pass. For a
    CPU Triton is told to interpret kernels, which works if no module with kernels has been imported yet.
    """
    device = default_device()
    if device.type == "cpu":
        if not os.environ.get(DRY_RUN):
            end_without_gpu(f"torch sees none; {DRY_RUN}=1 tries the program out")
        os.environ["TRITON_INTERPRET"] = "1"
    prepare_device(device)
    print(f"on {device}", flush=True)
    return device


def without_gpu() -> dict[str, str]:
    """The environment of a process that does on the CPU what this one does on the GPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", DRY_RUN: "1"}


def graphs_of(device: torch.device) -> GraphDevice:
    """CUDA graphs, or tapes, which stand in for them on a CPU."""
    return TapeGraphs() if device.type == "cpu" else CudaGraphs(device)
