"""Runs the sides of a section one after another in child processes, within a deadline. Measures nothing itself.

One child runs all sides, so that imports and the CUDA context are paid once. A new child takes over after a side that
failed, hung or left memory behind, because the first one may then be unusable. The parent never uses CUDA: a child
that is forked after its parent has used CUDA cannot use it.
"""

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from benchmarks.gpu.protocol import INCOMPLETE

Line = dict[str, Any]
# Sends a line of results to the parent.
Send = Callable[..., None]

# A side that takes this many times its expected seconds, and at least PATIENCE_SECONDS, is ended.
PATIENCE, PATIENCE_SECONDS = 2.0, 12.0
LEAVING_SECONDS = 5.0
MOST_BYTES_LEFT = 1 << 30  # a child with more reserved memory after a side is replaced
ERROR_CHARACTERS = 600


@dataclass(frozen=True)
class Task:
    """A side to run.

    expected: seconds on an H200. work: sends its lines as soon as it knows them. is_last_of_process: whether the next
    side runs in a new process.
    """

    name: str
    expected: float
    work: Callable[[Send], None]
    is_last_of_process: bool = False


@dataclass
class Outcome:
    """The lines that a side has sent so far.

    error: why the side stopped before its end, or None. skipped: why it was never started, or None.
    """

    lines: list[Line] = field(default_factory=list)
    error: str | None = None
    skipped: str | None = None

    @property
    def last(self) -> Line:
        """The last line, or {}."""
        return self.lines[-1] if self.lines else {}


@dataclass(frozen=True)
class _End:
    """End of a side. reserved: bytes that its process still reserves."""

    error: str | None
    reserved: int


def run_in_turn(
    tasks: Sequence[Task],
    *,
    deadline: float,
    prepare: Callable[[], object] = lambda: None,
    clean: Callable[[], int] = lambda: 0,
    on_line: Callable[[str, Line], None],
) -> dict[str, Outcome]:
    """Runs tasks one after another until the deadline, a time of time.monotonic. Returns what became of each.

    prepare: called once in each child. clean: called after each task; frees memory and returns the bytes still
    reserved. on_line: called with each line as soon as it arrives, including errors and tasks that were not started.
    """
    outcomes: dict[str, Outcome] = {}
    child: _Child | None = None
    for task in tasks:
        outcome = outcomes[task.name] = Outcome()
        left = deadline - time.monotonic()
        if left < task.expected:
            outcome.skipped = f"not started: {max(0.0, left):.0f} s left, {task.expected:.0f} s expected"
            on_line(task.name, {"skipped": outcome.skipped})
            continue
        child = child or _Child(tasks, prepare, clean)
        reserved = 0
        for message in child.run(task, seconds=min(left, max(PATIENCE_SECONDS, PATIENCE * task.expected))):
            if isinstance(message, _End):
                outcome.error, reserved = message.error, message.reserved
            else:
                outcome.lines.append(message)
                on_line(task.name, message)
        if outcome.error is not None:
            on_line(task.name, {"error": outcome.error})
        if outcome.error is not None or task.is_last_of_process or reserved > MOST_BYTES_LEFT:
            child.leave()
            child = None
    if child is not None:
        child.leave()
    return outcomes


def exit_status(outcomes: Iterable[Outcome], *, has_failed: bool) -> int:
    """Returns the exit status of a check of sides: 1, or INCOMPLETE if none failed but some were not started, or 0."""
    if has_failed:
        return 1
    return INCOMPLETE if any(one.skipped is not None for one in outcomes) else 0


class _Child:
    """A child process that runs the requested tasks."""

    def __init__(self, tasks: Sequence[Task], prepare: Callable[[], object], clean: Callable[[], int]) -> None:
        context = get_context("fork")
        self._connection, theirs = context.Pipe()
        # The child closes its copy of this end, and therefore notices that its parent was killed.
        self._process: BaseProcess = context.Process(
            target=_serve,
            args=(self._connection, theirs, {task.name: task for task in tasks}, prepare, clean),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def run(self, task: Task, *, seconds: float) -> Iterator[Line | _End]:
        """Yields the task's lines and its end, which is an error after this many seconds."""
        end = time.monotonic() + seconds
        try:
            self._connection.send(task.name)
            while True:
                if not self._connection.poll(max(0.0, end - time.monotonic())):
                    yield _End(f"ended after {seconds:.0f} s without a result", 0)
                    return
                message = self._connection.recv()
                yield message
                if isinstance(message, _End):
                    return
        except (EOFError, OSError):
            self._process.join(LEAVING_SECONDS)
            yield _End(f"its process ended with exit code {self._process.exitcode}", 0)

    def leave(self) -> None:
        """Ends the process, so that its GPU memory is free."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(LEAVING_SECONDS)
        if self._process.is_alive():
            # A process that waits for the driver ignores SIGTERM.
            self._process.kill()
            self._process.join()
        self._connection.close()


def _serve(
    of_parent: Connection,
    connection: Connection,
    tasks: dict[str, Task],
    prepare: Callable[[], object],
    clean: Callable[[], int],
) -> None:
    of_parent.close()
    torch.set_num_threads(1)
    failed = error_of(prepare)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        while (name := connection.recv()) is not None:
            with redirect_stdout(nowhere):
                error = failed or error_of(lambda: tasks[name].work(lambda **line: connection.send(line)))
                reserved = 0
                if error is None:
                    gc.collect()
                    reserved = clean()
            connection.send(_End(error, reserved))


def error_of(work: Callable[[], object]) -> str | None:
    """Runs `work` and returns a description of any exception, also of one that would end the process, or None."""
    try:
        work()
    except BaseException as error:  # whatever happens in a side is a result
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
    return None
