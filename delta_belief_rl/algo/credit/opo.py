"""OPO: the group's returns, weighted by length, as the baseline that varies the gradient least.

For game ``i`` of a group with returns ``S_j`` (sum of all channels over a game's turns) and ``n_j``
trained tokens::

    A_i = S_i - sum_j(n_j * S_j) / sum_j(n_j)

With games of equal length this is GRPO without division. There is no deviation in the denominator.
Groups of one and groups without spread give 0 and are counted as dead.

Source: OPO (arXiv 2505.23585). Confidence: exact, the formula of its public code, but for groups of
one, which keep their raw return there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Advantage, Grain, Stateless, require_first
from delta_belief_rl.algo.credit.groups import (
    finish,
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.credit.whitening import trained_tokens
from delta_belief_rl.types import TurnTable


@dataclass(frozen=True, slots=True)
class OpoSettings:
    """OPO has no knobs."""


@dataclass(frozen=True, slots=True)
class Opo(Stateless):
    """See the module's head."""

    settings: OpoSettings = OpoSettings()
    requires: ClassVar[tuple[str, ...]] = ("group", "traj", "n_tokens", "valid", "rewards")
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """A game of its own is its own baseline."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "opo")
        used, live, group = used_channels(table), live_games(table), table.game_group()
        score = table.grid(total_reward(used, table)).sum(axis=1)
        length = table.grid(trained_tokens(table)).sum(axis=1)
        tokens = np.bincount(group, weights=length)
        baseline = np.bincount(group, weights=length * score) / np.maximum(tokens, 1)
        games = np.where(group_stats(score, live, group).flat, 0.0, score - baseline[group])
        return finish(table, games[table.traj], used)
