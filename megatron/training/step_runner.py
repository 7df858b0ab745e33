"""StepRunner: forward and backward of a step, again from the same start until no rank lost anything in them.

What can be lost, and what grows then, is the StepMemory's; the optimizer's step is training.py's.

[Note: void steps] Experts in buffers of a fixed size may get more rows than these hold, or find no page for what their
backward needs. They go on with what they have, and raise a flag on the device. The sum over all ranks, which travels
with the statistics of the step, says on every rank alike that the step is void: gradients and losses are wrong, and may
be NaN. It must leave no trace: all ranks go back to where it began, grow, and run it again, before anything that counts
has moved. What moves once a step (router biases, schedules, counters, checkpoints) therefore comes after the verdict.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import Any, Protocol

import torch
from torch import nn

from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.graphs.capture import CaptureFailedError
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.timers import Timers
from megatron.core.utils import unwrap_model
from megatron.training.console import print_rank_0
from megatron.training.kept_batches import KeptBatches, with_own_containers
from megatron.training.rng_state import capture_rng, restore_rng
from megatron.training.step_statistics import Overflow, RecordsAuxLosses, Reports, StatisticsExchange, StepStatistics
from megatron.training.step_update import StepUpdate

# A rerun grows to what the void one needed, or by a fixed share: what so many do not reach, none will.
_MAX_RERUNS = 8

# From the reports of this rank's passes and its flags.
_Judge = Callable[[Reports, torch.Tensor | None], StepStatistics]


class ExpertOverflowError(RuntimeError):
    """A step lost rows or pages, and may not or cannot run again with more; raised on every rank, with no update."""


class StepMemory(Protocol):
    """The memory of experts whose buffers have a fixed size; see [Note: void steps]."""

    def begin_step(self, *, num_microbatches: int, forward_only: bool) -> None:
        """Called before the passes of a step or of an evaluation's iteration, also before they run again."""
        ...

    def void_flags(self) -> torch.Tensor:
        """[2], fp64, on the device: 1 where this rank's step is void, by rows over budget and by inputs without pages.

        After the passes, once or more.
        """
        ...

    def grow_sync(self, *, iteration: int) -> str:
        """Grows what was too small, after a void step whose traces are gone; returns a line for the log. Collective.

        Raises ExpertOverflowError on all ranks where it may not or cannot.
        """
        ...

    def end_step(self) -> None:
        """Called after a step that was not void; after an error, begin_step may follow without it."""
        ...


class StepGraph(Protocol):
    """Runs the passes from CUDA graphs, of a whole step or of its parts."""

    @property
    def failure(self) -> str | None:
        """Why something could not be captured; None while everything could."""
        ...

    @property
    def may_break_off(self) -> bool:
        """Whether a call may raise CaptureFailedError, so that the start of the step has to be kept."""
        ...

    def __call__(
        self, *, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **keywords: Any
    ) -> list[Any]:
        """Runs a step as get_forward_backward_func's function does.

        Raises CaptureFailedError, on all ranks, with nothing executed.
        """
        ...

    def drop_graphs(self) -> None:
        """Lets go of all graphs and their memory; later steps are captured anew."""
        ...


@dataclass(kw_only=True)
class StepRunner:
    """Runs the passes of steps and evaluations over this rank's chunks.

    update: what follows the passes of a step that counts; None for a run that only evaluates.
    memory: None where nothing can be lost. graph: None where passes are launched one by one. With neither, passes run
    once, and nothing of the step's start is kept.
    """

    args: argparse.Namespace
    model: Sequence[nn.Module]  # the chunks of this rank's pipeline stage
    forward_step: Callable[..., Any]
    groups: ProcessGroupCollection
    statistics: StatisticsExchange
    timers: Timers
    update: StepUpdate | None = None
    memory: StepMemory | None = None
    graph: StepGraph | None = None

    def train_sync(
        self,
        iterator: Iterator[Any] | None,
        *,
        num_microbatches: int,
        iteration: int,
        exit_reasons: Callable[[], Sequence[bool]],
    ) -> tuple[Reports, StepStatistics]:
        """Forward and backward of a training step: what this rank's losses report, and what all ranks know. Collective.

        update_sync is to follow. iteration: the step's number, for messages. exit_reasons: asked when
        the passes are done. NOTE: reads the device, see StatisticsExchange. Raises ExpertOverflowError on all ranks.
        """

        def judge(reports: Reports, void_flags: torch.Tensor | None) -> StepStatistics:
            # Anew after each run: a signal may come in one that is void.
            reasons = exit_reasons()
            return self.statistics.reduce_step_sync(
                reports,
                self.model,
                exit_reasons=reasons,
                void_flags=void_flags,
                with_load=iteration % self.args.log_interval == 0,
            )

        return self._run_sync(iterator, judge, num_microbatches=num_microbatches, iteration=iteration)

    def update_sync(self) -> tuple[bool, float, float | None]:
        """Finalizes gradients and updates parameters after train_sync; returns what MegatronOptimizer.step does.

        Collective. NOTE: reads the device, see there.
        """
        assert self.update is not None, "a run that only evaluates updates nothing"
        return self.update.run_sync()

    def evaluate_sync(self, iterator: Iterator[Any] | None, *, num_microbatches: int, iteration: int) -> Reports:
        """Forward of one global batch, without gradients; what this rank's losses report of it. Collective.

        With a memory, ranks agree after each batch, in a small all-reduce that a run without one does not need: if they
        agreed once an evaluation, as on its losses, all of its batches would have to be kept. iteration, NOTE and
        errors: as for train_sync.
        """

        def judge(_: Reports, void_flags: torch.Tensor | None) -> StepStatistics:
            if void_flags is None:
                return StepStatistics({}, None)
            return self.statistics.reduce_sync({}, void_flags=void_flags)

        reports, _ = self._run_sync(
            iterator, judge, num_microbatches=num_microbatches, iteration=iteration, forward_only=True
        )
        return reports

    def _run_sync(
        self,
        iterator: Iterator[Any] | None,
        judge: _Judge,
        *,
        num_microbatches: int,
        iteration: int,
        forward_only: bool = False,
    ) -> tuple[Reports, StepStatistics]:
        may_break_off = self.graph is not None and self.graph.may_break_off and not forward_only
        if self.memory is None and not may_break_off:
            reports = self._run_passes(iterator, num_microbatches=num_microbatches, forward_only=forward_only)
            return reports, judge(reports, None)
        start = _Start(iterator)
        grown: list[str] = []
        while True:
            reports = self._run_from(
                start, num_microbatches=num_microbatches, iteration=iteration, forward_only=forward_only
            )
            statistics = judge(reports, None if self.memory is None else self.memory.void_flags())
            if self.memory is None:
                return reports, statistics
            if not statistics.overflow.is_void:
                self.memory.end_step()
                return reports, statistics
            if not forward_only:
                self.forget_gradients()
            if len(grown) == _MAX_RERUNS:
                raise ExpertOverflowError(_growth_in_vain(statistics.overflow, grown, iteration=iteration))
            grown.append(self.memory.grow_sync(iteration=iteration))
            what = "an evaluation after iteration" if forward_only else "iteration"
            print_rank_0(f"  {what} {iteration} was void and runs again ({statistics.overflow}): {grown[-1]}")
            # Last, as whatever grew may have drawn numbers.
            start.go_back()

    def _run_from(self, start: "_Start", *, num_microbatches: int, iteration: int, forward_only: bool) -> Reports:
        """Runs the passes over the batches of `start`; eagerly where they could not be captured. Collective."""

        def run() -> Reports:
            if self.memory is not None:
                self.memory.begin_step(num_microbatches=num_microbatches, forward_only=forward_only)
            if self.update is not None and not forward_only:
                # Of a step that an error ended before its update.
                self.update.forget()
            return self._run_passes(start.batches, num_microbatches=num_microbatches, forward_only=forward_only)

        try:
            return run()
        except CaptureFailedError as error:
            print_rank_0(
                f"  iteration {iteration} could not be captured as a CUDA graph ({error}): it and all that follow run "
                "without one. tools/check_capture.py with these flags names the lines"
            )
        self.forget_gradients()
        start.go_back()
        return run()

    def forget_gradients(self) -> None:
        """Drops those of passes that do not count, also what is on its way to other ranks. Collective."""
        wrapped = (chunk for chunk in self.model if isinstance(chunk, _BaseDataParallel))
        # One of the chunks of a scheduler speaks for all; begins an iteration anew, as zero_grad does.
        for chunk in {chunk.launch_order: chunk for chunk in wrapped}.values():
            chunk.reset_iteration()
        if self.update is not None:
            self.update.forget()

    def _run_passes(self, iterator: Iterator[Any] | None, *, num_microbatches: int, forward_only: bool) -> list[Any]:
        """Runs the passes over the next batches; returns what the losses of the last stage report."""
        for inner in unwrap_model(list(self.model)):
            # Of passes that were void, or that an error broke off.
            if isinstance(inner, RecordsAuxLosses):
                inner.aux_losses.forget_step()
        with self.timers("forward-backward", log_level=1):
            return (self.graph or get_forward_backward_func())(
                forward_step_func=self.forward_step,
                data_iterator=self._of_chunks(iterator),
                model=self.model,
                num_microbatches=num_microbatches,
                seq_length=self.args.seq_length,
                micro_batch_size=self.args.micro_batch_size,
                forward_only=forward_only,
            )

    def _of_chunks(self, iterator: Iterator[Any] | None) -> list[Iterator[Any] | None]:
        """Returns the same batches for each chunk that reads any: the ends of the pipeline, for tokens and labels."""
        stage, last, num_chunks = group_rank(self.groups.pp), group_size(self.groups.pp) - 1, len(self.model)
        # Attention in the middle needs masks and borders of documents: read again, which is cheaper than sent along.
        everywhere = self.args.reset_attention_mask
        readers = [
            chunk
            for chunk in range(num_chunks)
            if everywhere or stage == chunk == 0 or (stage == last and chunk == num_chunks - 1)
        ]
        if iterator is None or len(readers) < 2:
            return [iterator if chunk in readers else None for chunk in range(num_chunks)]
        # All have read equally far when the step ends, so that the copies of one step suffice.
        copies = dict(zip(readers, (map(with_own_containers, copy) for copy in tee(iterator, len(readers)))))
        return [copies.get(chunk) for chunk in range(num_chunks)]


class _Start:
    """The state at the start of a step: its batches, None for a stage that reads none, and random generators."""

    def __init__(self, iterator: Iterator[Any] | None) -> None:
        self.batches = None if iterator is None else KeptBatches(iterator)
        self._generators = capture_rng()

    def go_back(self) -> None:
        """Whoever runs the step again reads and draws the same."""
        restore_rng(self._generators)
        if self.batches is not None:
            self.batches.rewind()


def _growth_in_vain(overflow: Overflow, grown: Sequence[str], *, iteration: int) -> str:
    return (
        f"iteration {iteration} is void after {len(grown)} reruns ({overflow}), nothing was updated in it. Growing did "
        f"not help: {'; '.join(grown)}. Set --moe-expert-rank-capacity-factor higher where rows are over budget, "
        "--moe-paged-stash-buffer-size-factor-cuda or -cpu where inputs are without pages"
    )
