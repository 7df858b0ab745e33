"""Vector clocks of streams, events and the host.

A clock maps each stream to the number of its launches that are ordered before a point. A launch increments the entry of
its stream. An event copies the clock of its stream, and a wait takes the element-wise maximum of both clocks. The host
is stream HOST. It is ordered after a launch only once it has waited for that launch, and every launch is ordered after
everything that the host did before.

Source: L. Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978, and its extension to
vectors by C. Fidge and F. Mattern, 1988.
"""

from dataclasses import dataclass, field

HOST = -1
Clock = dict[int, int]


def join(into: Clock, other: Clock) -> None:
    """Sets `into` to the element-wise maximum of both clocks."""
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


@dataclass
class Event:
    """A point in a stream. capture: number of the capture in which the event was recorded, 0 outside of captures."""

    clock: Clock
    stream: int
    capture: int


@dataclass
class Timeline:
    """Clocks of all streams of a device. Stream 0 is the default stream."""

    clocks: dict[int, Clock] = field(default_factory=lambda: {HOST: {}})
    events: dict[int, Event] = field(default_factory=dict)
    last_event: int = 0
    host_version: int = 1
    _host_seen: dict[int, int] = field(default_factory=dict)

    def clock_of(self, stream: int) -> Clock:
        """Returns the clock of a stream. The caller may change it in place."""
        clock = self.clocks.get(stream)
        if clock is None:
            clock = self.clocks[stream] = {}
        return clock

    def present(self, stream: int) -> Clock:
        """Returns the clock of a stream for its next launch, merged with the clock of the host."""
        clock = self.clock_of(stream)
        if self._host_seen.get(stream) != self.host_version:
            join(clock, self.clocks[HOST])
            self._host_seen[stream] = self.host_version
        return clock

    def tick(self, stream: int) -> tuple[int, Clock]:
        """Adds a launch to a stream. Returns the launch's number, and the stream's clock including the launch."""
        clock = self.present(stream)
        number = clock[stream] = clock.get(stream, 0) + 1
        return number, clock

    def tick_host(self) -> tuple[int, Clock]:
        """Adds an access by the host to memory that it shares with the device. Returns the same values as `tick`."""
        clock = self.clocks[HOST]
        number = clock[HOST] = clock.get(HOST, 0) + 1
        self.host_version += 1
        return number, clock

    def host_waits(self, clock: Clock) -> None:
        """Orders the host after the clock of a stream or an event."""
        join(self.clocks[HOST], clock)
        self.host_version += 1

    def host_waits_for_all(self) -> None:
        """Orders the host after all launches."""
        for stream, clock in list(self.clocks.items()):
            if stream != HOST:
                join(self.clocks[HOST], clock)
        self.host_version += 1
