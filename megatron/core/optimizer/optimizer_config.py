"""Settings of the optimizer, gradient clipping and loss scaling.

Learning-rate and weight-decay schedules are in megatron/core/optimizer_param_scheduler.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import torch

from megatron.core.config_field import config_field, run_checks, validate_fields
from megatron.core.optimizer.in_backward_config import InBackwardConfig
from megatron.core.optimizer.muon_config import MuonConfig
from megatron.core.optimizer.offload_config import OptimizerOffloadConfig
from megatron.core.optimizer.precision_config import PrecisionConfig
from megatron.core.timers import Timers


@dataclass(kw_only=True)
class OptimizerConfig(PrecisionConfig, OptimizerOffloadConfig, MuonConfig, InBackwardConfig):
    """Settings of the optimizer that get_megatron_optimizer builds."""

    cli_group: ClassVar[str] = "optimizer"

    optimizer: str = config_field(
        "adam",
        choices=("adam", "sgd", "muon", "distributed_fused_adam"),
        help="Optimizer; adam is AdamW, muon is Muon for matrices with AdamW for the rest, distributed_fused_adam is "
        "AdamW with sharded states and gradients (ZeRO-2).",
    )
    lr: float | None = config_field(None, more_than=0, help="Highest learning rate; the schedule scales it.")
    min_lr: float = config_field(0.0, at_least=0, help="Lowest learning rate; the schedule never goes below it.")
    decoupled_lr: float | None = config_field(
        None, more_than=0, help="Highest learning rate of word embeddings and output layer; unset: --lr."
    )
    decoupled_min_lr: float | None = config_field(
        None, at_least=0, help="Lowest learning rate of word embeddings and output layer; unset: --min-lr."
    )
    weight_decay: float = config_field(
        0.01, at_least=0, help="Weight decay; biases and one-dimensional parameters are not decayed."
    )
    apply_wd_to_qk_layernorm: bool = config_field(
        False, help="Weight decay of the norms that --qk-layernorm adds, too."
    )
    adam_beta1: float = config_field(0.9, at_least=0, less_than=1, help="Decay of Adam's first moment.")
    adam_beta2: float = config_field(0.999, at_least=0, less_than=1, help="Decay of Adam's second moment.")
    adam_eps: float = config_field(1e-8, more_than=0, help="Added to Adam's denominator.")
    sgd_momentum: float = config_field(0.9, at_least=0, less_than=1, help="Momentum of --optimizer sgd.")
    clip_grad: float = config_field(1.0, at_least=0, help="Clip gradients to this global 2-norm; 0 does not clip.")

    loss_scale: float | None = config_field(
        None, more_than=0, help="Constant loss scale for --fp16; none means a dynamic scale."
    )
    # High on purpose: the first steps of a run overflow and find the scale that fits.
    initial_loss_scale: float = config_field(2**32, more_than=0, help="Dynamic loss scale at the start.")
    min_loss_scale: float = config_field(1.0, more_than=0, help="Lowest dynamic loss scale.")
    loss_scale_window: float = config_field(
        1000, at_least=1, help="Double the dynamic loss scale after this many steps without overflow."
    )
    hysteresis: int = config_field(2, at_least=1, help="Overflows before the dynamic loss scale is halved.")

    fp16: bool = config_field(False, flags=(), help="The model's parameters are fp16: loss scaling, fp32 masters.")
    bf16: bool = config_field(False, flags=(), help="The model's parameters are bf16: fp32 masters.")
    params_dtype: torch.dtype = config_field(torch.float32, flags=(), help="Type of the model's parameters.")
    deterministic_mode: bool = config_field(False, flags=(), help="Accumulate norms in fp64.")
    use_distributed_optimizer: bool | None = config_field(
        None, flags=(), help="Whether states are sharded, as DistributedDataParallelConfig says; unset: as that says."
    )
    log_num_zeros_in_grad: bool = config_field(False, flags=(), help="Let step() count zeros in the gradient.")
    optimizer_cuda_graph: bool = config_field(
        False, help="The step belongs to the graph of --cuda-graph-impl full_iteration as well."
    )
    timers: Timers = field(default_factory=Timers)

    def __post_init__(self) -> None:
        validate_fields(self)
        checks: list[Callable[[], object]] = [
            self.validate_learning_rate,
            self.validate_precision,
            partial(self.validate_stored_types, self.optimizer),
            partial(self.validate_offload, self.optimizer),
            partial(
                self.validate_in_backward,
                self.optimizer,
                clip_grad=self.clip_grad,
                fp16=self.fp16,
                offloads=self.optimizer_cpu_offload,
                has_graph=self.optimizer_cuda_graph,
            ),
        ]
        if self.optimizer_cuda_graph:
            checks.append(self.validate_device_step)
        run_checks(*checks)

    def validate_learning_rate(self) -> None:
        # A configuration without a rate is fine until an optimizer is built from it.
        if self.lr is not None and self.min_lr > self.lr:
            raise ValueError(
                f"OptimizerConfig.min_lr is {self.min_lr}: must be at most OptimizerConfig.lr, which is {self.lr}"
            )
        if self.decoupled_lr is None and self.decoupled_min_lr is not None:
            raise ValueError(
                f"OptimizerConfig.decoupled_min_lr is {self.decoupled_min_lr}: needs OptimizerConfig.decoupled_lr"
            )
        lowest = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        if self.decoupled_lr is not None and lowest > self.decoupled_lr:
            raise ValueError(
                f"OptimizerConfig.decoupled_lr is {self.decoupled_lr}: must be at least its minimum, {lowest} "
                "(OptimizerConfig.decoupled_min_lr, or else OptimizerConfig.min_lr)"
            )

    def validate_precision(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("OptimizerConfig.fp16 and bf16 are both set: choose one")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"OptimizerConfig.min_loss_scale is {self.min_loss_scale}: "
                f"must be at most initial_loss_scale, which is {self.initial_loss_scale}"
            )

    def validate_device_step(self) -> None:
        """Raises ValueError for what a step needs the host for, and so cannot be in a graph (optimizer_cuda_graph)."""
        if self.optimizer == "muon":
            raise ValueError(
                "OptimizerConfig.optimizer is muon, whose step the host decides on: with optimizer_cuda_graph it must "
                "be adam or sgd"
            )
        if self.optimizer_cpu_offload:
            raise ValueError(
                "OptimizerConfig.optimizer_cpu_offload is set, and the host updates what it keeps: leave it out with "
                "optimizer_cuda_graph"
            )
        for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            # A skipped step writes back what it has read, and a block's scale may come out as another one.
            if vars(self)[name] == "fp16":
                raise ValueError(
                    f"OptimizerConfig.{name} is fp16, which a skipped step may round anew: with optimizer_cuda_graph "
                    "it must be fp32" + ("" if name == "main_params_dtype" else " or bf16")
                )
