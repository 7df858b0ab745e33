"""Measures the bandwidth of work that could read and write each byte once: rows, activations, RoPE, kernels to come.

    python -m benchmarks.gpu.checks.new_kernels [--seconds N] [--small]

Each kernel is an entry of KERNELS: a function that returns the work and the bytes that it has to read and write. gb_s
is their rate, and of_copy is relative to copy_ of 1 GiB in the same process. The shape is one layer of Qwen3-30B-A3B
with 4096 tokens on each of 8 ranks.

Expected seconds on an H200: 15 of the 22 that are reserved for kernels of later issues. The CUDA context 4, Triton
compiles at most six kernels in 1 to 2 s each, and each is timed in less than 0.1 s.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu.checks.ceilings import COPIED_BYTES, SMALL_BYTES, copy_rate, run_tasks, seconds_of
from benchmarks.gpu.checks.side_workers import Send, Task
from benchmarks.gpu.shapes import RANKS, SHAPES, SMALL, Shape
from megatron.core.device import default_device, device_name
from megatron.core.fusions.gated_activation import ops as activation_ops
from megatron.core.transformer.moe.static_rows import ops as row_ops
from megatron.core.transformer.rope import RotaryEmbedding, split_and_rotate

SHAPE = "Qwen3-30B-A3B"


@dataclass(frozen=True)
class Kernel:
    """Work to time, and the bytes that it has to read and write."""

    work: Callable[[], object]
    num_bytes: int


class Operands:
    """Rows of a layer of experts with balanced routing, on the device, in bf16.

    All rows of the buffers are live. Tokens are those of all ranks, so most of their choices have no row here.
    """

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.rows, self.tokens, self.topk = shape.seq * shape.topk, RANKS * shape.seq, shape.topk
        generator = torch.Generator().manual_seed(1)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16)

        # Tokens of the rows in increasing order for each expert, as after a stable sort.
        source = torch.randint(self.tokens, (shape.num_own, self.rows // shape.num_own), generator=generator)
        source = source.sort(dim=1).values.flatten()
        slots = torch.full((self.tokens * self.topk,), -1, dtype=torch.int32)
        slots[torch.randperm(len(slots), generator=generator)[: self.rows]] = torch.arange(self.rows, dtype=torch.int32)
        self.source, self.slots = source.to(torch.int32).to(device), slots.view(self.tokens, self.topk).to(device)
        self.num_rows = torch.full((1,), self.rows, dtype=torch.int64, device=device)
        self.x, self.buffer = random(self.tokens, shape.hidden), random(self.rows, shape.hidden)
        self.gate_up, self.act = random(self.rows, 2 * shape.ffn), random(self.rows, shape.ffn)
        self.weights = torch.rand(self.rows, device=device)
        self.grad_gate_up, self.grad_weights = torch.empty_like(self.gate_up), torch.empty_like(self.weights)
        # The qkv projection's output of one microbatch, and the rotation of its positions.
        heads = shape.heads // shape.groups
        self.qkv = random(shape.seq, 1, shape.groups, heads + 2, shape.kv_channels)
        self.table = RotaryEmbedding(shape.kv_channels, shape.seq)(shape.seq)


def gather(one: Operands) -> Kernel:
    """Returns the gather of tokens' rows into a buffer."""
    return Kernel(
        lambda: row_ops.gather_rows(one.x, one.source, num_rows=one.num_rows, out=one.buffer),
        2 * one.buffer.nbytes + one.source.nbytes,
    )


def row_sum(one: Operands) -> Kernel:
    """Returns the sum of the rows of each token."""
    return Kernel(lambda: row_ops.sum_rows(one.buffer, one.slots), one.buffer.nbytes + one.x.nbytes + one.slots.nbytes)


def activation(one: Operands) -> Kernel:
    """Returns SwiGLU with the rows' weights."""
    return Kernel(
        lambda: activation_ops.gated_activation(
            one.gate_up, one.weights, num_rows=one.num_rows, out=one.act, activation="swiglu"
        ),
        one.gate_up.nbytes + one.weights.nbytes + one.act.nbytes,
    )


def activation_gradient(one: Operands) -> Kernel:
    """Returns the gradient of SwiGLU and of the rows' weights."""
    return Kernel(
        lambda: activation_ops.gated_activation_backward(
            one.act,
            one.gate_up,
            scale=one.weights,
            num_rows=one.num_rows,
            grad_gate_up=one.grad_gate_up,
            grad_scale=one.grad_weights,
            activation="swiglu",
        ),
        one.act.nbytes + 2 * one.gate_up.nbytes + 2 * one.weights.nbytes,
    )


def rotation(one: Operands) -> Kernel:
    """Returns RoPE of queries and keys, which leaves values in place."""
    rotated = split_and_rotate(one.qkv, one.table)[:2]
    return Kernel(lambda: split_and_rotate(one.qkv, one.table), 2 * sum(one.nbytes for one in rotated))


def rotation_gradient(one: Operands) -> Kernel:
    """Returns the gradient of RoPE, which joins the gradients of queries, keys and values."""
    results = split_and_rotate(one.qkv.requires_grad_(), one.table)
    grads = [torch.ones_like(result) for result in results]
    return Kernel(lambda: torch.autograd.grad(results, one.qkv, grads, retain_graph=True), 2 * one.qkv.nbytes)


KERNELS: dict[str, Callable[[Operands], Kernel]] = {
    "gather_rows": gather,
    "sum_rows": row_sum,
    "gated_activation": activation,
    "gated_activation_backward": activation_gradient,
    "split_and_rotate": rotation,
    "split_and_rotate, backward": rotation_gradient,
}


def main() -> None:
    """Measures each kernel. Exits with status 1 if one fails, INCOMPLETE if some were not started."""
    options = parse_options()
    tasks = [Task(name, 3, partial(measure, build=build, is_small=options.small)) for name, build in KERNELS.items()]
    sys.exit(run_tasks(tasks, seconds=options.seconds))


def measure(send: Send, *, build: Callable[[Operands], Kernel], is_small: bool) -> None:
    """Sends the time and the rates of a kernel."""
    device = default_device()
    kernel = build(Operands(SMALL if is_small else SHAPES[SHAPE], device))
    seconds = seconds_of(kernel.work, device)
    rate = kernel.num_bytes / seconds
    send(device=device_name(device), us=round(1e6 * seconds, 2), bytes=kernel.num_bytes, gb_s=round(rate / 1e9, 2))
    # After the first line, so that a copy that fails loses nothing.
    send(of_copy=round(rate / copy_rate(device, SMALL_BYTES if is_small else COPIED_BYTES), 4))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=22.0, help="no side starts without its expected seconds left")
    parser.add_argument("--small", action="store_true", help="tiny sizes, also on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
