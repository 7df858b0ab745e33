"""How large a pool a stage of a training run needs: from settings, the order of a step and what earlier steps taught.

Pure and exact to the page; peaks are counted in arithmetic.py. Pools are built and grown elsewhere.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Protocol

import torch

from megatron.core.transformer.moe.paged_stash.arithmetic import (
    Footprint,
    PagesByPriority,
    footprint,
    pages_for,
    peak_pages,
    resident_groups,
)
from megatron.core.transformer.moe.paged_stash.page_layout import ALIGNMENT, PoolLayout, Priority, TensorSpec
from megatron.core.transformer.moe.paged_stash.stash_order import Group, StashEvent, layer_name

RowsOf = Callable[[Group], int]
# A pool that was too small grows by this share of itself at least: a few reruns reach any size.
_LEAST_GROWTH = Fraction(1, 2)
# Room for somewhat more than the step that failed needed.
HEADROOM = Fraction(11, 10)


class StashSettings(Protocol):
    """What sizes follow from; TransformerConfig has it."""

    hidden_size: int
    moe_ffn_hidden_size: int | None
    gated_linear_unit: bool
    expert_tensor_parallel_size: int | None
    recompute_modules: list[str] | None
    params_dtype: torch.dtype
    moe_expert_rank_capacity_factor: float | None
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    moe_paged_stash_buffer_bytes: int | None
    moe_paged_stash_prefetch_layers: int


def page_bytes(config: StashSettings) -> int:
    """Bytes of a page: the rows of page_size tokens, in whole words of 16 bytes."""
    row_bytes = config.hidden_size * config.params_dtype.itemsize
    return -(-config.moe_paged_stash_page_size * row_bytes // ALIGNMENT) * ALIGNMENT


def expert_specs(config: StashSettings, *, rows: int, weight_itemsize: int = 4) -> tuple[TensorSpec, ...]:
    """What the experts of one layer leave for backward in buffers of `rows` rows: x, weights, gate_up and act.

    weight_itemsize: bytes of a routing weight. With moe_act recomputed there is no act.
    """
    assert config.moe_ffn_hidden_size is not None, "filled in by TransformerConfig"
    itemsize = config.params_dtype.itemsize
    ffn = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
    widths = [
        (config.hidden_size * itemsize, Priority.INPUT),
        (weight_itemsize, Priority.INPUT),
        (ffn * (2 if config.gated_linear_unit else 1) * itemsize, Priority.GATE_UP),
    ]
    if "moe_act" not in (config.recompute_modules or []):
        widths.append((ffn * itemsize, Priority.ACT))
    return tuple(TensorSpec(width, width, rows, priority) for width, priority in widths)


@dataclass(frozen=True)
class LearnedSizes:
    """What steps taught about sizes, the same on all ranks; a checkpoint carries it.

    capacity_factor: what moe_expert_rank_capacity_factor grew to. device_factor, host_factor: what pools grew to, of
    the balanced need. None: did not grow. rows_share: layer (from 1) -> the most rows that a pass of it had on any
    rank, over the balanced case. expert_ranks: how many ranks shared the experts then; 0: unknown.
    """

    capacity_factor: float | None = None
    device_factor: float | None = None
    host_factor: float | None = None
    rows_share: Mapping[int, float] = field(default_factory=dict)
    expert_ranks: int = 0

    def merged(self, other: "LearnedSizes") -> "LearnedSizes":
        """The larger of each size, as of two ranks or of two moments of one run."""
        layers = sorted({*self.rows_share, *other.rows_share})
        shares = {layer: max(self.rows_share.get(layer, 0.0), other.rows_share.get(layer, 0.0)) for layer in layers}
        return LearnedSizes(
            _larger(self.capacity_factor, other.capacity_factor),
            _larger(self.device_factor, other.device_factor),
            _larger(self.host_factor, other.host_factor),
            shares,
            max(self.expert_ranks, other.expert_ranks),
        )

    def for_expert_ranks(self, expert_ranks: int) -> "LearnedSizes":
        """What holds where that many ranks share the experts.

        Ranks that take over others' experts get the mean of their shares, at most the largest. Of experts that are
        spread further nothing is known of the single rank: rows are measured again.
        """
        is_known = 0 < expert_ranks <= self.expert_ranks
        shares = self.rows_share if is_known else {}
        return LearnedSizes(self.capacity_factor, self.device_factor, self.host_factor, shares, expert_ranks)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {**vars(self), "rows_share": {str(layer): share for layer, share in self.rows_share.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> "LearnedSizes":
        """What to_json gave; None, as in a checkpoint without sizes: nothing learned."""
        if values is None:
            return cls()
        known = {name: values[name] for name in vars(cls()) if name in values}
        shares = {int(layer): share for layer, share in values.get("rows_share", {}).items()}
        return cls(**{**known, "rows_share": shares})


@dataclass(frozen=True)
class StepNeeds:
    """What a stage stashes in a step: events in their order, tensors of each group, live rows of a balanced pass."""

    events: Sequence[StashEvent]
    specs: Sequence[TensorSpec]
    balanced_rows: int
    page_bytes: int

    def pages(self, rows: RowsOf, *, up_to: Priority = Priority.ACT) -> int:
        """Most pages held at once if every tensor at least as important as `up_to` gets its pages."""
        unit = PoolLayout(self.page_bytes, device_pages=1)

        def of(group: Group) -> PagesByPriority:
            return PagesByPriority() if group in self._resident else pages_for(self.specs, rows(group), layout=unit)

        return peak_pages(self.events, of, up_to=up_to)

    # These are asked for in every step, of thousands of events.
    @cached_property
    def balanced_pages(self) -> int:
        """If every pass has the balanced number of rows."""
        return self.pages(lambda group: self.balanced_rows)

    @cached_property
    def most_pages(self) -> int:
        """If every buffer is full; no pool needs more."""
        return self.pages(lambda group: self._max_rows)

    def measured_pages(self, learned: LearnedSizes) -> int:
        """If every pass has the most rows that its layer had so far; a layer without any has the balanced number."""
        shares = {layer_name(layer): share for layer, share in learned.rows_share.items()}

        def rows(group: Group) -> int:
            return min(math.ceil(_exact(shares.get(group[0], 1.0)) * self.balanced_rows), self._max_rows)

        return self.pages(rows)

    @cached_property
    def _resident(self) -> set[Group]:
        return resident_groups(self.events)

    @property
    def _max_rows(self) -> int:
        return min((spec.max_tokens for spec in self.specs), default=0)


def pool_layout(
    config: StashSettings,
    events: Sequence[StashEvent],
    *,
    balanced_rows: int,
    specs: Sequence[TensorSpec],
    learned: LearnedSizes,
) -> PoolLayout | None:
    """The pool of a stage whose longest step has these events; None if it stashes nothing.

    balanced_rows: rows of a pass if every rank gets as many. Pages that a run once grew to stay, unless their tier is
    not wanted any more. Raises ValueError for more pages than a pool can count.
    """
    needs = StepNeeds(events, specs, balanced_rows, page_bytes(config))
    if needs.most_pages == 0:
        return None
    given, balanced = config.moe_paged_stash_buffer_bytes, needs.balanced_pages
    if given is None:
        device = _pages_of_factor(config.moe_paged_stash_buffer_size_factor_cuda, needs, learned=learned)
    else:
        device = given // needs.page_bytes
    host = _pages_of_factor(config.moe_paged_stash_buffer_size_factor_cpu, needs, learned=learned)
    if device:
        device = max(device, _multiple(learned.device_factor or 0.0, balanced))
    if host:
        host = max(host, _multiple(learned.host_factor or 0.0, balanced))
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


def capacity_factor(flag: float, learned: LearnedSizes) -> float:
    """The factor of the static buffers: what was asked for, or what an earlier step of the run needed."""
    return max(flag, learned.capacity_factor or flag)


def learned_lines(config: StashSettings, learned: LearnedSizes) -> list[str]:
    """For the log: which settings a resumed run goes beyond, because it had to grow before its checkpoint."""
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


def stash_footprint(
    config: StashSettings, events: Sequence[StashEvent], *, specs: Sequence[TensorSpec], layout: PoolLayout | None
) -> Footprint:
    """Bytes that wait on the device at the peak of a step of these events, without and with a pool of this layout."""
    one_group = sum(spec.max_bytes for spec in specs)
    empty = PoolLayout(ALIGNMENT, device_pages=0, host_pages=1)
    return footprint(
        events,
        lambda group: one_group,
        layout=layout or empty,
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


def factor_at(quantile: float, peaks: Sequence[float]) -> float:
    """The smallest of the observed peaks that at least this share of them do not exceed; quantile: above 0, at most 1.

    peaks: of each step, what it needed over the balanced case. Of n steps nothing is known beyond 1 - 1/n: the answer
    then is the largest. Raises ValueError for no peaks and for other quantiles.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile is {quantile}: must be above 0 and at most 1")
    if not peaks:
        raise ValueError("peaks is empty: a quantile needs a step at least")
    return sorted(peaks)[math.ceil(_exact(quantile) * len(peaks)) - 1]


def peaks_of_trace(needs: StepNeeds, steps: Sequence[Sequence[int]]) -> list[float]:
    """Of each recorded step, pages of its peak over those of the balanced step, as factor_at takes them.

    steps: live rows of each forward of the needs' events, in their order. Raises ValueError for another number.
    """
    groups = list(dict.fromkeys(event.group for event in needs.events))
    peaks = []
    for number, rows in enumerate(steps):
        if len(rows) != len(groups):
            raise ValueError(f"step {number} has {len(rows)} passes: must have {len(groups)}, one a forward")
        peaks.append(needs.pages(dict(zip(groups, rows)).__getitem__) / max(needs.balanced_pages, 1))
    return peaks


def _pages_of_factor(factor: float, needs: StepNeeds, *, learned: LearnedSizes) -> int:
    return _multiple(abs(factor), needs.measured_pages(learned) if factor < 0 else needs.balanced_pages)


def _multiple(factor: float, pages: int) -> int:
    """factor x pages, rounded up."""
    return math.ceil(_exact(factor) * pages)


def _exact(number: float) -> Fraction:
    """The decimal number that the user wrote, or a ratio of page counts: 1.1 x 10 pages are 11, not 12."""
    return Fraction(number).limit_denominator(10**9)


def _larger(one: float | None, other: float | None) -> float | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
