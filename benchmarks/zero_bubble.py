"""Measures how long the stages of a pipeline wait with --pipeline-schedule zb-h1, zbv and 1f1b.

    python benchmarks/zero_bubble.py [--rounds 4] [--only KIND ...] [--json FILE]

4 ranks are the stages of train_step.py's model, with 2 layers each and a small vocabulary, so that the stages take
about as long as each other; with zbv these are two chunks of a layer. A step has 8 micro-batches. Time is that of
one_link.py ([Note: time of a rank]): a rank computes, or waits until another stage has sent its tensor; messages take
no time. The sides step in turns, in processes of their own. Every executed pass is recorded with its start and end.
Reports, as medians over the rounds:

- F, B, W: CPU milliseconds of a pass, mean over stages and chunks. B includes W in 1F1B.
- idle: the share of the stages' time, from the first pass to the last, in which they run no pass.
- length: of the passes of a step, relative to 1F1B; and as the list of passes implies, if each pass of a chunk takes
  its median.
- above the list: passes by which the step is longer than its list implies.
- above the bound: passes by which the step is longer than its lower bound with the memory of 1F1B: stage s runs P - s
  forwards before its first backward, which waits for all forwards of its micro-batch and the backwards of later stages,
  and then never waits. With zbv, a stage waits for its first forward only. A pass is the longest of F, B and W.
- cpu, peak: CPU seconds and peak memory of a training step relative to 1F1B.
"""

import argparse
import json
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.record import Target, report_targets  # noqa: E402
from benchmarks.one_link import CpuClock, OneLink, patch_counts_and_stages  # noqa: E402
from benchmarks.sides import Measurement, context, print_table, run_rounds, start_side  # noqa: E402
from benchmarks.train_step import build_run  # noqa: E402
from megatron.core.pipeline_parallel.runner import ScheduleRunner  # noqa: E402
from megatron.core.pipeline_parallel.schedule import (  # noqa: E402
    Action,
    ActionKind,
    Pair,
    Schedule,
    ScheduleKind,
    pipeline_of,
    stage_orders,
)
from megatron.core.pipeline_parallel.timeline import timeline  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

STAGES, NUM_MICROBATCHES = 4, 8
FLAGS = (
    *("--num-layers", "8", "--vocab-size", "64", "--micro-batch-size", "2", "--global-batch-size", "16"),
    *("--pipeline-model-parallel-size", str(STAGES)),
)
EXPERTS: dict[str, tuple[str, ...]] = {
    "dropless": (),
    "stash": ("--moe-expert-rank-capacity-factor", "1.5", "--moe-paged-stash"),
}
BASE, OTHERS = "1f1b", ("zb-h1", "zbv")


class Pass(NamedTuple):
    """An executed pass with its start and end, in seconds of its rank since the first pass could start."""

    action: Action
    start: float
    end: float


class Idle(NamedTuple):
    """Figures of one step. implied: length that the list of passes implies. bound, length, implied: in seconds."""

    passes: dict[str, float]
    length: float
    implied: float
    bound: float
    idle: float

    @property
    def above_bound(self) -> float:
        """Number of passes by which the step is longer than its bound."""
        return (self.length - self.bound) / max(self.passes.values())

    @property
    def above_list(self) -> float:
        """Number of passes by which the step is longer than its list implies."""
        return (self.length - self.implied) / max(self.passes.values())


def main() -> None:
    """Measures all kinds of experts, and prints the tables and the targets."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    for kind in options.only:
        sides = [
            start_side(side, partial(build, *FLAGS, *EXPERTS[kind], "--pipeline-schedule", side), ranks=STAGES)
            for side in (BASE, *OTHERS)
        ]
        rounds = run_rounds(sides, rounds=options.rounds, steps=1)
        print(f"\n{kind}:")
        relative = print_table(rounds, base=BASE)
        found = {side: [_figures(one, ScheduleKind(side)) for one in measured] for side, measured in rounds.items()}
        figures[kind] = {side: _medians(some, found[BASE]) for side, some in found.items()}
        for side in OTHERS:
            figures[kind][side] |= {"cpu": relative[side]["cpu x"], "peak": relative[side]["net x"]}
            targets += [
                Target(f"{kind}, {side}: passes above the list", figures[kind][side]["above the list"], 1.0),
                Target(f"{kind}, {side}: length, relative to 1F1B", figures[kind][side]["length"], 0.95),
            ]
        for side, some in figures[kind].items():
            print(f"{side}: " + ", ".join(f"{name} {value:.3f}" for name, value in some.items()))
    print()
    holds = report_targets(targets)
    if options.json is not None:
        record = {"figures": figures, "targets": [asdict(target) for target in targets], **context()}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not holds)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4, help="counted rounds per side (default: 4)")
    parser.add_argument("--only", nargs="+", default=[*EXPERTS], choices=[*EXPERTS], help="kinds (default: all)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def build(*flags: str) -> Callable[[], list[Pass]]:
    """Builds a training step that returns its passes."""
    run, link = build_run(*flags), OneLink()
    patch_counts_and_stages(link)
    found: list[Pass] = []
    run_passes, run_one = ScheduleRunner.run, ScheduleRunner._run

    def run_step_of(runner: ScheduleRunner, steps: Any) -> list[Any]:
        found.clear()
        link.restart(CpuClock())
        return run_passes(runner, steps)

    def run_pass(runner: ScheduleRunner, step: Action | Pair) -> None:
        assert link.clock is not None and isinstance(step, Action)
        start = link.clock.now()
        run_one(runner, step)
        found.append(Pass(step, start, link.clock.now()))

    patch.object(ScheduleRunner, "run", run_step_of).start()
    patch.object(ScheduleRunner, "_run", run_pass).start()

    def step() -> list[Pass]:
        run_step(run)
        return list(found)

    return step


def _figures(measured: Measurement, kind: ScheduleKind) -> Idle:
    stages: list[list[Pass]] = [steps[0] for steps in measured.results]
    schedule = Schedule(kind)
    pipeline = pipeline_of(schedule, STAGES, 2 if kind is ScheduleKind.ZBV else 1)
    orders = stage_orders(pipeline, NUM_MICROBATCHES, schedule)
    assert [[one.action for one in own] for own in stages] == orders, "the executed passes are those of the list"
    seconds = [_median_seconds(own) for own in stages]
    length = max(own[-1].end for own in stages) - min(own[0].start for own in stages)
    busy = [sum(one.end - one.start for one in own) for own in stages]
    spans = timeline(orders, pipeline, seconds=lambda stage, step: seconds[stage][_key(step.passes[0])])
    forwards, backwards = ([own[kind, 0] for own in seconds] for kind in (ActionKind.FORWARD, ActionKind.BACKWARD))
    if pipeline.is_v:
        bounds = [sum(forwards[:stage]) + busy[stage] for stage in range(STAGES)]
    else:
        bounds = [
            sum(forwards) + sum(backwards[stage + 1 :]) + busy[stage] - (STAGES - stage) * forwards[stage]
            for stage in range(STAGES)
        ]
    kinds = dict.fromkeys(kind for kind, _ in seconds[0])
    return Idle(
        {one.value: statistics.mean(own[key] for own in seconds for key in own if key[0] is one) for one in kinds},
        length,
        max(span.end for stage in spans for span in stage.values()),
        max(bounds),
        1 - sum(busy) / (length * STAGES),
    )


def _key(action: Action) -> tuple[ActionKind, int]:
    return action.kind, action.chunk


def _median_seconds(passes: Sequence[Pass]) -> dict[tuple[ActionKind, int], float]:
    """Returns the median duration of the passes of each kind and chunk."""
    found = defaultdict(list)
    for one in passes:
        found[_key(one.action)].append(one.end - one.start)
    return {key: statistics.median(some) for key, some in found.items()}


def _medians(steps: Sequence[Idle], base: Sequence[Idle]) -> dict[str, float]:
    found = {kind: 1e3 * statistics.median(step.passes[kind] for step in steps) for kind in steps[0].passes}
    found["idle"] = statistics.median(step.idle for step in steps)
    found["length"] = statistics.median(step.length / other.length for step, other in zip(steps, base, strict=True))
    found["length of the list"] = statistics.median(
        step.implied / other.implied for step, other in zip(steps, base, strict=True)
    )
    found["above the list"] = statistics.median(step.above_list for step in steps)
    found["above the bound"] = statistics.median(step.above_bound for step in steps)
    return found


if __name__ == "__main__":
    main()
