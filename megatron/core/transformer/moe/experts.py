"""Experts of one rank, applied to rows that are sorted by expert: GroupedMLP, and its reference SequentialMLP.

GroupedMLP computes all experts with grouped GEMMs, in the function of expert_function.py; SequentialMLP runs one MLP
after the other. The file also defines ExpertShard, which describes the experts of a rank, and low-rank adapters of
grouped experts. A token dispatcher (dispatch.py) provides the rows.

Shapes: R rows, H hidden, F width of one expert, e experts of this rank, E experts of all ranks, r width of adapters.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.activations import ACTIVATIONS
from megatron.core.block_scaled.format import BlockFormat, SquareBlocks
from megatron.core.config_field import require_defaults
from megatron.core.fusions.gated_activation import GatedActivation
from megatron.core.logical_tensors import LogicalPiece, model_logical_pieces
from megatron.core.model_parallel_config import ConstantInit, InitMethod, init_of_matrix
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight, zero_parameter
from megatron.core.tensor_parallel.param_attributes import (
    MatrixWindow,
    mark_expert,
    set_square_blocks,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.lora import init_of_a, rank_and_scale
from megatron.core.transformer.lora_config import require_whole_experts
from megatron.core.transformer.mlp import MLP, MLPSubmodules, build_activation
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.expert_function import ExpertLinear, ExpertMath, expert_outputs
from megatron.core.transformer.moe.grouped_gemm import row_offsets
from megatron.core.transformer.moe.paged_stash import StashedRows
from megatron.core.transformer.moe.quantized_experts import QuantizedLinear, QuantizedWeights
from megatron.core.transformer.moe.static_rows import StaticOrder
from megatron.core.transformer.spec_utils import build_module, get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide

# Checkpoint keys. Grouped and sequential experts share them, so each can load the other's checkpoints.
_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"
_BIAS1, _BIAS2 = "linear_fc1.bias", "linear_fc2.bias"


@dataclass
class GroupedMLPSubmodules:
    """Specs of the low-rank adapters for fc1 and fc2; None means no adapter."""

    linear_fc1: Any = None
    linear_fc2: Any = None


class GroupedMLP(MegatronModule):
    """All experts of a rank, computed with grouped GEMMs.

    1. fc1, one matrix per expert: rows [R, H] -> gate_up [R, 2F] (F without a gated activation).
    2. The activation, times the routing weight of each row: act [R, F].
    3. fc2, one matrix per expert: [R, H].

    Saves the rows, gate_up and the weights for backward, but not act. bias1: [e, 2F], bias2: [e, H], with
    add_bias_linear; bias2 is also multiplied by the routing weight. linear_fc1, linear_fc2: the adapters of fc1 and
    fc2, or None. quantized: the weights in 8 bits, if the configuration's fp8 is set, else None; see
    [Note: rows in 8 bits] in expert_function.py. MoELayer sets its step.
    """

    bias1: nn.Parameter | None
    bias2: nn.Parameter | None
    linear_fc1: "ExpertAdapter | None"
    linear_fc2: "ExpertAdapter | None"

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: GroupedMLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        """Allocates the weights and builds the adapters.

        submodules: adapters for fc1 and fc2; fc1 and fc2 themselves cannot be replaced. pg_collection: the groups of
        this rank; None means the groups of parallel_state, if they exist. name: stored for the caller. Raises
        ValueError for submodules other than adapters.
        """
        super().__init__(config)
        self.name = name
        self.shard = ExpertShard.of(pg_collection or existing_process_groups(), num_local_experts)
        self.num_local_experts = num_local_experts
        self.ffn_hidden_size = divide(config.moe_ffn_hidden_size, self.shard.num_parts)
        self.fc1_width = self.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
        self.activation = build_activation(config)
        is_static = config.moe_expert_rank_capacity_factor is not None
        if is_static:
            require_name(self.activation)
        self.is_static = is_static
        self.quantized: QuantizedWeights | None = None
        hidden = config.hidden_size
        # Megatron's shapes. The memory layout is [e, H, 2F] and [e, F, H].
        self.weight1 = empty_parameter(hidden, num_local_experts * self.fc1_width, config=config)
        self.weight2 = empty_parameter(num_local_experts * self.ffn_hidden_size, hidden, config=config)
        set_tensor_model_parallel_attributes(self.weight1, True, 1, 1)
        set_tensor_model_parallel_attributes(self.weight2, True, 0, 1)
        self.register_parameter("bias1", None)
        self.register_parameter("bias2", None)
        if config.add_bias_linear:
            self.bias1 = zero_parameter(num_local_experts, self.fc1_width, config=config)
            self.bias2 = zero_parameter(num_local_experts, hidden, config=config)
            set_tensor_model_parallel_attributes(self.bias1, True, 1, 1)
        self.set_format(config.block_format)
        specs = submodules or GroupedMLPSubmodules()
        self.linear_fc1 = self._adapter(specs.linear_fc1, (hidden, self.fc1_width))
        self.linear_fc2 = self._adapter(specs.linear_fc2, (self.ffn_hidden_size, hidden))
        mark_experts(self)
        for name, init_method in self.init_methods().items():
            initialize_weight(self.get_parameter(name), init_method, config=config)

    def _adapter(self, spec: Any, sizes: tuple[int, int]) -> Any:
        if spec is None:
            return None
        kind = get_module(spec)
        if not (isinstance(kind, type) and issubclass(kind, ExpertAdapter)):
            raise ValueError(
                f"submodules contains {kind!r}: linear_fc1 and linear_fc2 of GroupedMLP must be ExpertAdapter or None; "
                "use SequentialMLP for other linear layers"
            )
        return build_module(spec, self.shard, self.num_local_experts, config=self.config, sizes=sizes)

    @property
    def trains_on_rows(self) -> bool:
        """Whether the gradient of a trained weight is a product of x: of the first linear layer, or its adapter's A."""
        lora_a = None if self.linear_fc1 is None else self.linear_fc1.lora_a
        return self.weight1.requires_grad or (lora_a is not None and lora_a.requires_grad)

    @property
    def quantized_bytes(self) -> int:
        """Bytes of the weights in 8 bits, which the first forward allocates; 0 if the experts do not use them."""
        if self.quantized is None:
            return 0
        hidden, ffn, row_bytes = self.config.hidden_size, self.ffn_hidden_size, self.quantized.form.row_bytes
        return self.num_local_experts * (hidden * row_bytes(self.fc1_width) + ffn * row_bytes(hidden))

    def set_format(self, form: BlockFormat | None) -> None:
        """Sets the format in which the experts compute; None means the precision of the parameters."""
        self.quantized = None if form is None else QuantizedWeights(form)
        for weight, height, width in (
            (self.weight1, self.config.hidden_size, self.fc1_width),
            (self.weight2, self.ffn_hidden_size, self.config.hidden_size),
        ):
            set_square_blocks(weight, None if form is None else SquareBlocks(form, height, width))

    def quantized_weights(self) -> tuple[QuantizedLinear, QuantizedLinear]:
        """Returns the weights of fc1 and fc2 in 8 bits, quantized in this step, of experts that compute in 8 bits."""
        assert self.quantized is not None, "experts in the parameters' precision"
        experts = self.num_local_experts
        params = self.weight1, self.weight2
        return self.quantized.of_step(
            self.quantized.step,
            params[0].detach().view(experts, -1, self.fc1_width),
            params[1].detach().view(experts, self.ffn_hidden_size, -1),
            params=params,
        )

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter by name, excluding adapters."""
        assert self.config.init_method is not None and self.config.output_layer_init_method is not None
        # Logical matrices of one expert, over all ranks that share it.
        parts, hidden = self.shard.num_parts, self.config.hidden_size
        methods = {
            "weight1": init_of_matrix(self.config.init_method, parts * self.fc1_width, hidden),
            "weight2": init_of_matrix(self.config.output_layer_init_method, hidden, parts * self.ffn_hidden_size),
        }
        return methods | ({} if self.bias1 is None else dict.fromkeys(("bias1", "bias2"), ConstantInit(0)))

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        output_buffer: None = None,
        grad_input_buffer: None = None,
        *,
        order: StaticOrder | None = None,
        stashed: StashedRows | None = None,
        packed_x: Tensor | None = None,
    ) -> tuple[Tensor, None]:
        """Applies each row's expert and multiplies the output by the row's routing weight. Includes the biases.

        permuted_local_hidden_states: [R, H], parameter dtype; tokens_per_expert: [e], int64, on the device;
        permuted_probs: [R], fp32 or parameter dtype. With a static buffer, R is C. output_buffer, grad_input_buffer:
        must be None. Returns [R, H], parameter dtype, and None for the bias.

        order: assigns the rows of a static buffer to the choices of N tokens. The first and third argument are then the
        tokens, [N, H], and their weights, [N, K], and the result is the sum of each token's rows, [N, H]. stashed:
        saves the rows of the buffer for backward; requires an order. packed_x: the tokens in 8 bits, as expert_outputs
        receives them.
        """
        if output_buffer is not None or grad_input_buffer is not None:
            require_defaults(
                "GroupedMLP.forward",
                "results and gradients are written to newly allocated tensors",
                output_buffer=(output_buffer, None),
                grad_input_buffer=(grad_input_buffer, None),
            )
        output = expert_outputs(
            permuted_local_hidden_states,
            permuted_probs,
            _linear(self.weight1, self.bias1, self.linear_fc1),
            _linear(self.weight2, self.bias2, self.linear_fc2),
            math=self._math(),
            parts=self.parts,
            offsets=row_offsets(tokens_per_expert),
            order=order,
            stashed=stashed,
            packed_x=packed_x,
        )
        return output, None

    def _math(self) -> ExpertMath:
        fc1, fc2 = self.linear_fc1, self.linear_fc2
        factors = 0.0 if fc1 is None else fc1.scale, 0.0 if fc2 is None else fc2.scale
        # All ranks that share an expert store the whole bias2. Each adds a share of it, because their results are
        # summed.
        math = ExpertMath(self.activation, self.is_static, 1 / self.shard.num_parts, factors)
        return math if self.quantized is None else math._replace(quantized=self.quantized_weights())

    # For checkpoints and optimizers.

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns this rank's pieces of the checkpointed tensors, which stack all experts.

        fc1 is stored as [E, F, H], split into two tensors, gate and up, if the activation is gated; fc2 is stored as
        [E, H, F]. Biases have no input dimension. The result includes the adapters.
        """
        experts, hidden, ffn = self.num_local_experts, self.config.hidden_size, self.ffn_hidden_size
        all_experts, first = self.shard.num_experts, self.shard.first_expert
        all_ffn, first_ffn = ffn * self.shard.num_parts, ffn * self.shard.part
        halves = (".gate", ".up") if self.config.gated_linear_unit else ("",)
        # Stored as [output, input], as in dense layers and Hugging Face, through a transposed view.
        fc1_stride = (hidden * self.fc1_width, 1, self.fc1_width)
        pieces = {
            "weight1": [
                LogicalPiece(
                    prefix + _FC1 + half,
                    (experts, ffn, hidden),
                    fc1_stride,
                    index * ffn,
                    (all_experts, all_ffn, hidden),
                    (first, first_ffn, 0),
                )
                for index, half in enumerate(halves)
            ],
            "weight2": [
                LogicalPiece(
                    prefix + _FC2,
                    (experts, hidden, ffn),
                    (ffn * hidden, 1, hidden),
                    0,
                    (all_experts, hidden, all_ffn),
                    (first, 0, first_ffn),
                )
            ],
        }
        for name, adapter, parts in (("linear_fc1.", self.linear_fc1, halves), ("linear_fc2.", self.linear_fc2, ("",))):
            if adapter is not None:
                pieces |= {name + own: held for own, held in adapter.pieces(prefix + name, parts).items()}
        if self.bias1 is None:
            return pieces
        bias1 = ((experts, ffn), (self.fc1_width, 1)), ((all_experts, all_ffn), (first, first_ffn))
        bias2 = LogicalPiece(prefix + _BIAS2, (experts, hidden), (hidden, 1), 0, (all_experts, hidden), (first, 0))
        gate_up = [
            LogicalPiece(prefix + _BIAS1 + half, *bias1[0], index * ffn, *bias1[1]) for index, half in enumerate(halves)
        ]
        return {**pieces, "bias1": gate_up, "bias2": [bias2]}

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """Returns the windows of each expert's fc1 (gate, then up) and fc2, which are stored transposed."""
        hidden, ffn, width = self.config.hidden_size, self.ffn_hidden_size, self.fc1_width
        experts = range(self.num_local_experts)
        return {
            "weight1": [MatrixWindow((width, hidden), (1, width), index * hidden * width) for index in experts],
            "weight2": [MatrixWindow((hidden, ffn), (1, hidden), index * ffn * hidden) for index in experts],
        }


def _linear(weight: Tensor, bias: Tensor | None, adapter: "ExpertAdapter | None") -> ExpertLinear:
    if adapter is None:
        return ExpertLinear(weight, bias)
    return ExpertLinear(weight, bias, adapter.lora_a, adapter.lora_b)


# Megatron's name for grouped experts, which are a Transformer Engine module there.
TEGroupedMLP = GroupedMLP


class SequentialMLP(MegatronModule):
    """Runs one MLP per expert, one after the other. Reference implementation for GroupedMLP."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        """Builds an MLP for each expert.

        pg_collection: the groups of this rank; None means the groups of parallel_state, if they exist. name: stored for
        the caller.
        """
        super().__init__(config)
        self.name = name
        self.shard = ExpertShard.of(pg_collection or existing_process_groups(), num_local_experts)
        self.num_local_experts = num_local_experts
        mlp = partial(MLP, config, submodules, is_expert=True, pg_collection=pg_collection)
        experts = [mlp(ffn_hidden_size=config.moe_ffn_hidden_size) for _ in range(num_local_experts)]
        self.local_experts = nn.ModuleList(experts)
        mark_experts(self)
        for bias in (expert.linear_fc2.bias for expert in experts):
            if bias is not None and self.shard.num_parts > 1:
                # All ranks that share an expert store the whole bias, and each adds a share of it in forward. The
                # gradient of the whole bias is num_parts times the gradient of the share.
                bias.register_hook(partial(torch.mul, self.shard.num_parts))

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """Applies each row's expert and multiplies the output by the row's routing weight. Includes the biases.

        permuted_local_hidden_states: [R, H], parameter dtype; tokens_per_expert: [e], int64, on the device;
        permuted_probs: [R], fp32 or parameter dtype. Returns [R, H], parameter dtype, and None for the bias.
        """
        sizes = _counts_sync(tokens_per_expert)
        # An expert without tokens runs on zero rows, so that its parameters receive zero gradients.
        inputs, weights = permuted_local_hidden_states.split(sizes), permuted_probs.split(sizes)
        outputs = []
        for expert, rows, scale in zip(self.local_experts, inputs, weights, strict=True):
            output, bias = expert(rows, scale)
            # Each rank that shares the expert adds a share of the bias, because the results of these ranks are summed.
            outputs.append(output if bias is None else output + bias / self.shard.num_parts)
        return torch.cat(outputs), None

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Returns each expert's pieces of the checkpointed tensors, which GroupedMLP also uses."""
        return {
            f"local_experts.{index}.{name}": [self._of_expert(part, index, prefix=prefix) for part in parts]
            for index, expert in enumerate(self.local_experts)
            for name, parts in model_logical_pieces(expert).items()
        }

    def _of_expert(self, part: LogicalPiece, index: int, *, prefix: str) -> LogicalPiece:
        """Converts one expert's piece into the expert's entry of the stacked tensor."""
        return LogicalPiece(
            key=prefix + part.key,
            shape=(1, *part.shape),
            stride=(math.prod(part.shape), *part.stride),
            storage_offset=part.storage_offset,
            global_shape=(self.shard.num_experts, *part.global_shape),
            global_offset=(self.shard.first_expert + index, *part.global_offset),
        )


def _counts_sync(tokens_per_expert: Tensor) -> list[int]:
    """Reads the number of rows per expert on the host. NOTE: waits for the device; GroupedMLP does not call it."""
    counts: list[Any] = tokens_per_expert.tolist()
    return counts


# --- Experts of a rank ---


@dataclass(frozen=True)
class ExpertShard:
    """Experts that a rank stores, and the rank's part of each expert if experts are split over ranks.

    num_experts: number of experts in the layer. first_expert: index of the rank's first expert. part: index of the
    rank's part of each expert, below num_parts.
    """

    num_experts: int
    first_expert: int
    part: int
    num_parts: int

    @classmethod
    def of(cls, groups: ProcessGroupCollection, num_local_experts: int) -> "ExpertShard":
        """Builds this rank's shard from the expert and expert-tensor groups."""
        return cls(
            num_experts=num_local_experts * group_size(groups.ep),
            first_expert=num_local_experts * group_rank(groups.ep),
            part=group_rank(groups.expt_tp),
            num_parts=group_size(groups.expt_tp),
        )


def mark_experts(experts: nn.Module) -> None:
    """Marks every parameter as an expert parameter, whose gradient is summed over the ranks with the same experts."""
    for parameter in experts.parameters():
        mark_expert(parameter)


# --- Adapters ---


class ExpertAdapter(MegatronModule):
    """Low-rank adapters for fc1 or fc2 of all experts of a rank, which add scale * B A x to the output.

    lora_a: [e, I, r], random; lora_b: [e, r, O], initially zero. I and O are the input and output widths of fc1 or fc2.
    Checkpoint keys are the same as for adapters of sequential experts. Adapters of linear layers are in lora.py.
    """

    def __init__(
        self, shard: ExpertShard, num_local_experts: int, *, config: TransformerConfig, sizes: tuple[int, int]
    ) -> None:
        """Allocates A and B; sizes: I and O, which is 2F for a gated fc1.

        Raises ValueError if experts are split over ranks.
        """
        super().__init__(config)
        require_whole_experts(shard.num_parts)
        rank, self.scale = rank_and_scale(config)
        self.shard, self.num_local_experts, self.sizes, self.rank = shard, num_local_experts, sizes, rank
        self.lora_a = empty_parameter(num_local_experts, sizes[0], rank, config=config)
        initialize_weight(self.lora_a, init_of_a(sizes[0]), config=config)
        self.lora_b = zero_parameter(num_local_experts, rank, sizes[1], config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """Returns the init method of each parameter by name."""
        return {"lora_a": init_of_a(self.sizes[0]), "lora_b": ConstantInit(0)}

    def pieces(self, key: str, halves: tuple[str, ...]) -> dict[str, list[LogicalPiece]]:
        """Returns this rank's pieces of the checkpointed tensors, stored as [output, input]: A [E, r, I], B [E, O, r].

        key: the linear layer's name with a trailing dot. halves: suffixes of B, which is stored as one tensor per
        suffix.
        """
        (inputs, outputs), rank, experts = self.sizes, self.rank, self.num_local_experts
        all_experts, first = self.shard.num_experts, self.shard.first_expert
        width = outputs // len(halves)
        lora_a = LogicalPiece(
            key + "lora_a",
            (experts, rank, inputs),
            (inputs * rank, 1, rank),
            0,
            (all_experts, rank, inputs),
            (first, 0, 0),
        )
        lora_b = [
            LogicalPiece(
                key + "lora_b" + half,
                (experts, width, rank),
                (rank * outputs, 1, outputs),
                index * width,
                (all_experts, width, rank),
                (first, 0, 0),
            )
            for index, half in enumerate(halves)
        ]
        return {"lora_a": [lora_a], "lora_b": lora_b}

    def weight_matrices(self) -> dict[str, list[MatrixWindow]]:
        """Returns the windows of each expert's A and B, which are stored transposed."""
        (inputs, outputs), rank = self.sizes, self.rank
        experts = range(self.num_local_experts)
        return {
            "lora_a": [MatrixWindow((rank, inputs), (1, rank), index * inputs * rank) for index in experts],
            "lora_b": [MatrixWindow((outputs, rank), (1, outputs), index * rank * outputs) for index in experts],
        }


def require_name(activation: GatedActivation) -> None:
    """Raises ValueError for an activation without a name, which has no kernel for the live rows of a static buffer."""
    if activation.form is None:
        names = [name for name, known in ACTIVATIONS.items() if known.function is not None]
        raise ValueError(
            f"activation_func is {activation.function} with gated_linear_unit {activation.is_gated}: with "
            f"moe_expert_rank_capacity_factor it must be one of {', '.join(names)}"
        )
