"""Plots as inline SVG: lines over time, and points. No script, no network; colours come from the page's own style.

Coordinates are in the units of a fixed view box that scales with the page. Knows nothing of benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 40
TICKS = 5
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    points: bool = False
    """Drawn as dots and not joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    shaded: tuple[float, float] | None = None
    """A span of x that the figures are of."""
    log_x: bool = False
    marks: Sequence[tuple[float, str]] = ()
    """Places on x with a word."""


def svg(plot: Plot) -> str:
    """Empty where there is nothing to draw."""
    drawn = [series for series in plot.series if any(value is not None for value in series.y)]
    if not drawn:
        return ""
    xs = [x for series in drawn for x, y in zip(series.x, series.y, strict=True) if y is not None]
    ys = [y for series in drawn for y in series.y if y is not None]
    axis_x = _Axis.of(min(xs), max(xs), LEFT, WIDTH - RIGHT, log=plot.log_x)
    axis_y = _Axis.of(0.0, max(ys) * 1.05 or 1.0, HEIGHT - BOTTOM, TOP)
    parts = [
        f'<figure><figcaption>{escape(plot.title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(plot.title, quote=True)}: {escape(_summary(drawn), quote=True)}">'
    ]
    if plot.shaded is not None:
        low, high = (min(max(axis_x.at(edge), LEFT), WIDTH - RIGHT) for edge in plot.shaded)
        size = f'width="{max(0.0, high - low):.1f}" height="{HEIGHT - TOP - BOTTOM}"'
        parts.append(f'<rect class="peak" x="{low:.1f}" y="{TOP}" {size}/>')
    parts += [_grid(axis_x, axis_y, plot)]
    parts += [_drawn(series, number, axis_x, axis_y) for number, series in enumerate(drawn)]
    for x, word in plot.marks:
        at = axis_x.at(x)
        parts.append(
            f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text x="{at + 4:.1f}" y="{TOP + 12}">{escape(word)}</text>'
        )
    legend = "".join(f'<span class="s{number}">{escape(series.name)}</span>' for number, series in enumerate(drawn))
    return "".join(parts) + f'</svg><p class="legend">{legend}</p></figure>'


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    begin: float
    end: float
    log: bool

    @staticmethod
    def of(low: float, high: float, begin: float, end: float, *, log: bool = False) -> _Axis:
        log = log and low > 0
        return _Axis(low, high if high > low else low + 1, begin, end, log)

    def at(self, value: float) -> float:
        low, high, here = (
            (math.log(self.low), math.log(self.high), math.log(max(value, self.low)))
            if self.log
            else (self.low, self.high, value)
        )
        return self.begin + (here - low) / (high - low) * (self.end - self.begin)

    def ticks(self) -> list[float]:
        if self.log:
            return [
                base * 10**power
                for power in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
                for base in (1, 2, 5)
                if self.low <= base * 10**power <= self.high
            ]
        raw = (self.high - self.low) / TICKS
        step = 10 ** math.floor(math.log10(raw))
        step *= next(base for base in (1, 2, 5, 10) if base * step >= raw)
        first = math.ceil(self.low / step)
        return [step * place for place in range(first, math.floor(self.high / step) + 1)]


def _grid(axis_x: _Axis, axis_y: _Axis, plot: Plot) -> str:
    parts = []
    for value in axis_y.ticks():
        at = axis_y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text class="y" x="{LEFT - 6}" y="{at + 4:.1f}">{_number(value)}</text>')
    for value in axis_x.ticks():
        parts.append(f'<text class="x" x="{axis_x.at(value):.1f}" y="{HEIGHT - BOTTOM + 16}">{_number(value)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="x" x="{middle:.0f}" y="{HEIGHT - 6}">{escape(plot.x_label)}</text>')
    upright = f'transform="translate(13 {(TOP + HEIGHT - BOTTOM) / 2:.0f}) rotate(-90)"'
    parts.append(f'<text class="x" {upright}>{escape(plot.y_label)}</text>')
    return "".join(parts)


def _drawn(series: Series, number: int, axis_x: _Axis, axis_y: _Axis) -> str:
    places = [None if y is None else (axis_x.at(x), axis_y.at(y)) for x, y in zip(series.x, series.y, strict=True)]
    if series.points:
        return "".join(
            f'<circle class="s{number}" cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="2.5"/>' for place in places if place
        )
    path, pen = [], "M"
    for place in places:
        if place is None:
            pen = "M"  # What is not known is a hole in the line.
            continue
        path.append(f"{pen}{place[0]:.1f} {place[1]:.1f}")
        pen = "L"
    return f'<path class="s{number}" d="{"".join(path)}"/>'


def _number(value: float) -> str:
    for size, name in _PREFIXES:
        if abs(value) >= size:
            return f"{value / size:g}{name}"
    return f"{value:.6g}"


def _summary(series: Sequence[Series]) -> str:
    """For who hears a page."""
    said = []
    for one in series:
        values = [value for value in one.y if value is not None]
        said.append(f"{one.name} from {_number(round(min(values), 3))} to {_number(round(max(values), 3))}")
    return "; ".join(said)
