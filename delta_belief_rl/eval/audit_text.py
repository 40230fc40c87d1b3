"""Audits as plain tables and as JSON, and the bounds that they are held against.

Tables show rates in per cent with 95 % intervals over secrets. JSON has fractions of 1; a number
that does not exist is null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from delta_belief_rl.eval.agreement import Agreement
from delta_belief_rl.eval.analyze_text import plain
from delta_belief_rl.eval.judge_audit import FileAudit, GamesAudit
from delta_belief_rl.eval.judge_trial import JudgeReport
from delta_belief_rl.eval.recount import percent
from delta_belief_rl.eval.statistics import Interval
from delta_belief_rl.types import UserError

_WORST = 10
"""Properties that the table of a judge names, the worst first; JSON has all."""

Row = Sequence[str]


def too_low(rates: Iterable[tuple[str, float]], bound: float | None) -> list[str]:
    """One sentence for each rate below a bound; rates that do not exist are passed over.

    Raises:
        UserError: There is a bound but no rate.
    """
    if bound is None:
        return []
    known = [(name, rate) for name, rate in rates if not math.isnan(rate)]
    if not known:
        raise UserError(
            "--min-agreement has nothing to look at: no question was answered twice; give more "
            "games or rounds."
        )
    return [
        f"{name} is {rate:.4f}, below --min-agreement {bound:g}"
        for name, rate in known
        if rate < bound
    ]


def too_high(rates: Iterable[tuple[str, float]], bound: float | None) -> list[str]:
    """One sentence for each error rate above a bound.

    Raises:
        UserError: There is a bound but no rate.
    """
    if bound is None:
        return []
    known = list(rates)
    if not known:
        raise UserError(
            "--max-error-rate has nothing to look at: only a run's own files, which keep their "
            "turns, say where the judge failed."
        )
    return [
        f"{name} is {rate:.4f}, above --max-error-rate {bound:g}"
        for name, rate in known
        if rate > bound
    ]


# -------------------------------------------------------------------------------------------- games


def games_json(audit: GamesAudit, failed: Sequence[str]) -> dict[str, Any]:
    """An audit of stored games as plain values."""
    return {
        "files": [plain(asdict(file) | {"error_rate": file.error_rate}) for file in audit.files],
        "pairs": [plain(asdict(pair)) for pair in audit.pairs],
        "together": None if audit.together is None else plain(asdict(audit.together)),
        "failed": list(failed),
    }


def games_text(audit: GamesAudit) -> str:
    """An audit of stored games as tables."""
    turns = [
        (
            file.label,
            str(file.games),
            str(file.turns),
            "-" if file.errors is None else _count(file.errors, file.turns),
            _count(file.invalid, file.turns),
            _count(file.flagged, file.turns),
            str(file.repeats),
            _count(file.unflagged, file.repeats),
        )
        for file in audit.files
    ]
    head = ("file", "games", "turns", "errors", "invalid", "flagged repeated", "repeats", "missed")
    parts = [table("Replies", head, turns), _consistencies(audit)]
    if audit.pairs:
        rows = [(pair.first, pair.second, *_agreement(pair.agreement)) for pair in audit.pairs]
        head = ("file", "and file", "questions", "agree % [95 %]", "kappa [95 %]")
        parts.append(table("Agreement on the questions of both files", head, rows))
    return "\n\n".join(parts)


def _consistencies(audit: GamesAudit) -> str:
    rows = [_consistency_row(file) for file in audit.files]
    if audit.together is not None:
        found = audit.together
        rows.append(
            (
                "all files",
                str(found.pairs),
                _disagreeing(found.rate),
                "within files " + _disagreeing(found.within),
                "between files " + _disagreeing(found.between),
                _plain(found.kappa),
            )
        )
    head = ("file", "pairs", "contradict % [95 %]", "within games", "between games", "kappa [95 %]")
    return table("Pairs of yes/no answers to one question about one secret", head, rows)


def _consistency_row(file: FileAudit) -> Row:
    found = file.consistency
    rates = (_disagreeing(rate) for rate in (found.rate, found.within, found.between))
    return (file.label, str(found.pairs), *rates, _plain(found.kappa))


# -------------------------------------------------------------------------------------------- judge


def judge_json(
    reports: Mapping[str, JudgeReport], both: Agreement | None, failed: Sequence[str]
) -> dict[str, Any]:
    """An audit of one or two judges as plain values."""
    return {
        "judges": {name: plain(asdict(report)) for name, report in reports.items()},
        "agreement": None if both is None else plain(asdict(both)),
        "failed": list(failed),
    }


def judge_text(reports: Mapping[str, JudgeReport], both: Agreement | None) -> str:
    """An audit of one or two judges as tables."""
    columns = [_judge_column(report) for report in reports.values()]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    parts = [table("Judges", ("", *reports), rows)]
    if both is not None:
        questions, rate, kappa = _agreement(both)
        parts.append(f"They agree on {rate} % of {questions} questions, kappa {kappa}")
    parts += [_properties(name, report) for name, report in reports.items() if _wrong(report)]
    parts += [
        table(f"Errors of {name}", ("replies", "reason"), [*_reasons(report)])
        for name, report in reports.items()
        if report.errors
    ]
    return "\n\n".join(parts)


def _judge_column(report: JudgeReport) -> dict[str, str]:
    cost = report.cost_per_question
    return {
        "questions": str(report.questions),
        "replies": str(report.replies),
        "right % [95 %]": "-" if report.accuracy is None else percent(report.accuracy),
        "consistent % [95 %]": _rate(report.consistency.rate),
        "kappa with itself": _plain(report.consistency.kappa),
        "errors": _count(report.errors, report.replies),
        "invalid %": f"{100 * report.invalid:.1f}",
        "latency p50, p95, s": f"{report.latency_p50:.4f}, {report.latency_p95:.4f}",
        "tokens per question": f"{report.tokens_per_question:.1f}",
        "cost per question": "-" if cost is None else f"{cost:.6g}",
    }


def _wrong(report: JudgeReport) -> list[tuple[str, Interval]]:
    """Properties with a wrong reply, the worst first."""
    wrong = [(name, rate) for name, rate in report.properties.items() if rate.value < 1]
    return sorted(wrong, key=lambda item: (item[1].value, item[0]))


def _properties(name: str, report: JudgeReport) -> str:
    wrong = _wrong(report)
    rows = [(prop, str(rate.units), percent(rate)) for prop, rate in wrong[:_WORST]]
    title = f"Properties that {name} gets wrong ({len(wrong)} of {len(report.properties)})"
    return table(title, ("property", "secrets", "right % [95 %]"), rows)


def _reasons(report: JudgeReport) -> Iterator[Row]:
    for reason, count in sorted(report.reasons.items(), key=lambda item: -item[1]):
        yield str(count), reason or "(no reason given)"


# -------------------------------------------------------------------------------------------- cells


def table(title: str, head: Row, rows: Sequence[Row]) -> str:
    """A table of text; the first column is left-aligned, the others right-aligned."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    out = [title]
    for line in lines:
        first, *rest = (
            cell.rjust(width) if column else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        out.append("  " + "  ".join([first, *rest]).rstrip())
    return "\n".join(out)


def _count(part: int, whole: int) -> str:
    return f"{part} ({100 * part / whole:.1f} %)" if whole else str(part)


def _agreement(found: Agreement) -> tuple[str, str, str]:
    return str(found.questions), _rate(found.rate), _plain(found.kappa)


def _rate(rate: Interval) -> str:
    return "-" if math.isnan(rate.value) else percent(rate)


def _disagreeing(rate: Interval) -> str:
    if math.isnan(rate.value):
        return "-"
    turned = Interval(1 - rate.value, 1 - rate.high, 1 - rate.low, rate.se, rate.units)
    return percent(turned)


def _plain(value: Interval) -> str:
    if math.isnan(value.value):
        return "-"
    return f"{value.value:.3f} [{value.low:.3f}, {value.high:.3f}]"
