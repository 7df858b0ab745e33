"""Draws SVG panels of lines without a plotting library. Measures nothing."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

_COLORS = ("#2f7fd1", "#d1642e", "#2b9348", "#8e44ad", "#b8860b", "#c2185b", "#00838f", "#6d4c41")
_STYLE = """.bg{fill:#fff}.ink{fill:#1b1f24}.dim{fill:#57606a}.grid{stroke:#d0d7de;fill:none}
.limit{stroke:#57606a;stroke-dasharray:6 4;fill:none}.line{fill:none;stroke-width:2}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.ink{fill:#e6edf3}.dim{fill:#9aa4af}.grid{stroke:#30363d}}"""
_LEFT, _TOP, _WIDTH, _HEIGHT, _GAP, _BELOW = 52, 34, 380, 220, 70, 56


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    ticks: labels of the x axis. series: by name, one number per tick, None if missing. limit: level at which a
    horizontal line is drawn.
    """

    title: str
    x_label: str
    ticks: Sequence[str]
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    limit: float | None = None

    @property
    def step(self) -> float:
        """Distance of grid lines: a round number that results in at most six lines."""
        known = [value for values in self.series.values() for value in values if value is not None]
        most = max([*known, self.limit or 0.0], default=0.0) or 1.0
        steps = (digit * 10.0**power for power in range(-6, 12) for digit in (1, 2, 5))
        return next(step for step in steps if most <= 6 * step)

    @property
    def top(self) -> float:
        """Upper end of the y axis."""
        return 6 * self.step


def drawing(title: str, panels: Sequence[Panel], *, columns: int = 2) -> str:
    """Returns an SVG of the panels, row by row, each with a legend."""
    names = max((len(panel.series) for panel in panels), default=0)
    cell_width, cell_height = _LEFT + _WIDTH + _GAP, _TOP + _HEIGHT + _BELOW + 16 * names
    rows = -(-len(panels) // columns)
    width, height = cell_width * min(columns, max(1, len(panels))), 36 + rows * cell_height
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><title>{escape(title)}</title><style>{_STYLE}</style>',
        f'<rect class="bg" width="{width}" height="{height}"/>',
        f'<text class="ink" x="12" y="22" font-weight="bold">{escape(title)}</text>',
    ]
    for number, panel in enumerate(panels):
        at = (number % columns * cell_width + _LEFT, 36 + number // columns * cell_height + _TOP)
        parts.append(f'<g transform="translate({at[0]} {at[1]})">')
        parts += [*_axes(panel), *_marks(panel), *_legend(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _x(panel: Panel, index: int) -> float:
    return (index + 0.5) * _WIDTH / max(1, len(panel.ticks))


def _y(panel: Panel, value: float) -> float:
    return _HEIGHT * (1 - max(0.0, value) / panel.top)


def _axes(panel: Panel) -> Iterator[str]:
    yield f'<text class="ink" x="0" y="-12">{escape(panel.title)}</text>'
    for number in range(round(panel.top / panel.step) + 1):
        y = _y(panel, number * panel.step)
        yield f'<path class="grid" d="M0 {y:.1f}H{_WIDTH}"/>'
        yield f'<text class="dim" x="-6" y="{y + 4:.1f}" text-anchor="end">{number * panel.step:g}</text>'
    for index, tick in enumerate(panel.ticks):
        yield (
            f'<text class="dim" x="{_x(panel, index):.1f}" y="{_HEIGHT + 15}" text-anchor="middle" font-size="10">'
            f"{escape(tick)}</text>"
        )
    yield f'<text class="dim" x="{_WIDTH / 2}" y="{_HEIGHT + 32}" text-anchor="middle">{escape(panel.x_label)}</text>'
    if panel.limit is not None:
        yield f'<path class="limit" d="M0 {_y(panel, panel.limit):.1f}H{_WIDTH}"/>'


def _marks(panel: Panel) -> Iterator[str]:
    for number, values in enumerate(panel.series.values()):
        color = _COLORS[number % len(_COLORS)]
        known = [(index, value) for index, value in enumerate(values) if value is not None]
        places = [f"{_x(panel, index):.1f} {_y(panel, value):.1f}" for index, value in known]
        if places:
            yield f'<path class="line" stroke="{color}" d="M{" L".join(places)}"/>'
        for place, (_, value) in zip(places, known, strict=True):
            yield (f'<circle transform="translate({place})" r="3" fill="{color}"><title>{value:.3g}</title></circle>')


def _legend(panel: Panel) -> Iterator[str]:
    for number, name in enumerate(panel.series):
        y, color = _HEIGHT + 50 + 16 * number, _COLORS[number % len(_COLORS)]
        yield f'<rect x="0" y="{y - 9}" width="10" height="10" fill="{color}"/>'
        yield f'<text class="ink" x="16" y="{y}">{escape(name)}</text>'
