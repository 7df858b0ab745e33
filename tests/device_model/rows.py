"""Runs of the training program on modelled GPUs: the rows of the capture table in docs/cuda_graphs.md, and others.

    PYTHONPATH=. .venv/bin/python -m tests.device_model.rows [--graphs none|full|local] [--waits] [NAME ...]

prints each row's alarms, and with --waits where the host waits.
"""

import argparse
import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.device_model.host import on_modelled_gpus
from tools.capture_configurations import CONFIGURATIONS

NUM_STEPS = 4
GRAPHS = {
    "none": [],
    "full": ["--cuda-graph-impl", "full_iteration", "--cuda-graph-warmup-steps", "2"],
    "local": ["--cuda-graph-impl", "local", "--cuda-graph-warmup-steps", "2", "--cuda-graph-modules"],
}


@dataclass
class Modelled:
    """A rank's record of a run on the modelled device. losses: of each step; failure: why there is no graph."""

    name: str
    losses: list[Any] = field(default_factory=list)
    alarms: list[str] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    num_graphs: int = 0
    failure: str | None = None
    num_launches: int = 0
    seconds: float = 0.0


def argv_of(name: str, graphs: str) -> list[str]:
    """Returns the command line of a row."""
    row = CONFIGURATIONS[name]
    return [*row.argv, *GRAPHS[graphs], *(row.modules.split() if graphs == "local" else [])]


def train(runs: Sequence[tuple[str, Sequence[str]]], num_steps: int = NUM_STEPS) -> list[Modelled]:
    """Trains command lines one after the other on this rank, and returns what the model found."""
    # Here and not above: a process that only starts others must not load the model.
    from megatron.training.training import train_step
    from tests.device_model.cuda_api import install
    from tests.distributed.tiny_runs import started_run

    device = install()
    found = []
    for name, argv in runs:
        record = Modelled(name)
        device.alarms.found.clear()
        device.host_wait_sites.clear()
        launches, began = device.num_launches, time.monotonic()
        with started_run(argv) as run:
            for _ in range(num_steps):
                record.losses.append(repr(run.measured(train_step(run)[0]).losses))
            graph = run.steps.graph
            if graph is not None:
                record.num_graphs, record.failure = graph.num_graphs, graph.failure
                graph.drop_graphs()
        record.alarms = [f"{count} x {alarm}" for alarm, count in device.alarms.found.items()]
        record.waits = dict(device.host_wait_sites)
        record.num_launches, record.seconds = device.num_launches - launches, time.monotonic() - began
        found.append(record)
    return found


def main() -> None:
    """Prints what the model finds in the rows that are named, or in all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--graphs", choices=list(GRAPHS), default="full")
    parser.add_argument("--waits", action="store_true")
    parser.add_argument("--more", default="", help="further flags, in one word")
    options = parser.parse_args()
    names = options.names or list(CONFIGURATIONS)
    for name in names:
        runs = [(name, [*argv_of(name, options.graphs), *options.more.split()])]
        try:
            results = on_modelled_gpus(train, CONFIGURATIONS[name].ranks, runs)
        except Exception as error:
            print(f"ERROR {name}: {str(error)[:1500]}", flush=True)
            continue
        for rank, (record,) in enumerate(results):
            print(
                f"{name} [{rank}]: {record.seconds:.1f} s, {record.num_launches} launches, {record.num_graphs} graphs, "
                f"{record.failure or ''} {record.losses[-1]}",
                flush=True,
            )
            for alarm in record.alarms:
                print(f"    {alarm}")
            for wait, count in record.waits.items() if options.waits else ():
                print(f"    waits {count} x {wait}")


if __name__ == "__main__":
    # By its full name, so that ranks find `train`.
    importlib.import_module("tests.device_model.rows").main()
