"""Configuration that every parallel component shares: precision and the schedule's callables.

Parallel sizes are in parallel_layout_config.py, shapes of the network in transformer/transformer_config.py.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from dataclasses import field as plain_field
from typing import ClassVar

import torch

from megatron.core.config_field import config_field, validate_fields
from megatron.core.parallel_layout_config import ParallelLayoutConfig, validate_parallel_layout
from megatron.core.pipeline_config import PipelineConfig
from megatron.core.timers import Timers

# Fills a weight of any shape and float dtype in place.
InitMethod = Callable[[torch.Tensor], object]
NoSync = Callable[[], AbstractContextManager[None]]
# Takes a chunk's parameters.
SyncOfChunk = Callable[..., None]


@dataclass(frozen=True)
class ConstantInit:
    """Fills a parameter with one value."""

    value: float

    def __call__(self, param: torch.Tensor) -> torch.Tensor:
        """param: any shape, any float dtype; filled in place."""
        return param.fill_(self.value)


@dataclass(kw_only=True)
class ModelParallelConfig(ParallelLayoutConfig, PipelineConfig):
    """Precision and schedule of a model, with its parallel layout; `TransformerConfig` inherits the fields.

    The callables are set by the training loop: `grad_scale_func` multiplies the loss before backward, and with it the
    losses that hang inside a model which has `set_aux_loss_scale`, `no_sync_func` defers gradient reduction to the
    last microbatch, `grad_sync_func` and `param_sync_func` start collectives of a chunk
    (pipeline_parallel/sync_callables.py says when; each a list with one callable a chunk where there are several),
    `finalize_model_grads_func` runs after the last one. `timers` measure the passes.
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
    init_model_with_meta_device: bool = config_field(
        False,
        help="Build the model without memory; each rank then makes its shards alone (--use-torch-fsdp2).",
    )
    cross_entropy_loss_fusion: bool = config_field(
        False, help="One pass from logits to losses, which is how losses are computed here with or without it."
    )
    gradient_accumulation_fusion: bool = config_field(
        True,
        flags=("--no-gradient-accumulation-fusion",),
        help="Add the weight gradients of linear layers, experts and word embeddings where they add up, as they are "
        "computed; not with --deterministic-mode.",
    )
    calculate_per_token_loss: bool = config_field(
        False,
        help="Weigh all tokens of a global batch alike, not its micro-batches, which may have unequal numbers of them.",
    )
    params_dtype: torch.dtype = torch.float32
    perform_initialization: bool = True
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    no_sync_func: NoSync | Sequence[NoSync] | None = None
    grad_sync_func: SyncOfChunk | Sequence[SyncOfChunk] | None = None
    param_sync_func: SyncOfChunk | Sequence[SyncOfChunk] | None = None
    finalize_model_grads_func: Callable[..., None] | None = None
    timers: Timers = plain_field(default_factory=Timers)

    def __post_init__(self) -> None:
        validate_fields(self)
        validate_precision(self)
        validate_parallel_layout(self)


def validate_precision(config: ModelParallelConfig) -> None:
    """Raises ValueError where the precision flags contradict each other."""
    if config.fp16 and config.bf16:
        raise ValueError("--fp16 and --bf16 are both given: choose one precision")
