"""Measures implementations side by side: each side is a few single-threaded processes, and the sides step in turns.

Independent of the content of a step. While one side steps, the others wait. Ratios are computed per round, so that
drift of the machine cancels.
"""

import json
import multiprocessing
import os
import platform
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from benchmarks.source import commit_of_tree
from megatron.core.device import peak_memory_bytes

# A step of one rank. Its arguments, if it has any, and its result can be pickled.
Step = Callable[..., object]
# Builds the model on one rank and returns its step.
Build = Callable[[], Step]
# What a round measures of a side.
Figures = TypeVar("Figures")


@dataclass(frozen=True)
class Measurement:
    """Means over a round's steps in seconds, peak memory, and the results of the steps.

    peak_bytes: since the process started. results: of each rank, one for each step that returned something.
    """

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int
    results: list[list[Any]] = field(default_factory=list)


@dataclass
class Side:
    """The processes of one implementation."""

    name: str
    connections: list[Connection]
    processes: list[Any]

    def measure(self, steps: int, *arguments: object) -> Measurement:
        """Runs `steps` steps on all ranks and returns the measurement of the round. arguments: of each step.

        CPU seconds are summed over ranks. Time and memory are the worst rank's.
        """
        for connection in self.connections:
            connection.send((steps, arguments))
        ranks: list[Measurement] = [connection.recv() for connection in self.connections]
        return Measurement(
            cpu_seconds=sum(rank.cpu_seconds for rank in ranks),
            wall_seconds=max(rank.wall_seconds for rank in ranks),
            peak_bytes=max(rank.peak_bytes for rank in ranks),
            results=[of_rank for rank in ranks for of_rank in rank.results],
        )

    def stop(self) -> None:
        """Ends the side's processes."""
        for connection in self.connections:
            connection.send((0, ()))
        for process in self.processes:
            process.join()


def run_rounds(sides: list[Side], *, rounds: int, steps: int) -> dict[str, list[Measurement]]:
    """Measures `steps` steps of each side once per round, as run_measured_rounds does."""
    return run_measured_rounds(sides, rounds=rounds, measure=lambda side: side.measure(steps))


def run_measured_rounds(
    sides: list[Side], *, rounds: int, measure: Callable[[Side], Figures]
) -> dict[str, list[Figures]]:
    """Measures each side once per round, after a warm-up round, and ends the processes. Returns results by side.

    The order alternates between rounds, so that no side benefits from being first.
    """
    measured: dict[str, list[Figures]] = {side.name: [] for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else sides[::-1]:
            try:
                measurement = measure(side)
            except (EOFError, OSError) as error:
                raise RuntimeError(f"a rank of {side.name} ended in round {number}: see its error above") from error
            if number > 0:
                measured[side.name].append(measurement)
    for side in sides:
        side.stop()
    return measured


def ratios(ours: list[Measurement], plain: list[Measurement]) -> dict[str, float]:
    """Returns medians over the rounds of ours / plain, and for peaks the ratio of the last round."""
    return {
        "cpu x": statistics.median(o.cpu_seconds / p.cpu_seconds for o, p in zip(ours, plain, strict=True)),
        "wall x": statistics.median(o.wall_seconds / p.wall_seconds for o, p in zip(ours, plain, strict=True)),
        "net x": ours[-1].peak_bytes / plain[-1].peak_bytes,
    }


def print_table(measured: Mapping[str, list[Measurement]], *, base: str) -> dict[str, dict[str, float]]:
    """Prints medians of each side and ratios to the side `base`. Returns the ratios by side."""
    width = max(map(len, measured)) + 2
    columns = ("cpu s/step", "wall s/step", "peak MiB", "cpu x", "wall x", "net x")
    print(" " * width + "".join(f"{column:>13}" for column in columns))
    figures = {name: ratios(some, measured[base]) for name, some in measured.items()}
    for name, some in measured.items():
        cpu = statistics.median(m.cpu_seconds for m in some)
        wall = statistics.median(m.wall_seconds for m in some)
        shown = [f"{cpu:.3f}", f"{wall:.3f}", f"{some[-1].peak_bytes / 2**20:.0f}"]
        shown += [f"{value:.3f}" for value in figures[name].values()]
        print(f"{name:{width}}" + "".join(f"{value:>13}" for value in shown))
    return figures


def write_record(path: Path, figures: object, *, measured: Mapping[str, list[Measurement]]) -> None:
    """Writes results, rounds and conditions as JSON."""
    record = {"figures": figures, "rounds": {k: [asdict(m) for m in v] for k, v in measured.items()}, **context()}
    path.write_text(json.dumps(record, indent=1) + "\n")


def free_port() -> int:
    """Returns a TCP port on which no process listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_side(name: str, build: Build, *, ranks: int, packages: Sequence[str] = ()) -> Side:
    """Starts the ranks of one implementation. `build` must be importable, because processes are spawned.

    packages: imported before the memory baseline is taken, like torch.
    """
    context = multiprocessing.get_context("spawn")
    port = free_port()
    connections, processes = [], []
    for rank in range(ranks):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(build, theirs),
            kwargs={"rank": rank, "ranks": ranks, "port": port, "packages": packages},
            # Ends with this process, which may fail because of a different side.
            daemon=True,
        )
        process.start()
        connections.append(ours)
        processes.append(process)
    return Side(name, connections, processes)


def serve(
    build: Build, connection: Connection, *, rank: int, ranks: int, port: int, packages: Sequence[str] = ()
) -> None:
    """Runs one rank: builds the model, then runs the requested numbers of steps, until 0 of them are requested."""
    join_ranks(rank, ranks=ranks, port=port)
    for package in packages:
        import_module(package)
    baseline = peak_memory_bytes(torch.device("cpu"))
    step = build()
    while True:
        steps, arguments = connection.recv()
        if steps == 0:
            break
        cpu, wall = time.process_time(), time.perf_counter()
        results = [result for _ in range(steps) if (result := step(*arguments)) is not None]
        connection.send(
            Measurement(
                cpu_seconds=(time.process_time() - cpu) / steps,
                wall_seconds=(time.perf_counter() - wall) / steps,
                peak_bytes=peak_memory_bytes(torch.device("cpu")) - baseline,
                results=[results],
            )
        )
    dist.destroy_process_group()


def join_ranks(rank: int, *, ranks: int, port: int) -> None:
    """Sets this process up as a single-threaded rank, as torchrun would start it."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )


def context() -> dict[str, str]:
    """Returns the conditions of a measurement: date, device, torch version and commit."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "commit": commit_of_tree(),
    }
