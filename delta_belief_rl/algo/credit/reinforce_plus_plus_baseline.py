"""REINFORCE++ with the group's mean as baseline.

For game ``i`` of a group ``g`` with return ``S_i`` (sum of all channels over its turns)::

    x_i = S_i - mean_g,    A = whiten(x)    over all sampled tokens of the batch

(``credit.whitening``): longer games weigh more in the mean and the deviation that are taken out.

``parity="ours"``
    Groups of one and groups without spread have no part in the whitening and give 0.
``parity="reference"``
    As published: a group of one has mean 0, so that ``x`` is its raw score, and a group without
    spread still gets what the whitening's mean leaves.

Source: REINFORCE++ (arXiv 2501.03262).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Advantage, Grain, Stateless, require_choice, require_first
from delta_belief_rl.algo.credit.groups import (
    PARITY_CHOICES,
    finish,
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.credit.whitening import trained_tokens, whiten
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaselineSettings:
    """Knobs of ``ReinforcePlusPlusBaseline``."""

    parity: str = "ours"

    def __post_init__(self) -> None:
        require_choice("algorithm.parity", self.parity, PARITY_CHOICES)


@dataclass(frozen=True, slots=True)
class ReinforcePlusPlusBaseline(Stateless):
    """See the module's head."""

    settings: ReinforcePlusPlusBaselineSettings = ReinforcePlusPlusBaselineSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "n_tokens", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.TOKEN

    @property
    def needs_group(self) -> bool:
        """A group of one teaches something only under the reference's own rule."""
        return self.settings.parity != "reference"

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "reinforce_plus_plus_baseline")
        used, live = used_channels(table), live_games(table)
        score = table.grid(total_reward(used, table)).sum(axis=1)
        stats = group_stats(score, live, table.game_group())
        published = self.settings.parity == "reference"
        # A group of one keeps its raw score where that is the rule, as if its mean were 0.
        mean = np.where(stats.count == 1, 0.0, stats.mean) if published else stats.mean
        centred = score - mean
        part = live if published else live & ~stats.flat
        tokens = np.where(part[table.traj], trained_tokens(table), 0)
        return finish(table, whiten(centred[table.traj], tokens), used)
