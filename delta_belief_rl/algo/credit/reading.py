"""What the methods have in common that hold a view against the game as it was played.

``gap_behind`` is the beginning of every method that changes the tokens of another one by
``l_view - l``; the two checks are those of settings that several methods have under names of their
own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from delta_belief_rl.algo.base import (
    LOGP,
    VIEW,
    Advantage,
    require_choice,
    require_previous,
    require_range,
)
from delta_belief_rl.algo.credit.views import (
    LOGP_COLUMN,
    seen_games,
    token_advantages,
    token_gap,
    view_share,
)
from delta_belief_rl.algo.scorers.hints import READERS
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable


def gap_requires(view: str) -> tuple[str, ...]:
    """What a method must have that calls ``gap_behind``."""
    return ("traj", "valid", LOGP, VIEW + view)


@dataclass(frozen=True, slots=True)
class Gap:
    """How a view reads the played tokens of another method.

    Attributes:
        before: What the method before found.
        tokens: Its advantage of every token, ``[S]``.
        gap: ``l_view - l``, 0 where there is no view, ``[S]``.
        seen: Games that have the view, ``[N]``.
        share: Share of the games that have it.
    """

    before: Advantage
    tokens: FloatArray
    gap: FloatArray
    seen: BoolArray
    share: float


def gap_behind(table: TurnTable, previous: Advantage | None, name: str, view: str) -> Gap:
    """Hold a view against the game.

    Args:
        table: Its rows.
        previous: Of the method before.
        name: Of the method that asks, for messages.
        view: Which context.

    Raises:
        UserError: There is no method before.
        ValueError: The table has no such view.
    """
    before = require_previous(previous, name)
    seen = seen_games(table, VIEW + view, LOGP_COLUMN)
    return Gap(
        before,
        token_advantages(table, before),
        token_gap(table, view, seen),
        seen,
        view_share(table, seen),
    )


def require_teacher(method: str, teacher: str) -> None:
    """Check who reads the view of a method.

    Raises:
        UserError: Nobody of that name can.
    """
    require_choice(f"algorithm.{method}.teacher", teacher, READERS)


class RatioKnobs(Protocol):
    """Settings of a method that shares a return out by ratios of likelihoods."""

    @property
    def temperature(self) -> float:
        """Divides the score of a turn."""
        ...

    @property
    def clip_low(self) -> float:
        """Least ratio."""
        ...

    @property
    def clip_high(self) -> float:
        """Largest ratio."""
        ...

    @property
    def smoothing(self) -> float:
        """Weight of a turn's own credit; 1 leaves turns apart."""
        ...

    @property
    def gamma(self) -> float:
        """Discount per turn."""
        ...

    @property
    def epsilon(self) -> float:
        """Added to a standard deviation."""
        ...

    @property
    def teacher(self) -> str:
        """Who reads the view."""
        ...


def require_ratio_knobs(method: str, knobs: RatioKnobs) -> None:
    """Check the settings that ``hcapo`` and ``relace`` share.

    Raises:
        UserError: One is out of its range.
    """
    head = f"algorithm.{method}"
    require_range(f"{head}.temperature", knobs.temperature, 0.0, open_low=True)
    require_range(f"{head}.clip_low", knobs.clip_low, 0.0, 1.0)
    require_range(f"{head}.clip_high", knobs.clip_high, 1.0)
    require_range(f"{head}.smoothing", knobs.smoothing, 0.0, 1.0)
    require_range("algorithm.gamma", knobs.gamma, 0.0, 1.0)
    require_range("algorithm epsilon", knobs.epsilon, 0.0)
    require_teacher(method, knobs.teacher)
