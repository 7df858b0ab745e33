"""Moves the saved rows of an expert group into pages at the end of its forward, and back before its backward.

saved_tensors.py decides which tensors belong to a group. stash.py decides which group is next.

[Note: side streams] The planning kernel allocates pages on the stash stream, and only it writes the heads of the rings.
The release kernel returns pages on the restore stream, and only it writes the tails. A stash and a restore may
therefore run concurrently. With a single stream, the prefetch of the next group would wait for copies into pages
although it does not depend on them. All work on either stream first waits for the main stream:

- stash: the experts' kernels may still be writing its sources. Its plan must also see the pages that backward has
  released, because the reserve counts on them. The main stream waited for these releases before it ran backward.
- restore: kernels launched earlier on the main stream may still read the memory of its targets, because the allocator
  reuses memory in main-stream order.

Stashes that replace each other use the same two streams (StashStreams). torch has a pool of 32 streams per device and
assigns them round-robin, so new streams for each plan would soon coincide with the streams of reductions and copies,
and wait for their work. A reset clears the page pool on the main stream. The main stream therefore waits for both
streams before the reset, and both streams wait for the main stream after it.
"""

import enum
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.device.streams import SideStream, main_waits_for, record_main
from megatron.core.paged_rows import PagedRows
from megatron.core.transformer.moe.paged_stash.page_layout import COPIES_PER_PROCESSOR, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import CLOSED, RESTORE_ALIGNMENT, PageGroup, PagePool
from megatron.core.transformer.moe.paged_stash.row_encoding import decode, encode
from megatron.core.transformer.moe.paged_stash.saved_tensors import (
    Block,
    SavedTensor,
    StorageView,
    VersionOf,
)
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent


class Phase(enum.Enum):
    """State of a group's tensors."""

    RECORDING = "unchanged; its forward is running"
    KEPT = "not in pages: unchanged, decoded, or in the scratch; its backward is the next event"
    STASHED = "in pages"
    RESTORING = "being copied back; pages released"
    READY = "readable in its backward"
    LOST = "lost; its forward raised an exception"


class GroupMemory:
    """Saved rows of one expert group, and their state. Lives as long as autograd or a StashedRows references them."""

    def __init__(self, event: StashEvent, generation: int) -> None:
        """Creates a group in Phase.RECORDING.

        event: the group's forward. generation: number of resets of the stash before this forward.
        """
        self.event, self.generation = event, generation
        self.key = event.group
        self.phase = Phase.RECORDING
        self.pages: GroupPages | None = None
        self.has_backward_begun = False
        self.memories: list[weakref.ref[RestoredBlock]] = []
        self.places: list[Place] = []  # one per block
        self.recomputations: list[Recomputation] = []
        self.ready: torch.Event | None = None  # set when rows are restored and dropped tensors recomputed
        self.let_go: Callable[[], None] | None = None  # releases the pages, if that has not happened yet
        # Whether the pages are released after the weight gradients instead of in backward.
        self.keeps_pages = False
        self.placed: list[PagedRows] = []  # the tensors of a group that is computed in pages, until they are released
        self.scratch_generation = CLOSED  # number of resets of the pool before the group was computed in the scratch
        self.scratch_set = 0  # the set of scratch pages in which rows without pages on the device are computed

    def __del__(self) -> None:
        if self.let_go is not None and not sys.is_finalizing():
            self.let_go()


@dataclass
class GroupPages:
    """Pages of a group. A collected group passes them to the keeper, so this object must not refer to the group.

    stashed: event at the end of the copy into pages. arrived: event after the copy back and, unless kernels compute in
    the pages, their release. targets: memory that the group's rows are restored into. arriving: memory that the copy
    back writes to, which is a part of `targets` except for encoded rows. num_rows: [1], int64, of a group with
    encoded rows. computed: whether kernels compute the group's tensors in the pages.
    """

    group: PageGroup
    generation: int
    is_given_back: bool = False
    stashed: torch.Event | None = None
    arrived: torch.Event | None = None
    targets: list[Tensor] = field(default_factory=list)
    arriving: Sequence[Tensor] = ()
    num_rows: Tensor | None = None
    computed: bool = False


class RestoredBlock:
    """Restored bytes of one Block. Lives as long as autograd or a StashedRows references it."""

    __slots__ = ("first_byte", "restored", "change", "__weakref__")

    def __init__(self, first_byte: int) -> None:
        self.first_byte = first_byte  # position in the original storage at which the restored memory begins
        self.restored: Tensor | None = None
        self.change: str | None = None  # error message if the original was changed before its copy was complete

    @property
    def bytes(self) -> Tensor:
        """The restored bytes: [n], uint8. Raises RuntimeError if the original was changed while it was copied."""
        if self.change is not None:
            raise RuntimeError(self.change)
        assert self.restored is not None, "not restored"
        return self.restored


class Place(NamedTuple):
    """Position of a block's rows in the restored memory: bytes `lead` to `end`.

    The restored memory replaces the original storage from first_byte on. pitch: bytes from one row to the next.
    encoded_width: as in Block.
    """

    first_byte: int
    lead: int
    end: int
    pitch: int
    encoded_width: int

    @staticmethod
    def of(block: Block) -> "Place":
        """Returns the place of a block, with the original's alignment."""
        first_byte = block.start // RESTORE_ALIGNMENT * RESTORE_ALIGNMENT
        lead = block.start - first_byte
        return Place(first_byte, lead, lead + block.num_bytes, block.pitch, block.encoded_width)

    def rows_in(self, memory: Tensor) -> Tensor:
        """Returns the rows to decode into: [C, W], bf16, a view of restored memory, [N], uint8."""
        columns, pitch = self.encoded_width, self.pitch // 2
        elements = memory[self.lead : self.end].view(torch.bfloat16)
        return elements.as_strided((1 + (len(elements) - columns) // pitch, columns), (pitch, 1))


@dataclass(frozen=True)
class Recomputation:
    """Recomputation of a tensor if it was dropped. Indices are positions in the group's specs."""

    index: int
    priority: Priority
    recompute: Callable[..., None]
    out: StorageView
    sources: tuple[tuple[int, StorageView], ...]


class StoredRows(NamedTuple):
    """Memory blocks that one group stores in pages. specs: one for each block. recomputations: of droppable blocks."""

    blocks: list[Block]
    specs: list[TensorSpec]
    recomputations: list[Recomputation]

    @staticmethod
    def of(blocks: list[Block]) -> "StoredRows":
        """Builds the specs and recomputations of blocks that a StashGroup collected."""
        again = [
            _recomputation_of(block, blocks, index=index) for index, block in enumerate(blocks) if _can_drop(block)
        ]
        return StoredRows(blocks, [block.spec for block in blocks], again)


NOTHING = StoredRows([], [], [])


@dataclass(frozen=True)
class Reading:
    """Copy into pages that the main stream has not waited for yet.

    copied: event at the end of the copy, None on the CPU. sources: memory that the copy reads, kept alive until the
    wait; empty on the CPU, where the copy is synchronous. versions: for each block, its RestoredBlock and the versions
    of its tensors when the copy was launched.
    """

    copied: torch.Event | None
    sources: list[Tensor]
    versions: list[tuple[RestoredBlock, list[VersionOf]]]

    def note_changes(self) -> None:
        """Invalidates blocks that were changed since the launch, because the copy may have read old or new values."""
        for memory, versions in self.versions:
            changes = (version.change() for version in versions)
            memory.change = memory.change or next((change for change in changes if change is not None), None)


class PageKeeper:
    """Moves groups into and out of a pool's pages. Each stash has one instance. All methods are thread-safe.

    1. `stash` plans and fills pages on the stash stream, after the group's forward.
    2. `start_restore` copies rows back on the restore stream, and then releases the pages, unless the group keeps them
       for weight gradients: `restore_first` then copies one tensor back once more, and `give_back` releases them.
    3. `finish_restore` makes the main stream wait for that copy, and recomputes dropped tensors.
    4. The pages of a group that autograd drops without backward are released when Python collects the group.
    5. `reset` frees all pages. Rows that are still in pages are lost.

    A group that is computed in pages calls `place` before its forward, `spill` after it, `fetch` in backward, and
    `give_back` after the last kernel that reads the pages. All of its work runs on the main stream, except for copies
    to and from the host. `prefetch` starts the copy from the host before that backward, if the group's set of the
    scratch is free. If another group takes the set, the main stream waits for the copy, and `fetch` copies again. A
    group whose backward is the next event needs no pages: it calls `place_in_scratch` instead, `rest_in_scratch` after
    its forward, `read_in_scratch` in backward, and neither `spill` nor `fetch`.
    """

    def __init__(self, pool: PagePool, *, num_programs: int, streams: "StashStreams") -> None:
        self.pool, self.generation = pool, 0
        self._num_programs = num_programs
        self.streams = streams
        self._stash_stream, self._restore_stream = streams.stash, streams.restore
        self._reading: list[Reading] = []
        self._lock, self._depth = threading.RLock(), 0
        # Modes before the outermost `with`.
        self._has_grad = False
        self._inference: torch.inference_mode | None = None
        self._gone: deque[GroupPages] = deque()  # pages of collected groups, not yet released
        self._has_copied = False  # whether a group was copied since the last reset

    def __enter__(self) -> None:
        """Excludes other threads, and finalizers, which Python may run at any time. Disables grad mode.

        The keeper itself is the context, because a generator costs the host several times as much.
        """
        self._lock.acquire()
        self._depth += 1
        if self._depth > 1:
            return
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._has_grad = torch.is_grad_enabled()
        if self._has_grad:
            torch.set_grad_enabled(False)

    def __exit__(self, *error: Any) -> None:
        if self._depth == 1:
            if self._has_grad:
                torch.set_grad_enabled(True)
            if self._inference is not None:
                self._inference.__exit__(*error)
        self._depth -= 1
        self._lock.release()
        if self._gone:
            self._release_gone()

    @torch.compiler.disable  # the records of groups change while the compiler evaluates its guards
    def stash(
        self,
        group: GroupMemory,
        rows: StoredRows,
        *,
        num_rows: Tensor,
        reserve: Tensor | None,
        is_captured: bool = False,
    ) -> list[RestoredBlock]:
        """Allocates pages for a group and copies its live rows into them. Returns where the blocks will be restored.

        num_rows: [1], int64; reserve: [3], int64, both on the device. is_captured: whether a CUDA graph captures this
        call, see [Note: captured parts].
        """
        self._has_copied = True
        pages = GroupPages(self.pool.open_group(rows.specs, is_fixed=is_captured), self.generation)
        if not is_captured:
            # From here on, also after an exception, the pages are released when the group is collected.
            group.let_go = partial(self._let_go, pages)
        # Encoded on the main stream, which may then write to the originals.
        sources = [
            self._encoded(block, num_rows) if block.encoded_width else block.bytes_of_rows(self.pool.device)
            for block in rows.blocks
        ]
        try:
            with self._stash_stream.behind_main(*pages.group.waits):
                self.pool.plan(pages.group, num_rows, reserve=reserve)
                self.pool.stash(pages.group, sources, num_programs=self._num_programs)
        finally:
            copied = self._stash_stream.record()
            # The rows of a captured group are restored in another graph, which runs after this graph has ended. Waiting
            # for an event of this capture would make the other capture fail.
            pages.stashed = None if is_captured else copied
            # The allocator must not reuse this memory before the main stream has waited for the copy. Otherwise the
            # copy would read data that later kernels of the main stream write there.
            read = [] if copied is None else [*sources, num_rows]
            reading = Reading(copied, read, [])
            self._reading.append(reading)
        group.pages, group.phase = pages, Phase.STASHED
        group.recomputations = rows.recomputations
        memories = []
        for block in rows.blocks:
            place = Place.of(block)
            memory = RestoredBlock(place.first_byte)
            memories.append(memory)
            group.memories.append(weakref.ref(memory))
            group.places.append(place)
            if (block.saved or block.mark is not None) and not block.encoded_width:
                reading.versions.append((memory, _versions_of(block)))
            if block.saved:
                _replace_saved(block, memory)
            if block.encoded_width:
                pages.num_rows = num_rows
        return memories

    @torch.compiler.disable  # as stash
    def keep_decoded(self, rows: StoredRows, *, num_rows: Tensor) -> list[RestoredBlock]:
        """Encodes and decodes rows of a group that receives no pages. Returns memory with the result for each block.

        Blocks that are not encoded remain in their storage. num_rows: [1], int64, on the device.
        """
        memories = []
        for block in rows.blocks:
            if block.encoded_width:
                place = Place.of(block)
                memory = RestoredBlock(place.first_byte)
                memory.restored = self.pool.restored.take(place.end)
                decode(self._encoded(block, num_rows), num_rows, out=place.rows_in(memory.restored))
                _replace_saved(block, memory)
            else:
                memory = RestoredBlock(0)
                memory.restored = torch.empty(0, dtype=torch.uint8, device=self.pool.device).set_(block.storage)
            memories.append(memory)
        return memories

    def _encoded(self, block: Block, num_rows: Tensor) -> Tensor:
        """Encodes the live rows of a block. num_rows: [1], int64. Returns [n], uint8."""
        size, stride = (block.num_rows, block.encoded_width), (block.pitch // 2, 1)
        rows = torch.empty(0, dtype=torch.bfloat16, device=self.pool.device)
        return encode(rows.set_(block.storage, block.start // 2, size, stride), num_rows)

    @torch.compiler.disable  # as stash
    def place(
        self,
        group: GroupMemory,
        specs: Sequence[TensorSpec],
        *,
        num_rows: Tensor,
        reserve: Tensor | None,
        is_captured: bool,
    ) -> GroupPages:
        """Allocates pages in which the group's kernels then compute its tensors.

        num_rows: [1], int64; reserve: [3], int64, or None; is_captured: as in `stash`.
        """
        opened = self.pool.open_group(specs, scratch_set=group.scratch_set, is_fixed=is_captured)
        pages = GroupPages(opened, self.generation, computed=True)
        if not is_captured:
            group.let_go = partial(self._let_go, pages)
        for event in pages.group.waits:
            main_waits_for(event, self.pool.device)
        self.pool.scratch.take(pages.group, group.event.name)
        self.pool.plan(pages.group, num_rows, reserve=reserve, in_pages=True)
        group.pages, group.phase = pages, Phase.STASHED
        return pages

    @torch.compiler.disable  # as stash
    def place_in_scratch(
        self, group: GroupMemory, specs: Sequence[TensorSpec], dtypes: Sequence[torch.dtype], *, num_rows: Tensor
    ) -> list[PagedRows]:
        """Lets a group whose backward is the next event compute its tensors in the scratch. num_rows: [1], int64."""
        rows = self.pool.rows_in_scratch(specs, dtypes, scratch_set=group.scratch_set)
        # Until its backward ends no other group computes, unless the step departs from its order, or the weight
        # gradients are computed later.
        self.pool.scratch.take(group, group.event.name, move_out=_move_out)
        group.scratch_generation = self.pool.generation
        # An invalid number discards the step, as in a plan.
        self.pool.check_count(num_rows, specs[0].max_tokens)
        return rows

    def rest_in_scratch(self, group: GroupMemory) -> None:
        """Ends the forward of a group that was computed in the scratch."""
        self.pool.scratch.rest(group)

    def read_in_scratch(self, group: GroupMemory) -> None:
        """Begins the backward of a group that was computed in the scratch, unless its rows were moved out of it."""
        self.check_readable(group)
        if self.pool.scratch.is_resting(group):
            self.pool.scratch.take(group, group.event.name, move_out=_move_out)
        group.phase = Phase.READY

    def spill(self, group: GroupMemory, *, num_rows: Tensor) -> None:
        """Copies what the kernels computed in the scratch to the group's pages on the host. num_rows: [1], int64."""
        pages = self._current(group)
        self.pool.check_fresh(pages.group.generation)
        self.pool.scratch.leave(pages.group)
        if not self.pool.layout.host_pages:
            return
        sources = [self.pool.scratch_of(pages.group, index) for index in range(len(pages.group.tensors))]
        try:
            with self._stash_stream.behind_main():
                self.pool.stash(pages.group, sources, num_programs=self._num_programs, host_only=True)
        finally:
            copied = self._stash_stream.record()
            pages.stashed = None if pages.group.is_fixed else copied
            # The next group computes in the same scratch.
            self._reading.append(Reading(copied, [] if copied is None else [num_rows], []))

    def fetch(
        self, group: GroupMemory, again: Callable[[Tensor], None] | None, *, following: GroupMemory | None
    ) -> None:
        """Copies the group's rows on the host back into the scratch, and recomputes a dropped last tensor there.

        again: writes the last tensor unless its argument, [1], int64, is 0; None if it is not dropped. following: a
        group to prefetch.
        """
        pages = self._current(group)
        has_host_pages = self.pool.layout.host_pages > 0
        is_prefetched = has_host_pages and self.pool.scratch.is_resting(pages.group)
        self.pool.scratch.take(pages.group, group.event.name)
        if has_host_pages:
            if not is_prefetched:
                self._copy_from_host(pages, num_programs=0)
            if following is not None:
                # Launched before the main stream waits and recomputes, because this copy depends on neither.
                self.prefetch(following)
            main_waits_for(pages.arrived, self.pool.device)
        if again is not None:
            again(self.pool.dropped(pages.group, len(pages.group.tensors) - 1))
        group.ready, group.phase = record_main(self.pool.device), Phase.READY

    def prefetch(self, group: GroupMemory) -> None:
        """Starts to copy the rows on the host of a group whose backward is the next event into the scratch.

        Does nothing if the group was not computed in pages, or if its set of the scratch is not free, such as while
        weight gradients of the previous group there are still to be computed.
        """
        if group.phase is not Phase.STASHED or not self.is_computed(group):
            return
        pages = self._current(group)
        if not self.pool.layout.host_pages or not self.pool.scratch.is_free(pages.group.scratch_set):
            return
        # Holds the pages and not the group, which would otherwise stay alive if autograd dropped it.
        await_copy = partial(self._await_copy, pages)
        self.pool.scratch.take(pages.group, group.event.name, move_out=await_copy)
        self._copy_from_host(pages, num_programs=self._num_programs)
        # Last, so that after an interruption the group's backward copies the rows itself.
        self.pool.scratch.rest(pages.group)

    def _copy_from_host(self, pages: GroupPages, *, num_programs: int) -> None:
        targets = [self.pool.scratch_of(pages.group, index) for index in range(len(pages.group.tensors))]
        # The kernels of the set's previous user are already on the main stream.
        try:
            with self._restore_stream.behind_main(pages.stashed):
                self.pool.restore(pages.group, targets, num_programs=num_programs, host_only=True)
        finally:
            pages.arrived = self._restore_stream.record()

    def _await_copy(self, pages: GroupPages, _: PageGroup) -> None:
        """Cancels a prefetch: the rows remain in their pages on the host, and another group overwrites the copy."""
        main_waits_for(pages.arrived, self.pool.device)

    def check_readable(self, group: GroupMemory) -> None:
        """Raises RuntimeError if a reset, or the last reader, has released the pages of a group."""
        if group.pages is None:
            self.check_current(group.event, group.generation)
            self.pool.check_fresh(group.scratch_generation)
        else:
            self.pool.check_fresh(self._current(group).group.generation)

    def keeps_for_readers(self, group: GroupMemory) -> bool:
        """Returns whether rows of a group that was placed can be read after its backward, whichever groups follow.

        Rows from the host are in the scratch, which the next group needs. A group without pages moves out of it.
        """
        return group.pages is None or (group.pages.computed and not self.pool.layout.host_pages)

    def end_backward(self, group: GroupMemory) -> None:
        """Ends the backward of a group that was placed, and whose weight gradients are computed later."""
        if group.pages is None:
            self.pool.scratch.rest(group)
        elif self.reads_again(group):
            self.pool.scratch.leave(group.pages.group)
        else:
            self.pool.leave_to_readers(group.pages.group)

    def reads_again(self, group: GroupMemory) -> bool:
        """Returns whether weight gradients that are computed later copy rows back from the pages, which are kept.

        They read rows that were computed in pages there, unless pages on the host may be among them.
        """
        return group.keeps_pages and group.pages is not None and not self.keeps_for_readers(group)

    def give_back(self, group: GroupMemory) -> None:
        """Releases the pages of a group that was computed in them, or has kept them. Later calls do nothing."""
        pages = group.pages
        if pages is None:
            self.pool.scratch.leave(group)
            return
        if pages.is_given_back or pages.generation != self.generation:
            return
        if not pages.computed:
            self._release(pages)
            # The next plan must see these pages as free.
            main_waits_for(pages.arrived, self.pool.device)
            group.let_go = None
            return
        self.pool.scratch.leave(pages.group)
        self._release_computed(pages)
        pages.is_given_back = True
        # The events of captured groups belong to graphs, and their entries are never reused.
        after = None if pages.group.is_fixed else record_main(self.pool.device)
        self.pool.close_group(pages.group, after=after)
        group.let_go = None

    def start_restore(self, group: GroupMemory, *, is_awaited: bool = False) -> None:
        """Starts to copy a group's rows back from pages. If memory runs out, it raises and leaves the group in pages.

        is_awaited: whether the main stream is about to wait for the copy, so that no other kernel requires free SMs
        meanwhile.
        """
        pages = self._current(group)
        indices = range(len(group.places))
        targets, rows = self._targets(group, pages, indices)
        # Kept alive until the main stream has waited for the copy. Otherwise the allocator could reuse the targets, and
        # the copy would overwrite them.
        pages.targets, pages.arriving = targets, rows
        is_launched = False
        try:
            with self._restore_stream.behind_main(pages.stashed):
                self.pool.restore(pages.group, rows, num_programs=0 if is_awaited else self._num_programs)
                if pages.num_rows is not None:
                    self._decode(group, pages, indices, rows, targets)
                is_launched = True
                # Set before the release, so that after an interruption in between nothing is copied from the pages
                # twice.
                group.phase = Phase.RESTORING
                if group.keeps_pages:
                    pages.arrived = self._restore_stream.record()
                else:
                    self._give_back(pages)
        finally:
            if not is_launched:
                # Another attempt replaces this memory, which the stream may still write to.
                main_waits_for(self._restore_stream.record(), self.pool.device)

    def restore_first(self, group: GroupMemory) -> Tensor:
        """Copies the first tensor of a group that keeps its pages to memory of its own, after the group's backward.

        Returns [n], uint8, as in RestoredBlock, or from the first row on if the group was computed in pages.
        """
        pages, index = self._current(group), 0
        if pages.computed:
            targets = rows = [self.pool.restored.take(pages.group.tensors[index].spec.max_bytes)]
        else:
            targets, rows = self._targets(group, pages, [index])
        try:
            with self._restore_stream.behind_main():
                self.pool.restore(pages.group, rows, only=index)
                if pages.num_rows is not None:
                    self._decode(group, pages, [index], rows, targets)
        finally:
            # The main stream uses the memory afterwards, or, after an exception, frees it.
            main_waits_for(self._restore_stream.record(), self.pool.device)
        return targets[0]

    def _targets(
        self, group: GroupMemory, pages: GroupPages, indices: Sequence[int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Allocates memory for blocks of a group: [n] each, uint8, and the parts that a copy back writes to."""
        take, places, tensors = self.pool.restored.take, group.places, pages.group.tensors
        targets = [take(places[index].end) for index in indices]
        rows = [
            take(tensors[index].spec.max_bytes)
            if places[index].encoded_width
            else target[places[index].lead : places[index].end]
            for index, target in zip(indices, targets, strict=True)
        ]
        return targets, rows

    @staticmethod
    def _decode(
        group: GroupMemory,
        pages: GroupPages,
        indices: Sequence[int],
        rows: Sequence[Tensor],
        targets: Sequence[Tensor],
    ) -> None:
        """Decodes the copied rows of those blocks whose rows are encoded. rows, targets: as in _targets."""
        assert pages.num_rows is not None, "set with encoded rows"
        for index, encoded, target in zip(indices, rows, targets, strict=True):
            place, spec = group.places[index], pages.group.tensors[index].spec
            if place.encoded_width:
                decode(encoded[: spec.max_bytes], pages.num_rows, out=place.rows_in(target))

    def finish_restore(self, group: GroupMemory) -> None:
        """Makes the main stream wait for the rows and recompute the dropped tensors."""
        pages = self._current(group)
        if not group.keeps_pages:
            with self._restore_stream.behind_main():
                self._give_back(pages)
        main_waits_for(pages.arrived, self.pool.device)
        for one in sorted(group.recomputations, key=lambda one: one.priority):
            # The host does not wait: recompute reads the flag on the device, and writes nothing if it is 0.
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
        group.recomputations, pages.targets, pages.arriving, group.phase = [], [], (), Phase.READY
        if group.keeps_pages:
            return
        # Kernels of the main stream read the flags. The records must not be reused before these kernels are done.
        self.pool.close_group(pages.group, after=group.ready)
        group.let_go = None

    def join(self) -> None:
        """Makes the main stream wait for all copies into pages. Their sources may then be overwritten or freed.

        If a source was overwritten while a copy could still read it, the backward of its tensors will raise.
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
        """Makes both side streams wait for the main stream, without launching work."""
        for stream in (self._stash_stream, self._restore_stream):
            stream.behind_main()

    def forget_groups(self) -> None:
        """Discards all groups stashed so far, without releasing their pages or waiting for their copies."""
        self.generation += 1
        self._gone.clear()
        self.forget_copies()

    def forget_copies(self) -> None:
        """Drops pending waits for copies into pages. After an aborted capture, CUDA would reject their events."""
        self._reading.clear()
        self.pool.scratch.forget()

    def reset(self) -> None:
        """Frees all pages. Allocates nothing."""
        # The main stream clears the pool, and no release may run after that.
        self.join_all()
        self.pool.reset()
        self.generation += 1
        self._has_copied = False
        self.pool.restored.trim()

    def is_waiting(self, group: GroupMemory) -> bool:
        """Returns whether the group's rows are in pages or being copied back."""
        alive = group.pages is not None and group.pages.generation == self.generation
        return alive and group.phase in (Phase.STASHED, Phase.RESTORING)

    def is_computed(self, group: GroupMemory) -> bool:
        """Returns whether the group's kernels compute in its pages, from which no rows are restored."""
        return group.pages is not None and group.pages.computed

    def check_current(self, event: StashEvent, generation: int) -> None:
        """Raises RuntimeError if the stash was reset after the forward, which ran in the given generation."""
        if generation != self.generation:
            raise RuntimeError(
                f"cannot run backward of the expert group {event.name!r}, forward {event.instance} of its step: its "
                "rows were in the stash when reset() freed all pages; rerun the forward"
            )

    def _current(self, group: GroupMemory) -> GroupPages:
        assert group.pages is not None, f"{group.event}: {group.phase.value}"
        self.check_current(group.event, group.pages.generation)
        return group.pages

    def _let_go(self, pages: GroupPages) -> None:
        self._gone.append(pages)
        self._release_gone()

    def _release_gone(self) -> None:
        """Releases the pages of collected groups, or leaves them to the call that is running, if there is one."""
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

    def _release(self, pages: GroupPages) -> None:
        if pages.generation != self.generation:
            return
        if pages.computed:
            main_waits_for(pages.stashed, self.pool.device)
            # A prefetch may still read the pages.
            main_waits_for(pages.arrived, self.pool.device)
            self.pool.scratch.leave(pages.group)
            self._release_computed(pages)
            self.pool.close_group(pages.group, after=record_main(self.pool.device))
            return
        with self._restore_stream.behind_main(pages.stashed):
            self._give_back(pages)
        if pages.targets:
            # A copy back that the main stream has not waited for may still write to these targets.
            main_waits_for(pages.arrived, self.pool.device)
        self.pool.close_group(pages.group, after=pages.arrived)

    def _release_computed(self, pages: GroupPages) -> None:
        # On the main stream, whose next plan must see these pages as free. Releases of groups that were copied run on
        # the restore stream, and two releases must not run at the same time.
        if self._has_copied:
            main_waits_for(self._restore_stream.record(), self.pool.device)
        self.pool.release(pages.group)

    def _give_back(self, pages: GroupPages) -> None:
        if not pages.is_given_back:
            self.pool.release(pages.group)
            # Recorded after the release, not only after the copy. Once the main stream has waited for this event, the
            # next plan must see these pages as free, and another group may get the entries in the page table.
            pages.arrived = self._restore_stream.record()
            # Set last, because after an interruption all of this is repeated, and a second release does nothing.
            pages.is_given_back = True


def tensor_of(saved: SavedTensor) -> Tensor:
    """Rebuilds a saved tensor, of any shape and dtype, from its restored rows. Other rows are undefined.

    Raises RuntimeError if the original was changed in place while it was copied.
    """
    assert saved.memory is not None and saved.view is not None, "not stashed"
    return saved.view.over(saved.memory.bytes, saved.memory.first_byte)


def _move_out(group: GroupMemory) -> None:
    """Copies the tensors of a group that was computed in the scratch to memory of their own."""
    for rows in group.placed:
        rows.move_out()


def _replace_saved(block: Block, memory: RestoredBlock) -> None:
    """Makes autograd read a block's saved tensors from restored memory."""
    for saved in block.saved:
        assert saved.snapshot is not None, "blocks contain only tensors with snapshots"
        saved.view, saved.memory, saved.snapshot = StorageView.of(saved.snapshot.tensor), memory, None


def _versions_of(block: Block) -> list[VersionOf]:
    """Returns a VersionOf for each tensor in the block. Views of one tensor share a version counter."""
    snapshots = [saved.snapshot for saved in block.saved if saved.snapshot is not None]
    if block.mark is not None:
        snapshots.append(block.mark.snapshot)
    return [VersionOf(snapshot) for snapshot in snapshots]


def _can_drop(block: Block) -> bool:
    return block.mark is not None and block.mark.recompute is not None


def _recomputation_of(block: Block, blocks: list[Block], *, index: int) -> Recomputation:
    mark = block.mark
    assert mark is not None and mark.recompute is not None
    sources = tuple(
        (blocks.index(held), StorageView.of(source.tensor))
        for held, source in zip(block.sources, mark.sources, strict=True)
    )
    return Recomputation(index, mark.priority, mark.recompute, StorageView.of(mark.snapshot.tensor), sources)


def copy_programs(device: torch.device, num_sms: int) -> int:
    """Returns the maximum number of programs of a copy that runs concurrently with other kernels.

    num_sms: number of streaming multiprocessors (SMs) that the copy may fill, 0 for all. Returns 0 for no limit, and on
    the CPU. See [Note: copies during GEMMs] in triton_kernels.py.
    """
    return 0 if device.type == "cpu" else COPIES_PER_PROCESSOR * num_sms


@dataclass(frozen=True)
class StashStreams:
    """Streams of a stash and of the stashes that replace it; see [Note: side streams]. Immutable and thread-safe."""

    stash: SideStream
    restore: SideStream

    @classmethod
    def on(cls, device: torch.device) -> "StashStreams":
        """Creates both streams on the device."""
        return cls(SideStream(device), SideStream(device))
