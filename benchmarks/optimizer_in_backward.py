"""Compares --optimizer-in-backward with a step after backward: memory in three modes, and the cost of an update.

    python benchmarks/optimizer_in_backward.py [--ranks 2] [--rounds 20] [--json FILE]

First counts the peak bytes of tensors in a step of linear layers, operator by operator, without timing: gloo
processes, fp32, a bucket of four layers. Reports the worst rank in bytes per parameter, including activations. `held`
is the policy exact. Tensors of collectives count while gloo's threads reference them, which varies. Targets are
therefore for one rank, without collectives.

Then measures the milliseconds of AdamW over 300 parameters of 2048 elements with one thread, for possible
implementations of an optimizer in backward: a separate optimizer for each parameter, stepped in its hook; one foreach
or fused optimizer for the group; ours for a flat bucket, including the norm of its gradients. Every round runs all of
them, and ratios are medians over rounds.

The targets come last, each PASS or FAIL. The exit status is 1 if one fails.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.record import Target, report_targets  # noqa: E402
from benchmarks.live_bytes import PeakBytes  # noqa: E402
from benchmarks.sides import context, free_port, join_ranks  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer  # noqa: E402

WIDTH, LAYERS, LAYERS_A_BUCKET = 256, 64, 4
NUM_PARAMS = WIDTH * WIDTH * LAYERS
MODES: dict[str, dict[str, bool]] = {
    "DDP": {},
    "ZeRO-1": {"use_distributed_optimizer": True},
    "ZeRO-2": {"use_distributed_optimizer": True, "shard_gradients": True},
}
# Settings of the optimizer for each column of the table.
WAYS: dict[str, dict[str, object]] = {
    "after backward": {"clip_grad": 1.0},
    "in backward": {"clip_grad": 0.0, "optimizer_in_backward": True},
    "held": {"clip_grad": 1.0, "optimizer_in_backward": True, "optimizer_in_backward_clip": "exact"},
}
NUM_SMALL, SMALL_SHAPE = 300, (32, 64)
EACH, FLAT = "optimizer of each parameter", "flat bucket"


def main() -> None:
    """Measures memory and update times, and prints the tables and the targets."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks for which memory is counted (default: 2)")
    parser.add_argument("--rounds", type=int, default=20, help="counted rounds per update (default: 20)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    alone, memory = count_memory(1), count_memory(options.ranks)
    costs, figures = time_updates(options.rounds)
    print()
    buckets = 2 * 4 * LAYERS_A_BUCKET / LAYERS
    # The gradient of one layer exists in addition to its bucket.
    law = 4 + 8 + buckets + 4 / LAYERS
    targets = [Target(f"{FLAT} over {EACH}", figures[FLAT], 0.1)]
    for mode, most in alone.items():
        saved = most["after backward"] - most["in backward"]
        targets.append(Target(f"{mode}: over parameters, moments, two buckets", most["in backward"] / law, 1.01))
        targets.append(Target(f"{mode}: saved over gradients except for two buckets", saved / (4 - buckets), 1.0, True))
    holds = report_targets(targets)
    if options.json is not None:
        record = {
            "bytes per parameter": memory,
            "on one rank": alone,
            "milliseconds": costs,
            "targets": [asdict(t) for t in targets],
        }
        options.json.write_text(json.dumps({**record, **context()}, indent=1) + "\n")
    sys.exit(not holds)


def count_memory(ranks: int) -> dict[str, dict[str, float]]:
    """Prints and returns the worst rank's peak within a step, in bytes per parameter, by mode and way."""
    print(f"\n{ranks} rank{'s' * (ranks > 1)}, peak within a step, bytes per parameter")
    print(" " * 10 + "".join(f"{way:>18}" for way in WAYS))
    found: dict[str, dict[str, float]] = {}
    for mode in MODES:
        found[mode] = {}
        for way in WAYS:
            port = free_port()
            with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
                jobs = [
                    pool.submit(most_in_a_step, mode, way, rank=rank, ranks=ranks, port=port) for rank in range(ranks)
                ]
                found[mode][way] = max(job.result() for job in jobs) / NUM_PARAMS
        print(f"{mode:10}" + "".join(f"{value:18.2f}" for value in found[mode].values()))
    return found


def most_in_a_step(mode: str, way: str, *, rank: int, ranks: int, port: int) -> int:
    """Returns one rank's peak bytes within a step."""
    join_ranks(rank, ranks=ranks, port=port)
    dist.init_process_group("gloo")
    with PeakBytes() as held:
        torch.manual_seed(1234)
        layers = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
        bucket_size = LAYERS_A_BUCKET * WIDTH * WIDTH
        settings: dict[str, object] = {**MODES[mode], "overlap_grad_reduce": True, "bucket_size": bucket_size}
        model, optimizer = wrap_and_build(layers, settings, way=WAYS[way])

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, WIDTH)).sum().backward()
            finalize_model_grads([model])
            optimizer.step()

        most = max(held.peak_of(step) for _ in range(3))
    dist.destroy_process_group()
    return most


def wrap_and_build(
    module: nn.Module, settings: dict[str, object], *, way: dict[str, object]
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wraps the model and builds its optimizer. settings: of the wrapper. way: settings of the optimizer."""
    releases = bool(way.get("optimizer_in_backward"))
    ddp_config = DistributedDataParallelConfig(release_gradients=releases, **settings)  # type: ignore[arg-type]
    model = DistributedDataParallel(ModelParallelConfig(), ddp_config, module)
    name = "distributed_fused_adam" if settings.get("shard_gradients") else "adam"
    config = OptimizerConfig(lr=1e-3, optimizer=name, **way)  # type: ignore[arg-type]
    return model, get_megatron_optimizer(config, [model])


def time_updates(rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Prints and returns the median milliseconds, and the ratios to the first implementation, by name."""
    torch.set_num_threads(1)
    updates = {
        EACH: update_each(),
        "foreach group": update_group(foreach=True),
        "fused group": update_group(fused=True),
        FLAT: update_flat(),
    }
    measured: dict[str, list[float]] = {name: [] for name in updates}
    for number in range(rounds + 2):
        for name, update in updates.items():
            seconds = update()
            # The first updates allocate states and warm caches.
            if number > 1:
                measured[name].append(1000 * seconds)
    costs = {name: statistics.median(some) for name, some in measured.items()}
    pairs = {name: zip(some, measured[EACH], strict=True) for name, some in measured.items()}
    figures = {name: statistics.median(one / other for one, other in some) for name, some in pairs.items()}
    print(f"\nAdamW over {NUM_SMALL} parameters of {SMALL_SHAPE[0] * SMALL_SHAPE[1]} elements")
    print(f"{'':30}{'ms':>8}{'x':>8}")
    for name, cost in costs.items():
        print(f"{name:30}{cost:8.2f}{figures[name]:8.3f}")
    return costs, figures


def update_each() -> Callable[[], float]:
    """Returns an update with a separate optimizer for each parameter, as stepped in hooks."""
    params = small_params()
    optimizers = [torch.optim.AdamW([param], lr=1e-3) for param in params]

    def update() -> float:
        give_gradients(params)
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - start

    return update


def update_group(**implementation: bool) -> Callable[[], float]:
    """Returns an update with one optimizer for all parameters, after all gradients are complete."""
    params = small_params()
    optimizer = torch.optim.AdamW(params, lr=1e-3, **implementation)  # type: ignore[arg-type]

    def update() -> float:
        give_gradients(params)
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return update


def update_flat() -> Callable[[], float]:
    """Returns this framework's update of a bucket in backward, including the end of the step."""
    model, optimizer = wrap_and_build(nn.ParameterList(small_params()), {}, way=WAYS["in backward"])
    params = list(model.parameters())
    spent = [0.0]
    # The hook runs just before the update, so the time since then includes only the update and the end of the step.
    model.register_bucket_ready_hook(lambda bucket: spent.__setitem__(0, time.perf_counter()))

    def update() -> float:
        optimizer.zero_grad()
        torch.stack([param.sum() for param in params]).sum().backward()
        finalize_model_grads([model])
        optimizer.step()
        return time.perf_counter() - spent[0]

    return update


def small_params() -> list[nn.Parameter]:
    """Returns NUM_SMALL random parameters of shape SMALL_SHAPE, fp32."""
    return [nn.Parameter(torch.randn(SMALL_SHAPE)) for _ in range(NUM_SMALL)]


def give_gradients(params: list[nn.Parameter]) -> None:
    """Assigns gradients of ones to the parameters."""
    for param in params:
        param.grad = torch.ones_like(param)


if __name__ == "__main__":
    main()
