"""Measures how much GEMMs slow down during copies, with the current and the previous copy programs, for several program
limits.

The GEMMs are torch's mm, our grouped GEMM and torch's grouped_mm. gemm_beside_stash.py explains the results.
"""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F

from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.gemm_beside_stash import SMALL, Rivals, Sizes, measure
from megatron.core.transformer.moe.paged_stash import triton_kernels
from megatron.core.transformer.moe.paged_stash.expert_ops import ops

# Number of 16-byte words that a program moved at a time until 2026-11-27, its warps and its registers. One program
# filled an SM.
BEFORE = {"MAX_BLOCK": 4096, "WORDS_PER_WARP": 256, "MAX_REGISTERS": 128, "COPIES_PER_PROCESSOR": 1}
SHOWN = ("gemm_x", "rate_x", "cost_x", "is_covered", "pair_alone_us")


class OurProducts(Rivals):
    """The grouped GEMMs of Qwen3-30B-A3B's fc1 with our kernel instead of torch's mm."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        super().__init__(sizes, device)
        experts, rows, inner, outer = (2, 16, 32, 48) if sizes == SMALL else (16, 1024, 2048, 1536)
        self.offsets = torch.arange(1, experts + 1, device=device, dtype=torch.int32) * rows
        self.x, self.weight, self.product = (
            torch.randn(shape, device=device, dtype=torch.bfloat16)
            for shape in ((experts * rows, inner), (experts, inner, outer), (experts * rows, outer))
        )

    def products(self) -> None:
        for _ in range(4 * self.sizes.products):
            ops.grouped_gemm(self.x, self.weight, offsets=self.offsets, out=self.product)


class TorchsProducts(OurProducts):
    """The same grouped GEMMs with torch's grouped_mm."""

    def products(self) -> None:
        for _ in range(4 * self.sizes.products):
            F.grouped_mm(self.x, self.weight, offs=self.offsets)


RIVALS = {"mm": Rivals, "our grouped product": OurProducts, "torch's grouped_mm": TorchsProducts}


@contextmanager
def programs_before(device: torch.device) -> Iterator[None]:
    """Restores the previous copy programs in its body."""
    with ExitStack() as stack:
        for name, value in BEFORE.items() if device.type != "cpu" else ():
            stack.enter_context(patch.object(triton_kernels, name, value))
        # Launches are prepared with one of the sizes.
        for prepared in (triton_kernels._copy, triton_kernels._of_block):
            stack.callback(prepared.cache_clear)
            prepared.cache_clear()
        yield


def is_default(row: dict[str, Any]) -> bool:
    """Returns whether a row was measured with the current programs and without a limit."""
    return row["side"] == "after" and row["num_programs"] == 0


def main() -> None:
    """Reports each GEMM, side and program limit as soon as it is measured. A limit of 0 means unlimited."""
    options = parse_options()
    device = checked_device()
    processors = 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count
    rows: list[dict[str, Any]] = []
    for name, kind in RIVALS.items():
        rivals = kind(SMALL if options.small else Sizes(), device)
        for side, caps in (("before", (0, 8)), ("after", (0, processors, 2 * processors, 3 * processors))):
            with programs_before(device) if side == "before" else ExitStack():
                for cap in dict.fromkeys(caps):
                    row = measure(rivals, cap, rounds=options.rounds)
                    named = {"products": name, "side": side, "num_programs": cap}
                    rows.append({**named, **{key: row[key] for key in SHOWN}})
                    print(rows[-1], flush=True)
                    costs = [one["cost_x"] for one in rows if is_default(one)]
                    report(rows=rows, highest_cost_x=max(costs, default=None))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, also on the CPU")
    parser.add_argument("--rounds", type=int, default=5, help="rounds per GEMM, side and program limit (default: 5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
