"""Low-rank adapters of grouped experts: those of all experts of a rank in two stacked matrices.

What adapters are is lora.py's, which linear layers have them lora_specs.py's. Shapes: e experts; I and O widths of the
rows and of what comes out; r the adapters' width.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.logical import LogicalPiece
from megatron.core.model_parallel_config import ConstantInit, InitMethod
from megatron.core.tensor_parallel.layers import empty_parameter, initialize_weight, zero_parameter
from megatron.core.transformer.lora import init_of_a, rank_and_scale
from megatron.core.transformer.lora_config import require_whole_experts
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.expert_shard import ExpertShard
from megatron.core.transformer.moe.grouped_gemm import grouped_gemm
from megatron.core.transformer.moe.paged_stash import add_low_rank
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.weight_matrices import MatrixWindow


@dataclass
class GroupedMLPSubmodules:
    """Specs of the adapters beside the weights of both products; None: without."""

    linear_fc1: Any = None
    linear_fc2: Any = None


class ExpertAdapter(MegatronModule):
    """alpha / r B A x of each expert, stored as sequential experts' adapters are.

    lora_a: [e, I, r], random; lora_b: [e, r, O], zero at first.
    """

    def __init__(
        self, shard: ExpertShard, num_local_experts: int, *, config: TransformerConfig, sizes: tuple[int, int]
    ) -> None:
        """sizes: I and O; of a gated fc1 O is gate over up. Raises ValueError for experts in parts."""
        super().__init__(config)
        require_whole_experts(shard.num_parts)
        rank, self.scale = rank_and_scale(config)
        self.shard, self.num_local_experts, self.sizes, self.rank = shard, num_local_experts, sizes, rank
        self.lora_a = empty_parameter(num_local_experts, sizes[0], rank, config=config)
        initialize_weight(self.lora_a, init_of_a(sizes[0]), config=config)
        self.lora_b = zero_parameter(num_local_experts, rank, sizes[1], config=config)

    def init_methods(self) -> dict[str, InitMethod]:
        """How the parameters start, by name."""
        return {"lora_a": init_of_a(self.sizes[0]), "lora_b": ConstantInit(0)}

    def forward(self, product: Tensor, rows: Tensor, *, offsets: Tensor) -> Tensor:
        """product: [R, O], what the weights made of rows, [R, I], both parameter dtype; offsets: [e], int32, on the
        device: where each expert's rows end. Adds to the product in place and returns it.
        """
        low = grouped_gemm(rows, self.lora_a, offsets=offsets)  # [R, r]
        return add_low_rank(product, low, weight=self.lora_b, offsets=offsets, scale=self.scale)

    def pieces(self, key: str, halves: tuple[str, ...]) -> dict[str, list[LogicalPiece]]:
        """The stacked tensors of all experts, output before input: A [E, r, I], B [E, O, r], or one B for each half.

        key: the linear layer's name with a trailing dot.
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
        """Each expert's A and B, which lie transposed."""
        (inputs, outputs), rank = self.sizes, self.rank
        experts = range(self.num_local_experts)
        return {
            "lora_a": [MatrixWindow((rank, inputs), (1, rank), index * inputs * rank) for index in experts],
            "lora_b": [MatrixWindow((outputs, rank), (1, outputs), index * rank * outputs) for index in experts],
        }
