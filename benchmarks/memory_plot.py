"""Draws the results of stash_memory.py: bytes over the capacity factor, a panel for each skew. Measures nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# One line of the table, in the format of stash_memory.py.
Line = Mapping[str, Any]
# Kinds in the legend's order, with their labels.
KINDS = {
    "static": "static buffers",
    "stash": "static buffers + paged stash",
    "rungs": "+ recompute (half of the pages)",
    "dropless": "eager (the host waits)",
}
_STYLE = """.bg{fill:#fff}.ink{fill:#1b1f24}.dim{fill:#57606a}.grid{stroke:#d0d7de}
.needs{stroke:#57606a;stroke-dasharray:2 3}
.line{fill:none;stroke-width:2}.static{stroke:#d1642e;fill:#d1642e}.stash{stroke:#2f7fd1;fill:#2f7fd1}
.rungs{stroke:#2b9348;fill:#2b9348}.dropless{stroke:#57606a;fill:#57606a;stroke-dasharray:6 4}
@media (prefers-color-scheme:dark){.bg{fill:#0d1117}.ink{fill:#e6edf3}.dim{fill:#9aa4af}.grid{stroke:#30363d}}"""
_PANEL, _LEFT, _TOP, _HIGH, _GAP = 230, 52, 86, 220, 34


@dataclass(frozen=True)
class _Scale:
    """Maps factors and MiB to coordinates in a panel.

    left: left edge of the panel. most_factor, most_mib: ends of the axes.
    """

    left: float
    most_factor: float
    most_mib: float

    def x(self, factor: float) -> float:
        return self.left + (factor - 1) / (self.most_factor - 1) * _PANEL

    def y(self, mib: float) -> float:
        return _TOP + _HIGH - mib / self.most_mib * _HIGH


def drawing(lines: Sequence[Line], *, layout: str) -> str:
    """Returns the SVG for one layout. Raises ValueError if no line has that layout."""
    own = [line for line in lines if line["layout"] == layout]
    if not own:
        raise ValueError(f"layout is {layout!r}: must be one of {sorted({line['layout'] for line in lines})}")
    skews = list(dict.fromkeys(line["skew"] for line in own))
    most_factor = max(line["capacity"] or 0 for line in own)
    step = _step(max(_mib(line) for line in own))
    most_mib = step * (max(_mib(line) for line in own) // step + 1)
    width = _LEFT + len(skews) * (_PANEL + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 360" font-family="sans-serif" font-size="12">',
        f"<title>Memory of activations saved for backward over the capacity factor</title><style>{_STYLE}</style>",
        f'<rect class="bg" width="{width}" height="360"/>',
        '<text class="ink" x="12" y="22" font-weight="bold">MiB of expert activations saved for backward, at the '
        "peak of a step, on the rank with the most</text>",
        *_legend(),
    ]
    for number, skew in enumerate(skews):
        scale = _Scale(_LEFT + number * (_PANEL + _GAP), most_factor, most_mib)
        parts += _panel([line for line in own if line["skew"] == skew], scale, step=step)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = [], 12.0
    for kind, label in KINDS.items():
        parts.append(f'<path class="line {kind}" d="M{x:g} 42h24"/>')
        parts.append(f'<text class="ink" x="{x + 30:g}" y="46">{label}</text>')
        x += 52 + 6 * len(label)
    return parts


def _panel(lines: Sequence[Line], scale: _Scale, *, step: float) -> list[str]:
    needs = lines[0]["needs"]
    title = f"one rank receives {needs:.2g} times its share" if needs > 1 else "balanced routing"
    bottom, right = scale.y(0), scale.left + _PANEL
    parts = [f'<text class="ink" x="{scale.left:g}" y="{_TOP - 12}" font-size="11">{title}</text>']
    for index in range(int(scale.most_mib / step) + 1):
        y = scale.y(index * step)
        parts.append(f'<path class="grid" d="M{scale.left:g} {y:g}H{right:g}"/>')
        parts.append(
            f'<text class="dim" x="{scale.left - 6:g}" y="{y + 4:g}" text-anchor="end">{index * step:g}</text>'
        )
    for factor in range(1, int(scale.most_factor) + 1):
        parts.append(
            f'<text class="dim" x="{scale.x(factor):g}" y="{bottom + 16:g}" text-anchor="middle">{factor}</text>'
        )
    parts.append(
        f'<text class="dim" x="{scale.left + _PANEL / 2:g}" y="{bottom + 33:g}" text-anchor="middle">'
        "capacity factor of the buffers</text>"
    )
    if needs > 1:
        parts.append(f'<path class="needs" d="M{scale.x(needs):g} {_TOP}V{bottom:g}"/>')
        parts.append(f'<text class="dim" x="{scale.x(needs) - 4:g}" y="{_TOP + 24}" text-anchor="end">overflow</text>')
    for kind in KINDS:
        parts += _curve([line for line in lines if line["kind"] == kind], kind, scale=scale)
    return parts


def _curve(lines: Sequence[Line], kind: str, *, scale: _Scale) -> list[str]:
    if kind == "dropless":
        return [f'<path class="line {kind}" d="M{scale.left:g} {scale.y(_mib(line)):g}h{_PANEL}"/>' for line in lines]
    points = sorted((line["capacity"], _mib(line)) for line in lines)
    places = [f"{scale.x(factor):.1f} {scale.y(mib):.1f}" for factor, mib in points]
    if not places:
        return []
    dots = [f'<circle class="{kind}" cx="{place.split()[0]}" cy="{place.split()[1]}" r="3"/>' for place in places]
    return [f'<path class="line {kind}" style="fill:none" d="M{" L".join(places)}"/>', *dots]


def _mib(line: Line) -> float:
    """Returns the MiB of a line. Pages count with the pool's size, whether or not a step fills them."""
    held: int = line["held_bytes"] - line["at_peak_pages"] + max(line["arena_bytes"], line["at_peak_pages"])
    return held / 2**20


def _step(most: float) -> float:
    """Returns the distance of grid lines: a round number that results in at most six lines."""
    steps = (digit * 10.0**power for power in range(-2, 9) for digit in (1, 2, 5))
    return next(step for step in steps if most <= 6 * step)
