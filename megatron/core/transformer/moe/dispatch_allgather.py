"""Dispatch for experts that are not split over ranks: a permutation of this rank's tokens, no communication."""

from torch import Tensor

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.moe.capacity import build_row_order
from megatron.core.transformer.moe.dispatch import DispatchedTokens
from megatron.core.transformer.moe.permutation import (
    PermutationMap,
    permute_probs,
    permute_tokens,
    unpermute_tokens,
)
from megatron.core.transformer.transformer_config import TransformerConfig


class MoEAllGatherTokenDispatcher:
    """Sorts tokens by expert; with an expert-parallel group of one rank there is nothing to gather."""

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        *,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        assert config.num_moe_experts is not None
        if num_local_experts != config.num_moe_experts:
            raise ValueError(
                f"num_local_experts is {num_local_experts}: must be num_moe_experts ({config.num_moe_experts}) "
                "while experts are not split over ranks"
            )
        # Megatron's scripts pass the settings to every dispatcher: how many tokens an expert takes is one of them.
        self.row_order = build_row_order(config, config.num_moe_experts)

    def dispatch(
        self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor
    ) -> tuple[DispatchedTokens, Tensor, PermutationMap]:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64.
        Returns the rows in expert order, tokens_per_expert [E], int64, on the device, and what combine needs.
        """
        permutation, tokens_per_expert = self.row_order(probs, expert_indices)
        rows = DispatchedTokens(permute_tokens(tokens, permutation), permute_probs(probs, permutation))
        return rows, tokens_per_expert, permutation

    def combine(self, rows: Tensor, metadata: PermutationMap) -> Tensor:
        """rows: [R, H], any float dtype, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        return unpermute_tokens(rows, metadata)
