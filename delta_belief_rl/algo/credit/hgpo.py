"""HGPO: turns from the same state, weighted up the further back their histories agree.

With ``G`` the return-to-go of ``gigpo``, for ``m`` = 1 .. ``history`` + 1 a turn is compared with
those valid turns of its group whose last ``m`` states, its own included, are the same::

    a_m = (G - mean_m) / (std_m + eps)          std_m of the population (ddof=0), eps = 1e-6
    A   = sum_m w_m * a_m / sum_m w_m           w_m = (m + 1) ^ length_weight_alpha

Only those ``m`` count for which the turn has ``m`` states behind it and at least one other turn to
be compared with; with ``skip_zero`` those with ``a_m = 0`` are left out as well. A turn without any
has 0. ``base_group`` adds ``m = 0``, the comparison of whole games by their return, with weight 1.
With ``norm_adv_by_std_in_grpo=False`` nothing is divided by a deviation.

Source: HGPO (arXiv 2602.22817). Confidence: exact, the formula of its public code.
"""

from __future__ import annotations

from collections.abc import Iterator
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
from delta_belief_rl.algo.credit.states import history_numbers, with_state_stats
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable, UserError


@dataclass(frozen=True, slots=True)
class HgpoSettings:
    """Knobs of ``Hgpo``; ``gamma`` discounts per turn, ``epsilon`` is in reward units.

    ``history`` counts the states before the turn's own.
    """

    history: int = 2
    length_weight_alpha: float = 1.0
    base_group: bool = False
    skip_zero: bool = True
    gamma: float = 0.95
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        if self.history < 0:
            raise UserError(f"algorithm.hgpo.history must not be negative, not {self.history}.")
        require_range("algorithm.hgpo.length_weight_alpha", self.length_weight_alpha, 0.0)
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class Hgpo(Stateless):
    """See the module's head."""

    settings: HgpoSettings = HgpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid"),
        *("rewards", "state_key"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Turns are compared with those of siblings."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "hgpo")
        used = used_channels(table)
        grid = table.grid(total_reward(used, table))
        total, weights = np.zeros(table.num_rows), np.zeros(table.num_rows)
        for depth, (item, counts) in self._items(table, grid):
            if self.settings.skip_zero:
                # A turn at the mean differs from it by rounding.
                counts = counts & (np.abs(item) > 1e-9)
            weight = counts * (depth + 1.0) ** self.settings.length_weight_alpha
            total += weight * item
            weights += weight
        turns = np.divide(total, weights, out=np.zeros_like(total), where=weights > 0)
        return with_state_stats(finish(table, turns, used), table)

    def _items(
        self, table: TurnTable, grid: FloatArray
    ) -> Iterator[tuple[int, tuple[FloatArray, BoolArray]]]:
        """Depth ``m``, ``a_m``, and the rows that have it; the last two ``[R]``."""
        if self.settings.base_group:
            games, counts = self._norm(grid.sum(axis=1), live_games(table), table.game_group())
            yield 0, (games[table.traj], counts[table.traj])
        returns = return_to_go(grid, self.settings.gamma)[table.traj, table.turn]
        for depth in range(1, min(self.settings.history + 1, table.num_turns) + 1):
            numbers, deep = history_numbers(table, depth)
            yield depth, self._norm(returns, table.valid & deep, numbers)

    def _norm(
        self, values: FloatArray, mask: BoolArray, group: IntArray
    ) -> tuple[FloatArray, BoolArray]:
        """Standardised values, and where there are at least two to compare."""
        stats = group_stats(values, mask, group)
        out = values - stats.mean
        if self.settings.norm_adv_by_std_in_grpo:
            population = stats.std * np.sqrt((stats.count - 1).clip(0) / np.maximum(stats.count, 1))
            out = out / (population + self.settings.epsilon)
        return np.where(stats.flat, 0.0, out), mask & (stats.count >= 2)
