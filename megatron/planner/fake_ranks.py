"""One rank of a layout, in a process by itself: the code that builds a rank's part of a model runs as it would there.

Nothing is sent: torch's `fake` process groups have ranks and sizes, and their collectives do nothing.
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
    """Inside, this process is `rank` of `world_size` in the layout of args: parallel_state has its groups.

    Raises ValueError for sizes that do not fit, RuntimeError where this process has process groups already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of its own already: leave its process groups first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    # It would ask the group for a backend of the tensors' device, and fake groups have none for the meta device.
    changed = {"batch_isend_irecv": _start_one_by_one, "all_gather_object": _hear_own_word}
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


def _hear_own_word(found: list[Any], own: Any, **of_group: Any) -> None:
    """What the fake group's would come to, without pickling the word once for each of thousands of ranks."""
    found[:] = [own] * len(found)
