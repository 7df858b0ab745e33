"""Random numbers of a device: seeds, the states of torch's generators, and streams besides the default one."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy
import torch


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators, on every device."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state_bytes(device: torch.device) -> list[torch.Tensor]:
    """States of torch's generators that `device` uses: each [N], uint8, on the CPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_rng_state_bytes(states: list[torch.Tensor], device: torch.device) -> None:
    """Restores what `rng_state_bytes` returned: each [N], uint8, on the CPU."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class RandomStream:
    """Random numbers that go on by themselves beside torch's default ones: the host's, and the device's where it is a
    GPU. The GPU side has not been run yet.

    A GPU's state is an object that takes the default one's place, since the capture of a CUDA graph forbids to read or
    set its bytes. A replay moves on the objects that were registered with the graph before it was captured.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._host = torch.Generator().manual_seed(seed).get_state()
        # One object for good: what a checkpoint brings is written into it, so that graphs go on with that.
        self.gpu = torch.Generator(device).manual_seed(seed) if device.type == "cuda" else None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Makes torch draw from this stream inside the block."""
        default = torch.get_rng_state()
        torch.set_rng_state(self._host)
        try:
            with nullcontext() if self.gpu is None else _gpu_draws_from(self.gpu):
                yield
        finally:
            self._host = torch.get_rng_state()
            torch.set_rng_state(default)

    def state_bytes(self) -> list[torch.Tensor]:
        """States as rng_state_bytes gives them: each [N], uint8, on the CPU. Not while a CUDA graph is captured."""
        return [self._host] if self.gpu is None else [self._host, self.gpu.get_state()]

    def set_state_bytes(self, states: list[torch.Tensor]) -> None:
        """Takes what state_bytes returned: each [N], uint8, on the CPU. Not while a CUDA graph is captured."""
        self._host = states[0]
        if self.gpu is not None:
            self.gpu.set_state(states[1])


@contextmanager
def _gpu_draws_from(generator: torch.Generator) -> Iterator[None]:
    default = torch.cuda.default_generators[generator.device.index]
    before = default.graphsafe_get_state()
    default.graphsafe_set_state(generator)
    try:
        yield
    finally:
        default.graphsafe_set_state(before)
