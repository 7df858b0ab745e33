"""DdpDebug: a BucketObserver that raises an error when parameters or gradients are accessed at the wrong time.

It is slow and synchronizes with the device. It also checks that each element of a buffer has exactly one owner.

[Note: debug mode] Memory that must not be read is filled with NaN: the parameter shards of other ranks, from this
rank's update to their gather, and the gradient shards whose sums other ranks own. Writes to memory that must not be
written are detected by a checksum. Debug mode reduces in rank order, because only then does a bucket keep its values
from the launch to the wait.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.core.device.torch_internals import TorchDispatchMode, dispatch_mode_stack, tree_leaves
from megatron.core.distributed.bucket_group import Traffic, _ParamAndGradBucketGroup
from megatron.core.distributed.bucket_storage import _ParamAndGradBucket
from megatron.core.distributed.collectives import shard_of
from megatron.core.distributed.layout import ALIGNMENT, FlatBuffer, ParamSlot, Span
from megatron.core.group_collectives import gather_objects
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import added_to_main_grad

# A checksum is the sum of a tensor's elements, reinterpreted as integers of the same size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DdpDebugError(RuntimeError):
    """Error of debug mode: a parameter or gradient was read, written or sent at the wrong time."""


class DdpDebug:
    """A BucketObserver with the checks of --ddp-debug; see [Note: debug mode].

    tell_others: sends the error message to the other ranks, which may be waiting for this rank, so that they raise it
    too.
    """

    def __init__(self, tell_others: Callable[[str], None]) -> None:
        self._tell_others = tell_others
        self._groups: list[_ParamAndGradBucketGroup] = []
        self._reductions: Counter[str] = Counter()
        self._is_first_grad = True
        # By group name: checksums of gradients that are being reduced.
        self._sent_grads: dict[str, list[int]] = {}
        self._under_way: set[str] = set()
        self._reads = _StaleReads(self._stop)

    def attach(self, groups: Sequence[_ParamAndGradBucketGroup], module: nn.Module) -> None:
        """Starts checking these groups, and checks that each of their elements has exactly one owner. Collective."""
        for group in groups:
            self._check_views(group)
        for buffer in dict.fromkeys(bucket.buffer for group in groups for bucket in group.buckets):
            if buffer.is_sharded:
                _check_coverage(buffer)
        self._groups += groups
        self._reads.watch(module)

    # Gradients.

    def begin_iteration(self) -> None:
        self._reductions.clear()
        self._sent_grads.clear()
        self._is_first_grad = True

    def before_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Checks, before the first gradient of an iteration, that all gradients are zero.

        Gradients that kernels have already added to main_grad are excluded.
        """
        if self._is_first_grad:
            self._is_first_grad = False
            for other in self._groups:
                self._check_zero_sync(other, "when the first gradient of the iteration was ready")

    def after_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Checks that a late gradient was not added to gradients that are already being reduced."""
        self._check_grads_unchanged(group, "a late gradient was ready")

    def before_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        if traffic is Traffic.GATHER:
            self._check_poison_sync(group)
            return
        self._check_grads_unchanged(group, "its second round began")
        self._check_views(group)
        if traffic is Traffic.REDUCE:
            self._reductions[group.name] += 1
            if self._reductions[group.name] > 1:
                self._stop(f"gradients of {_names(group)} are reduced twice in one iteration")

    def after_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        if traffic is Traffic.GATHER:
            self._under_way.add(group.name)
        elif group.can_repeat:
            self._sent_grads[group.name] = [_checksum_sync(slot.comm_view) for slot in group.slots]

    def before_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        if traffic is not Traffic.GATHER:
            self._check_grads_unchanged(group, "the sum was waited for")
            # The wait itself changes the gradients.
            self._sent_grads.pop(group.name, None)

    def after_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        if traffic is Traffic.GATHER:
            self._under_way.discard(group.name)
            self._reads.allow(group.slots)

    def before_agreement(self) -> None:
        """Does nothing."""

    def after_agreement(self) -> None:
        """Does nothing."""

    def end_iteration(self) -> None:
        """Checks that every group was reduced exactly once, and fills other ranks' gradient shards with NaN."""
        for group in self._groups:
            if self._reductions[group.name] != 1:
                self._stop(
                    f"gradients of {_names(group)} were reduced {self._reductions[group.name]} times in the iteration: "
                    "must be exactly once"
                )
            self._check_views(group)
            for bucket in group.buckets:
                if group.is_sharded:
                    _poison(bucket.grad_data, bucket)

    # Parameters.

    def gather_due(self, group: _ParamAndGradBucketGroup) -> None:
        """Fills other ranks' parameter shards with NaN, and forbids reads of them until the gather."""
        if group.name in self._under_way:
            self._stop(f"{_names(group)} were updated while their gather was in flight: call wait_params first")
        self._check_views(group)
        for bucket in group.buckets:
            _poison(bucket.param_data, bucket)
            own = shard_of(bucket.param_data, bucket.settings.group)
            self._reads.forbid(bucket.slots, own=own)

    # Internals.

    def _check_zero_sync(self, group: _ParamAndGradBucketGroup, when: str) -> None:
        for slot in group.slots:
            if not added_to_main_grad(slot.param) and int(slot.main_grad.count_nonzero()):
                self._stop(f"gradient of {slot.name} was not exactly zero {when}")

    def _check_grads_unchanged(self, group: _ParamAndGradBucketGroup, when: str) -> None:
        before = self._sent_grads.get(group.name, [])
        for slot, checksum in zip(group.slots, before):
            if _checksum_sync(slot.comm_view) != checksum:
                self._stop(f"gradient of {slot.name} was written after its reduction had started; detected when {when}")

    def _check_views(self, group: _ParamAndGradBucketGroup) -> None:
        """Raises an error unless every parameter and gradient is a view of its buffer, with the buffer's dtype."""
        for bucket in group.buckets:
            dtype = bucket.param_data.dtype
            for slot in bucket.slots:
                if not _is_at(slot.param, _slice_of(bucket.param_data, slot, bucket=bucket)):
                    self._stop(f"parameter {slot.name} is no longer a view of its buffer: its data was replaced")
                if not _is_at(slot.comm_view, _slice_of(bucket.grad_data, slot, bucket=bucket)):
                    self._stop(f"gradient of {slot.name} is no longer a view of its buffer")
                if slot.param.dtype != dtype:
                    self._stop(f"parameter {slot.name} is {slot.param.dtype} but its buffer is {dtype}")

    def _check_poison_sync(self, group: _ParamAndGradBucketGroup) -> None:
        """Raises an error unless other ranks' shards are still NaN; this rank's shard may have been updated."""
        with self._reads.paused():
            for bucket in group.buckets:
                intact = torch.ones_like(bucket.param_data, dtype=torch.bool)
                for part, value in zip(_shards_of_others(intact, bucket), _shards_of_others(bucket.param_data, bucket)):
                    part.copy_(value.isnan())
                for slot in bucket.slots:
                    if not bool(_slice_of(intact, slot, bucket=bucket).all()):
                        self._stop(f"parameter {slot.name} was written before its gather: call wait_params first")

    def _stop(self, message: str) -> NoReturn:
        self._tell_others(message)
        raise DdpDebugError(message)


def _is_at(view: torch.Tensor, place: torch.Tensor) -> bool:
    return view.numel() == 0 or view.data_ptr() == place.data_ptr()


def _slice_of(flat: torch.Tensor, slot: ParamSlot, *, bucket: _ParamAndGradBucket) -> torch.Tensor:
    start = slot.span.start - bucket.layout.span.start
    return flat[start : start + slot.span.numel]


def _shards_of_others(flat: torch.Tensor, bucket: _ParamAndGradBucket) -> list[torch.Tensor]:
    """Returns views of a bucket's flat tensor before and after this rank's shard."""
    group = bucket.settings.group
    rows, rank = flat.view(group_size(group), -1), group_rank(group)
    return [rows[:rank], rows[rank + 1 :]]


def _poison(flat: torch.Tensor, bucket: _ParamAndGradBucket) -> None:
    for part in _shards_of_others(flat, bucket):
        part.fill_(float("nan"))


def _checksum_sync(tensor: torch.Tensor) -> int:
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64).item())


def _names(group: _ParamAndGradBucketGroup) -> str:
    return ", ".join(slot.name for slot in group.slots)


# Uses of a parameter before its all-gather. Inside a module's forward every use is an error, on all ranks. Outside, the
# optimizer updates this rank's shards, so that only uses of other ranks' shards are errors.


@dataclass(frozen=True)
class _Range:
    """Range of elements [begin, end) in a storage."""

    begin: int
    end: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Range":
        """Builds the range from the first to the last element of a tensor.

        tensor: any shape and dtype.
        """
        begin = int(tensor.storage_offset())
        reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
        return cls(begin, begin + 1 + reach if tensor.numel() else begin)

    def without(self, other: "_Range") -> "list[_Range]":
        parts = [_Range(self.begin, min(self.end, other.begin)), _Range(max(self.begin, other.end), self.end)]
        return [part for part in parts if part.begin < part.end]

    def meets(self, other: "_Range") -> bool:
        return max(self.begin, other.begin) < min(self.end, other.end)


@dataclass(frozen=True)
class _Stale:
    """A parameter that must not be used before its gather.

    whole: all of its memory. of_others: the parts that other ranks update.
    """

    name: str
    whole: list[_Range]
    of_others: list[_Range]


class _StaleReads:
    """Detects uses of stale parameters, inside and outside the forward of watched modules; stop: raises an error."""

    def __init__(self, stop: Callable[[str], NoReturn]) -> None:
        self._stop = stop
        self._forbidden: dict[nn.Parameter, _Stale] = {}
        self._is_paused = False
        self._outside = _Watch(self, is_outside=True)

    def watch(self, module: nn.Module) -> None:
        """Checks each operation of `module`'s forward from now on."""
        modes: list[_Watch] = []

        def enter(*unused: Any) -> None:
            modes.append(_Watch(self, is_outside=False))
            modes[-1].__enter__()

        def leave(*unused: Any) -> None:
            modes.pop().__exit__(None, None, None)
            self._leave_outside()

        # Registered as the outermost hooks, so that operations of other hooks are checked too. The mode is exited even
        # if forward raises.
        module.register_forward_pre_hook(enter, prepend=True)
        module.register_forward_hook(leave, always_call=True)

    def forbid(self, slots: Sequence[ParamSlot], *, own: torch.Tensor) -> None:
        """Marks parameters as stale; own: the shard that this rank may still update, [n], any dtype."""
        for slot in slots:
            whole = _Range.of(slot.param)
            self._forbidden[slot.param] = _Stale(slot.name, [whole], whole.without(_Range.of(own)))
        if any(stale.of_others for stale in self._forbidden.values()):
            self._enter_outside()

    def allow(self, slots: Sequence[ParamSlot]) -> None:
        """Marks parameters as current."""
        for slot in slots:
            self._forbidden.pop(slot.param, None)
        self._leave_outside()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Suspends all checks inside the context."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def check(self, operation: Any, tensors: Iterable[Any], *, is_outside: bool) -> None:
        """Raises an error if an argument of an operation overlaps a stale parameter in memory.

        operation: the operation that the error message names. tensors: its arguments, tensors of any shape and dtype;
        other objects are ignored. is_outside: whether the operation runs outside every watched module's forward.
        """
        if not self._forbidden or self._is_paused:
            return
        used = [(t.untyped_storage().data_ptr(), _Range.of(t)) for t in tensors if isinstance(t, torch.Tensor)]
        names = [
            stale.name
            for param, stale in self._forbidden.items()
            for ranges in [stale.of_others if is_outside else stale.whole]
            if any(
                address == param.untyped_storage().data_ptr() and any(one.meets(reach) for one in ranges)
                for address, reach in used
            )
        ]
        if names:
            self._stop(
                f"{operation} uses {', '.join(names)} before the gather of these parameters is complete: first call "
                "their module, or DistributedDataParallel.wait_params with these parameters"
            )

    def _enter_outside(self) -> None:
        # Entered only if the stack contains no modes of other code, because modes must be exited in reverse order. A
        # model whose step ended in an error may have left a mode of this class on the stack.
        modes = dispatch_mode_stack()
        if self._outside not in modes and all(isinstance(mode, _Watch) and mode.is_outside for mode in modes):
            self._outside.__enter__()

    def _leave_outside(self) -> None:
        if not self._forbidden and dispatch_mode_stack()[-1:] == [self._outside]:
            self._outside.__exit__(None, None, None)


class _Watch(TorchDispatchMode):
    def __init__(self, reads: _StaleReads, *, is_outside: bool) -> None:
        super().__init__()
        self._reads, self.is_outside = reads, is_outside

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        reads_nothing = func.is_view or name.endswith("_like") or name.startswith("new_")
        # Collectives are excluded, because they make the parameters current.
        if not reads_nothing and func.namespace != "c10d":
            self._reads.check(func, tree_leaves((args, kwargs)), is_outside=self.is_outside)
        return func(*args, **kwargs)


# Check that the ranks' shards partition a buffer: every element has exactly one owner.


def _check_coverage(buffer: FlatBuffer) -> None:
    """Raises ValueError on all ranks that share `buffer`, naming a parameter, unless each element has one owner.

    Collective over buffer.data_parallel_group.
    """
    of_ranks = gather_objects(buffer.owned_spans(), buffer.data_parallel_group)
    problem = find_coverage_problem(of_ranks, numel=buffer.layout.numel)
    if problem is not None:
        element, what = problem
        names = [slot.name for slot in buffer.slots if slot.span.start <= element < slot.span.padded_end]
        raise ValueError(f"element {element} of the buffer (parameter {', '.join(names) or 'none, padding'}) {what}")


def find_coverage_problem(spans_of_ranks: Sequence[Sequence[Span]], *, numel: int) -> tuple[int, str] | None:
    """Returns the first element that does not have exactly one owner, and a description; None if there is none.

    The first element of a misaligned shard is reported too.
    """
    owned = sorted((span.start, span.end, rank) for rank, spans in enumerate(spans_of_ranks) for span in spans)
    end, last = 0, -1
    for start, its_end, rank in owned:
        if start % ALIGNMENT or its_end % ALIGNMENT:
            return start, f"is in a shard of rank {rank}, {start} to {its_end}, that is not aligned to {ALIGNMENT}"
        if start > end:
            return end, "is owned by no rank"
        if start < end:
            return start, f"is owned by rank {last} and by rank {rank}"
        end, last = its_end, rank
    return None if end == numel else (min(end, numel), "is owned by no rank" if end < numel else "is past the end")
