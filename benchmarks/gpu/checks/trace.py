"""Profiles one eager step with static experts and a stash. Reports its longest gaps and what the host did in them."""

import argparse
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks.device_events import busy_microseconds, host_spans_of, launches_of, longest_gaps
from benchmarks.gpu.checks.reporting import checked_device, expect, report
from benchmarks.gpu.graph_step import Case, build
from benchmarks.gpu.shapes import ROUTINGS, SHAPES, SMALL, sides_of
from megatron.core.device import synchronize
from megatron.training.training import run_step

SIDE, SHAPE = "eager static + stash", "Qwen3-30B-A3B, short"
WARM_STEPS, GAPS = 3, 12


def main() -> None:
    """Profiles the fourth step and reports its gaps."""
    options = parse_options()
    device = checked_device()
    shape = SMALL if options.small else SHAPES[SHAPE]
    run, routing = build(Case("traced", shape, "balanced"), sides_of(ROUTINGS["balanced"])[SIDE].flags or "")

    def step() -> None:
        routing.advance()
        run_step(run)
        synchronize(device)

    for _ in range(WARM_STEPS):
        step()
    kinds = [ProfilerActivity.CPU] if device.type == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=kinds) as recorded:
        step()
    launches = launches_of(recorded)
    expect(bool(launches), "the profile shows launches")
    gaps = longest_gaps(launches, host_spans_of(recorded), count=GAPS)
    for gap in gaps:
        print(gap, flush=True)
    whole = max(span.end for span in launches) - launches[0].start
    report(
        step_ms=whole / 1e3,
        busy_ms=busy_microseconds(launches) / 1e3,
        launches=len(launches),
        layers=shape.layers,
        microbatches=shape.microbatches,
        gaps=[str(gap) for gap in gaps],
    )
    if options.trace is not None:
        recorded.export_chrome_trace(str(options.trace))


def parse_options() -> argparse.Namespace:
    """Parses the command line of this check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a tiny shape, also on the CPU")
    parser.add_argument("--trace", type=Path, metavar="FILE.json.gz", help="also write the whole trace")
    return parser.parse_args()


if __name__ == "__main__":
    main()
