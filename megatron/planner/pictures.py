"""Pictures of a plan's page as SVG: stacked bars with an axis and a legend, and passes of a schedule; pure.

What they show is chosen in page.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 1120
_LEFT, _RIGHT, _ROW, _BAR, _TOP = 172, 110, 26, 18, 8
_LEGEND_ROW = 20
# Of characters of 12 px in a wide sans-serif font, about.
_CHARACTER = 7.4
# Of the numbers in boxes: digits, of 11 px, and of 9 px where these do not fit.
_DIGIT = {11: 7.0, 9: 5.7}
# A row of panels, and what is around the columns of one.
_PANELS, _PANEL_HIGH, _PANEL_LEFT, _PANEL_RIGHT = 3, 190, 58, 14


@dataclass(frozen=True)
class Bar:
    """A row of a chart. parts: lengths by name, in the chart's unit; end: what stands behind it."""

    label: str
    parts: Mapping[str, float]
    end: str


@dataclass(frozen=True)
class Panel:
    """A chart of columns beside others. columns: from left to right; their ends are shown by the mouse."""

    title: str
    columns: Sequence[Bar]


@dataclass(frozen=True)
class Box:
    """A pass on a row of a schedule: from start to end, in the axis's unit; title: shown by the mouse."""

    row: int
    start: float
    end: float
    color: str
    text: str
    title: str


def stacked_bars(
    bars: Sequence[Bar], colors: Mapping[str, str], *, axis: str, limit: tuple[float, str] | None = None
) -> str:
    """Bars with a legend of the names in colors that they have. limit: a line across them, and what it is."""
    longest = max([sum(bar.parts.values()) for bar in bars] + ([] if limit is None else [limit[0]]), default=0.0) or 1.0
    used = [name for name in colors if any(bar.parts.get(name, 0) > 0 for bar in bars)]
    legend, legend_height = _legend([(name, colors[name]) for name in used])
    top = legend_height + _TOP + (16 if limit else 0)
    bottom = top + len(bars) * _ROW
    parts, ends = [legend, *_axis(longest, axis, top=top, bottom=bottom)], []
    for number, bar in enumerate(bars):
        y = top + number * _ROW + (_ROW - _BAR) / 2
        parts.append(_text((_LEFT - 8, y + 13), bar.label, anchor="end"))
        x = float(_LEFT)
        for name in used:
            wide = _scaled(bar.parts.get(name, 0.0), longest)
            if wide > 0:
                tip = f"{bar.label}: {name} {bar.parts[name]:.4g} {axis}"
                parts.append(_rect(x, y, wide=wide, high=_BAR, color=colors[name], title=tip))
            x += wide
        ends.append(_text((x + 6, y + 13), bar.end, halo=True))
    if limit is not None:
        x = _LEFT + _scaled(limit[0], longest)
        parts.append(
            f'<path d="M{x:.1f} {top - 6}V{bottom}" stroke="#b00020" stroke-width="2" stroke-dasharray="5 3"/>'
        )
        anchor = "end" if x > WIDTH / 2 else "start"
        parts.append(_text((x, top - 9), limit[1], anchor=anchor, color="#b00020"))
    return _svg([*parts, *ends], bottom + 44)


def stacked_columns(
    panels: Sequence[Panel],
    colors: Mapping[str, str],
    *,
    x_axis: str,
    y_axis: str,
    limit: tuple[float, str],
) -> str:
    """Columns that add up to 100, in panels beside each other with one legend. limit: a line across, and what it is."""
    used = [name for name in colors if any(bar.parts.get(name, 0) > 0 for panel in panels for bar in panel.columns)]
    legend, legend_height = _legend([(name, colors[name]) for name in used])
    per_row = min(_PANELS, max(2, len(panels)))
    parts, high = [legend], _PANEL_HIGH + 92
    for number, panel in enumerate(panels):
        row, place = divmod(number, per_row)
        left, right = (WIDTH / per_row * at for at in (place, place + 1))
        frame = left + _PANEL_LEFT, right - _PANEL_RIGHT, legend_height + row * high + 34
        parts += _panel(panel, {name: colors[name] for name in used}, frame=frame, axes=(x_axis, y_axis), limit=limit)
    return _svg(parts, legend_height + math.ceil(len(panels) / per_row) * high)


def _panel(
    panel: Panel,
    colors: Mapping[str, str],
    *,
    frame: tuple[float, float, float],
    axes: tuple[str, str],
    limit: tuple[float, str],
) -> list[str]:
    """frame: left and right end of the columns, and their top."""
    left, right, top = frame
    bottom, x_axis, y_axis = top + _PANEL_HIGH, *axes
    parts = [_text((left, top - 12), panel.title)]
    for tick in range(0, 101, 20):
        y = bottom - tick / 100 * _PANEL_HIGH
        parts.append(f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#ddd"/>')
        parts.append(_text((left - 6, y + 4), str(tick), anchor="end", color="#555"))
    wide = (right - left) / max(1, len(panel.columns))
    # Where there are many columns, every second or third one has its label.
    every = math.ceil(_CHARACTER * (1 + max((len(bar.label) for bar in panel.columns), default=0)) / wide)
    for number, bar in enumerate(panel.columns):
        x, y = left + number * wide, float(bottom)
        for name, color in colors.items():
            tall = bar.parts.get(name, 0.0) / 100 * _PANEL_HIGH
            y -= tall
            if tall > 0:
                tip = f"{bar.label}: {name} {bar.parts[name]:.4g} {y_axis}; {bar.end}"
                parts.append(_rect(x + 0.1 * wide, y, wide=0.8 * wide, high=tall, color=color, title=tip))
        if number % every == 0:
            parts.append(_text((x + wide / 2, bottom + 16), bar.label, anchor="middle", color="#555"))
    y = bottom - limit[0] / 100 * _PANEL_HIGH
    dashed = f'<path d="M{left:.1f} {y:.1f}H{right:.1f}" stroke="#222" stroke-width="1.5" stroke-dasharray="5 3">'
    parts.append(f"{dashed}<title>{escape(limit[1])}</title></path>")
    parts.append(_text(((left + right) / 2, bottom + 36), x_axis, anchor="middle"))
    middle = top + _PANEL_HIGH / 2
    parts.append(_text((left - 40, middle), y_axis, anchor="middle", turned=True))
    return parts


def schedule(boxes: Iterable[Box], rows: Sequence[str], *, axis: str, legend: Sequence[tuple[str, str]]) -> str:
    """Boxes on rows over time."""
    drawn = list(boxes)
    longest = max((box.end for box in drawn), default=0.0) or 1.0
    text, legend_height = _legend(legend)
    top = legend_height + _TOP
    bottom = top + len(rows) * _ROW
    parts = [text, *_axis(longest, axis, top=top, bottom=bottom)]
    parts += [_text((_LEFT - 8, top + number * _ROW + 17), row, anchor="end") for number, row in enumerate(rows)]
    for box in drawn:
        x, y, wide = (
            _LEFT + _scaled(box.start, longest),
            top + box.row * _ROW + 3,
            _scaled(box.end - box.start, longest),
        )
        edge = "white" if wide > 4 else None
        parts.append(_rect(x, y, wide=max(wide, 0.3), high=_ROW - 6, color=box.color, title=box.title, edge=edge))
        fitting = [size for size, digit in _DIGIT.items() if wide > digit * len(box.text) + 2]
        if fitting:
            parts.append(_text((x + wide / 2, y + 14), box.text, anchor="middle", size=fitting[0]))
    return _svg(parts, bottom + 44)


def _svg(parts: Iterable[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="100%" '
        f'font-family="sans-serif" font-size="12">{"".join(parts)}</svg>'
    )


def _axis(longest: float, name: str, *, top: float, bottom: float) -> list[str]:
    step = 10 ** math.floor(math.log10(longest / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if longest / (step * factor) <= 8)
    parts = []
    for number in range(int(longest / step + 1e-9) + 1):
        x = _LEFT + _scaled(number * step, longest)
        parts.append(f'<path d="M{x:.1f} {top}V{bottom}" stroke="#ddd"/>')
        parts.append(_text((x, bottom + 15), f"{number * step:g}", anchor="middle", color="#555"))
    parts.append(f'<path d="M{_LEFT} {bottom}H{WIDTH - _RIGHT}" stroke="#888"/>')
    parts.append(_text(((_LEFT + WIDTH - _RIGHT) / 2, bottom + 34), name, anchor="middle"))
    return parts


def _legend(entries: Sequence[tuple[str, str]]) -> tuple[str, float]:
    """The legend, and how high it is."""
    parts, x, y = [], float(_LEFT), 0
    for name, color in entries:
        wide = 30 + _CHARACTER * len(name)
        if x + wide > WIDTH:
            x, y = float(_LEFT), y + _LEGEND_ROW
        parts.append(_rect(x, y + 3, wide=12, high=12, color=color, title=name) + _text((x + 17, y + 13), name))
        x += wide
    return "".join(parts), y + _LEGEND_ROW + 4 if entries else 0


def _scaled(value: float, longest: float) -> float:
    return value / longest * (WIDTH - _LEFT - _RIGHT)


def _rect(x: float, y: float, *, wide: float, high: float, color: str, title: str, edge: str | None = None) -> str:
    stroke = "" if edge is None else f' stroke="{edge}"'
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{wide:.2f}" height="{high:.1f}" fill="{color}"{stroke}>'
        f"<title>{escape(title)}</title></rect>"
    )


def _text(
    at: tuple[float, float],
    text: str,
    *,
    anchor: str = "start",
    color: str = "#222",
    size: int = 12,
    halo: bool = False,
    turned: bool = False,
) -> str:
    """halo: with a white edge, where lines may cross it; turned: upwards."""
    x, y = at
    more = ' stroke="white" stroke-width="3" paint-order="stroke"' if halo else ""
    more += f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}" font-size="{size}"{more}>'
        f"{escape(text)}</text>"
    )
