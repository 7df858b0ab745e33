"""Tensors of the modelled device, and the dispatch mode that runs their operators on the CPU and records accesses.

[Note: tensors] A DeviceTensor reports cuda:0 as its device, so that the program and torch follow their GPU code paths.
The storage that the program sees defines identity, size and lifetime, and is never read. The bytes are in a second
storage on the CPU, which the model looks up by the first, so that views, `.data` and resizing of storages work as on a
GPU. A graph may keep the bytes alive without keeping the program's storage alive.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from megatron.core.graphs.refusals import reason_against_operator
from tests.device_model.access_sets import paged_operands
from tests.device_model.alarms import Kind, site
from tests.device_model.memory import Block, Usage, Use

if TYPE_CHECKING:
    from tests.device_model.device import Device

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")
Range = tuple[Block, int, int]
# Operators that are not views but change no device memory.
_WITHOUT_WORK = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided detach detach_ alias lift_fresh lift set_ resize_ "
    "_unsafe_view is_pinned _has_compatible_shallow_copy_type is_same_size _reshape_alias record_stream".split()
)
_METADATA_IN_PLACE = frozenset(
    "as_strided_ squeeze_ unsqueeze_ t_ transpose_ swapdims_ swapaxes_ detach_ set_ resize_".split()
)
# Returns the exact accesses of an operator of the project whose schema is less precise; see access_sets.py.
AccessSet = Callable[..., Callable[[], list[Usage]]]


class DeviceTensor(Tensor):
    """A tensor of the modelled device. [Note: tensors] explains its storages."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    # Answered here, since each read of these properties would otherwise be dispatched: a third of all operators.
    device = property(lambda _: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda _: True)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return CUDA
        return _DEVICE[0].run(func, args, kwargs or {})

    def tolist(self) -> Any:
        """Copies the values to the host and returns them as a list, as for a GPU tensor."""
        return self.detach().cpu().tolist()

    def __format__(self, spec: str) -> str:
        return self.item().__format__(spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) in memo:
            return memo[id(self)]
        with torch.no_grad():
            copy = self.detach().clone()
        copy.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            copy._is_param = True  # type: ignore[attr-defined]
        copy.__dict__.update({name: value for name, value in self.__dict__.items() if name != "_is_param"})
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().requires_grad_(self.requires_grad).__reduce_ex__(protocol)


_DEVICE: "list[Device]" = []


class DeviceMode(TorchDispatchMode):
    """Passes every operator to the model, so that factories create DeviceTensors and host accesses are recorded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = _DEVICE[0]
        if not types and not device.num_pinned and func not in _PINNING and not (kwargs and _names_memory(kwargs)):
            return func(*args, **(kwargs or {}))  # neither the device nor pinned memory is involved
        if func is torch.ops.prim.device.default:
            return CUDA
        return device.run(func, args, kwargs or {})


_PINNING = {torch.ops.aten.pin_memory.default, torch.ops.aten._pin_memory.default, torch.ops.aten.is_pinned.default}


def _names_memory(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("device") is not None or bool(kwargs.get("pin_memory"))


def make_tensor(program: torch.UntypedStorage, like: Tensor) -> DeviceTensor:
    """Returns a DeviceTensor over the program's storage with sizes, strides and offset of `like`."""
    base = torch.empty(0, dtype=like.dtype)
    base.set_(program, like.storage_offset(), like.size(), like.stride())  # type: ignore[call-overload]
    made: DeviceTensor = torch.Tensor._make_subclass(  # type: ignore[assignment]
        DeviceTensor, base, False, dispatch_device=True, device_for_backend_keys=CUDA
    )
    return made


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the byte range [start, end) of a tensor in its storage."""
    size = tensor.element_size()
    start = tensor.storage_offset() * size
    if tensor.numel() == 0:
        return start, start
    last = sum((count - 1) * stride for count, stride in zip(tensor.size(), tensor.stride()))
    return start, start + (last + 1) * size


@contextmanager
def plainly() -> Any:
    """Disables dispatch modes and autograd for operators on plain tensors."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        yield


class _Given:
    """Arguments of one call. A closure would be a reference cycle, which delays frees and so hides HANDED_OUT alarms.

    inputs: device tensors by the id of their plain form. programs: the program's storages by the address of the storage
    that contains the bytes. hosts: plain tensors.
    """

    __slots__ = ("device", "inputs", "programs", "hosts", "on_device")

    def __init__(self, device: Any) -> None:
        self.device = device
        self.inputs: dict[int, Tensor] = {}
        self.programs: dict[int, torch.UntypedStorage] = {}
        self.hosts: list[Tensor] = []
        self.on_device = False

    def lower(self, value: Any) -> Any:
        """Returns the argument's replacement in a call of the CPU operator."""
        if type(value) is DeviceTensor:
            self.on_device = True
            plain = self.device.bytes_of(value)
            self.inputs[id(plain)] = value
            self.programs[plain.untyped_storage()._cdata] = value.untyped_storage()
            return plain
        if isinstance(value, Tensor):
            self.hosts.append(value)
            if self.device.capture is not None and self.device.registered and self.device.is_pinned(value):
                # A tensor over the same bytes, since the graph would keep the program's tensor alive.
                return self.device.bytes_of(value) if self.device.block_of(value).is_registered else value
        elif type(value) is list or type(value) is tuple:
            return type(value)(map(self.lower, value))
        elif isinstance(value, torch.device) and value.type == "cuda":
            self.on_device = True
            return CPU
        return value


@dataclass(frozen=True, slots=True)
class _Facts:
    """Properties of an operator, looked up once.

    reads_back: whether the host may read a value, depending on the arguments. is_free: whether it launches no device
    work. writes: positions and names of the arguments that it writes to. takes_shape: whether it uses only the shapes
    of its arguments. run: the function that computes it.
    """

    name: str
    schema_name: str
    is_collective: bool
    is_view: bool
    is_free: bool
    is_random: bool
    reads_back: bool
    takes_shape: bool
    writes: list[tuple[int, str]]
    run: Callable[..., Any]


class OperatorRunner:
    """Base class of Device that runs operators."""

    def __init__(self) -> None:
        self.access_sets: dict[str, AccessSet] = {}
        self._facts: dict[Any, _Facts] = {}
        self._local = threading.local()

    # Tensors.

    def block_of(self: "Device", tensor: Tensor) -> Block:
        """Returns the block of a DeviceTensor or a pinned tensor. Allocates a new block for a resized storage."""
        program = tensor.untyped_storage()
        block = self.memory.blocks[program._cdata]
        if not block.is_pinned and block.num_bytes != program.nbytes():
            block = self.resized(program, block)
        return block

    def bytes_of(self: "Device", tensor: Tensor) -> Tensor:
        """Returns a plain tensor over the bytes of a DeviceTensor, or of a tensor in registered memory."""
        block = self.block_of(tensor)
        plain = torch.empty(0, dtype=tensor.dtype)
        plain.set_(block.storage, tensor.storage_offset(), tensor.size(), tensor.stride())  # type: ignore[call-overload]
        if tensor.is_conj():
            plain = plain.conj()
        return plain

    def range_of(self: "Device", tensor: Tensor) -> Range:
        """Returns the block and byte range of a DeviceTensor or a pinned tensor."""
        return (self.block_of(tensor), *extent(tensor))

    def is_pinned(self: "Device", tensor: Tensor) -> bool:
        """Returns whether a plain tensor is in pinned memory."""
        if not self.num_pinned:
            return False
        storage = tensor.untyped_storage()
        block = self.memory.blocks.get(storage._cdata)
        if block is None and self.registered:
            block = self.registered_block(storage)
        return block is not None and block.is_pinned

    def adopt(self: "Device", plain: Tensor) -> DeviceTensor:
        """Returns a new DeviceTensor with the values of a plain tensor."""
        storage = plain.untyped_storage()
        program = torch.UntypedStorage(storage.nbytes())
        self.allocate(program, storage)
        return make_tensor(program, plain)

    def adopt_pinned(self: "Device", plain: Tensor) -> Tensor:
        """Marks the memory of a plain host tensor as pinned, and returns the tensor."""
        self.allocate_pinned(plain.untyped_storage())
        return plain

    # Operators.

    def run(self: "Device", func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs one operator on tensors of the device, of the host, or both."""
        facts = self._facts.get(func) or self._learn(func)
        name, writes = facts.name, facts.writes
        if facts.is_view and type(args[0]) is DeviceTensor:
            views = func(self.bytes_of(args[0]), *args[1:], **kwargs)
            program = args[0].untyped_storage()
            return (
                make_tensor(program, views)
                if isinstance(views, Tensor)
                else type(views)(make_tensor(program, view) for view in views)
            )
        given = _Given(self)
        low_args = tuple(map(given.lower, args))
        low_kwargs = {key: given.lower(value) for key, value in kwargs.items()}
        inputs, programs, hosts, on_device = given.inputs, given.programs, given.hosts, given.on_device
        wanted = kwargs.get("device")
        if name in ("is_pinned", "_is_pinned"):
            return not on_device and self.is_pinned(args[0])
        if not on_device:
            return self._run_on_host(func, name, args, kwargs, hosts)
        if name == "record_stream":
            self.use(args[0], args[1].stream_id)
            return None
        if name in _METADATA_IN_PLACE:
            return self._change_metadata(func, args, kwargs)
        if facts.is_collective:
            self.alarms.add(Kind.FORBIDDEN, f"{func} is not modelled", site())
        if facts.reads_back and wanted is None:
            self._check_reads(func, args, kwargs)
        if name in ("copy_", "_to_copy"):
            return self._copy(func, name, args, kwargs, low_args, low_kwargs, inputs, programs)
        self._await_collectives(inputs.values(), written_by(writes, args, kwargs))
        self.before_launch(low_args, low_kwargs, writes)
        declare = self.access_sets.get(facts.schema_name)
        declared = None if declare is None else declare(self, *args, **kwargs)
        results = facts.run(*low_args, **low_kwargs)
        to_host = wanted is not None and torch.device(wanted).type == "cpu"
        raised = self._raise(results, inputs, programs, to_host=to_host)
        if facts.takes_shape:
            inputs = {}
        if not facts.is_free:
            if declared is not None:
                usages = declared()
            else:
                arguments = (argument.name for argument in func._schema.arguments)
                given_by_name = {**dict(zip(arguments, args)), **kwargs}
                arenas, in_pages = paged_operands(self, given_by_name, {name for _, name in writes})
                usages = in_pages + self._usages(
                    facts.schema_name,
                    args,
                    kwargs,
                    {key: one for key, one in inputs.items() if id(one) not in arenas},
                    hosts,
                    writes,
                    raised,
                    arenas,
                )
            generator = getattr(kwargs.get("generator"), "number", None) if facts.is_random else None
            self.launch(name, usages, random=facts.is_random, generator=generator)
        self.after_launch(facts.run, low_args, low_kwargs, results, writes=writes, is_free=facts.is_free)
        return raised

    def _await_collectives(self: "Device", tensors: Iterable[Tensor], written: list[Tensor]) -> None:
        ids = set(map(id, written))
        self.finish_collectives(
            [one for one in tensors if id(one) not in ids], [one for one in written if type(one) is DeviceTensor]
        )

    def _learn(self, func: Any) -> _Facts:
        name = func._schema.name.split("::")[-1]
        tags = set(func.tags)
        reading = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        writes = [
            (place, argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        is_view = func.is_view and not writes
        facts = self._facts[func] = _Facts(
            name=name,
            schema_name=func._schema.name,
            is_collective=func.namespace == "c10d",
            is_view=is_view or name in ("detach", "alias", "_unsafe_view", "_reshape_alias"),
            is_free=name in _WITHOUT_WORK or is_view,
            is_random=torch.Tag.nondeterministic_seeded in tags,
            reads_back=bool(tags & reading) or name.rstrip("_") in _CHECKED,
            takes_shape=name.endswith("_like") or name.startswith("new_"),
            writes=writes,
            run=_ONLY_ON_GPUS.get(func, func),
        )
        return facts

    def _check_reads(self: "Device", func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        given = {argument.name: argument.default_value for argument in func._schema.arguments}
        given |= dict(zip((argument.name for argument in func._schema.arguments), args)) | kwargs
        reason = reason_against_operator(func, given)
        if reason is not None:
            self.host_waits(f"{func}")

    def _raise(
        self: "Device",
        results: Any,
        inputs: dict[int, Tensor],
        programs: dict[int, torch.UntypedStorage],
        *,
        to_host: bool,
    ) -> Any:
        if isinstance(results, Tensor):
            known = inputs.get(id(results))
            if known is not None:
                return known
            if to_host or results.is_meta:
                return results
            program = programs.get(results.untyped_storage()._cdata)
            if program is not None:
                return make_tensor(program, results)
            made = self.adopt(results)
            programs[results.untyped_storage()._cdata] = made.untyped_storage()
            return made
        if isinstance(results, (list, tuple)):
            return type(results)(self._raise(one, inputs, programs, to_host=to_host) for one in results)
        return results

    def _usages(
        self: "Device",
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        inputs: dict[int, Tensor],
        hosts: list[Tensor],
        writes: list[Any],
        results: Any,
        arenas: set[int],
    ) -> list[Usage]:
        written = [one for one in written_by(writes, args, kwargs) if id(one) not in arenas]
        ids = set(map(id, written))
        found = [Usage(*self.range_of(one), Use.READ) for one in inputs.values() if id(one) not in ids]
        for one in hosts:
            if self.is_pinned(one):
                if id(one) not in ids:
                    found.append(Usage(*self.range_of(one), Use.READ))
            elif one.dim() > 0 and one.numel() and not name.startswith("aten::"):
                self.alarms.add(Kind.PAGEABLE, name, site())
        known = {id(one) for one in inputs.values()}
        made = [one for one in _tensors(results) if type(one) is DeviceTensor and id(one) not in known]
        outputs = [one for one in written if type(one) is DeviceTensor or self.is_pinned(one)]
        return found + [Usage(*self.range_of(one), Use.WRITE) for one in (*outputs, *made)]

    def _run_on_host(
        self: "Device", func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], hosts: list[Tensor]
    ) -> Any:
        pins = name in ("pin_memory", "_pin_memory")
        if kwargs.get("pin_memory") or pins:
            if self.capture is not None:
                self.alarms.add(Kind.FORBIDDEN, "allocation of pinned memory", site())
            if pins:
                return args[0] if self.is_pinned(args[0]) else self.adopt_pinned(args[0].clone())
            made = func(*args, **{**kwargs, "pin_memory": False})
            return self.adopt_pinned(made)
        results = func(*args, **kwargs)
        if self.num_pinned and not func.is_view and name not in _WITHOUT_WORK:
            pinned = [one for one in hosts if self.is_pinned(one)]
            if pinned:
                written = list(map(id, written_by(self._facts[func].writes, args, kwargs)))
                self.host_accesses(name, pinned, written)
        return results

    def _change_metadata(self: "Device", func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        # Meta kernels change only sizes and strides.
        with torch.utils._mode_utils.no_dispatch():
            before = torch._C._meta_in_tls_dispatch_include()
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                func(*args, **kwargs)
            finally:
                torch._C._set_meta_in_tls_dispatch_include(before)
        return args[0]

    def _copy(
        self: "Device",
        func: Any,
        name: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        low_args: Sequence[Any],
        low_kwargs: dict[str, Any],
        inputs: dict[int, Tensor],
        programs: dict[int, torch.UntypedStorage],
    ) -> Any:
        """Runs a copy within the device or between device and host. The host waits unless its memory is pinned."""
        is_new = name == "_to_copy"
        source = args[0] if is_new else args[1]
        source_on_host = type(source) is not DeviceTensor
        wanted = kwargs.get("device")
        to_host = (
            (wanted is not None and torch.device(wanted).type == "cpu") if is_new else type(args[0]) is not DeviceTensor
        )
        behind = bool(kwargs.get("non_blocking", args[2] if not is_new and len(args) > 2 else False))
        self._await_collectives(inputs.values(), [] if is_new else [args[0]])
        self.before_launch(low_args, low_kwargs, [] if is_new else [(0, "self")])
        results = func(*low_args, **low_kwargs)
        raised = self._raise(results, inputs, programs, to_host=to_host) if is_new else args[0]
        if is_new and to_host and behind and kwargs.get("pin_memory"):
            self.adopt_pinned(raised)
        target = raised
        pinned = self.is_pinned(source if source_on_host else target) if source_on_host or to_host else False
        usages = [] if source_on_host and not pinned else [Usage(*self.range_of(source), Use.READ)]
        usages += [] if to_host and not pinned else [Usage(*self.range_of(target), Use.WRITE)]
        self.launch(name, usages, copies=True)
        if (source_on_host or to_host) and not (behind and pinned):
            where = f"{'from' if source_on_host else 'to'} {'pinned' if pinned else 'pageable'} memory"
            self.host_waits(f"{name} {where}")
        self.after_launch(func, low_args, low_kwargs, results, writes=[] if is_new else [(0, "self")], is_free=False)
        return raised


def written_by(writes: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Returns the tensors that an operator writes to. writes: positions and names of its output arguments."""
    found: list[Tensor] = []
    for place, name in writes:
        found += _tensors(kwargs[name] if name in kwargs else args[place] if place < len(args) else None)
    return found


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _tensors(one)]
    return []


_CHECKED = frozenset(
    "histc _histogramdd_bin_edges multinomial normal isin mode segment_reduce searchsorted embedding_renorm "
    "_pack_padded_sequence _to_sparse _coalesce _linalg_check_errors _linalg_eigh _linalg_eigvals linalg_eig "
    "linalg_eigvals _linalg_svd linalg_matrix_exp linalg_lstsq cholesky cholesky_inverse index index_put "
    "_index_put_impl _unsafe_index _unsafe_index_put masked_fill index_fill _foreach_addcdiv _foreach_addcmul".split()
)


# Implementations, on the CPU, of operators that torch provides only for GPUs.


def _softmax(logits: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.ops.aten._softmax(logits.float() if half_to_float else logits, dim, False)


def _log_softmax(logits: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return torch.ops.aten._log_softmax(logits.float() if half_to_float else logits, dim, False)


def _softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._softmax_backward_data(grad, output, dim, output.dtype).to(input_dtype)


def _log_softmax_backward(grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    return torch.ops.aten._log_softmax_backward_data(grad, output, dim, output.dtype).to(input_dtype)


def _addmm_to_dtype(
    added: Tensor,
    left: Tensor,
    right: Tensor,
    out_dtype: torch.dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    return torch.addmm(added, left.to(out_dtype), right.to(out_dtype), beta=beta, alpha=alpha, out=out)


_ONLY_ON_GPUS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.addmm.dtype_out: _addmm_to_dtype,
    torch.ops.aten._softmax.default: _softmax,
    torch.ops.aten._log_softmax.default: _log_softmax,
    torch.ops.aten._softmax_backward_data.default: _softmax_backward,
    torch.ops.aten._log_softmax_backward_data.default: _log_softmax_backward,
}
