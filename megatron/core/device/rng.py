"""Random numbers: seeds, states of torch's generators, and named streams in addition to the default stream.

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
    """Seeds the generators of Python, NumPy and torch (on all devices)."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state_bytes(device: torch.device) -> list[torch.Tensor]:
    """Returns the states of torch's default generators for the host and `device`: each [N], uint8, on the CPU."""
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
    """Random-number stream that is independent of torch's default stream, on the host and, for a GPU, on the device.

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
        """Returns the generator states: each [N], uint8, on the CPU. Not allowed while a CUDA graph is captured."""
        return [self._host] if self.gpu is None else [self._host, self.gpu.get_state()]

    def set_state_bytes(self, states: list[torch.Tensor]) -> None:
        """Restores the result of state_bytes: each [N], uint8, on the CPU. Not allowed during a CUDA graph capture."""
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
    """Named random-number streams in addition to torch's default stream, on a GPU or on the CPU."""

    def __init__(self, use_cudagraphable_rng: bool = False, is_inference_rng_tracker: bool = False) -> None:
        """Creates a tracker without streams.

        use_cudagraphable_rng: ignored, because GPU streams can always be used in CUDA graphs. Raises ValueError if
        is_inference_rng_tracker is True.
        """
        if is_inference_rng_tracker:
            raise ValueError("is_inference_rng_tracker is True: must be False, because inference is not supported")
        self._streams: dict[str, RandomStream] = {}

    def is_initialized(self) -> bool:
        """Returns whether any stream has been added."""
        return bool(self._streams)

    def reset(self) -> None:
        """Removes all streams."""
        self._streams = {}

    def get_states(self) -> RngStates:
        """Returns the generator states of each stream by name: each [N], uint8, on the CPU."""
        return {name: stream.state_bytes() for name, stream in self._streams.items()}

    def set_states(self, states: RngStates) -> None:
        """Restores the result of get_states: each [N], uint8, on the CPU. Reuses existing streams of the same name."""
        self._streams = {name: self._streams.get(name) or RandomStream(0, default_device()) for name in states}
        for name, stream in self._streams.items():
            stream.set_state_bytes(states[name])

    def add(self, name: str, seed: int) -> None:
        """Adds a stream with a seed. Raises ValueError if the name already exists."""
        if name in self._streams:
            raise ValueError(f"the random-number stream {name!r} already exists: reset the tracker first")
        self._streams[name] = RandomStream(seed, default_device())

    def generators(self) -> list[torch.Generator]:
        """Returns the GPU generators of all streams in the order they were added. The list is empty on the CPU.

        Each generator must be registered with CUDAGraph.register_generator_state before a graph is captured. The graph
        registers the default generator automatically.
        """
        return [stream.gpu for stream in self._streams.values() if stream.gpu is not None]

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Makes torch draw from the stream `name` inside the block.

        Allowed during a CUDA graph capture if `generators` are registered with the graph. Raises ValueError if the
        stream does not exist.
        """
        if name not in self._streams:
            raise ValueError(
                f"there is no random-number stream {name!r}: call model_parallel_cuda_manual_seed() or add() first"
            )
        with self._streams[name].drawn():
            yield


@functools.cache
def rng_tracker() -> CudaRNGStatesTracker:
    """Returns the random-number stream tracker of this process."""
    return CudaRNGStatesTracker()
