"""Results of collectives contain nothing that was not written, also if the other ranks do not exist."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.group_collectives import all_gather_rows, all_reduce_sum, reduce_scatter_rows
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.tensor_parallel.mappings import all_to_all
from megatron.core.transformer.moe.dispatch_alltoall import CollectiveTransport, exchange_counts
from tests.unit_tests.core.fake_world import fake_world
from tests.unit_tests.core.poisoned_memory import poisoned_memory

RANKS = 4


def gathered(rows: Tensor) -> Tensor:
    return all_gather_rows(rows, dist.group.WORLD).wait()


def reduced(rows: Tensor) -> Tensor:
    return reduce_scatter_rows(rows, dist.group.WORLD).wait()


def summed(rows: Tensor) -> Tensor:
    return all_reduce_sum(rows, dist.group.WORLD).wait()


def exchanged(rows: Tensor) -> Tensor:
    return all_to_all(dist.group.WORLD, rows)


def exchanged_unevenly(rows: Tensor) -> Tensor:
    return all_to_all(dist.group.WORLD, rows, [3, 9, 0, 2], [2, 2, 2, 2])


def dispatched(rows: Tensor) -> Tensor:
    return CollectiveTransport(dist.group.WORLD).launch([rows], send=[2, 2, 2, 2], receive=[1, 9, 2, 1]).received[0]


@pytest.mark.parametrize(
    "collective", [gathered, reduced, summed, exchanged, exchanged_unevenly, dispatched], ids=lambda f: f.__name__
)
def test_no_row_of_a_result_is_left_unwritten(collective):
    with fake_world(0, RANKS), poisoned_memory():
        assert torch.empty(2).isnan().all(), "memory is not poisoned"
        result = collective(torch.ones(2 * RANKS, 3))
    assert result.isfinite().all()


def test_no_count_of_rows_is_left_unwritten():
    with fake_world(0, RANKS), poisoned_memory():
        received = exchange_counts(torch.ones(RANKS, 2, dtype=torch.int64), dist.group.WORLD).wait()
    assert received.amax() <= 1


def test_tensors_received_from_stages_that_do_not_exist_are_zero():
    with fake_world(1, RANKS), poisoned_memory():
        stages = P2PCommunicator(dist.group.WORLD, ModelParallelConfig(pipeline_dtype=torch.float32))
        received = stages.recv_forward((2, 3), False)
    assert torch.equal(received, torch.zeros(2, 3))
