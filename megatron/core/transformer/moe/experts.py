"""The experts of one rank: in one grouped matrix product, or one after the other; rows arrive sorted by expert."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.dist_checkpointing.logical import LogicalPiece, model_logical_pieces
from megatron.core.model_parallel_config import ConstantInit, InitMethod
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight, zero_parameter
from megatron.core.tensor_parallel.param_attributes import mark_expert, set_tensor_model_parallel_attributes
from megatron.core.transformer.mlp import MLP, MLPSubmodules, build_activation
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.expert_adapters import ExpertAdapter, GroupedMLPSubmodules
from megatron.core.transformer.moe.expert_shard import ExpertShard
from megatron.core.transformer.moe.grouped_gemm import grouped_gemm, row_offsets
from megatron.core.transformer.moe.paged_stash import StashGroup, add_expert_bias
from megatron.core.transformer.moe.static_experts import ExpertParameters, LowRank, static_activation, static_experts
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from megatron.core.weight_matrices import MatrixWindow


class GroupedMLP(MegatronModule):
    """All experts of a rank at once: fc1 grouped product, weighted activation, fc2 grouped product.

    Backward keeps the rows [R, H], gate_up [R, 2F], the weights [R] and the activations [R, F]. bias1: [e, 2F], bias2:
    [e, H], where linear layers have biases; a row's share of bias2 is its weight. linear_fc1, linear_fc2: the adapters
    of both products, or None.
    """

    bias1: nn.Parameter | None
    bias2: nn.Parameter | None
    linear_fc1: ExpertAdapter | None
    linear_fc2: ExpertAdapter | None

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        submodules: GroupedMLPSubmodules | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        assert config.moe_ffn_hidden_size is not None
        self.shard = ExpertShard.of(pg_collection or existing_process_groups(), num_local_experts)
        self.num_local_experts = num_local_experts
        self.ffn_hidden_size = divide(config.moe_ffn_hidden_size, self.shard.num_parts)
        self.fc1_width = self.ffn_hidden_size * (2 if config.gated_linear_unit else 1)
        self.activation = build_activation(config)
        is_static = config.moe_expert_rank_capacity_factor is not None
        self.static_activation = static_activation(config) if is_static else None
        hidden = config.hidden_size
        # Megatron's shapes; the memory is that of [e, H, 2F] and [e, F, H].
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
        specs = submodules or GroupedMLPSubmodules()
        self.linear_fc1 = self._adapter(specs.linear_fc1, (hidden, self.fc1_width))
        self.linear_fc2 = self._adapter(specs.linear_fc2, (self.ffn_hidden_size, hidden))
        mark_experts(self)
        for name, init_method in self.init_methods().items():
            initialize_weight(self.get_parameter(name), init_method, config=config)

    def _adapter(self, spec: Any, sizes: tuple[int, int]) -> Any:
        if spec is None:
            return None
        return build_module(spec, self.shard, self.num_local_experts, config=self.config, sizes=sizes)

    def init_methods(self) -> dict[str, InitMethod]:
        """How the parameters start, by name."""
        assert self.config.init_method is not None and self.config.output_layer_init_method is not None
        methods = {"weight1": self.config.init_method, "weight2": self.config.output_layer_init_method}
        return methods | ({} if self.bias1 is None else dict.fromkeys(("bias1", "bias2"), ConstantInit(0)))

    def forward(
        self,
        permuted_local_hidden_states: Tensor,
        tokens_per_expert: Tensor,
        permuted_probs: Tensor,
        *,
        group: StashGroup | None = None,
    ) -> tuple[Tensor, None]:
        """permuted_local_hidden_states: [R, H], parameter dtype; tokens_per_expert: [e], int64, on the device;
        permuted_probs: [R], fp32 or parameter dtype. group: where the rows of a buffer of fixed size wait for backward.
        Returns [R, H], parameter dtype, rows weighted, and no bias.
        """
        offsets = row_offsets(tokens_per_expert)
        if self.static_activation is not None:
            output = static_experts(
                permuted_local_hidden_states,
                permuted_probs,
                parameters=self._parameters_of_pass(),
                offsets=offsets,
                activation=self.static_activation,
                parts=self.parts,
                group=group,
            )
            return output, None
        # [R, H] -> [R, 2F] -> [R, F] -> [R, H]; the weight is applied where rows are narrowest to keep.
        gate_up = self.parts.expert_fc1(self._fc1, permuted_local_hidden_states, offsets=offsets)
        act, release = self.parts.moe_act(self._weighted_activation, gate_up, permuted_probs.unsqueeze(-1))
        output = grouped_gemm(act, self.weight2, offsets=offsets)
        if self.bias2 is not None:
            share = 1 / self.shard.num_parts
            output = add_expert_bias(output, self.bias2, offsets=offsets, scale=permuted_probs, share=share)
        if self.linear_fc2 is not None:
            output = self.linear_fc2(output, act, offsets=offsets)
        release(output)
        return output, None

    def _fc1(self, rows: Tensor, *, offsets: Tensor) -> Tensor:
        product = grouped_gemm(rows, self.weight1, offsets=offsets)
        if self.bias1 is not None:
            product = add_expert_bias(product, self.bias1, offsets=offsets)
        return product if self.linear_fc1 is None else self.linear_fc1(product, rows, offsets=offsets)

    def _parameters_of_pass(self) -> ExpertParameters:
        # Each part adds its share of bias2: whoever takes the rows back sums the parts.
        low_ranks = (
            None if one is None else LowRank(one.lora_a, one.lora_b, one.scale)
            for one in (self.linear_fc1, self.linear_fc2)
        )
        return ExpertParameters(
            self.weight1, self.weight2, self.bias1, self.bias2, 1 / self.shard.num_parts, *low_ranks
        )

    def _weighted_activation(self, gate_up: Tensor, weights: Tensor) -> Tensor:
        return self.activation(gate_up, bias=None, scale=weights)

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """The stacked tensors of all experts: fc1 [E, F, H] (gate and up apart where gated), fc2 [E, H, F]; biases
        likewise without the input, and adapters.
        """
        experts, hidden, ffn = self.num_local_experts, self.config.hidden_size, self.ffn_hidden_size
        all_experts, first = self.shard.num_experts, self.shard.first_expert
        all_ffn, first_ffn = ffn * self.shard.num_parts, ffn * self.shard.part
        halves = (".gate", ".up") if self.config.gated_linear_unit else ("",)
        # Stored as Hugging Face and the dense layers have it, output before input: a transposed view of ours.
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
        """Each expert's fc1 (gate over up) and fc2, which lie transposed."""
        hidden, ffn, width = self.config.hidden_size, self.ffn_hidden_size, self.fc1_width
        experts = range(self.num_local_experts)
        return {
            "weight1": [MatrixWindow((width, hidden), (1, width), index * hidden * width) for index in experts],
            "weight2": [MatrixWindow((hidden, ffn), (1, hidden), index * ffn * hidden) for index in experts],
        }


class SequentialMLP(MegatronModule):
    """One MLP an expert, run one after the other: the reference for GroupedMLP."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config)
        self.shard = ExpertShard.of(pg_collection or existing_process_groups(), num_local_experts)
        self.num_local_experts = num_local_experts
        mlp = partial(MLP, config, submodules, is_expert=True, pg_collection=pg_collection)
        experts = [mlp(ffn_hidden_size=config.moe_ffn_hidden_size) for _ in range(num_local_experts)]
        self.local_experts = nn.ModuleList(experts)
        mark_experts(self)
        for bias in (expert.linear_fc2.bias for expert in experts):
            if bias is not None and self.shard.num_parts > 1:
                # All ranks of an expert hold the bias whole and add a share: they need the gradient of all of it.
                bias.register_hook(partial(torch.mul, self.shard.num_parts))

    def forward(
        self, permuted_local_hidden_states: Tensor, tokens_per_expert: Tensor, permuted_probs: Tensor
    ) -> tuple[Tensor, None]:
        """permuted_local_hidden_states: [R, H], parameter dtype; tokens_per_expert: [e], int64, on the device;
        permuted_probs: [R], fp32 or parameter dtype. Returns [R, H], parameter dtype, rows weighted, and no bias.
        """
        sizes = _counts_sync(tokens_per_expert)
        # An expert without tokens runs on no rows: its parameters still get gradients, of zeros.
        inputs, weights = permuted_local_hidden_states.split(sizes), permuted_probs.split(sizes)
        outputs = []
        for expert, rows, scale in zip(self.local_experts, inputs, weights, strict=True):
            output, bias = expert(rows, scale)
            # Each part adds its share: whoever takes the rows back sums the parts.
            outputs.append(output if bias is None else output + bias / self.shard.num_parts)
        return torch.cat(outputs), None

    def logical_pieces(self, prefix: str) -> dict[str, list[LogicalPiece]]:
        """Each expert's part of the tensors that GroupedMLP stores; biases likewise."""
        return {
            f"local_experts.{index}.{name}": [self._of_expert(part, index, prefix=prefix) for part in parts]
            for index, expert in enumerate(self.local_experts)
            for name, parts in model_logical_pieces(expert).items()
        }

    def _of_expert(self, part: LogicalPiece, index: int, *, prefix: str) -> LogicalPiece:
        """One expert's tensor as a row of all experts'."""
        return LogicalPiece(
            key=prefix + part.key,
            shape=(1, *part.shape),
            stride=(math.prod(part.shape), *part.stride),
            storage_offset=part.storage_offset,
            global_shape=(self.shard.num_experts, *part.global_shape),
            global_offset=(self.shard.first_expert + index, *part.global_offset),
        )


def mark_experts(experts: nn.Module) -> None:
    """Writes on every parameter that its gradient is summed over the ranks of the same experts alone."""
    for parameter in experts.parameters():
        mark_expert(parameter)


_FC1, _FC2 = "linear_fc1.weight", "linear_fc2.weight"
_BIAS1, _BIAS2 = "linear_fc1.bias", "linear_fc2.bias"


def _counts_sync(tokens_per_expert: Tensor) -> list[int]:
    """Rows of each expert, on the host. NOTE: waits for the device; only the sequential reference does."""
    counts: list[Any] = tokens_per_expert.tolist()
    return counts
