"""TapeGraphs: what CUDA graphs do to a program, done on the CPU, so that a replay can be compared with eager passes.

For tests and tools/check_capture.py: it makes nothing faster. Knows operators and memory; what may not be captured at
all is graphs/safety.py's, of which the reads of the device are refused here too.

[Note: tape] A capture writes down each operator that PyTorch dispatches, with its arguments. As with a GPU, the capture
itself leaves no trace: memory and random numbers are what they were before, and memory that was made inside holds
garbage (NaN) until the first replay. A replay runs the operators again on the very same memory; nothing of Python runs.
So a value that Python carried from one pass to the next, a number that the host baked in, or an account that nobody
keeps shows up as another loss.

A GPU reuses in later captures of a pool the memory that earlier ones freed. Which memory that is depends on the
allocator, so a tape assumes the worst case of [Note: pools]: before it runs, a replay fills with NaN all memory that
later captures of its pool made.
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
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_leaves

from megatron.core.device import rng_state_bytes, set_rng_state_bytes

_CPU = torch.device("cpu")
# Operators that only make memory: a replay finds there what was left.
_MAKE_MEMORY = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
# Whose partner may come later: with what is launched after them.
_SENDS = frozenset({torch.ops.c10d.send.default, torch.ops.c10d.recv_.default})
_READS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})


@dataclass(frozen=True)
class _Launch:
    """An operator as it was called, and what of its results is memory of its own: (position, tensor)."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    storages: frozenset[int]
    made: list[tuple[int, Tensor]]


@dataclass(frozen=True)
class _Pool:
    """A memory pool: its tapes in the order of their capture, kept alive by their owners alone."""

    tapes: "list[weakref.ref[Tape]]" = field(default_factory=list)

    def later_than(self, tape: "Tape") -> "list[Tape]":
        """Returns the tapes that were captured after `tape`."""
        alive = [found for found in (reference() for reference in self.tapes) if found is not None]
        return alive[alive.index(tape) + 1 :]


class Tape:
    """A captured part of a program; see Graph."""

    def __init__(self, pool: "_Pool") -> None:
        self.made: dict[int, tuple[Tensor, int]] = {}  # storages made by the capture, as bytes, with their sizes
        self._pool = pool
        pool.tapes[:] = [*(one for one in pool.tapes if one() is not None), weakref.ref(self)]
        self._launches: list[_Launch] = []
        # Collectives of which nobody has needed the result yet, and the storages that they work on.
        self._under_way: list[tuple[Any, frozenset[int]]] = []

    @torch.no_grad()
    def replay(self) -> None:
        """Runs all operators again, on the same memory, after it has spoiled that of later captures of the pool."""
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
        """Appends an operator."""
        self._launches.append(launch)

    def _wait_for(self, storages: frozenset[int] | None) -> None:
        """Waits for collectives that use any of these storages; None: for all."""
        left = []
        for work, used in self._under_way:
            if storages is None or used & storages:
                work.wait()
            else:
                left.append((work, used))
        self._under_way = left


class TapeGraphs:
    """A GraphDevice for the CPU; see [Note: tape]. Random numbers are those of torch's default generator alone."""

    def __init__(self) -> None:
        # Of captures that belong together, until all are done; None: each by itself.
        self._together: list[_Recorder] | None = None
        self._own_pool = _Pool()

    @contextmanager
    def on_capture_stream(self) -> Iterator[None]:
        """Runs its body unchanged: the CPU has no streams."""
        yield

    def new_pool(self) -> _Pool:
        """Returns an empty pool."""
        return _Pool()

    @contextmanager
    def capturing(self, pool: _Pool | None = None) -> Iterator[Tape]:
        """Records the body's operators as a Tape. Raises RuntimeError where the host would have to read a result."""
        tape, drawn = Tape(self._own_pool if pool is None else pool), rng_state_bytes(_CPU)
        recorder = _Recorder(tape)
        with nullcontext() if self._together is not None else self.capturing_together():
            assert self._together is not None, "made by capturing_together"
            self._together.append(recorder)
            try:
                with _python_calls_patched(recorder), recorder:
                    yield tape
            finally:
                set_rng_state_bytes(drawn, _CPU)

    @contextmanager
    def capturing_together(self) -> Iterator[None]:
        """Keeps the values that the captures computed until the block ends, since later captures read them."""
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
        self._before: dict[int, tuple[Tensor, Tensor]] = {}  # bytes of older storages that were written to, and a copy
        self._made = tape.made

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):
            # A tensor that has no memory of its own says what it does instead, in operations that come here.
            return NotImplemented
        kwargs = kwargs or {}
        if _READS & set(func.tags) and not _is_plain_index(func, args):
            raise _read_refused(str(func))
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        launch = _Launch(func, args, kwargs, frozenset(map(_key, tensors)), [])
        # Collectives do not say what they write to.
        for tensor in tensors if func.namespace == "c10d" else _written(func, args, kwargs=kwargs):
            self._keep(tensor)
        results = func(*args, **kwargs)
        for place, leaf in enumerate(tree_leaves(results)):
            # What only tells a layout has no memory to keep.
            if isinstance(leaf, Tensor) and not leaf.is_meta and _key(leaf) not in launch.storages:
                # Another tensor than the caller's, which may come to stand for other memory.
                launch.made.append((place, leaf.detach()))
                self._made[_key(leaf)] = (_bytes(leaf), leaf.untyped_storage().nbytes())
        if func._schema.name in _MAKE_MEMORY:
            launch.made.clear()
        self._tape.add(launch)
        return results

    def undo(self) -> None:
        """Gives memory from before the capture what it held then."""
        for current, before in self._before.values():
            current.copy_(before)

    def spoil(self) -> None:
        """Fills memory that was made inside with NaN."""
        _spoil(self._made.values())

    def _keep(self, tensor: Tensor) -> None:
        if _key(tensor) not in self._made and _key(tensor) not in self._before:
            data = _bytes(tensor)
            self._before[_key(tensor)] = (data, data.clone())


def _spoil(made: Iterable[tuple[Tensor, int]]) -> None:
    """Fills storages with NaN; what was freed for good gets memory again. made: bytes, [N], uint8, and sizes."""
    for data, num_bytes in made:
        if data.untyped_storage().nbytes() < num_bytes:
            data.untyped_storage().resize_(num_bytes)
        data.fill_(0xFF)


@contextmanager
def _python_calls_patched(recorder: "_Recorder") -> Iterator[None]:
    with ExitStack() as stack:
        # Some of gloo's collectives copy their result within `wait`, which a replay's own `wait` does too.
        stack.enter_context(patch.object(dist.Work, "wait", _unrecorded(dist.Work.wait)))
        # Not operators, so that nothing else would see them.
        for name in ("tolist", "numpy"):
            method = _refused_outside_operators(vars(torch._C.TensorBase)[name], name, recorder=recorder)
            stack.enter_context(patch.object(Tensor, name, method, create=True))
        yield


def _refused_outside_operators(read: Callable[..., Any], name: str, *, recorder: "_Recorder") -> Callable[..., Any]:
    def read_in_operators(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if recorder in _get_current_dispatch_mode_stack():
            raise _read_refused(f"torch.Tensor.{name}")
        return read(tensor, *args, **kwargs)

    return read_in_operators


def _read_refused(operation: str) -> RuntimeError:
    return RuntimeError(
        f"{operation} reads the device, or has a shape that depends on values: no graph can hold it; "
        "megatron.core.graphs.safety.assert_capturable names the line (where the CPU alone reads, which only "
        "--deterministic-mode does without, tapes cannot stand for a GPU)"
    )


def _unrecorded(wait: Callable[..., bool]) -> Callable[..., bool]:
    def wait_unrecorded(work: dist.Work, *timeout: Any) -> bool:
        with _disable_current_modes():
            return wait(work, *timeout)

    return wait_unrecorded


def _is_plain_index(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a lookup by positions: the operator has the tag for masks, which it takes too."""
    masks = (torch.bool, torch.uint8)
    return func is torch.ops.aten.index.Tensor and all(index is None or index.dtype not in masks for index in args[1])


def _key(tensor: Tensor) -> int:
    # Tensors on the tape keep the storages alive, so that no two have one number.
    return tensor.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    """All bytes of a tensor's storage: [N], uint8, a view."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _written(func: Any, args: tuple[Any, ...], *, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operator says it writes to."""
    found: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name) if argument.name in kwargs else (*args, *[None] * 64)[position]
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found
