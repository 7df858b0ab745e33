"""What a token dispatcher is: tokens out to the experts' rows and back; implementations are in dispatch_*.py."""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class DispatchedTokens(NamedTuple):
    """Rows that this rank's experts receive, sorted by expert.

    hidden_states: [R, H], the tokens' dtype. probs: [R], the routing weight of each row.
    """

    hidden_states: Tensor
    probs: Tensor


class MoETokenDispatcher(Protocol):
    """Moves tokens to experts and back. It keeps no state: what combine needs travels in the metadata."""

    def dispatch(
        self, tokens: Tensor, *, probs: Tensor, expert_indices: Tensor
    ) -> tuple[DispatchedTokens, Tensor, Any]:
        """tokens: [T, H], any float dtype; probs: [T, K], float; expert_indices: [T, K], int64.
        Returns the rows, tokens_per_expert [e], int64, on the device, and frozen metadata for combine.
        """
        ...

    def combine(self, rows: Tensor, metadata: Any) -> Tensor:
        """rows: [R, H], any float dtype, weighted -> [T, H]: the sum of each token's rows, in token order."""
        ...
