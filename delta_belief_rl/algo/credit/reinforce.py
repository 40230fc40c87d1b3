"""RLOO and REINFORCE: scores without a deviation in the denominator.

``Rloo``, for a game of a group of ``n`` with return ``S_i``, given to all of its turns::

    A_i = S_i - mean_{j != i} S_j  =  n/(n-1) * (S_i - mean_g)

``Reinforce``, for games that have no siblings; the batch stands in for the group::

    A_{i,k} = G_{i,k} - b_{i,k}       G the return-to-go
    b = 0 ("none"), or the mean of G_{.,k} over all other games of the batch ("batch"), zero after
    their end

Source: RLOO (arXiv 2402.14740).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import (
    Advantage,
    Grain,
    Stateless,
    require_choice,
    require_first,
    require_range,
)
from delta_belief_rl.algo.credit.groups import (
    finish,
    group_stats,
    live_games,
    return_to_go,
    total_reward,
    used_channels,
)
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class RlooSettings:
    """RLOO has no knobs."""


@dataclass(frozen=True, slots=True)
class Rloo(Stateless):
    """See the module's head. Groups of one give 0."""

    settings: RlooSettings = RlooSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A group of one teaches nothing."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "rloo")
        used = used_channels(table)
        live = live_games(table)
        score = table.grid(total_reward(used, table)).sum(axis=1)
        stats = group_stats(score, live, table.game_group())
        games = (score - stats.mean) * stats.count / np.maximum(stats.count - 1, 1)
        games = np.where(live & ~stats.flat, games, 0.0)
        return finish(table, games[table.traj], used)


@dataclass(frozen=True, slots=True)
class ReinforceSettings:
    """Knobs of ``Reinforce``."""

    gamma: float = 1.0
    baseline: str = "batch"

    def __post_init__(self) -> None:
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_choice("algorithm.baseline", self.baseline, ("none", "batch"))


@dataclass(frozen=True, slots=True)
class Reinforce(Stateless):
    """See the module's head."""

    settings: ReinforceSettings = ReinforceSettings()
    requires: ClassVar[tuple[str, ...]] = ("traj", "turn", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """The batch is the baseline."""
        return False

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "reinforce")
        used = used_channels(table)
        grid = return_to_go(table.grid(total_reward(used, table)), self.settings.gamma)
        if self.settings.baseline == "batch":
            mask = np.broadcast_to(live_games(table)[:, None], grid.shape)
            stats = group_stats(grid, mask, np.zeros(len(grid), dtype=np.int64))
            centred = (grid - stats.mean) * stats.count / np.maximum(stats.count - 1, 1)
            grid = np.where(stats.flat, 0.0, centred)
        return finish(table, grid[table.traj, table.turn], used)
