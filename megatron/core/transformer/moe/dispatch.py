"""The interface of token dispatchers, which move tokens to the ranks of their experts and back.

A layer calls six methods, in the order in which MoETokenDispatcher lists them. The dispatchers are in dispatch_*.py,
the choice among them in token_dispatcher.py.

T tokens of this rank, H hidden, K choices of a token, E experts, R rows that this rank's experts receive, e experts of
this rank.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.permutation import Routing
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


class MoETokenDispatcher(ABC):
    """Moves tokens to experts and back, in six steps that each pass tensors to the next.

    1. `dispatch_preprocess` orders the tokens, or copies them into the rows to send.
    2. `token_dispatch` sends them to the ranks of their experts.
    3. `dispatch_postprocess` returns the rows of this rank's experts, sorted by expert: [R, H].
    4. `combine_preprocess` puts the experts' results into the order in which they are sent back.
    5. `token_combine` sends them back.
    6. `combine_postprocess` returns the tokens in the shape that step 1 received.

    Steps 4 to 6 sum the rows of a token; the experts have applied the weights. Between the steps the dispatcher keeps
    the order of the rows, so one forward ends before the next begins. All ranks of the experts' groups (expert and
    expert-tensor) call together. config: of the layer. shared_experts: see set_shared_experts.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        groups = pg_collection or existing_process_groups()
        self.config = config
        self.ep_group, self.tp_group, self.tp_ep_group = groups.ep, groups.expt_tp, groups.tp_ep
        self.ep_size, self.tp_size = group_size(groups.ep), group_size(groups.expt_tp)
        self.shared_experts: Callable[[Tensor], Any] | None = None
        self._demand: RowDemand | None = None
        self._tokens: Tensor | None
        self._shape, self._tokens = torch.Size(), None  # as step 1 received them; tokens for a shared expert
        self._shared_output: Tensor | None = None
        self._passage: Any = None  # the order of the rows of the running forward, of each dispatcher's own type

    def order_rows(self, tokens: Tensor, routing: Routing) -> Any:
        """Does the work of step 1 that a CUDA graph may capture; returns the second argument of `begin`.

        tokens: [T, H], any float dtype. In the result, tensors that require gradients are in tuples, never in other
        containers. The default returns the fields of the routing, for dispatchers whose shapes depend on it.
        """
        return routing.weights, routing.indices, routing.has_absent

    def begin(self, tokens: Tensor, ordered: Any) -> tuple[Tensor, Tensor]:
        """Does the rest of step 1 and returns its result.

        tokens: [*, H], any float dtype. ordered: what order_rows returned for the same tokens.
        """
        rows = as_rows(tokens)
        # Kept only for whom they serve: a forward that backward repeats for its saved tensors may stop before `_end`.
        self._shape, self._tokens = tokens.shape, None if self.shared_experts is None else rows
        self._shared_output = None
        return self._begin(rows, ordered)

    @abstractmethod
    def _begin(self, tokens: Tensor, ordered: Any) -> tuple[Tensor, Tensor]:
        """Sets _passage and returns the rows and weights that step 2 sends; tokens: [T, H]."""

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what token_dispatch sends: rows, or tokens with all their choices, and their weights.

        tokens: [*, H], any float dtype. routing_map and probs: a router's tables [T, E], bool and float, or the
        experts of each token [T, K], int64, and their weights [T, K]. NOTE: tables synchronize with the device, since
        the largest number of experts of a token is a shape.
        """
        routing = Routing.of(probs, routing_map, num_experts=self.config.num_moe_experts)
        return self.begin(tokens, self.order_rows(as_rows(tokens), routing))

    @abstractmethod
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends rows [*, H], any float dtype, and weights, as dispatch_preprocess returned them. Collective.

        Returns those that arrived.
        """

    @abstractmethod
    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts what token_dispatch returned by expert; take_demand then returns the demand.

        Returns rows [R, H], tokens_per_expert [e], int64, on the device, and the weight of each row [R].
        """

    @abstractmethod
    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """hidden_states: [R, H], any float dtype, sorted by expert and weighted. Returns the rows to send back."""

    @abstractmethod
    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sends rows back, [*, H], any float dtype; returns those that arrived. Collective."""

    @abstractmethod
    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns the tokens in their first shape: [*, H], any float dtype, sums of rows over experts and ranks."""

    def set_shared_experts(self, shared_experts: Callable[[Tensor], Any]) -> None:
        """Makes token_dispatch run a shared expert while rows are sent; combine_postprocess then adds its result.

        shared_experts: tokens [T, H], any float dtype -> [T, H], alone or with a bias to add, which may be None.
        """
        if not callable(shared_experts):
            raise ValueError(f"shared_experts is {shared_experts!r}: must be a module or function")
        self.shared_experts = shared_experts

    def get_expert_zero_copy_buffers(self) -> tuple[None, None]:
        """Returns no output buffer and no buffer for gradients: experts write to tensors of their own here."""
        return None, None

    def take_demand(self) -> RowDemand | None:
        """Returns the demand that step 3 found, once; None where no row can be dropped."""
        # It is not kept, since a CUDA graph may hold the forward.
        demand, self._demand = self._demand, None
        return demand

    def _run_shared_experts(self) -> None:
        """Called by token_dispatch while rows are on their way."""
        if self.shared_experts is not None:
            assert self._tokens is not None, "dispatch_preprocess comes first"
            result = self.shared_experts(self._tokens)
            if isinstance(result, tuple):
                output, bias = result
                result = output if bias is None else output + bias
            self._shared_output = result

    def _end(self, tokens: Tensor) -> Tensor:
        """Adds the shared expert's result to tokens: [T, H], forgets the forward, and returns them as [*, H]."""
        shape = self._shape
        if self._shared_output is not None:
            tokens = tokens + self._shared_output
        self._passage = self._shared_output = self._tokens = None
        return in_shape(tokens, shape)


def as_rows(tokens: Tensor) -> Tensor:
    """Returns [*, H], any dtype, as [T, H]."""
    return tokens if tokens.dim() == 2 else tokens.reshape(-1, tokens.shape[-1])


def in_shape(tokens: Tensor, shape: torch.Size) -> Tensor:
    """Returns [T, H], any dtype, as a view of that shape."""
    return tokens if tokens.shape == shape else tokens.view(shape)


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
