"""A plan of the paged stash in words and as JSON; what is planned is tools/plan_stash.py's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.moe.paged_stash import Counter
from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from megatron.planner.stash.costs import StageCosts
from megatron.planner.stash.outlook import Needs, Outlook
from megatron.planner.stash.stages import PlannedRun, StashFlags
from megatron.planner.stash.walk import Rung, StageSteps, Walk
from megatron.training.command_line.config_builder import with_flag_names
from megatron.training.command_line.flags import flag_table

RUNGS = {
    Rung.DEVICE: "device",
    Rung.HOST: "spills",
    Rung.ACT: "act recomputed",
    Rung.GATE_UP: "gate_up recomputed",
    Rung.NO_PAGES: "void: pages",
    Rung.OVER_CAPACITY: "void: rows",
}
GOALS = {
    Rung.DEVICE: "every page on the device",
    Rung.HOST: "at most spilled to the host",
    Rung.ACT: "at most act recomputed",
    Rung.GATE_UP: "at most gate_up recomputed, none void",
}


@dataclass(frozen=True)
class StashPlan:
    """All that is said. given: the run with its own flags, which grows; table: what lacks with other factors; costs: of
    the recommended ones.
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
    recommended: dict[Rung, Outlook]
    costs: dict[Rung, list[StageCosts]]
    pays: bool
    reasons: list[str]


def as_text(plan: StashPlan) -> str:
    """Returns the plan as text for a terminal."""
    run, steps = plan.run, len(plan.needs.rows)
    head = [
        f"plan of the paged stash: {len(run.stages)} stages, {len(run.layers)} layers with experts, "
        f"{run.ranks.num_sharing} ranks share {run.ranks.num_experts} experts; {run.num_microbatches} micro-batches of "
        f"{run.ranks.tokens:,} tokens a rank in a step",
        f"routing: {plan.source}, {steps:,} steps",
        *(f"  note: {guess}" for guess in plan.guesses),
    ]
    parts = [head, _needs_lines(plan)]
    if plan.recommended or plan.table:
        parts += [_given_lines(plan), _table_lines(plan.table), _recommended_lines(plan), _cost_lines(plan)]
    return "\n\n".join("\n".join(part) for part in [*parts, plan.reasons])


def as_json(plan: StashPlan) -> dict[str, Any]:
    """Returns the plan's figures as JSON values."""
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
            "rungs": plan.given.rungs.tolist(),
            "voids": plan.given.voids.tolist(),
            "ended_at": plan.given.ended_at,
            "capacity_factor": plan.given.capacity_factor,
            "device_factor": plan.given.grown.device_factor,
            "host_factor": plan.given.grown.host_factor,
            "stages": [_stage(stage) for stage in plan.given.stages],
        },
        "table": [_row(one) for one in plan.table],
        "recommended": {rung.name.lower(): _row(one) for rung, one in plan.recommended.items()},
        "costs": {rung.name.lower(): [_costs(one) for one in of_stages] for rung, of_stages in plan.costs.items()},
        "pays": plan.pays,
        "reasons": plan.reasons,
    }


def paste(flags: StashFlags) -> str:
    """The flags of a stash as a command line has them."""
    return (
        f"--moe-paged-stash --moe-expert-rank-capacity-factor {flags.moe_expert_rank_capacity_factor:g} "
        f"--moe-paged-stash-page-size {flags.moe_paged_stash_page_size} "
        f"--moe-paged-stash-buffer-size-factor-cuda {flags.moe_paged_stash_buffer_size_factor_cuda:g} "
        f"--moe-paged-stash-buffer-size-factor-cpu {flags.moe_paged_stash_buffer_size_factor_cpu:g}"
    )


def needs_note(plan: StashPlan) -> str:
    """Returns a note where steps are too few for the wanted probability; empty where they are enough."""
    if len(plan.needs.rows) * (1 - plan.wanted) >= 1 - 1e-6:
        return ""
    return f"of {len(plan.needs.rows):,} steps p{100 * plan.wanted:g} is the most; more steps tell more"


def _needs_lines(plan: StashPlan) -> list[str]:
    rows = [
        ("--moe-expert-rank-capacity-factor", plan.needs.rows),
        ("--moe-paged-stash-buffer-size-factor-cuda", plan.needs.pages),
    ]
    shares = (plan.wanted, 0.5, 1.0)
    cells = [["needed", f"p{100 * plan.wanted:g}", "median", "most"]]
    cells += [[name, *(f"{rounded_up(factor_at(one, of.tolist())):.2f}" for one in shares)] for name, of in rows]
    lines = _columns(cells)
    return lines + ([note] if (note := needs_note(plan)) else [])


def _given_lines(plan: StashPlan) -> list[str]:
    walk = plan.given
    cells = [["stage", "pages", "most held", "pages on the host", "most held", "gate_up recomputed", "act recomputed"]]
    for number, stage in enumerate(walk.stages):
        if stage.layouts and stage.layouts[-1]:
            cells.append([str(number), *map(str, _stage_numbers(stage))])
    steps = len(walk.rungs)
    lines = [f"with these flags: {paste(plan.run.flags)}", *_columns(cells)]
    lines.append("of the rank with most; the last two: tensors in the worst step")
    if walk.voids.any():
        grown = f"rows to {walk.capacity_factor:.3g} x"
        for name, factor in (("device", walk.grown.device_factor), ("host", walk.grown.host_factor)):
            grown += f", pages of the {name} to {factor:.3g} x" if factor is not None else ""
        lines.append(f"void steps: {int(walk.voids.sum()):,} in {steps:,}; the run grows: {grown}")
    if walk.ended_at is not None:
        lines.append(f"--moe-paged-stash-overflow-policy error ends the run in step {walk.ended_at + 1}")
    return lines


def _table_lines(table: Sequence[Outlook]) -> list[str]:
    shown = [rung for rung in Rung if rung in (Rung.DEVICE, Rung.NO_PAGES) or any(one.shares[rung] for one in table)]
    cells = [
        ["page size", "factor", "on host", "device MiB", "host MiB", *(RUNGS[rung] for rung in shown), "spilled MiB"]
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
                *(f"{one.shares[rung]:.1%}" for rung in shown),
                _mib(one.spilled_bytes),
            ]
        )
    factor = table[0].flags.moe_expert_rank_capacity_factor if table else None
    title = f"of the steps come to (the worst rank counts), with --moe-expert-rank-capacity-factor {factor:g}:"
    return [title, *_columns(cells)] if table else []


def _recommended_lines(plan: StashPlan) -> list[str]:
    lines = [f"enough for {plan.wanted:.4%} of the steps, by the same walk:"]
    steps = len(plan.needs.rows)
    for rung, one in plan.recommended.items():
        reached = round(one.share_up_to(rung) * steps)
        lines.append(f"{GOALS[rung]}: reached in {reached:,} of {steps:,} steps, {_mib(one.device_bytes)} MiB of pages")
        lines.append(f"  {paste(one.flags)}")
    if not plan.recommended:
        lines.append("none: no factor reaches it")
    return lines


def _cost_lines(plan: StashPlan) -> list[str]:
    lines = [
        f"costs of a step on the rank and stage with most, ms ({plan.device} of configs/devices.yaml, "
        f"{plan.host_gb_s:g} GB/s to the host; estimates):"
    ]
    cells = [
        ["enough for", "experts forward", "backward", "stash", "spill each way", "act recomputed", "gate_up recomputed"]
    ]
    for rung, of_stages in plan.costs.items():
        times = [(one.forward, one.backward, one.stash, one.spill, one.act, one.gate_up) for one in of_stages]
        cells.append([RUNGS[rung], *(f"{1e3 * max(column):.3g}" for column in zip(*times, strict=True))])
    lines += _columns(cells)
    for of_stages in plan.costs.values():
        spilling = [one for one in of_stages if one.spill > 0]
        if spilling:
            late = [str(one.stage) for one in spilling if not one.hides_spill]
            hidden = "fits beside the experts' own products"
            lines.append(
                f"spilling {hidden}" if not late else f"spilling takes longer than those on stages {', '.join(late)}"
            )
    for one in next(iter(plan.costs.values()), []):
        lines.append(f"stage {one.stage}: {with_flag_names(one.line, flag_table())}")
    return lines


def _stage_numbers(stage: StageSteps) -> list[int]:
    """Pages and the most held of both tiers, and tensors recomputed."""
    layouts = [layout for of_step in stage.layouts for layout in of_step]
    return [
        max(layout.device_pages for layout in layouts),
        int(stage.counters[Counter.HIGH_WATER_DEVICE].max()),
        max(layout.host_pages for layout in layouts),
        int(stage.counters[Counter.HIGH_WATER_HOST].max()),
        int(stage.counters[Counter.DROPPED_GATE_UP].max()),
        int(stage.counters[Counter.DROPPED_ACT].max()),
    ]


def _stage(stage: StageSteps) -> dict[str, Any]:
    """Returns the ranks' counts in each step."""
    return {
        "page_bytes": stage.page_bytes,
        "balanced_pages": stage.balanced_pages,
        "pages_wanted": stage.pages_wanted.tolist(),
        **{counter.name.lower(): of.tolist() for counter, of in stage.counters.items()},
    }


def _row(one: Outlook) -> dict[str, Any]:
    return {
        "flags": _flags(one.flags),
        "shares": {rung.name.lower(): share for rung, share in one.shares.items()},
        "device_bytes": one.device_bytes,
        "host_bytes": one.host_bytes,
        "spilled_bytes_of_step": one.spilled_bytes,
        "largest_spill_of_step": one.largest_spill,
    }


def _costs(one: StageCosts) -> dict[str, Any]:
    seconds = {name: vars(one)[name] for name in ("forward", "backward", "stash", "spill", "act", "gate_up")}
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


def _columns(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in cells]
