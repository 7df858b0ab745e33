"""Renders the page of a plan from the values of plan.json. The wording is in page.html.jinja."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.pages.figures import Bar, Box, Figure, short_time, stacked_bars, time_line, time_unit
from megatron.pages.page import render

_TEMPLATE = Path(__file__).with_name("page.html.jinja")
_PALETTE = (
    "#4e79a7",
    "#f28e2b",
    "#59a14f",
    "#b07aa1",
    "#9c755f",
    "#76b7b2",
    "#edc948",
    "#e15759",
    "#ff9da7",
    "#bab0ac",
)
# Names on the page and colors, by name in plan.json.
_PERSISTENT = {
    "parameters": ("parameters", "#2a6496"),
    "gradients": ("gradients", "#5b8fc4"),
    "masters": ("masters", "#9ec3e6"),
    "moments": ("moments", "#b07aa1"),
    "pages": ("stash pages", "#9c755f"),
}
_HOST = {
    "host_pages": ("stash pages", "#9c755f"),
    "host_states": ("optimizer states", "#b07aa1"),
    "host_activations": ("activations", "#f28e2b"),
}
_ACTIVATIONS = ("#f28e2b", "#edc948", "#e15759", "#ff9da7", "#59a14f", "#8cd17d", "#76b7b2", "#bab0ac")
_TEMPORARY = "temporary, in backward or the optimizer step"
_TIMES = {
    "forward": "#93c1ea",
    "recompute": "#edc948",
    "backward": "#59a14f",
    "exposed communication": "#e15759",
    "optimizer": "#b07aa1",
    "bubble": "#d0d3d6",
}
# Model chunks alternate between shades.
_SHADES = {
    "F": ("forward", ("#cfe3f7", "#93c1ea", "#6aa6dc", "#4a86c0")),
    "B": ("backward", ("#d7edd2", "#a3d59a", "#7cc273", "#569f51")),
    "W": ("weight gradients", ("#f7e6cf", "#eccb9c", "#dfb071", "#c9944d")),
}
_BUCKETS, _PADDING = "buckets", "padding of all buckets of a buffer, combined"
_MOST_BOXES = 4000
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def page(document: Mapping[str, Any]) -> str:
    """Renders the page of a plan. document: the result of plan_document, or plan.json as parsed by json.loads."""
    has_step = document["step"] is not None
    return render(
        _TEMPLATE,
        title=f"Plan of {document['world_size']:,} ranks",
        layout=", ".join(f"{name} {size}" for name, size in document["layout"].items() if size > 1),
        fit=document["fit"],
        facts=_facts(document),
        memory=_memory(document),
        host_memory=_host_memory(document),
        times=_times(document) if has_step else None,
        slowest=_slowest(document) if has_step else None,
        schedule=_schedule(document) if has_step else None,
        links=_links(document),
        buckets=_buckets(document),
        notes=document["notes"],
        assumptions=document["assumptions"],
    )


def _facts(document: Mapping[str, Any]) -> list[list[str]]:
    batch, parameters, step, device = (document[name] for name in ("batch", "parameters", "step", "device"))
    rows = [
        ["Parameters", f"{parameters['all']:,}, of which {parameters['of_a_token']:,} are active per token"],
        [
            "Step",
            f"{batch['num_microbatches']} micro-batches of {batch['micro_batch_size']} x {batch['seq_length']:,} "
            "tokens",
        ],
        ["Device", f"{device['name']}, {device['memory_gib']:g} GiB"],
    ]
    if step is not None:
        mfu = "" if step["mfu"] is None else f", MFU {100 * step['mfu']:.1f}%"
        rows.append(
            [
                "Estimated time",
                f"{short_time(step['seconds'])} per step, {step['tokens_per_second']:,.0f} tokens/s, "
                f"{step['tflops']:.3g} TFLOP/s per device{mfu}",
            ]
        )
    return rows


def _memory(document: Mapping[str, Any]) -> Figure:
    stages = document["stages"]
    kinds = sorted({kind for stage in stages for kind, size in stage["memory"]["activations"].items() if size})
    colors = dict(_PERSISTENT.values()) | {
        f"activations: {kind}": _ACTIVATIONS[number % len(_ACTIVATIONS)] for number, kind in enumerate(kinds)
    }
    colors[_TEMPORARY] = "#d0d3d6"
    room = document["device"]["memory_gib"] * 2**30
    most = max(stage["peak"] for stage in stages)
    # Draws the device's memory as a line, unless the bars would become too short to see.
    fits = most * 50 > room
    unit, size = _unit(max(most, room if fits else 0))
    bars = []
    for stage in stages:
        memory = stage["memory"]
        lengths = {name: memory[kind] / size for kind, (name, _) in _PERSISTENT.items()}
        lengths |= {f"activations: {kind}": count / size for kind, count in memory["activations"].items()}
        lengths[_TEMPORARY] = (stage["peak"] - stage["total"]) / size
        bars.append(Bar(_stage_name(stage), lengths, f"{stage['peak'] / size:.2f} {unit}"))
    limit = (room / size, f"{document['device']['name']}: {room / size:.4g} {unit}") if fits else None
    return stacked_bars(bars, colors, axis=unit, limit=limit)


def _host_memory(document: Mapping[str, Any]) -> Figure | None:
    totals = [sum(stage[kind] for kind in _HOST) for stage in document["stages"]]
    if not any(totals):
        return None
    unit, size = _unit(max(totals))
    bars = [
        Bar(
            _stage_name(stage),
            {name: stage[kind] / size for kind, (name, _) in _HOST.items()},
            f"{total / size:.2f} {unit}",
        )
        for stage, total in zip(document["stages"], totals, strict=True)
    ]
    return stacked_bars(bars, dict(_HOST.values()), axis=unit)


def _times(document: Mapping[str, Any]) -> Figure:
    longest = document["step"]["seconds"]
    unit, size = time_unit(longest)
    bars = []
    for stage in document["stages"]:
        time = stage["time"]
        lengths = {name: time.get(name, 0.0) / size for name in _TIMES}
        lengths["exposed communication"] = sum(time["exposed"].values()) / size
        bars.append(Bar(_stage_name(stage), lengths, short_time(longest)))
    return stacked_bars(bars, _TIMES, axis=f"{unit} per step")


def _slowest(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the template values of the two time tables, for the stage with the smallest bubble."""
    stage = min(document["stages"], key=lambda stage: stage["time"]["bubble"])
    time, longest = stage["time"], document["step"]["seconds"]
    messages = [(f"exposed in {name}", seconds) for name, seconds in time["exposed"].items() if seconds > 0]
    modules = sorted(time["by_kind"].items(), key=lambda item: -item[1])

    def rows(seconds_of: list[tuple[str, float]]) -> list[list[str]]:
        return [[name, short_time(seconds), f"{100 * seconds / longest:.1f}%"] for name, seconds in seconds_of]

    hidden = ("hidden by computation", time["hidden"])
    return {"stage": _stage_name(stage), "modules": rows(modules), "messages": rows([*messages, hidden])}


def _schedule(document: Mapping[str, Any]) -> dict[str, Any]:
    lists = document["schedule"]
    unit, size = time_unit(document["step"]["seconds"])
    most = _MOST_BOXES // len(lists)
    chunks = sorted({chunk for passes in lists for _, chunk, *_ in passes})
    letters = {letter for passes in lists for letter, *_ in passes}
    kinds = {
        (letter, chunk): (name + (f", chunk {chunk}" if len(chunks) > 1 else ""), shades[(chunk + 1) % len(shades)])
        for letter, (name, shades) in _SHADES.items()
        if letter in letters
        for chunk in chunks
    }
    boxes = []
    for row, passes in enumerate(lists):
        in_interval = Counter((start, end) for *_, start, end in passes)
        for letter, chunk, microbatch, start, end in passes[:most]:
            name = f"{_SHADES[letter][0]} of micro-batch {microbatch} in chunk {chunk}"
            # The passes of a pair share an interval. Each one is drawn in a half of it, the backward first.
            is_paired = in_interval[start, end] > 1
            middle = (start + end) / 2 if is_paired else end
            begin, stop = (middle, end) if is_paired and letter == "F" else (start, middle)
            length = f"{short_time(end - start)}{' with the pass that takes turns' if is_paired else ''}"
            tip = f"{name}: {length}, starts at {short_time(start)}"
            boxes.append(Box(row, begin / size, stop / size, kinds[letter, chunk][0], str(microbatch), tip))
    return {
        "bubble": f"{100 * document['step']['split']['bubble'] / document['step']['seconds']:.1f}%",
        "num_drawn": most,
        "compared": document["schedules"],
        "num_passes": len(letters) * len(chunks) * document["batch"]["num_microbatches"],
        "figure": time_line(
            boxes,
            [_stage_name(stage) for stage in document["stages"]],
            axis=unit,
            colors=dict(kinds.values()),
        ),
    }


def _links(document: Mapping[str, Any]) -> dict[str, Any] | None:
    stage = max(document["stages"], key=lambda stage: sum(one["link_bytes"] for one in stage["links"]))
    if not stage["links"]:
        return None
    phases = sorted({one["phase"] for one in stage["links"]}, key=lambda one: (one not in ("forward", "backward"), one))
    groups: dict[str, Counter[str]] = {}
    for one in stage["links"]:
        groups.setdefault(one["group"], Counter())[one["phase"]] += one["link_bytes"]
    unit, size = _unit(max(counts.total() for counts in groups.values()))
    bars = [
        Bar(group, {phase: count / size for phase, count in counts.items()}, _bytes(counts.total()))
        for group, counts in groups.items()
    ]
    colors = {phase: _PALETTE[number % len(_PALETTE)] for number, phase in enumerate(phases)}
    messages = [
        [
            *(one["group"], one["operation"], one["phase"], f"{one['group_size']:,}", str(one["in_node"])),
            *(f"{one['count']:,}", _bytes(one["num_bytes"]), _bytes(one["link_bytes"]), short_time(one["seconds"])),
        ]
        for one in stage["links"]
    ]
    return {
        "stage": _stage_name(stage),
        "figure": stacked_bars(bars, colors, axis=f"{unit} on the rank's links"),
        "messages": messages,
        "groups": [[name, f"{one['size']:,}", one["ranks"]] for name, one in stage["groups"].items()],
    }


def _buckets(document: Mapping[str, Any]) -> dict[str, Any] | None:
    stage = max(document["stages"], key=lambda stage: sum(one["num_bytes"] for one in stage["buffers"]))
    if not stage["buffers"]:
        return None
    unit, size = _unit(max(sum(one["bucket_bytes"]) for one in stage["buffers"]))
    boxes, rows = [], []
    for row, one in enumerate(stage["buffers"]):
        end = 0.0
        for number, length in enumerate(one["bucket_bytes"]):
            ends = dict.fromkeys(one["bucket_ends"][number]) if one["bucket_ends"] else ()
            tip = ", ".join([f"bucket {number}: {_bytes(length)}", *([" to ".join(ends)] if ends else [])])
            boxes.append(Box(row, end / size, (end + length) / size, _BUCKETS, str(number), tip))
            end += length
        padding_share = one["padding_bytes"] / one["num_bytes"] if one["num_bytes"] else 0.0
        if padding := end * padding_share:
            tip = f"padding of all buckets: {_bytes(padding)}"
            boxes.append(Box(row, (end - padding) / size, end / size, _PADDING, "", tip))
        rows.append(
            [
                *(f"{one['kind']}, chunk {one['chunk']}", one["param_dtype"], one["grad_dtype"]),
                *(str(len(one["bucket_bytes"])), _bytes(one["num_bytes"]), _bytes(one["padding_bytes"])),
                f"{100 * padding_share:.3f}%",
            ]
        )
    colors = {_BUCKETS: "#93c1ea", _PADDING: "#e15759"}
    figure = time_line(boxes, [row[0] for row in rows], axis=f"{unit} of gradients", colors=colors)
    return {"stage": _stage_name(stage), "figure": figure, "buffers": rows}


def _stage_name(stage: Mapping[str, Any]) -> str:
    return f"stage {stage['stage']} (rank {stage['rank']:,})"


def _unit(most: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if most >= size), ("bytes", 1))


def _bytes(count: float) -> str:
    unit, size = _unit(count)
    return f"{count / size:.4g} {unit}"
