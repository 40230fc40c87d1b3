"""GRPO for pass@k: only the best game of a group is rewarded, by its lead over the second best.

For a group ``g`` with returns ``S_i`` (sum of all channels over a game's turns)::

    A_i = (S_best - S_second) / (std_g + eps)     for the best game; std_g unbiased, eps = 1e-6
    A_i = S_best - S_second                       with norm_adv_by_std_in_grpo=False
    A_i = 0                                       for all other games

Nothing is pushed down, so that a policy keeps several ways to a win. Where two games share the best
return, all advantages of the group are 0, and so are those of a group of one; such groups are
counted as dead.

Source: pass@k training (arXiv 2503.19595). Confidence: exact, the formula of its public code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Advantage, Grain, Stateless, require_first, require_range
from delta_belief_rl.algo.credit.groups import (
    finish,
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable


@dataclass(frozen=True, slots=True)
class GrpoPasskSettings:
    """Knobs of ``GrpoPassk``; ``epsilon`` in reward units."""

    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class GrpoPassk(Stateless):
    """See the module's head."""

    settings: GrpoPasskSettings = GrpoPasskSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Without a second game there is no lead."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "grpo_passk")
        used, live, group = used_channels(table), live_games(table), table.game_group()
        score = table.grid(total_reward(used, table)).sum(axis=1)
        stats = group_stats(score, live, group)
        games = _leads(score, live, group)
        if self.settings.norm_adv_by_std_in_grpo:
            games = games / (stats.std + self.settings.epsilon)
        games = np.where(stats.flat, 0.0, games)
        return finish(table, games[table.traj], used)


def _leads(score: FloatArray, live: BoolArray, group: IntArray) -> FloatArray:
    """How far the best live game of each group is ahead of the second, at its place. ``[N]``."""
    out = np.zeros(len(score))
    for number in np.unique(group[live]):
        games = np.flatnonzero(live & (group == number))
        if len(games) < 2:
            continue
        *_, second, best = games[np.argsort(score[games])]
        lead = score[best] - score[second]
        # Equal sums differ by rounding.
        if lead > 1e-12 * np.abs(score[games]).max():
            out[best] = lead
    return out
