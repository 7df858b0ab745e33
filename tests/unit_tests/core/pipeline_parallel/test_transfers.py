"""Programs of all stages complete for every layout and follow known schedules; invalid ones are rejected."""

from itertools import product

import pytest

from megatron.core.pipeline_parallel.expansion import expand, kept_events
from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Pipeline, interleaved_schedule, stage_orders
from megatron.core.pipeline_parallel.timeline import bubble_share, timeline
from megatron.core.pipeline_parallel.transfers import Post, Program, pipeline_programs
from megatron.core.pipeline_parallel.validation import validate_programs
from megatron.core.transformer.moe.paged_stash.stash_order import StashOrder
from megatron.training.step.expert_memory import stash_events
from tests.counts import long_count


@pytest.mark.slow
def test_every_schedule_runs_to_its_end() -> None:
    sizes = [range(1, long_count(usual, soak=soak) + 1) for usual, soak in ((6, 8), (3, 4), (9, 16))]
    for stages, chunks, microbatches in product(*sizes):
        if stages == 1 and chunks > 1:
            continue
        pipeline = Pipeline(stages, chunks)
        for overlap, without_backward in product((False, True), repeat=2):
            options = {"overlap": overlap, "without_backward": without_backward}
            programs = pipeline_programs(pipeline, microbatches, **options)
            validate_programs(programs, pipeline)
            passes = chunks * microbatches * (1 if without_backward else 2)
            assert all(sum(isinstance(step, Action) for step in program) == passes for program in programs)


@pytest.mark.parametrize("group", [4, 5, 7, 16])
@pytest.mark.parametrize("microbatches", [1, 6, 9, 16])
def test_groups_of_any_size_from_the_number_of_stages_on_run(group: int, microbatches: int) -> None:
    validate_programs(pipeline_programs(Pipeline(4, 3), microbatches, group_size=group), Pipeline(4, 3))


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(4, 1, 8), (4, 2, 8), (3, 4, 9), (8, 1, 1)])
def test_bubbles_are_those_of_the_known_schedules(stages: int, chunks: int, microbatches: int) -> None:
    pipeline = Pipeline(stages, chunks)
    orders = stage_orders(pipeline, microbatches)
    share = bubble_share(timeline(orders, pipeline))
    assert share == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))
    if chunks == 1:
        for stage, order in enumerate(orders):
            in_flight = [sum(1 if a.kind is ActionKind.FORWARD else -1 for a in order[:n]) for n in range(len(order))]
            assert max(in_flight) == min(microbatches, stages - stage)


def test_lists_read_as_expected() -> None:
    first, last = pipeline_programs(Pipeline(2), 2)
    assert [str(step) for step in first] == (
        ["F0.0", "[send F0.0 to 1]", "F0.1", "[send F0.1 to 1, receive B0.0 from 1]", "await B0.0", "B0.0"]
        + ["[receive B0.1 from 1]", "await B0.1", "B0.1"]
    )
    # The second input is received while the first microbatch is computed.
    assert [str(step) for step in last[:4]] == ["[receive F0.0 from 0]", "await F0.0", "[receive F0.1 from 0]", "F0.0"]
    order = interleaved_schedule(1, Pipeline(2, 2), num_microbatches=3)
    assert " ".join(map(str, order)) == "F0.0 F0.1 F1.0 B1.0 F1.1 B1.1 F0.2 B0.0 B0.1 F1.2 B1.2 B0.2"


def swapped(program: Program, first: int, second: int) -> Program:
    steps = list(program)
    steps[first], steps[second] = steps[second], steps[first]
    return tuple(steps)


def test_lists_that_cannot_run_are_refused() -> None:
    pipeline = Pipeline(2)
    first, last = pipeline_programs(pipeline, 2)
    bad = {
        "stage 0 sends F0.0 before running it": (swapped(first, 0, 1), last),
        "stage 1 runs F0.0 without its input": (first, swapped(last, 1, 3)),
        "stage 0 awaits B0.0, which it has not posted": (swapped(first, 3, 4), last),
        "stage 0 does not send in the order in which stage 1 receives": (
            (first[0], first[2], first[3], first[1], *first[4:]),
            last,
        ),
        "stage 1 never awaits F0.1": (first, tuple(s for s in last if "0.1" not in str(s) or "receive" in str(s))),
        "stage 0 does not send in the order": (first[:1] + first[2:], last),
    }
    for message, programs in bad.items():
        with pytest.raises(ValueError, match=message):
            validate_programs(programs, pipeline)
    # Each stage waits for a tensor that the other would send only afterwards.
    sent, received = first[3].transfers
    late = (first[0], first[2], Post((received,)), *first[4:6], first[1], Post((sent,)), *first[6:])
    with pytest.raises(ValueError, match="schedule deadlocks: stage . before"):
        validate_programs((late, last), pipeline)
    f0, f1, b0 = (Action(ActionKind(kind), 0, int(number)) for kind, number in ("F0", "F1", "B0"))
    with pytest.raises(ValueError, match="regardless of the order of transfers: stage 0 at B0.0, stage 1 at F0.1"):
        timeline([[f0, b0, f1], [f0, f1, b0]], pipeline)


@pytest.mark.parametrize("chunks", [1, 2])
def test_expanded_lists_are_what_the_stash_sees(chunks: int) -> None:
    pipeline = Pipeline(2, chunks)
    for order in stage_orders(pipeline, 5):
        events = expand(order, [[1, 3], [5]][:chunks])
        stash = stash_events(events)
        follower = StashOrder(stash)
        for event in stash:
            follower.observe(event)
        assert not follower.departed


def test_layers_that_run_again_do_so_before_the_backward_of_their_segment() -> None:
    first = expand([Action(kind, 0, 0) for kind in ActionKind], [[2, 3, 4]], recompute={2: 0, 3: 0})
    shown = " ".join(map(str, first))
    assert shown == ("F layer 2.0 F layer 3.0 F layer 4.0 B layer 4.0 R layer 2.0 R layer 3.0 B layer 3.0 B layer 2.0")
    assert " ".join(map(str, kept_events(first))) == "F layer 4.0 B layer 4.0"
