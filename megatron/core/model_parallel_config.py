"""Configuration that every parallel component shares: precision, parallel sizes and the schedule's callables.

Shapes of the network are in transformer/transformer_config.py.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import ClassVar

import torch

from megatron.core.config_field import config_field, validate_fields
from megatron.core.timers import Timers

# Fills a weight of any shape and float dtype in place.
InitMethod = Callable[[torch.Tensor], object]


@dataclass(kw_only=True)
class ModelParallelConfig:
    """Precision and parallel layout of a model; `TransformerConfig` inherits the fields.

    The callables are set by the training loop: `grad_scale_func` multiplies the loss before backward,
    `aux_loss_scale_func` receives the same factor for losses that hang inside the model, `no_sync_func` defers
    gradient reduction to the last microbatch, `finalize_model_grads_func` runs after the last one. `timers` measure
    the passes.
    """

    cli_group: ClassVar[str] = "mixed precision and determinism"

    fp16: bool = config_field(False, help="Train in fp16 with fp32 master weights and dynamic loss scaling.")
    bf16: bool = config_field(False, help="Train in bf16 with fp32 master weights.")
    deterministic_mode: bool = config_field(
        False, help="Sum over ranks in rank order in fp32 and use deterministic kernels: reruns are bit-identical."
    )
    use_cpu_initialization: bool = config_field(
        False, help="Draw initial weights on the CPU; the same seed gives the same weights on every device."
    )
    cross_entropy_loss_fusion: bool = config_field(
        False, help="One pass from logits to losses, which is how losses are computed here with or without it."
    )
    calculate_per_token_loss: bool = config_field(
        False,
        help="Weigh all tokens of a global batch alike, not its micro-batches, which may have unequal numbers of them.",
    )
    params_dtype: torch.dtype = torch.float32
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    aux_loss_scale_func: Callable[[torch.Tensor], None] | None = None
    no_sync_func: Callable[[], AbstractContextManager[None]] | None = None
    grad_sync_func: Callable[..., None] | None = None
    finalize_model_grads_func: Callable[..., None] | None = None
    timers: Timers = plain_field(default_factory=Timers)

    def __post_init__(self) -> None:
        validate_fields(self)
        validate_precision(self)
        validate_parallel_layout(self)
        validate_callables(self)


def validate_precision(config: ModelParallelConfig) -> None:
    """Raises ValueError where the precision flags contradict each other."""
    if config.fp16 and config.bf16:
        raise ValueError("--fp16 and --bf16 are both given: choose one precision")


def validate_parallel_layout(config: ModelParallelConfig) -> None:
    """Raises ValueError for a layout that the layers do not have."""
    for field in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "context_parallel_size",
        "expert_model_parallel_size",
        "expert_tensor_parallel_size",
    ):
        if vars(config)[field] != 1:
            raise ValueError(f"{field} is {vars(config)[field]}: layers are not split over ranks yet, must be 1")
    if config.sequence_parallel:
        raise ValueError("sequence_parallel is True: not available yet, must be False")


def validate_callables(config: ModelParallelConfig) -> None:
    """Raises ValueError for a callable that the schedule would not call."""
    if config.grad_sync_func is not None:
        raise ValueError(f"grad_sync_func is {config.grad_sync_func}: not available yet, must be None")
