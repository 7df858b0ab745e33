"""Linear and embedding layers that are split over a tensor-parallel group, under Megatron's names.

mappings.py and linear.py implement the communication of activations. A tp_group of None means the group of
parallel_state, see group_or_existing. With a group of one rank, such as ALONE, a layer is not split.
"""

from contextlib import nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.config_field import require_defaults
from megatron.core.device import default_device
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.group_collectives import all_gather_rows
from megatron.core.logical_tensors import LogicalPiece, identity_piece
from megatron.core.model_parallel_config import ConstantInit, InitMethod, init_of_matrix
from megatron.core.parallel_state import group_or_existing
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size, or_alone
from megatron.core.tensor_parallel.activated_product import activated_product
from megatron.core.tensor_parallel.copies import CopiedWithGroups
from megatron.core.tensor_parallel.linear import (
    LinearWithFrozenWeight,
    LinearWithGradAccumulationAndAsyncCommunication,
    autocast_input,
    is_autocast_on,
    linear_with_frozen_weight,
    linear_with_grad_accumulation_and_async_allreduce,
)
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region_,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.param_attributes import (
    copy_tensor_model_parallel_attributes,
    mark_partial_gradient,
    param_is_not_tensor_parallel_duplicate,
    set_defaults_if_not_set_tensor_model_parallel_attributes,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.tensor_parallel.weight_grads import look_up
from megatron.core.utils import divide

__all__ = [
    "ColumnParallelLinear",
    "LinearWithFrozenWeight",
    "LinearWithGradAccumulationAndAsyncCommunication",
    "ReplicatedLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_tensor_model_parallel_attributes",
    "linear_with_frozen_weight",
    "linear_with_grad_accumulation_and_async_allreduce",
    "param_is_not_tensor_parallel_duplicate",
    "set_defaults_if_not_set_tensor_model_parallel_attributes",
    "set_tensor_model_parallel_attributes",
]


class LayerConfig(Protocol):
    """The fields of TransformerConfig that these layers read."""

    params_dtype: torch.dtype
    use_cpu_initialization: bool
    init_model_with_meta_device: bool
    perform_initialization: bool
    sequence_parallel: bool


class ColumnParallelLinear(CopiedWithGroups):
    """Computes y = x W^T (+ b) with the rows of W split over the tensor-parallel group.

    Returns (y, bias); bias is not None only with skip_bias_add, when the caller must add it.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    master_weight: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        bias: bool = True,
        gather_output: bool = False,
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        skip_bias_add: bool = False,
        skip_weight_param_allocation: bool = False,
        embedding_activation_buffer: list[Tensor] | None = None,
        grad_output_buffer: list[Tensor] | None = None,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        disable_grad_reduce: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        output_dtype: torch.dtype | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Allocates this rank's rows of the weight and of the bias.

        gather_output: return all columns on every rank instead of only this rank's. skip_bias_add: return the bias for
        the caller to add. skip_weight_param_allocation: the weight is passed to forward. is_expert: whether the token
        dispatcher moves tokens between ranks and sums their gradients; tp_group is then the expert-tensor group.
        stride: number of tensors stacked in the rows of W, each of which is split over the ranks.
        keep_master_weight_for_test: store the initial W of all ranks as master_weight; collective. disable_grad_reduce:
        the caller sums the input's gradient over the ranks. tp_group: takes precedence over pg_collection.
        tp_comm_buffer_name, name: accepted without effect. embedding_activation_buffer, grad_output_buffer,
        output_dtype: must be None.
        """
        super().__init__()
        init_method = init_of_matrix(init_method, output_size, input_size)
        require_defaults(
            "ColumnParallelLinear",
            "weight gradients are computed immediately, and a GEMM's result has the dtype of its operands",
            embedding_activation_buffer=(embedding_activation_buffer, None),
            grad_output_buffer=(grad_output_buffer, None),
            output_dtype=(output_dtype, None),
        )
        tp_group = _group_of_layer(tp_group, pg_collection, is_expert=is_expert)
        self.input_size, self.output_size, self.tp_group = input_size, output_size, tp_group
        self.output_size_per_partition = split_size(output_size, tp_group, name="output_size")
        self.skip_bias_add, self.init_method, self.gather_output = skip_bias_add, init_method, gather_output
        self.sums_input_grad = not is_expert and not disable_grad_reduce
        self.sequence_parallel = config.sequence_parallel and not is_expert
        self.stride, self.master_weight = stride, None
        if skip_weight_param_allocation:
            self.register_parameter("weight", None)
        else:
            self.weight = empty_parameter(self.output_size_per_partition, input_size, config=config)
            set_tensor_model_parallel_attributes(self.weight, True, 0, stride)
            initialize_weight(self.weight, init_method, config=config, tp_group=tp_group)
            if keep_master_weight_for_test:
                self.master_weight = _whole_weight(self.weight, tp_group, dim=0, stride=stride)
        self.register_parameter("bias", None)
        if bias:
            self.bias = zero_parameter(self.output_size_per_partition, config=config)
            set_tensor_model_parallel_attributes(self.bias, True, 0, stride)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init methods of the parameters, by name."""
        return {name: self.init_method if name == "weight" else ConstantInit(0) for name, _ in self.named_parameters()}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns this rank's rows of the weight [output_size, input_size] and of the bias [output_size]."""
        return {
            name: split_pieces(prefix + name, p, group=self.tp_group, dim=0, stride=self.stride)
            for name, p in self.named_parameters()
        }

    def extra_repr(self) -> str:
        """Returns the sizes of the layer, which repr shows."""
        return _sizes_of(self, has_bias=self.bias is not None)

    def forward(
        self, input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the linear layer. input_: [*, input_size], parameter dtype.

        Under sequence parallelism, input_ is this rank's part, [S / ranks, *, input_size]. Returns
        [*, output_size / ranks], or [*, output_size] if gathered, same dtype, for the whole sequence, and this rank's
        part of the bias with skip_bias_add, else None. runtime_gather_output: overrides gather_output unless None.
        """
        weight = self.weight if weight is None else weight
        assert weight is not None, "the layer has no weight: pass one to forward"
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_,
            weight,
            None if self.skip_bias_add else self.bias,
            True,
            self.sums_input_grad,
            self.sequence_parallel,
            tp_group=self.tp_group,
        )
        if self.gather_output if runtime_gather_output is None else runtime_gather_output:
            output = gather_from_tensor_model_parallel_region(output, self.tp_group)
        return output, self.bias if self.skip_bias_add else None


class ReplicatedLinear(CopiedWithGroups):
    """Computes y = x W^T with W replicated over the tensor-parallel group. Returns (y, None), like the split layers.

    Under sequence parallelism each rank processes its part of the sequence, and the weight's gradient must be summed
    over the ranks. Otherwise all ranks compute the same result, and the following layer sums the gradient of its input.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: LayerConfig,
        init_method: InitMethod,
        bias: bool = False,
        tp_group: dist.ProcessGroup | None = None,
        **of_split_layers: Any,
    ) -> None:
        """Allocates the weight.

        bias: must be False. tp_group: ranks with identical copies. of_split_layers: unused arguments that builders pass
        to every linear layer: gather_output, skip_bias_add, is_expert, tp_comm_buffer_name.
        """
        super().__init__()
        init_method = init_of_matrix(init_method, output_size, input_size)
        if bias:
            raise ValueError("bias is True: must be False, because ReplicatedLinear does not support a bias")
        self.input_size, self.output_size, self.init_method = input_size, output_size, init_method
        self.tp_group = group_or_existing(tp_group)
        self.weight = empty_parameter(output_size, input_size, config=config)
        mark_partial_gradient(self.weight, partial=config.sequence_parallel)
        initialize_weight(self.weight, init_method, config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of the weight."""
        return {"weight": self.init_method}

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """Computes the linear layer. input_: [*, input_size], parameter dtype -> [*, output_size], same dtype."""
        output = linear_with_grad_accumulation_and_async_allreduce(
            input_, self.weight, None, True, False, False, tp_group=self.tp_group
        )
        return output, None


class RowParallelLinear(CopiedWithGroups):
    """Computes y = x W^T (+ b) with the columns of W split over the tensor-parallel group.

    Returns (y, bias); bias is not None only with skip_bias_add, when the caller must add it.
    """

    bias: nn.Parameter | None
    master_weight: Tensor | None

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
        stride: int = 1,
        keep_master_weight_for_test: bool = False,
        is_expert: bool = False,
        tp_comm_buffer_name: str | None = None,
        tp_group: dist.ProcessGroup | None = None,
        name: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Allocates this rank's columns of the weight, and the bias.

        skip_bias_add: return the bias for the caller to add. input_is_parallel: whether the input contains only this
        rank's columns. is_expert: whether the token dispatcher sums the results of the ranks, after which the bias must
        be added once; tp_group is then the expert-tensor group. The other arguments are as in ColumnParallelLinear,
        with columns in place of rows.
        """
        super().__init__()
        init_method = init_of_matrix(init_method, output_size, input_size)
        tp_group = _group_of_layer(tp_group, pg_collection, is_expert=is_expert)
        self.stride, self.master_weight = stride, None
        self.input_size, self.output_size, self.tp_group = input_size, output_size, tp_group
        self.input_size_per_partition = split_size(input_size, tp_group, name="input_size")
        self.skip_bias_add, self.init_method, self.input_is_parallel = skip_bias_add, init_method, input_is_parallel
        sequence_parallel = config.sequence_parallel and not is_expert
        if not input_is_parallel and sequence_parallel:
            raise ValueError("input_is_parallel is False: must be True with sequence_parallel")
        self.sums_here = group_size(tp_group) > 1 and not is_expert
        self.reduce = (
            reduce_scatter_to_sequence_parallel_region
            if sequence_parallel
            else reduce_from_tensor_model_parallel_region_
        )
        self.weight = empty_parameter(output_size, self.input_size_per_partition, config=config)
        set_tensor_model_parallel_attributes(self.weight, True, 1, stride)
        initialize_weight(self.weight, init_method, config=config, tp_group=tp_group)
        if keep_master_weight_for_test:
            self.master_weight = _whole_weight(self.weight, tp_group, dim=1, stride=stride)
        self.register_parameter("bias", None)
        if bias:
            self.bias = zero_parameter(output_size, config=config)
            # The gradient covers only this rank's part of the sequence.
            mark_partial_gradient(self.bias, partial=sequence_parallel)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init methods of the parameters, by name."""
        return {name: self.init_method if name == "weight" else ConstantInit(0) for name, _ in self.named_parameters()}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns this rank's columns of the weight [output_size, input_size]. The bias is replicated."""
        pieces = split_pieces(prefix + "weight", self.weight, group=self.tp_group, dim=1, stride=self.stride)
        return {"weight": pieces}

    def extra_repr(self) -> str:
        """Returns the sizes of the layer, which repr shows."""
        return _sizes_of(self, has_bias=self.bias is not None)

    def forward(
        self, input_: Tensor, *, activation: GatedActivation | None = None, scale: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the linear layer and sums its results over the ranks.

        input_: [*, input_size / ranks], or [*, input_size] unless input_is_parallel, parameter dtype. activation: None,
        or the layer multiplies activation(input_, scale) instead, which is then not saved for backward; scale: [*] or
        None. Returns [*, output_size], or under sequence parallelism [S / ranks, *, output_size], same dtype, and the
        bias with skip_bias_add, else None. With is_expert, the results are not summed.
        """
        bias = None if self.skip_bias_add else self.bias
        skipped = self.bias if self.skip_bias_add else None
        # The bias is added after the sum, so that it is added once and not once per rank.
        added_here = None if self.sums_here else bias
        if activation is not None and (added_here is not None or not self.input_is_parallel or is_autocast_on(input_)):
            input_, activation = activation(input_, scale), None
        if not self.input_is_parallel:
            input_ = scatter_to_tensor_model_parallel_region(input_, self.tp_group)
        if activation is None:
            output = linear_with_grad_accumulation_and_async_allreduce(
                input_, self.weight, added_here, True, False, False, tp_group=self.tp_group
            )
        else:
            output = activated_product(activation, input_, scale, self.weight)
        if not self.sums_here:
            return output, skipped
        output = self.reduce(output, self.tp_group)
        return output if bias is None else output + autocast_input(bias), skipped


class VocabParallelEmbedding(CopiedWithGroups):
    """An embedding table with its rows, one per vocabulary entry, split over the tensor-parallel group."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        init_method: InitMethod,
        reduce_scatter_embeddings: bool = False,
        config: LayerConfig,
        tp_group: dist.ProcessGroup | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        """Allocates this rank's rows.

        reduce_scatter_embeddings: return this rank's part of the sequence, with the sequence as the first dimension.
        tp_group: takes precedence over pg_collection.
        """
        super().__init__()
        init_method = init_of_matrix(init_method, num_embeddings, embedding_dim)
        tp_group = _group_of_layer(tp_group, pg_collection)
        self.num_embeddings, self.embedding_dim, self.init_method = num_embeddings, embedding_dim, init_method
        self.tp_group, self.reduce_scatter_embeddings = tp_group, reduce_scatter_embeddings
        self.num_embeddings_per_partition = split_size(num_embeddings, tp_group, name="num_embeddings")
        self.vocab_start_index = group_rank(tp_group) * self.num_embeddings_per_partition
        self.weight = empty_parameter(self.num_embeddings_per_partition, embedding_dim, config=config)
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)
        initialize_weight(self.weight, init_method, config=config, tp_group=tp_group)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of the table, by name."""
        return {"weight": self.init_method}

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns this rank's rows of the table [num_embeddings, embedding_dim]."""
        return {"weight": [split_piece(prefix + "weight", self.weight, group=self.tp_group, dim=0)]}

    def forward(self, input_: Tensor) -> Tensor:
        """Looks up embeddings. input_: [*], int64, from 0 to num_embeddings - 1.

        Returns [*, embedding_dim], parameter dtype. With reduce_scatter_embeddings, input_ is [B, S] and the result is
        [S / ranks, B, embedding_dim]. Ids out of range raise ValueError on the CPU, and fail an assertion of the kernel
        on a GPU, which ends the process.
        """
        if self.reduce_scatter_embeddings:
            # Transposes the small ids instead of wide embeddings.
            return reduce_scatter_to_sequence_parallel_region(self._own_rows(input_.t()), self.tp_group)
        return reduce_from_tensor_model_parallel_region_(self._own_rows(input_), self.tp_group)

    def _own_rows(self, input_: Tensor) -> Tensor:
        if group_size(self.tp_group) == 1:
            return self._look_up(input_, input_)
        local = input_ - self.vocab_start_index
        foreign = (local < 0) | (local >= self.num_embeddings_per_partition)
        # Invalid ids remain out of range on every rank, so that the look-up fails.
        elsewhere = foreign & (input_ >= 0) & (input_ < self.num_embeddings)
        # Ids of other ranks read an arbitrary row, which is zeroed to exclude it from the sum over ranks.
        rows = self._look_up(local.masked_fill(elsewhere, 0), input_)
        return rows.masked_fill(foreign.unsqueeze(-1), 0)

    def _look_up(self, local: Tensor, input_: Tensor) -> Tensor:
        try:
            return look_up(local, self.weight)
        except IndexError as error:
            raise ValueError(
                f"ids from {input_.amin():d} to {input_.amax():d}: must be from 0 to num_embeddings - 1 "
                f"({self.num_embeddings - 1})"
            ) from error


def split_size(size: int, group: dist.ProcessGroup | None, *, name: str) -> int:
    """Returns `size` divided by the number of ranks. Raises ValueError naming `name` if it is not divisible."""
    if size % group_size(group):
        raise ValueError(f"{name} is {size}: must be divisible by the {group_size(group)} tensor-parallel ranks")
    return divide(size, group_size(group))


def split_pieces(
    key: str, local: Tensor, *, group: dist.ProcessGroup | None, dim: int, stride: int
) -> list[LogicalPiece]:
    """Returns this rank's pieces of `stride` tensors that are each split along `dim` and stored as one tensor.

    local: this rank's parts of these tensors, concatenated along `dim`, any shape and dtype. Raises ValueError if
    stride does not divide the dimension.
    """
    if stride == 1:
        return [split_piece(key, local, group=group, dim=dim)]
    shape, ranks = tuple(local.shape), group_size(group)
    length, strides = divide(shape[dim], stride), identity_piece(key, shape).stride
    whole = tuple(size * ranks if d == dim else size for d, size in enumerate(shape))
    part = tuple(length if d == dim else size for d, size in enumerate(shape))
    firsts = [(number * ranks + group_rank(group)) * length for number in range(stride)]
    return [
        LogicalPiece(
            key,
            part,
            strides,
            number * length * strides[dim],
            whole,
            tuple(first if d == dim else 0 for d in range(len(shape))),
        )
        for number, first in enumerate(firsts)
    ]


def split_piece(key: str, local: Tensor, *, group: dist.ProcessGroup | None, dim: int) -> LogicalPiece:
    """Returns this rank's piece of a stored tensor that is split evenly along `dim` in rank order.

    local: this rank's part, any shape and dtype.
    """
    shape = tuple(local.shape)
    whole = tuple(size * group_size(group) if d == dim else size for d, size in enumerate(shape))
    offset = tuple(group_rank(group) * size if d == dim else 0 for d, size in enumerate(shape))
    return LogicalPiece(key, shape, identity_piece(key, shape).stride, 0, whole, offset)


def _group_of_layer(
    tp_group: dist.ProcessGroup | None, groups: ProcessGroupCollection | None, *, is_expert: bool = False
) -> dist.ProcessGroup:
    if tp_group is None and groups is not None:
        return or_alone(groups.expt_tp if is_expert else groups.tp)
    return group_or_existing(tp_group, "expt_tp" if is_expert else "tp")


def _whole_weight(local: Tensor, group: dist.ProcessGroup, *, dim: int, stride: int) -> Tensor:
    """Gathers a weight that is split over ranks along `dim` as in `split_pieces`."""
    parts = all_gather_rows(local.detach().unsqueeze(0), group).wait()
    return torch.cat([part for parts_of in parts.chunk(stride, dim + 1) for part in parts_of], dim=dim)


def _sizes_of(layer: "ColumnParallelLinear | RowParallelLinear", *, has_bias: bool) -> str:
    return (
        f"in_features={layer.input_size}, out_features={layer.output_size}, bias={has_bias}, "
        f"TP={group_size(layer.tp_group)}"
    )


def empty_parameter(*shape: int, config: LayerConfig) -> nn.Parameter:
    """Creates an uninitialised parameter: [*shape], config.params_dtype, on this process's device."""
    return new_parameter(empty_values(*shape, config=config))


def zero_parameter(*shape: int, config: LayerConfig) -> nn.Parameter:
    """Creates a parameter of zeros: [*shape], config.params_dtype, on this process's device."""
    return new_parameter(empty_values(*shape, config=config).zero_())


def empty_values(*shape: int, config: LayerConfig) -> Tensor:
    """Allocates uninitialised memory for a parameter: [*shape], dtype config.params_dtype, on this process's device.

    With init_model_with_meta_device, or inside `with torch.device("meta")`, the tensor is on the meta device.
    """
    device = torch.device("cpu") if config.use_cpu_initialization else default_device()
    if config.init_model_with_meta_device or torch.get_default_device().type == "meta":
        device = torch.device("meta")
    return torch.empty(*shape, dtype=config.params_dtype, device=device)


def device_for_buffers(param: Tensor) -> torch.device:
    """Returns the device of a parameter, or this process's device for a parameter on the meta device."""
    return default_device() if param.is_meta else param.device


def new_parameter(values: Tensor) -> nn.Parameter:
    """Creates a parameter, marked as replicated until the caller marks it as split. values: any shape, float dtype."""
    param = nn.Parameter(values)
    set_tensor_model_parallel_attributes(param, False, -1, 1)
    mark_partial_gradient(param, partial=False)
    return param


def initialize_weight(
    weight: nn.Parameter, init_method: InitMethod, *, config: LayerConfig, tp_group: dist.ProcessGroup | None = None
) -> None:
    """Initializes a weight in place from torch's generator, unless the enclosing model initializes it later by name.

    weight: any shape, any float dtype. tp_group: ranks over which the weight is split, so that they must draw different
    numbers.
    """
    if not config.perform_initialization:
        return
    with torch.no_grad(), get_cuda_rng_tracker().fork() if group_size(tp_group) > 1 else nullcontext():
        init_method(weight)
