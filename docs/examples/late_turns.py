"""Late turns: a game's lead over its siblings, of which the turns near the end get most.

For game ``i`` of a group of ``G`` with return ``S_i`` and ``n_i`` turns, turn ``k`` (from 0) gets::

    A_ik = (S_i - mean of the other G - 1 returns) * decay^(n_i - 1 - k)

With ``decay=1`` every turn gets the same, which is RLOO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    Stateless,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import (
    finish,
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.plugin import CreditPlugin
from delta_belief_rl.types import TurnTable

NAME = "late_turns"


@dataclass(frozen=True, slots=True)
class LateTurnsSettings:
    """What ``algorithm.kwargs`` may set."""

    decay: float = 0.9

    def __post_init__(self) -> None:
        require_range("algorithm.kwargs.decay", self.decay, 0.0, 1.0, open_low=True)


@dataclass(frozen=True, slots=True)
class LateTurns(Stateless):
    """See the file's head; ``Stateless`` says that nothing is kept between steps."""

    settings: LateTurnsSettings = LateTurnsSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "turn", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A lone game has no siblings to lead."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages, one a row of the table."""
        require_first(previous, NAME)
        used = used_channels(table)
        returns = table.grid(total_reward(used, table)).sum(axis=1)
        stats = group_stats(returns, live_games(table), table.game_group())
        lead = (returns - stats.mean) * stats.count / np.maximum(stats.count - 1, 1)
        lead = np.where(stats.flat, 0.0, lead)
        turns_of_game = np.bincount(table.traj, minlength=table.num_games)
        to_the_end = turns_of_game[table.traj] - 1 - table.turn
        return finish(table, lead[table.traj] * self.settings.decay**to_the_end, used)


METHODS = {
    NAME: CreditPlugin(
        LateTurns, LateTurnsSettings, summary="lead over the siblings, more of it for late turns"
    )
}
