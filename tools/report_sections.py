"""Builds the report sections with separate tables and figures: communication, memory, and expert memory.

The plan is the plan.json that --dry-run writes to --tensorboard-dir.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megatron.core.transformer.moe.paged_stash.sizing import factor_at, rounded_up
from megatron.tools.report_figures import layer_table_figure, run_names
from megatron.tools.run_log import LEVEL_COUNTERS, RunLog

PLAN_NAME = "plan.json"
KINDS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "masters": "masters",
    "moments": "moments",
    "pages": "stash pages",
    "host_pages": "stash pages, host memory",
    "host_states": "masters and moments, host memory",
}
# Categories that are not on the device. Older plans do not contain host_states.
HOST = ("host_pages", "host_states")
ACTIVATIONS, REST = "activations", "rest"
LABELS = {**KINDS, ACTIVATIONS: "activations at their peak", REST: "other, up to the peak"}
PEAKS = {"peak_allocated": "peak allocated", "peak_rss": "peak resident, with Python and libraries"}
SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
Bytes = dict[str, int]
QUANTILE = 0.999
STASH_SECTION = "Expert memory"
# Flag, the field with the factor in use, and the field with the factor that a step required.
FACTORS = (
    ("moe_expert_rank_capacity_factor", "stash/capacity_factor", "stash/capacity_factor_needed"),
    ("moe_paged_stash_buffer_size_factor_cuda", "stash/pool_factor", "stash/pool_factor_needed"),
)


# Section: communication.


def timeline(run: RunLog) -> dict[str, Any] | None:
    """Returns the transfers of the last logged step in milliseconds, or None if the log contains no valid ones."""
    try:
        rows = [
            {
                "name": f"{number}. {one['traffic']} {one['name']}",
                "megabytes": float(one["bytes"]) / 1e6,
                "ready": float(one["ready_ms"]),
                "launched": float(one["launched_ms"]),
                "done": float(one["done_ms"]),
                "waits": [[float(begin), float(end)] for begin, end in one["waits_ms"]],
            }
            for number, one in enumerate(run.overlap["transfers"], 1)
        ]
        return {"step": run.overlap["iteration"], "backward_end": float(run.overlap["backward_end_ms"]), "rows": rows}
    except (KeyError, TypeError, ValueError):
        return None


# Section: memory by category.


class ForeignPlanError(ValueError):
    """Raised for a plan.json that is unreadable or belongs to a different run."""


def memory_section(run: RunLog) -> dict[str, Any] | None:
    """Returns the table rows and each stage's bytes by category, or None if neither the log nor a plan contains any."""
    notes, plan = [], None
    path = run.path.with_name(PLAN_NAME)
    measured = _measured(run)
    try:
        plan = read_plan(path, run)
    except FileNotFoundError:
        notes.append(
            f"There is no {PLAN_NAME} next to the log, so there is no prediction. --dry-run --world-size N with "
            "the flags of the run writes a plan to --tensorboard-dir."
        )
    except ForeignPlanError as error:
        notes.append(f"{path} is ignored: {error}.")
    if not measured and plan is None:
        return None
    if measured:
        notes.append(f"Measured after step {run.held['iteration']}: the maximum over ranks, by category.")
    else:
        notes.append("The run has not logged memory by category yet.")
    if plan is not None:
        notes.append("Predicted: the maximum over stages, by category.")
    predicted = {} if plan is None else _planned_stages(plan)
    return {
        "notes": notes,
        "rows": _rows(run, predicted, measured=measured)
        + ([] if plan is None else _time_rows(run, _planned_time(plan))),
        "kinds": list(LABELS),
        "labels": LABELS,
        "stages": [
            {"stage": stage, "predicted": predicted.get(stage), "measured": _with_rest(measured.get(stage))}
            for stage in sorted({*predicted, *measured})
        ],
    }


def read_plan(path: Path, run: RunLog) -> dict[str, Any]:
    """Returns the plan of this run.

    Raises FileNotFoundError if there is none, and ForeignPlanError if it is not a plan of this run.
    """
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ForeignPlanError(f"it is not JSON ({error})") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ForeignPlanError(f"it cannot be read ({error.strerror})") from error
    try:
        stages = _planned_stages(plan)
        _planned_time(plan)
        int(plan["world_size"]), int(plan["parameters"]["all"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ForeignPlanError(f"it is not a plan of --dry-run ({type(error).__name__}: {error})") from error
    environment, model = run.record.get("environment") or {}, run.record.get("model") or {}
    # Values of the plan, and of the run if known.
    sizes = {
        "parameters": (plan["parameters"]["all"], model.get("parameters")),
        "processes": (plan["world_size"], environment.get("world_size")),
        "pipeline stages": (len(stages), len(_measured(run)) or None),
    }
    for name, (planned, found) in sizes.items():
        if found is not None and planned != found:
            raise ForeignPlanError(f"it belongs to a different run: {planned} {name}, but this run has {found}")
    return dict(plan)


def _planned_stages(plan: dict[str, Any]) -> dict[int, Bytes]:
    """Returns the planned bytes by category for each stage number."""
    found = {}
    for stage in plan["stages"]:
        memory = stage["memory"]
        sizes = {kind: int({"host_states": 0, **stage, **memory}[kind]) for kind in KINDS}
        found[int(stage["stage"])] = {**sizes, ACTIVATIONS: sum(map(int, memory["activations"].values()))}
    if not found:
        raise ValueError("stages is empty")
    return found


def _planned_time(plan: dict[str, Any]) -> tuple[float, str] | None:
    """Returns the estimated seconds per step and the device, or None if the planned run does not train."""
    step = plan["step"]
    return None if step is None else (float(step["seconds"]), str(step["device"]))


def _measured(run: RunLog) -> dict[int, Bytes]:
    """Returns the measured bytes of each stage, maximum over its ranks; empty if the log contains no valid values."""
    try:
        return {int(stage): _sizes(sizes) for stage, sizes in run.held.get("stages", {}).items()}
    except (TypeError, ValueError, AttributeError, OverflowError):
        return {}


def _of_rank_0(run: RunLog) -> Bytes:
    try:
        return _sizes(run.held.get("rank_0", {}))
    except (TypeError, ValueError, AttributeError, OverflowError):
        return {}


def _sizes(record: dict[str, Any]) -> Bytes:
    return {name: int(size) for name, size in record.items()}


def _with_rest(sizes: Bytes | None) -> Bytes | None:
    """Adds the allocated bytes that belong to no category: activations, communication and temporary buffers."""
    if sizes is None or "peak_allocated" not in sizes:
        return sizes
    persistent = sum(sizes.get(kind, 0) for kind in KINDS if kind not in HOST)
    return {**sizes, REST: max(0, sizes["peak_allocated"] - persistent)}


def _rows(run: RunLog, predicted: dict[int, Bytes], *, measured: dict[int, Bytes]) -> list[dict[str, str]]:
    first = _of_rank_0(run)
    rows = []
    for kind, label in KINDS.items():
        planned = max((sizes[kind] for sizes in predicted.values()), default=None)
        held = max((sizes.get(kind, 0) for sizes in measured.values()), default=None)
        if planned or held:
            rows.append(_row(label, planned=planned, held=held, first=first.get(kind)))
    if predicted:
        rows.append(_row(LABELS[ACTIVATIONS], planned=max(sizes[ACTIVATIONS] for sizes in predicted.values())))
    for name, label in PEAKS.items():
        held = max((sizes[name] for sizes in measured.values() if name in sizes), default=None)
        if held is not None:
            # The resident memory includes Python and libraries, which no plan predicts, so no difference is shown.
            all_kinds = max(map(_on_device, predicted.values()), default=None) if name == "peak_allocated" else None
            rows.append(_row(label, planned=all_kinds, held=held, first=first.get(name)))
    return rows


def _on_device(sizes: Bytes) -> int:
    return sum(size for kind, size in sizes.items() if kind not in HOST)


def _row(label: str, *, planned: int | None, held: int | None = None, first: int | None = None) -> dict[str, str]:
    difference = ""
    if planned is not None and held is not None:
        difference = "none" if planned == held else f"{held - planned:+,} bytes"
        if planned and planned != held:
            difference += f" ({(held - planned) / planned:+.1%})"
    return {
        "name": label,
        "predicted": bytes_text(planned),
        "measured": bytes_text(held),
        "difference": difference,
        "first": bytes_text(first),
    }


def _time_rows(run: RunLog, planned: tuple[float, str] | None) -> list[dict[str, str]]:
    values = run.series["seconds"].values if "seconds" in run.series else np.zeros(0)
    if planned is None or not values.size:
        return []
    seconds, device = planned
    # The median, because the first steps and steps during a save take longer.
    measured = float(np.nanmedian(values))
    found = str((run.record.get("environment") or {}).get("device", ""))
    row = {"name": "step time, median", "predicted": "", "measured": f"{measured:.4g} s", "difference": "", "first": ""}
    if device.lower() not in found.lower():
        # An estimate for another device says nothing about this run.
        return [row]
    difference = f"{(measured - seconds) / seconds:+.0%}" if seconds else ""
    return [{**row, "name": f"{row['name']} (on {device})", "predicted": f"{seconds:.4g} s", "difference": difference}]


def bytes_text(size: int | None) -> str:
    """Formats bytes with four digits and a unit. None becomes an empty string."""
    if size is None:
        return ""
    unit, divisor = next((one for one in SIZES if size >= one[1]), SIZES[-1])
    return f"{size / divisor:.4g} {unit}"


# Section: expert buffers and the paged stash.


def stash_section(run: RunLog) -> dict[str, Any] | None:
    """Returns lines of text and the page occupancy of the last logged step, or None without expert buffers."""
    lines = [
        line
        for flag, given, needed in FACTORS
        if (line := _factor_line(run, flag, given=given, needed=needed)) is not None
    ]
    if lines and (sentence := _levels_line(run)):
        lines.append(sentence)
    return {"lines": lines, "timeline": _occupancy(run)} if lines else None


def _levels_line(run: RunLog) -> str | None:
    """Describes how often steps reached each recompute level, or returns None if the log contains no counts."""
    words = {
        "spilled_pages": "pages spilled to the host",
        "dropped_gate_up": "gate_up recomputed",
        "void_steps": "steps discarded and retried",
    }
    counts = {
        name: run.series[f"stash/rungs/{name}"].values for name in LEVEL_COUNTERS if f"stash/rungs/{name}" in run.series
    }
    if not counts:
        return None
    reached = [
        f"{words[name]}: {int(values.sum()):,}, in {np.count_nonzero(values):,} steps"
        for name, values in counts.items()
        if values.any()
    ]
    steps = len(next(iter(counts.values())))
    return f"Of {steps:,} steps: " + ("; ".join(reached) or "all had enough pages and rows")


def _factor_line(run: RunLog, flag: str, *, given: str, needed: str) -> str | None:
    """Describes the value of a flag that suffices for all but one step in a thousand, or returns None without data."""
    if needed not in run.series or given not in run.series:
        return None
    peaks = run.series[needed].values.tolist()
    factor = rounded_up(factor_at(QUANTILE, peaks))
    in_use = float(run.series[given].values[-1])
    if in_use == 0:
        # Without device pages, the required factor applies to host pages, whose factor is not logged.
        flag = flag.replace("_cuda", "_cpu")
    value = (run.record.get("flags") or {}).get(flag)
    you_gave = f"buffers have {in_use:.4g}" if value is None else f"you gave {value:g}"
    if value is not None and in_use != 0 and not math.isclose(value, in_use, rel_tol=5e-3):
        you_gave += f", the buffers have {in_use:.4g}"
    few = "" if len(peaks) * (1 - QUANTILE) >= 1 - 1e-6 else "; the maximum of these few steps"
    name = flag.replace("_", "-")
    return f"--{name}: factor needed at p99.9: {factor:.2f} (of {len(peaks):,} steps; {you_gave}{few})"


def _occupancy(run: RunLog) -> dict[str, Any] | None:
    """Returns the pages in use along the schedule and the pool sizes, or None without a valid logged step."""
    try:
        pool = run.stash.pool
        timeline = pool["timeline"]
        passes = [int(layer) for layer in timeline["passes"]]
        changes = [[int(number) for number in change] for change in timeline["changes"]]
        weights = [int(place) for place in timeline.get("weights", [])]
        if not passes or any(len(change) != 4 or not 0 <= change[0] < len(passes) for change in changes):
            return None
        sizes = {"device_pages": int(pool["device_pages"]), "host_pages": int(pool["host_pages"])}
        where = {"step": run.stash.pool_step, "rank": int(pool["rank"])}
        return {**where, **sizes, "passes": passes, "weights": weights, "changes": changes}
    except (KeyError, TypeError, ValueError):
        return None


def rows_figures(runs: Sequence[RunLog]) -> list[dict[str, Any]]:
    """Returns a figure for each run: the rows of each layer's fullest forward, relative to balanced routing."""
    figures = []
    for index, run in enumerate(runs):
        if not run.stash.rows.sums:
            continue
        of_run = f" ({run_names(runs)[index]})" if len(runs) > 1 else ""
        frame = {
            "id": f"stash-rows-{index}",
            "section": STASH_SECTION,
            "title": f"Live rows by layer{of_run}",
            "axis": "rows / balanced rows",
            "note": "The fullest forward of each layer on any rank since the previous log line. The capacity "
            "of the buffers is the capacity factor.",
        }
        figures.append(layer_table_figure(run.stash.rows, frame, bound=run.series.get("stash/capacity_factor")))
    return figures
