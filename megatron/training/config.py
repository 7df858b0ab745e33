"""Settings of the training program itself: batches, checkpoints and process group; the log's are in logging_config.py.

Settings of the model, the optimizer and the data live beside their code in megatron/core.
"""

import signal
from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


def parse_signal(word: str) -> int:
    """The number of a signal given by name (`SIGTERM`, `term`) or number (`15`)."""
    number = _signal_number(word)
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{word!r} cannot be caught by any program; examples: SIGTERM, SIGUSR1, 15")
    return number


def _signal_number(word: str) -> int:
    if word.isdigit():
        return int(signal.Signals(int(word)))
    name = word.upper()
    # `kill -TERM` has taught people the short form.
    name = name if name.startswith("SIG") else f"SIG{name}"
    if name not in signal.Signals.__members__:
        raise ValueError(f"{word!r} is not a signal; examples: SIGTERM, SIGUSR1, 15")
    return int(signal.Signals[name])


@dataclass(kw_only=True)
class CommandLineConfig:
    """Where else settings come from, and showing what they add up to."""

    cli_group: ClassVar[str] = "configuration file"

    config: str | None = config_field(
        None, help="YAML file of settings, keys as in --print-config; flags on the command line win over it."
    )
    print_config: bool = config_field(False, help="Print all settings as YAML that --config reads back, and exit.")
    model: str | None = config_field(
        None, help="Name of a model whose flags are taken; a file of --config and the command line win over them."
    )
    model_scale: str | None = config_field(
        None, choices=("full", "tiny"), help="tiny: a small model with every feature of --model, for tests."
    )
    list_models: bool = config_field(False, help="Print the models that --model knows, and exit.")

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class TrainingConfig:
    """How long to train, in which batches, and when to stop or evaluate."""

    cli_group: ClassVar[str] = "training"

    micro_batch_size: int | None = config_field(None, help="Samples per forward pass of one model copy.", at_least=1)
    global_batch_size: int | None = config_field(
        None, help="Samples per training step over all ranks; unset: micro batch x data-parallel size.", at_least=1
    )
    train_iters: int | None = config_field(None, help="Number of training steps.", at_least=0)
    train_samples: int | None = config_field(
        None, help="Train on this many samples instead; schedules are then given in samples too.", at_least=1
    )
    exit_interval: int | None = config_field(
        None, help="Save and exit after a step whose number this divides.", at_least=1
    )
    exit_duration_in_mins: int | None = config_field(
        None, help="Save and exit after this many minutes of training.", at_least=0
    )
    exit_signal_handler: bool = config_field(False, help="Save and exit when --exit-signal arrives.")
    exit_signal: int = config_field(
        int(signal.SIGTERM), help="Signal, name or number, that --exit-signal-handler waits for.", parse=parse_signal
    )
    check_for_nan_in_loss_and_grad: bool = config_field(
        True,
        flags=("--no-check-for-nan-in-loss-and-grad",),
        help="Do not stop at a loss or gradient that is not finite.",
    )
    seed: int = config_field(1234, help="Seed of weights, dropout and data order.", at_least=0, at_most=2**32 - 1)
    skip_train: bool = config_field(False, help="Do not train: only evaluate the loaded model.")
    eval_iters: int = config_field(100, help="Batches per evaluation; 0: never evaluate.", at_least=0)
    eval_interval: int | None = config_field(
        None, help="Steps between evaluations; unset: evaluate after the last step only.", at_least=1
    )
    use_mcore_models: bool = config_field(
        False, dest="deprecated_use_mcore_models", help="Accepted for old scripts: the model is always of this kind."
    )
    transformer_impl: str = config_field(
        "local",
        choices=("local", "transformer_engine"),
        help="Whose layers to use: this project's, or those of the package transformer_engine, which needs a GPU.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class BatchScheduleConfig:
    """How the global batch size grows; at most one of the two schedules."""

    cli_group: ClassVar[str] = "training"

    rampup_batch_size: list[int] | None = config_field(
        None, nargs=3, help="START INCREMENT SAMPLES: raise the batch from START to --global-batch-size over SAMPLES."
    )
    step_batch_size_schedule: str | None = config_field(
        None,
        help='"0:256 500:512 ...": each batch size from this number of samples on; 60B and the like are tokens.',
    )
    decrease_batch_size_if_needed: bool = config_field(
        False, help="Round batch sizes down to what --micro-batch-size and the number of processes divide."
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class CheckpointConfig:
    """Where checkpoints go, where they come from, and what is in them."""

    cli_group: ClassVar[str] = "checkpointing"

    save: str | None = config_field(None, help="Folder to write checkpoints to.")
    save_interval: int | None = config_field(
        None,
        flags=("--save-interval", "--persistent-save-interval"),
        help="Steps between checkpoints; unset: one at the end.",
        at_least=1,
    )
    async_save: bool = config_field(
        False, help="Copy the state at a step's end and write the checkpoint beside training."
    )
    save_retain_interval: int | None = config_field(
        None, help="Delete checkpoints before the latest whose step does not divide by this; unset: none.", at_least=1
    )
    ckpt_fully_parallel_save: bool = config_field(
        True,
        flags=("--no-ckpt-fully-parallel-save",),
        help="Let the lowest rank that holds a tensor write it, instead of spreading writes over all that hold it.",
    )
    ckpt_fully_parallel_load: bool = config_field(
        False, help="Let one of the ranks that want the same tensor read it, and send it to the others."
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
        help="What becomes of keys that the checkpoint lacks (unexpected) and of those that nothing takes (missing).",
    )
    dist_ckpt_optim_fully_reshardable: bool = config_field(
        False, help="Accepted; here the optimizer's state always loads under any layout."
    )
    load: str | None = config_field(None, help="Folder to continue from; an empty or absent one starts from scratch.")
    finetune: bool = config_field(
        False, help="Load the weights only: start at step 0 with a fresh optimizer, RNG and data order."
    )
    moe_use_upcycling: bool = config_field(
        False,
        help="Start a model with experts from the dense checkpoint in --load: each expert as the layer it replaces.",
    )
    ckpt_step: int | None = config_field(None, help="Load this step instead of the latest.", at_least=0)
    use_checkpoint_args: bool = config_field(False, help="Take the model's shape from the checkpoint in --load.")
    exit_on_missing_checkpoint: bool = config_field(
        False, help="Stop if --load holds no checkpoint instead of starting from scratch."
    )
    ckpt_format: str = config_field(
        "torch_dist", choices=("torch_dist",), help="Format of checkpoints, independent of the parallel layout."
    )
    no_save_optim: bool = config_field(False, help="Leave the optimizer's state out of checkpoints.")
    no_save_rng: bool = config_field(False, help="Leave the random-number state out of checkpoints.")
    no_load_optim: bool = config_field(False, help="Do not load the optimizer's state.")
    no_load_rng: bool = config_field(False, help="Do not load the random-number state.")

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class VirtualStagesConfig:
    """How a pipeline stage's layers are cut into virtual stages; at most one of the two."""

    cli_group: ClassVar[str] = "parallel layout"

    num_layers_per_virtual_pipeline_stage: int | None = config_field(
        None, help="Layers per virtual stage of a pipeline stage; unset: a stage is one piece.", at_least=1
    )
    num_virtual_stages_per_pipeline_rank: int | None = config_field(
        None, help="Virtual stages per pipeline stage; unset: 1.", at_least=1
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class DistributedConfig:
    """How the processes of a run find and wait for each other."""

    cli_group: ClassVar[str] = "distributed init"

    distributed_backend: str | None = config_field(
        None, choices=("nccl", "gloo"), help="Communication library; unset: nccl with GPUs, gloo without."
    )
    distributed_timeout_minutes: int = config_field(
        10, help="Minutes that a collective may take before the run fails.", at_least=1, at_most=1_000_000
    )
    use_gloo_process_groups: bool = config_field(
        True,
        flags=("--disable-gloo-process-groups",),
        help="With GPUs, connect ranks over NCCL alone; else errors and file lists go over gloo, past the GPU.",
    )
    use_tp_pp_dp_mapping: bool = config_field(
        False, help="Number ranks by pipeline stage before data-parallel rank: stages are then closer together."
    )
    fake_process_group: bool = config_field(
        False,
        help="Be one rank (RANK, 0) of --world-size or WORLD_SIZE alone, sending nothing: its memory and time are "
        "real, what it learns is not.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class ShardedParametersConfig:
    """Whether parameters themselves are spread over data-parallel ranks; how is FullyShardConfig's."""

    cli_group: ClassVar[str] = "data parallelism"

    use_torch_fsdp2: bool = config_field(
        False,
        help="Shard parameters, gradients and optimizer state over the data-parallel ranks by torch's fully_shard.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)


@dataclass(kw_only=True)
class GradientReductionConfig:
    """What the command line calls settings of gradients that DistributedDataParallelConfig has under other names."""

    cli_group: ClassVar[str] = "data parallelism"

    grad_reduce_in_bf16: bool = config_field(False, help="Reduce gradients in bf16, the parameters' type, not in fp32.")
    accumulate_allreduce_grads_in_fp32: bool = config_field(
        False, help="Accumulate and reduce gradients in fp32, as is done without --grad-reduce-in-bf16 anyway."
    )
    align_grad_reduce: bool = config_field(
        True,
        flags=("--no-align-grad-reduce", "--disable-align-grad-reduce"),
        help="Start reductions of virtual stages as soon as backward allows, not at one point on all stages.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.grad_reduce_in_bf16 and self.accumulate_allreduce_grads_in_fp32:
            raise ValueError(
                "--grad-reduce-in-bf16 and --accumulate-allreduce-grads-in-fp32 are both given: choose one type"
            )
