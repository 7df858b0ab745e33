"""Dispatchers of --moe-token-dispatcher-type flex: libraries that move tokens in their own way.

First the choice of a back end and its requirements on the machine, then the back ends: DeepEP, and torch's symmetric
memory. Both fill the static buffers of dispatch_static.py. Neither has run on a GPU yet.

T tokens of this rank, N tokens that this rank receives, H hidden, K choices of a token, C rows of the buffer.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from megatron.core.device import default_device, is_capturing
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.transformer.moe.dispatch import Dispatched
from megatron.core.transformer.moe.dispatch_alltoall import RowsUnderWay, to_every_shard
from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAlltoAllTokenDispatcher,
    MoEStaticTokenDispatcher,
    StaticRows,
    padded_rank_rows,
)
from megatron.core.transformer.transformer_config import TransformerConfig

# The device of a run that is planned without memory, for another machine; see without_memory.
_PLANNED = "meta"


@dataclass(frozen=True)
class FlexBackend:
    """A library that moves tokens.

    dispatcher: builds its dispatcher; None for a back end that is not supported. missing: describes the requirements of
    these settings that this machine does not meet; empty if it meets all.
    """

    dispatcher: Callable[..., MoEStaticTokenDispatcher] | None
    missing: Callable[[TransformerConfig], list[str]]


def require_flex_backend(config: TransformerConfig) -> None:
    """Raises ValueError, identically on every rank, where this machine lacks the back end that the settings select."""
    if config.num_moe_experts is None or config.moe_token_dispatcher_type != "flex":
        return
    missing = FLEX_BACKENDS[config.moe_flex_dispatcher_backend].missing(config)
    if missing:
        raise ValueError(
            f"moe_token_dispatcher_type is flex with moe_flex_dispatcher_backend {config.moe_flex_dispatcher_backend}, "
            f"which needs {', '.join(missing)}: give --moe-token-dispatcher-type alltoall, which needs none of this"
        )


def build_flex_dispatcher(
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection | None = None,
) -> MoEStaticTokenDispatcher:
    """Builds the dispatcher of the selected back end, which require_flex_backend has accepted. Collective.

    On the device without memory, where no library runs, torch's all-to-all fills the same buffers.
    """
    build: Callable[..., MoEStaticTokenDispatcher] | None = FLEX_BACKENDS[config.moe_flex_dispatcher_backend].dispatcher
    assert build is not None, "require_flex_backend refuses back ends without a dispatcher"
    if default_device().type == _PLANNED:
        build = MoEStaticAlltoAllTokenDispatcher
    return build(num_local_experts, local_expert_indices, config=config, pg_collection=pg_collection)


def _missing_for_symm_mem(config: TransformerConfig) -> list[str]:
    device = default_device()
    return [] if device.type in ("cuda", _PLANNED) else [f"a CUDA device (here is {device.type})"]


def _missing_for_deepep(config: TransformerConfig) -> list[str]:
    missing = _missing_for_symm_mem(config)
    if default_device().type != _PLANNED and importlib.util.find_spec("deep_ep") is None:
        missing.append("the package deep_ep (not installed)")
    if config.params_dtype is not torch.bfloat16:
        missing.append("--bf16 (it sends no other tokens)")
    if config.moe_router_dtype == "fp64":
        missing.append("--moe-router-dtype fp32 (it sends weights in fp32)")
    return missing


def _missing_for_unsupported(config: TransformerConfig) -> list[str]:
    return ["support that this version has not"]


# --- DeepEP ---


@dataclass(frozen=True)
class DeepEPReceived:
    """Received tokens [N, H], the weights of their choices [N, K], and their rows in this rank's buffer.

    handle: deep_ep's, for the way back. num_tokens: T, of each rank.
    """

    tokens: Tensor
    weights: Tensor
    rows: StaticRows
    handle: Any
    num_tokens: int


class MoEDeepEPTokenDispatcher(MoEStaticTokenDispatcher):
    """Dispatches by the package deep_ep (DeepEP 1.0.0), which sends a token to each rank once.

    A token is sent to a rank once, even if several of its experts are there, and each rank sums the results of its
    experts before it sends them back. Received tokens fill the static buffer in expert order. In deep_ep the number of
    received tokens is a shape, for which the host waits once per layer.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        *,
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        row_alignment: int = 1,
    ) -> None:
        """row_alignment: see [Note: row alignment] in dispatch_static.py.

        Collective for the first layer of a model, which allocates the buffer.
        """
        super().__init__(
            num_local_experts,
            local_expert_indices,
            config=config,
            pg_collection=pg_collection,
            row_alignment=row_alignment,
        )
        self.buffer = deep_ep_buffer(self.group, config.hidden_size * torch.bfloat16.itemsize)

    def send(self, tokens: Tensor, preprocessed: tuple[Tensor, Tensor]) -> DeepEPReceived:
        """Sends tokens: [T, H], bf16; preprocessed: probs [T, K], float, and expert_indices [T, K], int64."""
        budget, num_experts = self.budget, len(self.experts)
        probs, expert_indices = to_every_shard(
            *preprocessed, num_local_experts=num_experts, num_shards=budget.num_shards
        )
        # deep_ep supports fp32 weights only.
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

    def finish_dispatch(self, sent: DeepEPReceived) -> Dispatched:
        """Returns the rows of this rank's experts [C, H], their numbers [e], int64, on the device, and metadata."""
        order = sent.rows.order
        demand = self.budget.demand_on_rank(order.rows_needed, sent.num_tokens)
        return Dispatched(sent.rows.take(sent.tokens, sent.weights), order.rows_per_group, sent, demand)

    def combine(self, rows: Tensor, metadata: DeepEPReceived) -> Tensor:
        """rows: [C, H], bf16, in expert order and weighted -> [T, H]: the sum of each token's rows."""
        return _Return.apply(metadata.rows.give_back(rows), self.buffer, metadata.handle)


# A buffer occupies GPU memory, so the layers of a model, which have the same ranks and width, share one. The cache
# holds the last one. A call for another group or width drops it, and it is freed with the last layer that uses it.
@functools.lru_cache(maxsize=1)
def deep_ep_buffer(group: ProcessGroup, hidden_bytes: int) -> Any:
    """Returns deep_ep's buffer of `group` for tokens of hidden_bytes bytes. Collective when it allocates one.

    Raises ValueError for a number of ranks without settings in deep_ep, and where deep_ep cannot be imported.
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
    """Received tokens; experts: [N, K], where 0 is this rank's first expert and -1 an expert of another rank."""

    tokens: Tensor
    weights: Tensor
    experts: Tensor
    handle: Any


class _Send(torch.autograd.Function):
    """Sends tokens with their weights and choices; backward sends both gradients back and sums them for each token."""

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
    """Sends results back and sums them for each token; backward sends the gradient of the sum to each rank."""

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
    """Sends tokens: [T, H], bf16, weights: [T, K], fp32, and experts: [T, K], int64, over all ranks; returns N tokens.

    NOTE: deep_ep waits on the host for N.
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


# --- torch's symmetric memory ---


class SymmetricTransport:
    """A RowTransport over memory that the GPUs of one machine can read directly, in place of torch's all-to-all.

    Each rank copies its rows into its buffer, and the other ranks copy their part from there. All layers share the
    buffer that torch allocates for `group`, since rows are in it only during `launch`. Its two barriers are kernels of
    the current stream, so that the host does not wait. Received rows are copies, which autograd may save for backward.

    A larger buffer replaces the old one, whose memory is freed, but a CUDA graph goes on using the old one. So once a
    graph has been captured, only `reserve` makes the buffer grow.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._num_bytes = 0  # of the buffer, as far as this layer has asked for it
        self._is_in_graphs = False

    def launch(self, rows: Tensor, *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Sends rows: [ranks x P, *], any dtype, P to each rank, through the shared buffer. Collective.

        Before a capture, the buffer grows for a larger size than any before, which synchronizes the hosts of the ranks.
        Raises RuntimeError for a larger size during a capture or after one.
        """
        assert send is None and receive is None, "symmetric memory carries the same number of rows for each rank"
        received = rows.new_empty(rows.shape)
        part = rows.unflatten(0, (group_size(self.group), -1))[0]
        if part.numel():
            self._check_size(rows.nbytes, is_captured=is_capturing(rows.device))
            buffer = self.workspace(self._num_bytes)
            buffer.get_buffer(buffer.rank, rows.shape, rows.dtype).copy_(rows)
            # All ranks have written their rows.
            buffer.barrier()
            here = buffer.rank * part.numel()
            for sender, target in enumerate(received.chunk(group_size(self.group))):
                target.copy_(buffer.get_buffer(sender, part.shape, rows.dtype, here))
            # All ranks have read their rows. Without this, the next exchange could overwrite rows that are being read.
            buffer.barrier()
        return RowsUnderWay(rows, received)

    def reserve(self, num_bytes: int) -> None:
        """Makes the buffer large enough for exchanges of num_bytes on each rank. Collective.

        If that is more than before, the caller has dropped all graphs.
        """
        if num_bytes > self._num_bytes:
            self._is_in_graphs, self._num_bytes = False, num_bytes
            self.workspace(num_bytes)

    def workspace(self, num_bytes: int) -> Any:
        """Returns the group's buffer with at least num_bytes bytes on each rank. Collective when it grows.

        Raises RuntimeError where the GPUs of the group cannot read each other's memory.
        """
        return symmetric_memory.get_symm_mem_workspace(self.group.group_name, num_bytes)

    def _check_size(self, num_bytes: int, *, is_captured: bool) -> None:
        """Grows `_num_bytes`; raises RuntimeError where a graph uses the buffer that is there, or is about to."""
        if num_bytes > self._num_bytes and (is_captured or self._is_in_graphs):
            raise RuntimeError(
                f"moe_flex_dispatcher_backend is symm_mem: an exchange of {num_bytes} bytes needs a larger buffer than "
                f"the {self._num_bytes} bytes that CUDA graphs use, which cannot grow while they exist: keep to "
                "microbatches of at most the tokens of seq_length x micro_batch_size, or set "
                "--moe-token-dispatcher-type alltoall or --cuda-graph-impl none"
            )
        self._num_bytes = max(self._num_bytes, num_bytes)
        self._is_in_graphs = self._is_in_graphs or is_captured


def build_symmetric_dispatcher(
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    *,
    config: TransformerConfig,
    pg_collection: ProcessGroupCollection | None = None,
    row_alignment: int = 1,
) -> MoEStaticAlltoAllTokenDispatcher:
    """Builds the static all-to-all dispatcher over symmetric memory. Collective.

    Raises ValueError where the GPUs of the group cannot read each other's memory.
    """
    groups = pg_collection or existing_process_groups()
    transport = SymmetricTransport(or_alone(groups.tp_ep))
    try:
        transport.workspace(1)
    except RuntimeError as error:
        raise ValueError(
            f"moe_flex_dispatcher_backend is symm_mem, but the GPUs of the experts share no memory ({error}): give "
            "--moe-token-dispatcher-type alltoall"
        ) from error
    return MoEStaticAlltoAllTokenDispatcher(
        num_local_experts,
        local_expert_indices,
        config=config,
        pg_collection=pg_collection,
        row_alignment=row_alignment,
        transport=transport,
        # The only layout with the same number of rows for each rank.
        layout=padded_rank_rows,
    )


# --- The registry ---

# Back ends by the value of --moe-flex-dispatcher-backend.
FLEX_BACKENDS = {
    "deepep": FlexBackend(MoEDeepEPTokenDispatcher, _missing_for_deepep),
    "hybridep": FlexBackend(None, _missing_for_unsupported),
    "ncclep": FlexBackend(None, _missing_for_unsupported),
    "symm_mem": FlexBackend(build_symmetric_dispatcher, _missing_for_symm_mem),
}
