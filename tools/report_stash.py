"""What the report shows of expert buffers and the paged stash: factors, rows of layers, pages along the schedule."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from tools.report_figures import layer_table_figure, run_names
from tools.run_log import RUNGS, RunLog

QUANTILE = 0.999
SECTION = "Expert memory"
# Flag and the fields of what it gave and of what was needed.
FACTORS = (
    ("moe_expert_rank_capacity_factor", "stash/capacity_factor", "stash/capacity_factor_needed"),
    ("moe_paged_stash_buffer_size_factor_cuda", "stash/pool_factor", "stash/pool_factor_needed"),
)


def stash_section(run: RunLog) -> dict[str, Any] | None:
    """Lines of text, and the occupancy of the last step that was logged; None where experts have no such buffers."""
    lines = [
        line
        for flag, given, needed in FACTORS
        if (line := factor_line(run, flag, given=given, needed=needed)) is not None
    ]
    if lines and (sentence := rungs_line(run)):
        lines.append(sentence)
    return {"lines": lines, "timeline": occupancy(run)} if lines else None


def rungs_line(run: RunLog) -> str | None:
    """How often steps had to give way, by kind; None where the log does not tell."""
    words = {
        "spilled_pages": "pages spilled to the host",
        "dropped_act": "act computed again",
        "dropped_gate_up": "gate_up computed again",
        "void_steps": "steps run again",
    }
    counts = {name: run.series[f"stash/rungs/{name}"].values for name in RUNGS if f"stash/rungs/{name}" in run.series}
    if not counts:
        return None
    told = [
        f"{words[name]}: {int(values.sum()):,}, in {np.count_nonzero(values):,} steps"
        for name, values in counts.items()
        if values.any()
    ]
    steps = len(next(iter(counts.values())))
    return f"Of {steps:,} steps: " + ("; ".join(told) or "none lacked pages or rows")


def factor_line(run: RunLog, flag: str, *, given: str, needed: str) -> str | None:
    """Which value of the flag would have been enough for all but one step of a thousand."""
    if needed not in run.series or given not in run.series:
        return None
    peaks = run.series[needed].values.tolist()
    factor = rounded_up(factor_at(QUANTILE, peaks))
    in_use = float(run.series[given].values[-1])
    if in_use == 0:
        # No pages on the device: what is needed is needed on the host, whose factor no field tells.
        flag = flag.replace("_cuda", "_cpu")
    value = (run.record.get("flags") or {}).get(flag)
    you_gave = f"buffers have {in_use:.4g}" if value is None else f"you gave {value:g}"
    if value is not None and in_use != 0 and not math.isclose(value, in_use, rel_tol=5e-3):
        you_gave += f", which came to {in_use:.4g}"
    few = "" if len(peaks) * (1 - QUANTILE) >= 1 - 1e-6 else "; of so few steps it is the largest"
    name = flag.replace("_", "-")
    return f"--{name}: factor needed at p99.9: {factor:.2f} (of {len(peaks):,} steps; {you_gave}{few})"


def occupancy(run: RunLog) -> dict[str, Any] | None:
    """The timeline of the log, and how many pages there are; None where no step was logged that we can read."""
    try:
        pool = run.stash.pool
        timeline = pool["timeline"]
        passes = [int(layer) for layer in timeline["passes"]]
        changes = [[int(number) for number in change] for change in timeline["changes"]]
        if not passes or any(len(change) != 4 or not 0 <= change[0] < len(passes) for change in changes):
            return None
        sizes = {"device_pages": int(pool["device_pages"]), "host_pages": int(pool["host_pages"])}
        where = {"step": run.stash.pool_step, "rank": int(pool["rank"])}
        return {**where, **sizes, "passes": passes, "changes": changes}
    except (KeyError, TypeError, ValueError):
        return None


def rows_figures(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Rows of each layer's fullest pass over those of the balanced case, of each run by itself."""
    figures = []
    for index, run in enumerate(runs):
        if not run.stash.rows.sums:
            continue
        of_run = f" ({run_names(runs)[index]})" if len(runs) > 1 else ""
        frame = {
            "id": f"stash-rows-{index}",
            "section": SECTION,
            "title": f"Live rows by layer{of_run}",
            "axis": "rows / balanced rows",
            "note": "Of each layer's fullest pass on any process since the last log line. Buffers have room for the "
            "capacity factor.",
        }
        figures.append(layer_table_figure(run.stash.rows, frame, bound=run.series.get("stash/capacity_factor")))
    return figures
