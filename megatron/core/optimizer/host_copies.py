"""Copies of gradients to the host and of updated parameters back, chunk by chunk, while the host computes.

What a chunk's update is, update_rules.py says; which parameters are updated on the host, param_runs.py.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.device import CopyStream, host_bytes
from megatron.core.optimizer.param_runs import ParamRun
from megatron.core.optimizer.stored_floats import WithRemainder

# Elements that are on their way together: long enough a copy for its start to cost little. On the grid of 64.
CHUNK = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Elements from start to end of a run."""

    run: ParamRun
    start: int
    end: int


class HostCopies:
    """For some runs, whose masters are in the host's memory. While a chunk is updated, the next one's gradient comes
    and the parameters of the one before go; each way has two buffers and, on a GPU, a stream.
    """

    def __init__(self, runs: Sequence[ParamRun]) -> None:
        self.runs = frozenset(runs)
        device = next((run.grad.device for run in runs), torch.device("cpu"))
        longest = min(CHUNK, max((run.main.numel for run in runs), default=0))
        self._to_host, self._to_device = CopyStream(device), CopyStream(device)
        grad_bytes = longest * max((run.grad.element_size() for run in runs), default=0)
        param_bytes = longest * max((run.model.element_size() for run in runs), default=0)
        self._grads = [host_bytes(grad_bytes, device) for _ in range(2)]
        self._params = [host_bytes(param_bytes, device) for _ in range(2)]
        # Of each buffer of parameters the last copy from it.
        self._sent: list[Any] = [None, None]

    def chunks(self, runs: Sequence[ParamRun]) -> Iterator[tuple[Chunk, torch.Tensor]]:
        """Each chunk of these runs, in order, with its gradient on the host: [n], the buffer's dtype.

        The caller updates the masters before it asks for the next; then the parameters are written from them. At the
        end, work that is launched on the device finds all parameters new.
        """
        todo = [
            Chunk(run, start, min(start + CHUNK, run.main.numel))
            for run in runs
            for start in range(0, run.main.numel, CHUNK)
        ]
        coming = [self._fetch(chunk, slot) for slot, chunk in enumerate(todo[:1])]
        for index, chunk in enumerate(todo):
            grad, copied = coming.pop()
            # The next one goes where the one before last was, which has been read.
            coming += [self._fetch(later, (index + 1) % 2) for later in todo[index + 1 : index + 2]]
            self._to_host.host_waits_for(copied)
            yield chunk, grad
            self._send(chunk, index % 2)
        for sent in self._sent:
            self._to_device.main_waits_for(sent)

    def _fetch(self, chunk: Chunk, slot: int) -> tuple[torch.Tensor, Any]:
        there = chunk.run.grad[chunk.start : chunk.end]
        here = self._grads[slot][: there.nbytes]
        return here.view(there.dtype), self._to_host.copy(here, there.view(torch.uint8))

    def _send(self, chunk: Chunk, slot: int) -> None:
        run = chunk.run
        if not run.is_copy or isinstance(run.main, WithRemainder):
            return
        there = run.model[chunk.start : chunk.end]
        here = self._params[slot][: there.nbytes]
        # What it holds may still be on its way.
        self._to_device.host_waits_for(self._sent[slot])
        here.view(there.dtype).copy_(run.main.read(chunk.start, chunk.end))
        self._sent[slot] = self._to_device.copy(there.view(torch.uint8), here)
