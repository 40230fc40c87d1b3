"""Turn-wise GRPO: each turn index is standardised inside its group.

The game's outcome and length rewards (``eog``) are added to *every* turn it has::

    r_{i,k} = eog_i + (other channels of the turn)
    A_{i,k} = (r_{i,k} - mean_g(r_{.,k})) / (max(std_g(r_{.,k}), std_floor) + eps)      std unbiased

``parity="ours"``
    Games that are over by turn ``k`` do not enter column ``k``. Columns with fewer than two games,
    or without spread, give 0. ``std_floor`` (reward units) keeps belief noise from being blown up.
``parity="reference"``
    As published: finished games enter every later column as 0, ``std_floor`` is 0, and a group of
    one has mean 0 and deviation 1, so its advantage is the raw reward.

Both are biased estimates of the policy gradient of the summed reward (a turn is not credited with
what it brings about later, and each column has its own scale); ``grpo_turn_rtg`` is not.

Source: arXiv 2602.12342.
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
    PARITY_CHOICES,
    finish,
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.types import FloatArray, TurnTable


@dataclass(frozen=True, slots=True)
class GrpoTurnSettings:
    """Knobs of ``GrpoTurn``; ``std_floor`` and ``epsilon`` in reward units.

    ``episode_channels`` are those whose sum over the game is added to every turn.
    """

    norm_adv_by_std_in_grpo: bool = True
    std_floor: float = 0.01
    epsilon: float = 1e-6
    parity: str = "ours"
    episode_channels: tuple[str, ...] = ("outcome", "length", "normalised")

    def __post_init__(self) -> None:
        require_range("algorithm.std_floor", self.std_floor, 0.0)
        require_range("algorithm epsilon", self.epsilon, 0.0)
        require_choice("algorithm.parity", self.parity, PARITY_CHOICES)


@dataclass(frozen=True, slots=True)
class GrpoTurn(Stateless):
    """See the module's head."""

    settings: GrpoTurnSettings = GrpoTurnSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "turn", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A group of one teaches something only under the reference's own rule."""
        return self.settings.parity != "reference"

    def paid(self, table: TurnTable) -> FloatArray:
        """Rewards with the channels of the whole game on each of its turns."""
        return total_reward(used_channels(table, self.settings.episode_channels), table)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``; all groups and turns at once on the ``[N, K]`` grid.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "grpo_turn")
        published = self.settings.parity == "reference"
        used = used_channels(table, self.settings.episode_channels)
        reward = table.grid(total_reward(used, table))
        mask = table.grid(table.valid).astype(np.bool_)
        if published:
            mask = np.broadcast_to(live_games(table)[:, None], reward.shape)
        stats = group_stats(reward, mask, table.game_group())
        grid = reward - stats.mean
        if self.settings.norm_adv_by_std_in_grpo:
            floor = 0.0 if published else self.settings.std_floor
            grid = grid / (np.maximum(stats.std, floor) + self.settings.epsilon)
        grid = np.where(stats.flat, 0.0, grid)
        if published:
            scale = 1.0 + self.settings.epsilon if self.settings.norm_adv_by_std_in_grpo else 1.0
            grid = np.where(stats.count == 1, reward / scale, grid)
        return finish(table, grid[table.traj, table.turn], used)
