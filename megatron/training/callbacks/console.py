"""Console output of a run: training, validation and checkpoint lines in two formats, and a progress bar on terminals.

MegatronLines prints the fields of Megatron-LM in their order, as users' parsers expect them. CompactLines is meant for
people. steps.jsonl contains every number of both.
"""

import math
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron.core.transformer.moe.paged_stash.sizing import rounded_up
from megatron.training.callbacks.base import Callback, EvaluationReport, PoolReport, RunStart, StashReport, StepReport

# Share of gate_ups that may be recomputed without a field in compact lines.
USUAL_RECOMPUTATION = 0.1
# Minimum number of columns for the name of an evaluated set.
SHORTEST_LABEL = 20


class LogLines(Protocol):
    """Interface of a format for the console lines of a run."""

    def training(self, reports: Sequence[StepReport], train_iters: int) -> str:
        """Formats the line of one or more consecutive steps."""
        ...

    def evaluation(self, report: EvaluationReport) -> str:
        """Formats the line of an evaluation."""
        ...

    def saved(self, iteration: int) -> str:
        """Formats the line printed when the checkpoint of an iteration is complete."""
        ...


class ConsoleLog(Callback):
    """Prints one line every `log_interval` iterations, with means over the interval and counts since the last line."""

    def __init__(self, log_interval: int, *, write: Callable[[str], None], lines: LogLines | None = None) -> None:
        """Prepares an empty interval. lines: format of the lines; None means Megatron-LM's format."""
        self.log_interval = log_interval
        self.train_iters = 0
        self.write = write
        self.lines = MegatronLines() if lines is None else lines
        self._reports: list[StepReport] = []

    def on_train_start(self, start: RunStart) -> None:
        """Starts a new interval at the first step of the run."""
        self.train_iters = start.train_iters
        self._reports.clear()

    def on_step_end(self, report: StepReport) -> None:
        """Records the step, and prints a line at the end of an interval."""
        self._reports.append(report)
        if report.iteration % self.log_interval == 0:
            self._flush()

    def on_rewind(self, iteration: int) -> None:
        """Starts a new interval, because the recorded steps will be repeated."""
        self._reports.clear()

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Prints the losses and perplexities of the evaluated split."""
        self.write(self.lines.evaluation(report))

    def on_save(self, iteration: int) -> None:
        """Prints a line when a checkpoint is complete on disk."""
        self.write(self.lines.saved(iteration))

    def on_train_end(self) -> None:
        """Prints a line for the last, incomplete interval."""
        self._flush()

    def on_run_end(self) -> None:
        """Prints a line for an interval that was interrupted by an error."""
        self._flush()

    def _flush(self) -> None:
        if self._reports:
            self.write(self.lines.training(self._reports, self.train_iters))
            for note in (note for report in self._reports for note in report.notes):
                self.write(note)
            self._reports.clear()


class MegatronLines:
    """Formats lines as Megatron-LM does."""

    def training(self, reports: Sequence[StepReport], train_iters: int) -> str:
        """Formats the line of one or more consecutive steps."""
        return format_training_line(reports, train_iters)

    def evaluation(self, report: EvaluationReport) -> str:
        """Formats the line of an evaluation."""
        return format_evaluation_line(report)

    def saved(self, iteration: int) -> str:
        """Formats the line printed when the checkpoint of an iteration is complete."""
        return f"  successfully saved checkpoint from iteration {iteration:7d}"


class _Field(NamedTuple):
    """A field of a compact line. short: used if the line would be too wide."""

    text: str
    short: str


class CompactLines:
    """Formats short lines: step, loss, speed, gradient norm and remaining time, and fields for unusual events."""

    # Maximum number of columns in a line.
    WIDTH = 110

    def __init__(
        self,
        *,
        micro_batch_size: int,
        minutes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the clock for the remaining time. minutes: time limit of the run, from now; None means no limit."""
        self._micro_batch_size = micro_batch_size
        self._clock = clock
        self._deadline = math.inf if minutes is None else clock() + 60 * minutes
        self._loss_scale: float | None = None  # at the last line

    def training(self, reports: Sequence[StepReport], train_iters: int) -> str:
        """Formats the line of one or more consecutive steps."""
        last, losses = reports[-1], mean_losses(reports)
        seconds = sum(report.seconds for report in reports)
        fields = [_same(f"step {last.iteration:>{len(str(train_iters))}}/{train_iters}")]
        if "lm loss" in losses:
            fields.append(_same(f"loss {_number(losses['lm loss'])}"))
        elif all(report.skipped for report in reports):
            fields.append(_same("loss -"))
        speed = sum(report.tokens for report in reports) / seconds
        fields.append(_Field(f"{speed:,.0f} tokens/s", f"{_short_count(round(speed))} tok/s"))
        fields.append(_Field(f"grad norm {last.grad_norm:.3g}", f"norm {last.grad_norm:.2g}"))
        fields.append(_same(f"ETA {self._remaining(train_iters - last.iteration, seconds / len(reports))}"))
        before, self._loss_scale = self._loss_scale or reports[0].loss_scale, last.loss_scale
        events = _events(reports, micro_batch_size=self._micro_batch_size)
        if last.loss_scale != before:
            events.append(_Field(f"loss scale {last.loss_scale:g}", f"scale {last.loss_scale:.3g}"))
        return _fitted(fields, events, width=self.WIDTH)

    def evaluation(self, report: EvaluationReport) -> str:
        """Formats the line of an evaluation."""
        where = "after training" if report.final else f"at step {report.iteration}"
        values = [
            f"{name.removeprefix('lm ')} {_number(value)}" + (f", perplexity {perplexity(value):,.4g}" * is_loss(name))
            for name, value in report.losses.items()
        ] or ["no values"]
        label = _shortened(report.label, max(SHORTEST_LABEL, self.WIDTH - len(f" {where}: {values[0]}")))
        return _joined([f"{label} {where}: {values[0]}", *values[1:]], width=self.WIDTH)

    def saved(self, iteration: int) -> str:
        """Formats the line printed when the checkpoint of an iteration is complete."""
        return f"saved the checkpoint of step {iteration}"

    def _remaining(self, steps: int, step_seconds: float) -> str:
        seconds = round(max(0.0, min(steps * step_seconds, self._deadline - self._clock())))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        days, hours = divmod(hours, 24)
        if days:
            return f"{days}d {hours}h"
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _events(reports: Sequence[StepReport], *, micro_batch_size: int) -> list[_Field]:
    """Returns fields for unusual events since the last line, the most important ones first."""
    counts = [
        ("nan", "nan", sum(report.nan for report in reports)),
        ("skipped", "skip", sum(report.skipped for report in reports)),
    ]
    last, stash = reports[-1], reports[-1].stash
    if stash is not None:
        counts.insert(0, ("discarded", "disc", stash.void_steps))
        if stash.pool is not None:
            counts.append(("spilled", "spill", stash.pool.spilled_pages))
            recomputed = stash.pool.dropped_gate_up
            # Each microbatch has a gate_up in each layer, or several with tensor or context parallelism.
            num_tensors = stash.steps * len(stash.rows) * last.global_batch_size // micro_batch_size
            if recomputed > USUAL_RECOMPUTATION * num_tensors:
                counts.append(("recomputed", "recomp", recomputed))
    return [_Field(f"{name} {count}", f"{short} {_short_count(count)}") for name, short, count in counts if count]


def _same(text: str) -> _Field:
    return _Field(text, text)


def _number(value: float) -> str:
    """Formats a value with three decimals, or with four significant digits if it is small or large."""
    return f"{value:.3f}" if 0.1 <= abs(value) < 10_000 else f"{value:.4g}"


def _short_count(count: int) -> str:
    """Formats a count with at most four digits and a unit."""
    for unit in ("", "k", "M", "G"):
        if count < 10_000:
            return f"{count}{unit}"
        count //= 1000
    return f"{count}T"


def _fitted(fields: Sequence[_Field], events: Sequence[_Field], *, width: int) -> str:
    """Joins usual fields and events into a line of at most `width` columns, if possible.

    Shortens all of them if necessary, and then drops the last usual fields, so that events remain.
    """
    line = "  ".join(field.text for field in [*fields, *events])
    for kept in range(len(fields), 0, -1):
        if len(line) <= width:
            return line
        line = "  ".join(field.short for field in [*fields[:kept], *events])
    return _shortened(line, width)


def _shortened(text: str, width: int) -> str:
    """Replaces the middle of a text with an ellipsis if it needs more than `width` columns."""
    if len(text) <= width:
        return text
    num_end = (width - 3) // 2
    return f"{text[: width - 3 - num_end]}...{text[len(text) - num_end :]}"


def _joined(fields: Sequence[str], *, width: int) -> str:
    """Joins fields, and replaces trailing fields that do not fit into `width` columns with an ellipsis."""
    line = "  ".join(fields)
    kept = len(fields)
    while len(line) > width and kept > 1:
        kept -= 1
        line = "  ".join([*fields[:kept], "..."])
    return _shortened(line, width)


def format_training_line(reports: Sequence[StepReport], train_iters: int) -> str:
    """Formats the log line of consecutive steps, with the names and the order of Megatron-LM's fields."""
    last = reports[-1]
    seconds = sum(report.seconds for report in reports)
    fields = [
        f" [{datetime.now():%Y-%m-%d %H:%M:%S}] iteration {last.iteration:8d}/{train_iters:8d}",
        f" consumed samples: {last.consumed_samples:12d}",
        f" elapsed time per iteration (ms): {1000.0 * seconds / len(reports):.1f}",
        *_throughput_fields(reports, seconds),
        f" learning rate: {last.learning_rate:.6E}",
        *_decoupled_fields(last),
        f" global batch size: {last.global_batch_size:5d}",
        *(f" {name}: {value:.6E}" for name, value in mean_losses(reports).items()),
        f" loss scale: {last.loss_scale:.1f}",
        f" grad norm: {last.grad_norm:.3f}",
    ]
    if last.num_zeros is not None:
        fields.append(f" num zeros: {last.num_zeros}")
    if last.params_norm is not None:
        fields.append(f" params norm: {last.params_norm:.3f}")
    if last.max_attention_logit is not None:
        fields.append(f" max attention logit: {last.max_attention_logit:.3f}")
    if last.stash is not None:
        fields += _stash_fields(last.stash)
    fields.append(f" number of skipped iterations: {sum(report.skipped for report in reports):3d}")
    fields.append(f" number of nan iterations: {sum(report.nan for report in reports):3d}")
    return " |".join(fields) + " |"


def _decoupled_fields(last: StepReport) -> list[str]:
    rate = last.decoupled_learning_rate
    return [] if rate is None else [f" decoupled learning rate: {rate:.6E}"]


def _stash_fields(stash: StashReport) -> list[str]:
    fields = [
        f" expert capacity factor needed: {max(stash.factors_needed):.2f} of {stash.capacity_factor:.2f}",
        f" void steps: {stash.void_steps}",
    ]
    return fields if stash.pool is None else fields + _pool_fields(stash.pool)


def _pool_fields(pool: PoolReport) -> list[str]:
    """Formats the peak usage of the pool's tiers, and a description of spilled and recomputed tensors, if any."""
    tiers = [("device", pool.device_high_water, pool.device_pages), ("host", pool.host_high_water, pool.host_pages)]
    held = [f"{most}/{pages} ({100 * most / pages:.0f}%) {name}" for name, most, pages in tiers if pages]
    words = shortage_words(pool)
    return [f" stash pages of rank {pool.rank}: {', '.join(held)}", *([f" stash: {words}"] if words else [])]


def shortage_words(pool: PoolReport) -> str:
    """Describes the spilled and recomputed tensors since the last log line, with the cause; "" if there are none."""
    spilled = "1 page" if pool.spilled_pages == 1 else f"{pool.spilled_pages} pages"
    found = [f"{spilled} spilled to the host"] if pool.spilled_pages else []
    times = "1 time" if pool.dropped_gate_up == 1 else f"{pool.dropped_gate_up} times"
    found += [f"gate_up recomputed {times}"] if pool.dropped_gate_up else []
    if not found:
        return ""
    # The factor that keeps all tensors does not avoid spills.
    needed = max(pool.factor_to_keep_all, *(pool.factors_needed if pool.spilled_pages else ()), 0.0)
    if not needed or (pool.device_pages and needed <= pool.factor):
        # Missing pages were not the reason. The order of the step was not known yet, or the pool has grown since then.
        return ", ".join(found)
    shown, given = f"{rounded_up(needed):.2f}", f"{pool.factor:.2f}"
    if shown == given:
        shown, given = f"{needed:.5f}", f"{pool.factor:.5f}"
    # Without pages on the device, the factor refers to the host's pages.
    reason = f"too few pages (factor needed {shown}{f', given {given}' if pool.device_pages else ''})"
    # If no factor would have avoided the recomputation, the reason applies to the spills only.
    num_explained = len(found) if pool.factor_to_keep_all else 1
    return ", ".join([*found[:num_explained], reason, *found[num_explained:]])


def _throughput_fields(reports: Sequence[StepReport], seconds: float) -> list[str]:
    """Formats the mean throughput over the interval. Returns no fields if the steps do not report it."""
    fields = []
    means = {
        name: sum((vars(report)[name] or 0.0) * report.seconds for report in reports) / seconds
        for name in ("tflops", "mfu")
        if vars(reports[-1])[name] is not None
    }
    if "tflops" in means:
        # With one digit, a CPU's throughput would be shown as 0.0.
        digits = 1 if means["tflops"] >= 1 else 4
        fields.append(f" throughput per GPU (TFLOP/s/GPU): {means['tflops']:.{digits}f}")
    if "mfu" in means:
        fields.append(f" MFU (%): {100.0 * means['mfu']:.1f}")
    return fields


def mean_losses(reports: Sequence[StepReport]) -> dict[str, float]:
    """Returns the mean of each loss over the steps that report it, excluding skipped steps."""
    values: dict[str, list[float]] = {}
    for report in reports:
        for name, value in ({} if report.skipped else report.losses).items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in values.items()}


def format_evaluation_line(report: EvaluationReport) -> str:
    """Formats the log line of an evaluation: the values of the split, and the perplexity of each loss."""
    where = f"iteration {report.iteration}"
    if report.final:
        where += f" on {report.split} set"
    # Also for the test split, as in Megatron-LM.
    parts = [f"{'validation' if report.set_name is None else report.label} loss at {where}"]
    for name, value in report.losses.items():
        parts.append(f"{name} value: {value:.6E}")
        if is_loss(name):
            parts.append(f"{name} PPL: {perplexity(value):.6E}")
    return " " + " | ".join(parts) + " | "


def is_loss(name: str) -> bool:
    """Returns whether the name belongs to a loss, which has a perplexity: it ends in "loss"."""
    return name.endswith("loss")


def perplexity(loss: float) -> float:
    """Returns exp(loss), limited to exp(20) because the perplexity of an untrained model is meaningless; nan of nan."""
    return math.nan if math.isnan(loss) else math.exp(min(20.0, loss))


class ProgressBar(Callback):
    """Shows the iteration, the latest losses and tokens per second at the bottom of a terminal, below log lines."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console)
        self._task: TaskID | None = None
        self._figures = ""
        self._validation = ""

    def on_train_start(self, start: RunStart) -> None:
        """Draws the bar before the first step."""
        self._progress.start()
        self._task = self._progress.add_task(
            "training", total=start.train_iters, completed=start.iteration, figures="waiting for the first step"
        )

    def on_step_end(self, report: StepReport) -> None:
        """Advances the bar and shows the step's loss and speed."""
        loss = report.losses.get("lm loss", float("nan"))
        self._figures = f"loss {_number(loss)}  {report.tokens / report.seconds:,.0f} tokens/s"
        self._draw("training", completed=report.iteration)

    def on_evaluation_start(self, iteration: int) -> None:
        """Shows in the bar that an evaluation is running."""
        self._draw("evaluating", completed=iteration)

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Shows the latest validation loss."""
        self._validation = f"  {report.label} {_number(report.losses.get('lm loss', float('nan')))}"
        self._draw("training", completed=report.iteration)

    def on_run_end(self) -> None:
        """Stops the bar and restores the terminal."""
        self._progress.stop()

    def _draw(self, description: str, *, completed: int) -> None:
        if self._task is not None:
            figures = self._figures + self._validation
            self._progress.update(self._task, completed=completed, description=description, figures=figures)
