"""If one rank cannot allocate its pool, every rank raises the error; on two processes."""

import pytest
import torch
import torch.distributed as dist

from megatron.core.group_collectives import RemoteRankError
from megatron.core.transformer.moe.paged_stash import PoolLayout
from megatron.core.transformer.paged_stash_config import PagedStashConfig
from megatron.training.step.expert_memory import open_pool
from tests.harness import run_on_ranks

TOO_MUCH = 2**31 - 1  # pages of 64 MiB: more than any address space


def refused_everywhere() -> None:
    rank = dist.get_rank()
    config = PagedStashConfig(moe_paged_stash=True, moe_paged_stash_buffer_size_factor_cpu=0.5)
    pool = open_pool(torch.device("cpu"), PoolLayout(64, 3) if rank else None, config=config)
    assert (pool is None) == (rank == 0)
    for layout, flag in (
        (PoolLayout(2**26, 1, TOO_MUCH), "--moe-paged-stash-buffer-size-factor-cpu is 0.5: 144115188008747008 bytes"),
        (PoolLayout(2**26, TOO_MUCH), "--moe-paged-stash-buffer-size-factor-cuda is 1.1: 144115188008747008 bytes"),
    ):
        with pytest.raises(ValueError if rank == 1 else RemoteRankError, match=flag):
            open_pool(torch.device("cpu"), layout if rank == 1 else None, config=config)
    with pytest.raises(
        ValueError if rank == 1 else RemoteRankError, match="--moe-paged-stash-prefetch-layers 0, which"
    ):
        layout = PoolLayout(2**26, TOO_MUCH) if rank == 1 else None
        open_pool(torch.device("cpu"), layout, config=config, scratch_pages=1, scratch_sets=2)


def test_memory_that_one_rank_lacks_is_named_on_every_rank() -> None:
    run_on_ranks(refused_everywhere, 2)


@pytest.mark.parametrize("heap_is_kept", [True, False])
def test_a_pool_keeps_restored_memory_where_the_heap_does_not(
    heap_is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatron.training.step.expert_memory.keep_cpu_heap", lambda: heap_is_kept)
    pool = open_pool(torch.device("cpu"), PoolLayout(64, 3), config=PagedStashConfig(moe_paged_stash=True))
    assert pool is not None
    # Each buffer is freed before the next call, so a pool that keeps memory returns the same memory again.
    addresses = {pool.restored.take(2**21).data_ptr() for _ in range(2)}
    kept = [len(buffers) for buffers in pool.restored._persistent.values()]
    assert kept == ([] if heap_is_kept else [1])
    assert heap_is_kept or len(addresses) == 1
