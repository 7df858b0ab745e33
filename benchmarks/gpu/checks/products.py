"""Our grouped product beside torch's grouped_mm: forward, gradients of rows and of weights, bf16, uneven experts."""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.checks.reporting import checked_device, expect, report
from benchmarks.gpu.record import hold
from megatron.core.device import mark_time, seconds_between
from megatron.core.transformer.moe.paged_stash.expert_ops import ops

LAUNCHES_SECONDS, WARM_TURNS = 5e-4, 3
ERROR = 8e-3  # relative to the norm: two roundings to bf16


@dataclass(frozen=True)
class Shape:
    """Sizes of one product: rows of all experts together, H, O, experts."""

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
    """Rows in uneven parts, weights, gradients and room for results."""

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

    def ours(self) -> dict[str, Callable[[], Tensor]]:
        """Our operators by name. Results are [rows, outer], [rows, inner] and [experts, inner, outer], bf16."""
        return {
            "forward": lambda: self._product(self.x, self.weight, self.out),
            "grad_x": lambda: self._product(self.grad, self.weight.transpose(1, 2), self.grad_x),
            "grad_weight": self._weight_gradient,
        }

    def theirs(self) -> dict[str, Callable[[], Tensor]]:
        """torch's operators by name. Results are [rows, outer], [rows, inner] and [experts, inner, outer], bf16."""
        return {
            "forward": lambda: F.grouped_mm(self.x, self.weight, offs=self.offsets),
            "grad_x": lambda: F.grouped_mm(self.grad, self.weight.transpose(1, 2), offs=self.offsets),
            "grad_weight": lambda: F.grouped_mm(self.x.t(), self.grad, offs=self.offsets),
        }

    def _product(self, rows: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        ops.grouped_gemm(rows, weight, offsets=self.offsets, out=out)
        return out

    def _weight_gradient(self) -> Tensor:
        ops.grouped_gemm_weight_grad(self.x, self.grad, offsets=self.offsets, out=self.grad_weight)
        return self.grad_weight


def main() -> None:
    """Reports each shape as soon as it is measured; a side that raises does not end the other."""
    options = parse_options()
    device = checked_device()
    rows, wrong = [], []
    for shape in SMALL if options.small else SHAPES:
        operands = Operands(shape, device)
        theirs = operands.theirs()
        for name, work in operands.ours().items():
            row = compared(work, theirs[name], device=device, rounds=options.rounds)
            flops = 2 * shape.rows * shape.inner * shape.outer
            for side in ("ours", "theirs"):
                if f"{side}_ms" in row:
                    row[f"{side}_tflop_s"] = flops / float(row[f"{side}_ms"]) / 1e9
            rows.append({"shape": shape.name, "product": name, **row})
            print(rows[-1], flush=True)
            report(products=rows)
            if "error" in row or float(row.get("distance", 0)) > ERROR:
                wrong.append(f"{shape.name} {name}")
    expect(not wrong, f"both sides ran and agree {wrong or ''}")


def compared(
    ours: Callable[[], Tensor], theirs: Callable[[], Tensor], *, device: torch.device, rounds: int
) -> dict[str, float | str]:
    """Milliseconds of both sides, their ratio, and how far their results are apart; or the error of a side.

    ours, theirs: return [rows, outer], [rows, inner] or [experts, inner, outer], bf16, both the same.
    """
    try:
        mine = ours().float()
    except RuntimeError as error:
        return {"error": f"ours: {error}"[:300]}
    row: dict[str, float | str] = {}
    try:
        other = theirs().float()
    except (RuntimeError, AttributeError, ValueError) as error:
        row["error"] = f"theirs: {error}"[:300]
        return {**row, "ours_ms": 1e3 * statistics.median(seconds_of(ours, device) for _ in range(rounds))}
    row["distance"] = ((mine - other).norm() / other.norm()).item()
    # In turns, so that a change of the clock meets both.
    pairs = [(seconds_of(ours, device), seconds_of(theirs, device)) for _ in range(rounds)][WARM_TURNS:]
    row["ours_ms"], row["theirs_ms"] = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    row["rate_x"] = statistics.median(other / own for own, other in pairs)
    return row


def seconds_of(work: Callable[[], Tensor], device: torch.device) -> float:
    """Seconds of the device for one run, after a wait that hides its launch. work: returns any shape, bf16."""
    hold(device, LAUNCHES_SECONDS)
    start = mark_time(device)
    work()
    return seconds_between(start, mark_time(device))


def parse_options() -> argparse.Namespace:
    """The command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny shape, on the CPU too")
    parser.add_argument("--rounds", type=int, default=13, help=f"rounds, {WARM_TURNS} not counted (default: 13)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
