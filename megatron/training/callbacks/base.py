"""The moments of a run that optional behaviour hangs on, and the records handed over at each.

Callbacks watch; they never change parameters, gradients or the order of data.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Milliseconds a step that ranks worked, their waiting for each other left out: the fastest and slowest rank."""

    min_ms: float
    min_rank: int
    max_ms: float
    max_rank: int


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """Pages of the paged stash in the steps since the last log line.

    rank, device_pages, host_pages, page_bytes, device_high_water, host_high_water: of the step and rank whose pool was
    fullest, the sizes of its tiers and the most pages that each held at once; timeline: when, see stash_timeline.py,
    None where the plan is that of an earlier report whose step was as full.
    planned_pages, spilled_pages of them that found no room on the device, live_bytes in them and tail_bytes that no row
    filled, dropped_gate_up and dropped_act, tensors that were recomputed: sums over ranks and steps.
    factor: device pages over those of a balanced step's peak, the longest step of the run, of the rank that has the
    fewest; factors_needed: the same of the pages that would have sufficed, of the rank that needed the most in each
    step, oldest first. factor_to_keep_all: the factor with which none of these steps would have recomputed a tensor, 0
    if none did for want of pages. It includes the pages that gate_up and act leave free for later layers, and is of the
    host's pages if the device has none.
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
    dropped_act: int
    factor: float
    factors_needed: tuple[float, ...]
    factor_to_keep_all: float = 0.0
    timeline: dict[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class StashReport:
    """Expert buffers of a fixed size in the steps since the last log line, over all ranks.

    steps: how many these are. void_steps: runs of them that had to be done again. capacity_factor: of the buffers now;
    factors_needed: the least that would have done, of each step, oldest first. balanced_rows: of a pass, if all experts
    were chosen equally often; buffer_rows: room for them; rows: layer number to the most live rows of a pass on any
    rank. rungs: of each of spilled_pages, dropped_act, dropped_gate_up and void_steps that occurred, how often in each
    step, oldest first. pool: None without the paged stash.
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
    """The results of one training step, as plain numbers; None: not asked for, or not known at this step.

    losses: mean over the global batch by name ("lm loss", "load_balancing_loss"). seconds: wall time of the step.
    grad_norm: global L2 norm before clipping, not finite where a gradient was not. params_norm: that of the weights
    after the step. tflops: 10^12 operations a second of one device; mfu: their share of its peak. memory: bytes of
    this rank by kind. timers: milliseconds a step by timer, of the slowest rank, mean since the last log line.
    overlap: how communication overlapped with backward on this rank, see overlap_record.
    expert_load: layer number to tokens per expert over all ranks. per_layer: name to layer number to value.
    straggler: a rank that stays slower than the others, at log lines, see stragglers.py.
    is_last: the run ends with this step, early or not. stash: of expert buffers, at log lines and at the last step.
    routing: layer number to tokens per expert of each micro-batch and rank of a stage, [M, R, E] int64, ranks that
    share experts next to each other; on the first rank alone.
    held: bytes by kind that ranks hold, see held_memory.py.
    notes: lines for the console below that of the step.
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


@dataclass(frozen=True, kw_only=True)
class EvaluationReport:
    """Mean losses over an evaluation; `split` is "validation" or "test"."""

    iteration: int
    split: str
    losses: dict[str, float]
    final: bool = False


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The first and the last iteration of a run."""

    iteration: int
    train_iters: int


class Callback:
    """Base of all callbacks: each method is a moment of the run and does nothing unless overridden."""

    def on_train_start(self, start: RunStart) -> None:
        """Called before the first step."""

    def on_step_start(self, iteration: int) -> None:
        """Called before each training step; `iteration` steps are done."""

    def on_step_end(self, report: StepReport) -> None:
        """Called after each training step."""

    def on_evaluation_start(self, iteration: int) -> None:
        """Called before an evaluation."""

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Called after an evaluation of one split."""

    def on_save(self, iteration: int) -> None:
        """Called when a checkpoint is complete on disk."""

    def on_rewind(self, iteration: int) -> None:
        """Called when the run has returned to the checkpoint of `iteration`: later steps are repeated."""

    def on_train_end(self) -> None:
        """Called after the last step and its checkpoint, before the final evaluation."""

    def on_run_end(self) -> None:
        """Called at the very end, also when an error ends the run, to close files."""


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
