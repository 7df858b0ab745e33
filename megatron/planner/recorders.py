"""Records the kernels, messages and live memory of a traced step, as torch dispatch modes.

The recorders observe the run's own code on meta tensors. work.py estimates the time of the records.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import finalize

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.device.torch_internals import TorchDispatchMode, storage_id, tree_leaves
from megatron.core.pipeline_parallel.schedule import Action, ActionKind
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import redraws_numbers
from megatron.planner.work import (
    AGREEMENT,
    BACKWARD,
    FORWARD,
    GRADS,
    OPTIMIZER,
    OTHER,
    PARAMS,
    PIPELINE,
    STATISTICS,
    ChunkWork,
    Kernel,
    Kernels,
    Traffic,
    Unit,
    kind_of_module,
    merged,
    scaled_dtype,
)

RECOMPUTE = "recompute"
_FORWARD, _BACKWARD, _UPDATE = "ScheduleRunner._forward", "ScheduleRunner._backward", "MegatronOptimizer.step"
_WEIGHT = "ScheduleRunner._weight"
# Kind of the gradients that a microbatch holds until its weight pass.
HELD_GRADIENTS = "gradients for weight passes"
_HAND_OVER = "PassTurns.hand_over"
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8"}
_COUNTED = {"aten", "activation", "block_scaled", "paged_stash", "rope", "router", "static_rows"}
# Grouped GEMMs of experts in 8 bits.
_SCALED = {"scaled_product", "scaled_weight_grad"}
# Grouped GEMMs of torch, and of experts with static buffers.
GROUPED = {"_grouped_mm", "grouped_gemm", "grouped_gemm_weight_grad", *_SCALED}
# Operators that run in the first microbatch of a step alone: weights are quantized once. See quantized_experts.py.
ONCE = {"quantize_squares"}
# Operators that move no bytes: allocations, views, and reads by the host.
_FREE = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "_reshape_alias"),
    *("detach", "lift_fresh", "set_", "resize_", "_local_scalar_dense", "equal", "record_stream", "is_pinned"),
}
# Operators that read as many bytes as they write, independent of the size of the table.
_GATHERS = {"embedding", "index", "index_select", "gather"}
# Operators that read their source, and read and write as many bytes of the table.
_SCATTERS = {"index_put_", "_index_put_impl_", "index_add_", "index_copy_", "scatter_", "scatter_add_"}
# Operators whose bytes do not depend on the size of the table.
ROWS_OF_TABLES = _GATHERS | _SCATTERS
# Maps trace names to phases. A message belongs to the phase of the innermost open trace.
_PHASES = {
    "ScheduleRunner._forward": FORWARD,
    "ScheduleRunner._backward": BACKWARD,
    "P2PCommunicator.post": PIPELINE,
    "_ParamAndGradBucketGroup.launch_gathers": PARAMS,
    "FSDP::all_gather": PARAMS,
    "FSDP::post_backward_reduce": GRADS,
    "_ParamAndGradBucketGroup.launch_reductions": GRADS,
    "_ParamAndGradBucketGroup.complete_reductions": GRADS,
    "finalize_model_grads": GRADS,
    "MegatronOptimizer.step": OPTIMIZER,
    "Iteration.agree_sync": AGREEMENT,
    "Iteration.highest_sync": AGREEMENT,
    "Iteration.first_ranks_order_sync": AGREEMENT,
    "StatisticsExchange.reduce_sync": STATISTICS,
}
_OPERATIONS = {
    "allreduce_": "all-reduce",
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "reduce_scatter_": "reduce-scatter",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor_coalesced_": "reduce-scatter",
    "alltoall_base_": "all-to-all",
    "alltoall_": "all-to-all",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "receive",
}
# Operations whose payload is their input. The payload of others is their output, or the tensor changed in place.
_BY_INPUT = {"reduce-scatter", "all-to-all"}
# All messages inside one of these trace ranges belong to one collective.
_WHOLE = {
    "gather_shards_": "all-gather",
    "_OrderedReduceScatter": "reduce-scatter",
    "_OrderedReduceScatter._send": "reduce-scatter",
}
# The subset of _WHOLE in which a new collective begins.
_BEGINNINGS = {"gather_shards_", "_OrderedReduceScatter"}
# Several groups may have the same ranks. A message is named after the first match: in forward and backward a group of
# model parallelism, otherwise of data parallelism. hcp_0 and hcp_1 are the levels of hierarchical context parallelism.
_OF_MODEL = "tp hcp_0 hcp_1 cp pp ep expt_tp tp_cp tp_ep embd dp dp_cp expt_dp tp_dp tp_dp_cp mp tp_ep_pp".split()
_OF_DATA = (
    "dp dp_cp expt_dp intra_dp_cp intra_expt_dp inter_dist_opt intra_dist_opt tp cp pp embd tp_cp tp_dp_cp mp "
    "tp_ep_pp tp_dp ep expt_tp tp_ep"
).split()
_SHORT = {"expt_tp": "etp", "expt_dp": "edp", "tp_dp_cp": "stage"}


class RunningModules:
    """Tracks the innermost module whose forward is running, while `followed` is active."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._inside: list[str] = []

    @property
    def name(self) -> str:
        """Name of the running module in named_modules(); "" in the model itself and outside all modules."""
        return self._inside[-1] if self._inside else ""

    def __bool__(self) -> bool:
        return bool(self._inside)

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Tracks modules inside the block. Recovers after a forward that raises."""
        handles = []
        for model in self._models:
            for name, module in model.named_modules():
                handles.append(module.register_forward_pre_hook(self._enter(name)))
                handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, name: str) -> Callable[..., None]:
        def enter(*_: Any) -> None:
            self._inside.append(name)

        return enter

    def _leave(self, *_: Any) -> None:
        self._inside.pop()


class WorkRecorder(TorchDispatchMode):
    """Counts the kernels of each pass while `recording` is active, in a step of one microbatch.

    live_rows: share of the expert buffers' rows that are live. Grouped GEMMs skip the other rows.
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
        """Records kernels inside the block, together with the module whose forward or backward is running."""
        with self._running.followed(), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack), self:
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts its kernel, unless it moves no bytes."""
        kwargs = kwargs or {}
        if func.namespace == "profiler":
            self._follow(func, args)
        result = func(*args, **kwargs)
        name = func._overloadpacket.__name__
        if func.namespace not in _COUNTED or func.is_view or name in _FREE or self._counter() is None:
            return result
        self._count(func, name, args=args, kwargs=kwargs, result=result)
        return result

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
        """Returns the counter of the pass that is running, or None outside passes."""
        counters = {FORWARD: self.forwards, BACKWARD: self.backwards, RECOMPUTE: self.recomputed}
        name = self.pass_name
        if name is not None:
            return counters[name][-1]
        return self.update if _UPDATE in self._names else None

    @property
    def pass_name(self) -> str | None:
        """Name of the running pass: forward, backward, or recompute for a forward inside backward; None outside."""
        if _BACKWARD in self._names:
            # A module that runs forward during backward is being recomputed.
            return RECOMPUTE if self._running else BACKWARD
        return FORWARD if _FORWARD in self._names else None

    def _count(self, func: Any, name: str, *, args: Any, kwargs: Any, result: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        example = next((one for one in (*inputs, *outputs) if one.is_floating_point()), None)
        moved = _moved_bytes(func, name, inputs=inputs, outputs=outputs)
        unit, flops = Unit.MEMORY, 0.0
        dtype = "fp32" if example is None else dtype_name(example)
        if name in _SCALED:
            unit, flops, dtype = (
                Unit.MATMUL,
                self._live_rows * _scaled_flops(name, args, kwargs),
                scaled_dtype(BlockFormat(kwargs["block"])),
            )
        elif name in GROUPED:
            # Holds for both forms: rows times expert matrices, and rows times rows for weight gradients.
            unit, flops = Unit.MATMUL, 2.0 * self._live_rows * inputs[0].numel() * inputs[1].shape[-1]
        elif func._overloadpacket in flop_registry:
            unit, flops = Unit.MATMUL, float(flop_registry[func._overloadpacket](*args, **kwargs, out_val=result))
        if moved or flops:
            self._add(Kernel(self.kind, unit, dtype, float(flops), float(moved)), is_once=name in ONCE)

    def note(self, unit: Unit, tensor: Tensor, *, flops: float, num_bytes: float) -> None:
        """Counts one kernel. Fused kernels call it directly. tensor: any shape, in the dtype of the computation."""
        self._add(Kernel(self.kind, unit, dtype_name(tensor), float(flops), float(num_bytes)), is_once=False)

    def _add(self, kernel: Kernel, *, is_once: bool) -> None:
        """Counts one kernel. is_once: whether it runs once per step, and counts with the update."""
        counter = self._counter()
        if counter is not None:
            (self.update if is_once else counter)[kernel] += 1

    @property
    def kind(self) -> str:
        """Kind of the module whose forward or backward is running."""
        return kind_of_module(self._running.name) if self._running else self._kind or kind_of_module("")

    def _pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        return kind_of_module(self._running.name), tensor.detach()

    def _unpack(self, kept: tuple[str, Tensor]) -> Tensor:
        # The module that saved it runs its backward next.
        self._kind, tensor = kept
        return tensor

    def chunks(self, actions: Sequence[Action]) -> tuple[ChunkWork, ...]:
        """Returns the recorded work of each chunk. actions: passes of the step, one per chunk and kind of pass."""
        of_kind = {kind: [action.chunk for action in actions if action.kind is kind] for kind in ActionKind}
        forwards = dict(zip(of_kind[ActionKind.FORWARD], self.forwards, strict=True))
        backwards = zip(of_kind[ActionKind.BACKWARD], self.backwards, self.recomputed, strict=True)
        found = {chunk: ChunkWork(forwards[chunk], kernels, recompute) for chunk, kernels, recompute in backwards}
        return tuple(found[chunk] for chunk in sorted(found))


def dtype_name(tensor: Tensor) -> str:
    """Returns a tensor's dtype as named in Kernel, such as bf16. tensor: any shape and dtype."""
    return _DTYPES.get(tensor.dtype, "fp32")


def _scaled_flops(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> float:
    """Returns the FLOPs of a product in 8 bits. Packed rows also contain scales, so its sizes are those of results."""
    out = kwargs["out"]
    if name == "scaled_weight_grad":
        return 2.0 * kwargs["rows"] * out.shape[1] * out.shape[2]
    weight = args[1]
    return 2.0 * out.shape[0] * weight.shape[1] * kwargs["width"]


def _moved_bytes(func: Any, name: str, *, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> float:
    """Returns the number of bytes that an operator reads and writes."""
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
        # A first argument that changes in place is also written; other results are arguments that are not read. Half
        # of the tensors in lists are assumed to be sources, half results.
        changed = func._schema.arguments[0].alias_info
        if name.startswith(("_foreach_", "_fused_")):
            written += sum(one.nbytes for one in inputs) // 2
        elif changed is not None and changed.is_write:
            written += inputs[0].nbytes
    return float(sum(one.nbytes for one in inputs) + written)


@dataclass
class _OpenRanges:
    """Names of the trace ranges that a thread has entered, and whether the current collective and slice are counted."""

    names: list[str] = field(default_factory=list)
    is_begun: bool = False
    is_slice_begun: bool = False


def noted_by(*recorders: WorkRecorder) -> Callable[..., None]:
    """Returns a function like WorkRecorder.note, which counts a kernel in the recorder that is active."""

    def note(unit: Unit, tensor: Tensor, *, flops: float, num_bytes: float) -> None:
        for one in recorders:
            one.note(unit, tensor, flops=flops, num_bytes=num_bytes)

    return note


class MessageRecorder(TorchDispatchMode):
    """Records the messages that are sent while the mode is active. Must be the innermost mode.

    groups: this rank's process groups, after which messages are named. The backward of a pair of passes runs on a
    thread of its own, with the same modes, so trace ranges are followed for each thread.
    """

    def __init__(self, groups: ProcessGroupCollection) -> None:
        super().__init__()
        self._groups = _ranks_of_kinds(groups)
        self._messages: list[Traffic] = []
        self._of_threads: dict[int, _OpenRanges] = {}
        self._known: dict[tuple[str, str], tuple[str, int]] = {}

    @property
    def _open(self) -> _OpenRanges:
        return self._of_threads.setdefault(threading.get_ident(), _OpenRanges())

    def take(self) -> tuple[Traffic, ...]:
        """Returns and clears the messages recorded since the last call."""
        messages, self._messages = self._messages, []
        return merged(messages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Records collectives and trace names, and runs every operator unchanged."""
        if func.namespace == "profiler":
            self._follow(func, args)
        elif func.namespace == "c10d":
            self._note(str(func._schema.name).removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _follow(self, func: Any, args: Sequence[Any]) -> None:
        ranges = self._open
        if "enter" in func._schema.name:
            # Torch's own trace names end with the module in parentheses.
            name = str(args[0]).partition(" (")[0]
            ranges.names.append(name)
            ranges.is_begun = ranges.is_begun and name not in _BEGINNINGS
            ranges.is_slice_begun = ranges.is_slice_begun and name != "_OrderedReduceScatter._send"
        elif ranges.names:
            ranges.names.pop()

    def _note(self, name: str, args: Sequence[Any]) -> None:
        if name not in _OPERATIONS:
            return  # barriers and similar operations
        operation, ranges = _OPERATIONS[name], self._open
        count, num_bytes = 1, _bytes_of(args[1] if operation in _BY_INPUT else args[0])
        whole = _WHOLE.get(ranges.names[-1]) if ranges.names else None
        if whole is not None:
            # Slices that are sent while a reduction is waited for count as part of the reduction.
            count = int(not ranges.is_begun and not _BEGINNINGS.isdisjoint(ranges.names))
            if whole == "reduce-scatter" and args[3] and not ranges.is_slice_begun:
                # A slice is one message per peer rank. The first counts twice, to include this rank's part.
                num_bytes *= 2
            ranges.is_begun = ranges.is_slice_begun = True
            operation = whole
        phase = next((_PHASES[one] for one in reversed(ranges.names) if one in _PHASES), OTHER)
        group, size = self._name_of(_group_in(args), phase)
        self._messages.append(Traffic(group, size, operation, phase, count, num_bytes))

    def _name_of(self, group: dist.ProcessGroup, phase: str) -> tuple[str, int]:
        """Returns the name under which a group's messages are recorded in a phase, and the group's size."""
        key = (group.group_name, phase)
        if key not in self._known:
            ranks = _ranks_of(group)
            order = _OF_MODEL if phase in (FORWARD, BACKWARD, PIPELINE) else _OF_DATA
            found = next((name for name in order if self._groups.get(name) == ranks), "world")
            is_world = len(ranks) == dist.get_world_size() and phase in (STATISTICS, OTHER)
            self._known[key] = "world" if is_world else _SHORT.get(found, found), len(ranks)
        return self._known[key]


def ranks_by_name(groups: ProcessGroupCollection, links: Iterable[Traffic]) -> dict[str, tuple[int, ...]]:
    """Returns the ranks of each group that appears in the recorded messages, by name of the group."""
    own = {_SHORT.get(name, name): ranks for name, ranks in _ranks_of_kinds(groups).items()}
    own["world"] = tuple(range(dist.get_world_size()))
    return {name: own[name] for name in sorted({one.group for one in links})}


def _ranks_of_kinds(groups: ProcessGroupCollection) -> dict[str, tuple[int, ...]]:
    """Returns this rank's groups by name, as ranks. hcp_0 and hcp_1 are levels of hierarchical context parallelism."""
    named = {**vars(groups), **{f"hcp_{level}": group for level, group in enumerate(groups.hcp)}}
    return {name: _ranks_of(group) for name, group in named.items() if isinstance(group, dist.ProcessGroup)}


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def _group_in(args: Iterable[Any]) -> dist.ProcessGroup:
    boxed = next(arg for arg in args if isinstance(arg, torch.ScriptObject))
    return dist.ProcessGroup.unbox(boxed)


def _bytes_of(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, Tensor) else sum(map(_bytes_of, tensors))


class LiveBytes(TorchDispatchMode):
    """Counts the live bytes of storages that operators allocate on a device while the mode is active.

    A storage is live until its last tensor is freed. The mode must be the innermost one, and sees only operators of
    threads in which it is active. peaks: largest number of live bytes in each part that `begin` started; "" is the part
    before the first `begin`. messages_peak: largest number of live bytes among the inputs and outputs of collectives.
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__()
        self._device_type, self._part = device_type, ""
        self._alive: dict[int, int] = {}
        self._messages: set[int] = set()
        self._bytes = self._message_bytes = 0
        self.peaks, self.messages_peak = {"": 0}, 0

    def begin(self, part: str) -> None:
        """Starts a new part, whose peak is recorded separately."""
        self._part = part
        self.peaks[part] = self._bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operator and counts the storages that it allocates."""
        result = func(*args, **(kwargs or {}))
        given = {storage_id(storage) for storage in self._storages((args, kwargs))}
        for storage in self._storages(result):
            # Views of an input allocate nothing.
            if storage_id(storage) not in given:
                self._note(storage)
        if func.namespace == "c10d":
            for key in given:
                self._note_message(key)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage_id(storage)
        if key not in self._alive:
            self._alive[key] = storage.nbytes()
            finalize(storage, self._forget, key)
            self._bytes += storage.nbytes()
            self.peaks[self._part] = max(self.peaks[self._part], self._bytes)

    def _note_message(self, key: int) -> None:
        if key in self._alive and key not in self._messages:
            self._messages.add(key)
            self._message_bytes += self._alive[key]
            self.messages_peak = max(self.messages_peak, self._message_bytes)

    def _forget(self, key: int) -> None:
        num_bytes = self._alive.pop(key)
        self._bytes -= num_bytes
        if key in self._messages:
            self._messages.remove(key)
            self._message_bytes -= num_bytes

    def _storages(self, tree: Any) -> list[torch.UntypedStorage]:
        tensors = (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
        return [tensor.untyped_storage() for tensor in tensors if tensor.device.type == self._device_type]


class HeldBytes(LiveBytes):
    """Records the bytes that a microbatch holds between its backward and its weight pass.

    The step must have one microbatch. by_pass: for each weight pass, bytes of tensors that the forward saved, by the
    kind of the module that saved them, and of gradients as HELD_GRADIENTS. Tensors that two weight passes hold count
    for the later one.
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__(device_type)
        self.by_pass: list[Counter[str]] = []
        self._kinds: dict[int, str] = {}
        # The storages that are live when a weight pass begins, until it ends.
        self._held: set[int] = set()
        self._names: list[str] = []

    def note_saved(self, tensor: Tensor, kind: str) -> None:
        """Records the kind of the module that saves a tensor, any shape and dtype, for backward."""
        self._kinds[storage_id(tensor.untyped_storage())] = kind

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows weight passes by their trace name, and counts as LiveBytes does."""
        if func.namespace == "profiler":
            if "enter" in func._schema.name:
                self._names.append(str(args[0]))
                if self._names[-1] == _WEIGHT:
                    self._held = {*self._alive}
                    self.by_pass.append(Counter())
            elif self._names and self._names.pop() == _WEIGHT:
                self._held = set()
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _forget(self, key: int) -> None:
        kind = self._kinds.pop(key, HELD_GRADIENTS)
        if key in self._held:
            self._held.remove(key)
            self.by_pass[-1][kind] += self._alive[key]
        super()._forget(key)

    def by_chunk(self, actions: Sequence[Action]) -> tuple[Counter[str], ...]:
        """Returns the recorded bytes of each chunk. actions: passes of the step, one per chunk and kind of pass."""
        chunks = [action.chunk for action in actions if action.kind is ActionKind.WEIGHT]
        found = dict(zip(chunks, self.by_pass, strict=True))
        return tuple(found[chunk] for chunk in sorted(found))


class SplitRecorder(WorkRecorder):
    """Counts the kernels of a step whose backwards leave weight gradients to weight passes, which are not counted.

    held: receives the kinds of saved tensors.
    """

    def __init__(self, model: Sequence[nn.Module], *, live_rows: float = 1.0, held: HeldBytes) -> None:
        super().__init__(model, live_rows=live_rows)
        self._held = held

    def _pack(self, tensor: Tensor) -> tuple[str, Tensor]:
        kind, kept = super()._pack(tensor)
        self._held.note_saved(kept, kind)
        return kind, kept


class TurnBytes(NamedTuple):
    """Bytes that are live during one turn of a pass: the most of them, and those when it hands over or ends."""

    peak: int
    held: int


@dataclass(frozen=True)
class PassBytes:
    """Live bytes of a pass. before: bytes that the pass holds before its first turn."""

    before: int
    turns: tuple[TurnBytes, ...]


class TurnRecorder(LiveBytes):
    """Records the live bytes of each pass of a step without pairs, turn by turn.

    A turn ends where the pass would hand over in a pair. passes: bytes of the passes in the order of execution, without
    the bytes that are live before a forward or after a backward. messages: the part of these bytes that collectives
    use. rest: bytes that are live after the last pass.
    """

    def __init__(self, device_type: str = "meta") -> None:
        super().__init__(device_type)
        self.passes: list[PassBytes] = []
        self.messages: list[PassBytes] = []
        self.rest = 0
        self._names: list[str] = []
        # Of the running pass: live bytes of all tensors and of messages between its turns, and the most in each turn.
        self._levels: list[tuple[int, int]] = []
        self._peaks: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follows passes and their turns by their trace names, and counts as LiveBytes does."""
        if func.namespace == "profiler":
            self._follow(func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _follow(self, func: Any, args: Sequence[Any]) -> None:
        if "enter" in func._schema.name:
            self._names.append(str(args[0]))
            if self._names[-1] in (_FORWARD, _BACKWARD):
                self._levels, self._peaks = [], []
                self._begin_turn()
            elif self._names[-1] == _HAND_OVER and not redraws_numbers():
                self._end_turn()
                self._begin_turn()
        elif self._names and (name := self._names.pop()) in (_FORWARD, _BACKWARD):
            self._end_turn()
            self._end_pass(is_forward=name == _FORWARD)

    def _begin_turn(self) -> None:
        self.begin(_HAND_OVER)
        self.messages_peak = self._message_bytes
        self._levels.append((self._bytes, self._message_bytes))

    def _end_turn(self) -> None:
        self._peaks.append((self.peaks[_HAND_OVER], self.messages_peak))

    def _end_pass(self, *, is_forward: bool) -> None:
        levels = [*self._levels, (self._bytes, self._message_bytes)]
        for which, found in enumerate((self.passes, self.messages)):
            base = levels[0 if is_forward else -1][which]
            turns = (
                TurnBytes(peak[which] - base, level[which] - base)
                for peak, level in zip(self._peaks, levels[1:], strict=True)
            )
            found.append(PassBytes(levels[0][which] - base, tuple(turns)))
        self.rest = self._bytes
