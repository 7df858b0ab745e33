"""A world of ranks that are not there, for groups whose sizes and ranks are all that counts. Holds no tests."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state


@contextmanager
def fake_world(rank: int, world_size: int) -> Iterator[None]:
    """Inside, this process is a rank of torch's fake process group; checks that no groups are left over."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        assert len(dist.distributed_c10d._world.pg_map) == 1, "groups were left over"
        dist.destroy_process_group()
