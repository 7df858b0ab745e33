"""Defines StepRunner, which runs forward and backward of a step, and retries them if any rank overflows.

expert_memory.py implements StepMemory, which detects overflows and grows. update.py runs the optimizer's step.

[Note: discarded steps]
Experts with fixed-size buffers may receive more rows than fit into a buffer (expert overflow), or find no page for an
x that backward requires (stash overflow). They continue without these rows and set a flag on the device. The flags are
summed over all ranks together with the statistics of the step, so every rank learns that the step overflowed. Its
gradients and losses are wrong, and may be NaN. The step is discarded and must leave no trace: all ranks restore the
state at its start, grow the buffers or pools that were too small, and retry the step. State that changes once per step
(router biases, schedules, counters, checkpoints) is therefore updated only after this decision.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import tee
from typing import Any, Protocol

import torch
from torch import nn

from megatron.core.datasets.indexed_dataset import DataError
from megatron.core.datasets.padding import NO_PADDING, PADDING_MASK, count_padding_sync, marks_padding
from megatron.core.device.torch_internals import tree_map
from megatron.core.distributed.data_parallel_base import _BaseDataParallel
from megatron.core.graphs.capture import CaptureFailedError
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_placement import placement_of
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.timers import Timers
from megatron.core.utils import get_model_config, unwrap_model
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.checkpointing.rng_state import RngState, capture_rng, restore_rng, same_rng
from megatron.training.step.statistics import Overflow, RecordsAuxLosses, Reports, StatisticsExchange, StepStatistics
from megatron.training.step.update import StepUpdate

# Each retry uses the sizes that the discarded attempt required, or sizes grown by a fixed factor. A step that still
# overflows after this number of retries would never succeed.
_MAX_RETRIES = 8
# Maps the reports of this rank's passes and its overflow flags to the statistics of the step over all ranks.
_ReduceStatistics = Callable[[Reports, torch.Tensor | None], StepStatistics]


class ExpertOverflowError(RuntimeError):
    """Raised on every rank, before any update, if a step overflowed and growth is forbidden or impossible."""


class StepMemory(Protocol):
    """Interface of fixed-size expert memory, which may overflow. See [Note: discarded steps]."""

    def begin_step(self, *, num_microbatches: int, forward_only: bool) -> None:
        """Called before the passes of a step or of an evaluation's iteration, and before each retry."""
        ...

    def overflow_flags(self) -> torch.Tensor:
        """Returns whether experts and whether the stash overflowed on this rank: [2], fp64, 0 or 1, on the device.

        Called once or more after the passes.
        """
        ...

    def grow_sync(self, *, iteration: int) -> str:
        """Grows buffers or pools after a discarded step, and returns a line for the log. Collective.

        Raises ExpertOverflowError on all ranks if growth is forbidden or impossible.
        """
        ...

    def end_step(self) -> None:
        """Called after a step that did not overflow. Not called if an error ends the step."""
        ...


class StepGraph(Protocol):
    """Interface of objects that run the passes with CUDA graphs of the whole step or of parts of it."""

    @property
    def failure(self) -> str | None:
        """Reason why a capture failed; None if no capture has failed."""
        ...

    @property
    def may_break_off(self) -> bool:
        """Whether a call may raise CaptureFailedError, so that the state at the start of the step must be saved."""
        ...

    def __call__(
        self, *, data_iterator: Any, num_microbatches: int, forward_only: bool = False, **keywords: Any
    ) -> list[Any]:
        """Runs the passes of a step, with the arguments and results of get_forward_backward_func's function.

        Raises CaptureFailedError on all ranks, before executing anything, if a capture fails.
        """
        ...

    def drop_graphs(self) -> None:
        """Releases all graphs and their memory. Later steps are captured again."""
        ...


@dataclass(kw_only=True)
class StepRunner:
    """Runs the passes of steps and evaluations over this rank's model chunks.

    log_interval: steps between log lines, for which the load of experts is counted. has_experts: whether any layer of
    the model has experts. resets_attention_mask: whether attention depends on the borders of documents in a batch.
    update: runs after the passes of a step that is not discarded; None for a run that only evaluates. memory: None if
    nothing can overflow. graph: None if passes run eagerly. Without memory and graph, passes run once, and the state at
    the start of the step is not saved.
    """

    seq_length: int
    micro_batch_size: int
    log_interval: int
    has_experts: bool
    resets_attention_mask: bool
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
        """Runs forward and backward of a training step. Collective.

        Returns the reports of this rank's losses, and the statistics over all ranks. The caller must then call
        update_sync. iteration: number of the step, for messages. exit_reasons: called after the passes. Raises
        ExpertOverflowError on all ranks. NOTE: reads the device, see StatisticsExchange.
        """

        counted = None if iterator is None else CountedBatches(iterator, must_mark_padding=self._has_later_experts)

        def reduce(reports: Reports, overflow_flags: torch.Tensor | None) -> StepStatistics:
            # Read after each attempt, because a signal may arrive during a discarded attempt.
            reasons = exit_reasons()
            statistics = self.statistics.reduce_step_sync(
                reports,
                self.model,
                exit_reasons=reasons,
                padding=counted.padding if counted is not None and self._reads_first else NO_PADDING,
                overflow_flags=overflow_flags,
                with_load=iteration % self.log_interval == 0,
            )
            # A stage that reads no batches only knows the sum.
            if statistics.padding.tokens > 0 or (counted is not None and counted.has_padding_mask):
                self._require_padding_in_routers()
            return statistics

        return self._run_sync(counted, reduce, num_microbatches=num_microbatches, iteration=iteration)

    def update_sync(self) -> tuple[bool, float, float | None]:
        """Finalizes gradients and updates parameters after train_sync. Collective.

        Returns the result of MegatronOptimizer.step. NOTE: reads the device, like that method.
        """
        assert self.update is not None, "a run that only evaluates updates nothing"
        return self.update.run_sync()

    def evaluate_sync(
        self,
        iterator: Iterator[Any] | None,
        *,
        num_microbatches: int,
        iteration: int,
        collect_non_loss_data: bool = False,
    ) -> Reports:
        """Runs forward of a global batch without gradients, and returns the reports of this rank's losses. Collective.

        collect_non_loss_data: call the loss function with non_loss_data=True, and return its results instead.

        With a memory, ranks exchange overflow flags after each batch, with a small all-reduce. A single exchange per
        evaluation would require storing all batches for a retry. iteration, NOTE and errors: as for train_sync.
        """

        def reduce(_: Reports, overflow_flags: torch.Tensor | None) -> StepStatistics:
            if overflow_flags is None:
                return StepStatistics({}, None)
            return self.statistics.reduce_sync({}, overflow_flags=overflow_flags)

        reports, _ = self._run_sync(
            iterator,
            reduce,
            num_microbatches=num_microbatches,
            iteration=iteration,
            forward_only=True,
            collect_non_loss_data=collect_non_loss_data,
        )
        return reports

    def _run_sync(
        self,
        iterator: Iterator[Any] | None,
        reduce: _ReduceStatistics,
        *,
        num_microbatches: int,
        iteration: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
    ) -> tuple[Reports, StepStatistics]:
        may_break_off = self.graph is not None and self.graph.may_break_off and not forward_only
        if self.memory is None and not may_break_off:
            reports = self._run_passes(
                iterator,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
            )
            return reports, reduce(reports, None)
        start = _StepStart(iterator)
        grown: list[str] = []
        while True:
            reports = self._run_from(
                start,
                num_microbatches=num_microbatches,
                iteration=iteration,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
            )
            statistics = reduce(reports, None if self.memory is None else self.memory.overflow_flags())
            if self.memory is None:
                return reports, statistics
            if not statistics.overflow.occurred:
                self.memory.end_step()
                return reports, statistics
            if not forward_only:
                self.discard_gradients()
            if len(grown) == _MAX_RETRIES:
                raise ExpertOverflowError(_growth_failed(statistics.overflow, grown, iteration=iteration))
            grown.append(self.memory.grow_sync(iteration=iteration))
            what = "an evaluation after iteration" if forward_only else "iteration"
            print_rank_0(f"  {what} {iteration} overflowed ({statistics.overflow}), retrying: {grown[-1]}")
            # Restored last, because growing may have drawn random numbers.
            start.restore()

    def _run_from(
        self,
        start: "_StepStart",
        *,
        num_microbatches: int,
        iteration: int,
        forward_only: bool,
        collect_non_loss_data: bool,
    ) -> Reports:
        """Runs the passes over the batches of `start`. If their capture fails, runs them eagerly. Collective."""

        def run() -> Reports:
            if self.memory is not None:
                self.memory.begin_step(num_microbatches=num_microbatches, forward_only=forward_only)
            if self.update is not None and not forward_only:
                # Drops the state of a step that was ended by an error before its update.
                self.update.forget()
            return self._run_passes(
                start.batches,
                num_microbatches=num_microbatches,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
            )

        try:
            return run()
        except CaptureFailedError as error:
            print_rank_0(
                f"  iteration {iteration} could not be captured as a CUDA graph ({error}): it and all later "
                "iterations run without one. Run tools/check_capture.py with these flags to find the lines that "
                "prevent it"
            )
        self.discard_gradients()
        start.restore()
        return run()

    def skip(self, iterator: Iterator[Any] | None, *, num_microbatches: int) -> None:
        """Reads and discards the batches of a step, on ranks that read batches."""
        reading = next((one for one in self._chunk_iterators(iterator) if one is not None), None)
        if reading is not None:
            with _error_if_data_ends(num_microbatches):
                for _ in range(num_microbatches):
                    next(reading)

    def discard_gradients(self) -> None:
        """Discards the gradients of a discarded step, including reductions in flight. Collective."""
        wrapped = (chunk for chunk in self.model if isinstance(chunk, _BaseDataParallel))
        # Resets each collective scheduler once, through any of its chunks. Like zero_grad, this begins an iteration.
        for chunk in {chunk.launch_order: chunk for chunk in wrapped}.values():
            chunk.reset_iteration()
        if self.update is not None:
            self.update.forget()

    def _run_passes(
        self,
        iterator: Iterator[Any] | None,
        *,
        num_microbatches: int,
        forward_only: bool,
        collect_non_loss_data: bool,
    ) -> list[Any]:
        """Runs the passes over the next batches. Returns the reports of the losses on the last stage."""
        for inner in unwrap_model(list(self.model)):
            # Drops records of passes that were discarded or ended by an error.
            if isinstance(inner, RecordsAuxLosses):
                inner.aux_losses.forget_step()
        with self.timers("forward-backward", log_level=1), _error_if_data_ends(num_microbatches):
            return (self.graph or get_forward_backward_func())(
                forward_step_func=self.forward_step,
                data_iterator=self._chunk_iterators(iterator),
                model=self.model,
                num_microbatches=num_microbatches,
                seq_length=self.seq_length,
                micro_batch_size=self.micro_batch_size,
                forward_only=forward_only,
                collect_non_loss_data=collect_non_loss_data,
            )

    def _require_padding_in_routers(self) -> None:
        """Raises ValueError if routers of this rank have not received the padding masks of the batches."""
        for chunk in unwrap_model(list(self.model)):
            if isinstance(chunk, RecordsAuxLosses) and chunk.aux_losses.ignores_padding:
                raise ValueError(
                    "batches contain padding_mask, but forward_step does not pass it to the model, so routers would "
                    'count padding as data: call the model with padding_mask=batch.get("padding_mask") on every '
                    "pipeline stage"
                )

    @property
    def _has_later_experts(self) -> bool:
        """Whether experts are in chunks that read no batches by default."""
        return self.has_experts and group_size(self.groups.pp) * len(self.model) > 2

    @property
    def _reads_first(self) -> bool:
        """Whether this rank is the first of the ranks that read the same batches."""
        return all(group_rank(group) == 0 for group in (self.groups.pp, self.groups.tp, self.groups.cp))

    def _chunk_iterators(self, iterator: Iterator[Any] | None) -> list[Iterator[Any] | None]:
        """Returns an iterator over the same batches for each chunk, or None for a chunk that reads no batches.

        The first and the last chunk of the pipeline read batches, for tokens and labels.
        """
        stage, schedule = group_rank(self.groups.pp), get_model_config(self.model[0]).pipeline_schedule
        placement = placement_of(schedule, group_size(self.groups.pp), len(self.model))
        # Attention in other chunks uses masks and document boundaries, and routers use padding masks. Reading them is
        # cheaper than receiving them.
        everywhere = self.resets_attention_mask or (self.has_experts and marks_padding(iterator))
        readers = [
            chunk
            for chunk in range(placement.num_chunks)
            if everywhere or placement.has_embedding(stage, chunk) or placement.has_loss(stage, chunk)
        ]
        if iterator is None or len(readers) < 2:
            return [iterator if chunk in readers else None for chunk in range(placement.num_chunks)]
        # All copies have read the same batches when the step ends, so `tee` buffers at most the batches of one step.
        copies = dict(zip(readers, (map(with_own_containers, copy) for copy in tee(iterator, len(readers)))))
        return [copies.get(chunk) for chunk in range(placement.num_chunks)]


@contextmanager
def _error_if_data_ends(num_microbatches: int) -> Iterator[None]:
    """Converts the end of a script's iterator to a ValueError. Iterators over datasets never end."""
    try:
        yield
    except StopIteration as error:
        raise DataError(
            f"the data ended within a step of {num_microbatches} micro-batches: the dataset provider's iterators "
            "must supply enough data for --train-iters and --eval-iters"
        ) from error


class CountedBatches(Iterator[Any]):
    """Iterates over `source` and counts the padding of its batches.

    must_mark_padding: raises ValueError for a padding_mask of a source without has_padding_mask, because the stages
    that read no batches would not receive it.
    """

    def __init__(self, source: Iterator[Any], *, must_mark_padding: bool = False) -> None:
        self._source = source
        self._must_mark_padding = must_mark_padding
        self.has_padding_mask = marks_padding(source)
        self.padding = NO_PADDING

    def __next__(self) -> Any:
        batch = next(self._source)
        if not isinstance(batch, dict) or PADDING_MASK not in batch:
            return batch
        if self._must_mark_padding and not self.has_padding_mask:
            raise ValueError(
                "batches contain padding_mask, but has_padding_mask of their data set or iterator is not True: set it, "
                "because all pipeline stages must read the mask for their routers"
            )
        self.has_padding_mask = True
        self.padding += count_padding_sync(batch)
        return batch


class _StepStart:
    """State at the start of a step: its batches (None on stages without batches) and the random-number generators."""

    def __init__(self, iterator: Iterator[Any] | None) -> None:
        self.batches = None if iterator is None else RetryBatches(iterator)
        self._generators = capture_rng()

    def restore(self) -> None:
        """Restores the state, so that a retry reads the same batches and draws the same random numbers."""
        restore_rng(self._generators)
        if self.batches is not None:
            self.batches.rewind()


class RetryBatches(Iterator[Any]):
    """Iterates over `source` and stores the batches of a step, so that `rewind` can replay them for a retry.

    The reader receives new dicts, lists and tuples, which it may modify, around the source's tensors, which it must not
    modify. If a read from the source drew random numbers, the replay sets the generators to their state after that
    read. All microbatches remain in host memory until the step is complete. No tensor is copied, but with
    --create-attention-mask-in-dataloader each microbatch contains a mask of B x S x S bytes. Document boundaries avoid
    the mask.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self.has_padding_mask = marks_padding(source)
        # Each with the generators' state after the read, if the read drew random numbers.
        self._kept: list[tuple[Any, RngState | None]] = []
        self._num_read = 0

    def __next__(self) -> Any:
        if self._num_read == len(self._kept):
            before = capture_rng()
            batch = next(self._source)
            # A source may draw random numbers to choose its batches. A replay draws none.
            after = capture_rng()
            self._kept.append((batch, None if same_rng(before, after) else after))
        elif (drawn := self._kept[self._num_read][1]) is not None:
            restore_rng(drawn)
        self._num_read += 1
        return with_own_containers(self._kept[self._num_read - 1][0])

    def rewind(self) -> None:
        """Returns to the first batch of the step."""
        self._num_read = 0


def with_own_containers(batch: Any) -> Any:
    """Returns new dicts, lists and tuples around the same tensors."""
    return tree_map(lambda leaf: leaf, batch)


def _growth_failed(overflow: Overflow, grown: Sequence[str], *, iteration: int) -> str:
    return (
        f"iteration {iteration} still overflows after {len(grown)} retries ({overflow}), and updated nothing. "
        f"Growing did not help: {'; '.join(grown)}. Raise --moe-expert-rank-capacity-factor against expert "
        "overflow, --moe-paged-stash-buffer-size-factor-cuda or -cpu against stash overflow"
    )
