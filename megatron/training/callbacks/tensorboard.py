"""Writes scalars of a run for TensorBoard, with Megatron-LM's tags. wandb_log.py logs the same scalars."""

import torch.distributed as dist

from megatron.training.callbacks.base import Callback, EvaluationReport, RunStart, StepReport
from megatron.training.callbacks.console import is_loss, perplexity
from megatron.training.callbacks.lines import print_rank_0
from megatron.training.config import LoggingConfig


class TensorBoardLog(Callback):
    """Writes scalars for TensorBoard to `folder` every `tensorboard_log_interval` iterations."""

    def __init__(self, folder: str, config: LoggingConfig) -> None:
        try:
            # An optional package that takes a second to import.
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"--tensorboard-dir is {folder}: the package tensorboard is missing; install megatron-stash[report]"
            ) from error

        self.config = config
        self._folder = folder
        self._open = SummaryWriter
        self._writer: SummaryWriter | None = None

    def on_train_start(self, start: RunStart) -> None:
        """Opens the event file. `purge_step` hides the points that an earlier run wrote after the start iteration."""
        self._writer = self._open(
            self._folder, purge_step=start.iteration + 1, max_queue=self.config.tensorboard_queue_size
        )

    def on_rewind(self, iteration: int) -> None:
        """Hides the points of steps that will be repeated."""
        self.on_run_end()
        self.on_train_start(RunStart(iteration=iteration, train_iters=iteration))

    def on_step_end(self, report: StepReport) -> None:
        """Writes the step's scalars at the configured interval, and expert-buffer scalars at every log line."""
        self._add(step_scalars(report, self.config), step=report.iteration)

    def on_evaluation_end(self, report: EvaluationReport) -> None:
        """Writes the values of the evaluated set, and the perplexity of its losses if requested."""
        self._add(evaluation_scalars(report, self.config), step=report.iteration)

    def on_run_end(self) -> None:
        """Writes buffered points and closes the file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            try:
                writer.close()
            except OSError as error:
                self._give_up(error)

    def _add(self, scalars: dict[str, float], *, step: int) -> None:
        try:
            for tag, value in scalars.items():
                if self._writer is not None:
                    self._writer.add_scalar(tag, value, step)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        # The error has ended the writer's thread, so later calls would raise it again.
        self._writer = None
        print_rank_0(
            f"WARNING: cannot write to {self._folder}: {error}; no more points are written for TensorBoard until the "
            "run is restarted"
        )


def step_scalars(report: StepReport, config: LoggingConfig) -> dict[str, float]:
    """Returns the scalars to log after a step, by tag. Empty between log intervals."""
    scalars: dict[str, float | None] = {**_stash_scalars(report)}
    if report.iteration % config.tensorboard_log_interval == 0:
        scalars |= {
            **report.losses,
            "learning-rate": report.learning_rate,
            "batch-size": report.global_batch_size,
            "grad-norm": report.grad_norm,
            "iteration-time": report.seconds,
            "tokens-per-second": report.tokens / report.seconds,
            **_layer_scalars(report),
            "num-zeros": report.num_zeros,
            "params-norm": report.params_norm,
            "max-attention-logit": report.max_attention_logit,
            "throughput": report.tflops,
            "mfu": report.mfu,
            "decoupled-learning-rate": report.decoupled_learning_rate,
            **_optional_scalars(report, config),
        }
    return {tag: value for tag, value in scalars.items() if value is not None}


def evaluation_scalars(report: EvaluationReport, config: LoggingConfig) -> dict[str, float]:
    """Returns the scalars to log after an evaluation, by tag."""
    scalars = {}
    for name, value in report.losses.items():
        scalars[f"{name} {report.label}"] = value
        if config.log_validation_ppl_to_tensorboard and is_loss(name):
            scalars[f"{name} {report.label} ppl"] = perplexity(value)
    return scalars


def _optional_scalars(report: StepReport, config: LoggingConfig) -> dict[str, float]:
    scalars: dict[str, float] = {}
    if config.log_loss_scale_to_tensorboard:
        scalars["loss-scale"] = report.loss_scale
    if config.log_world_size_to_tensorboard:
        scalars["world-size"] = dist.get_world_size()
    if config.log_memory_to_tensorboard:
        scalars |= {f"mem-{kind.replace('_', '-')}-bytes": value for kind, value in (report.memory or {}).items()}
    if config.log_timers_to_tensorboard:
        scalars |= {f"{name}-time": ms / 1000.0 for name, ms in (report.timers or {}).items()}
    return scalars


def _stash_scalars(report: StepReport) -> dict[str, float]:
    """Returns the scalars of expert buffers and the paged stash since the last log line.

    Layers are numbered from 0, as in the router tags.
    """
    stash = report.stash
    if stash is None:
        return {}
    scalars: dict[str, float] = {
        "experts/capacity-factor": stash.capacity_factor,
        "experts/capacity-factor-needed": max(stash.factors_needed),
        "experts/void-steps": stash.void_steps,
        **{f"experts/rows_layer_{number - 1}": rows for number, rows in stash.rows.items()},
    }
    if (pool := stash.pool) is not None:
        scalars |= {
            "stash/device-high-water": pool.device_high_water,
            "stash/device-pages": pool.device_pages,
            "stash/host-high-water": pool.host_high_water,
            "stash/host-pages": pool.host_pages,
            "stash/factor-needed": max(pool.factors_needed),
            "stash/spilled-pages": pool.spilled_pages,
            "stash/gate-up-again": pool.dropped_gate_up,
            "stash/tail-bytes": pool.tail_bytes,
        }
    return scalars


def _layer_scalars(report: StepReport) -> dict[str, float]:
    """Returns router losses and load imbalance (busiest expert over the mean), by Megatron's tags.

    Layers are numbered from 0.
    """
    scalars = {
        f"moe/{name}_layer_{number - 1}": value
        for name, values in (report.per_layer or {}).items()
        for number, value in values.items()
    }
    for number, tokens in (report.expert_load or {}).items():
        scalars[f"moe/load_imbalance_layer_{number - 1}"] = max(tokens) * len(tokens) / sum(tokens)
    return scalars
