"""The interface of token dispatchers, which move tokens to the ranks of their experts and back.

A layer calls four methods in this order: `preprocess` orders rows, `send` starts to move them, `finish_dispatch`
returns the rows of this rank's experts, and `combine` brings the experts' results back. The dispatchers are in
dispatch_*.py, the choice among them in token_dispatcher.py.

T tokens of this rank, H hidden, K choices of a token, R rows that this rank's experts receive, e experts of this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.process_groups_config import group_rank, group_size
from megatron.core.transformer.transformer_config import TransformerConfig


class DispatchedTokens(NamedTuple):
    """Rows that this rank's experts receive, sorted by expert.

    hidden_states: [R, H], the tokens' dtype. probs: [R], the routing weight of each row.
    """

    hidden_states: Tensor
    probs: Tensor


class RowDemand(NamedTuple):
    """The routing's demand on this rank's static buffers.

    rows_missing: [1], int64, on the device: above 0 if the buffers were too small and rows were dropped. factor_needed:
    [1], fp32, on the device: the smallest capacity factor that would have dropped none. can_lose: whether any routing
    could make these buffers drop rows.
    """

    rows_missing: Tensor
    factor_needed: Tensor
    can_lose: bool


class Dispatched(NamedTuple):
    """The input of this rank's experts, and the metadata that `combine` needs.

    tokens_per_expert: [e], int64, on the device. metadata: immutable, read by `combine` only. demand: None where no row
    can be dropped.
    """

    rows: DispatchedTokens
    tokens_per_expert: Tensor
    metadata: Any
    demand: RowDemand | None = None


class MoETokenDispatcher(ABC):
    """Moves tokens to experts and back.

    It keeps no state of a forward: `combine` receives the metadata that `finish_dispatch` returned. Only settings may
    change between forwards, such as the capacity factor of static buffers. All ranks of the experts' groups (expert and
    expert-tensor) call together. Work between `send` and `finish_dispatch` overlaps with the communication.
    """

    def dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> Dispatched:
        """Runs preprocess, send and finish_dispatch.

        tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64, over all experts. Returns
        the rows that this rank's experts receive: [R, H], counts and metadata.
        """
        preprocessed = self.preprocess(tokens, probs=probs, expert_indices=expert_indices)
        return self.finish_dispatch(self.send(tokens, preprocessed))

    def preprocess(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> Any:
        """Does the work before sending that a CUDA graph may capture; returns the second argument of `send`.

        tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64, over all experts. In the
        result, tensors that require gradients are in tuples, never in other containers. The default returns its
        arguments, for dispatchers whose shapes depend on the routing.
        """
        return probs, expert_indices

    @abstractmethod
    def send(self, tokens: Tensor, preprocessed: Any) -> Any:
        """Starts to send tokens: [T, H], any float dtype. Returns the argument of `finish_dispatch`."""

    @abstractmethod
    def finish_dispatch(self, sent: Any) -> Dispatched:
        """Waits for the rows of this rank's experts [R, H] and sorts them by expert."""

    @abstractmethod
    def combine(self, rows: Tensor, metadata: Any) -> Tensor:
        """rows: [R, H], any float dtype, weighted -> [T, H]: the sum of each token's rows over experts and ranks."""


def local_experts(config: TransformerConfig, group: ProcessGroup | None) -> range:
    """Returns the experts of this rank in the expert-parallel group: consecutive, the same number on each rank.

    Raises ValueError where the number of ranks does not divide the number of experts.
    """
    assert config.num_moe_experts is not None
    if config.num_moe_experts % group_size(group):
        raise ValueError(
            f"expert_model_parallel_size is {group_size(group)}: must divide num_moe_experts ({config.num_moe_experts})"
        )
    share = config.num_moe_experts // group_size(group)
    return range(group_rank(group) * share, (group_rank(group) + 1) * share)


def own_experts(
    num_local_experts: int,
    local_expert_indices: Sequence[int],
    *,
    config: TransformerConfig,
    ep_group: ProcessGroup | None,
) -> range:
    """Returns local_experts' range; raises ValueError where the caller's number or indices differ from it."""
    local = local_experts(config, ep_group)
    if num_local_experts != len(local) or list(local_expert_indices) != list(local):
        raise ValueError(
            f"num_local_experts is {num_local_experts} and local_expert_indices are {list(local_expert_indices)}: "
            f"this rank has {len(local)}, {list(local)}"
        )
    return local
