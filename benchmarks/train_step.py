"""Training steps of this framework and of the same model in plain PyTorch, interleaved in one run.

    python benchmarks/train_step.py [--rounds 8] [--steps 3] [--json FILE]

Prints CPU seconds, wall time and peak memory of a step, and ours / plain as medians over the rounds. Two processes
of one thread each train one model: 4 layers, hidden 256, 8 experts top-2, sequence 256,
micro-batch 4, fp32, AdamW with clipping. While one side steps, the other waits.
"""

import argparse
import json
import multiprocessing
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

import pretrain_gpt  # noqa: E402
from benchmarks.plain_model import PlainConfig, PlainModel  # noqa: E402
from megatron.core.device import keep_cpu_heap, peak_memory_bytes  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from megatron.training.setup import setup_data, setup_run  # noqa: E402
from megatron.training.training import train_step  # noqa: E402

RANKS = 2
SEQUENCE, MICRO_BATCH = 256, 4
FLAGS = f"""
--num-layers 4 --hidden-size 256 --num-attention-heads 4 --num-experts 8 --moe-router-topk 2
--moe-ffn-hidden-size 512 --moe-grouped-gemm --moe-router-load-balancing-type none
--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
--seq-length {SEQUENCE} --max-position-embeddings {SEQUENCE} --micro-batch-size {MICRO_BATCH}
--mock-data --tokenizer-type NullTokenizer --vocab-size 8192 --num-workers 0
--lr 1e-4 --lr-decay-style constant --train-iters 100000 --eval-iters 0
"""


@dataclass(frozen=True)
class Measurement:
    """Means over one round's steps on one rank, in seconds; peak_bytes since the process started."""

    cpu_seconds: float
    wall_seconds: float
    peak_bytes: int


@dataclass
class Side:
    """The processes of one implementation."""

    name: str
    connections: list[Connection]
    processes: list[Any]

    def measure(self, steps: int) -> Measurement:
        """Runs `steps` on all ranks: CPU seconds summed over ranks, wall time and memory of the worst rank."""
        for connection in self.connections:
            connection.send(steps)
        ranks: list[Measurement] = [connection.recv() for connection in self.connections]
        return Measurement(
            cpu_seconds=sum(rank.cpu_seconds for rank in ranks),
            wall_seconds=max(rank.wall_seconds for rank in ranks),
            peak_bytes=max(rank.peak_bytes for rank in ranks),
        )

    def stop(self) -> None:
        """Ends the processes."""
        for connection in self.connections:
            connection.send(0)
        for process in self.processes:
            process.join()


def main() -> None:
    """Measures and prints the table."""
    options = parse_options()
    os.environ["OMP_NUM_THREADS"] = "1"
    # pretrain_gpt.py makes glibc keep its heap; a plain script has torch's default, unless asked otherwise.
    plain = build_plain_with_kept_heap if options.plain_keeps_heap else build_plain
    sides = [start_side("plain", plain), start_side("ours", build_ours)]
    rounds: dict[str, list[Measurement]] = {side.name: [] for side in sides}
    for number in range(options.rounds + 1):
        for side in sides:
            measurement = side.measure(options.steps)
            if number > 0:  # the first round warms up
                rounds[side.name].append(measurement)
    for side in sides:
        side.stop()
    report(rounds, options)


def parse_options() -> argparse.Namespace:
    """The command line of this benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="counted rounds of each side (default: 8)")
    parser.add_argument("--steps", type=int, default=3, help="steps of one round (default: 3)")
    parser.add_argument(
        "--plain-keeps-heap",
        action="store_true",
        help="give the plain side our allocator setting too (glibc keeps memory)",
    )
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    return parser.parse_args()


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_side(name: str, build: Callable[[], Callable[[], None]]) -> Side:
    """Starts the ranks of one implementation."""
    context = multiprocessing.get_context("spawn")
    port = free_port()
    connections, processes = [], []
    for rank in range(RANKS):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(build, theirs), kwargs={"rank": rank, "port": port})
        process.start()
        connections.append(ours)
        processes.append(process)
    return Side(name, connections, processes)


def serve(build: Callable[[], Callable[[], None]], connection: Connection, *, rank: int, port: int) -> None:
    """One rank: builds, then runs as many steps as it is told to, until told 0."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    baseline = peak_memory_bytes(torch.device("cpu"))
    step = build()
    while steps := connection.recv():
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(steps):
            step()
        connection.send(
            Measurement(
                cpu_seconds=(time.process_time() - cpu) / steps,
                wall_seconds=(time.perf_counter() - wall) / steps,
                peak_bytes=peak_memory_bytes(torch.device("cpu")) - baseline,
            )
        )
    dist.destroy_process_group()


def build_plain() -> Callable[[], None]:
    """DDP, fused AdamW and torch's clipping around the plain model."""
    dist.init_process_group("gloo")
    torch.manual_seed(1234)
    config = PlainConfig()
    model = torch.nn.parallel.DistributedDataParallel(PlainModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01, fused=True)

    def step() -> None:
        tokens = torch.randint(config.vocab_size, (MICRO_BATCH, SEQUENCE + 1))
        loss = model(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def build_plain_with_kept_heap() -> Callable[[], None]:
    """build_plain with the allocator setting that this framework makes for itself."""
    keep_cpu_heap()
    return build_plain()


def build_ours() -> Callable[[], None]:
    """The whole of a training step as pretrain_gpt.py runs it, data and statistics included."""
    args = initialize_megatron(argv=FLAGS.split())
    run = setup_run(args, pretrain_gpt.model_provider, forward_step_func=pretrain_gpt.forward_step)
    setup_data(run, pretrain_gpt.train_valid_test_datasets_provider, num_workers=0)

    def step() -> None:
        train_step(run)

    return step


def report(rounds: dict[str, list[Measurement]], options: argparse.Namespace) -> None:
    """Prints medians and ratios; ratios pair the rounds, so that drift of the machine cancels."""
    plain, ours = rounds["plain"], rounds["ours"]
    figures = {
        "cpu x": statistics.median(o.cpu_seconds / p.cpu_seconds for o, p in zip(ours, plain)),
        "wall x": statistics.median(o.wall_seconds / p.wall_seconds for o, p in zip(ours, plain)),
        "net x": ours[-1].peak_bytes / plain[-1].peak_bytes,
    }
    print(f"{'':8}{'cpu s/step':>12}{'wall s/step':>13}{'peak MiB':>10}")
    for name, measured in rounds.items():
        cpu = statistics.median(m.cpu_seconds for m in measured)
        wall = statistics.median(m.wall_seconds for m in measured)
        print(f"{name:8}{cpu:12.3f}{wall:13.3f}{measured[-1].peak_bytes / 2**20:10.0f}")
    print("  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    print(f"allocator: ours keeps glibc's heap, plain {'does too' if options.plain_keeps_heap else 'does not'}")
    if options.json is not None:
        record = {"figures": figures, "rounds": {k: [asdict(m) for m in v] for k, v in rounds.items()}, **context()}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def context() -> dict[str, str]:
    """What the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }


if __name__ == "__main__":
    main()
