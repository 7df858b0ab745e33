"""Compares AdamW over flat ranges, in several forms, with torch.optim's AdamW over separate parameters, interleaved in
one process.

    python benchmarks/optimizer_step.py [--parameters 300] [--elements 65536] [--rounds 15] [--json FILE]

Prints nanoseconds of CPU time per parameter element and the ratio to torch's fused AdamW, as medians over the rounds.
The flat step is MegatronOptimizer's, without gradient reduction and norm.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.device import keep_cpu_heap  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer.adam import GradScale  # noqa: E402

FORMS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "flat": (torch.float32, {}),
    "flat, a bucket at a time": (torch.float32, {"bucket_size": 1 << 20}),
    "flat, bf16 with fp32 masters": (torch.bfloat16, {"bf16": True}),
    "flat, bf16 with remainders": (torch.bfloat16, {"bf16": True, "use_precision_aware_optimizer": True}),
    "flat, bf16, moments in bf16": (
        torch.bfloat16,
        {"bf16": True, "use_precision_aware_optimizer": True, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
}


def main() -> None:
    """Measures the steps and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=300)
    parser.add_argument("--elements", type=int, default=65536, help="elements per parameter")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    keep_cpu_heap()
    shape = (options.parameters, options.elements)
    steps: dict[str, Callable[[], object]] = {"torch fused": torch_step(shape, fused=True)}
    steps["torch foreach"] = torch_step(shape, foreach=True)
    steps |= {name: flat_step(shape, dtype, settings=settings) for name, (dtype, settings) in FORMS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(options.rounds + 1):
        for name, step in steps.items():
            start = time.process_time()
            step()
            seconds[name].append(time.process_time() - start)
    base = seconds["torch fused"][1:]
    table = {
        name: {
            "ns_per_element": statistics.median(times[1:]) * 1e9 / (shape[0] * shape[1]),
            # Ratios per round, so that a temporarily slow machine affects both sides.
            "ratio": statistics.median(own / other for own, other in zip(times[1:], base)),
        }
        for name, times in seconds.items()
    }
    for name, row in table.items():
        print(f"{name:32} {row['ns_per_element']:8.3f} ns  {row['ratio']:6.2f} x")
    if options.json is not None:
        options.json.write_text(
            json.dumps({"parameters": shape[0], "elements": shape[1], "forms": table}, indent=1) + "\n"
        )


def torch_step(shape: tuple[int, int], **kind: Any) -> Callable[[], object]:
    """Returns a step of torch.optim.AdamW over parameters of shape (number, elements)."""
    parameters = [nn.Parameter(torch.randn(shape[1])) for _ in range(shape[0])]
    for parameter in parameters:
        parameter.grad = torch.randn(shape[1])
    return torch.optim.AdamW(parameters, lr=1e-4, **kind).step


def flat_step(shape: tuple[int, int], dtype: torch.dtype, *, settings: dict[str, Any]) -> Callable[[], object]:
    """Returns the same step by a MegatronOptimizer, including copying masters back to the parameters."""
    own = dict(settings)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        bucket_size=own.pop("bucket_size", None),
        overlap_grad_reduce="bucket_size" in settings,
    )
    model = nn.ParameterList(torch.randn(shape[1]).to(dtype) for _ in range(shape[0]))
    wrapped = DistributedDataParallel(ModelParallelConfig(), ddp_config, model)
    for buffer in wrapped.all_buffers:
        buffer.grad_data.normal_()
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4, clip_grad=0.0, **own), [wrapped])
    # Omits the norm, which torch's step does not compute either.
    return lambda: optimizer._update(GradScale(1.0))


if __name__ == "__main__":
    main()
