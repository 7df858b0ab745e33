"""Saves and loads checkpoints of a training run. Re-exports the public functions."""

from megatron.training.checkpointing.folder import (
    check_save_folder,
    get_checkpoint_tracker_filename,
    refuse_checkpoints_of_another_run,
)
from megatron.training.checkpointing.loading import load_run
from megatron.training.checkpointing.saving import begin_save_checkpoint, save_run
from megatron.training.checkpointing.scripts import get_checkpoint_name, load_checkpoint, save_checkpoint

__all__ = [
    "begin_save_checkpoint",
    "check_save_folder",
    "get_checkpoint_name",
    "get_checkpoint_tracker_filename",
    "load_checkpoint",
    "load_run",
    "refuse_checkpoints_of_another_run",
    "save_checkpoint",
    "save_run",
]
