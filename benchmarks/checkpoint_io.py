"""Compares the speed of checkpoints with torch.save and torch.load of the same bytes, and measures how much a
concurrent save slows down training steps.

    python benchmarks/checkpoint_io.py [--rounds 8] [--megabytes 240] [--steps 12] [--folder DIR] [--json FILE]

Runs one process with one training thread. Sides are interleaved round by round and alternate in which one runs first.
Results are medians of wall time. Both saves end with the bytes on disk (fsync). Loads are from the page cache, and from
disk after the kernel was asked to drop the file. Our load verifies every byte before it changes anything, and fills
existing tensors; torch.load creates new tensors.

Then measures series of training steps, half of them with a save that starts before the first step. Reports the
additional time, including the copy made in the first step, relative to a series without a save. Also reports the
processor time of the training thread, which depends less on other programs on the machine.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.record import Target, report_targets, write_record  # noqa: E402
from megatron.core.device import prepare_device  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor, StagingMemory, begin_save, load_items, save_items  # noqa: E402

BANDWIDTH_TARGET = 0.8  # relative to torch.save
SLOWDOWN_TARGET = 0.05  # relative to steps without a save
_TENSORS = 60
Times = dict[str, list[float]]


def main() -> None:
    """Measures, prints the table, and exits with status 1 if a target is missed."""
    options = parse_options()
    torch.set_num_threads(1)
    prepare_device(torch.device("cpu"))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        rows = measure_files(Path(folder), megabytes=options.megabytes, rounds=options.rounds)
        steps = measure_steps(Path(folder), megabytes=options.megabytes, steps=options.steps, rounds=options.rounds)
    medians = {name: statistics.median(times) for name, times in rows.items()}
    for name, seconds in medians.items():
        print(f"{name:28} {seconds:8.3f} s {options.megabytes / 1e3 / seconds:8.2f} GB/s")
    for name, times in steps.items():
        print(f"{name:40} {statistics.median(times):8.3f} s")
    targets = [
        Target(
            f"{what}: bandwidth to torch.save's",
            medians["torch save"] / medians[f"ours {what}"],
            BANDWIDTH_TARGET,
            True,
        )
        for what in ("save", "load", "load from disk")
    ]
    for clock in ("wall", "processor"):
        beside, alone = (
            statistics.median(steps[f"{kind}, {clock}"]) for kind in ("steps beside a save", "steps alone")
        )
        targets.append(Target(f"steps beside a save, {clock} time: slowdown", beside / alone - 1, SLOWDOWN_TARGET))
    holds = report_targets(targets)
    figures = {"megabytes": options.megabytes, "rounds": options.rounds, "seconds": {**medians, **_medians(steps)}}
    write_record(options.json, figures, device=torch.device("cpu"), targets=targets)
    sys.exit(0 if holds else 1)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds per side (default: 8)")
    parser.add_argument("--megabytes", type=int, default=240, help="size of the state (default: 240)")
    parser.add_argument("--steps", type=int, default=12, help="training steps in a series (default: 12)")
    parser.add_argument("--folder", type=Path, help="folder on the disk to measure (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def measure_files(folder: Path, *, megabytes: int, rounds: int) -> Times:
    """Measures the seconds of each round of each side."""
    width = int((megabytes * 1e6 / 4 / _TENSORS) ** 0.5)
    tensors = {f"layers.{index}.weight": torch.randn(width, width) for index in range(_TENSORS)}
    state = [ShardedTensor.whole(name, tensor) for name, tensor in tensors.items()]
    file, ours = folder / "plain.pt", folder / "ours"

    def torch_save() -> None:
        with open(file, "wb") as stream:
            torch.save(tensors, stream)
            stream.flush()
            os.fsync(stream.fileno())

    sides: dict[str, Callable[[], object]] = {
        "torch save": torch_save,
        "ours save": lambda: save_items(state, ours, common={}),
        "torch load": lambda: torch.load(file, weights_only=True),
        "ours load": lambda: load_items(state, ours),
        "torch load from disk": lambda: torch.load(file, weights_only=True),
        "ours load from disk": lambda: load_items(state, ours),
    }
    times: Times = {name: [] for name in sides}
    names = list(sides)
    swapped = [name for pair in zip(names[1::2], names[::2], strict=True) for name in pair]
    for number in range(rounds + 1):
        # The second side of a pair runs on a disk and memory that the first has just used, so each side runs in
        # both positions.
        for name in names if number % 2 else swapped:
            if name.endswith("save"):
                # Neither side overwrites its previous files or waits for another side's pending writes.
                file.unlink(missing_ok=True) if name == "torch save" else shutil.rmtree(ours, ignore_errors=True)
                os.sync()
            if name.endswith("disk"):
                drop_from_cache([file, *ours.iterdir()])
            begin = time.perf_counter()
            sides[name]()
            if number > 0:  # the first round warms up
                times[name].append(time.perf_counter() - begin)
    return times


def drop_from_cache(files: list[Path]) -> None:
    """Asks the kernel to drop the files from the page cache."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def measure_steps(folder: Path, *, megabytes: int, steps: int, rounds: int) -> Times:
    """Measures the seconds of series of steps, alone and during a save, and of the copy and the whole save."""
    width = int((megabytes * 1e6 / 4 / 3 / 8) ** 0.5)  # weights and two moments of eight layers
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    inputs, staging = torch.randn(96, width), StagingMemory()

    def step() -> None:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()

    step()
    state = [ShardedTensor.whole(name, param.detach()) for name, param in model.named_parameters()]
    for index, param in enumerate(model.parameters()):
        state += [
            ShardedTensor.whole(f"{name}.{index}", optimizer.state[param][name]) for name in ("exp_avg", "exp_avg_sq")
        ]
    kinds = ("steps alone", "steps beside a save")
    times: Times = {f"{kind}, {clock}": [] for kind in kinds for clock in ("wall", "processor")}
    times |= {"copy of the state": [], "save beside steps": []}
    for number in range(rounds + 1):
        for kind in kinds:
            wall, processor = time.perf_counter(), time.thread_time()
            pending = begin_save(state, folder / "beside", common={}, staging=staging) if kind == kinds[1] else None
            copied = time.perf_counter()
            for _ in range(steps):
                step()
            seconds = time.perf_counter() - wall, time.thread_time() - processor
            if pending is not None:
                pending.finish()
            if number > 0:
                times[f"{kind}, wall"].append(seconds[0])
                times[f"{kind}, processor"].append(seconds[1])
                if pending is not None:
                    times["copy of the state"].append(copied - wall)
                    times["save beside steps"].append(time.perf_counter() - wall)
            os.sync()
    return times


def _medians(times: Times) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
