"""Profiles one step: a table of the device's kernels, and the functions on which the host spends its time.

The rates of a kernel need its bytes and FLOPs, which follow from the shape for the kernels of the experts' rows (see
`work_of_kernels`). Other kernels have a time and a count only.
"""

import cProfile
import pstats
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.checks.device_events import Span, busy_microseconds, launches_of
from benchmarks.gpu.graph_step import Stepper
from benchmarks.gpu.shapes import RANKS, Shape, Side
from megatron.core.device import synchronize

KERNELS, FUNCTIONS = 40, 25
NAME_CHARACTERS = 110
ROOT = Path(__file__).resolve().parent.parent.parent.parent


@dataclass(frozen=True)
class Work:
    """Bytes read and written, and operations, of all launches of a kernel in one step."""

    num_bytes: float = 0.0
    flops: float = 0.0


def work_of_kernels(shape: Shape, side: Side) -> dict[str, Work]:
    """Returns the work of this project's kernels on the experts' rows in a step, by name, with balanced routing.

    Counts live rows once for each read and each write, and weights once for each GEMM. Every tensor of a stash has
    pages. torch's kernels, which run the other GEMMs, have names that do not tell their shapes.
    """
    if not side.has_static_rows:
        return {}
    rows, tokens = shape.seq * shape.topk, RANKS * shape.seq
    element, ffn, hidden = shape.element_bytes, shape.ffn, shape.hidden
    weights = shape.num_own * hidden * ffn
    number = 4  # bytes of an index, a weight of a row, or an element of a gradient of weights
    passes = shape.layers * shape.microbatches
    of_pass = {
        # Rows of tokens in forward and of their gradients in backward, and the rows' weights.
        "gather_kernel": Work(rows * (4 * hidden * element + 5 * number)),
        "sum_kernel": Work(rows * (2 * hidden * element + number) + tokens * 2 * hidden * element
                           + tokens * shape.topk * 4 * number),
        "act_kernel": Work(rows * (3 * ffn * element + number)),
        "act_gradient_kernel": Work(rows * (6 * ffn * element + 2 * number)),  # writes act as well
        "weight_grad_kernel": Work(rows * (2 * hidden + 3 * ffn) * element + 3 * weights * 2 * number,
                                   6.0 * rows * hidden * ffn),
    }  # fmt: skip
    work = {name: Work(passes * one.num_bytes, passes * one.flops) for name, one in of_pass.items()}
    if side.has_stash:
        # Of the GEMMs, only the one that a stash may recompute; see [Note: choice of kernel] in grouped_gemm.py.
        product = rows * (hidden + 2 * ffn) * element + 2 * weights * element
        work["grouped_gemm_kernel"] = Work(passes * product, passes * 4.0 * rows * hidden * ffn)
    if side.has_stash and not side.computes_in_pages:
        # x, gate_up and the rows' weights. The last layer's rows are used before they would be stashed.
        copied = rows * ((hidden + 2 * ffn) * element + number)
        work["copy_kernel"] = Work(4.0 * copied * (shape.layers - 1) * shape.microbatches)
    return work


def kernel_table(stepper: Stepper, work: Mapping[str, Work]) -> dict[str, Any]:
    """Profiles a step. Returns its launches, the busy time, and a row for each of the longest kernels.

    work: bytes and FLOPs of kernels in a step, by name.
    """
    device = stepper.device
    kinds = [ProfilerActivity.CPU] if device.type == "cpu" else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    synchronize(device)
    with profile(activities=kinds) as recorded:
        stepper.step()
        synchronize(device)
    launches = launches_of(recorded)
    span = max((one.end for one in launches), default=0.0) - min((one.start for one in launches), default=0.0)
    rows = rows_of(launches, work)
    rest = rows[KERNELS:]
    if rest:
        count, micros = sum(row["count"] for row in rest), sum(row["us"] for row in rest)
        rows = [*rows[:KERNELS], {"kernel": f"{len(rest)} others", "count": count, "us": round(micros, 1)}]
    return {
        "launches": len(launches),
        "busy_ms": busy_microseconds(launches) / 1e3,
        "span_ms": span / 1e3,
        "kernels_of_known_work": sorted(work),
        "kernels": rows,
    }


def rows_of(launches: Sequence[Span], work: Mapping[str, Work]) -> list[dict[str, Any]]:
    """Returns a row for each kernel, longest first: launches, microseconds, and rates if its work is known."""
    count: dict[str, int] = {}
    micros: dict[str, float] = {}
    for launch in launches:
        count[launch.name] = count.get(launch.name, 0) + 1
        micros[launch.name] = micros.get(launch.name, 0.0) + launch.end - launch.start
    rows = []
    for name in sorted(micros, key=lambda one: -micros[one]):
        row: dict[str, Any] = {"kernel": name[:NAME_CHARACTERS], "count": count[name], "us": round(micros[name], 1)}
        known = work.get(name)
        if known is not None and micros[name] > 0:
            row["gb_s"] = round(known.num_bytes / micros[name] / 1e3, 1)
            row["tflop_s"] = round(known.flops / micros[name] / 1e6, 1)
        rows.append(row)
    return rows


def host_profile(stepper: Stepper) -> dict[str, Any]:
    """Profiles the Python functions of a step. Returns calls and seconds, and the functions with the most own time.

    The profiler sees one thread, so backward runs in this thread instead of autograd's.
    """
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        synchronize(stepper.device)
        profiler.enable()
        try:
            stepper.step()
        finally:
            profiler.disable()
    statistics: Any = pstats.Stats(profiler)
    entries = sorted(statistics.stats.items(), key=lambda entry: -entry[1][2])
    rows = [
        {
            "function": _function(*place),
            "calls": calls,
            "own_ms": round(1e3 * own, 2),
            "ms": round(1e3 * total, 2),
        }
        for place, (_, calls, own, total, _) in entries[:FUNCTIONS]
    ]
    return {"calls": statistics.total_calls, "host_ms": round(1e3 * statistics.total_tt, 1), "functions": rows}


def _function(path: str, line: int, name: str) -> str:
    place = path.removeprefix(f"{ROOT}/").rpartition("site-packages/")[2]
    return name if path == "~" else f"{place}:{line} {name}"
