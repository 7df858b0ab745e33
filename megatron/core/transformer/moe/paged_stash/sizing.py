"""Sizes of a stage's page pool: the pages that a step requires, the sizes learned in a run, and the pool's layout.

Page counts are exact for any number of rows per pass. arithmetic.py counts pages. training/step/expert_memory.py
allocates the pools and grows them.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.transformer.moe.paged_stash.arithmetic import Footprint, footprint, peak_pages, resident_groups
from megatron.core.transformer.moe.paged_stash.page_layout import (
    ALIGNMENT,
    DEFAULT_PAGE_SIZE,
    LEAST_IMPORTANT,
    TILE_ROWS,
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
    page_bytes,
    pages_for,
)
from megatron.core.transformer.moe.paged_stash.row_encoding import encoded_bytes, encoded_width
from megatron.core.transformer.moe.paged_stash.stash_order import GroupKey, StashEvent, layer_name, layer_of

# Smallest growth of a pool that was too small, as a share of its size, so that a few retries reach any size.
_LEAST_GROWTH = Fraction(1, 2)
# Headroom beyond the pages that the failed step required.
HEADROOM = Fraction(11, 10)
# Largest expected share. Reserving pages for all rows of a buffer (share 1) would be a guarantee, which assumes that no
# page is released before the step ends.
_ALMOST_ALL = 0.999
# Number of past steps that the reserve considers. With fewer steps less is recomputed. With 2 steps, however, an x
# received no pages in routing that benchmarks/stash_factors.py recorded.
RESERVE_STEPS = 8
# Largest page of a GPU that is chosen without a requested size.
_LARGEST_PAGE = 64 * 2**20

RowsOf = Callable[[GroupKey], int]


class StashSettings(Protocol):
    """Settings that determine sizes. TransformerConfig implements them."""

    hidden_size: int
    moe_ffn_hidden_size: int
    gated_linear_unit: bool
    expert_tensor_parallel_size: int
    lora_rank: int | None
    lora_target_modules: list[str]
    params_dtype: torch.dtype
    moe_expert_rank_capacity_factor: float | None
    moe_paged_stash: bool
    moe_paged_stash_dtype: str | None
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    moe_paged_stash_buffer_bytes: int | None
    moe_paged_stash_prefetch_layers: int

    @property
    def stash_computes_in_pages(self) -> bool:
        """Whether experts compute in the pages of the stash."""
        ...

    @property
    def captures_experts(self) -> bool:
        """Whether CUDA graphs capture parts of layers that contain experts."""
        ...

    @property
    def expert_layers(self) -> Sequence[int]:
        """Numbers of the layers with experts."""
        ...

    @property
    def block_format_of(self) -> Callable[[int | None], BlockFormat | None]:
        """Maps a layer number, from 1, to the format in which its experts save x; None for params_dtype."""
        ...


@dataclass(frozen=True)
class StepNeeds:
    """Requirements of one step: events in order, tensor specs of groups by name, and live rows of a balanced pass.

    A pass is balanced if every rank receives the same number of rows.
    """

    events: Sequence[StashEvent]
    specs: Mapping[str, Sequence[TensorSpec]]
    balanced_rows: int
    page_bytes: int

    def pages(self, rows: RowsOf, *, up_to: Priority = LEAST_IMPORTANT) -> int:
        """Returns the peak page count if every tensor at least as important as `up_to` receives pages.

        rows: returns the live rows of a group. up_to: by default, all tensors receive pages.
        """
        unit = PoolLayout(self.page_bytes, device_pages=1)

        def of(group: GroupKey) -> PagesByPriority:
            if group in self._resident:
                return PagesByPriority()
            return pages_for(self.specs[group[0]], rows(group), layout=unit)

        return peak_pages(self.events, of, up_to=up_to)

    # Cached, because every step reads them, and a step may have thousands of events.
    @cached_property
    def balanced_pages(self) -> int:
        """Number of pages required if every pass has the balanced number of rows."""
        return self.pages(lambda group: self.balanced_rows)

    @cached_property
    def most_pages(self) -> int:
        """Number of pages required if every buffer is full, which is the largest useful pool."""
        return self.pages(lambda group: self.max_rows)

    def pages_of_shares(self, rows_share: Mapping[int, float]) -> int:
        """Returns the number of pages required if each pass has its layer's multiple of the balanced rows.

        rows_share: multiple for each layer number, from 1; it is 1 for layers without an entry.
        """
        shares = {layer_name(layer): share for layer, share in rows_share.items()}

        def rows(group: GroupKey) -> int:
            return min(multiple(shares.get(group[0], 1.0), self.balanced_rows), self.max_rows)

        return self.pages(rows)

    @cached_property
    def _resident(self) -> set[GroupKey]:
        return resident_groups(self.events)

    @property
    def max_rows(self) -> int:
        """Rows of a group's buffers."""
        return min((spec.max_tokens for specs in self.specs.values() for spec in specs), default=0)


def step_needs(config: StashSettings, events: Sequence[StashEvent], *, max_rows: int, balanced_rows: int) -> StepNeeds:
    """Returns the requirements of a stage whose step has these events and whose buffers have max_rows rows."""
    forms = {event.name: config.block_format_of(layer_of(event.name)) for event in events}
    of_forms = {form: expert_specs(config, rows=max_rows, form=form) for form in {*forms.values()}}
    specs = {name: of_forms[form] for name, form in forms.items()}
    one_page = page_bytes(
        config.moe_paged_stash_page_size, hidden_size=config.hidden_size, itemsize=config.params_dtype.itemsize
    )
    return StepNeeds(events, specs, balanced_rows, one_page)


def page_size_on_gpu(config: StashSettings) -> int:
    """Returns the rows of hidden size per page on a GPU.

    If experts compute in pages, a page holds whole rows of all tensors, and by default enough of them for a tile of the
    kernels. Raises ValueError for a size of which a page does not.
    """
    size, given = config.moe_paged_stash_page_size, config.moe_paged_stash_buffer_bytes
    if not config.stash_computes_in_pages:
        return size
    widths, least, unit = _widths(config), least_page_size(config), _hidden_bytes(config)
    size = usual_page_size(config) if size == DEFAULT_PAGE_SIZE else size
    if given is not None and given < size * unit:
        raise ValueError(
            f"moe_paged_stash_buffer_bytes is {given}: must be at least one page, {size * unit} bytes "
            f"({size} rows of x)"
        )
    if size % least:
        raise ValueError(
            f"moe_paged_stash_page_size is {size}: must be a multiple of {least}, so that a page holds whole rows of x "
            f"and gate_up ({' and '.join(map(str, widths))} bytes), or moe_paged_stash_compute must be copies"
        )
    return size


def usual_page_size(config: StashSettings) -> int:
    """Returns the rows of hidden size in a page of a GPU in which experts compute, if no size is requested.

    It holds at least a tile of the kernels. DEFAULT_PAGE_SIZE stands for it. Raises ValueError if rows of x in 8 bits
    would require huge pages.
    """
    size = TILE_ROWS * least_page_size(config)
    num_bytes = size * _hidden_bytes(config)
    if any(formats(config)) and num_bytes > _LARGEST_PAGE:
        raise ValueError(
            f"moe_paged_stash_compute is 'pages': with fp8, rows of x and gate_up have "
            f"{' and '.join(map(str, _widths(config)))} bytes, and pages that hold {TILE_ROWS} whole rows of each "
            f"would have {num_bytes / 2**20:,.1f} MiB, more than {_LARGEST_PAGE / 2**20:.0f} MiB; must be copies "
            "(--moe-paged-stash-compute copies), the default on GPUs"
        )
    return size


def least_page_size(config: StashSettings) -> int:
    """Returns the rows of hidden size in the smallest page that holds whole rows of x and of gate_up, of all layers."""
    unit = _hidden_bytes(config)
    # Pages are multiples of ALIGNMENT bytes.
    return math.lcm(*_widths(config), ALIGNMENT, unit) // unit


def _hidden_bytes(config: StashSettings) -> int:
    """Returns the bytes of a row of hidden size, the unit of page sizes."""
    return config.hidden_size * config.params_dtype.itemsize


def _widths(config: StashSettings) -> list[int]:
    """Returns the distinct bytes of a row of the tensors that experts save in pages, over all layers, x first."""
    specs = [spec for form in formats(config) for spec in expert_specs(config, rows=1, form=form)]
    return list(dict.fromkeys(spec.row_bytes for spec in specs))


def formats(config: StashSettings) -> list[BlockFormat | None]:
    """Returns each format in which a layer's experts save x, once; None stands for params_dtype."""
    return list(dict.fromkeys(map(config.block_format_of, config.expert_layers)))


def expert_specs(config: StashSettings, *, rows: int, form: BlockFormat | None = None) -> tuple[TensorSpec, ...]:
    """Returns specs of the tensors that a layer's experts save in pages for `rows` rows: x and gate_up.

    Experts whose rows are copied also save routing weights, fp32, and the input rows of each adapter times its first
    matrix. Rows that are encoded have the bytes of their encoding. form: format of x, or None.
    """
    specs = []
    for (width, dtype, priority), encoded in zip(_saved_rows(config, form), _encoded_widths(config, form), strict=True):
        row_bytes = encoded_bytes(encoded) if encoded else width * dtype.itemsize
        specs.append(TensorSpec(row_bytes, row_bytes, rows, priority))
    return tuple(specs)


def _encoded_widths(config: StashSettings, form: BlockFormat | None) -> list[int]:
    """Returns the elements of an encoded row of each tensor that experts save in pages; 0 for rows that are not."""
    is_lossy = config.moe_paged_stash_dtype is not None
    rows = _saved_rows(config, form)
    return [encoded_width(width * dtype.itemsize, dtype) if is_lossy else 0 for width, dtype, _ in rows]


def stored_row_bytes(config: StashSettings, form: BlockFormat | None = None) -> int:
    """Returns the bytes of a row of all tensors that experts save in pages. form: format of x, or None."""
    return sum(spec.row_bytes for spec in expert_specs(config, rows=0, form=form))


def buffer_row_bytes(config: StashSettings, form: BlockFormat | None = None) -> int:
    """Returns the bytes of a row of all tensors that experts save in pages, as they are in whole buffers.

    form: format of x, or None.
    """
    return sum(width * dtype.itemsize for width, dtype, _ in _saved_rows(config, form))


def largest_of_layers(num_bytes: int, config: StashSettings, *, layers: Sequence[int], rows: int) -> int:
    """Returns the bytes that the experts of one layer save for backward, the largest of these layers.

    num_bytes: bytes of all layers, which differ only in the format of x. rows: rows of a buffer.
    """
    if not num_bytes or not layers:
        return 0
    of_layers = [buffer_row_bytes(config, config.block_format_of(layer)) for layer in layers]
    missing = rows * (max(of_layers) * len(layers) - sum(of_layers))
    return (num_bytes + missing) // len(layers)


def mean_row_bytes(config: StashSettings) -> int:
    """Returns the bytes of a row in pages as LearnedSizes records them: the mean of all layers."""
    of_forms = {form: stored_row_bytes(config, form) for form in formats(config)}
    of_layers = [of_forms[config.block_format_of(layer)] for layer in config.expert_layers]
    return sum(of_layers) // len(of_layers)


def _saved_rows(config: StashSettings, form: BlockFormat | None) -> list[tuple[int, torch.dtype, Priority]]:
    """Returns the elements of a row, dtype and priority of each tensor that experts save in pages, x first."""
    dtype = config.params_dtype
    ffn = config.moe_ffn_hidden_size // config.expert_tensor_parallel_size
    # Rows in 8 bits are bytes to a stash.
    width, of_x = (config.hidden_size, dtype) if form is None else (form.row_bytes(config.hidden_size), torch.uint8)
    x = width, of_x, Priority.INPUT
    # A gate_up that is never recomputed is as important as x.
    priority = Priority.GATE_UP if config.moe_paged_stash_dtype is None else Priority.INPUT
    gate_up = ffn * (2 if config.gated_linear_unit else 1), dtype, priority
    if config.stash_computes_in_pages:
        return [x, gate_up]
    low = [name for name in ("linear_fc1", "linear_fc2") if name in config.lora_target_modules]
    adapters = [] if config.lora_rank is None else [(config.lora_rank, dtype, Priority.INPUT) for _ in low]
    return [x, (1, torch.float32, Priority.INPUT), gate_up, *adapters]


def prefetch_groups(config: StashSettings) -> int:
    """Returns the number of groups whose rows are restored, and their pages released, ahead of their backward."""
    # Rows are not restored from the pages in which experts compute, and a graph that holds a part of one layer cannot
    # restore the rows of another layer.
    is_alone = config.stash_computes_in_pages or config.captures_experts
    return 0 if is_alone else config.moe_paged_stash_prefetch_layers


def scratch_sets(config: StashSettings) -> int:
    """Returns the number of sets of scratch pages: 2 if rows on the host are prefetched, else 1; 0 for copies."""
    if not config.stash_computes_in_pages:
        return 0
    has_host_pages = config.moe_paged_stash_buffer_size_factor_cpu != 0
    prefetches = config.moe_paged_stash_prefetch_layers > 0 and not config.captures_experts
    return 2 if has_host_pages and prefetches else 1


def scratch_pages(config: StashSettings, needs: StepNeeds) -> int:
    """Returns the pages of one set, in which the rows of a group without pages on the device are computed.

    It suffices for the largest group, and is 0 if rows are copied.
    """
    if not config.stash_computes_in_pages:
        return 0
    unit = PoolLayout(needs.page_bytes, device_pages=1)
    of_groups = (sum(unit.pages_for(spec.max_bytes) for spec in specs) for specs in needs.specs.values())
    return max(of_groups, default=0)


class PoolBytes(NamedTuple):
    """Bytes of a pool.

    device: its pages and scratch on the device. host: its pages on the host. one_group: the part of the scratch that
    replaces the whole buffers of the group whose backward follows; 0 if that group has buffers beside the pool.
    """

    device: int = 0
    host: int = 0
    one_group: int = 0

    @property
    def total(self) -> int:
        """Bytes on the device and on the host."""
        return self.device + self.host


def pool_bytes(config: StashSettings, needs: StepNeeds, layout: PoolLayout | None) -> PoolBytes:
    """Returns the bytes of a pool with this layout; None means no pool."""
    if layout is None:
        return PoolBytes()
    on_device = layout.device_pages + scratch_pages(config, needs) * scratch_sets(config)
    # A group in a graph of its own does not use the scratch, which may be overwritten between two graphs.
    is_in_scratch = config.stash_computes_in_pages and not config.captures_experts
    of_groups = (sum(spec.max_bytes for spec in specs) for specs in needs.specs.values())
    one_group = max(of_groups, default=0) if is_in_scratch else 0
    return PoolBytes(on_device * layout.page_bytes, layout.host_pages * layout.page_bytes, one_group)


def multiple(factor: float, count: int) -> int:
    """Returns factor x count, rounded up.

    The factor is a decimal number from the user or a ratio of page counts: 1.1 x 10 pages are 11, not 12.
    """
    return math.ceil(Fraction(factor).limit_denominator(10**9) * count)


@dataclass(frozen=True)
class LearnedSizes:
    """Sizes learned from earlier steps, identical on all ranks and saved in checkpoints.

    capacity_factor: grown moe_expert_rank_capacity_factor. device_factor, host_factor: grown pool sizes relative to the
    pages of balanced passes. None means not grown. rows_share: for each layer number, from 1, the largest number of
    rows of a pass on any rank, relative to a balanced pass. expert_ranks: number of ranks that shared the experts; 0 if
    unknown. row_bytes: bytes of one row in pages, over all tensors, as the mean of all layers; 0 if unknown.
    """

    capacity_factor: float | None = None
    device_factor: float | None = None
    host_factor: float | None = None
    rows_share: Mapping[int, float] = field(default_factory=dict)
    expert_ranks: int = 0
    row_bytes: int = 0

    def merged(self, other: "LearnedSizes") -> "LearnedSizes":
        """Returns the maximum of each size, e.g. over two ranks or two steps of one run."""
        layers = sorted({*self.rows_share, *other.rows_share})
        shares = {layer: max(self.rows_share.get(layer, 0.0), other.rows_share.get(layer, 0.0)) for layer in layers}
        return LearnedSizes(
            _larger(self.capacity_factor, other.capacity_factor),
            _larger(self.device_factor, other.device_factor),
            _larger(self.host_factor, other.host_factor),
            shares,
            max(self.expert_ranks, other.expert_ranks),
            max(self.row_bytes, other.row_bytes),
        )

    def valid_for(self, *, expert_ranks: int, row_bytes: int) -> "LearnedSizes":
        """Returns the sizes that remain valid if expert_ranks ranks share the experts and a row has row_bytes bytes.

        With fewer ranks than before, a rank's share is a mean of known shares, and therefore at most the largest known
        share. With more ranks, the share of a single rank is unknown, and shares are measured from scratch.

        Pool factors are relative to the pages of balanced passes. With rows of another size, the tensors that must have
        pages are another share of these pages, and pools grow from scratch.
        """
        is_known = 0 < expert_ranks <= self.expert_ranks
        shares = self.rows_share if is_known else {}
        pools = (self.device_factor, self.host_factor) if row_bytes == self.row_bytes else (None, None)
        return LearnedSizes(self.capacity_factor, *pools, shares, expert_ranks, row_bytes)

    def to_json(self) -> dict[str, Any]:
        """Returns the sizes as JSON values."""
        return {**vars(self), "rows_share": {str(layer): share for layer, share in self.rows_share.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any] | None) -> "LearnedSizes":
        """Builds the sizes from the result of to_json. None, from a checkpoint without sizes, yields empty sizes.

        Raises ValueError for other values.
        """
        if values is None:
            return cls()
        if not isinstance(values, Mapping) or not isinstance(values.get("rows_share", {}), Mapping):
            raise ValueError(f"learned_sizes is {values!r:.80}: must be a mapping of sizes by name")
        known = {name: values[name] for name in vars(cls()) if name in values}
        shares = {_layer(layer): share for layer, share in values.get("rows_share", {}).items()}
        factors = [known.get(name) for name in ("capacity_factor", "device_factor", "host_factor")]
        for number in (*shares.values(), *factors):
            _check_size(number)
        for name in ("expert_ranks", "row_bytes"):
            count = known.get(name, 0)
            if isinstance(count, bool) or not isinstance(count, int) or count < 0:
                raise ValueError(f"learned_sizes.{name} is {count!r:.80}: must be an integer, 0 or more")
        return cls(**{**known, "rows_share": shares})


def _larger(one: float | None, other: float | None) -> float | None:
    return max((number for number in (one, other) if number is not None), default=None)


def _check_size(number: Any) -> None:
    """Raises ValueError unless the number is a valid size. None is valid and stands for a factor that did not grow."""
    is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
    if number is not None and not (is_number and 0 <= number < math.inf):
        raise ValueError(f"learned_sizes contains {number!r:.80}: must be a number, 0 or more")


def _layer(text: Any) -> int:
    if not isinstance(text, str) or not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ValueError(f"learned_sizes.rows_share contains {text!r:.80}: must be a layer number, starting at 1")
    return int(text)


def pool_layout(config: StashSettings, needs: StepNeeds, *, learned: LearnedSizes) -> PoolLayout | None:
    """Returns the pool layout of a stage whose longest step has these requirements; None if nothing is stashed.

    A learned larger size is used unless its tier is disabled. Raises ValueError if a tier would have more pages than a
    pool can address.
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
                f"moe_paged_stash_buffer_{name} requests {pages} pages of {needs.page_bytes} bytes: must "
                f"be fewer than 2**31; even completely full buffers occupy {needs.most_pages} pages"
            )
    # A pool has at least one page, even with tiny factors.
    return PoolLayout(needs.page_bytes, max(device, 1 - min(host, 1)), host)


def _pages_of_factor(factor: float, needs: StepNeeds, *, learned: LearnedSizes) -> int:
    return multiple(abs(factor), needs.pages_of_shares(learned.rows_share) if factor < 0 else needs.balanced_pages)


def grown_sizes(layout: PoolLayout, needs: StepNeeds, *, wanted_pages: int) -> LearnedSizes | None:
    """Returns the pool factor that wanted_pages require in an undersized pool; None if it already fits full buffers.

    wanted_pages: peak page count of the tensors that received no pages in this pool and of all more important tensors.
    The device tier grows; a pool without a device tier grows on the host. Merge the factors of all ranks before
    pool_layout.
    """
    if layout.num_pages >= needs.most_pages:
        return None
    enough = max(math.ceil(wanted_pages * HEADROOM), math.ceil(layout.num_pages * (1 + _LEAST_GROWTH)))
    total, balanced = min(enough, needs.most_pages), max(needs.balanced_pages, 1)
    if layout.device_pages == 0:
        return LearnedSizes(host_factor=total / balanced)
    return LearnedSizes(device_factor=(total - layout.host_pages) / balanced)


def capacity_factor(factor: float, learned: LearnedSizes) -> float:
    """Returns the capacity factor of static buffers: the configured one, or the learned one if it is larger."""
    return max(factor, learned.capacity_factor or factor)


def expected_share(most_share: float, *, balanced_rows: int, max_rows: int) -> float:
    """Returns the share of max_rows that a pass is expected to fill, for a stash's reserve.

    It is the share of the pass with the most rows in the last RESERVE_STEPS steps. most_share: rows of that pass
    divided by balanced_rows; 0 if unknown.
    """
    return min(_ALMOST_ALL, max(1.0, most_share) * balanced_rows / max_rows)


def learned_lines(config: StashSettings, learned: LearnedSizes, *, valid: LearnedSizes) -> list[str]:
    """Returns log lines about the sizes that a resumed run uses, and about pool sizes that it does not use.

    learned: sizes from the checkpoint. valid: the part of them that is valid in this run.
    """
    # Growth may exceed a size given in bytes. A disabled tier does not grow, and a negative factor is a multiple of the
    # measured need.
    given = config.moe_paged_stash_buffer_size_factor_cuda, config.moe_paged_stash_buffer_size_factor_cpu
    device, host = (factor if factor > 0 else math.inf for factor in given)
    sizes = (
        ("moe_expert_rank_capacity_factor", config.moe_expert_rank_capacity_factor or 0.0, valid.capacity_factor),
        (
            "moe_paged_stash_buffer_size_factor_cuda",
            device if config.moe_paged_stash_buffer_bytes is None else 0.0,
            valid.device_factor,
        ),
        ("moe_paged_stash_buffer_size_factor_cpu", host, valid.host_factor),
    )
    lines = [
        f"{name}: grew to {grown:.4g} before the checkpoint, and this run uses the grown value; set a larger value to "
        "override it"
        for name, asked, grown in sizes
        if grown is not None and grown > asked
    ]
    has_pools = config.moe_paged_stash
    if has_pools and (learned.device_factor, learned.host_factor) != (valid.device_factor, valid.host_factor):
        lines.append(
            "pools start with the configured sizes: the checkpoint's were learned for rows with "
            f"{learned.row_bytes or 'an unknown number of'} bytes in pages, and this run's have {valid.row_bytes}, "
            "because of another moe_paged_stash_compute, moe_paged_stash_dtype or fp8, another shape of the experts, "
            "or an older version"
        )
    return lines


def check_effect(stages: Iterable[Sequence[StashEvent]]) -> None:
    """Raises ValueError if no stage would ever stash anything. stages: events of each stage's longest step.

    Single stages may stash nothing, such as a stage without experts.
    """
    if not any({event.group for event in events} - resident_groups(events) for events in stages):
        raise ValueError(
            "moe_paged_stash is True but has no effect: the backward of every expert group directly follows its "
            "forward, so nothing is stashed. A stash requires several layers with experts, or pipeline stages with "
            "several microbatches: disable moe_paged_stash"
        )


def factor_at(quantile: float, peaks: Sequence[float]) -> float:
    """Returns the smallest observed peak that is at least as large as the given share of the peaks.

    quantile: above 0, at most 1. peaks: pages required by each step, relative to the balanced case. n peaks contain no
    information about quantiles beyond 1 - 1/n, for which the largest peak is returned. Raises ValueError if there are
    no peaks or the quantile is out of range.
    """
    if not 0 < quantile <= 1:
        raise ValueError(f"quantile is {quantile}: must be above 0 and at most 1")
    if not peaks:
        raise ValueError("peaks is empty: a quantile requires at least one step")
    return sorted(peaks)[max(multiple(quantile, len(peaks)), 1) - 1]


def rounded_up(factor: float, *, decimals: int = 2) -> float:
    """Rounds a factor up for display to the user. Ignores rounding errors up to 1e-6 of the last decimal."""
    units = 10**decimals
    return math.ceil(factor * units - 1e-6) / units


def stash_footprint(config: StashSettings, needs: StepNeeds, *, layout: PoolLayout) -> Footprint:
    """Returns the peak device memory of tensors saved for backward, without and with a pool of this layout."""
    forms = {name: config.block_format_of(layer_of(name)) for name in needs.specs}
    row_bytes = {name: buffer_row_bytes(config, form) for name, form in forms.items()}
    encoded = [
        sum(encoded_bytes(width) for width in _encoded_widths(config, form) if width) for form in {*forms.values()}
    ]
    return footprint(
        needs.events,
        lambda group: row_bytes[group[0]] * needs.max_rows,
        layout=layout,
        prefetch_groups=prefetch_groups(config),
        scratch_sets=scratch_sets(config),
        encoded_bytes=max(encoded, default=0) * needs.max_rows,
    )


def gain_line(own: Footprint, layout: PoolLayout, *, config: StashSettings) -> str:
    """Returns a log line that states how much memory a stage's stash saves or costs, and whether it is lossy."""
    tiers = [f"{layout.device_pages} pages"] * bool(layout.device_pages)
    if layout.host_pages:
        tiers.append(f"{layout.host_pages} pages on the host, {_mib(layout.host_pages * layout.page_bytes)}")
    outcome = f"saves {own.saving:.0%}"
    if round(own.saving, 2) < 0:
        outcome = (
            f"COSTS {-own.saving:.0%}: use less memory with a smaller moe_paged_stash_page_size or, with copies or "
            "pages on the host, moe_paged_stash_prefetch_layers, without moe_paged_stash, or, where tensors may be "
            "recomputed, with a smaller moe_paged_stash_buffer_size_factor_cuda"
        )
    return (
        f"paged stash: {_mib(own.arena_bytes)} of pages + {_mib(own.working_set_bytes)} of buffers instead of "
        f"{_mib(own.static_bytes)} on the device ({', '.join(tiers)}): " + "; ".join((outcome, *encoding_words(config)))
    )


def encoding_words(config: StashSettings) -> tuple[str, ...]:
    """Returns a clause that states that rows are stored in 8 bits, or nothing if they are stored as they are."""
    if config.moe_paged_stash_dtype is None:
        return ()
    sizes = [
        f"{stored_row_bytes(config, form):,} instead of {buffer_row_bytes(config, form):,}" for form in formats(config)
    ]
    return (
        f"moe_paged_stash_dtype {config.moe_paged_stash_dtype} is lossy: backward reads rows that were stored in 8 "
        f"bits, {' or '.join(sizes)} bytes of each",
    )


def check_encoding(config: StashSettings) -> None:
    """Raises ValueError if rows are to be stored in 8 bits, and no row would be smaller."""
    if config.moe_paged_stash_dtype is None:
        return
    if all(stored_row_bytes(config, form) == buffer_row_bytes(config, form) for form in formats(config)):
        raise ValueError(
            f"moe_paged_stash_dtype is {config.moe_paged_stash_dtype!r} but has no effect: with hidden_size "
            f"{config.hidden_size} and moe_ffn_hidden_size {config.moe_ffn_hidden_size} no row becomes smaller, since "
            "stored rows are multiples of 16 bytes; omit it"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 / 10 else f"{num_bytes / 2**10:.1f} KiB"
