"""An analysis as plain tables and as JSON.

Tables show rates in per cent, differences in points and beliefs in nats. JSON has rates as
fractions of 1 and beliefs in nats; a number that does not exist is null.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from delta_belief_rl.eval.analyze import Comparison, FileAnalysis, Outcome, Subset
from delta_belief_rl.eval.game_statistics import BeliefStats, WinKind
from delta_belief_rl.eval.recount import percent

UNITS = {"rates, shares, mean, std, pass and intervals": "fraction of 1", "beliefs": "nats"}

Row = Sequence[str]


# --------------------------------------------------------------------------------------------- JSON


def to_json(file: FileAnalysis, *, per_secret: bool = False) -> dict[str, Any]:
    """One file as an object of plain values.

    ``strict_wins`` follows the strict rule; ``published_strict_wins``, ``list_wins`` and
    ``other_wins`` are the published classes of the winning question and add up to ``wins``.
    ``*_at_n`` is for ``n`` games of a secret, null where secrets differ in ``n``.
    """
    questions = asdict(file.questions)
    total = file.questions.questions
    value: dict[str, Any] = {
        "file": str(file.stored.path),
        "label": file.label,
        "units": UNITS,
        "forms": dict(Counter(game.form.value for game in file.games)),
        "steps": sorted({game.step for game in file.games if game.step is not None}),
        "games": len(file.games),
        "secrets": file.secrets,
        "n": file.n,
        "failed_games": file.failed_games,
        **_rule("", file.compatible, file.n),
        **_rule("strict_", file.strict, file.n),
        "published_strict_wins": file.kinds[WinKind.SINGLE],
        "published_strict_rate": file.kinds[WinKind.SINGLE] / len(file.games),
        "list_wins": file.kinds[WinKind.LIST],
        "other_wins": file.kinds[WinKind.OTHER],
        "questions": total,
        "list_question_share": questions["list_share"],
        "candidate_list_share": questions["candidate_list_share"],
        "words_per_question": questions["words"],
        "duplicates": questions["duplicates"],
        "duplicate_share": _share(questions["duplicates"], total),
        "normalised_duplicate_share": _share(questions["normalised_duplicates"], total),
        "unflagged_duplicates": questions["unflagged"],
        "unflagged_duplicate_share": _share(questions["unflagged"], questions["duplicates"]),
        "invalid_count": questions["invalid"],
        "repeated_count": questions["repeated"],
        "answer_pairs": questions["answer_pairs"],
        "contradictory_answer_share": questions["contradictions"],
        "cacheable_question_share": questions["cacheable_share"],
        "judge_failure_share": questions["judge_failures"],
        **_beliefs(file),
        "relations": {
            relation.name: {"checked": relation.checked, "satisfied": relation.satisfied}
            for relation in file.relations
        },
        "damaged": [{"line": d.number, "reason": d.reason} for d in file.stored.damaged],
        "notes": list(file.notes),
    }
    if file.subsets:
        value["training_secrets"] = {name: _subset(part) for name, part in file.subsets.items()}
    if file.same_priors is not None:
        value["against_first"] = _comparison(file.comparison)
        value["same_priors"] = dict(file.same_priors)
    if per_secret:
        value["per_secret"] = _per_secret(file)
    return plain(value)


def plain(value: Any) -> Any:
    """The same with null for numbers that are not finite, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _rule(prefix: str, outcome: Outcome, n: int | None) -> dict[str, Any]:
    return {
        f"{prefix}wins": outcome.wins,
        f"{prefix}rate" if prefix else "win_rate": outcome.rate.value,
        f"{prefix}cluster_se": outcome.rate.se,
        f"{prefix}ci_low": outcome.rate.low,
        f"{prefix}ci_high": outcome.rate.high,
        f"{prefix}rate_errors_as_losses" if prefix else "win_rate_errors_as_losses": (
            outcome.errors_as_losses
        ),
        f"{prefix}mean_at_n": outcome.mean,
        f"{prefix}std_at_n": outcome.std,
        f"{prefix}pass_at_n": None if n is None else outcome.pass_at_k.get(n),
        f"{prefix}pass_at_k": outcome.pass_at_k,
        f"{prefix}win_by_turn": outcome.by_turn,
    }


def _beliefs(file: FileAnalysis) -> dict[str, Any]:
    """The means over all games by name, then each part whole."""
    every = file.beliefs["all"]
    names = ("prior", "final", "net_gain", "positive_sum", "positive_over_net")
    flat = {name: None if every is None else getattr(every, name) for name in names}
    parts = {name: part and asdict(part) for name, part in file.beliefs.items()}
    deviation, largest = file.noise
    return {
        **flat,
        "mean_belief_by_turn": None if every is None else every.by_turn,
        "beliefs": parts,
        "prior_noise_std": deviation,
        "prior_noise_range": largest,
    }


def _subset(part: Subset) -> dict[str, Any]:
    return {
        "secrets": part.secrets,
        "games": part.games,
        "win_rate": part.compatible.value,
        "ci_low": part.compatible.low,
        "ci_high": part.compatible.high,
        "strict_rate": part.strict.value,
        "strict_ci_low": part.strict.low,
        "strict_ci_high": part.strict.high,
    }


def _comparison(found: Comparison | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "first": found.first,
        "secrets": found.secrets,
        "win_rate_difference": found.compatible.value,
        "ci_low": found.compatible.low,
        "ci_high": found.compatible.high,
        "strict_rate_difference": found.strict.value,
        "strict_ci_low": found.strict.low,
        "strict_ci_high": found.strict.high,
        "answer_agreement": found.agreement,
        "answer_pairs": found.answer_pairs,
    }


def _per_secret(file: FileAnalysis) -> list[dict[str, Any]]:
    games: dict[str, list[int]] = {}
    for game in file.games:
        games.setdefault(game.secret, []).append(game.num_turns)
    return [
        {
            "secret": secret,
            "games": len(turns),
            "wins": int(file.compatible.counts[secret][0]),
            "strict_wins": int(file.strict.counts[secret][0]),
            "mean_turns": sum(turns) / len(turns),
        }
        for secret, turns in games.items()
    ]


# ------------------------------------------------------------------------------------------- tables


def to_text(files: Sequence[FileAnalysis], *, per_secret: bool = False) -> str:
    """All tables of an analysis, files in rows."""
    parts = [
        _outcomes(files),
        _winning_questions(files),
        _questions(files),
        _belief_table(files),
        _training(files),
        _relations(files),
        _comparisons(files),
    ]
    if per_secret:
        parts += [_secrets(file) for file in files]
    notes = [f"{file.label}: {note}" for file in files for note in file.notes]
    notes += [
        f"{file.label}: {len(file.stored.damaged)} damaged lines were skipped"
        for file in files
        if file.stored.damaged
    ]
    if notes:
        parts.append("\n".join(["Notes", *(f"  {note}" for note in notes)]))
    return "\n\n".join(part for part in parts if part)


def _outcomes(files: Sequence[FileAnalysis]) -> str:
    rows: list[Row] = []
    for file in files:
        at = "" if file.n is None else f"@{file.n}"
        for name, rule in (("compatible", file.compatible), ("strict", file.strict)):
            found = None if file.n is None else rule.pass_at_k.get(file.n)
            rows.append(
                (
                    file.label if rule is file.compatible else "",
                    name,
                    f"{rule.wins}/{sum(count for _, count in rule.counts.values())}",
                    percent(rule.rate),
                    f"{100 * rule.rate.se:.2f}",
                    f"mean{at} {100 * rule.mean:.2f} ± {100 * rule.std:.2f}" if at else "-",
                    f"pass{at} {100 * found:.2f}" if found is not None else "-",
                    f"{100 * rule.errors_as_losses:.2f}",
                )
            )
    head = ("file", "rule", "wins", "won % [95 %]", "SE", "mean ± std %", "pass %", "errors lost %")
    return _table("Games won; intervals and standard errors over secrets", head, rows)


def _winning_questions(files: Sequence[FileAnalysis]) -> str:
    rows = [
        (
            file.label,
            str(file.compatible.wins),
            *(str(file.kinds[kind]) for kind in WinKind),
            f"{100 * file.kinds[WinKind.SINGLE] / len(file.games):.2f}",
            str(file.strict.wins),
        )
        for file in files
    ]
    head = ("file", "wins", "single guess", "list", "other mention", "single %", "strict rule")
    return _table("Winning questions by the published classes", head, rows)


def _questions(files: Sequence[FileAnalysis]) -> str:
    rows: list[Row] = []
    for file in files:
        found = file.questions
        judge = found.judge_failures
        rows.append(
            (
                file.label,
                str(found.questions),
                f"{found.words:.1f}",
                _percent(found.list_share),
                f"{found.duplicates} ({_percent(_share(found.duplicates, found.questions))})",
                str(found.normalised_duplicates),
                f"{found.unflagged} of {found.duplicates}",
                str(found.invalid),
                str(found.repeated),
                _percent(found.contradictions),
                "-" if judge is None else _percent(judge),
            )
        )
    head = ("file", "questions", "words", "list %", "duplicates (%)", "normalised", "not flagged")
    more = ("invalid", "repeated", "contradictory %", "judge failed %")
    return _table("Questions", (*head, *more), rows)


def _belief_table(files: Sequence[FileAnalysis]) -> str:
    rows: list[Row] = []
    for file in files:
        for name, part in file.beliefs.items():
            if part is not None:
                rows.append((file.label if name == "all" else "", name, *_belief_cells(part)))
    head = ("file", "outcome", "games", "prior", "final", "net gain", "sum of gains", "gains/net")
    more = ("change in turn 1", "turn 2", "turn 3")
    return _table("Belief in the secret, nats, mean over games", (*head, *more), rows)


def _belief_cells(part: BeliefStats) -> Row:
    means = (part.prior, part.final, part.net_gain, part.positive_sum, part.positive_over_net)
    changes = [f"{change:+.2f}" for change in part.change_by_turn[:3]]
    return (str(part.games), *map(_decimal, means), *changes, *["-"] * (3 - len(changes)))


def _training(files: Sequence[FileAnalysis]) -> str:
    rows = [
        (file.label, name, str(part.secrets), percent(part.compatible), percent(part.strict))
        for file in files
        for name, part in file.subsets.items()
        if part.games
    ]
    head = ("file", "part", "secrets", "won % [95 %]", "strict % [95 %]")
    return _table("Training secrets (overlap) and the others (clean)", head, rows)


def _relations(files: Sequence[FileAnalysis]) -> str:
    rows = [
        (file.label, *(f"{r.satisfied}/{r.checked}" if r.checked else "-" for r in file.relations))
        for file in files
    ]
    head = ("file", *(relation.name for relation in files[0].relations))
    return _table("Relations of the published files: rows that satisfy them", head, rows)


def _comparisons(files: Sequence[FileAnalysis]) -> str:
    rows = [
        (
            file.label,
            str(found.secrets),
            percent(found.compatible, sign=True),
            percent(found.strict, sign=True),
            _percent(found.agreement),
        )
        for file in files
        if (found := file.comparison) is not None
    ]
    head = ("file", "secrets", "won, points [95 %]", "strict, points [95 %]", "equal answers %")
    return _table(f"Minus {files[0].label}, paired over secrets", head, rows)


def _secrets(file: FileAnalysis) -> str:
    rows = [
        (
            row["secret"],
            f"{row['wins']}/{row['games']}",
            f"{row['strict_wins']}/{row['games']}",
            f"{row['mean_turns']:.1f}",
        )
        for row in _per_secret(file)
    ]
    return _table(f"Secrets of {file.label}", ("secret", "won", "strict", "mean turns"), rows)


def _table(title: str, head: Row, rows: Sequence[Row]) -> str:
    """Aligned columns, the first to the left; empty without rows."""
    if not rows:
        return ""
    cells = [head, *([" ".join(cell.split()) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index == 0 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f}"


def _decimal(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
