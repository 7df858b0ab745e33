"""Compares a CUDA graph of work on the main stream and two side streams, as for a stash, with eager execution."""

import torch
from torch import Tensor

from benchmarks.gpu.checks.reporting import checked_device, expect, graphs_of, report
from megatron.core.device import mark_time, seconds_between, synchronize
from megatron.core.device.streams import SideStream, main_waits_for, record_main

ROUNDS, REPLAYS, SIZE, CYCLES = 4, 50, 1 << 16, 200_000


class Work:
    """Rounds in which each side stream uses a result of the main stream, and the next round uses theirs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.sides = device, [SideStream(device) for _ in range(2)]
        self.value = torch.zeros(SIZE, device=device)
        self.parts = [torch.zeros(SIZE, device=device) for _ in self.sides]

    def run(self) -> None:
        """Launches all work. Delays one side stream per round, so that a missing wait is detected."""
        for number in range(ROUNDS):
            self.value.mul_(1.25).add_(1)
            ready = record_main(self.device)
            events = []
            for place, (side, part) in enumerate(zip(self.sides, self.parts, strict=True)):
                with side.behind_main(ready):
                    self._wait(CYCLES if (number + place) % 2 else 0)
                    part.add_(self.value, alpha=place + 0.5)
                    events.append(side.record())
            for event in events:
                main_waits_for(event, self.device)
            self.value.add_(self.parts[0] - self.parts[1])

    def results(self) -> list[Tensor]:
        """Returns copies of all results, each [SIZE], fp32."""
        return [tensor.clone() for tensor in (self.value, *self.parts)]

    def _wait(self, cycles: int) -> None:
        if self.device.type == "cuda" and cycles:
            torch.cuda._sleep(cycles)


def main() -> None:
    """Captures the work once, replays it repeatedly, and compares the results of each replay."""
    device = checked_device()
    eager, captured = Work(device), Work(device)
    graphs = graphs_of(device)
    with graphs.on_capture_stream():
        captured.run()
        eager.run()
    synchronize(device)
    with graphs.capturing() as graph:
        captured.run()
    seconds = 0.0
    for number in range(REPLAYS):
        seed = torch.full((SIZE,), 0.1 * number, device=device)
        for work in (eager, captured):
            work.value.copy_(seed)
            for part in work.parts:
                part.zero_()
        start = mark_time(device)
        graph.replay()
        seconds += seconds_between(start, mark_time(device))
        eager.run()
        pairs = zip(eager.results(), captured.results(), strict=True)
        if not all(torch.equal(*pair) for pair in pairs):
            expect(False, f"replay {number} is bitwise equal to eager execution")
    expect(True, f"{REPLAYS} replays are bitwise equal to eager execution")
    report(replay_us=1e6 * seconds / REPLAYS)


if __name__ == "__main__":
    main()
