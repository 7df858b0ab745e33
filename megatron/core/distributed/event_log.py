"""EventLog: records when gradients became ready and when collectives ran, without delaying them.

Pure functions at the end of the file compute metrics from these times, such as the share of hidden communication.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.core.device import CompletionMarks, TimeMark, mark_time, seconds_between
from megatron.core.distributed.bucket_group import Traffic, _ParamAndGradBucketGroup

_KEPT_STEPS = 4


@dataclass(frozen=True)
class Transfer:
    """One collective of a bucket group; times in seconds since the step's first event.

    ready: time at which its last gradient was written or, for a gather, its parameters were updated. waits: begin and
    end of each interval in which the rank waited for it. num_bytes: size of its tensors on one rank.
    """

    name: str
    traffic: Traffic
    num_bytes: int
    ready: float
    launched: float
    done: float
    waits: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class StepTimes:
    """The transfers of a step, in launch order; backward_end: time at which the last gradient was ready, in seconds."""

    transfers: tuple[Transfer, ...]
    backward_end: float


@dataclass
class _Marks:
    """Time marks of a transfer in progress. group: None for the agreement of all ranks."""

    group: _ParamAndGradBucketGroup | None
    traffic: Traffic
    ready: TimeMark | None
    launched: TimeMark
    num_messages: int = 0
    done: TimeMark | None = None
    waits: list[list[TimeMark]] = field(default_factory=list)


class EventLog:
    """BucketObserver that records one step after each `record_next_step`; other steps cost one comparison per event.

    On a GPU the times are events of the current stream, so waits are measured on the stream, not on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._completion = CompletionMarks(device)
        self._is_asked = False
        self._start: TimeMark | None = None
        self._last_grad: dict[str, TimeMark] = {}
        self._due: dict[str, TimeMark] = {}
        self._marks: list[_Marks] = []
        self._finished: deque[tuple[TimeMark, dict[str, TimeMark], list[_Marks]]] = deque(maxlen=_KEPT_STEPS)

    def record_next_step(self) -> None:
        """Requests a recording from the end of the current iteration to the end of the next."""
        self._is_asked = True

    def take_sync(self) -> list[StepTimes]:
        """Returns the steps recorded since the last call. NOTE: on a GPU, waits until they have run."""
        steps = [_step_times(start, grads, marked=marked) for start, grads, marked in self._finished]
        self._finished.clear()
        return steps

    # BucketObserver.

    def attach(self, groups: Sequence[_ParamAndGradBucketGroup], module: nn.Module) -> None:
        """Does nothing, because groups are recorded when they are launched."""

    def begin_iteration(self) -> None:
        # Gathers of an aborted iteration will still be waited for, but its reductions will not.
        self._last_grad.clear()
        self._marks = [marks for marks in self._marks if marks.traffic is Traffic.GATHER]

    def before_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        """Records nothing, because only the time after a gradient is relevant."""

    def after_grad(self, group: _ParamAndGradBucketGroup, param: nn.Parameter) -> None:
        if self._is_recording:
            self._last_grad[group.name] = self._now()

    def before_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        if self._is_recording:
            ready = (self._due if traffic is Traffic.GATHER else self._last_grad).get(group.name)
            self._marks.append(_Marks(group, traffic, ready, self._now()))

    def after_launch(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        marks = self._find(traffic, group)
        if marks is not None:

            def note(moment: TimeMark) -> None:
                marks.done = moment

            works = group.works(traffic)
            marks.num_messages = len(works)
            self._completion.mark(works, note)

    def before_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        marks = self._find(traffic, group)
        if marks is not None:
            marks.waits.append([self._now()])

    def after_wait(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> None:
        marks = self._find(traffic, group)
        if marks is not None:
            marks.waits[-1].append(self._now())

    def before_agreement(self) -> None:
        if self._is_recording:
            now = self._now()
            self._marks.append(_Marks(None, Traffic.AGREE, now, now, num_messages=1, waits=[[now]]))

    def after_agreement(self) -> None:
        if self._is_recording:
            self._marks[-1].waits[0].append(self._now())

    def end_iteration(self) -> None:
        if self._start is not None:
            self._finished.append((self._start, self._last_grad, self._marks))
        self._last_grad, self._due, self._marks = {}, {}, []
        self._start, self._is_asked = (self._now() if self._is_asked else None), False

    def gather_due(self, group: _ParamAndGradBucketGroup) -> None:
        if self._is_recording:
            self._due[group.name] = self._now()

    # Inside.

    @property
    def _is_recording(self) -> bool:
        return self._start is not None

    def _now(self) -> TimeMark:
        return mark_time(self._device)

    def _find(self, traffic: Traffic, group: _ParamAndGradBucketGroup) -> _Marks | None:
        if not self._is_recording:
            return None
        found = (marks for marks in reversed(self._marks) if marks.group is group and marks.traffic is traffic)
        return next(found, None)


def _step_times(start: TimeMark, last_grad: dict[str, TimeMark], *, marked: list[_Marks]) -> StepTimes:
    def seconds(mark: TimeMark) -> float:
        return seconds_between(start, mark)

    transfers = []
    for marks in marked:
        launched = seconds(marks.launched)
        waits = tuple((seconds(begin), seconds(end)) for begin, end in marks.waits)
        # The end of a wait is an upper bound, because the thread that marks completion may run later.
        done = last = waits[-1][1] if waits and marks.num_messages else launched
        if marks.done is not None:
            done = min(seconds(marks.done), last) if waits else seconds(marks.done)
        transfers.append(
            Transfer(
                name="all ranks" if marks.group is None else marks.group.name,
                traffic=marks.traffic,
                num_bytes=0 if marks.group is None else _num_bytes(marks.group, marks.traffic),
                ready=launched if marks.ready is None else seconds(marks.ready),
                launched=launched,
                done=done,
                waits=waits,
            )
        )
    return StepTimes(tuple(transfers), max(map(seconds, last_grad.values()), default=0.0))


def _num_bytes(group: _ParamAndGradBucketGroup, traffic: Traffic) -> int:
    tensors = [bucket.param_data if traffic is Traffic.GATHER else bucket.grad_data for bucket in group.buckets]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Metrics computed from the times.


def exposed_seconds(transfer: Transfer) -> float:
    """Returns the number of seconds spent waiting for the transfer."""
    return sum(end - begin for begin, end in transfer.waits)


def hidden_seconds(step: StepTimes, traffic: Traffic) -> float:
    """Returns the time in seconds during which a transfer of this kind was in flight and nothing waited for it.

    Transfers of a kind run one after another. A transfer that is launched early begins when its predecessor completes.
    """
    total = free = 0.0
    for transfer in (one for one in step.transfers if one.traffic is traffic):
        began = max(transfer.launched, free)
        waited = sum(_before(transfer.done, begin=max(begin, began), end=end) for begin, end in transfer.waits)
        total += max(0.0, transfer.done - began - waited)
        free = max(free, transfer.done)
    return total


def launched_before_next_was_ready(step: StepTimes) -> list[bool]:
    """Returns, for each reduction but the last, whether it was launched before the next one was ready.

    Ready means that the last gradient was accumulated. False means that communication was delayed by gradients that it
    did not need.
    """
    reductions = _reductions(step)
    return [one.launched < following.ready for one, following in zip(reductions, reductions[1:])]


def hidden_share(step: StepTimes) -> float | None:
    """Returns the reduction time hidden by backward, as a share of the time that could have been hidden; 1 is the best.

    In the ideal case, each transfer has its measured duration and starts as soon as its last gradient is ready and its
    predecessor has completed. Returns None if nothing could have been hidden, for example with a single bucket, which
    is ready only after the last gradient.
    """
    hidden = possible = 0.0
    free = ideally_free = 0.0  # time at which earlier transfers completed, or could have completed
    for transfer in _reductions(step):
        began = max(transfer.launched, free)
        took = max(0.0, transfer.done - began)
        hidden += _before(step.backward_end, begin=began, end=began + took)
        free = max(free, transfer.done)
        could_begin = max(transfer.ready, ideally_free)
        ideally_free = could_begin + took
        possible += _before(step.backward_end, begin=could_begin, end=ideally_free)
    return hidden / possible if possible > 0 else None


def _reductions(step: StepTimes) -> list[Transfer]:
    return [transfer for transfer in step.transfers if transfer.traffic is Traffic.REDUCE]


def _before(limit: float, *, begin: float, end: float) -> float:
    """Returns the seconds of [begin, end] that lie before `limit`."""
    return max(0.0, min(end, limit) - begin)
