"""Lets a single process act as any rank of a layout, so that it builds that rank's part of a model.

Uses torch's `fake` process groups, which know ranks and sizes but whose collectives do nothing.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.initialize import build_groups


@contextmanager
def fake_rank(args: argparse.Namespace, rank: int, *, world_size: int) -> Iterator[ProcessGroupCollection]:
    """Makes this process act as `rank` of `world_size` inside the block, and yields the rank's process groups.

    Sets parallel_state to the layout of args. Raises ValueError if its sizes do not divide world_size, and RuntimeError
    if process groups already exist.
    """
    if dist.is_initialized():
        raise RuntimeError("this process already has process groups: destroy them first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # torch's batch_isend_irecv requires a backend for the tensors' device, and fake groups have none for meta.
    changed = {"batch_isend_irecv": _start_one_by_one, "all_gather_object": _repeat_own_object}
    before = {name: vars(dist)[name] for name in changed}
    vars(dist).update(changed)
    try:
        yield build_groups(args)
    finally:
        vars(dist).update(before)
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def _start_one_by_one(operations: Sequence[dist.P2POp]) -> list[dist.Work | None]:
    ends = {dist.isend: "group_dst", dist.irecv: "group_src"}
    return [one.op(one.tensor, group=one.group, **{ends[one.op]: one.group_peer}) for one in operations]


def _repeat_own_object(found: list[Any], own: Any, **of_group: Any) -> None:
    """Fills the list as an all-gather of equal objects would, without pickling `own` for thousands of ranks."""
    found[:] = [own] * len(found)
