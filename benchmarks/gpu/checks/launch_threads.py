"""Compiles and launches Triton kernels in the main thread and autograd's thread, whose CUDA contexts differ."""

import threading
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks.reporting import checked_device, expect, report

DEVICE = checked_device()  # before importing Triton, which then decides whether to interpret kernels

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from megatron.core.fusions.gated_activation import ops  # noqa: E402

NUMEL = 1000


@triton.jit
def add_kernel(x, out, addend, numel, SIZE: tl.constexpr):
    """Adds a number to each element, in one program. x, out: [numel], fp32."""
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, tl.load(x + lane, mask=lane < numel) + addend, mask=lane < numel)


def add(x: Tensor, addend: float, *, warps: int) -> Tensor:
    """Adds a number to x, [NUMEL], fp32. A different number of warps causes a new compilation."""
    out = torch.full_like(x, -1)
    add_kernel[(1,)](x, out, addend, NUMEL, SIZE=1024, num_warps=warps)
    return out


class LaunchInBackward(torch.autograd.Function):
    """Launches two kernels in backward: one that is already compiled, and one that is compiled there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, found: dict[str, Any]) -> Tensor:
        """Returns a copy of x, [NUMEL], fp32. found: receives the results of the launches in backward."""
        ctx.found = found
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Launches the kernels and returns grad, [NUMEL], fp32."""
        grad = grad.contiguous()  # the gradient of a sum is one expanded number
        began = time.perf_counter()
        ctx.found.update(thread=threading.get_ident(), same=add(grad, 1.0, warps=4), new=add(grad, 2.0, warps=8))
        ctx.found["seconds"] = time.perf_counter() - began
        return grad, None


def main() -> None:
    """Launches kernels in the main thread, in backward and in a Python thread, then one of the stash's kernels."""
    ones = torch.ones(NUMEL, device=DEVICE)
    began = time.perf_counter()
    expect(bool((add(ones, 1.0, warps=4) == 2).all()), "a kernel compiled by the main thread is correct")
    report(compile_seconds=time.perf_counter() - began)
    leaf = torch.ones(NUMEL, device=DEVICE, requires_grad=True)
    found: dict[str, Any] = {}
    LaunchInBackward.apply(leaf, found).sum().backward()
    expect(bool((found["same"] == 2).all()), "a compiled kernel launched in backward is correct")
    expect(bool((found["new"] == 3).all()), "a kernel compiled in backward is correct")
    is_other = found["thread"] != threading.get_ident()
    report(backward_seconds=found["seconds"], backward_is_another_thread=is_other)
    expect(is_other or DEVICE.type == "cpu", "backward on a GPU runs in autograd's thread")
    thread = threading.Thread(target=lambda: found.update(other=add(ones, 4.0, warps=2)))
    thread.start()
    thread.join()
    expect("other" in found and bool((found["other"] == 5).all()), "a kernel compiled in a Python thread is correct")
    gate_up, scale = torch.randn(4, 64, device=DEVICE), torch.ones(4, device=DEVICE)
    out, rows = torch.zeros(4, 32, device=DEVICE), torch.tensor([4], device=DEVICE)
    ops.gated_activation(gate_up, scale, num_rows=rows, activation="swiglu", out=out)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(out, torch.nn.functional.silu(gate) * up)
    print("holds: SwiGLU is correct", flush=True)


if __name__ == "__main__":
    main()
