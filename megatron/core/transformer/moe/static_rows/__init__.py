"""Rows of experts in buffers of a fixed size, of which only the device knows how many are live."""

from megatron.core.transformer.moe.static_rows.row_movement import gather_rows, sum_rows
from megatron.core.transformer.moe.static_rows.row_order import (
    StaticOrder,
    aligned_rows,
    expert_of_received_rows,
    order_by_expert,
    order_by_rank,
)

__all__ = [
    "StaticOrder",
    "aligned_rows",
    "expert_of_received_rows",
    "gather_rows",
    "order_by_expert",
    "order_by_rank",
    "sum_rows",
]
