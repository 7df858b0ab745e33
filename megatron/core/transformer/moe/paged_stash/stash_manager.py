"""PagedStash: the context that experts run in, and the order of a step. Which tensors a context takes is decided in
saved_tensors.py, where they go in stash_group.py.

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
"""

import weakref
from collections import Counter as Multiset
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.moe.paged_stash.arithmetic import Footprint, ReserveRow, footprint, resident_groups
from megatron.core.transformer.moe.paged_stash.captured_part import CapturedGroup, CapturedPart, ReplayedForward
from megatron.core.transformer.moe.paged_stash.page_layout import Counter, PoolLayout, Priority, TensorSpec, is_whole
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool
from megatron.core.transformer.moe.paged_stash.recording import RowTensors, StashGroup
from megatron.core.transformer.moe.paged_stash.reserve import Reserve
from megatron.core.transformer.moe.paged_stash.saved_tensors import Block, Hooks, SavedTensor, outer_hooks
from megatron.core.transformer.moe.paged_stash.side_streams import main_waits_for
from megatron.core.transformer.moe.paged_stash.stash_group import PageKeeper, Phase, StashedGroup, tensor_of
from megatron.core.transformer.moe.paged_stash.stash_order import MAX_EVENTS, EventKind, Group, StashEvent, StashOrder

# Forwards without a reset after which names, sizes and order of further ones are no longer recorded.
_MAX_FORWARDS = MAX_EVENTS // 2
# Phases that do not change any more once backward has begun.
_SETTLED = (Phase.KEPT, Phase.READY)


class PagedStash:
    """Keeps in pages the live rows of what expert groups save for backward; their gradients stay the same bit for bit.

    1. A context collects what autograd saves. At its end the live rows of row tensors are copied into pages, and the
       oversized memory is free once the next context begins.
    2. When backward asks for the first tensor of a group, the group's rows come back with the strides and the address
       alignment that they had, and the rows of the next groups start on their way.
    3. Marked tensors that found no pages are computed again. If an x found none, the step is void.
    4. `reset` between steps frees all pages and learns the order of the step for the next one.

    Rows beyond the live ones come back with whatever bytes are there: backward must not read them.
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
    ) -> None:
        """prefetch_groups: how many groups' rows come back ahead of their backward, each into buffers of max_rows rows.

        events: the order of a step; learned if not given. num_programs: how many programs a copy may occupy on a GPU,
        0: as many as are useful. reserved_share: rows of later groups for which pages are kept back before gate_up and
        act get any, as a share of max_rows. 1 guarantees, in each step that keeps to its order or has none, that x
        finds pages in a pool that could hold every x; smaller shares guarantee nothing, and 0 keeps nothing back.
        Reserve says what holds when. has_rungs: whether gate_up and act are dropped, and computed again, if pages are
        lacking; else they are as important as x. specs: what each group of `events` stashes, where that is known
        before the first step. Raises ValueError for other values.
        """
        for argument, number in (("prefetch_groups", prefetch_groups), ("num_programs", num_programs)):
            if not is_whole(number) or number < 0:
                raise ValueError(f"{argument} ({number!r}) must be an integer of at least 0")
        if not 0.0 <= reserved_share <= 1.0:
            raise ValueError(f"reserved_share ({reserved_share}) must be between 0 and 1")
        self._settings = {
            "prefetch_groups": prefetch_groups,
            "events": None if events is None else tuple(events),
            "num_programs": num_programs,
            "has_rungs": has_rungs,
            "specs": tuple(specs),
        }
        self.pool, self.order = pool, StashOrder(events)
        self._prefetch_groups, self._has_rungs = prefetch_groups, has_rungs
        self._keeper = PageKeeper(pool, num_programs=num_programs)
        self._instances: Multiset[str] = Multiset()  # forwards of this step so far, by name
        self._num_forwards = 0  # of this step so far
        self._groups: weakref.WeakValueDictionary[Group, StashedGroup] = weakref.WeakValueDictionary()
        self._max_bytes: dict[Group, int] = {}  # of the buffers that a group's rows lie in
        self._part: CapturedPart | None = None  # whose forward or backward is being captured
        self._is_enabled = True
        self._is_spoiled = False  # an exception ended a context of this step
        with self._keeper.exclusive():  # whatever mode the caller is in
            self._reserve = Reserve(pool.layout, pool.device, share=reserved_share)
            if specs:
                for group in {event.group for event in self.order.events} - resident_groups(self.order.events):
                    self._reserve.learn(group, specs, max_rows=min(spec.max_tokens for spec in specs))
            self._reserve.begin_step(self.order.events)

    def __reduce__(self) -> Any:
        """A copy, by deepcopy or pickle, has the settings alone, and a pool of its own from its first use on.

        No page, order or group of this stash is in it. A copy that trains nothing, such as an average of weights, takes
        no memory.
        """
        if "_unbound" in self.__dict__:
            return _unbound, (type(self), *self.__dict__["_unbound"])
        settings = {**self._settings, "reserved_share": self.reserved_share}
        return _unbound, (type(self), str(self.pool.device), self.pool.layout, settings)

    def __getattr__(self, name: str) -> Any:
        """Makes the pool of a copy when something is first asked of it."""
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
        """Around the forward of one expert group, with max_rows rows of which the first num_rows are live.

        num_rows: [1] or scalar, int64 or int32, on the pool's device, read when the context ends; or an int.
        backward_is_next: nothing is stashed, as nothing else runs before this group's backward. takes: which saved
        tensors are rows; without declarations this is guessed, see [Note: guessed rows].
        The context does nothing without grad mode, in a recomputation (while backward runs), directly inside
        torch.utils.checkpoint, which keeps nothing, in a step that `reset` disabled, and with max_rows below 2. Weights
        and saved tensors without max_rows rows are left to hooks around the context. Raises ValueError for a wrong
        num_rows or max_rows, if no saved tensor has rows, and if one of them may as well be a weight.
        """
        if "_unbound" in self.__dict__ and not torch.is_grad_enabled():
            # Before anything is asked of a copy, which would make its pool.
            _check_count(num_rows, max_rows, device=None)
            yield StashGroup(torch.device("cpu"), max_rows, group=None, hooks=None)
            return
        _check_count(num_rows, max_rows, device=self.pool.device)
        with self._keeper.exclusive():
            # What runs next may write to memory that the copies of the previous group still read: the buffers of a
            # static dispatch are the same for all layers, and the allocator hands out again what autograd let go of.
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
        """Between steps, after the last backward, or after an exception: all pages are free, counters are 0.

        What is still in pages is lost: its backward raises RuntimeError. Rows that are back stay. enabled: False if the
        contexts of the next step are to do nothing.
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
            # Names may be new in each step: what is known of those that are not in the list will not be asked for.
            self._max_bytes = {group: num_bytes for group, num_bytes in self._max_bytes.items() if group in known}
            self._reserve.forget_others(known)
            self._reserve.begin_step(self.order.events)
            self._is_enabled = enabled

    def footprint(self) -> Footprint:
        """Bytes that a step like the last complete one keeps on the device, with and without the stash; zeros before.

        Worth a look: in a pool too large for the step, or a step of few groups, the stash costs memory.
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
        """Pages that each forward of the step leaves free, as arithmetic.simulate takes them; () if none are kept."""
        return self._reserve.table

    @property
    def reserved_share(self) -> float:
        """Rows of later groups for which pages are kept back, as a share of max_rows."""
        return self._reserve.share

    def raise_reserved_share(self, share: float) -> None:
        """Between steps, before `reset`: later steps keep back more. Their plans read it from the memory that they read
        until now, so that a captured step stays valid. Raises ValueError for a smaller share, and where it was 0.
        """
        if not 0.0 < self.reserved_share <= share <= 1.0:
            raise ValueError(
                f"reserved_share ({share}) must be between {self.reserved_share}, which must be above 0, and 1"
            )
        if share > self.reserved_share:
            with self._keeper.exclusive():
                self._reserve.raise_share(share)

    def join(self) -> None:
        """Makes the main stream wait for all copies; reset does so too."""
        with self._keeper.exclusive():
            self._keeper.join_all()

    @contextmanager
    def captured(self) -> Iterator[None]:
        """Around whole steps, or passes of them, that a CUDA graph captures after a reset: their copies are part of it.

        A replay follows a reset too, and needs nothing of this object but its memory. Not run on a GPU yet.
        """
        with self._keeper.exclusive():
            # A capture ends with all streams joined that took part, and none can be joined that did not.
            self._keeper.fork()
        try:
            yield
            self.join()
        finally:
            with self._keeper.exclusive():
                # Their events are the graph's: nobody outside may wait for them, as giving pages back would.
                self._keeper.forget_groups()

    def new_part(self) -> CapturedPart:
        """Returns the record of a part of a layer that is about to be captured."""
        return CapturedPart(torch.zeros(len(Priority), dtype=torch.int64, device=self.pool.device))

    @contextmanager
    def capturing(self, part: CapturedPart) -> Iterator[None]:
        """Around the forward of a part of a layer, then around its backward, each captured as a graph of its own.

        See [Note: captured parts]. The step's account stays as it is: `replaying` and `replaying_backward` keep it.
        Call `join` before each capture and replay, as copies of eager groups may be under way. Not run on a GPU yet.
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
        """Called before a replay of the part's forward, with this stash or another one over the same pool."""
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
        """Called before a replay of that forward's backward. Raises RuntimeError where a reset came between."""
        with self._keeper.exclusive():
            self._keeper.check_current(forward.event, forward.generation)
            self.order.observe(StashEvent(EventKind.BACKWARD, *forward.event.group))

    @property
    def void(self) -> Tensor:
        """Above 0 if this step's gradients are wrong: scalar, int64, on the device, a view that `reset` clears."""
        with self._keeper.exclusive():
            self._keeper.join()
        return self.pool.counters[Counter.VOID]

    def is_void_sync(self) -> bool:
        """Whether this step's gradients are wrong. NOTE: waits for the device."""
        return bool(self.void.item())

    def _begin(self, name: str, *, backward_is_next: bool) -> StashedGroup:
        with self._keeper.exclusive():
            event = self._next_forward(name)
            if self._part is None:
                self._count_forward(name)
            group = StashedGroup(event, self._keeper.generation)
            if backward_is_next:
                self._reserve.learn(event.group, [], max_rows=0)
            if backward_is_next or self.order.is_backward_next(event):
                group.phase = Phase.KEPT
            return group

    def _commit(self, group: StashedGroup, recording: StashGroup, *, num_rows: Tensor | int, max_rows: int) -> None:
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
            self.order.observe(group.event)
            self._groups[group.event.group] = group

    def _capture(
        self, part: CapturedPart, group: StashedGroup, *, blocks: list[Block], num_rows: Tensor | int, max_rows: int
    ) -> None:
        """Does what _commit does for a group that a CUDA graph captures."""
        name, specs = group.event.name, [block.spec for block in blocks]
        if part.group is not None:
            raise RuntimeError(f"{part.group.name} and {name} are in one part: a graph holds one expert group")
        part.group = CapturedGroup(name)
        if not blocks:
            group.phase = Phase.KEPT
            return
        count = _count_tensor(num_rows, self.pool.device)
        self._keeper.stash(group, blocks, num_rows=count, reserve=part.reserve, is_captured=True)
        # What recomputes dropped tensors may read others that the forward made.
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
        group: StashedGroup = saved.group
        # A group has many tensors: those after the first find everything settled, and need neither the lock nor its
        # modes to look at memory that is back.
        if not group.has_backward_begun or group.phase not in _SETTLED:
            with self._keeper.exclusive():
                if group.phase is Phase.LOST:
                    raise RuntimeError(
                        f"backward of the expert group {group.event.name!r}, whose forward did not end well"
                    )
                if group.phase is not Phase.RECORDING:
                    self._reach(group)
        if saved.memory is None:
            return saved.kept()
        # The backward of this tensor may run on another stream than that of the group's first one.
        main_waits_for(group.ready, self.pool.device)
        return tensor_of(saved)

    def _reach(self, group: StashedGroup) -> None:
        """Backward has come to a group: brings its rows back, and starts on those of the groups after it."""
        is_first = not group.has_backward_begun and group.generation == self._keeper.generation
        group.has_backward_begun = True
        backward = StashEvent(EventKind.BACKWARD, *group.event.group)
        if is_first:
            self._keeper.join()  # as at the start of a context: backward writes to memory that autograd let go of
            if self._part is None:
                self.order.observe(backward)
        if group.phase is Phase.STASHED:
            self._keeper.start_restore(group)
        if is_first and self._part is None:
            # Before the main stream waits and computes dropped tensors: these copies need to wait for neither.
            self._prefetch(self.order.upcoming_backwards(backward, self._prefetch_groups))
        if group.phase is Phase.RESTORING:
            self._keeper.finish_restore(group)

    def _prefetch(self, events: list[StashEvent]) -> None:
        for event in events:
            group = self._groups.get(event.group)
            if group is not None and group.phase is Phase.STASHED:
                self._keeper.start_restore(group)


def _is_recomputed(hooks: Hooks | None) -> bool:
    """Whether this code will run again in backward, or is doing so: what it saves is dropped, or used at once."""
    if hooks is not None and isinstance(hooks[0], FunctionType) and hooks[0].__module__ == "torch.utils.checkpoint":
        return True
    return torch._C._current_graph_task_id() != -1


def _unbound(kind: type[PagedStash], device: str, layout: PoolLayout, settings: dict[str, Any]) -> PagedStash:
    """A copy of a stash, yet without a pool."""
    copy = kind.__new__(kind)
    copy.__dict__["_unbound"] = device, layout, settings
    return copy


def _check_count(num_rows: Tensor | int, max_rows: int, *, device: torch.device | None) -> None:
    """device: where a tensor must be; None: anywhere."""
    if not is_whole(max_rows) or max_rows < 0:
        raise ValueError(f"max_rows ({max_rows!r}) must be an integer of at least 0")
    if isinstance(num_rows, Tensor):
        is_elsewhere = device is not None and num_rows.device != device
        if num_rows.numel() != 1 or num_rows.dtype not in (torch.int64, torch.int32) or is_elsewhere:
            found = f"{list(num_rows.shape)}, {num_rows.dtype}, on {num_rows.device}"
            raise ValueError(f"num_rows ({found}) must be one int64 or int32 on {device or 'the device'}")
    elif not is_whole(num_rows) or not 0 <= num_rows <= max_rows:
        raise ValueError(f"num_rows ({num_rows!r}) must be an integer between 0 and max_rows ({max_rows})")


def _count_tensor(num_rows: Tensor | int, device: torch.device) -> Tensor:
    """[1], int64: a copy, since the caller may change its own before the stash stream has read it."""
    if isinstance(num_rows, Tensor):
        return num_rows.detach().to(torch.int64, copy=True).reshape(1)
    return torch.full((1,), num_rows, dtype=torch.int64, device=device)
