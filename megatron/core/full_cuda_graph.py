"""FullCudaGraphWrapper: the passes of all microbatches of a step as one CUDA graph, captured once and replayed.

Knows a callable that runs passes, static inputs and participants; no experts and no optimizer. See graphs/capture.py.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves, tree_map

from megatron.core.agreement import all_ranks_agree
from megatron.core.device import CudaGraphs, default_device
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
from megatron.core.group_collectives import gather_objects
from megatron.core.tensor_parallel import get_cuda_rng_tracker

logger = logging.getLogger(__name__)

# Kinds of steps that are remembered as having run eagerly.
_MANY_KEYS = 64


class _Plan(Enum):
    WARM_UP = "run eagerly, to be captured when it comes again"
    CAPTURE = "capture and replay"
    REPLAY = "replay"


@dataclass(frozen=True)
class _Captured:
    """A graph, the memory that it reads and writes, and what each participant's account was after it."""

    graph: Graph
    inputs: StaticTree
    reports: list[Any]
    accounts: list[Any]


class FullCudaGraphWrapper:
    """Takes the place of the function that get_forward_backward_func returns, with the same keywords.

    1. The first cuda_graph_warmup_steps training steps run as they do without it.
    2. The next one is captured, for its number of microbatches and the shapes of its batches, and replayed at once.
    3. Each later step with a known number of microbatches copies its batches into place and replays: its losses and
       gradients have the bits of the eager passes. Another number runs eagerly once and is captured the time after, as
       is a known one when what a participant's fingerprint names has changed. max_graphs are kept, the last used ones.
    4. Passes with forward_only run eagerly, also between replays.

    If a capture fails on any rank, all raise CaptureFailedError: the batches were read, and nothing was executed. From
    then on this runs everything eagerly; `failure` says why.
    device: None for the GPU of this process, with the tracker's random-number streams. participants: see
    GraphParticipant. follow_up: what else is part of the graph, behind the passes and all that their participants wait
    for; it is given what the passes return, and does not run after eager ones. Not run on a GPU yet.
    """

    def __init__(
        self,
        forward_backward_func: Callable[..., list[Any]],
        cuda_graph_warmup_steps: int = 1,
        *,
        device: GraphDevice | None = None,
        participants: Sequence[GraphParticipant] = (),
        follow_up: Callable[[list[Any]], None] | None = None,
        max_graphs: int = 4,
    ) -> None:
        for name, number in (("cuda_graph_warmup_steps", cuda_graph_warmup_steps), ("max_graphs", max_graphs)):
            if number < 1:
                raise ValueError(f"{name} is {number}: must be at least 1")
        self._failure: str | None = None
        self._run = forward_backward_func
        self._device = device or CudaGraphs(default_device(), generators=get_cuda_rng_tracker().generators)
        self._participants = list(participants)
        self._follow_up = follow_up
        self._max_graphs = max_graphs
        self._steps_to_warm_up = cuda_graph_warmup_steps
        self._warm: dict[Hashable, None] = {}  # kinds of steps that have run eagerly, in order
        self._has_warned = False
        self._graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self._given: Hashable = None  # what participants took for given in the last step

    @property
    def num_graphs(self) -> int:
        """Graphs that are kept."""
        return len(self._graphs)

    @property
    def failure(self) -> str | None:
        """Why a step could not be captured; None: all could so far."""
        return self._failure

    @property
    def may_break_off(self) -> bool:
        """Whether a call may raise CaptureFailedError; once one has, none does."""
        return self._failure is None

    def __call__(
        self, *, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **keywords: Any
    ) -> list[Any]:
        """Runs the passes; returns what the losses of the last stage report, in memory of the caller's own.

        data_iterator: an iterator or None, or a list with one a chunk; the passes get the same, over what was read of
        it. Collective where the passes are. Raises CaptureFailedError; ValueError for batches that no graph can take.
        """
        keywords["num_microbatches"] = num_microbatches
        if forward_only or not self.may_break_off:
            return self._run(data_iterator=data_iterator, forward_only=forward_only, **keywords)
        batches = _read(data_iterator, num_microbatches)
        key = (num_microbatches, signature(batches))
        plan = self._agree_on_plan(key)
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
        """Lets go of all graphs and their memory; later steps are captured anew."""
        self._graphs.clear()
        self._warm.clear()

    def _agree_on_plan(self, key: Hashable) -> "_Plan":
        """What all ranks do with this step. Collective, a few bytes from host to host: ranks may have read batches of
        other shapes, and passes that ran eagerly may have taught a rank alone what graphs cannot know.
        """
        given = fingerprints(self._participants)
        is_stale, self._given = self._given is not None and self._given != given, given
        is_warm = self._steps_to_warm_up == 0 and key in self._warm
        own = (is_stale, is_warm, key in self._graphs)
        everyone = gather_objects(own, dist.group.WORLD if dist.is_initialized() else None)
        any_stale, all_warm, all_captured = (
            fold(facts) for fold, facts in zip((any, all, all), zip(*everyone, strict=True), strict=True)
        )
        if any_stale:
            self.drop_graphs()
            return _Plan.WARM_UP
        if all_captured:
            return _Plan.REPLAY
        return _Plan.CAPTURE if all_warm else _Plan.WARM_UP

    def _count_warm_up(self, key: Hashable) -> None:
        # Of a number of microbatches, or sizes, that are new: one step, in which kernels are built and tables grow.
        self._steps_to_warm_up = max(0, self._steps_to_warm_up - 1)
        self._warm[key] = None
        if len(self._warm) > _MANY_KEYS:
            del self._warm[next(iter(self._warm))]
            if not self._graphs and not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%d steps had batches of as many kinds (number of micro-batches, shapes, plain values): nothing is "
                    "captured, as no kind comes again",
                    _MANY_KEYS,
                )

    @record_function("FullCudaGraphWrapper.capture")
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
        except RuntimeError as error:  # this rank's CaptureFailedError, or the news of another's
            self._failure = str(error)
            self.drop_graphs()
            for participant in self._participants:
                participant.dropped()
            raise CaptureFailedError(self._failure) from error
        return _Captured(graph, inputs, reports, [participant.captured() for participant in self._participants])

    def _run_passes(self, batches: Any, keywords: dict[str, Any]) -> list[Any]:
        iterators = list(map(_iterator, batches)) if isinstance(batches, tuple) else _iterator(batches)
        return self._run(data_iterator=iterators, forward_only=False, **keywords)

    @record_function("FullCudaGraphWrapper.replay")
    def _replay(self, captured: _Captured, batches: Any) -> list[Any]:
        captured.inputs.fill(batches)
        captured.graph.replay()
        for participant, account in zip(self._participants, captured.accounts):
            participant.replayed(account)
        # The next replay overwrites them.
        return [tree_map(_own, report) for report in captured.reports]


def _read(data_iterator: Any, num_microbatches: int) -> Any:
    """The step's batches, in a list, or a tuple with one of each chunk; None for those that read nothing."""
    if isinstance(data_iterator, list):
        return tuple(_read(one, num_microbatches) for one in data_iterator)
    return None if data_iterator is None else [next(data_iterator) for _ in range(num_microbatches)]


def _iterator(batches: list[Any] | None) -> Iterator[Any] | None:
    return None if batches is None else iter(batches)


def _check_reports(reports: list[Any]) -> None:
    for leaf in tree_leaves(reports):
        if not isinstance(leaf, torch.Tensor):
            raise ValueError(
                f"the loss function reports {leaf!r}, which each replay would repeat: report tensors alone"
            )


def _own(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
