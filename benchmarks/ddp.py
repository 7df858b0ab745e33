"""Compares this framework's data-parallel modes with torch's, on one model in one interleaved run.

    python benchmarks/ddp.py [--rounds 8] [--steps 3] [--only NAME ...] [--json FILE]

Model, batch and the two processes are the same as in train_step.py. The sides are the plain model under torch's DDP
(the base of all ratios), ZeroRedundancyOptimizer and FSDP2, and ours with all-reduce and with the distributed
optimizer, each with and without overlap. For our sides with overlap it also reports the time relative to the same mode
without overlap, and the share of hidden communication from the event log: communication that ran during backward,
relative to the largest possible amount (median over steps, worst rank).

Peaks are resident memory since the imports. Ours keeps freed memory in glibc's heap, including holes, like
pretrain_gpt.py. torch's sides return it to the kernel.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.plain_model import PlainConfig, PlainModel  # noqa: E402
from benchmarks.sides import (  # noqa: E402
    Build,
    Measurement,
    print_table,
    ratios,
    run_rounds,
    start_side,
    write_record,
)
from benchmarks.train_step import RANKS, build_ours, build_plain, build_run, plain_step  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.distributed.event_log import EventLog, hidden_share  # noqa: E402
from megatron.training.training import run_step  # noqa: E402

OVERLAP = ("--overlap-grad-reduce", "--ddp-bucket-size", "2000000")
SHARDED = ("--use-distributed-optimizer",)
# For each side with overlap, the same mode without overlap.
WITHOUT = {
    "ours, overlap": "ours",
    "ours, sharded, overlap": "ours, sharded",
    "ours, sharded, overlap, gather": "ours, sharded",
}


def main() -> None:
    """Measures the sides and prints the table."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    chosen = {name: build for name, build in builds().items() if not options.only or name in options.only}
    sides = [start_side(name, build, ranks=RANKS) for name, build in chosen.items()]
    measured = run_rounds(sides, rounds=options.rounds, steps=options.steps)
    figures = print_table(measured, base="plain DDP")
    for name, found in overlap_figures(measured).items():
        figures[name].update(found)
        print(f"{name}: " + ", ".join(f"{what} {value:.3f}" for what, value in found.items()))
    if options.json is not None:
        write_record(options.json, figures, measured=measured)


def builds() -> dict[str, Build]:
    """Returns the sides by name, the base first."""
    overlapped = (*SHARDED, *OVERLAP)
    return {
        "plain DDP": build_plain,
        "ZeroRedundancyOptimizer": build_zero_redundancy,
        "FSDP2": build_fsdp2,
        "ours": build_ours,
        "ours, overlap": partial(build_observed, *OVERLAP),
        "ours, sharded": partial(build_ours, *SHARDED),
        "ours, sharded, overlap": partial(build_observed, *overlapped),
        "ours, sharded, overlap, gather": partial(build_observed, *overlapped, "--overlap-param-gather"),
    }


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds per side (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps per round (default: 3)")
    parser.add_argument("--only", nargs="+", default=[], choices=[*builds()], help="sides to run, including the base")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    if options.only and "plain DDP" not in options.only:
        parser.error(f"--only is {options.only}: must include 'plain DDP', the base of the ratios")
    return options


def overlap_figures(measured: dict[str, list[Measurement]]) -> dict[str, dict[str, float]]:
    """Returns, for each side with overlap, the hidden share of the communication and the time ratios.

    CPU and wall time are relative to the same side without overlap.
    """
    figures: dict[str, dict[str, float]] = {}
    for name, without in WITHOUT.items():
        by_rank = [[rank for rank in one.results if rank] for one in measured.get(name, [])]
        shares = [min(map(statistics.median, ranks)) for ranks in by_rank if ranks]
        if shares:
            figures[name] = {"hidden of what fits": statistics.median(shares)}
            if without in measured:
                over = ratios(measured[name], measured[without])
                figures[name].update({f"{kind} of no overlap": over[kind] for kind in ("cpu x", "wall x")})
    return figures


def build_observed(*flags: str) -> Callable[[], float | None]:
    """Builds a step of this framework with an event log; it returns the share of communication that backward hides."""
    run = build_run(*flags)
    log = EventLog(run.device)
    for order in {chunk.launch_order for chunk in run.model if isinstance(chunk, DistributedDataParallel)}:
        order.observe(log)

    def step() -> float | None:
        # The recorded step begins when this step ends.
        log.record_next_step()
        run_step(run)
        noted = log.take_sync()
        return hidden_share(noted[-1]) if noted else None

    return step


def build_zero_redundancy() -> Callable[[], None]:
    """Builds torch's DDP with ZeroRedundancyOptimizer around fused AdamW."""
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    config = PlainConfig()
    model = torch.nn.parallel.DistributedDataParallel(PlainModel(config))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4, weight_decay=0.01, fused=True)
    return plain_step(model, optimizer, config=config)


def build_fsdp2() -> Callable[[], None]:
    """Builds torch's FSDP2, applied layer by layer, with fused AdamW on the shards."""
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    config = PlainConfig()
    model = PlainModel(config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    return plain_step(model, optimizer, config=config)


if __name__ == "__main__":
    main()
