"""Pictures of an analysis: SVG files that stand alone.

=========================  ======================================================================
file                       shows
=========================  ======================================================================
``win_rate.svg``           rate of each file under both rules, 95 % intervals over secrets
``pass_at_k.svg``          pass@k under both rules
``win_by_turn.svg``        share of games won within so many turns, under both rules
``belief_by_turn.svg``     belief in the secret by turn, won and lost games apart
``winning_questions.svg``  wins by the kind of the winning question
=========================  ======================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path

from delta_belief_rl.eval.analyze import FileAnalysis, Outcome
from delta_belief_rl.eval.charts import COLOURS, HEIGHT, WIDTH, Series, line_chart, nice_ticks
from delta_belief_rl.eval.game_statistics import BeliefStats, WinKind
from delta_belief_rl.eval.statistics import Interval
from delta_belief_rl.types import UserError

GAP, MARGIN, LINE = 24, 16, 18
_STYLE = (
    'text{font:11px system-ui,"Segoe UI","DejaVu Sans",sans-serif;fill:#44505b}'
    ".title{font-size:15px;font-weight:600;fill:#1d2733}.head{font-size:12px;font-weight:600}"
    ".axis{fill:#5b6670}.grid{stroke:#e4e8eb}.in{fill:#fff;font-weight:600}"
)
_COMPATIBLE, _STRICT = COLOURS[0], COLOURS[1]
_LETTER = 6.2
"""Mean width of a letter at the size of the labels."""

Legend = Sequence[tuple[str, str, bool]]
"""Name, colour, dashed."""
Curve = Callable[[Outcome], list[tuple[float, float]]]


def write_plots(files: Sequence[FileAnalysis], folder: Path) -> list[Path]:
    """Draw every picture that the files have data for and return the paths.

    Raises:
        UserError: The folder cannot be made or written.
    """
    pictures = {
        "win_rate": win_rate_plot(files),
        "pass_at_k": curve_plot(files, "pass@k", "k, games of a secret", _pass_points),
        "win_by_turn": curve_plot(files, "Games won within so many turns", "turn", _turn_points),
        "belief_by_turn": belief_plot(files),
        "winning_questions": kind_plot(files),
    }
    paths: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, body in pictures.items():
            if body:
                path = folder / f"{name}.svg"
                path.write_text(body, encoding="utf-8")
                paths.append(path)
    except OSError as error:
        raise UserError(
            f"The plots cannot be written to {folder} ({error.strerror}): name another folder."
        ) from error
    return paths


# ------------------------------------------------------------------------------------------- panels


def curve_plot(files: Sequence[FileAnalysis], title: str, x_label: str, curve: Curve) -> str:
    """A panel for each rule with a line for each file; empty when no file has two points."""
    rules = {
        "compatible rule": [curve(file.compatible) for file in files],
        "strict rule": [curve(file.strict) for file in files],
    }
    if not any(len(points) > 1 for lines in rules.values() for points in lines):
        return ""
    top = max(y for lines in rules.values() for points in lines for _, y in points)
    panels: list[tuple[str, str]] = []
    for rule, lines in rules.items():
        series = [
            Series(file.label, points, _colour(index), dashed=_dashed(index))
            for index, (file, points) in enumerate(zip(files, lines, strict=True))
        ]
        chart = line_chart(series, x_label=x_label, percent=True, y_range=(0.0, top or 1.0))
        panels.append((rule, chart))
    legend = [(file.label, _colour(i), _dashed(i)) for i, file in enumerate(files)]
    return _document(title, panels, legend)


def belief_plot(files: Sequence[FileAnalysis]) -> str:
    """A panel for each file whose beliefs are known, all to one scale; else empty."""
    names = {"won": COLOURS[2], "lost": COLOURS[6], "all": COLOURS[5]}
    shown = [(file, file.beliefs) for file in files if file.beliefs["all"] is not None]
    known = [part for _, parts in shown for part in parts.values() if part is not None]
    if not known:
        return ""
    values = [value for part in known for value in part.by_turn]
    panels: list[tuple[str, str]] = []
    for file, parts in shown:
        series = [
            Series(name, _belief_points(part), colour, dashed=name == "all")
            for name, colour in names.items()
            if (part := parts[name]) is not None
        ]
        chart = line_chart(series, x_label="turn", y_range=(min(values), max(values)))
        panels.append((file.label, chart))
    legend = [(f"{name} games", colour, name == "all") for name, colour in names.items()]
    title = "Belief in the secret, nats, mean over the games that are still going on"
    return _document(title, panels, legend)


def _belief_points(part: BeliefStats) -> list[tuple[float, float]]:
    return [(float(turn), value) for turn, value in enumerate(part.by_turn)]


def _pass_points(outcome: Outcome) -> list[tuple[float, float]]:
    return [(float(k), value) for k, value in outcome.pass_at_k.items()]


def _turn_points(outcome: Outcome) -> list[tuple[float, float]]:
    return [(float(turn), share) for turn, share in enumerate(outcome.by_turn)]


# --------------------------------------------------------------------------------------------- rows


def win_rate_plot(files: Sequence[FileAnalysis]) -> str:
    """A row for each file: both rates as dots on their intervals."""
    rules = (("compatible rule", _COMPATIBLE), ("strict rule", _STRICT))
    rates = [(file.compatible.rate, file.strict.rate) for file in files]
    top = max((rate.high for pair in rates for rate in pair if rate.units), default=0.0)
    ticks = nice_ticks(0.0, top or 1.0)
    left = _label_width(files)
    scale = _scale(left, ticks[-1])
    marks = "".join(
        _whisker(rate, scale, 12 + 14 * place + row * _ROW, colour)
        for row, pair in enumerate(rates)
        for place, (rate, (_, colour)) in enumerate(zip(pair, rules, strict=True))
        if rate.units
    )
    axis = _row_axis(ticks, scale, len(files), percent=True)
    body = axis + _row_labels(files, left) + marks
    legend = [(name, colour, False) for name, colour in rules]
    return _wide("Games won, 95 % intervals over secrets", body, len(files), legend)


def kind_plot(files: Sequence[FileAnalysis]) -> str:
    """A row for each file: its wins, parted by the kind of the winning question."""
    colours = dict(zip(WinKind, (COLOURS[2], COLOURS[6], COLOURS[5]), strict=True))
    most = max(file.compatible.wins for file in files)
    if not most:
        return ""
    ticks = nice_ticks(0.0, float(most))
    left = _label_width(files)
    scale = _scale(left, ticks[-1])
    bars = "".join(_stack(file, row, scale, colours) for row, file in enumerate(files))
    body = _row_axis(ticks, scale, len(files), percent=False) + _row_labels(files, left) + bars
    words = {
        WinKind.SINGLE: "single direct guess",
        WinKind.LIST: "list of candidates",
        WinKind.OTHER: "other mention",
    }
    legend = [(words[kind], colour, False) for kind, colour in colours.items()]
    return _wide("Wins by the kind of the winning question", body, len(files), legend)


_ROW = 38
_WIDE = 2 * WIDTH + GAP


def _stack(
    file: FileAnalysis, row: int, scale: Callable[[float], float], colours: Mapping[WinKind, str]
) -> str:
    parts: list[str] = []
    start = 0.0
    for kind, count in file.kinds.items():
        x, end = scale(start), scale(start + count)
        parts.append(
            f'<rect x="{x:.1f}" y="{row * _ROW + 7}" width="{max(end - x - 1, 0):.1f}" height="24" '
            f'fill="{colours[kind]}"/>'
        )
        if end - x > _LETTER * (len(str(count)) + 1):
            parts.append(
                f'<text class="in" x="{(x + end) / 2:.1f}" y="{row * _ROW + 23}" '
                f'text-anchor="middle">{count}</text>'
            )
        start += count
    return "".join(parts)


def _whisker(rate: Interval, scale: Callable[[float], float], y: int, colour: str) -> str:
    return (
        f'<line x1="{scale(rate.low):.1f}" x2="{scale(rate.high):.1f}" y1="{y}" y2="{y}" '
        f'stroke="{colour}" stroke-width="2" stroke-opacity=".55"/>'
        f'<circle cx="{scale(rate.value):.1f}" cy="{y}" r="4" fill="{colour}"/>'
        f'<text x="{scale(rate.high) + 7:.1f}" y="{y + 4}">{100 * rate.value:.1f} %</text>'
    )


def _row_axis(
    ticks: Sequence[float], scale: Callable[[float], float], rows: int, *, percent: bool
) -> str:
    base = rows * _ROW
    return "".join(
        f'<line class="grid" x1="{scale(t):.1f}" x2="{scale(t):.1f}" y1="0" y2="{base}"/>'
        f'<text x="{scale(t):.1f}" y="{base + 15}" text-anchor="middle">'
        f"{f'{100 * t:.3g} %' if percent else f'{t:.4g}'}</text>"
        for t in ticks
    )


def _row_labels(files: Sequence[FileAnalysis], left: float) -> str:
    return "".join(
        f'<text x="{left - 10:.0f}" y="{row * _ROW + 23}" text-anchor="end">'
        f"{escape(file.label)}</text>"
        for row, file in enumerate(files)
    )


def _label_width(files: Sequence[FileAnalysis]) -> float:
    return 20 + _LETTER * max(len(file.label) for file in files)


def _scale(left: float, top: float) -> Callable[[float], float]:
    """From ``0..top`` to pixels, with room for a number to the right."""
    width = max(_WIDE - left - 60, 200)
    return lambda value: left + width * value / top


# ----------------------------------------------------------------------------------------- document


def _document(title: str, panels: Sequence[tuple[str, str]], legend: Legend) -> str:
    """Panels in two columns, under a title and a legend."""
    keys, top = _legend(legend, _WIDE)
    parts = [keys]
    for index, (head, chart) in enumerate(panels):
        x = MARGIN + (index % 2) * (WIDTH + GAP)
        y = top + (index // 2) * (HEIGHT + LINE + GAP)
        parts.append(f'<text class="head" x="{x}" y="{y + 12}">{escape(head)}</text>')
        place = f'<svg x="{x}" y="{y + LINE}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(re.sub("^<svg ", place, chart))
    rows = (len(panels) + 1) // 2
    return _page(title, "".join(parts), top + rows * (HEIGHT + LINE + GAP))


def _wide(title: str, body: str, rows: int, legend: Legend) -> str:
    """One picture over the whole width."""
    keys, top = _legend(legend, _WIDE)
    moved = f'<g transform="translate({MARGIN},{top})">{body}</g>'
    return _page(title, keys + moved, top + rows * _ROW + 24)


def _legend(legend: Legend, width: float) -> tuple[str, int]:
    """The legend in as many lines as it needs, and where the space under it begins."""
    x, y = float(MARGIN), MARGIN + 2 * LINE
    parts: list[str] = []
    for name, colour, dashed in legend:
        size = 32 + _LETTER * len(name)
        if x > MARGIN and x + size > width:
            x, y = float(MARGIN), y + LINE
        dash = ' stroke-dasharray="5 3"' if dashed else ""
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
            f'stroke-width="3"{dash}/><text x="{x + 23:.0f}" y="{y}">{escape(name)}</text>'
        )
        x += size + 8
    return "".join(parts), y + GAP


def _page(title: str, body: str, height: int) -> str:
    width = _WIDE + 2 * MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="{escape(title, quote=True)}">'
        f'<style>{_STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text class="title" x="{MARGIN}" y="{MARGIN + 12}">{escape(title)}</text>{body}</svg>\n'
    )


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _dashed(index: int) -> bool:
    """Colours come again for more files than there are colours."""
    return index // len(COLOURS) % 2 == 1
