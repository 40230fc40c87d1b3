"""How well beliefs foretell the outcome: means by turn and outcome, Brier score, AUC.

A belief is a number for each conversation and exchange: a log-probability (turned into a
probability for the Brier score), a stated probability, or 0 and 1 for a right answer. Games without
a known outcome stand in no number. The places are ``start`` (before the first exchange),
``before_last`` (before the exchange that ended the game, the latest at which the outcome was still
open), ``end`` (after it), and after each exchange ``t``, over the games that had so many: those
that ended earlier are not there, so a curve is of other games at every place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from delta_belief_rl.belief.stated import NoProbability
from delta_belief_rl.eval.beliefs import BeliefRow, probability
from delta_belief_rl.types import BoolArray, FloatArray


@dataclass(frozen=True, slots=True)
class Place:
    """A belief at one place, split by outcome.

    Attributes:
        turn: Exchanges before it; None where games differ in it.
        mean_won, mean_lost: Mean of the belief, in its own unit; None without such games.
        brier: Mean squared distance of the probability from the outcome; None without games.
        auc: Chance that a won game has a higher belief than a lost one; None without both.
    """

    turn: int | None
    won: int
    lost: int
    mean_won: float | None
    mean_lost: float | None
    brier: float | None
    auc: float | None


def auc(scores: FloatArray, won: BoolArray) -> float | None:
    """Chance that a random won game scores above a random lost one, ties counting half.

    Both arrays are ``[N]``; None unless there are games of both kinds.

    Example:
        >>> auc(np.array([0.1, 0.5, 0.5, 0.9]), np.array([False, False, True, True]))
        0.875
    """
    wins, losses = scores[won], scores[~won]
    if not len(wins) or not len(losses):
        return None
    order = np.sort(losses)
    below, up_to = (np.searchsorted(order, wins, side) for side in ("left", "right"))
    return float((below + up_to).sum() / (2 * len(wins) * len(losses)))


def brier(probabilities: FloatArray, won: BoolArray) -> float | None:
    """Mean of ``(p - outcome)^2`` over games, both ``[N]``; None without a game."""
    return float(((probabilities - won) ** 2).mean()) if len(probabilities) else None


def values_of(row: BeliefRow, method: str) -> dict[int, float]:
    """The beliefs of a conversation by exchanges before them; missing ones are left out."""
    if method == "logprob":
        return dict(enumerate(row.log_probs))
    if method == "confidence":
        pairs = zip(row.asked, row.confidence, strict=False)
        return {turn: value for turn, value in pairs if not isinstance(value, NoProbability)}
    return {turn: float(right) for turn, right in zip(row.asked, row.right, strict=False)}


def calibrate(rows: Sequence[BeliefRow], method: str) -> dict[str, Any]:
    """All numbers of one measure: ``start``, ``before_last``, ``end`` and ``by_turn``.

    A turn is in ``by_turn`` when every game that had it was asked there; where statements are asked
    for only now and then, the last exchange of a game is in ``end`` alone.
    """
    known = [(row, values_of(row, method)) for row in rows if row.conversation.won is not None]
    turns = sorted({turn for row, _ in known for turn in _asked(row, method)})
    turns = [t for t in turns if all(t in _asked(r, method) for r, _ in known if _had(r, t))]
    latest = [
        (row, max((t for t in values if t < row.conversation.num_turns), default=None), values)
        for row, values in known
    ]
    before = [(row, values[turn]) for row, turn, values in latest if turn is not None]
    ended = [(row, v[row.conversation.num_turns]) for row, v in known if _is_whole(row, v)]
    places = {turn: [(row, v[turn]) for row, v in known if turn in v] for turn in turns}
    return {
        "start": _plain(_place(places.get(0, []), method, 0)),
        "before_last": _plain(_place(before, method, None)),
        "end": _plain(_place(ended, method, None)),
        "by_turn": [_plain(_place(games, method, turn)) for turn, games in places.items()],
    }


def _asked(row: BeliefRow, method: str) -> Sequence[int]:
    """Exchanges after which the row was measured."""
    return range(len(row.log_probs)) if method == "logprob" else row.asked


def _is_whole(row: BeliefRow, values: Mapping[int, float]) -> bool:
    """Whether the belief after the last exchange is known."""
    return row.conversation.num_turns in values


def _had(row: BeliefRow, turn: int) -> bool:
    return row.conversation.num_turns >= turn


def _place(games: Sequence[tuple[BeliefRow, float]], method: str, turn: int | None) -> Place:
    won = np.array([bool(row.conversation.won) for row, _ in games], dtype=np.bool_)
    values = np.array([value for _, value in games], dtype=np.float64)
    shares = np.array([probability(v) for v in values]) if method == "logprob" else values
    return Place(
        turn=turn,
        won=int(won.sum()),
        lost=int((~won).sum()),
        mean_won=float(values[won].mean()) if won.any() else None,
        mean_lost=float(values[~won].mean()) if (~won).any() else None,
        brier=brier(shares, won),
        auc=auc(values, won),
    )


def _plain(place: Place) -> dict[str, Any]:
    names = ("turn", "won", "lost", "mean_won", "mean_lost", "brier", "auc")
    return {name: getattr(place, name) for name in names}


def summarise_beliefs(rows: Sequence[BeliefRow], methods: Sequence[str]) -> dict[str, Any]:
    """Everything that is worth knowing about some rows, as plain values.

    For ``logprob`` the prior, the final belief, the net gain and the sum of the positive changes
    are there, too, as means in nats split by outcome (``won``, ``lost``, ``unknown``); for
    ``confidence`` the statements that were no probability, by reason.
    """
    out: dict[str, Any] = {
        "conversations": len(rows),
        "won": sum(row.conversation.won is True for row in rows),
        "lost": sum(row.conversation.won is False for row in rows),
    }
    for method in methods:
        out[method] = calibrate(rows, method)
    if "logprob" in methods:
        out["logprob"]["gain"] = _gains(rows)
    if "confidence" in methods:
        stated = [value for row in rows for value in row.confidence]
        out["confidence"]["asked"] = len(stated)
        out["confidence"]["missing"] = {
            reason.value: sum(value is reason for value in stated) for reason in NoProbability
        }
    return out


def _gains(rows: Sequence[BeliefRow]) -> Mapping[str, Mapping[str, float]]:
    groups = {"won": True, "lost": False, "unknown": None}
    out: dict[str, dict[str, float]] = {}
    for name, outcome in groups.items():
        curves = [
            np.array(row.log_probs)
            for row in rows
            if row.log_probs and row.conversation.won is outcome
        ]
        if curves:
            out[name] = {
                "games": float(len(curves)),
                "prior": float(np.mean([curve[0] for curve in curves])),
                "final": float(np.mean([curve[-1] for curve in curves])),
                "net_gain": float(np.mean([curve[-1] - curve[0] for curve in curves])),
                "positive_sum": float(
                    np.mean([np.maximum(np.diff(curve), 0.0).sum() for curve in curves])
                ),
            }
    return out
