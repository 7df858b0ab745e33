"""Compares four host-bound operations before and after an optimization: the captures of a step, the agreement on its
plan, checks of gradients, and grouped GEMMs.

Each side is measured at least ROUNDS times within SECONDS, and its fastest time is reported. Sides named `before`
reproduce an earlier implementation of this framework, which is no longer used.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks.device_events import counts_of, launches_of
from benchmarks.gpu.checks.reporting import checked_device, expect, graphs_of, report
from megatron.core.device import synchronize
from megatron.core.distributed.consistency import GradChecks
from megatron.core.graphs.capture import GraphDevice
from megatron.core.group_collectives import any_rank_sync, gather_objects
from tests.harness import run_on_ranks

ROUNDS, SECONDS = 3, 4.0
NUM_CAPTURES, SIZE = 32, 1 << 16
NUM_PARAMS, NUMEL = 400, 1 << 16
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def main() -> None:
    """Runs the measurements. The agreement is timed on two processes of this machine, which do not use the GPU."""
    device = checked_device()
    report(agreement_us=run_on_ranks(agreement, 2, backend="gloo", timeout=40)[0])
    report(captures_ms={name: 1e3 * seconds for name, seconds in captures(device).items()})
    report(**grad_checks(device))
    if device.type == "cuda":
        captured = [str(dtype) for dtype in DTYPES if can_be_captured(dtype, device)]
        report(captured_products=captured)
        expect(captured == ["torch.bfloat16"], "a graph can capture torch's grouped GEMMs only in bf16")


def best(side: Callable[[], object], device: torch.device) -> float:
    """Returns the shortest time of several calls in seconds, each until the device has finished."""
    side()
    found: list[float] = []
    end = time.monotonic() + SECONDS
    while len(found) < ROUNDS or (len(found) < 20 * ROUNDS and time.monotonic() < end):
        synchronize(device)
        start = time.perf_counter()
        side()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found)


def agreement() -> dict[str, float]:
    """Measures the agreement on a step's plan in microseconds: now one reduction, previously two gathers of bytes."""
    sides = {
        "before": lambda: gather_objects((False, True, True), dist.group.WORLD),
        "now": lambda: any_rank_sync(False, True, True),
    }
    found = {}
    for name, side in sides.items():
        side()
        # A fixed number of repetitions, because both ranks must run the same number.
        dist.barrier()
        start = time.perf_counter()
        for _ in range(200):
            side()
        found[name] = 1e6 * (time.perf_counter() - start) / 200
    return found


def captures(device: torch.device) -> dict[str, float]:
    """Measures a step that captures NUM_CAPTURES parts between eager work, in seconds.

    All parts share one pool. Before, memory was cleaned up for each capture; now once per step.
    """
    x = torch.ones(SIZE, dtype=torch.float32, device=device)

    def step(graphs: GraphDevice, *, is_one_step: bool) -> None:
        pool, kept = graphs.new_pool(), []
        with graphs.on_capture_stream() if is_one_step else nullcontext():
            for _ in range(NUM_CAPTURES):
                # Eager work in flight, and memory in the cache.
                (x * 2).add_(x)
                with graphs.capturing(pool) as graph:
                    x.mul(1.5).add_(1)
                kept.append(graph)

    graphs = graphs_of(device)
    return {
        "before": best(lambda: step(graphs, is_one_step=False), device),
        "now": best(lambda: step(graphs, is_one_step=True), device),
    }


def grad_checks(device: torch.device) -> dict[str, dict[str, float]]:
    """Measures the check of an fp32 bucket, in milliseconds and launches.

    Before, one operator ran per parameter; now one runs for the whole bucket.
    """
    flat = torch.randn(NUM_PARAMS * NUMEL, dtype=torch.float32, device=device)
    grads = [(f"p{number}", part) for number, part in enumerate(flat.split(NUMEL))]
    checks = GradChecks(nan=True, large=False)

    def of_each() -> Tensor:
        lows, highs = zip(*(torch.aminmax(grad) for _, grad in grads))
        return torch.maximum(-torch.stack(lows), torch.stack(highs)).double()

    def of_bucket() -> None:
        checks.measure(grads)
        checks.forget()

    sides: dict[str, Callable[[], object]] = {"before": of_each, "now": of_bucket}
    results = {"grad_checks_ms": {name: 1e3 * best(side, device) for name, side in sides.items()}}
    if device.type == "cuda":
        results["grad_checks_launches"] = {name: num_launches(side) for name, side in sides.items()}
    flat[-1] = float("-inf")
    checks.measure(grads)
    expect(checks.non_finite_sync() == [grads[-1][0]], "an infinite gradient is detected and its parameter is named")
    return results


def num_launches(side: Callable[[], object]) -> float:
    """Returns the number of kernels, copies and fills in one call."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        side()
        synchronize(torch.device("cuda"))
    return float(counts_of(launches_of(recorded)).total())


def can_be_captured(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether a graph can capture torch's grouped GEMM, which it cannot if the host reads the offsets."""
    rows, weight = (torch.ones(shape, dtype=dtype, device=device) for shape in ((64, 32), (4, 32, 16)))
    offsets = torch.tensor([10, 20, 40, 64], dtype=torch.int32, device=device)
    graphs = graphs_of(device)
    with graphs.on_capture_stream():
        F.grouped_mm(rows, weight, offs=offsets)
    try:
        with graphs.capturing():
            F.grouped_mm(rows, weight, offs=offsets)
    except RuntimeError as error:
        print(f"{dtype}: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


if __name__ == "__main__":
    main()
