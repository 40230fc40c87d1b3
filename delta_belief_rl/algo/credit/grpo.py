"""GRPO on whole games (StarPO): one number for a game, given to all of its turns.

For game ``i`` of a group ``g`` with return ``S_i`` (sum of all channels over its turns)::

    A_i = (S_i - mean_g) / (std_g + eps)        std_g unbiased, eps = 1e-6
    A_i = S_i - mean_g                          with norm_adv_by_std_in_grpo=False (Dr.GRPO)

Groups of one and groups without spread give 0 and are counted as dead. Under ``parity="reference"``
a group of one has mean 0 and deviation 1, so its advantage is the raw score, as in the published
code.

Source: GRPO (arXiv 2402.03300), StarPO (2504.20073), Dr.GRPO (2503.20783).
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
class GrpoSettings:
    """Knobs of ``Grpo``; ``epsilon`` in reward units."""

    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6
    parity: str = "ours"

    def __post_init__(self) -> None:
        require_range("algorithm epsilon", self.epsilon, 0.0)
        require_choice("algorithm.parity", self.parity, PARITY_CHOICES)


@dataclass(frozen=True, slots=True)
class Grpo(Stateless):
    """See the module's head."""

    settings: GrpoSettings = GrpoSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A group of one teaches something only under the reference's own rule."""
        return self.settings.parity != "reference"

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "grpo")
        used = used_channels(table)
        live = live_games(table)
        score = table.grid(total_reward(used, table)).sum(axis=1)
        stats = group_stats(score, live, table.game_group())
        games = score - stats.mean
        if self.settings.norm_adv_by_std_in_grpo:
            games = games / (stats.std + self.settings.epsilon)
        games = np.where(live & ~stats.flat, games, 0.0)
        if self.settings.parity == "reference":
            scale = 1.0 + self.settings.epsilon if self.settings.norm_adv_by_std_in_grpo else 1.0
            games = np.where(live & (stats.count == 1), score / scale, games)
        return finish(table, games[table.traj], used)


def whole_games(table: TurnTable, divided: bool, epsilon: float) -> FloatArray:
    """``A_grpo``: the comparison of whole games that other methods add their own term to, ``[R]``.

    Args:
        table: Its rewards are compared.
        divided: By the deviation of the group; see ``GrpoSettings.norm_adv_by_std_in_grpo``.
        epsilon: In reward units.
    """
    return Grpo(GrpoSettings(divided, epsilon)).apply(table).turns
