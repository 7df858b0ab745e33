"""Tests sums over ranks against fp64 and, in rank order, bitwise, however tensors are split and collectives finish."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed import collectives
from megatron.core.distributed.collectives import ReductionPolicy, gather_shards_, reduce_bucket_, shard_of
from tests.counts import soak_only
from tests.harness import run_on_ranks

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def values_of_ranks(size, dtype, *, ranks):
    """Returns the values of all ranks, the same on every rank.

    Their magnitudes differ, so that a different order of addition gives a different sum.
    """
    made = [torch.randn(size, generator=torch.Generator().manual_seed(r)) * 7.0**r for r in range(ranks)]
    return [value.to(dtype) for value in made]


def in_rank_order(values):
    total = values[0].to(torch.promote_types(values[0].dtype, torch.float32), copy=True)
    for value in values[1:]:
        total += value.to(total.dtype)
    return total


def reduced(values, policy, *, sharded, buckets=1, group=None):
    """Returns this rank's flat tensor, reduced in `buckets` equal parts that are all in flight together.

    If sharded, the reduced shards are gathered; the shards of every second part are first reduced into a separate
    tensor.
    """
    group = group or dist.group.WORLD
    flat = values[dist.get_rank()].clone()
    parts = flat.chunk(buckets)
    places = [
        torch.empty_like(shard_of(part, group)) if sharded and number % 2 else None for number, part in enumerate(parts)
    ]
    handles = [
        reduce_bucket_(part, group, sharded=sharded, policy=policy, into=place) for part, place in zip(parts, places)
    ]
    if policy.can_repeat:
        assert torch.equal(flat, values[dist.get_rank()]), "changed before wait"
    for handle in handles:
        handle.advance()
    for handle in reversed(handles):
        handle.wait()
    for part, place in zip(parts, places):
        if place is not None:
            shard_of(part, group).copy_(place)
    if sharded:
        for handle in [gather_shards_(part, group) for part in parts]:
            handle.wait()
    return flat


def check_every_way():
    ranks = dist.get_world_size()
    size = 12 * 64 * ranks
    collectives._SLICE_ELEMENTS = 5 * 64 * ranks  # so that a whole tensor takes several slices, and the last is shorter
    for dtype in DTYPES:
        values = values_of_ranks(size, dtype, ranks=ranks)
        exact = sum(value.double() for value in values)
        ordered = in_rank_order(values)
        for average in (False, True):
            factor = 1 / ranks if average else 1
            for sharded in (False, True):
                for buckets in (1, 12):
                    total = reduced(values, ReductionPolicy(average=average), sharded=sharded, buckets=buckets)
                    error = (total.double() - exact * factor).norm() / exact.norm() / factor
                    assert error < 4 * torch.finfo(dtype).eps, (dtype, average, sharded, error)
                    for policy in (
                        ReductionPolicy(deterministic=True, average=average),
                        ReductionPolicy(fp32_accumulation=True, average=average),
                    ):
                        # Dtypes wider than 16 bits need no fp32 accumulation and keep the backend's order.
                        if policy.deterministic or dtype.itemsize == 2:
                            total = reduced(values, policy, sharded=sharded, buckets=buckets)
                            expected = (ordered / ranks if average else ordered).to(dtype)
                            assert torch.equal(total, expected), (policy, dtype, sharded, buckets)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, soak_only(4)])
def test_sums_are_right_in_every_dtype_and_rank_ordered_ones_to_the_bit_however_cut(ranks):
    run_on_ranks(check_every_way, ranks)


def check_discard_sizes_and_instances():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    values = values_of_ranks(64 * ranks * 5, torch.float32, ranks=ranks)
    flat = values[rank].clone()
    # A discarded first round and a second round over the whole must be bitwise equal to a single round.
    policy = ReductionPolicy(deterministic=True)
    collectives._SLICE_ELEMENTS = 64 * ranks
    reduce_bucket_(flat, dist.group.WORLD, sharded=True, policy=policy).discard()
    assert torch.equal(flat, values[rank])
    reduce_bucket_(flat.mul_(2.0), dist.group.WORLD, sharded=True, policy=policy).wait()
    expected = in_rank_order([value * 2 for value in values])
    assert torch.equal(shard_of(flat, dist.group.WORLD), shard_of(expected, dist.group.WORLD))
    with pytest.raises(AssertionError, match="can_repeat"):
        handle = reduce_bucket_(flat, dist.group.WORLD, sharded=False, policy=ReductionPolicy())
        try:
            handle.discard()
        finally:
            handle.wait()
    # Tensors of any size, which are not buckets.
    for size in (1, 2, 63, 1003):
        some = values_of_ranks(size, torch.float32, ranks=ranks)
        assert torch.equal(reduced(some, policy, sharded=False), in_rank_order(some))
    if ranks % 2 == 0:
        check_instances(values, instances=2)


def check_instances(values, *, instances):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    size = ranks // instances
    inside = [dist.new_group(list(range(i * size, (i + 1) * size))) for i in range(instances)][rank // size]
    across = [dist.new_group(list(range(i, ranks, size))) for i in range(size)][rank % size]
    exact = sum(value.double() for value in values)
    for average in (False, True):
        for deterministic in (False, True):
            policy = ReductionPolicy(deterministic=deterministic, average=average, instances_group=across)
            for sharded in (False, True):
                cut = [reduced(values, policy, sharded=sharded, buckets=n, group=inside) for n in (1, 5)]
                error = (cut[0].double() * (ranks if average else 1) - exact).norm() / exact.norm()
                assert error < 1e-6 and (not deterministic or torch.equal(*cut))


@pytest.mark.parametrize("ranks", [4, soak_only(3)])
def test_discarded_rounds_odd_sizes_and_two_levels(ranks):
    run_on_ranks(check_discard_sizes_and_instances, ranks)


def discard_before_the_others_have_launched():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat, launched = torch.full([ranks << 16], float(rank)), torch.zeros(1)
    if rank > 0:
        dist.recv(launched, 0)
    handle = reduce_bucket_(flat, dist.group.WORLD, sharded=True, policy=ReductionPolicy(deterministic=True))
    works = handle.works()
    if rank == 0:
        for other in range(1, ranks):
            dist.send(launched, other)
    handle.discard()
    return len(works) > 0 and all(work.is_completed() for work in works)


def test_after_discard_no_message_reads_the_tensor():
    assert run_on_ranks(discard_before_the_others_have_launched, 3) == [True] * 3


def test_a_group_of_none_is_this_rank_alone():
    flat, elsewhere = torch.ones(3), torch.zeros(3)
    reduce_bucket_(flat, None, sharded=True, policy=ReductionPolicy(), into=elsewhere).wait()
    assert elsewhere.tolist() == [1.0] * 3
    for policy in (ReductionPolicy(deterministic=True, average=True), ReductionPolicy(average=True)):
        reduce_bucket_(flat, None, sharded=True, policy=policy).wait()
        gather_shards_(flat, None).wait()
    assert flat.tolist() == [1.0] * 3
