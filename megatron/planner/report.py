"""Implements --dry-run and the output formats of a plan: printed lines, plan.json, and tables of searched layouts.

plan.py and layout_search.py compute plans, and page.py draws the page.
"""

import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from megatron.core.files import replaced_file
from megatron.core.optimizer.param_groups import ConfigOverrides
from megatron.core.pipeline_placement import configured_placement
from megatron.pages.page import MissingPackageError
from megatron.planner.fit import Fit, Planner, fit_of, with_change
from megatron.planner.layout_search import Advice, Found
from megatron.planner.page import page
from megatron.planner.plan import (
    NOT_PLANNED,
    BufferLayout,
    ForwardStep,
    Plan,
    RankPlan,
    moved_to_a_v,
    pipeline_number_of,
    plan_run,
)
from megatron.planner.step_time import (
    ASSUMPTIONS,
    PAIR_ASSUMPTION,
    STASH_ASSUMPTION,
    ScheduleTime,
    StageTime,
    StepTime,
    ranks_per_node,
    run_time,
    schedule_times,
)
from megatron.planner.work import link_bytes, message_seconds
from megatron.training.command_line.errors import CommandLineError
from megatron.training.compute.devices import Device, planned_device
from megatron.training.config import RunConfig

JSON_FILE, PAGE_FILE = "plan.json", "plan.html"
# Columns of a printed line.
WIDTH = 100
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_GIB = 1 << 30
_MEMORY_COLUMNS = ("parameters", "gradients", "masters", "moments", "pages", "activations", "total", "peak")
_LINK_COLUMNS = ("group", "ranks", "operation", "phase", "count", "payload", "on links")
_LAYOUT_COLUMNS = "tp pp vpp cp ep etp mbs states recompute experts GiB step/s MFU bubble exposed".split()
# Maximum number of passes in plan.json, which would otherwise grow to many megabytes. Later passes are left out.
_MAX_PASSES = 20_000
# The flags suggested for a plan that does not fit do not change the sizes of its layout.
_OTHER_LAYOUTS = "other layouts, such as experts over more ranks: tools/plan_layout.py, with the same flags"
# Seconds below which a value is a rounding error.
_ROUNDING_SECONDS = 1e-12
# Share of the step's time below which a schedule is not called faster.
_SAME_SPEED = 1e-3


def print_plan(
    run_config: RunConfig,
    model_provider: Callable[..., nn.Module],
    *,
    reread: Callable[[Sequence[str]], RunConfig],
    forward_step_func: ForwardStep,
    config_overrides: ConfigOverrides | None = None,
) -> None:
    """Prints the plan of RANK's pipeline, and whether it fits into memory. Under torchrun, only rank 0 prints.

    reread: parses the command line with additional words. Raises ValueError for an unknown rank or device, and for an
    unwritable folder.
    """
    if "WORLD_SIZE" in os.environ and run_config.launch.rank != 0:
        return
    number, device = pipeline_number_of(run_config, run_config.launch.rank), planned_device()
    planner = Planner(
        reread=reread,
        plan=partial(
            plan_run,
            model_provider=model_provider,
            forward_step_func=forward_step_func,
            config_overrides=config_overrides,
            rank_in_stage=number,
        ),
        model_provider=model_provider,
        forward_step=forward_step_func,
    )
    plan = planner.plan(run_config)
    step = run_time(plan, run_config, device=device)
    moved = moved_to_a_v(run_config)
    moved_plan = None if moved is None else (planner.plan(moved), moved)
    schedules = schedule_times(plan, run_config, device=device, moved=moved_plan)
    fit = fit_of(plan, device)
    if not fit.fits:
        fit = with_change(fit, plan, run_config, planner)
    lines = [*plan_lines(plan, run_config), *([] if step is None else time_lines(step, plan))]
    if schedules:
        lines.append(f"schedules: {schedule_line(schedules, given=run_config.transformer.pipeline_schedule)}")
    elif configured_placement(run_config.transformer).is_v:
        given = run_config.transformer.pipeline_schedule
        lines.append(f"schedules: {given} alone is planned; a plan with 1f1b and one chunk per stage compares all")
    lines.append(fit.line)
    if not fit.fits:
        lines.append(_OTHER_LAYOUTS)
    if run_config.logging.tensorboard_dir is not None:
        document = plan_document(plan, run_config, device=device, step=step, fit=fit, schedules=schedules)
        lines.append(_written_line(document, Path(run_config.logging.tensorboard_dir)))
    print("\n".join(lines))


def _written_line(document: Mapping[str, Any], folder: Path) -> str:
    """Writes the plan into the folder of --tensorboard-dir, and returns a line that names the files."""
    try:
        files = write_plan(document, folder)
    except OSError as error:
        raise CommandLineError(
            f"--tensorboard-dir is {folder}: the plan cannot be written there ({error.strerror}); must be a "
            "folder that exists or can be created"
        ) from None
    return f"written: {' and '.join(map(str, files))}"


def plan_lines(plan: Plan, run_config: RunConfig) -> list[str]:
    """Returns the printed lines of a plan."""
    unit, size = next(
        ((unit, size) for unit, size in _UNITS if max(stage.memory.total for stage in plan.stages) >= size),
        ("bytes", 1),
    )
    rows: list[tuple[str, ...]] = [("stage", "rank", "layers", *_MEMORY_COLUMNS)]
    for stage in plan.stages:
        memory = stage.memory
        activations = memory.activations.by_kind.total()
        by_kind = (*memory.persistent_by_kind.values(), activations, memory.total, memory.peak)
        values = [num_bytes / size for num_bytes in by_kind]
        rows.append((str(stage.stage), str(stage.rank), _range(stage.layers), *(f"{value:.2f}" for value in values)))
    widths = [max(map(len, column)) for column in zip(*rows)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    fullest = max(plan.stages, key=lambda stage: stage.memory.total)
    temporary = fullest.memory.temporary
    return [
        f"plan of {_number(run_config.launch.world_size, 'rank')}: {_layout(run_config)}; "
        f"{_number(plan.num_microbatches, 'microbatch', several='microbatches')} of "
        f"{run_config.training.micro_batch_size} x {run_config.data.seq_length} tokens a step",
        f"parameters: {plan.num_parameters:,}, of which {plan.active_parameters:,} are active for a token",
        f"memory of {'the first rank' if plan.stages[0].rank == 0 else 'one rank'} of each stage, in {unit}:",
        *table,
        f"activations of stage {fullest.stage}, which holds the most: {_kinds(fullest, unit=unit, size=size)}",
        f"peak: includes temporary memory, on stage {fullest.stage} up to {temporary.passes / size:.2f} {unit} in "
        f"passes, or up to {temporary.update / size:.2f} {unit} in the update, which runs without activations; "
        f"messages hold up to {temporary.messages / size:.2f} {unit} at one time",
        *buffer_lines(plan.stages, unit=unit, size=size),
        *links_lines(fullest, unit=unit, size=size),
        *_note_lines(plan, unit=unit, size=size),
    ]


def _range(layers: Sequence[int]) -> str:
    """Formats layer numbers as ranges, such as 1-4,9."""
    starts = [n for n in layers if n - 1 not in layers]
    ends = [n for n in layers if n + 1 not in layers]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)) or "none"


def _kinds(stage: RankPlan, *, unit: str, size: int) -> str:
    kinds = sorted(stage.memory.activations.by_kind.items(), key=lambda item: -item[1])
    return ", ".join(f"{kind} {count / size:.2f} {unit}" for kind, count in kinds if count) or "none"


def _number(count: int, one: str, *, several: str | None = None) -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _layout(run_config: RunConfig) -> str:
    sizes = layout_sizes(run_config)
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1 or name == "data")


def layout_sizes(run_config: RunConfig) -> dict[str, int]:
    """Returns the parallel sizes of a run by name. `expert tensor` is left out for models without experts."""
    transformer = run_config.transformer
    has_experts = transformer.num_moe_experts is not None
    return {
        "tensor": transformer.tensor_model_parallel_size,
        "pipeline": transformer.pipeline_model_parallel_size,
        "virtual": transformer.virtual_pipeline_model_parallel_size or 1,
        "context": transformer.context_parallel_size,
        "expert": transformer.expert_model_parallel_size,
        **({"expert tensor": transformer.expert_tensor_parallel_size} if has_experts else {}),
        "data": run_config.launch.data_parallel_size,
    }


def buffer_lines(stages: Sequence[RankPlan], *, unit: str, size: int) -> list[str]:
    """Returns one line for each buffer of the stage with the most padding, with its buckets and padding."""
    most = max(stages, key=lambda stage: sum(one.padding_bytes for one in stage.buffers))
    return [_buffer_line(one, most.stage, unit=unit, size=size) for one in most.buffers]


def _buffer_line(one: BufferLayout, stage: int, *, unit: str, size: int) -> str:
    buckets = f"{len(one.bucket_bytes)} {'bucket' if len(one.bucket_bytes) == 1 else 'buckets'}"
    return (
        f"buffer of stage {stage}, chunk {one.chunk}: {one.kind}, {one.param_dtype} with {one.grad_dtype} gradients, "
        f"{buckets}, {one.num_bytes / size:.2f} {unit}, of which {100 * one.padding_share:.3f} % is padding"
    )


def links_lines(stage: RankPlan, *, unit: str, size: int) -> list[str]:
    """Formats a rank's messages in a step as a table, largest first. The column `on links` shows link_bytes."""
    if not stage.load.traffic:
        return []
    rows: list[tuple[str, ...]] = [_LINK_COLUMNS]
    for one in sorted(stage.load.traffic, key=lambda one: -one.num_bytes):
        sizes = (f"{one.num_bytes / size:.2f}", f"{link_bytes(one) / size:.2f}")
        rows.append((one.group, str(one.group_size), one.operation, one.phase, str(one.count), *sizes))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]
    return [f"sent in a step by rank {stage.rank}, of stage {stage.stage}, in {unit}:", *lines]


def _note_lines(plan: Plan, *, unit: str, size: int) -> list[str]:
    notes = [f"not included: {NOT_PLANNED}"]
    if plan.is_balanced:
        notes.append("expert rows assume that tokens choose all experts equally often")
    return [*notes, *plan.substitutions, *_host_lines(plan, unit=unit, size=size)]


def _host_lines(plan: Plan, *, unit: str, size: int) -> list[str]:
    """Returns a line about the stage with the most host memory, or nothing if no stage uses host memory."""
    most = max(plan.stages, key=lambda stage: sum(stage.memory.on_host.values()))
    on_host = most.memory.on_host
    kinds = ", ".join(f"{kind} {count / size:.2f} {unit}" for kind, count in on_host.items() if count)
    if not kinds:
        return []
    return [
        f"in the host's memory, not in the table: up to {sum(on_host.values()) / size:.2f} {unit} per rank, "
        f"on stage {most.stage}: {kinds}"
    ]


def assumptions(plan: Plan) -> tuple[str, ...]:
    """Returns the assumptions of the estimated time of a step."""
    has_stash = any(stage.memory.pages.total for stage in plan.stages)
    further = ((STASH_ASSUMPTION, has_stash), (PAIR_ASSUMPTION, plan.has_pairs))
    return *ASSUMPTIONS, *(assumption for assumption, holds in further if holds)


def time_lines(step: StepTime, plan: Plan) -> list[str]:
    """Formats the estimated step as printed lines."""
    split = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in step.split().items())
    mfu = "" if step.mfu is None else f", MFU {100 * step.mfu:.1f}%"
    slowest = min(step.stages, key=lambda stage: stage.bubble)
    kinds = sorted(slowest.by_kind.items(), key=lambda item: -item[1])
    return [
        f"estimated step on {step.device}: {_seconds(step.seconds)}, {step.tokens_per_second:,.0f} tokens/s, "
        f"{step.tflops:.1f} TFLOP/s a device{mfu}",
        f"split of the step, mean over stages: {split}",
        f"passes of stage {step.stages.index(slowest)}, which waits the least: forward {_seconds(slowest.forward)}, "
        f"recompute {_seconds(slowest.recompute)}, backward {_seconds(slowest.backward)}; by kind "
        + ", ".join(f"{kind} {_seconds(seconds)}" for kind, seconds in kinds),
        *(f"assumed: {assumption}" for assumption in assumptions(plan)),
    ]


def schedule_line(times: Sequence[ScheduleTime], *, given: str) -> str:
    """Compares the schedules that a layout could use, and names the flag of a faster one. given: the run's schedule."""
    compared = ", ".join(f"{one.kind.value} {_seconds(one.seconds)} (bubble {100 * one.bubble:.1f}%)" for one in times)
    own, best = next(one for one in times if one.kind.value == given), min(times, key=lambda one: one.seconds)
    if best.seconds > own.seconds * (1 - _SAME_SPEED):
        return f"{compared}; none is faster than {given}"
    more = max(new - old for new, old in zip(best.num_bytes, own.num_bytes, strict=True))
    unit, size = next(((unit, size) for unit, size in _UNITS if abs(more) >= size), ("bytes", 1))
    memory = f"a stage needs up to {more / size:.2f} {unit} more memory" if more > 0 else "no stage needs more memory"
    return (
        f"{compared}; with --pipeline-schedule {best.kind.value} the step takes "
        f"{100 * (1 - best.seconds / own.seconds):.1f}% less time, and {memory}"
    )


def _seconds(seconds: float) -> str:
    if seconds < _ROUNDING_SECONDS:
        return "0 ms"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def plan_document(
    plan: Plan,
    run_config: RunConfig,
    *,
    device: Device,
    step: StepTime | None,
    fit: Fit,
    schedules: Sequence[ScheduleTime] = (),
) -> dict[str, Any]:
    """Returns the content of plan.json, with sizes in bytes and times in seconds.

    step: None if nothing is trained. schedules: the schedules that the layout could use, if it has a choice.
    """
    in_node = ranks_per_node(plan, device)
    times = [None] * len(plan.stages) if step is None else step.stages
    return {
        "world_size": run_config.launch.world_size,
        "layout": layout_sizes(run_config),
        "batch": {
            "num_microbatches": plan.num_microbatches,
            "micro_batch_size": run_config.training.micro_batch_size,
            "seq_length": run_config.data.seq_length,
        },
        "parameters": {"all": plan.num_parameters, "of_a_token": plan.active_parameters},
        "device": asdict(device),
        "fit": {**asdict(fit), "fits": fit.fits, "line": fit.line},
        "stages": [
            _stage(stage, time, device=device, in_node=in_node) for stage, time in zip(plan.stages, times, strict=True)
        ],
        "step": None if step is None else _step(step),
        "schedule": [] if step is None else _schedule(step),
        "schedules": _schedules(schedules, given=run_config.transformer.pipeline_schedule),
        "notes": notes(plan, device),
        "assumptions": list(assumptions(plan)),
    }


def notes(plan: Plan, device: Device) -> list[str]:
    """Returns the notes of plan.json and of the page: parts that the plan excludes, and its assumptions."""
    found = [f"Not included: {NOT_PLANNED}."]
    if plan.is_balanced:
        found.append("Expert rows assume that tokens choose all experts equally often.")
    found += [f"{one}." for one in plan.substitutions]
    full = [stage for stage in plan.stages if stage.memory.peak > device.memory_bytes]
    if full:
        found.append(
            f"Stages that exceed the memory of the {device.name} ({device.memory_gib:g} GiB): "
            f"{', '.join(str(stage.stage) for stage in full)}."
        )
    if any(any(stage.memory.on_host.values()) for stage in plan.stages):
        found.append("Device memory does not include host memory.")
    return found


def _stage(stage: RankPlan, time: StageTime | None, *, device: Device, in_node: Mapping[str, int]) -> dict[str, Any]:
    memory, links = stage.memory, []
    for one in stage.load.traffic:
        shared = in_node.get(one.group, one.group_size)
        seconds = message_seconds(one, device, in_node=shared)
        links.append({**asdict(one), "link_bytes": link_bytes(one), "in_node": shared, "seconds": seconds})
    return {
        "stage": stage.stage,
        "rank": stage.rank,
        "layers": list(stage.layers),
        "memory": {**memory.persistent_by_kind, "activations": dict(memory.activations.by_kind)},
        "total": memory.total,
        "working": memory.temporary.passes,
        "updating": memory.temporary.update,
        "messages": memory.temporary.messages,
        "peak": memory.peak,
        **{f"host_{kind}": count for kind, count in memory.on_host.items()},
        "groups": {name: {"size": len(ranks), "ranks": rank_range(ranks)} for name, ranks in stage.groups.items()},
        "links": links,
        "buffers": [_buffer(one) for one in stage.buffers],
        "time": None if time is None else asdict(time),
    }


def _buffer(one: BufferLayout) -> dict[str, Any]:
    ends = [list(pair) for pair in one.bucket_ends]
    return {**asdict(one), "bucket_bytes": list(one.bucket_bytes), "bucket_ends": ends}


def _step(step: StepTime) -> dict[str, Any]:
    return {
        "device": step.device,
        "seconds": step.seconds,
        "tokens_per_second": step.tokens_per_second,
        "tflops": step.tflops,
        "mfu": step.mfu,
        "split": step.split(),
    }


def _schedule(step: StepTime) -> list[list[list[Any]]]:
    """Returns the passes of each stage as [F, B or W, chunk, micro-batch, start, end], with times in seconds."""
    most = _MAX_PASSES // len(step.spans)
    return [
        [[a.kind.value, a.chunk, a.microbatch, span.start, span.end] for a, span in list(stage.items())[:most]]
        for stage in step.spans
    ]


def _schedules(times: Sequence[ScheduleTime], *, given: str) -> dict[str, Any] | None:
    if not times:
        return None
    compared = [{**asdict(one), "kind": one.kind.value} for one in times]
    return {"compared": compared, "line": schedule_line(times, given=given)}


def write_plan(document: Mapping[str, Any], folder: Path) -> list[Path]:
    """Writes plan.json and plan.html, and returns their paths. Creates a missing folder. May raise OSError.

    If a package that pages require is missing, writes only plan.json and prints the package's name on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts = {JSON_FILE: json.dumps(document, indent=1)}
    try:
        texts[PAGE_FILE] = page(document)
    except MissingPackageError as error:
        print(f"{PAGE_FILE} is not written: {error}", file=sys.stderr)
    for name, text in texts.items():
        with replaced_file(folder / name) as file:
            file.write(text.encode())
    return [folder / name for name in texts]


def rank_range(ranks: Sequence[int]) -> str:
    """Formats a non-empty list of ranks, in rising order, as start:stop:step of Python's range.

    0:8:1 means 0 to 7. A sum adds one element of each term: 2:4:1 + 0:17:16 means 2, 3, 18, 19. Other lists of ranks
    are several terms separated by commas.
    """
    terms: list[range] = []
    rest = list(ranks)
    while len(rest) > 1:
        length = _regular(rest)
        blocks = [rest[at : at + length] for at in range(0, len(rest), length)]
        offsets = [[rank - block[0] for rank in block] for block in blocks]
        if any(one != offsets[0] for one in offsets):
            return ", ".join(" + ".join(map(_term, (one, *terms))) for one in _steady(rest))
        terms.append(_steps(offsets[0]))
        rest = [block[0] for block in blocks]
    # The term with the smallest steps starts at the first rank.
    first = terms.pop(0) if terms else range(1)
    moved = range(first.start + rest[0], first.stop + rest[0], first.step)
    return " + ".join(_term(one) for one in (moved, *terms))


def _steady(ranks: Sequence[int]) -> Iterator[range]:
    """Splits ranks into the longest possible ranges with equal steps."""
    while ranks:
        length = _regular(ranks)
        yield _steps(ranks[:length])
        ranks = ranks[length:]


def _regular(ranks: Sequence[int]) -> int:
    """Returns the length of the longest prefix of ranks with equal steps."""
    steps = [after - before for before, after in zip(ranks, ranks[1:])]
    return next((at + 1 for at, step in enumerate(steps) if step != steps[0]), len(ranks))


def _steps(ranks: Sequence[int]) -> range:
    return range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0] if len(ranks) > 1 else 1)


def _term(one: range) -> str:
    return f"{one.start}:{one.stop}:{one.step}"


def table_lines(advice: Sequence[Advice]) -> list[str]:
    """Formats layouts as a table with one line each."""
    rows = [["", *_LAYOUT_COLUMNS], *([f"{number}.", *_cells(one)] for number, one in enumerate(advice, start=1))]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def _cells(advice: Advice) -> list[str]:
    layout, time = advice.layout, advice.time
    choices = (layout.sharding, layout.recompute, layout.experts)
    sizes = (
        layout.tensor,
        layout.stages,
        layout.chunks,
        layout.context,
        layout.expert,
        layout.expert_tensor,
        layout.micro_batch,
    )
    return [
        *map(str, sizes),
        *("-" if one is None else one.value for one in choices),
        f"{advice.num_bytes / _GIB:.2f}",
        f"{time.seconds:.3g}",
        "-" if time.mfu is None else f"{100 * time.mfu:.1f}%",
        f"{100 * _bubble(time) / time.seconds:.1f}%",
        f"{100 * _exposed(time) / time.seconds:.1f}%",
    ]


def _bubble(time: StepTime) -> float:
    """Returns the time that stages wait for each other, in seconds, as a mean over stages."""
    # A difference of sums may be negative by rounding.
    return max(0.0, sum(stage.bubble for stage in time.stages) / len(time.stages))


def _exposed(time: StepTime) -> float:
    """Returns the time that stages wait for communication that is not overlapped, in seconds, as a mean over stages."""
    return sum(sum(stage.exposed.values()) for stage in time.stages) / len(time.stages)


def flag_lines(advice: Advice) -> str:
    """Formats a layout's command for a shell, in lines of at most WIDTH columns unless a single flag is longer."""
    lines = ["pretrain_gpt.py"]
    flags: list[list[str]] = []
    for word in advice.words:
        if word.startswith("--") or not flags:
            flags.append([])
        flags[-1].append(word)
    for flag in map(shlex.join, flags):
        # Leaves space for the number before the command and the backslash after it.
        if len(lines[-1]) + 1 + len(flag) + 6 > WIDTH:
            lines.append(f"    {flag}")
        else:
            lines[-1] += f" {flag}"
    return " \\\n".join(lines)


def pair_line(advice: Advice) -> str | None:
    """Describes what pairs of passes gain in a layout; None if its schedule has no pairs."""
    if advice.alone is None:
        return None
    times = advice.time, advice.alone
    steps = [f"{_seconds(time.seconds)} a step, {100 * _exposed(time) / time.seconds:.1f}% exposed" for time in times]
    return f"passes in turns: {steps[0]}; without pairs: {steps[1]}"


def bytes_in_words(num_bytes: int) -> str:
    """Formats a number of bytes with all digits and in GiB."""
    return f"{num_bytes:,} bytes ({num_bytes / _GIB:.2f} GiB)"


def found_as_json(found: Found, *, verified: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Converts the result of a search to JSON values. verified: differences between layouts and their dry runs."""
    return {
        "compared": found.compared,
        "fitting": found.fitting,
        "layouts": [_advice_as_json(one) for one in found.front],
        "nearest": None if found.nearest is None else _advice_as_json(found.nearest),
        "dry_runs": list(verified),
    }


def _advice_as_json(advice: Advice) -> dict[str, Any]:
    layout, time = advice.layout, advice.time
    return {
        "words": list(advice.words),
        "layers": list(layout.counts),
        "bytes": advice.num_bytes,
        "fullest_stage": advice.fullest,
        "stages": [
            {
                **asdict(stage.states),
                "pages": stage.pages.device,
                "host_pages": stage.pages.host,
                "activations": dict(stage.activations.by_kind),
            }
            for stage in advice.stages
        ],
        "seconds": time.seconds,
        "mfu": time.mfu,
        "tokens_per_second": time.tokens_per_second,
        "bubble_seconds": _bubble(time),
        "exposed_seconds": _exposed(time),
        "seconds_without_pairs": None if advice.alone is None else advice.alone.seconds,
    }
