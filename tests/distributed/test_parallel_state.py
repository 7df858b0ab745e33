"""Process groups in real processes: each connects its own ranks, is destroyed in time, and leaks no resources."""

import gc
import os
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import parallel_state
from megatron.training.config import DistributedConfig, LaunchConfig
from megatron.training.initialize import leave_process_group
from megatron.training.startup_handshake import join_process_group
from tests.harness import run_on_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "expert_tensor_parallel_size": 1},
    {"context_parallel_size": 3, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1},
]


@pytest.mark.slow
def test_groups_sum_over_their_ranks_in_one_layout_after_another_and_leave_nothing_open() -> None:
    run_on_ranks(_two_layouts_twice, 6)


def _two_layouts_twice() -> None:
    open_files = []
    for sizes in [*LAYOUTS, *LAYOUTS]:
        parallel_state.initialize_model_parallel(**sizes, distributed_timeout_minutes=7)
        for name, group in vars(parallel_state.get_process_groups()).items():
            stage = parallel_state.get_pipeline_model_parallel_rank()
            absent = {
                "inter_dist_opt",
                "hcp",
                *(("pos_embd",) if stage > 0 else ()),
                *(("embd",) if stage == 1 else ()),
            }
            if not group:
                assert name in absent, name
                continue
            ranks = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(ranks, group=group)
            assert ranks.item() == sum(dist.get_process_group_ranks(group)), name
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            assert timeout == timedelta(minutes=7), name
        del group
        # Keeps connections open until all ranks have finished reading.
        dist.barrier()
        parallel_state.destroy_model_parallel()
        gc.collect()
        assert list(dist.distributed_c10d._world.pg_map) == [dist.group.WORLD]
        open_files.append(len(os.listdir("/proc/self/fd")))
    # The count falls at the end, when another rank has already closed its connections.
    assert max(open_files) == open_files[0], open_files


def test_the_same_processes_meet_again_and_again() -> None:
    assert run_on_ranks(_meet, 3, backend=None) == [[3.0, 3.0, 3.0]] * 3


def _meet() -> list[float]:
    sums = []
    for visit in range(3):
        join_process_group(
            DistributedConfig(),
            LaunchConfig(),
            torch.device("cpu"),
            settings=partial(dict, visit=str(visit)),
            broadcast=None,
        )
        parallel_state.initialize_model_parallel(context_parallel_size=3)
        total = torch.ones(1)
        dist.all_reduce(total, group=parallel_state.get_context_parallel_group())
        sums.append(total.item())
        leave_process_group()
    return sums
