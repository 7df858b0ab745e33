"""Compares our current and previous grouped GEMMs with torch's grouped_mm in bf16: forward and both gradients.

Experts have different numbers of rows. For weight gradients that accumulate in fp32, ours accumulates within the GEMM.
torch's and our previous GEMM first write the gradient in bf16 and then add it.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.checks.reporting import checked_device, expect, report
from benchmarks.gpu.record import hold
from megatron.core.device import mark_time, seconds_between
from megatron.core.transformer.moe.paged_stash import triton_grouped_gemm
from megatron.core.transformer.moe.paged_stash.expert_ops import ops

LAUNCHES_SECONDS, WARM_TURNS = 5e-4, 3
ERROR = 8e-3  # relative to the norm: two roundings to bf16
SIDES = ("before", "ours", "theirs")
# Tiles, warps and stages until 2026-11-27, with masked loads and two programs per multiprocessor.
TILE_BEFORE = {"ROWS": 128, "COLUMNS": 128, "TERMS": 64, "num_warps": 8, "num_stages": 3}

Work = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of one grouped GEMM. rows: of all experts together. inner, outer: input and output width."""

    name: str
    rows: int
    inner: int
    outer: int
    experts: int


SHAPES = (
    Shape("Qwen3-30B-A3B", 16384, 2048, 1536, 16),
    Shape("DeepSeek-V3", 8192, 7168, 4096, 8),
    Shape("Mixtral-8x7B", 4096, 4096, 28672, 2),
)
SMALL = (Shape("small", 96, 32, 48, 3),)


class Operands:
    """Rows in uneven parts, weights, gradients, and buffers for results."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(1)
        shares = torch.rand(shape.experts, generator=generator) + 0.2
        ends = (shares.cumsum(0) / shares.sum() * shape.rows).to(torch.int32)
        ends[-1] = shape.rows
        self.offsets = ends.to(device)

        def random(*sizes: int) -> Tensor:
            return torch.randn(sizes, device=device, dtype=torch.bfloat16) * sizes[-1] ** -0.25

        self.x, self.grad = random(shape.rows, shape.inner), random(shape.rows, shape.outer)
        self.weight = random(shape.experts, shape.inner, shape.outer)
        self.out, self.grad_x = torch.empty_like(self.grad), torch.empty_like(self.x)
        self.grad_weight = torch.empty_like(self.weight)
        self.main_grad = torch.zeros_like(self.weight, dtype=torch.float32)

    def ours(self) -> dict[str, Work]:
        """Returns our operators by name. Results are [rows, outer], [rows, inner] and [experts, inner, outer], bf16.

        The result of added_weight is fp32.
        """
        return {
            "forward": lambda: self._product(self.x, self.weight, self.out),
            "grad_x": lambda: self._product(self.grad, self.weight.transpose(1, 2), self.grad_x),
            "grad_weight": self._weight_gradient,
            "added_weight": self._added_in_product,
        }

    def before(self) -> dict[str, Work]:
        """Returns the previous operators, which write the weight gradient before adding it."""
        return {**self.ours(), "added_weight": lambda: self._added(self._weight_gradient())}

    def theirs(self) -> dict[str, Work]:
        """Returns torch's operators by name, with the same results."""

        def weight_gradient() -> Tensor:
            return F.grouped_mm(self.x.t(), self.grad, offs=self.offsets)

        return {
            "forward": lambda: F.grouped_mm(self.x, self.weight, offs=self.offsets),
            "grad_x": lambda: F.grouped_mm(self.grad, self.weight.transpose(1, 2), offs=self.offsets),
            "grad_weight": weight_gradient,
            "added_weight": lambda: self._added(weight_gradient()),
        }

    def _product(self, rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        ops.grouped_gemm(rows, weight, offsets=self.offsets, out=out)
        return out

    def _weight_gradient(self) -> Tensor:
        ops.grouped_gemm_weight_grad(self.x, self.grad, offsets=self.offsets, out=self.grad_weight)
        return self.grad_weight

    def _added_in_product(self) -> Tensor:
        ops.grouped_gemm_weight_grad(self.x, self.grad, offsets=self.offsets, out=self.main_grad, is_added=True)
        return self.main_grad

    def _added(self, grad: Tensor) -> Tensor:
        return self.main_grad.add_(grad)


@contextmanager
def tiles_before() -> Iterator[None]:
    """Restores the previous tiles of our GEMM in its body."""
    module = triton_grouped_gemm
    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "_is_even", lambda *_: False))
        stack.enter_context(patch.object(module, "_PRODUCTS_PER_PROCESSOR", {8: 2}))
        for name in ("product_tile", "weight_grad_tile"):
            stack.enter_context(patch.object(module, name, lambda *_, **__: dict(TILE_BEFORE)))
        # Launches are prepared with one of the tiles.
        for prepared in (module._product, module._weight_gradient):
            stack.callback(prepared.cache_clear)
            prepared.cache_clear()
        yield


def main() -> None:
    """Compares each shape and reports it as soon as it is measured. A side that raises does not stop the others."""
    options = parse_options()
    device = checked_device()
    rows, wrong = [], []
    for shape in SMALL if options.small else SHAPES:
        operands = Operands(shape, device)
        sides = [operands.before(), operands.ours(), operands.theirs()]
        for name in sides[0]:
            row = compared([side[name] for side in sides], operands, device=device, rounds=options.rounds)
            flops = 2 * shape.rows * shape.inner * shape.outer
            for side in SIDES:
                if f"{side}_ms" in row:
                    row[f"{side}_tflop_s"] = flops / float(row[f"{side}_ms"]) / 1e9
            rows.append({"shape": shape.name, "product": name, **row})
            print(rows[-1], flush=True)
            report(products=rows)
            if "error" in row or float(row.get("distance", 0)) > ERROR:
                wrong.append(f"{shape.name} {name}")
    expect(not wrong, f"all sides ran and agree {wrong or ''}")


def compared(works: list[Work], operands: Operands, *, device: torch.device, rounds: int) -> dict[str, float | str]:
    """Returns the milliseconds of each side, torch's and the previous time over ours, and the largest difference.

    Returns only the error if a side raises one. works: in the order of SIDES, each returns [rows, outer], [rows, inner]
    or [experts, inner, outer], bf16 or fp32.
    """
    results, row = [], dict[str, float | str]()
    for side, work in zip(SIDES, works, strict=True):
        operands.main_grad.zero_()
        try:
            with tiles_before() if side == "before" else ExitStack():
                results.append(work().float().clone())
        except (RuntimeError, AttributeError, ValueError) as error:
            return {"error": f"{side}: {error}"[:300]}
    row["distance"] = max(((one - results[-1]).norm() / results[-1].norm()).item() for one in results)
    # The sides alternate, so that a change of the clock affects all of them.
    turns = []
    for _ in range(rounds):
        with tiles_before():
            before = seconds_of(works[0], device)
        turns.append((before, seconds_of(works[1], device), seconds_of(works[2], device)))
    for side, column in zip(SIDES, zip(*turns[WARM_TURNS:], strict=True), strict=True):
        row[f"{side}_ms"] = 1e3 * statistics.median(column)
    row["rate_x"] = statistics.median(theirs / ours for _, ours, theirs in turns[WARM_TURNS:])
    row["gain_x"] = statistics.median(before / ours for before, ours, _ in turns[WARM_TURNS:])
    return row


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Returns the device's seconds for one run, after a wait that hides its launch."""
    hold(device, LAUNCHES_SECONDS)
    start = mark_time(device)
    work()
    return seconds_between(start, mark_time(device))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny shape, also on the CPU")
    parser.add_argument(
        "--rounds", type=int, default=13, help=f"rounds, of which {WARM_TURNS} are not counted (default: 13)"
    )
    options = parser.parse_args()
    if options.rounds <= WARM_TURNS:
        parser.error(f"--rounds is {options.rounds}: must be above {WARM_TURNS}, the number of warm-up rounds")
    return options


if __name__ == "__main__":
    main()
