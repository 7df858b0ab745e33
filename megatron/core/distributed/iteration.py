"""Iteration: the phase of a training iteration, and the agreement of a stage's ranks at its end.

This file launches no collectives over gradients or parameters. Code that launches one first records it in a
CollectiveTrace.

[Note: trace] Two checks find ranks that launch different collectives. CollectiveTrace.check_agreed compares a hash of
all launches of a pipeline stage once a step, in the agreement at its end. With --ddp-debug, _SideChannel.compare also
compares each launch before anything is sent, which works even if the collective would hang. Usage, over one stage:

    trace = CollectiveTrace(stage_group)  # debug: CollectiveTrace(stage_group, debug_timeout_s=300.0), collective
    trace.name_bucket("chunk 0 dense 3", ["layer.weight"])  # once a bucket, for messages
    trace.record(op="all-reduce", group=dp_group, flat=flat, bucket="chunk 0 dense 3")  # right before each launch
    largest = [...]  # trace.agreement(), two integers, after the step's MAX all-reduce over the stage
    trace.check_agreed(largest)  # raises CollectiveMismatchError on all ranks of the stage or on none
"""

import time
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core.device.trace_ranges import trace_range
from megatron.core.distributed.consistency import raise_non_finite
from megatron.core.group_collectives import RemoteRankError, gather_objects, message_device
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size

# Reason that is sent to the other ranks when `reset` is called.
RESET = "reset_iteration() was called after an error"

_NAMES_SHOWN = 3
# Number of launches of each rank whose entries remain in the store. A rank may be ahead of a slower rank, through
# groups that do not include it, by this many launches before the slower rank misses an entry.
_KEPT_LAUNCHES = 1000
_LONGEST_PAUSE = 0.05  # seconds between two queries of the store


def stage_group_of(groups: ProcessGroupCollection) -> dist.ProcessGroup | None:
    """Returns the group of ranks that must launch collectives in one order; None means this rank alone."""
    return groups.dp_cp if groups.tp_dp_cp is None else groups.tp_dp_cp


@dataclass(frozen=True)
class MethodNames:
    """Names of the methods that error messages tell a user to call.

    zero: begins an iteration. finish: ends its reductions.

    reset_iteration has the same name in every wrapper and optimizer.
    """

    zero: str = "zero_grad_buffer"
    finish: str = "finish_grad_sync"


# The trace of launches; see [Note: trace].


class CollectiveMismatchError(RuntimeError):
    """Error on all ranks of a pipeline stage that launched different collectives. Names the first difference."""


@dataclass(frozen=True)
class _Entry:
    """A recorded launch.

    line: its description, identical on all ranks that record the same launch. hashed: the line as bytes.
    """

    line: str
    hashed: bytes


class CollectiveTrace:
    """Records the launches of this rank. Every rank of a stage must record the same sequence.

    Bucket groups may legitimately differ between ranks of the stage, for example if some ranks have frozen their
    experts. The launches of such groups are not recorded and therefore not compared.

    group: the ranks of the stage; None means this rank alone. debug_timeout_s: how many seconds a rank waits before
    each launch for the other ranks of the launch's group, to compare entries before anything is sent; None compares
    only once per step. With a timeout, the constructor is collective.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, debug_timeout_s: float | None = None) -> None:
        self._group = group
        self._names: dict[str, tuple[str, ...]] = {}
        # Cached, because launches repeat in every step and a lookup costs only a microsecond.
        self._entries: dict[Hashable, _Entry] = {}
        self._groups: dict[dist.ProcessGroup | None, int] = {}
        self._digest = 0
        self._since_agreement: list[_Entry] = []
        self._channel: _SideChannel | None = None
        if debug_timeout_s is not None and group_size(group) > 1:
            assert group is not None
            self._channel = _SideChannel(group, timeout_s=debug_timeout_s)

    def name_bucket(self, bucket: str, names: Sequence[str]) -> None:
        """Sets the parameter names listed in messages about `bucket`."""
        self._names[bucket] = tuple(names)

    def record(self, *, op: str, group: dist.ProcessGroup | None, flat: torch.Tensor, bucket: str) -> None:
        """Records a launch; must be called immediately before it.

        flat: the tensor that is sent or filled, [N], any dtype. In debug mode, raises CollectiveMismatchError if the
        ranks of `group` do not all record the same launch, or if one of them does not reach it in time.
        """
        key = (op, group, flat.dtype, flat.numel(), bucket)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._entries[key] = self._new_entry(op, group, flat=flat, bucket=bucket)
        self._add(entry)
        if self._channel is not None:
            self._channel.compare(entry.line, group)

    def note(self, line: str) -> None:
        """Records an event other than a launch, as text.

        The event must occur on all ranks of the stage, at the same position among their launches.
        """
        self._add(self._entries.setdefault(line, _Entry(line, line.encode())))

    def stop(self, reason: str) -> None:
        """In debug mode, makes the other ranks raise `reason` at their next launch instead of waiting."""
        if self._channel is not None:
            self._channel.stop(reason)

    def agreement(self) -> list[int]:
        """Returns two integers to include in the step's MAX all-reduce over the stage."""
        return [self._digest, -self._digest]

    def check_agreed(self, largest: Sequence[int]) -> None:
        """Raises CollectiveMismatchError on all ranks if their launches in this step differ, and begins a new step.

        largest: the result of the MAX all-reduce of `agreement` over the stage. Collective only if it raises.
        """
        entries, self._since_agreement = self._since_agreement, []
        self._digest = 0
        if largest[0] == -largest[1]:
            return
        lines = gather_objects([entry.line for entry in entries], self._group)
        assert self._group is not None
        ranks = dist.get_process_group_ranks(self._group)
        raise CollectiveMismatchError(_first_difference(dict(zip(ranks, lines))))

    def _add(self, entry: _Entry) -> None:
        # Python's hash of strings cannot be used, because its salt differs between processes.
        self._digest = zlib.crc32(entry.hashed, self._digest)
        self._since_agreement.append(entry)

    def _new_entry(self, op: str, group: dist.ProcessGroup | None, *, flat: torch.Tensor, bucket: str) -> _Entry:
        # Ranks of one stage belong to different groups of the same kind, so groups are numbered by first use.
        number = self._groups.setdefault(group, len(self._groups))
        names = self._names.get(bucket, ())
        shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
        line = (
            f"{op} of {flat.numel()} {flat.dtype} over {group_size(group)} ranks (group {number}), bucket {bucket} "
            f"({len(names)} parameters: {shown})"
        )
        return _Entry(line, line.encode())


# The iteration.


class _Phase(Enum):
    """The phase of an iteration, from zero_grad_buffer to the optimizer's step.

    REPLAYED: a CUDA graph has run the iteration with its reductions, and ranks have not agreed on its end yet. STEPPED:
    ranks have agreed that none has aborted the iteration, and their optimizers update. CLOSED: the wrappers were
    removed.
    """

    COLLECTING = "collecting"
    REPLAYED = "replayed"
    FINISHED = "finished"
    STEPPED = "stepped"
    ABORTED = "aborted"
    CLOSED = "closed"


@dataclass(frozen=True)
class IterationOutcome:
    """Outcome of an iteration, on one rank or combined over ranks.

    late: for each bucket group, by number, whether it received a gradient after its reduction was launched.
    """

    is_aborted: bool
    is_non_finite: bool
    is_reordered: bool
    late: list[bool]

    @property
    def has_failed(self) -> bool:
        """Whether the iteration must be aborted."""
        return self.is_aborted or self.is_non_finite


class Iteration:
    """Phase of an iteration, set by its owner, and the agreement of a stage's ranks at its end.

    stage_group: the ranks that agree. pp_group: the ranks that must stop together if a gradient is not finite. None
    means this rank alone. stage_host, pp_host: groups of the same ranks whose collectives run on the host; without
    them, each step reads a result from the GPU. trace: records launches; their hash is compared in the agreement.
    words: names of the owner's methods, for error messages.
    """

    def __init__(
        self,
        stage_group: dist.ProcessGroup | None = None,
        *,
        pp_group: dist.ProcessGroup | None = None,
        stage_host: dist.ProcessGroup | None = None,
        pp_host: dist.ProcessGroup | None = None,
        trace: CollectiveTrace | None = None,
        words: MethodNames | None = None,
    ) -> None:
        self.trace, self.words = trace or CollectiveTrace(stage_group), words or MethodNames()
        # Whether an optimizer calls `step` after each `finish`, on all ranks of the model.
        self.has_optimizer = False
        self._phase = _Phase.COLLECTING
        self._stage_group, self._pp_group = stage_group, pp_group
        self._stage_messages, self._pp_messages = stage_host or stage_group, pp_host or pp_group
        self._message_device = message_device([self._stage_messages, self._pp_messages])

    # The phase.

    @property
    def is_collecting(self) -> bool:
        """Whether gradients may become ready."""
        return self._phase is _Phase.COLLECTING

    @property
    def is_replayed(self) -> bool:
        """Whether a CUDA graph has run the iteration and ranks have not agreed on it yet."""
        return self._phase is _Phase.REPLAYED

    @property
    def is_finished(self) -> bool:
        """Whether all gradients are reduced, on all ranks, and the optimizer may step or has stepped."""
        return self._phase in (_Phase.FINISHED, _Phase.STEPPED)

    def check_usable(self) -> None:
        """Raises RuntimeError after an abort, until the next iteration begins, and permanently after `close`."""
        if self._phase is _Phase.CLOSED:
            raise RuntimeError("the wrapper was removed by release(): wrap the module and build its optimizer again")
        if self._phase is _Phase.ABORTED:
            raise RuntimeError(f"the iteration was aborted: call reset_iteration() or {self.words.zero}() first")

    def refuse_gradient(self, subject: str) -> NoReturn:
        """Raises RuntimeError for a gradient produced outside an iteration; subject: its name for the message."""
        self.check_usable()
        raise RuntimeError(
            f"{subject} was produced after {self.words.finish}: call {self.words.zero} before the first backward"
        )

    # Transitions.

    def begin(self) -> None:
        """Begins an iteration; raises RuntimeError after `close`."""
        if self._phase is _Phase.CLOSED:
            self.check_usable()
        self._phase = _Phase.COLLECTING

    def finish(self) -> None:
        """Records that all gradients are reduced."""
        self._phase = _Phase.FINISHED

    def resume(self) -> None:
        """Returns to collecting gradients, after a `finish` that does not end the iteration."""
        self._phase = _Phase.COLLECTING

    def mark_replayed(self) -> None:
        """Records that a CUDA graph has run an iteration."""
        self._phase = _Phase.REPLAYED

    def mark_stepped(self) -> None:
        """Records that the optimizer updates, without the agreement of `step`."""
        self._phase = _Phase.STEPPED

    def step(self) -> None:
        """Verifies that no rank has reset the iteration since `finish`.

        Collective after `finish` if there is an optimizer.

        Whether gradients are finite, and so whether the optimizer updates, is not part of this agreement. Raises
        RemoteRankError if another rank has reset the iteration since `finish`.
        """
        if self._phase is _Phase.STEPPED:
            return
        self.check_usable()
        rank = self.end_finished_sync(is_reset=False)
        if rank is not None:
            self._phase = _Phase.ABORTED
            raise RemoteRankError(
                f"rank {rank} aborted the iteration: {RESET} that followed finish_grad_sync. No rank has updated its "
                "parameters: call reset_iteration() and continue with the next iteration"
            )

    def end_finished_sync(self, *, is_reset: bool) -> int | None:
        """Returns the highest rank that reset the iteration after `finish`, or None; the same on all ranks. Collective.

        is_reset: whether this rank reset it. Sends nothing if there is no optimizer, or before `finish`.
        """
        if self._phase is not _Phase.FINISHED or not self.has_optimizer:
            return None
        rank = dist.get_rank() if dist.is_initialized() else 0
        highest = self.highest_sync(rank + 1 if is_reset else 0)
        self._phase = _Phase.STEPPED
        return highest - 1 if highest else None

    def close(self) -> None:
        """Rules out further iterations, because the wrappers are removed."""
        self._phase = _Phase.CLOSED

    # The agreement at the end.

    @trace_range("Iteration.agree_sync")
    def agree_sync(self, local: IterationOutcome, *, of_all_stages: bool) -> IterationOutcome:
        """Returns the combined outcome of the stage's ranks: a flag is set if it is set on any of them. Collective.

        of_all_stages: whether is_non_finite is combined over all pipeline stages; must be the same on all stages.
        Raises CollectiveMismatchError on all ranks of the stage if their launches differ.
        """
        if group_size(self._stage_messages) == group_size(self._pp_messages) == 1:
            # Nothing is sent, so a graph can contain this.
            return local
        flags = [local.is_aborted, local.is_non_finite, local.is_reordered, *local.late]
        numbers = torch.tensor([*self.trace.agreement(), *flags], dtype=torch.int64, device=self._message_device)
        if group_size(self._stage_messages) > 1:
            dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=self._stage_messages)
        if group_size(self._pp_messages) > 1 and of_all_stages:
            # Without this collective, the other stages would not stop and would wait for this stage.
            is_non_finite = numbers[3:4]  # a view
            dist.all_reduce(is_non_finite, op=dist.ReduceOp.MAX, group=self._pp_messages)
        # NOTE: reads the device once a step if collectives cannot run on the host.
        highest, negated_lowest, aborted, non_finite, reordered, *late = numbers.tolist()
        self.trace.check_agreed([highest, negated_lowest])
        return IterationOutcome(bool(aborted), bool(non_finite), bool(reordered), [bool(flag) for flag in late])

    def abort_sync(self, reason: str) -> None:
        """Aborts after an agreement in which this rank reported an abort, and shares `reason`. Collective."""
        self._phase = _Phase.ABORTED
        gather_objects(reason, self._stage_group)

    def raise_aborted_sync(
        self, outcome: IterationOutcome, *, problem: str | Exception | None, non_finite: list[str], in_backward: bool
    ) -> NoReturn:
        """Aborts after an agreement that found an error, and raises the error. Collective.

        problem: this rank's error, raised unchanged, or a text, raised as ValueError. If it is None, raises
        RemoteRankError with the problem of another rank, or NonFiniteGradientError if no rank has one. non_finite:
        names of this rank's non-finite gradients. in_backward: whether an optimizer may already have used them.
        """
        self._phase = _Phase.ABORTED
        if not outcome.is_aborted:
            raise_non_finite(non_finite, [self._stage_group, self._pp_group], in_backward=in_backward)
        reason = f"{type(problem).__name__} in backward: {problem}" if isinstance(problem, Exception) else problem
        reasons = gather_objects(reason, self._stage_group)
        if isinstance(problem, Exception):
            raise problem
        if problem is not None:
            raise ValueError(problem)
        ranks = range(1) if self._stage_group is None else dist.get_process_group_ranks(self._stage_group)
        rank, reason = next((rank, reason) for rank, reason in zip(ranks, reasons) if reason is not None)
        raise RemoteRankError(
            f"rank {rank} aborted the iteration: {reason}. Its gradients are dropped on all ranks: "
            "call reset_iteration() and continue with the next iteration"
        )

    @trace_range("Iteration.highest_sync")
    def highest_sync(self, number: int) -> int:
        """Returns the maximum of `number` over all ranks of all stages. Collective."""
        highest = torch.tensor(number, dtype=torch.int64, device=self._message_device)
        for group in (self._stage_messages, self._pp_messages):
            if group_size(group) > 1:
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
        # NOTE: reads the device once a step if collectives cannot run on the host.
        return int(highest)

    @trace_range("Iteration.first_ranks_order_sync")
    def first_ranks_order_sync(self, order: list[int]) -> list[int]:
        """Returns the first rank's `order` of bucket group numbers. Collective over the stage."""
        numbers = torch.tensor(order, dtype=torch.int64, device=self._message_device)
        if group_size(self._stage_messages) > 1:
            dist.broadcast(numbers, group=self._stage_messages, group_src=0)
        # NOTE: waits for the broadcast, only in the few steps that change the order.
        return numbers.tolist()


# Internals of the trace.


class _SideChannel:
    """Exchanges trace entries through torch's store, which works even while a collective hangs."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        store = _get_default_store()
        # One prefix per trace, because several traces may have the same ranks.
        number = [store.add("traces", 1) if group_rank(group) == 0 else 0]
        dist.broadcast_object_list(number, group=group, group_src=0)
        self._store = dist.PrefixStore(f"trace {number[0]}", store)
        self._rank = dist.get_rank()
        self._timeout_s = timeout_s
        self._num_launches = 0

    def compare(self, line: str, group: dist.ProcessGroup | None) -> None:
        """Waits until all ranks of `group` reach this launch, and compares their lines.

        Raises CollectiveMismatchError on all of them if lines differ or the wait times out.
        """
        self._num_launches += 1
        self._store.set(self._key(self._rank, self._num_launches), line)
        self._store.set(f"last {self._rank}", line)
        if self._num_launches > _KEPT_LAUNCHES:
            self._store.delete_key(self._key(self._rank, self._num_launches - _KEPT_LAUNCHES))
        if group_size(group) == 1:
            return
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        missing = self._wait_for(ranks)
        if missing:
            self._fail(self._describe_missing(missing, line))
        lines = {rank: self._store.get(self._key(rank, self._num_launches)).decode() for rank in ranks}
        if any(other != line for other in lines.values()):
            where = f"launch {self._num_launches} since the start differs: "
            self._fail(where + _by_line(lines))

    def _wait_for(self, ranks: list[int]) -> list[int]:
        """Returns the ranks that did not reach the launch in time."""
        keys = {rank: self._key(rank, self._num_launches) for rank in ranks}
        deadline, pause = time.monotonic() + self._timeout_s, 1e-4
        while True:
            # Another rank may have stopped before this launch, for a reason that this rank cannot see.
            if self._store.check(["stopped"]) and self._read_stop()[0] < self._num_launches:
                raise CollectiveMismatchError(self._read_stop()[1])
            missing = [rank for rank, key in keys.items() if not self._store.check([key])]
            if not missing or time.monotonic() > deadline:
                return missing
            # The store's own wait would write two lines to stderr at each timeout.
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _describe_missing(self, missing: list[int], line: str) -> str:
        last = [
            self._store.get(f"last {rank}").decode() if self._store.check([f"last {rank}"]) else "nothing"
            for rank in missing
        ]
        known = "; ".join(f"the last launch of rank {rank} was: {text}" for rank, text in zip(missing, last))
        return (
            f"{_ranks(missing)} did not reach launch {self._num_launches} since the start within "
            f"{self._timeout_s:g} s. Rank {self._rank} launches {line}; {known}"
        )

    def stop(self, reason: str) -> None:
        """Makes the other ranks raise `reason` at the launch after this rank's last one."""
        self._write_stop(self._num_launches, reason)

    def _fail(self, message: str) -> None:
        # All ranks raise the first message written, which is the cause; later ones may be its consequences.
        self._write_stop(self._num_launches - 1, message)
        raise CollectiveMismatchError(self._read_stop()[1])

    def _write_stop(self, num_launches: int, reason: str) -> None:
        self._store.compare_set("stopped", "", f"{num_launches} {reason}")

    def _read_stop(self) -> tuple[int, str]:
        """Returns the number of launches after which a rank stopped, and the reason."""
        num_launches, _, reason = self._store.get("stopped").decode().partition(" ")
        return int(num_launches), reason

    @staticmethod
    def _key(rank: int, launch: int) -> str:
        return f"{rank}/{launch}"


def _first_difference(lines: dict[int, list[str]]) -> str:
    """Describes the first launch that differs; lines: each rank's launches, in order."""
    longest = max(len(own) for own in lines.values())
    for position in range(longest):
        at = {rank: own[position] if position < len(own) else "nothing" for rank, own in lines.items()}
        if len(set(at.values())) > 1:
            return f"launch {position + 1} of this step differs: {_by_line(at)}"
    raise AssertionError("equal launches with different hashes")


def _by_line(lines: dict[int, str]) -> str:
    kinds = dict.fromkeys(lines.values())
    return "; ".join(f"{_ranks([r for r, other in lines.items() if other == line])} launch {line}" for line in kinds)


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
