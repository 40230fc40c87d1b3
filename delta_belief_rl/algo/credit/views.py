"""What the methods share that read the played tokens behind another context.

A view is the log-prob of every sampled token with a hint in the game's opening
(``TurnTable.tokens["view:<name>"]``), NaN in games that have no such hint. Such a game says
nothing: ratios are 1 there and gaps 0.

Legend: ``R`` rows, ``S`` sampled tokens of all rows end to end, ``N`` games.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from delta_belief_rl.algo.base import VIEW, Advantage, Scorer
from delta_belief_rl.algo.credit.groups import dead_share
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable

LOGP_COLUMN = "logp"
"""Column of ``TurnTable.tokens`` that ``base.LOGP`` requires."""


@runtime_checkable
class AsksViews(Protocol):
    """A credit method that says itself who tells the hints of its views, and who reads them."""

    def scorers(self, rule: str) -> tuple[Scorer, ...]:
        """One for each view it requires; ``rule`` says what counts as a win."""
        ...


def token_column(table: TurnTable, name: str) -> FloatArray:
    """A column of ``TurnTable.tokens``, ``[S]``.

    Raises:
        ValueError: It is missing or of another length.
    """
    count = int(table.n_tokens.sum())
    if name not in table.tokens or table.tokens[name].shape != (count,):
        raise ValueError(f"the turn table has no column {name} of {count} tokens")
    return table.tokens[name]


def seen_games(table: TurnTable, *columns: str) -> BoolArray:
    """Games whose trained tokens all have a finite number in every column, ``[N]``."""
    used = np.repeat(table.valid, table.n_tokens)
    known = np.ones(len(used), dtype=np.bool_)
    for name in columns:
        known &= np.isfinite(token_column(table, name))
    games = np.repeat(table.traj, table.n_tokens)
    seen = np.zeros(table.num_games, dtype=np.bool_)
    seen[games[used]] = True
    seen[games[used & ~known]] = False
    return seen


def turn_means(table: TurnTable, values: FloatArray) -> FloatArray:
    """Mean over the tokens of each turn, ``[S] -> [R]``; NaN for a turn without tokens."""
    totals = np.bincount(table.token_row(), weights=values, minlength=table.num_rows)
    return np.where(table.n_tokens > 0, totals / np.maximum(table.n_tokens, 1), np.nan)


def game_ratios(
    table: TurnTable, scores: FloatArray, seen: BoolArray, low: float, high: float
) -> FloatArray:
    """``clip(exp(score) / mean over the game's valid turns of exp(score), low, high)``, ``[R]``.

    Args:
        table: Its rows.
        scores: ``[R]``, log-scale.
        seen: ``[N]``, games that have the view; all others get 1 everywhere.
        low: Lower bound.
        high: Upper bound.
    """
    used = table.valid & seen[table.traj] & np.isfinite(scores)
    top = np.full(table.num_games, -np.inf)
    np.maximum.at(top, table.traj[used], scores[used])
    # A factor that a whole game shares cancels; without it, nothing overflows.
    value = np.exp(np.where(used, scores - np.where(used, top[table.traj], 0.0), -np.inf))
    count = np.bincount(table.traj[used], minlength=table.num_games)
    mean = np.bincount(table.traj, weights=value, minlength=table.num_games) / np.maximum(count, 1)
    ratio = value / np.where(used, mean[table.traj], 1.0)
    return np.where(used, np.clip(ratio, low, high), 1.0)


def smoothed(table: TurnTable, values: FloatArray, alpha: float) -> FloatArray:
    """``alpha * Q_k + (1 - alpha) * Q_{k+1}`` over the valid turns of a game, ``[R]``.

    The last valid turn keeps its value, and so do rows that are not valid.
    """
    rows = np.flatnonzero(table.valid)
    out = values.copy()
    if len(rows) > 1:
        here, after = rows[:-1], rows[1:]
        mixed = alpha * values[here] + (1.0 - alpha) * values[after]
        out[here] = np.where(table.traj[here] == table.traj[after], mixed, values[here])
    return out


def protected(table: TurnTable, local: FloatArray) -> FloatArray:
    """Local credit without its negative part in games that were won, ``[R]``."""
    return np.where(table.won, np.maximum(local, 0.0), local)


def token_gap(table: TurnTable, view: str, seen: BoolArray) -> FloatArray:
    """``l_view - l`` of the trained tokens of games that have the view, 0 elsewhere, ``[S]``."""
    used = np.repeat(table.valid & seen[table.traj], table.n_tokens)
    with np.errstate(invalid="ignore"):
        gap = token_column(table, VIEW + view) - token_column(table, LOGP_COLUMN)
    return np.where(used, gap, 0.0)


def token_advantages(table: TurnTable, advantage: Advantage) -> FloatArray:
    """The advantage of every token as the method before left it, ``[S]``."""
    if advantage.tokens is not None:
        return advantage.tokens
    return np.repeat(advantage.turns, table.n_tokens)


def with_tokens(
    table: TurnTable, previous: Advantage, tokens: FloatArray, stats: Mapping[str, float]
) -> Advantage:
    """The advantage with other tokens, zero on rows that are not valid, and their means."""
    kept = np.where(np.repeat(table.valid, table.n_tokens), tokens, 0.0)
    means = turn_means(table, kept)
    turns = np.where(np.isfinite(means), means, previous.turns)
    taught = np.bincount(table.token_row(), weights=kept != 0.0, minlength=table.num_rows) > 0
    dead = {"frac_dead_groups": dead_share(table, taught)}
    return replace(previous, turns=turns, tokens=kept, stats={**previous.stats, **dead, **stats})


def view_share(table: TurnTable, seen: BoolArray) -> float:
    """Share of the games with a valid turn that have the view."""
    live = np.unique(table.traj[table.valid])
    return float(seen[live].mean()) if len(live) else 0.0


def ratio_stats(
    table: TurnTable, ratio: FloatArray, seen: BoolArray, low: float, high: float
) -> dict[str, float]:
    """How far ratios spread and how many the bounds hold, over the turns that have one."""
    values = ratio[table.valid & seen[table.traj]]
    return {
        "view_share": view_share(table, seen),
        "ratio_std": float(values.std()) if len(values) else 0.0,
        "ratio_at_low": float((values <= low).mean()) if len(values) else 0.0,
        "ratio_at_high": float((values >= high).mean()) if len(values) else 0.0,
    }
