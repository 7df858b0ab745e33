"""The order of reductions: the same on all ranks whatever each of them computes first, and what is learned from it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.distributed.launch_sequence import LaunchSequence, Readiness
from tests.counts import long_count


def learned(sequence, incomplete):
    seen = sequence.seen(incomplete)
    wanted = seen if sequence.wants(seen) else None
    sequence.learn(seen)
    return wanted


class Rank:
    """Backward passes of one rank: its groups become ready in an order of its own, some of them never."""

    def __init__(self, chunks, absent):
        self.sequence = LaunchSequence()
        self.numbers = [n for count in chunks for n in self.sequence.add([i != absent for i in range(count)])]
        self.groups = [n for count, n in zip((i for c in chunks for i in range(c)), self.numbers) if count != absent]
        self.launched = []
        self.ready = set()

    def events(self, rng):
        """One step: yields between its gradients, so that ranks may be interleaved."""
        self.sequence.start()
        self.launched.append([])
        self.ready = set(rng.sample(self.groups, rng.randint(0, len(self.groups))))
        now = set()
        for group in rng.sample(sorted(self.ready), len(self.ready)):
            self.sequence.came(group)
            now.add(group)
            launched = self.sequence.ready(group)
            assert set(launched) & set(self.groups) <= now, "launched before it was ready"
            self.launched[-1] += launched
            yield

    def finish(self):
        self.launched[-1] += self.sequence.rest()
        return learned(self.sequence, set(self.groups) - self.ready)


@pytest.mark.parametrize("seed", range(long_count(30, soak=3000)))
def test_all_ranks_launch_the_same_sequence_with_each_group_once(seed):
    rng = random.Random(seed)
    chunks = [rng.randint(1, 4) for _ in range(rng.randint(1, 3))]
    # Some groups are on other ranks alone.
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


def run(sequence, came, incomplete=()):
    sequence.start()
    launched = []
    for group in came:
        sequence.came(group)
        launched.append(sequence.ready(group))
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


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_expected_gradients_grow_at_once_and_shrink_after_four_steps(counts):
    readiness, expected, fewer = Readiness(1), 1, []
    for count in counts:
        complete = [readiness.came(0) for _ in range(count)]
        assert [at + 1 for at, now in enumerate(complete) if now] == ([expected] if count >= expected else [])
        assert readiness.is_complete == (count >= expected)
        readiness.learn()
        fewer = [] if count >= expected else [*fewer, count]
        if count > expected:
            expected = count
        elif len(fewer) == 4:
            expected, fewer = max(1, *fewer), []


def test_groups_that_an_error_left_are_taken_before_others() -> None:
    sequence = LaunchSequence()
    turns = sequence.take([3, 1, 2])
    assert next(turns) == 3
    turns.close()
    assert list(sequence.take([0])) == [1, 2, 0] and not list(sequence.take([]))
    next(sequence.take([1, 2]))
    sequence.start()
    assert not list(sequence.take([]))
