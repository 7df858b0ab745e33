"""Counts launches on the device per step and static MoE layer, and the operators of the same step on the CPU.

Both are differences between steps with 2 and with 4 layers, with one microbatch, so that embedding, loss and other
parts of the optimizer cancel. Operators are counted as for the launch budget (tests/distributed/launch_budget.py).
"""

import argparse
import json
import subprocess
import sys
from collections import Counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks.device_events import counts_of, launches_of
from benchmarks.gpu.checks.reporting import checked_device, expect, report, without_gpu
from benchmarks.gpu.checks.training import become_a_rank
from benchmarks.gpu.protocol import RESULT
from megatron.core.device import synchronize
from megatron.training.training import run_step
from tests.distributed.launch_budget import recorded_launches
from tests.distributed.stash_runs import stash
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags
from tests.gpu.graph_cases import EXPERTS, HALF, Case, argv_of

FEW, MANY, WARM_STEPS = 2, 4, 3
CASES: dict[str, Flags] = {"static experts": {}, "static experts with a stash": stash(1.5, compute="copies")}


def main() -> None:
    """Counts launches on the GPU, and operators in a separate process on the CPU."""
    options = parse_options()
    device = checked_device()
    become_a_rank()
    if options.operators:
        report(operators={name: per_layer(operators_of, flags) for name, flags in CASES.items()})
        return
    command = [sys.executable, "-m", "benchmarks.gpu.checks.launches", "--operators"]
    child = subprocess.Popen(command, env=without_gpu(), stdout=subprocess.PIPE, text=True)
    counted = {}
    if device.type == "cuda":
        counted = {name: per_layer(launches_in, flags) for name, flags in CASES.items()}
        report(launches=counted)
    lines = child.communicate()[0].splitlines()
    expect(child.returncode == 0, "the operators on the CPU could be counted")
    operators = next(json.loads(line.removeprefix(RESULT)) for line in lines if line.startswith(RESULT))["operators"]
    report(operators=operators)
    for name in CASES:
        print(f"{name}: launches per layer and step {counted.get(name)}, operators {operators[name]}", flush=True)


def per_layer(count: Any, flags: Flags) -> dict[str, float]:
    """Returns the counts of one layer, and of a step without layers, assuming counts linear in the number of layers."""
    few, many = (count(argv_of(Case("moe", {**EXPERTS, **HALF, **flags, "num-layers": n, "global-batch-size": 1})))
                 for n in (FEW, MANY))  # fmt: skip
    layer = (many.total() - few.total()) / (MANY - FEW)
    kinds = {kind: (many[kind] - few[kind]) / (MANY - FEW) for kind in many if many[kind] != few[kind]}
    most = sorted(kinds.items(), key=lambda pair: -pair[1])[:12]
    return {"layer": layer, "rest": few.total() - FEW * layer, **dict(most)}


def operators_of(argv: list[str]) -> Counter[str]:
    """Counts the operators of one step that launch kernels."""
    with started_run(argv) as run:
        for _ in range(WARM_STEPS):
            run_step(run)
        with recorded_launches() as found:
            run_step(run)
    return Counter(one.operator for one in found)


def launches_in(argv: list[str]) -> Counter[str]:
    """Counts the kernels, copies and fills of one step."""
    with started_run(argv) as run:
        for _ in range(WARM_STEPS):
            run_step(run)
        synchronize(torch.device("cuda"))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
            run_step(run)
            synchronize(torch.device("cuda"))
    return counts_of(launches_of(recorded))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operators", action="store_true", help="only count the operators, on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    main()
