"""Interfaces of a capture: the device that makes graphs, participants that keep records, and static inputs.

full_cuda_graph.py captures the forward and backward passes of a step, transformer/cuda_graphs.py parts of layers.
graphs/safety.py checks what captured code must not do.

[Note: graphs] A graph repeats the work that was launched during its capture: the same kernels on the same memory, with
the numbers that the host passed to them then. A replay runs no Python. So inputs are copied into static memory, and
numbers that change are read from the device. A participant restores the host's records of what the passes did.

[Note: pools] The graphs of one memory pool share memory: a capture reuses the memory that earlier captures of its pool
have freed. A replay may therefore overwrite all memory that later captures of its pool allocated, including their
outputs and saved tensors. A later capture never reuses memory that is still referenced. So the graphs of a pool must
be replayed in the order of their capture, one at a time. When an earlier graph is replayed, nothing may still need the
memory of the later ones.
"""

from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

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
        """Records its body into a graph instead of running it. Raises RuntimeError if no graph can hold the body.

        pool: a result of `new_pool`; None for the device's own pool.
        """
        ...

    def capturing_together(self) -> AbstractContextManager[None]:
        """Surrounds several captures, if later ones use tensors of earlier ones before any graph was replayed."""
        ...


class GraphParticipant:
    """Keeps the host's records of what captured passes do; see [Note: graphs]. By itself it does nothing.

    An account is a participant's record of one captured graph.
    """

    def fingerprint(self) -> Hashable:
        """Returns a value that differs once captured graphs can no longer be used.

        A replay changes it on all ranks or on none. Eager passes may change it on some ranks alone.
        """
        return None

    def prepare(self) -> None:
        """Completes work in flight. Called before each capture and each replay, outside of them."""

    def capturing(self) -> AbstractContextManager[None]:
        """Surrounds the captured passes. The current stream must have joined all other streams when the block ends."""
        return nullcontext()

    def captured(self) -> Any:
        """Returns the account of a capture, which `replayed` receives after each replay."""
        return None

    def dropped(self) -> None:
        """Called instead of `captured` if the capture failed on any rank. None of its work has run."""

    def replayed(self, account: Any) -> None:
        """Restores the records that the passes would have left. Called after each replay."""


class StaticTree:
    """Static device memory for values of one structure: tensors in dicts, lists and tuples.

    Values other than tensors are part of the graph, so they must be equal each time the memory is filled.
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
        """Copies values in, in the order of the current stream. Copies from pinned tensors do not block the host.

        Their signature must be that of the values from which this was made: see `signature`.
        """
        for own, new in zip(self._leaves, tree_flatten(values)[0], strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new, non_blocking=True)


def signature(values: Any) -> Hashable:
    """Returns the structure, shapes and dtypes of tensors, and other values: what values of one StaticTree share.

    Raises ValueError for an object that is neither a tensor nor a plain constant, as it could change unnoticed.
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
    """Work could not be captured, and none of it has run. For a whole step, all ranks raise it."""


@contextmanager
def naming_first_error() -> Iterator[None]:
    """Turns an error inside into a CaptureFailedError with a message of one line.

    It surrounds the captured work, and once more the capture: ending a capture after an error raises a second error,
    and the message should be that of the first. It accepts most types of errors, as other ranks must learn of each.
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
