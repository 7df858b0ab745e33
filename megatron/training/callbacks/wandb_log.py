"""Logs scalars of a run to Weights & Biases through the package wandb, with the same tags as tensorboard.py.

[Note: continued runs] Weights & Biases identifies a run by its id, which the first start writes to `run_id.txt` in the
run's folder. A start from a checkpoint reads the id and continues that run. A start at step 0 begins a new run. Points
use the iteration as their step, which must not decrease. If an iteration is repeated after a restart or a rewind, its
first values remain.
"""

import os
import sys
from pathlib import Path
from typing import Any

from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.callbacks.tensorboard import evaluation_scalars, step_scalars
from megatron.training.command_line.published import publish_wandb
from megatron.training.command_line.yaml_config import config_values
from megatron.training.config import RunConfig

_ID_FILE = "run_id.txt"


def wandb_folder(run_config: RunConfig) -> Path:
    """Returns the folder for wandb's files: --wandb-save-dir, or `wandb` in --save. One of the two is always given."""
    own, save = run_config.logging.wandb_save_dir, run_config.checkpoint.save
    if own is not None:
        return Path(own)
    assert save is not None, "checked with --wandb-project"
    return Path(save) / "wandb"


class WandbLog(Callback):
    """Logs to Weights & Biases every `tensorboard_log_interval` iterations and after each evaluation.

    writer: the module `wandb`, whose `log` works after on_train_start. Megatron-LM passes the same object to scripts.
    """

    def __init__(self, run_config: RunConfig) -> None:
        config = run_config.logging
        try:
            # An optional package that takes a second to import.
            import wandb
        except ImportError as error:
            raise ValueError(
                f"--wandb-project is {config.wandb_project}: the package wandb is missing; install "
                "megatron-stash[wandb]"
            ) from error

        self.config = config
        self.writer: Any = wandb
        self._folder = wandb_folder(run_config)
        self._settings = config_values(run_config.values)
        self._run: Any = None
        self._last_step = 0

    def on_train_start(self, start: RunStart) -> None:
        """Starts a run, or continues the run recorded in the folder. See [Note: continued runs]."""
        id_file = self._folder / _ID_FILE
        known = id_file.read_text(encoding="utf-8").strip() if start.iteration > 0 and id_file.is_file() else None
        run_id = os.environ.get("WANDB_RUN_ID") or known or self.writer.util.generate_id()
        try:
            self._run = self.writer.init(
                project=self.config.wandb_project,
                entity=self.config.wandb_entity,
                name=self.config.wandb_exp_name,
                dir=str(self._folder),
                config=self._settings,
                id=run_id,
                resume="allow",
                # A continued run may have other flags.
                allow_val_change=True,
            )
        except self.writer.errors.Error as error:
            raise ValueError(
                f"--wandb-project is {self.config.wandb_project}, but Weights & Biases cannot start: {error}. Set "
                "WANDB_MODE=offline to write local files, and upload them later with `wandb sync`"
            ) from error
        publish_wandb(self.writer)
        id_file.write_text(f"{run_id}\n", encoding="utf-8")

    def on_step_end(self, report: StepReport) -> None:
        """Logs the step's scalars, which are the same as for TensorBoard."""
        self._log(step_scalars(report, self.config), step=report.iteration)

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Logs the evaluation's scalars, which are the same as for TensorBoard."""
        self._log(evaluation_scalars(report, self.config), step=report.iteration)

    def on_run_end(self) -> None:
        """Uploads or writes the remaining points, and marks the run as failed if it ended with an error."""
        run, self._run = self._run, None
        publish_wandb(None)
        if run is not None:
            run.finish(exit_code=0 if sys.exc_info()[0] is None else 1)
            # Waits for wandb's background process, which writes the last points after `finish` has returned.
            self.writer.teardown()

    def _log(self, scalars: dict[str, float], *, step: int) -> None:
        if scalars and self._run is not None and step >= self._last_step:
            self._last_step = step
            self._run.log(scalars, step=step)
