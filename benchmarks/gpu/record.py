"""Functions shared by all GPU benchmarks: targets, the results file, and a busy GPU. Measures nothing."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.sides import context
from megatron.core.device import default_device, device_name

CYCLES_PER_SECOND = 2e9  # approximate clock of a GPU


@dataclass(frozen=True)
class Target:
    """A measured value and its limit. is_least: the limit is a minimum. measured: None if it was not measured."""

    name: str
    measured: float | None
    limit: float
    is_least: bool = False

    @property
    def holds(self) -> bool:
        """Whether the value was measured and satisfies the limit."""
        if self.measured is None:
            return False
        return self.measured >= self.limit if self.is_least else self.measured <= self.limit

    def __str__(self) -> str:
        measured = "not measured" if self.measured is None else f"{self.measured:.3f}"
        sign = ">=" if self.is_least else "<="
        return f"{'PASS' if self.holds else 'FAIL'}  {self.name}: {measured}, must be {sign} {self.limit:.3f}"


def benchmark_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options common to GPU benchmarks. rounds: default of --rounds."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"counted rounds per case (default: {rounds})")
    parser.add_argument("--small", action="store_true", help="tiny sizes without targets, also on the CPU")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="also draw the results to this file")
    return parser


def require_device(options: argparse.Namespace) -> torch.device:
    """Returns this process's device. Exits without a GPU, unless the sizes are small."""
    device = default_device()
    if device.type == "cpu" and not options.small:
        sys.exit(f"{sys.argv[0]} requires a GPU; test the program with --small")
    return device


def figures_of_target(target: Target) -> dict[str, Any]:
    """Returns a target as values of a result."""
    return {**asdict(target), "holds": target.holds}


def report_targets(targets: Sequence[Target]) -> bool:
    """Prints a line for each target and returns whether all hold."""
    for target in targets:
        print(target)
    return all(target.holds for target in targets)


def write_record(
    path: Path | None, figures: Mapping[str, Any], *, device: torch.device, targets: Sequence[Target]
) -> None:
    """Writes results, targets and conditions as JSON. Does nothing if `path` is None."""
    if path is None:
        return
    where = {**context(), "device": device_name(device)}
    shown = [figures_of_target(target) for target in targets]
    path.write_text(json.dumps({**where, "targets": shown, **figures}, indent=1) + "\n")


def hold(device: torch.device, seconds: float) -> None:
    """Keeps the GPU's current stream busy, so that the host's subsequent launches run without gaps."""
    if device.type != "cpu":
        torch.get_device_module(device)._sleep(int(seconds * CYCLES_PER_SECOND))
