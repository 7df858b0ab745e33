"""Low-rank adapters of linear layers: y = W x + alpha / r * B A x, with W frozen (Hu et al., LoRA, 2021).

models/gpt/gpt_layer_specs.py selects the layers with adapters. Adapters of grouped experts are in moe/experts.py.
megatron/training loads checkpoints that do not contain adapters.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.logical_tensors import LogicalPiece
from megatron.core.model_parallel_config import ConstantInit, InitMethod
from megatron.core.process_groups_config import group_size
from megatron.core.tensor_parallel.layers import (
    ColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    empty_parameter,
    initialize_weight,
    split_piece,
    zero_parameter,
)
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.param_attributes import mark_partial_gradient, set_tensor_model_parallel_attributes
from megatron.core.transformer.lora_config import require_whole_experts
from megatron.core.transformer.transformer_config import NormalInit, TransformerConfig

ADAPTER_NAMES = ("lora_a", "lora_b")


class LoRAColumnParallelLinear(ColumnParallelLinear):
    """A ColumnParallelLinear with an adapter. A is replicated; the rows of B are split like the weight."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        """Builds the layer and its adapter. options: as in ColumnParallelLinear.

        Raises ValueError for experts that are split over expert-tensor-parallel ranks.
        """
        super().__init__(input_size, output_size, config=config, **options)
        if not self.sums_input_grad:
            require_whole_experts(group_size(self.tp_group))
        rank, self.scale = rank_and_scale(config)
        self.lora_a = empty_parameter(rank, input_size, config=config)
        # Under sequence parallelism each rank applies it to its part of the sequence.
        mark_partial_gradient(self.lora_a, partial=self.sequence_parallel)
        initialize_weight(self.lora_a, init_of_a(input_size), config=config)
        self.lora_b = zero_parameter(self.output_size_per_partition, rank, config=config)
        set_tensor_model_parallel_attributes(self.lora_b, True, 0, 1)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter, by name."""
        return {**super().init_methods(), "lora_a": init_of_a(self.input_size), "lora_b": ConstantInit(0)}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns the base layer's pieces, and this rank's rows of lora_b [output_size, r]. lora_a is replicated."""
        pieces = super().logical_pieces(prefix)
        del pieces["lora_a"]
        return pieces

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the adapter's output to the output of ColumnParallelLinear. input_: [*, input_size], parameter dtype.

        Returns [*, output_size / ranks], same dtype, and the skipped bias or None.
        """
        output, bias = super().forward(input_, weight, runtime_gather_output)
        # This tensor is narrow, so its communication is cheap.
        low = F.linear(input_, self.lora_a)  # [*, r]
        if self.sequence_parallel:
            low = gather_from_sequence_parallel_region(low, group=self.tp_group)
        elif self.sums_input_grad:
            low = copy_to_tensor_model_parallel_region(low, self.tp_group)
        added = F.linear(low, self.lora_b)
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            added = gather_from_tensor_model_parallel_region(added, self.tp_group)
        return torch.add(output, added, alpha=self.scale), bias


class LoRAReplicatedLinear(ReplicatedLinear):
    """A ReplicatedLinear with an adapter. A and B are replicated."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        """Builds the layer and its adapter. options: as in ReplicatedLinear."""
        super().__init__(input_size, output_size, config=config, **options)
        rank, self.scale = rank_and_scale(config)
        self.lora_a = empty_parameter(rank, input_size, config=config)
        initialize_weight(self.lora_a, init_of_a(input_size), config=config)
        self.lora_b = zero_parameter(output_size, rank, config=config)
        for parameter in (self.lora_a, self.lora_b):
            # As for the weight, each rank applies them to its part of the sequence.
            mark_partial_gradient(parameter, partial=config.sequence_parallel)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter, by name."""
        return {**super().init_methods(), "lora_a": init_of_a(self.input_size), "lora_b": ConstantInit(0)}

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Adds the adapter's output. input_: [*, input_size], parameter dtype -> [*, output_size], same dtype."""
        output, _ = super().forward(input_)
        return torch.add(output, F.linear(F.linear(input_, self.lora_a), self.lora_b), alpha=self.scale), None


class LoRARowParallelLinear(RowParallelLinear):
    """A RowParallelLinear with an adapter. The columns of A are split like the weight; B is replicated."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **options: Any) -> None:
        """Builds the layer and its adapter. options: as in RowParallelLinear.

        Raises ValueError for experts that are split over expert-tensor-parallel ranks.
        """
        super().__init__(input_size, output_size, config=config, **options)
        is_expert = options.get("is_expert", False)
        if is_expert:
            require_whole_experts(group_size(self.tp_group))
        rank, self.scale = rank_and_scale(config)
        self.lora_a = empty_parameter(rank, self.input_size_per_partition, config=config)
        set_tensor_model_parallel_attributes(self.lora_a, True, 1, 1)
        initialize_weight(self.lora_a, init_of_a(input_size), config=config, tp_group=self.tp_group)
        self.lora_b = zero_parameter(output_size, rank, config=config)
        mark_partial_gradient(self.lora_b, partial=config.sequence_parallel and not is_expert)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter, by name."""
        return {**super().init_methods(), "lora_a": init_of_a(self.input_size), "lora_b": ConstantInit(0)}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns the base layer's pieces, and this rank's columns of lora_a [r, input_size]. lora_b is replicated."""
        piece = split_piece(prefix + "lora_a", self.lora_a, group=self.tp_group, dim=1)
        return {**super().logical_pieces(prefix), "lora_a": [piece]}

    def forward(
        self, input_: Tensor, *, activation: GatedActivation | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Adds the adapter's output to the output of RowParallelLinear, which has the same arguments.

        input_: [*, input_size / ranks], parameter dtype. Returns [*, output_size], same dtype, and the skipped bias or
        None. The result of an activation is saved for backward, because two products need it.
        """
        if activation is not None:
            input_ = activation(input_, scale)
        output, bias = super().forward(input_)
        low = F.linear(input_, self.lora_a)  # [*, r]
        if self.sums_here:
            low = self.reduce(low, self.tp_group)
        return torch.add(output, F.linear(low, self.lora_b), alpha=self.scale), bias


def is_adapter(name: str) -> bool:
    """Returns whether a parameter name or checkpoint key belongs to an adapter."""
    return any(part in ADAPTER_NAMES for part in name.split("."))


def freeze_all_but_adapters(model: nn.Module) -> None:
    """Freezes all parameters except adapters, which become trainable."""
    for name, param in model.named_parameters():
        param.requires_grad = is_adapter(name)


def rank_and_scale(config: TransformerConfig) -> tuple[int, float]:
    """Returns the rank of adapters, and the scale of their output."""
    assert config.lora_rank is not None, "layers with adapters require lora_rank"
    return config.lora_rank, config.lora_alpha / config.lora_rank


def init_of_a(input_size: int) -> NormalInit:
    """Returns the init method of an adapter's matrix A."""
    # B starts at 0, so the initial model is unchanged.
    return NormalInit(1 / math.sqrt(input_size))
