"""Which groups the passes of an iteration launch, and when the oldest reduction must be settled: pure decisions."""

from dataclasses import dataclass
from typing import Any

import pytest

from megatron.core.distributed.launch_sequence import LaunchSequence
from megatron.core.distributed.passes import Passes, PassScope


@dataclass(frozen=True)
class Group:
    """What passes know of a group."""

    number: int


def two_chunks(scope: PassScope) -> tuple[Passes, LaunchSequence]:
    """Groups 0 and 1 of the first chunk, 2 and 3 of the second, which backward reaches first."""
    passes, sequence = Passes(scope, max_in_flight=2), LaunchSequence(is_armed=True)
    for _ in range(2):
        passes.add_chunk(sequence.add([True, True]))
    assert sequence.order == [2, 3, 0, 1]
    return passes, sequence


def begin_pass(passes: Passes, sequence: LaunchSequence, *numbers: int) -> list[int]:
    """Gradients of these groups come; what may be launched."""
    launched = []
    for number in numbers:
        sequence.came(number, part=passes.groups_with(number))
        launched += sequence.ready(number)
    return launched


def test_a_chunk_does_not_wait_for_groups_of_another() -> None:
    passes, sequence = two_chunks(PassScope.CHUNK)
    assert begin_pass(passes, sequence, 0) == [0]
    sequence.start()
    assert begin_pass(passes, sequence, 3, 2) == [2, 3]
    sequence.start()
    passes, sequence = two_chunks(PassScope.ALL)
    assert begin_pass(passes, sequence, 0, 3) == []


def test_the_end_of_an_iteration_makes_up_for_the_passes_that_a_rank_has_not_had() -> None:
    passes, sequence = two_chunks(PassScope.CHUNK)
    assert passes.rest(sequence) == [2, 3, 0, 1]
    passes.begin()
    # One chunk's pass has ended, that of the other was broken off after its first launch.
    passes.ended({2, 3}, seen=[])
    assert begin_pass(passes, sequence, 0) == [0]
    assert passes.rest(sequence) == [1]
    assert passes.rest(sequence) == []
    # A second pass of the same chunk was broken off, and the other chunk has had none.
    passes.begin()
    sequence.start()
    passes.ended({2, 3}, seen=[])
    assert begin_pass(passes, sequence, 3) == []
    assert passes.rest(sequence) == [2, 3, 0, 1]


@pytest.mark.parametrize("scope", [PassScope.ALL, PassScope.CHUNK])
def test_the_oldest_reduction_is_settled_when_too_many_hold_memory(scope: PassScope) -> None:
    passes, groups = Passes(scope, max_in_flight=2), [Group(number) for number in range(4)]
    found: list[Any] = [passes.launched(group) for group in groups]  # type: ignore[arg-type]
    assert found == [None, None, groups[0], groups[1]]
    passes.all_settled()
    assert passes.launched(groups[0]) is None  # type: ignore[arg-type]


def test_what_is_reduced_once_an_iteration_is_not_settled_before_its_end() -> None:
    passes = Passes(PassScope.ITERATION, max_in_flight=0)
    assert passes.launched(Group(0)) is None  # type: ignore[arg-type]
    assert passes.may_launch_early(overlap=True) and not passes.may_launch_early(overlap=False)


def test_the_order_of_one_chunks_passes_is_learned_and_of_several_chunks_none() -> None:
    one, sequence = Passes(PassScope.CHUNK, max_in_flight=2), LaunchSequence(is_armed=True)
    one.add_chunk(sequence.add([True, True]))
    assert one.order_seen(sequence, incomplete=[]) == [0, 1]
    one.ended({0, 1}, seen=[1, 0])
    assert one.order_seen(sequence, incomplete=[]) == [1, 0]
    several, sequence = two_chunks(PassScope.CHUNK)
    several.ended({2, 3}, seen=[3, 2, 0, 1])
    assert several.order_seen(sequence, incomplete=[]) == [2, 3, 0, 1]
