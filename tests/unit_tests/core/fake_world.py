"""A simulated world of ranks, for process groups of which only the sizes and ranks matter. Contains no tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process a rank of torch's fake process group, and checks that no groups are left over."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        assert len(dist.distributed_c10d._world.pg_map) == 1, "groups were left over"
        dist.destroy_process_group()
