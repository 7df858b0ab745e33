"""OptimizerConfig: update rule, learning rates, clipping, loss scaling, and the form and location of optimizer state.

The class inherits one base class per group of settings, so that flags are listed group by group. Schedules of learning
rate and weight decay are in megatron/core/optimizer_param_scheduler.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from megatron.core.config_field import MegatronConfig, config_field, run_checks, validate_fields
from megatron.core.timers import Timers

# Dtypes by their command-line names. fp8 is stored as bytes, as in Megatron, and is rejected.
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.uint8}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MOMENTS = ("fp32", "fp16", "bf16", "fp8")


def _dtype_field(choices: tuple[str, ...], *, help: str) -> Any:
    return config_field(torch.float32, cli_default="fp32", choices=choices, named=DTYPES, help=help)


@dataclass(frozen=True)
class ParamPredicate:
    """A condition on a parameter, for ParamKey. Conditions with the same name compare equal.

    fn: called with the parameter.
    """

    name: str
    fn: Callable[[nn.Parameter], bool] = field(compare=False, hash=False)


@dataclass(frozen=True)
class ParamWithNamePredicate:
    """A condition on a parameter and its name, for ParamKey. Conditions with the same name compare equal.

    fn: called with the parameter and its name in the model.
    """

    name: str
    fn: Callable[[nn.Parameter, str], bool] = field(compare=False, hash=False)


@dataclass(frozen=True)
class ParamKey:
    """Selects the parameters of an override: every parameter that satisfies at least one of the given conditions.

    name: shell patterns for names without wrapper prefixes ("*.router.weight"). attr: names of attributes that are true
    on the parameter. predicate, with_name_predicate: other conditions, such as shapes. Each field may be a single
    condition or a tuple.
    """

    name: str | tuple[str, ...] = ()
    attr: str | tuple[str, ...] = ()
    predicate: ParamPredicate | tuple[ParamPredicate, ...] = ()
    with_name_predicate: ParamWithNamePredicate | tuple[ParamWithNamePredicate, ...] = ()

    def matches(self, param: nn.Parameter, param_name: str) -> bool:
        """Returns whether the override applies to this parameter."""
        return (
            any(fnmatchcase(param_name, pattern) for pattern in _as_tuple(self.name))
            or any(vars(param).get(attribute) for attribute in _as_tuple(self.attr))
            or any(predicate.fn(param) for predicate in _as_tuple(self.predicate))
            or any(predicate.fn(param, param_name) for predicate in _as_tuple(self.with_name_predicate))
        )


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


@dataclass(kw_only=True)
class PrecisionConfig:
    """Settings for storing state in fewer bits than updates compute in (stored_floats.py).

    OptimizerConfig checks the values.
    """

    cli_group: ClassVar[str] = "optimizer"

    use_precision_aware_optimizer: bool = config_field(
        False, help="Store masters, gradients and moments of --optimizer adam in the dtypes of the flags below."
    )
    main_grads_dtype: torch.dtype = _dtype_field(
        ("fp32", "bf16"),
        help="Dtype of the gradients that the optimizer reads; bf16 requires reduction in bf16.",
    )
    main_params_dtype: torch.dtype = _dtype_field(
        ("fp32", "fp16"), help="Dtype of the masters of 16-bit parameters; fp16 has a scale per block."
    )
    exp_avg_dtype: torch.dtype = _dtype_field(
        _MOMENTS, help="Dtype of Adam's first moment; fp16 has a scale per block, fp8 is not supported."
    )
    exp_avg_sq_dtype: torch.dtype = _dtype_field(
        _MOMENTS, help="Dtype of Adam's second moment; fp16 has a scale per block, fp8 is not supported."
    )
    store_param_remainders: bool = config_field(
        True,
        flags=(),
        help="For fp32 masters of bf16 parameters, store only the 16 bits that the parameters lack.",
    )

    @property
    def keeps_remainders(self) -> bool:
        """Whether masters of bf16 parameters are stored as the 16 bits that the parameters lack."""
        is_wide = self.main_params_dtype == torch.float32
        return self.use_precision_aware_optimizer and is_wide and self.store_param_remainders

    def validate_stored_types(self, optimizer: str) -> None:
        """Raises ValueError for dtypes that cannot be stored. optimizer: name of the update rule."""
        for name in ("main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
            value = _NAMES[vars(self)[name]]
            if value == "fp8":
                raise ValueError(f"OptimizerConfig.{name} is fp8: must be fp32, bf16 or fp16")
            if value != "fp32" and not self.use_precision_aware_optimizer:
                raise ValueError(f"OptimizerConfig.{name} is {value}: requires use_precision_aware_optimizer")
        if self.use_precision_aware_optimizer and optimizer not in ("adam", "distributed_fused_adam"):
            raise ValueError(
                f"OptimizerConfig.optimizer is {optimizer} with use_precision_aware_optimizer: must be adam or "
                "distributed_fused_adam"
            )


@dataclass(kw_only=True)
class OptimizerOffloadConfig:
    """Settings for optimizer state in host memory.

    flat_params.py selects the parameters whose state is offloaded. OptimizerConfig checks the values.
    """

    cli_group: ClassVar[str] = "optimizer"

    optimizer_cpu_offload: bool = config_field(
        False, help="Store masters and moments in host memory and update them there; no effect on a CPU."
    )
    optimizer_offload_fraction: float = config_field(
        0.0,
        cli_default=1.0,
        at_least=0,
        at_most=1,
        help="Fraction of the parameters whose state --optimizer-cpu-offload moves to the host.",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = config_field(
        False,
        help="With --optimizer-cpu-offload: overlap the copies of gradients and parameters with updates on the host.",
    )

    @property
    def host_fraction(self) -> float:
        """Fraction of the parameters whose state is in host memory."""
        return self.optimizer_offload_fraction if self.optimizer_cpu_offload else 0.0

    def validate_offload(self, optimizer: str) -> None:
        """Raises ValueError for settings that are incompatible with offloading. optimizer: name of the update rule."""
        if self.optimizer_cpu_offload and optimizer == "muon":
            raise ValueError(
                "OptimizerConfig.optimizer is muon with optimizer_cpu_offload: use a different optimizer, "
                "or disable offloading"
            )
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            raise ValueError(
                "OptimizerConfig.overlap_cpu_optimizer_d2h_h2d is set: requires optimizer_cpu_offload as well"
            )
        if 0 < self.optimizer_offload_fraction < 1 and not self.optimizer_cpu_offload:
            raise ValueError(
                f"OptimizerConfig.optimizer_offload_fraction is {self.optimizer_offload_fraction}: requires "
                "optimizer_cpu_offload"
            )


@dataclass(kw_only=True)
class MuonConfig:
    """Settings of Muon, which updates matrices (muon.py); OptimizerConfig checks the values."""

    cli_group: ClassVar[str] = "optimizer"

    muon_momentum: float = config_field(
        0.95, cli_default=0.9, at_least=0, less_than=1, help="Momentum of --optimizer muon."
    )
    muon_nesterov: bool = config_field(False, help="Use Nesterov momentum in --optimizer muon.")
    muon_num_ns_steps: int = config_field(
        5, at_least=1, less_than=100, help="Newton-Schulz steps that orthogonalize Muon's updates."
    )
    muon_scale_mode: str = config_field(
        "spectral",
        choices=("spectral", "unit_rms_norm", "shape_scaling"),
        help="Scale of Muon's update of an [m, n] matrix: sqrt(max(m, n)), sqrt(m / n) or sqrt(max(1, m / n)).",
    )
    muon_extra_scale_factor: float = config_field(1.0, more_than=0, help="Additional factor of Muon's updates.")
    muon_split_qkv: bool = config_field(
        True,
        flags=("--muon-no-split-qkv",),
        help="Orthogonalize the updates of q, k and v as one matrix if they are stored in one weight.",
    )
    muon_tp_mode: str = config_field(
        "duplicated",
        choices=("blockwise", "duplicated", "distributed"),
        help="Handling of tensor-parallel matrices in Muon; no effect, because Muon does not support them.",
    )


def check_whole_matrices(optimizer: str, *, tensor_model_parallel_size: int, expert_tensor_parallel_size: int) -> None:
    """Raises ValueError for an update rule of whole matrices if tensor parallelism splits dense or expert matrices."""
    if optimizer == "muon" and max(tensor_model_parallel_size, expert_tensor_parallel_size) > 1:
        raise ValueError(
            f"OptimizerConfig.optimizer is muon with tensor_model_parallel_size {tensor_model_parallel_size} and "
            f"expert_tensor_parallel_size {expert_tensor_parallel_size}: both must be 1, because muon requires whole "
            "matrices"
        )


class InBackwardClip(Enum):
    """Clipping policies for updates in backward, which run before the norm of all gradients is known."""

    EXACT = "exact"
    PREVIOUS_NORM = "previous-norm"
    PER_BUCKET = "per-bucket"


@dataclass(kw_only=True)
class InBackwardConfig:
    """Settings for updates in backward (optimizer_in_backward.py); OptimizerConfig checks the values."""

    cli_group: ClassVar[str] = "optimizer"

    optimizer_in_backward: bool = config_field(
        False, help="Update each bucket of parameters while the next one is being reduced, and free its gradients."
    )
    optimizer_in_backward_clip: str | None = config_field(
        None,
        choices=tuple(clip.value for clip in InBackwardClip),
        help="Clipping with --optimizer-in-backward: exact stores reduced gradients until the norm is known, "
        "previous-norm uses the previous step's norm, per-bucket uses the norm of each bucket.",
    )

    @property
    def in_backward_clip(self) -> InBackwardClip | None:
        """Clipping policy; None without clipping, or without updates in backward."""
        chosen = self.optimizer_in_backward_clip
        return None if chosen is None else InBackwardClip(chosen)

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients are held until their norm is known, so that a step can still be skipped or discarded."""
        return self.in_backward_clip is InBackwardClip.EXACT

    def validate_in_backward(
        self, optimizer: str, *, clip_grad: float, fp16: bool, offloads: bool, has_graph: bool
    ) -> None:
        """Raises ValueError for settings that are incompatible with updates in backward.

        optimizer: name of the update rule. offloads: whether states are on the host. has_graph: whether a CUDA graph
        contains the step.
        """
        if self.optimizer_in_backward:
            self.validate_clip_in_backward(clip_grad, fp16=fp16)
            others = [
                ("optimizer is muon", optimizer == "muon", "it requires whole matrices, which buckets may split"),
                (
                    "optimizer_cpu_offload is set",
                    offloads,
                    "the host updates parameters in step(), while gradients are copied",
                ),
                ("optimizer_cuda_graph is set", has_graph, "graphs require persistent gradients"),
            ]
            for words, is_set, why in others:
                if is_set:
                    raise ValueError(
                        f"OptimizerConfig.{words} and OptimizerConfig.optimizer_in_backward is set: {why}; set only "
                        "one of them"
                    )
        elif self.optimizer_in_backward_clip is not None:
            raise ValueError(
                f"OptimizerConfig.optimizer_in_backward_clip is {self.optimizer_in_backward_clip}: requires "
                "OptimizerConfig.optimizer_in_backward"
            )

    def validate_clip_in_backward(self, clip_grad: float, *, fp16: bool) -> None:
        """Raises ValueError if updates in backward cannot clip to clip_grad, or cannot skip overflowed fp16 steps."""
        clip = self.optimizer_in_backward_clip
        if clip_grad > 0 and clip is None:
            # Without an error, nothing would be clipped.
            raise ValueError(
                f"OptimizerConfig.clip_grad is {clip_grad} and OptimizerConfig.optimizer_in_backward is set: the "
                "norm of all gradients is not known before backward ends, so "
                "OptimizerConfig.optimizer_in_backward_clip must be exact, previous-norm or per-bucket, or "
                "OptimizerConfig.clip_grad must be 0"
            )
        if clip_grad == 0 and clip is not None and not self.holds_gradients:
            raise ValueError(
                f"OptimizerConfig.optimizer_in_backward_clip is {clip} and OptimizerConfig.clip_grad is 0, which "
                "disables clipping: set the norm to clip to, or do not set "
                "OptimizerConfig.optimizer_in_backward_clip"
            )
        if fp16 and not self.holds_gradients:
            raise ValueError(
                "OptimizerConfig.fp16 and OptimizerConfig.optimizer_in_backward are both set: whether a step overflows "
                "and is skipped is not known before backward ends, so OptimizerConfig.optimizer_in_backward_clip must "
                "be exact"
            )


@dataclass(kw_only=True)
class OptimizerConfig(PrecisionConfig, OptimizerOffloadConfig, MuonConfig, InBackwardConfig, MegatronConfig):
    """Settings of the optimizer that get_megatron_optimizer builds."""

    cli_group: ClassVar[str] = "optimizer"

    optimizer: str = config_field(
        "adam",
        choices=("adam", "sgd", "muon", "distributed_fused_adam"),
        help="Optimizer; adam is AdamW, muon is Muon for matrices with AdamW for the rest, distributed_fused_adam is "
        "AdamW with sharded states and gradients (ZeRO-2).",
    )
    lr: float = config_field(None, filled_in=True, more_than=0, help="Maximum learning rate; the schedule scales it.")
    min_lr: float | None = config_field(
        None, cli_default=0.0, at_least=0, help="Minimum learning rate of the schedule."
    )
    decoupled_lr: float | None = config_field(
        None, more_than=0, help="Maximum learning rate of word embeddings and output layer; unset: --lr."
    )
    decoupled_min_lr: float | None = config_field(
        None, at_least=0, help="Minimum learning rate of word embeddings and output layer; unset: --min-lr."
    )
    weight_decay: float = config_field(
        0.01, at_least=0, help="Weight decay; biases and one-dimensional parameters are not decayed."
    )
    apply_wd_to_qk_layernorm: bool = config_field(
        False, help="Also apply weight decay to the norms that --qk-layernorm adds."
    )
    adam_beta1: float = config_field(0.9, at_least=0, less_than=1, help="Decay rate of Adam's first moment.")
    adam_beta2: float = config_field(0.999, at_least=0, less_than=1, help="Decay rate of Adam's second moment.")
    adam_eps: float = config_field(1e-8, more_than=0, help="Added to Adam's denominator.")
    sgd_momentum: float = config_field(0.9, at_least=0, less_than=1, help="Momentum of --optimizer sgd.")
    clip_grad: float = config_field(1.0, at_least=0, help="Clip gradients to this global 2-norm; 0 disables clipping.")

    loss_scale: float | None = config_field(
        None, more_than=0, help="Constant loss scale for --fp16; unset: dynamic loss scale."
    )
    # High on purpose: the first steps overflow until the scale fits.
    initial_loss_scale: float = config_field(2**32, more_than=0, help="Initial dynamic loss scale.")
    min_loss_scale: float = config_field(1.0, more_than=0, help="Minimum dynamic loss scale.")
    loss_scale_window: float = config_field(
        1000, at_least=1, help="Double the dynamic loss scale after this many steps without overflow."
    )
    hysteresis: int = config_field(2, at_least=1, help="Number of overflows before the dynamic loss scale is halved.")

    fp16: bool = config_field(False, flags=(), help="Use fp16 model parameters, with loss scaling and fp32 masters.")
    bf16: bool = config_field(False, flags=(), help="Use bf16 model parameters, with fp32 masters.")
    params_dtype: torch.dtype = config_field(torch.float32, flags=(), help="Dtype of the model's parameters.")
    deterministic_mode: bool = config_field(False, flags=(), help="Accumulate norms in fp64.")
    use_distributed_optimizer: bool = config_field(
        False,
        flags=(),
        help="Requires DistributedDataParallelConfig.use_distributed_optimizer, which takes precedence.",
    )
    overlap_param_gather: bool = config_field(
        False, flags=(), help="Requires DistributedDataParallelConfig.overlap_param_gather, which takes precedence."
    )
    overlap_param_gather_with_optimizer_step: bool = config_field(
        False, flags=(), help="Requires the field of DistributedDataParallelConfig, which takes precedence."
    )
    log_num_zeros_in_grad: bool = config_field(False, flags=(), help="Count zeros in the gradients in step().")
    optimizer_cuda_graph: bool = config_field(
        False, help="Include the step in the graph of --cuda-graph-impl full_iteration."
    )
    timers: Timers = field(
        default_factory=Timers, compare=False
    )  # excluded from comparisons, because each config has separate timers

    def __post_init__(self) -> None:
        validate_fields(self)
        self.timers = self.timers or Timers()
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

    @property
    def lowest_lr(self) -> float:
        """Minimum learning rate of the schedule; 0 if min_lr is not set."""
        return 0.0 if self.min_lr is None else self.min_lr

    def validate_learning_rate(self) -> None:
        # lr may be None until an optimizer is built.
        if self.lr is not None and self.lowest_lr > self.lr:
            raise ValueError(
                f"OptimizerConfig.min_lr is {self.min_lr}: must be at most OptimizerConfig.lr, which is {self.lr}"
            )
        if self.decoupled_lr is None and self.decoupled_min_lr is not None:
            raise ValueError(
                f"OptimizerConfig.decoupled_min_lr is {self.decoupled_min_lr}: requires OptimizerConfig.decoupled_lr"
            )
        lowest = self.lowest_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        if self.decoupled_lr is not None and lowest > self.decoupled_lr:
            raise ValueError(
                f"OptimizerConfig.decoupled_lr is {self.decoupled_lr}: must be at least its minimum, {lowest} "
                "(OptimizerConfig.decoupled_min_lr, or otherwise OptimizerConfig.min_lr)"
            )

    def validate_precision(self) -> None:
        if self.fp16 and self.bf16:
            raise ValueError("OptimizerConfig.fp16 and OptimizerConfig.bf16 are both given: choose one precision")
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"OptimizerConfig.min_loss_scale is {self.min_loss_scale}: "
                f"must be at most initial_loss_scale, which is {self.initial_loss_scale}"
            )

    def validate_device_step(self) -> None:
        """Raises ValueError for settings whose step requires the host, which optimizer_cuda_graph cannot capture."""
        if self.optimizer == "muon":
            raise ValueError(
                "OptimizerConfig.optimizer is muon, which requires a host decision: must be adam or sgd with "
                "optimizer_cuda_graph"
            )
        if self.optimizer_cpu_offload:
            raise ValueError(
                "OptimizerConfig.optimizer_cpu_offload is set, so updates run on the host: must be False with "
                "optimizer_cuda_graph"
            )
        if self.main_params_dtype == torch.float16:
            # Parameters are written from their masters in every replay, even if the update is skipped. Until the first
            # update they may be more precise than scaled fp16, which cannot represent numbers below 2^-32 of the
            # largest in their block.
            raise ValueError(
                "OptimizerConfig.main_params_dtype is fp16: a skipped step would round parameters to the precision "
                "of their masters; with optimizer_cuda_graph it must be fp32"
            )
