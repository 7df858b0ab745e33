"""Opens the pools of a run, on all ranks or on none. How large they are is decided in core's paged_stash/sizing.py."""

import torch

from megatron.core.device import keep_cpu_heap
from megatron.core.group_collectives import all_ranks_agree
from megatron.core.transformer.moe.paged_stash import PagePool, PoolLayout
from megatron.core.transformer.moe.paged_stash.page_layout import Tier
from megatron.core.transformer.moe.paged_stash.page_pool import TierMemoryError
from megatron.core.transformer.paged_stash_config import PagedStashConfig
from megatron.training.command_line.config_builder import flags_named_in_errors

_CUDA, _CPU = "moe_paged_stash_buffer_size_factor_cuda", "moe_paged_stash_buffer_size_factor_cpu"


def open_pool(device: torch.device, layout: PoolLayout | None, *, config: PagedStashConfig) -> PagePool | None:
    """This rank's pool; None where the stage stashes nothing, and so has no layout. Collective over all ranks.

    Raises on every rank if one has too little memory: on that one a ValueError that names the flag and what helps, on
    the others a RemoteRankError.
    """
    pool = None
    with all_ranks_agree(), flags_named_in_errors():
        try:
            if layout is not None:
                # Setup has called it already; it answers whether the heap is kept.
                is_kept = device.type == "cpu" and keep_cpu_heap()
                pool = PagePool(device, layout, keeps_restored=not is_kept)
        except TierMemoryError as error:
            raise ValueError(_advice(error, config)) from error
    return pool


def _advice(error: TierMemoryError, config: PagedStashConfig) -> str:
    wanted = f"{error.num_bytes} bytes ({error.num_bytes / 2**30:.2f} GiB)"
    if error.tier is Tier.HOST:
        return (
            f"{_CPU} is {config.moe_paged_stash_buffer_size_factor_cpu}: {wanted} of page-locked host memory cannot be "
            "had; give a smaller factor, run fewer ranks on this machine, or raise its limit of locked memory "
            "(ulimit -l)"
        )
    given = config.moe_paged_stash_buffer_bytes
    name = _CUDA if given is None else "moe_paged_stash_buffer_bytes"
    asked = config.moe_paged_stash_buffer_size_factor_cuda if given is None else given
    return (
        f"{name} is {asked}: {wanted} for pages cannot be had on the device; give a smaller one, and {_CPU} for pages "
        "on the host"
    )
