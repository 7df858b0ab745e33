"""Settings of the training program itself: batches, checkpoints, log and process group.

Settings of the model, the optimizer and the data live beside their code in megatron/core.
"""

import signal
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


def parse_signal(word: str) -> int:
    """The number of a signal given by name (`SIGTERM`, `term`) or number (`15`)."""
    if word.isdigit():
        return int(signal.Signals(int(word)))
    name = word.upper()
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        raise ValueError(f"{word!r} is not a signal; examples: SIGTERM, SIGUSR1, 15")
    return int(signal.Signals[name])


@dataclass(kw_only=True)
class TrainingConfig:
    """How long to train, in which batches, and when to stop or evaluate."""

    cli_group: ClassVar[str] = "training"

    micro_batch_size: int | None = config_field(None, help="samples per forward pass of one model copy", at_least=1)
    global_batch_size: int | None = config_field(
        None, help="samples per training step over all ranks; unset: micro batch x data-parallel size", at_least=1
    )
    train_iters: int | None = config_field(None, help="number of training steps", at_least=0)
    exit_interval: int | None = config_field(
        None, help="save and exit after a step whose number this divides", at_least=1
    )
    exit_duration_in_mins: int | None = config_field(
        None, help="save and exit after this many minutes of training", at_least=0
    )
    exit_signal_handler: bool = config_field(False, help="save and exit when --exit-signal arrives")
    exit_signal: int = config_field(
        int(signal.SIGTERM), help="signal, name or number, that --exit-signal-handler waits for", parse=parse_signal
    )
    check_for_nan_in_loss_and_grad: bool = config_field(
        True,
        flags=("--no-check-for-nan-in-loss-and-grad",),
        help="do not stop at a loss or gradient that is not finite",
    )
    seed: int = config_field(1234, help="seed of weights, dropout and data order", at_least=0)
    skip_train: bool = config_field(False, help="do not train: only evaluate the loaded model")
    eval_iters: int = config_field(100, help="batches per evaluation; 0: never evaluate", at_least=0)
    eval_interval: int | None = config_field(
        None, help="steps between evaluations; unset: evaluate after the last step only", at_least=1
    )
    use_mcore_models: bool = config_field(
        False, dest="deprecated_use_mcore_models", help="accepted for old scripts: the model is always of this kind"
    )
    transformer_impl: str = config_field("local", choices=("local",), help="which implementation of the layers to use")

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, where they come from, and what is in them."""

    cli_group: ClassVar[str] = "checkpointing"

    save: str | None = config_field(None, help="folder to write checkpoints to")
    save_interval: int | None = config_field(
        None,
        flags=("--save-interval", "--persistent-save-interval"),
        help="steps between checkpoints; unset: one at the end",
        at_least=1,
    )
    load: str | None = config_field(None, help="folder to continue from; an empty or absent one starts from scratch")
    finetune: bool = config_field(
        False, help="load the weights only: start at step 0 with a fresh optimizer, RNG and data order"
    )
    ckpt_step: int | None = config_field(None, help="load this step instead of the latest", at_least=0)
    use_checkpoint_args: bool = config_field(False, help="take the model's shape from the checkpoint in --load")
    exit_on_missing_checkpoint: bool = config_field(
        False, help="stop if --load holds no checkpoint instead of starting from scratch"
    )
    ckpt_format: str = config_field(
        "torch_dist", choices=("torch_dist",), help="format of checkpoints, independent of the parallel layout"
    )
    no_save_optim: bool = config_field(False, help="leave the optimizer's state out of checkpoints")
    no_save_rng: bool = config_field(False, help="leave the random-number state out of checkpoints")
    no_load_optim: bool = config_field(False, help="do not load the optimizer's state")
    no_load_rng: bool = config_field(False, help="do not load the random-number state")

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class LoggingConfig:
    """What is reported while training runs."""

    cli_group: ClassVar[str] = "logging"

    log_interval: int = config_field(100, help="steps between log lines", at_least=1)
    tensorboard_dir: str | None = config_field(None, help="folder for TensorBoard files; unset: none are written")
    tensorboard_log_interval: int = config_field(1, help="steps between TensorBoard points", at_least=1)

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class DistributedConfig:
    """How the processes of a run find and wait for each other."""

    cli_group: ClassVar[str] = "distributed init"

    distributed_backend: str | None = config_field(
        None, choices=("nccl", "gloo"), help="communication library; unset: nccl with GPUs, gloo without"
    )
    distributed_timeout_minutes: int = config_field(
        10, help="minutes that a collective may take before the run fails", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)
