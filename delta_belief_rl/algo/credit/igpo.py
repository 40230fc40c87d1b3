"""IGPO: each turn is paid for the information it gained, the last one for the outcome.

The belief channel holds what a turn added to the log-prob of the answer. With the weights ``w_o``
and ``w_g`` of this update::

    r_k = w_g * belief_k + other channels      on every turn but the game's last
    r_k = w_o * outcome + other channels       on the last; its belief is left out
    n_k = (r_k - mean) / (std + eps)           std = sqrt(var + 1e-8), eps = 1e-6
    A_k = n_k + gamma * n_k+1 + gamma^2 * n_k+2 + ...

``norm="joint"`` takes one mean and deviation over all turns of the group, ``"separate"`` (default)
one over the gain turns and one over the last turns. Which turns are gain turns is read from the
table and never from the reward: a gain of exactly 0 is a gain. Fewer than two members, or no
spread, give 0. ``var`` divides by n as in the published code, by n - 1 with ``unbiased_std``.

With ``curriculum_steps`` above 0, ``w_o`` rises from 0.5 to 1 and ``w_g`` falls from 1 to 0.5, both
linearly over so many updates; without, both are 1.

Source: IGPO (arXiv 2510.14967). Confidence: exact, the formula of its public code, but for gain
turns, which that code finds by reward, and for groups of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from delta_belief_rl.algo.credit.groups import finish, group_stats, return_to_go, used_channels
from delta_belief_rl.types import FloatArray, TurnTable

NORMS = ("joint", "separate")
GAIN, OUTCOME = "belief", "outcome"
VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True)
class IgpoSettings:
    """Knobs of ``Igpo``; ``gamma`` discounts per turn, ``curriculum_steps`` 0 is no curriculum."""

    norm: str = "separate"
    gamma: float = 1.0
    unbiased_std: bool = False
    curriculum_steps: int = 0
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        require_choice("algorithm.igpo.norm", self.norm, NORMS)
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range("algorithm.igpo.curriculum_steps", self.curriculum_steps, 0)
        require_range("algorithm epsilon", self.epsilon, 0.0)


@dataclass(frozen=True, slots=True)
class Igpo(Stateless):
    """See the module's head."""

    settings: IgpoSettings = IgpoSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "terminal"),
        *("rewards", f"reward:{GAIN}", f"reward:{OUTCOME}"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Turns are compared inside a group."""
        return True

    def paid(self, table: TurnTable) -> FloatArray:
        """Rewards with the weights of the table's update and without the last turn's gain."""
        return np.sum([np.zeros(table.num_rows), *self._used(table).values()], axis=0)

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
        """
        require_first(previous, "igpo")
        used = self._used(table)
        reward = self.paid(table)
        part = table.terminal if self.settings.norm == "separate" else np.zeros_like(table.terminal)
        scaled = self._norm(reward, table, part.astype(np.int64))
        grid = return_to_go(table.grid(scaled), self.settings.gamma)
        found = finish(table, grid[table.traj, table.turn], used)
        final, gain = self._weights(table.update)
        stats = {"outcome_weight": final, "gain_weight": gain}
        return replace(found, stats={**found.stats, **stats})

    def _weights(self, update: int) -> tuple[float, float]:
        """Weights of outcome and gain in an update."""
        steps = self.settings.curriculum_steps
        if not steps:
            return 1.0, 1.0
        way = min(update / steps, 1.0)
        return 0.5 + 0.5 * way, 1.0 - 0.5 * way

    def _used(self, table: TurnTable) -> dict[str, FloatArray]:
        """The channels as they are paid, ``[R]`` each."""
        used = used_channels(table)
        final, gain = self._weights(table.update)
        if GAIN in used:
            used[GAIN] = np.where(table.terminal, 0.0, gain * used[GAIN])
        if OUTCOME in used:
            used[OUTCOME] = final * used[OUTCOME]
        return used

    def _norm(self, reward: FloatArray, table: TurnTable, part: np.ndarray) -> FloatArray:
        """Standardised rewards, ``[R]``, each part of a group for itself."""
        stats = group_stats(reward, table.valid, 2 * table.group + part)
        variance = stats.std**2
        if not self.settings.unbiased_std:
            variance = variance * (stats.count - 1) / np.maximum(stats.count, 1)
        scale = np.sqrt(np.maximum(variance, 0.0) + VARIANCE_FLOOR) + self.settings.epsilon
        return np.where(table.valid & ~stats.flat, (reward - stats.mean) / scale, 0.0)
