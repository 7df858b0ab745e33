"""Defines checkpoint settings: folders to save to and load from, and the content of checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.config_field import config_field, validate_fields

# Settings that apply only to a run's first load, and the values with which the run continues from its own checkpoints.
CONTINUE_RUN: dict[str, Any] = {"finetune": False, "ckpt_step": None, "no_load_optim": False, "no_load_rng": False}


@dataclass(kw_only=True)
class CheckpointConfig:
    """Folders and contents of checkpoints to save and load."""

    cli_group: ClassVar[str] = "checkpointing"

    save: str | None = config_field(None, help="Folder to write checkpoints to.")
    save_interval: int | None = config_field(
        None,
        flags=("--save-interval", "--persistent-save-interval"),
        help="Steps between checkpoints; unset: one at the end.",
        at_least=1,
    )
    async_save: bool = config_field(
        False, help="Copy the state at a step's end and write the checkpoint in the background."
    )
    save_retain_interval: int | None = config_field(
        None,
        help="Delete checkpoints before the latest unless their step is a multiple of this; unset: keep all.",
        at_least=1,
    )
    ckpt_fully_parallel_save: bool = config_field(
        True,
        flags=("--no-ckpt-fully-parallel-save",),
        help="Let the lowest rank that holds a tensor write it, instead of distributing the writes among its holders.",
    )
    ckpt_fully_parallel_load: bool = config_field(
        False, help="Let a single rank read a tensor that several ranks need, and send it to the others."
    )
    dist_ckpt_strictness: str = config_field(
        "assume_ok_unexpected",
        choices=(
            "assume_ok_unexpected",
            "log_unexpected",
            "log_all",
            "raise_unexpected",
            "raise_all",
            "ignore_all",
        ),
        help="Handling of keys that the checkpoint lacks (unexpected) and of keys that the run does not use (missing).",
    )
    dist_ckpt_optim_fully_reshardable: bool = config_field(
        False, help="Accepted without effect: the optimizer state can always be loaded under any layout."
    )
    load: str | None = config_field(
        None, help="Folder to continue from. If it is empty or absent, the run starts from scratch."
    )
    pretrained_checkpoint: str | None = config_field(
        None,
        help="Folder of a checkpoint with the initial weights of a new run; ignored if --load holds a checkpoint.",
    )
    finetune: bool = config_field(
        False, help="Load the weights only: start at step 0 with a fresh optimizer, RNG and data order."
    )
    moe_use_upcycling: bool = config_field(
        False,
        help="Initialize an MoE model from the dense checkpoint in --load: each expert is a copy of the dense layer.",
    )
    ckpt_step: int | None = config_field(None, help="Load this step instead of the latest.", at_least=0)
    use_checkpoint_args: bool = config_field(
        False, help="Use the model's arguments from the checkpoint in --load (rules weights, model and given)."
    )
    exit_on_missing_checkpoint: bool = config_field(
        False, help="Stop if --load holds no checkpoint, instead of starting from scratch."
    )
    ckpt_format: str = config_field(
        "torch_dist",
        choices=("torch_dist", "torch"),
        help="Format of saved checkpoints, independent of the parallel layout. torch, Megatron-LM's format with "
        "one file per rank, can only be read. --load detects it automatically, so runs without --save accept "
        "it.",
    )
    no_save_optim: bool = config_field(False, help="Leave the optimizer state out of checkpoints.")
    no_save_rng: bool = config_field(False, help="Leave the random-number state out of checkpoints.")
    no_load_optim: bool = config_field(False, help="Do not load the optimizer state.")
    no_load_rng: bool = config_field(False, help="Do not load the random-number state.")

    def __post_init__(self) -> None:
        validate_fields(self)
        problems = [*self._problems_of_load(), *self._problems_of_save()]
        if problems:
            raise ValueError("\n".join(f"CheckpointConfig.{problem}" for problem in problems))

    def _problems_of_load(self) -> Iterator[str]:
        if self.load is not None or self.pretrained_checkpoint is not None:
            return
        for name in ("finetune", "ckpt_step", "use_checkpoint_args", "exit_on_missing_checkpoint"):
            # Only None and False mean "not given", because step 0 is a valid step.
            value = vars(self)[name]
            if value is not None and value is not False:
                yield f"{name} needs CheckpointConfig.load: give the folder of the checkpoint"
        if self.moe_use_upcycling:
            yield "moe_use_upcycling needs CheckpointConfig.load: add it, or drop moe_use_upcycling"

    def _problems_of_save(self) -> Iterator[str]:
        for name in ("save_interval", "async_save", "save_retain_interval"):
            if vars(self)[name] and self.save is None:
                yield f"{name} needs CheckpointConfig.save: give the folder for the checkpoints"
        if self.ckpt_format == "torch" and self.save is not None:
            yield (
                f"ckpt_format is torch with CheckpointConfig.save {self.save}: that format can only be read; use "
                "torch_dist, with which CheckpointConfig.load still detects and reads it"
            )
