"""An error in one of two passes that take turns ends both on every rank, is raised as it is, and leaves no trace."""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.moe.experts import GroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.training.run import TrainingRun
from megatron.training.training import run_step
from tests.counts import slow, soak_only
from tests.distributed.layout_runs import OVERLAPPED, ZERO2
from tests.distributed.pair_runs import DELAYED, PAIRS, THREAD, watched_pairs
from tests.distributed.parity import layout
from tests.distributed.stash_runs import argv_of, stash
from tests.distributed.tiny_runs import Batch, comparable, started_run, state_of
from tests.functional_tests.case import Flags
from tests.harness import launch_on_ranks, run_on_ranks

NUM_MICROBATCHES = 4
COMMON: Flags = {
    **layout(ep=2),
    "moe-token-dispatcher-type": "alltoall",
    "global-batch-size": 2 * NUM_MICROBATCHES,
    "num-layers": 3,
    "train-iters": 100,
}
RUNS: dict[str, Flags] = {
    "dropless": {**PAIRS, "moe-expert-rank-capacity-factor": None},
    # Expert groups whose rows are on the host compute in memory that all groups share.
    "pages": {**PAIRS, **DELAYED, **stash(0.3, 0.3)},
    "zero 2, recomputed": {
        **PAIRS,
        **ZERO2,
        **OVERLAPPED,
        "ddp-bucket-size": 1001,
        "optimizer-in-backward": True,
        "optimizer-in-backward-clip": "exact",
        "recompute-granularity": "selective",
        "recompute-modules": ["moe"],
    },
}


class InjectedError(Exception):
    """An error that code of a layer might raise."""


def _raise(*unused: Any) -> None:
    raise InjectedError


def _interrupt(*unused: Any) -> None:
    signal.raise_signal(signal.SIGINT)


@contextmanager
def _at_call(owner: type, number: int, act: Callable[..., Any], *, where: str) -> Iterator[None]:
    """Calls `act` in the given call of owner.forward, from 1: before it, or in the backward of its input or output."""
    forward: Any = owner.forward  # type: ignore[attr-defined]
    num_calls = 0

    def called(layer: Any, tokens: Tensor, *args: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls != number:
            return forward(layer, tokens, *args, **named)
        if where == "before":
            act()
        if where == "input":
            tokens.register_hook(act)
        result = forward(layer, tokens, *args, **named)
        if where == "output":
            result[0].register_hook(act)
        return result

    with patch.object(owner, "forward", called):
        yield


# In a step of 3 layers, calls 4 to 6 belong to the second micro-batch: its forward pairs with the first backward, and
# its backward with the third forward. Calls of recomputed layers are counted too.
BREAKS: dict[str, Any] = {
    "experts": partial(_at_call, GroupedMLP, 5, _raise, where="before"),
    "attention": partial(_at_call, SelfAttention, 5, _raise, where="before"),
    "backward of combine": partial(_at_call, MoELayer, 5, _raise, where="output"),
    "backward of dispatch": partial(_at_call, MoELayer, 5, _raise, where="input"),
    "backward of the experts": partial(_at_call, GroupedMLP, 5, _raise, where="output"),
    "interrupt of a forward": partial(_at_call, SelfAttention, 5, _interrupt, where="before"),
    "interrupt while the backward runs": partial(_at_call, MoELayer, 5, _interrupt, where="output"),
}


class _Steps:
    """Steps of a run, each with the same batches whenever it is repeated."""

    def __init__(self, run: TrainingRun) -> None:
        assert run.train_iterator is not None
        self._run, self._iterator = run, run.train_iterator
        self._batches: list[Batch] = []

    def next(self) -> None:
        """Reads the batches of the next step."""
        self._batches = [next(self._iterator) for _ in range(NUM_MICROBATCHES)]

    def step(self) -> dict[str, Any]:
        """Runs the step and returns its report."""
        self._run.train_iterator = iter(self._batches)
        return comparable(self._run.measured(run_step(self._run)[0]))


def _survive(argv: Sequence[str], plain: Sequence[str]) -> None:
    """Alternates broken and good steps, and compares the good ones with a run without pairs."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with started_run(plain) as run:
        steps, expected = _Steps(run), []
        for _ in BREAKS:
            steps.next()
            expected.append(steps.step())
        state = state_of(run)
    with started_run(argv) as run, watched_pairs() as log:
        steps = _Steps(run)
        layers = [part for chunk in run.model for part in chunk.modules() if isinstance(part, MoELayer)]
        for (name, breaks), report in zip(BREAKS.items(), expected, strict=True):
            steps.next()
            before = len(log.num_changes)
            kind = KeyboardInterrupt if "interrupt" in name else InjectedError
            with breaks(), pytest.raises(kind):
                steps.step()
            assert 0 < len(log.num_changes) - before < NUM_MICROBATCHES, f"{name} breaks a pair"
            assert all(layer.token_dispatcher.cover is None for layer in layers)
            assert all("grad_queue" not in vars(param) for chunk in run.model for param in chunk.parameters())
            assert all(thread.name != THREAD for thread in threading.enumerate())
            assert {**steps.step(), "stash": None} == {**report, "stash": None}, name
        assert state_of(run) == state


@pytest.mark.parametrize("name", ["dropless", slow("pages"), slow("zero 2, recomputed")])
def test_an_error_in_a_pair_is_raised_as_it_is_and_leaves_no_trace(name: str) -> None:
    plain: Flags = dict.fromkeys([*PAIRS, *DELAYED])
    run_on_ranks(_survive, 2, argv_of(COMMON, RUNS[name]), argv_of(COMMON, RUNS[name], plain))


def _break_one_rank(argv: Sequence[str], where: str) -> None:
    with started_run(argv) as run:
        steps = _Steps(run)
        for _ in range(2):
            steps.next()
            steps.step()
        steps.next()
        if dist.get_rank() == 1:
            with BREAKS[where]():
                steps.step()
        else:
            steps.step()


@pytest.mark.parametrize("where", ["backward of dispatch", soak_only("experts"), soak_only("backward of combine")])
def test_an_error_on_one_rank_ends_the_passes_of_the_others(where: str) -> None:
    first, second = launch_on_ranks(_break_one_rank, 2, argv_of(COMMON, RUNS["dropless"]), where)
    assert isinstance(second.error, InjectedError)
    # Its message names the lost connection, and it does not hang.
    assert isinstance(first.error, RuntimeError) and "peer" in str(first.error), first.error
