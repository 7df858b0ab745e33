"""Python's garbage collection at fixed steps: no rank pauses while the others wait for it."""

import gc

from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.logging_config import GarbageCollectionConfig


class ManualGC(Callback):
    """Switches automatic collection off for the run; collects where the configuration says."""

    def __init__(self, config: GarbageCollectionConfig) -> None:
        self.config = config

    def on_train_start(self, start: RunStart) -> None:
        """Collects what the setup left; from here on nothing else does."""
        gc.disable()
        gc.collect()

    def on_step_end(self, report: StepReport) -> None:
        """Collects every `manual_gc_interval` steps."""
        if self.config.manual_gc_interval and report.iteration % self.config.manual_gc_interval == 0:
            gc.collect()

    def on_evaluation_start(self, iteration: int) -> None:
        """Collects before an evaluation."""
        if self.config.manual_gc_eval:
            gc.collect()

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Collects the young objects of the evaluation."""
        if self.config.manual_gc_eval:
            gc.collect(generation=0)

    def on_run_end(self) -> None:
        """Leaves the process as it was."""
        gc.enable()
