"""What capture of a device's work needs to know of the device, of those who take part, and of the memory that stays.

Which work is captured is full_cuda_graph.py's (a step's passes) and transformer/cuda_graphs.py's (single modules); what
must not happen in it is graphs/safety.py's.

[Note: graphs] A graph repeats what was launched while it was captured: the same kernels on the same memory, with the
numbers that the host gave them then. Nothing of it runs in Python again. So inputs are copied into memory that stays,
numbers that change are read from the device, and whoever keeps account on the host of what passes did is told that
they ran once more.

[Note: pools] The graphs of one memory pool share memory: a capture reuses whatever earlier captures of its pool have
freed. A replay therefore may overwrite everything that graphs captured later in the same pool made, their outputs and
saved tensors included. Memory that a capture made and that is still referenced is never given to a later capture. So
the graphs of a pool must be replayed in the order of their capture, one at a time, and all that the later graphs made
must be dead when an earlier one is replayed.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

# What a graph may take from the host as it is, if it is the same each time.
CONSTANTS = (bool, int, float, str, type(None))


class Graph(Protocol):
    """A captured piece of work; torch.cuda.CUDAGraph is one."""

    def replay(self) -> None:
        """Launches the captured work on its memory, after the current stream's work; the host does not wait."""
        ...


class GraphDevice(Protocol):
    """Captures the work of a device, into memory pools: see [Note: pools]."""

    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Runs its body eagerly where captures are made, so that libraries set up what they keep for a stream."""
        ...

    def new_pool(self) -> Any:
        """Returns an empty memory pool for graphs of this device. Its memory is released after its last graph."""
        ...

    def capturing(self, pool: Any = None) -> AbstractContextManager[Graph]:
        """Records its body into the graph instead of running it. Raises RuntimeError for what no graph can hold.

        pool: one of `new_pool`; None: a pool of the device's own.
        """
        ...

    def capturing_together(self) -> AbstractContextManager[None]:
        """Surrounds captures of which later ones use tensors of earlier ones, before any of them has run."""
        ...


class GraphParticipant:
    """Keeps the host's records of what captured passes do; see [Note: graphs]. By itself it does nothing."""

    def fingerprint(self) -> Hashable:
        """Returns a value that changes when a captured graph can no longer be used.

        While a graph is replayed it changes on all ranks or on none; after eager passes it may change on some alone.
        """
        return None

    def prepare(self) -> None:
        """Called before each capture and replay, outside of it: completes what is in flight."""

    def capturing(self) -> AbstractContextManager[None]:
        """Surrounds the passes, as part of the graph; all other streams must be waited for before it ends."""
        return nullcontext()

    def captured(self) -> Any:
        """Returns the record of a capture, which `replayed` receives each time."""
        return None

    def dropped(self) -> None:
        """Called instead of `captured` where the capture failed on this rank or another: nothing of it has run."""

    def replayed(self, account: Any) -> None:
        """Called after the graph has run: restores the record that the capture left."""


class StaticTree:
    """Device memory that stays, for values of one structure: tensors in dicts, lists and tuples.

    What is no tensor must be equal whenever the memory is filled, as it is part of the graph.
    """

    def __init__(self, values: Any, device: torch.device) -> None:
        leaves, self._structure = tree_flatten(values)
        self._leaves = [
            torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]

    @property
    def values(self) -> Any:
        """The tensors that stay, in dicts, lists and tuples of the caller's own."""
        return tree_unflatten(self._leaves, self._structure)

    def fill(self, values: Any) -> None:
        """Copies values in, behind what reads the last ones; of page-locked tensors without waiting for the device.

        They must have the shapes, dtypes and other values that this was made for: see `signature`.
        """
        for own, new in zip(self._leaves, tree_flatten(values)[0], strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new, non_blocking=True)


def signature(values: Any) -> Hashable:
    """Returns what all values of one StaticTree share: structure, shapes and dtypes of tensors, all other values.

    Raises ValueError for what is neither a tensor nor a plain constant: it could change without being seen.
    """
    leaves, structure = tree_flatten(values)
    wrong = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
    if wrong is not None:
        raise ValueError(
            f"a batch has a {type(wrong).__name__}: with CUDA graphs batches are tensors, numbers, texts and None in "
            "dicts, lists and tuples; make it a tensor"
        )
    return str(structure), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
    )


def fingerprints(participants: Sequence[GraphParticipant]) -> Hashable:
    """The values that all of them take for given."""
    return tuple(participant.fingerprint() for participant in participants)


_MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)


class CaptureFailedError(RuntimeError):
    """Something could not be captured; nothing of it has run. Raised for a step on all ranks."""


@contextmanager
def naming_first_error() -> Iterator[None]:
    """Raises CaptureFailedError, in one line, for an error inside; of several, the first that was named so.

    Once around what is captured and once around the capture: to end one that an error broke raises another, which says
    nothing of the first. Mistakes of any kind, as other ranks must learn of each.
    """
    try:
        yield
    except _MISTAKES as error:
        raise CaptureFailedError(_first_named(error)) from error


def _first_named(error: BaseException) -> str:
    link: BaseException | None = error
    while link is not None and not isinstance(link, CaptureFailedError):
        link = link.__context__
    found = link or error
    return str(found).partition("\n")[0] or type(found).__name__
