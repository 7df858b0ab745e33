"""Compares DistributedFusedAdam with torch's DDP and fused AdamW, and with other sharded optimizers.

    python benchmarks/fused_adam.py [--ranks 2 4] [--rounds 6] [--steps 2] [--only NAME ...] [--json FILE]

The model has 50 million parameters in fp32 and uses clipping. gloo processes have one thread each. Sides are
interleaved round by round. Reports the processor time of all ranks, and the worst rank's wall time and peak resident
memory since the imports, relative to DDP, the first line. Sides run in groups of at most 16 processes, each with a
separate DDP side. All sides use torch's default allocator. The bf16 side also computes in bf16, which is slower on most
CPUs. DeepSpeed is included if it is installed.

Below each table follows the memory of tensors, counted operator by operator in separate processes without timing: bytes
per parameter of the worst rank between steps, and the peak within a step, including activations. The targets of our
default settings come last, each PASS or FAIL. The exit status is 1 if one fails.
"""

import argparse
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.gpu.record import Target, report_targets  # noqa: E402
from benchmarks.live_bytes import PeakBytes  # noqa: E402
from benchmarks.plain_model import PlainConfig, PlainModel  # noqa: E402
from benchmarks.sides import (  # noqa: E402
    Build,
    context,
    free_port,
    join_ranks,
    print_table,
    run_rounds,
    start_side,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import (  # noqa: E402
    DistributedFusedAdam,
    OptimizerConfig,
    get_megatron_optimizer,
)

MODEL = PlainConfig(num_layers=6, hidden_size=512, num_heads=8, num_experts=8, ffn_hidden_size=512, vocab_size=8192)
NUM_PARAMS = 52_460_032
SEQUENCE = 256
BUCKET_BYTES = 25 * 2**20
RATES: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
BASE, OURS = "DDP + AdamW(fused=True)", "ours"
DEEPSPEED = "DeepSpeed ZeRO-2"
MOST_PROCESSES = 16
LIMITS = {"cpu x": 1.0, "net x": 0.85}


def main() -> None:
    """Measures the sides and prints the tables and the targets."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    if importlib.util.find_spec("deepspeed") is None:
        print(f"{DEEPSPEED} is skipped, because the package deepspeed is not installed")
    record: dict[str, Any] = {}
    targets: list[Target] = []
    for ranks in options.ranks:
        print(f"\n{ranks} ranks")
        chosen = {name: build for name, build in builds().items() if not options.only or name in {OURS, *options.only}}
        figures, rounds = measure(chosen, ranks=ranks, options=options)
        live = count_memory({BASE: build_reference, **chosen}, ranks=ranks)
        record[f"{ranks} ranks"] = {"figures": figures, "live_bytes_a_parameter": live, "rounds": rounds}
        targets += [Target(f"{kind}, {ranks} ranks", figures[OURS][kind], limit) for kind, limit in LIMITS.items()]
        # Parameters, plus two moments and a gradient sharded over the ranks: fp32 parameters are updated in place. The
        # memory of three buckets is kept for reuse.
        law = 4 + 12 / ranks + 3 * BUCKET_BYTES / NUM_PARAMS
        targets.append(Target(f"live bytes between steps over the formula's, {ranks} ranks", live[OURS][0] / law, 1.02))
    print()
    holds = report_targets(targets)
    if options.json is not None:
        options.json.write_text(json.dumps({**record, "targets": [asdict(t) for t in targets], **context()}, indent=1))
    sys.exit(not holds)


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=6, help="counted rounds per side (default: 6)")
    parser.add_argument("--steps", type=int, default=2, help="steps per round (default: 2)")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=[*builds()], help="sides in addition to the base and ours"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


def measure(
    chosen: Mapping[str, Build], *, ranks: int, options: argparse.Namespace
) -> tuple[dict[str, dict[str, float]], list[dict[str, Any]]]:
    """Measures the sides in groups and prints a table for each. Returns ratios by side, and each group's rounds."""
    figures: dict[str, dict[str, float]] = {}
    rounds: list[dict[str, Any]] = []
    for group in groups_of([*chosen], size=max(1, MOST_PROCESSES // ranks - 1)):
        sides = [start_side(BASE, build_reference, ranks=ranks)]
        for name in group:
            packages = ("deepspeed",) if name == DEEPSPEED else ()
            sides.append(start_side(name, chosen[name], ranks=ranks, packages=packages))
        measured = run_rounds(sides, rounds=options.rounds, steps=options.steps)
        figures |= print_table(measured, base=BASE)
        rounds.append({name: [asdict(one) for one in some] for name, some in measured.items()})
    return figures, rounds


def count_memory(chosen: Mapping[str, Build], *, ranks: int) -> dict[str, tuple[float, float]]:
    """Prints and returns the worst rank's live bytes per parameter, between steps and at the peak within a step."""
    width = max(map(len, chosen)) + 2
    print(" " * width + f"{'at rest, bytes per parameter':>30}{'most in a step':>20}")
    found: dict[str, tuple[float, float]] = {}
    for name, build in chosen.items():
        port = free_port()
        with ProcessPoolExecutor(ranks, mp_context=get_context("spawn")) as pool:
            jobs = [pool.submit(live_bytes, build, rank=rank, ranks=ranks, port=port) for rank in range(ranks)]
            each = [job.result() for job in jobs]
        at_rest, most = (max(numbers) for numbers in zip(*each))
        found[name] = at_rest, most
        print(f"{name:{width}}{at_rest:30.2f}{most:20.2f}")
    return found


def live_bytes(build: Build, *, rank: int, ranks: int, port: int) -> tuple[float, float]:
    """Returns one rank's live bytes per parameter between steps, and at the peak within a step (see count_memory)."""
    join_ranks(rank, ranks=ranks, port=port)
    with PeakBytes() as held:
        step = build()
        most = max(held.peak_of(step) for _ in range(3))
        at_rest = held.total()
    dist.destroy_process_group()
    return at_rest / NUM_PARAMS, most / NUM_PARAMS


def groups_of(names: Sequence[str], *, size: int) -> Iterator[Sequence[str]]:
    """Splits the names into groups of at most `size`."""
    return (names[start : start + size] for start in range(0, len(names), size))


def builds() -> dict[str, Build]:
    """Returns the sides that are compared with the base, by name."""
    sides: dict[str, Build] = {
        OURS: build_ours,
        "ours, init_params": build_taken_over,
        "ours, buckets of 100 MB": partial(build_ours, bucket_cap_mb=100.0),
        "ours, standing gradients": partial(build_ours, contiguous_grad_buffer=True),
        "ours, gathers in forward": partial(build_ours, overlap_param_sync=True),
        "ours, bf16 with remainders": build_remainders,
        "ZeRO-1 of pretrain_gpt.py": build_zero1,
        "ZeroRedundancyOptimizer": build_zero_redundancy,
        "FSDP2": build_fsdp2,
    }
    if importlib.util.find_spec("deepspeed") is not None:
        sides[DEEPSPEED] = build_deepspeed
    return sides


def build_model() -> PlainModel:
    """Joins a process group and builds the model that all sides use."""
    dist.init_process_group("gloo")
    return seeded_model()


def seeded_model() -> PlainModel:
    """Builds the model with the same weights on all ranks."""
    torch.manual_seed(1234)
    return PlainModel(MODEL)


def build_reference() -> Callable[[], None]:
    """Builds torch's DDP with its default settings, and torch's AdamW."""
    model = nn.parallel.DistributedDataParallel(build_model())
    return torch_step(model, torch.optim.AdamW(model.parameters(), fused=True, **RATES))


def build_zero_redundancy() -> Callable[[], None]:
    """Builds torch's DDP with ZeroRedundancyOptimizer around AdamW."""
    model = nn.parallel.DistributedDataParallel(build_model())
    return torch_step(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, fused=True, **RATES))


def build_fsdp2() -> Callable[[], None]:
    """Builds torch's FSDP2, applied layer by layer, with AdamW on the shards."""
    model = build_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return torch_step(model, torch.optim.AdamW(model.parameters(), fused=True, **RATES))


def torch_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Returns a function that runs a step with torch's clipping."""

    def step() -> None:
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_ours(**settings: Any) -> Callable[[], None]:
    """Builds this framework's optimizer around the bare model. settings: further arguments of the optimizer."""
    model = build_model()
    return our_step(model, DistributedFusedAdam(model.parameters(), **RATES, **settings))


def build_taken_over() -> Callable[[], None]:
    """Builds our side with init_params, so that no first backward with whole gradients determines the buckets."""
    model = build_model()
    optimizer = DistributedFusedAdam(model.parameters(), **RATES)
    optimizer.init_params()
    return our_step(model, optimizer)


def build_remainders() -> Callable[[], None]:
    """Builds bf16 parameters, communicated in bf16, with an optimizer that stores their fp32 remainders."""
    model = build_model().bfloat16()
    settings: dict[str, Any] = {"store_params": False, "store_param_remainders": True}
    optimizer = DistributedFusedAdam(model.parameters(), param_sync_dtype=torch.bfloat16, **RATES, **settings)
    return our_step(model, optimizer)


def our_step(model: nn.Module, optimizer: DistributedFusedAdam) -> Callable[[], None]:
    """Returns a function that runs a step with the optimizer's clipping."""

    def step() -> None:
        loss_of(model).backward()
        optimizer.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def build_zero1() -> Callable[[], None]:
    """Builds this framework's DDP wrapper and sharded optimizer, with overlapped reductions."""
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, bucket_size=6_000_000
    )
    model = DistributedDataParallel(ModelParallelConfig(), settings, build_model())
    optimizer = get_megatron_optimizer(OptimizerConfig(clip_grad=1.0, **RATES), [model])

    def step() -> None:
        loss_of(model).backward()
        model.finish_grad_sync()
        optimizer.step()
        optimizer.zero_grad()

    return step


def build_deepspeed() -> Callable[[], None]:
    """Builds DeepSpeed's ZeRO-2 around AdamW. DeepSpeed clips the gradients."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    model = seeded_model()
    # The same number of elements as in the buckets of DDP and of our optimizer.
    buckets = {"reduce_bucket_size": 25 * 2**18, "allgather_bucket_size": 25 * 2**18}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "overlap_comm": False, **buckets},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RATES)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def step() -> None:
        engine.backward(loss_of(engine))
        engine.step()

    return step


def loss_of(model: nn.Module) -> torch.Tensor:
    """Returns the loss for a sequence of random tokens, [], in the model's dtype."""
    tokens = torch.randint(MODEL.vocab_size, (1, SEQUENCE + 1))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert isinstance(loss, torch.Tensor)
    return loss


if __name__ == "__main__":
    main()
