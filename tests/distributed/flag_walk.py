"""Traces the path of a flag: from the words of a command line to the function that uses the value. Holds no tests.

`trace_flag` starts the processes of a run twice on one rank, with --seed. In the second start it records each function
of megatron that holds the flag's word or its value, as an argument, in a local variable or as its result, and each
function that calls such a function. The walk ends with the first function outside of configuration, seed_generators.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from megatron.training.checkpointing.rng_state import seed_generators
from tests.distributed.batch_walk import COMMAND_LINE
from tests.distributed.tiny_runs import started_run
from tests.distributed.walks import ROOT, Entered, entered_function
from tests.harness import run_on_ranks

# A number that no other argument has.
_SEED = 4711


def trace_flag() -> list[Entered]:
    """Returns the functions from argv to seed_generators that hold --seed, or call one that does."""
    return run_on_ranks(_flag_on_rank, 1)[0]


def _flag_on_rank() -> list[Entered]:
    words = [*COMMAND_LINE.split(), "--seed", str(_SEED)]
    with started_run(words):
        pass
    with (
        traced_values([ROOT / "megatron"], _is_seed, until=seed_generators.__code__) as holders,
        started_run(words),
    ):
        pass
    return holders


def _is_seed(value: Any) -> bool:
    return (type(value) is int and value == _SEED) or (type(value) is str and value == str(_SEED))


@contextmanager
def traced_values(
    packages: Iterable[Path], is_value: Callable[[Any], bool], *, until: CodeType
) -> Iterator[list[Entered]]:
    """Yields a list that collects the functions of `packages` that hold a value, or call one that does, once each.

    They are in the order in which the value reaches them, callers first. until: the trace ends when this function is
    called.
    """
    holders: list[Entered] = []
    folders = tuple(packages)

    # Traces lines, because a local variable may hold the value for a few lines only.
    def trace(frame: FrameType, event: str, result: Any) -> Any:
        one = entered_function(frame.f_code, folders)
        if one is None:
            return None
        held = [*frame.f_locals.values(), result] if event == "return" else frame.f_locals.values()
        if one not in holders and any(map(is_value, held)):
            holders.extend(caller for caller in _stack(frame, folders) if caller not in holders)
        if frame.f_code is until:
            sys.settrace(before)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield holders
    finally:
        sys.settrace(before)


def _stack(frame: FrameType | None, packages: tuple[Path, ...]) -> list[Entered]:
    """Returns the functions of `packages` on the stack that ends in `frame`, outermost first, once each."""
    found = []
    while frame is not None:
        found.append(entered_function(frame.f_code, packages))
        frame = frame.f_back
    return list(dict.fromkeys(one for one in reversed(found) if one is not None))
