"""Tables of operations that a CUDA graph cannot contain, with reasons: Python functions, torch functions, operators.

graphs/safety.py monitors the calls and reports their lines. The reasons apply to CUDA. On a CPU many of these calls
wait for nothing, but they are still rejected, so that code developed without a GPU can be captured on one.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from megatron.core.device.torch_internals import FakeTensor


@dataclass(frozen=True)
class Reason:
    """The reason why an operation cannot be captured, and an alternative."""

    why: str
    instead: str


READ = Reason(
    "the host waits for the device to read a value, which fails in a capture; a replay would not read it again",
    "compute on the device (torch.where, masks, index_select), or read it after the replay",
)
SHAPE = Reason(
    "the shape of the result depends on values, so the host has to wait for them, and replays would differ",
    "give the result a fixed size: torch.where, a mask, output_size=",
)
CHECK = Reason(
    "on a GPU the host reads back whether the values are valid, or how many there are",
    "use a variant that reads nothing back (linalg *_ex, scatter_add, sort), or do it outside the region",
)
SCALAR = Reason(
    "on a GPU the host reads the value out of its tensor", "pass a Python number, or use torch.where with the tensor"
)
HOST_DATA = Reason(
    "host data is copied to the device through pageable memory: the host waits, and a replay copies the old data",
    "create the tensor before the region and copy into it between replays; torch.full creates constants on the device",
)
HOST_MEMORY = Reason(
    "it allocates memory of the host, which a capture cannot do and a replay does not repeat",
    "name the device (device=x.device), or allocate before the region",
)
COPY = Reason(
    "a copy between host and device waits for the host's memory unless it is pinned and non_blocking",
    "copy outside the region, or between device and pinned memory allocated before it, with non_blocking=True",
)
BAKED = Reason(
    "a host number is read once, when the graph is captured, and every replay uses the old value",
    "keep it in a tensor on the device that is written between replays",
)
WAIT = Reason(
    "the host waits for the device or queries its progress, which fails in a capture",
    "order work with events that streams wait for (wait_event, wait_stream), and wait after the replay",
)
GENERATOR = Reason(
    "a replay draws the same numbers again from a generator that the graph does not know",
    "draw from the default generator, or register this one with the graph and name it in `generators`",
)
GENERATOR_STATE = Reason(
    "the host reads or writes a generator's state, which fails in a capture; a replay would not do so again",
    "seed before the region; to draw the same numbers again, use generator objects that are registered with the graph",
)
HOST_RANDOM = Reason(
    "a number drawn on the host is drawn once, when the graph is captured", "draw it on the device, or between replays"
)
OBJECTS = Reason(
    "ranks wait for each other on the host, or exchange data that the host has to read",
    "do it between replays; collectives of tensors can be captured",
)
ALLOCATOR = Reason("the allocator waits for the device", "do it between replays")
OUTLIVES = Reason(
    "this memory is still referenced at the end of the region, and the next replay overwrites it",
    "delete the reference, allocate the memory before the region, or declare it with Region.keep",
)
RESIZED = Reason(
    "memory from before the region is resized inside; replays use the old address",
    "allocate its full size before the region",
)

ADDRESS = Reason(
    "the address or memory of a tensor is passed to code that is not monitored, whose reads and writes are not part "
    "of the graph",
    "use operators of torch or torch.library, or pass the memory between replays",
)
UNSEEN_COPY = Reason(
    "memory is copied without an operator: the copy is not part of the graph, and its references cannot be checked",
    "use clone(), and declare copies that outlive the region with Region.keep",
)
THREAD = Reason(
    "another thread does its work once, during the capture, and not in a replay",
    "compute on the device in this thread, or let other threads work between replays",
)

Arguments = Mapping[str, Any]


def _always(_: Arguments) -> bool:
    return True


# Operators that read values back on a GPU, although their tags do not say so: the name without `aten::` and a trailing
# underscore, and the condition on the arguments.
_CHECKED: dict[str, Callable[[Arguments], bool]] = {
    "histc": lambda given: given["min"] == given["max"],
    "_histogramdd_bin_edges": _always,
    "multinomial": lambda given: not given["replacement"] or given["num_samples"] == 1,
    "normal": lambda given: isinstance(given.get("std"), Tensor),
    "isin": lambda given: not given["assume_unique"] and isinstance(given.get("test_elements"), Tensor),
    "mode": _always,
    "segment_reduce": lambda given: not given["unsafe"],
    "searchsorted": lambda given: given["sorter"] is not None,
    "embedding_renorm": _always,
    "_pack_padded_sequence": _always,
    "_to_sparse": _always,
    "_coalesce": _always,
    "_linalg_check_errors": _always,
    "_linalg_eigh": _always,
    "_linalg_eigvals": _always,
    "linalg_eig": _always,
    "linalg_eigvals": _always,
    "_linalg_svd": _always,
    "linalg_matrix_exp": _always,
    "linalg_lstsq": _always,
    "cholesky": _always,
    "cholesky_inverse": _always,
}
_INDEXING = frozenset(("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"))
# Operators that read an argument on the host if it is a tensor, with the name of that argument.
_SCALARS = {"masked_fill": "value", "index_fill": "value", "_foreach_addcdiv": "scalars", "_foreach_addcmul": "scalars"}


def reason_against_operator(func: Any, given: Arguments) -> Reason | None:
    """Returns the reason why an operator overload cannot be captured with these arguments (by name), or None.

    Copies between devices are covered by `reason_of_copy`.
    """
    name = func._schema.name.split("::")[-1].rstrip("_")
    if given.get("pin_memory") or name == "_pin_memory":
        return HOST_MEMORY
    if name == "lift_fresh" and given["self"].dim() > 0:
        return HOST_DATA
    if name in _INDEXING:
        return SHAPE if any(_is_mask(index) for index in given["indices"]) else None
    if name in _CHECKED:
        return CHECK if _CHECKED[name](given) else None
    value = given.get(_SCALARS.get(name, ""))
    if isinstance(value, Tensor) and not (value.device.type == "cpu" and is_elsewhere(given)):
        return SCALAR
    return _reason_of_tags(func.tags, given)


def _reason_of_tags(tags: Sequence[torch.Tag], given: Arguments) -> Reason | None:
    if torch.Tag.data_dependent_output in tags:
        return READ
    if torch.Tag.dynamic_output_shape in tags:
        # With output_size, as in repeat_interleave, the shape is fixed.
        return SHAPE if given.get("output_size") is None else None
    if torch.Tag.cudagraph_unsafe in tags:
        return Reason("torch marks this operator as unsafe in CUDA graphs", "do it outside the region")
    return None


def reason_of_copy(func: Any, given: Arguments) -> Reason | None:
    """Returns the reason why an operator with tensors on the host and on a device cannot be captured, or None.

    Operators of other libraries are not checked.
    """
    if func.namespace != "aten":
        return None
    if func._schema.name == "aten::_to_copy":
        source, device = given["self"].device, given["device"]
        return (
            COPY if device is not None and "cpu" in (types := {source.type, device.type}) and len(types) > 1 else None
        )
    if not is_elsewhere(given):
        return None
    if func._schema.name == "aten::copy_" and _is_asynchronous(given):
        return None
    on_host = (tensor for tensor in tensors_in(given.values()) if tensor.device.type == "cpu")
    reads_all = func._schema.name == "aten::copy_"
    # A scalar tensor is passed as an argument of the kernel.
    return COPY if any(reads_all or tensor.dim() > 0 for tensor in on_host) else None


def _is_asynchronous(given: Arguments) -> bool:
    """Returns whether a copy_ does not block the host.

    Fake tensors are treated as pinned, because they do not store that property.
    """
    host = given["self"] if given["self"].device.type == "cpu" else given["src"]
    return bool(given["non_blocking"]) and (isinstance(host, FakeTensor) or host.is_pinned())


def is_elsewhere(given: Arguments) -> bool:
    """Returns whether any tensor among the arguments is not on the CPU."""
    return any(tensor.device.type != "cpu" for tensor in tensors_in(given.values()))


def tensors_in(values: Any) -> list[Tensor]:
    """Returns the tensors, any shape and dtype, in arguments or results, including nested lists and tuples."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


# Methods of Tensor that return values to the host. A method that is not listed here calls an operator that is rejected.
_READS = frozenset(
    "item tolist numpy cpu __array__ __bool__ __int__ __float__ __index__ __complex__ __repr__ __format__ "
    "__contains__ is_nonzero".split()
)
_FACTORIES = frozenset(
    "empty zeros ones full arange range linspace logspace eye rand randn randint randperm empty_strided tril_indices "
    "triu_indices".split()
)
# Functions whose backward counts zeros on the host. It does not while a dispatch mode is active, so no mode sees it.
_COUNTED_IN_BACKWARD = frozenset(("prod", "cumprod"))


def reason_against_function(name: str, given: Sequence[Any], *, named: Mapping[str, Any]) -> Reason | None:
    """Returns the reason why a function or method of torch cannot be captured with these arguments, or None.

    Covers only functions that cannot be detected by their operators on the CPU.
    """
    if name in _READS:
        return READ
    if name == "pin_memory":
        return HOST_MEMORY
    if name in ("data_ptr", "__dlpack__", "share_memory_"):
        return ADDRESS
    if name == "__deepcopy__":
        return UNSEEN_COPY
    if name == "tensor_split" and any(isinstance(value, Tensor) for value in (*given[1:], *named.values())):
        return READ
    if name == "new_tensor":
        return HOST_DATA
    if name in ("tensor", "as_tensor", "asarray") and not isinstance(given[0], Tensor):
        # A scalar may remain on the host as an operand of operators on the device.
        return HOST_DATA if named.get("device") is not None or not _is_number(given[0]) else None
    return None


def reads_only_on_cpu(name: str, given: Sequence[Any], *, named: Mapping[str, Any]) -> bool:
    """Returns whether a function of torch reads values only on the CPU, to validate them."""
    num_classes = named.get("num_classes", given[1] if len(given) > 1 else -1)
    return name == "one_hot" and num_classes >= 0


def fills_where_masked(name: str, given: Sequence[Any]) -> bool:
    """Returns whether a call is x[mask] = number, which runs as masked_fill on a GPU."""
    if name != "__setitem__" or isinstance(given[2], Tensor):
        return False
    indices = given[1] if isinstance(given[1], tuple) else (given[1],)
    return sum(_is_mask(index) for index in indices) == 1 and len(tensors_in(indices)) == 1


def reason_against_result(name: str, result: Any, *, named: Mapping[str, Any]) -> Reason | None:
    """Returns the reason why a tensor returned by a function of torch, or its backward, cannot be captured, or None."""
    if name in _COUNTED_IN_BACKWARD and isinstance(result, Tensor) and result.requires_grad:
        return CHECK
    if name not in _FACTORIES or named.get("out") is not None or not isinstance(result, Tensor):
        return None
    is_told = named.get("device") is not None or torch.get_default_device().type != "cpu"
    # Without a device the tensor is on the host, also on a machine with a GPU.
    return None if is_told or math.prod(result.shape) == 0 or result.dim() == 0 else HOST_MEMORY


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


# Functions by defining module and qualified name, as in their frames. Re-exports therefore do not matter.
PYTHON_CALLS: dict[str, Reason] = {
    **dict.fromkeys(
        (
            "torch.cuda.synchronize",
            "torch.accelerator.synchronize",
            "torch.cpu.synchronize",
            "megatron.core.device.streams.synchronize",
            "megatron.core.device.streams.seconds_between",
            "megatron.core.device.streams.CopyStream.host_waits_for",
        ),
        WAIT,
    ),
    **dict.fromkeys(("torch.cuda.memory.empty_cache", "torch.accelerator.memory.empty_cache"), ALLOCATOR),
    **dict.fromkeys(
        ("megatron.core.device.memory.host_bytes", "megatron.core.device.pinned_memory.pinned_bytes"),
        HOST_MEMORY,
    ),
    "torch.serialization.save": READ,
    **dict.fromkeys(
        (
            "threading.Thread.start",
            "concurrent.futures.thread.ThreadPoolExecutor.submit",
            "concurrent.futures.process.ProcessPoolExecutor.submit",
        ),
        THREAD,
    ),
    "torch.storage.TypedStorage.data_ptr": ADDRESS,
    **{f"torch.storage._StorageBase.{name}": UNSEEN_COPY for name in ("clone", "cpu", "to", "__deepcopy__")},
    **{
        f"torch.distributed.distributed_c10d.{name}": OBJECTS
        for name in (
            "barrier",
            "monitored_barrier",
            "all_gather_object",
            "gather_object",
            "broadcast_object_list",
            "scatter_object_list",
            "send_object_list",
            "recv_object_list",
            "new_group",
        )
    },
}
# The last parts of these names, for a fast first test.
PYTHON_NAMES = frozenset(name.rsplit(".", 1)[1] for name in PYTHON_CALLS)

# Methods that read or write a state's bytes. Methods named graphsafe_... exchange the state object instead.
_OF_STATES = frozenset("manual_seed seed initial_seed get_state set_state get_offset set_offset".split())
# A function that accesses only the CPU's state bytes, and on a GPU exchanges registered state objects.
GRAPH_SAFE_STATES = "megatron.core.device.rng.RandomStream.drawn"
# A function that starts work on another thread and waits for it, so that a graph contains it.
WORK_OF_THREADS = "megatron.core.device.threads.DelegateThread.submit"
# The wrapper of functions that run on the CPU alone.
ON_CPU_ALONE = "megatron.core.device.current.cpu_alone.<locals>.run_on_cpu_alone"


# Functions of torch in C, which no mode sees.
_GIVES_MEMORY = frozenset(("_to_dlpack", "to_dlpack"))
_TAKES_MEMORY = frozenset(("frombuffer", "_from_dlpack", "from_file"))
# Methods that read a tensor, for threads other than the region's, whose calls no mode sees.
READS_OF_THREADS = (*sorted(_READS - {"__repr__", "__format__"}), "nonzero", "__dlpack__", "data_ptr")


def reason_against_method(owner: Any, name: str) -> Reason | None:
    """Returns the reason why a C method or function, which torch's modes do not see, cannot be captured, or None."""
    if name in ("synchronize", "query", "elapsed_time") and isinstance(owner, (torch.Event, torch.Stream)):
        return WAIT
    if name == "is_completed":
        return WAIT
    if isinstance(owner, torch.Generator) and name in _OF_STATES:
        return GENERATOR_STATE
    # Seeding is allowed, because torch imports parts of itself lazily, which create generators of Python.
    if isinstance(owner, Random) and name in ("random", "getrandbits"):
        return HOST_RANDOM
    if name in _GIVES_MEMORY or (name == "data_ptr" and isinstance(owner, torch.UntypedStorage)):
        return ADDRESS
    if name in _TAKES_MEMORY:
        return HOST_DATA
    return READ if isinstance(owner, Tensor) and name in ("tolist", "numpy") else None
