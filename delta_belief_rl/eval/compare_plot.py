"""The picture of a comparison: learning curves, and each method's difference from the baseline.

One SVG file that stands alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from delta_belief_rl.eval.charts import COLOURS, HEIGHT, WIDTH, Series, line_chart, nice_ticks
from delta_belief_rl.eval.compare import Comparison, Difference, MethodResult

_GAP, _MARGIN, _LINE, _ROW = 24, 16, 18, 26
_LETTER = 6.2
"""Mean width of a letter at the size of the labels."""
_STYLE = (
    'text{font:11px system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:#44505b}'
    ".title{font-size:15px;font-weight:600;fill:#1d2733}.head{font-size:12px;font-weight:600}"
    ".axis{fill:#5b6670}.grid{stroke:#e4e8eb}.zero{stroke:#5b6670}"
)


def comparison_plot(comparison: Comparison) -> str:
    """The SVG; panels without data are left out, and all of it where no run is finished."""
    if not comparison.results:
        return ""
    colours = {
        one.method: (COLOURS[at % len(COLOURS)], at // len(COLOURS) % 2 == 1)
        for at, one in enumerate(comparison.results)
    }
    keys, top = _legend([one.method for one in comparison.results], colours)
    curves = line_chart(
        [
            series
            for at, one in enumerate(comparison.results)
            for series in _series(one, at, colours)
        ],
        x_label="turns of the budget spent",
        percent=True,
    )
    parts = [keys, _panel("Strict win rate in validation", curves, _MARGIN, top)]
    height = top + _LINE + HEIGHT
    gaps = [one for one in comparison.differences if not math.isnan(one.rate.interval.value)]
    if gaps:
        body, tall = _forest(gaps, colours)
        head = f"Difference from {comparison.baseline} at the end, in points"
        parts.append(_panel(head, body, _MARGIN + WIDTH + _GAP, top))
        height = max(height, top + _LINE + tall)
    return _page("Methods at one budget", "".join(parts), height + _MARGIN)


def _series(one: MethodResult, at: int, colours: dict[str, tuple[str, bool]]) -> tuple[Series, ...]:
    """The curve with its whiskers, set apart a little so that they do not cover each other."""
    colour, dashed = colours[one.method]
    points = [(point.spent, point.rate.interval.value) for point in one.curve]
    points = [point for point in points if not math.isnan(point[1])]
    if not points:
        return ()
    shift = (points[-1][0] - points[0][0]) * 0.006 * at
    known = [point for point in one.curve if not math.isnan(point.rate.interval.low)]
    band = [
        (point.spent + shift, point.rate.interval.low, point.rate.interval.high) for point in known
    ]
    # The dots follow their whiskers.
    points = [(x + shift, y) for x, y in points]
    return (Series(one.method, points, colour, dots=True, band=band, dashed=dashed),)


def _forest(gaps: Sequence[Difference], colours: dict[str, tuple[str, bool]]) -> tuple[str, int]:
    """A row for each method: the difference on its interval; hollow where it is not real."""
    ends = [
        value
        for gap in gaps
        for value in (gap.rate.interval.low, gap.rate.interval.high, gap.rate.interval.value)
        if not math.isnan(value)
    ]
    ticks = nice_ticks(min(0.0, *ends), max(0.0, *ends))
    left = 12 + _LETTER * max(len(gap.method) for gap in gaps)
    span = max(WIDTH - left - 76, 150)

    def x(value: float) -> float:
        return round(left + span * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    base = len(gaps) * _ROW + 6
    parts = [
        f'<line class="{"zero" if tick == 0 else "grid"}" x1="{x(tick)}" x2="{x(tick)}" y1="0" '
        f'y2="{base}"/><text x="{x(tick)}" y="{base + 15}" text-anchor="middle">'
        f"{_tick(tick)}</text>"
        for tick in ticks
    ]
    for row, gap in enumerate(gaps):
        y, found = row * _ROW + 16, gap.rate.interval
        colour = colours[gap.method][0]
        fill = colour if gap.is_real else "#fff"
        parts.append(
            f'<text x="{left - 8:.0f}" y="{y + 4}" text-anchor="end">{escape(gap.method)}</text>'
        )
        if not math.isnan(found.low):
            parts.append(
                f'<line x1="{x(found.low)}" x2="{x(found.high)}" y1="{y}" y2="{y}" '
                f'stroke="{colour}" stroke-width="2" stroke-opacity=".55"/>'
            )
        text = f"{100 * found.value:+.1f}{' real' if gap.is_real else ''}"
        parts.append(
            f'<circle cx="{x(found.value)}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" '
            f'stroke-width="1.5"/><text x="{left + span + 10:.0f}" y="{y + 4}">{text}</text>'
        )
    return "".join(parts), base + 24


def _tick(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:+.3g}"


def _panel(head: str, body: str, x: float, y: float) -> str:
    """A chart or a group of marks under its head."""
    inside = body
    if body.startswith("<svg "):
        inside = body.replace("<svg ", f'<svg width="{WIDTH}" height="{HEIGHT}" ', 1)
    return (
        f'<g transform="translate({x},{y})"><text class="head" x="0" y="0">{escape(head)}</text>'
        f'<g transform="translate(0,{_LINE - 6})">{inside}</g></g>'
    )


def _legend(methods: Sequence[str], colours: dict[str, tuple[str, bool]]) -> tuple[str, int]:
    """The legend in as many lines as it needs, and where the space under it begins."""
    x, y = float(_MARGIN), _MARGIN + 2 * _LINE
    parts: list[str] = []
    for method in methods:
        colour, dashed = colours[method]
        size = 32 + _LETTER * len(method)
        if x > _MARGIN and x + size > 2 * WIDTH + _GAP:
            x, y = float(_MARGIN), y + _LINE
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="3"{dash}/><text x="{x + 23:.0f}" y="{y}">{escape(method)}</text>'
        )
        x += size + 8
    return "".join(parts), y + _GAP + 6


def _page(title: str, body: str, height: float) -> str:
    width = 2 * WIDTH + _GAP + 2 * _MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height:.0f}" '
        f'width="{width}" height="{height:.0f}" role="img" '
        f'aria-label="{escape(title, quote=True)}"><style>{_STYLE}</style>'
        f'<rect width="{width}" height="{height:.0f}" fill="#fff"/>'
        f'<text class="title" x="{_MARGIN}" y="{_MARGIN + 12}">{escape(title)}</text>{body}</svg>\n'
    )
