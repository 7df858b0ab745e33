"""Estimates the time cost and the memory saving of a planned stash, and explains the result.

Letters: H hidden size, F ffn size of one expert. Rates of devices are in configs/devices.yaml. The bytes of a step are
computed by the paged stash's own arithmetic, exact to the page.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron.core.block_scaled.format import BlockFormat
from megatron.core.transformer.moe.paged_stash import Counter
from megatron.core.transformer.moe.paged_stash.arithmetic import Footprint, peak_pages
from megatron.core.transformer.moe.paged_stash.page_layout import PagesByPriority
from megatron.core.transformer.moe.paged_stash.sizing import (
    StepNeeds,
    buffer_row_bytes,
    encoding_words,
    gain_line,
    prefetch_groups,
    scratch_sets,
    stash_footprint,
    stored_row_bytes,
)
from megatron.planner.stash.outlook import Outlook
from megatron.planner.stash.routing import RoutingSpan
from megatron.planner.stash.stages import PlannedRun, StashFlags
from megatron.planner.stash.walk import StepLevel
from megatron.planner.work import multiplied_dtype, scaled_dtype
from megatron.training.compute.devices import Device

_WHERE = {
    StepLevel.DEVICE: "with every page on the device",
    StepLevel.HOST: "where pages are spilled to the host",
    StepLevel.GATE_UP: "where gate_up is recomputed",
}
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class ExpertShape:
    """Sizes of one expert: H and F in elements, itemsize in bytes. is_gated: whether gate_up has 2F columns, not F."""

    hidden_size: int
    ffn_hidden_size: int
    itemsize: int = 2
    is_gated: bool = True

    @property
    def input_bytes(self) -> int:
        """Bytes of x per row, excluding the row's routing weight (4 bytes)."""
        return self.hidden_size * self.itemsize

    @property
    def gate_up_bytes(self) -> int:
        """Bytes of gate_up per row."""
        return self._fc1_width * self.itemsize

    @property
    def row_bytes(self) -> int:
        """Bytes saved for backward per row."""
        return self.input_bytes + self.gate_up_bytes

    @property
    def flops(self) -> int:
        """FLOPs of forward and backward per row: 18 H F for three H x F matrices, with three GEMMs each.

        Without a gate there are two matrices. A multiply-add counts as 2 FLOPs.
        """
        return 6 * self.hidden_size * (self._fc1_width + self.ffn_hidden_size)

    @property
    def gate_up_flops(self) -> int:
        """FLOPs to compute gate_up once, per row: 4 H F, or 2 H F without a gate."""
        return 2 * self.hidden_size * self._fc1_width

    @property
    def _fc1_width(self) -> int:
        return (2 if self.is_gated else 1) * self.ffn_hidden_size


@dataclass(frozen=True)
class Machine:
    """Rates of one device, per second, and the time that the stash's work takes on it without overlap.

    flops: FLOPs of grouped GEMMs. copied_bytes: bytes read plus bytes written in device memory. host_bytes: bytes in
    one direction between device and host. scaled_flops: FLOPs of grouped GEMMs in 8 bits; None if the run has none.
    """

    flops: float
    copied_bytes: float
    host_bytes: float
    scaled_flops: float | None = None

    @classmethod
    def of(cls, device: Device, dtype: torch.dtype, *, form: BlockFormat | None = None) -> "Machine":
        """Reads a device's rates. Raises ValueError if configs/devices.yaml lists no rate for the dtype.

        form: format of the experts that compute in 8 bits, or None.
        """
        scaled = None if form is None else device.tflops(multiplied_dtype(scaled_dtype(form), device))
        return cls(
            flops=device.tflops(_DTYPES[dtype]) * 1e12 * device.attainable_matmul,
            copied_bytes=device.memory_gb_s * 1e9 * device.attainable_memory,
            host_bytes=device.host_bytes_s,
            scaled_flops=None if scaled is None else scaled * 1e12 * device.attainable_matmul,
        )

    def compute_seconds(self, expert: ExpertShape, num_rows: int) -> float:
        """Returns the time of the experts' forward and backward, in seconds. The forward takes a third of it."""
        return num_rows * expert.flops / self.flops

    def copy_seconds(self, num_bytes: float, *, encoded_from: float = 0.0) -> float:
        """Returns the time to stash and restore num_bytes, in seconds. Both read and write every byte.

        encoded_from: bytes of the rows before they are encoded; 0 if they are not. Encoding reads them and writes
        num_bytes, and decoding does the reverse.
        """
        encoding = 2 * (encoded_from + num_bytes) if encoded_from else 0.0
        return (4 * num_bytes + encoding) / self.copied_bytes

    def host_seconds(self, num_bytes: float) -> float:
        """Returns the time of a one-way copy between device and host, in seconds."""
        return num_bytes / self.host_bytes

    def gate_up_seconds(self, expert: ExpertShape, num_rows: int) -> float:
        """Returns the time to recompute gate_up from x, with 4 of the 18 H F FLOPs of a row, in seconds."""
        return num_rows * expert.gate_up_flops / self.flops


@dataclass(frozen=True)
class StageCosts:
    """Estimated costs of one stage.

    Each time is in seconds per step: the mean over steps, on the rank where that mean is the largest.

    forward, backward: the experts' GEMMs, with which copies can overlap. stash: copies into pages and back. spill:
    copies to the host, in one direction. gate_up: recomputation. waiting_groups: groups saved for backward at the
    peak. tail_share: share of the pages' bytes that no row occupies. line: sentence about the memory saving.
    """

    stage: int
    forward: float
    backward: float
    stash: float
    spill: float
    gate_up: float
    footprint: Footprint
    waiting_groups: int
    tail_share: float
    line: str

    @property
    def hides_spill(self) -> bool:
        """Whether copies to and from the host can be hidden behind the experts' GEMMs."""
        return self.spill <= min(self.forward, self.backward)

    @property
    def words(self) -> str:
        """A clause that compares the time of copies and recomputation with the experts' time."""
        extra = (self.stash + self.gate_up) / (self.forward + self.backward)
        return f"copies and recomputation take {extra:.1%} of the experts' own time"


def stage_costs(run: PlannedRun, plan: Outlook, *, spans: Sequence[RoutingSpan], machine: Machine) -> list[StageCosts]:
    """Estimates the costs of each stage that stashes tensors. spans: expert rows of the planned steps."""
    costs, expert = [], _expert_shape(run.flags)
    for number, stage in enumerate(plan.walk.stages):
        if not stage.layouts or not stage.layouts[-1]:
            continue
        rows = np.concatenate([_rows_of_steps(span, run.stages[number].layers) for span in spans])
        counters, page_bytes = stage.counters, stage.page_bytes
        moved = _most(counters[Counter.LIVE_BYTES])
        planned = _most(counters[Counter.PLANNED_PAGES]) * page_bytes
        time_share = _time_share(plan.flags, machine, layers=run.stages[number].layers)
        compute = machine.compute_seconds(expert, round(_most(rows))) * time_share
        needs = run.needs(
            plan.flags,
            number,
            num_microbatches=run.num_microbatches,
            max_rows=run.ranks.max_rows(plan.flags.moe_expert_rank_capacity_factor or 1.0),
        )
        layout = stage.layouts[-1][0]
        footprint = stash_footprint(plan.flags, needs, layout=layout)
        costs.append(
            StageCosts(
                number,
                forward=compute / 3,
                backward=compute * 2 / 3,
                stash=0.0
                if plan.flags.stash_computes_in_pages
                else _copy_seconds(plan.flags, machine, moved, layers=run.stages[number].layers),
                spill=machine.host_seconds(_most(counters[Counter.SPILLED_PAGES]) * page_bytes),
                gate_up=machine.gate_up_seconds(expert, round(_most(stage.dropped_rows))) * time_share,
                footprint=footprint,
                waiting_groups=_waiting_groups(needs),
                tail_share=1 - moved / planned if planned else 0.0,
                line=gain_line(footprint, layout, config=plan.flags),
            )
        )
    return costs


def _copy_seconds(flags: StashFlags, machine: Machine, moved: float, *, layers: Sequence[int]) -> float:
    forms = [flags.block_format_of(layer) for layer in layers]
    stored = sum(stored_row_bytes(flags, form) for form in forms)
    whole = sum(buffer_row_bytes(flags, form) for form in forms)
    return machine.copy_seconds(moved, encoded_from=0.0 if whole == stored else moved * whole / stored)


def _time_share(flags: StashFlags, machine: Machine, *, layers: Sequence[int]) -> float:
    """Returns the time of the layers' GEMMs relative to the time without 8 bits, if all layers have equal rows."""
    if machine.scaled_flops is None:
        return 1.0
    in_8_bits = sum(flags.block_format_of(layer) is not None for layer in layers)
    return 1 + in_8_bits / len(layers) * (machine.flops / machine.scaled_flops - 1)


def _expert_shape(flags: StashFlags) -> ExpertShape:
    ffn = flags.moe_ffn_hidden_size // flags.expert_tensor_parallel_size
    return ExpertShape(flags.hidden_size, ffn, flags.params_dtype.itemsize, is_gated=flags.gated_linear_unit)


def _rows_of_steps(span: RoutingSpan, layers: Sequence[int]) -> np.ndarray:
    """Returns the number of rows in each step, summed over its passes and the given layers, [S, N]."""
    summed: np.ndarray = np.sum([span.rows[layer].sum(axis=0, dtype=np.int64) for layer in layers], axis=0)
    return summed


def _most(values: np.ndarray) -> float:
    """Averages over steps, and returns the largest mean of any rank. values: [S, N]."""
    return float(values.mean(axis=0).max()) if values.size else 0.0


def _waiting_groups(needs: StepNeeds) -> int:
    """Returns the number of groups saved for backward at the peak of a step, including those that are not stashed."""
    return peak_pages(needs.events, lambda group: PagesByPriority(1))


def verdict(
    plan: Outlook, costs: Sequence[StageCosts], *, others: Mapping[StepLevel, Sequence[StageCosts]]
) -> tuple[bool, list[str]]:
    """Returns whether the stash saves memory on the fullest stage, and sentences that explain the result.

    costs: costs of each stage with every page on the device. others: costs of plans with fewer pages, by level.
    """
    if not costs:
        return False, [
            "stashing has no effect: the backward of every expert group directly follows its forward, so that "
            "nothing is saved in between; it needs several MoE layers, or pipeline stages with several "
            "micro-batches"
        ]
    worst = _fullest(costs)
    saving, factor = worst.footprint.saving, plan.flags.moe_expert_rank_capacity_factor or 1.0
    sets = scratch_sets(plan.flags) or 1 + prefetch_groups(plan.flags)
    figures = (
        f"stage {worst.stage}: buffers have {factor:.2f} x the balanced rows; {worst.waiting_groups} groups are saved "
        f"for backward at the peak, {min(sets, worst.waiting_groups)} of them still in whole buffers; "
        f"{worst.tail_share:.1%} of the pages' bytes are tails"
    )
    figures = "; ".join((figures, *encoding_words(plan.flags)))
    if saving > 0:
        return True, [
            f"stashing pays: it saves {saving:.0%} of the experts' activations on the device; {worst.words}",
            figures,
        ]
    costs_more = f"it costs {-saving:.0%} more memory than whole buffers; {worst.words}"
    reasons = [f"stashing does not pay: {costs_more}", figures]
    saves = {level: _fullest(of) for level, of in others.items() if of and _fullest(of).footprint.saving > 0}
    if saves:
        level, least = min(saves.items())
        reasons[0] = (
            f"stashing pays only {_WHERE[level]}: it saves {least.footprint.saving:.0%} of the experts' activations on "
            f"the device; {least.words}"
        )
        reasons.insert(1, f"with every page on the device {costs_more}")
    if worst.waiting_groups <= sets + 1:
        reasons.append(
            f"too few groups are saved: {worst.waiting_groups} at the peak, of which {sets} are working sets"
        )
    if factor < 1.3:
        reasons.append(f"routing is balanced: with a capacity factor of {factor:.2f}, little of the buffers is padding")
    if worst.tail_share > 0.1:
        reasons.append(
            f"pages are too large for the number of rows: {worst.tail_share:.0%} of their bytes are tails; use a "
            "smaller --moe-paged-stash-page-size"
        )
    return bool(saves), reasons


def _fullest(costs: Sequence[StageCosts]) -> StageCosts:
    """Returns the stage with the most expert bytes saved for backward."""
    return max(costs, key=lambda one: one.footprint.static_bytes)
