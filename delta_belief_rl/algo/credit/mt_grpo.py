"""MT-GRPO: what a game brought in the end and what its turns brought, standardised apart.

With ``norm(x) = (x - mean) / (std + eps)`` inside a group (std unbiased, eps = 1e-4), ``o_i`` the
sum of a game's outcome and length rewards and ``r_{i,k}`` the other channels of its turn ``k``::

    A_{i,k} = norm(o_i) + turn_advantage_w * norm(r_{i,k})

``turn_credit="each"``
    ``norm(r_{i,k})`` compares turn ``k`` with the turns ``k`` of those siblings that have one;
    fewer than two, or no spread, give 0. This is the generalisation to many turns.
``turn_credit="boundary"``
    As published, for games whose one important turn is a call that brings a result: ``r_i``, the
    sum of all turns, goes to the turns up to and including the first that the environment answered;
    later turns have ``norm(o_i)`` alone. A game in which nothing was answered has
    ``norm(o_i + r_i)`` everywhere.

``TurnTable.answered`` says which actions were answered.

Source: MT-GRPO (arXiv 2505.11821). Confidence: ``boundary`` is exact, the formula of its public
code, but for groups without spread, which give 0 here; ``each`` extends it.
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
    live_games,
    standardised,
    total_reward,
    used_channels,
)
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable


@dataclass(frozen=True, slots=True)
class MtGrpoSettings:
    """Knobs of ``MtGrpo``; ``epsilon`` in reward units.

    ``episode_channels`` make up the outcome, all others are rewards of turns.
    """

    turn_advantage_w: float = 1.0
    turn_credit: str = "each"
    epsilon: float = 1e-4
    episode_channels: tuple[str, ...] = ("outcome", "length", "normalised")

    def __post_init__(self) -> None:
        require_range("algorithm.mt_grpo.turn_advantage_w", self.turn_advantage_w, 0.0)
        require_choice("algorithm.mt_grpo.turn_credit", self.turn_credit, ("each", "boundary"))
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class MtGrpo(Stateless):
    """See the module's head."""

    settings: MtGrpoSettings = MtGrpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "answered"),
        *("rewards", "reward:outcome"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Both terms compare siblings."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "mt_grpo")
        used = used_channels(table)
        late = {name: used[name] for name in self.settings.episode_channels if name in used}
        own = {name: value for name, value in used.items() if name not in late}
        outcome = table.grid(total_reward(late, table)).sum(axis=1)
        turns = table.grid(total_reward(own, table))
        make = self._each if self.settings.turn_credit == "each" else self._boundary
        return finish(table, make(table, outcome, turns)[table.traj, table.turn], used)

    def _each(self, table: TurnTable, outcome: FloatArray, turns: FloatArray) -> FloatArray:
        """Both terms on the ``[N, K]`` grid, each turn index on its own."""
        group, mask = table.game_group(), table.grid(table.valid).astype(np.bool_)
        game = self._norm(outcome, live_games(table), group)
        return game[:, None] + self.settings.turn_advantage_w * self._norm(turns, mask, group)

    def _boundary(self, table: TurnTable, outcome: FloatArray, turns: FloatArray) -> FloatArray:
        """Both terms up to the first answer, on the ``[N, K]`` grid."""
        group, live, reward = table.game_group(), live_games(table), turns.sum(axis=1)
        late = self._norm(outcome, live, group)
        early = late + self.settings.turn_advantage_w * self._norm(reward, live, group)
        answers = table.grid(table.valid & table.answered).astype(np.bool_)
        # Answers before a turn, the turn itself left out.
        before = np.cumsum(answers, axis=1) - answers
        grid = np.where(before == 0, early[:, None], late[:, None])
        silent = self._norm(outcome + reward, live, group)
        return np.where(answers.sum(axis=1, keepdims=True) > 0, grid, silent[:, None])

    def _norm(self, values: FloatArray, mask: BoolArray, group: IntArray) -> FloatArray:
        return standardised(values, mask, group, self.settings.epsilon)
