"""PagedStash: the contexts that expert groups run in, and the order of a step.

saved_tensors.py decides which tensors a context stashes, and group_memory.py moves them into pages and back.

    stash = PagedStash(PagePool(device, PoolLayout(page_bytes=65536, device_pages=4096)))
    for batch in batches:
        ...                                # the forward of every expert layer does this:
            with stash.context(f"layer {number}", num_rows, max_rows=C):
                y = experts(x)             # x: [C, H], of which num_rows rows are live
        loss.backward()
        void = stash.is_void_sync()        # too few pages even for x: these gradients are wrong
        stash.reset()
        if not void:
            optimizer.step()

[Note: captured parts] A CUDA graph may hold the forward of a single layer, and another one its backward. During capture
a context runs once as usual: the forward's graph plans and fills pages at its end, and the backward's graph restores
the rows and releases the pages. Replays run none of this code. A captured group therefore has its own entries in the
page tables. The number of pages to leave free depends on the group's position in the step, so it is read from memory
that the host writes before each replay. Decisions that are the same in each step are part of the graph: whether the
group is stashed, or kept because its backward is the next event. No prefetch crosses graphs. Within each graph the side
streams fork from the main stream and join it again, so that a replay is one unit of work on the main stream.
"""

import weakref
from collections import Counter as Multiset
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.arithmetic import Footprint, ReserveRow, footprint, resident_groups
from megatron.core.transformer.moe.paged_stash.group_memory import (
    GroupMemory,
    PageKeeper,
    Phase,
    StashStreams,
    main_waits_for,
    tensor_of,
)
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec, is_whole
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.reserve import Reserve
from megatron.core.transformer.moe.paged_stash.saved_tensors import (
    Block,
    Hooks,
    RowTensors,
    SavedTensor,
    StashGroup,
    outer_hooks,
)
from megatron.core.transformer.moe.paged_stash.stash_order import (
    MAX_EVENTS,
    EventKind,
    GroupKey,
    StashEvent,
    StashOrder,
)

# After this many forwards without a reset, names, sizes and order of further ones are not recorded.
_MAX_FORWARDS = MAX_EVENTS // 2
# Final phases, reached once backward has begun.
_SETTLED = (Phase.KEPT, Phase.READY)


@dataclass(frozen=True)
class CapturedGroup:
    """Expert group in a captured part.

    specs: empty for a group that is not stashed. kept: objects that must live as long as the graphs.
    """

    name: str
    specs: Sequence[TensorSpec] = ()
    max_rows: int = 0
    kept: tuple[Any, ...] = ()


@dataclass(eq=False)
class CapturedPart:
    """Part of a layer that CUDA graphs capture. Must live as long as the graphs.

    reserve: [3], int64, on the device: pages that the group's plan leaves free. group: None until it is captured.
    """

    reserve: Tensor
    group: CapturedGroup | None = None


@dataclass(frozen=True)
class ReplayedForward:
    """Forward that a graph has run, for its backward. generation: number of resets of the stash before it."""

    event: StashEvent
    generation: int


class PagedStash:
    """Keeps the live rows that expert groups save for backward in pages. Gradients remain bit-identical.

    1. A context collects the tensors that autograd saves. At its end the live rows of row tensors are copied into
       pages, and the oversized memory is freed once the next context begins.
    2. When backward accesses the first tensor of a group, the group's rows are restored with their strides and address
       alignment, and the rows of the next groups are prefetched.
    3. Marked tensors without pages are recomputed. If an x got no pages, the step is discarded (stash overflow).
    4. `reset` between steps frees all pages and learns the order of the step for the next one.

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
        specs: Sequence[TensorSpec] = (),
        streams: StashStreams | None = None,
    ) -> None:
        """Creates a stash over a pool.

        prefetch_groups: number of groups whose rows are restored ahead of their backward, each into buffers of max_rows
        rows. events: order of a step; learned if not given. num_programs: most programs of a copy that runs
        concurrently with other kernels on a GPU, such as copy_programs(); 0 means no limit. reserved_share: rows of
        later groups for which pages are reserved before gate_up and act get any, as a share of max_rows. Share 1
        guarantees that x finds pages in a pool that could hold every x, in each step that follows its order or has
        none. Smaller shares guarantee nothing, and 0 reserves nothing; see Reserve. has_rungs: whether gate_up and act
        have recompute levels, i.e. are dropped and recomputed if pages run out; otherwise they are as important as x.
        specs: sizes that each group of `events` stashes, if they are known before the first step. streams: the streams
        of the stash that this one replaces, on the pool's device; None creates new streams. Raises ValueError for other
        values.
        """
        for argument, number in (("prefetch_groups", prefetch_groups), ("num_programs", num_programs)):
            if not is_whole(number) or number < 0:
                raise ValueError(f"{argument} ({number!r}) must be an integer of at least 0")
        if not isinstance(reserved_share, int | float) or not 0.0 <= reserved_share <= 1.0:
            raise ValueError(f"reserved_share ({reserved_share!r}) must be a number between 0 and 1")
        kinds = (("pool", (pool,), PagePool), ("events", events or (), StashEvent), ("specs", specs, TensorSpec))
        for argument, values, kind in kinds:
            wrong = next((value for value in values if not isinstance(value, kind)), None)
            if wrong is not None:
                raise ValueError(f"{argument} has a {type(wrong).__name__} ({wrong!r}): must be {kind.__name__}")
        self._settings = {
            "prefetch_groups": prefetch_groups,
            "events": None if events is None else tuple(events),
            "num_programs": num_programs,
            "has_rungs": has_rungs,
            "specs": tuple(specs),
        }
        self.pool, self.order = pool, StashOrder(events)
        self._prefetch_groups, self._has_rungs = prefetch_groups, has_rungs
        self._keeper = PageKeeper(pool, num_programs=num_programs, streams=streams or StashStreams.on(pool.device))
        self._instances: Multiset[str] = Multiset()  # number of forwards so far in this step, by name
        self._num_forwards = 0  # so far in this step
        self._groups: weakref.WeakValueDictionary[GroupKey, GroupMemory] = weakref.WeakValueDictionary()
        self._max_bytes: dict[GroupKey, int] = {}  # size of the buffers that hold a group's rows
        self._part: CapturedPart | None = None  # part whose forward or backward is being captured
        self._is_enabled = True
        self._is_spoiled = False  # whether an exception ended a context of this step
        with self._keeper.exclusive():  # independent of the caller's grad mode
            self._reserve = Reserve(pool.layout, pool.device, share=reserved_share)
            if specs:
                for group in {event.group for event in self.order.events} - resident_groups(self.order.events):
                    self._reserve.learn(group, specs, max_rows=min(spec.max_tokens for spec in specs))
            self._reserve.begin_step(self.order.events)

    def __reduce__(self) -> Any:
        """Gives a copy, by deepcopy or pickle, only the settings; its own pool is allocated on first use.

        The copy shares no page, order or group with this stash. A copy that is not trained, such as an average of
        weights, takes no memory.
        """
        if "_unbound" in self.__dict__:
            return _unbound, (type(self), *self.__dict__["_unbound"])
        settings = {**self._settings, "reserved_share": self.reserved_share}
        return _unbound, (type(self), str(self.pool.device), self.pool.layout, settings)

    def __getattr__(self, name: str) -> Any:
        """Allocates the pool of a copy when the copy is first used."""
        if "_unbound" not in self.__dict__ or name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        device, layout, settings = self.__dict__["_unbound"]
        pool = PagePool(device, layout)
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
        """Wraps the forward of one expert group with max_rows rows, of which the first num_rows are live.

        num_rows: [1] or scalar, int64 or int32, on the pool's device, read when the context ends; or an int.
        backward_is_next: stashes nothing, because nothing else runs before this group's backward. takes: the rule for
        which saved tensors are rows; without declarations they are guessed, see [Note: guessed rows]. The context is
        inactive without grad mode, in a recomputation (while backward runs), directly inside torch.utils.checkpoint,
        which saves nothing, in a step that `reset` disabled, and with max_rows below 2. Hooks around the context
        receive weights and saved tensors without max_rows rows. Raises ValueError for a wrong num_rows or max_rows, if
        no saved tensor has rows, and if one of them may be a weight.
        """
        if "_unbound" in self.__dict__ and not torch.is_grad_enabled():
            # Checked before any attribute is read, which would allocate the pool of a copy.
            _check_count(num_rows, max_rows, device=None)
            yield StashGroup(torch.device("cpu"), max_rows, group=None, hooks=None)
            return
        _check_count(num_rows, max_rows, device=self.pool.device)
        if not isinstance(takes, RowTensors):
            raise ValueError(f"takes ({takes!r}) must be one of {', '.join(map(str, RowTensors))}")
        with self._keeper.exclusive():
            # The next kernels may write to memory that the copies of the previous group still read: all layers share
            # the buffers of a static dispatch, and the allocator reuses memory that autograd released.
            self._keeper.join()
        hooks = outer_hooks()
        if not self._is_enabled or not torch.is_grad_enabled() or _is_recomputed(hooks) or max_rows < 2:
            yield StashGroup(self.pool.device, max_rows, group=None, hooks=None)
            return
        group = self._begin(name, backward_is_next=backward_is_next)
        recording = StashGroup(
            self.pool.device,
            max_rows,
            group=group,
            hooks=hooks,
            takes_rows=group.phase is Phase.RECORDING,
            has_rungs=self._has_rungs,
            takes=takes,
        )
        try:
            with torch.autograd.graph.saved_tensors_hooks(recording.pack, self._unpack):
                yield recording
            if recording.has_saved:
                self._commit(group, recording, num_rows=num_rows, max_rows=max_rows)
        finally:
            if group.phase is Phase.RECORDING and recording.has_saved:
                group.phase, self._is_spoiled = Phase.LOST, self._is_spoiled or self._part is None
                recording.forget()
            recording.close()

    def reset(self, *, enabled: bool = True) -> None:
        """Frees all pages and clears the counters. Call it between steps, after the last backward or an exception.

        Rows that are still in pages are lost, and their backward raises RuntimeError. Restored rows stay valid.
        enabled: False disables the contexts of the next step.
        """
        with self._keeper.exclusive():
            is_complete = not any(self._keeper.is_waiting(group) for group in self._groups.values())
            self._keeper.reset()
            if is_complete and not self._is_spoiled:
                self.order.finish_step()
            else:
                self.order.abandon_step()
            self._groups, self._instances = weakref.WeakValueDictionary(), Multiset()
            self._num_forwards, self._is_spoiled = 0, False
            known = {event.group for event in self.order.events}
            # Names may be new in each step. Records of names that are not in the list are no longer needed.
            self._max_bytes = {group: num_bytes for group, num_bytes in self._max_bytes.items() if group in known}
            self._reserve.forget_others(known)
            self._reserve.begin_step(self.order.events)
            self._is_enabled = enabled

    def footprint(self) -> Footprint:
        """Returns the device bytes of a step like the last complete one, with and without the stash; zeros before it.

        The stash costs memory if the pool is too large for the step, or the step has few groups.
        """
        max_bytes = self._max_bytes
        return footprint(
            self.order.events,
            lambda group: max_bytes.get(group, 0),
            layout=self.pool.layout,
            prefetch_groups=self._prefetch_groups,
        )

    @property
    def reserve(self) -> tuple[ReserveRow, ...]:
        """Pages that each forward of the step leaves free, in the form that arithmetic.simulate takes; () without a
        reserve.
        """
        return self._reserve.table

    @property
    def reserved_share(self) -> float:
        """Rows of later groups for which pages are reserved, as a share of max_rows."""
        return self._reserve.share

    def set_reserved_share(self, share: float) -> None:
        """Makes later steps reserve pages for this share of max_rows. Call it between steps, before `reset`.

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
            with self._keeper.exclusive():
                self._reserve.set_share(share)

    @property
    def streams(self) -> StashStreams:
        """The streams of copies into and out of pages."""
        return self._keeper.streams

    def join(self) -> None:
        """Makes the main stream wait for all copies, as `reset` also does."""
        with self._keeper.exclusive():
            self._keeper.join_all()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Wraps whole steps, or passes of them, that a CUDA graph captures after a reset, together with their copies.

        A replay must also follow a reset, and requires only this object's memory.
        """
        with self._keeper.exclusive():
            # At its end a capture must join all streams that took part, and it cannot join others.
            self._keeper.fork()
        try:
            yield
            self.join()
        finally:
            with self._keeper.exclusive():
                # Their events belong to the graph. Nothing outside may wait for them, as releasing pages would.
                self._keeper.forget_groups()

    def new_part(self) -> CapturedPart:
        """Creates the record of a part of a layer that is about to be captured."""
        return CapturedPart(torch.zeros(len(Priority), dtype=torch.int64, device=self.pool.device))

    @contextmanager
    def capturing(self, part: CapturedPart) -> Iterator[None]:
        """Wraps the forward of a part of a layer, and later its backward, each captured as a separate graph.

        See [Note: captured parts]. The order of the step does not change here; `replaying` and `replaying_backward`
        update it. Call `join` before each capture and replay, because copies of eager groups may still run. Not run on
        a GPU yet.
        """
        with self._keeper.exclusive():
            self._keeper.fork()
        self._part = part
        try:
            yield
            self.join()
        finally:
            self._part = None
            with self._keeper.exclusive():
                self._keeper.forget_copies()

    def replaying(self, part: CapturedPart) -> ReplayedForward | None:
        """Records the upcoming replay of the part's forward, on this stash or another one over the same pool."""
        group = part.group
        if group is None:
            return None
        with self._keeper.exclusive():
            event = self._next_forward(group.name)
            self._count_forward(group.name)
            if group.specs:
                self._learn(event, group.specs, max_rows=group.max_rows)
                row = self._reserve_of(event)
                if row is not None:
                    part.reserve.copy_(row)
            self.order.observe(event)
            return ReplayedForward(event, self._keeper.generation)

    def replaying_backward(self, forward: ReplayedForward) -> None:
        """Records the upcoming replay of that forward's backward. Raises RuntimeError if a reset came in between."""
        with self._keeper.exclusive():
            self._keeper.check_current(forward.event, forward.generation)
            self.order.observe(StashEvent(EventKind.BACKWARD, *forward.event.group))

    @property
    def void(self) -> Tensor:
        """Greater than 0 if this step's gradients are wrong (stash overflow): scalar, int64, on the device.

        It is a view that `reset` clears.
        """
        with self._keeper.exclusive():
            self._keeper.join()
        return self.pool.counters[Counter.VOID]

    def is_void_sync(self) -> bool:
        """Returns whether this step's gradients are wrong (stash overflow). NOTE: waits for the device."""
        return bool(self.void.item())

    def _begin(self, name: str, *, backward_is_next: bool) -> GroupMemory:
        with self._keeper.exclusive():
            event = self._next_forward(name)
            if self._part is None:
                self._count_forward(name)
            group = GroupMemory(event, self._keeper.generation)
            if backward_is_next:
                self._reserve.learn(event.group, [], max_rows=0)
            if backward_is_next or self.order.is_backward_next(event):
                group.phase = Phase.KEPT
            return group

    def _commit(self, group: GroupMemory, recording: StashGroup, *, num_rows: Tensor | int, max_rows: int) -> None:
        with self._keeper.exclusive():
            blocks = recording.blocks() if group.phase is Phase.RECORDING else []
            if self._part is not None:
                self._capture(self._part, group, blocks=blocks, num_rows=num_rows, max_rows=max_rows)
                return
            if group.phase is Phase.RECORDING:
                self._learn(group.event, [block.spec for block in blocks], max_rows=max_rows)
                if blocks:
                    count = _count_tensor(num_rows, self.pool.device)
                    self._keeper.stash(group, blocks, num_rows=count, reserve=self._reserve_of(group.event))
                else:
                    group.phase = Phase.KEPT
            if group.phase is Phase.KEPT:
                self._check_kept(num_rows, max_rows=max_rows)
            self.order.observe(group.event)
            self._groups[group.event.group] = group

    def _check_kept(self, num_rows: Tensor | int, *, max_rows: int) -> None:
        """Discards the step if a group without pages has a wrong number of rows; an int was checked already."""
        if isinstance(num_rows, Tensor):
            # Runs on the main stream, which waited for all plans when the context began.
            self.pool.check_count(_count_tensor(num_rows, self.pool.device), max_rows)

    def _capture(
        self, part: CapturedPart, group: GroupMemory, *, blocks: list[Block], num_rows: Tensor | int, max_rows: int
    ) -> None:
        """Commits a group that a CUDA graph captures; see _commit."""
        name, specs = group.event.name, [block.spec for block in blocks]
        if part.group is not None:
            raise RuntimeError(
                f"{part.group.name} and {name} are in one captured part: a graph can hold only one expert group"
            )
        part.group = CapturedGroup(name)
        if not blocks:
            group.phase = Phase.KEPT
            self._check_kept(num_rows, max_rows=max_rows)
            return
        count = _count_tensor(num_rows, self.pool.device)
        self._keeper.stash(group, blocks, num_rows=count, reserve=part.reserve, is_captured=True)
        # Recomputations of dropped tensors may read other tensors that the forward created.
        part.group = CapturedGroup(name, specs, max_rows, (group.pages, *group.recomputations))

    def _next_forward(self, name: str) -> StashEvent:
        is_counted = self._num_forwards < _MAX_FORWARDS
        return StashEvent(EventKind.FORWARD, name, self._instances[name] if is_counted else self._num_forwards)

    def _count_forward(self, name: str) -> None:
        if self._num_forwards < _MAX_FORWARDS:
            self._instances[name] += 1
        self._num_forwards += 1

    def _learn(self, event: StashEvent, specs: Sequence[TensorSpec], *, max_rows: int) -> None:
        if self._num_forwards > _MAX_FORWARDS:
            return
        self._reserve.learn(event.group, specs, max_rows=max_rows)
        self._max_bytes[event.group] = sum(spec.max_bytes for spec in specs)

    def _reserve_of(self, event: StashEvent) -> Tensor | None:
        """Returns the pages that the next event's plan leaves free: [3], int64, on the device, or None."""
        return self._reserve.row(event.group, self.order.forward_index(event))

    def _unpack(self, saved: SavedTensor) -> Tensor:
        group: GroupMemory = saved.group
        # A group has many tensors. After the first access its state is final, and restored memory can be read without
        # the lock and its modes.
        if not group.has_backward_begun or group.phase not in _SETTLED:
            with self._keeper.exclusive():
                if group.phase is Phase.LOST:
                    raise RuntimeError(
                        f"backward of the expert group {group.event.name!r}, whose forward raised an exception"
                    )
                if group.phase is not Phase.RECORDING:
                    self._reach(group)
        if saved.memory is None:
            return saved.kept()
        # The backward of this tensor may run on another stream than the backward of the group's first tensor.
        main_waits_for(group.ready, self.pool.device)
        return tensor_of(saved)

    def _reach(self, group: GroupMemory) -> None:
        """Restores a group whose backward has begun, and starts restoring the groups after it."""
        is_first = not group.has_backward_begun and group.generation == self._keeper.generation
        group.has_backward_begun = True
        backward = StashEvent(EventKind.BACKWARD, *group.event.group)
        if is_first:
            self._keeper.join()  # as in context(): backward writes to memory that autograd released
            if self._part is None:
                self.order.observe(backward)
        if group.phase is Phase.STASHED:
            self._keeper.start_restore(group, is_awaited=True)
        if is_first and self._part is None:
            # Launched before the main stream waits and recomputes dropped tensors, because these copies depend on
            # neither.
            self._prefetch(self.order.upcoming_backwards(backward, self._prefetch_groups))
        if group.phase is Phase.RESTORING:
            self._keeper.finish_restore(group)

    def _prefetch(self, events: list[StashEvent]) -> None:
        for event in events:
            group = self._groups.get(event.group)
            if group is not None and group.phase is Phase.STASHED:
                self._keeper.start_restore(group)


def _is_recomputed(hooks: Hooks | None) -> bool:
    """Returns whether backward will rerun or is rerunning this code, so that its saved tensors are not kept."""
    if hooks is not None and isinstance(hooks[0], FunctionType) and hooks[0].__module__ == "torch.utils.checkpoint":
        return True
    return torch._C._current_graph_task_id() != -1


def _unbound(kind: type[PagedStash], device: str, layout: PoolLayout, settings: dict[str, Any]) -> PagedStash:
    """Returns a copy of a stash that has no pool yet."""
    copy = kind.__new__(kind)
    copy.__dict__["_unbound"] = device, layout, settings
    return copy


def _check_count(num_rows: Tensor | int, max_rows: int, *, device: torch.device | None) -> None:
    """Checks num_rows and max_rows. device: required device of a tensor; None accepts any."""
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
    """Returns a copy, [1], int64, because the caller may change its tensor before the stash stream has read it."""
    if isinstance(num_rows, Tensor):
        return num_rows.detach().to(torch.int64, copy=True).reshape(1)
    return torch.full((1,), num_rows, dtype=torch.int64, device=device)
