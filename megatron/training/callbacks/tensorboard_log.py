"""Scalars of the run for TensorBoard, under the tags that Megatron users' dashboards know."""

from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.callbacks.console_log import perplexity


class TensorBoardLog(Callback):
    """Writes every `interval` iterations to `folder`."""

    def __init__(self, folder: str, *, interval: int) -> None:
        try:
            # Optional, and a second to import: only runs that ask for it pay.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard-dir is {folder}: the package tensorboard is missing, install megatron-stash[report]"
            ) from error

        self.interval = interval
        self._folder = folder
        self._open = SummaryWriter
        self._writer: SummaryWriter | None = None

    def on_train_start(self, start: RunStart) -> None:
        """Opens the event file; points of an earlier run past the start are hidden by `purge_step`."""
        self._writer = self._open(self._folder, purge_step=start.iteration + 1)

    def on_step_end(self, report: StepReport) -> None:
        """Writes losses, learning rate, norm and speed."""
        if report.iteration % self.interval:
            return
        scalars = {
            **report.losses,
            "learning-rate": report.learning_rate,
            "batch-size": report.global_batch_size,
            "loss-scale": report.loss_scale,
            "grad-norm": report.grad_norm,
            "iteration-time": report.seconds,
            "tokens-per-second": report.tokens / report.seconds,
            **_layer_scalars(report),
        }
        for tag, value in scalars.items():
            if value is not None:
                self._add(tag, value, step=report.iteration)

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Writes loss and perplexity of the split."""
        for name, value in report.losses.items():
            self._add(f"{name} {report.split}", value, step=report.iteration)
            self._add(f"{name} {report.split} ppl", perplexity(value), step=report.iteration)

    def on_run_end(self) -> None:
        """Writes what is buffered and closes the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _add(self, tag: str, value: float, *, step: int) -> None:
        assert self._writer is not None, "the writer is opened by on_train_start"
        self._writer.add_scalar(tag, value, step)


def _layer_scalars(report: StepReport) -> dict[str, float]:
    """By Megatron's tags, which count layers from 0: router losses, and the busiest expert's tokens over the mean."""
    scalars = {
        f"moe/{name}_layer_{number - 1}": value
        for name, values in (report.per_layer or {}).items()
        for number, value in values.items()
    }
    for number, tokens in (report.expert_load or {}).items():
        scalars[f"moe/load_imbalance_layer_{number - 1}"] = max(tokens) * len(tokens) / sum(tokens)
    return scalars
