"""PagedStash and StashedRows: forwards of expert groups, the order of groups in a step, and pages reserved for x.

saved_tensors.py decides which tensors a context stashes, and group_memory.py moves them into pages and back.
stash_order.py predicts the order, and arithmetic.py computes page counts.

    stash = PagedStash(PagePool(device, PoolLayout(page_bytes=65536, device_pages=4096)))
    for batch in batches:
        ...                                # an expert layer of a script does this (GroupedMLP uses `begin`):
            with stash.context(f"layer {number}", num_rows, max_rows=C):
                y = experts(x)             # x: [C, H], of which num_rows rows are live
        loss.backward()
        is_void = stash.is_void_sync()     # too few pages even for x: these gradients are wrong
        stash.reset()
        if not is_void:
            optimizer.step()

[Note: captured parts] One CUDA graph may contain the forward of a single layer, and another graph its backward. During
capture a forward runs once as usual: the forward's graph plans and fills pages at its end, and the backward's graph
restores the rows and releases the pages. Replays run none of this code. A captured group therefore has separate entries
in the page tables. The number of pages to leave free depends on the group's position in the step, so the graph reads it
from memory that the host writes before each replay. A decision that is the same in each step is part of the graph:
whether the group is stashed, or kept because its backward is the next event. No prefetch crosses graphs. Within each
graph the side streams fork from the main stream and join it, so that a replay is one unit of work on the main stream.
"""

import weakref
from collections import Counter as Multiset
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.core.autograd import require_kept
from megatron.core.device.streams import main_waits_for
from megatron.core.device.torch_internals import Hooks, active_hooks, current_backward_id
from megatron.core.paged_rows import PagedRows, Rows, memory_of
from megatron.core.transformer.moe.paged_stash.arithmetic import (
    Footprint,
    ReserveRow,
    footprint,
    peak_pages,
    reserve_table,
    resident_groups,
)
from megatron.core.transformer.moe.paged_stash.group_memory import (
    NOTHING,
    GroupMemory,
    PageKeeper,
    Phase,
    Recomputation,
    RestoredBlock,
    StashStreams,
    StoredRows,
    tensor_of,
)
from megatron.core.transformer.moe.paged_stash.page_layout import (
    Counter,
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
    is_whole,
    pages_for,
    row_spec,
)
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.row_encoding import check_stash_dtype
from megatron.core.transformer.moe.paged_stash.saved_tensors import (
    Block,
    RowTensors,
    SavedTensor,
    StashGroup,
    StorageView,
    outer_hooks,
)
from megatron.core.transformer.moe.paged_stash.stash_order import (
    MAX_EVENTS,
    EventKind,
    GroupKey,
    StashEvent,
    StashOrder,
)

# After this many forwards without a reset, the names, sizes and order of later forwards are not recorded.
_MAX_FORWARDS = MAX_EVENTS // 2
_KNOWN_SIZES = 4096  # entries of a cache; training needs one for each size of buffers
_NEVER_FREE = 2**62  # a page count larger than any pool
# Final phases, reached once backward has begun.
_SETTLED = (Phase.KEPT, Phase.READY)


class GroupBytes(NamedTuple):
    """Bytes of the buffers that hold a group's rows: as they are, and those of its encoded rows."""

    whole: int
    encoded: int = 0

    @staticmethod
    def of(blocks: Sequence[Block]) -> "GroupBytes":
        """Returns the sizes of a group with these blocks."""
        encoded = [block.num_rows * block.stored_bytes for block in blocks if block.encoded_width]
        return GroupBytes(sum(block.max_bytes for block in blocks), sum(encoded))


@dataclass(frozen=True)
class CapturedGroup:
    """Expert group in a captured part.

    specs: empty for a group that is not stashed. max_bytes: bytes of the buffers that hold its rows; None for those of
    the specs, which encoded rows do not have. kept: objects that must live as long as the CUDA graphs.
    """

    name: str
    specs: Sequence[TensorSpec] = ()
    max_rows: int = 0
    max_bytes: GroupBytes | None = None
    kept: tuple[Any, ...] = ()


@dataclass(eq=False)
class CapturedPart:
    """Part of a layer that CUDA graphs capture. Must live as long as the graphs.

    reserve: [3], int64, on the device: pages that the group's plan leaves free. group: None before the capture.
    """

    reserve: Tensor
    group: CapturedGroup | None = None


@dataclass(frozen=True)
class ReplayedForward:
    """Identifies a replayed forward to `replaying_backward`. generation: number of stash resets before the forward."""

    event: StashEvent
    generation: int


class PagedStash:
    """Stores the live rows that expert groups save for backward in pages.

    Gradients remain bit-identical, unless `dtype` requests that rows of bf16 are stored in 8 bits.

    1. A context collects the tensors that autograd saves. At its end the live rows of row tensors are copied into
       pages, and the oversized memory is freed once the next context begins.
    2. When backward accesses the first tensor of a group, the group's rows are restored with their strides and address
       alignment, and the rows of the next groups are prefetched.
    3. Marked tensors without pages are recomputed, unless `dtype` is set. If an x received no pages, the step is
       discarded (stash overflow).
    4. `reset` between steps frees all pages and learns the order of the step for the next one.

    With computes_in_pages, groups that call `begin` and `StashedRows.place` receive their pages before their forward,
    compute in them, and are not copied, except for rows that receive pages on the host. A group whose backward is the
    next event computes in the pool's scratch. If the pool has two sets of scratch pages, groups use them in turn, in
    the order of their backwards, and the rows on the host of the next group are prefetched into the other set.

    Restored rows beyond the live ones are undefined. Backward must not read them.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        prefetch_groups: int = 1,
        events: Sequence[StashEvent] | None = None,
        num_programs: int = 0,
        reserved_share: float = 1.0,
        has_rungs: bool = True,
        specs: Mapping[str, Sequence[TensorSpec]] | None = None,
        streams: StashStreams | None = None,
        computes_in_pages: bool = False,
        dtype: str | None = None,
    ) -> None:
        """Creates a stash that stores rows in the pages of `pool`.

        prefetch_groups: number of groups whose rows are restored ahead of their backward, each into buffers of max_rows
        rows; not of groups that compute in pages. events: order of a step; None learns it. num_programs: maximum number
        of programs of a copy that runs concurrently with other kernels on a GPU, such as copy_programs(); 0 means no
        limit. reserved_share: share of max_rows for which pages are reserved for later groups before gate_up and act
        receive any. 1 guarantees that every x receives pages if the pool could hold all of them, in steps that follow
        the known order and in steps without one. Smaller values guarantee nothing, and 0 reserves nothing; see Reserve.
        has_rungs: whether gate_up and act have recompute levels, i.e. are dropped and recomputed if pages run out;
        otherwise they are as important as x. specs: tensor sizes of the groups in `events` by name, if they are known
        before the first step. streams: the streams of the stash that this stash replaces, on the pool's device; None
        creates new streams. computes_in_pages: whether groups that `place` their tensors compute in pages; requires a
        pool with scratch. dtype: "mxfp8" stores rows of bf16 in 8 bits, about half as many bytes, from which backward
        computes other gradients than from the rows themselves; there are no recompute levels then. Contexts encode rows
        that their module declares. See [Note: compressed stash] in row_encoding.py.
        Raises ValueError for invalid arguments.
        """
        check_stash_dtype(dtype)
        if dtype is not None and computes_in_pages:
            raise ValueError(
                f"dtype is {dtype!r}, and computes_in_pages is True: rows are encoded when they are copied into pages; "
                "use computes_in_pages=False"
            )
        if computes_in_pages and not pool.scratch_pages:
            raise ValueError("computes_in_pages is True, but the pool has no scratch: build it with scratch_pages")
        for argument, number in (("prefetch_groups", prefetch_groups), ("num_programs", num_programs)):
            if not is_whole(number) or number < 0:
                raise ValueError(f"{argument} ({number!r}) must be an integer of at least 0")
        if not isinstance(reserved_share, int | float) or not 0.0 <= reserved_share <= 1.0:
            raise ValueError(f"reserved_share ({reserved_share!r}) must be a number between 0 and 1")
        specs = dict(specs or {})
        of_groups = [spec for own in specs.values() for spec in own]
        kinds = (("pool", (pool,), PagePool), ("events", events or (), StashEvent), ("specs", of_groups, TensorSpec))
        for argument, values, kind in kinds:
            wrong = next((value for value in values if not isinstance(value, kind)), None)
            if wrong is not None:
                raise ValueError(f"{argument}: got a {type(wrong).__name__} ({wrong!r}), must be {kind.__name__}")
        self._settings = {
            "prefetch_groups": prefetch_groups,
            "events": None if events is None else tuple(events),
            "num_programs": num_programs,
            "has_rungs": has_rungs,
            "specs": specs,
            "computes_in_pages": computes_in_pages,
            "dtype": dtype,
        }
        self.computes_in_pages = computes_in_pages
        self.pool, self.order = pool, StashOrder(events)
        self._prefetch_groups, self.has_rungs = prefetch_groups, has_rungs and dtype is None
        self.dtype = dtype
        self._prefetches_from_host = computes_in_pages and pool.scratch_sets > 1
        # Without pages on the host, groups keep their pages until their weight gradients are computed.
        self._keeper = PageKeeper(pool, num_programs=num_programs, streams=streams or StashStreams.on(pool.device))
        self._instances: Multiset[str] = Multiset()  # number of forwards so far in this step, by name
        self._num_forwards = 0  # so far in this step
        self._groups: weakref.WeakValueDictionary[GroupKey, GroupMemory] = weakref.WeakValueDictionary()
        self._max_bytes: dict[GroupKey, GroupBytes] = {}  # sizes of the buffers that hold a group's rows
        self._part: CapturedPart | None = None  # part whose forward or backward is being captured
        self._is_enabled = True
        self._is_spoiled = False  # whether an exception ended a context of this step
        with self._keeper:  # independent of the caller's grad mode
            self._reserve = Reserve(pool.layout, pool.device, share=reserved_share)
            if specs:
                for group in {event.group for event in self.order.events} - resident_groups(self.order.events):
                    own = specs[group[0]]
                    self._reserve.learn(group, own, max_rows=min(spec.max_tokens for spec in own))
            self._reserve.begin_step(self.order.events)

    def __reduce__(self) -> Any:
        """Makes deepcopy and pickle copy only the settings. The copy allocates a separate pool on first use.

        The copy shares no page, order or group with this stash. A copy that is never trained, such as in an average of
        weights, allocates nothing.
        """
        if "_unbound" in self.__dict__:
            return _unbound, (type(self), *self.__dict__["_unbound"])
        settings = {**self._settings, "reserved_share": self.reserved_share}
        make_pool, arguments = self.pool.__reduce__()
        return _unbound, (type(self), partial(make_pool, *arguments), settings)

    def __getattr__(self, name: str) -> Any:
        """Allocates the pool of a copy when the copy is first used."""
        if "_unbound" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        make_pool, settings = self.__dict__["_unbound"]
        pool = make_pool()
        del self.__dict__["_unbound"]
        PagedStash.__init__(self, pool, **settings)
        return getattr(self, name)

    @contextmanager
    def context(
        self,
        name: str,
        num_rows: Tensor | int,
        *,
        max_rows: int,
        backward_is_next: bool = False,
        takes: RowTensors = RowTensors.GUESSED,
    ) -> Iterator[StashGroup]:
        """Context manager for the forward of one expert group with max_rows rows, of which the first num_rows are live.

        num_rows: [1] or scalar, int64 or int32, on the pool's device, read when the context ends; or an int.
        backward_is_next: whether this group's backward runs next, in which case nothing is stashed. takes: rule that
        decides which saved tensors contain rows; undeclared tensors may be guessed, see [Note: guessed rows]. The
        context is inactive without grad mode, in a recomputation (while backward runs), directly inside
        torch.utils.checkpoint, which saves nothing, in a step that `reset` disabled, and if max_rows is below 2. Outer
        saved-tensor hooks receive weights and other saved tensors without max_rows rows. Raises ValueError if num_rows
        or max_rows is invalid, if no saved tensor has rows, or if a tensor with rows may be a weight.
        """
        if "_unbound" in self.__dict__ and not torch.is_grad_enabled():
            # Checked before any attribute is read, which would allocate the pool of a copy.
            _check_count(num_rows, max_rows, device=None)
            yield StashGroup(torch.device("cpu"), max_rows, group=None, hooks=None)
            return
        _check_count(num_rows, max_rows, device=self.pool.device)
        if not isinstance(takes, RowTensors):
            raise ValueError(f"takes ({takes!r}) must be one of {', '.join(map(str, RowTensors))}")
        hooks = outer_hooks()
        group = self._open(name, hooks, max_rows=max_rows, backward_is_next=backward_is_next)
        if group is None:
            yield StashGroup(self.pool.device, max_rows, group=None, hooks=None)
            return
        recording = StashGroup(
            self.pool.device,
            max_rows,
            group=group,
            hooks=hooks,
            takes_rows=self._takes_rows(group),
            has_rungs=self.has_rungs,
            takes=takes,
            encodes=self.dtype is not None,
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(recording.pack, self._unpack):
                yield recording
            if recording.has_saved:
                stored = StoredRows.of(recording.blocks()) if self._takes_rows(group) else NOTHING
                self._commit(group, stored, num_rows=num_rows, max_rows=max_rows)
        finally:
            if group.phase is Phase.RECORDING and recording.has_saved:
                group.phase = Phase.LOST
                self._spoil()
                recording.forget()
            recording.close()

    def begin(self, name: str, num_rows: Tensor, *, max_rows: int) -> "StashedRows | None":
        """Begins the forward of an expert group whose caller passes the stash its tensors itself, without hooks.

        num_rows: [1], int64, on the pool's device; the caller must not change it before the group's backward. Returns
        None where a context would be inactive.
        """
        if "_unbound" in self.__dict__ and not torch.is_grad_enabled():
            return None
        if type(max_rows) is not int or max_rows < 0:  # before the more expensive check
            _check_count(num_rows, max_rows, device=self.pool.device)
        if type(num_rows) is int:
            raise ValueError(f"num_rows ({num_rows}) must be a tensor, [1], int64, on {self.pool.device}")
        group = self._open(name, active_hooks(), max_rows=max_rows)
        return None if group is None else StashedRows(self, group, num_rows, max_rows=max_rows)

    def reset(self, *, enabled: bool = True) -> None:
        """Frees all pages and clears the counters. Call it between steps, after the last backward or an exception.

        Rows that are still in pages are lost, and their backward raises RuntimeError. Restored rows remain valid.
        enabled: False disables the contexts of the next step.
        """
        with self._keeper:
            is_complete = not any(self._keeper.is_waiting(group) for group in self._groups.values())
            for group in self._groups.values():
                group.placed = []  # views of the arena, which may be freed next
            self._keeper.reset()
            if is_complete and not self._is_spoiled:
                self.order.finish_step()
            else:
                self.order.abandon_step()
            self._groups, self._instances = weakref.WeakValueDictionary(), Multiset()
            self._num_forwards, self._is_spoiled = 0, False
            known = {event.group for event in self.order.events}
            # Names may be new in each step. Records of names that are not in the list are no longer needed.
            self._max_bytes = {group: sizes for group, sizes in self._max_bytes.items() if group in known}
            self._reserve.forget_others(known)
            self._reserve.begin_step(self.order.events)
            self._is_enabled = enabled

    def footprint(self) -> Footprint:
        """Returns the memory that tensors saved for backward occupy with and without the stash.

        Computed for the order of the last complete step; zeros before the first one. The stash costs memory if the pool
        is too large for the step, or the step has few groups.
        """
        max_bytes = self._max_bytes
        return footprint(
            self.order.events,
            lambda group: max_bytes[group].whole if group in max_bytes else 0,
            layout=self.pool.layout,
            prefetch_groups=self._prefetch_groups,
            scratch_sets=self.pool.scratch_sets if self.computes_in_pages else 0,
            encoded_bytes=max((sizes.encoded for sizes in max_bytes.values()), default=0),
        )

    @property
    def reserve(self) -> tuple[ReserveRow, ...]:
        """Pages that each forward of the step leaves free, for arithmetic.simulate; () without a reserve."""
        return self._reserve.table

    @property
    def reserved_share(self) -> float:
        """Share of max_rows for which pages are reserved for later groups."""
        return self._reserve.share

    def set_reserved_share(self, share: float) -> None:
        """Changes reserved_share for later steps. Call it between steps, before `reset`.

        Plans read the reserve from the same memory as before, so captured steps remain valid. Raises ValueError unless
        0 < share <= 1, and if the stash was built with reserved_share 0.
        """
        if not 0.0 < share <= 1.0:
            raise ValueError(f"share is {share}: must be above 0 and at most 1")
        if self.reserved_share == 0.0:
            raise ValueError(
                f"share is {share}, but the stash was built with reserved_share 0: build it with a value above 0"
            )
        if share != self.reserved_share:
            with self._keeper:
                self._reserve.set_share(share)

    @property
    def streams(self) -> StashStreams:
        """Streams that copy rows into and out of pages."""
        return self._keeper.streams

    @property
    def is_capturing_part(self) -> bool:
        """Whether the forward or backward of a layer's part is being captured; see `capturing`."""
        return self._part is not None

    def join(self) -> None:
        """Makes the main stream wait for all copies, as `reset` does, so that a CUDA graph may be replayed next.

        Rows that rest in the scratch, where the graph may compute, move to other memory. Raises RuntimeError if weight
        gradients that are computed later have still to read rows there.
        """
        with self._keeper:
            self._keeper.join_all()
            self.pool.scratch.empty()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Context manager for capturing whole steps, or single passes of a step, together with their copies.

        The capture and each replay must follow a reset. The graph uses memory of this object, which must outlive it.
        """
        with self._keeper:
            # At its end a capture must join all streams that took part, and it cannot join others.
            self._keeper.fork()
        try:
            yield
            self.join()
        finally:
            with self._keeper:
                # The groups' events belong to the graph. Releasing pages outside of the graph would wait for them.
                self._keeper.forget_groups()

    def new_part(self) -> CapturedPart:
        """Creates the record of a layer's part that is about to be captured."""
        return CapturedPart(torch.zeros(len(Priority), dtype=torch.int64, device=self.pool.device))

    @contextmanager
    def capturing(self, part: CapturedPart) -> Iterator[None]:
        """Context manager for capturing the forward of a layer's part, and later its backward, as separate graphs.

        See [Note: captured parts]. The order of the step does not change here; `replaying` and `replaying_backward`
        update it. Call `join` before each capture and replay, because copies of eager groups may still run. Not run on
        a GPU yet.
        """
        with self._keeper:
            self._keeper.fork()
        self._part = part
        try:
            yield
            self.join()
        finally:
            self._part = None
            with self._keeper:
                self._keeper.forget_copies()

    def replaying(self, part: CapturedPart) -> ReplayedForward | None:
        """Records that the part's forward is about to be replayed; returns the argument of replaying_backward.

        The part may belong to a different stash over the same pool. Returns None if the part contains no group.
        """
        group = part.group
        if group is None:
            return None
        with self._keeper:
            event = self._next_forward(group.name)
            self._count_forward(group.name)
            if group.specs:
                self._learn(event, group.specs, max_rows=group.max_rows, max_bytes=group.max_bytes)
                row = self._reserve_of(event)
                if row is not None:
                    part.reserve.copy_(row)
            self.order.observe(event)
            return ReplayedForward(event, self._keeper.generation)

    def replaying_backward(self, forward: ReplayedForward) -> None:
        """Records that the forward's backward is about to be replayed.

        Raises RuntimeError if the stash was reset after the forward.
        """
        with self._keeper:
            self._keeper.check_current(forward.event, forward.generation)
            self.order.observe(StashEvent(EventKind.BACKWARD, *forward.event.group))

    @property
    def void(self) -> Tensor:
        """Counter that is above 0 if this step's gradients are wrong (stash overflow): scalar, int64, on the device.

        It is a view that `reset` sets to 0.
        """
        with self._keeper:
            self._keeper.join()
        return self.pool.counters[Counter.VOID]

    def is_void_sync(self) -> bool:
        """Returns whether this step's gradients are wrong (stash overflow). NOTE: waits for the device."""
        return bool(self.void.item())

    def _open(
        self, name: str, hooks: Hooks | None, *, max_rows: int, backward_is_next: bool = False
    ) -> GroupMemory | None:
        """Begins a group's forward, unless it must not be stashed; see `context`."""
        is_active = self._is_enabled and torch.is_grad_enabled() and not _is_recomputed(hooks) and max_rows >= 2
        with self._keeper:
            # The next kernels may write to memory that the copies of the previous group still read: all layers share
            # the buffers of a static dispatch, and the allocator reuses memory that autograd released.
            self._keeper.join()
            return self._begin(name, backward_is_next=backward_is_next) if is_active else None

    def _takes_rows(self, group: GroupMemory) -> bool:
        """Returns whether rows of a group are stored, or, if its backward follows, are at least encoded."""
        return group.phase is Phase.RECORDING or self.dtype is not None

    def _spoil(self) -> None:
        """Records that an exception ended a forward, so that the order of this step is not learned."""
        self._is_spoiled = self._is_spoiled or self._part is None

    def _begin(self, name: str, *, backward_is_next: bool) -> GroupMemory:
        """Begins a group's forward. The caller holds the lock."""
        event = self._next_forward(name)
        if self._part is None:
            self._count_forward(name)
        group = GroupMemory(event, self._keeper.generation)
        if backward_is_next:
            self._reserve.learn(event.group, [], max_rows=0)
        if backward_is_next or self.order.is_backward_next(event):
            group.phase = Phase.KEPT
        return group

    def _commit(
        self,
        group: GroupMemory,
        stored: StoredRows,
        *,
        num_rows: Tensor | int,
        max_rows: int,
        may_change: bool = True,
    ) -> list[RestoredBlock]:
        """Ends a group's forward. Returns where its blocks will be restored, or are decoded; [] if all rows are kept.

        may_change: whether the caller may change num_rows before the group's backward.
        """
        with self._keeper:
            memories = []
            count = num_rows if isinstance(num_rows, Tensor) and not may_change else None
            is_kept = group.phase is Phase.KEPT or not stored.blocks
            specs = [] if is_kept else stored.specs
            max_bytes = None if self.dtype is None else GroupBytes.of(stored.blocks)
            self._enter(group, specs, max_rows=max_rows, max_bytes=max_bytes)
            if not is_kept:
                memories = self._keeper.stash(
                    group,
                    stored,
                    num_rows=_count_tensor(num_rows, self.pool.device) if count is None else count,
                    reserve=self._pages_to_leave(group),
                    is_captured=self._part is not None,
                )
            else:
                group.phase = Phase.KEPT
                if isinstance(num_rows, Tensor) or stored.blocks:
                    count = _count_tensor(num_rows, self.pool.device) if count is None else count
                    # An invalid number discards the step. Runs on the main stream, which waited for all plans when the
                    # group began.
                    self.pool.check_count(count, max_rows)
                    memories = self._keeper.keep_decoded(stored, num_rows=count)
            # Recomputations of dropped tensors may read other tensors that the forward created.
            self._leave(group, specs, kept=tuple(stored.recomputations), max_rows=max_rows, max_bytes=max_bytes)
            return memories

    def _place(
        self,
        group: GroupMemory,
        specs: Sequence[TensorSpec],
        dtypes: Sequence[torch.dtype],
        *,
        num_rows: Tensor,
        max_rows: int,
    ) -> list[PagedRows]:
        """Allocates pages in which a group's forward computes its tensors; `_placed` ends that forward."""
        with self._keeper:
            self._enter(group, specs, max_rows=max_rows)
            group.keeps_pages = not self.pool.layout.host_pages or self.order.is_late(group.event)
            if self._prefetches_from_host and self._part is None:
                # Backwards that follow each other use different sets.
                group.scratch_set = self.order.backward_index(group.event) % self.pool.scratch_sets
            if group.phase is Phase.KEPT:
                return self._keeper.place_in_scratch(group, specs, dtypes, num_rows=num_rows)
            pages = self._keeper.place(
                group,
                specs,
                num_rows=num_rows,
                reserve=self._pages_to_leave(group),
                is_captured=self._part is not None,
            )
            return [self.pool.rows_in_pages(pages.group, index, dtype) for index, dtype in enumerate(dtypes)]

    def _placed(
        self, group: GroupMemory, specs: Sequence[TensorSpec], *, num_rows: Tensor, max_rows: int, kept: Any
    ) -> None:
        with self._keeper:
            if group.phase is Phase.KEPT:
                self._keeper.rest_in_scratch(group)
            else:
                self._keeper.spill(group, num_rows=num_rows)
            self._leave(group, specs, kept=(kept,), max_rows=max_rows)

    def _enter(
        self, group: GroupMemory, specs: Sequence[TensorSpec], *, max_rows: int, max_bytes: GroupBytes | None = None
    ) -> None:
        """Records the sizes of a group before it receives pages. max_bytes: as in CapturedGroup."""
        part = self._part
        if part is None and group.phase is Phase.RECORDING:
            self._learn(group.event, specs, max_rows=max_rows, max_bytes=max_bytes)
        if part is not None and part.group is not None:
            raise RuntimeError(
                f"{part.group.name} and {group.event.name} are in one captured part: a part can contain only one "
                "expert group"
            )

    def _pages_to_leave(self, group: GroupMemory) -> Tensor | None:
        return self._reserve_of(group.event) if self._part is None else self._part.reserve

    def _leave(
        self,
        group: GroupMemory,
        specs: Sequence[TensorSpec],
        *,
        kept: tuple[Any, ...],
        max_rows: int,
        max_bytes: GroupBytes | None = None,
    ) -> None:
        """Adds a forward to the step, or to the captured part, which keeps `kept` alive."""
        if self._part is None:
            self.order.observe(group.event)
            self._groups[group.key] = group
        else:
            kept = () if group.pages is None else (group.pages, *kept)
            self._part.group = CapturedGroup(group.event.name, specs, max_rows, max_bytes, kept)

    def _next_forward(self, name: str) -> StashEvent:
        is_counted = self._num_forwards < _MAX_FORWARDS
        return StashEvent(EventKind.FORWARD, name, self._instances[name] if is_counted else self._num_forwards)

    def _count_forward(self, name: str) -> None:
        if self._num_forwards < _MAX_FORWARDS:
            self._instances[name] += 1
        self._num_forwards += 1

    def _learn(
        self, event: StashEvent, specs: Sequence[TensorSpec], *, max_rows: int, max_bytes: GroupBytes | None
    ) -> None:
        if self._num_forwards > _MAX_FORWARDS:
            return
        group = event.group
        if group in self._max_bytes and self._reserve.knows(group, specs, max_rows=max_rows):
            return
        self._reserve.learn(group, specs, max_rows=max_rows)
        self._max_bytes[group] = max_bytes or GroupBytes(sum(spec.max_bytes for spec in specs))

    def _reserve_of(self, event: StashEvent) -> Tensor | None:
        """Returns the pages that this forward's plan must leave free: [3], int64, on the device, or None."""
        return self._reserve.row(event.group, self.order.forward_index(event))

    def _unpack(self, saved: SavedTensor) -> Tensor:
        self._settle(saved.group)
        return saved.kept() if saved.memory is None else tensor_of(saved)

    def _settle(self, group: GroupMemory) -> None:
        """Restores a group in its backward. Its rows can be read afterwards, on the current stream."""
        # A group has many tensors. After the first access its state is final, and restored memory can be read without
        # the lock and its modes.
        if not group.has_backward_begun or group.phase not in _SETTLED:
            with self._keeper:
                if group.phase is Phase.LOST:
                    raise _lost(group)
                if group.phase is not Phase.RECORDING:
                    self._reach(group)
        # The backward of this tensor may run on another stream than the backward of the group's first tensor.
        main_waits_for(group.ready, self.pool.device)

    def _reach_placed(self, group: GroupMemory, again: Callable[[Tensor], None] | None) -> None:
        """Makes the rows of a group that was computed in pages readable in its backward."""
        with self._keeper:
            if group.phase is Phase.LOST:
                raise _lost(group)
            following = None
            if self._begin_backward(group) and self._prefetches_from_host and self._part is None:
                event = self.order.adjacent_backward(StashEvent(EventKind.BACKWARD, *group.key))
                following = None if event is None else self._groups.get(event.group)
            if group.phase is Phase.KEPT:
                self._keeper.read_in_scratch(group)
                if following is not None:
                    self._keeper.prefetch(following)
            else:
                self._keeper.fetch(group, again, following=following)

    def _give_back(self, group: GroupMemory, *, is_weight_pass: bool = False) -> None:
        with self._keeper:
            if is_weight_pass and group.keeps_pages and group.generation == self._keeper.generation:
                self.order.observe(StashEvent(EventKind.WEIGHT, *group.key))
            self._keeper.give_back(group)
            group.placed = []

    def _read_first(self, group: GroupMemory) -> Tensor:
        with self._keeper:
            return self._keeper.restore_first(group)

    def _end_backward(self, group: GroupMemory) -> None:
        with self._keeper:
            self._keeper.end_backward(group)

    def _begin_backward(self, group: GroupMemory) -> bool:
        """Adds a backward to the step. Returns whether it is the first access to the group in a valid step."""
        is_first = not group.has_backward_begun and group.generation == self._keeper.generation
        group.has_backward_begun = True
        if is_first:
            self._keeper.join()  # as in _open: backward writes to memory that autograd released
            if self._part is None:
                self.order.observe(StashEvent(EventKind.BACKWARD, *group.key))
        return is_first

    def _reach(self, group: GroupMemory) -> None:
        """Restores a group whose backward has begun, and prefetches the groups that run backward next."""
        is_first = self._begin_backward(group)
        if group.phase is Phase.STASHED:
            self._keeper.start_restore(group, is_awaited=True)
        if is_first and self._part is None:
            # Launched before the main stream waits and recomputes dropped tensors, because these copies depend on
            # neither.
            backward = StashEvent(EventKind.BACKWARD, *group.key)
            self._prefetch(self.order.upcoming_backwards(backward, self._prefetch_groups))
        if group.phase is Phase.RESTORING:
            self._keeper.finish_restore(group)

    def _prefetch(self, events: list[StashEvent]) -> None:
        for event in events:
            group = self._groups.get(event.group)
            if group is not None and group.phase is Phase.STASHED and not self._keeper.is_computed(group):
                self._keeper.start_restore(group)


def _lost(group: GroupMemory) -> RuntimeError:
    return RuntimeError(
        f"cannot run backward of the expert group {group.event.name!r}: its forward raised an exception"
    )


class StashedRows:
    """The row tensors of one expert group, which its owner passes to `save` and reads back with `read`.

    If `place` returns pages, the owner computes the tensors in them. After `read` it calls `done`, and before that
    `add_reader` for each product that may read the rows later. The pages are released once all of these have ended.
    Pages with copies are released by `read`, unless the stash expects that weight gradients are computed later.

    Use it as a context manager around the group's forward: an exception marks the step as incomplete. No one may write
    to the tensors after `save`: copies into pages may still be reading them, and changes are not detected.
    """

    def __init__(self, stash: PagedStash, group: GroupMemory, num_rows: Tensor, *, max_rows: int) -> None:
        """Created by PagedStash.begin; num_rows: [1], int64, on the pool's device."""
        self._stash, self._group, self._num_rows, self._max_rows = stash, group, num_rows, max_rows
        self._kept: list[Tensor] = []
        self._restored: list[tuple[StorageView, RestoredBlock]] = []
        self._is_placed = False
        self._specs: Sequence[TensorSpec] = ()
        self._recompute: Callable[..., None] | None = None
        self._num_readers = 0
        # The graph task of the backward that reads the rows.
        self._backward = -1
        # Describes the first saved tensor, if the group keeps its pages.
        self._first: StorageView | None = None
        self._is_saved = False
        # Whether `save` accepts a recomputation of gate_up, which then requires bit-identical kernels.
        self.may_recompute = stash.has_rungs

    def place(
        self, widths: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype]
    ) -> tuple[PagedRows, PagedRows] | None:
        """Allocates pages for x and gate_up, [C, W] each; call it before their forward.

        widths, dtypes: W and dtype of both. Returns None if the caller must compute in memory of its own: the stash
        copies rows, or the group's backward follows immediately, in another captured graph. Rows that receive no pages,
        or pages on the host, are computed in a scratch that the next group overwrites: `save` copies them to the host,
        gate_up without pages is computed again by `recompute`, and x without pages discards the step.
        """
        group = self._group
        # The scratch may be overwritten between two graphs, if the step departs from its order.
        if not self._stash.computes_in_pages or (group.phase is Phase.KEPT and self._stash.is_capturing_part):
            return None
        itemsizes = dtypes[0].itemsize, dtypes[1].itemsize
        self._specs = _placed_specs(*widths, *itemsizes, self._max_rows, may_recompute=self.may_recompute)
        x, gate_up = self._stash._place(group, self._specs, dtypes, num_rows=self._num_rows, max_rows=self._max_rows)
        group.placed, self._is_placed = [x, gate_up], True
        return x, gate_up

    def save(
        self, inputs: Sequence[Rows], gate_up: Rows, *, recompute: Callable[..., None] | None, num_sources: int
    ) -> None:
        """Stores the live rows of tensors; call it once, at the end of the group's forward.

        inputs: [C] or [C, W], any dtype, and gate_up: [C, W], all contiguous and at the start of their storage; or the
        result of `place`. recompute: writes the live rows of gate_up again, as in StashGroup.mark, with
        the first num_sources inputs as sources; None stores gate_up like an input. Raises ValueError for other tensors,
        and RuntimeError in a second call.
        """
        if self._is_saved:
            raise RuntimeError(f"{self._group.event.name!r}: rows were saved already; call begin once for each forward")
        if self._is_placed:
            if list(map(id, (*inputs, gate_up))) != list(map(id, self._group.placed)):
                raise ValueError(
                    f"{self._group.event.name!r} was placed in pages: save must receive what place returned"
                )
            self._recompute, self._is_saved = recompute, True
            self._stash._placed(
                self._group, self._specs, num_rows=self._num_rows, max_rows=self._max_rows, kept=recompute
            )
            return
        stash, group, tensors = self._stash, self._group, [memory_of(one) for one in (*inputs, gate_up)]
        stored, views = NOTHING, [StorageView.of(tensor) for tensor in tensors]
        for view, tensor in zip(views, tensors):
            if view.offset or not view.size or view.size[0] != self._max_rows or not tensor.is_contiguous():
                raise ValueError(
                    f"a tensor has shape {list(view.size)}, strides {view.stride} and offset {view.offset}: must be "
                    f"contiguous, with offset 0 and max_rows ({self._max_rows}) rows"
                )
        self._is_saved = True
        group.keeps_pages = stash.order.is_late(group.event)
        if group.phase is Phase.RECORDING or stash.dtype is not None:
            blocks = [Block.whole(tensor) for tensor in tensors]
            for block, tensor in zip(blocks, tensors) if stash.dtype is not None else ():
                block.encode_if_smaller(tensor.dtype)
            # Without encoded rows, the host needs no call for each block.
            specs = [
                row_spec(block.stored_bytes if block.encoded_width else block.end, self._max_rows) for block in blocks
            ]
            recomputations, last = [], len(inputs)
            if recompute is not None and stash.dtype is None:
                if not 0 < num_sources <= last:
                    raise ValueError(f"num_sources ({num_sources}) must be 1 to {last}, the number of inputs")
                specs[-1] = row_spec(blocks[-1].end, self._max_rows, Priority.GATE_UP)
                sources = tuple(enumerate(views[:num_sources]))
                recomputations = [Recomputation(last, Priority.GATE_UP, recompute, views[-1], sources)]
            stored = StoredRows(blocks, specs, recomputations)
        memories = stash._commit(group, stored, num_rows=self._num_rows, max_rows=self._max_rows, may_change=False)
        if memories:
            self._restored = list(zip(views, memories))
        else:
            self._kept = tensors

    def read(self, *, keep: bool) -> list[Rows]:
        """Returns the tensors that were passed to `save`, [C, *], any dtype, gate_up last.

        Rows beyond the live ones are undefined. Call it once in each backward. keep: whether another backward follows,
        for which rows in pages are not kept. Raises RuntimeError if the previous call did not keep them, or if the rows
        were still in pages at a reset.
        """
        if not self._is_saved:
            raise RuntimeError(f"{self._group.event.name!r}: rows were not saved; call save in forward")
        if self._is_placed:
            if self._group.phase is Phase.READY:
                raise RuntimeError(
                    f"cannot run backward of the expert group {self._group.event.name!r} a second time: the first has "
                    "released its pages; run with --moe-paged-stash-compute copies (from Python: "
                    "computes_in_pages=False), or run the forward again"
                )
            again = None if self._recompute is None else partial(_recompute_placed, self._group, self._recompute)
            self._stash._reach_placed(self._group, again)
            self._recompute, self._num_readers, self._backward = None, 1, current_backward_id()
            return [*self._group.placed]
        require_kept(self._kept or self._restored)
        self._stash._settle(self._group)
        tensors = self._kept or [view.over(memory.bytes, memory.first_byte) for view, memory in self._restored]
        if not keep:
            if self._group.keeps_pages and self._restored:
                # The backward that runs is the first reader, until it calls `done`.
                self._num_readers, self._backward = 1, current_backward_id()
                self._first = self._restored[0][0]
            self._kept, self._restored = [], []
        return [*tensors]

    def add_reader(self) -> "RowsReader | None":
        """Adds a product that reads the first saved tensor, possibly after `done`; None if its pages were released."""
        if not self._num_readers:
            return None
        self._num_readers += 1
        return RowsReader(self)

    def _reads_again(self) -> bool:
        return self._stash._keeper.reads_again(self._group)

    def _read_again(self) -> Tensor:
        """Copies the first tensor that `save` received back from its pages once more."""
        memory = self._stash._read_first(self._group)
        if self._first is not None:
            return self._first.over(memory, self._group.places[0].first_byte)
        rows = self._group.placed[0]
        return memory.view(rows.dtype)[: rows.max_rows * rows.width].view(rows.shape)

    def done(self, *, has_failed: bool = False) -> None:
        """Ends a backward. Pages that it has not released are released once all of their readers have ended.

        has_failed: whether an exception ended it. The pages are then released immediately.
        """
        if not self._num_readers:
            return
        self._num_readers = 0 if has_failed else self._num_readers - 1
        if self._num_readers:
            if self._is_placed:
                self._stash._end_backward(self._group)
        else:
            self._stash._give_back(self._group)

    def _end_reader(self) -> None:
        if self._num_readers:
            self._num_readers -= 1
            if not self._num_readers:
                # A schedule may compute weight gradients in a later backward.
                self._stash._give_back(self._group, is_weight_pass=current_backward_id() != self._backward)

    def _check_readable(self) -> None:
        self._stash._keeper.check_readable(self._group)

    def _can_be_deferred(self) -> bool:
        # Rows that were copied back are in memory of their own.
        return not self._is_placed or self._stash._keeper.keeps_for_readers(self._group)

    def __enter__(self) -> "StashedRows":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is not None:
            self._stash._spoil()


class RowsReader:
    """A product that reads rows in pages once, possibly after the backward of their group."""

    def __init__(self, rows: StashedRows) -> None:
        """Created by StashedRows.add_reader."""
        self._rows: StashedRows | None = rows

    @property
    def reads_again(self) -> bool:
        """Whether a product of a later backward must call `restored` instead of reading the rows where they are."""
        return self._rows is not None and self._rows._reads_again()

    @property
    def can_be_deferred(self) -> bool:
        """Whether the product may read the rows after other groups have computed."""
        return self._rows is not None and self._rows._can_be_deferred()

    def restored(self) -> Tensor:
        """Copies the first tensor that was saved from its pages: [C, W], any dtype, in memory of its own."""
        assert self._rows is not None, "a product reads its rows once"
        return self._rows._read_again()

    def kept(self, rows: Rows) -> "tuple[Rows, RowsReader | None]":
        """Returns the rows, [C, W], any dtype, and their reader, for a product of a later backward.

        Rows whose pages other groups will overwrite are copied, and then need no reader.
        """
        assert type(rows) is PagedRows, "copies of rows are read again"
        if self.can_be_deferred:
            return rows, self
        self.begin()
        copied = rows.copied()
        self.end()
        return copied, None

    def begin(self) -> None:
        """Raises RuntimeError if the rows are no longer in their pages."""
        if self._rows is None:
            raise RuntimeError("rows in pages are read by each product once: their pages may have been released since")
        self._rows._check_readable()

    def end(self) -> None:
        """Records that the product has read the rows."""
        rows, self._rows = self._rows, None
        if rows is not None:
            rows._end_reader()


# Typed, so that an invalid width is not taken for an equal valid one.
@lru_cache(_KNOWN_SIZES, typed=True)
def _placed_specs(
    x: int, gate_up: int, x_itemsize: int, gate_up_itemsize: int, max_rows: int, *, may_recompute: bool
) -> tuple[TensorSpec, TensorSpec]:
    """Returns the specs of x and gate_up, whose rows have these numbers of elements."""
    for width in (x, gate_up):
        if not is_whole(width) or width < 1:
            raise ValueError(
                f"widths ({x}, {gate_up}) must be integers of at least 1: the elements of a row of x and gate_up"
            )
    droppable = Priority.GATE_UP if may_recompute else Priority.INPUT
    return row_spec(x * x_itemsize, max_rows), row_spec(gate_up * gate_up_itemsize, max_rows, droppable)


def _recompute_placed(group: GroupMemory, recompute: Callable[..., None], needed: Tensor) -> None:
    x, gate_up = group.placed
    recompute(gate_up, needed, x)


def _is_recomputed(hooks: Hooks | None) -> bool:
    """Returns whether this forward is a recomputation, or will be recomputed, so that nothing must be stashed."""
    if hooks is not None and isinstance(hooks[0], FunctionType) and hooks[0].__module__ == "torch.utils.checkpoint":
        return True
    return current_backward_id() != -1


def _unbound(kind: type[PagedStash], make_pool: Callable[[], PagePool], settings: dict[str, Any]) -> PagedStash:
    """Builds a copy of a stash whose pool is not allocated yet."""
    copy = kind.__new__(kind)
    copy.__dict__["_unbound"] = make_pool, settings
    return copy


def _check_count(num_rows: Tensor | int, max_rows: int, *, device: torch.device | None) -> None:
    """Raises ValueError for an invalid num_rows or max_rows. device: required device of a tensor; None accepts any."""
    if not is_whole(max_rows) or max_rows < 0:
        raise ValueError(f"max_rows ({max_rows!r}) must be an integer of at least 0")
    if isinstance(num_rows, Tensor):
        is_elsewhere = device is not None and num_rows.device != device
        if num_rows.numel() != 1 or num_rows.dtype not in (torch.int64, torch.int32) or is_elsewhere:
            found = f"{list(num_rows.shape)}, {num_rows.dtype}, on {num_rows.device}"
            raise ValueError(f"num_rows ({found}) must be one int64 or int32 element on {device or 'the device'}")
    elif not is_whole(num_rows) or not 0 <= num_rows <= max_rows:
        raise ValueError(f"num_rows ({num_rows!r}) must be an integer between 0 and max_rows ({max_rows})")


def _count_tensor(num_rows: Tensor | int, device: torch.device) -> Tensor:
    """Copies num_rows into a new tensor, [1], int64.

    The caller may change the original before the stash stream has read it.
    """
    if isinstance(num_rows, Tensor):
        return num_rows.detach().to(torch.int64, copy=True).reshape(1)
    return torch.full((1,), num_rows, dtype=torch.int64, device=device)


# The reserve for x.


class Reserve:
    """Pages for x: the numbers of pages that gate_up and act must leave free in each forward of a step, on the device.

    If the pool is large enough for every x, gate_up and act never occupy pages that x needs.

    With share 1:
    1. If the order of a step and the sizes of its groups are known, the guarantees of reserve_table hold.
    2. If some sizes are still unknown, as in the first step of a given order, groups that have not run are assumed to
       be as large as the largest known group. Every x receives pages unless a group turns out larger. gate_up may be
       dropped before act.
    3. If the order is unknown, gate_up and act receive no pages.

    A step that departs from its order is in case 3 from then on. Pages that gate_up and act already have are kept.

    With a smaller share, every group is assumed to have exactly that share of max_rows, including open groups, whose
    pages will be released. If the assumption is wrong, x may run out of pages. With share 0 nothing is reserved.
    """

    def __init__(self, layout: PoolLayout, device: torch.device, *, share: float) -> None:
        self._layout, self._share = layout, share
        self._stashed: dict[GroupKey, tuple[Sequence[TensorSpec], int]] = {}  # specs and max_rows of each group
        self._pages: dict[GroupKey, PagesByPriority] = {}  # upper bound for each group
        self._droppable: set[str] = set()  # names of groups with gate_up or act
        self._events: tuple[StashEvent, ...] = ()
        self._starts: list[int] = []  # positions of forwards in events
        self._resident: set[GroupKey] = set()
        self._table: list[ReserveRow] = []
        self._pages_of_table: dict[GroupKey, PagesByPriority] = {}
        self._is_written = False  # whether _rows contains the whole table
        # Persistent memory, because a CUDA graph may read it.
        self._rows = torch.zeros(0, len(Priority), dtype=torch.int64, device=device)
        self._inputs_alone = torch.tensor([0, _NEVER_FREE, _NEVER_FREE], dtype=torch.int64, device=device)

    def begin_step(self, events: tuple[StashEvent, ...]) -> None:
        """Prepares the reserve of the next step. Allocates only if the number of forwards changed.

        events: expected events of the step; () if they are unknown.
        """
        if events is not self._events:
            self._events, self._resident = events, resident_groups(events)
            self._starts = [place for place, event in enumerate(events) if event.kind is EventKind.FORWARD]
            self._pages_of_table, self._is_written = {}, False
            if len(self._rows) != len(self._starts):
                self._rows = self._rows.new_zeros(len(self._starts), len(Priority))
        if self._is_written and self._pages_of_table == self._pages:
            return
        self._is_written = bool(self._droppable) and self._all_known()
        if self._is_written and self._starts:
            self._rows.copy_(torch.tensor(self._up_to_date_table(), dtype=torch.int64, device="cpu"))

    def learn(self, group: GroupKey, specs: Sequence[TensorSpec], *, max_rows: int) -> None:
        """Records the sizes of the tensors that a group stashes. Empty specs do not replace recorded sizes."""
        if specs or group not in self._pages:
            self._stashed[group] = specs, max_rows
            self._pages[group] = self._pages_of_share(group)
        if any(spec.priority is not Priority.INPUT for spec in specs):
            self._droppable.add(group[0])

    def knows(self, group: GroupKey, specs: Sequence[TensorSpec], *, max_rows: int) -> bool:
        """Returns whether `learn` with these arguments would change nothing."""
        return self._stashed.get(group) == (specs, max_rows)

    def forget_others(self, groups: set[GroupKey]) -> None:
        """Drops the records of all groups that are not in `groups`. Call it before begin_step."""
        if self._pages.keys() <= groups:
            return
        self._stashed = {group: stashed for group, stashed in self._stashed.items() if group in groups}
        self._pages = {group: pages for group, pages in self._pages.items() if group in groups}
        self._droppable &= {name for name, _ in groups}

    @property
    def share(self) -> float:
        """Share of max_rows for which pages are reserved."""
        return self._share

    def set_share(self, share: float) -> None:
        """Sets the reserved share from the next begin_step on. The rows keep their memory address."""
        before = self._pages, self._share < 1
        self._share = share
        self._pages = {group: self._pages_of_share(group) for group in self._stashed}
        if (self._pages, share < 1) == before:
            return
        # Not written here, because copies of the ending step may still be reading the rows.
        self._pages_of_table, self._is_written = {}, False

    def row(self, group: GroupKey, forward_index: int | None) -> Tensor | None:
        """Returns the pages that a group's plan must leave free: [3], int64, on the device; None for no reserve.

        forward_index: index among the forwards of the step's events, from 0; None if it is unknown.
        """
        if not self._share:
            return None
        if group not in self._pages:
            return self._inputs_alone
        if group[0] not in self._droppable:
            return None
        if forward_index is None or forward_index >= len(self._rows):
            return self._inputs_alone
        if not self._is_written:
            row = self._up_to_date_table()[forward_index] if self._all_known() else self._guess(forward_index)
            for priority, num_pages in enumerate(row):
                # A copy from the host would wait for the device or require pinned memory.
                self._rows[forward_index, priority].fill_(num_pages)
        return self._rows[forward_index]

    @property
    def table(self) -> tuple[ReserveRow, ...]:
        """Pages to leave free in each forward of the step; () if nothing is reserved or known yet."""
        return tuple(self._table) if self._is_written and self._share else ()

    def _pages_of_share(self, group: GroupKey) -> PagesByPriority:
        specs, max_rows = self._stashed[group]
        return pages_for(specs, int(max_rows * self._share), layout=self._layout)

    def _all_known(self) -> bool:
        stashed = (self._events[place] for place in self._starts if self._events[place].group not in self._resident)
        return all(event.group in self._pages for event in stashed)

    def _up_to_date_table(self) -> list[ReserveRow]:
        if self._pages_of_table != self._pages:
            # Share 1 assumes nothing about pages that open groups will release, because their number is uncertain.
            at_least = self._most if self._share < 1 else None
            self._table = reserve_table(self._events, self._most, at_least=at_least)
            self._pages_of_table = dict(self._pages)
        return self._table

    def _guess(self, forward_index: int) -> ReserveRow:
        """Returns the peak page counts of the rest of the step, as a reserve row.

        Assumes that unknown groups are as large as the largest known group. The cost is linear in the number of later
        events.
        """
        largest = PagesByPriority(*map(max, zip(*self._pages.values())))
        later = self._events[self._starts[forward_index] + 1 :]

        def most(group: GroupKey) -> PagesByPriority:
            return self._most(group) if group in self._pages or group in self._resident else largest

        for_gate_up, for_act = (peak_pages(later, most, up_to=kept) for kept in (Priority.INPUT, Priority.GATE_UP))
        return 0, for_gate_up, for_act

    def _most(self, group: GroupKey) -> PagesByPriority:
        return PagesByPriority() if group in self._resident else self._pages[group]
