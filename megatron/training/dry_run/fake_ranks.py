"""One rank of a layout, in a process by itself: the code that builds a rank's part of a model runs as it would there.

Nothing is sent: torch's `fake` process groups have ranks and sizes, and their collectives do nothing.
"""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.initialize import build_groups


@contextmanager
def fake_rank(args: argparse.Namespace, rank: int, *, world_size: int) -> Iterator[ProcessGroupCollection]:
    """Inside, this process is `rank` of `world_size` in the layout of args: parallel_state has its groups.

    Raises ValueError for sizes that do not fit, RuntimeError where this process has process groups already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of its own already: leave its process groups first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # It would ask the group for a backend of the tensors' device, and fake groups have none for the meta device.
    batch_isend_irecv = dist.batch_isend_irecv
    vars(dist)["batch_isend_irecv"] = lambda operations: []
    try:
        yield build_groups(args)
    finally:
        vars(dist)["batch_isend_irecv"] = batch_isend_irecv
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
