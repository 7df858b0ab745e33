"""Defines settings of reports (log, TensorBoard, timers, profiles, memory) and of Python's garbage collection."""

from dataclasses import dataclass
from typing import ClassVar

from megatron.core.config_field import config_field, validate_fields


@dataclass(kw_only=True)
class LoggingConfig:
    """Log lines, TensorBoard and Weights & Biases points, timers, and other reports during training."""

    cli_group: ClassVar[str] = "logging"

    log_interval: int = config_field(100, help="Steps between log lines.", at_least=1)
    log_format: str = config_field(
        "megatron",
        help="megatron: log lines with all fields of Megatron-LM, for parsers; compact: step, loss, tokens/s, gradient "
        "norm and remaining time in at most 110 columns. Both write the same steps.jsonl.",
        choices=("megatron", "compact"),
    )
    log_throughput: bool = config_field(
        False, help="Log TFLOP/s per device and, for known GPUs, the share of the bf16 peak."
    )
    log_params_norm: bool = config_field(False, help="Log the 2-norm of all parameters after each step.")
    log_num_zeros_in_grad: bool = config_field(False, help="Log the number of gradient elements that are exactly zero.")
    log_progress: bool = config_field(
        False, help="Append a line to progress.txt in --save at each start and each checkpoint."
    )
    timing_log_level: int = config_field(
        0,
        help="0: no timers; 1: the parts of a step; 2: also forward, backward and data of each micro-batch.",
        choices=(0, 1, 2),
    )
    timing_log_option: str = config_field(
        "minmax",
        help="Ranks whose times are logged: the slowest, the fastest and the slowest, or all.",
        choices=("max", "minmax", "all"),
    )
    tensorboard_dir: str | None = config_field(None, help="Folder for TensorBoard files; unset: none are written.")
    tensorboard_log_interval: int = config_field(1, help="Steps between TensorBoard points.", at_least=1)
    tensorboard_queue_size: int = config_field(
        1000, help="Number of TensorBoard points buffered in memory before they are written.", at_least=1
    )
    log_timers_to_tensorboard: bool = config_field(False, help="Write the timers of --timing-log-level to TensorBoard.")
    log_loss_scale_to_tensorboard: bool = config_field(
        True,
        flags=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard"),
        help="Leave the loss scale out of TensorBoard.",
    )
    log_validation_ppl_to_tensorboard: bool = config_field(
        False, help="Write the perplexity of evaluations to TensorBoard."
    )
    log_memory_to_tensorboard: bool = config_field(False, help="Write memory by kind to TensorBoard.")
    wandb_project: str | None = config_field(
        None, help="Weights & Biases project to log to, with the same names as in TensorBoard; unset: none."
    )
    wandb_exp_name: str | None = config_field(
        None, help="Name of the run in --wandb-project, which requires it. A resumed run continues the same run."
    )
    wandb_save_dir: str | None = config_field(
        None, help="Folder for the files of Weights & Biases; unset: the folder `wandb` in --save."
    )
    wandb_entity: str | None = config_field(
        None, help="User or team that owns --wandb-project; unset: the user's default."
    )
    record_routing: str | None = config_field(
        None,
        help="File that receives each step's tokens per expert, by layer, micro-batch and rank, for "
        "tools/plan_stash.py; compressed if its name ends in .gz.",
    )
    log_world_size_to_tensorboard: bool = config_field(False, help="Write the number of processes to TensorBoard.")

    def __post_init__(self) -> None:
        validate_fields(self)
        if self.wandb_project is not None and self.wandb_exp_name is None:
            raise ValueError(
                f"LoggingConfig.wandb_project is {self.wandb_project} without wandb_exp_name: give the run a name"
            )

    @property
    def is_compact(self) -> bool:
        """Whether the console shows short lines, without the notes that Megatron-LM's format prints in every run."""
        return self.log_format == "compact"


@dataclass(kw_only=True)
class ProfilingConfig:
    """Profiles and memory histories of selected steps and ranks."""

    cli_group: ClassVar[str] = "profiling"

    profile: bool = config_field(
        False, help="Profile steps for nsys (cudaProfilerApi), or to a file with --use-pytorch-profiler."
    )
    profile_step_start: int = config_field(10, help="Completed steps before recording starts.", at_least=0)
    profile_step_end: int = config_field(12, help="Last step to record.", at_least=1)
    profile_ranks: list[int] = config_field(
        default_factory=list, help="Ranks that record; unset: rank 0.", at_least=0, nargs="+"
    )
    use_pytorch_profiler: bool = config_field(
        False, help="Profile with torch's profiler into the folder `profile` of --tensorboard-dir or --save."
    )
    pytorch_profiler_collect_shapes: bool = config_field(False, help="Record the shapes of operators' inputs.")
    pytorch_profiler_collect_callstack: bool = config_field(False, help="Record the Python call stacks of operators.")

    record_memory_history: bool = config_field(
        False,
        help="Record memory allocations and releases: on a GPU in all steps, on a CPU in the profiled steps.",
    )
    memory_snapshot_path: str = config_field(
        "snapshot.pickle",
        help="File for --record-memory-history. With several ranks, the rank is added to the name.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
        self.validate_steps()

    def validate_steps(self) -> None:
        if self.profile_step_end <= self.profile_step_start:
            raise ValueError(
                f"ProfilingConfig.profile_step_end is {self.profile_step_end}: must be more than "
                f"profile_step_start, which is {self.profile_step_start}"
            )


@dataclass(kw_only=True)
class GarbageCollectionConfig:
    """Schedule of Python's cyclic garbage collector."""

    cli_group: ClassVar[str] = "training"

    manual_gc: bool = config_field(
        False, help="Collect garbage at fixed steps, at the same time on all ranks, instead of automatically."
    )
    manual_gc_interval: int = config_field(
        0, help="Steps between collections of --manual-gc; 0: only around evaluations.", at_least=0
    )
    manual_gc_eval: bool = config_field(
        True,
        flags=("--no-manual-gc-eval", "--disable-manual-gc-eval"),
        help="Do not collect before and after evaluations.",
    )

    def __post_init__(self) -> None:
        validate_fields(self)
