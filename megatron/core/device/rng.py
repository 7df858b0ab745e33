"""Random numbers: seeds, the states of torch's generators, and streams in addition to the default one.

[Note: generators of a GPU] While a CUDA graph is captured, the bytes of a generator's state may be neither read nor
written. However, one generator object may replace another: graphsafe_set_state makes the default generator share the
state of `gpu`. A replay advances the objects that were registered with the graph before its capture. A stream therefore
keeps one object for its lifetime, and a loaded state is written into it.
"""

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy
import torch

from megatron.core.device.current import default_device

MODEL_PARALLEL_RNG, EXPERT_PARALLEL_RNG = "model-parallel-rng", "expert-parallel-rng"
DATA_PARALLEL_RNG = "data-parallel-rng"
# The states of named streams: each [N], uint8, on the CPU.
RngStates = dict[str, list[torch.Tensor]]


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


class CudaRNGStatesTracker:
    """Named random-number streams in addition to the default one, on a GPU or on the CPU."""

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        """Creates a tracker without streams.

        use_cudagraphable_rng: ignored, because GPU streams can always be used in CUDA graphs. Raises ValueError if
        is_inference_rng_tracker is True.
        """
        if is_inference_rng_tracker:
            raise ValueError("is_inference_rng_tracker is True: inference is not supported, must be False")
        self._streams: dict[str, RandomStream] = {}

    def is_initialized(self) -> bool:
        """Returns whether there are streams."""
        return bool(self._streams)

    def reset(self) -> None:
        """Removes all streams."""
        self._streams = {}

    def get_states(self) -> RngStates:
        """Returns the generator states of each stream by name: each [N], uint8, on the CPU."""
        return {name: stream.state_bytes() for name, stream in self._streams.items()}

    def set_states(self, states: RngStates) -> None:
        """Restores states of get_states: each [N], uint8, on the CPU. Existing streams of these names are reused."""
        self._streams = {name: self._streams.get(name) or RandomStream(0, default_device()) for name in states}
        for name, stream in self._streams.items():
            stream.set_state_bytes(states[name])

    def add(self, name: str, seed: int) -> None:
        """Adds a stream. Raises ValueError if the name is taken."""
        if name in self._streams:
            raise ValueError(f"the random-number stream {name!r} already exists: reset the tracker first")
        self._streams[name] = RandomStream(seed, default_device())

    def generators(self) -> list[torch.Generator]:
        """Returns the GPU generators of all streams in the order they were added; empty on the CPU.

        Each must be registered with CUDAGraph.register_generator_state before a graph is captured. A graph registers
        the default generator itself.
        """
        return [stream.gpu for stream in self._streams.values() if stream.gpu is not None]

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Makes torch draw from the stream `name` inside the block.

        This is allowed during the capture of a CUDA graph with which `generators` are registered. Raises ValueError if
        there is no such stream.
        """
        if name not in self._streams:
            raise ValueError(
                f"there is no random-number stream {name!r}: call model_parallel_cuda_manual_seed, or add it"
            )
        with self._streams[name].drawn():
            yield


@functools.cache
def rng_tracker() -> CudaRNGStatesTracker:
    """Returns the tracker of this process."""
    return CudaRNGStatesTracker()
