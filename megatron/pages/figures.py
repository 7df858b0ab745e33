"""Builds figures of pages as plain values for plotly.js: stacked bars, stacked columns, and boxes on a time line.

Texts are escaped, because plotly would interpret parts of them as markup. Colors of text and grid lines are chosen in
plots.js, which draws the figures.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

_ROW, _AXIS, _LIMIT, _PANEL = 26, 56, 22, 260  # heights in pixels
_CHARACTER = 7  # approximate width in pixels of a 12 px character
_LIMIT_COLOR = "#d1344b"
# Rows with more boxes than this are too narrow for box edges.
_MOST_EDGED = 200


@dataclass(frozen=True)
class Figure:
    """A plotly figure. legend: (name, color) of each part, shown above the figure. height: height in pixels."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int
    legend: list[tuple[str, str]]
    title: str = ""


@dataclass(frozen=True)
class Bar:
    """One stacked bar. parts: maps the name of a part to its length, in the chart's unit. end: text after the bar."""

    label: str
    parts: Mapping[str, float]
    end: str


@dataclass(frozen=True)
class Panel:
    """One of several column charts. columns: from left to right. Hovering over a column shows its text `end`."""

    title: str
    columns: Sequence[Bar]


@dataclass(frozen=True)
class Box:
    """A box on a row of a time line, from start to end in the axis's unit. title: text shown on hover."""

    row: int
    start: float
    end: float
    kind: str
    text: str
    title: str


def time_unit(seconds: float) -> tuple[str, float]:
    """Returns the name and the seconds of the unit for an axis that ends at `seconds`: its tick labels stay short."""
    units = (("seconds", 1.0), ("milliseconds", 1e-3), ("microseconds", 1e-6))
    return next(((unit, size) for unit, size in units if seconds >= size), units[-1])


def short_time(seconds: float) -> str:
    """Returns a time with three digits, in the unit that suits it."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds < 1e-10:
        return "0 s"  # rounding error of sums that cancel
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-4 else f"{1e6 * seconds:.3g} us"


def stacked_bars(
    bars: Sequence[Bar], colors: Mapping[str, str], *, axis: str, limit: tuple[float, str] | None = None
) -> Figure:
    """Returns a figure of stacked horizontal bars.

    colors: maps the name of a part to its color, in drawing order. limit: position and label of a vertical line.
    """
    totals = [sum(bar.parts.values()) for bar in bars]
    longest = max([*totals, *([] if limit is None else [limit[0]])], default=0.0) or 1.0
    ends = [
        {"x": total, "y": row, "text": escape(bar.end), "xanchor": "left", "xshift": 2, "showarrow": False}
        for row, (bar, total) in enumerate(zip(bars, totals, strict=True))
    ]
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"title": {"text": escape(axis)}, "range": [0, longest]},
        "yaxis": _rows_axis([bar.label for bar in bars]),
        "margin": {"r": 10 + _CHARACTER * max((len(bar.end) for bar in bars), default=0)},
        "annotations": ends,
    }
    height = _AXIS + _ROW * len(bars)
    if limit is not None:
        position, label = limit
        side = "right" if position > longest / 2 else "left"
        text = {"x": position, "y": 1, "yref": "paper", "yanchor": "bottom", "xanchor": side, "text": escape(label)}
        layout["annotations"] = [*ends, {**text, "font": {"color": _LIMIT_COLOR}, "showarrow": False}]
        layout["shapes"] = [_limit_line(x0=position, x1=position, y0=0, y1=1, yref="paper")]
        layout["margin"]["t"] = _LIMIT
        height += _LIMIT
    return Figure(_stacked(bars, colors, unit=axis, is_horizontal=True), layout, height, _legend(bars, colors))


def stacked_columns(
    panels: Sequence[Panel], colors: Mapping[str, str], *, x_axis: str, y_axis: str, limit: tuple[float, str]
) -> list[Figure]:
    """Returns one figure of stacked columns per panel, with values from 0 to 100 and a shared legend.

    colors: maps the name of a part to its color, in drawing order. limit: position and label of a horizontal line.
    """
    legend = _legend([bar for panel in panels for bar in panel.columns], colors)
    height, label = limit
    line = {**_limit_line(x0=0, x1=1, xref="paper", y0=height, y1=height), "name": escape(label)}
    figures = []
    for panel in panels:
        places = list(range(len(panel.columns)))
        labels = [escape(bar.label) for bar in panel.columns]
        layout = {
            "barmode": "stack",
            "xaxis": {"title": {"text": escape(x_axis)}, "tickvals": places, "ticktext": labels},
            "yaxis": {"title": {"text": escape(y_axis)}, "range": [0, 101]},
            "shapes": [line],
        }
        data = _stacked(panel.columns, colors, unit=y_axis, is_horizontal=False)
        figures.append(Figure(data, layout, _PANEL, legend, panel.title))
    return figures


def time_line(boxes: Iterable[Box], rows: Sequence[str], *, axis: str, colors: Mapping[str, str]) -> Figure:
    """Returns a figure of boxes on named rows. colors: maps a kind of box to its color; later kinds are on top."""
    by_kind: dict[str, list[Box]] = {kind: [] for kind in colors}
    for box in boxes:
        by_kind[box.kind].append(box)
    edge = 0.5 if sum(map(len, by_kind.values())) <= _MOST_EDGED * len(rows) else 0
    data = [
        {
            **_bars(kind, colors[kind], edge=edge),
            "orientation": "h",
            "y": [box.row for box in drawn],
            "base": [box.start for box in drawn],
            "x": [box.end - box.start for box in drawn],
            "text": [escape(box.text) for box in drawn],
            "customdata": [escape(box.title) for box in drawn],
            "textposition": "inside",
            "insidetextanchor": "middle",
            "textangle": 0,
        }
        for kind, drawn in by_kind.items()
        if drawn
    ]
    layout = {
        "barmode": "overlay",
        "xaxis": {"title": {"text": escape(axis)}, "rangemode": "tozero"},
        "yaxis": _rows_axis(rows),
        # Texts that do not fit into their boxes appear after zooming in.
        "uniformtext": {"mode": "hide", "minsize": 8},
    }
    return Figure(data, layout, _AXIS + _ROW * len(rows), list(colors.items()))


def _stacked(bars: Sequence[Bar], colors: Mapping[str, str], *, unit: str, is_horizontal: bool) -> list[dict[str, Any]]:
    """Returns one plotly trace for each part that occurs in any bar."""
    traces = []
    for name, _ in _legend(bars, colors):
        drawn = [(place, bar) for place, bar in enumerate(bars) if bar.parts.get(name, 0) > 0]
        places, lengths = [place for place, _ in drawn], [bar.parts[name] for _, bar in drawn]
        tips = [escape(f"{bar.label}: {name} {bar.parts[name]:.4g} {unit}; {bar.end}") for _, bar in drawn]
        axes = {"x": lengths, "y": places, "orientation": "h"} if is_horizontal else {"x": places, "y": lengths}
        traces.append({**_bars(name, colors[name], edge=0.5), **axes, "customdata": tips})
    return traces


def _bars(name: str, color: str, *, edge: float) -> dict[str, Any]:
    marker = {"color": color, "line": {"color": "white", "width": edge}}
    return {
        "type": "bar",
        "name": escape(name),
        "marker": marker,
        "width": 0.76,
        "hovertemplate": "%{customdata}<extra></extra>",
    }


def _rows_axis(labels: Sequence[str]) -> dict[str, Any]:
    """Returns a vertical axis with a label for each row, the first at the top."""
    return {
        "tickvals": list(range(len(labels))),
        "ticktext": [escape(label) for label in labels],
        "range": [len(labels) - 0.5, -0.5],
        "fixedrange": True,
        "showgrid": False,
        "zeroline": False,
    }


def _limit_line(**place: Any) -> dict[str, Any]:
    return {"type": "line", **place, "line": {"color": _LIMIT_COLOR, "width": 2, "dash": "5px,3px"}}


def _legend(bars: Sequence[Bar], colors: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(name, color) for name, color in colors.items() if any(bar.parts.get(name, 0) > 0 for bar in bars)]
