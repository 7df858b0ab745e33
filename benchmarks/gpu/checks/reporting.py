"""Functions with which a check reports its results, or that it requires a GPU, to the runner. Checks nothing itself."""

import os
import sys
from typing import NoReturn

import torch

from benchmarks.gpu.protocol import DRY_RUN, NEEDS_GPU, result_line
from megatron.core.device import CudaGraphs, default_device, prepare_device
from megatron.core.graphs.capture import GraphDevice
from megatron.core.graphs.tape import TapeGraphs


def report(**results: object) -> None:
    """Prints results, which the runner records immediately. May be called several times.

    `side` names the side that was measured, whose results are kept apart from those of others.
    """
    # One write, which output of other processes cannot split. It begins with a line end because the output may be in
    # the middle of a line, as with pytest after each test.
    sys.stdout.write(f"\n{result_line(results)}\n")
    sys.stdout.flush()


def expect(holds: bool, claim: str) -> None:
    """Prints whether a claim holds. Raises SystemExit if it does not."""
    print(f"{'holds' if holds else 'FAILS'}: {claim}", flush=True)
    if not holds:
        sys.exit(1)


def end_without_gpu(reason: str) -> NoReturn:
    """Ends a check that would be meaningless on a CPU."""
    print(f"needs a GPU: {reason}", flush=True)
    sys.exit(NEEDS_GPU)


def checked_device() -> torch.device:
    """Returns the device of the check, prepared as for training. In a dry run it may be the CPU.

    Otherwise ends the check if torch sees no GPU, because a machine with a broken GPU would seem to pass. On a CPU,
    Triton is told to interpret kernels, which takes effect only before a module with kernels is imported.
    """
    device = default_device()
    if device.type == "cpu":
        if not os.environ.get(DRY_RUN):
            end_without_gpu(f"torch sees no GPU; set {DRY_RUN}=1 to run the program without one")
        os.environ["TRITON_INTERPRET"] = "1"
    prepare_device(device)
    print(f"on {device}", flush=True)
    return device


def without_gpu() -> dict[str, str]:
    """Returns the environment for a process that does the same work on the CPU."""
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", DRY_RUN: "1"}


def graphs_of(device: torch.device) -> GraphDevice:
    """Returns CUDA graphs, or tapes on a CPU."""
    return TapeGraphs() if device.type == "cpu" else CudaGraphs(device)
