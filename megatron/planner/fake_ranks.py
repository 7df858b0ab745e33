"""Lets a single process act as any rank of a layout, so that it builds that rank's part of a model.

Uses torch's fake process groups, which know ranks and sizes but whose collectives do nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore, _create_fake_pg

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.config import RunConfig
from megatron.training.initialize import build_groups

# torch's own "fake" backend has no groups for tensors on the meta device.
_BACKEND = "fake_meta"
dist.Backend.register_backend(_BACKEND, _create_fake_pg, extended_api=True, devices=["cpu", "meta"])


@contextmanager
def fake_rank(run_config: RunConfig, rank: int, *, world_size: int) -> Iterator[ProcessGroupCollection]:
    """Makes this process act as `rank` of `world_size` inside the block, and yields the rank's process groups.

    Sets parallel_state to the layout of the run. Raises ValueError if its sizes do not divide world_size, and
    RuntimeError if process groups already exist.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already has process groups: destroy them first")
    dist.init_process_group(_BACKEND, store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield build_groups(run_config)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
