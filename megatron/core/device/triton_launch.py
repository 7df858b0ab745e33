"""Prepared launches of Triton kernels, and the grid arithmetic and checks of their launchers. Contains no kernels.

[Note: prepared launches] kernel[grid](...) spends 15 to 40 us of Python per launch: it binds all arguments by name,
classifies each of them, and looks the compiled kernel up by a string of all classes and options. In training, a launch
site repeats with the same sizes and constants. A PreparedLaunch holds these, and each compiled kernel together with the
classes of the remaining arguments, so that a repeated launch passes addresses and row counts to the compiled kernel.

[Note: specialization] Triton compiles a kernel for each dtype of a pointer, for addresses that are or are not divisible
by 16, and for integers that are 1, divisible by 16, or wider than 32 bits. A PreparedLaunch distinguishes at least as
much: tensors by dtype and by address modulo 16, `fixed` numbers by value, because they belong to the object, and counts
by their width. Kernels must not be specialized on counts otherwise, so they are listed in do_not_specialize. Triton
itself chooses the compiled kernel, in the first launch with new classes.

[Note: interfaces of Triton] Direct launches depend on what Triton does not document: kernel[grid](...) returns the
compiled kernel; its run() takes the grid, stream, function, metadata, hooks and all arguments in the kernel's order;
knobs.runtime has chains of hooks; the active driver returns the current device and stream. All uses are in this file.
They hold for Triton 3.6 to 3.9. With a different interface, or without a part of it, every launch is kernel[grid](...).
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import torch
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

# Prepared launches that a launcher keeps. Models have a few shapes each; only strides of unusual gradients vary.
MAX_PREPARED: Final = 256
# Leading parameters of a compiled kernel's run(). Triton 3.6 names the first five and passes on the others.
_RUN_PARAMETERS = (
    *("gridX", "gridY", "gridZ", "stream", "function"),
    *("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"),
)


# What a launch passes after its tensors.
Count: TypeAlias = int | tuple[int, ...] | TensorDescriptor


class Knobs(NamedTuple):
    """Triton's settings at run time, and the class of its chains of hooks."""

    runtime: Any
    chain: Any


def known_knobs() -> Knobs | None:
    """Returns what tells whether launches are observed, or None if this Triton does not have it."""
    try:
        from triton.knobs import HookChain, runtime

        hooks, _ = (runtime.launch_enter_hook, runtime.launch_exit_hook), runtime.debug
    except (ImportError, AttributeError):
        return None
    return Knobs(runtime, HookChain) if all(hasattr(hook, "calls") for hook in hooks) else None


_KNOBS: Final = known_knobs()


@dataclass(frozen=True, slots=True)
class _Ready:
    """A compiled kernel on one device.

    compiled: kept alive, because Triton 3.9 unloads a kernel's code with it. limit: maximum number of programs along
    the first axis. current_device, stream_of: the driver's functions.
    """

    compiled: Any
    run: Callable[..., None]
    function: int
    metadata: Any
    limit: int
    current_device: Callable[[], int]
    stream_of: Callable[[int], int]


class PreparedLaunch:
    """Launches a Triton kernel with fixed sizes and constants. See [Note: prepared launches].

    The kernel's parameters are tensors, then counts, then those in `fixed`. Instances may be shared by threads and
    devices, and launches may be captured into CUDA graphs.
    """

    __slots__ = ("_kernel", "_fixed", "_options", "_per_processor", "_tail", "_ready")

    def __init__(
        self, kernel: Any, fixed: Mapping[str, Any], *, options: Mapping[str, Any], per_processor: int | None = None
    ) -> None:
        """fixed: arguments by name, including constexpr arguments. options: num_warps and other compiler options.

        per_processor: maximum number of programs for each multiprocessor, for kernels that loop over tiles; None means
        one program per tile.
        """
        self._kernel, self._fixed, self._options = kernel, dict(fixed), dict(options)
        self._per_processor = per_processor
        names = kernel.arg_names[len(kernel.arg_names) - len(fixed) :]
        assert set(names) == set(fixed), f"{kernel}: its last parameters are {names}, not {list(fixed)}"
        self._tail = tuple(fixed[name] for name in names)
        # By classes of arguments. Threads may both prepare an entry; either one is right.
        self._ready: dict[tuple[Any, ...], _Ready | None] = {}

    def __call__(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        counts: Sequence[Count] = (),
        *,
        columns: int = 1,
    ) -> None:
        """Launches programs x columns programs on the current stream of the first tensor's device.

        tensors: any shapes and dtypes. counts: numbers that the kernel is not specialized on, tuples of numbers that
        all compile to the same kernel, or descriptors with the first tensor's dtype and boxes of one shape.
        """
        first = tensors[0]
        assert first is not None, "the first tensor determines the device"
        device, known = first.get_device(), _KNOBS
        if device < 0:  # the interpreter
            self._launch(programs, tensors, counts, columns=columns)
            return
        # Hooks, as of profilers, receive metadata that only Triton builds.
        if (
            known is None
            or type(before := known.runtime.launch_enter_hook) is not known.chain
            or before.calls
            or type(after := known.runtime.launch_exit_hook) is not known.chain
            or after.calls
            or known.runtime.debug
        ):
            with torch.accelerator.device_index(device):
                self._launch(programs, tensors, counts, columns=columns)
            return
        addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        key = (
            device,
            *[None if tensor is None else tensor.dtype for tensor in tensors],
            *[address & 15 for address in addresses],
            *[count >> 31 for count in counts if type(count) is int],
        )
        ready = self._ready.get(key)
        if ready is None or ready.current_device() != device:
            with torch.accelerator.device_index(device):
                compiled = self._launch(programs, tensors, counts, columns=columns)
                if ready is None and key not in self._ready:
                    self._ready[key] = self._ready_on(device, compiled, num_tensors=len(tensors), counts=counts)
            return
        if programs > ready.limit:
            programs = ready.limit
        stream = ready.stream_of(device)
        # 0 stands for None, which is a constant of the compiled kernel, like all arguments that Triton ignores here.
        ready.run(
            programs, columns, 1, stream, ready.function, ready.metadata, None, None, None,
            *addresses, *counts, *self._tail,
        )  # fmt: skip

    def _launch(
        self,
        programs: int,
        tensors: Sequence[Tensor | None],
        counts: Sequence[Count],
        *,
        columns: int,
    ) -> Any:
        """Launches through Triton's public interface on the current device; returns the compiled kernel, if any."""
        first = tensors[0]
        assert first is not None, "the first tensor determines the device"
        grid = (min(programs, self._limit_on(first.get_device())), columns)
        return self._kernel[grid](*tensors, *counts, **self._fixed, **self._options)

    def _limit_on(self, device: int) -> int:
        return 2**31 - 1 if self._per_processor is None else self._per_processor * num_processors(device)

    def _ready_on(self, device: int, compiled: Any, *, num_tensors: int, counts: Sequence[Count]) -> _Ready | None:
        """Returns what direct launches need, or None if Triton's interface is not the one in the note."""
        names = self._kernel.arg_names[num_tensors:][: len(counts)]
        plain = [name for name, count in zip(names, counts, strict=True) if isinstance(count, int)]
        assert set(plain) <= set(self._kernel.do_not_specialize), f"{self._kernel}: is specialized on one of {plain}"
        run = getattr(compiled, "run", None)
        if run is None or not is_known_run(run):
            return None
        try:
            active = driver.active
            return _Ready(
                compiled,
                run,
                compiled.function,
                compiled.packed_metadata,
                self._limit_on(device),
                active.get_current_device,
                active.get_current_stream,
            )
        except AttributeError:
            return None


def is_known_run(run: Callable[..., None]) -> bool:
    """Returns whether a compiled kernel's run() has the parameters that direct launches pass."""
    try:
        *leading, rest = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):  # without a signature, or without parameters
        return False
    names = tuple(parameter.name for parameter in leading)
    is_prefix = len(names) >= 5 and names == _RUN_PARAMETERS[: len(names)]
    return is_prefix and rest.kind is inspect.Parameter.VAR_POSITIONAL


@functools.cache
def num_processors(device: int) -> int:
    """Returns the number of streaming multiprocessors of a CUDA device; 2 for a negative index, the interpreter."""
    count: int = 2 if device < 0 else torch.cuda.get_device_properties(device).multi_processor_count
    return count


def next_power_of_2(number: int) -> int:
    """Returns the smallest power of 2 that is at least `number`, which must be positive."""
    return 1 << (number - 1).bit_length()


def check_dtypes(*dtypes: torch.dtype) -> None:
    """Raises ValueError unless all dtypes are fp32, bf16 or fp16."""
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"{dtype} is not supported: only fp32, bf16 and fp16 have kernels")


def check_adjacent_columns(width: int, *column_strides: int) -> None:
    """Asserts that columns of rows of `width` elements are adjacent in memory."""
    assert width <= 1 or set(column_strides) <= {0, 1}, f"columns must be adjacent, not {column_strides} apart"
