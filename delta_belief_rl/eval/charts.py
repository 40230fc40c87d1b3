"""Small SVG charts as text, for pages that must stand alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 12, 34
COLOURS = ("#2467a8", "#d1701c", "#2f8556", "#8a4f9e", "#7a6a20", "#5b6670", "#b03a48", "#3c9aa0")
"""Told apart by people with the common colour deficiencies, in this order."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart.

    Attributes:
        points: ``(x, y)`` in order of x.
        dots: Draw the points as well, for series with few of them.
        faint: Draw it thin and pale, for raw values behind a mean.
        dashed: Tells it from another line of the same colour.
    """

    name: str
    points: Sequence[tuple[float, float]]
    colour: str = COLOURS[0]
    dots: bool = False
    faint: bool = False
    band: Sequence[tuple[float, float, float]] = ()
    """``(x, low, high)`` intervals, drawn as whiskers."""
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class _Scale:
    """A linear map from data to pixels."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(self.start + share * (self.end - self.start), 1)


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that cover ``low..high``.

    Example:
        >>> nice_ticks(0.0, 0.87)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    if high - low < 1e-6 * max(abs(low), abs(high), 1e-3):  # a flat line
        low, high = low - 0.5, high + 0.5
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(m * magnitude for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(k * step, 10) for k in range(first, last + 1)]


def running_mean(
    points: Sequence[tuple[float, float]], width: int = 5
) -> list[tuple[float, float]]:
    """Each point replaced by the mean of the last ``width`` values, fewer at the start."""
    values = [y for _, y in points]
    means: list[tuple[float, float]] = []
    for index, (x, _) in enumerate(points):
        window = values[max(0, index - width + 1) : index + 1]
        means.append((x, sum(window) / len(window)))
    return means


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str = "training step",
    percent: bool = False,
    y_range: tuple[float, float] | None = None,
) -> str:
    """An SVG with one line a series; an empty string when there is nothing to draw.

    Args:
        percent: Values are shares and shown in percent.
        y_range: Limits of the y axis; chosen from the data when None.
    """
    series = [s for s in series if s.points]
    if not series:
        return ""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points] + [
        v for s in series for b in s.band for v in b[1:]
    ]
    x_ticks = [t for t in nice_ticks(min(xs), max(xs)) if min(xs) <= t <= max(xs)]
    y_ticks = nice_ticks(*(y_range or (min(ys), max(ys))))
    x = _Scale(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, LEFT, WIDTH - RIGHT)
    y = _Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [_frame(x, y, x_ticks, y_ticks, x_label, percent)]
    parts += [_series(s, x, y, percent) for s in series]
    return _svg("".join(parts), ", ".join(s.name for s in series))


def _svg(body: str, label: str, height: int = HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}">'
        f"{body}</svg>"
    )


def _frame(
    x: _Scale,
    y: _Scale,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_label: str,
    percent: bool,
) -> str:
    parts: list[str] = []
    for tick in y_ticks:
        height = y(tick)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height}" y2="{height}"/>'
            f'<text x="{LEFT - 6}" y="{height + 4}" text-anchor="end">'
            f"{_number(tick, percent)}</text>"
        )
    base = HEIGHT - BOTTOM
    parts += [
        f'<text x="{x(tick)}" y="{base + 15}" text-anchor="middle">{_number(tick, False)}</text>'
        for tick in x_ticks
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text class="axis" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    return "".join(parts)


def _series(series: Series, x: _Scale, y: _Scale, percent: bool) -> str:
    path = " ".join(f"{x(px)},{y(py)}" for px, py in series.points)
    style = 'stroke-width="1" stroke-opacity=".35"' if series.faint else 'stroke-width="2"'
    style += ' stroke-dasharray="5 3"' if series.dashed else ""
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{series.colour}" {style} '
        'stroke-linejoin="round" stroke-linecap="round"/>'
    ]
    parts += [
        f'<line x1="{x(px)}" x2="{x(px)}" y1="{y(low)}" y2="{y(high)}" stroke="{series.colour}" '
        'stroke-width="1.2" stroke-opacity=".6"/>'
        for px, low, high in series.band
    ]
    if series.dots or len(series.points) == 1:
        parts += [
            f'<circle cx="{x(px)}" cy="{y(py)}" r="3.2" fill="{series.colour}">'
            f"<title>{escape(series.name)}, step {px:g}: {_number(py, percent)}</title></circle>"
            for px, py in series.points
        ]
    return "".join(parts)


def stacked_bar(parts: Mapping[str, float], unit: str = "s") -> str:
    """One horizontal bar with a coloured piece for each part; its share is written inside."""
    total = sum(parts.values())
    if total <= 0:
        return ""
    pieces: list[str] = []
    start = 0.0
    span = WIDTH - 2
    for index, (name, value) in enumerate(parts.items()):
        width = span * value / total
        label = f"{name}: {value:.2f} {unit}, {100 * value / total:.0f} %"
        pieces.append(
            f'<rect x="{1 + start:.1f}" y="2" width="{max(width - 1, 0.5):.1f}" height="26" rx="2" '
            f'fill="{COLOURS[index % len(COLOURS)]}"><title>{escape(label)}</title></rect>'
        )
        if width > 44:
            pieces.append(
                f'<text x="{1 + start + width / 2:.1f}" y="19" text-anchor="middle" class="in">'
                f"{100 * value / total:.0f} %</text>"
            )
        start += width
    return _svg("".join(pieces), "time of a step by part", height=30)


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.3g} %" if percent else f"{value:.4g}"
