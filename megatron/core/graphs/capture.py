"""Interfaces of a capture: the device that creates graphs, participants that maintain records, and static inputs.

full_cuda_graph.py captures the forward and backward passes of a step, transformer/cuda_graphs.py parts of layers.
graphs/safety.py detects forbidden operations in captured code.

[Note: graphs] A graph repeats the work that was launched during its capture: the same kernels on the same memory, with
the numbers that the host passed to them then. A replay runs no Python. Inputs are therefore copied into static memory,
and numbers that change are read from the device. A participant restores the host's records of the passes.

[Note: pools] The graphs of one memory pool share memory: a capture reuses the memory that earlier captures of its pool
have freed. A replay may therefore overwrite all memory that later captures of its pool allocated, including their
outputs and saved tensors. A later capture never reuses memory that is still referenced. The graphs of a pool must
therefore be replayed in the order of their capture, one at a time. When an earlier graph is replayed, the memory of
later graphs must no longer be in use.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from megatron.core.device.torch_internals import tree_flatten, tree_unflatten

# Types of values on the host that a graph may contain. They must be equal in each step.
CONSTANTS = (bool, int, float, str, type(None))


class Graph(Protocol):
    """Captured work, such as a torch.cuda.CUDAGraph."""

    def replay(self) -> None:
        """Launches the captured work after the current stream's work. Does not block the host."""
        ...


class GraphDevice(Protocol):
    """Captures the work of a device as graphs in memory pools; see [Note: pools]."""

    def on_capture_stream(self) -> AbstractContextManager[None]:
        """Runs its body eagerly on the capture stream, so that libraries create their workspaces for it."""
        ...

    def new_pool(self) -> Any:
        """Returns an empty memory pool. Its memory is released with its last graph."""
        ...

    def capturing(self, pool: Any = None) -> AbstractContextManager[Graph]:
        """Records its body into a graph instead of running it. Raises RuntimeError if the body cannot be captured.

        pool: a result of `new_pool`; None for the device's default pool.
        """
        ...

    def capturing_together(self) -> AbstractContextManager[None]:
        """Wraps several captures, so that later ones may use tensors of earlier ones before any graph is replayed."""
        ...


class GraphParticipant:
    """Maintains the host's records of captured passes; see [Note: graphs]. The base class does nothing.

    An account is a participant's record of one captured graph.
    """

    def fingerprint(self) -> Hashable:
        """Returns a value that changes once captured graphs can no longer be used.

        A replay changes it on all ranks or on none. Eager passes may change it on some ranks only.
        """
        return None

    def prepare(self) -> None:
        """Completes work in flight. Called before each capture and before each replay."""

    def capturing(self) -> AbstractContextManager[None]:
        """Wraps the captured passes. The current stream must have joined all other streams when the block ends."""
        return nullcontext()

    def captured(self) -> Any:
        """Returns the account of a capture, which `replayed` receives after each replay."""
        return None

    def dropped(self) -> None:
        """Called instead of `captured` if the capture failed on any rank. None of the captured work has run."""

    def replayed(self, account: Any) -> None:
        """Updates the host's records as if the captured passes had run eagerly. Called after each replay."""


class StaticTree:
    """Static device memory for values of one structure: tensors in dicts, lists and tuples.

    Values other than tensors are part of the graph, so they must be identical each time the memory is filled.
    """

    def __init__(self, values: Any, device: torch.device) -> None:
        leaves, self._structure = tree_flatten(values)
        self._leaves = [
            torch.empty_like(leaf, device=device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves
        ]

    @property
    def values(self) -> Any:
        """The static tensors, in new dicts, lists and tuples, which the caller may change."""
        return tree_unflatten(self._leaves, self._structure)

    def fill(self, values: Any) -> None:
        """Copies values into the static memory on the current stream; copies from pinned memory do not block the host.

        `values` must have the same signature as the values from which this object was created, see `signature`.
        """
        for own, new in zip(self._leaves, tree_flatten(values)[0], strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new, non_blocking=True)


def signature(values: Any) -> Hashable:
    """Returns the properties that all values of one StaticTree share.

    These are the structure, the shapes and dtypes of tensors, and all other values. Raises ValueError for an object
    that is neither a tensor nor a plain constant, because it could change unnoticed.
    """
    leaves, structure = tree_flatten(values)
    wrong = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *CONSTANTS))), None)
    if wrong is not None:
        raise ValueError(
            f"a batch contains a {type(wrong).__name__}: with CUDA graphs it may contain only tensors, numbers, "
            "strings and None in dicts, lists and tuples; convert the value to a tensor"
        )
    return str(structure), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf) for leaf in leaves
    )


def fingerprints(participants: Sequence[GraphParticipant]) -> Hashable:
    """Returns the fingerprints of all participants."""
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
    """Error for work that could not be captured; none of it has run. For a whole step, all ranks raise it."""


@contextmanager
def naming_first_error() -> Iterator[None]:
    """Converts an error inside into a CaptureFailedError with a one-line message.

    It wraps both the captured work and the capture, because ending a capture after an error raises a second error, and
    the message should describe the first. It converts most types of errors, because other ranks must be notified of
    every error.
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
