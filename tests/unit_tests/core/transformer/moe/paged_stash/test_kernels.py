"""Registration of a page pool's operators meets torch's requirements."""

from typing import Any

import pytest
import torch
from torch.library import opcheck

from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.page_pool import PagePool


@pytest.mark.parametrize("name", ["plan", "stash", "restore", "release"])
def test_operators_are_registered_as_torch_expects(name: str) -> None:
    pool = PagePool("cpu", PoolLayout(64, 5, 5))
    group = pool.open_group([TensorSpec(64, 64, 6), TensorSpec(32, 48, 6, Priority.ACT)])
    num_rows, reserve = torch.tensor([5]), torch.zeros(3, dtype=torch.int64)
    pool.plan(group, num_rows)
    memories = [torch.zeros(6 * 64, dtype=torch.uint8), torch.zeros(6 * 48, dtype=torch.uint8)]
    records: dict[str, Any] = {"table": group.slab.table, "held": group.slab.held, "layout": pool.layout.numbers}
    records["tensors"] = group.calls[0].tensors
    ends = {"heads": pool.heads, "tails": pool.tails, "ring": pool.ring, "counters": pool.counters}
    pages = pool.device_pages, pool.host_pages
    calls: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "plan": (torch.ops.paged_stash.plan, (num_rows, reserve), ends),
        "stash": (torch.ops.paged_stash.stash, (memories, pages[0]), {"host_pages": pages[1], "num_programs": 0}),
        "restore": (torch.ops.paged_stash.restore, pages, {"targets": memories, "num_programs": 0}),
        "release": (torch.ops.paged_stash.release, (pool.ring, pool.tails), {}),
    }
    operator, args, named = calls[name]
    opcheck(operator.default, args, {**records, **named})
