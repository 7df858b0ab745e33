"""Shows a pipeline schedule: `python tools/show_schedule.py --stages 4 --microbatches 8` prints it, --svg draws it.

Assumes that a forward pass takes 1, a backward pass 2, a pair of both 3, and communication no time. If weight gradients
are a pass of their own, it takes 1 of the backward's 2.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

if not __package__:  # run by its path, as in a clone without installation
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.core.pipeline_parallel.schedule import (
    Action,
    ActionKind,
    Orders,
    Pipeline,
    Schedule,
    ScheduleKind,
    forward_only,
    pipeline_of,
    stage_orders,
)
from megatron.core.pipeline_parallel.timeline import Interval, Timeline, bubble_share, timeline
from megatron.core.pipeline_parallel.transfers import pipeline_programs
from megatron.core.pipeline_parallel.validation import validate_programs
from megatron.core.pipeline_placement import V_SCHEDULES
from megatron.version_flag import PrintVersions

# Name and colors of each kind of pass by chunk, from light to dark.
_STYLES = {
    ActionKind.FORWARD: ("forward", ("#cfe3f7", "#93c1ea", "#5a9bd8", "#2f6fb0")),
    ActionKind.BACKWARD: ("backward", ("#d7edd2", "#a3d59a", "#6cb863", "#3f8f3b")),
    ActionKind.WEIGHT: ("weight gradients", ("#f6e3c5", "#eac387", "#d99c48", "#a86f1e")),
}
_UNIT, _ROW, _BOX, _LEFT, _TOP = 22, 30, 22, 74, 44


def main(argv: Sequence[str] | None = None) -> None:
    """Validates and shows the schedule of the command line. Exits with a one-line error for an impossible schedule."""
    options = _parser().parse_args(argv)
    try:
        check_options(options)
        schedule = Schedule(ScheduleKind(options.schedule), options.group_size, options.paired)
        pipeline = pipeline_of(schedule, options.stages, chunks_of(options))
        orders: Orders = stage_orders(pipeline, options.microbatches, schedule)
        programs = pipeline_programs(
            pipeline,
            options.microbatches,
            schedule,
            without_backward=options.forward_only,
            overlap=not options.no_overlap,
        )
        validate_programs(programs, pipeline)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    if options.forward_only:
        orders = [forward_only(order) for order in orders]
    spans = timeline(orders, pipeline)
    print(as_text(spans))
    print(caption(spans, options.microbatches))
    if options.steps is not None:
        print(f"stage {options.steps}:", *programs[options.steps], sep="\n  ")
    if options.svg is not None:
        try:
            options.svg.write_text(
                as_svg(spans, pipeline, title=caption(spans, options.microbatches)), encoding="utf-8"
            )
        except OSError as error:
            raise SystemExit(f"error: --svg is {options.svg}: {error.strerror}") from error


def check_options(options: argparse.Namespace) -> None:
    """Raises ValueError for an invalid number of stages, chunks or microbatches, or an invalid stage."""
    for name, number in (
        ("stages", options.stages),
        ("chunks", chunks_of(options)),
        ("microbatches", options.microbatches),
    ):
        if number < 1:
            raise ValueError(f"--{name} is {number}: must be at least 1")
    if options.schedule in V_SCHEDULES and options.stages > 1 and chunks_of(options) != 2:
        raise ValueError(f"--chunks is {options.chunks}: must be 2 with --schedule {options.schedule}, or be omitted")
    if options.steps is not None and not 0 <= options.steps < options.stages:
        raise ValueError(f"--steps is {options.steps}: must be a stage, from 0 to {options.stages - 1}")


def chunks_of(options: argparse.Namespace) -> int:
    """Returns the number of chunks per stage: as given, 2 for several stages placed in a V, or 1."""
    if options.chunks is not None:
        return int(options.chunks)
    return 2 if options.schedule in V_SCHEDULES and options.stages > 1 else 1


def caption(spans: Timeline, num_microbatches: int) -> str:
    """Returns a one-line description of the schedule."""
    length = max(span.end for stage in spans for span in stage.values())
    return (
        f"{len(spans)} stages, {num_microbatches} micro-batches: {length:g} forward passes long, "
        f"{100 * bubble_share(spans):.1f}% idle"
    )


def as_text(spans: Timeline) -> str:
    """Formats the schedule with one line per stage and one column per unit of time.

    A column shows F, B or W, the chunk if there are several, and the microbatch. A plus sign joins the passes of a
    pair.
    """
    labels = {action: _label(action, spans) for stage in spans for action in stage}
    width = max(len(label) for label in labels.values()) + 1
    lines = []
    for number, stage in enumerate(spans):
        line = ""
        for span, actions in _by_interval(stage).items():
            label = "+".join(labels[action] for action in actions)
            line = line.ljust(int(span.start) * width, ".") + label.ljust(int(span.end - span.start) * width)
        lines.append(f"stage {number:<3} {line}".rstrip())
    return "\n".join(lines)


def as_svg(spans: Timeline, pipeline: Pipeline, *, title: str) -> str:
    """Draws the schedule as SVG, with one row per stage.

    Forward passes are blue, backward passes green and passes of weight gradients brown, later chunks are darker, and
    lines show transfers. A pair is a framed box with the backward pass above the forward pass.
    """
    length = max(span.end for stage in spans for span in stage.values())
    width, height = _LEFT + length * _UNIT + 16, _TOP + len(spans) * _ROW + 72
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'style="max-width: {width:g}px" width="100%" font-family="sans-serif" font-size="11">',
        f'<rect width="{width:g}" height="{height}" fill="white"/>',
        f'<text x="12" y="24" font-size="14">{title}</text>',
    ]
    for stage, passes in enumerate(spans):
        parts.append(f'<text x="12" y="{_middle(stage) + 4}">stage {stage}</text>')
        parts += [_step(stage, actions=actions, span=span) for span, actions in _by_interval(passes).items()]
    for stage, passes in enumerate(spans):
        parts += [_line(spans, pipeline, stage=stage, action=action) for action in passes]
    parts += _axis(length, y=_TOP + len(spans) * _ROW)
    has_pairs = any(len(actions) > 1 for stage in spans for actions in _by_interval(stage).values())
    kinds = {action.kind for stage in spans for action in stage}
    shown = [style for kind, style in _STYLES.items() if kind in kinds]
    parts += [*_legend(shown, pipeline.num_chunks, y=height - 22, has_pairs=has_pairs), "</svg>"]
    return "\n".join(part for part in parts if part) + "\n"


def _by_interval(stage: dict[Action, Interval]) -> dict[Interval, list[Action]]:
    """Groups the passes of a stage by their interval, which the passes of a pair share, in order."""
    found: dict[Interval, list[Action]] = {}
    for action, span in stage.items():
        found.setdefault(span, []).append(action)
    return found


def _step(stage: int, *, actions: Sequence[Action], span: Interval) -> str:
    """Draws a pass, or the passes of a pair as the upper and lower half of a framed box."""
    x, width, top = _LEFT + span.start * _UNIT, (span.end - span.start) * _UNIT, _middle(stage) - _BOX // 2
    if len(actions) == 1:
        return _box(actions[0], x=x, y=top, width=width, height=_BOX)
    half = _BOX // 2
    halves = [_box(action, x=x, y=top + n * half, width=width, height=half) for n, action in enumerate(actions)]
    return f'<g font-size="9">{"".join(halves)}{_frame(x=x, y=top, width=width, height=_BOX)}</g>'


def _box(action: Action, *, x: float, y: int, width: float, height: int) -> str:
    _, colors = _STYLES[action.kind]
    dark = action.chunk % len(colors) == len(colors) - 1
    return (
        f'<rect x="{x:g}" y="{y}" width="{width:g}" height="{height}" fill="{_shade(colors, action.chunk)}" '
        f'stroke="white"/><text x="{x + width / 2:g}" y="{y + height // 2 + 4}" text-anchor="middle" '
        f'fill="{"white" if dark else "#222"}">{action.microbatch}</text>'
    )


def _frame(*, x: float, y: int, width: float, height: int) -> str:
    return f'<rect x="{x + 1:g}" y="{y}" width="{width - 2:g}" height="{height}" fill="none" stroke="#444"/>'


def _line(spans: Timeline, pipeline: Pipeline, *, stage: int, action: Action) -> str:
    """Draws a line from the end of a pass to the start of the pass on an adjacent stage that requires its output."""
    target = pipeline.target(stage, action)
    # Omits lines from the last stage back to the first, which would cross all rows.
    if target is None or abs(target.stage - stage) != 1:
        return ""
    x1, x2 = (_LEFT + time * _UNIT for time in (spans[stage][action].end, spans[target.stage][target.action].start))
    side = _BOX // 2 if target.stage > stage else -_BOX // 2
    return (
        f'<line x1="{x1:g}" y1="{_middle(stage) + side}" x2="{x2:g}" y2="{_middle(target.stage) - side}" '
        'stroke="#888" stroke-width="0.7"/>'
    )


def _axis(length: float, *, y: int) -> list[str]:
    """Draws the time axis."""
    parts = [f'<path d="M{_LEFT} {y}H{_LEFT + length * _UNIT:g}" stroke="#888"/>']
    step = next(step * 10**power for power in range(9) for step in (1, 2, 5) if length <= 15 * step * 10**power)
    for time in range(0, int(length) + 1, step):
        x = _LEFT + time * _UNIT
        parts.append(
            f'<path d="M{x} {y}v4" stroke="#888"/><text x="{x}" y="{y + 15}" text-anchor="middle">{time}</text>'
        )
    middle = _LEFT + length * _UNIT / 2
    return [*parts, f'<text x="{middle:g}" y="{y + 30}" text-anchor="middle">time, in forward passes of a chunk</text>']


def _legend(shown: Sequence[tuple[str, tuple[str, ...]]], num_chunks: int, *, y: int, has_pairs: bool) -> list[str]:
    parts, x = [], _LEFT
    for name, colors in shown:
        for chunk in range(num_chunks):
            label = name if num_chunks == 1 else f"{name}, chunk {chunk}"
            parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_shade(colors, chunk)}"/>')
            parts.append(f'<text x="{x + 17}" y="{y + 10}">{label}</text>')
            x += 34 + 6 * len(label)
    if has_pairs:
        parts.append(_frame(x=x, y=y, width=14, height=12))
        parts.append(f'<text x="{x + 19}" y="{y + 10}">pair: both passes in turns</text>')
    return parts


def _shade(colors: tuple[str, ...], chunk: int) -> str:
    return colors[chunk % len(colors)]


def _middle(stage: int) -> int:
    return _TOP + stage * _ROW + _ROW // 2


def _label(action: Action, spans: Timeline) -> str:
    one_chunk = all(other.chunk == 0 for stage in spans for other in stage)
    return f"{action.kind.value}{action.microbatch}" if one_chunk else str(action)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--version", action=PrintVersions)
    parser.add_argument("--stages", type=int, default=4, help="pipeline stages")
    parser.add_argument(
        "--chunks",
        type=int,
        help="virtual stages per pipeline stage; default: 2 with a schedule that places them in a V, and otherwise 1",
    )
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches per step")
    parser.add_argument(
        "--group-size", type=int, help="consecutive micro-batches of a chunk; default: the number of stages"
    )
    parser.add_argument(
        "--schedule",
        choices=[kind.value for kind in ScheduleKind],
        default=Schedule().kind.value,
        help="order of the passes, as in --pipeline-schedule",
    )
    parser.add_argument(
        "--paired",
        action="store_true",
        help="pair a backward pass with the forward pass of another micro-batch, as with "
        "--overlap-moe-expert-parallel-comm",
    )
    parser.add_argument("--forward-only", action="store_true", help="show an evaluation, without backward passes")
    parser.add_argument(
        "--no-overlap", action="store_true", help="post receives only when they are needed (with --steps)"
    )
    parser.add_argument("--steps", type=int, metavar="STAGE", help="print the list of actions that this stage executes")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the schedule as SVG to this file")
    return parser


if __name__ == "__main__":
    main()
