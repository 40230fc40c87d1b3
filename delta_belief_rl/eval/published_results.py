"""A cell's numbers beside the published ones, each with its conditions.

The published figures and what is known of how they were made stand in ``published_results.yaml``. A
difference is told only where every condition is known and the same on both sides; elsewhere the two
numbers stand beside each other, and what differs is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from delta_belief_rl.eval.cells import Cell
from delta_belief_rl.eval.statistics import Interval

FILE = Path(__file__).with_name("published_results.yaml")
MEASURES = {
    "mean": "won",
    "gain_20_50": "gain from 20 to 50 turns",
    "mean_score": "mean score",
}
"""Words for the measures whose name says too little."""
Value = str | int | float | None


@dataclass(frozen=True, slots=True)
class PublishedResult:
    """One published number.

    Attributes:
        measure: ``mean``, ``pass@k``, ``gain_20_50`` or ``mean_score``.
        model: Its published name.
        value: A share of 1, or a grade on ``scale``.
        std: Over the sample columns, where it was published.
        approximate: Read off a curve.
        conditions: By name; None where it was not published.
    """

    benchmark: str
    measure: str
    model: str
    value: float
    std: float | None
    approximate: bool
    scale: tuple[float, float]
    conditions: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition that is not known to be the same on both sides."""

    name: str
    ours: Value
    published: Value


@dataclass(frozen=True, slots=True)
class Comparison:
    """A number of a cell beside a published one.

    Attributes:
        ours: On the published scale; None where the cell has no such number.
        differs: Conditions that are known on both sides and differ.
        unknown: Conditions that were not published.
        difference: Ours minus the published one; None unless every condition is the same.
    """

    cell: str
    published: PublishedResult
    ours: Interval | None
    differs: tuple[Condition, ...]
    unknown: tuple[Condition, ...]
    difference: float | None


@lru_cache(maxsize=1)
def published_results() -> tuple[PublishedResult, ...]:
    """All published numbers, in the order of the file."""
    body: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    out: list[PublishedResult] = []
    for row in body["results"]:
        conditions = {
            "model": body["models"][row["model"]],
            **row.get("conditions", body["conditions"][row["benchmark"]]),
            "best_of": row.get("best_of", 1),
        }
        low, high = row.get("scale", (0, 1))
        out.append(
            PublishedResult(
                benchmark=row["benchmark"],
                measure=row["measure"],
                model=row["model"],
                value=float(row["value"]),
                std=row.get("std"),
                approximate=bool(row.get("approximate", False)),
                scale=(float(low), float(high)),
                conditions=conditions,
            )
        )
    return tuple(out)


def published_conditions(benchmark: str) -> Mapping[str, Value]:
    """How the numbers of a benchmark were made; empty where none was published."""
    body: dict[str, Any] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return body["conditions"].get(benchmark, {})


def compare(cells: Sequence[Cell]) -> list[Comparison]:
    """Every cell beside every published number of its benchmark that it has a counterpart of."""
    return [
        _compare(cell, result)
        for cell in cells
        for result in published_results()
        if result.benchmark == cell.benchmark
    ]


def _compare(cell: Cell, result: PublishedResult) -> Comparison:
    given = conditions_of(cell)
    pairs = [Condition(n, given.get(n), value) for n, value in result.conditions.items()]
    differs = tuple(p for p in pairs if p.published is not None and p.ours != p.published)
    unknown = tuple(p for p in pairs if p.published is None)
    ours = measured(cell, result)
    same = ours is not None and not differs and not unknown
    return Comparison(
        cell=cell.label,
        published=result,
        ours=ours,
        differs=differs,
        unknown=unknown,
        difference=ours.value - result.value if same and ours is not None else None,
    )


def conditions_of(cell: Cell) -> dict[str, Value]:
    """The conditions of a cell by their names in the file."""
    player, own = cell.player, cell.conditions
    return {
        "model": player.model if player.adapter is None else f"{player.model} + {player.adapter}",
        "tasks": own.tasks,
        "judge": own.judge,
        "secrets": cell.secrets,
        "games": own.games,
        "turns": own.turns,
        "temperature": own.temperature,
        "top_p": own.top_p,
        "top_k": own.top_k,
        "win_rule": own.win_rule,
        "best_of": own.best_of,
        "parser": own.parser,
        "candidate_lists": own.candidate_lists,
        "duplicates": own.duplicates,
    }


def measured(cell: Cell, result: PublishedResult) -> Interval | None:
    """The cell's counterpart of a published number; None where it has none.

    Wins follow the published rule.
    """
    figures, measure = cell.compatible, result.measure
    if measure == "mean":
        return figures.rate
    if measure == "gain_20_50":
        return figures.gain_20_50
    if measure == "mean_score":
        return None if cell.mean_score is None else _scaled(cell.mean_score, *result.scale)
    return figures.pass_at_k.get(int(measure.removeprefix("pass@")))


def _scaled(score: Interval, low: float, high: float) -> Interval:
    """A grade in [0, 1] on another scale."""
    width = high - low
    value, bottom, top = (low + width * x for x in (score.value, score.low, score.high))
    return Interval(value, bottom, top, width * score.se, score.units)


# ------------------------------------------------------------------------------------------- text


def comparison_text(comparisons: Sequence[Comparison]) -> str:
    """The comparisons as text, by cell."""
    if not comparisons:
        return "Nothing was published for these benchmarks."
    lines: list[str] = []
    for cell in dict.fromkeys(found.cell for found in comparisons):
        lines += ["", f"{cell}, beside the published numbers"]
        for found in comparisons:
            if found.cell == cell:
                measure, model, theirs, ours, verdict = comparison_row(found)
                lines.append(f"  {measure}: {model} {theirs}; here {ours}; {verdict}")
    return "\n".join(lines).lstrip("\n")


def comparison_row(found: Comparison) -> tuple[str, str, str, str, str]:
    """Measure, published model, its number, ours, and the difference or why there is none."""
    result = found.published
    percent = result.scale == (0.0, 1.0)
    measure = MEASURES.get(result.measure, result.measure)
    if result.conditions["best_of"] != 1:
        measure += f", best of {result.conditions['best_of']} by belief"
    theirs = f"{'about ' if result.approximate else ''}{_number(result.value, percent)}"
    if result.std is not None:
        theirs += f" (std {_number(result.std, percent)})"
    ours = "none" if found.ours is None else _interval(found.ours, percent)
    verdict = why_not(found)
    if found.difference is not None:
        points = f"{100 * found.difference:+.1f} points"
        verdict = f"difference {points if percent else format(found.difference, '+.2f')}"
    return measure, result.model, theirs, ours, verdict


def why_not(found: Comparison) -> str:
    """Why no difference is told."""
    parts: list[str] = []
    if found.ours is None:
        parts.append("this cell has no such number")
    if found.differs:
        told = ", ".join(f"{c.name} ({c.ours}, not {c.published})" for c in found.differs)
        parts.append(f"not comparable: other {told}")
    if found.unknown:
        parts.append(f"not published: {', '.join(c.name for c in found.unknown)}")
    return "; ".join(parts)


def _interval(value: Interval, percent: bool) -> str:
    low, high = _number(value.low, percent), _number(value.high, percent)
    return f"{_number(value.value, percent)} [{low}, {high}]"


def _number(value: float, percent: bool) -> str:
    return f"{100 * value:.1f} %" if percent else f"{value:.2f}"
