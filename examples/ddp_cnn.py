"""Trains a small data-parallel convolutional network on random pictures, without transformers, with torch's optimizer.

    python examples/ddp_cnn.py
    torchrun --nproc-per-node 3 examples/ddp_cnn.py
    torchrun --nproc-per-node 3 examples/ddp_cnn.py --overlap --steps 50

With --overlap each bucket of gradients is reduced during backward, otherwise all buckets at its end. Losses are bitwise
equal either way, because sums over ranks are in rank order (deterministic_mode). Rank 0 prints the losses, and the
number of steps in which each bucket was in flight before the next bucket was complete.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # a clone works without installation

from megatron.core.device import require_launch  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.distributed.event_log import EventLog, launched_before_next_was_ready  # noqa: E402
from megatron.core.model_parallel_config import ModelParallelConfig  # noqa: E402

CLASSES, PIXELS, MICROBATCHES = 10, 16, 2


class CNN(nn.Module):
    """Three convolutions and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(a, b, 3, padding=1) for a, b in ((3, 16), (16, 32), (32, 32))])
        self.classify = nn.Linear(32 * (PIXELS // 8) ** 2, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Returns the logits, [B, CLASSES], fp32. pictures: [B, 3, PIXELS, PIXELS], fp32."""
        for convolution in self.convolutions:
            pictures = F.max_pool2d(torch.relu(convolution(pictures)), 2)
        return self.classify(pictures.flatten(1))


def random_pictures(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Returns this rank's pictures of a step, [B, 3, PIXELS, PIXELS], fp32, and their classes, [B], int64.

    The pictures are noise around one pattern per class.
    """
    patterns = torch.randn(CLASSES, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1000 * step + rank + 1)
    labels = torch.randint(CLASSES, (16 * MICROBATCHES,), generator=generator)
    return patterns[labels] + torch.randn(labels.numel(), 3, PIXELS, PIXELS, generator=generator), labels


def train_step(ddp: DistributedDataParallel, optimizer: torch.optim.Optimizer, *, step: int) -> Tensor:
    """Runs one step of several microbatches. Returns this rank's mean loss, [], fp32."""
    pictures, labels = random_pictures(step, dist.get_rank() if dist.is_initialized() else 0)
    ddp.zero_grad_buffer()
    *first, last = zip(pictures.chunk(MICROBATCHES), labels.chunk(MICROBATCHES))
    with ddp.no_sync():
        losses = [_backward(ddp, batch) for batch in first]
    losses.append(_backward(ddp, last))
    ddp.finish_grad_sync()
    for param in ddp.parameters():
        # torch's optimizer reads param.grad, but the mean over ranks is in the buffer.
        param.grad = param.main_grad
    optimizer.step()
    return torch.stack(losses).sum()


def _backward(ddp: DistributedDataParallel, batch: tuple[Tensor, Tensor]) -> Tensor:
    pictures, labels = batch
    loss = F.cross_entropy(ddp(pictures), labels) / MICROBATCHES
    loss.backward()
    return loss.detach()


def main(argv: Sequence[str] | None = None) -> None:
    """Trains on the processes that a launcher started, or on a single process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--overlap", action="store_true", help="reduce gradients during backward")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(argv)
    require_launch()
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(1234)
    settings = DistributedDataParallelConfig(
        overlap_grad_reduce=options.overlap, bucket_size=1000 if options.overlap else None
    )
    ddp = DistributedDataParallel(ModelParallelConfig(deterministic_mode=True), settings, CNN())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    log = EventLog(torch.device("cpu"))
    ddp.launch_order.observe(log)
    early = [0] * (len(ddp.bucket_groups) - 1)
    for step in range(options.steps):
        log.record_next_step()
        loss = train_step(ddp, optimizer, step=step)
        for times in log.take_sync():
            early = [count + now for count, now in zip(early, launched_before_next_was_ready(times))]
        if dist.is_initialized():
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        if step % 10 == 9 and int(os.environ.get("RANK", "0")) == 0:
            print(f"step {step + 1}: loss {float(loss):.9f}", flush=True)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"{len(ddp.bucket_groups)} buckets; in flight before the next was complete in {early} steps", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
