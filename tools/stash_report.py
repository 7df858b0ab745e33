"""Formats a plan of the paged stash as text, JSON and an HTML page. tools/plan_stash.py creates the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.transformer.moe.paged_stash import Counter
from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from megatron.pages.figures import Bar, Figure, Panel, short_time, stacked_bars, stacked_columns, time_unit
from megatron.pages.page import render
from megatron.planner.stash.costs import StageCosts
from megatron.planner.stash.outlook import Needs, Outlook
from megatron.planner.stash.stages import PlannedRun, StashFlags
from megatron.planner.stash.walk import StageSteps, StepLevel, Walk
from megatron.training.command_line.config_builder import with_flag_names
from megatron.training.command_line.flags import flag_table

_TEMPLATE = Path(__file__).with_name("stash_report.html.jinja")
# Names of the recompute levels in printed tables and on the page, and as goals that steps must not exceed.
HEADINGS = {
    StepLevel.DEVICE: "device",
    StepLevel.HOST: "spills",
    StepLevel.GATE_UP: "gate_up recomputed",
    StepLevel.NO_PAGES: "discarded: pages",
    StepLevel.OVER_CAPACITY: "discarded: rows",
}
NAMES = {
    StepLevel.DEVICE: "every page on the device",
    StepLevel.HOST: "pages spilled to the host",
    StepLevel.GATE_UP: "gate_up recomputed",
    StepLevel.NO_PAGES: "discarded: too few pages",
    StepLevel.OVER_CAPACITY: "discarded: more rows than the buffers hold",
}
GOALS = {
    StepLevel.DEVICE: "every page on the device",
    StepLevel.HOST: "at most spilled to the host",
    StepLevel.GATE_UP: "at most gate_up recomputed, none discarded",
}
# From green to red. Light and dark alternate, so that color-blind readers can distinguish stacked parts.
_LEVEL_COLORS = {
    StepLevel.DEVICE: "#2a9d62",
    StepLevel.HOST: "#9ccbe8",
    StepLevel.GATE_UP: "#e07b1f",
    StepLevel.NO_PAGES: "#a50f15",
    StepLevel.OVER_CAPACITY: "#6f6f78",
}
_MEMORY = {"pages on the device": "#4e79a7", "whole buffers": "#f28e2b", "pages on the host": "#bab0ac"}
_TIMES = {
    "experts forward": "#93c1ea",
    "experts backward": "#4a86c0",
    "to pages and back": "#59a14f",
    "to the host and back": "#b07aa1",
    "gate_up recomputed": "#e15759",
}


@dataclass(frozen=True)
class StashPlan:
    """A plan of the paged stash.

    given: the run with the given flags, whose buffers grow. table: the outlook with other factors. recommended:
    sufficient flags for each recompute level. costs: costs of the recommended flags by level and stage.
    """

    run: PlannedRun
    source: str
    guesses: list[str]
    wanted: float
    device: str
    host_gb_s: float
    needs: Needs
    given: Walk
    table: list[Outlook]
    recommended: dict[StepLevel, Outlook]
    costs: dict[StepLevel, list[StageCosts]]
    pays: bool
    reasons: list[str]


def as_text(plan: StashPlan) -> str:
    """Formats the plan for a terminal."""
    run, steps = plan.run, len(plan.needs.rows)
    head = [
        f"plan of the paged stash: {len(run.stages)} stages, {len(run.layers)} MoE layers, {run.ranks.num_sharing} "
        f"ranks share {run.ranks.num_experts} experts; {run.num_microbatches} micro-batches of "
        f"{run.ranks.tokens:,} tokens per rank in a step",
        f"routing: {plan.source}, {steps:,} steps",
        *(f"  note: {guess}" for guess in plan.guesses),
    ]
    parts = [head, _needs_lines(plan)]
    if plan.recommended or plan.table:
        parts += [_given_lines(plan), _table_lines(plan.table), _recommended_lines(plan), _cost_lines(plan)]
    return "\n\n".join("\n".join(part) for part in [*parts, plan.reasons])


def as_json(plan: StashPlan) -> dict[str, Any]:
    """Returns the plan's values as JSON values."""
    return {
        "routing": plan.source,
        "notes": plan.guesses,
        "steps": len(plan.needs.rows),
        "wanted_probability": plan.wanted,
        "device": plan.device,
        "host_gb_s": plan.host_gb_s,
        "capacity_factor_needed": plan.needs.rows.tolist(),
        "pool_factor_needed": plan.needs.pages.tolist(),
        "given": {
            "flags": _flags(plan.run.flags),
            "rungs": plan.given.levels.tolist(),
            "voids": plan.given.discards.tolist(),
            "ended_at": plan.given.ended_at,
            "capacity_factor": plan.given.capacity_factor,
            "device_factor": plan.given.grown.device_factor,
            "host_factor": plan.given.grown.host_factor,
            "stages": [_stage(stage) for stage in plan.given.stages],
        },
        "table": [_row(one) for one in plan.table],
        "recommended": {level.name.lower(): _row(one) for level, one in plan.recommended.items()},
        "costs": {level.name.lower(): [_costs(one) for one in of_stages] for level, of_stages in plan.costs.items()},
        "pays": plan.pays,
        "reasons": plan.reasons,
    }


def as_page(plan: StashPlan) -> str:
    """Returns the plan as an HTML page. Raises MissingPackageError if a package required by pages is missing."""
    run, steps = plan.run, len(plan.needs.rows)
    verdict, *reasons = plan.reasons
    return render(
        _TEMPLATE,
        title="Plan of the paged stash",
        verdict=verdict,
        reasons=reasons,
        facts=[
            ["Pipeline stages", f"{len(run.stages)}; MoE layers: {len(run.layers)}"],
            ["Experts", f"{run.ranks.num_experts}, shared by {run.ranks.num_sharing} ranks"],
            ["Step", f"micro-batches: {run.num_microbatches}, of {run.ranks.tokens:,} tokens per rank"],
            ["Routing", f"{plan.source}, {steps:,} steps"],
            ["Device", f"{plan.device}, {plan.host_gb_s:g} GB/s to the host"],
        ],
        guesses=plan.guesses,
        wanted=f"{100 * plan.wanted:g}%",
        needs={"rows": _needs_rows(plan, (0.5, plan.wanted, 1.0)), "note": needs_note(plan)},
        levels=_levels(plan),
        recommended=_recommended(plan),
        memory=_memory(plan),
        device=plan.device,
        costs=_cost_bars(plan),
        spills=_spills(plan),
    )


def paste(flags: StashFlags) -> str:
    """Returns the stash's flags as command-line text."""
    dtype = "" if flags.moe_paged_stash_dtype is None else f"--moe-paged-stash-dtype {flags.moe_paged_stash_dtype} "
    return (
        f"--moe-paged-stash {dtype}--moe-expert-rank-capacity-factor {flags.moe_expert_rank_capacity_factor:g} "
        f"--moe-paged-stash-page-size {flags.moe_paged_stash_page_size} "
        f"--moe-paged-stash-buffer-size-factor-cuda {flags.moe_paged_stash_buffer_size_factor_cuda:g} "
        f"--moe-paged-stash-buffer-size-factor-cpu {flags.moe_paged_stash_buffer_size_factor_cpu:g}"
    )


def needs_note(plan: StashPlan) -> str:
    """Returns a note if there are too few steps for the wanted probability, else an empty string."""
    if len(plan.needs.rows) * (1 - plan.wanted) >= 1 - 1e-6:
        return ""
    return f"with {len(plan.needs.rows):,} steps p{100 * plan.wanted:g} is the maximum; more steps are more precise"


def _needs_lines(plan: StashPlan) -> list[str]:
    head = ["needed", f"p{100 * plan.wanted:g}", "median", "most"]
    lines = _columns([head, *_needs_rows(plan, (plan.wanted, 0.5, 1.0))])
    return lines + ([note] if (note := needs_note(plan)) else [])


def _needs_rows(plan: StashPlan, shares: Sequence[float]) -> list[list[str]]:
    """Returns a row for each flag with the values that suffice for the given fractions of the steps."""
    needs = {
        "--moe-expert-rank-capacity-factor": plan.needs.rows,
        "--moe-paged-stash-buffer-size-factor-cuda": plan.needs.pages,
    }
    return [
        [flag, *(f"{rounded_up(factor_at(share, factors.tolist())):.2f}" for share in shares)]
        for flag, factors in needs.items()
    ]


def _given_lines(plan: StashPlan) -> list[str]:
    walk = plan.given
    cells = [["stage", "pages", "peak in use", "pages on the host", "peak in use", "gate_up recomputed"]]
    for number, stage in enumerate(walk.stages):
        if stage.layouts and stage.layouts[-1]:
            cells.append([str(number), *map(str, _stage_numbers(stage))])
    steps = len(walk.levels)
    lines = [f"with these flags: {paste(plan.run.flags)}", *_columns(cells)]
    lines.append("maxima over ranks; the last column is the number of tensors in the worst step")
    if walk.discards.any():
        given = plan.run.flags.moe_expert_rank_capacity_factor or 1.0
        grown = [f"rows to {walk.capacity_factor:.3g} x"] if walk.capacity_factor > given else []
        for name, factor in (("device", walk.grown.device_factor), ("host", walk.grown.host_factor)):
            grown += [f"pages of the {name} to {factor:.3g} x"] if factor is not None else []
        then = (
            f"grows {', '.join(grown)}" if grown else "reserves more pages for the experts' inputs, and grows nothing"
        )
        lines.append(f"discarded steps: {int(walk.discards.sum()):,} of {steps:,}; the run {then}")
    if walk.ended_at is not None:
        lines.append(f"--moe-paged-stash-overflow-policy error ends the run in step {walk.ended_at + 1}")
    return lines


def _table_lines(table: Sequence[Outlook]) -> list[str]:
    shown = [
        level
        for level in StepLevel
        if level in (StepLevel.DEVICE, StepLevel.NO_PAGES) or any(one.shares[level] for one in table)
    ]
    cells = [
        [
            "page size",
            "factor",
            "on host",
            "device MiB",
            "host MiB",
            *(HEADINGS[level] for level in shown),
            "spilled MiB",
        ]
    ]
    for one in table:
        flags = one.flags
        cells.append(
            [
                str(flags.moe_paged_stash_page_size),
                f"{flags.moe_paged_stash_buffer_size_factor_cuda:g}",
                f"{flags.moe_paged_stash_buffer_size_factor_cpu:g}",
                _mib(one.device_bytes),
                _mib(one.host_bytes),
                *(f"{one.shares[level]:.1%}" for level in shown),
                _mib(one.spilled_bytes),
            ]
        )
    factor = table[0].flags.moe_expert_rank_capacity_factor if table else None
    title = f"fraction of steps by the worst rank's level, with --moe-expert-rank-capacity-factor {factor:g}:"
    return [title, *_columns(cells)] if table else []


def _recommended_lines(plan: StashPlan) -> list[str]:
    lines = [f"sufficient for {plan.wanted:.4%} of the steps, by simulation:"]
    steps = len(plan.needs.rows)
    for level, one in plan.recommended.items():
        reached = round(one.share_up_to(level) * steps)
        lines.append(
            f"{GOALS[level]}: reached in {reached:,} of {steps:,} steps, {_mib(one.device_bytes)} MiB of pages"
        )
        lines.append(f"  {paste(one.flags)}")
    if not plan.recommended:
        lines.append("none: no factor is sufficient")
    return lines


def _cost_lines(plan: StashPlan) -> list[str]:
    lines = [
        f"costs per step in ms, on the rank and stage with the highest cost ({plan.device} of configs/devices.yaml, "
        f"{plan.host_gb_s:g} GB/s to the host; estimates):"
    ]
    cells = [
        [
            "sufficient for",
            "experts forward",
            "backward",
            "stash",
            "spill each way",
            "gate_up recomputed",
        ]
    ]
    for level, of_stages in plan.costs.items():
        times = [(one.forward, one.backward, one.stash, one.spill, one.gate_up) for one in of_stages]
        cells.append([HEADINGS[level], *(f"{1e3 * max(column):.3g}" for column in zip(*times, strict=True))])
    lines += _columns(cells)
    for of_stages in plan.costs.values():
        spilling = [one for one in of_stages if one.spill > 0]
        if spilling:
            late = [str(one.stage) for one in spilling if not one.hides_spill]
            products = "the experts' GEMMs"
            lines.append(
                f"spilling is hidden by {products}"
                if not late
                else f"spilling takes longer than {products} on stages {', '.join(late)}"
            )
    for one in next(iter(plan.costs.values()), []):
        lines.append(f"stage {one.stage}: {with_flag_names(one.line, flag_table())}")
    return lines


def _stage_numbers(stage: StageSteps) -> list[int]:
    """Returns the pages and peak pages in use of each tier, and the numbers of recomputed tensors."""
    layouts = [layout for of_step in stage.layouts for layout in of_step]
    return [
        max(layout.device_pages for layout in layouts),
        int(stage.counters[Counter.HIGH_WATER_DEVICE].max()),
        max(layout.host_pages for layout in layouts),
        int(stage.counters[Counter.HIGH_WATER_HOST].max()),
        int(stage.counters[Counter.DROPPED_GATE_UP].max()),
    ]


def _levels(plan: StashPlan) -> dict[str, Any] | None:
    """Returns, for each factor of host pages, figures with a panel for each page size."""
    if not plan.table:
        return None
    used = [level for level in StepLevel if any(one.shares[level] for one in plan.table)]
    tiers = []
    for host in sorted({one.flags.moe_paged_stash_buffer_size_factor_cpu for one in plan.table}):
        rows = [one for one in plan.table if one.flags.moe_paged_stash_buffer_size_factor_cpu == host]
        panels = [
            Panel(
                f"pages of {size:,} token{'s' if size > 1 else ''}",
                [_column(one, used) for one in rows if one.flags.moe_paged_stash_page_size == size],
            )
            for size in sorted({one.flags.moe_paged_stash_page_size for one in rows})
        ]
        figures = stacked_columns(
            panels,
            {NAMES[level]: _LEVEL_COLORS[level] for level in used},
            x_axis="factor of device pages",
            y_axis="% of the steps",
            limit=(100 * plan.wanted, f"wanted: {100 * plan.wanted:g}%"),
        )
        title = f"Pages on the host: factor {host:g}" if host else "No pages on the host"
        tiers.append({"title": title, "figures": figures})
    return {"capacity": f"{plan.table[0].flags.moe_expert_rank_capacity_factor:g}", "tiers": tiers}


def _column(one: Outlook, used: Sequence[StepLevel]) -> Bar:
    shares = {NAMES[level]: 100 * one.shares[level] for level in used}
    return Bar(f"{one.flags.moe_paged_stash_buffer_size_factor_cuda:g}", shares, f"{_short_mib(one.device_bytes)} MiB")


def _recommended(plan: StashPlan) -> list[dict[str, str]]:
    steps, split = len(plan.needs.rows), " --moe-paged-stash-buffer-size-factor-cuda"
    found = []
    for level, one in plan.recommended.items():
        reached = f"{round(one.share_up_to(level) * steps):,} of {steps:,} steps"
        sizes = (
            f"{_short_mib(one.device_bytes)} MiB of pages on the device, {_short_mib(one.host_bytes)} MiB on the host"
        )
        # Two lines that a shell reads as one.
        flags = f" \\\n {split}".join(paste(one.flags).split(split))
        name = NAMES[level] if level is StepLevel.DEVICE else f"{NAMES[level]} at most"
        found.append({"goal": f"{name}: {reached}, {sizes}", "flags": flags})
    return found


def _memory(plan: StashPlan) -> dict[str, Any] | None:
    """Returns a figure of the stage with the most memory, without a stash and with each level's recommended flags."""
    stages = {level: max(of, key=lambda one: one.footprint.static_bytes) for level, of in plan.costs.items() if of}
    if not stages:
        return None
    first = next(iter(stages.values()))
    bars = [_memory_bar("no stash", pages=0, buffers=first.footprint.static_bytes, host=0)]
    for level, stage in stages.items():
        pages, buffers = stage.footprint.arena_bytes, stage.footprint.working_set_bytes
        bars.append(_memory_bar(NAMES[level], pages=pages, buffers=buffers, host=plan.recommended[level].host_bytes))
    return {"stage": first.stage, "figure": stacked_bars(bars, _MEMORY, axis="MiB at the peak of a step")}


def _memory_bar(label: str, *, pages: int, buffers: int, host: int) -> Bar:
    sizes = dict(zip(_MEMORY, (size / 2**20 for size in (pages, buffers, host)), strict=True))
    return Bar(label, sizes, f"{_short_mib(pages + buffers)} MiB")


def _cost_bars(plan: StashPlan) -> Figure | None:
    times = {level: _largest_times(of) for level, of in plan.costs.items() if of}
    if not times:
        return None
    first = next(iter(times.values()))
    alone = {name: first[name] for name in ("experts forward", "experts backward")}
    parts = {"experts alone": alone}
    for level, found in times.items():
        parts[NAMES[level]] = {name: value for name, value in found.items() if name not in alone}
    unit, size = time_unit(max(sum(of.values()) for of in parts.values()))
    bars = [
        Bar(label, {name: seconds / size for name, seconds in of.items()}, short_time(sum(of.values())))
        for label, of in parts.items()
    ]
    return stacked_bars(bars, _TIMES, axis=f"{unit} per step")


def _largest_times(stages: Sequence[StageCosts]) -> dict[str, float]:
    """Returns the largest times over the stages in seconds, by the names of _TIMES."""
    columns = {
        "experts forward": [one.forward for one in stages],
        "experts backward": [one.backward for one in stages],
        "to pages and back": [one.stash for one in stages],
        "to the host and back": [2 * one.spill for one in stages],
        "gate_up recomputed": [one.gate_up for one in stages],
    }
    return {name: max(values) for name, values in columns.items()}


def _spills(plan: StashPlan) -> Figure | None:
    """Returns the one-way spill time of each configuration. The limit is the shorter of the experts' two passes."""
    spilling = [one for one in [*plan.table, *plan.recommended.values()] if one.spilled_bytes]
    stages = next(iter(plan.costs.values()), [])
    if not spilling or not stages:
        return None
    hides = min(min(one.forward, one.backward) for one in stages)
    times = [one.spilled_bytes / (plan.host_gb_s * 1e9) for one in spilling]
    unit, size = time_unit(max(hides, *times))
    bars = []
    for one, seconds in zip(spilling, times, strict=True):
        flags = one.flags
        label = (
            f"{flags.moe_paged_stash_page_size}: {flags.moe_paged_stash_buffer_size_factor_cuda:g} + "
            f"{flags.moe_paged_stash_buffer_size_factor_cpu:g}"
        )
        bars.append(Bar(label, {"one way": seconds / size}, f"{_short_mib(one.spilled_bytes)} MiB"))
    limit = (hides / size, f"experts' forward: {short_time(hides)}")
    return stacked_bars(bars, {"one way": "#b07aa1"}, axis=f"{unit} per step", limit=limit)


def _stage(stage: StageSteps) -> dict[str, Any]:
    """Returns the page sizes and counters of a stage's ranks in each step."""
    return {
        "page_bytes": stage.page_bytes,
        "balanced_pages": stage.balanced_pages,
        "pages_wanted": stage.pages_wanted.tolist(),
        **{counter.name.lower(): of.tolist() for counter, of in stage.counters.items()},
    }


def _row(one: Outlook) -> dict[str, Any]:
    return {
        "flags": _flags(one.flags),
        "shares": {level.name.lower(): share for level, share in one.shares.items()},
        "device_bytes": one.device_bytes,
        "host_bytes": one.host_bytes,
        "spilled_bytes_of_step": one.spilled_bytes,
        "largest_spill_of_step": one.largest_spill,
    }


def _costs(one: StageCosts) -> dict[str, Any]:
    seconds = {
        "forward": one.forward,
        "backward": one.backward,
        "stash": one.stash,
        "spill": one.spill,
        "gate_up": one.gate_up,
    }
    return {
        "stage": one.stage,
        "seconds": seconds,
        "hides_spill": one.hides_spill,
        **vars(one.footprint),
        "saving": one.footprint.saving,
        "waiting_groups": one.waiting_groups,
        "tail_share": one.tail_share,
    }


def _flags(flags: StashFlags) -> dict[str, Any]:
    return {name: value for name, value in vars(flags).items() if name.startswith("moe_") and "ffn" not in name}


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.1f}"


def _short_mib(num_bytes: float) -> str:
    size = num_bytes / 2**20
    return f"{size:,.1f}" if size >= 10 else f"{size:.3g}"


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in cells]
