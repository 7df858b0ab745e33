"""Linear and embedding layers under Megatron's names; the tensor-parallel group has one rank for now."""

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.device import default_device
from megatron.core.model_parallel_config import InitMethod


class LayerConfig(Protocol):
    """What the layers read of a TransformerConfig."""

    params_dtype: torch.dtype
    use_cpu_initialization: bool
    perform_initialization: bool


class ColumnParallelLinear(nn.Module):
    """y = x W^T (+ b), W's rows split over the tensor-parallel group. Returns (y, bias to add or None)."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        is_expert: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """skip_bias_add: leave adding the bias to the caller. skip_weight_param_allocation: the weight is passed to
        forward. gather_output, is_expert: accepted for callers that pass them, no effect in a group of one rank.
        """
        super().__init__()
        require_one_rank(tp_group, "ColumnParallelLinear")
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.init_method = skip_bias_add, init_method
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self.weight = empty_parameter(output_size, input_size, config=config)
            initialize_weight(self.weight, init_method, config=config)
        self.register_parameter("bias", zero_parameter(output_size, config=config) if bias else None)

    def init_methods(self) -> dict[str, InitMethod]:
        """How the random parameters start, by name."""
        return {} if self.weight is None else {"weight": self.init_method}

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """input_: [*, input_size], parameter dtype. Returns [*, output_size], same dtype, and the skipped bias."""
        weight = self.weight if weight is None else weight
        assert weight is not None, "the layer has no weight of its own: pass one"
        return linear(input_, weight, bias=self.bias, skip_bias_add=self.skip_bias_add)


class RowParallelLinear(nn.Module):
    """y = x W^T (+ b), W's columns split over the tensor-parallel group. Returns (y, bias to add or None)."""

    bias: nn.Parameter | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        is_expert: bool = False,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        """skip_bias_add: leave adding the bias to the caller. input_is_parallel, is_expert: accepted for callers that
        pass them, no effect in a group of one rank.
        """
        super().__init__()
        require_one_rank(tp_group, "RowParallelLinear")
        self.input_size, self.output_size = input_size, output_size
        self.skip_bias_add, self.init_method = skip_bias_add, init_method
        self.weight = empty_parameter(output_size, input_size, config=config)
        initialize_weight(self.weight, init_method, config=config)
        self.register_parameter("bias", zero_parameter(output_size, config=config) if bias else None)

    def init_methods(self) -> dict[str, InitMethod]:
        """How the random parameters start, by name."""
        return {"weight": self.init_method}

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """input_: [*, input_size], parameter dtype. Returns [*, output_size], same dtype, and the skipped bias."""
        return linear(input_, self.weight, bias=self.bias, skip_bias_add=self.skip_bias_add)


class VocabParallelEmbedding(nn.Module):
    """One row per vocabulary entry, rows split over the tensor-parallel group."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        config: LayerConfig,
        tp_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        require_one_rank(tp_group, "VocabParallelEmbedding")
        self.num_embeddings, self.embedding_dim, self.init_method = num_embeddings, embedding_dim, init_method
        self.weight = empty_parameter(num_embeddings, embedding_dim, config=config)
        initialize_weight(self.weight, init_method, config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """How the random parameters start, by name."""
        return {"weight": self.init_method}

    def forward(self, input_: Tensor) -> Tensor:
        """input_: [*], int64, below num_embeddings. Returns [*, embedding_dim], parameter dtype."""
        return F.embedding(input_, self.weight)


def linear(input_: Tensor, weight: Tensor, *, bias: Tensor | None, skip_bias_add: bool) -> tuple[Tensor, Tensor | None]:
    """input_: [*, I]; weight: [O, I]; bias: [O], all one float dtype. Returns [*, O] and the bias if it was skipped."""
    if skip_bias_add:
        return F.linear(input_, weight), bias
    return F.linear(input_, weight, bias), None


def empty_parameter(*shape: int, config: LayerConfig) -> nn.Parameter:
    """A parameter whose values are still to be set: [*shape], config.params_dtype, on this process's device."""
    device = torch.device("cpu") if config.use_cpu_initialization else default_device()
    return nn.Parameter(torch.empty(*shape, dtype=config.params_dtype, device=device))


def zero_parameter(*shape: int, config: LayerConfig) -> nn.Parameter:
    """A parameter of zeros: [*shape], config.params_dtype, on this process's device."""
    return nn.Parameter(empty_parameter(*shape, config=config).detach().zero_())


def initialize_weight(weight: nn.Parameter, init_method: InitMethod, *, config: LayerConfig) -> None:
    """Draws a new weight from torch's generator, unless the model that holds it does so later by name.

    weight: any shape, any float dtype; filled in place.
    """
    if config.perform_initialization:
        with torch.no_grad():
            init_method(weight)


def require_one_rank(group: dist.ProcessGroup | None, layer: str) -> None:
    """Raises ValueError for a tensor-parallel group that the layer cannot be split over yet."""
    if group is not None and group.size() != 1:
        raise ValueError(f"{layer}: the tensor-parallel group has {group.size()} ranks: must have 1")
