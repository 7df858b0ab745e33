"""Dispatch by the package deep_ep (DeepEP 1.0.0): a token goes to each rank once, however many experts it has there.

What came lies in expert order in the same buffers of a fixed size as behind the other static dispatchers. But how many
tokens come is a shape in deep_ep, so that the host waits for that number once a layer. No GPU has run it yet.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import ProcessGroupCollection, group_size
from megatron.core.transformer.moe.dispatch import Dispatched
from megatron.core.transformer.moe.dispatch_alltoall import to_every_shard
from megatron.core.transformer.moe.dispatch_static import MoEStaticTokenDispatcher, StaticRows
from megatron.core.transformer.transformer_config import TransformerConfig


@dataclass(frozen=True)
class DeepEPReceived:
    """Tokens that came, [N, H], the weights of their choices, [N, K], fp32, and their rows in this rank's buffer.

    handle: of deep_ep, for the way back. num_tokens: T, of each rank.
    """

    tokens: Tensor
    weights: Tensor
    rows: StaticRows
    handle: Any
    num_tokens: int


class MoEDeepEPTokenDispatcher(MoEStaticTokenDispatcher):
    """deep_ep sends tokens there and, summed over their experts on each rank, back."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        row_alignment: int = 1,
    ) -> None:
        """row_alignment: rows of zeros fill up each expert's to a multiple of this. Collective for a model's first."""
        super().__init__(
            num_local_experts,
            local_expert_indices,
            config=config,
            pg_collection=pg_collection,
            row_alignment=row_alignment,
        )
        self.buffer = deep_ep_buffer(self.group, config.hidden_size * torch.bfloat16.itemsize)

    def begin_dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> DeepEPReceived:
        """tokens: [T, H], bf16; probs: [T, K], float; expert_indices: [T, K], int64."""
        budget, num_experts = self.budget, len(self.experts)
        probs, expert_indices = to_every_shard(
            probs, expert_indices, num_local_experts=num_experts, num_shards=budget.num_shards
        )
        # The package takes weights in fp32 alone.
        sent = _Sent(
            *_Send.apply(
                tokens.contiguous(),
                probs.float().contiguous(),
                expert_indices.contiguous(),
                self.buffer,
                budget.num_ranks * num_experts,
            )
        )
        rows = self.by_expert(sent.experts, num_tokens=len(tokens))
        return DeepEPReceived(sent.tokens, sent.weights.to(probs.dtype), rows, sent.handle, len(tokens))

    def finish_dispatch(self, begun: DeepEPReceived) -> Dispatched:
        """The rows of this rank's experts [C, H], rows of each expert [e], int64, on the device, and metadata."""
        order = begun.rows.order
        demand = self.budget.demand_on_rank(order.rows_needed, begun.num_tokens)
        return Dispatched(begun.rows.take(begun.tokens, begun.weights), order.rows_per_group, begun, demand)

    def combine(self, rows: Tensor, metadata: DeepEPReceived) -> Tensor:
        """rows: [C, H], bf16, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        return _Return.apply(metadata.rows.give_back(rows), self.buffer, metadata.handle)


# Each costs GPU memory: the layers of a model, which have the same ranks and width, share the one of the last call. It
# goes with the last of them, after a call for others.
@functools.lru_cache(maxsize=1)
def deep_ep_buffer(group: ProcessGroup, hidden_bytes: int) -> Any:
    """deep_ep's buffers of `group` for tokens of so many bytes. Collective when it makes them.

    Raises ValueError for a number of ranks that deep_ep has no settings for, and where it cannot be imported.
    """
    try:
        import deep_ep
    except ImportError as error:
        raise ValueError(
            f"moe_flex_dispatcher_backend is deepep, but its package deep_ep cannot be imported ({error}): give "
            "--moe-token-dispatcher-type alltoall"
        ) from error

    num_ranks = group_size(group)
    try:
        configs = deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)
    except AssertionError as error:
        raise ValueError(
            f"moe_flex_dispatcher_backend is deepep with {num_ranks} ranks of experts: {error}; give another "
            "expert_model_parallel_size, or --moe-token-dispatcher-type alltoall"
        ) from error
    return deep_ep.Buffer(
        group,
        max(config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks) for config in configs),
    )


class _Sent(NamedTuple):
    """What came. experts: from this rank's first, -1 for those of others."""

    tokens: Tensor
    weights: Tensor
    experts: Tensor
    handle: Any


class _Send(torch.autograd.Function):
    """Forward sends tokens with their weights and choices; backward sums both gradients where the tokens came from."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, experts: Tensor, buffer: Any, num_experts: int) -> _Sent:
        sent = _send_sync(buffer, tokens, weights=weights, experts=experts, num_experts=num_experts)
        ctx.buffer, ctx.handle = buffer, sent.handle
        ctx.mark_non_differentiable(sent.experts)
        return sent

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, weights_grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tokens_grad, weights_grad, _ = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=weights_grad.contiguous()
        )
        return tokens_grad, weights_grad, None, None, None


class _Return(torch.autograd.Function):
    """Forward sums rows where the tokens came from; backward sends the sum's gradient to each of them."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined: Tensor = buffer.combine(rows.contiguous(), handle)[0]
        return combined

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


def _send_sync(buffer: Any, tokens: Tensor, *, weights: Tensor, experts: Tensor, num_experts: int) -> _Sent:
    """tokens: [T, H], bf16; weights: [T, K], fp32; experts: [T, K], int64, over all ranks. Returns N tokens.

    NOTE: deep_ep lets the host wait for N.
    """
    per_rank, per_rdma_rank, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(experts, num_experts)
    received, received_experts, received_weights, _, handle, _ = buffer.dispatch(
        tokens,
        topk_idx=experts,
        topk_weights=weights,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_rdma_rank,
        is_token_in_rank=is_in_rank,
        num_tokens_per_expert=per_expert,
    )
    return _Sent(received, received_weights, received_experts, handle)
