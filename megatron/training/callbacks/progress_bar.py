"""A live bar at the foot of a terminal; log lines scroll above it. Runs that write to a file do not use it."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport


class ProgressBar(Callback):
    """Shows iterations, the latest losses and tokens per second."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[figures]}"), console=console)
        self._task: TaskID | None = None
        self._figures = ""
        self._validation = ""

    def on_train_start(self, start: RunStart) -> None:
        """Draws the bar at the iteration that the run starts from."""
        self._progress.start()
        self._task = self._progress.add_task(
            "training", total=start.train_iters, completed=start.iteration, figures="waiting for the first step"
        )

    def on_step_end(self, report: StepReport) -> None:
        """Moves the bar."""
        loss = report.losses.get("lm loss", float("nan"))
        self._figures = f"loss {loss:.3f}  {report.tokens / report.seconds:,.0f} tokens/s"
        self._draw("training", completed=report.iteration)

    def on_evaluation_start(self, iteration: int) -> None:
        """Says why the bar stands still."""
        self._draw("evaluating", completed=iteration)

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Keeps the latest validation loss in view."""
        self._validation = f"  {report.split} {report.losses.get('lm loss', float('nan')):.3f}"
        self._draw("training", completed=report.iteration)

    def on_run_end(self) -> None:
        """Leaves the terminal as it was."""
        self._progress.stop()

    def _draw(self, description: str, *, completed: int) -> None:
        if self._task is not None:
            figures = self._figures + self._validation
            self._progress.update(self._task, completed=completed, description=description, figures=figures)
