"""Turn-wise advantages from returns-to-go with a leave-one-out baseline.

With rewards left where they fall (the outcome on the last turn), ``n`` games in the group, and zero
reward after a game's end (an absorbing state)::

    G_{i,k} = r_{i,k} + gamma * G_{i,k+1}
    A_{i,k} = G_{i,k} - mean_{j != i} G_{j,k}  =  n/(n-1) * (G_{i,k} - mean_g(G_{.,k}))

The baseline of a turn depends on the siblings only, so it is independent of the turn's own action,
and with ``gamma=1`` the expectation of ``sum_k A_k * grad log pi_k`` is the policy gradient of the
summed reward. Subtracting it once from the whole return matters: rewards centred turn by turn and
then summed would charge a game for the turns that it lives, not for what it does.

``scale_by_std`` divides by one number per group, the deviation of whole-game returns (at least
``std_floor``), which keeps the relative weight of turns. Groups of one give 0.
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
    return_to_go,
    total_reward,
    used_channels,
)
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class GrpoTurnRtgSettings:
    """Knobs of ``GrpoTurnRtg``; ``std_floor`` and ``epsilon`` in reward units."""

    gamma: float = 1.0
    scale_by_std: bool = False
    std_floor: float = 0.01
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range("algorithm.std_floor", self.std_floor, 0.0)
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class GrpoTurnRtg(Stateless):
    """See the module's head."""

    settings: GrpoTurnRtgSettings = GrpoTurnRtgSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "turn", "valid", "rewards")
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
        require_first(previous, "grpo_turn_rtg")
        used = used_channels(table)
        group, live = table.game_group(), live_games(table)
        returns = return_to_go(table.grid(total_reward(used, table)), self.settings.gamma)
        mask = np.broadcast_to(live[:, None], returns.shape)
        stats = group_stats(returns, mask, group)
        grid = (returns - stats.mean) * stats.count / np.maximum(stats.count - 1, 1)
        if self.settings.scale_by_std and returns.shape[1]:
            spread = group_stats(returns[:, 0], live, group).std[:, None]
            grid = grid / (np.maximum(spread, self.settings.std_floor) + self.settings.epsilon)
        grid = np.where(stats.flat, 0.0, grid)
        return finish(table, grid[table.traj, table.turn], used)
