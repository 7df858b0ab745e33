"""Alarms of the device model, with the lines of the project that caused them."""

import sys
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
_HERE = str(Path(__file__).parent)
_PROJECT = (str(ROOT / "megatron"), str(ROOT / "pretrain_gpt.py"), str(ROOT / "tests"), str(ROOT / "tools"))


class Kind(Enum):
    """Kinds of alarms."""

    RACE = "two accesses of the same memory, one of them a write, without an order"
    HANDED_OUT = "freed memory may be handed out again while a stream still uses it"
    CAPTURE_WAIT = "a wait across the border of a capture"
    UNJOINED = "a stream that a capture forked was not joined at its end"
    OUTSIDE = "work of a captured region on a stream that is not captured, which no replay repeats"
    FORBIDDEN = "a capture forbids it"
    GROWTH = "new memory is allocated while the memory that it replaces is alive"
    OVERWRITTEN = "a replay has overwritten this memory, which shares its pool"
    FREED = "a replay uses memory that was freed after the capture"
    RELEASED = "a kernel uses pages of the stash that were released"
    RETURNED = "pinned memory is returned to the operating system while the device may still use it"
    PAGEABLE = "a kernel uses host memory that is not pinned"
    UNREGISTERED = "captured work draws from a generator that the graph does not know"


@dataclass(frozen=True)
class Alarm:
    """An error that the device model found. sites: lines of the project, the later access first."""

    kind: Kind
    what: str
    sites: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kind.name}: {self.what}: {self.kind.value}; {' <- '.join(self.sites)}"


@dataclass
class AlarmList:
    """All alarms of a run; equal ones are counted once."""

    found: dict[Alarm, int] = field(default_factory=dict)

    def add(self, kind: Kind, what: str, *sites: str) -> None:
        """Records an alarm, or counts it if an equal one was recorded before."""
        alarm = Alarm(kind, what, sites)
        self.found[alarm] = self.found.get(alarm, 0) + 1

    def kinds(self) -> set[Kind]:
        """Returns the kinds of all alarms."""
        return {alarm.kind for alarm in self.found}


def site() -> str:
    """Returns file, line and function of the innermost three callers in the project, innermost first."""
    found: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(found) < 3:
        name = frame.f_code.co_filename
        if name.startswith(_PROJECT) and not name.startswith(_HERE):
            found.append(f"{name.removeprefix(str(ROOT) + '/')}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return " < ".join(found) or "autograd"
