"""Vector clocks of streams, events and the host.

A clock maps each stream to the number of its launches that come before a point. A launch increments the entry of its
own stream. An event copies the clock of its stream, and a wait takes the larger entries of both clocks. The host is
stream HOST: it comes after a launch only once it has waited for it, and every launch comes after all that the host did
before.

Source: L. Lamport, "Time, clocks, and the ordering of events in a distributed system", 1978, and its extension to
vectors by C. Fidge and F. Mattern, 1988.
"""

from dataclasses import dataclass, field

HOST = -1
Clock = dict[int, int]


def join(into: Clock, other: Clock) -> None:
    """Sets `into` to the larger entries of both clocks."""
    for stream, tick in other.items():
        if into.get(stream, 0) < tick:
            into[stream] = tick


@dataclass
class Event:
    """Point in a stream. capture: number of the capture in which it was recorded, 0 outside of captures."""

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
        """Returns the clock of a stream, which may be changed in place."""
        clock = self.clocks.get(stream)
        if clock is None:
            clock = self.clocks[stream] = {}
        return clock

    def present(self, stream: int) -> Clock:
        """Returns the clock of a stream, with all that the host knows, which comes before the stream's next launch."""
        clock = self.clock_of(stream)
        if self._host_seen.get(stream) != self.host_version:
            join(clock, self.clocks[HOST])
            self._host_seen[stream] = self.host_version
        return clock

    def tick(self, stream: int) -> tuple[int, Clock]:
        """Launches work: returns the number of the launch, and the clock with all that comes before it and itself."""
        clock = self.present(stream)
        number = clock[stream] = clock.get(stream, 0) + 1
        return number, clock

    def tick_host(self) -> tuple[int, Clock]:
        """Notes an access of the host to memory that it shares with the device; see `tick`."""
        clock = self.clocks[HOST]
        number = clock[HOST] = clock.get(HOST, 0) + 1
        self.host_version += 1
        return number, clock

    def host_waits(self, clock: Clock) -> None:
        """Makes the host know what a stream or an event knows."""
        join(self.clocks[HOST], clock)
        self.host_version += 1

    def host_waits_for_all(self) -> None:
        """Makes the host know of all launches."""
        for stream, clock in list(self.clocks.items()):
            if stream != HOST:
                join(self.clocks[HOST], clock)
        self.host_version += 1
