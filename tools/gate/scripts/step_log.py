"""Provides the model, the batches and the step log that the gate's scripts share."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PIXELS, CLASSES, BATCH = 8, 5, 4


class Network(nn.Module):
    """Two convolutions and two linear layers in module lists, which wrappers recognize as units, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)])
        self.linears = nn.ModuleList([nn.Linear(8 * PIXELS**2 // 16, 13), nn.Linear(13, 13)])
        self.scale = nn.Parameter(torch.ones(1))
        self.classify = nn.Linear(13, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        """Maps pictures, [B, 3, PIXELS, PIXELS], any float dtype, to logits, [B, CLASSES], same dtype."""
        for convolution in self.convolutions:
            pictures = nn.functional.max_pool2d(torch.relu(convolution(pictures)), 2)
        hidden = pictures.flatten(1)
        for linear in self.linears:
            hidden = torch.tanh(linear(hidden)) * self.scale
        return self.classify(hidden)


def start() -> tuple[int, int]:
    """Joins the process group if there are several ranks, and seeds torch. Returns the rank and the number of ranks."""
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1234)
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def batch(step: int, rank: int, *, number: int = 0) -> tuple[Tensor, Tensor]:
    """Returns a microbatch of this rank: pictures, [B, 3, PIXELS, PIXELS], fp32, and classes, [B], int64."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + number)
    pictures = torch.randn(BATCH, 3, PIXELS, PIXELS, generator=generator)
    return pictures, torch.randint(CLASSES, (BATCH,), generator=generator)


def log_step(step: int, losses: Iterable[Tensor], *, params: Iterable[Tensor], **more: Any) -> None:
    """Appends a line to steps.jsonl with the losses and parameter digests of all ranks. Collective.

    losses: this rank's losses, each [], any float dtype. params: the parameters or shards stored on this rank. more:
    further values of this rank.
    """
    mine = {"losses": [float(loss) for loss in losses], "params": digest(params), **more}
    every: list[Any] = [mine]
    if dist.is_initialized():
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    if int(os.environ["RANK"]) == 0:
        line = {"iteration": step, **{f"rank_{rank}": one for rank, one in enumerate(every)}}
        with Path("steps.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")


def digest(tensors: Iterable[Tensor]) -> str:
    """Hashes the bytes of tensors of any shape and dtype, in their logical order."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        mine = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        found.update(mine.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def digest_of_state(state: Any) -> str:
    """Hashes all tensors and numbers in nested dictionaries and lists, in order."""
    found = hashlib.blake2b(digest_size=16)
    _add(state, found)
    return found.hexdigest()


def _add(value: Any, found: Any) -> None:
    if isinstance(value, Tensor):
        found.update(digest([value]).encode())
    elif isinstance(value, dict):
        for key, inner in value.items():
            found.update(str(key).encode())
            _add(inner, found)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _add(inner, found)
    elif isinstance(value, (bool, int, float, str)):
        found.update(repr(value).encode())
