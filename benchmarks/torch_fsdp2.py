"""Compares TorchFullyShardedDataParallel with plain fully_shard and torch's AdamW, on one model in one run.

    python benchmarks/torch_fsdp2.py [--ranks 2] [--rounds 5] [--steps 2] [--json FILE]

Model, losses and clipping are the same as in fused_adam.py: 52 million parameters, fp32, single-threaded gloo
processes, sharded layer by layer. Sides are interleaved round by round. Reports the processor time of all ranks, and
the worst rank's wall time and peak resident memory since the imports. The targets come last, each PASS or FAIL. The
exit status is 1 if one fails.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.fused_adam import RATES, build_fsdp2, build_model, loss_of  # noqa: E402
from benchmarks.gpu.record import Target, report_targets  # noqa: E402
from benchmarks.sides import Build, context, print_table, run_rounds, start_side  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    TorchFullyShardedDataParallel,
    TorchFullyShardedDataParallelConfig,
)
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

BASE, OURS, KEPT = "plain fully_shard", "ours", "ours, not resharded after forward"
LIMITS = {"cpu x": 1.02, "wall x": 1.02, "net x": 1.02}


def main() -> None:
    """Measures the sides, and prints the table and the targets."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    builds: dict[str, Build] = {
        BASE: build_fsdp2,
        OURS: build_ours,
        KEPT: partial(build_ours, reshard_after_forward=False),
    }
    sides = [start_side(name, build, ranks=options.ranks) for name, build in builds.items()]
    measured = run_rounds(sides, rounds=options.rounds, steps=options.steps)
    figures = print_table(measured, base=BASE)
    targets = [Target(kind, figures[OURS][kind], limit) for kind, limit in LIMITS.items()]
    holds = report_targets(targets)
    if options.json is not None:
        record = {"figures": figures, "targets": [asdict(target) for target in targets], **context()}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not holds)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds per side (default: 5)")
    parser.add_argument("--steps", type=int, default=2, help="steps per round (default: 2)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def build_ours(*, reshard_after_forward: bool = True) -> Callable[[], None]:
    """Builds this framework's FSDP2 wrapper and optimizer."""
    settings = TorchFullyShardedDataParallelConfig(reshard_after_forward=reshard_after_forward)
    model = TorchFullyShardedDataParallel(ModelParallelConfig(), settings, build_model())
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=1.0, **RATES), [model])

    def step() -> None:
        loss_of(model).backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
