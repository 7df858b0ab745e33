"""Proves by an event log what computes between the launch and the end of each exchange of rows in a pair of passes."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from torch import Tensor

from megatron.core.pipeline_parallel.runner import ScheduleRunner
from megatron.core.pipeline_parallel.schedule import Action, ActionKind, Pair
from megatron.core.tensor_parallel.weight_grads import WeightGradQueue
from megatron.core.transformer.moe import dispatch_alltoall, dispatch_static
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.training.training import run_step
from tests.distributed.stash_runs import argv_of, stash
from tests.distributed.tiny_runs import started_run
from tests.functional_tests.case import Flags
from tests.harness import run_on_ranks

FLAGS: Flags = {
    "num-layers": 2,
    "expert-model-parallel-size": 2,
    "moe-token-dispatcher-type": "alltoall",
    "overlap-moe-expert-parallel-comm": True,
    "deterministic-mode": None,
}
# Four layers, so that each chunk of an interleaved stage has one.
STAGES: Flags = {"num-layers": 4, "pipeline-model-parallel-size": 2}
LAYOUTS: dict[str, tuple[int, Flags]] = {
    "no pipeline": (2, {"global-batch-size": 6}),
    "1F1B": (4, {**STAGES, "global-batch-size": 10}),
    "interleaved": (4, {**STAGES, "num-virtual-stages-per-pipeline-rank": 2, "global-batch-size": 8}),
}
EXPERTS: dict[str, Flags] = {"dropless": {"moe-expert-rank-capacity-factor": None}, "static": {}, "stash": stash()}
QUEUES: dict[str, Flags] = {"": {}, " and weights": {"delay-wgrad-compute": True}}
# The first pair of two layers without a pipeline: the backward, then the forward, in turns.
DROPLESS = """
launch combine'2
                    attention1, router1, launch counts1
weights
                    wait counts1, launch dispatch1
wait combine'2, experts'2, launch dispatch'2, weights
                    wait dispatch1, experts1, launch combine1
wait dispatch'2, router'2, attention'2, launch combine'1
                    wait combine1, attention2, router2, launch counts2
weights
                    wait counts2, launch dispatch2
wait combine'1, experts'1, launch dispatch'1, weights
                    wait dispatch2, experts2, launch combine2
wait dispatch'1, router'1, attention'1, weights
                    wait combine2
"""
# Row counts travel with the rows.
STATIC = """
launch combine'2
                    attention1, router1, launch dispatch1
wait combine'2, experts'2, launch dispatch'2
                    wait dispatch1, experts1, launch combine1
wait dispatch'2, router'2, attention'2, launch combine'1
                    wait combine1, attention2, router2, launch dispatch2
wait combine'1, experts'1, launch dispatch'1
                    wait dispatch2, experts2, launch combine2
wait dispatch'1, router'1, attention'1
                    wait combine2
"""
STATIC_AND_WEIGHTS = """
launch combine'2, weights
                    attention1, router1, launch dispatch1
wait combine'2, experts'2, launch dispatch'2, weights
                    wait dispatch1, experts1, launch combine1
wait dispatch'2, router'2, attention'2, launch combine'1, weights
                    wait combine1, attention2, router2, launch dispatch2
wait combine'1, experts'1, launch dispatch'1, weights
                    wait dispatch2, experts2, launch combine2
wait dispatch'1, router'1, attention'1, weights
                    wait combine2
"""
SEQUENCES = {
    "dropless": DROPLESS,
    "dropless and weights": DROPLESS,
    "static": STATIC,
    "static and weights": STATIC_AND_WEIGHTS,
    "stash": STATIC,
    "stash and weights": STATIC_AND_WEIGHTS,
}
# Parts of a pass, other than launches and waits.
PARTS = {"attention", "router", "experts", "attention'", "router'", "experts'", "weights"}


class Event(NamedTuple):
    """A part of a pass, or the launch of an exchange or the wait for it. layer: from 1; 0 for held weight gradients."""

    action: Action
    what: str
    layer: int

    def __str__(self) -> str:
        return f"{self.what}{self.layer or ''}"


class Log:
    """Events of this rank, and the pairs that it ran."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.pairs: list[Pair] = []
        self.of_thread = threading.local()
        self._launches: Counter[tuple[Action, int]] = Counter()

    def add(self, what: str, layer: int = 0) -> None:
        """Appends an event of the pass that this thread runs."""
        self.events.append(Event(self.of_thread.action, what, layer))

    def launch(self, layer: int, name: str | None = None) -> "_Work":
        """Logs a launch. name: of the exchange; None for rows, which are named by their number in the pass."""
        if name is None:
            action: Action = self.of_thread.action
            names = ("dispatch", "combine") if action.kind is ActionKind.FORWARD else ("combine'", "dispatch'")
            name = names[self._launches[action, layer]]
            self._launches[action, layer] += 1
        self.add(f"launch {name}", layer)
        return _Work(partial(self.add, f"wait {name}", layer))


@dataclass
class _Work:
    log: Any
    inner: Any = ()

    def wait(self) -> None:
        self.log()
        for work in self.inner:
            work.wait()


@dataclass(frozen=True)
class _Transport:
    """Logs the exchanges of a layer, each as one."""

    transport: Any
    log: Log
    layer: int

    @property
    def group(self) -> Any:
        return self.transport.group

    def launch(self, tensors: Any, **rows: Any) -> Any:
        work = self.log.launch(self.layer)
        running = self.transport.launch(tensors, **rows)
        work.inner = running.works
        return replace(running, works=(work,))

    def reserve(self, num_bytes: int) -> None:
        self.transport.reserve(num_bytes)


@contextmanager
def logged_passes(log: Log) -> Iterator[None]:
    """Context in which the runner's passes, row counts and computed weight gradients are logged."""
    run, forward, backward = ScheduleRunner._run, ScheduleRunner._forward, ScheduleRunner._backward
    counts, run_queue = dispatch_alltoall.exchange_counts, WeightGradQueue.run

    def named_pass(original: Any, runner: ScheduleRunner, action: Action) -> None:
        log.of_thread.action = action
        original(runner, action)

    def named_run(runner: ScheduleRunner, step: Action | Pair) -> None:
        log.pairs += [step] if isinstance(step, Pair) else []
        run(runner, step)

    def logged_counts(*args: Any) -> Any:
        pending = counts(*args)
        # Launched before the rows of the same layer.
        work: Any = log.launch(log.events[-1].layer, "counts")
        work.inner, pending._work = (pending._work,), work
        return pending

    def logged_queue(queue: WeightGradQueue) -> None:
        if queue.num_pending:
            log.add("weights")
        run_queue(queue)

    with ExitStack() as stack:
        for name, function in (("_forward", forward), ("_backward", backward)):
            method = partial(named_pass, function)
            stack.enter_context(patch.object(ScheduleRunner, name, lambda *args, method=method: method(*args)))
        stack.enter_context(patch.object(ScheduleRunner, "_run", named_run))
        stack.enter_context(patch.object(WeightGradQueue, "run", logged_queue))
        for module in (dispatch_alltoall, dispatch_static):
            stack.enter_context(patch.object(module, "exchange_counts", logged_counts))
        padded = dispatch_static.padded_rank_rows
        stack.enter_context(patch.object(dispatch_static, "rank_row_layout", lambda device: padded))
        yield


def log_layer(log: Log, layer: TransformerLayer) -> None:
    """Logs the parts of a layer: when its modules begin, and when the gradients of their inputs are complete."""
    number, moe = layer.layer_number, layer.mlp
    moe.token_dispatcher.transport = _Transport(moe.token_dispatcher.transport, log, number)
    for name, module in (("attention", layer.self_attention), ("router", moe.router), ("experts", moe.experts)):

        def begin(_: Any, args: tuple[Any, ...], name: str = name) -> None:
            log.add(name, number)
            given: Tensor = args[0]
            given.register_hook(lambda grad: log.add(f"{name}'", number))

        module.register_forward_pre_hook(begin)


def logs_of_runs(argvs: list[list[str]]) -> list[Log]:
    """Runs one step of each command line; returns what this rank logged, without its state of threads."""
    logs = []
    for argv in argvs:
        log = Log()
        with logged_passes(log), started_run(argv) as run:
            for chunk in run.model:
                for part in chunk.modules():
                    if isinstance(part, TransformerLayer):
                        log_layer(log, part)
            report, _ = run_step(run)
        del log.of_thread
        logs.append(log)
    return logs


def all_logs(layout: str) -> dict[str, list[Log]]:
    """Returns the logs of all ranks, by kind of experts, with and without the queue."""
    ranks, flags = LAYOUTS[layout]
    named = {kind + queue: {**FLAGS, **flags, **EXPERTS[kind], **QUEUES[queue]} for kind in EXPERTS for queue in QUEUES}
    by_rank = run_on_ranks(logs_of_runs, ranks, [argv_of(flags) for flags in named.values()], timeout=300)
    return {name: [rank[index] for rank in by_rank] for index, name in enumerate(named)}


def events_of(log: Log, pair: Pair) -> list[Event]:
    """Returns the events of a pair."""
    return [event for event in log.events if event.action in pair]


def assert_covered(log: Log) -> None:
    """Asserts that each exchange of a pair is launched and awaited once, and that the other pass computes between."""
    assert log.pairs
    for pair in log.pairs:
        events = events_of(log, pair)
        launched = [event for event in events if event.what.startswith("launch")]
        assert Counter(event._replace(what=event.what.replace("launch", "wait")) for event in launched) == Counter(
            event for event in events if event.what.startswith("wait")
        )
        for event in launched:
            start = events.index(event)
            end = events.index(event._replace(what=event.what.replace("launch", "wait")))
            others = [one.what for one in events[start:] if one.action != event.action]
            between = [one.what for one in events[start:end] if one.action != event.action]
            assert not PARTS.isdisjoint(between) or not others, f"{pair}: {event} is covered by {between}"


def drawn(log: Log, pair: Pair) -> str:
    """Returns the turns of a pair, those of the forward indented."""
    turns = groupby(events_of(log, pair), key=lambda event: event.action)
    lines = [" " * 20 * (action == pair.forward) + ", ".join(map(str, events)) for action, events in turns]
    return "\n".join(["", *lines, ""])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_between_launch_and_wait_of_each_exchange_lies_a_part_of_the_other_pass(layout: str) -> None:
    for name, logs in all_logs(layout).items():
        for log in logs:
            assert_covered(log)
            # Counts travel with padded rows.
            assert ("dropless" in name) == any("counts" in event.what for event in log.events), name
            if layout == "no pipeline":
                assert drawn(log, log.pairs[0]) == SEQUENCES[name], name
        stages = len(logs) // 2
        for stage in range(stages):
            first, second = logs[2 * stage : 2 * stage + 2]
            assert first.events == second.events, f"{name}: the ranks of stage {stage} launch in different orders"
