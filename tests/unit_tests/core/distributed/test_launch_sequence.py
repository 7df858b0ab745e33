"""Reductions are launched in the same order on all ranks, and the order is learned from backward.

Also checks backward passes: which groups each pass launches, and when the oldest reduction must be waited for.
"""

import random

import pytest

from megatron.core.distributed.launch_sequence import LaunchSequence, ReduceScope, _BackwardPasses
from tests.counts import long_count


def learned(sequence, incomplete):
    seen = sequence.seen(incomplete)
    wanted = seen if sequence.wants(seen) else None
    sequence.learn(seen)
    return wanted


class Rank:
    """Backward passes of one rank, whose groups become ready in random order. Some never become ready."""

    def __init__(self, chunks, absent):
        self.sequence = LaunchSequence()
        self.numbers = [n for count in chunks for n in self.sequence.add([i != absent for i in range(count)])]
        self.groups = [n for count, n in zip((i for c in chunks for i in range(c)), self.numbers) if count != absent]
        self.launched = []
        self.ready = set()

    def events(self, rng):
        """Runs one step. Yields after each gradient, so that ranks can be interleaved."""
        self.sequence.start()
        self.launched.append([])
        self.ready = set(rng.sample(self.groups, rng.randint(0, len(self.groups))))
        now = set()
        for group in rng.sample(sorted(self.ready), len(self.ready)):
            self.sequence.count_gradient(group)
            now.add(group)
            launched = self.sequence.mark_ready(group)
            assert set(launched) & set(self.groups) <= now, "a group was launched before it was ready"
            self.launched[-1] += launched
            yield

    def finish(self):
        self.launched[-1] += self.sequence.rest()
        return learned(self.sequence, set(self.groups) - self.ready)


@pytest.mark.parametrize("seed", range(long_count(30, soak=3000)))
def test_all_ranks_launch_the_same_sequence_with_each_group_once(seed):
    rng = random.Random(seed)
    chunks = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    # Some groups exist only on other ranks.
    ranks = [Rank(chunks, absent) for absent in (rng.choice([None, 1]), None, rng.choice([None, 0, 2]))]
    for step in range(8):
        running = [rank.events(rng) for rank in ranks]
        while running:
            passes = rng.choice(running)
            if next(passes, "ended") == "ended":
                running.remove(passes)
        if step == 5:
            for rank in ranks:
                rank.sequence.is_frozen = True
        wanted = [rank.finish() for rank in ranks][0]
        assert all(sorted(rank.launched[-1]) == sorted(rank.numbers) for rank in ranks)
        assert step < 5 or wanted is None
        if wanted is not None:
            for rank in ranks:
                rank.sequence.adopt(wanted)
    assert ranks[0].launched == ranks[1].launched == ranks[2].launched


def run(sequence, groups, incomplete=()):
    sequence.start()
    launched = []
    for group in groups:
        sequence.count_gradient(group)
        launched.append(sequence.mark_ready(group))
    launched.append(sequence.rest())
    wanted = learned(sequence, incomplete)
    if wanted is not None:
        sequence.adopt(wanted)
    return launched


def test_the_order_follows_backward_after_the_first_step_and_later_if_seen_twice():
    sequence = LaunchSequence()
    sequence.add([True] * 2), sequence.add([True] * 2)
    assert run(sequence, [1, 3, 0, 2]) == [[], [], [], [], [2, 3, 0, 1]]
    assert run(sequence, [1, 3, 0, 2]) == [[1], [3], [0], [2], []]
    assert run(sequence, [3, 1, 0, 2]) == [[], [1, 3], [0], [2], []]
    assert run(sequence, [1, 3, 0, 2]) == [[1], [3], [0], [2], []]
    assert run(sequence, [3, 1], incomplete=[0, 2]) == [[], [1, 3], [0, 2]]
    assert run(sequence, [3, 1, 2], incomplete=[0, 2]) == [[], [1, 3], [], [0, 2]]
    assert sequence.order == [3, 1, 0, 2]


def test_what_waits_behind_a_group_is_launched_with_it():
    sequence = LaunchSequence()
    sequence.add([True] * 3)
    assert sequence.up_to(1) == [0, 1] and sequence.up_to(0) == [] and sequence.rest() == [2]


def test_groups_that_an_error_left_are_taken_before_others() -> None:
    sequence = LaunchSequence()
    turns = sequence.take([3, 1, 2])
    assert next(turns) == 3
    turns.close()
    assert list(sequence.take([0])) == [1, 2, 0] and not list(sequence.take([]))
    next(sequence.take([1, 2]))
    sequence.start()
    assert not list(sequence.take([]))


# Backward passes.


def two_chunks(scope: ReduceScope) -> tuple[_BackwardPasses, LaunchSequence]:
    """Builds two chunks: groups 0 and 1 in the first, 2 and 3 in the second, which backward reaches first."""
    passes, sequence = _BackwardPasses(scope, max_in_flight=2), LaunchSequence(is_armed=True)
    for _ in range(2):
        passes.add_chunk(sequence.add([True, True]))
    assert sequence.order == [2, 3, 0, 1]
    return passes, sequence


def begin_pass(passes: _BackwardPasses, sequence: LaunchSequence, *numbers: int) -> list[int]:
    """Marks the gradients of these groups as ready and returns the groups that may be launched."""
    launched = []
    for number in numbers:
        sequence.count_gradient(number, part=passes.groups_with(number))
        launched += sequence.mark_ready(number)
    return launched


def test_a_chunk_does_not_wait_for_groups_of_another() -> None:
    passes, sequence = two_chunks(ReduceScope.CHUNK)
    assert begin_pass(passes, sequence, 0) == [0]
    sequence.start()
    assert begin_pass(passes, sequence, 3, 2) == [2, 3]
    sequence.start()
    passes, sequence = two_chunks(ReduceScope.ALL)
    assert begin_pass(passes, sequence, 0, 3) == []


def test_the_end_of_an_iteration_makes_up_for_the_passes_that_a_rank_has_not_had() -> None:
    passes, sequence = two_chunks(ReduceScope.CHUNK)
    assert passes.rest(sequence) == [2, 3, 0, 1]
    passes.begin()
    # The backward pass of one chunk has ended. The other chunk's pass was aborted after its first launch.
    passes.ended({2, 3}, seen=[])
    assert begin_pass(passes, sequence, 0) == [0]
    assert passes.rest(sequence) == [1]
    assert passes.rest(sequence) == []
    # A second pass of the same chunk was aborted, and the other chunk has had no pass.
    passes.begin()
    sequence.start()
    passes.ended({2, 3}, seen=[])
    assert begin_pass(passes, sequence, 3) == []
    assert passes.rest(sequence) == [2, 3, 0, 1]


@pytest.mark.parametrize("scope", [ReduceScope.ALL, ReduceScope.CHUNK])
def test_the_oldest_reduction_is_settled_when_too_many_hold_memory(scope: ReduceScope) -> None:
    passes = _BackwardPasses(scope, max_in_flight=2)
    assert [passes.launched(number) for number in range(4)] == [None, None, 0, 1]
    passes.all_settled()
    assert passes.launched(0) is None


def test_what_is_reduced_once_an_iteration_is_not_settled_before_its_end() -> None:
    passes = _BackwardPasses(ReduceScope.ITERATION, max_in_flight=0)
    assert passes.launched(0) is None
    assert passes.may_launch_early(overlap=True) and not passes.may_launch_early(overlap=False)


def test_the_order_of_one_chunks_passes_is_learned_and_of_several_chunks_none() -> None:
    one, sequence = _BackwardPasses(ReduceScope.CHUNK, max_in_flight=2), LaunchSequence(is_armed=True)
    one.add_chunk(sequence.add([True, True]))
    assert one.order_seen(sequence, incomplete=[]) == [0, 1]
    one.ended({0, 1}, seen=[1, 0])
    assert one.order_seen(sequence, incomplete=[]) == [1, 0]
    several, sequence = two_chunks(ReduceScope.CHUNK)
    several.ended({2, 3}, seen=[3, 2, 0, 1])
    assert several.order_seen(sequence, incomplete=[]) == [2, 3, 0, 1]
