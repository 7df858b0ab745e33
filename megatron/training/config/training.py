"""Defines settings of a training run: sources of settings, length and batches, bad steps, and memory plans."""

import signal
from dataclasses import dataclass
from typing import Any, ClassVar

from megatron.core.config_field import config_field, validate_fields
from megatron.core.num_microbatches_calculator import BatchSchedule, NumMicroBatches, build_batch_schedule


@dataclass(kw_only=True)
class CommandLineConfig:
    """Configuration files and presets, and flags that print settings or models."""

    cli_group: ClassVar[str] = "configuration file"

    config: str | None = config_field(
        None, help="YAML file of settings, with the keys of --print-config; flags on the command line take precedence."
    )
    print_config: bool = config_field(False, help="Print all settings as YAML that --config reads back, and exit.")
    model: str | None = config_field(
        None, help="Use the flags of a named model; --config and the command line take precedence."
    )
    model_scale: str | None = config_field(
        None, choices=("full", "tiny"), help="tiny: a small model with every feature of --model, for tests."
    )
    list_models: bool = config_field(False, help="Print the models that --model accepts, and exit.")

    def __post_init__(self) -> None:
        validate_fields(self)


def planned_samples(settings: Any, batches: BatchSchedule) -> tuple[int, int, int]:
    """Returns the numbers of train, validation and test samples that fix the order of a new run.

    settings: the settings of TrainingConfig as attributes. These numbers must not change, because they also give the
    order of checkpoints that do not store it.
    """
    train_iters = settings.train_iters or 0
    evaluations = 1 if settings.eval_interval is None else train_iters // settings.eval_interval + 1
    train = settings.train_samples or batches.samples_after(train_iters)
    evaluation = settings.eval_iters * (settings.eval_global_batch_size or batches.final_size)
    return train, evaluations * evaluation, evaluation


def parse_signal(word: str) -> int:
    """Parses a signal given by name (`SIGTERM`, `term`) or number (`15`)."""
    number = _signal_number(word)
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{word!r} cannot be caught by a program; examples: SIGTERM, SIGUSR1, 15")
    return number


def _signal_number(word: str) -> int:
    if word.isdigit():
        return int(signal.Signals(int(word)))
    name = word.upper()
    # Users know the short form from `kill -TERM`.
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        raise ValueError(f"{word!r} is not a signal; examples: SIGTERM, SIGUSR1, 15")
    return int(signal.Signals[name])


@dataclass(kw_only=True)
class TrainingConfig:
    """Length of training, batch sizes, and conditions to stop or evaluate."""

    cli_group: ClassVar[str] = "training"

    micro_batch_size: int = config_field(
        None, filled_in=True, help="Samples per forward pass of one model replica.", at_least=1
    )
    global_batch_size: int | None = config_field(
        None, help="Samples per training step over all ranks; unset: micro-batch size x data-parallel size.", at_least=1
    )
    train_iters: int | None = config_field(None, help="Number of training steps.", at_least=0)
    train_samples: int | None = config_field(
        None, help="Train on this many samples instead of --train-iters. Schedules then also use samples.", at_least=1
    )
    exit_interval: int | None = config_field(
        None, help="Save and exit after a step whose number is a multiple of this.", at_least=1
    )
    exit_duration_in_mins: int | None = config_field(
        None, help="Save and exit after this many minutes of training.", at_least=0
    )
    exit_signal_handler: bool = config_field(False, help="Save and exit on --exit-signal.")
    exit_signal: int = config_field(
        int(signal.SIGTERM),
        help="Signal that --exit-signal-handler waits for, as a name or number.",
        parse=parse_signal,
    )
    check_for_nan_in_loss_and_grad: bool = config_field(
        True,
        flags=("--no-check-for-nan-in-loss-and-grad",),
        help="Do not stop when a loss or gradient is not finite.",
    )
    seed: int = config_field(1234, help="Seed of weights, dropout and data order.", at_least=0, at_most=2**32 - 1)
    skip_train: bool = config_field(False, help="Do not train: only evaluate the loaded model.")
    eval_iters: int = config_field(100, help="Batches per evaluation; 0: never evaluate.", at_least=0)
    eval_interval: int | None = config_field(
        None, help="Steps between evaluations; unset: evaluate only after the last step.", at_least=1
    )
    start_eval_at_iter: int | None = config_field(
        None, help="First step at which --eval-interval applies; unset: from the start.", at_least=0
    )
    eval_global_batch_size: int | None = config_field(
        None, help="Samples per batch of an evaluation over all ranks; unset: the last --global-batch-size.", at_least=1
    )
    iterations_to_skip: list[int] = config_field(
        default_factory=list,
        help="Numbers of completed steps after which a step is skipped: its batches are read but not trained on.",
        at_least=0,
        nargs="+",
    )
    use_mcore_models: bool = config_field(
        False, dest="deprecated_use_mcore_models", help="Accepted for old scripts, without effect."
    )
    transformer_impl: str = config_field(
        "local",
        choices=("local", "transformer_engine"),
        help="Layer implementation: local, or the package transformer_engine, which requires a GPU.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class BatchScheduleConfig:
    """Growth of the global batch size, by at most one of two schedules."""

    cli_group: ClassVar[str] = "training"

    rampup_batch_size: list[int] | None = config_field(
        None,
        nargs=3,
        help="START INCREMENT SAMPLES: increase the batch size from START to --global-batch-size over SAMPLES.",
    )
    step_batch_size_schedule: str | None = config_field(
        None,
        help='"0:256 60B:512 ...": use each batch size from this number of tokens on, with or without a suffix K, M, B '
        "or T. Spaces or commas separate the pairs.",
    )
    decrease_batch_size_if_needed: bool = config_field(
        False, help="Round batch sizes down to a multiple of --micro-batch-size times the data-parallel size."
    )

    def __post_init__(self) -> None:
        validate_fields(self)

    def batch_sizes(
        self, *, global_batch_size: int | None, micro_batch_size: int, data_parallel_size: int, seq_length: int
    ) -> NumMicroBatches:
        """Returns the batch sizes of a run. Raises ValueError if they do not divide into microbatches."""
        schedule = build_batch_schedule(
            global_batch_size,
            rampup_batch_size=self.rampup_batch_size,
            step_batch_size_schedule=self.step_batch_size_schedule,
            seq_length=seq_length,
        )
        return NumMicroBatches(schedule, micro_batch_size, data_parallel_size, self.decrease_batch_size_if_needed)


@dataclass(kw_only=True)
class FaultConfig:
    """Handling of non-finite losses and gradients, loss spikes, diverging replicas, and slow ranks."""

    cli_group: ClassVar[str] = "faults"

    non_finite_policy: str = config_field(
        "stop",
        choices=("stop", "skip", "rewind"),
        help="Action after a step with a non-finite loss or gradient: end the run, skip the update, or rewind to "
        "the last checkpoint and skip that step's data.",
    )
    loss_spike_rewind: float | None = config_field(
        None,
        help="When a loss exceeds this many times the median of the last 100 steps, rewind to the last checkpoint and "
        "skip the data since then; unset: never.",
        more_than=1,
    )
    max_rewinds: int = config_field(3, help="Maximum number of rewinds. The next bad step ends the run.", at_least=1)
    check_weight_hash_across_dp_replicas_interval: int | None = config_field(
        None, help="Steps between comparisons of the weights of all replicas; unset: none.", at_least=1
    )
    log_straggler: bool = config_field(False, help="Log persistently slow ranks. Sets --timing-log-level 1.")

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class DryRunConfig:
    """Settings of --dry-run, which prints a memory plan instead of training."""

    cli_group: ClassVar[str] = "plan"

    dry_run: bool = config_field(
        False, help="Do not train: print the memory of one rank of each pipeline stage by kind, and exit."
    )
    world_size: int | None = config_field(
        None, help="Number of ranks that --dry-run plans for; unset: the number of started ranks.", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)
