"""The life of one expert group's memory: into pages at the end of its forward, back before its backward, then freed.
Which tensors belong to a group is decided in saved_tensors.py, which group comes next in stash_manager.py.
"""

import enum
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.page_layout import Priority
from megatron.core.transformer.moe.paged_stash.page_pool import RESTORE_ALIGNMENT, PageGroup, PagePool
from megatron.core.transformer.moe.paged_stash.saved_tensors import (
    Block,
    SavedTensor,
    StorageView,
    VersionOf,
    block_with,
)
from megatron.core.transformer.moe.paged_stash.side_streams import SideStream, main_waits_for, record_main
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent


class Phase(enum.Enum):
    """The state of a group's tensors."""

    RECORDING = "as they were; its forward runs"
    KEPT = "as they were; its backward comes next"
    STASHED = "in pages"
    RESTORING = "on their way back; pages given back"
    READY = "back"
    LOST = "its forward ended with an exception"


class Memory:
    """The bytes of one Block once they are back; lives as long as autograd holds one of its tensors."""

    __slots__ = ("first_byte", "restored", "change", "__weakref__")

    def __init__(self, first_byte: int) -> None:
        self.first_byte = first_byte  # the byte of the original storage that the restored memory begins with
        self.restored: Tensor | None = None
        self.change: str | None = None  # how the original was changed while its copy could still read it


class Place(NamedTuple):
    """Where a block's rows come back to: num_bytes bytes that start `lead` bytes into the restored memory, which stands
    for the original storage from first_byte on.
    """

    first_byte: int
    lead: int
    num_bytes: int


@dataclass(frozen=True)
class Reading:
    """A copy into pages that the main stream has not waited for. copied: its end, None on the CPU.

    sources: the memory that it reads, kept until then; none on the CPU, where the copy is done. versions: by block, its
    Memory and the versions of the tensors in it when the copy was launched.
    """

    copied: torch.Event | None
    sources: list[Tensor]
    versions: list[tuple[Memory, list[VersionOf]]]

    def note_changes(self) -> None:
        """Spoils the blocks that were written to meanwhile: the copy may have read either value."""
        for memory, versions in self.versions:
            changes = (version.change() for version in versions)
            memory.change = memory.change or next((change for change in changes if change is not None), None)


@dataclass
class Pages:
    """A group's pages. The finalizer that frees them refers to this object, so it must not refer to the group.

    stashed: when the copy into pages is done. arrived: when the copy back is done and the pages are freed. targets:
    memory that the copy back writes to.
    """

    group: PageGroup
    generation: int
    is_given_back: bool = False
    stashed: torch.Event | None = None
    arrived: torch.Event | None = None
    targets: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Recomputation:
    """The recomputation of a tensor that was dropped. Indices are positions in the group's specs."""

    index: int
    priority: Priority
    recompute: Callable[..., None]
    out: StorageView
    sources: tuple[tuple[int, StorageView], ...]


class StashedGroup:
    """One expert group of one micro-batch, for as long as autograd holds any of its tensors."""

    def __init__(self, event: StashEvent, generation: int) -> None:
        """event: its forward. generation: number of the stash's resets before it."""
        self.event, self.generation = event, generation
        self.phase = Phase.RECORDING
        self.pages: Pages | None = None
        self.has_backward_begun = False
        self.memories: list[weakref.ref[Memory]] = []
        self.places: list[Place] = []  # one for each block
        self.recomputations: list[Recomputation] = []
        self.ready: torch.Event | None = None  # rows are back, and what was dropped is computed again


class PageKeeper:
    """Moves groups in and out of a pool. One for each stash; any thread may call it, at any time.

    1. `stash`: pages are planned and filled on the stash stream, behind the group's forward.
    2. `start_restore`: rows are copied back on the restore stream, and pages given back at once.
    3. `finish_restore`: the main stream waits for that copy, and computes again what was dropped.
    4. A group that autograd lets go of without backward gives its pages back when Python collects it.
    5. `reset`: all pages are free; what was still in pages is lost.
    """

    def __init__(self, pool: PagePool, *, num_programs: int) -> None:
        self.pool, self.generation = pool, 0
        self._num_programs = num_programs
        self._stash_stream, self._restore_stream = SideStream(pool.device), SideStream(pool.device)
        self._reading: list[Reading] = []
        self._lock, self._depth = threading.RLock(), 0
        self._gone: deque[Pages] = deque()  # of groups that were collected, yet to be released

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keeps out other threads, and finalizers, which Python may run between any two lines. Grad mode is off."""
        try:
            with self._lock, torch.inference_mode(False), torch.no_grad():
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
        finally:
            self._release_gone()

    @torch.compiler.disable  # what it keeps about groups changes under the compiler's guards
    def stash(
        self,
        group: StashedGroup,
        blocks: list[Block],
        *,
        num_rows: Tensor,
        reserve: Tensor | None,
        is_captured: bool = False,
    ) -> None:
        """Copies the live rows into pages. num_rows: [1], int64; reserve: [3], int64, both on the device.

        is_captured: as part of a CUDA graph, see [Note: captured parts].
        """
        specs = [block.spec for block in blocks]
        pages = Pages(self.pool.open_group(specs, is_fixed=is_captured), self.generation)
        if not is_captured:
            # From here on, whatever happens, the pages come back when the group goes.
            weakref.finalize(group, self._let_go, pages).atexit = False
        sources = [block.bytes_of_rows(self.pool.device) for block in blocks]
        try:
            with self._stash_stream.behind_main(*pages.group.waits):
                self.pool.plan(pages.group, num_rows, reserve=reserve)
                self.pool.stash(pages.group, sources, num_programs=self._num_programs)
        finally:
            copied = self._stash_stream.record()
            # The rows of a captured group come back in another graph, which follows the whole of this one, and whose
            # capture would break at an event of this one's.
            pages.stashed = None if is_captured else copied
            # Until the main stream has waited for the copy the allocator must not hand this memory out: the copy would
            # read what later kernels of the main stream write to it.
            read = [] if copied is None else [*sources, num_rows]
            reading = Reading(copied, read, [])
            self._reading.append(reading)
        group.pages, group.phase = pages, Phase.STASHED
        group.recomputations = [
            _recomputation_of(block, blocks, index=index) for index, block in enumerate(blocks) if _can_drop(block)
        ]
        for block in blocks:
            first_byte = block.start // RESTORE_ALIGNMENT * RESTORE_ALIGNMENT
            memory = Memory(first_byte)
            group.memories.append(weakref.ref(memory))
            group.places.append(Place(first_byte, block.start - first_byte, block.num_bytes))
            reading.versions.append((memory, _versions_of(block)))
            for saved in block.saved:
                saved.memory, saved.snapshot = memory, None

    def start_restore(self, group: StashedGroup) -> None:
        """Starts the copy back of a group that is in pages; without memory for it, raises and leaves it in pages."""
        pages = self._current(group)
        ends = [place.lead + place.num_bytes for place in group.places]
        targets = [self.pool.restored.take(end) for end in ends]
        rows = [target[place.lead : end] for target, place, end in zip(targets, group.places, ends, strict=True)]
        # Kept until the main stream has waited for the copy: it would overwrite memory that the allocator handed out
        # earlier.
        pages.targets = targets
        with self._restore_stream.behind_main(pages.stashed):
            self.pool.restore(pages.group, rows, num_programs=self._num_programs)
            # Before giving pages back: after an interruption in between nothing may be copied out of them again.
            group.phase = Phase.RESTORING
            self._give_back(pages)

    def finish_restore(self, group: StashedGroup) -> None:
        """Makes the main stream wait for the rows, and compute again what was dropped."""
        pages = self._current(group)
        with self._restore_stream.behind_main():
            self._give_back(pages)
        main_waits_for(pages.arrived, self.pool.device)
        for one in sorted(group.recomputations, key=lambda one: one.priority):
            # The host waits for nothing: the flag is on the device, where recompute reads it and writes nothing if 0.
            needed = self.pool.dropped(pages.group, one.index)
            views = ((one.index, one.out), *one.sources)
            out, *sources = (view.over(pages.targets[i], group.places[i].first_byte) for i, view in views)
            if one.recompute(out, needed, *sources) is not None:  # type: ignore[func-returns-value]
                raise TypeError(
                    f"{one.recompute} returned a value: recompute(out, needed, *sources) must write to `out`"
                )
        for memory, target in zip(group.memories, pages.targets, strict=True):
            alive = memory()
            if alive is not None:
                alive.restored = target
        group.ready = record_main(self.pool.device)
        group.recomputations, pages.targets, group.phase = [], [], Phase.READY
        # The flags are read by kernels of the main stream: until these are done no one else may get the records.
        self.pool.close_group(pages.group, after=group.ready)

    def join(self) -> None:
        """Makes the main stream wait for all copies into pages; their sources may then be overwritten or freed.

        Sources that were overwritten before, while a copy could still read them, make their backward raise.
        """
        for reading in self._reading:
            reading.note_changes()
            main_waits_for(reading.copied, self.pool.device)
        self._reading.clear()

    def join_all(self) -> None:
        """Makes the main stream wait for all copies, into pages and back."""
        self.join()
        for stream in (self._stash_stream, self._restore_stream):
            main_waits_for(stream.record(), self.pool.device)

    def fork(self) -> None:
        """Puts both side streams behind the main stream, with nothing to do."""
        for stream in (self._stash_stream, self._restore_stream):
            with stream.behind_main():
                pass

    def forget_groups(self) -> None:
        """Groups that were stashed so far hold nothing that anyone may give back or wait for."""
        self.generation += 1
        self._gone.clear()
        self.forget_copies()

    def forget_copies(self) -> None:
        """Drops waits for copies into pages: a GPU refuses those of a capture that an error aborted."""
        self._reading.clear()

    def reset(self) -> None:
        """Gives all pages back. Allocates nothing."""
        # The main stream clears the pool: no release may run after that.
        self.join_all()
        self.pool.reset()
        self.generation += 1
        self.pool.restored.trim()

    def is_waiting(self, group: StashedGroup) -> bool:
        """Whether rows of the group are in pages or on their way."""
        alive = group.pages is not None and group.pages.generation == self.generation
        return alive and group.phase in (Phase.STASHED, Phase.RESTORING)

    def check_current(self, event: StashEvent, generation: int) -> None:
        """Raises RuntimeError where a reset came after a forward of that generation."""
        if generation != self.generation:
            raise RuntimeError(
                f"backward of the expert group {event.name!r}, forward {event.instance} of its step: its rows were in "
                "the stash when reset() gave all pages back; run its forward again"
            )

    def _current(self, group: StashedGroup) -> Pages:
        assert group.pages is not None, f"{group.event}: {group.phase.value}"
        self.check_current(group.event, group.pages.generation)
        return group.pages

    def _let_go(self, pages: Pages) -> None:
        self._gone.append(pages)
        self._release_gone()

    def _release_gone(self) -> None:
        """Gives back the pages of collected groups, unless another call is under way, which does it at its end."""
        while self._gone and self._lock.acquire(blocking=False):
            try:
                if self._depth:
                    return
                self._depth += 1
                try:
                    self._release(self._gone.popleft())
                finally:
                    self._depth -= 1
            finally:
                self._lock.release()

    def _release(self, pages: Pages) -> None:
        if pages.generation != self.generation:
            return
        with self._restore_stream.behind_main(pages.stashed):
            self._give_back(pages)
        if pages.targets:
            # A copy back that nobody waited for may still write to them.
            main_waits_for(pages.arrived, self.pool.device)
        self.pool.close_group(pages.group, after=pages.arrived)

    def _give_back(self, pages: Pages) -> None:
        if not pages.is_given_back:
            self.pool.release(pages.group)
            # Behind the release, not just behind the copy: once the main stream has waited for this, the next plan must
            # find these pages free, as the reserve assumes, and the group's room in the table may go to another.
            pages.arrived = self._restore_stream.record()
            # Last: after an interruption all of this is done again, and a second release does nothing.
            pages.is_given_back = True


def tensor_of(saved: SavedTensor) -> Tensor:
    """A saved tensor, of any shape and dtype, whose rows are back. Rows beyond the live ones hold any bytes.

    Raises RuntimeError if the original was changed in place while it was copied.
    """
    if saved.memory is not None and saved.memory.change is not None:
        raise RuntimeError(saved.memory.change)
    assert saved.memory is not None and saved.memory.restored is not None, "not restored"
    return saved.view.over(saved.memory.restored, saved.memory.first_byte)


def _versions_of(block: Block) -> list[VersionOf]:
    """One for each version counter; views of one tensor share theirs."""
    snapshots = [saved.snapshot for saved in block.saved if saved.snapshot is not None]
    if block.mark is not None:
        snapshots.append(block.mark.snapshot)
    return [VersionOf(snapshot) for snapshot in snapshots]


def _can_drop(block: Block) -> bool:
    return block.mark is not None and block.mark.recompute is not None


def _recomputation_of(block: Block, blocks: list[Block], *, index: int) -> Recomputation:
    mark = block.mark
    assert mark is not None and mark.recompute is not None
    sources = []
    for source in mark.sources:
        position = block_with(source, blocks)
        assert position is not None, "blocks_of gave every source a block"
        sources.append((position, StorageView.of(source.tensor)))
    return Recomputation(index, mark.priority, mark.recompute, StorageView.of(mark.snapshot.tensor), tuple(sources))
