"""``eval.json`` and ``eval.html``: all cells of an evaluation as one document and on one page."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from delta_belief_rl.eval.cells import Cell
from delta_belief_rl.eval.charts import COLOURS, Series, line_chart
from delta_belief_rl.eval.eval_text import (
    belief_rows,
    budget_rows,
    condition_text,
    cost_rows,
    main_rows,
    pass_rows,
    reported_rows,
)
from delta_belief_rl.eval.game_statistics import BeliefStats
from delta_belief_rl.eval.published_results import Comparison, comparison_row
from delta_belief_rl.obs.disk import writing
from delta_belief_rl.trainer.checkpoint import write_atomic

JSON, HTML = "eval.json", "eval.html"


def document(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> dict[str, Any]:
    """Everything as plain values; numbers that JSON cannot hold are None."""
    body = {"cells": [asdict(cell) for cell in cells]}
    if comparisons:
        body["published"] = [asdict(found) for found in comparisons]
    return _plain(body)


def write_page(out: Path, cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> None:
    """Write both files, each whole or not at all.

    Raises:
        DiskRefused: The disk refuses.
    """
    body = json.dumps(document(cells, comparisons), indent=1, ensure_ascii=False, allow_nan=False)
    with writing("The figures", out, "--out"):
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(out / JSON, body.encode() + b"\n")
        write_atomic(out / HTML, to_html(cells, comparisons).encode())


def to_html(cells: Sequence[Cell], comparisons: Sequence[Comparison]) -> str:
    """The page as text; nothing in it is loaded from elsewhere."""
    environment = Environment(
        loader=PackageLoader("delta_belief_rl.obs", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    tables = [
        ("Games won", main_rows(cells)),
        ("Won within so many turns", budget_rows(cells)),
        ("pass@k", pass_rows(cells)),
        ("Questions and cost", cost_rows(cells)),
    ]
    if any(cell.beliefs["all"] for cell in cells):
        tables.append(("Belief in the secret, in nats", belief_rows(cells)))
    if any(cell.reported for cell in cells):
        tables.append(("What the environment says of the games", reported_rows(cells)))
    benchmarks = dict.fromkeys(cell.benchmark for cell in cells)
    sections = [(name, charts([c for c in cells if c.benchmark == name])) for name in benchmarks]
    return environment.get_template("eval.html.j2").render(
        tables=tables,
        sections=sections,
        comparisons=[(found.cell, *comparison_row(found)) for found in comparisons],
        conditions=[(cell.label, condition_text(cell)) for cell in cells],
    )


def charts(cells: Sequence[Cell]) -> list[Mapping[str, Any]]:
    """The curves of the cells of one benchmark; a chart without data is left out."""
    found = [
        _rules_chart(
            "Games won within so many turns",
            "Every budget of one evaluation; the strict rule is dashed.",
            "turn",
            cells,
            lambda cell, strict: list(
                enumerate(cell.strict.by_turn if strict else cell.compatible.by_turn)
            ),
        ),
        _rules_chart(
            "pass@k",
            "Chance that one of k games of a secret is won; the strict rule is dashed.",
            "k",
            cells,
            lambda cell, strict: list(
                (cell.strict.pass_curve if strict else cell.compatible.pass_curve).items()
            ),
        ),
        _belief_chart(cells),
    ]
    return [chart for chart in found if chart["svg"]]


def _rules_chart(
    title: str,
    note: str,
    x_label: str,
    cells: Sequence[Cell],
    curve: Callable[[Cell, bool], list[tuple[int, float]]],
) -> dict[str, Any]:
    series = [
        Series(
            f"{cell.player.name}, {'strict' if strict else 'compatible'}",
            [(float(x), y) for x, y in curve(cell, strict)],
            _colour(index),
            dashed=strict,
        )
        for index, cell in enumerate(cells)
        for strict in (False, True)
    ]
    svg = line_chart(series, x_label=x_label, percent=True, y_range=(0.0, _top(series)))
    return {"title": title, "note": note, "svg": svg, "legend": _legend(series)}


def _belief_chart(cells: Sequence[Cell]) -> dict[str, Any]:
    series = [
        Series(f"{cell.player.name}, {name} games", _beliefs(stats), _colour(index), dashed=dashed)
        for index, cell in enumerate(cells)
        for name, dashed in (("won", False), ("lost", True))
        if (stats := cell.beliefs[name]) is not None
    ]
    return {
        "title": "Belief in the secret",
        "note": "Log-probability in nats, mean over the games that are still going on.",
        "svg": line_chart(series, x_label="turn"),
        "legend": _legend(series),
    }


def _beliefs(stats: BeliefStats) -> list[tuple[float, float]]:
    return [(float(turn), value) for turn, value in enumerate(stats.by_turn)]


def _top(series: Sequence[Series]) -> float:
    return max((y for one in series for _, y in one.points), default=0.0) or 1.0


def _legend(series: Sequence[Series]) -> list[tuple[str, str, bool]]:
    return [(one.name, one.colour, one.dashed) for one in series if one.points]


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _plain(value: Any) -> Any:
    """Ready for JSON: text keys, lists, None for what is no number."""
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
