"""A set of the scratch has one user at a time, and no rows that are still needed are overwritten."""

import gc
import threading
from collections.abc import Callable

import pytest

from megatron.core.transformer.moe.paged_stash.scratch import ScratchSets


class Group:
    def __init__(self, scratch_set: int = 0) -> None:
        self.scratch_set = scratch_set


def running(scratch: ScratchSets, group: Group) -> None:
    """Leaves the group in the state in which `take` leaves it."""


def resting(scratch: ScratchSets, group: Group) -> None:
    scratch.rest(group)


def read_later(scratch: ScratchSets, group: Group) -> None:
    scratch.leave_to_readers(group)


def left(scratch: ScratchSets, group: Group) -> None:
    scratch.leave(group)


State = Callable[[ScratchSets, Group], None]
STATES = (running, resting, read_later, left)


@pytest.mark.parametrize("state", STATES)
def test_another_group_takes_a_set_only_if_no_rows_are_lost(state: State) -> None:
    scratch, first, second, moved = ScratchSets(1), Group(), Group(), list[Group]()
    scratch.take(first, "one", move_out=moved.append)
    state(scratch, first)
    assert scratch.is_resting(first) == (state is resting) and scratch.is_free(0) == (state is left)
    scratch.take(first, "one", move_out=moved.append)  # a group may always return to its set
    assert not moved and not scratch.is_resting(first)
    state(scratch, first)
    if state is read_later:
        with pytest.raises(RuntimeError, match="'two' would overwrite rows of 'one', whose weight gradients"):
            scratch.take(second, "two")
        assert not moved
        scratch.leave(first)
    scratch.take(second, "two")
    assert moved == ([first] if state in (running, resting) else [])
    scratch.rest(first)
    scratch.leave(first)
    assert not scratch.is_free(0), "the set belongs to another group now"
    del second
    gc.collect()
    assert scratch.is_free(0), "a collected group uses nothing"


@pytest.mark.parametrize("state", STATES)
def test_a_set_whose_group_is_running_is_refused_to_another_thread(state: State) -> None:
    scratch, first, second, errors = ScratchSets(2), Group(1), Group(1), list[str]()

    def take() -> None:
        try:
            scratch.take(second, "two")
        except RuntimeError as error:
            errors.append(str(error))

    scratch.take(first, "one")
    state(scratch, first)
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    expected = {running: "run in two threads", read_later: "weight gradients have not been computed"}.get(state)
    assert len(errors) == (expected is not None) and all(expected in error for error in errors if expected)
    assert scratch.is_free(0), "each set has users of its own"


@pytest.mark.parametrize("state", STATES)
def test_rows_that_rest_are_moved_before_a_graph_is_replayed(state: State) -> None:
    scratch, group, moved = ScratchSets(2), Group(1), list[Group]()
    scratch.take(group, "one", move_out=moved.append)
    state(scratch, group)
    if state is read_later:
        with pytest.raises(RuntimeError, match="a CUDA graph would overwrite rows of 'one', whose weight gradients"):
            scratch.empty()
    else:
        scratch.empty()
    assert moved == ([group] if state is resting else [])
    assert scratch.is_free(1) == (state in (resting, left))
    scratch.forget()
    assert scratch.is_free(1)
