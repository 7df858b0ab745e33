"""Dispatchers for --moe-token-dispatcher-type flex, which move tokens with a communication library.

The choice of a backend and its hardware requirements come first, followed by the backends: DeepEP, and torch's
symmetric memory. Both fill the static buffers of dispatch_static.py. On GPUs, symmetric memory was tested with one rank
and DeepEP not yet; see docs/gpu_results.md.

T tokens of this rank, N tokens that this rank receives, H hidden, K choices of a token, C rows of the buffer.
"""

import functools
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.autograd import PlainFunction, first_order
from megatron.core.device import default_device, is_capturing
from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_size, or_alone
from megatron.core.transformer.moe.dispatch import Dispatch
from megatron.core.transformer.moe.dispatch_alltoall import RowsUnderWay, require_own_stream, to_every_shard
from megatron.core.transformer.moe.dispatch_static import (
    MoEStaticAlltoAllTokenDispatcher,
    MoEStaticTokenDispatcher,
    padded_rank_rows,
    require_probs,
)
from megatron.core.transformer.moe.static_rows import StaticOrder
from megatron.core.transformer.transformer_config import TransformerConfig

# Device of a run that is planned for a different machine, without memory; see without_memory.
_PLANNED = "meta"


@dataclass(frozen=True)
class FlexBackend:
    """Communication library that moves tokens.

    dispatcher: None for an unsupported backend. missing: lists the requirements that this machine or the given settings
    do not meet.
    """

    dispatcher: "type[MoEFlexTokenDispatcher] | None"
    missing: Callable[[TransformerConfig], list[str]]


def require_flex_backend(config: TransformerConfig, backend: str | None = None) -> None:
    """Raises ValueError, identically on every rank, if this machine or the settings do not support a flex backend.

    backend: name of the backend to check. None checks moe_flex_dispatcher_backend if moe_token_dispatcher_type is flex,
    and nothing for other types.
    """
    if backend is None:
        if config.num_moe_experts is None or config.moe_token_dispatcher_type != "flex":
            return
        backend = config.moe_flex_dispatcher_backend
    missing = FLEX_BACKENDS[backend].missing(config)
    if missing:
        raise ValueError(
            f"moe_token_dispatcher_type is flex with moe_flex_dispatcher_backend {backend}, which requires "
            f"{', '.join(missing)}: use --moe-token-dispatcher-type alltoall, which has no such requirements"
        )


class MoEFlexTokenDispatcher(MoEStaticTokenDispatcher):
    """Base class of the flex dispatchers. Its constructor returns an instance of the selected backend's subclass.

    On the meta device, where no library runs, torch's all-to-all fills the same buffers. The buffers have a fixed size,
    which a routing may exceed. Construction is collective.
    """

    def __new__(
        cls,
        num_local_experts: int = 0,
        local_expert_indices: Sequence[int] = (),
        config: TransformerConfig | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **settings: Any,
    ) -> "MoEFlexTokenDispatcher":
        """Selects the subclass; raises ValueError if the settings or this machine do not support the backend."""
        # A copy made by deepcopy or pickle already has its subclass and passes no arguments.
        if cls is MoEFlexTokenDispatcher and config is not None:
            if config.moe_expert_rank_capacity_factor is None:
                raise ValueError(
                    "moe_expert_rank_capacity_factor is None: must be set for dispatchers of type flex, whose buffers "
                    "have a fixed size"
                )
            require_flex_backend(config, config.moe_flex_dispatcher_backend)
            cls = FLEX_BACKENDS[config.moe_flex_dispatcher_backend].dispatcher or cls
            if default_device().type == _PLANNED:
                cls = MoEPlannedTokenDispatcher
        return super().__new__(cls)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Prepares tokens for sending; hidden_states: [*, H], any float dtype. See MoETokenDispatcher."""
        return super().dispatch_preprocess(hidden_states, routing_map, probs)

    @abstractmethod
    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Sends the result of dispatch_preprocess; async_finish, allocate_on_comm_stream: must be True. Collective.

        hidden_states: [*, H], any float dtype; probs: float. Returns the received rows and weights. Raises ValueError
        if probs is None.
        """

    @abstractmethod
    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Sends back the result of combine_preprocess; the other arguments must be True. Collective.

        hidden_states: [*, H], any float dtype. Returns the received rows.
        """


def _missing_for_symm_mem(config: TransformerConfig) -> list[str]:
    device = default_device()
    return [] if device.type in ("cuda", _PLANNED) else [f"a CUDA device (the current device is {device.type})"]


def _missing_for_deepep(config: TransformerConfig) -> list[str]:
    missing = _missing_for_symm_mem(config)
    if default_device().type != _PLANNED and importlib.util.find_spec("deep_ep") is None:
        missing.append("the package deep_ep (not installed)")
    if config.params_dtype is not torch.bfloat16:
        missing.append("--bf16 (it sends bf16 tokens only)")
    if config.moe_router_dtype == "fp64":
        missing.append("--moe-router-dtype fp32 (it sends fp32 weights only)")
    return missing


def _missing_for_unsupported(config: TransformerConfig) -> list[str]:
    return ["support that this version does not have"]


# --- DeepEP ---


@dataclass(frozen=True)
class DeepEPPassage:
    """State of one forward.

    experts: [T, K], indices of the chosen experts over all ranks, for this rank's tokens. handle: deep_ep's handle of
    the dispatch, which combine requires. order: that of the received tokens in this rank's buffer.
    """

    experts: Tensor
    num_tokens: int
    handle: Any = None
    order: StaticOrder | None = None


class MoEDeepEPTokenDispatcher(MoEFlexTokenDispatcher):
    """Dispatches with the package deep_ep (DeepEP 1.0.0).

    A token is sent to each rank at most once, even if several of its experts are there, and each rank sums the results
    of its experts before it sends them back. Received tokens fill the static buffer in expert order. In deep_ep the
    number of received tokens is a shape, so the host waits for the device once per layer.
    """

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        row_alignment: int = 1,
    ) -> None:
        """Looks up the group's communication buffer. Collective for the first layer of a model, which allocates it.

        row_alignment: see [Note: row alignment] in dispatch_static.py.
        """
        super().__init__(num_local_experts, local_expert_indices, config, pg_collection, row_alignment=row_alignment)
        self.buffer = deep_ep_buffer(self.group, config.hidden_size * torch.bfloat16.itemsize)

    def _begin(self, tokens: Tensor, ordered: tuple[Tensor, Tensor, bool], state: Dispatch) -> tuple[Tensor, Tensor]:
        probs, expert_indices, has_absent = ordered
        budget, num_experts = self.budget, len(self.experts)
        probs, experts = to_every_shard(
            probs, expert_indices, num_local_experts=num_experts, num_shards=budget.num_shards
        )
        if has_absent:
            # deep_ep's marker of a slot without an expert.
            experts = experts.masked_fill(experts >= budget.num_ranks * num_experts, -1)
        state.rows = DeepEPPassage(experts.contiguous(), len(tokens))
        return tokens, probs

    def token_dispatch(
        self,
        hidden_states: Tensor,
        probs: Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Sends tokens and their weights to the ranks of their experts. Collective.

        hidden_states: [T, H], bf16. probs: [T, K], float. Returns the N tokens that this rank receives and the weights
        of their choices, [N, H] and [N, K].
        """
        require_own_stream("MoEDeepEPTokenDispatcher.token_dispatch", async_finish, allocate_on_comm_stream)
        probs, state = require_probs(probs), self._current.state
        passage: DeepEPPassage = state.rows
        # deep_ep supports fp32 weights only.
        sent = _Sent(
            *_Send.apply(
                hidden_states.contiguous(),
                probs.float().contiguous(),
                passage.experts,
                self.buffer,
                self.budget.num_ranks * len(self.experts),
            )
        )
        state.rows = replace(
            passage, order=self.by_expert(sent.experts, num_tokens=passage.num_tokens), handle=sent.handle
        )
        self._run_shared_experts(state)
        return sent.tokens, sent.weights.to(probs.dtype)

    def order_received(self, hidden_states: Tensor) -> StaticOrder:
        """Returns the order of the received tokens in the buffer; hidden_states: [N, H], bf16."""
        state = self._current.state
        passage: DeepEPPassage = state.rows
        order = passage.order
        assert order is not None, "token_dispatch comes first"
        state.demand = self.budget.demand_on_rank(order.rows_needed, passage.num_tokens)
        return order

    def token_combine(
        self, hidden_states: Tensor, async_finish: bool = True, allocate_on_comm_stream: bool = True
    ) -> Tensor:
        """Sends results back and sums them for each token; hidden_states: [N, H], bf16. Returns [T, H]. Collective."""
        require_own_stream("MoEDeepEPTokenDispatcher.token_combine", async_finish, allocate_on_comm_stream)
        return _Return.apply(hidden_states, self.buffer, self._current.state.rows.handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Reshapes the tokens to their original shape; hidden_states: [T, H], bf16. Returns [*, H]."""
        return self._end(hidden_states, self._current.state)


# A buffer occupies GPU memory, so the layers of a model, which have the same ranks and width, share it. The cache
# contains the most recent buffer. A call for a different group or width evicts it, and it is freed with the last layer
# that uses it.
@functools.lru_cache(maxsize=1)
def deep_ep_buffer(group: ProcessGroup, hidden_bytes: int) -> Any:
    """Returns deep_ep's buffer of `group` for tokens of hidden_bytes bytes. Collective if it must be allocated.

    Raises ValueError if deep_ep has no settings for this number of ranks, or cannot be imported.
    """
    try:
        import deep_ep
    except ImportError as error:
        raise ValueError(
            f"moe_flex_dispatcher_backend is deepep, but the package deep_ep cannot be imported ({error}): use "
            "--moe-token-dispatcher-type alltoall"
        ) from error

    num_ranks = group_size(group)
    try:
        configs = deep_ep.Buffer.get_dispatch_config(num_ranks), deep_ep.Buffer.get_combine_config(num_ranks)
    except AssertionError as error:
        raise ValueError(
            f"moe_flex_dispatcher_backend is deepep with {num_ranks} expert-parallel ranks: {error}; use a different "
            "expert_model_parallel_size, or --moe-token-dispatcher-type alltoall"
        ) from error
    return deep_ep.Buffer(
        group,
        max(config.get_nvl_buffer_size_hint(hidden_bytes, num_ranks) for config in configs),
        max(config.get_rdma_buffer_size_hint(hidden_bytes, num_ranks) for config in configs),
    )


class _Sent(NamedTuple):
    """Received tokens. experts: [N, K], local expert indices, -1 for experts of other ranks."""

    tokens: Tensor
    weights: Tensor
    experts: Tensor
    handle: Any


class _Send(PlainFunction):
    """Sends tokens with their weights and choices; backward sends both gradients back and sums them for each token."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, experts: Tensor, buffer: Any, num_experts: int) -> _Sent:
        sent = _send_sync(buffer, tokens, weights=weights, experts=experts, num_experts=num_experts)
        ctx.buffer, ctx.handle = buffer, sent.handle
        ctx.mark_non_differentiable(sent.experts)
        return sent

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor, weights_grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        tokens_grad, weights_grad, _ = ctx.buffer.combine(
            grad.contiguous(), ctx.handle, topk_weights=weights_grad.contiguous()
        )
        return tokens_grad, weights_grad, None, None, None


class _Return(PlainFunction):
    """Sends results back and sums them for each token; backward sends the gradient of the sum to each rank."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, buffer: Any, handle: Any) -> Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        combined: Tensor = buffer.combine(rows.contiguous(), handle)[0]
        return combined

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0], None, None


def _send_sync(buffer: Any, tokens: Tensor, *, weights: Tensor, experts: Tensor, num_experts: int) -> _Sent:
    """Sends tokens to the ranks of their experts, and returns the N tokens that this rank receives.

    tokens: [T, H], bf16. weights: [T, K], fp32. experts: [T, K], int64, indices over all ranks. NOTE: deep_ep
    synchronizes with the host to read N.
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
    """RowTransport over memory that the GPUs of one machine can read directly, in place of torch's all-to-all.

    Each rank copies its rows into its buffer, and the other ranks read their part from it. All layers share the buffer
    that torch allocates for `group`, because it contains rows only during `launch`. The two barriers are kernels on the
    current stream, so the host does not wait. Received rows are copies, which autograd may save for backward.

    A larger buffer replaces the old one, whose memory is freed, although existing CUDA graphs still use it. After a
    graph has been captured, only `reserve` may therefore grow the buffer.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._num_bytes = 0  # bytes of the buffer that this layer has requested so far
        self._is_in_graphs = False

    def launch(self, tensors: Sequence[Tensor], *, send: list[int] | None, receive: list[int] | None) -> RowsUnderWay:
        """Sends P rows of each tensor to each rank through the shared buffer. Collective.

        tensors: [ranks x P, *], any dtype; P may differ between tensors. Before a capture, the buffer grows if
        necessary, which synchronizes the hosts of the ranks. Raises RuntimeError if it is too small during or after a
        capture.
        """
        assert send is None and receive is None, "symmetric memory requires the same number of rows for each rank"
        return RowsUnderWay(tensors, [self._exchange(rows) for rows in tensors])

    def _exchange(self, rows: Tensor) -> Tensor:
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
            # All ranks have read their rows. Without this barrier, the next exchange could overwrite rows that are
            # being read.
            buffer.barrier()
        return received

    def reserve(self, num_bytes: int) -> None:
        """Grows the buffer, if necessary, for exchanges of num_bytes bytes on each rank. Collective.

        Before the buffer grows, the caller must have dropped all graphs.
        """
        if num_bytes > self._num_bytes:
            self._is_in_graphs, self._num_bytes = False, num_bytes
            self.workspace(num_bytes)

    def workspace(self, num_bytes: int) -> Any:
        """Returns the group's buffer, with at least num_bytes bytes on each rank. Collective when it grows.

        Raises RuntimeError if the GPUs of the group cannot read each other's memory.
        """
        return symmetric_memory.get_symm_mem_workspace(self.group.group_name, num_bytes)

    def _check_size(self, num_bytes: int, *, is_captured: bool) -> None:
        """Grows `_num_bytes` if necessary; raises RuntimeError if CUDA graphs use a buffer of the current size."""
        if num_bytes > self._num_bytes and (is_captured or self._is_in_graphs):
            raise RuntimeError(
                f"moe_flex_dispatcher_backend is symm_mem: an exchange of {num_bytes} bytes requires a larger buffer "
                f"than the {self._num_bytes} bytes that CUDA graphs use, which cannot grow while graphs exist: "
                "limit microbatches to seq_length x micro_batch_size tokens, or set --moe-token-dispatcher-type "
                "alltoall or --cuda-graph-impl none"
            )
        self._num_bytes = max(self._num_bytes, num_bytes)
        self._is_in_graphs = self._is_in_graphs or is_captured


class MoESymmetricTokenDispatcher(MoEStaticAlltoAllTokenDispatcher, MoEFlexTokenDispatcher):
    """Static all-to-all dispatcher that exchanges rows through symmetric memory."""

    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: TransformerConfig,
        pg_collection: ProcessGroupCollection | None = None,
        *,
        row_alignment: int = 1,
    ) -> None:
        """Allocates the symmetric memory. Collective.

        Raises ValueError if the GPUs of the group cannot read each other's memory.
        """
        groups = pg_collection or existing_process_groups()
        transport = SymmetricTransport(or_alone(groups.tp_ep))
        try:
            transport.workspace(1)
        except RuntimeError as error:
            raise ValueError(
                "moe_flex_dispatcher_backend is symm_mem, but the GPUs of the expert group cannot share memory "
                f"({error}): use --moe-token-dispatcher-type alltoall"
            ) from error
        super().__init__(
            num_local_experts,
            local_expert_indices,
            config,
            pg_collection,
            row_alignment=row_alignment,
            transport=transport,
            # The only layout with the same number of rows for every rank.
            layout=padded_rank_rows,
        )


class MoEPlannedTokenDispatcher(MoEStaticAlltoAllTokenDispatcher, MoEFlexTokenDispatcher):
    """Replaces any backend on the meta device, where no library runs."""


# --- Registry ---

# Backends by the value of --moe-flex-dispatcher-backend.
FLEX_BACKENDS = {
    "deepep": FlexBackend(MoEDeepEPTokenDispatcher, _missing_for_deepep),
    "hybridep": FlexBackend(None, _missing_for_unsupported),
    "ncclep": FlexBackend(None, _missing_for_unsupported),
    "symm_mem": FlexBackend(MoESymmetricTokenDispatcher, _missing_for_symm_mem),
}
