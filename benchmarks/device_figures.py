"""Measures this machine for plans: `python benchmarks/device_figures.py --output mine.yaml` writes an entry "cpu".

With one thread, measures matrix multiplications, copies too large for any cache, and the minimum time of a torch
operation. With two processes, measures large and small all-reduces over gloo. Single-thread results are the fastest of
the rounds, and all-reduce results the median. Peaks are the measured rates, so that the attainable shares of compute
and memory are 1. To plan with the entry, set MEGATRON_DEVICES=mine.yaml MEGATRON_PLAN_DEVICE=cpu.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.sides import run_rounds, start_side  # noqa: E402
from megatron.training.compute.devices import cpu_figures, devices_of_file  # noqa: E402

RANKS = 2
_MESSAGE_ELEMENTS = 1 << 22


def main() -> None:
    """Measures the machine, and prints and writes the entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (default: 7)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures = {
        name: float(f"{value:.3g}") if isinstance(value, float) else value
        for name, value in measured(options.rounds).items()
    }
    entry = {"cpu": figures}
    options.output.write_text(yaml.safe_dump(entry, sort_keys=False), encoding="utf-8")
    devices_of_file(options.output)  # raises errors that a plan would raise
    print(options.output.read_text(encoding="utf-8"), end="")


def measured(rounds: int) -> dict[str, Any]:
    """Returns the results by the field names of an entry."""
    messages = {size: _all_reduce_seconds(size, rounds) for size in ("large", "small")}
    # Each of the two ranks sends the whole tensor, in two halves.
    rate = _MESSAGE_ELEMENTS * 4 / messages["large"] / 1e9
    latency = messages["small"] * 1e6
    return {
        **cpu_figures(rounds),
        "attainable_link": 1.0,
        "node_gb_s": rate,
        "node_latency_us": latency,
        "network_gb_s": rate,
        "network_latency_us": latency,
    }


def _all_reduce_seconds(size: str, rounds: int) -> float:
    side = start_side(size, _large_messages if size == "large" else _small_messages, ranks=RANKS)
    return statistics.median(one.wall_seconds for one in run_rounds([side], rounds=rounds, steps=5)[size])


def _large_messages() -> Callable[[], None]:
    return _all_reduces(_MESSAGE_ELEMENTS)


def _small_messages() -> Callable[[], None]:
    return _all_reduces(1)


def _all_reduces(elements: int) -> Callable[[], None]:
    dist.init_process_group("gloo")
    tensor = torch.zeros(elements)
    return lambda: dist.all_reduce(tensor) and None


if __name__ == "__main__":
    main()
