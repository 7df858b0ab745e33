"""PassTurns: runs the backward and the forward of a pair in turns; each computes while the other exchanges rows.

schedule.py lists pairs, runner.py runs them, and expansion.py computes the order of their expert groups. Schedulers of
data-parallel collectives take turns of a different kind (distributed/turns.py).

[Note: turns] A pass that is about to wait for an exchange of rows hands over to the other pass of its pair, and
continues when the other one hands over or ends. The backward begins. So the launch of an exchange and its end enclose a
part of the other pass, which covers the exchange:

    backward: ... launch combine' |                        | experts'; launch dispatch' |                 | router' ...
    forward:                      | router; launch dispatch |                            | experts; launch combine | ...

The forward runs on the calling thread, and the backward on a thread of its own: autograd is not cut, so hooks,
recompute, and layers of any kind work as in a pass that runs alone. The two threads never compute at the same time, so
that the order of everything that they launch depends on the model and the schedule only, and is the same on every rank.
Both launch to the same stream. Autograd must not use its own thread of a GPU for the backward: there is one for all
backwards, and a backward that waits for its turn would block one that runs inside the forward, such as the capture of a
part of a layer as a CUDA graph.

A pass hands over only at an exchange of a MoE layer, and never while it holds state of its thread: a recomputation that
has restored the states of random-number generators keeps its turn until it ends.
"""

import enum
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue

import torch

from megatron.core.device import DelegateThread, ThreadSettings
from megatron.core.device.trace_ranges import trace_range
from megatron.core.tensor_parallel.random import redraws_numbers


class Role(enum.Enum):
    """The pass of a pair that a thread runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class PairAborted(RuntimeError):
    """Raised in a pass whose partner has failed."""


class PassTurns:
    """Runs pairs of passes in turns. See [Note: turns]. `close` ends its thread."""

    def __init__(self) -> None:
        self._thread = DelegateThread("backward of a pair")
        # Of the pair that is running: the passes that have not ended, the turns given to each, the first error, and the
        # pass that each thread runs.
        self._running: set[Role] = set()
        self._turns: dict[Role, SimpleQueue[None]] = {}
        self._error: BaseException | None = None
        self._roles: dict[int, Role] = {}

    def close(self) -> None:
        """Ends the thread."""
        # An interrupt may have left a backward that waits for its turn.
        self._end(set(self._running), PairAborted("the pair was closed"))
        self._thread.close()

    def run_pair(self, backward: Callable[[], None], forward: Callable[[], None]) -> None:
        """Runs both functions, the backward on the other thread, until both have ended.

        If one of them raises, the other ends with PairAborted when it is its turn. The first error is raised here.
        """
        self._running, self._error, self._roles = set(Role), None, {}
        self._turns = {role: SimpleQueue() for role in Role}
        settings, on_one_thread = ThreadSettings(), partial(_without_autograd_threads, backward)
        wait = self._thread.submit(partial(self._run, Role.BACKWARD, partial(settings.run, on_one_thread)))
        self._run(Role.FORWARD, partial(self._at_first_turn, forward))
        # Nothing of the pair may run any longer when the caller handles an error.
        wait()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # which references this frame

    @trace_range("PassTurns.hand_over")
    def hand_over(self) -> None:
        """Lets the other pass of a running pair continue, and returns when it hands over or ends.

        Called by the code of both passes, and by passes that run alone, which return immediately. So does a backward
        inside a forward on a thread of autograd. Raises PairAborted if the other pass has failed, or the pair was
        closed.
        """
        role = self._roles.get(threading.get_ident())
        if role is None or redraws_numbers():
            return
        other = Role.BACKWARD if role is Role.FORWARD else Role.FORWARD
        if other in self._running:
            self._turns[other].put(None)
            self._turns[role].get()
        self._check(role)

    def _at_first_turn(self, forward: Callable[[], None]) -> None:
        self._turns[Role.FORWARD].get()
        self._check(Role.FORWARD)
        forward()

    def _run(self, role: Role, run: Callable[[], None]) -> None:
        """Runs a pass, and records its error instead of raising it."""
        error = None
        try:
            self._roles[threading.get_ident()] = role
            run()
        except BaseException as raised:
            error = raised
        finally:
            self._roles.pop(threading.get_ident(), None)
            self._end({role}, error)
            del error

    def _end(self, roles: set[Role], error: BaseException | None) -> None:
        """Records that passes have ended, and lets the other pass continue, which fails if there is an error."""
        self._error = self._error or error
        self._running -= roles
        for turns in self._turns.values():
            turns.put(None)

    def _check(self, role: Role) -> None:
        if self._error is not None:
            raise PairAborted(f"the {role.value} pass of a pair was aborted, because the other pass has failed")


def _without_autograd_threads(backward: Callable[[], None]) -> None:
    with torch.autograd.set_multithreading_enabled(False):
        backward()
