"""Random numbers: seeds, the states of torch's generators, and streams in addition to the default one.

[Note: generators of a GPU] While a CUDA graph is captured, the bytes of a generator's state may be neither read nor
written. One generator object may take over for another, though: graphsafe_set_state makes the default generator share
the state of `gpu`. A replay advances the objects that were registered with the graph before its capture. So a stream
keeps one object for its lifetime, and a loaded state is written into it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy
import torch


def seed_all(seed: int) -> None:
    """Seeds the generators of Python, numpy and torch, the last on all devices."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state_bytes(device: torch.device) -> list[torch.Tensor]:
    """Returns the states of torch's default generators that `device` uses: each [N], uint8, on the CPU."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return states


def set_rng_state_bytes(states: list[torch.Tensor], device: torch.device) -> None:
    """Restores the states that rng_state_bytes returned: each [N], uint8, on the CPU."""
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)


class RandomStream:
    """A random-number stream independent of torch's default one, on the host and, for a GPU, also on the device.

    See [Note: generators of a GPU].
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._host = torch.Generator().manual_seed(seed).get_state()
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
        """Returns the states: each [N], uint8, on the CPU. Not allowed while a CUDA graph is captured."""
        return [self._host] if self.gpu is None else [self._host, self.gpu.get_state()]

    def set_state_bytes(self, states: list[torch.Tensor]) -> None:
        """Restores states of state_bytes: each [N], uint8, on the CPU. Not allowed while a CUDA graph is captured."""
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
