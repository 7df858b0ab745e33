"""How a check tells the runner its numbers, and that it needs a GPU. Checks nothing itself."""

import json
import os
import sys
from typing import NoReturn

import torch

from benchmarks.gpu.registry import NEEDS_GPU, RESULT
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
    """The device of the check, prepared as a training program does; the CPU stands in where there is no GPU.

    Without a GPU Triton is told to interpret kernels, which works if no module with kernels has been imported yet.
    """
    device = default_device()
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    prepare_device(device)
    print(f"on {device}", flush=True)
    return device


def graphs_of(device: torch.device) -> GraphDevice:
    """CUDA graphs, or tapes, which stand in for them on a CPU."""
    return TapeGraphs() if device.type == "cpu" else CudaGraphs(device)
