"""Several instances of a sharded optimizer: sums within one instance, and one owner per element in each instance."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.bucket_group import Traffic
from megatron.core.distributed.ddp_debug import find_coverage_problem
from megatron.core.distributed.layout import Span
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.param_attributes import mark_expert
from tests.counts import long_count, soak_only
from tests.harness import run_on_ranks

STEPS = long_count(4, soak=20)
SIZES = [1, 7, 63, 64, 65, 129]


class Sums(nn.Module):
    """Parameters of odd sizes, the last two marked as experts, in a loss with random gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])
        for weight in self.weights[-2:]:
            mark_expert(weight)

    def forward(self, factor):
        return sum((weight * torch.randn(weight.shape) * factor).sum() for weight in self.weights)


def train(instances, expert_size, **settings):
    """Trains by gradient descent without an optimizer and returns the final parameters."""
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_size, num_distributed_optimizer_instances=instances
    )
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, num_distributed_optimizer_instances=instances, **settings
    )
    ddp = DistributedDataParallel(ModelParallelConfig(deterministic_mode=True), config, Sums())
    buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
    for buffer in buffers:
        check_owners(buffer, instances)
    torch.manual_seed(dist.get_rank())
    for _ in range(STEPS):
        ddp.zero_grad_buffer()
        ddp(3.0 ** dist.get_rank()).backward()
        ddp.finish_grad_sync()
        descend(ddp)
    found = torch.cat([weight.detach() for weight in ddp.module.weights])
    dist.barrier()
    parallel_state.destroy_model_parallel()
    return found


def descend(ddp):
    for buffer in ddp.all_buffers:
        for span in buffer.owned_spans():
            own = slice(span.start, span.end)
            buffer.param_data[own] -= 1e-3 * buffer.grad_data[own]
    ddp.mark_params_stale()
    ddp.start_param_sync(force_sync=True)


def check_owners(buffer, instances):
    groups = parallel_state.get_process_groups()
    replicas = groups.expt_dp if buffer.is_expert else groups.dp_cp
    of_ranks = [None] * replicas.size()
    dist.all_gather_object(of_ranks, [(span.start, span.numel) for span in buffer.owned_spans()], group=replicas)
    size = replicas.size() // instances
    for first in range(0, replicas.size(), size):
        spans = [[Span(*one) for one in of_rank] for of_rank in of_ranks[first : first + size]]
        assert find_coverage_problem(spans, numel=buffer.numel) is None


def compare(expert_size):
    one = train(1, expert_size)
    averaged = train(2, expert_size, average_in_collective=True)
    cut = [train(2, expert_size, overlap_grad_reduce=True, bucket_size=size) for size in (1, 100, None)]
    for several in (averaged, *cut):
        assert (several - one).norm() < 1e-6 * one.norm()
    # The instances determine the order of addition; the buckets do not.
    assert torch.equal(cut[0], cut[1]) and torch.equal(cut[0], cut[2])
    return cut[0][: sum(SIZES[:-2])].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ranks, expert_size", [(4, 2), soak_only(6, 1)])
def test_two_instances_train_as_one_does(ranks, expert_size):
    dense = run_on_ranks(compare, ranks, expert_size)
    assert dense == [dense[0]] * ranks


def second_levels(overlap):
    """Runs a step with two backward passes, the second one late with overlap, and observes the reductions.

    Returns the parameters, and how many of this rank's inter-instance reductions were in flight before the last
    gradient of the first backward, and at the end.
    """
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2, num_distributed_optimizer_instances=2)
    across = parallel_state.get_process_groups().inter_dist_opt
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        num_distributed_optimizer_instances=2,
        overlap_grad_reduce=overlap,
        bucket_size=1,
    )
    ddp = DistributedDataParallel(ModelParallelConfig(), settings, Sums())
    groups = [*ddp.bucket_groups, *ddp.expert_parallel_bucket_groups]
    launched, seen = [], []

    def count(flat, *, group, **kwargs):
        work = all_reduce(flat, group=group, **kwargs)
        launched.extend([work] if group is across else [])
        return work

    def wait_on_one_rank(grad):
        # The other ranks continue and may start all inter-instance reductions at the end. This rank waits for no
        # inter-instance reduction that it has already started.
        if not seen and dist.get_rank() == 0:
            for work in [work for group in groups for work in group.works(Traffic.REDUCE) if work not in launched]:
                work.wait()

    ddp.module.weights[1].register_hook(wait_on_one_rank)
    ddp.module.weights[0].register_hook(lambda grad: seen.append(len(launched)))
    torch.manual_seed(dist.get_rank())
    all_reduce = dist.all_reduce
    with patch.object(dist, "all_reduce", count):
        for backwards in (1, 2):
            del launched[:], seen[:]
            ddp.zero_grad_buffer()
            for _ in range(backwards):
                ddp(1.0).backward()
            ddp.finish_grad_sync()
    descend(ddp)
    parallel_state.destroy_model_parallel()
    return torch.cat([weight.detach() for weight in ddp.module.weights]), seen[0], len(launched)


def compare_second_levels():
    (expected, *at_end), (found, *early) = [second_levels(overlap) for overlap in (False, True)]
    assert (found - expected).norm() < 1e-6 * expected.norm()
    return at_end, early


def test_b16_shards_are_summed_over_instances_during_backward_whenever_a_rank_comes_to_it():
    per_rank = run_on_ranks(compare_second_levels, 4)
    # Without overlap: one bucket of dense and one of expert parameters. With overlap: one bucket per parameter, two of
    # them experts', and all are reduced again after the late backward.
    assert all(at_end == [0, 2] for at_end, _ in per_rank)
    assert all(launched == 12 for _, (_, launched) in per_rank)
    # Inter-instance reductions start as the first level completes, which it has done for four buckets on any machine.
    assert 4 <= per_rank[0][1][0] < 12


def test_groups_of_another_number_of_instances_are_refused():
    with pytest.raises(ValueError, match="instances is 2, and pg_collection.inter_dist_opt has 1 ranks: must be equal"):
        settings = DistributedDataParallelConfig(use_distributed_optimizer=True, num_distributed_optimizer_instances=2)
        DistributedDataParallel(ModelParallelConfig(), settings, Sums())
