"""ScratchSets: which expert group uses each set of a pool's scratch pages.

    scratch = ScratchSets(1)
    scratch.take(group, "layer 1", move_out=copy_elsewhere)   # before its kernels write there
    scratch.rest(group)                                       # at the end of its forward
    scratch.take(group, "layer 1", move_out=copy_elsewhere)   # at the start of its backward
    scratch.leave(group)                                      # after the last kernel that reads there

It contains no tensors. page_pool.py owns the memory, and group_memory.py decides when a group takes a set.
"""

import enum
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol


class ScratchGroup(Protocol):
    """An object that lives as long as a group's rows. scratch_set: the set of scratch pages that the group uses."""

    scratch_set: int


class ScratchUse(enum.Enum):
    """Use of a set of scratch pages by the group that took it."""

    RUNNING = "kernels of its forward or backward use the rows"
    RESTING = "its rows are complete; its backward reads them later"
    READ_LATER = "its backward has ended; weight gradients will read the rows"


class _User(NamedTuple):
    """The group that took a set. thread: the one that launches its kernels. move_out: as in ScratchSets.take."""

    group: weakref.ref[Any]
    name: str
    use: ScratchUse
    thread: int
    move_out: Callable[[Any], None] | None


class ScratchSets:
    """The users of the sets of scratch pages. A set has one user at a time.

    A set is free again once its user has called `leave`, or was collected.
    """

    def __init__(self, num_sets: int) -> None:
        self._users: list[_User | None] = [None] * num_sets

    def take(self, group: ScratchGroup, name: str, *, move_out: Callable[[Any], None] | None = None) -> None:
        """Lets the kernels of a group use its set. Raises RuntimeError if the rows of another group would be lost.

        name: of the group, for errors. move_out: called with the group if another one takes the set before this one
        leaves it; must copy the rows elsewhere. Without it, a group of the same thread that has not left the set was
        interrupted by an exception.
        """
        thread = threading.get_ident()
        user = self._users[group.scratch_set]
        other = None if user is None else user.group()
        if user is not None and other is not None and other is not group:
            if user.use is ScratchUse.READ_LATER:
                raise _overwrites(user.name, by=f"the expert group {name!r}")
            if user.use is ScratchUse.RUNNING and user.thread != thread:
                raise RuntimeError(
                    f"the expert groups {name!r} and {user.name!r} run in two threads and compute in the pages of one "
                    "pool: use a pool for each thread, or --moe-paged-stash-compute copies (from Python: "
                    "computes_in_pages=False)"
                )
            if user.move_out is not None:
                user.move_out(other)
        self._users[group.scratch_set] = _User(weakref.ref(group), name, ScratchUse.RUNNING, thread, move_out)

    def rest(self, group: ScratchGroup) -> None:
        """Records that a group's rows are complete, and that no kernel uses them until it calls `take` again.

        Any thread may then take the set, because `move_out` does not interfere with a forward or backward.
        """
        self._change(group, ScratchUse.RESTING)

    def leave_to_readers(self, group: ScratchGroup) -> None:
        """Records that a group's backward has ended, and that weight gradients will read its rows before it leaves."""
        self._change(group, ScratchUse.READ_LATER)

    def leave(self, group: ScratchGroup) -> None:
        """Ends a group's use of its set. Does nothing if another group has taken the set."""
        if self._user(group) is not None:
            self._users[group.scratch_set] = None

    def is_resting(self, group: ScratchGroup) -> bool:
        """Returns whether a group called `rest`, and no group has taken the set since."""
        user = self._user(group)
        return user is not None and user.use is ScratchUse.RESTING

    def is_free(self, scratch_set: int) -> bool:
        """Returns whether no group uses a set."""
        user = self._users[scratch_set]
        return user is None or user.group() is None

    def empty(self) -> None:
        """Moves the rows of resting groups elsewhere, because a replayed graph may overwrite them.

        Raises RuntimeError if weight gradients have still to read the rows of a group.
        """
        for scratch_set, user in enumerate(self._users):
            group = None if user is None else user.group()
            if user is None or group is None:
                continue
            if user.use is ScratchUse.READ_LATER:
                raise _overwrites(user.name, by="a CUDA graph")
            if user.use is ScratchUse.RESTING and user.move_out is not None:
                user.move_out(group)
                self._users[scratch_set] = None

    def forget(self) -> None:
        """Makes all sets free, such as those that a graph uses whose capture has ended."""
        self._users = [None] * len(self._users)

    def _user(self, group: ScratchGroup) -> _User | None:
        user = self._users[group.scratch_set]
        return user if user is not None and user.group() is group else None

    def _change(self, group: ScratchGroup, use: ScratchUse) -> None:
        user = self._user(group)
        if user is not None:
            self._users[group.scratch_set] = user._replace(use=use)


def _overwrites(name: str, *, by: str) -> RuntimeError:
    return RuntimeError(
        f"{by} would overwrite rows of {name!r}, whose weight gradients have not been computed yet: compute them "
        "before another group needs the same scratch, or use no pages on the host "
        "(moe_paged_stash_buffer_size_factor_cpu 0), or --moe-paged-stash-compute copies"
    )
