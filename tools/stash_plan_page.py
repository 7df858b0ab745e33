"""A plan of the paged stash as a page of HTML that needs no network: rungs against factors, memory, costs.

What is planned is tools/plan_stash.py's; the same in words is stash_plan_words.py's.
"""

from collections.abc import Sequence
from html import escape

from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from megatron.planner.html_parts import html_list, html_page, section, table
from megatron.planner.pictures import Bar, Panel, stacked_bars, stacked_columns
from megatron.planner.stash.costs import StageCosts
from megatron.planner.stash.outlook import Outlook
from megatron.planner.stash.walk import Rung
from tools.stash_plan_words import GOALS, RUNGS, StashPlan, needs_note, paste

# From green to red, as far apart for colour-blind readers as stacked parts need: light and dark take turns.
_COLORS = {
    Rung.DEVICE: "#2a9d62",
    Rung.HOST: "#9ccbe8",
    Rung.ACT: "#edc948",
    Rung.GATE_UP: "#e07b1f",
    Rung.NO_PAGES: "#a50f15",
    Rung.OVER_CAPACITY: "#3d3d3d",
}
NAMES = {
    Rung.DEVICE: "every page on the device",
    Rung.HOST: "pages spilled to the host",
    Rung.ACT: "act recomputed",
    Rung.GATE_UP: "gate_up recomputed",
    Rung.NO_PAGES: "void: no pages",
    Rung.OVER_CAPACITY: "void: more rows than buffers have",
}
_MEMORY = {"pages on the device": "#4e79a7", "whole buffers": "#f28e2b", "pages on the host": "#bab0ac"}
_TIMES = {
    "experts forward": "#93c1ea",
    "experts backward": "#4a86c0",
    "to pages and back": "#59a14f",
    "to the host and back": "#b07aa1",
    "act recomputed": "#edc948",
    "gate_up recomputed": "#e15759",
}


def as_page(plan: StashPlan) -> str:
    """The page, whole."""
    run, steps = plan.run, len(plan.needs.rows)
    facts = [
        ["Pipeline stages", f"{len(run.stages)}; layers with experts: {len(run.layers)}"],
        ["Experts", f"{run.ranks.num_experts}, shared by {run.ranks.num_sharing} ranks"],
        ["Step", f"micro-batches: {run.num_microbatches}, of {run.ranks.tokens:,} tokens a rank"],
        ["Routing", f"{plan.source}, {steps:,} steps"],
        ["Device", f"{plan.device}, {plan.host_gb_s:g} GB/s to the host"],
    ]
    verdict, *reasons = plan.reasons
    parts = [
        "<h1>Plan of the paged stash</h1>",
        f"<p><b>{escape(verdict)}</b></p>",
        html_list(reasons),
        table(["", ""], facts, words=2),
        html_list(plan.guesses),
        section("What steps need", _needs(plan)),
        section("How often each rung is reached", _rungs(plan)),
        section(f"Flags that are enough for {plan.wanted:.4%} of the steps", _recommended(plan)),
        section("What waits for backward on the device", _memory(plan)),
        section("Costs of a step", _costs(plan)),
        section("Spilling against the time that hides it", _spills(plan)),
    ]
    return html_page("Plan of the paged stash", parts)


def _needs(plan: StashPlan) -> str:
    rows = [
        [name, *(f"{rounded_up(factor_at(share, values.tolist())):.2f}" for share in (0.5, plan.wanted, 1.0))]
        for name, values in (
            ("--moe-expert-rank-capacity-factor", plan.needs.rows),
            ("--moe-paged-stash-buffer-size-factor-cuda", plan.needs.pages),
        )
    ]
    note = needs_note(plan)
    said = "<p>Multiples of the balanced case with which a step loses no row, or keeps every page on the device.</p>"
    head = ["flag", "for half of the steps", f"for {100 * plan.wanted:g}%", "for all"]
    return said + table(head, rows) + (f"<p>{escape(note)}</p>" if note else "")


def _rungs(plan: StashPlan) -> str:
    if not plan.table:
        return ""
    capacity = plan.table[0].flags.moe_expert_rank_capacity_factor
    used = [rung for rung in Rung if any(one.shares[rung] for one in plan.table)]
    colors = {NAMES[rung]: _COLORS[rung] for rung in used}
    parts = [
        f"<p>Shares of the steps, by what the rank that is worst off comes to, with buffers for {capacity:g} of the "
        f"balanced rows. Dashed: the wanted {100 * plan.wanted:g}%.</p>"
    ]
    limit = 100 * plan.wanted, f"wanted: {100 * plan.wanted:g}%"
    for host in sorted({one.flags.moe_paged_stash_buffer_size_factor_cpu for one in plan.table}):
        rows = [one for one in plan.table if one.flags.moe_paged_stash_buffer_size_factor_cpu == host]
        panels = _panels(rows, used)
        parts.append(f"<h3>{'No pages on the host' if not host else f'Pages on the host: factor {host:g}'}</h3>")
        parts.append(
            stacked_columns(panels, colors, x_axis="factor of device pages", y_axis="% of the steps", limit=limit)
        )
    return "".join(parts)


def _panels(rows: Sequence[Outlook], used: Sequence[Rung]) -> list[Panel]:
    """One of each page size."""
    return [
        Panel(
            f"pages of {size:,} token{'s' if size > 1 else ''}",
            [_column(one, used) for one in rows if one.flags.moe_paged_stash_page_size == size],
        )
        for size in sorted({one.flags.moe_paged_stash_page_size for one in rows})
    ]


def _column(one: Outlook, used: Sequence[Rung]) -> Bar:
    shares = {NAMES[rung]: 100 * one.shares[rung] for rung in used}
    return Bar(f"{one.flags.moe_paged_stash_buffer_size_factor_cuda:g}", shares, f"{_mib(one.device_bytes)} MiB")


def _recommended(plan: StashPlan) -> str:
    if not plan.recommended:
        return f"<p>{'None: no factor reaches it.' if plan.table else 'None: no page is ever needed.'}</p>"
    steps, parts = len(plan.needs.rows), []
    for rung, one in plan.recommended.items():
        reached = f"{round(one.share_up_to(rung) * steps):,} of {steps:,} steps"
        sizes = f"{_mib(one.device_bytes)} MiB of pages on the device, {_mib(one.host_bytes)} on the host"
        # Two lines that a shell takes as one.
        flags = " \\\n  --moe-paged-stash-buffer-size-factor-cuda".join(
            paste(one.flags).split(" --moe-paged-stash-buffer-size-factor-cuda")
        )
        goal = escape(f"{GOALS[rung]}: {reached}, {sizes}")
        parts.append(f"<h3>{goal}</h3><pre>{escape(flags)}</pre>")
    return "".join(parts)


def _memory(plan: StashPlan) -> str:
    """Draws the stage that holds most, without a stash and with each of the recommended ones."""
    stages = {rung: max(of, key=lambda one: one.footprint.static_bytes) for rung, of in plan.costs.items() if of}
    if not stages:
        return ""
    first = next(iter(stages.values()))
    bars = [_memory_bar("no stash", pages=0, buffers=first.footprint.static_bytes, host=0)]
    for rung, stage in stages.items():
        footprint = stage.footprint
        host = plan.recommended[rung].host_bytes
        bars.append(
            _memory_bar(RUNGS[rung], pages=footprint.arena_bytes, buffers=footprint.working_set_bytes, host=host)
        )
    said = (
        f"<p>On a rank of stage {first.stage}, where the experts leave most; the host's memory beside it. Rows: no "
        "stash, and the flags that are enough for each rung.</p>"
    )
    return said + stacked_bars(bars, _MEMORY, axis="MiB at the peak of a step")


def _memory_bar(label: str, *, pages: int, buffers: int, host: int) -> Bar:
    sizes = dict(zip(_MEMORY, (size / 2**20 for size in (pages, buffers, host)), strict=True))
    return Bar(label, sizes, f"{_mib(pages + buffers)} MiB")


def _costs(plan: StashPlan) -> str:
    times = {rung: _worst(of) for rung, of in plan.costs.items() if of}
    if not times:
        return ""
    first = next(iter(times.values()))
    alone = {name: first[name] for name in ("experts forward", "experts backward")}
    bars = [Bar("experts alone", alone, _ms(sum(alone.values())))]
    for rung, found in times.items():
        extra = {name: value for name, value in found.items() if name not in alone}
        bars.append(Bar(RUNGS[rung], extra, _ms(sum(extra.values()))))
    said = (
        f"<p>On the rank and stage with most, estimated by the rates of {escape(plan.device)} in configs/devices.yaml. "
        "First the experts' own products, then what the flags that are enough for each rung add. Copies to the host "
        "run beside other work.</p>"
    )
    return said + stacked_bars(bars, _TIMES, axis="milliseconds in a step")


def _worst(stages: Sequence[StageCosts]) -> dict[str, float]:
    """Milliseconds by the names of _TIMES."""
    columns = {
        "experts forward": [one.forward for one in stages],
        "experts backward": [one.backward for one in stages],
        "to pages and back": [one.stash for one in stages],
        "to the host and back": [2 * one.spill for one in stages],
        "act recomputed": [one.act for one in stages],
        "gate_up recomputed": [one.gate_up for one in stages],
    }
    return {name: 1e3 * max(values) for name, values in columns.items()}


def _spills(plan: StashPlan) -> str:
    """Draws how long each configuration that spills takes one way, with the experts' forward as the limit.

    The forward is the shorter of the experts' passes.
    """
    spilling = [one for one in [*plan.table, *plan.recommended.values()] if one.spilled_bytes]
    stages = next(iter(plan.costs.values()), [])
    if not spilling or not stages:
        return "" if not stages else "<p>Nothing is spilled with these factors.</p>"
    hides = 1e3 * min(min(one.forward, one.backward) for one in stages)
    bars = []
    for one in spilling:
        flags, seconds = one.flags, one.spilled_bytes / (plan.host_gb_s * 1e9)
        label = (
            f"{flags.moe_paged_stash_page_size}: {flags.moe_paged_stash_buffer_size_factor_cuda:g} + "
            f"{flags.moe_paged_stash_buffer_size_factor_cpu:g}"
        )
        bars.append(Bar(label, {"one way": 1e3 * seconds}, f"{_mib(one.spilled_bytes)} MiB"))
    said = (
        "<p>Mean of a step on the rank that spills most, one way. Rows: page size, factor on the device + on the host. "
        "Behind bars: what is spilled. Copies that take longer than the dashed line do not fit beside the experts' own "
        "products.</p>"
    )
    limit = (hides, f"experts' forward: {_ms(hides)}")
    return said + stacked_bars(bars, {"one way": "#b07aa1"}, axis="milliseconds in a step", limit=limit)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms"


def _mib(num_bytes: float) -> str:
    size = num_bytes / 2**20
    return f"{size:,.1f}" if size >= 10 else f"{size:.3g}"
