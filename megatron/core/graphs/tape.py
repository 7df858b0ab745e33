"""TapeGraphs: captures and replays on the CPU with the semantics of CUDA graphs, for tests and tools/check_capture.py.

Tapes do not make runs faster. graphs/safety.py detects all operations that cannot be captured; a tape only rejects
reads of values by the host.

[Note: tape] A capture records each operator that PyTorch dispatches, with its arguments. As on a GPU, the capture
itself has no effect: afterwards memory and random-number states are unchanged, and memory that was allocated inside
holds NaN until the first replay. A replay runs the operators on the same memory and runs no other Python code. A loss
therefore differs from the eager loss if Python passed a value from one pass to the next, if a host number became part
of the graph, or if no participant restored a record.

On a GPU a later capture reuses memory that earlier captures of its pool freed. The allocator decides which memory, so a
tape assumes the worst case of [Note: pools]: a replay first fills all memory of later captures of its pool with NaN.

[Note: waits of a tape] A replayed collective is asynchronous. The replay waits for it before the next operator that
uses any of its tensors, and at the end. It must not wait before sends and receives, because their partner may be
launched later.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from megatron.core.device import rng_state_bytes, set_rng_state_bytes
from megatron.core.device.torch_internals import TorchDispatchMode, dispatch_mode_stack, storage_id, tree_leaves

_CPU = torch.device("cpu")
# Operators that only allocate memory. A replay leaves the memory's contents unchanged.
_MAKE_MEMORY = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
# Transfers whose partner may be launched later; see [Note: waits of a tape].
_SENDS = frozenset({torch.ops.c10d.send.default, torch.ops.c10d.recv_.default})
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True)
class _Launch:
    """One call of an operator. made: the results that have newly allocated memory, as (position, tensor)."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    storages: frozenset[int]
    made: list[tuple[int, Tensor]]


@dataclass(frozen=True)
class _Pool:
    """A memory pool: weak references to its tapes, in the order of their capture."""

    tapes: "list[weakref.ref[Tape]]" = field(default_factory=list)

    def later_than(self, tape: "Tape") -> "list[Tape]":
        """Returns the tapes captured after `tape`."""
        alive = [found for found in (reference() for reference in self.tapes) if found is not None]
        return alive[alive.index(tape) + 1 :]


class Tape:
    """The recorded operators of one capture; implements Graph."""

    def __init__(self, pool: "_Pool") -> None:
        self.made: dict[int, tuple[Tensor, int]] = {}  # storages allocated by the capture: bytes and size
        self._pool = pool
        pool.tapes[:] = [*(one for one in pool.tapes if one() is not None), weakref.ref(self)]
        self._launches: list[_Launch] = []
        # Collectives in flight and the storages that they use.
        self._under_way: list[tuple[Any, frozenset[int]]] = []

    @torch.no_grad()
    def replay(self) -> None:
        """Overwrites memory that later captures of the pool allocated with NaN, then reruns the recorded operators."""
        for later in self._pool.later_than(self):
            _spoil(later.made.values())
        for launch in self._launches:
            if launch.operator not in _SENDS:
                self._wait_for(launch.storages)
            results = tree_leaves(launch.operator(*launch.args, **launch.kwargs))
            for place, tensor in launch.made:
                tensor.copy_(results[place])
            if launch.operator.namespace == "c10d":
                self._under_way.append((results[-1], launch.storages))
        self._wait_for(None)

    def add(self, launch: "_Launch") -> None:
        """Appends an operator call."""
        self._launches.append(launch)

    def _wait_for(self, storages: frozenset[int] | None) -> None:
        """Waits for collectives that use any of these storages; None means all collectives."""
        left = []
        for work, used in self._under_way:
            if storages is None or used & storages:
                work.wait()
            else:
                left.append((work, used))
        self._under_way = left


class TapeGraphs:
    """A GraphDevice for the CPU; see [Note: tape]. It supports only torch's default random generator."""

    def __init__(self) -> None:
        # The captures inside capturing_together; None outside of it.
        self._together: list[_Recorder] | None = None
        self._own_pool = _Pool()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Runs its body unchanged, because the CPU has no streams."""
        yield

    def new_pool(self) -> _Pool:
        """Returns an empty pool."""
        return _Pool()

    @contextmanager
    def capturing(self, pool: _Pool | None = None) -> Iterator[Tape]:
        """Records the body's operators as a Tape. Raises RuntimeError if the host reads a result."""
        tape, drawn = Tape(self._own_pool if pool is None else pool), rng_state_bytes(_CPU)
        recorder = _Recorder(tape)
        with nullcontext() if self._together is not None else self.capturing_together():
            assert self._together is not None, "set by capturing_together"
            self._together.append(recorder)
            try:
                with _python_calls_patched(recorder), recorder:
                    yield tape
            finally:
                set_rng_state_bytes(drawn, _CPU)

    @contextmanager
    def capturing_together(self) -> Iterator[None]:
        """Restores memory only at the end of the block, because later captures read results of earlier ones."""
        recorders: list[_Recorder] = []
        self._together = recorders
        try:
            yield
        finally:
            self._together = None
            for recorder in reversed(recorders):
                recorder.undo()
            for recorder in recorders:
                recorder.spoil()


class _Recorder(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # older storages that were written to: bytes and a copy
        self._made = tape.made

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # Subclasses run other operators instead, which are dispatched here next.
            return NotImplemented
        kwargs = kwargs or {}
        if _READS & set(func.tags) and not _is_plain_index(func, args):
            raise _read_refused(str(func))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        launch = _Launch(func, args, kwargs, frozenset(map(_key, tensors)), [])
        # The schema of a collective does not mark the arguments that it writes to.
        for tensor in tensors if func.namespace == "c10d" else _written(func, args, kwargs=kwargs):
            self._keep(tensor)
        results = func(*args, **kwargs)
        for place, leaf in enumerate(tree_leaves(results)):
            # A meta tensor only describes a layout and has no memory.
            if isinstance(leaf, Tensor) and not leaf.is_meta and _key(leaf) not in launch.storages:
                # A tensor owned by the tape, because the caller may assign its tensor other memory (set_, .data).
                launch.made.append((place, leaf.detach()))
                self._made[_key(leaf)] = (_bytes(leaf), leaf.untyped_storage().nbytes())
        if func._schema.name in _MAKE_MEMORY:
            launch.made.clear()
        self._tape.add(launch)
        return results

    def undo(self) -> None:
        """Restores the content that older memory had before the capture."""
        for current, before in self._before.values():
            current.copy_(before)

    def spoil(self) -> None:
        """Fills memory that the capture allocated with NaN."""
        _spoil(self._made.values())

    def _keep(self, tensor: Tensor) -> None:
        if _key(tensor) not in self._made and _key(tensor) not in self._before:
            data = _bytes(tensor)
            self._before[_key(tensor)] = (data, data.clone())


def _spoil(made: Iterable[tuple[Tensor, int]]) -> None:
    """Fills storages with NaN, after restoring their size if it was reduced. made: bytes, [N], uint8, and sizes."""
    for data, num_bytes in made:
        if data.untyped_storage().nbytes() < num_bytes:
            data.untyped_storage().resize_(num_bytes)
        data.fill_(0xFF)


@contextmanager
def _python_calls_patched(recorder: "_Recorder") -> Iterator[None]:
    with ExitStack() as stack:
        # Some collectives of gloo copy their result in `wait`. A replay also calls `wait`, which then copies it.
        stack.enter_context(patch.object(dist.Work, "wait", _unrecorded(dist.Work.wait)))
        # These methods are not operators, so the dispatch mode does not see them.
        for name in ("tolist", "numpy"):
            method = _refused_outside_operators(vars(torch._C.TensorBase)[name], name, recorder=recorder)
            stack.enter_context(patch.object(Tensor, name, method, create=True))
        yield


def _refused_outside_operators(read: Callable[..., Any], name: str, *, recorder: "_Recorder") -> Callable[..., Any]:
    def read_in_operators(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder in dispatch_mode_stack():
            raise _read_refused(f"torch.Tensor.{name}")
        return read(tensor, *args, **kwargs)

    return read_in_operators


def _read_refused(operation: str) -> RuntimeError:
    return RuntimeError(
        f"{operation} reads a device value or has a value-dependent shape, so a graph cannot contain it; "
        "megatron.core.graphs.safety.assert_capturable reports the line. Some code reads values only on the CPU: "
        "with a tape, set --deterministic-mode"
    )


def _unrecorded(wait: Callable[..., bool]) -> Callable[..., bool]:
    def wait_unrecorded(work: dist.Work, *timeout: Any) -> bool:
        with _disable_current_modes():
            return wait(work, *timeout)

    return wait_unrecorded


def _is_plain_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Returns whether an operator indexes by positions. It is tagged as dynamic because it also accepts masks."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and all(index is None or index.dtype not in masks for index in args[1])


def _key(tensor: Tensor) -> int:
    # The tape keeps the storages alive, so no two of them have the same address.
    return storage_id(tensor.untyped_storage())


def _bytes(tensor: Tensor) -> Tensor:
    """Returns a view of all bytes of a tensor's storage: [N], uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _written(func: Any, args: tuple[Any, ...], *, kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator writes to, according to its schema."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.name in kwargs else (*args, *[None] * 64)[position]
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
