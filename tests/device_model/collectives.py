"""Collectives of the modelled device, with the streams, waits and lifetimes of NCCL and the results of gloo.

An asynchronous collective runs on a stream of its group, which first waits for the current stream. `wait` makes the
current stream, not the host, wait for the collective's end. A synchronous collective runs on the current stream (torch
2.8 and later). The work object keeps its tensors alive until `wait`, as ProcessGroupNCCL does.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.device_model import operators
from tests.device_model.alarms import Kind, site
from tests.device_model.device import Device
from tests.device_model.library import LIBRARY
from tests.device_model.memory import Usage, Use
from tests.device_model.operators import DeviceTensor, _tensors

_STREAMS: dict[Any, torch.Stream] = {}


class ModelledWork(dist.Work):
    """The Work object of a collective. end: event at the collective's end, None if it ran on the current stream."""

    def __init__(self, device: Device, end: torch.Event | None, tensors: list[Tensor]) -> None:
        super().__init__()
        self._device, self._end, self._tensors = device, end, tensors

    def wait(self, timeout: Any = None) -> bool:
        """Makes the current stream wait for the end of the collective."""
        if self._end is not None:
            torch.accelerator.current_stream().wait_event(self._end)
        self._tensors = []
        return True

    def synchronize(self) -> None:
        """Makes the current stream wait for the end of the collective."""
        self.wait()

    def is_completed(self) -> bool:
        """Queries the device's progress, which is forbidden during a capture, and returns True."""
        self._device.query()
        return True

    def is_success(self) -> bool:
        """Returns True, as the model has no communication errors."""
        return True

    def exception(self) -> None:
        """Returns None, as the model has no communication errors."""
        return None

    def get_future(self) -> Any:
        """Returns a completed future with the collective's tensors."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


class _Once:
    """Gloo work that is awaited only once, as gloo's transfers require. then: called after it, on plain tensors."""

    def __init__(self, inner: Any, then: Callable[[], Any] | None) -> None:
        self._inner, self._then, self._is_done = inner, then, False

    def wait(self) -> None:
        if self._is_done:
            return
        self._is_done = True
        if self._inner is not None:
            self._inner.wait()
        if self._then is not None:
            with operators.plainly():
                self._then()


# Gloo aborts a transfer whose work object is freed, so the last _MAX_HELD are kept; far fewer are ever in flight.
_HELD: "deque[_Once]" = deque()
_MAX_HELD = 4096


def _held(inner: Any, then: Callable[[], Any] | None = None) -> _Once:
    work = _Once(inner, then)
    _HELD.append(work)
    if len(_HELD) > _MAX_HELD:
        _HELD.popleft().wait()
    return work


def install_collectives(device: Device) -> None:
    """Replaces the methods of process groups, so that they accept tensors of the modelled device."""
    group_type = torch._C._distributed_c10d.ProcessGroup
    barrier = group_type.barrier

    def checked_barrier(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if device.capture is not None:
            device.alarms.add(Kind.FORBIDDEN, "ranks wait for each other on the host", site())
        return barrier(group, *args, **kwargs)

    group_type.barrier = checked_barrier
    for name in vars(group_type):
        if name in _METHODS or name in _UNSUPPORTED:
            setattr(group_type, name, _method(device, name, getattr(group_type, name)))


def _method(device: Device, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def method(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        given = _tensors([*args, *kwargs.values()])
        if not any(type(one) is DeviceTensor for one in given):
            return original(group, *args, **kwargs)
        if name in _UNSUPPORTED:
            raise NotImplementedError(f"the device model does not know {name}")
        if kwargs:
            raise NotImplementedError(f"the device model knows {name} without keywords, not with {sorted(kwargs)}")
        return _launch(device, name, original, group, args)

    return method


def _launch(device: Device, name: str, original: Callable[..., Any], group: Any, args: Sequence[Any]) -> ModelledWork:
    outputs, inputs, run, key = _METHODS[name](original, group, *args)
    tensors = [*outputs, *inputs]
    options = next((one for one in reversed(args) if hasattr(one, "asyncOp")), None)
    is_async = True if options is None else bool(options.asyncOp)
    device.finish_collectives(inputs, outputs)
    low = {id(one): device.bytes_of(one) for one in tensors}
    plain_outputs, plain_inputs = [low[id(one)] for one in outputs], [low[id(one)] for one in inputs]

    def start() -> Any:
        with operators.plainly():
            return run(plain_outputs, plain_inputs)

    caller = torch.accelerator.current_stream()
    before = int(LIBRARY.get_current_stream())
    end = None
    if is_async:
        if key not in _STREAMS:
            _STREAMS[key] = torch.Stream(device="cuda")
        comm = _STREAMS[key]
        comm.wait_stream(caller)
        LIBRARY.set_current_stream(comm.stream_id)
    try:
        capture = device.capture
        if capture is not None and device.stream in capture.streams:
            for plain in plain_outputs:
                device.keep(capture, plain)
        usages = [Usage(*device.range_of(one), Use.READ) for one in inputs]
        usages += [Usage(*device.range_of(one), Use.WRITE) for one in outputs]
        device.launch(name, usages)
        inner = start()
        device.add_step(plain_inputs, plain_outputs, start)
        for part, is_write in ((inputs, False), (outputs, True)):
            for block in {device.block_of(one) for one in part}:
                block.pending.append((inner, is_write))
        if is_async:
            end = torch.accelerator.current_stream().record_event()
    finally:
        LIBRARY.set_current_stream(before)
    return ModelledWork(device, end, tensors if is_async else [])


# Each method returns its outputs, its inputs, a function that starts it on plain tensors, and the key of its stream.


def _averages(options: Any) -> bool:
    return bool(options.reduceOp == dist.ReduceOp.AVG)


def _allreduce(original: Any, group: Any, tensors: Any, options: Any = None) -> Any:
    tensors = _tensors(tensors)
    averages = options is not None and _averages(options)
    if averages:
        options.reduceOp = dist.ReduceOp.SUM

    def run(outputs: list[Tensor], _: list[Tensor]) -> Any:
        work = original(group, outputs, options)
        return _held(work, (lambda: [one.div_(group.size()) for one in outputs]) if averages else None)

    return tensors, [], run, group


def _broadcast(original: Any, group: Any, tensors: Any, options: Any) -> Any:
    tensors = _tensors(tensors)
    is_root = group.rank() == options.rootRank

    def run(outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        return _held(original(group, inputs if is_root else outputs, options))

    return ([], tensors, run, group) if is_root else (tensors, [], run, group)


def _all_gather_single(original: Any, group: Any, output: Tensor, input: Tensor, options: Any = None) -> Any:
    def run(outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        gathered = [torch.empty_like(inputs[0]) for _ in range(group.size())]
        work = dist.all_gather(gathered, inputs[0].clone(), group=group, async_op=True)
        return _held(work, lambda: outputs[0].view(-1).copy_(torch.cat([one.view(-1) for one in gathered])))

    return [output], [input], run, group


def _reduce_scatter_single(original: Any, group: Any, output: Tensor, input: Tensor, options: Any = None) -> Any:
    if options is not None and not (_averages(options) or options.reduceOp == dist.ReduceOp.SUM):
        raise NotImplementedError(f"the device model does not know a reduce-scatter with {options.reduceOp}")
    averages = options is not None and _averages(options)

    def run(outputs: list[Tensor], inputs: list[Tensor]) -> Any:
        # Gloo has no reduce-scatter. Summing in rank order makes the result independent of the order of arrival.
        received = torch.empty_like(inputs[0].view(-1))
        work = dist.all_to_all_single(received, inputs[0].reshape(-1).clone(), group=group, async_op=True)

        def add() -> None:
            parts = received.view(group.size(), -1)
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            outputs[0].view(-1).copy_(total.div_(group.size()) if averages else total)

        return _held(work, add)

    return [output], [input], run, group


def _all_to_all_single(original: Any, group: Any, output: Tensor, input: Tensor, *rest: Any) -> Any:
    return [output], [input], lambda outputs, inputs: _held(original(group, outputs[0], inputs[0], *rest)), group


def _allgather(original: Any, group: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    def run(low_outputs: list[Tensor], low_inputs: list[Tensor]) -> Any:
        return _held(original(group, [low_outputs], low_inputs, *rest))

    return _tensors(outputs), _tensors(inputs), run, group


def _alltoall(original: Any, group: Any, outputs: Any, inputs: Any, *rest: Any) -> Any:
    return (
        outputs,
        inputs,
        lambda low_outputs, low_inputs: _held(original(group, low_outputs, low_inputs, *rest)),
        group,
    )


def _send(original: Any, group: Any, tensors: Any, peer: int, tag: int) -> Any:
    return [], _tensors(tensors), lambda _, inputs: _held(original(group, inputs, peer, tag)), (group, "send", peer)


def _recv(original: Any, group: Any, tensors: Any, peer: int, tag: int) -> Any:
    return _tensors(tensors), [], lambda outputs, _: _held(original(group, outputs, peer, tag)), (group, "recv", peer)


_METHODS: dict[str, Callable[..., Any]] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "_allgather_base": _all_gather_single,
    "all_gather_single": _all_gather_single,
    "_reduce_scatter_base": _reduce_scatter_single,
    "reduce_scatter_single": _reduce_scatter_single,
    "alltoall_base": _all_to_all_single,
    "all_to_all_single": _all_to_all_single,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "send": _send,
    "recv": _recv,
}
_UNSUPPORTED = frozenset(
    "allgather_coalesced allgather_into_tensor_coalesced all_gather_single_coalesced allreduce_coalesced gather reduce "
    "recv_anysource reduce_scatter reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter".split()
)
