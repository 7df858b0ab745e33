"""Waits of passes that take turns, compared with a simulation of streams in which the order of launches is given."""

import random
from itertools import groupby

import pytest

from megatron.core.pipeline_parallel.expansion import turn_order
from megatron.planner.pair_time import (
    HAND_OVER,
    Doing,
    Part,
    PassWork,
    backward_parts,
    forward_parts,
    waits,
)


def _compute(seconds: float) -> Part:
    return Part(Doing.COMPUTE, seconds)


def _simulated_seconds(*passes: list[Part]) -> float:
    """Returns the end of the last computation on a device with one compute stream and one link.

    The host launches everything without waiting, in the order of the turns.
    """
    turns = [
        [(number, list(group)) for is_turn, group in groupby(parts, HAND_OVER.__eq__) if not is_turn]
        for number, parts in enumerate(passes)
    ]
    launches = turn_order(*turns) if len(turns) == 2 else turns[0]
    computed = sent = 0.0
    last_message = dict.fromkeys(range(len(passes)), 0.0)
    for number, parts in launches:
        for doing, seconds in parts:
            if doing is Doing.COMPUTE:
                computed += seconds
            elif doing is Doing.SEND:
                # Reads what has been computed, and occupies the link after earlier messages.
                sent = last_message[number] = max(sent, computed) + seconds
            else:
                computed = max(computed, last_message[number])
    return computed


def _random_work(choose: random.Random, layers: int, *, exchanged: float, counts_rows: bool) -> PassWork:
    experts, rest, first, last, in_transit, held, held_rest = (choose.uniform(0.1, 2.0) for _ in range(7))
    return PassWork(
        layers,
        experts=experts,
        rest=rest,
        exchanged=exchanged,
        first=first,
        last=last,
        in_transit=in_transit,
        held_experts=held,
        held_rest=held_rest,
        counts_rows=counts_rows,
    )


def _total(parts: list[Part]) -> float:
    return sum(part.seconds for part in parts if part.doing is Doing.COMPUTE)


@pytest.mark.parametrize("seed", range(20))
def test_a_pair_takes_as_long_as_its_streams(seed: int) -> None:
    choose = random.Random(seed)
    counts_rows, again = seed % 2 == 1, seed % 4 > 1
    layers = [choose.randint(1, 4) for _ in range(2)]
    works = [
        _random_work(choose, number, exchanged=choose.choice((0.0, 0.5, 5.0)), counts_rows=counts_rows)
        for number in layers
    ]
    repeated = _random_work(choose, layers[0], exchanged=1.0, counts_rows=counts_rows) if again else None
    passes = backward_parts(works[0], repeated), forward_parts(works[1])
    computed = sum(map(_total, passes))
    assert computed + sum(waits(*passes)) == pytest.approx(_simulated_seconds(*passes))
    for parts in passes:
        assert _total(parts) + waits(parts)[0] == pytest.approx(_simulated_seconds(parts))


def test_without_messages_nothing_waits() -> None:
    work = PassWork(3, experts=3.0, rest=6.0, exchanged=0.0, held_experts=3.0)
    assert waits(backward_parts(work), forward_parts(work)) == [0.0, 0.0]


# If rows are sent after row counts, the gradients of dispatch occupy the link first, so both have the same cover.
@pytest.mark.parametrize(("counts_rows", "message"), [(False, 0.99), (True, 0.49)])
def test_messages_below_the_cover_are_hidden_in_a_pair(counts_rows: bool, message: float) -> None:
    forward = PassWork(4, experts=4.0, rest=4.0, exchanged=8 * message, counts_rows=counts_rows)
    backward = PassWork(4, experts=4.0, rest=8.0, exchanged=8 * message, held_experts=4.0, counts_rows=counts_rows)
    assert waits(backward_parts(backward), forward_parts(forward)) == [0.0, 0.0]
    assert waits(forward_parts(forward)) == [pytest.approx(8 * message)]


def test_longer_messages_expose_what_the_other_pass_does_not_cover() -> None:
    # Each message takes 1.5 s. Computations of 1 s cover them: router and experts of the forward, experts and router of
    # the backward.
    forward = PassWork(1, experts=1.0, rest=1.0, exchanged=3.0)
    backward = PassWork(1, experts=1.0, rest=1.0, exchanged=3.0)
    # The gradients of combine start at 0 and end at 1.5, the rows at 3.0 because the link is busy until 1.5, the
    # gradients of dispatch at 4.5, and the results at 6.0. The backward waits 0.5 s, the forward from 2.5 to 3, the
    # backward from 4 to 4.5, and the forward from 5.5 to 6.
    assert waits(backward_parts(backward), forward_parts(forward)) == [1.0, 1.0]


def test_a_recomputed_forward_that_keeps_its_turn_waits_for_its_own_exchanges() -> None:
    # A backward that repeats a layer has as many exchanges as two layers of a forward.
    forward, backward = PassWork(2, experts=18.0, rest=18.0, exchanged=4.0), PassWork(1, 9.0, 9.0, exchanged=2.0)
    repeated = PassWork(1, experts=9.0, rest=9.0, exchanged=4.0)
    # It computes nothing between the results and their gradients, so one exchange of the forward is exposed.
    assert waits(backward_parts(backward, repeated), forward_parts(forward)) == [0.0, 1.0]
    keeping = backward_parts(backward, repeated, repeats_in_turns=False)
    assert waits(keeping, forward_parts(forward)) == [4.0, 2.0]


def test_held_weight_gradients_cover_the_next_exchange_of_a_backward_that_runs_alone() -> None:
    work = PassWork(2, experts=2.0, rest=2.0, exchanged=12.0, held_experts=4.0)
    # Each of two layers exposes 3 s of the gradients of combine, and 3 - 2 s of the gradients of dispatch.
    assert waits(backward_parts(work)) == [2 * (3.0 + 1.0)]
