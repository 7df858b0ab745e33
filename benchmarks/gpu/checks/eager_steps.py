"""Compares the losses of three eager training steps on this device with a process on the CPU."""

import argparse
import json
import math
import subprocess
import sys
import time

from benchmarks.gpu.checks.reporting import checked_device, expect, report, without_gpu
from benchmarks.gpu.checks.training import StashCounts, become_a_rank, losses_of
from benchmarks.gpu.protocol import RESULT
from tests.distributed.graph_runs import train_here
from tests.distributed.stash_runs import stash
from tests.gpu.graph_cases import EXPERTS, Case, argv_of

STEPS, ERROR = 3, 1e-3
# fp32 without dropout and jitter, which use different random numbers on each device.
CASES = {
    "dense": Case("dense", {}),
    "experts": Case("moe", EXPERTS),
    "stash, host pages, recomputation": Case("moe", {**EXPERTS, **stash(0.3, 0.4, compute="copies")}),
}


def main() -> None:
    """Trains each case, prints its losses immediately, and compares all cases at the end."""
    options = parse_options()
    device = checked_device()
    reference = None if options.alone else steps_of_the_cpu()
    become_a_rank()
    losses: dict[str, list[float]] = {}
    for name, case in CASES.items():
        counts, began = StashCounts(), time.perf_counter()
        run = train_here(argv_of(case, {"train-iters": STEPS}), setup=counts.setup, callbacks=[counts])
        losses[name] = losses_of(run)
        print(f"{name}: {losses[name]}, {time.perf_counter() - began:.1f} s, {counts.total}", flush=True)
        expect(all(map(math.isfinite, losses[name])), f"{name}: losses are finite")
    report(losses=losses)
    if reference is None:
        return
    expected = losses_of_process(reference)
    worst = max(
        abs(ours - theirs) / abs(theirs)
        for name in CASES
        for ours, theirs in zip(losses[name], expected[name], strict=True)
    )
    report(device=str(device), worst_error=worst)
    expect(worst < ERROR, f"losses agree with the CPU's up to a relative error of {worst:.2g}")


def steps_of_the_cpu() -> "subprocess.Popen[str]":
    """Starts the same steps in a process that sees no GPU."""
    command = [sys.executable, "-m", "benchmarks.gpu.checks.eager_steps", "--alone"]
    return subprocess.Popen(command, env=without_gpu(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def losses_of_process(process: "subprocess.Popen[str]") -> dict[str, list[float]]:
    """Waits for the CPU process and returns its losses by case."""
    output, _ = process.communicate()
    if process.returncode:
        print(output)
        sys.exit("the steps on the CPU failed")
    line = next(line for line in output.splitlines() if line.startswith(RESULT))
    losses: dict[str, list[float]] = json.loads(line.removeprefix(RESULT))["losses"]
    return losses


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="do not start a CPU process for comparison")
    return parser.parse_args()


if __name__ == "__main__":
    main()
