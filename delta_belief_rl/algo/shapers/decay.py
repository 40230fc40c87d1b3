"""A weight on a reward of turns that fades over training, until the outcome alone is paid.

A score of each turn (of a judge, or any other channel) helps while wins are rare, and later pays
for turns that are not needed. With ``p`` the scores, ``K`` how many turns of the game have one and
``u`` the number of updates done::

    channel_k = w(u) * p_k / K      aggregation="mean", so that a game is paid w * mean of p
    channel_k = w(u) * p_k          aggregation="sum", which pays for length as well

    w(u) = weight * max(0, 1 - u / horizon)                  schedule="linear"
    w(u) = weight * (1 + cos(pi * min(u / horizon, 1))) / 2  schedule="cosine"
    w(u) = weight * 2 ^ (-u / half_life), 0 below 1e-3       schedule="exp"

``horizon`` counts updates; 0 stands for half of those planned. From there on the channel is exactly
zero and so are its traces in any estimator; ``needed`` says when scores need not be made any more.
The weight is a function of ``u`` alone, which a resumed run reads from its checkpoint.

A turn without a score (NaN: its judge failed) is paid nothing and counts in no mean, and neither
does a turn that is not valid.

Shapes: ``R`` rows of the turn table.

Source: the idea of a decaying process reward. Confidence: reconstructed from a short description;
shape, horizon and aggregation are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Grain, Stateless, require_choice, require_range
from delta_belief_rl.types import FloatArray, TurnTable, UserError

CHANNEL = "process"
SCHEDULES = ("linear", "cosine", "exp")
AGGREGATIONS = ("mean", "sum")
LEAST_WEIGHT = 1e-3


@dataclass(frozen=True, slots=True)
class DecaySettings:
    """Knobs of ``Decay``; ``horizon`` and ``half_life`` in updates."""

    weight: float = 0.5
    schedule: str = "linear"
    aggregation: str = "mean"
    horizon: int = 0
    half_life: float = 50.0

    def __post_init__(self) -> None:
        require_range("algorithm.process_reward.weight", self.weight, 0.0)
        require_choice("algorithm.process_reward.schedule", self.schedule, SCHEDULES)
        require_choice("algorithm.process_reward.aggregation", self.aggregation, AGGREGATIONS)
        require_range("algorithm.process_reward.horizon", self.horizon, 0)
        require_range("algorithm.process_reward.half_life", self.half_life, 0.0, open_low=True)


class Decay(Stateless):
    """See the module's head."""

    requires: ClassVar[tuple[str, ...]] = ("traj", "valid")
    provides: ClassVar[tuple[str, ...]] = (f"reward:{CHANNEL}",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    def __init__(self, settings: DecaySettings, planned: int = 0) -> None:
        """Fix the horizon.

        Args:
            settings: The knobs.
            planned: Updates of the whole run; read only where ``horizon`` is 0.

        Raises:
            UserError: The horizon is to follow from the planned updates, and none are.
        """
        self.settings = settings
        self.horizon = float(settings.horizon or planned / 2)
        if settings.schedule != "exp" and self.horizon <= 0:
            raise UserError(
                "algorithm.process_reward.horizon is 0, which stands for half of the planned "
                "updates, but none are planned; set it to at least 1."
            )

    def weight(self, update: int) -> float:
        """``w(u)`` after so many updates."""
        start = self.settings.weight
        if self.settings.schedule == "exp":
            value = start * 2.0 ** (-update / self.settings.half_life)
            return value if value >= LEAST_WEIGHT else 0.0
        if update >= self.horizon:
            return 0.0
        share = update / self.horizon
        if self.settings.schedule == "cosine":
            return start * 0.5 * (1.0 + math.cos(math.pi * share))
        return start * (1.0 - share)

    def needed(self, update: int) -> bool:
        """Whether anything is paid, so that scores have to be made."""
        return self.weight(update) > 0.0

    def channel(self, table: TurnTable, scores: FloatArray, update: int) -> FloatArray:
        """The reward channel of a step, ``[R]``.

        Args:
            table: Its columns ``traj`` and ``valid`` are read.
            scores: ``p``, ``[R]``; NaN where there is none.
            update: ``u``.

        Raises:
            ValueError: ``scores`` does not have one entry for each row.
        """
        if scores.shape != (table.num_rows,):
            raise ValueError(f"scores {scores.shape} for {table.num_rows} turns")
        scored, weight = table.valid & np.isfinite(scores), self.weight(update)
        if weight == 0.0:
            return np.zeros(table.num_rows)
        paid = weight * np.where(scored, scores, 0.0)
        if self.settings.aggregation == "sum" or not table.num_rows:
            return paid
        count = np.bincount(table.traj, weights=scored, minlength=table.num_games)
        return paid / np.maximum(count, 1.0)[table.traj]

    def faded(self, table: TurnTable, channel: str, update: int) -> Mapping[str, FloatArray]:
        """All channels of a table, one of them as the scores that fade, under its own name.

        Raises:
            UserError: The table has no such channel.
        """
        if channel not in table.rewards:
            known = ", ".join(table.rewards) or "none"
            raise UserError(
                f"algorithm.process_reward fades the reward channel {channel!r}, which this run "
                f"does not have; it has {known}."
            )
        return {**table.rewards, channel: self.channel(table, table.rewards[channel], update)}
