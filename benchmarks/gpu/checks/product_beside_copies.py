"""gemm_beside_stash.py at three caps and two sizes of a copy's block: how much a product slows down beside copies."""

import argparse
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.checks.reporting import checked_device, report
from benchmarks.gpu.gemm_beside_stash import SMALL, Rivals, Sizes, measure

CAPS = (0, 8, 32)
BLOCKS = (4096, 1024)  # words of 16 bytes that a program moves at a time; 4096 is the size for large pages
BLOCK_WORDS = "megatron.core.transformer.moe.paged_stash.triton_kernels.block_words"
SHOWN = ("gemm_x", "rate_x", "cost_x", "is_covered", "pair_alone_us")


def main() -> None:
    """Reports each pair of a block size and a cap as soon as it is measured."""
    options = parse_options()
    device = checked_device()
    rivals = Rivals(SMALL if options.small else Sizes(), device)
    rows: list[dict[str, Any]] = []
    for block in BLOCKS:
        with with_blocks(block, device):
            for cap in CAPS:
                row = measure(rivals, cap, rounds=options.rounds)
                rows.append({"block": block, "num_programs": cap, **{name: row[name] for name in SHOWN}})
                print(rows[-1], flush=True)
                report(rows=rows, lowest_cost_x=min(one["cost_x"] for one in rows))


def with_blocks(block: int, device: torch.device) -> AbstractContextManager[object]:
    """Makes copies use this block; a CPU has none."""
    return nullcontext() if device.type == "cpu" else patch(BLOCK_WORDS, lambda page_bytes: block)


def parse_options() -> argparse.Namespace:
    """The command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="tiny sizes, on the CPU too")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each pair (default: 5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
