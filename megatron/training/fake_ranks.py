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
from megatron.core.rank_generator import DEFAULT_ORDER


@contextmanager
def fake_rank(args: argparse.Namespace, rank: int, *, world_size: int) -> Iterator[ProcessGroupCollection]:
    """Inside, this process is `rank` of `world_size` in the layout of args: parallel_state has its groups.

    Raises ValueError for sizes that do not fit, RuntimeError where this process has process groups already.
    """
    if dist.is_initialized():
        raise RuntimeError("this process is a rank of its own already: leave its process groups first")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else DEFAULT_ORDER,
        )
        yield parallel_state.get_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
