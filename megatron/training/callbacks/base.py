"""Defines the interface of callbacks and the reports that they receive at each moment of a run.

Callbacks observe. They never change parameters, gradients or the order of data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megatron.core.datasets.padding import NO_PADDING, PaddingCount


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Milliseconds of work per step, on the fastest and on the slowest rank, excluding waits for other ranks."""

    min_ms: float
    min_rank: int
    max_ms: float
    max_rank: int


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Page usage of the paged stash since the last log line.

    Fields that describe the fullest pool of any rank and step: rank, the sizes of its tiers (device_pages, host_pages,
    page_bytes), the peak number of pages in use (device_high_water, host_high_water), and timeline (see stash_timeline
    in meters/stash.py). timeline is None if an earlier report contains a timeline of the same plan for a step that was
    at least as full.

    Sums over ranks and steps: planned_pages, spilled_pages (planned pages that did not fit on the device), live_bytes
    (bytes of rows in pages), tail_bytes (bytes of pages that no row occupies), and dropped_gate_up (the number of
    recomputed gate_ups).

    factor: number of device pages relative to the peak of a balanced step, for the longest step of the run and the rank
    with the smallest factor. factors_needed: smallest sufficient factor of each step, as the maximum over ranks, in
    chronological order. factor_to_keep_all: the factor with which none of these steps would have recomputed a tensor; 0
    if no tensor was recomputed for lack of pages. It includes the pages that gate_up leaves free for later layers, and
    refers to host pages if the device has none.
    """

    rank: int
    device_pages: int
    host_pages: int
    page_bytes: int
    device_high_water: int
    host_high_water: int
    planned_pages: int
    spilled_pages: int
    live_bytes: int
    tail_bytes: int
    dropped_gate_up: int
    factor: float
    factors_needed: tuple[float, ...]
    factor_to_keep_all: float = 0.0
    timeline: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class StashReport:
    """Usage of the fixed-size expert buffers since the last log line, over all ranks.

    steps: number of steps since the last log line. void_steps: number of discarded attempts at these steps.
    capacity_factor: current capacity factor of the buffers. factors_needed: smallest sufficient factor of each step, in
    chronological order. balanced_rows: rows of a forward pass under balanced routing. buffer_rows: rows of a buffer.
    rows: maps a layer number to the largest number of live rows of a forward pass on any rank. rungs: maps
    spilled_pages, dropped_gate_up and void_steps to their counts in each step, in chronological order, without entries
    that are always 0. pool: None without the paged stash.
    """

    steps: int
    void_steps: int
    capacity_factor: float
    factors_needed: tuple[float, ...]
    balanced_rows: int
    buffer_rows: int
    rows: dict[int, int]
    rungs: dict[str, list[int]]
    pool: PoolReport | None


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The results of one training step as plain numbers. None means not requested, or not known at this step.

    losses: mean over the global batch by name ("lm loss", "load_balancing_loss"). seconds: wall time of the step.
    grad_norm: global L2 norm before clipping; not finite if a gradient is not finite. params_norm: L2 norm of the
    weights after the step. tflops: 10^12 operations per second of one device. mfu: model FLOP/s utilization, the share
    of the device's peak. memory: bytes on this rank by kind. timers: maps a timer to the slowest rank's milliseconds
    per step, averaged since the last log line. overlap: overlap of communication with backward on this rank (see
    overlap_record). expert_load: maps a layer number to the tokens per expert over all ranks. per_layer: maps a name to
    values by layer number. straggler: a rank that is persistently slower than the others, at log lines (see Straggler).
    max_attention_logit: largest scaled attention score over layers, heads and ranks. is_last: whether the run ends with
    this step. stash: usage of expert buffers, at log lines and at the last step. routing: maps a layer number to the
    tokens per expert of each microbatch and rank of a stage, [M, R, E], int64, on the first rank only. Ranks that share
    experts are adjacent. tokens: tokens of the step without padding. padding, consumed_padding: padding of the step's
    samples, and of all consumed samples. held: bytes allocated on the ranks, by kind (see meters/memory.py). notes:
    additional console lines, printed after the step's line.
    """

    iteration: int
    losses: dict[str, float]
    grad_norm: float
    num_zeros: int | None
    learning_rate: float
    loss_scale: float
    global_batch_size: int
    consumed_samples: int
    tokens: int
    seconds: float
    skipped: bool
    nan: bool
    weight_decay: float | None = None
    decoupled_learning_rate: float | None = None
    params_norm: float | None = None
    max_attention_logit: float | None = None
    tflops: float | None = None
    mfu: float | None = None
    memory: dict[str, int] | None = None
    timers: dict[str, float] | None = None
    rank_times: RankTimes | None = None
    overlap: dict[str, Any] | None = None
    expert_load: dict[int, list[int]] | None = None
    per_layer: dict[str, dict[int, float]] | None = None
    stash: StashReport | None = None
    routing: dict[int, Tensor] | None = None
    held: dict[str, Any] | None = None
    straggler: dict[str, Any] | None = None
    is_last: bool = False
    notes: tuple[str, ...] = ()
    padding: PaddingCount = NO_PADDING
    consumed_padding: PaddingCount = NO_PADDING


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Mean losses of an evaluation.

    split: "validation" or "test". final: whether training has ended. set_name: name of the validation set if there are
    several.
    """

    iteration: int
    split: str
    losses: dict[str, float]
    final: bool = False
    set_name: str | None = None

    @property
    def label(self) -> str:
        """Name of the split, followed by the name of the set if there are several, such as "validation-books"."""
        return self.split if self.set_name is None else f"{self.split}-{self.set_name}"


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The first and the last iteration of a run. consumed_padding: padding of the samples consumed before it."""

    iteration: int
    train_iters: int
    consumed_padding: PaddingCount = NO_PADDING


class Callback:
    """Base class of callbacks. Each method is called at one moment of the run and does nothing unless overridden."""

    def on_train_start(self, start: RunStart) -> None:
        """Called before the first step."""

    def on_step_start(self, iteration: int) -> None:
        """Called before each training step, after `iteration` completed steps. Skipped steps call no on_step_end."""

    def on_step_end(self, report: StepReport) -> None:
        """Called after each training step."""

    def on_evaluation_start(self, iteration: int) -> None:
        """Called before an evaluation."""

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Called after an evaluation, once for each data set."""

    def on_save(self, iteration: int) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_rewind(self, iteration: int) -> None:
        """Called after the run has reloaded the checkpoint of `iteration`, before it repeats the later steps."""

    def on_train_end(self) -> None:
        """Called after the last step and its checkpoint, before the final evaluation."""

    def on_run_end(self) -> None:
        """Called at the end of the run, even after an error, to close files."""


@dataclass
class CallbackList(Callback):
    """Forwards each moment to its callbacks, in order."""

    callbacks: Sequence[Callback] = field(default_factory=tuple)

    def on_train_start(self, start: RunStart) -> None:
        for callback in self.callbacks:
            callback.on_train_start(start)

    def on_step_start(self, iteration: int) -> None:
        for callback in self.callbacks:
            callback.on_step_start(iteration)

    def on_step_end(self, report: StepReport) -> None:
        for callback in self.callbacks:
            callback.on_step_end(report)

    def on_evaluation_start(self, iteration: int) -> None:
        for callback in self.callbacks:
            callback.on_evaluation_start(iteration)

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        for callback in self.callbacks:
            callback.on_evaluation_end(report)

    def on_save(self, iteration: int) -> None:
        for callback in self.callbacks:
            callback.on_save(iteration)

    def on_rewind(self, iteration: int) -> None:
        for callback in self.callbacks:
            callback.on_rewind(iteration)

    def on_train_end(self) -> None:
        for callback in self.callbacks:
            callback.on_train_end()

    def on_run_end(self) -> None:
        for callback in self.callbacks:
            callback.on_run_end()
