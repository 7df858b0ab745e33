"""What a token dispatcher is: tokens out to the experts' rows and back; implementations are in dispatch_*.py."""

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
    """The routing's demand on this rank's static buffers, all on the device.

    rows_missing: [1], int64, above 0 if they were too small, and rows were lost. factor_needed: [1], fp32: the capacity
    factor with which none would have been. can_lose: whether any routing could have lost rows here.
    """

    rows_missing: Tensor
    factor_needed: Tensor
    can_lose: bool


class Dispatched(NamedTuple):
    """The input of a rank's experts, and the way back.

    tokens_per_expert: [e], int64, on the device. metadata: frozen, for combine alone. demand: None where nothing can be
    lost.
    """

    rows: DispatchedTokens
    tokens_per_expert: Tensor
    metadata: Any
    demand: RowDemand | None = None


class MoETokenDispatcher(ABC):
    """Moves tokens to experts and back. It keeps no state: what combine needs travels in the metadata.

    All ranks of the experts' groups (expert and expert-tensor) call together. Work between `begin_dispatch` and
    `finish_dispatch` runs beside whatever is being sent.
    """

    def dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> Dispatched:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64, over all experts.
        Returns the rows that this rank's experts receive: [R, H], counts and metadata.
        """
        return self.finish_dispatch(self.begin_dispatch(tokens, probs=probs, expert_indices=expert_indices))

    @abstractmethod
    def begin_dispatch(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> Any:
        """The first half of `dispatch`. tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K],
        int64. Returns what `finish_dispatch` wants.
        """

    def preprocess(self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor) -> Any:
        """Does the part of begin_dispatch that precedes any communication; returns the argument of `send`.

        tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64. Tensors with gradients in
        the result are in tuples alone.
        """
        return probs, expert_indices

    def send(self, tokens: Tensor, preprocessed: Any) -> Any:
        """The rest of begin_dispatch; tokens: [T, H], any float dtype. Returns what `finish_dispatch` wants."""
        probs, expert_indices = preprocessed
        return self.begin_dispatch(tokens, probs=probs, expert_indices=expert_indices)

    @abstractmethod
    def finish_dispatch(self, begun: Any) -> Dispatched:
        """The second half of `dispatch`."""

    @abstractmethod
    def combine(self, rows: Tensor, metadata: Any) -> Tensor:
        """rows: [R, H], any float dtype, weighted -> [T, H]: the sum of each token's rows over experts and ranks."""


def local_experts(config: TransformerConfig, group: ProcessGroup | None) -> range:
    """The experts of this rank of the expert-parallel group: neighbours, as many on each rank.

    Raises ValueError where they cannot be shared out evenly.
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
