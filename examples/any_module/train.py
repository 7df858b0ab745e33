"""Trains a diffusion model on generated pictures, with optimizer states and gradients sharded over the processes.

    python examples/any_module/train.py
    torchrun --nproc-per-node 2 examples/any_module/train.py --save /tmp/rings --steps 150
    torchrun --nproc-per-node 3 examples/any_module/train.py --save /tmp/rings

Works with any PyTorch module and loop: DistributedFusedAdam is the only part of this project that it uses. The model is
not wrapped. Every step uses the same pictures for any number of processes, and losses differ only by rounding.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from examples.any_module.diffusion import UNet, add_noise, as_text, draw_pictures, paint  # noqa: E402
from megatron.core.device import require_launch  # noqa: E402
from megatron.core.optimizer import DistributedFusedAdam  # noqa: E402


@dataclass(frozen=True)
class Trained:
    """The objects whose states are saved in a checkpoint."""

    model: nn.Module
    optimizer: DistributedFusedAdam
    schedule: torch.optim.lr_scheduler.LRScheduler

    def state(self) -> dict[str, Any]:
        """Returns the states of all three. The optimizer's state is this process's shard."""
        return {name: part.state_dict() for name, part in vars(self).items()}

    def take(self, state: dict[str, Any]) -> None:
        """Restores all three from the result of `state` after it was filled from a file."""
        for name, part in vars(self).items():
            part.load_state_dict(state[name])


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on the processes that a launcher started, or on a single process."""
    options = parse_options(argv)
    require_launch()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        # On one process the optimizer does not require a group, but torch.distributed.checkpoint warns without one.
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    torch.manual_seed(1234)  # the same weights on all processes
    model = UNet().to(dtype=dtype, memory_format=torch.channels_last)
    optimizer = build_optimizer(model, options)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.schedule_steps)
    trained = Trained(model, optimizer, schedule)
    first = load_newest(options.save, trained) if options.save else 0
    for step in range(first, options.steps):
        loss, norm = train_step(model, optimizer, step=step, options=options)
        schedule.step()
        if (step + 1) % options.log_every == 0:
            report(step, loss=loss, norm=norm, rate=optimizer.param_groups[0]["lr"])
    # All-gathers of the parameters that are read below may still be in flight.
    optimizer.param_sync()
    if options.save and first < options.steps:
        save(options.save, trained, step=options.steps)
    if rank_and_size()[0] == 0 and options.paint:
        print(as_text(paint(model, options.paint, dtype=dtype)), flush=True)
    dist.destroy_process_group()


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line of this example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: 300)")
    parser.add_argument("--schedule-steps", type=int, default=300, help="steps of the cosine schedule (default: 300)")
    parser.add_argument("--batch", type=int, default=24, help="pictures per step, over all processes (default: 24)")
    parser.add_argument("--micro-batch", type=int, default=4, help="pictures per backward (default: 4)")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument(
        "--bf16", action="store_true", help="use bf16 parameters; the optimizer stores the remaining 16 bits of fp32"
    )
    parser.add_argument("--overlap", action="store_true", help="gather each module's parameters before its forward")
    parser.add_argument(
        "--save", type=Path, help="folder to save to at the end, and to continue from if it contains a checkpoint"
    )
    parser.add_argument("--log-every", type=int, default=25)
    parser.add_argument("--paint", type=int, default=4, help="pictures to print at the end (default: 4)")
    options = parser.parse_args(argv)
    if options.batch % (options.micro_batch * rank_and_size()[1]):
        parser.error(f"--batch {options.batch} must be a multiple of --micro-batch x processes")
    return options


def build_optimizer(model: nn.Module, options: argparse.Namespace) -> DistributedFusedAdam:
    """Builds the optimizer, which reduces gradients in backward and updates this rank's shard of every parameter."""
    precision: dict[str, Any] = {}
    if options.bf16:
        # A bf16 parameter plus 16 bits form its fp32 value, so no fp32 copy is kept.
        precision = {"store_params": False, "store_param_remainders": True, "param_sync_dtype": torch.bfloat16}
    return DistributedFusedAdam(
        model.parameters(),
        lr=options.lr,
        weight_decay=0.01,
        bucket_cap_mb=1.0,
        overlap_param_sync=options.overlap,
        **precision,
    )


def train_step(
    model: nn.Module, optimizer: DistributedFusedAdam, *, step: int, options: argparse.Namespace
) -> tuple[Tensor, Tensor]:
    """Runs one step of several microbatches.

    Returns this rank's mean loss and the global gradient norm, each [], fp32.
    """
    batches = own_batches(step, options)
    optimizer.zero_grad()
    losses = []
    for number, (pictures, times, noise) in enumerate(batches, 1):
        # Only the last backward reduces gradients.
        with nullcontext() if number == len(batches) else optimizer.no_sync():
            found = model(pictures.to(next(model.parameters()).dtype), times)
            loss = (found - noise).square().mean() / len(batches)
            loss.backward()
        losses.append(loss.detach())
    norm = optimizer.clip_grad_norm(1.0)
    optimizer.step()
    return torch.stack(losses).sum(), norm


def own_batches(step: int, options: argparse.Namespace) -> list[tuple[Tensor, ...]]:
    """Returns this rank's pictures of a step, in microbatches of M.

    The pictures of a step are the same for any number of ranks. A microbatch contains noisy pictures, [M, 1, H, W],
    fp32; times, [M], int64; and the noise, in the shape of the pictures.
    """
    generator = torch.Generator().manual_seed(step)
    drawn = add_noise(draw_pictures(options.batch, generator=generator), generator=generator)
    rank, ranks = rank_and_size()
    own = [part.chunk(ranks)[rank].split(options.micro_batch) for part in drawn]
    return list(zip(*own))


def rank_and_size() -> tuple[int, int]:
    """Returns this process's rank and the number of processes."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def report(step: int, *, loss: Tensor, norm: Tensor, rate: float) -> None:
    """Prints the mean loss over the ranks, the gradient norm and the learning rate. loss, norm: [], fp32."""
    dist.all_reduce(loss)
    loss /= dist.get_world_size()
    if rank_and_size()[0] == 0:
        print(f"step {step + 1}: loss {float(loss):.6f} grad norm {float(norm):.5f} lr {rate:.6f}", flush=True)


def save(folder: Path, trained: Trained, *, step: int) -> None:
    """Writes a checkpoint that any number of processes can load. Each process writes its shard."""
    dcp.save({**trained.state(), "step": step}, checkpoint_id=folder / f"step_{step:06}")


def load_newest(folder: Path, trained: Trained) -> int:
    """Loads the newest complete checkpoint, if there is one. Returns the number of completed steps."""
    complete = sorted(path.parent for path in folder.glob("step_*/.metadata"))
    if not complete:
        return 0
    state = {**trained.state(), "step": 0}
    dcp.load(state, checkpoint_id=complete[-1])
    trained.take(state)
    return state["step"]


if __name__ == "__main__":
    main()
