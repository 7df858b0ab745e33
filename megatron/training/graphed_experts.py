"""GraphedExperts: what experts with buffers of a fixed size keep account of while a CUDA graph runs a step's passes.

Sizes, and when they change, are expert_memory.py's; what a participant is, graphs/capture.py's.
"""

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from megatron.core.graphs.capture import GraphParticipant
from megatron.core.transformer.moe.paged_stash import PagedStash
from megatron.training.expert_memory import ExpertMemory


@dataclass(frozen=True)
class _Account:
    """passes: numbers of the layers whose forwards ran, in order. rows: [n], int64, on the device, live rows of each.

    stash: here so that its memory, which the graph reads, lives as long.
    """

    passes: list[int]
    rows: Tensor
    stash: PagedStash | None


class GraphedExperts(GraphParticipant):
    """The experts' memory, whose begin_step precedes each capture and replay, and whatever follows a broken capture."""

    def __init__(self, memory: ExpertMemory) -> None:
        self._memory = memory

    def fingerprint(self) -> Hashable:
        """Returns the epoch of buffer and pool sizes."""
        return self._memory.epoch

    @contextmanager
    def capturing(self) -> Iterator[None]:
        stash = self._memory.stash
        if stash is None:
            yield
        else:
            with stash.captured():
                yield

    def captured(self) -> _Account:
        step = self._memory.step
        return _Account(list(step.passes), step.rows, step.stash)

    def replayed(self, account: _Account) -> None:
        self._memory.step.passes, self._memory.step.rows = list(account.passes), account.rows
