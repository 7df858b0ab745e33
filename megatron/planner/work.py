"""WorkRecorder: every kernel of a step as it passes torch's dispatcher: arithmetic and bytes, by pass and module.

It counts what the run's own code calls, on tensors without memory; what that takes on a device is rates.py's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from megatron.core.pipeline_parallel.schedule import Action, ActionKind
from megatron.planner.activations import kind_of_module
from megatron.planner.rates import Kernel, Kernels, Unit
from megatron.planner.running_modules import RunningModules
from megatron.planner.step_time import BACKWARD, FORWARD, ChunkWork

RECOMPUTE = "recompute"
_FORWARD, _BACKWARD, _UPDATE = "ScheduleRunner._forward", "ScheduleRunner._backward", "MegatronOptimizer.step"
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
# torch's, and those of experts with buffers of a fixed size.
GROUPED = {"_grouped_mm", "grouped_gemm", "grouped_gemm_weight_grad"}
_COUNTED = {"aten", "paged_stash", "router", "static_rows"}
# They move nothing: memory that is handed out, other views of it, reads by the host.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("detach", "lift_fresh", "set_", "resize_", "_local_scalar_dense", "equal", "record_stream", "is_pinned"),
}
# They read as much as they write, however large the table is.
_GATHERS = {"embedding", "index", "index_select", "gather"}
# They read what they are given, and read and write as much of the table.
_SCATTERS = {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"}
# The sizes of tables make no difference to either.
ROWS_OF_TABLES = _GATHERS | _SCATTERS


class WorkRecorder(TorchDispatchMode):
    """Notes kernels by pass while it is on, in a step of one microbatch.

    live_rows: of the rows of experts' buffers, the share that products multiply: the rest has no tokens.
    """

    def __init__(self, model: Sequence[nn.Module], *, live_rows: float = 1.0) -> None:
        super().__init__()
        self._running, self._live_rows = RunningModules(model), live_rows
        self._names: list[str] = []
        self._kind = ""
        self.forwards: list[Kernels] = []
        self.backwards: list[Kernels] = []
        self.recomputed: list[Kernels] = []
        self.update = Kernels()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Records kernels inside the block, with the module whose forward or backward runs."""
        with self._running.followed(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self:
            yield

    def chunks(self, order: Sequence[Action]) -> tuple[ChunkWork, ...]:
        """The work of each chunk. order: in which the step ran its passes, one of each chunk and kind."""
        of_kind = {kind: [action.chunk for action in order if action.kind is kind] for kind in ActionKind}
        forwards = dict(zip(of_kind[ActionKind.FORWARD], self.forwards, strict=True))
        backwards = zip(of_kind[ActionKind.BACKWARD], self.backwards, self.recomputed, strict=True)
        found = {chunk: ChunkWork(forwards[chunk], kernels, again) for chunk, kernels, again in backwards}
        return tuple(found[chunk] for chunk in sorted(found))

    def note(self, unit: Unit, tensor: Tensor, *, flops: float, num_bytes: float) -> None:
        """Counts a fused kernel, which the dispatcher does not see. tensor: any shape, of the dtype it computes in."""
        counter = self._counter()
        if counter is not None:
            counter[Kernel(self.kind, unit, dtype_name(tensor), float(flops), float(num_bytes))] += 1

    @property
    def kind(self) -> str:
        """The kind of the module whose forward or backward is running."""
        return kind_of_module(self._running.name) if self._running else self._kind or kind_of_module("")

    @property
    def pass_name(self) -> str | None:
        """forward, backward or, of forwards that backward runs again, recompute; None outside of passes."""
        if _BACKWARD in self._names:
            # Modules run forward in a backward when they are computed again.
            return RECOMPUTE if self._running else BACKWARD
        return FORWARD if _FORWARD in self._names else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts its kernel, unless it is a view or free."""
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            self._follow(func, args)
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if func.namespace not in _COUNTED or func.is_view or name in _FREE or self._counter() is None:
            return result
        self._count(func, name, args=args, kwargs=kwargs, result=result)
        return result

    def _count(self, func: Any, name: str, *, args: Any, kwargs: Any, result: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        example = next((one for one in (*inputs, *outputs) if one.is_floating_point()), None)
        moved = _moved_bytes(func, name, inputs=inputs, outputs=outputs)
        unit, flops = Unit.MEMORY, 0.0
        if name in GROUPED:
            # Of both forms: rows by the matrices of experts, and rows by rows to such matrices.
            unit, flops = Unit.MATMUL, 2.0 * self._live_rows * inputs[0].numel() * inputs[1].shape[-1]
        elif func._overloadpacket in flop_registry:
            unit, flops = Unit.MATMUL, float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        if moved or flops:
            self.note(
                unit, torch.empty(0, dtype=torch.float32) if example is None else example, flops=flops, num_bytes=moved
            )

    def _follow(self, func: Any, args: Sequence[Any]) -> None:
        if "enter" not in func._schema.name:
            if self._names:
                self._names.pop()
            return
        name = str(args[0]).partition(" (")[0]
        self._names.append(name)
        if name == _FORWARD:
            self.forwards.append(Kernels())
        elif name == _BACKWARD:
            self.backwards.append(Kernels())
            self.recomputed.append(Kernels())

    def _counter(self) -> Kernels | None:
        """Returns the counter of the pass that is running."""
        counters = {FORWARD: self.forwards, BACKWARD: self.backwards, RECOMPUTE: self.recomputed}
        name = self.pass_name
        if name is not None:
            return counters[name][-1]
        return self.update if _UPDATE in self._names else None

    def _pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        return kind_of_module(self._running.name), tensor.detach()

    def _unpack(self, kept: tuple[str, Tensor]) -> Tensor:
        # The backward of the module that saved it comes next.
        self._kind, tensor = kept
        return tensor


def dtype_name(tensor: Tensor) -> str:
    """Returns a tensor's dtype as Kernel names it; tensor: any shape and dtype."""
    return _DTYPES.get(tensor.dtype, "fp32")


def _moved_bytes(func: Any, name: str, *, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Bytes that an operation reads and writes."""
    if name in _GATHERS:
        return 2.0 * sum(one.nbytes for one in outputs)
    if name in _SCATTERS:
        return 3.0 * inputs[-1].nbytes
    if name in ("zero_", "fill_", "zeros", "new_zeros", "zeros_like", "full", "ones_like", "new_full", "arange"):
        return float(sum(one.nbytes for one in outputs))
    if name in ("copy_", "_foreach_copy_"):
        return float(sum(one.nbytes for one in inputs))
    known = {id(one) for one in inputs}
    written = sum(one.nbytes for one in outputs if id(one) not in known)
    if func._schema.is_mutable:
        # What is changed in place is written as well.
        written += inputs[0].nbytes if not name.startswith(("_foreach_", "_fused_")) else sum(map(_nbytes, inputs)) // 2
    return float(sum(one.nbytes for one in inputs) + written)


def _nbytes(tensor: Tensor) -> int:
    return tensor.nbytes
