"""Runs of the training program whose passes take turns, with a record of the turns. Holds no tests."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest.mock import patch

from megatron.core.pipeline_parallel.pass_turns import PassTurns, Role
from tests.functional_tests.case import Flags

PAIRS: Flags = {"overlap-moe-expert-parallel-comm": True}
DELAYED: Flags = {"delay-wgrad-compute": True}
EXPERTS_DELAYED: Flags = {"overlap-dispatch-backward-with-experts-wgrad": True}
THREAD = "backward of a pair"


@dataclass
class PairLog:
    """Record of the pairs of this rank, in order.

    num_changes: for each pair, how often one pass continued after a part of the other one. role: the pass that runs.
    """

    num_changes: list[int] = field(default_factory=list)
    role: Role | None = None

    def run(self, role: Role) -> None:
        """Records that a pass begins, or continues after its turn."""
        self.num_changes[-1] += self.role not in (None, role)
        self.role = role


@contextmanager
def watched_pairs() -> Iterator[PairLog]:
    """Records the pairs that run inside the block."""
    log, run_pair, hand_over = PairLog(), PassTurns.run_pair, PassTurns.hand_over

    def watched(turns: PassTurns, backward: Callable[[], None], forward: Callable[[], None]) -> None:
        log.num_changes.append(0)
        log.role = None
        run_pair(turns, _after(log, Role.BACKWARD, backward), _after(log, Role.FORWARD, forward))
        log.role = None

    def handed_over(turns: PassTurns) -> None:
        role = log.role and _role()
        hand_over(turns)
        if role is not None:
            log.run(role)

    with patch.object(PassTurns, "run_pair", watched), patch.object(PassTurns, "hand_over", handed_over):
        yield log


def _after(log: PairLog, role: Role, run: Callable[[], None]) -> Callable[[], None]:
    def logged() -> None:
        log.run(role)
        run()

    return logged


def _role() -> Role:
    return Role.BACKWARD if threading.current_thread().name == THREAD else Role.FORWARD
