"""How large a pool a stage of a training run is: from settings, what a step needs and what earlier steps taught.

Pools are built and grown elsewhere; what they save is stash_gain.py's.
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction

from megatron.core.transformer.moe.paged_stash.arithmetic import resident_groups
from megatron.core.transformer.moe.paged_stash.learned_sizes import LearnedSizes
from megatron.core.transformer.moe.paged_stash.page_layout import PoolLayout
from megatron.core.transformer.moe.paged_stash.stash_order import StashEvent
from megatron.core.transformer.moe.paged_stash.step_needs import StashSettings, StepNeeds, multiple

# A pool that was too small grows by this share of itself at least: a few reruns reach any size.
_LEAST_GROWTH = Fraction(1, 2)
# Room for somewhat more than the step that failed needed.
HEADROOM = Fraction(11, 10)
# A reserve for all rows of a buffer is a guarantee, and counts on no page that comes back before the step ends.
_ALMOST_ALL = 0.999


def pool_layout(config: StashSettings, needs: StepNeeds, *, learned: LearnedSizes) -> PoolLayout | None:
    """The pool of a stage whose longest step has these needs; None if it stashes nothing.

    Pages that a run once grew to stay, unless their tier is not wanted any more. Raises ValueError for more pages than
    a pool can count.
    """
    if needs.most_pages == 0:
        return None
    given, balanced = config.moe_paged_stash_buffer_bytes, needs.balanced_pages
    if given is None:
        device = _pages_of_factor(config.moe_paged_stash_buffer_size_factor_cuda, needs, learned=learned)
    else:
        device = given // needs.page_bytes
    host = _pages_of_factor(config.moe_paged_stash_buffer_size_factor_cpu, needs, learned=learned)
    if device:
        device = max(device, multiple(learned.device_factor or 0.0, balanced))
    if host:
        host = max(host, multiple(learned.host_factor or 0.0, balanced))
    of_device = "size_factor_cuda" if given is None else "bytes"
    for name, pages in ((of_device, device), ("size_factor_cpu", host)):
        if pages >= 2**31:
            raise ValueError(
                f"moe_paged_stash_buffer_{name} asks for {pages} pages of {needs.page_bytes} bytes: must "
                f"be fewer than 2**31; full buffers fill {needs.most_pages}"
            )
    # A pool has a page, however small the factors.
    return PoolLayout(needs.page_bytes, max(device, 1 - min(host, 1)), host)


def grown_sizes(layout: PoolLayout, needs: StepNeeds, *, wanted_pages: int) -> LearnedSizes | None:
    """The factor that gives a pool which was too small room for wanted_pages; None if it has room for full buffers.

    wanted_pages: the most held at once by what found no pages in this pool, and by all that is more important. The
    device tier grows; a pool without one grows on the host. The factors of all ranks merged, pool_layout gives the
    pools.
    """
    if layout.num_pages >= needs.most_pages:
        return None
    enough = max(math.ceil(wanted_pages * HEADROOM), math.ceil(layout.num_pages * (1 + _LEAST_GROWTH)))
    total, balanced = min(enough, needs.most_pages), max(needs.balanced_pages, 1)
    if layout.device_pages == 0:
        return LearnedSizes(host_factor=total / balanced)
    return LearnedSizes(device_factor=(total - layout.host_pages) / balanced)


def capacity_factor(factor: float, learned: LearnedSizes) -> float:
    """The factor of the static buffers: what it was until now, or what an earlier step of the run needed."""
    return max(factor, learned.capacity_factor or factor)


def expected_share(most_share: float, *, balanced_rows: int, max_rows: int) -> float:
    """Returns the share of max_rows that a pass is expected to have, for a stash's reserve.

    It is that of the fullest pass so far. most_share: that pass's rows over balanced_rows; 0 if none is known.
    """
    return min(_ALMOST_ALL, max(1.0, most_share) * balanced_rows / max_rows)


def learned_lines(config: StashSettings, learned: LearnedSizes) -> list[str]:
    """Returns log lines on settings that a resumed run exceeds, because it had to grow before its checkpoint."""
    # Any growth is beyond a number of bytes; a tier that is not wanted any more does not grow.
    device = config.moe_paged_stash_buffer_size_factor_cuda or math.inf
    host = config.moe_paged_stash_buffer_size_factor_cpu or math.inf
    sizes = (
        ("moe_expert_rank_capacity_factor", config.moe_expert_rank_capacity_factor or 0.0, learned.capacity_factor),
        (
            "moe_paged_stash_buffer_size_factor_cuda",
            device if config.moe_paged_stash_buffer_bytes is None else 0.0,
            learned.device_factor,
        ),
        ("moe_paged_stash_buffer_size_factor_cpu", host, learned.host_factor),
    )
    return [
        f"{name}: the run of the checkpoint had to grow to {grown:.4g}, which counts here too; give a larger one to "
        "overrule it"
        for name, asked, grown in sizes
        if grown is not None and grown > asked
    ]


def check_effect(stages: Iterable[Sequence[StashEvent]]) -> None:
    """Raises ValueError if no stage would ever stash anything. stages: the events of each one's longest step.

    A stage without experts, or whose backward always follows, is fine as long as another one stashes.
    """
    if not any({event.group for event in events} - resident_groups(events) for events in stages):
        raise ValueError(
            "moe_paged_stash is True but can have no effect: the backward of every expert group directly follows its "
            "forward, so that nothing waits; it needs several layers with experts, or pipeline stages with several "
            "microbatches: drop moe_paged_stash"
        )


def _pages_of_factor(factor: float, needs: StepNeeds, *, learned: LearnedSizes) -> int:
    return multiple(abs(factor), needs.pages_of_shares(learned.rows_share) if factor < 0 else needs.balanced_pages)
