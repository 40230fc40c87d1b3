"""The picture of a study: a row for each method, its rate and its difference from the baseline."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from delta_belief_rl.eval.charts import COLOURS, nice_ticks
from delta_belief_rl.eval.statistics import Interval
from validation.credit.reading import Findings
from validation.credit.study import FAMILIES
from validation.credit.tables import family_of

_ROW, _TOP, _NAME, _PANEL, _GAP, _MARGIN = 22, 92, 190, 300, 44, 16
_WIDTH = _MARGIN + _NAME + 2 * _PANEL + _GAP + 76
_STYLE = (
    'text{font:11px system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:#44505b}'
    ".title{font-size:15px;font-weight:600;fill:#1d2733}.head{font-size:12px;font-weight:600}"
    ".grid{stroke:#e4e8eb}.mark{stroke:#5b6670}.start{stroke:#5b6670;stroke-dasharray:4 3}"
)
_FAMILY_COLOURS = dict(zip(FAMILIES, COLOURS, strict=True))


def study_plot(found: Findings, title: str) -> str:
    """One SVG that stands alone."""
    base = _TOP + len(found.ranked) * _ROW
    rates = [one.rate.interval for one in found.ranked]
    gaps = [
        found.against[one.method].rate.interval
        for one in found.ranked
        if one.method != found.baseline
    ]
    left, right = _MARGIN + _NAME, _MARGIN + _NAME + _PANEL + _GAP
    first, x = _axis([*rates, found.start.interval], left, base, sign=False)
    second, gap_x = _axis([*gaps, Interval(0.0, 0.0, 0.0, 0.0, 1)], right, base, sign=True)
    start = x(found.start.interval.value)
    parts = [
        _legend([family_of(one.method) for one in found.ranked]),
        _head("Strict win rate at the end, % (dashed: start)", left),
        _head(f"Less {found.baseline}, points (full dot: real)", right),
        first,
        second,
        f'<line class="start" x1="{start}" x2="{start}" y1="{_TOP - 4}" y2="{base}"/>',
        f'<line class="mark" x1="{gap_x(0.0)}" x2="{gap_x(0.0)}" y1="{_TOP - 4}" y2="{base}"/>',
    ]
    for row, one in enumerate(found.ranked):
        y, colour = (
            _TOP + row * _ROW + _ROW // 2,
            _FAMILY_COLOURS.get(family_of(one.method), "#000"),
        )
        parts.append(
            f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(one.method)}</text>'
        )
        parts.append(_dot(one.rate.interval, x, y, colour, full=True))
        if one.method == found.baseline:
            continue
        gap = found.against[one.method]
        parts.append(_dot(gap.rate.interval, gap_x, y, colour, full=gap.is_real))
        text = f"{100 * gap.rate.interval.value:+.1f}{' real' if gap.is_real else ''}"
        parts.append(f'<text x="{right + _PANEL + 10}" y="{y + 4}">{text}</text>')
    return _page(title, "".join(parts), base + 34)


def _axis(
    intervals: Sequence[Interval], left: int, base: int, *, sign: bool
) -> tuple[str, Callable[[float], float]]:
    """Grid and labels of one panel, and the place of a value in it."""
    ends = [
        end for one in intervals for end in (one.value, one.low, one.high) if not math.isnan(end)
    ]
    ticks = nice_ticks(min(ends), max(ends))

    def x(value: float) -> float:
        return round(left + _PANEL * (value - ticks[0]) / (ticks[-1] - ticks[0]), 1)

    lines = [
        f'<line class="grid" x1="{x(tick)}" x2="{x(tick)}" y1="{_TOP - 4}" y2="{base}"/>'
        f'<text x="{x(tick)}" y="{base + 15}" text-anchor="middle">'
        f"{100 * tick:{'+' if sign and tick else ''}.3g}</text>"
        for tick in ticks
    ]
    return "".join(lines), x


def _dot(found: Interval, x: Callable[[float], float], y: int, colour: str, *, full: bool) -> str:
    line = ""
    if not math.isnan(found.low):
        line = (
            f'<line x1="{x(found.low)}" x2="{x(found.high)}" y1="{y}" y2="{y}" stroke="{colour}" '
            'stroke-width="2" stroke-opacity=".55"/>'
        )
    fill = colour if full else "#fff"
    return (
        f'{line}<circle cx="{x(found.value)}" cy="{y}" r="4" fill="{fill}" stroke="{colour}" '
        'stroke-width="1.5"/>'
    )


def _head(text: str, x: int) -> str:
    return f'<text class="head" x="{x}" y="{_TOP - 14}">{escape(text)}</text>'


def _legend(families: Sequence[str]) -> str:
    """The families that are in the picture, in their own order."""
    parts: list[str] = []
    x = float(_MARGIN)
    for family, colour in _FAMILY_COLOURS.items():
        if family in families:
            parts.append(
                f'<circle cx="{x + 5:.0f}" cy="50" r="5" fill="{colour}"/>'
                f'<text x="{x + 14:.0f}" y="54">{escape(family)}</text>'
            )
            x += 26 + 6.2 * len(family)
    return "".join(parts)


def _page(title: str, body: str, height: int) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" role="img" aria-label="{escape(title, quote=True)}">'
        f'<style>{_STYLE}</style><rect width="{_WIDTH}" height="{height}" fill="#fff"/>'
        f'<text class="title" x="{_MARGIN}" y="30">{escape(title)}</text>{body}</svg>\n'
    )
