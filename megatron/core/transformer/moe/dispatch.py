"""Interface of token dispatchers, which send tokens to the ranks of their experts and back.

A layer calls six methods, in the order in which MoETokenDispatcher lists them. The dispatchers are in dispatch_*.py,
and token_dispatcher.py selects one.

T tokens of this rank, H hidden, K choices of a token, E experts, R rows that this rank's experts receive, e experts of
this rank.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron.core.parallel_state import existing_process_groups
from megatron.core.process_groups_config import ProcessGroupCollection, group_rank, group_size
from megatron.core.transformer.moe.permutation import Routing
from megatron.core.transformer.transformer_config import TransformerConfig


class RowDemand(NamedTuple):
    """Number of rows that one routing requires beyond this rank's static buffers, and the required capacity factor.

    rows_missing: [1], int64, on the device: above 0 if the buffers were too small and rows were dropped. factor_needed:
    [1], fp32, on the device: the smallest capacity factor that would have dropped no rows. can_lose: whether any
    routing could overflow these buffers.
    """

    rows_missing: Tensor
    factor_needed: Tensor
    can_lose: bool


class ExchangeCover(Protocol):
    """Computation that runs between the launch of an exchange of rows and its end.

    Each method is called after the launch, before the current stream or the host waits for the rows. It may run other
    layers of this pass or of another pass, including their exchanges. All ranks call the methods in the same order.
    """

    def before_counts(self) -> None:
        """Covers the exchange of row counts, which the host reads."""

    def before_rows(self) -> None:
        """Covers an exchange of rows in forward."""

    def before_row_gradients(self, *, follows_counts: bool) -> None:
        """Covers an exchange of gradients.

        follows_counts: whether they are the gradients of combine, in a layer whose forward has called before_counts.
        """


@dataclass
class Dispatch:
    """State of one forward through a dispatcher.

    shape: of the tokens passed to step 1. tokens: for a shared expert, otherwise None. rows: order of the rows, in a
    type specific to each dispatcher. demand: on static buffers, until it is taken. shared_output: result of the shared
    expert. order: of the rows that step 3 returned, in static dispatchers.
    """

    shape: torch.Size
    tokens: Tensor | None
    rows: Any = None
    demand: RowDemand | None = None
    shared_output: Tensor | None = None
    order: Any = None


class _ThreadState(threading.local):
    """The state of the latest forward on each thread. See [Note: state of a dispatch]."""

    def __init__(self) -> None:
        self.state = Dispatch(torch.Size(), None)

    def __reduce__(self) -> Any:
        """Makes deepcopy and pickle create a new, empty record."""
        return _ThreadState, ()


class MoETokenDispatcher(ABC):
    """Moves tokens to experts and back in six steps, each of which passes its tensors to the next.

    1. `dispatch_preprocess` orders the tokens, or copies them into the rows to send.
    2. `token_dispatch` sends them to the ranks of their experts.
    3. `dispatch_postprocess` returns the rows of this rank's experts, sorted by expert: [R, H].
    4. `combine_preprocess` puts the experts' results into the order in which they are sent back.
    5. `token_combine` sends them back.
    6. `combine_postprocess` returns the tokens in the shape that step 1 received.

    Steps 4 to 6 sum the rows of a token; the experts have already applied the weights. All ranks of the expert and
    expert-tensor groups must call each step. config: the layer's configuration. shared_experts: see set_shared_experts.
    cover: runs while rows are exchanged; None waits for them.

    [Note: state of a dispatch] Between the steps the dispatcher stores the state of the forward. A forward may take
    turns with a backward that recomputes the layer for another micro-batch. The two passes run on different threads,
    so a state for each thread is one for each pass. On a thread one forward must end before the next begins.
    """

    def __init__(self, config: TransformerConfig, pg_collection: ProcessGroupCollection | None = None) -> None:
        groups = pg_collection or existing_process_groups()
        self.config = config
        self.ep_group, self.tp_group, self.tp_ep_group = groups.ep, groups.expt_tp, groups.tp_ep
        self.ep_size, self.tp_size = group_size(groups.ep), group_size(groups.expt_tp)
        self.shared_experts: Callable[[Tensor], Any] | None = None
        self.cover: ExchangeCover | None = None
        self._current = _ThreadState()

    def order_rows(self, tokens: Tensor, routing: Routing) -> Any:
        """Runs the part of step 1 that a CUDA graph may capture; returns the second argument of `begin`.

        tokens: [T, H], any float dtype. In the result, tensors that require gradients may be nested in tuples only. The
        default, for dispatchers whose shapes depend on the routing, returns the fields of the routing.
        """
        return routing.weights, routing.indices, routing.has_absent

    def begin(self, tokens: Tensor, ordered: Any) -> tuple[Tensor, Tensor]:
        """Runs the rest of step 1; returns the input of token_dispatch.

        tokens: [*, H], any float dtype. ordered: the result of order_rows for the same tokens.
        """
        rows = as_rows(tokens)
        # Tokens are stored only for a shared expert, because a forward that is recomputed for its saved tensors may
        # stop before `_end`, which drops them.
        state = self._current.state = Dispatch(tokens.shape, None if self.shared_experts is None else rows)
        return self._begin(rows, ordered, state)

    @abstractmethod
    def _begin(self, tokens: Tensor, ordered: Any, state: Dispatch) -> tuple[Tensor, Tensor]:
        """Sets state.rows and returns the rows and weights that step 2 sends; tokens: [T, H]."""

    def dispatch_preprocess(self, tokens: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Prepares the input of token_dispatch: rows, or tokens with all their choices, and their weights.

        tokens: [*, H], any float dtype. routing_map, probs: either a router's tables [T, E], bool and float, or the
        experts of each token [T, K], int64, and their weights [T, K]. NOTE: with tables the host waits for the device,
        because the largest number of experts per token determines a shape.
        """
        routing = Routing.of(probs, routing_map, num_experts=self.config.num_moe_experts)
        return self.begin(tokens, self.order_rows(as_rows(tokens), routing))

    @abstractmethod
    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Sends rows [*, H], any float dtype, and weights, as returned by dispatch_preprocess. Collective.

        Returns the received rows and weights.
        """

    @abstractmethod
    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sorts the received rows by expert; afterwards take_demand returns the demand.

        Returns rows [R, H], tokens_per_expert [e], int64, on the device, and the weight of each row [R].
        """

    @abstractmethod
    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Puts the experts' results into the order in which they are sent back.

        hidden_states: [R, H], any float dtype, sorted by expert, already multiplied by the weights.
        """

    @abstractmethod
    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Sends results back to the ranks of their tokens; returns the received rows. Collective.

        hidden_states: [*, H], any float dtype, the result of combine_preprocess.
        """

    @abstractmethod
    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sums each token's rows over experts and ranks; returns the tokens in their original shape.

        hidden_states: [*, H], any float dtype, the result of token_combine.
        """

    def set_shared_experts(self, shared_experts: Callable[[Tensor], Any]) -> None:
        """Makes token_dispatch run a shared expert while rows are sent; combine_postprocess then adds its result.

        shared_experts: maps tokens [T, H], any float dtype, to [T, H], or to a tuple of [T, H] and a bias, which is
        added unless it is None.
        """
        if not callable(shared_experts):
            raise ValueError(f"shared_experts is {shared_experts!r}: must be a module or function")
        self.shared_experts = shared_experts

    def take_demand(self) -> RowDemand | None:
        """Returns and clears the RowDemand of this forward; None for a dispatcher without static buffers."""
        # The demand is cleared because a CUDA graph may own its memory.
        state = self._current.state
        demand, state.demand = state.demand, None
        return demand

    def _run_shared_experts(self, state: Dispatch) -> None:
        """Runs the shared expert; token_dispatch calls it while rows are in transit."""
        if self.shared_experts is not None:
            assert state.tokens is not None, "set_shared_experts comes before dispatch_preprocess"
            result = self.shared_experts(state.tokens)
            if isinstance(result, tuple):
                output, bias = result
                result = output if bias is None else output + bias
            state.shared_output = result

    def _end(self, tokens: Tensor, state: Dispatch) -> Tensor:
        """Adds the shared expert's result to tokens, [T, H], and returns them in their original shape.

        Also drops the state of this forward, except a demand that was not taken.
        """
        if state.shared_output is not None:
            tokens = tokens + state.shared_output
        state.rows = state.shared_output = state.tokens = None
        return in_shape(tokens, state.shape)


def as_rows(tokens: Tensor) -> Tensor:
    """Flattens all dimensions except the last: [*, H], any dtype -> [T, H]."""
    return tokens if tokens.dim() == 2 else tokens.reshape(-1, tokens.shape[-1])


def in_shape(tokens: Tensor, shape: torch.Size) -> Tensor:
    """Views tokens, [T, H], any dtype, in the given shape."""
    return tokens if tokens.shape == shape else tokens.view(shape)


def local_experts(config: TransformerConfig, group: ProcessGroup | None) -> range:
    """Returns the range of experts that this rank of the expert-parallel group stores.

    All ranks have the same number of experts. Raises ValueError if the number of ranks does not divide the number of
    experts.
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
    """Returns this rank's experts, as local_experts does, after checking the caller's arguments against them.

    Raises ValueError if num_local_experts or local_expert_indices differ from that range.
    """
    local = local_experts(config, ep_group)
    if num_local_experts != len(local) or list(local_expert_indices) != list(local):
        raise ValueError(
            f"num_local_experts is {num_local_experts} and local_expert_indices are {list(local_expert_indices)}: "
            f"must be {len(local)} and {list(local)} on this rank"
        )
    return local
