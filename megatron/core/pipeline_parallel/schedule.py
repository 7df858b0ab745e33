"""Schedules as data: pure functions that list the forward and backward passes of each stage, in order.

transfers.py derives the transfers between stages from these lists, and runner.py executes them.

[Note: weight passes] A schedule may list the weight gradients of a backward as a pass of their own (Qi et al. 2023,
"Zero Bubble Pipeline Parallelism"). Its backward then computes the gradients of activations, which the previous stage
waits for, and holds everything else until the weight pass, which depends on no other stage and may fill the time in
which a stage would wait. A backward without a weight pass computes both. Parameters receive the gradients of a
microbatch, of matrices and of all others, in its weight pass, so reductions start only there.

[Note: warm-up of paired passes] A pair starts when the inputs of both passes are there, and both outputs leave when the
pair ends. With 1F1B's usual warm-up, one forward for each following stage, the last stage would pair a backward with
the forward that it depends on. With one more forward, each pair of a stage would need the previous pair of the stage
before it, and that pair would need the previous pair of this stage, so adjacent stages would run in turns, at half
speed. Two forwards for each following stage, and one more, keep all stages busy. The usual warm-up of the interleaved
schedule has two for each following stage, so one more is sufficient.
"""

import enum
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple, Protocol

from megatron.core.pipeline_placement import V_SCHEDULES, Placement, placement_of


class ActionKind(enum.Enum):
    """The pass that an action runs on its microbatch. WEIGHT: see [Note: weight passes]."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    # Enum's own hash is Python code, and schedules look up thousands of actions.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One pass of one microbatch through one model chunk."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"

    @property
    def passes(self) -> tuple["Action", ...]:
        """The action itself, as for a pair."""
        return (self,)

    def of_kind(self, kind: ActionKind) -> "Action":
        """Returns a pass of another kind of the same microbatch through the same chunk."""
        return Action(kind, self.chunk, self.microbatch)


class Pair(NamedTuple):
    """A backward and the forward of another microbatch, which run together and take turns. The backward begins."""

    backward: Action
    forward: Action

    def __str__(self) -> str:
        return f"{self.backward}+{self.forward}"

    @property
    def passes(self) -> tuple[Action, ...]:
        """The backward and the forward."""
        return tuple(self)


# The passes of one stage, and of each stage.
Order = Sequence[Action | Pair]
Orders = Sequence[Order]


def passes(order: Order) -> list[Action]:
    """Lists the passes of an order, the backward of a pair before its forward."""
    return [action for step in order for action in step.passes]


def held_backwards(order: Order) -> frozenset[Action]:
    """Returns the backwards whose weight gradients are a pass of their own. See [Note: weight passes]."""
    return frozenset(
        action.of_kind(ActionKind.BACKWARD) for action in passes(order) if action.kind is ActionKind.WEIGHT
    )


class Neighbor(NamedTuple):
    """A pass of another stage that produces the input of a pass, or consumes its output."""

    stage: int
    action: Action


class Pipeline(Placement):
    """Stages with their chunks, and the passes between which tensors are handed over."""

    __slots__ = ()

    def source(self, stage: int, action: Action) -> Neighbor | None:
        """Returns the pass of another part that produces an action's input; None if no other part is involved."""
        return _neighbor(self, stage, action=action, distance=-1 if action.kind is ActionKind.FORWARD else 1)

    def target(self, stage: int, action: Action) -> Neighbor | None:
        """Returns the pass of another part that consumes an action's output; None if no other part is involved."""
        return _neighbor(self, stage, action=action, distance=1 if action.kind is ActionKind.FORWARD else -1)

    def sender(self, stage: int, action: Action) -> Neighbor | None:
        """Returns the source if another stage runs it, and None if this stage hands the input over itself."""
        source = self.source(stage, action)
        return None if source is None or source.stage == stage else source

    def receiver(self, stage: int, action: Action) -> Neighbor | None:
        """Returns the target if another stage runs it, and None if this stage hands the output over itself."""
        target = self.target(stage, action)
        return None if target is None or target.stage == stage else target


# Called five times per pass while lists are built and checked.
@lru_cache(maxsize=1 << 14)
def _neighbor(pipeline: Pipeline, stage: int, *, action: Action, distance: int) -> Neighbor | None:
    part = pipeline.part_of(stage, action.chunk) + distance
    if action.kind is ActionKind.WEIGHT or not 0 <= part < pipeline.num_parts:
        return None
    its_stage, chunk = pipeline.place_of(part)
    return Neighbor(its_stage, Action(action.kind, chunk, action.microbatch))


class ScheduleKind(enum.Enum):
    """The values of --pipeline-schedule.

    ONE_F_ONE_B: alternating passes, also with several chunks per stage. ZB_H1: see zero_bubble_h1. ZBV, DUALPIPEV: two
    chunks per stage, placed in a V; see zero_bubble_v and dualpipe_v.
    """

    ONE_F_ONE_B = "1f1b"
    ZB_H1 = "zb-h1"
    ZBV = "zbv"
    DUALPIPEV = "dualpipev"

    __hash__ = object.__hash__


class Schedule(NamedTuple):
    """How the passes of a step are ordered, for any number of stages and microbatches.

    group_size: see interleaved_schedule; None means the number of stages. paired: whether a backward and the forward of
    another microbatch form a pair after the warm-up. ZB_H1 and ZBV have no pairs, and DUALPIPEV has them in any case.
    """

    kind: ScheduleKind = ScheduleKind.ONE_F_ONE_B
    group_size: int | None = None
    paired: bool = False


ONE_F_ONE_B = Schedule()


class ScheduleConfig(Protocol):
    """The fields of ModelParallelConfig that choose a schedule."""

    pipeline_schedule: str
    microbatch_group_size_per_vp_stage: int | None
    overlap_moe_expert_parallel_comm: bool


def configured_schedule(config: ScheduleConfig) -> Schedule:
    """Returns the schedule that a configuration chooses for training steps."""
    return Schedule(
        ScheduleKind(config.pipeline_schedule),
        config.microbatch_group_size_per_vp_stage,
        config.overlap_moe_expert_parallel_comm,
    )


def pipeline_of(schedule: Schedule, num_stages: int, num_chunks: int) -> Pipeline:
    """Returns the pipeline of a schedule."""
    return Pipeline(*placement_of(schedule.kind.value, num_stages, num_chunks))


def one_forward_one_backward(
    stage: int, num_stages: int, *, num_microbatches: int, paired: bool = False
) -> list[Action | Pair]:
    """Lists the 1F1B schedule of a stage: one warm-up forward per following stage, then alternating passes.

    Any number of microbatches is allowed. At most num_stages - stage microbatches are between forward and backward
    (PipeDream-Flush, Narayanan et al. 2021). paired: whether alternating passes form pairs, after a longer warm-up; at
    most 2 (num_stages - stage) - 1 microbatches are then between forward and backward, apart from the running pair.
    """
    forwards = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    ahead = forwards_ahead(stage, Pipeline(num_stages), paired=paired)
    return _alternating(forwards, backwards, ahead=ahead, paired=paired)


def interleaved_schedule(
    stage: int, pipeline: Pipeline, *, num_microbatches: int, group_size: int | None = None, paired: bool = False
) -> list[Action | Pair]:
    """Lists the interleaved 1F1B schedule of a stage.

    `group_size` microbatches pass through a chunk before the stage continues with its next chunk. group_size: at least
    the number of stages, which is the default, because smaller groups would wait for themselves. paired: whether
    alternating passes form pairs, after a longer warm-up. Any number of microbatches is allowed: a last group smaller
    than the number of stages is scheduled as if it were complete, and its missing microbatches are skipped. Raises
    ValueError for a smaller group_size.
    """
    stages, chunks = pipeline.num_stages, pipeline.num_chunks
    group_size = stages if group_size is None else group_size
    if group_size < stages:
        raise ValueError(
            f"microbatch_group_size_per_vp_stage is {group_size}: must be at least pipeline_model_parallel_size "
            f"({stages})"
        )
    # Removing a microbatch from a valid schedule leaves a valid schedule, because microbatches do not depend on each
    # other.
    remainder = num_microbatches % group_size
    padded = num_microbatches + (max(0, stages - remainder) if remainder else 0)
    forwards = grouped_forwards(padded, chunks, group_size=group_size)
    backwards = [Action(ActionKind.BACKWARD, chunks - 1 - f.chunk, f.microbatch) for f in forwards]
    ahead = forwards_ahead(stage, pipeline, group_size=group_size, paired=paired)
    order = _alternating(forwards, backwards, ahead=ahead, paired=paired)
    return _only(order, lambda action: action.microbatch < num_microbatches)


def zero_bubble_h1(stage: int, num_stages: int, *, num_microbatches: int) -> list[Action]:
    """Lists the ZB-H1 schedule of a stage, in which weight passes fill the time at the end of 1F1B.

    Like 1F1B, apart from the weight passes, which follow `stage` backwards later, so that each backward of a stage
    directly follows that of the next stage. At most num_stages microbatches are between their forward and their weight
    pass, as on the first stage of 1F1B, and num_stages - stage of them between forward and backward (Qi et al. 2023,
    section 2.3). Any number of microbatches is allowed.
    """
    ahead = min(num_stages - stage, num_microbatches)
    order = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(ahead)]
    for microbatch in range(num_microbatches):
        order.append(Action(ActionKind.BACKWARD, 0, microbatch))
        if microbatch >= stage:
            order.append(Action(ActionKind.WEIGHT, 0, microbatch - stage))
        if microbatch + ahead < num_microbatches:
            order.append(Action(ActionKind.FORWARD, 0, microbatch + ahead))
    remaining = range(max(0, num_microbatches - stage), num_microbatches)
    return order + [Action(ActionKind.WEIGHT, 0, microbatch) for microbatch in remaining]


def zero_bubble_v(stage: int, num_stages: int, *, num_microbatches: int) -> list[Action]:
    """Lists the ZBV schedule of a stage with two chunks, placed in a V.

    Stages wait for num_stages - 1 forwards of a chunk, if all passes of a chunk take equally long and there are at
    least 2 num_stages - 2 microbatches. At most 2 num_stages forwards of a chunk are before their weight pass, which is
    the memory of the first stage of 1F1B (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory"). Any number
    of microbatches is allowed.
    """
    if num_microbatches <= num_stages:
        return _v_of_few(stage, num_stages, num_microbatches=num_microbatches)
    padded = max(num_microbatches, 2 * num_stages - 1)
    remaining = num_stages - stage
    order = _numbered(
        # Warm-up, until the first microbatch has returned to this stage, and until its backward reaches chunk 0.
        ("F0", 2 * remaining - 1),
        ("F1 F0", stage),
        ("F1 b1 W1", remaining),
        # All passes in turns, then without new microbatches.
        ("F0 b0 W0 F1 b1 W1", padded - 2 * num_stages + stage + 1),
        ("b0 W0 F1 b1 W1", remaining - 1),
        # Backwards that earlier stages wait for, and weight passes while this stage waits.
        ("b0 b1", stage),
        ("b0 W0", remaining),
        ("W1", stage),
        ("W0", stage),
    )
    # Missing microbatches are skipped, as in interleaved_schedule.
    return [action for action in passes(order) if action.microbatch < num_microbatches]


def dualpipe_v(stage: int, num_stages: int, *, num_microbatches: int) -> list[Action | Pair]:
    """Lists the DualPipeV schedule of a stage: two chunks, placed in a V, with pairs of passes of different chunks.

    At most 2 num_stages + 1 forwards of a chunk are before the end of their backward. Weight passes only fill the
    beginning and the end (DeepSeek-AI 2025, DualPipe; the V is by Sea AI Lab). With fewer than 2 num_stages
    microbatches, which would leave pairs and stages waiting for each other, the order is that of zero_bubble_v.
    """
    if num_microbatches < 2 * num_stages:
        return list(zero_bubble_v(stage, num_stages, num_microbatches=num_microbatches))
    following = num_stages - stage - 1
    half, is_odd = divmod(stage + 1, 2)
    return _numbered(
        # Warm-up, as in zero_bubble_v.
        ("F0", 2 * following),
        ("F0 F1", stage + 1),
        ("b1 W1 F1", following),
        # Pairs, then without new microbatches.
        ("B1+F0 B0+F1", num_microbatches - 2 * num_stages + stage + 1),
        ("B1 B0+F1", following),
        # Backwards, of which the second half leaves weight passes for the time in which this stage waits.
        ("B1 B0", half),
        ("B1 b0", is_odd),
        ("b1 b0", half),
        ("W b0", following),
        ("W", stage + 1),
    )


def _v_of_few(stage: int, num_stages: int, *, num_microbatches: int) -> list[Action]:
    """Lists ZBV for at most num_stages microbatches, all of which may be before their weight pass at the same time.

    Each microbatch passes through all parts and back without waiting, two units of time after the previous one. On each
    stage, no two passes then start at the same time. Weight passes fill what remains.
    """
    last = 2 * num_stages - 1
    starts: dict[int, Action] = {}
    for microbatch in range(num_microbatches):
        for kind, chunk, first in (
            (ActionKind.FORWARD, 0, stage),
            (ActionKind.FORWARD, 1, last - stage),
            (ActionKind.BACKWARD, 1, last + 1 + stage),
            (ActionKind.BACKWARD, 0, 2 * last + 1 - stage),
        ):
            starts[first + 2 * microbatch] = Action(kind, chunk, microbatch)
    order: list[Action] = []
    held: deque[Action] = deque()
    clock = 0
    for start, action in sorted(starts.items()):
        while held and clock < start:
            order.append(held.popleft())
            clock += 1
        order.append(action)
        clock = start + 1
        if action.kind is ActionKind.BACKWARD:
            held.append(action.of_kind(ActionKind.WEIGHT))
    return order + list(held)


def _numbered(*sections: tuple[str, int]) -> list[Action | Pair]:
    """Lists passes written as text, each section as often as given, for the next microbatch of kind and chunk.

    F0, B0: forward and full backward of chunk 0. b0: backward whose weight pass comes later. W0: the weight pass of the
    first of these backwards of chunk 0, and W: of any chunk. B0+F1: a pair.
    """
    numbers: Counter[tuple[ActionKind, int]] = Counter()
    held: list[Action] = []

    def next_action(text: str) -> Action:
        kind, chunk = ActionKind(text[0].upper()), text[1:]
        if kind is ActionKind.WEIGHT:
            backward = next(one for one in held if chunk in ("", str(one.chunk)))
            held.remove(backward)
            return backward.of_kind(kind)
        action = Action(kind, int(chunk), numbers[kind, int(chunk)])
        numbers[kind, int(chunk)] += 1
        if text[0] == "b":
            held.append(action)
        return action

    order: list[Action | Pair] = []
    for text, times in sections:
        for step in text.split() * times:
            actions = [next_action(part) for part in step.split("+")]
            order.append(Pair(*actions) if len(actions) == 2 else actions[0])
    return order


def grouped_forwards(num_microbatches: int, num_chunks: int, *, group_size: int) -> list[Action]:
    """Lists a stage's forwards: `group_size` microbatches through each chunk in turn, then the next group."""
    return [
        Action(ActionKind.FORWARD, chunk, microbatch)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def forwards_ahead(stage: int, pipeline: Pipeline, *, group_size: int | None = None, paired: bool = False) -> int:
    """Returns the number of warm-up forwards before a stage alternates, if the step has at least that many.

    group_size: group size of an interleaved schedule; None means the number of stages. paired: whether alternating
    passes form pairs, see [Note: warm-up of paired passes].
    """
    following = pipeline.num_stages - stage - 1
    if pipeline.num_chunks == 1 and not paired:
        return following
    ahead = following * 2 + (pipeline.num_chunks - 1) * (group_size or pipeline.num_stages)
    return ahead + 1 if paired else ahead


def _alternating(forwards: list[Action], backwards: list[Action], *, ahead: int, paired: bool) -> list[Action | Pair]:
    ahead = min(ahead, len(forwards))
    steady: list[Action | Pair] = []
    for forward, backward in zip(forwards[ahead:], backwards):
        steady += [Pair(backward, forward)] if paired else [forward, backward]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]


def _only(order: Order, is_kept: Callable[[Action], bool]) -> list[Action | Pair]:
    """Removes passes from an order. A pass that loses the other pass of its pair remains as an action."""
    remaining: list[Action | Pair] = []
    for step in order:
        kept = [action for action in step.passes if is_kept(action)]
        remaining += [step] if len(kept) == len(step.passes) else kept
    return remaining


def stage_orders(
    pipeline: Pipeline, num_microbatches: int, schedule: Schedule = ONE_F_ONE_B
) -> list[list[Action | Pair]]:
    """Lists the passes of every stage: sequential for one stage, 1F1B for several, interleaved for several chunks.

    schedule: chooses other orders for several stages. A stage without forwards after the warm-up has no pairs. Neither
    a chunk's first forward nor its last backward is ever in a pair. Raises ValueError for a group that is too small,
    for several chunks without pipeline stages, and for chunks, a placement or pairs that the kind of schedule does not
    have.
    """
    kind, group_size, paired = schedule
    if pipeline.num_stages > 1:
        _check_kind(kind, pipeline, paired=paired)
        fixed = _FIXED_ORDERS.get(kind)
        if fixed is not None:
            return [
                list(fixed(stage, pipeline.num_stages, num_microbatches=num_microbatches))
                for stage in range(pipeline.num_stages)
            ]
    if pipeline.num_chunks > 1:
        if pipeline.num_stages == 1:
            raise ValueError(
                f"{pipeline.num_chunks} model chunks were given: without pipeline parallelism there must be exactly 1"
            )
        return [
            interleaved_schedule(
                stage, pipeline, num_microbatches=num_microbatches, group_size=group_size, paired=paired
            )
            for stage in range(pipeline.num_stages)
        ]
    # With one stage, each backward directly follows its forward, or the forward of the next microbatch in a pair.
    return [
        one_forward_one_backward(stage, pipeline.num_stages, num_microbatches=num_microbatches, paired=paired)
        for stage in range(pipeline.num_stages)
    ]


class _FixedOrder(Protocol):
    """A schedule that depends on nothing but the numbers of stages and microbatches."""

    def __call__(self, stage: int, num_stages: int, *, num_microbatches: int) -> Order: ...


_FIXED_ORDERS: dict[ScheduleKind, _FixedOrder] = {
    ScheduleKind.ZB_H1: zero_bubble_h1,
    ScheduleKind.ZBV: zero_bubble_v,
    ScheduleKind.DUALPIPEV: dualpipe_v,
}


def _check_kind(kind: ScheduleKind, pipeline: Pipeline, *, paired: bool) -> None:
    """Raises ValueError unless stages and pairs are those of a kind of schedule. pipeline: with several stages."""
    is_v = kind.value in V_SCHEDULES
    if is_v != pipeline.is_v or (is_v and pipeline.num_chunks != 2):
        raise ValueError(
            f"schedule {kind.value} with {pipeline.num_chunks} model chunks per stage, placed in "
            f"{'a V' if pipeline.is_v else 'turns'}: must have {'2 chunks in a V' if is_v else 'chunks in turns'}"
        )
    if kind is ScheduleKind.ZB_H1 and pipeline.num_chunks > 1:
        raise ValueError(f"schedule {kind.value} with {pipeline.num_chunks} model chunks per stage: must have 1")
    if paired and kind in (ScheduleKind.ZB_H1, ScheduleKind.ZBV):
        raise ValueError(
            f"schedule {kind.value} with pairs: must have none, because only backwards without passes for "
            "their weight gradients form pairs"
        )


def forward_only(order: Order) -> list[Action]:
    """Returns the schedule without its backward passes, and therefore without pairs, for evaluation."""
    return [action for action in passes(order) if action.kind is ActionKind.FORWARD]


def validate_schedule(order: Order) -> None:
    """Raises ValueError if a stage cannot run its passes in this order.

    An action may not repeat, a backward must follow the forward of its microbatch, and a weight pass the backward. The
    weight gradients of a chunk are completed in the order of its backwards, so that their sums do not depend on the
    schedule. A pair consists of a backward and a forward that do not depend on each other. Dependencies that pass
    through other stages are checked by validation.py.
    """
    seen: set[Action] = set()
    held = held_backwards(order)
    # For each chunk, the backwards whose weight gradients are held, in order.
    pending: dict[int, deque[Action]] = {}
    for step in order:
        if isinstance(step, Pair):
            _validate_pair(step)
        for action in step.passes:
            if action in seen:
                raise ValueError(f"schedule runs {action} twice")
            before = _PRECEDING.get(action.kind)
            if before is not None and action.of_kind(before) not in seen:
                raise ValueError(f"schedule runs {action} before {action.of_kind(before)}")
            waiting = pending.setdefault(action.chunk, deque())
            if action in held:
                waiting.append(action.of_kind(ActionKind.WEIGHT))
            elif action.kind is not ActionKind.FORWARD and waiting and waiting[0] != action:
                raise ValueError(f"schedule runs {action} before {waiting[0]}, whose backward came first")
            elif action.kind is ActionKind.WEIGHT:
                waiting.popleft()
            seen.add(action)


# The pass of the same microbatch and chunk that each kind of pass must follow.
_PRECEDING = {ActionKind.BACKWARD: ActionKind.FORWARD, ActionKind.WEIGHT: ActionKind.BACKWARD}


def _validate_pair(pair: Pair) -> None:
    if pair.backward.kind is not ActionKind.BACKWARD or pair.forward.kind is not ActionKind.FORWARD:
        raise ValueError(f"schedule pairs {pair}: must be a backward and a forward")
    if (pair.backward.chunk, pair.backward.microbatch) == (pair.forward.chunk, pair.forward.microbatch):
        raise ValueError(f"schedule pairs {pair}: the backward needs what the forward computes")
