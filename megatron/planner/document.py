"""A plan as plain values, which plan.json holds and the page is made of, and lines about its time.

Nothing is planned here.
"""

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.core.replaced_file import replaced_file
from megatron.planner.buffers import BufferLayout
from megatron.planner.fit import Fit
from megatron.planner.page import page
from megatron.planner.plan import NOT_PLANNED, Plan, RankPlan
from megatron.planner.rank_ranges import rank_range
from megatron.planner.rates import message_seconds
from megatron.planner.run_time import ASSUMPTIONS, places
from megatron.planner.step_time import StageTime, StepTime
from megatron.planner.table import layout_sizes
from megatron.planner.traffic import link_bytes
from megatron.training.compute.devices import Device

JSON_FILE, PAGE_FILE = "plan.json", "plan.html"
# More would make files of many megabytes; those of the beginning are told.
_MOST_PASSES = 20_000
# Seconds below which a difference of sums is rounding.
_NOTHING = 1e-12


def plan_document(
    plan: Plan, args: argparse.Namespace, *, device: Device, step: StepTime | None, fit: Fit
) -> dict[str, Any]:
    """All that is known of the plan, in bytes and seconds, as JSON has it. step: None where nothing is trained."""
    in_node = places(plan, device)
    times = [None] * len(plan.stages) if step is None else step.stages
    return {
        "world_size": args.world_size,
        "layout": layout_sizes(args),
        "batch": {
            "num_microbatches": plan.num_microbatches,
            "micro_batch_size": args.micro_batch_size,
            "seq_length": args.seq_length,
        },
        "parameters": {"all": plan.num_parameters, "of_a_token": plan.active_parameters},
        "device": asdict(device),
        "fit": {**asdict(fit), "fits": fit.fits, "line": fit.line},
        "stages": [
            _stage(stage, time, device=device, in_node=in_node) for stage, time in zip(plan.stages, times, strict=True)
        ],
        "step": None if step is None else _step(step),
        "schedule": [] if step is None else _schedule(step),
        "notes": notes(plan, device),
        "assumptions": list(ASSUMPTIONS),
    }


def write_plan(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes plan.json and plan.html into the folder, which is made where it is missing. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {JSON_FILE: json.dumps(document, indent=1), PAGE_FILE: page(document)}
    for name, text in texts.items():
        with replaced_file(folder / name) as file:
            file.write(text.encode())
    return [folder / name for name in texts]


def time_lines(step: StepTime) -> list[str]:
    """Returns the printed lines about the estimated step."""
    split = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in step.split().items())
    mfu = "" if step.mfu is None else f", MFU {100 * step.mfu:.1f}%"
    slowest = min(step.stages, key=lambda stage: stage.bubble)
    kinds = sorted(slowest.by_kind.items(), key=lambda item: -item[1])
    return [
        f"estimated step on {step.device}: {_seconds(step.seconds)}, {step.tokens_per_second:,.0f} tokens/s, "
        f"{step.tflops:.1f} TFLOP/s a device{mfu}",
        f"of it, mean over stages: {split}",
        f"passes of stage {step.stages.index(slowest)}, which waits least: forward {_seconds(slowest.forward)}, "
        f"recompute {_seconds(slowest.recompute)}, backward {_seconds(slowest.backward)}; by kind "
        + ", ".join(f"{kind} {_seconds(seconds)}" for kind, seconds in kinds),
        *(f"assumed: {assumption}" for assumption in ASSUMPTIONS),
    ]


def notes(plan: Plan, device: Device) -> list[str]:
    """Returns notes that every form of the plan shows."""
    found = [f"Memory leaves out {NOT_PLANNED}."]
    if plan.is_balanced:
        found.append("Rows of experts are those of tokens that choose all experts equally often.")
    found += [f"{one}." for one in plan.stand_ins]
    full = [stage for stage in plan.stages if stage.peak > device.memory_bytes]
    if full:
        found.append(
            f"Memory of stages {', '.join(str(stage.stage) for stage in full)} is more than the {device.name} has "
            f"({device.memory_gib:g} GiB)."
        )
    if any(any(stage.host.values()) for stage in plan.stages):
        found.append("What is in the host's memory is not part of the device's.")
    return found


def _stage(stage: RankPlan, time: StageTime | None, *, device: Device, in_node: Mapping[str, int]) -> dict[str, Any]:
    standing = {name: vars(stage)[name] for name in ("parameters", "gradients", "masters", "moments", "pages")}
    links = []
    for one in stage.links:
        shared = in_node.get(one.group, one.group_size)
        seconds = message_seconds(one, device, in_node=shared)
        links.append({**asdict(one), "link_bytes": link_bytes(one), "in_node": shared, "seconds": seconds})
    return {
        "stage": stage.stage,
        "rank": stage.rank,
        "layers": list(stage.layers),
        "memory": {**standing, "activations": dict(stage.activations)},
        "total": stage.total,
        **{name: vars(stage)[name] for name in ("working", "updating", "messages")},
        "peak": stage.peak,
        **{f"host_{kind}": count for kind, count in stage.host.items()},
        "groups": {name: {"size": len(ranks), "ranks": rank_range(ranks)} for name, ranks in stage.groups.items()},
        "links": links,
        "buffers": [_buffer(one) for one in stage.buffers],
        "time": None if time is None else asdict(time),
    }


def _buffer(one: BufferLayout) -> dict[str, Any]:
    ends = [list(pair) for pair in one.bucket_ends]
    return {**asdict(one), "bucket_bytes": list(one.bucket_bytes), "bucket_ends": ends}


def _step(step: StepTime) -> dict[str, Any]:
    figures = ("device", "seconds", "tokens_per_second", "tflops", "mfu")
    return {**{name: vars(step)[name] for name in figures}, "split": step.split()}


def _schedule(step: StepTime) -> list[list[list[Any]]]:
    """Returns each stage's passes: F or B, chunk, microbatch, start and end in seconds."""
    most = _MOST_PASSES // len(step.spans)
    return [
        [[a.kind.value, a.chunk, a.microbatch, span.start, span.end] for a, span in list(stage.items())[:most]]
        for stage in step.spans
    ]


def _seconds(seconds: float) -> str:
    if seconds < _NOTHING:
        return "0 ms"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
