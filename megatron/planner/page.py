"""The page of a plan: one file of HTML that needs no network, from what plan.json holds. Its pictures: pictures.py."""

from collections import Counter
from collections.abc import Mapping
from html import escape
from typing import Any

from megatron.planner.html_parts import html_list, html_page, notice, section, table
from megatron.planner.pictures import Bar, Box, schedule, stacked_bars

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
_STANDING = {
    "parameters": "#1f4e79",
    "gradients": "#4e79a7",
    "masters": "#9ec3e6",
    "moments": "#b07aa1",
    "pages": "#9c755f",
}
_WHILE = "passes or update, for a while"
_HOST = {"pages": "#9c755f", "states": "#b07aa1", "activations": "#f28e2b"}
_ACTIVATIONS = ("#f28e2b", "#edc948", "#e15759", "#ff9da7", "#59a14f", "#8cd17d", "#76b7b2", "#bab0ac")
_TIMES = {
    "forward": "#93c1ea",
    "recompute": "#edc948",
    "backward": "#59a14f",
    "exposed communication": "#e15759",
    "optimizer": "#b07aa1",
    "bubble": "#d9d9d9",
}
_FORWARD = ("#cfe3f7", "#93c1ea", "#6aa6dc", "#4a86c0")
_BACKWARD = ("#d7edd2", "#a3d59a", "#7cc273", "#569f51")
_PASSES = ("forward", "backward")
_MOST_BOXES = 4000
_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


def page(document: Mapping[str, Any]) -> str:
    """The page; document: as plan_document makes it, or json.loads reads it again."""
    layout = ", ".join(f"{name} {size}" for name, size in document["layout"].items() if size > 1)
    title = f"Plan of {document['world_size']:,} ranks"
    parts = [
        f"<h1>{title}</h1><p>{escape(layout or 'no parallelism')}</p>",
        notice(document["fit"]["line"], is_good=document["fit"]["fits"]),
        _facts(document),
        section("Memory of a rank of each stage", _memory(document)),
        section("What a rank of each stage has in the host's memory", _host_memory(document)),
        *([] if document["step"] is None else _times(document)),
        section("What a rank sends in a step", _links(document)),
        section("Buckets of gradients", _buckets(document)),
        section("Notes", html_list(document["notes"])),
        section("What the time assumes", html_list(document["assumptions"])),
    ]
    return html_page(title, parts)


def _facts(document: Mapping[str, Any]) -> str:
    batch, parameters, step, device = (document[name] for name in ("batch", "parameters", "step", "device"))
    rows = [
        ["Parameters", f"{parameters['all']:,}; a token meets {parameters['of_a_token']:,}"],
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
                f"{_seconds(step['seconds'])} a step, {step['tokens_per_second']:,.0f} tokens/s, "
                f"{step['tflops']:.3g} TFLOP/s a device{mfu}",
            ]
        )
    return table(["", ""], rows, words=2)


def _memory(document: Mapping[str, Any]) -> str:
    stages = document["stages"]
    kinds = sorted({kind for stage in stages for kind, size in stage["memory"]["activations"].items() if size})
    colors = dict(_STANDING) | {
        f"activations: {kind}": _ACTIVATIONS[number % len(_ACTIVATIONS)] for number, kind in enumerate(kinds)
    }
    colors[_WHILE] = "#d9d9d9"
    room = document["device"]["memory_gib"] * 2**30
    most = max(stage["peak"] for stage in stages)
    # The device's memory as a line, unless bars would be too short to be seen beside it.
    fits = most * 50 > room
    unit, size = _unit(max(most, room if fits else 0))
    bars = []
    for stage in stages:
        memory = stage["memory"]
        lengths = {name: memory[name] / size for name in _STANDING}
        lengths |= {f"activations: {kind}": count / size for kind, count in memory["activations"].items()}
        lengths[_WHILE] = (stage["peak"] - stage["total"]) / size
        bars.append(Bar(_stage_name(stage), lengths, f"{stage['peak'] / size:.2f} {unit}"))
    limit = (room / size, f"{document['device']['name']}: {room / size:.4g} {unit}") if fits else None
    return stacked_bars(bars, colors, axis=unit, limit=limit)


def _host_memory(document: Mapping[str, Any]) -> str:
    stages = document["stages"]
    kept = [{kind: stage[f"host_{kind}"] for kind in _HOST} for stage in stages]
    most = max(sum(kinds.values()) for kinds in kept)
    if not most:
        return ""
    unit, size = _unit(most)
    bars = [
        Bar(
            _stage_name(stage),
            {kind: count / size for kind, count in kinds.items()},
            f"{sum(kinds.values()) / size:.2f} {unit}",
        )
        for stage, kinds in zip(stages, kept, strict=True)
    ]
    return stacked_bars(bars, _HOST, axis=unit)


def _times(document: Mapping[str, Any]) -> list[str]:
    stages = [stage for stage in document["stages"] if stage["time"] is not None]
    longest = document["step"]["seconds"]
    unit, size = _time_unit(longest)
    bars = []
    for stage in stages:
        time = stage["time"]
        lengths = {name: time.get(name, 0.0) / size for name in _TIMES}
        lengths["exposed communication"] = sum(time["exposed"].values()) / size
        bars.append(Bar(_stage_name(stage), lengths, _seconds(longest)))
    slowest = min(stages, key=lambda stage: stage["time"]["bubble"])["time"]
    kinds = sorted(slowest["by_kind"].items(), key=lambda item: -item[1])
    exposed = [(f"exposed in {name}", seconds) for name, seconds in slowest["exposed"].items() if seconds > 0]
    exposed.append(("hidden behind computation", slowest["hidden"]))
    rows = [[name, _seconds(seconds), f"{100 * seconds / longest:.1f}%"] for name, seconds in kinds]
    waits = [[name, _seconds(seconds), f"{100 * seconds / longest:.1f}%"] for name, seconds in exposed]
    return [
        section("Time of a step", stacked_bars(bars, _TIMES, axis=f"{unit} in a step, by what it goes into")),
        section("StageTrace of the stage that waits least", table(["module", "time", "of the step"], rows)),
        section("Its messages", table(["", "time", "of the step"], waits)),
        section("Schedule", _drawn_schedule(document)),
    ]


def _drawn_schedule(document: Mapping[str, Any]) -> str:
    lists = document["schedule"]
    unit, size = _time_unit(document["step"]["seconds"])
    most = _MOST_BOXES // len(lists)
    boxes = []
    for row, passes in enumerate(lists):
        for kind, chunk, microbatch, start, end in passes[:most]:
            colors = _FORWARD if kind == "F" else _BACKWARD
            name = f"{'forward' if kind == 'F' else 'backward'} of micro-batch {microbatch} in chunk {chunk}"
            tip = f"{name}: {_seconds(end - start)} from {_seconds(start)} on"
            color = colors[(chunk + 1) % len(colors)]
            boxes.append(Box(row, start / size, end / size, color, str(microbatch), tip))
    chunks = sorted({box[1] for passes in lists for box in passes})
    legend = [
        (name + (f", chunk {chunk}" if len(chunks) > 1 else ""), colors[(chunk + 1) % len(colors)])
        for name, colors in (("forward", _FORWARD), ("backward", _BACKWARD))
        for chunk in chunks
    ]
    total = 2 * len(chunks) * document["batch"]["num_microbatches"]
    bubble = document["step"]["split"]["bubble"] / document["step"]["seconds"]
    said = f"Numbers are micro-batches. Stages wait for each other {100 * bubble:.1f}% of the step."
    if most < total:
        said += f" The first {most} of {total} passes of each stage are drawn."
    rows = [_stage_name(stage) for stage in document["stages"]]
    return f"<p>{said}</p>" + schedule(boxes, rows, axis=f"{unit} from the start of the step", legend=legend)


def _links(document: Mapping[str, Any]) -> str:
    stage = max(document["stages"], key=lambda stage: sum(one["link_bytes"] for one in stage["links"]))
    if not stage["links"]:
        return "<p>Nothing: there is one rank, or no training.</p>"
    phases = sorted({one["phase"] for one in stage["links"]}, key=lambda phase: (phase not in _PASSES, phase))
    colors = {phase: _PALETTE[number % len(_PALETTE)] for number, phase in enumerate(phases)}
    groups: dict[str, Counter[str]] = {}
    for one in stage["links"]:
        groups.setdefault(one["group"], Counter())[one["phase"]] += one["link_bytes"]
    unit, size = _unit(max(sum(phases.values()) for phases in groups.values()))
    bars = [
        Bar(group, {phase: count / size for phase, count in counts.items()}, _bytes(sum(counts.values())))
        for group, counts in groups.items()
    ]
    head = ["group", "operation", "phase", "ranks", "of them in a node", "messages", "payload", "on the link", "time"]
    rows = [
        [
            *(one["group"], one["operation"], one["phase"], f"{one['group_size']:,}", str(one["in_node"])),
            *(f"{one['count']:,}", _bytes(one["num_bytes"]), _bytes(one["link_bytes"]), _seconds(one["seconds"])),
        ]
        for one in stage["links"]
    ]
    said = f"<p>Of {_stage_name(stage)}, which sends most; times are of messages one after the other.</p>"
    picture = stacked_bars(bars, colors, axis=f"{unit} on the rank's links")
    members = [[name, f"{one['size']:,}", one["ranks"]] for name, one in stage["groups"].items()]
    meaning = "<p>Ranks of its groups, as first:end:step; a sum has one of each.</p>"
    return said + picture + table(head, rows, words=3) + meaning + table(["group", "size", "ranks"], members)


def _buckets(document: Mapping[str, Any]) -> str:
    stage = max(document["stages"], key=lambda stage: sum(one["num_bytes"] for one in stage["buffers"]))
    if not stage["buffers"]:
        return "<p>None: parameters lie one by one.</p>"
    unit, size = _unit(max(sum(one["bucket_bytes"]) for one in stage["buffers"]))
    boxes, names, rows = [], [], []
    for row, one in enumerate(stage["buffers"]):
        names.append(f"{one['kind']}, chunk {one['chunk']}")
        total = sum(one["bucket_bytes"])
        padding = total * one["padding_bytes"] / one["num_bytes"] if one["num_bytes"] else 0.0
        at = 0.0
        for number, length in enumerate(one["bucket_bytes"]):
            names_of = " to ".join(dict.fromkeys(one["bucket_ends"][number]) if one["bucket_ends"] else ())
            tip = f"bucket {number}: {_bytes(length)}{', ' if names_of else ''}{names_of}"
            boxes.append(Box(row, at / size, (at + length) / size, _FORWARD[1 + number % 2], str(number), tip))
            at += length
        if padding:
            tip = f"padding of all buckets: {_bytes(padding)}"
            boxes.append(Box(row, (at - padding) / size, at / size, "#e15759", "", tip))
        share = 100 * one["padding_bytes"] / one["num_bytes"] if one["num_bytes"] else 0.0
        rows.append(
            [
                *(names[-1], one["param_dtype"], one["grad_dtype"], str(len(one["bucket_bytes"]))),
                *(_bytes(one["num_bytes"]), _bytes(one["padding_bytes"]), f"{share:.3f}%"),
            ]
        )
    legend = [("buckets", _FORWARD[1]), ("padding of all buckets of a buffer, put together", "#e15759")]
    head = ["buffer", "parameters", "gradients", "buckets", "bytes of both", "padding", "of the buffer"]
    said = f"<p>Of {_stage_name(stage)}: the last bucket of a buffer is complete first.</p>"
    picture = schedule(boxes, names, axis=f"{unit} of gradients", legend=legend)
    return said + picture + table(head, rows, words=3)


def _stage_name(stage: Mapping[str, Any]) -> str:
    return f"stage {stage['stage']} (rank {stage['rank']:,})"


def _unit(most: float) -> tuple[str, int]:
    return next(((unit, size) for unit, size in _UNITS if most >= size), ("bytes", 1))


def _bytes(count: float) -> str:
    unit, size = _unit(count)
    return f"{count / size:.4g} {unit}"


def _time_unit(seconds: float) -> tuple[str, float]:
    return ("seconds", 1.0) if seconds >= 1 else ("milliseconds", 1e-3)


def _seconds(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds < 1e-10:
        return "0 s"  # what is left of sums that cancel
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"
