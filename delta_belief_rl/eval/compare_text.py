"""A comparison as Markdown, CSV and JSON, and as text for a terminal."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from delta_belief_rl.eval.compare import REAL, Comparison, Difference, MethodResult
from delta_belief_rl.eval.compare_statistics import Estimate
from delta_belief_rl.eval.eval_text import percent
from delta_belief_rl.eval.statistics import Interval

Rows = list[list[str]]


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison and what a reader has to know of it.

    Attributes:
        methods: All that were asked for, in order.
        seeds: Likewise.
        labels: How sure each method's formula is; see ``algo.catalogue``.
        failures: (method, seed) to why the run failed.
        facts: What was played, by name.
        differing: Method to the settings besides ``algorithm`` in which it differs from the
            baseline, one ``name: value instead of value`` each.
    """

    comparison: Comparison
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    labels: Mapping[str, str]
    failures: Mapping[tuple[str, int], str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    differing: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def missing(self) -> list[tuple[str, int]]:
        """Runs that neither ended nor failed."""
        done = {one.method: one.seed_rates for one in self.comparison.results}
        cells = [(method, seed) for method in self.methods for seed in self.seeds]
        return [
            (method, seed)
            for method, seed in cells
            if seed not in done.get(method, {}) and (method, seed) not in self.failures
        ]


# ------------------------------------------------------------------------------------------- tables


def method_rows(report: Report) -> Rows:
    """The table: a row for each method, those without a finished run included."""
    head = ["method", "form", "seeds", "strict win %", "learning curve %", "turns a game"]
    head += ["steps", "games", "tokens", "seconds", "host GiB", "GPU GiB"]
    found = {one.method: one for one in report.comparison.results}
    rows = [head]
    for method in report.methods:
        label, one = report.labels.get(method, ""), found.get(method)
        done = f"{len(one.seed_rates) if one else 0} of {len(report.seeds)}"
        failed = sum(1 for cell in report.failures if cell[0] == method)
        done += f", {failed} failed" if failed else ""
        cells = _numbers(one) if one else ["-"] * (len(head) - 3)
        rows.append([method, label, done, *cells])
    return rows


def _numbers(one: MethodResult) -> list[str]:
    sizes = (one.steps, one.games, one.tokens, one.seconds)
    return [
        _percent(one.rate.interval),
        _percent(one.area.interval),
        f"{one.turns:.1f}",
        *(f"{size:.0f}" for size in sizes),
        *("-" if math.isnan(peak) else f"{peak:.1f}" for peak in (one.host_gib, one.gpu_gib)),
    ]


def difference_rows(report: Report) -> Rows:
    """Each method less the baseline, in points of per cent."""
    rows = [["less the baseline", "seeds", "strict win", "p", "learning curve", "p", "real"]]
    for one in report.comparison.differences:
        rows.append(
            [
                one.method,
                str(one.rate.seeds),
                _percent(one.rate.interval, sign=True),
                _p(one.rate_p),
                _percent(one.area.interval, sign=True),
                _p(one.area_p),
                "yes" if one.is_real else "no",
            ]
        )
    return rows


def sentences(report: Report) -> list[str]:
    """What the differences say, one sentence a method, in words."""
    base = report.comparison.baseline
    return [_sentence(one, base) + _limits(report, one) for one in report.comparison.differences]


def _limits(report: Report, one: Difference) -> str:
    """What a difference does not speak of."""
    pair = {one.method, report.comparison.baseline}
    lost = sorted({seed for name, seed in (*report.failures, *report.missing) if name in pair})
    text = " It is of one seed; another may give another." if one.rate.seeds == 1 else ""
    if lost:
        text += f" Left out: seeds {', '.join(map(str, lost))}, where a run failed or did not end."
    return text


def _sentence(one: Difference, baseline: str) -> str:
    gap = one.rate.interval
    if math.isnan(one.rate_p):
        return f"{one.method} and {baseline} share too few secrets with an outcome to be compared."
    found = f"{_percent(gap, sign=True)} points, {_p(one.rate_p, 'p = ', 'p ')}"
    if one.is_real:
        side = "above" if gap.value > 0 else "below"
        return f"{one.method} is {side} {baseline}: {found}. This difference is real."
    return (
        f"{one.method} and {baseline} cannot be told apart: {found}. More seeds or secrets would "
        "be needed."
    )


def notes(report: Report) -> list[str]:
    """How to read the table, and what stands against the comparison."""
    budget, lines = report.comparison.budget, list[str]()
    lines.append(
        f"Budget of each run: {budget.steps} steps x {budget.secrets} secrets x {budget.games} "
        f"games x {budget.turns} turns = {budget.total} turns; a method that plays more games in a "
        "step makes fewer steps of it."
    )
    lines.append(
        "Intervals are 95 %, over seeds and secrets. Differences are paired over both; p-values "
        f"are two-sided and by Holm's rule over all methods; real means p below {REAL:g}."
    )
    lone = any(one.rate.seeds == 1 for one in report.comparison.differences)
    if lone or any(len(one.seed_rates) == 1 for one in report.comparison.results):
        lines.append(
            "With one seed an interval is over secrets alone: it says nothing of what another seed "
            "would give."
        )
    found = [one.rate for one in report.comparison.differences]
    if any(math.isnan(one.interval.low) for one in found):
        lines.append(
            "No interval stands where every seed and secret gave the same difference: there is no "
            "spread to judge by, so its p-value is that of a sign test over secrets."
        )
    failed = sum(one.failed_games for one in report.comparison.results)
    if failed:
        lines.append(f"{failed} validation games had no outcome and are left out.")
    for method, settings in report.differing.items():
        if settings:
            lines.append(
                f"{method} differs from {report.comparison.baseline} in more than credit: "
                f"{'; '.join(settings)}."
            )
    lines += [
        f"{method} with seed {seed} failed: {cause}"
        for (method, seed), cause in report.failures.items()
    ]
    if report.missing:
        names = ", ".join(f"{method} with seed {seed}" for method, seed in report.missing)
        lines.append(f"Not run to its end: {names}. The same command goes on with it.")
    return lines


# -------------------------------------------------------------------------------------------- forms


def to_text(report: Report) -> str:
    """For a terminal."""
    parts = [aligned("Methods at one budget", method_rows(report))]
    if report.comparison.differences:
        title = f"Differences from {report.comparison.baseline}, in points of per cent"
        parts.append(aligned(title, difference_rows(report)))
        parts.append("\n".join(sentences(report)))
    parts.append("\n".join(notes(report)))
    return "\n\n".join(parts)


def to_markdown(report: Report, plot: str) -> str:
    """A page with the table and the conditions.

    Args:
        report: What to show.
        plot: Name of the plot's file beside the page; empty where there is none.
    """
    parts = ["# Methods at one budget", _piped(method_rows(report))]
    if plot:
        parts.append(f"![{plot}]({plot})")
    if report.comparison.differences:
        parts.append(f"## Differences from {report.comparison.baseline}, in points of per cent")
        parts.append(_piped(difference_rows(report)))
        parts.append("\n".join(f"* {sentence}" for sentence in sentences(report)))
    parts.append("## How to read this")
    parts.append("\n".join(f"* {note}" for note in notes(report)))
    facts = [["what", "value"], *([name, value] for name, value in report.facts.items())]
    parts += ["## What was played", _piped(facts)]
    return "\n\n".join(parts) + "\n"


def to_csv(report: Report) -> str:
    """A line for each method; numbers in full, empty where there is none."""
    found = {one.method: one for one in report.comparison.results}
    apart = {one.method: one for one in report.comparison.differences}
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(
        [
            *("method", "form", "seeds_done", "seeds_failed"),
            *(f"{name}{part}" for name in ("rate", "area") for part in ("", "_low", "_high")),
            *("turns", "steps", "games", "tokens", "seconds", "host_gib", "gpu_gib"),
            *("rate_gap", "rate_gap_low", "rate_gap_high", "rate_gap_p"),
            *("area_gap", "area_gap_low", "area_gap_high", "area_gap_p", "real"),
        ]
    )
    for method in report.methods:
        one, gap = found.get(method), apart.get(method)
        failed = sum(1 for cell in report.failures if cell[0] == method)
        row: list[object] = [method, report.labels.get(method, "")]
        row += [len(one.seed_rates) if one else 0, failed]
        row += [*_ends(one and one.rate), *_ends(one and one.area)]
        sizes = ("turns", "steps", "games", "tokens", "seconds", "host_gib", "gpu_gib")
        row += [_plain(getattr(one, name)) if one else "" for name in sizes]
        row += [*_ends(gap and gap.rate), _plain(gap.rate_p) if gap else ""]
        row += [*_ends(gap and gap.area), _plain(gap.area_p) if gap else ""]
        row.append(int(gap.is_real) if gap else "")
        lines.writerow(row)
    return file.getvalue()


def to_json(report: Report) -> dict[str, Any]:
    """Everything, in plain values; a number that does not exist is null."""
    comparison = report.comparison
    return {
        "budget": {**asdict(comparison.budget), "total_turns": comparison.budget.total},
        "baseline": comparison.baseline,
        "seeds": list(report.seeds),
        "facts": dict(report.facts),
        "methods": [
            {**_json(asdict(one)), "form": report.labels.get(one.method, "")}
            for one in comparison.results
        ],
        "differences": [
            {**_json(asdict(one)), "real": one.is_real} for one in comparison.differences
        ],
        "sentences": sentences(report),
        "notes": notes(report),
        "differing": {method: list(items) for method, items in report.differing.items()},
        "failures": [
            {"method": method, "seed": seed, "cause": cause}
            for (method, seed), cause in report.failures.items()
        ],
        "missing": [{"method": method, "seed": seed} for method, seed in report.missing],
    }


def _ends(estimate: Estimate | None) -> list[object]:
    if estimate is None:
        return ["", "", ""]
    found = estimate.interval
    return [_plain(value) for value in (found.value, found.low, found.high)]


def _plain(value: float) -> object:
    return "" if math.isnan(value) else value


def _json(value: Any) -> Any:
    """NaN as null, keys as text."""
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _percent(value: Interval, *, sign: bool = False) -> str:
    """In per cent, with the interval where there is one."""
    if math.isnan(value.low) and not math.isnan(value.value):
        return f"{100 * value.value:{'+' if sign else ''}.1f} [none]"
    return percent(value, sign=sign)


def _p(value: float, equal: str = "", less: str = "") -> str:
    """A p-value, behind one of two words."""
    if math.isnan(value):
        return "-"
    return f"{less}below 0.001" if value < 0.001 else f"{equal}{value:.3f}"


def _piped(rows: Rows) -> str:
    """A Markdown table."""
    cells = [[text.replace("|", "\\|") for text in row] for row in rows]
    ruled = [cells[0], ["---"] * len(cells[0]), *cells[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in ruled)


def aligned(title: str, rows: Rows) -> str:
    """A table for a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])
