"""Programs of all stages complete for every layout and follow known schedules; invalid ones are rejected."""

from collections.abc import Generator
from itertools import accumulate, product

import pytest

from megatron.core.pipeline_parallel.expansion import expand, kept_events, turn_order
from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Pair,
    Pipeline,
    Schedule,
    ScheduleKind,
    forward_only,
    forwards_ahead,
    held_backwards,
    interleaved_schedule,
    passes,
    pipeline_of,
    stage_orders,
    validate_schedule,
)
from megatron.core.pipeline_parallel.timeline import bubble_share, timeline
from megatron.core.pipeline_parallel.transfers import Await, Direction, Post, Program, Transfer, pipeline_programs
from megatron.core.pipeline_parallel.validation import validate_programs
from megatron.core.pipeline_placement import Placement
from megatron.core.transformer.moe.paged_stash.stash_order import StashOrder
from megatron.training.step.expert_memory import stash_events
from tests.counts import long_count


@pytest.mark.slow
def test_every_schedule_runs_to_its_end() -> None:
    sizes = [range(1, long_count(usual, soak=soak) + 1) for usual, soak in ((6, 8), (3, 4), (9, 16))]
    for stages, chunks, microbatches in product(*sizes):
        if stages == 1 and chunks > 1:
            continue
        schedules = [Schedule(), Schedule(paired=True), *(Schedule(kind) for kind in OF_CHUNKS.get(chunks, ()))]
        for overlap, without_backward, schedule in product((False, True), (False, True), schedules):
            pipeline = pipeline_of(schedule, stages, chunks)
            options = {"overlap": overlap, "without_backward": without_backward}
            programs = pipeline_programs(pipeline, microbatches, schedule, **options)
            validate_programs(programs, pipeline)
            kinds = {ActionKind.FORWARD} if without_backward else {ActionKind.FORWARD, ActionKind.BACKWARD}
            expected = {Action(*one) for one in product(kinds, range(chunks), range(microbatches))}
            splits_all = schedule.kind in (ScheduleKind.ZB_H1, ScheduleKind.ZBV) and stages > 1 and not without_backward
            for program in programs:
                order = [step for step in program if isinstance(step, (Action, Pair))]
                ran = passes(order)
                weights = [action for action in ran if action.kind is ActionKind.WEIGHT]
                assert len(ran) - len(weights) == len(expected) and set(ran) - set(weights) == expected
                assert len(weights) == len(held_backwards(order))
                assert len(weights) == chunks * microbatches if splits_all else stages > 1 or not weights


# One stage has one chunk, whatever the schedule.
OF_CHUNKS = {1: (ScheduleKind.ZB_H1,), 2: (ScheduleKind.ZBV, ScheduleKind.DUALPIPEV)}


# Stages wait for the first forward only. With few microbatches, the first backward of the first part ends late.
@pytest.mark.parametrize(
    ("kind", "stages", "microbatches", "units"),
    [
        *((ScheduleKind.ZB_H1, *sizes) for sizes in ((4, 8, 27), (8, 24, 79), (4, 4, 15), (2, 1, 5))),
        *((ScheduleKind.ZBV, *sizes) for sizes in ((4, 8, 51), (8, 24, 151), (4, 4, 27), (8, 5, 43), (2, 1, 9))),
        *((ScheduleKind.DUALPIPEV, *sizes) for sizes in ((4, 8, 54), (8, 24, 158), (2, 4, 26), (8, 5, 43))),
    ],
)
def test_weight_passes_shorten_the_step(kind: ScheduleKind, stages: int, microbatches: int, units: int) -> None:
    chunks = 1 if kind is ScheduleKind.ZB_H1 else 2
    pipeline = pipeline_of(Schedule(kind), stages, chunks)
    spans = timeline(stage_orders(pipeline, microbatches, Schedule(kind)), pipeline)
    ends = [max(span.end for span in stage.values()) for stage in spans]
    assert max(ends) == units
    if microbatches >= stages:
        # Pairs keep the passes of two microbatches together, at the cost of one forward for each other stage.
        waits = (stages - 1) * (2 if kind is ScheduleKind.DUALPIPEV else 1)
        assert units == 3 * chunks * microbatches + waits


@pytest.mark.parametrize("stages", [2, 3, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 17])
def test_a_v_holds_no_more_chunks_than_the_first_stage_of_1f1b(stages: int, microbatches: int) -> None:
    for kind, limit in ((ScheduleKind.ZBV, 2 * stages), (ScheduleKind.DUALPIPEV, 2 * stages + 1)):
        for order in stage_orders(Pipeline(stages, 2, True), microbatches, Schedule(kind)):
            frees = dict.fromkeys(held_backwards(order), 0)
            steps = [1 if one.kind is ActionKind.FORWARD else frees.get(one, -1) for one in passes(order)]
            held = list(accumulate(steps))
            assert max(held) <= min(limit, 2 * microbatches)


def test_a_v_is_the_placement_of_its_schedules_only() -> None:
    placement = Placement(3, 4, True)
    assert [placement.parts_of(stage) for stage in range(3)] == [[0, 5, 6, 11], [1, 4, 7, 10], [2, 3, 8, 9]]
    assert [placement.place_of(part) for part in (0, 3, 11)] == [(0, 0), (2, 1), (0, 3)]
    assert (placement.loss_stage, Placement(3, 4).loss_stage) == (0, 2)
    for pipeline, schedule, message in (
        (Pipeline(4, 2), Schedule(ScheduleKind.ZBV), "zbv with 2 model chunks per stage, placed in turns"),
        (Pipeline(4, 2, True), Schedule(), "1f1b with 2 model chunks per stage, placed in a V"),
        (Pipeline(4, 1, True), Schedule(ScheduleKind.DUALPIPEV), "dualpipev with 1 model chunks"),
        (Pipeline(4, 2, True), Schedule(ScheduleKind.ZBV, paired=True), "zbv with pairs"),
    ):
        with pytest.raises(ValueError, match=message):
            stage_orders(pipeline, 8, schedule)


def test_a_stage_cannot_hand_over_what_it_has_not_computed() -> None:
    pipeline = Pipeline(2, 2, True)
    programs = pipeline_programs(pipeline, 1, Schedule(ScheduleKind.ZBV))
    first, second = (next(step for step in programs[1] if str(step) == name) for name in ("F0.0", "F1.0"))
    swapped = [{first: second, second: first}.get(step, step) for step in programs[1]]
    with pytest.raises(ValueError, match=r"stage 1 runs F1\.0 without its input"):
        validate_programs([programs[0], tuple(swapped)], pipeline)


@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
def test_zb_h1_holds_no_more_microbatches_than_the_first_stage_of_1f1b(microbatches: int) -> None:
    for stage, order in enumerate(stage_orders(Pipeline(4), microbatches, Schedule(ScheduleKind.ZB_H1))):
        for ends, limit in ((ActionKind.BACKWARD, 4 - stage), (ActionKind.WEIGHT, 4)):
            steps = {ActionKind.FORWARD: 1, ends: -1}
            held = list(accumulate(steps.get(action.kind, 0) for action in passes(order)))
            assert max(held) == min(limit, microbatches), stage


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ("F0.0 W0.0 B0.0", r"runs W0\.0 before B0\.0"),
        ("F0.0 B0.0 W0.0 W0.0", r"runs W0\.0 twice"),
        ("F0.0 F0.1 B0.0 B0.1 W0.1 W0.0", r"runs W0\.1 before W0\.0, whose backward came first"),
        ("F0.0 F0.1 B0.0 B0.1 W0.0", r"runs B0\.1 before W0\.0, whose backward came first"),
    ],
)
def test_an_order_in_which_weight_passes_cannot_run_is_rejected(order: str, message: str) -> None:
    actions = [Action(ActionKind(one[0]), int(one[1]), int(one[3])) for one in order.split()]
    with pytest.raises(ValueError, match=message):
        validate_schedule(actions)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("group", [4, 5, 7, 16])
@pytest.mark.parametrize("microbatches", [1, 6, 9, 16])
def test_groups_of_any_size_from_the_number_of_stages_on_run(group: int, microbatches: int, paired: bool) -> None:
    programs = pipeline_programs(Pipeline(4, 3), microbatches, Schedule(group_size=group, paired=paired))
    validate_programs(programs, Pipeline(4, 3))


# Pairs hide exchanges of experts. If there are none, a step with pairs takes as long as one without.
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("stages", "chunks", "microbatches"), [(1, 1, 5), (4, 1, 8), (4, 1, 5), (4, 2, 8), (3, 4, 9), (8, 1, 1)]
)
def test_bubbles_are_those_of_the_known_schedules(stages: int, chunks: int, microbatches: int, paired: bool) -> None:
    pipeline = Pipeline(stages, chunks)
    orders = stage_orders(pipeline, microbatches, Schedule(paired=paired))
    share = bubble_share(timeline(orders, pipeline))
    assert share == pytest.approx((stages - 1) / (chunks * microbatches + stages - 1))
    if chunks == 1:
        for stage, order in enumerate(passes(one) for one in orders):
            in_flight = [sum(1 if a.kind is ActionKind.FORWARD else -1 for a in order[:n]) for n in range(len(order))]
            most = 2 * (stages - stage) - 1 if paired else stages - stage
            assert max(in_flight) == min(microbatches, most)


def test_pairs_follow_the_warm_up_but_not_the_first_forward_or_last_backward_of_a_chunk() -> None:
    for stages, chunks, microbatches, more in product(range(1, 6), range(1, 4), range(1, 14), (0, 1, 4)):
        if stages == 1 and chunks > 1:
            continue
        pipeline, group = Pipeline(stages, chunks), stages + more
        unpaired = stage_orders(pipeline, microbatches, Schedule(group_size=group))
        for stage, order in enumerate(stage_orders(pipeline, microbatches, Schedule(group_size=group, paired=True))):
            ran, pairs = passes(order), [step for step in order if isinstance(step, Pair)]
            forwards = forward_only(order)
            # Both kinds of passes run in the order without pairs.
            assert forwards == forward_only(unpaired[stage])
            assert [a for a in ran if a not in set(forwards)] == [a for a in unpaired[stage] if a not in set(forwards)]
            first = {action.chunk: action for action in reversed(forwards)}
            last = {action.chunk: action for action in ran if action.kind is ActionKind.BACKWARD}
            assert not {pair.forward for pair in pairs} & set(first.values())
            assert not {pair.backward for pair in pairs} & set(last.values())
            if chunks == 1 or microbatches % group == 0:
                ahead = forwards_ahead(stage, pipeline, group_size=group, paired=True)
                assert len(pairs) == max(0, chunks * microbatches - ahead)


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
    order = interleaved_schedule(1, Pipeline(2, 2), num_microbatches=3, paired=True)
    assert " ".join(map(str, order)) == "F0.0 F0.1 F1.0 B1.0+F1.1 B1.1+F0.2 B0.0 B0.1+F1.2 B1.2 B0.2"
    # A pair has both inputs before it starts, and sends both outputs after it has ended.
    middle = [str(step) for step in pipeline_programs(Pipeline(3), 5, Schedule(paired=True))[1]]
    start = middle.index("B0.0+F0.3")
    assert middle[start - 3 : start + 2] == (
        ["[send F0.2 to 2, receive F0.4 from 0, receive B0.0 from 2]", "await B0.0", "await F0.3", "B0.0+F0.3"]
        + ["[send B0.0 to 0, send F0.3 to 2, receive B0.1 from 2]"]
    )


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


def test_pairs_with_too_short_a_warm_up_are_refused() -> None:
    pipeline = Pipeline(2)
    f0, f1, b0, b1 = (Action(ActionKind(kind), 0, int(number)) for kind, number in ("F0", "F1", "B0", "B1"))
    # One forward for each following stage, as without pairs, and one for the last stage: the pair of each stage waits
    # for the pair of the other one.
    with pytest.raises(
        ValueError, match=r"regardless of the order of transfers: stage 0 at B0.0\+F0.1, stage 1 at B0.0"
    ):
        timeline([[f0, Pair(b0, f1), b1], [f0, Pair(b0, f1), b1]], pipeline)
    send, receive = (lambda action, way=way: Transfer(way, action, 1) for way in Direction)
    first = (f0, Post((send(f0), receive(b0))), Await(b0), Pair(b0, f1), Post((send(f1), receive(b1))), Await(b1), b1)
    send, receive = (lambda action, way=way: Transfer(way, action, 0) for way in Direction)
    last = (Post((receive(f0),)), Await(f0), f0, Post((receive(f1),)), Await(f1), Pair(b0, f1), Post((send(b0),)))
    last = (*last, b1, Post((send(b1),)))
    with pytest.raises(ValueError, match="schedule deadlocks: stage 0 before await B0.0, stage 1 before await F0.1"):
        validate_programs((first, last), pipeline)
    # Without the pair on the last stage, the same transfers are possible.
    at = last.index(Pair(b0, f1))
    validate_programs((first, (*last[:3], b0, Post((send(b0),)), *last[3:5], f1, *last[at + 2 :])), pipeline)
    without_input = (*first[:2], *first[3:])
    with pytest.raises(ValueError, match="stage 0 runs B0.0 without its input"):
        validate_programs((without_input, last), pipeline)


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("chunks", [1, 2])
def test_expanded_lists_are_what_the_stash_sees(chunks: int, paired: bool) -> None:
    pipeline = Pipeline(2, chunks)
    for order in stage_orders(pipeline, 5, Schedule(paired=paired)):
        events = expand(order, [[1, 3], [5]][:chunks])
        stash = stash_events(events)
        follower = StashOrder(stash)
        for event in stash:
            follower.observe(event)
        assert not follower.departed


def test_layers_that_run_again_do_so_before_the_backward_of_their_segment() -> None:
    first = expand([Action(kind, 0, 0) for kind in ActionKind], [[2, 3, 4]], recompute={2: 0, 3: 0})
    shown = " ".join(map(str, first))
    assert shown == (
        "F layer 2.0 F layer 3.0 F layer 4.0 B layer 4.0 R layer 2.0 R layer 3.0 B layer 3.0 B layer 2.0 "
        "W layer 4.0 W layer 3.0 W layer 2.0"
    )
    assert " ".join(map(str, kept_events(first))) == "F layer 4.0 B layer 4.0 W layer 4.0"


def _handing_over(name: str, segments: int, log: list[str]) -> Generator[None, None, None]:
    """A pass that hands over between its segments."""
    for number in range(segments):
        if number:
            yield
        log.append(f"{name}{number}")


def test_segments_of_a_pair_run_as_if_two_passes_handed_over() -> None:
    for backward, forward in product(range(1, 6), repeat=2):
        log: list[str] = []
        turn, other = _handing_over("b", backward, log), _handing_over("f", forward, log)
        while turn is not other:
            try:
                next(turn)
                turn, other = other, turn
            except StopIteration:
                turn = other
        for _ in turn:
            pass
        assert turn_order([f"b{n}" for n in range(backward)], [f"f{n}" for n in range(forward)]) == log


@pytest.mark.parametrize("recomputed_alone", [(), (2, 3)])
def test_expert_groups_of_a_pair_run_in_the_turns_of_their_layers(recomputed_alone: tuple[int, ...]) -> None:
    layers, recompute = [2, 3, 5], {2: 0, 3: 0}
    order = [
        Action(ActionKind.FORWARD, 0, 0),
        Pair(Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 1)),
    ]
    log: list[str] = []

    def forward(kind: str, instance: int, layers: list[int], *, hands_over: bool) -> Generator[None, None, None]:
        for layer in layers:
            yield from [None] * hands_over
            log.append(f"{kind} layer {layer}.{instance}")
            yield from [None] * hands_over

    def backward() -> Generator[None, None, None]:
        for segment in ([5], [2, 3]):
            if segment == [2, 3]:
                yield from forward("R", 0, segment, hands_over=not recomputed_alone)
            for layer in reversed(segment):
                yield
                log.append(f"B layer {layer}.0")
                yield

    for _ in forward("F", 0, layers, hands_over=False):
        pass
    running = [backward(), forward("F", 1, layers, hands_over=True)]
    while running:
        # Each pass runs to its next turn.
        running = [one for one in running if next(one, "ended") != "ended"]
    events = expand(order, [layers], recompute=recompute, recomputed_alone=recomputed_alone)
    assert [str(event) for event in events] == log
