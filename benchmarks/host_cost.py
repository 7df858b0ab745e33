"""Measures the host cost of GPU training steps without a GPU: Python calls, operators, Triton launches and CPU time.

    python benchmarks/host_cost.py [--sides NAME ...] [--rounds 30] [--functions 20] [--json FILE]

Real Triton launchers run against a stub of libcuda (stub_gpu.py), on a tiny bf16 model with routers, experts and
attention like Qwen3's. Every column is the cost of one layer and micro-batch, forward and backward, with its share of a
step's other work for a layer: the difference between steps with 4 and 2 layers, over 2 layers and 4 micro-batches.

calls    calls that Python's profiler counts, of Python functions and of C functions
Python   the same, of Python functions only
launches kernels launched through Triton
ops      operators that torch's profiler records, nested ones included
CPU ms   CPU time of a process with one thread, fastest step of --rounds

Counts repeat exactly. --functions lists the functions with the most calls. Needs Triton and a C compiler.
"""

import argparse
import cProfile
import gc
import json
import os
import pstats
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.graph_step import Case, started_side  # noqa: E402
from benchmarks.gpu.shapes import BALANCED, DROPLESS, PLAIN, SMALL, STATIC, Side  # noqa: E402
from benchmarks.sides import context  # noqa: E402
from benchmarks.stub_gpu import build_stub, missing_requirement, stub_gpu  # noqa: E402

LAYERS = (2, 4)
MICROBATCHES = 4
WARM_STEPS = 4
SHAPE = replace(SMALL, microbatches=MICROBATCHES, seq=32, extra="--bf16 --no-check-for-nan-in-loss-and-grad")
_STASH, _PAGES = "eager static + stash", "eager static + stash, pages"
IN_8_BITS = "--fp8-format e4m3 --fp8-recipe mxfp8"
# Name -> side of graph_step.py, and further flags. stash: rows are copied into pages; pages: experts compute in them.
SIDES = {
    "plain": (PLAIN, ""),
    "dropless": (DROPLESS, ""),
    "static": (STATIC, ""),
    "stash": (_STASH, ""),
    "pages": (_PAGES, ""),
    "8 bits": (STATIC, IN_8_BITS),
    "8 bits, stash": (_STASH, IN_8_BITS),
    "8 bits, pages": (_PAGES, f"{IN_8_BITS} --moe-paged-stash-page-size 48"),
}


@dataclass(frozen=True)
class StepCost:
    """Host cost of one step, or of one layer and micro-batch of a step.

    calls: calls of Python functions and of C functions. functions: number of calls of each function, by its place.
    operators, cpu_ms: None if steps were not timed.
    """

    calls: float
    python_calls: float
    launches: float
    operators: float | None = None
    cpu_ms: float | None = None
    functions: Mapping[str, float] = field(default_factory=dict, repr=False)


def main() -> None:
    """Measures the requested sides, prints the table, and writes the results."""
    options = parse_options()
    missing = missing_requirement()
    if missing is not None:
        sys.exit(f"{sys.argv[0]}: {missing}")
    found = measure(options.sides, rounds=options.rounds, folder=options.cache)
    print_costs(found)
    for name, cost in found.items():
        if options.functions:
            print_functions(name, cost, number=options.functions)
    if options.json is not None:
        write_costs(options.json, found)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", default=[*SIDES], choices=[*SIDES], help="sides (default: all)")
    parser.add_argument("--rounds", type=int, default=30, help="timed steps (default: 30); 0 only counts")
    parser.add_argument("--functions", type=int, default=0, metavar="N", help="list the N most called functions")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    cache = Path(tempfile.gettempdir()) / f"megatron_stub_gpu_{os.getuid()}"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of compiled kernels (default: %(default)s)")
    return parser.parse_args()


def measure(sides: Sequence[str], *, rounds: int, folder: Path) -> dict[str, StepCost]:
    """Measures the cost of one layer and micro-batch of each side. Every number of layers has a process of its own.

    rounds: timed steps; 0 only counts. folder: for the stub and compiled kernels.
    """
    build_stub(folder)
    found = {}
    for side in sides:
        if rounds:
            steps = [receive(start(side, layers, rounds), side) for layers in LAYERS]
        else:
            # Counts do not depend on what else the machine does.
            started = [start(side, layers, rounds) for layers in LAYERS]
            steps = [receive(connection, side) for connection in started]
        found[side] = difference(*steps)
    return found


def start(side: str, layers: int, rounds: int) -> Connection:
    """Starts the process of one side and number of layers. Returns the connection that its StepCost comes from."""
    # Forked, because imports take longer than steps. This process has run nothing that a fork could break.
    spawner = get_context("fork")
    ours, theirs = spawner.Pipe()
    spawner.Process(target=serve, args=(theirs, side, layers, rounds), daemon=True).start()
    theirs.close()
    return ours


def receive(connection: Connection, side: str) -> StepCost:
    """Waits for a process's result."""
    try:
        cost: StepCost = connection.recv()
    except EOFError:
        raise RuntimeError(f"{side}: its process failed with the error above") from None
    return cost


def serve(connection: Connection, side: str, layers: int, rounds: int) -> None:
    """Measures steps of one side in a process of its own, and sends the StepCost."""
    torch.set_num_threads(1)
    case = Case("host cost", replace(SHAPE, layers=layers), BALANCED)
    with ExitStack() as stack:
        count_launches = stack.enter_context(stub_gpu())
        with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
            step = stack.enter_context(started_side(case, side_of(case, side))).step
        for _ in range(WARM_STEPS):
            step()
        connection.send(cost_of(step, count_launches, rounds=rounds))


def side_of(case: Case, name: str) -> Side:
    """Returns a side of SIDES for a case."""
    base, more = SIDES[name]
    side = case.sides[base]
    return replace(side, flags=f"{side.flags} {more}") if more else side


def cost_of(step: Callable[[], None], count_launches: Callable[[], int], *, rounds: int) -> StepCost:
    """Returns the cost of one step. rounds: timed steps; 0 also skips operators, whose profile takes half the time."""
    before = count_launches()
    profiler = cProfile.Profile()
    # A collection would call finalizers of objects that earlier steps left.
    gc.collect()
    gc.disable()
    profiler.runcall(step)
    gc.enable()
    launches = count_launches() - before
    functions: Counter[str] = Counter()
    python_calls = 0
    stats: Any = pstats.Stats(profiler)
    for (path, line, name), (_, calls, *_) in stats.stats.items():
        is_python = path != "~"
        python_calls += calls if is_python else 0
        functions[f"{os.path.relpath(path, ROOT)}:{line} {name}" if is_python else name] += calls
    cost = StepCost(stats.total_calls, python_calls, launches, functions=functions)
    if not rounds:
        return cost
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as recorded:
        step()
    operators = sum(event.count for event in recorded.key_averages())
    seconds = []
    for _ in range(rounds):
        begun = time.process_time()
        step()
        seconds.append(time.process_time() - begun)
    return replace(cost, operators=operators, cpu_ms=1e3 * min(seconds))


def difference(few: StepCost, many: StepCost) -> StepCost:
    """Returns the cost of one layer and micro-batch from the costs of steps with the numbers of layers in LAYERS."""
    units = (LAYERS[1] - LAYERS[0]) * MICROBATCHES

    def per_unit(few: float | None, many: float | None) -> float | None:
        return None if few is None or many is None else (many - few) / units

    names = {**few.functions, **many.functions}
    return StepCost(
        calls=(many.calls - few.calls) / units,
        python_calls=(many.python_calls - few.python_calls) / units,
        launches=(many.launches - few.launches) / units,
        operators=per_unit(few.operators, many.operators),
        cpu_ms=per_unit(few.cpu_ms, many.cpu_ms),
        functions={name: (many.functions.get(name, 0) - few.functions.get(name, 0)) / units for name in names},
    )


def print_costs(costs: Mapping[str, StepCost]) -> None:
    """Prints the costs as a table."""
    columns = {"calls": "calls", "Python": "python_calls", "launches": "launches", "ops": "operators"}
    print(f"{'layer and micro-batch':22}" + "".join(f"{column:>10}" for column in (*columns, "CPU ms")))
    for name, cost in costs.items():
        counts = [getattr(cost, attribute) for attribute in columns.values()]
        shown = ["" if count is None else f"{count:.0f}" for count in counts]
        shown.append("" if cost.cpu_ms is None else f"{cost.cpu_ms:.2f}")
        print(f"{name:22}" + "".join(f"{text:>10}" for text in shown))


def print_functions(name: str, cost: StepCost, *, number: int) -> None:
    """Prints the functions with the most calls."""
    print(f"\n{name}: calls per layer and micro-batch")
    for function, calls in sorted(cost.functions.items(), key=lambda item: -item[1])[:number]:
        print(f"{calls:8.2f} {function}")


def write_costs(path: Path, costs: Mapping[str, StepCost]) -> None:
    """Writes the costs and the conditions of the measurement as JSON, without the functions."""
    import triton

    figures = {name: asdict(cost) for name, cost in costs.items()}
    for figure in figures.values():
        del figure["functions"]
    conditions = {**context(), "triton": triton.__version__, "python": sys.version.split()[0]}
    path.write_text(json.dumps({**conditions, "layer_and_microbatch": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
