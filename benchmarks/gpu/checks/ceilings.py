"""Measures the ceilings of the machine: rates of copies and GEMMs, and the cost of each kind of launch.

    python -m benchmarks.gpu.checks.ceilings [--seconds N] [--small]

copy             copy_ of 1 GiB on the device, GB/s of bytes read and written
mm, ...          bf16 GEMMs, TF/s
aten operator    microseconds of the host for a launch: an in-place addition to one element
Triton launch    kernel[grid](...) of a kernel with three arguments
our launcher     triton_rows.gather_rows with one row
our operator     the same through torch's dispatcher, as the layers call it
custom operator  an operator of torch.library that does nothing
autograd         an autograd Function that does nothing: forward and backward
graph node       one of 1,000 additions to one element in the replay of a CUDA graph

host_us counts until the last launch has returned, us until the device has finished, both for each launch. On a CPU, the
launcher's side runs the CPU operator, because compiled kernels need a GPU.

Expected seconds on an H200: 13. The CUDA context 4, cuBLAS and 60 GEMMs 3, two Triton compilations 5, everything else
1.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.gpu.checks.reporting import checked_device, graphs_of, report
from benchmarks.gpu.checks.side_workers import Send, Task, exit_status, run_in_turn
from benchmarks.gpu.record import hold
from megatron.core.device import default_device, device_name, mark_time, seconds_between, synchronize
from megatron.core.transformer.moe import static_rows, triton_rows

ROUNDS, WARM_ROUNDS = 9, 2
LAUNCHES, FUNCTIONS, NODES = 1000, 100, 1000
SMALL_LAUNCHES = 10  # Triton's interpreter takes 2 ms each
HELD_SECONDS = 5e-4
COPIED_BYTES, SMALL_BYTES = 1 << 30, 1 << 20
# Rows, inner and output width: a square, and the qkv projection of Qwen3-30B-A3B for 4096 tokens.
PRODUCTS = {"mm 8192": (8192, 8192, 8192), "mm 4096 x 2048 x 5120": (4096, 2048, 5120)}
SMALL_PRODUCT = (64, 64, 64)
ELEMENTS = 32


def main() -> None:
    """Measures each ceiling. Exits with status 1 if one fails, INCOMPLETE if some were not started."""
    options = parse_options()
    tasks = [
        Task("copy", 5, partial(measure_copy, num_bytes=SMALL_BYTES if options.small else COPIED_BYTES)),
        *(
            Task(name, 2, partial(measure_product, sizes=SMALL_PRODUCT if options.small else sizes))
            for name, sizes in PRODUCTS.items()
        ),
        *(
            Task(name, 1, partial(measure_launches, build=build, count=SMALL_LAUNCHES if options.small else LAUNCHES))
            for name, build in LAUNCHED.items()
        ),
        Task("autograd", 1, measure_functions),
        Task("graph node", 2, measure_nodes),
    ]
    sys.exit(run_tasks(tasks, seconds=options.seconds))


def run_tasks(tasks: list[Task], *, seconds: float) -> int:
    """Runs tasks and reports their lines. Returns the exit status, 1 if one failed (see `exit_status`)."""
    outcomes = run_in_turn(
        tasks,
        deadline=time.monotonic() + seconds,
        prepare=checked_device,
        on_line=lambda name, line: report(side=name, **line),
    )
    if all((one.error or "").startswith("SystemExit") for one in outcomes.values()):
        checked_device()
    return exit_status(outcomes.values(), has_failed=any(one.error is not None for one in outcomes.values()))


def seconds_of(work: Callable[[], object], device: torch.device, *, rounds: int = ROUNDS) -> float:
    """Returns the device's median seconds for one call of `work`, which starts while the device is busy."""
    found = []
    for _ in range(WARM_ROUNDS + rounds):
        hold(device, HELD_SECONDS)
        start = mark_time(device)
        work()
        found.append(seconds_between(start, mark_time(device)))
    return statistics.median(found[WARM_ROUNDS:])


def measure_copy(send: Send, *, num_bytes: int) -> None:
    """Sends the rate of a copy on the device."""
    send(device=device_name(default_device()), gb_s=round(copy_rate(default_device(), num_bytes) / 1e9, 2))


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Returns the rate of a copy on the device, in bytes read and written per second."""
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * num_bytes / seconds_of(lambda: target.copy_(source), device)


def measure_product(send: Send, *, sizes: tuple[int, int, int]) -> None:
    """Sends the rate of a bf16 GEMM. sizes: rows, inner width and output width."""
    device, (rows, inner, outer) = default_device(), sizes
    x, weight = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in ((rows, inner), (inner, outer)))
    out = torch.empty(rows, outer, device=device, dtype=torch.bfloat16)
    seconds = seconds_of(lambda: torch.mm(x, weight, out=out), device)
    send(ms=round(1e3 * seconds, 4), tflop_s=round(2e-12 * rows * inner * outer / seconds, 2))


# Launches by name: functions that build a function that launches once.


def aten_launch(device: torch.device) -> Callable[[], object]:
    """Returns a launch of an operator of torch on one element."""
    x = torch.zeros(1, dtype=torch.float32, device=device)
    return lambda: x.add_(1)


def triton_launch(device: torch.device) -> Callable[[], object]:
    """Returns a launch of a Triton kernel by its grid, as in Triton's tutorials."""
    x = torch.zeros(ELEMENTS, dtype=torch.float32, device=device)

    # Defined here, because a dry run sets Triton's interpreter when it finds no GPU.
    @triton.jit
    def add_kernel(x, size, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        tl.store(x + index, tl.load(x + index, mask=index < size) + 1, mask=index < size)

    return lambda: add_kernel[(1,)](x, ELEMENTS, SIZE=ELEMENTS)


def gather_arguments(device: torch.device) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Returns arguments of gather_rows for one row: x [1, ELEMENTS] bf16, its source [1] int32, counts and result."""
    x = torch.ones(1, ELEMENTS, dtype=torch.bfloat16, device=device)
    source = torch.zeros(1, dtype=torch.int32, device=device)
    counts = torch.ones(1, dtype=torch.int64, device=device)
    return (x, source), {"num_rows": counts, "out": torch.empty_like(x)}


def our_launch(device: torch.device) -> Callable[[], object]:
    """Returns a launch by the launcher of an operator of this project."""
    args, named = gather_arguments(device)
    launcher: Callable[..., Any] = triton_rows.gather_rows if device.type == "cuda" else static_rows.ops.gather_rows
    return lambda: launcher(*args, **named)


def our_operator(device: torch.device) -> Callable[[], object]:
    """Returns a launch of an operator of this project through torch's dispatcher."""
    args, named = gather_arguments(device)
    return lambda: static_rows.ops.gather_rows(*args, **named)


def custom_operator(device: torch.device) -> Callable[[], object]:
    """Returns a call of an operator of torch.library that does nothing."""
    x = torch.zeros(1, dtype=torch.float32, device=device)
    torch.library.define("gpu_checks::nothing", "(Tensor x) -> ()")
    torch.library.impl("gpu_checks::nothing", "CompositeExplicitAutograd", lambda x: None)
    nothing = torch.ops.gpu_checks.nothing
    return lambda: nothing(x)


LAUNCHED: dict[str, Callable[[torch.device], Callable[[], object]]] = {
    "aten operator": aten_launch,
    "Triton launch": triton_launch,
    "our launcher": our_launch,
    "our operator": our_operator,
    "custom operator": custom_operator,
}


def measure_launches(send: Send, *, build: Callable[[torch.device], Callable[[], object]], count: int) -> None:
    """Sends the microseconds of a launch, on the host alone and until the device has finished."""
    device = default_device()
    launch = build(device)

    def launches() -> None:
        for _ in range(count):
            launch()

    host, whole = host_and_whole(launches, device)
    send(host_us=round(1e6 * host / count, 3), us=round(1e6 * whole / count, 3))


def host_and_whole(work: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns the seconds until `work` returns and until the device has finished it, each the least of three calls."""
    hosts, wholes = [], []
    for _ in range(1 + 3):
        synchronize(device)
        start = time.perf_counter()
        work()
        hosts.append(time.perf_counter() - start)
        synchronize(device)
        wholes.append(time.perf_counter() - start)
    return min(hosts[1:]), min(wholes[1:])


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def measure_functions(send: Send) -> None:
    """Sends the microseconds of an autograd Function that does nothing, forward and backward."""
    device = default_device()
    x = torch.zeros(1, dtype=torch.float32, device=device, requires_grad=True)

    def step() -> None:
        y = x
        for _ in range(FUNCTIONS):
            y = _Nothing.apply(y)
        torch.autograd.grad(y, x, torch.ones_like(y))

    host, whole = host_and_whole(step, device)
    send(host_us=round(1e6 * host / FUNCTIONS, 3), us=round(1e6 * whole / FUNCTIONS, 3))


def measure_nodes(send: Send) -> None:
    """Sends the microseconds of a node in the replay of a graph."""
    device = default_device()
    graphs = graphs_of(device)
    x = torch.zeros(1, dtype=torch.float32, device=device)
    with graphs.on_capture_stream():
        x.add_(1)
        with graphs.capturing() as graph:
            for _ in range(NODES):
                x.add_(1)
    host, whole = host_and_whole(graph.replay, device)
    send(host_us=round(1e6 * host / NODES, 3), us=round(1e6 * whole / NODES, 3), nodes=NODES)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="no side starts without its expected seconds left")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
