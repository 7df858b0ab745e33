"""The modelled link of benchmarks/expert_overlap.py sends one message after the other and hides nothing of them."""

from typing import Any

import torch.distributed as dist

from benchmarks.one_link import OneLink
from tests.harness import run_on_ranks


class _SetClock:
    """A clock that the test sets, and that waits advance."""

    time = 0.0

    def restart(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wait_until(self, end: float) -> None:
        self.time = max(self.time, end)


def _times() -> list[tuple[float, float, float]]:
    """Sends three messages of 2 s and 10 or 20 bytes; returns the time and both waits of this rank after each wait."""
    rank, group, clock, found = dist.get_rank(), dist.group.WORLD, _SetClock(), []
    assert group is not None
    link = OneLink()
    link.restart(clock, seconds_per_message=2, seconds_per_byte=0.1)

    def launch(time: float) -> Any:
        clock.time = time
        return link.launch([], 10 * (rank + 1), group)[0]

    def wait(message: Any) -> None:
        message.wait()
        found.append((clock.time, link.exposed, link.uneven))

    first, second = launch(rank), launch(rank + 1)
    clock.time = 4
    wait(first)
    wait(second)
    wait(launch(20 + rank))
    return found


def test_a_message_begins_when_all_ranks_have_launched_it_and_the_link_is_free() -> None:
    # The slower rank launches at 1, 2 and 21 s; a message takes 2 s + 20 bytes x 0.1 s.
    assert run_on_ranks(_times, 2) == [[(5, 1, 0), (9, 5, 0), (25, 9, 1)], [(5, 1, 0), (9, 5, 0), (25, 9, 0)]]
