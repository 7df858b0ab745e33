"""assert_capturable(): fails, without a GPU, at the first thing that a CUDA graph could not hold or would get wrong.

It watches what runs on tensors of the CPU and on fake tensors, also fake ones of a GPU. What is refused, and why, is in
graph_refusals.py; how a graph is made is full_cuda_graph.py's matter.

[Note: what is watched] A TorchFunctionMode sees functions and methods with their arguments, which many operators on the
CPU never hear of (x.cpu() does nothing there). A TorchDispatchMode sees the operators below, also those of backward. A
profile function sees what is neither: calls of streams, events, generators, barriers. Inside an operator nothing is
watched: its CUDA kernel is another one, and the CPU's may read what it likes.
"""

import gc
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.graph_refusals import (
    BAKED,
    GENERATOR,
    OUTLIVES,
    PYTHON_CALLS,
    PYTHON_NAMES,
    READ,
    RESIZED,
    SHAPE,
    Reason,
    fills_where_masked,
    is_elsewhere,
    reads_only_on_cpu,
    reason_against_function,
    reason_against_method,
    reason_against_operator,
    reason_against_result,
    reason_of_copy,
    tensors_in,
)

# Frames of these files are nobody's own code.
_OWN_OR_TORCHS = (os.path.dirname(torch.__file__) + os.sep, __file__)
_PYTHONS = sysconfig.get_path("stdlib") + os.sep
_FORWARD_LINE = "line of the forward"


@dataclass(frozen=True)
class SourceLine:
    """Where user code stands; backward: the node of autograd that ran, where that line is not of backward itself."""

    file: str
    number: int
    backward: str | None = None

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        during = f" in {self.backward}" if self.backward else ""
        return f"{self.file}:{self.number} ({text}){during}"


class CaptureError(RuntimeError):
    """Something that cannot be captured. operation: what; why: the reason; line: of user code; instead: what to do."""

    def __init__(self, operation: str, why: str, *, line: SourceLine, instead: str) -> None:
        super().__init__(f"{operation} at {line}: {why}; {instead}")
        self.operation, self.why, self.line, self.instead = operation, why, line, instead


@dataclass
class Region:
    """What is watched. refusals: what was found so far, each operation of a line once; one alone unless collected."""

    refusals: list[CaptureError] = field(default_factory=list)
    _planned: set[int] = field(default_factory=set)

    def keep(self, *tensors: Tensor) -> None:
        """Plans that these live on, any shape and dtype: outputs that are read after a replay, memory of an owner.

        A replay overwrites them in place.
        """
        self._planned |= {tensor.untyped_storage()._cdata for tensor in tensors}


@contextmanager
def assert_capturable(generators: Sequence[torch.Generator] = ()) -> Iterator[Region]:
    """Raises CaptureError at the first operation inside that a CUDA graph could not hold or would get wrong.

    generators: those that will be registered with the graph, beside the default one. What is refused, and why:
    reads of values by the host, and checks that need them: it would have to wait, and a replay does not read again.
    Shapes that depend on values: replays have the shape of the capture.
    New memory of the host, and copies from or to it unless they are pinned and asynchronous: they make the host wait,
    or are done by the host, which does nothing in a replay.
    Numbers on the host that are no constants: a replay has the old ones.
    Other generators, generators' states, and numbers drawn on the host: a replay would have the same numbers again.
    Waiting for streams, events and ranks on the host: an error in a capture.
    Memory made inside that somebody still holds at the end, unless Region.keep plans it: replays overwrite it.
    Memory from before that is resized inside: replays use the old address.
    """
    with _watched(_Watch(generators, Region(), stops=True)) as region:
        yield region


@contextmanager
def collect_refusals(generators: Sequence[torch.Generator] = ()) -> Iterator[Region]:
    """As assert_capturable, but goes on, and leaves all that it would refuse in Region.refusals."""
    with _watched(_Watch(generators, Region(), stops=False)) as region:
        yield region


@contextmanager
def _watched(watch: "_Watch") -> Iterator[Region]:
    functions = _Functions(watch)
    with ExitStack() as stack:
        stack.enter_context(_on_in_backward(functions))
        stack.enter_context(_Operators(watch))
        stack.enter_context(functions)
        stack.callback(sys.setprofile, sys.getprofile())
        sys.setprofile(_Calls(watch))
        yield watch.region
    watch.finish()


@contextmanager
def _on_in_backward(functions: TorchFunctionMode) -> Iterator[None]:
    """A mode is off inside Tensor.backward, which is a function of torch; but backward runs the user's code again."""
    run_backward = torch.autograd._engine_run_backward

    def run_watched(*args: Any, **named: Any) -> Any:
        with functions:
            return run_backward(*args, **named)

    torch.autograd._engine_run_backward = run_watched
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run_backward


class _Watch:
    """What the modes share: what was refused, and which memory is whose."""

    def __init__(self, generators: Sequence[torch.Generator], region: Region, *, stops: bool) -> None:
        self.region = region
        # By address: an operator is given another object of Python's for the same generator.
        self.generators = {one._cdata for one in (torch.default_generator, *generators)}  # type: ignore[attr-defined]
        # Inside an operator, and inside what was refused; reads of the CPU alone; x[mask] = number.
        self.is_quiet = self.in_check = self.in_masked_fill = False
        self.host_devices: list[torch.device] = []
        self._stops = stops
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}  # from before the region, with their sizes
        self._made: dict[int, tuple[StorageWeakRef, str, SourceLine]] = {}

    def refuse(self, operation: str, reason: Reason, *, line: SourceLine | None = None) -> None:
        """Raises, or notes and goes on."""
        if self.is_quiet:
            return
        error = CaptureError(operation, reason.why, line=line or user_line(), instead=reason.instead)
        if all((one.operation, one.line) != (operation, error.line) for one in self.region.refusals):
            self.region.refusals.append(error)
        if self._stops:
            raise error

    def finish(self) -> None:
        """After the region: what is left over of it. Raises what somebody caught inside, too."""
        if self._stops and self.region.refusals:
            raise self.region.refusals[0]
        if self._left_over():
            # Cycles of Python objects hold nothing on purpose.
            gc.collect()
        for operation, line in self._left_over():
            self.refuse(f"the memory of {operation}", OUTLIVES, line=line)

    def _left_over(self) -> list[tuple[str, SourceLine]]:
        return [
            (operation, line)
            for number, (storage, operation, line) in self._made.items()
            if number not in self.region._planned and not storage.expired()
        ]

    def meets(self, tensors: Sequence[Tensor], storages: Sequence[torch.UntypedStorage]) -> None:
        """Arguments of an operator: memory that nobody has seen being made is from before the region."""
        for storage in (*(tensor.untyped_storage() for tensor in tensors), *storages):
            if storage._cdata not in self._made and storage._cdata not in self._known:
                self._known[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def made(self, operation: str, results: Sequence[Tensor]) -> None:
        """Results of an operator: memory that nobody has seen before was made by it."""
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata not in self._made and storage._cdata not in self._known:
                self._made[storage._cdata] = StorageWeakRef(storage), operation, user_line()

    def check_sizes(self, operation: str, tensors: Sequence[Tensor]) -> None:
        """After an operator that writes to these."""
        for storage in (tensor.untyped_storage() for tensor in tensors):
            known = self._known.get(storage._cdata)
            if known is not None and known[1] != storage.nbytes():
                self.refuse(operation, RESIZED)

    def is_from_before(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self._known

    def refuse_resize(self, storage: torch.UntypedStorage, *, frame: FrameType) -> None:
        if storage._cdata not in self._made:
            self.refuse("torch.UntypedStorage.resize_", RESIZED, line=user_line(frame))


class _Calls:
    """A profile function; see [Note: what is watched]."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._watch.is_quiet:
            return
        if event == "call" and frame.f_code.co_name in PYTHON_NAMES:
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
            if name in PYTHON_CALLS:
                self._watch.refuse(name, PYTHON_CALLS[name], line=user_line(frame.f_back))
        elif event == "c_call":
            owner, name = arg.__self__, arg.__name__
            reason = reason_against_method(owner, name)
            if reason is not None:
                operation = f"{type(owner).__module__}.{type(owner).__name__}.{name}"
                self._watch.refuse(operation, reason, line=user_line(frame))
            elif name == "resize_" and isinstance(owner, torch.UntypedStorage):
                self._watch.refuse_resize(owner, frame=frame)


class _Functions(TorchFunctionMode):
    """Sees functions and methods of torch; see [Note: what is watched]."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, named, name = self._watch, kwargs or {}, func.__name__
        reason = reason_against_function(name, args, named=named)
        if reason is None and name not in ("__get__", "device") and self._names_host(args, named):
            reason = READ if name == "to" else None
        if reason is not None:
            watch.refuse(resolve_name(func) or name, reason)
        before = watch.is_quiet, watch.in_check, watch.in_masked_fill
        watch.is_quiet |= reason is not None
        watch.in_check |= reads_only_on_cpu(name, args, named=named)
        watch.in_masked_fill |= fills_where_masked(name, args)
        try:
            result = func(*args, **named)
        finally:
            watch.is_quiet, watch.in_check, watch.in_masked_fill = before
        if func is torch.device:
            watch.host_devices += [result] if result.type == "cpu" else []
        given = {key: value for key, value in named.items() if key != "device" or not self._names_host((value,), {})}
        unplaced = reason_against_result(name, result, named=given)
        if unplaced is not None:
            watch.refuse(resolve_name(func) or name, unplaced)
        _note_forward_line(result)
        return result

    def _names_host(self, args: Sequence[Any], named: dict[str, Any]) -> bool:
        """Whether an argument is "cpu", or a device that the region itself made so; x.device may be any."""
        values = (*args, named.get("device"))
        return any(
            (isinstance(value, str) and value.split(":")[0] == "cpu")
            or any(value is device for device in self._watch.host_devices)
            for value in values
        )


class _Operators(TorchDispatchMode):
    """Sees operators, also those of backward; see [Note: what is watched]."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, named = self._watch, kwargs or {}
        with torch._C.DisableTorchFunction():
            given = _by_name(func, args, named=named)
            tensors = tensors_in(given.values())
            watch.meets(tensors, [value for value in given.values() if isinstance(value, torch.UntypedStorage)])
            reason = self._reason(func, given)
            if reason is not None:
                watch.refuse(str(func), reason)
            before, watch.is_quiet = watch.is_quiet, True
            try:
                result = func(*args, **named)
            finally:
                watch.is_quiet = before
            watch.made(str(func), tensors_in((result,)))
            if func._schema.is_mutable:
                watch.check_sizes(str(func), tensors)
        return result

    def _reason(self, func: Any, given: dict[str, Any]) -> Reason | None:
        watch, generator = self._watch, given.get("generator")
        if generator is not None and generator._cdata not in watch.generators:
            return GENERATOR
        reason = reason_against_operator(func, given) or reason_of_copy(func, given)
        if (reason is READ and watch.in_check) or (reason is SHAPE and watch.in_masked_fill):
            return None
        if reason is None and func.namespace == "aten" and is_elsewhere(given):
            on_host = (tensor for tensor in tensors_in(given.values()) if tensor.device.type == "cpu")
            return BAKED if any(watch.is_from_before(number) for number in on_host) else None
        return reason


def _by_name(func: Any, args: Sequence[Any], *, named: dict[str, Any]) -> dict[str, Any]:
    """An operator's arguments, with the defaults of those that were not given."""
    given = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    return {**given, **{one.name: value for one, value in zip(func._schema.arguments, args)}, **named}


def _note_forward_line(result: Any) -> None:
    """Leaves the line with autograd's node, for messages about its backward."""
    for tensor in tensors_in((result,)):
        if tensor.grad_fn is not None:
            # torch's stubs call it a method.
            metadata: Any = tensor.grad_fn.metadata
            metadata.setdefault(_FORWARD_LINE, user_line())


def user_line(frame: FrameType | None = None) -> SourceLine:
    """The innermost line that is neither torch's nor Python's own; in backward of a node of torch's, its forward's."""
    here = frame or sys._getframe()
    node: Any = None
    while here.f_back is not None and _is_not_users(here.f_code.co_filename):
        if here.f_code.co_name == "_engine_run_backward":
            node = torch._C._current_autograd_node()
        here = here.f_back
    if node is None:
        return SourceLine(here.f_code.co_filename, here.f_lineno)
    forward = node.metadata.get(_FORWARD_LINE) or SourceLine(here.f_code.co_filename, here.f_lineno)
    return SourceLine(forward.file, forward.number, f"the backward of {node.name()}")


def _is_not_users(file: str) -> bool:
    return file.startswith(_OWN_OR_TORCHS) or (file.startswith(_PYTHONS) and "site-packages" not in file)
