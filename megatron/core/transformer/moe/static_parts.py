"""Which rows a rank sends to each other rank, and what those are that come, for buffers of a fixed size.

A *part* is what one rank sends to another: at most P rows, those that have no room are lost. How parts lie in the
buffers that travel depends on the device, see part_layout; the rows of the experts do not.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.moe.static_rows import StaticOrder, expert_of_received_rows, order_by_rank
from megatron.core.transformer.moe.token_exchange import exchange_counts


@dataclass(frozen=True)
class Parts:
    """sent: this rank's slots in the rows that it sends, S of them. experts: [S', 1], int64, on the device: the local
    expert of each row that comes, e for those that stand for no slot. counts: [ranks, e], int64, on the device: rows
    that each rank has for each expert, with room or not. send, receive: rows to and from each rank; None: as many for
    each.
    """

    sent: StaticOrder
    experts: Tensor
    counts: Tensor
    send: list[int] | None = None
    receive: list[int] | None = None


@dataclass(frozen=True)
class PartSizes:
    """num_experts: of one rank; rows_per_part: P."""

    group: dist.ProcessGroup
    num_ranks: int
    num_experts: int
    rows_per_part: int

    def order(self, expert_indices: Tensor) -> StaticOrder:
        """The slots by rank, each rank's part P rows; expert_indices: [T, K], int64."""
        return order_by_rank(
            expert_indices,
            self.num_ranks * self.num_experts,
            num_ranks=self.num_ranks,
            rows_per_rank=self.rows_per_part,
        )

    def exchange_counts(self, sent: StaticOrder) -> Tensor:
        """[ranks, e], int64: rows that each rank has for each expert. Collective."""
        return exchange_counts(sent.rows_per_group.view(self.num_ranks, self.num_experts), self.group)


# From [T, K], int64, over all ranks' experts.
PartLayout = Callable[[Tensor, PartSizes], Parts]


def part_layout(device: torch.device) -> PartLayout:
    """How parts of tensors on this device travel."""
    return packed_parts_sync if device.type == "cpu" else padded_parts


def padded_parts(expert_indices: Tensor, sizes: PartSizes) -> Parts:
    """Parts of P rows, full or not, so that the host need not know how many are: [ranks * P, H] travels.

    expert_indices: [T, K], int64, over all ranks' experts.
    """
    sent = sizes.order(expert_indices)
    counts = sizes.exchange_counts(sent)
    return Parts(sent, expert_of_received_rows(counts, rows_per_rank=sizes.rows_per_part), counts)


def packed_parts_sync(expert_indices: Tensor, sizes: PartSizes) -> Parts:
    """Parts of as many rows as there are, one behind the other, so that no padding travels.

    expert_indices: [T, K], int64, over all ranks' experts. NOTE: reads counts, for tensors on the CPU, where that is no
    wait.
    """
    parts = padded_parts(expert_indices, sizes)
    is_sent, is_received = parts.sent.slot_of_row >= 0, parts.experts < sizes.num_experts
    # One entry more: slots without a row point to the last.
    rows = torch.cat([is_sent.cumsum(0) - 1, parts.experts.new_full((1,), -1)])
    order = replace(
        parts.sent,
        slot_of_row=parts.sent.slot_of_row[is_sent],
        token_of_row=parts.sent.token_of_row[is_sent],
        row_of_slot=rows[parts.sent.row_of_slot],
    )
    send, receive = torch.stack([flags.view(sizes.num_ranks, -1).sum(1) for flags in (is_sent, is_received)]).tolist()
    return Parts(order, parts.experts[is_received].unsqueeze(1), parts.counts, send, receive)
