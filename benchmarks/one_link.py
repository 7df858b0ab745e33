"""A network of one link per rank whose messages take given seconds, for measuring what computation hides of them.

expert_overlap.py is the benchmark that uses it.

[Note: one link] A message is an exchange of rows as a dispatcher launches it, with all of its tensors. It begins when
every rank of its group has launched it and its predecessor has ended, and takes `seconds_per_message` plus
`seconds_per_byte` for each byte that leaves a rank. It occupies the rank's link in both directions, because an
all-to-all sends and receives. So messages that are launched together take the sum of their times. The rows themselves
move by torch's all-to-all. Ranks send the time of the launch along, and therefore compute the same end.

[Note: time of a rank] Ranks that share cores delay each other, which would hide messages behind the computation of
another rank. CpuClock therefore counts the seconds that the threads of a rank have computed, and adds the seconds that
they would have waited: until the end of a message, or until another stage has sent its tensor. A wait is no sleep, and
nothing but computation of this rank takes time. WallClock is the real time: a wait lasts until the end of the message.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.group_collectives import Pending
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.transfers import Direction, Transfer
from megatron.core.transformer.moe import dispatch_alltoall
from megatron.core.transformer.moe.dispatch_alltoall import RowsUnderWay, RowTransport

# Of the messages that carry clocks between stages. Tensors have tag 0.
_CLOCK_TAG = 1


class Clock(Protocol):
    """Time of a rank. See [Note: time of a rank]."""

    def restart(self) -> None:
        """Starts a step."""

    def now(self) -> float:
        """Returns the seconds of this rank."""

    def wait_until(self, end: float) -> None:
        """Waits until `end`, unless it has passed."""


class CpuClock:
    """Seconds that a rank has computed and waited since the restart, which all ranks do together.

    Counts the thread that restarts, and the threads that it starts afterwards, from their first call on.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        # Of each thread: its clock of CPU time, by its identifier, and its CPU seconds.
        self._clocks = {threading.get_ident(): time.pthread_getcpuclockid(threading.get_ident())}
        self._spent: dict[int, float] = {}
        self._waited = -time.thread_time()

    def now(self) -> float:
        ident = threading.get_ident()
        if ident not in self._clocks:
            self._clocks[ident] = time.pthread_getcpuclockid(ident)
        for other, clock in self._clocks.items():
            # A thread that has ended has no clock, but its time counts.
            with suppress(OSError):
                self._spent[other] = time.clock_gettime(clock)
        return self._waited + sum(self._spent.values())

    def wait_until(self, end: float) -> None:
        self._waited += max(0.0, end - self.now())


class WallClock:
    """Real time, which all processes of a machine share."""

    def restart(self) -> None:
        pass

    def now(self) -> float:
        return time.perf_counter()

    def wait_until(self, end: float) -> None:
        while (left := end - time.perf_counter()) > 0:
            time.sleep(left)


class Message:
    """An exchange in progress, which ends as [Note: one link] says. Has the one method of dist.Work that is used."""

    def __init__(
        self, link: "OneLink", clock: Clock, works: Sequence[dist.Work], num_bytes: int, group: dist.ProcessGroup
    ) -> None:
        self._link, self._clock, self._works, self._before = link, clock, works, link.last
        # From each rank: the time of its launch, and its bytes.
        self._sent = torch.tensor([[clock.now(), num_bytes]] * dist.get_world_size(group), dtype=torch.float64)
        self._launches = torch.empty_like(self._sent)
        work = dist.all_to_all_single(self._launches, self._sent, group=group, async_op=True)
        assert work is not None, "an asynchronous collective returns its work"
        self._arriving: dist.Work | None = work
        self._launch = self._end = 0.0

    def end(self) -> float:
        """Returns the time at which the message ends."""
        if self._arriving is not None:
            self._arriving.wait()
            self._launch, num_bytes = self._launches.amax(0).tolist()
            free = 0.0 if self._before is None else self._before.end()
            link = self._link
            self._end = max(self._launch, free) + link.seconds_per_message + num_bytes * link.seconds_per_byte
            self._arriving = self._before = None
        return self._end

    def wait(self) -> None:
        """Waits for the rows and until the message ends."""
        start = self._clock.now()
        for work in self._works:
            work.wait()
        end = self.end()
        self._clock.wait_until(end)
        self._link.uneven += max(0.0, self._launch - start)
        self._link.exposed += max(0.0, end - max(start, self._launch))


class OneLink:
    """The link of this rank. Without a clock its messages take no time.

    exposed: seconds that this rank has waited for messages that all ranks had launched. uneven: seconds that it has
    waited for the launches of other ranks. last: the latest message. most_bytes: of a message.
    """

    def __init__(self) -> None:
        self.restart(None)

    def restart(self, clock: Clock | None, *, seconds_per_message: float = 0.0, seconds_per_byte: float = 0.0) -> None:
        """Starts a step, which must have completed all messages of the step before it."""
        self.clock = clock
        self.seconds_per_message, self.seconds_per_byte = seconds_per_message, seconds_per_byte
        self.exposed = self.uneven = 0.0
        self.last: Message | None = None
        self.most_bytes = 0
        if clock is not None:
            clock.restart()

    def launch(
        self, works: Sequence[dist.Work], num_bytes: int, group: dist.ProcessGroup
    ) -> "tuple[Message] | Sequence[dist.Work]":
        """Launches a message, which is returned in place of the works; without a clock returns these. Collective.

        works: the real exchange. num_bytes: that leave this rank.
        """
        if self.clock is None:
            return works
        self.most_bytes = max(self.most_bytes, num_bytes)
        self.last = Message(self, self.clock, works, num_bytes, group)
        return (self.last,)


@dataclass(frozen=True)
class LinkTransport:
    """Sends rows by `transport`, as messages on a link."""

    transport: RowTransport
    link: OneLink
    group: dist.ProcessGroup

    def launch(self, tensors: Sequence[Tensor], *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Launches all tensors as one message: [R, *] each, any dtype."""
        running = self.transport.launch(tensors, send=send, receive=receive)
        num_bytes = sum(_leaving_bytes(one, send, self.group) for one in tensors)
        works: Any = self.link.launch(running.works, num_bytes, self.group)
        return replace(running, works=works)

    def reserve(self, num_bytes: int) -> None:
        """Allocates memory for exchanges of num_bytes."""
        self.transport.reserve(num_bytes)


def _leaving_bytes(rows: Tensor, send: list[int] | None, group: dist.ProcessGroup) -> int:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    own = len(rows) // ranks if send is None else send[rank]
    return (len(rows) - own) * rows[:1].nbytes


def patch_counts_and_stages(link: OneLink) -> None:
    """Makes exchanges of row counts messages of the link, and stages send their time along, in this process."""
    exchange_counts = dispatch_alltoall.exchange_counts
    post, receive = P2PCommunicator.post, P2PCommunicator.receive
    sent_at: dict[Transfer, tuple[Tensor, dist.Work]] = {}

    def counts_as_message(counts: Tensor, group: dist.ProcessGroup) -> Pending:
        pending = exchange_counts(counts, group)
        assert pending._work is not None
        works: Any = link.launch([pending._work], _leaving_bytes(counts, None, group), group)
        (pending._work,) = works
        return pending

    def post_with_time(self: P2PCommunicator, transfers: Sequence[Transfer], *rest: Any, **more: Any) -> None:
        post(self, transfers, *rest, **more)
        for transfer in transfers if link.clock is not None else ():
            send = transfer.direction is Direction.SEND
            now = torch.tensor([link.clock.now() if send and link.clock else 0.0], dtype=torch.float64)
            start = dist.isend if send else dist.irecv
            work = start(
                now, group=self.pp_group, tag=_CLOCK_TAG, **{"group_dst" if send else "group_src": transfer.peer}
            )
            assert work is not None
            sent_at[transfer] = now, work

    def receive_at_its_time(self: P2PCommunicator, transfer: Transfer) -> Tensor:
        tensor = receive(self, transfer)
        if link.clock is not None:
            now, work = sent_at.pop(transfer)
            work.wait()
            link.clock.wait_until(float(now))
        return tensor

    patch.object(dispatch_alltoall, "exchange_counts", counts_as_message).start()
    patch.object(P2PCommunicator, "post", post_with_time).start()
    patch.object(P2PCommunicator, "receive", receive_at_its_time).start()
