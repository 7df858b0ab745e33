"""SyncedGroup: what all bucket groups share, their place among all and the gathers of their parameters.

How gradients are kept and reduced is bucket_group.py's, or transient_grads.py's; when, scheduler.py's.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from megatron.core.device import Arrival
from megatron.core.distributed.bucket_observer import Traffic
from megatron.core.distributed.collectives import Handle, gather_shards_
from megatron.core.distributed.flat_buffer import _ParamAndGradBucket
from megatron.core.distributed.iteration import Ledger
from megatron.core.distributed.launch_sequence import Readiness
from megatron.core.tensor_parallel.weight_grads import WeightGrad


class GradState(Enum):
    """The state of a group's gradients in an iteration."""

    COLLECTING = "collecting"
    IN_FLIGHT = "in flight"
    REDUCED = "reduced"


class ParamState(Enum):
    """Whether a rank's copy of the parameters is what their owners hold.

    ARRIVED: it is, but other ranks may still wait for theirs; CURRENT: it is on all ranks. A group leaves CURRENT, and
    comes back to it, at the same place of the program on all ranks; in between each is at its own state.
    """

    CURRENT = "current"
    STALE = "stale"
    IN_FLIGHT = "in flight"
    ARRIVED = "arrived"


class SyncedGroup(ABC):
    """Buckets that are reduced and gathered together. name: the same on all ranks, for messages.

    is_last_microbatch: gradients that come now are counted. is_last_backward: gradients that are counted now are the
    last of the iteration. number: its place among all groups, given when it is attached to a scheduler.
    """

    number: int

    def __init__(self, buckets: Sequence[_ParamAndGradBucket], *, name: str) -> None:
        self.buckets, self.name = list(buckets), name
        self.entries = [entry for bucket in self.buckets for entry in bucket.entries]
        # Notes what is launched, where all ranks of the stage have this group.
        self.ledger: Ledger | None = None
        self.is_last_microbatch = self.is_last_backward = True
        self.grad_state, self.param_state = GradState.COLLECTING, ParamState.CURRENT
        self.readiness = Readiness(len(self.entries))
        self.arrival = Arrival(self.device)
        self._index_of = {entry.param: index for index, entry in enumerate(self.entries)}
        self._gathers: list[Handle] = []
        # Called when the parameters have come, by a rank's owner of them.
        self.on_arrival: Callable[[], None] | None = None

    def attach(
        self,
        number: int,
        *,
        mark_grad_ready: Callable[["SyncedGroup", nn.Parameter], None],
        start_grad_sync: Callable[[Sequence["SyncedGroup"]], None],
        start_param_sync: Callable[[Sequence["SyncedGroup"]], None],
        need: Callable[..., None],
    ) -> None:
        """Sets the group's number, and the methods of a scheduler that reduce and gather it in its turn."""
        self.number = number
        self._mark_grad_ready, self._start_grad_sync = mark_grad_ready, start_grad_sync
        self._start_param_sync, self._need = start_param_sync, need

    # For users: each in its turn among all groups.

    def start_param_sync(self, force_sync: bool = False) -> None:
        """Starts to gather the parameters of this group and of all before it; force_sync: waits, too. Collective."""
        self._start_param_sync([self])
        if force_sync:
            self._need(self, prefetch=False)

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Waits for the parameters; starts the gather that follows unless told to skip. Collective."""
        self._need(self, prefetch=not skip_next_bucket_dispatch)

    # Gradients.

    @property
    @abstractmethod
    def is_late(self) -> bool:
        """Whether gradients were added after the reductions that were launched so far."""

    @property
    @abstractmethod
    def is_moving(self) -> bool:
        """Whether some gradients are being reduced, so that they cannot all be scaled now."""

    @abstractmethod
    def take(self, param: nn.Parameter) -> None:
        """Moves the gradient in `param.grad`, if any, to its place."""

    @abstractmethod
    def add(self, param: nn.Parameter, new: WeightGrad) -> None:
        """Adds a gradient that is not computed yet to its place."""

    def count_gradient(self, param: nn.Parameter) -> bool:
        """Counts a gradient of the last microbatch; whether it was the last one expected in this group."""
        return self.readiness.came(self._index_of[param])

    @abstractmethod
    def unfilled(self) -> list[str]:
        """Names of the parameters without a gradient in this iteration."""

    @abstractmethod
    def launch_reductions(self) -> None:
        """Starts to reduce the gradients. Collective."""

    @abstractmethod
    def start_second_round(self) -> None:
        """Starts to reduce what came too late on any rank; on all ranks. Collective."""

    @abstractmethod
    def advance(self) -> None:
        """Starts the second stage of reductions, so that several groups may run theirs together. Collective."""

    @abstractmethod
    def advance_early(self) -> bool:
        """Starts the second stage early, without blocking the host; returns whether all of it is in flight."""

    @abstractmethod
    def advance_second_round(self) -> None:
        """Does what `advance` does for the second round; called after `advance` of all groups. Collective."""

    @abstractmethod
    def complete_reductions(self) -> None:
        """Waits for all reductions of the group."""

    @abstractmethod
    def abandon(self) -> None:
        """Ends reductions in flight and discards their results. Collective."""

    @abstractmethod
    def reset(self) -> None:
        """Begins an iteration; no reduction is under way."""

    @abstractmethod
    def works(self, traffic: Traffic) -> list[dist.Work]:
        """The messages under way, for observers."""

    @abstractmethod
    def take_sums(self) -> None:
        """Copies the reduced values into every main_grad, if they were reduced elsewhere."""

    def reduced_grad(self, bucket: _ParamAndGradBucket) -> torch.Tensor:
        """This rank's part of a bucket's reduced gradients: [owned elements], the gradients' dtype."""
        owned = bucket.buffer.owned_spans()[bucket.layout.index]
        return bucket.buffer.grad_of(owned)

    @property
    def can_be_released(self) -> bool:
        """Whether the sums are complete and only hooks and optimizers in backward still need them."""
        return False

    @property
    def is_closed(self) -> bool:
        """Whether gradients that become ready now could no longer be added."""
        return False

    def hold(self) -> None:
        """Keeps sums that could be released, and lets late gradients add to them; until the next iteration."""
        assert not self.can_be_released, f"{self.name} does not know how to keep what it releases"

    @property
    def keeps_memory(self) -> bool:
        """Whether all passes collect gradients in the same memory."""
        return False

    def settle(self) -> None:
        """Waits for the oldest reduction of a pass and frees its buffer; for groups that accumulate over passes."""
        raise AssertionError(f"{self.name} is reduced once an iteration")

    def go_on(self) -> None:
        """Lets further gradients add to reduced sums; for groups that accumulate over passes."""
        raise AssertionError(f"{self.name} is reduced once an iteration")

    def drop_captured(self) -> None:
        """Begins an iteration after a CUDA graph's capture: what was launched in it has not run."""
        self.reset()
        self._gathers.clear()
        self.arrival.forget()

    def note_replayed(self) -> None:
        """Records that a CUDA graph has reduced the gradients, and gathered parameters if it does."""
        self.grad_state = GradState.REDUCED
        # Streams other than the one that the graph ran on have to wait for what it gathered.
        self.arrival.note()

    def name_of(self, param: nn.Parameter) -> str:
        """The name of one of its parameters, any shape and dtype."""
        return self.entries[self._index_of[param]].name

    # Parameters.

    @record_function("SyncedGroup.launch_gathers")
    def launch_gathers(self) -> None:
        """Starts to gather the parameters from the ranks that own their shards. Collective."""
        for bucket in self.buckets:
            flat, group = self._message_of(bucket), bucket.buffer.data_parallel_group
            if self.ledger is not None:
                self.ledger.record(op="all-gather", group=group, flat=flat, bucket=self.name)
            self._gathers.append(gather_shards_(flat, group))
        self.param_state = ParamState.IN_FLIGHT

    @record_function("SyncedGroup.complete_gathers")
    def complete_gathers(self) -> None:
        """Waits for a gather under way."""
        for handle in self._gathers:
            handle.wait()
        self._unpack()
        self._gathers.clear()
        self.arrival.note()
        self.param_state = ParamState.ARRIVED
        if self.on_arrival is not None:
            self.on_arrival()

    def _message_of(self, bucket: _ParamAndGradBucket) -> torch.Tensor:
        """The gather buffer of a bucket: [bucket elements], any float dtype, with this rank's shard in its place."""
        return bucket.param_data

    @abstractmethod
    def _unpack(self) -> None:
        """Puts what was gathered where the parameters are, if it was gathered elsewhere."""

    @property
    def device(self) -> torch.device:
        """The parameters' device."""
        return self.entries[0].param.device

    @property
    def is_sharded(self) -> bool:
        """Whether each rank owns a shard of the parameters, which the others gather."""
        return self.buckets[0].buffer.is_sharded

    @property
    def can_repeat(self) -> bool:
        """Whether gradients under reduction keep the values that were sent until the wait."""
        return self.buckets[0].buffer.settings.policy.can_repeat
