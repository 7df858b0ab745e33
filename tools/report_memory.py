"""What the report shows of memory by category: what ranks hold, beside what a plan said before the run, and its time.

plan.json is written by `--dry-run --tensorboard-dir`; what ranks hold is in the log, see training/meters/memory.py.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tools.run_log import RunLog

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
# Not on the device. Plans of before there were host_states lack them.
HOST = ("host_pages", "host_states")
ACTIVATIONS, REST = "activations", "rest"
LABELS = {**KINDS, ACTIVATIONS: "activations at their fullest", REST: "rest, up to the peak"}
PEAKS = {"peak_allocated": "most allocated at once", "peak_rss": "most resident, with Python and libraries"}
SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
Bytes = dict[str, int]


class ForeignPlanError(ValueError):
    """A plan.json that says nothing of this run."""


def memory_section(run: RunLog) -> dict[str, Any] | None:
    """Rows of a table, and bytes by kind of each stage for bars; None where neither a log nor a plan has any."""
    notes, plan = [], None
    path = run.path.with_name(PLAN_NAME)
    measured = _measured(run)
    try:
        plan = read_plan(path, run)
    except FileNotFoundError:
        notes.append(
            f"There is no {PLAN_NAME} beside the log, so nothing is predicted: the flags of the run with "
            "--dry-run --world-size N write it into --tensorboard-dir."
        )
    except ForeignPlanError as error:
        notes.append(f"{path} is left out: {error}.")
    if not measured and plan is None:
        return None
    if measured:
        notes.append(f"Measured after step {run.held['iteration']}: of each kind the most that any rank holds.")
    else:
        notes.append("The run has logged no memory by kind yet.")
    if plan is not None:
        notes.append("Predicted: of each kind the most of any stage.")
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
    """The plan in the file. Raises FileNotFoundError, and ForeignPlanError that says why it is none of this run."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ForeignPlanError(f"it is no JSON ({error})") from error
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ForeignPlanError(f"it cannot be read ({error.strerror})") from error
    try:
        stages = _planned_stages(plan)
        _planned_time(plan)
        int(plan["world_size"]), int(plan["parameters"]["all"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ForeignPlanError(f"it is no plan of --dry-run ({type(error).__name__}: {error})") from error
    environment, model = run.record.get("environment") or {}, run.record.get("model") or {}
    # Of the plan, and of the run where it is known.
    sizes = {
        "parameters": (plan["parameters"]["all"], model.get("parameters")),
        "processes": (plan["world_size"], environment.get("world_size")),
        "pipeline stages": (len(stages), len(_measured(run)) or None),
    }
    for name, (planned, found) in sizes.items():
        if found is not None and planned != found:
            raise ForeignPlanError(f"it is of another run: {planned} {name}, this run has {found}")
    return dict(plan)


def _planned_stages(plan: dict[str, Any]) -> dict[int, Bytes]:
    """By number of the stage."""
    found = {}
    for stage in plan["stages"]:
        memory = stage["memory"]
        sizes = {kind: int({"host_states": 0, **stage, **memory}[kind]) for kind in KINDS}
        found[int(stage["stage"])] = {**sizes, ACTIVATIONS: sum(map(int, memory["activations"].values()))}
    if not found:
        raise ValueError("stages is empty")
    return found


def _planned_time(plan: dict[str, Any]) -> tuple[float, str] | None:
    """Seconds of the step and the device they are estimated for; None for a plan without, as of a run without steps."""
    step = plan["step"]
    return None if step is None else (float(step["seconds"]), str(step["device"]))


def _measured(run: RunLog) -> dict[int, Bytes]:
    """By number of the stage, the most of its ranks; empty where the log has none that we can read."""
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
    """With what a GPU had allocated beyond what is told apart: activations, messages, what kernels take for a while."""
    if sizes is None or "peak_allocated" not in sizes:
        return sizes
    standing = sum(sizes.get(kind, 0) for kind in KINDS if kind not in HOST)
    return {**sizes, REST: max(0, sizes["peak_allocated"] - standing)}


def _rows(run: RunLog, predicted: dict[int, Bytes], *, measured: dict[int, Bytes]) -> list[dict[str, str]]:
    first = _of_rank_0(run)
    rows = []
    for kind, label in KINDS.items():
        said = max((sizes[kind] for sizes in predicted.values()), default=None)
        held = max((sizes.get(kind, 0) for sizes in measured.values()), default=None)
        if said or held:
            rows.append(_row(label, said=said, held=held, first=first.get(kind)))
    if predicted:
        rows.append(_row(LABELS[ACTIVATIONS], said=max(sizes[ACTIVATIONS] for sizes in predicted.values())))
    for name, label in PEAKS.items():
        held = max((sizes[name] for sizes in measured.values() if name in sizes), default=None)
        if held is not None:
            # A process has far more in memory than the plan tells of: no difference is told of that.
            all_kinds = max(map(_on_device, predicted.values()), default=None) if name == "peak_allocated" else None
            rows.append(_row(label, said=all_kinds, held=held, first=first.get(name)))
    return rows


def _on_device(sizes: Bytes) -> int:
    return sum(size for kind, size in sizes.items() if kind not in HOST)


def _row(label: str, *, said: int | None, held: int | None = None, first: int | None = None) -> dict[str, str]:
    difference = ""
    if said is not None and held is not None:
        difference = "none" if said == held else f"{held - said:+,} bytes"
        if said and said != held:
            difference += f" ({(held - said) / said:+.1%})"
    return {
        "name": label,
        "predicted": bytes_text(said),
        "measured": bytes_text(held),
        "difference": difference,
        "first": bytes_text(first),
    }


def _time_rows(run: RunLog, planned: tuple[float, str] | None) -> list[dict[str, str]]:
    values = run.series["seconds"].values if "seconds" in run.series else np.zeros(0)
    if planned is None or not values.size:
        return []
    seconds, device = planned
    # The median: the first steps take longer, and those beside a save.
    measured = float(np.nanmedian(values))
    texts = {"predicted": f"{seconds:.4g} s", "measured": f"{measured:.4g} s", "first": ""}
    found = str((run.record.get("environment") or {}).get("device", ""))
    if device.lower() not in found.lower():
        # The one says nothing of the other.
        name = f"time of a step, median (predicted for {device}, measured on {found or 'a device without a name'})"
        return [{"name": name, "difference": "", **texts}]
    difference = f"{(measured - seconds) / seconds:+.0%}" if seconds else ""
    return [{"name": f"time of a step, median (on {device})", "difference": difference, **texts}]


def bytes_text(size: int | None) -> str:
    """Four digits and a unit; empty for None."""
    if size is None:
        return ""
    unit, divisor = next((one for one in SIZES if size >= one[1]), SIZES[-1])
    return f"{size / divisor:.4g} {unit}"
