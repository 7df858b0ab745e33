"""DdpDebug: a BucketObserver that stops a step when something touches parameters or gradients at the wrong time.

It is slow, and reads the device. The reads of parameters that it objects to are found in stale_reads.py.

[Note: debug mode] What must not be read holds NaN: the parameters that other ranks own, from this rank's update to
their gather, and the gradients whose sums other ranks have. What must not be written has a checksum. Sums are taken in
rank order while debugging, since only then a bucket stays as it is from its launch until someone waits for it.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
from torch import nn

from megatron.core.distributed.bucket_observer import ObservedGroup, Traffic
from megatron.core.distributed.collectives import shard_of
from megatron.core.distributed.flat_buffer import Entry, _ParamAndGradBucket
from megatron.core.distributed.shard_coverage import check_coverage
from megatron.core.distributed.stale_reads import StaleReads
from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.tensor_parallel.param_attributes import added_to_main_grad

# The integer types whose sum over a tensor's bits is its checksum.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class DdpDebugError(RuntimeError):
    """A parameter or gradient was read, written or sent at the wrong time; the message names the parameters."""


class DdpDebug:
    """A BucketObserver with the checks of --ddp-debug; see [Note: debug mode].

    tell_others: makes the other ranks raise as well, which may have found no error and wait for this one.
    """

    def __init__(self, tell_others: Callable[[str], None]) -> None:
        self._tell_others = tell_others
        self._groups: list[ObservedGroup] = []
        self._reductions: Counter[str] = Counter()
        self._is_first_grad = True
        # By group: checksums of its gradients under reduction.
        self._sent_grads: dict[str, list[int]] = {}
        self._under_way: set[str] = set()
        self._reads = StaleReads(self._stop)

    def attach(self, groups: Sequence[ObservedGroup], module: nn.Module) -> None:
        """Starts to check these groups. Collective: the ranks' shards must cover every element once."""
        for group in groups:
            self._check_views(group)
        for buffer in dict.fromkeys(bucket.buffer for group in groups for bucket in group.buckets):
            if buffer.is_sharded:
                check_coverage(buffer)
        self._groups += groups
        self._reads.watch(module)

    # Gradients.

    def begin_iteration(self) -> None:
        self._reductions.clear()
        self._sent_grads.clear()
        self._is_first_grad = True

    def before_grad(self, group: ObservedGroup, param: nn.Parameter) -> None:
        """Checks before the first gradient that all are zero, except those that kernels have already added."""
        if self._is_first_grad:
            self._is_first_grad = False
            for other in self._groups:
                self._check_zero_sync(other, "when the first gradient of the iteration came")

    def after_grad(self, group: ObservedGroup, param: nn.Parameter) -> None:
        """Checks that a late gradient was kept apart from gradients already sent."""
        self._check_grads_unchanged(group, "its gradient came")

    def before_launch(self, traffic: Traffic, group: ObservedGroup) -> None:
        if traffic is Traffic.GATHER:
            self._check_poison_sync(group)
            return
        self._check_grads_unchanged(group, "its second round began")
        self._check_views(group)
        if traffic is Traffic.REDUCE:
            self._reductions[group.name] += 1
            if self._reductions[group.name] > 1:
                self._stop(f"gradients of {_names(group)} are reduced twice in one iteration")

    def after_launch(self, traffic: Traffic, group: ObservedGroup) -> None:
        if traffic is Traffic.GATHER:
            self._under_way.add(group.name)
        elif group.can_repeat:
            self._sent_grads[group.name] = [_checksum_sync(entry.wire) for entry in group.entries]

    def before_wait(self, traffic: Traffic, group: ObservedGroup) -> None:
        if traffic is not Traffic.GATHER:
            self._check_grads_unchanged(group, "someone waited for the sum")
            # The wait itself changes them.
            self._sent_grads.pop(group.name, None)

    def after_wait(self, traffic: Traffic, group: ObservedGroup) -> None:
        if traffic is Traffic.GATHER:
            self._under_way.discard(group.name)
            self._reads.allow(group.entries)

    def before_agreement(self) -> None:
        """Checks nothing."""

    def after_agreement(self) -> None:
        """Checks nothing."""

    def end_iteration(self) -> None:
        """Checks that every group was reduced once, and poisons the gradient shards of other ranks."""
        for group in self._groups:
            if self._reductions[group.name] != 1:
                self._stop(
                    f"gradients of {_names(group)} were reduced {self._reductions[group.name]} times in the iteration: "
                    "must be once"
                )
            self._check_views(group)
            for bucket in group.buckets:
                if bucket.buffer.is_sharded:
                    _poison(bucket.grad_data, bucket)

    # Parameters.

    def gather_due(self, group: ObservedGroup) -> None:
        """Poisons the parameter shards of other ranks and forbids reads of them until the gather."""
        if group.name in self._under_way:
            self._stop(f"{_names(group)} were updated while their gather was under way: it was never waited for")
        self._check_views(group)
        for bucket in group.buckets:
            _poison(bucket.param_data, bucket)
            own = shard_of(bucket.param_data, bucket.buffer.data_parallel_group)
            self._reads.forbid(bucket.entries, own=own)

    # Inside.

    def _check_zero_sync(self, group: ObservedGroup, when: str) -> None:
        for entry in group.entries:
            if not added_to_main_grad(entry.param) and int(entry.main_grad.count_nonzero()):
                self._stop(f"gradient of {entry.name} was not exactly zero {when}")

    def _check_grads_unchanged(self, group: ObservedGroup, when: str) -> None:
        before = self._sent_grads.get(group.name, [])
        for entry, checksum in zip(group.entries, before):
            if _checksum_sync(entry.wire) != checksum:
                self._stop(f"gradient of {entry.name} was written after its reduction had started; seen when {when}")

    def _check_views(self, group: ObservedGroup) -> None:
        """Stops where a parameter or its gradient is not what lies in the buffers, in their types."""
        for bucket in group.buckets:
            kind = bucket.buffer.kind
            for entry in bucket.entries:
                if not _is_at(entry.param, _slice_of(bucket.param_data, entry, bucket=bucket)):
                    self._stop(f"parameter {entry.name} is no view of its buffer any more: its data was replaced")
                if not _is_at(entry.wire, _slice_of(bucket.grad_data, entry, bucket=bucket)):
                    self._stop(f"gradient of {entry.name} is no view of its buffer any more")
                if entry.param.dtype != kind.param_dtype or bucket.grad_data.dtype != kind.grad_dtype:
                    self._stop(
                        f"parameter {entry.name} is {entry.param.dtype} and its gradient is sent as "
                        f"{bucket.grad_data.dtype}: {kind.param_dtype} and {kind.grad_dtype} were wrapped"
                    )

    def _check_poison_sync(self, group: ObservedGroup) -> None:
        """Others' shards are NaN until they arrive; this rank's own is being updated."""
        with self._reads.paused():
            for bucket in group.buckets:
                intact = torch.ones_like(bucket.param_data, dtype=torch.bool)
                for part, value in zip(_shards_of_others(intact, bucket), _shards_of_others(bucket.param_data, bucket)):
                    part.copy_(value.isnan())
                for entry in bucket.entries:
                    if not bool(_slice_of(intact, entry, bucket=bucket).all()):
                        self._stop(f"parameter {entry.name} was written before its gather: wait_params first")

    def _stop(self, message: str) -> NoReturn:
        self._tell_others(message)
        raise DdpDebugError(message)


def _is_at(view: torch.Tensor, place: torch.Tensor) -> bool:
    return view.numel() == 0 or view.data_ptr() == place.data_ptr()


def _slice_of(flat: torch.Tensor, entry: Entry, *, bucket: _ParamAndGradBucket) -> torch.Tensor:
    start = entry.span.start - bucket.layout.span.start
    return flat[start : start + entry.span.numel]


def _shards_of_others(flat: torch.Tensor, bucket: _ParamAndGradBucket) -> list[torch.Tensor]:
    """Returns the parts of a bucket's flat tensor before and after this rank's shard; views."""
    group = bucket.buffer.data_parallel_group
    rows, rank = flat.view(group_size(group), -1), group_rank(group)
    return [rows[:rank], rows[rank + 1 :]]


def _poison(flat: torch.Tensor, bucket: _ParamAndGradBucket) -> None:
    for part in _shards_of_others(flat, bucket):
        part.fill_(float("nan"))


def _checksum_sync(tensor: torch.Tensor) -> int:
    bits = tensor.detach().contiguous().view(_BITS[tensor.element_size()])
    return int(bits.sum(dtype=torch.int64).item())


def _names(group: ObservedGroup) -> str:
    return ", ".join(entry.name for entry in group.entries)
