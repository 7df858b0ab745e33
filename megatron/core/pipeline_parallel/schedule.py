"""Schedules as data: pure functions that list the forward and backward actions of a step, in order.

Nothing is executed here; runner.py does that.
"""

import enum
from dataclasses import dataclass


class ActionKind(enum.Enum):
    """What an action does with its microbatch."""

    FORWARD = "F"
    BACKWARD = "B"


@dataclass(frozen=True)
class Action:
    """One pass of one microbatch through one model chunk."""

    kind: ActionKind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}.{self.microbatch}"


def no_pipelining_schedule(num_microbatches: int) -> list[Action]:
    """Each microbatch's forward directly followed by its backward: one microbatch's activations live at a time."""
    return [
        Action(kind, chunk=0, microbatch=microbatch)
        for microbatch in range(num_microbatches)
        for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
    ]


def forward_only(actions: list[Action]) -> list[Action]:
    """The same schedule without its backward actions, for evaluation."""
    return [action for action in actions if action.kind is ActionKind.FORWARD]


def validate_schedule(actions: list[Action]) -> None:
    """Raises ValueError unless no action repeats and each backward comes after its own forward."""
    seen: set[Action] = set()
    for action in actions:
        if action in seen:
            raise ValueError(f"schedule runs {action} twice")
        forward = Action(ActionKind.FORWARD, action.chunk, action.microbatch)
        if action.kind is ActionKind.BACKWARD and forward not in seen:
            raise ValueError(f"schedule runs {action} before {forward}")
        seen.add(action)
