"""Returns of games on one scale before an estimator sees them.

With ``S`` the return of a game over all channels, and mean and unbiased deviation over the games of
its group (``over="group"``) or of the whole step (``over="batch"``)::

    method="identity"         S
    method="mean"             S - mean
    method="mean_std"         (S - mean) / (std + eps)                     eps = 1e-6
    method="mean_std_clamp"   the same, held within [clamp_low, clamp_high]

All channels become one, ``normalised``, which pays a game on its last valid turn: what a game is
paid for is what is put on a scale, so rewards of turns lose their places. ``identity`` changes
nothing. Fewer than two games, or games without spread, give 0 except under ``identity``.

Behind it ``grpo`` sees standardised returns either way; the methods differ for estimators that do
not divide, and where the clamp cuts. Filters of groups look at the returns before this step.

Shapes: ``R`` rows of the turn table.

Source: RAGEN (arXiv 2504.20073) and its public code. Confidence: the formulas are those of that
code; groups without spread are as everywhere in this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.groups import (
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.shapers.length import last_valid
from delta_belief_rl.types import FloatArray, TurnTable, UserError

CHANNEL = "normalised"
METHODS = ("identity", "mean", "mean_std", "mean_std_clamp")


@dataclass(frozen=True, slots=True)
class NormaliseSettings:
    """Knobs of ``normalised_rewards``; ``epsilon`` in reward units, the bounds in deviations."""

    method: str = "identity"
    over: str = "group"
    clamp_low: float = -1.0
    clamp_high: float = 3.0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        name = "algorithm.reward_normalisation"
        require_choice(f"{name}.method", self.method, METHODS)
        require_choice(f"{name}.over", self.over, ("group", "batch"))
        require_range(f"{name}.clamp_low", self.clamp_low)
        require_range(f"{name}.clamp_high", self.clamp_high)
        require_range("algorithm epsilon", self.epsilon, 0.0)
        if self.clamp_low > self.clamp_high:
            raise UserError(
                f"{name}.clamp_low is {self.clamp_low}, above {name}.clamp_high "
                f"{self.clamp_high}; the lower bound must not be above the upper one."
            )


def normalised_rewards(table: TurnTable, settings: NormaliseSettings) -> Mapping[str, FloatArray]:
    """The channels that an estimator is to see, ``[R]`` each, in place of ``table.rewards``."""
    if settings.method == "identity":
        return table.rewards
    score = table.grid(total_reward(used_channels(table), table)).sum(axis=1)
    live, group = live_games(table), table.game_group()
    stats = group_stats(score, live, np.zeros_like(group) if settings.over == "batch" else group)
    out = score - stats.mean
    if settings.method != "mean":
        out = out / (stats.std + settings.epsilon)
    if settings.method == "mean_std_clamp":
        out = np.clip(out, settings.clamp_low, settings.clamp_high)
    out = np.where(live & ~stats.flat, out, 0.0)
    return {CHANNEL: np.where(last_valid(table), out[table.traj], 0.0)}
