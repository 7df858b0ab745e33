"""ChunkSync: what a wrapped model chunk puts under the launch order of its stage; all of a stage. Launches nothing."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from megatron.core.distributed.grad_checks import GradChecks
from megatron.core.distributed.hand_out import HandOut
from megatron.core.distributed.synced_group import SyncedGroup


@dataclass(frozen=True, eq=False)
class ChunkSync:
    """What a DistributedDataParallel puts under a launch order.

    module: the chunk itself. find_problem: what has changed in it so that its buffers are wrong, in words, or None.
    zero_grads: forgets its gradients. checks: look at them before they are reduced; None: nobody does. hand_out: gets
    them afterwards; None: nobody does.
    """

    groups: Sequence[SyncedGroup]
    module: nn.Module
    find_problem: Callable[[], str | None]
    zero_grads: Callable[[], None]
    checks: GradChecks | None = None
    hand_out: HandOut | None = None


class StageChunks:
    """The chunks of a stage, in the order in which they were added."""

    def __init__(self) -> None:
        self._chunks: list[ChunkSync] = []
        self._hand_outs: dict[SyncedGroup, HandOut] = {}

    def __iter__(self) -> Iterator[ChunkSync]:
        return iter(self._chunks)

    def __len__(self) -> int:
        return len(self._chunks)

    def add(self, chunk: ChunkSync) -> None:
        """Another one."""
        self._chunks.append(chunk)
        if chunk.hand_out is not None:
            self._hand_outs.update(dict.fromkeys(chunk.groups, chunk.hand_out))

    @property
    def are_checked(self) -> bool:
        """Whether anybody looks at their gradients before they are reduced."""
        return any(chunk.checks for chunk in self._chunks)

    @property
    def have_consumer(self) -> bool:
        """Whether an optimizer takes gradients in backward."""
        return any(chunk.hand_out is not None and chunk.hand_out.consumer is not None for chunk in self._chunks)

    def begin(self) -> None:
        """Begins an iteration."""
        for chunk in self._chunks:
            if chunk.checks is not None:
                chunk.checks.forget()
            if chunk.hand_out is not None:
                chunk.hand_out.begin()

    def stop(self) -> None:
        """The iteration is broken off: nothing more of it is given out."""
        for chunk in self._chunks:
            if chunk.hand_out is not None:
                chunk.hand_out.stop()

    def end_iteration(self) -> None:
        """Everything was given out that is not completed later."""
        for chunk in self._chunks:
            if chunk.hand_out is not None:
                chunk.hand_out.end_backward()

    def find_problem(self) -> str | None:
        """The first change of a module that makes its buffers wrong, in words; None: there is none."""
        return next((found for chunk in self._chunks if (found := chunk.find_problem())), None)

    def non_finite_sync(self) -> list[str]:
        """Names of this rank's gradients that were not finite, where that is checked."""
        return [name for chunk in self._chunks if chunk.checks for name in chunk.checks.non_finite_sync()]

    def reduced(self, group: SyncedGroup) -> None:
        """Gives out a group whose gradients are reduced, if that was not done before."""
        if group in self._hand_outs:
            self._hand_outs[group].reduced(group)
