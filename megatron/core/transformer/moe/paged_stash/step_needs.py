"""StepNeeds: the pages that a step needs, exact to the page, whatever rows its passes have.

They are counted in arithmetic.py; how large a pool is made of them is sizing.py's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Protocol

import torch

from megatron.core.transformer.moe.paged_stash.arithmetic import peak_pages, resident_groups
from megatron.core.transformer.moe.paged_stash.page_layout import (
    PagesByPriority,
    PoolLayout,
    Priority,
    TensorSpec,
    page_bytes,
    pages_for,
)
from megatron.core.transformer.moe.paged_stash.stash_order import Group, StashEvent, layer_name

RowsOf = Callable[[Group], int]


class StashSettings(Protocol):
    """The settings that determine sizes; TransformerConfig has them."""

    hidden_size: int
    moe_ffn_hidden_size: int | None
    gated_linear_unit: bool
    expert_tensor_parallel_size: int | None
    recompute_modules: list[str] | None
    lora_rank: int | None
    lora_target_modules: list[str]
    params_dtype: torch.dtype
    moe_expert_rank_capacity_factor: float | None
    moe_paged_stash_page_size: int
    moe_paged_stash_buffer_size_factor_cuda: float
    moe_paged_stash_buffer_size_factor_cpu: float
    moe_paged_stash_buffer_bytes: int | None
    moe_paged_stash_prefetch_layers: int


@dataclass(frozen=True)
class StepNeeds:
    """The stash's input for one step: events in their order, tensors of each group, live rows of a balanced pass.

    A pass is balanced if every rank gets the same number of rows.
    """

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

    def pages_of_shares(self, rows_share: Mapping[int, float]) -> int:
        """If every pass has its layer's share of the balanced rows, layers from 1; without a share, all of them."""
        shares = {layer_name(layer): share for layer, share in rows_share.items()}

        def rows(group: Group) -> int:
            return min(multiple(shares.get(group[0], 1.0), self.balanced_rows), self._max_rows)

        return self.pages(rows)

    @cached_property
    def _resident(self) -> set[Group]:
        return resident_groups(self.events)

    @property
    def _max_rows(self) -> int:
        return min((spec.max_tokens for spec in self.specs), default=0)


def step_needs(config: StashSettings, events: Sequence[StashEvent], *, max_rows: int, balanced_rows: int) -> StepNeeds:
    """Returns the needs of a stage whose step has these events, with experts in buffers of max_rows rows."""
    one_page = page_bytes(
        config.moe_paged_stash_page_size, hidden_size=config.hidden_size, itemsize=config.params_dtype.itemsize
    )
    return StepNeeds(events, expert_specs(config, rows=max_rows), balanced_rows, one_page)


def expert_specs(config: StashSettings, *, rows: int) -> tuple[TensorSpec, ...]:
    """Returns what the experts of one layer save for backward in buffers of `rows` rows: x, weights, gate_up and act.

    Routing weights are fp32. With moe_act recomputed there is no act, and none where fc2 is frozen and has no adapter;
    adapters save the rows times their narrow half.
    """
    assert config.moe_ffn_hidden_size is not None, "filled in by TransformerConfig"
    itemsize = config.params_dtype.itemsize
    ffn = config.moe_ffn_hidden_size // (config.expert_tensor_parallel_size or 1)
    widths = [
        (config.hidden_size * itemsize, Priority.INPUT),
        (torch.float32.itemsize, Priority.INPUT),
        (ffn * (2 if config.gated_linear_unit else 1) * itemsize, Priority.GATE_UP),
    ]
    adapted = [] if config.lora_rank is None else config.lora_target_modules
    reads_act = config.lora_rank is None or "linear_fc2" in adapted
    if reads_act and "moe_act" not in (config.recompute_modules or []):
        widths.append((ffn * itemsize, Priority.ACT))
    if config.lora_rank is not None:
        low = (config.lora_rank * itemsize, Priority.INPUT)
        widths += [low for name in ("linear_fc1", "linear_fc2") if name in adapted]
    return tuple(TensorSpec(width, width, rows, priority) for width, priority in widths)


def multiple(factor: float, count: int) -> int:
    """factor x count, rounded up.

    The factor is the decimal number that the user wrote, or a ratio of page counts: 1.1 x 10 pages are 11, not 12.
    """
    return math.ceil(Fraction(factor).limit_denominator(10**9) * count)
