"""The cells of an evaluation as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from delta_belief_rl.eval.cells import Cell, RuleFigures
from delta_belief_rl.eval.statistics import Interval

Rows = list[list[str]]


def eval_text(cells: Sequence[Cell]) -> str:
    """Every table, with the conditions of each cell under them."""
    if not cells:
        return "No cell of this evaluation is complete."
    parts = [
        _titled("Games won, in per cent, with 95 % intervals over secrets", main_rows(cells)),
        _titled("Won within so many turns, in per cent", budget_rows(cells)),
        _titled("pass@k, in per cent", pass_rows(cells)),
        _titled("Questions and cost", cost_rows(cells)),
    ]
    if any(cell.beliefs["all"] for cell in cells):
        parts.append(_titled("Belief in the secret, mean over games, in nats", belief_rows(cells)))
    if any(cell.reported for cell in cells):
        parts.append(_titled("What the environment says of the games", reported_rows(cells)))
    notes = [f"{cell.label}: {condition_text(cell)}" for cell in cells]
    return "\n\n".join([*parts, "\n".join(["Conditions", *(f"  {note}" for note in notes)])])


def main_rows(cells: Sequence[Cell]) -> Rows:
    """Both win rates, ``Mean@n`` and ``pass@n`` by the rule that ended the games, and turns."""
    rows = [["benchmark", "player", "rule", "compatible", "strict", "Mean@n", "pass@n", "turns"]]
    scored = any(cell.mean_score for cell in cells)
    rows[0] += ["score"] * scored + ["games", "failed"]
    for cell in cells:
        figures, n = cell.rule, cell.conditions.games
        rows.append(
            [
                cell.benchmark,
                cell.player.name,
                cell.conditions.win_rule,
                percent(cell.compatible.rate),
                percent(cell.strict.rate),
                f"{_share(figures.mean)} ± {_share(figures.std)} (n={n})",
                percent(figures.pass_at_k[n]) if n in figures.pass_at_k else "-",
                f"{cell.mean_turns.value:.1f}",
                *([_score(cell)] * scored),
                f"{cell.secrets} x {n}",
                str(cell.failed_games),
            ]
        )
    return rows


def budget_rows(cells: Sequence[Cell]) -> Rows:
    """Win rates at the budgets that some cell has, under both rules."""
    budgets = sorted({budget for cell in cells for budget in cell.compatible.budgets})
    rows = [["benchmark", "player", "rule", *(str(budget) for budget in budgets), "gain 20 to 50"]]
    for cell in cells:
        for name, figures in rules(cell):
            found = (figures.budgets.get(budget) for budget in budgets)
            gain = percent(figures.gain_20_50, sign=True) if figures.gain_20_50 else "-"
            shown = (percent(rate) if rate else "-" for rate in found)
            rows.append([cell.benchmark, cell.player.name, name, *shown, gain])
    return rows


def pass_rows(cells: Sequence[Cell]) -> Rows:
    """pass@k under both rules."""
    sizes = sorted({k for cell in cells for _, figures in rules(cell) for k in figures.pass_at_k})
    rows = [["benchmark", "player", "rule", *(f"k={k}" for k in sizes)]]
    for cell in cells:
        for name, figures in rules(cell):
            found = (figures.pass_at_k.get(k) for k in sizes)
            shown = (percent(value) if value else "-" for value in found)
            rows.append([cell.benchmark, cell.player.name, name, *shown])
    return rows


def cost_rows(cells: Sequence[Cell]) -> Rows:
    """Shares of the questions, and what the evaluation took."""
    heads = ("invalid %", "repeated %", "asked twice %", "lists %", "judge failed %", "full games")
    rows = [["benchmark", "player", *heads, "tokens", "judge tokens", "seconds"]]
    for cell in cells:
        shares = (cell.invalid, cell.repeated, cell.duplicates, cell.lists, cell.judge_failures)
        rows.append(
            [
                cell.benchmark,
                cell.player.name,
                *(_share(share) for share in shares),
                str(cell.full_games),
                str(cell.sampled_tokens),
                f"{cell.judge_tokens:.0f}",
                f"{cell.seconds:.0f}",
            ]
        )
    return rows


def belief_rows(cells: Sequence[Cell]) -> Rows:
    """Belief before and after a game."""
    rows = [["benchmark", "player", "games", "number", "first", "last", "gain", "sum of rises"]]
    for cell in cells:
        for name, found in cell.beliefs.items():
            if found is not None:
                values = (found.prior, found.final, found.net_gain, found.positive_sum)
                shown = (f"{value:.2f}" for value in values)
                rows.append([cell.benchmark, cell.player.name, name, str(found.games), *shown])
    return rows


def reported_rows(cells: Sequence[Cell]) -> Rows:
    """Numbers of environments of plug-ins, by name."""
    rows = [["benchmark", "player", "number", "value"]]
    for cell in cells:
        for name, value in cell.reported.items():
            rows.append([cell.benchmark, cell.player.name, name, f"{value:.4g}"])
    return rows


def rules(cell: Cell) -> tuple[tuple[str, RuleFigures], ...]:
    """The figures of both rules by name."""
    return (("compatible", cell.compatible), ("strict", cell.strict))


def condition_text(cell: Cell) -> str:
    """How a cell was played, in a line."""
    own, player = cell.conditions, cell.player
    sampling = f"temperature {own.temperature:g}, top-p {own.top_p:g}, top-k {own.top_k}"
    parts = [
        f"model {player.model}",
        *([f"adapter {player.adapter} (step {player.step})"] if player.adapter else []),
        f"judge {own.judge}",
        f"tasks {own.tasks}",
        f"{own.turns} turns",
        "greedy" if own.temperature == 0 else sampling,
        *([f"best of {own.best_of} questions by change of belief"] if own.best_of > 1 else []),
        f"seed {own.seed}",
    ]
    return ", ".join(parts)


def percent(value: Interval, *, sign: bool = False) -> str:
    """``24.8 [22.1, 27.6]``; a dash without data."""
    if math.isnan(value.value):
        return "-"
    plus = "+" if sign else ""
    middle, low, high = (f"{100 * x:{plus}.1f}" for x in (value.value, value.low, value.high))
    return f"{middle} [{low}, {high}]"


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.1f}"


def _score(cell: Cell) -> str:
    found = cell.mean_score
    return "-" if found is None else f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def _titled(title: str, rows: Rows) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])
