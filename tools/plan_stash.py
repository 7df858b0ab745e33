"""Plans the paged stash before a run: `python tools/plan_stash.py FLAGS --world-size 64 --trace FILE`.

FLAGS are the flags of pretrain_gpt.py for the run, including presets and --config. --moe-paged-stash and its factors
may be omitted. FILE is a trace that --record-routing wrote in a run of the same model, in any layout. Without a trace,
`--skew dirichlet:0.3` draws a routing. Reports how often pages would run out for various factors and page sizes,
sufficient flags, the cost of spilling and recomputation, and whether the stash pays off.
"""

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.transformer.moe.paged_stash.page_layout import DEFAULT_PAGE_SIZE
from megatron.core.transformer.moe.paged_stash.sizing import formats, least_page_size, usual_page_size
from megatron.pages.page import MissingPackageError
from megatron.planner.stash.costs import Machine, stage_costs, verdict
from megatron.planner.stash.outlook import (
    Outlook,
    enough_capacity,
    needs_of_steps,
    outlook,
    recommended,
)
from megatron.planner.stash.routing import RoutingSpan, parse_skew, synthetic_spans, traced_spans
from megatron.planner.stash.stages import PlannedRun, StashFlags, planned_run
from megatron.planner.stash.walk import StepLevel, walk
from megatron.tools.stash_report import StashPlan, as_json, as_page, as_text
from megatron.tools.train import pretrain_gpt
from megatron.training.arguments import parse_args, validate_args
from megatron.training.callbacks.routing_trace import read_routing
from megatron.training.command_line.config_builder import run_config_of
from megatron.training.compute.devices import planned_device, plans_for_gpu

FACTORS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5)
# Number of expert ranks for which routing is generated, unless --plan-groups is given.
_SIMULATED_RANKS = 64
_EXIT_USAGE = 2


@dataclass(frozen=True)
class Routing:
    """The routing of the steps to plan. source: where it comes from. guesses: sentences about assumptions."""

    spans: list[RoutingSpan]
    source: str
    guesses: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the plan and returns the exit status: 2 for flags or a trace that cannot be planned, else 0."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        args = read_flags(words)
        plan = stash_plan(args)
        if args.json is not None:
            Path(args.json).write_text(json.dumps(as_json(plan), indent=1) + "\n", encoding="utf-8")
        print(as_text(plan))
        if args.page is not None:
            Path(args.page).write_text(as_page(plan), encoding="utf-8")
    except MissingPackageError as error:
        print(f"error: --page is {args.page}: {error}", file=sys.stderr)
        return _EXIT_USAGE
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror or error}", file=sys.stderr)
        return _EXIT_USAGE
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return _EXIT_USAGE
    return 0


def read_flags(words: Sequence[str]) -> argparse.Namespace:
    """Parses and validates the flags of the run and of the plan. Raises ValueError for a run that cannot be planned."""
    args = parse_args(_add_flags, argv=[*words, "--dry-run"])
    if args.num_experts is None:
        raise ValueError("--num-experts is not given: a paged stash requires a model with experts")
    _check_plan_flags(args)
    args.capacity_is_given = args.moe_expert_rank_capacity_factor is not None
    args.moe_paged_stash = True
    args.moe_expert_rank_capacity_factor = args.moe_expert_rank_capacity_factor or 1.0
    return validate_args(args)


def _check_plan_flags(args: argparse.Namespace) -> None:
    """Raises ValueError naming an invalid flag of the plan and its value."""
    if args.trace is None and args.skew is None:
        raise ValueError("no routing: give --trace FILE, written by --record-routing, or --skew such as dirichlet:0.3")
    if args.trace is not None and args.skew is not None:
        raise ValueError(f"--trace is {args.trace} and --skew is {args.skew}: give only one of them")
    if not 0 < args.wanted_probability <= 1:
        raise ValueError(f"--wanted-probability is {args.wanted_probability:g}: must be above 0 and at most 1")
    for name, what, is_right in (
        ("plan_steps", "above 0", _is_above_0),
        ("plan_groups", "above 0", _is_above_0),
        ("host_gb_s", "above 0", _is_above_0),
        ("plan_factors", "at least 0", lambda factor: 0 <= factor < math.inf),
        ("plan_host_factors", "at least 0", lambda factor: 0 <= factor < math.inf),
        ("plan_page_sizes", "above 0", _is_above_0),
    ):
        for value in _as_list(getattr(args, name)):
            if not is_right(value):
                raise ValueError(f"--{name.replace('_', '-')} has {value:g}: must be {what}")
    if args.skew is not None:
        parse_skew(args.skew)


def _is_above_0(number: float) -> bool:
    return 0 < number < math.inf


def _as_list(value: float | list[float] | None) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def stash_plan(args: argparse.Namespace) -> StashPlan:
    """Plans the paged stash for validated arguments."""
    run = planned_run(run_config_of(args), pretrain_gpt.model_provider)
    routing = _routing(args, run)
    needs = needs_of_steps(run, routing.spans)
    capacity = enough_capacity(needs, args.wanted_probability)
    flags = replace(run.flags, moe_expert_rank_capacity_factor=capacity)
    if not args.capacity_is_given:
        run = replace(run, flags=flags)
    device = planned_device()
    machine = Machine.of(device, flags.params_dtype, form=next(filter(None, formats(flags)), None))
    if args.host_gb_s is not None:
        machine = replace(machine, host_bytes=args.host_gb_s * 1e9)
    # If no group saves rows for backward, there are no factors to choose.
    stashes = bool(needs.pages.any())
    best = recommended(run, needs, spans=routing.spans, flags=flags, wanted=args.wanted_probability) if stashes else {}
    chosen = best.get(StepLevel.DEVICE) or outlook(run, flags, spans=routing.spans)
    costs = {level: stage_costs(run, one, spans=routing.spans, machine=machine) for level, one in best.items()}
    pays, reasons = verdict(chosen, stage_costs(run, chosen, spans=routing.spans, machine=machine), others=costs)
    return StashPlan(
        run=run,
        source=routing.source,
        guesses=routing.guesses,
        wanted=args.wanted_probability,
        device=device.name,
        host_gb_s=machine.host_bytes / 1e9,
        needs=needs,
        given=walk(run, run.flags, spans=routing.spans, grows=True),
        table=_table(args, run, spans=routing.spans) if stashes else [],
        recommended=best,
        costs=costs,
        pays=pays,
        reasons=reasons,
    )


def _routing(args: argparse.Namespace, run: PlannedRun) -> Routing:
    ranks = run.ranks
    if args.plan_groups is not None and args.plan_groups > ranks.num_groups:
        raise ValueError(
            f"--plan-groups is {args.plan_groups}: must be at most {ranks.num_groups}, the number of groups that "
            "share experts in a stage"
        )
    if args.trace is not None:
        groups = args.plan_groups or ranks.num_groups
        try:
            spans, guesses = traced_spans(read_routing(args.trace), run, num_groups=groups, seed=args.seed)
        except OSError as error:
            what = error.strerror or error
            raise ValueError(f"--trace is {args.trace}: {what}: give a file that --record-routing wrote") from None
        return Routing(spans, args.trace, guesses + _left_out(run, groups))
    groups = args.plan_groups or min(ranks.num_groups, max(1, _SIMULATED_RANKS // ranks.expert_ranks))
    skew = parse_skew(args.skew)
    spans = synthetic_spans(run, skew, num_steps=args.plan_steps, num_groups=groups, seed=args.seed)
    return Routing(spans, f"{skew}, seed {args.seed}", _left_out(run, groups))


def _left_out(run: PlannedRun, groups: int) -> list[str]:
    if groups == run.ranks.num_groups:
        return []
    return [f"{groups} of the {run.ranks.num_groups} groups that share experts in a stage were simulated"]


def _table(args: argparse.Namespace, run: PlannedRun, *, spans: Sequence[RoutingSpan]) -> list[Outlook]:
    """Returns the outlook for each combination of page size, host factor and device factor."""
    flags = run.flags
    # The page size with which one page holds a whole buffer.
    rows = run.ranks.max_rows(flags.moe_expert_rank_capacity_factor or 1.0)
    largest = 1 << (rows - 1).bit_length()
    for size in args.plan_page_sizes or []:
        _check_page_size(size, flags)
        if size > largest:
            raise ValueError(
                f"--plan-page-sizes has {size}: must be at most {largest}, because buffers have {rows} rows (tokens)"
            )
    sizes = args.plan_page_sizes or _usual_page_sizes(flags, largest=largest)
    hosts = args.plan_host_factors or [max(0.0, flags.moe_paged_stash_buffer_size_factor_cpu)]
    tried: list[StashFlags] = [
        replace(
            flags,
            moe_paged_stash_page_size=size,
            moe_paged_stash_buffer_size_factor_cuda=factor,
            moe_paged_stash_buffer_size_factor_cpu=host,
            moe_paged_stash_buffer_bytes=None,
        )
        for size in sizes
        for host in hosts
        for factor in args.plan_factors or FACTORS
        if factor or host
    ]
    if not tried:
        raise ValueError("--plan-factors and --plan-host-factors are all 0: at least one factor must be above 0")
    return [outlook(run, one, spans=spans) for one in tried]


def _check_page_size(size: int, flags: StashFlags) -> None:
    """Raises ValueError for a page size with which a run could not start on the planned device."""
    if not flags.stash_computes_in_pages:
        if size & (size - 1):
            raise ValueError(f"--plan-page-sizes has {size}: must be powers of two")
    elif plans_for_gpu() and size == DEFAULT_PAGE_SIZE:
        raise ValueError(
            f"--plan-page-sizes has {size}, which stands for the default: must be its size, {usual_page_size(flags)}"
        )
    elif plans_for_gpu() and size % least_page_size(flags):
        raise ValueError(
            f"--plan-page-sizes has {size}: must be multiples of {least_page_size(flags)}, so that a page holds whole "
            "rows of x and gate_up, or --moe-paged-stash-compute must be copies"
        )


def _usual_page_sizes(flags: StashFlags, *, largest: int) -> list[int]:
    """Returns a quarter of the given page size, the size itself and four times it, as far as a run could have them."""
    given, is_in_pages_of_gpu = flags.moe_paged_stash_page_size, flags.stash_computes_in_pages and plans_for_gpu()
    unit = least_page_size(flags) if is_in_pages_of_gpu else 1
    quarter, fourfold = given // 4 // unit * unit, min(given * 4, largest) // unit * unit
    sizes = {max(unit, quarter), given, max(given, fourfold)}
    # There a run takes this size for the usual one.
    return sorted(sizes - {DEFAULT_PAGE_SIZE} if is_in_pages_of_gpu else sizes)


def _add_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("plan of the paged stash")
    group.add_argument("--trace", metavar="FILE", help="Routing trace that --record-routing wrote for this model.")
    group.add_argument(
        "--skew",
        metavar="MODEL",
        help="Synthetic routing: balanced; dirichlet:CONCENTRATION, popularities drawn in each step; "
        "zipf:EXPONENT; drift:SPREAD:STEPS, popularities that drift.",
    )
    group.add_argument(
        "--wanted-probability",
        type=float,
        default=0.999,
        metavar="P",
        help="Fraction of the steps that must not exceed a level.",
    )
    group.add_argument(
        "--plan-steps", type=int, default=1000, metavar="N", help="Number of steps to generate with --skew."
    )
    group.add_argument(
        "--plan-groups", type=int, metavar="N", help="Number of groups sharing experts to simulate in each stage."
    )
    group.add_argument("--plan-factors", type=float, nargs="+", metavar="F", help="Factors of device pages to try.")
    group.add_argument("--plan-host-factors", type=float, nargs="+", metavar="F", help="Factors of host pages to try.")
    group.add_argument("--plan-page-sizes", type=int, nargs="+", metavar="N", help="Page sizes to try, in tokens.")
    group.add_argument(
        "--host-gb-s",
        type=float,
        metavar="X",
        help="Rate of copies between device and host in one direction, in 10^9 bytes per second; unset: the rate of "
        "the planned device in configs/devices.yaml.",
    )
    group.add_argument("--json", metavar="FILE", help="Also write the plan to this JSON file.")
    group.add_argument("--page", metavar="FILE", help="Also write an HTML page with figures to this file.")
    return parser


if __name__ == "__main__":
    sys.exit(main())
