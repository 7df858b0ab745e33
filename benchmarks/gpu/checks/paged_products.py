"""Compares kernels of experts whose rows are in pages with the same kernels on contiguous rows, in bf16.

    python -m benchmarks.gpu.checks.paged_products [--seconds N] [--rounds N] [--small] [--descriptors]

fc1            gate_up from x, both in pages
weight_grad    gradient of fc1's weights, from x in pages, written in bf16
added_grad     the same, added to fp32
gather         tokens copied to x in pages
act            the activation of gate_up in pages
act_grad       its gradient, which also writes the activation again

Experts have different numbers of rows, and the pages of a tensor are scattered over its arena. A page has the size that
page_size_on_gpu chooses: 128 times the least common multiple of the bytes of both rows. A shape has a line for each
kernel: milliseconds without and with pages, and their ratio, the median over rounds in which the two alternate. Results
must be equal bit by bit. plan_us and release_us: microseconds in which a layer's pages are planned and released.

Experts on a GPU compute in pages by default only once the targets hold for every shape: at most 1.03 times the time for
fc1, and 1.05 times for both weight gradients. The other kernels have no target.

With --descriptors, only fc1_descriptors is measured, without a target: fc1 in pages that reads x and the weights by
tensor descriptors, which no GPU has run yet, against fc1 on contiguous rows. Its ratio compares with fc1's.

Expected seconds on an H200: 13 for each shape, 39 in all. Triton compiles twelve kernels for the first shape and six
for each other one, in 1 to 2 s each, and all rounds take less than 1 s.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.checks.products import WARM_TURNS, seconds_of
from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.checks.side_workers import Line, Send, Task, exit_status, run_in_turn
from benchmarks.gpu.graph_step import free_memory
from benchmarks.gpu.record import Target, figures_of_target
from megatron.core.device import default_device, device_name
from megatron.core.fusions.gated_activation import ops as activation_ops
from megatron.core.paged_rows import PagedRows, Rows, operand
from megatron.core.transformer.moe.paged_stash import triton_grouped_gemm
from megatron.core.transformer.moe.paged_stash.expert_ops import ops
from megatron.core.transformer.moe.paged_stash.page_layout import TILE_ROWS, Counter, PoolLayout, Priority, row_spec
from megatron.core.transformer.moe.paged_stash.page_pool import PageGroup, PagePool
from megatron.core.transformer.moe.paged_stash.triton_grouped_gemm import Loads
from megatron.core.transformer.moe.static_rows import ops as row_ops

SHAPE_SECONDS = 13
LIMITS = {"fc1": 1.03, "weight_grad": 1.05, "added_grad": 1.05}
SIDES = ("contiguous", "paged")


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer.

    rows: live rows of all experts together, of 9/8 as many in the buffers. page: as many rows as a page has if both
    widths are equal.
    """

    rows: int
    hidden: int
    ffn: int
    experts: int
    page: int = TILE_ROWS

    @property
    def capacity(self) -> int:
        """Number of rows of the buffers."""
        return self.rows + self.rows // 8


# As in products.py.
SHAPES = {
    "Qwen3-30B-A3B": Shape(16384, 2048, 768, 16),
    "DeepSeek-V3": Shape(8192, 7168, 2048, 8),
    "Mixtral-8x7B": Shape(4096, 4096, 14336, 2),
}
SMALL = {"small": Shape(96, 32, 24, 3, page=8)}


class Operands:
    """Rows of a layer without and with pages. x and gate_up are by side, other tensors are contiguous on both sides."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self._generator, self._device = torch.Generator().manual_seed(1), device
        shares = torch.rand(shape.experts, generator=self._generator) + 0.2
        ends = (shares.cumsum(0) / shares.sum() * shape.rows).to(torch.int32)
        ends[-1] = shape.rows
        self.offsets, self.num_rows = ends.to(device), ends[-1:].long().to(device)
        self.live = shape.rows

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16) * sizes[-1] ** -0.25

        num_tokens = shape.rows // 2
        self.tokens = random(num_tokens, shape.hidden)
        source = torch.randint(num_tokens, (shape.capacity,), generator=self._generator, dtype=torch.int32)
        self.source = source.to(device)
        x, gate_up = random(shape.capacity, shape.hidden), random(shape.capacity, 2 * shape.ffn)
        self.weight = random(shape.experts, shape.hidden, 2 * shape.ffn)
        self.scale = torch.rand(shape.capacity, device=device)
        self.grad_gate_up, self.grad_act = torch.zeros_like(gate_up), random(shape.capacity, shape.ffn)
        self.grad_scale, self.act = torch.zeros_like(self.scale), torch.zeros_like(self.grad_act)
        self.grad = random(shape.capacity, 2 * shape.ffn)
        self.grad_weight = torch.empty_like(self.weight)
        self.main_grad = torch.zeros_like(self.weight, dtype=torch.float32)
        page_bytes = shape.page * math.lcm(*(rows.shape[1] * rows.itemsize for rows in (x, gate_up)))
        self.x: dict[str, Rows] = {"contiguous": x, "paged": self._paged(x, page_bytes)}
        self.gate_up: dict[str, Rows] = {"contiguous": gate_up, "paged": self._paged(gate_up, page_bytes)}

    def _paged(self, rows: Tensor, page_bytes: int) -> PagedRows:
        """Copies rows, [C, W], into pages in random order, of an arena of twice the size that is otherwise NaN."""
        elements = page_bytes // rows.itemsize
        pages = -(-rows.numel() // elements)
        table = torch.randperm(2 * pages, generator=self._generator)[:pages].to(self._device)
        arena = torch.full((2 * pages, elements), math.nan, device=self._device, dtype=rows.dtype)
        flat = torch.full((pages * elements,), math.nan, device=self._device, dtype=rows.dtype)
        flat[: self.live * rows.shape[1]] = rows[: self.live].reshape(-1)
        arena[table] = flat.view(pages, elements)
        return PagedRows(arena.view(-1), table, page_bytes, *rows.shape)

    def compared(self, rows: Rows) -> Tensor:
        """Returns a copy of a result: of its live rows, [R, W] or [R], or of a gradient of weights, any dtype."""
        if isinstance(rows, Tensor):
            return (rows if rows is self.grad_weight or rows is self.main_grad else rows[: self.live]).clone()
        elements = rows.page_bytes // rows.arena.itemsize
        return rows.arena.view(-1, elements)[rows.table].view(-1)[: self.live * rows.width].view(self.live, -1)

    # Kernels: each returns its results, without pages.

    def gather(self, side: str) -> list[Rows]:
        """Copies tokens to x."""
        out, places = operand("out", self.x[side])
        row_ops.gather_rows(self.tokens, self.source, num_rows=self.num_rows, out=out, **places)
        return [self.x[side]]

    def fc1(self, side: str) -> list[Rows]:
        """Multiplies x by the weights, into gate_up."""
        (x, of_x), (out, of_out) = operand("x", self.x[side]), operand("out", self.gate_up[side])
        ops.grouped_gemm(x, self.weight, offsets=self.offsets, out=out, **of_x, **of_out)
        return [self.gate_up[side]]

    def fc1_by_descriptors(self, side: str) -> list[Rows]:
        """Multiplies x by the weights, into gate_up. In pages, descriptors read both; on a CPU, fc1 replaces it."""
        if side == "contiguous" or self._device.type == "cpu":
            return self.fc1(side)
        (x, of_x), (out, of_out) = operand("x", self.x[side]), operand("out", self.gate_up[side])
        triton_grouped_gemm.grouped_gemm(
            x, self.weight, offsets=self.offsets, out=out, **of_x, **of_out, loads=Loads.DESCRIPTORS
        )
        return [self.gate_up[side]]

    def activation(self, side: str) -> list[Rows]:
        """Applies SwiGLU to gate_up."""
        gate_up, places = operand("gate_up", self.gate_up[side])
        activation_ops.gated_activation(
            gate_up, self.scale, num_rows=self.num_rows, out=self.act, activation="swiglu", **places
        )
        return [self.act]

    def activation_grad(self, side: str) -> list[Rows]:
        """Computes the gradients of SwiGLU, and its result again."""
        gate_up, places = operand("gate_up", self.gate_up[side])
        results = {"grad_gate_up": self.grad_gate_up, "grad_scale": self.grad_scale, "act": self.act}
        given: dict[str, Any] = {"scale": self.scale, "num_rows": self.num_rows, "activation": "swiglu"}
        activation_ops.gated_activation_backward(self.grad_act, gate_up, **given, **results, **places)
        return [*results.values()]

    def weight_grad(self, side: str) -> list[Rows]:
        """Writes the gradient of the weights in bf16."""
        return self._weight_grad(side, self.grad_weight, is_added=False)

    def added_grad(self, side: str) -> list[Rows]:
        """Adds the gradient of the weights to fp32."""
        return self._weight_grad(side, self.main_grad, is_added=True)

    def _weight_grad(self, side: str, out: Tensor, *, is_added: bool) -> list[Rows]:
        x, places = operand("x", self.x[side])
        ops.grouped_gemm_weight_grad(x, self.grad, offsets=self.offsets, out=out, is_added=is_added, **places)
        return [out]


# In the order of a step, so that each reads what the previous ones have written.
KERNELS: Mapping[str, Callable[[Operands, str], list[Rows]]] = {
    "gather": Operands.gather,
    "fc1": Operands.fc1,
    "act": Operands.activation,
    "act_grad": Operands.activation_grad,
    "weight_grad": Operands.weight_grad,
    "added_grad": Operands.added_grad,
}
BY_DESCRIPTORS = {"fc1_descriptors": Operands.fc1_by_descriptors}


def main() -> None:
    """Measures each shape. Exits with status 1 if a shape fails or misses a target, INCOMPLETE if one was not started.

    A shape whose results differ fails.
    """
    options = parse_options()
    shapes, kernels = SMALL if options.small else SHAPES, BY_DESCRIPTORS if options.descriptors else KERNELS
    figures: dict[str, Line] = {}

    def on_line(name: str, line: Line) -> None:
        figures.setdefault(name, {}).update(line)
        report(side=name, **line)

    outcomes = run_in_turn(
        [
            Task(name, SHAPE_SECONDS, partial(measure, shape=shape, rounds=options.rounds, kernels=kernels))
            for name, shape in shapes.items()
        ],
        deadline=time.monotonic() + options.seconds,
        prepare=checked_device,
        clean=lambda: free_memory(default_device()),
        on_line=on_line,
    )
    if all((one.error or "").startswith("SystemExit") for one in outcomes.values()):
        checked_device()
    # Times of tiny kernels on a CPU have no meaning.
    targets = [] if options.small or options.descriptors else targets_of(figures)
    if targets:
        report(targets=[figures_of_target(target) for target in targets])
    has_missed = any(target.measured is not None and not target.holds for target in targets)
    has_failed = any(one.error is not None for one in outcomes.values())
    sys.exit(exit_status(outcomes.values(), has_failed=has_failed or has_missed))


def targets_of(figures: Mapping[str, Line]) -> list[Target]:
    """Returns the stop rule of each shape: the ratios that decide whether a GPU computes in pages by default."""
    return [
        Target(f"{shape}: {kernel} in pages / contiguous, time", figures.get(shape, {}).get(f"{kernel}_x"), limit)
        for shape in SHAPES
        for kernel, limit in LIMITS.items()
    ]


def measure(
    send: Send,
    *,
    shape: Shape,
    rounds: int,
    kernels: Mapping[str, Callable[[Operands, str], list[Rows]]] = KERNELS,
) -> None:
    """Sends the times of each kernel and their ratio. Raises AssertionError if results with pages differ."""
    device = default_device()
    one = Operands(shape, device)
    send(device=device_name(device), page_bytes=one.x["paged"].page_bytes)  # type: ignore[union-attr]
    send(**time_plan(device, shape=shape, num_rows=one.num_rows, rounds=rounds))
    for name, kernel in kernels.items():
        check_bits(one, name, kernel)
        # Added gradients would otherwise grow without a limit.
        one.main_grad.zero_()
        turns = [tuple(seconds_of(partial(kernel, one, side), device) for side in SIDES) for _ in range(rounds)]
        contiguous, paged = (statistics.median(column) for column in zip(*turns[WARM_TURNS:], strict=True))
        ratio = statistics.median(two / first for first, two in turns[WARM_TURNS:])
        send(
            **{
                f"{name}_ms": round(1e3 * contiguous, 4),
                f"{name}_paged_ms": round(1e3 * paged, 4),
                f"{name}_x": round(ratio, 4),
            }
        )


def time_plan(device: torch.device, *, shape: Shape, num_rows: Tensor, rounds: int) -> Line:
    """Returns the median microseconds of the plan of x and gate_up, and of the release of their pages.

    num_rows: [1], int64, on the device. Three layers hold pages meanwhile.
    """
    widths = [2 * shape.hidden, 4 * shape.ffn]  # bytes of a row in bf16
    specs = [row_spec(width, shape.capacity, priority) for width, priority in zip(widths, Priority)]
    unit = PoolLayout(shape.page * math.lcm(*widths), device_pages=1)
    one_group = sum(unit.pages_for(spec.max_bytes) for spec in specs)
    layout = PoolLayout(unit.page_bytes, 4 * one_group)
    pool = PagePool(device, layout, scratch_pages=one_group)
    reserve = torch.zeros(len(Priority), dtype=torch.int64, device=device)
    groups = [pool.open_group(specs) for _ in range(4)]

    def plan(group: PageGroup) -> None:
        pool.plan(group, num_rows, reserve=reserve, in_pages=True)

    for group in groups[:3]:
        plan(group)
    times = [
        (seconds_of(partial(plan, groups[3]), device), seconds_of(partial(pool.release, groups[3]), device))
        for _ in range(rounds)
    ]
    planned, released = (statistics.median(column) for column in zip(*times[WARM_TURNS:], strict=True))
    assert pool.occupancy_sync().counters[Counter.VOID] == 0, "every tensor has pages"
    return {"plan_us": round(1e6 * planned, 2), "release_us": round(1e6 * released, 2)}


def check_bits(one: Operands, name: str, kernel: Callable[[Operands, str], list[Rows]]) -> None:
    """Runs a kernel on both sides. Raises AssertionError if results differ, or if one is NaN."""
    results = []
    for side in SIDES:
        one.main_grad.fill_(0.5)
        found = kernel(one, side)
        results.append([one.compared(each) for each in found])
    for without, with_pages in zip(*results, strict=True):
        assert not with_pages.isnan().any(), f"{name}: results with pages contain NaN"
        assert torch.equal(without, with_pages), f"{name}: results with pages differ from contiguous ones"


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=80.0, help="no shape starts without its expected seconds left")
    parser.add_argument("--small", action="store_true", help="a tiny shape, also on the CPU")
    parser.add_argument("--descriptors", action="store_true", help="measure only fc1 by descriptors, sm_90 and later")
    parser.add_argument(
        "--rounds", type=int, default=23, help=f"rounds, of which {WARM_TURNS} are not counted (default: 23)"
    )
    options = parser.parse_args()
    if options.rounds <= WARM_TURNS:
        parser.error(f"--rounds is {options.rounds}: must be above {WARM_TURNS}, the number of warm-up rounds")
    return options


if __name__ == "__main__":
    main()
