"""Linter for captured code: assert_capturable() raises at the first operation that a CUDA graph cannot repeat.

It requires no GPU, because it monitors code that runs on CPU tensors or on fake tensors of any device.
graphs/refusals.py contains the tables of rejected operations with their reasons. Graphs are created in other files.

[Note: monitored calls] A TorchFunctionMode sees calls of torch's functions and methods with their arguments, including
calls that run no operator on a CPU, such as x.cpu(). A TorchDispatchMode sees the operators, also in backward. A
profile function sees calls that neither mode sees, on streams, events, generators and barriers. The inside of an
operator is not monitored, because a GPU has a different kernel for it. These monitor the thread of the region, and
threads that compute on its behalf (device/threads.py). In other threads only methods of Tensor that read values are
monitored, and only for tensors that the region allocates or writes; other tensors belong to checkpoints and data
loading. Work that such a thread launches on the device is not detected. Code of this framework and of Triton may read
addresses. It compares them, or passes them to kernels. A read through an address from before the region, as with
ctypes, is not detected.
"""

import gc
import linecache
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, resolve_name

from megatron.core.device import inherited_by_threads
from megatron.core.device.torch_internals import FakeTensor, TorchDispatchMode, current_autograd_node, storage_id
from megatron.core.graphs.refusals import (
    ADDRESS,
    BAKED,
    GENERATOR,
    GENERATOR_STATE,
    GRAPH_SAFE_STATES,
    HOST_RANDOM,
    ON_CPU_ALONE,
    OUTLIVES,
    PYTHON_CALLS,
    PYTHON_NAMES,
    READ,
    READS_OF_THREADS,
    RESIZED,
    SHAPE,
    THREAD,
    WORK_OF_THREADS,
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

# Files whose frames are not user code.
_OWN_OR_TORCHS = (os.path.dirname(torch.__file__) + os.sep, __file__)
_FRAMEWORKS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHONS = sysconfig.get_path("stdlib") + os.sep
_FORWARD_LINE = "line of the forward"
_RELEASE_SECONDS = 1.0  # far longer than gloo's threads need on a busy machine


@dataclass(frozen=True)
class SourceLine:
    """A line of user code. backward: the autograd node that was running, if the line is in that node's forward."""

    file: str
    number: int
    backward: str | None = None

    def __str__(self) -> str:
        text = linecache.getline(self.file, self.number).strip()
        during = f" in {self.backward}" if self.backward else ""
        return f"{self.file}:{self.number} ({text}){during}"


class CaptureError(RuntimeError):
    """Error for an operation that cannot be captured.

    The message states the operation, the reason, the line of user code, and an alternative.
    """

    def __init__(self, operation: str, why: str, *, line: SourceLine, instead: str) -> None:
        super().__init__(f"{operation} at {line}: {why}; {instead}")
        self.operation, self.why, self.line, self.instead = operation, why, line, instead


class Region:
    """A monitored region. refusals: errors found so far, one per operation and line."""

    def __init__(self, memory: "_Memory") -> None:
        self.refusals: list[CaptureError] = []
        self.memory = memory

    def keep(self, *tensors: Tensor) -> None:
        """Declares tensors that outlive the region, such as outputs read after a replay.

        tensors: any shape and dtype. Each replay overwrites them in place.
        """
        self.memory.planned |= {storage_id(tensor.untyped_storage()) for tensor in tensors}

    def check_memory(self) -> None:
        """Adds a refusal for memory that is still referenced and was not declared with `keep`.

        assert_capturable calls it after the region. With collect_refusals the caller must call it, after it has used
        the results of the region.
        """
        if self.memory.left_over():
            # References from unreachable cycles are ignored.
            gc.collect()
            self.memory.wait_for_collectives()
        for operation, line in self.memory.left_over():
            self.add(CaptureError(f"the memory of {operation}", OUTLIVES.why, line=line, instead=OUTLIVES.instead))

    def add(self, error: CaptureError) -> None:
        """Adds a refusal, unless there is one for the same operation and line."""
        if all((one.operation, one.line) != (error.operation, error.line) for one in self.refusals):
            self.refusals.append(error)


@contextmanager
def assert_capturable(generators: Sequence[torch.Generator] = ()) -> Iterator[Region]:
    """Raises CaptureError at the first operation inside that a CUDA graph cannot contain, or would repeat incorrectly.

    generators: generators, in addition to the default one, that will be registered with the graph. It rejects:

    - Reads of values by the host, and checks that require them. The host would wait, and a replay does not read again.
    - Shapes that depend on values. Replays have the shapes of the capture.
    - Allocation of host memory, and copies from or to it that are not both pinned and asynchronous. The host would
      wait, or would do the work, which a replay does not repeat.
    - Host numbers that are not constants. A replay uses the values of the capture.
    - Other generators, reads and writes of generator states, and numbers drawn on the host. A replay would use the same
      numbers again.
    - Waits of the host for streams, events and ranks, which fail in a capture.
    - Addresses of tensors, and memory passed to another library (dlpack, ctypes), whose work is not part of the graph.
    - Work of other threads, and copies without an operator (deepcopy). A replay does not repeat them.
    - Memory allocated inside that is still referenced at the end, unless Region.keep declared it. Replays overwrite it.
    - Older memory that is resized inside. Replays use the old address.
    """
    watch = _Watch(generators, stops=True)
    with _monitoring(watch):
        yield watch.region
    watch.region.check_memory()
    if watch.region.refusals:
        # The memory check found a problem, or code of the region caught an earlier error.
        raise watch.region.refusals[0]


@contextmanager
def collect_refusals(
    generators: Sequence[torch.Generator] = (), *, goes_on_with: Region | None = None
) -> Iterator[Region]:
    """Collects in Region.refusals all operations that assert_capturable would reject, without raising.

    The caller must call Region.check_memory. goes_on_with: the region of a graph that is captured before this one and
    shares its memory.
    """
    watch = _Watch(generators, stops=False, memory=None if goes_on_with is None else goes_on_with.memory)
    with _monitoring(watch):
        yield watch.region


@contextmanager
def _monitoring(watch: "_Watch") -> Iterator[None]:
    """Installs the monitors of a region; see [Note: monitored calls]."""
    functions = _Functions(watch)
    with (
        _monitoring_threads(watch),
        _active_in_backward(functions),
        _Operators(watch),
        _monitoring_this_thread(watch, functions),
        # Dispatch modes such as _Operators are inherited without this.
        inherited_by_threads(partial(_monitoring_this_thread, watch, functions)),
    ):
        yield


@contextmanager
def _monitoring_this_thread(watch: "_Watch", functions: TorchFunctionMode) -> Iterator[None]:
    profile = sys.getprofile()
    watch.threads.add(threading.current_thread())
    with functions:
        sys.setprofile(_Calls(watch))
        try:
            yield
        finally:
            sys.setprofile(profile)


@contextmanager
def _active_in_backward(functions: TorchFunctionMode) -> Iterator[None]:
    """Keeps the mode active inside backward. torch disables it within torch functions, but backward runs user code."""
    run_backward = torch.autograd._engine_run_backward

    def run_monitored(*args: Any, **named: Any) -> Any:
        with functions:
            return run_backward(*args, **named)

    torch.autograd._engine_run_backward = run_monitored
    try:
        yield
    finally:
        torch.autograd._engine_run_backward = run_backward


@contextmanager
def _monitoring_threads(watch: "_Watch") -> Iterator[None]:
    """Records reads of the region's memory by other threads as refusals. Raising there could leave ranks waiting."""
    # Fills torch's cached table of names while no method is patched.
    resolve_name(Tensor.item)

    def monitored(name: str) -> Callable[..., Any]:
        read = getattr(Tensor, name)

        def read_in_any_thread(tensor: Tensor, *args: Any, **named: Any) -> Any:
            here = threading.current_thread()
            # The modes are active in threads of autograd, which Python did not start.
            is_others = here not in watch.threads and not isinstance(here, threading._DummyThread)
            if is_others and watch.memory.is_of_region(tensor.untyped_storage()):
                error = CaptureError(f"torch.Tensor.{name}", THREAD.why, line=user_line(), instead=THREAD.instead)
                watch.region.add(error)
            return read(tensor, *args, **named)

        watch.unpatched[read_in_any_thread] = read
        return read_in_any_thread

    with ExitStack() as stack:
        for name in READS_OF_THREADS:
            stack.enter_context(patch.object(Tensor, name, monitored(name), create=True))
        yield


class _Memory:
    """The storages of a region, by address. Weak references keep an address from being reused."""

    def __init__(self) -> None:
        self.planned: set[int] = set()
        self._older: dict[int, tuple[StorageWeakRef, int]] = {}  # storages from before the region, with their sizes
        self._made: dict[int, tuple[StorageWeakRef, str, SourceLine]] = {}
        self._written: set[int] = set()  # weak references to these storages

    def is_of_region(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether an operator of the region allocated the storage or wrote to it."""
        return storage_id(storage) in self._made or storage_id(storage) in self._written

    def write(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Records storages that an operator writes to."""
        self._written.update(storage_id(storage) for storage in storages)

    def is_made(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether an operator of the region allocated the storage."""
        return storage_id(storage) in self._made

    def meet(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Records the storages of an operator's arguments.

        Storages that no operator of the region allocated are older than the region.
        """
        for storage in storages:
            if storage_id(storage) not in self._made and storage_id(storage) not in self._older:
                self._older[storage_id(storage)] = StorageWeakRef(storage), storage.nbytes()

    def make(self, operation: str, storages: Iterable[torch.UntypedStorage]) -> None:
        """Records the storages of an operator's results. Storages not seen before were allocated by the operator."""
        for storage in storages:
            if storage_id(storage) not in self._made and storage_id(storage) not in self._older:
                self._made[storage_id(storage)] = StorageWeakRef(storage), operation, user_line()

    def is_resized(self, storage: torch.UntypedStorage) -> bool:
        """Returns whether the storage is older than the region and had a different size then."""
        _, num_bytes = self._older.get(storage_id(storage), (None, storage.nbytes()))
        return num_bytes != storage.nbytes()

    def left_over(self) -> list[tuple[str, SourceLine]]:
        """Returns the operators, with their lines, whose results are still referenced and were not declared."""
        made = ((number, *one) for number, one in self._made.items() if number not in self.planned)
        return [(operation, line) for _, storage, operation, line in made if not storage.expired()]

    def wait_for_collectives(self) -> None:
        """Waits until gloo's threads have released the tensors of completed collectives, at most _RELEASE_SECONDS.

        The threads release them shortly after `wait` has returned.
        """
        deadline = time.monotonic() + (_RELEASE_SECONDS if dist.is_initialized() else 0.0)
        while self.left_over() and time.monotonic() < deadline:
            time.sleep(0.001)


class _Watch:
    """State shared by the modes: the region, and the currently allowed operations."""

    def __init__(self, generators: Sequence[torch.Generator], *, stops: bool, memory: "_Memory | None" = None) -> None:
        self.memory = _Memory() if memory is None else memory
        self.region = Region(self.memory)
        # Keyed by address, because operators receive a different Python object for the same generator.
        self.generators = {one._cdata for one in (torch.default_generator, *generators)}  # type: ignore[attr-defined]
        # is_quiet: inside an operator or a rejected function. in_check: inside a check that reads only on the CPU.
        # in_masked_fill: inside x[mask] = number.
        self.is_quiet = self.in_check = self.in_masked_fill = False
        self.unpatched: dict[Callable[..., Any], Callable[..., Any]] = {}  # patched methods and torch's own
        # Threads of the region.
        self.threads: set[threading.Thread] = set()
        self.host_devices: list[tuple[torch.device, SourceLine]] = []
        self._stops = stops

    def refuse(self, operation: str, reason: Reason, *, line: SourceLine | None = None) -> None:
        """Adds a refusal, and raises it if the watch stops at the first one."""
        if self.is_quiet or ON_CPU_ALONE in _callers():
            return
        error = CaptureError(operation, reason.why, line=line or user_line(), instead=reason.instead)
        self.region.add(error)
        if self._stops:
            raise error


class _Calls:
    """The profile function; see [Note: monitored calls]."""

    def __init__(self, watch: _Watch) -> None:
        self._watch = watch

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        if self._watch.is_quiet:
            return
        if event == "call" and frame.f_code.co_name in PYTHON_NAMES:
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
            if name in PYTHON_CALLS and not (PYTHON_CALLS[name] is THREAD and WORK_OF_THREADS in _callers()):
                self._watch.refuse(name, PYTHON_CALLS[name], line=user_line(frame.f_back))
        elif event == "c_call":
            owner, name = arg.__self__, arg.__name__
            reason = reason_against_method(owner, name)
            if reason is GENERATOR_STATE and GRAPH_SAFE_STATES in _callers():
                return
            if reason is HOST_RANDOM and _is_importing(frame):
                return
            if reason is ADDRESS and _is_trusted_with_addresses(frame):
                return
            if reason is not None:
                operation = f"{type(owner).__module__}.{type(owner).__name__}.{name}"
                self._watch.refuse(operation, reason, line=user_line(frame))
            elif (
                name == "resize_" and isinstance(owner, torch.UntypedStorage) and not self._watch.memory.is_made(owner)
            ):
                self._watch.refuse("torch.UntypedStorage.resize_", RESIZED, line=user_line(frame))


class _Functions(TorchFunctionMode):
    """Monitors functions and methods of torch; see [Note: monitored calls]."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # torch looks methods up by name and finds the patched ones.
        func = self._watch.unpatched.get(func, func)
        watch, named, name = self._watch, kwargs or {}, func.__name__
        reason = reason_against_function(name, args, named=named)
        if reason is None and name not in ("__get__", "device") and self._names_host(args, named):
            reason = READ if name == "to" else None
        if reason is ADDRESS and name == "data_ptr" and _may_ask_for_addresses(user_line().file):
            reason = None
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
            watch.host_devices.append((result, user_line()))
        given = {key: value for key, value in named.items() if key != "device" or not self._names_host((value,), {})}
        unplaced = reason_against_result(name, result, named=given)
        if unplaced is not None:
            watch.refuse(resolve_name(func) or name, unplaced)
        _note_forward_line(result)
        return result

    def _names_host(self, args: Sequence[Any], named: dict[str, Any]) -> bool:
        """Returns whether an argument is "cpu", or a torch.device("cpu") created on the current line.

        x.device is not counted.
        """
        values = (*args, named.get("device"))
        if any(isinstance(value, str) and value.split(":")[0] == "cpu" for value in values):
            return True
        lines = [line for value in values for device, line in self._watch.host_devices if value is device]
        return any(line == user_line() for line in lines)


class _Operators(TorchDispatchMode):
    """Monitors operators, including operators that run in backward; see [Note: monitored calls]."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        watch, named = self._watch, kwargs or {}
        if any(_does_more(kind) for kind in types):
            # The operators that it runs are dispatched here next.
            return NotImplemented
        with torch._C.DisableTorchFunction():
            given = _by_name(func, args, named=named)
            storages = [tensor.untyped_storage() for tensor in tensors_in(given.values())]
            watch.memory.meet([*storages, *(one for one in given.values() if isinstance(one, torch.UntypedStorage))])
            written = (given[one.name] for one in func._schema.arguments if one.alias_info and one.alias_info.is_write)
            watch.memory.write(tensor.untyped_storage() for tensor in tensors_in(written))
            reason = self._reason(func, given)
            if reason is not None:
                watch.refuse(str(func), reason)
            before, watch.is_quiet = watch.is_quiet, True
            try:
                result = func(*args, **named)
            finally:
                watch.is_quiet = before
            watch.memory.make(str(func), (tensor.untyped_storage() for tensor in tensors_in((result,))))
            if func._schema.is_mutable and any(watch.memory.is_resized(storage) for storage in storages):
                watch.refuse(str(func), RESIZED)
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
            return BAKED if not all(watch.memory.is_made(number.untyped_storage()) for number in on_host) else None
        return reason


def _does_more(kind: type[Tensor]) -> bool:
    """Returns whether an operator on tensors of this class runs other operators. Operators on fake tensors do not."""
    return kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


def _by_name(func: Any, args: Sequence[Any], *, named: dict[str, Any]) -> dict[str, Any]:
    """Returns an operator's arguments by name, including defaults."""
    given = {one.name: one.default_value for one in func._schema.arguments if one.has_default_value()}
    return {**given, **{one.name: value for one, value in zip(func._schema.arguments, args)}, **named}


def _note_forward_line(result: Any) -> None:
    """Stores the current line in the autograd node of a result, for messages about its backward."""
    for tensor in tensors_in((result,)):
        # Reading grad_fn of a view may recreate its node, which fails for some views.
        if not tensor._is_view() and tensor.grad_fn is not None:
            # torch's stubs declare `metadata` as a method.
            metadata: Any = tensor.grad_fn.metadata
            metadata.setdefault(_FORWARD_LINE, user_line())


def user_line(frame: FrameType | None = None) -> SourceLine:
    """Returns the innermost line of user code; in the backward of a torch node, the line of the node's forward."""
    here = frame or sys._getframe()
    node: Any = None
    while here.f_back is not None and _is_not_users(here.f_code.co_filename):
        if here.f_code.co_name == "_engine_run_backward":
            node = current_autograd_node()
        here = here.f_back
    if _is_not_users(here.f_code.co_filename):
        # GPU nodes run in an autograd thread, which has no frame of user code.
        node = current_autograd_node()
    if node is None:
        return SourceLine(here.f_code.co_filename, here.f_lineno)
    forward = node.metadata.get(_FORWARD_LINE) or SourceLine(here.f_code.co_filename, here.f_lineno)
    return SourceLine(forward.file, forward.number, f"the backward of {node.name()}")


def _may_ask_for_addresses(file: str) -> bool:
    """Returns whether the code of this file may read addresses; see [Note: monitored calls]."""
    return file.startswith(_FRAMEWORKS) or f"{os.sep}triton{os.sep}" in file


def _is_trusted_with_addresses(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(_OWN_OR_TORCHS) or _may_ask_for_addresses(file)


def _is_importing(frame: FrameType | None) -> bool:
    """Returns whether a module is being imported.

    torch imports parts of itself lazily, and some of them draw random names on import.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _callers() -> set[str]:
    """Returns module and qualified name of each function on this thread's stack."""
    names: set[str] = set()
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        names.add(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}")
        frame = frame.f_back
    return names


def _is_not_users(file: str) -> bool:
    return file.startswith(_OWN_OR_TORCHS) or (file.startswith(_PYTHONS) and "site-packages" not in file)
