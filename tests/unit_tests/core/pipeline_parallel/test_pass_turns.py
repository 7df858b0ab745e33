"""PassTurns: the order of the turns of a pair, errors in its passes, and the settings of the backward's thread."""

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.core.device import inherited_by_threads
from megatron.core.model_parallel_config import ExpertOverlapConfig
from megatron.core.pipeline_parallel.expansion import turn_order
from megatron.core.pipeline_parallel.expert_overlap import ExpertOverlap
from megatron.core.pipeline_parallel.pass_turns import PairAborted, PassTurns
from megatron.core.tensor_parallel.random import recompute

SETTING: ContextVar[str] = ContextVar("setting", default="none")


@pytest.fixture
def turns() -> Iterator[PassTurns]:
    before = set(threading.enumerate())
    made = PassTurns()
    yield made
    made.close()
    assert set(threading.enumerate()) == before, "close ends the thread, also after an error"


@pytest.fixture
def alarm() -> Iterator[None]:
    """Makes SIGALRM raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGALRM, before)


class Passes:
    """Two passes that record their segments, and hand over between them. ended: the passes that have ended."""

    def __init__(self, turns: PassTurns) -> None:
        self._turns, self.seen, self.ended = turns, list[str](), list[str]()

    def one(self, name: str, num_turns: int, *, fails_in: int | None = None) -> Callable[[], None]:
        """Returns a pass with num_turns + 1 segments. fails_in: the segment that raises KeyError(name)."""

        def run() -> None:
            try:
                for segment in range(num_turns + 1):
                    if segment:
                        self._turns.hand_over()
                    self.seen.append(f"{name}{segment}")
                    if segment == fails_in:
                        raise KeyError(name)
            finally:
                self.ended.append(name)

        return run


def segments(name: str, num_turns: int) -> list[str]:
    return [f"{name}{segment}" for segment in range(num_turns + 1)]


@pytest.mark.parametrize("num_backward", range(4))
def test_passes_alternate_as_planned_whatever_their_numbers_of_turns(turns: PassTurns, num_backward: int) -> None:
    for num_forward in range(5):
        passes = Passes(turns)
        turns.run_pair(passes.one("B", num_backward), passes.one("F", num_forward))
        assert passes.seen == turn_order(segments("B", num_backward), segments("F", num_forward))


def test_a_pass_that_runs_alone_never_waits(turns: PassTurns) -> None:
    passes = Passes(turns)
    alone = passes.one("F", 2)
    alone()
    turns.run_pair(passes.one("B", 1), passes.one("G", 1))
    alone()
    assert passes.ended == ["F", "B", "G", "F"]


@pytest.mark.parametrize("name", ["B", "F"])
@pytest.mark.parametrize("segment", range(3))
def test_an_error_ends_the_other_pass_at_its_next_turn(turns: PassTurns, name: str, segment: int) -> None:
    passes, other = Passes(turns), "BF".replace(name, "")
    fails_in = {name: segment, other: None}
    with pytest.raises(KeyError, match=name):
        turns.run_pair(passes.one("B", 4, fails_in=fails_in["B"]), passes.one("F", 4, fails_in=fails_in["F"]))
    # The backward begins, so that a forward whose backward fails in its first segment never starts.
    has_started = (name, segment) != ("B", 0)
    assert passes.ended == ([name, other] if has_started else [name])
    assert passes.seen[-1] == f"{name}{segment}", "the other pass computes nothing after the error"
    again = Passes(turns)
    turns.run_pair(again.one("B", 1), again.one("F", 1))
    assert again.seen == ["B0", "F0", "B1", "F1"]


@pytest.mark.parametrize("fails_first", ["B", "F"])
def test_the_first_error_is_raised_even_if_the_other_pass_fails_when_it_is_aborted(
    turns: PassTurns, fails_first: str
) -> None:
    first = ZeroDivisionError("first")

    def fail() -> None:
        turns.hand_over()
        raise first

    def fail_again() -> None:
        try:
            turns.hand_over()
            turns.hand_over()
        except PairAborted as error:
            raise KeyError("second") from error

    with pytest.raises(ZeroDivisionError) as raised:
        turns.run_pair(*((fail, fail_again) if fails_first == "B" else (fail_again, fail)))
    assert raised.value is first and first.__context__ is None


def test_an_error_of_a_node_of_autograd_is_raised_as_it_is(turns: PassTurns) -> None:
    error, leaf = ValueError("in a hook"), torch.ones(2, requires_grad=True)

    def fail(grad: torch.Tensor) -> None:
        turns.hand_over()
        raise error

    loss = leaf.sum()
    leaf.register_hook(fail)
    passes = Passes(turns)
    with pytest.raises(ValueError, match="in a hook") as raised:
        turns.run_pair(loss.backward, passes.one("F", 3))
    assert raised.value is error and passes.seen == ["F0"] and leaf.grad is None


# In the forward's thread, an interrupt comes while it computes or waits.
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("is_waiting", [False, True])
def test_an_interrupt_ends_both_passes(turns: PassTurns, is_waiting: bool) -> None:
    passes = Passes(turns)

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(0.05)

    def backward() -> None:
        turns.hand_over()
        if is_waiting:
            interrupt()
        passes.one("B", 2)()

    def forward() -> None:
        if not is_waiting:
            interrupt()
        passes.one("F", 2)()

    with pytest.raises(KeyboardInterrupt):
        turns.run_pair(backward, forward)
    # The running segment of the backward ends first.
    assert passes.seen == (["F0", "B0"] if is_waiting else [])


@pytest.mark.usefixtures("alarm")
def test_a_backward_that_an_interrupt_leaves_running_ends_at_its_next_turn(turns: PassTurns) -> None:
    ended = list[BaseException]()

    def backward() -> None:
        turns.hand_over()
        os.kill(os.getpid(), signal.SIGALRM)
        deadline = time.monotonic() + 10
        try:
            while time.monotonic() < deadline:
                turns.hand_over()
        except PairAborted as error:
            ended.append(error)
            raise

    with pytest.raises(KeyboardInterrupt):
        turns.run_pair(backward, lambda: None)
    turns.close()
    assert len(ended) == 1


@pytest.mark.usefixtures("alarm")
def test_an_interrupt_at_any_time_hangs_nothing(turns: PassTurns) -> None:
    # After random times, so that an interrupt meets each line of the caller's thread in some run.
    num_interrupted = 0
    for attempt in range(200):
        passes = Passes(turns)
        # Starts the thread. An interrupt of Thread.start would leave threading itself in an inconsistent state.
        turns.run_pair(passes.one("B", 1), passes.one("F", 1))
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 * (attempt + 1))
                turns.run_pair(passes.one("B", 60), passes.one("F", 60))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            num_interrupted += 1
            turns.close()
            turns = PassTurns()
    turns.close()
    assert num_interrupted > 20


class Ops(TorchDispatchMode):
    """Records the names of operators, from the beginning whenever it is entered."""

    def __enter__(self) -> "Ops":
        self.seen: list[str] = []
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


def test_the_backward_runs_with_the_settings_of_the_caller(turns: PassTurns) -> None:
    leaf, found = torch.ones(3, requires_grad=True), dict[str, Any]()
    loss, ones, ops, entered = leaf.square().sum(), torch.ones(()), Ops(), list[int]()

    @contextmanager
    def record_thread() -> Iterator[None]:
        entered.append(threading.get_ident())
        yield

    def backward() -> None:
        found["thread"], found["device"] = threading.get_ident(), torch.empty(0).device.type
        loss.backward(ones, retain_graph=True)

    def look(grad: torch.Tensor) -> None:
        found["autocast"] = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
        found["setting"] = SETTING.get()

    leaf.register_hook(look)
    token = SETTING.set("given")
    try:
        with (
            ops,
            torch.autocast("cpu", dtype=torch.bfloat16),
            torch.device("meta"),
            inherited_by_threads(record_thread),
        ):
            ops.seen.append("before")
            turns.run_pair(backward, lambda: ops.seen.append("forward"))
            assert torch.is_autocast_enabled("cpu") and torch.empty(0).device.type == "meta"
    finally:
        SETTING.reset(token)
    assert entered == [found.pop("thread")] != [threading.get_ident()] and ops.seen[0] == "before"
    assert found == {"autocast": torch.bfloat16, "device": "meta", "setting": "given"}
    assert "aten::mul.Tensor" in ops.seen and ops.seen.index("forward") > ops.seen.index("aten::mul.Tensor")
    # Settings of an earlier pair do not remain on the thread.
    turns.run_pair(backward, lambda: None)
    assert found.pop("thread") != threading.get_ident()
    assert found == {"autocast": False, "device": "cpu", "setting": "none"}


RECOMPUTES: dict[str, tuple[Callable[..., torch.Tensor], bool]] = {
    "draws nothing": (partial(recompute, draws_numbers=False), True),
    "draws": (partial(recompute, draws_numbers=True), False),
    "by torch": (partial(checkpoint, use_reentrant=False), False),
    "by torch with reentry": (partial(checkpoint, use_reentrant=True), False),
}


@pytest.mark.parametrize("name", RECOMPUTES)
def test_a_recomputation_hands_over_unless_it_may_redraw_random_numbers(turns: PassTurns, name: str) -> None:
    again, takes_turns = RECOMPUTES[name]
    seen: list[str] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append("before")
        turns.hand_over()
        seen.append("after")
        return x.sigmoid().exp()

    given = torch.ones(2, requires_grad=True)
    loss = again(layer, given).sum()
    assert seen == ["before", "after"]
    seen.clear()

    def forward() -> None:
        seen.append("F0")
        turns.hand_over()
        seen.append("F1")

    turns.run_pair(loss.backward, forward)
    assert seen == (["before", "F0", "after", "F1"] if takes_turns else ["before", "after", "F0", "F1"])


def test_a_copy_of_a_layer_has_no_part_in_the_turns() -> None:
    overlap = ExpertOverlap(ExpertOverlapConfig(overlap_moe_expert_parallel_comm=True, delay_wgrad_compute=True))
    assert copy.deepcopy({"cover": overlap}) == {"cover": None}
