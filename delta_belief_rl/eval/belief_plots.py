"""Belief curves by outcome, as SVG files that stand alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from delta_belief_rl.eval.charts import COLOURS, HEIGHT, LEFT, WIDTH, Series, line_chart

HEAD = 46
"""Height of title and legend, in the chart's units."""
SCALE = 1.6
WON, LOST = COLOURS[2], COLOURS[1]
TITLES = {
    "logprob": "Log-probability of the answer, nats",
    "confidence": "Stated probability of the answer",
    "accuracy": "Share of conversations in which the answer is named",
}
STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#333}.title{font-size:13px;font-weight:600}"
    ".grid{stroke:#ddd;stroke-width:1}.axis{fill:#666}"
)


def belief_curves(summary: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write ``<method>_by_turn.svg`` for each measure of a summary that has a curve.

    Args:
        summary: From ``eval.calibration.summarise_beliefs``.
        folder: Made where it is missing.

    Returns:
        The files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    for method, title in TITLES.items():
        places = summary.get(method, {}).get("by_turn", [])
        series = [
            Series(f"{word}: {max((p[word] for p in places), default=0)} games", points, colour)
            for word, colour in (("won", WON), ("lost", LOST))
            if (points := _points(places, f"mean_{word}"))
        ]
        if not series:
            continue
        chart = line_chart(
            series, x_label="exchanges so far", y_range=None if method == "logprob" else (0.0, 1.0)
        )
        path = folder / f"{method}_by_turn.svg"
        path.write_text(standalone(chart, title, series), encoding="utf-8")
        written.append(path)
    return written


def standalone(chart: str, title: str, series: Sequence[Series]) -> str:
    """A chart of ``eval.charts`` with title, legend and style, as a file of its own."""
    legend: list[str] = []
    x = LEFT
    for one in series:
        legend.append(
            f'<line x1="{x}" x2="{x + 16}" y1="34" y2="34" stroke="{one.colour}" stroke-width="2"/>'
            f'<text x="{x + 21}" y="38">{escape(one.name)}</text>'
        )
        x += 34 + 6 * len(one.name)
    inner = chart.replace("<svg ", f'<svg y="{HEAD}" width="{WIDTH}" height="{HEIGHT}" ', 1)
    height = HEIGHT + HEAD
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{SCALE * WIDTH:.0f}" '
        f'height="{SCALE * height:.0f}" viewBox="0 0 {WIDTH} {height}"><style>{STYLE}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>'
        f'<text class="title" x="{LEFT}" y="18">{escape(title)}</text>'
        f"{''.join(legend)}{inner}</svg>\n"
    )


def _points(places: Sequence[Mapping[str, Any]], name: str) -> list[tuple[float, float]]:
    return [(float(p["turn"]), float(p[name])) for p in places if p[name] is not None]
