"""FullCudaGraphWrapper: captures the forward and backward passes of all microbatches of a step in one CUDA graph.

This file handles the callable that runs the passes, its static inputs and the participants. Experts and optimizers are
participants; see graphs/capture.py.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from megatron.core.config_field import require_defaults
from megatron.core.device import CudaGraphs, default_device, rng_tracker
from megatron.core.device.torch_internals import tree_leaves, tree_map
from megatron.core.device.trace_ranges import trace_range
from megatron.core.graphs.capture import (
    CaptureFailedError,
    Graph,
    GraphDevice,
    GraphParticipant,
    StaticTree,
    fingerprints,
    naming_first_error,
    signature,
)
from megatron.core.group_collectives import all_ranks_agree, any_rank_sync

logger = logging.getLogger(__name__)

# Maximum number of step kinds that are recorded as warmed up.
_MAX_WARM_KEYS = 64


class _Plan(Enum):
    WARM_UP = "run eagerly, capture the next step of this kind"
    CAPTURE = "capture and replay"
    REPLAY = "replay"


@dataclass(frozen=True)
class _Captured:
    """A captured graph with its static inputs, its loss reports and the record of each participant."""

    graph: Graph
    inputs: StaticTree
    reports: list[Any]
    accounts: list[Any]


class FullCudaGraphWrapper:
    """Drop-in replacement for the result of get_forward_backward_func that captures and replays CUDA graphs.

    1. The first cuda_graph_warmup_steps training steps run eagerly.
    2. The next step is captured, for its number of microbatches and the shapes of its batches, and then replayed.
    3. Each later step of a captured kind copies its batches into the static inputs and replays the graph. Losses and
       gradients are bit-identical to eager passes.
    4. A step of a new kind runs eagerly, and the next one of that kind is captured. The same happens after a change of
       a participant's fingerprint, which drops all graphs. The max_graphs most recently used graphs are kept.
    5. Passes with forward_only=True always run eagerly, even between replays.

    If a capture fails on any rank, all ranks raise CaptureFailedError. At that point the batches have been read, but
    no work has been executed. Later steps run eagerly, and `failure` describes the cause.

    device: None means the GPU of this process, with the tracker's random-number streams. follow_up: function that is
    captured at the end of the graph, after the participants' contexts have exited. It receives the result of the
    passes. It does not run after eager passes.
    """

    def __init__(
        self,
        forward_backward_func: Callable[..., list[Any]],
        cuda_graph_warmup_steps: int = 1,
        use_single_mempool: bool = False,
        *,
        device: GraphDevice | None = None,
        participants: Sequence[GraphParticipant] = (),
        follow_up: Callable[[list[Any]], None] | None = None,
        max_graphs: int = 4,
    ) -> None:
        """Wraps `forward_backward_func`. use_single_mempool: must be False, as graphs may be replayed in any order."""
        require_defaults(
            "FullCudaGraphWrapper",
            "each graph has its own memory pool, because graphs of one pool must be replayed in the order of capture",
            use_single_mempool=(use_single_mempool, False),
        )
        for name, number in (("cuda_graph_warmup_steps", cuda_graph_warmup_steps), ("max_graphs", max_graphs)):
            if number < 1:
                raise ValueError(f"{name} is {number}: must be at least 1")
        self._failure: str | None = None
        self._run = forward_backward_func
        self._device = device or CudaGraphs(default_device(), generators=rng_tracker().generators)
        self._participants = list(participants)
        self._follow_up = follow_up
        self._max_graphs = max_graphs
        self._steps_to_warm_up = cuda_graph_warmup_steps
        self._warm: dict[Hashable, None] = {}  # kinds of steps that have run eagerly, oldest first
        self._has_warned = False
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._last_fingerprints: Hashable = None  # of the previous step

    @property
    def num_graphs(self) -> int:
        """Number of captured graphs that are currently kept."""
        return len(self._graphs)

    @property
    def failure(self) -> str | None:
        """Error message of the capture that failed, or None if no capture has failed."""
        return self._failure

    @property
    def may_break_off(self) -> bool:
        """Whether a call may raise CaptureFailedError. After the first failure, calls no longer raise it."""
        return self._failure is None

    def __call__(
        self, *, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **keywords: Any
    ) -> list[Any]:
        """Runs the passes and returns the last stage's loss reports, which later replays do not overwrite.

        data_iterator: an iterator, None, or a list with one iterator or None per model chunk. Training calls read all
        batches first and are collective over all ranks, because the ranks agree on capture or replay. Raises
        CaptureFailedError, and ValueError for batches that cannot be static inputs.
        """
        keywords["num_microbatches"] = num_microbatches
        if forward_only or not self.may_break_off:
            return self._run(data_iterator=data_iterator, forward_only=forward_only, **keywords)
        batches = _read(data_iterator, num_microbatches)
        key = (num_microbatches, signature(batches))
        plan = self._agree_on_plan_sync(key)
        if plan is _Plan.WARM_UP:
            self._count_warm_up(key)
            with self._device.on_capture_stream():
                return self._run_passes(batches, keywords)
        for participant in self._participants:
            participant.prepare()
        if plan is _Plan.CAPTURE:
            self._graphs[key] = self._capture(batches, keywords)
            while len(self._graphs) > self._max_graphs:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        return self._replay(self._graphs[key], batches)

    def drop_graphs(self) -> None:
        """Drops all graphs and their memory. Later steps warm up and are captured from scratch."""
        self._graphs.clear()
        self._warm.clear()

    def _agree_on_plan_sync(self, key: Hashable) -> "_Plan":
        """Returns the plan that all ranks follow in this step. Collective: one all-reduce of three int64.

        Ranks may differ in the shapes of their batches, and in fingerprints that eager passes changed on some ranks.
        Both depend on the batches of this step, so a collective of the previous step could not include them.
        """
        current = fingerprints(self._participants)
        is_stale = self._last_fingerprints is not None and self._last_fingerprints != current
        self._last_fingerprints = current
        is_warm = self._steps_to_warm_up == 0 and key in self._warm
        any_stale, any_cold, any_new = any_rank_sync(is_stale, not is_warm, key not in self._graphs)
        if any_stale:
            self.drop_graphs()
            return _Plan.WARM_UP
        if not any_new:
            return _Plan.REPLAY
        return _Plan.WARM_UP if any_cold else _Plan.CAPTURE

    def _count_warm_up(self, key: Hashable) -> None:
        # A new kind of step requires one warm-up step, which compiles kernels and grows tables.
        self._steps_to_warm_up = max(0, self._steps_to_warm_up - 1)
        self._warm[key] = None
        if len(self._warm) > _MAX_WARM_KEYS:
            del self._warm[next(iter(self._warm))]
            if not self._graphs and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "no CUDA graph was captured in %d steps, because no two steps had the same number of "
                    "micro-batches, shapes and non-tensor values",
                    _MAX_WARM_KEYS,
                )

    @trace_range("FullCudaGraphWrapper.capture")
    def _capture(self, batches: Any, keywords: dict[str, Any]) -> _Captured:
        inputs = StaticTree(batches, default_device())
        inputs.fill(batches)
        try:
            with all_ranks_agree(), naming_first_error(), self._device.capturing() as graph, naming_first_error():
                with ExitStack() as stack:
                    for participant in self._participants:
                        stack.enter_context(participant.capturing())
                    reports = self._run_passes(inputs.values, keywords)
                _check_reports(reports)
                if self._follow_up is not None:
                    self._follow_up(reports)
        except RuntimeError as error:  # this rank's CaptureFailedError, or the error that reports another rank's
            self._failure = str(error)
            self.drop_graphs()
            for participant in self._participants:
                participant.dropped()
            raise CaptureFailedError(self._failure) from error
        return _Captured(graph, inputs, reports, [participant.captured() for participant in self._participants])

    def _run_passes(self, batches: Any, keywords: dict[str, Any]) -> list[Any]:
        return self._run(data_iterator=_iterators(batches), forward_only=False, **keywords)

    @trace_range("FullCudaGraphWrapper.replay")
    def _replay(self, captured: _Captured, batches: Any) -> list[Any]:
        captured.inputs.fill(batches)
        captured.graph.replay()
        for participant, account in zip(self._participants, captured.accounts):
            participant.replayed(account)
        # The next replay overwrites the reports.
        return [tree_map(_clone, report) for report in captured.reports]


def _read(data_iterator: Any, num_microbatches: int) -> Any:
    """Returns a step's batches: a list, a tuple with one list per chunk, or None if there is no iterator."""
    if isinstance(data_iterator, list):
        return tuple(_read(one, num_microbatches) for one in data_iterator)
    return None if data_iterator is None else [next(data_iterator) for _ in range(num_microbatches)]


def _iterators(batches: Any) -> Any:
    return list(map(_iterator, batches)) if isinstance(batches, tuple) else _iterator(batches)


def _iterator(batches: list[Any] | None) -> Iterator[Any] | None:
    return None if batches is None else iter(batches)


def _check_reports(reports: list[Any]) -> None:
    for leaf in tree_leaves(reports):
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(
                f"the loss function reports {leaf!r}, which would be the same in every replay: must report only tensors"
            )


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
