"""Compares training steps with fixed-size expert buffers, a stash and a CUDA graph with eager dropless steps.

    python benchmarks/gpu/graph_step.py [--rounds 3] [--steps 3] [--json FILE] [--plot FILE.svg] [--shapes NAME ...]
    python benchmarks/gpu/graph_step.py --small     # a tiny shape, also on the CPU, with a tape instead of a graph

Each side is a process that trains with flags of pretrain_gpt.py, as rank 0 of 8 whose other ranks are stand-ins (see
stand_ins.py). Its routing is forced: balanced, or skewed towards this rank, and different in every step. Sides
share the GPU's memory and take turns. If not all fit, they run in groups, each including the base.

ms       device time of a step, median
time x   relative to the eager dropless step, median over rounds
MiB      peak of torch's allocator since the process started; reserved: peak allocated from the device
memory x peak relative to dropless, both without the bytes that dropless allocates between steps (weights, gradients,
         states)
at most  (phi + w c / S), which memory x must not exceed: phi is pages over live rows, w is 1 + prefetched layers, c is
         capacity over live rows, and S is the number of layers
recomputed, on host, discarded: recomputed tensors, pages on the host, and discarded attempts in the last step

Sides that fail, for example for lack of memory, are named, and the exit status is 1. Has not been run on a GPU yet.
"""

import argparse
import os
import statistics
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.chart import Kind, Panel, drawing  # noqa: E402
from benchmarks.gpu.record import Target, benchmark_parser, report_targets, require_device, write_record  # noqa: E402
from benchmarks.gpu.shapes import (  # noqa: E402
    BASE,
    CAPACITY,
    PREFETCH,
    RANKS,
    ROUTINGS,
    SHAPES,
    SMALL,
    Routing,
    Shape,
    Side,
    sides_of,
)
from benchmarks.gpu.stand_ins import TABLES, Choices, ForcedRouting, join_stand_ins, shares_of_layers  # noqa: E402
from benchmarks.train_step import build_run  # noqa: E402
from megatron.core.device import default_device, mark_time, memory_bytes, seconds_between  # noqa: E402
from megatron.core.full_cuda_graph import FullCudaGraphWrapper  # noqa: E402
from megatron.core.graphs.tape import TapeGraphs  # noqa: E402
from megatron.core.transformer.moe.moe_layer import MoELayer  # noqa: E402
from megatron.core.transformer.moe.paged_stash import Counter  # noqa: E402
from megatron.training import setup  # noqa: E402
from megatron.training.run import TrainingRun  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

TIME_TARGET = 0.75
WARM_STEPS = 5  # including a graph's warm-up steps and its capture
MOST_ROWS = 0.95  # fraction of a buffer, so that no step is discarded
PATIENCE_SECONDS = 180
PRELOAD = ["benchmarks.train_step", "benchmarks.gpu.stand_ins"]


@dataclass(frozen=True)
class Case:
    """A shape combined with a routing."""

    name: str
    shape: Shape
    routing_name: str

    @property
    def routing(self) -> Routing:
        """Distribution of the rows."""
        return ROUTINGS[self.routing_name]

    def __str__(self) -> str:
        return f"{self.name}, {self.routing_name}"


@dataclass(frozen=True)
class Measurement:
    """Times and memory of a side's steps.

    seconds: time of each step. peak, reserved: peak bytes allocated and reserved. held: bytes allocated between steps.
    again, on_host, voids: stash counters of the last step.
    """

    seconds: list[float]
    peak: int
    reserved: int
    held: int
    again: int = 0
    on_host: int = 0
    voids: int = 0


@dataclass
class Process:
    """A side's process and its results so far. error: reason why there are no further results."""

    name: str
    process: Any
    connection: Connection
    rounds: list[Measurement]
    error: str | None = None

    def ask(self, steps: int) -> None:
        """Requests this number of steps, or the end for 0. `take` returns the result."""
        if self.error is None:
            try:
                self.connection.send(steps)
            except OSError as error:
                self.error = f"its process has ended: {error}"

    def take(self) -> Measurement | None:
        """Returns the next result, or None if there will be none, including after a timeout."""
        if self.error is not None:
            return None
        try:
            answer = self.connection.recv() if self.connection.poll(PATIENCE_SECONDS) else "no answer in time"
        except EOFError:
            answer = "its process ended without an answer"
        if isinstance(answer, Measurement):
            return answer
        self.error = str(answer)
        self.process.terminate()
        return None


def main() -> None:
    """Measures, prints and writes the results. Exits with status 1 if a target is missed or a side fails."""
    options = parse_options()
    device = require_device(options)
    records, targets = [], []
    for case in cases_of(options):
        record = record_of(case, rounds=options.rounds, steps=options.steps)
        print_case(case, record)
        records.append(record)
        # The CPU does not count allocations, and the limit is not meaningful for steps of this size.
        targets += [] if options.small else targets_of(case, record)
        # After each case, so that an interrupted run loses only the current case.
        write_record(options.json, {"cases": records}, device=device, targets=targets)
    if options.plot is not None:
        options.plot.write_text(plot(records))
    failed = [line for record in records for line in record["sides"].values() if "error" in line]
    sys.exit(not report_targets(targets) or len(failed) > 0)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Returns the cases that the command line selects."""
    shapes = SMALL if options.small else {name: SHAPES[name] for name in options.shapes}
    return [Case(name, shape, routing) for name, shape in shapes.items() for routing in options.routings]


def record_of(case: Case, *, rounds: int, steps: int) -> dict[str, Any]:
    """Measures all sides of a case and returns their results."""
    sides = sides_of(case.routing)
    lines: dict[str, dict[str, Any]] = {}
    for batch in batches(sides, at_once=case.shape.at_once):
        processes = measure(case, batch, rounds=rounds, steps=steps)
        lines = {**lines_of(case, batch, processes=processes), **lines}
    # The terms of the memory limit, and the distribution of rows.
    settings = {"c": CAPACITY, "w": 1 + PREFETCH, "S": case.shape.layers, **asdict(case.routing)}
    ordered = {name: lines[name] for name in sides}
    return {"case": str(case), "shape": asdict(case.shape), "settings": settings, "sides": ordered}


def batches(sides: Mapping[str, Side], *, at_once: int) -> list[dict[str, Side]]:
    """Splits the sides into groups that fit into memory, each including the base."""
    others = [name for name in sides if name != BASE]
    starts = range(0, len(others), at_once - 1)
    return [{name: sides[name] for name in (BASE, *others[start : start + at_once - 1])} for start in starts]


def measure(case: Case, sides: Mapping[str, Side], *, rounds: int, steps: int) -> list[Process]:
    """Starts the processes of these sides, lets them train in turns, and ends them."""
    processes = [start(name, case, flags=side.flags) for name, side in sides.items()]
    for process in processes:
        process.take()
    for number in range(rounds + 1):
        # The order alternates, so that no side has an advantage.
        for process in processes if number % 2 else processes[::-1]:
            process.ask(steps)
            measurement = process.take()
            if measurement is not None and number > 0:
                process.rounds.append(measurement)
    for process in processes:
        process.ask(0)
    for process in processes:
        process.process.join()
    return processes


def start(name: str, case: Case, *, flags: str) -> Process:
    """Starts the process of one side."""
    context = get_context("forkserver")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, case), kwargs={"flags": flags}, daemon=True)
    process.start()
    theirs.close()
    return Process(name, process, ours, [])


def serve(connection: Connection, case: Case, *, flags: str) -> None:
    """Builds and warms up the side, then runs the requested numbers of steps until 0 arrives. Sends errors as text."""
    torch.set_num_threads(1)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            run, routing = build(case, flags)
            warm = run_steps(run, routing, steps=WARM_STEPS)
            check_graph(run)
            connection.send(warm)
            while steps := connection.recv():
                connection.send(run_steps(run, routing, steps=steps))
    except (RuntimeError, ValueError, OSError, AssertionError, SystemExit) as error:
        traceback.print_exc()
        connection.send(f"{type(error).__name__}: {str(error)[:500]}")


def build(case: Case, flags: str) -> tuple[TrainingRun, ForcedRouting]:
    """Builds the run that pretrain_gpt.py would train, and the routing that its routers follow."""
    join_stand_ins(RANKS)
    if default_device().type == "cpu":
        setup.graph_device = TapeGraphs
    run = build_run(*case.shape.flags.split(), *flags.split())
    routers = [layer.router for chunk in run.model for layer in chunk.modules() if isinstance(layer, MoELayer)]
    return run, ForcedRouting(routers, tables_of(case).to(run.device))


def check_graph(run: TrainingRun) -> None:
    """Raises RuntimeError if steps that should replay a graph do not, because a run would continue without it."""
    graph = run.steps.graph
    if isinstance(graph, FullCudaGraphWrapper) and (graph.failure is not None or graph.num_graphs == 0):
        raise RuntimeError(f"no graph was captured in {WARM_STEPS} steps: {graph.failure}")


def tables_of(case: Case) -> torch.Tensor:
    """Returns the expert choices of all layers for each routing, which steps cycle through.

    The result is [TABLES, layers, T, K], int64.
    """
    shape, routing, generator = case.shape, case.routing, torch.Generator().manual_seed(1)
    choices = Choices(shape.seq, shape.topk, shape.num_experts, num_own=shape.num_own, unevenness=routing.unevenness)
    most = MOST_ROWS * min(CAPACITY, RANKS * shape.num_own / shape.topk)
    turns = [
        shares_of_layers(shape.layers, mean=routing.mean, spread=routing.spread, most=most, generator=generator)
        for _ in range(TABLES)
    ]
    return torch.stack([torch.stack([choices.draw(share, generator) for share in shares]) for shares in turns])


def run_steps(run: TrainingRun, routing: ForcedRouting, *, steps: int) -> Measurement:
    """Runs and measures training steps. A step ends at the device's position when the host has finished the step."""
    marks = [mark_time(run.device)]
    for _ in range(steps):
        routing.advance()
        run_step(run)
        marks.append(mark_time(run.device))
    seconds = [seconds_between(*pair) for pair in zip(marks, marks[1:])]
    memory = memory_bytes(run.device)
    peak = memory.get("max_allocated", memory["peak_rss"])
    measured = Measurement(seconds, peak, memory.get("max_reserved", peak), memory.get("allocated", 0))
    step = None if run.expert_memory is None else run.expert_memory.last_step
    if step is None or step.layout is None:
        return measured
    again = step.counters[Counter.DROPPED_ACT] + step.counters[Counter.DROPPED_GATE_UP]
    return replace(measured, again=again, on_host=step.counters[Counter.SPILLED_PAGES], voids=step.num_discards)


def lines_of(case: Case, sides: Mapping[str, Side], *, processes: Sequence[Process]) -> dict[str, dict[str, Any]]:
    """Returns the results of sides that were measured together, or only the error of sides that failed."""
    base = next(process for process in processes if process.name == BASE)
    lines: dict[str, dict[str, Any]] = {}
    for process in processes:
        if process.error is not None or base.error is not None:
            lines[process.name] = {"error": process.error or f"{BASE} failed"}
            continue
        side = sides[process.name]
        lines[process.name] = {
            "label": side.label,
            "flags": side.flags,
            "most_memory_x": side.most_memory(case.shape, case.routing),
            **figures_of(process.rounds, base.rounds),
            "rounds": [asdict(one) for one in process.rounds],
        }
    return lines


def figures_of(own: Sequence[Measurement], base: Sequence[Measurement]) -> dict[str, float]:
    """Returns medians over the steps and rounds, and ratios to the base."""
    medians = [[statistics.median(one.seconds) for one in rounds] for rounds in (own, base)]
    kept = max(one.held for one in base)
    return {
        "ms": 1e3 * statistics.median(seconds for one in own for seconds in one.seconds),
        "time_x": statistics.median(ours / theirs for ours, theirs in zip(*medians, strict=True)),
        "peak_mib": own[-1].peak / 2**20,
        "reserved_mib": own[-1].reserved / 2**20,
        "total_memory_x": own[-1].peak / base[-1].peak,
        "memory_x": (own[-1].peak - kept) / max(1, base[-1].peak - kept),
        "again": max(one.again for one in own),
        "on_host": max(one.on_host for one in own),
        "voids": max(one.voids for one in own),
    }


def targets_of(case: Case, record: Mapping[str, Any]) -> list[Target]:
    """Returns the time target of the graph with a stash, for launch-bound shapes, and its memory target."""
    line = record["sides"].get("graph + stash", {})
    found = []
    if case.shape.is_launch_bound:
        found.append(Target(f"{case}: graph + stash / eager dropless, time", line.get("time_x"), TIME_TARGET))
    settings = record["settings"]
    name = f"{case}: graph + stash / eager dropless, memory, S {settings['S']}, w {settings['w']}"
    limit = sides_of(case.routing)["graph + stash"].most_memory(case.shape, case.routing)
    assert limit is not None, "the side uses a stash"
    return [*found, Target(name, line.get("memory_x"), limit)]


def print_case(case: Case, record: Mapping[str, Any]) -> None:
    """Prints the table of one case."""
    print(f"\n{case}: {case.shape.seq} tokens x {case.shape.microbatches}, S {case.shape.layers}, c {CAPACITY:g}")
    columns = ("ms", "time x", "MiB", "reserved", "memory x", "at most", "recomputed", "on host", "discarded")
    print(
        " " * 26
        + "".join(f"{column:>9}" for column in columns[:6])
        + "".join(f"{column:>11}" for column in columns[6:])
    )
    for name, line in record["sides"].items():
        if "error" in line:
            print(f"{name:26} FAILED: {line['error']}")
            continue
        limit = "" if line["most_memory_x"] is None else f"{line['most_memory_x']:.2f}"
        print(
            f"{name:26}{line['ms']:9.1f}{line['time_x']:9.3f}{line['peak_mib']:9.0f}{line['reserved_mib']:9.0f}"
            f"{line['memory_x']:9.3f}{limit:>9}{line['again']:11}{line['on_host']:11}{line['voids']:11}",
            flush=True,
        )


def plot(records: Sequence[Mapping[str, Any]]) -> str:
    """Draws a panel for each case with the time and memory of its sides."""
    panels = []
    for record in records:
        lines = [line for line in record["sides"].values() if "error" not in line]
        series = {
            "time / eager dropless": [line["time_x"] for line in lines],
            "memory in addition to weights and states / eager dropless": [line["memory_x"] for line in lines],
        }
        labels = [line["label"] for line in lines]
        panels.append(Panel(record["case"], "", labels, series, kind=Kind.BARS, limit=1.0))
    return drawing("Training steps relative to eager dropless steps", panels)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = benchmark_parser(__doc__, rounds=3)
    parser.add_argument("--steps", type=int, default=3, help="steps per round (default: 3)")
    parser.add_argument(
        "--shapes", nargs="+", default=[*SHAPES], choices=[*SHAPES], help="shapes to measure (default: all)"
    )
    parser.add_argument(
        "--routings", nargs="+", default=[*ROUTINGS], choices=[*ROUTINGS], help="routings to measure (default: all)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    get_context("forkserver").set_forkserver_preload(PRELOAD)
    main()
