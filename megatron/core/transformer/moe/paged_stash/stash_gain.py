"""What a stage's stash saves on the device, or costs: in bytes, and as a line for the log."""

from megatron.core.transformer.moe.paged_stash.arithmetic import Footprint, footprint
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout
from megatron.core.transformer.moe.paged_stash.step_needs import StashSettings, StepNeeds


def stash_footprint(config: StashSettings, needs: StepNeeds, *, layout: PoolLayout) -> Footprint:
    """Bytes that wait on the device at the peak of a step, without and with a pool of this layout."""
    one_group = sum(spec.max_bytes for spec in needs.specs)
    return footprint(
        needs.events,
        lambda group: one_group,
        layout=layout,
        prefetch_groups=config.moe_paged_stash_prefetch_layers,
    )


def gain_line(own: Footprint, layout: PoolLayout) -> str:
    """What a stage's stash saves or costs, for the log."""
    with_stash = own.arena_bytes + own.working_set_bytes
    where = f"{layout.device_pages} pages on the device"
    if layout.host_pages:
        where += f", {layout.host_pages} on the host ({_mib(layout.host_pages * layout.page_bytes)})"
    if not layout.device_pages:
        where = f"{layout.host_pages} pages ({_mib(layout.host_pages * layout.page_bytes)}), all on the host"
    outcome = f"saves {own.saving:.0%}"
    if own.saving < 0:
        outcome = (
            f"COSTS {-own.saving:.0%}: less memory is needed here with a smaller "
            "moe_paged_stash_buffer_size_factor_cuda, moe_paged_stash_page_size or moe_paged_stash_prefetch_layers, or "
            "without moe_paged_stash"
        )
    return (
        f"paged stash: {where}; {_mib(own.arena_bytes)} of pages + {_mib(own.working_set_bytes)} of buffers "
        f"= {_mib(with_stash)} instead of {_mib(own.static_bytes)} of full buffers on the device: {outcome}"
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
