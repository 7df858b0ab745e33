"""Compares the overhead of our data-parallel wrappers and optimizers with torch's on one GPU, without communication.

    python benchmarks/gpu/ddp.py [--rounds 8] [--steps 20] [--layers 8] [--hidden 2048] --json FILE

Runs one process with an NCCL group of this rank and one model in bf16. The sides are plain DDP (the base of all ratios)
and FSDP2 with fused AdamW, and ours with and without sharding and overlap, with fp32 masters. Has not been run yet,
because it requires a GPU.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

ROOT = Path(__file__).resolve().parent.parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from benchmarks.sides import context  # noqa: E402
from megatron.core.device import (  # noqa: E402
    default_device,
    device_name,
    mark_time,
    memory_bytes,
    prepare_device,
    seconds_between,
    synchronize,
)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402

BASE = "plain DDP"
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 40_000_000}
SHARDED = {"use_distributed_optimizer": True}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and its batch. A layer has 8 x hidden x hidden parameters."""

    layers: int
    hidden: int
    tokens: int


@dataclass(frozen=True)
class Measurement:
    """Mean device time of a round's steps in seconds, and bytes allocated by the side between steps."""

    device_seconds: float
    held_bytes: int


class Block(nn.Module):
    """A residual feed-forward layer."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden, bias=False), nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the layer to x, [T, H], floating point. Returns the same shape and dtype."""
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def main() -> None:
    """Measures the sides and prints the table."""
    options = parse_options()
    device = default_device()
    if device.type != "cuda":
        sys.exit("benchmarks/gpu/ddp.py requires a GPU; use benchmarks/ddp.py on the CPU")
    prepare_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    sizes = Sizes(options.layers, options.hidden, options.tokens)
    measured: dict[str, list[Measurement]] = {}
    steps, held = {}, {}
    for name, build in builds().items():
        before = memory_bytes(device)["allocated"]
        steps[name] = build(sizes, device)
        steps[name]()
        synchronize(device)
        held[name] = memory_bytes(device)["allocated"] - before
    for number in range(options.rounds + 1):
        for name, step in steps.items():
            seconds = time_steps(step, options.steps, device=device)
            if number > 0:  # the first round warms up
                measured.setdefault(name, []).append(Measurement(seconds, held[name]))
    report(measured, options.json, device=device, sizes=sizes)
    dist.destroy_process_group()


def builds() -> dict[str, Callable[[Sizes, torch.device], Callable[[], None]]]:
    """Returns the sides by name, the base first."""
    return {
        BASE: build_plain,
        "FSDP2": build_fsdp2,
        "ours": partial(build_ours, settings={}),
        "ours, overlap": partial(build_ours, settings=OVERLAP),
        "ours, sharded": partial(build_ours, settings=SHARDED),
        "ours, sharded, overlap, gather": partial(
            build_ours, settings={**SHARDED, **OVERLAP, "overlap_param_gather": True}
        ),
    }


def build_model(sizes: Sizes, device: torch.device, *, dtype: torch.dtype) -> nn.Module:
    """Builds the model, with the same weights for every side."""
    torch.manual_seed(1234)
    return nn.Sequential(*[Block(sizes.hidden) for _ in range(sizes.layers)]).to(device, dtype)


def inputs(sizes: Sizes, device: torch.device) -> torch.Tensor:
    """Returns the input, [T, H], bf16."""
    return torch.randn(sizes.tokens, sizes.hidden, device=device, dtype=torch.bfloat16)


def build_plain(sizes: Sizes, device: torch.device) -> Callable[[], None]:
    """Builds torch's DDP with fp32 parameters and bf16 GEMMs by autocast, which has the same numerics."""
    model = nn.parallel.DistributedDataParallel(build_model(sizes, device, dtype=torch.float32), device_ids=[device])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    x = inputs(sizes, device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_fsdp2(sizes: Sizes, device: torch.device) -> Callable[[], None]:
    """Builds torch's FSDP2, applied layer by layer, with bf16 parameter gathers and fp32 gradient reductions."""
    model = build_model(sizes, device, dtype=torch.float32)
    mesh = init_device_mesh(device.type, (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)
    x = inputs(sizes, device)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def build_ours(sizes: Sizes, device: torch.device, *, settings: Mapping[str, bool | int]) -> Callable[[], None]:
    """Builds bf16 parameters with fp32 masters and gradients, and the same clipping as the other sides."""
    # mypy cannot check the names of the settings, which builds() chooses.
    config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **settings)  # type: ignore[arg-type]
    ddp = DistributedDataParallel(ModelParallelConfig(), config, build_model(sizes, device, dtype=torch.bfloat16))
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=1e-4, weight_decay=0.01, clip_grad=1.0, bf16=True), [ddp])
    x = inputs(sizes, device)

    def step() -> None:
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()

    return step


def time_steps(step: Callable[[], None], steps: int, *, device: torch.device) -> float:
    """Returns the device's mean seconds per step."""
    start = mark_time(device)
    for _ in range(steps):
        step()
    return seconds_between(start, mark_time(device)) / steps


def report(measured: dict[str, list[Measurement]], path: Path | None, *, device: torch.device, sizes: Sizes) -> None:
    """Prints medians and ratios to the base, and writes them with every round and the conditions of the measurement."""
    figures = {}
    for name, rounds in measured.items():
        pairs = zip(rounds, measured[BASE], strict=True)
        figures[name] = {
            "ms": 1e3 * statistics.median(one.device_seconds for one in rounds),
            "time x": statistics.median(one.device_seconds / base.device_seconds for one, base in pairs),
            "MiB": rounds[-1].held_bytes / 2**20,
            "memory x": rounds[-1].held_bytes / measured[BASE][-1].held_bytes,
        }
        print(f"{name:32}" + "".join(f"{key:>10} {value:9.3f}" for key, value in figures[name].items()))
    if path is not None:
        rounds_of = {name: [asdict(one) for one in rounds] for name, rounds in measured.items()}
        record = {**context(), "device": device_name(device), "sizes": asdict(sizes), "figures": figures}
        path.write_text(json.dumps({**record, "rounds": rounds_of}, indent=1) + "\n")


def parse_options() -> argparse.Namespace:
    """Parses the command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds per side (default: 8)")
    parser.add_argument("--steps", type=int, default=20, help="steps per round (default: 20)")
    parser.add_argument("--layers", type=int, default=8, help="layers (default: 8)")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size (default: 2048)")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per batch (default: 8192)")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
