"""Schedules as data: pure functions that list the forward and backward passes of each stage, in order.

transfers.py derives the transfers between stages from these lists, and runner.py executes them.
"""

import enum
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple


class ActionKind(enum.Enum):
    """The pass that an action runs on its microbatch."""

    FORWARD = "F"
    BACKWARD = "B"

    # Enum's own hash is Python code, and schedules look up thousands of actions.
    __hash__ = object.__hash__


class Action(NamedTuple):
    """One pass of one microbatch through one model chunk."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


# The passes of each stage.
Orders = Sequence[Sequence[Action]]


class Neighbor(NamedTuple):
    """A pass of another stage that produces the input of a pass, or consumes its output."""

    stage: int
    action: Action


class Pipeline(NamedTuple):
    """Model chunks over stages: chunk c of stage s is part c * num_stages + s of the model."""

    num_stages: int
    num_chunks: int = 1

    def source(self, stage: int, action: Action) -> Neighbor | None:
        """Returns the pass that produces an action's input; None for the first forward and backward of a microbatch."""
        return _neighbor(self, stage, action=action, distance=-1 if action.kind is ActionKind.FORWARD else 1)

    def target(self, stage: int, action: Action) -> Neighbor | None:
        """Returns the pass that consumes an action's output; None for the last forward and backward of a microbatch."""
        return _neighbor(self, stage, action=action, distance=1 if action.kind is ActionKind.FORWARD else -1)


# Called five times per pass while lists are built and checked.
@lru_cache(maxsize=1 << 14)
def _neighbor(pipeline: Pipeline, stage: int, *, action: Action, distance: int) -> Neighbor | None:
    part = action.chunk * pipeline.num_stages + stage + distance
    if not 0 <= part < pipeline.num_stages * pipeline.num_chunks:
        return None
    chunk, its_stage = divmod(part, pipeline.num_stages)
    return Neighbor(its_stage, Action(action.kind, chunk, action.microbatch))


def one_forward_one_backward(stage: int, num_stages: int, *, num_microbatches: int) -> list[Action]:
    """Lists the 1F1B schedule of a stage: one warm-up forward per following stage, then alternating passes.

    Any number of microbatches is allowed. At most num_stages - stage microbatches are between forward and backward
    (PipeDream-Flush, Narayanan et al. 2021).
    """
    forwards = [Action(ActionKind.FORWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(ActionKind.BACKWARD, 0, microbatch) for microbatch in range(num_microbatches)]
    return _alternating(forwards, backwards, ahead=forwards_ahead(stage, Pipeline(num_stages)))


def interleaved_schedule(
    stage: int, pipeline: Pipeline, *, num_microbatches: int, group_size: int | None = None
) -> list[Action]:
    """Lists the interleaved 1F1B schedule of a stage.

    `group_size` microbatches pass through a chunk before the stage continues with its next chunk. group_size: at least
    the number of stages, which is the default, because smaller groups would wait for themselves. Any number of
    microbatches is allowed: a last group smaller than the number of stages is scheduled as if it were complete, and its
    missing microbatches are skipped. Raises ValueError for a smaller group_size.
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
    ahead = forwards_ahead(stage, pipeline, group_size=group_size)
    return [a for a in _alternating(forwards, backwards, ahead=ahead) if a.microbatch < num_microbatches]


def grouped_forwards(num_microbatches: int, num_chunks: int, *, group_size: int) -> list[Action]:
    """Lists a stage's forwards: `group_size` microbatches through each chunk in turn, then the next group."""
    return [
        Action(ActionKind.FORWARD, chunk, microbatch)
        for first in range(0, num_microbatches, group_size)
        for chunk in range(num_chunks)
        for microbatch in range(first, min(first + group_size, num_microbatches))
    ]


def forwards_ahead(stage: int, pipeline: Pipeline, *, group_size: int | None = None) -> int:
    """Returns the number of warm-up forwards before a stage alternates, if the step has at least that many.

    group_size: group size of an interleaved schedule; None means the number of stages.
    """
    following = pipeline.num_stages - stage - 1
    if pipeline.num_chunks == 1:
        return following
    return following * 2 + (pipeline.num_chunks - 1) * (group_size or pipeline.num_stages)


def _alternating(forwards: list[Action], backwards: list[Action], *, ahead: int) -> list[Action]:
    ahead = min(ahead, len(forwards))
    steady = [action for pair in zip(forwards[ahead:], backwards) for action in pair]
    return [*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :]]


def stage_orders(pipeline: Pipeline, num_microbatches: int, *, group_size: int | None = None) -> list[list[Action]]:
    """Lists the passes of every stage: sequential for one stage, 1F1B for several, interleaved for several chunks.

    Raises ValueError for a group that is too small, and for several chunks without pipeline stages.
    """
    if pipeline.num_chunks > 1:
        if pipeline.num_stages == 1:
            raise ValueError(
                f"{pipeline.num_chunks} model chunks were given: without pipeline parallelism there must be exactly 1"
            )
        return [
            interleaved_schedule(stage, pipeline, num_microbatches=num_microbatches, group_size=group_size)
            for stage in range(pipeline.num_stages)
        ]
    # With one stage, each backward directly follows its forward.
    return [
        one_forward_one_backward(stage, pipeline.num_stages, num_microbatches=num_microbatches)
        for stage in range(pipeline.num_stages)
    ]


def forward_only(actions: Sequence[Action]) -> list[Action]:
    """Returns the schedule without its backward passes, for evaluation."""
    return [action for action in actions if action.kind is ActionKind.FORWARD]


def validate_schedule(actions: Sequence[Action]) -> None:
    """Raises ValueError if an action repeats, or if a backward does not follow the forward of its microbatch."""
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ValueError(f"schedule runs {action} twice")
        forward = Action(ActionKind.FORWARD, action.chunk, action.microbatch)
        if action.kind is ActionKind.BACKWARD and forward not in seen:
            raise ValueError(f"schedule runs {action} before {forward}")
        seen.add(action)
