"""RunSaves: the checkpoints that a run writes, at most one of them beside training, and what becomes of failed ones.

What is in a checkpoint is decided in checkpointing.py.
"""

import time
from collections.abc import Callable

from megatron.core.dist_checkpointing import CheckpointError, PendingSave, StagingMemory
from megatron.training.callbacks.lines import print_rank_0

# Of a rank that ends by an error: for what it is writing, and for the other ranks' parts of the same checkpoint.
_ABANDON_SECONDS = 30.0


class RunSaves:
    """Its methods are collective but for `abandon`; each of them first ends the save under way, if any.

    on_save: called with the iteration on every rank, once its checkpoint is complete and on disk.
    """

    def __init__(self, *, in_background: bool, on_save: Callable[[int], None]) -> None:
        self._staging = StagingMemory() if in_background else None
        self._on_save = on_save
        # Iteration, save, and when it began.
        self._pending: tuple[int, PendingSave, float] | None = None
        # The newest checkpoint that this run has written.
        self.latest: int | None = None
        # From the start of the last periodic save until it was on disk; in the background, steps ran meanwhile.
        self.seconds: float | None = None

    def save(self, iteration: int, begin: Callable[[StagingMemory | None], PendingSave]) -> None:
        """A checkpoint from which the run goes on: where it cannot be written, training does, and a line says why."""
        self.finish()
        start = time.perf_counter()
        try:
            self._pending = iteration, begin(self._staging), start
        except CheckpointError as error:
            _warn(error)
            return
        if self._staging is None:
            self.finish()
        else:
            print_rank_0(f"  scheduled an async checkpoint save at iteration {iteration:7d}")

    def save_last(self, iteration: int, begin: Callable[[StagingMemory | None], PendingSave]) -> None:
        """The checkpoint that a run leaves behind: raises CheckpointError on every rank where it cannot be written."""
        self.finish()
        # Nothing is left to do meanwhile: no copy.
        begin(None).finish()
        self._note(iteration)

    def poll(self) -> None:
        """After each step: ends a save whose files are complete. Costs nothing where none is under way."""
        if self._pending is not None and self._pending[1].ranks_are_done():
            self.finish()

    def finish(self) -> None:
        """Waits until the save under way, if any, is complete, or has failed."""
        if self._pending is None:
            return
        (iteration, pending, start), self._pending = self._pending, None
        try:
            pending.finish()
        except CheckpointError as error:
            _warn(error)
        else:
            self.seconds = time.perf_counter() - start
            self._note(iteration)

    def abandon(self) -> None:
        """At the end of a run that an error has ended: what the threads are about to complete is not lost. Local."""
        if self._pending is not None:
            self._pending[1].abandon(seconds=_ABANDON_SECONDS)

    def _note(self, iteration: int) -> None:
        self.latest = iteration
        self._on_save(iteration)


def _warn(error: CheckpointError) -> None:
    print_rank_0(f"WARNING: {error}: earlier checkpoints are as they were, and the next save tries again")
