"""Measures this machine for plans: `python benchmarks/device_figures.py --output mine.yaml` writes an entry "cpu".

Measures matrix products, copies too large for any cache, and the minimum time of a torch operation with one thread, and
all-reduces over gloo, large and small, with two processes. Figures are medians over rounds. Peaks are the measured
rates of products, so that the shares of products and memory are 1. Plan with it by setting MEGATRON_DEVICES=mine.yaml
MEGATRON_PLAN_DEVICE=cpu.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.sides import run_rounds, start_side  # noqa: E402
from megatron.training.compute.devices import devices_of_file  # noqa: E402

RANKS = 2
_SMALL = 512
_LARGE_ELEMENTS, _MESSAGE_ELEMENTS = 1 << 24, 1 << 22


def main() -> None:
    """Measures, prints and writes the entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement (default: 7)")
    parser.add_argument("--output", type=Path, required=True, help="file to write")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    figures = {
        name: None if value is None else float(f"{value:.3g}") for name, value in measured(options.rounds).items()
    }
    entry = {"cpu": {**figures, "devices_per_node": os.cpu_count() or 1}}
    options.output.write_text(yaml.safe_dump(entry, sort_keys=False), encoding="utf-8")
    devices_of_file(options.output)  # reports here what a plan would reject
    print(options.output.read_text(encoding="utf-8"), end="")


def measured(rounds: int) -> dict[str, float | None]:
    """Returns the figures by the fields of an entry."""
    products = {name: _product_tflops(dtype, rounds) for name, dtype in _TYPES.items()}
    large = torch.ones(_LARGE_ELEMENTS)
    result = torch.empty_like(large)
    copy = _median(lambda: torch.add(large, 1.0, out=result), rounds)
    few = torch.ones(8)
    launch = _median(lambda: [few + 1.0 for _ in range(1000)], rounds) / 1000
    messages = {size: _all_reduce_seconds(size, rounds) for size in ("large", "small")}
    # Each of two ranks sends the whole tensor, half by half.
    rate = _MESSAGE_ELEMENTS * 4 / messages["large"] / 1e9
    latency = messages["small"] * 1e6
    return {
        **products,
        "fp8_tflops": None,
        "attainable_matmul": 1.0,
        "attainable_attention": _attention_share(products["fp32_tflops"], rounds),
        "attainable_memory": 1.0,
        "attainable_link": 1.0,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "memory_gb_s": 2 * large.nbytes / copy / 1e9,
        "host_gb_s": large.nbytes / copy / 1e9,
        "node_gb_s": rate,
        "node_latency_us": latency,
        "network_gb_s": rate,
        "network_latency_us": latency,
        "kernel_us": launch * 1e6,
    }


_TYPES = {"bf16_tflops": torch.bfloat16, "fp32_tflops": torch.float32}


def _product_tflops(dtype: torch.dtype, rounds: int) -> float:
    left, right = torch.ones(_SMALL, _SMALL, dtype=dtype), torch.ones(_SMALL, _SMALL, dtype=dtype)
    return 2 * _SMALL**3 / _median(lambda: left @ right, rounds) / 1e12


def _attention_share(peak: float, rounds: int) -> float:
    query = torch.ones(4, 4, 256, 64)
    seconds = _median(lambda: F.scaled_dot_product_attention(query, query, query, is_causal=True), rounds)
    return min(1.0, 2 * 4 * 4 * 256 * 256 * 64 / seconds / 1e12 / peak)


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


def _median(run: Callable[[], object], rounds: int) -> float:
    """Returns the median seconds of a call."""
    run()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    main()
