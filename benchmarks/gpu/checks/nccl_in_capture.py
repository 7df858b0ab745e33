"""Runs collectives of a single-rank group eagerly and inside a CUDA graph: NCCL on a GPU, gloo with a tape."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.checks.reporting import checked_device, expect, graphs_of, report
from megatron.core.device import synchronize
from megatron.core.group_collectives import all_gather_single, reduce_scatter_single

NUMEL, REPLAYS = 1 << 16, 5


def gather(x: Tensor, out: Tensor) -> None:
    """All-gathers x into out, both [NUMEL], float."""
    all_gather_single(out, x, group=dist.group.WORLD, async_op=True).wait()


def scatter(x: Tensor, out: Tensor) -> None:
    """Reduce-scatters x into out, both [NUMEL], float."""
    reduce_scatter_single(out, x, group=dist.group.WORLD, async_op=True).wait()


def reduce(x: Tensor, out: Tensor) -> None:
    """All-reduces x into out, both [NUMEL], float."""
    out.copy_(x)
    work = dist.all_reduce(out, group=dist.group.WORLD, async_op=True)
    work.wait()


def exchange(x: Tensor, out: Tensor) -> None:
    """Exchanges x into out by all-to-all, both [NUMEL], float."""
    dist.all_to_all_single(out, x, group=dist.group.WORLD)


OPERATIONS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "all-reduce": reduce,
    "all-gather": gather,
    "reduce-scatter": scatter,
    "all-to-all": exchange,
}


def main() -> None:
    """Checks each collective with a separate graph, so that one failure does not hide others."""
    device = checked_device()
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    failed = []
    for name, operation in OPERATIONS.items():
        try:
            check(operation, device)
            print(f"holds: {name} over {backend}, eagerly and captured", flush=True)
        except (RuntimeError, AssertionError) as error:
            print(f"FAILS: {name} over {backend}: {error}", flush=True)
            failed.append(name)
    report(backend=backend, failed=failed)
    dist.destroy_process_group()
    expect(not failed, "all collectives ran")


def check(operation: Callable[[Tensor, Tensor], None], device: torch.device) -> None:
    """Raises AssertionError if a collective's result on a single rank, [NUMEL], fp32, differs from its input."""
    x, out = torch.randn(NUMEL, device=device), torch.zeros(NUMEL, device=device)
    graphs = graphs_of(device)
    with graphs.on_capture_stream():
        operation(x, out)
    synchronize(device)
    assert torch.equal(out, x), "wrong result of an eager collective"
    with graphs.capturing() as graph:
        operation(x, out)
        out.mul_(2)
    for _ in range(REPLAYS):
        x.normal_()
        out.zero_()
        graph.replay()
        assert torch.equal(out, 2 * x), "wrong result of a replayed collective"


if __name__ == "__main__":
    main()
