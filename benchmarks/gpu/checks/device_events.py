"""Reads a profile: launches on the device, the gaps between them, and the host's activity in the gaps.

Profiles nothing itself. Without a GPU, the operators that the host ran are used instead of launches.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import profile


@dataclass(frozen=True)
class Span:
    """An activity with its start and end, in microseconds since the start of the profile."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Gap:
    """A period in which nothing ran on the device. host: activities of the host, outermost first."""

    microseconds: float
    after: str
    before: str
    host: Sequence[str]

    def __str__(self) -> str:
        host = " > ".join(self.host) or "no named activity"
        return f"{self.microseconds:8.1f} us after {self.after[:50]}, before {self.before[:50]}; host in {host}"


def launches_of(recorded: profile) -> list[Span]:
    """Returns the device's kernels, copies and fills, ordered by start. Without a GPU, returns the operators."""
    events = recorded.events() or []
    # A named range of the host also appears on the device under the same name, although it is not a launch.
    on_host = {event.name for event in events if event.device_type == DeviceType.CPU}
    on_device = [event for event in events if event.device_type == DeviceType.CUDA and event.name not in on_host]
    if on_device:
        return sorted(map(span_of, on_device), key=lambda span: span.start)
    return sorted((s for s in map(span_of, events) if s.name.startswith("aten::")), key=lambda span: span.start)


def host_spans_of(recorded: profile) -> list[Span]:
    """Returns the named ranges, operators and CUDA calls of the host."""
    return [span_of(event) for event in recorded.events() or [] if event.device_type == DeviceType.CPU]


def span_of(event: Any) -> Span:
    """Converts an event of a profile to a span."""
    return Span(event.name, event.time_range.start, event.time_range.end)


def longest_gaps(launches: Sequence[Span], host: Iterable[Span], *, count: int) -> list[Gap]:
    """Returns the longest periods without a launch on any stream. launches: ordered by start."""
    if not launches:
        return []
    found, last = [], launches[0]
    for span in launches[1:]:
        if span.start > last.end:
            found.append((span.start - last.end, last, span))
        last = max(last, span, key=lambda one: one.end)
    found.sort(key=lambda gap: -gap[0])
    spans = sorted(host, key=lambda span: (span.start, -span.end))
    gaps = []
    for length, after, before in found[:count]:
        # The device waits for the host's activity in the middle of the gap.
        middle = (after.end + before.start) / 2
        inside = [span.name for span in spans if span.start <= middle <= span.end]
        gaps.append(Gap(length, after.name, before.name, inside[-5:]))
    return gaps


def busy_microseconds(launches: Sequence[Span]) -> float:
    """Returns the time during which at least one launch was running, in microseconds."""
    busy, until = 0.0, float("-inf")
    for span in launches:
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return busy


def counts_of(launches: Sequence[Span]) -> Counter[str]:
    """Counts kernels, copies and fills."""
    return Counter("copies" if s.name.startswith("Memcpy") else "fills" if s.name.startswith("Memset") else "kernels"
                   for s in launches)  # fmt: skip
