"""Exchange of rows through symmetric memory on all GPUs, or on one. Skipped without a GPU."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.transformer.moe.dispatch_alltoall import CollectiveTransport
from megatron.core.transformer.moe.dispatch_flex import SymmetricTransport
from tests.gpu.joined import join
from tests.harness import run_on_ranks

pytestmark = pytest.mark.gpu


def on_rank() -> None:
    device, group = join(), dist.group.WORLD
    transport = SymmetricTransport(group)
    pairs = []
    # Alternates weights and rows, as a dispatch does. The buffer grows twice, and is reused without a wait.
    for rows_per_part, width in [(3, 1), (3, 64), (500, 1), (500, 2048)] * 3:
        rows = torch.randn(dist.get_world_size() * rows_per_part, width, device=device, dtype=torch.bfloat16)
        collective = CollectiveTransport(group).launch([rows], send=None, receive=None)
        for work in collective.works:
            work.wait()
        pairs.append((transport.launch([rows], send=None, receive=None).received[0], collective.received[0]))
    assert all(torch.equal(found, wanted) for found, wanted in pairs)


def test_rows_come_as_the_collective_brings_them_and_stay_when_the_buffer_is_used_again() -> None:
    run_on_ranks(on_rank, torch.cuda.device_count(), backend=None)
