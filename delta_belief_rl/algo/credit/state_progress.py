"""State and progress: actions are compared where both the state and the progress are the same.

The same observation can mean different things early and late in a task. A cell holds the valid
turns of a group that have one state and one bucket ``floor(progress / progress_step)``. With ``G``
the return-to-go of ``gigpo``, ``Q(a)`` the mean of ``G`` over the turns of the cell whose action is
``a``, and ``S`` the return of a game over all channels::

    A = A_grpo + preference_w * pref

    pref = mean over the other actions b of the cell of
           +1, -1, 0 as Q(a) leads, trails, or lies within m of Q(b)     form="win_loss"
    pref = the same, each Q without the turns of the own game            form="loo"
    pref = G - mean of G over the cell                                   form="centered"

    m = margin * the largest |S| of the group

A cell with fewer than two actions has no preference; ``loo`` gives 0 as well where no other game
took the own action, or none took another one. ``centered`` asks for no second action: where
progress never changes it is the step term of ``gigpo`` that is not divided.

``A_grpo`` compares whole games; ``norm_adv_by_std_in_grpo`` divides it and not the preference. A
method that learns from progress needs one that moves: ``num_progress_buckets`` says how many
buckets a step had, ``frac_compared_turns`` how many turns had another action beside them.

Source: the idea of action preferences by state and progress. Confidence: reconstructed from a
short description; the form of the preference, margin, buckets and the sum with GRPO are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from delta_belief_rl.algo.credit.groups import (
    finish,
    group_stats,
    live_games,
    return_to_go,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.credit.grpo import whole_games
from delta_belief_rl.algo.credit.states import state_numbers
from delta_belief_rl.types import FloatArray, IntArray, TurnTable

FORMS = ("win_loss", "centered", "loo")
# Returns that are equal differ by rounding, relative to the largest of the group.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class StateProgressSettings:
    """Knobs of ``StateProgress``; ``gamma`` discounts per turn, ``epsilon`` is in reward units.

    ``progress_step`` is the width of a bucket in the environment's unit of progress: 0.25 makes
    quarters of a fraction and keeps whole stages apart. ``margin`` is a share of the group's
    largest return.
    """

    form: str = "win_loss"
    preference_w: float = 1.0
    gamma: float = 0.95
    margin: float = 0.05
    progress_step: float = 0.25
    norm_adv_by_std_in_grpo: bool = True
    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        name = "algorithm.state_progress"
        require_choice(f"{name}.form", self.form, FORMS)
        require_range(f"{name}.preference_w", self.preference_w, 0.0)
        require_range("algorithm.gamma", self.gamma, 0.0, 1.0)
        require_range(f"{name}.margin", self.margin, 0.0)
        require_range(f"{name}.progress_step", self.progress_step, 0.0, open_low=True)
        require_range("algorithm epsilon", self.epsilon, 0.0)


def progress_buckets(table: TurnTable, step: float) -> IntArray:
    """``floor(progress / step)`` of each row, ``[R]``; a value on a border is not below it.

    Raises:
        ValueError: The table has no progress.
    """
    if len(table.progress) != table.num_rows:
        raise ValueError("the turn table has no column progress")
    known = np.where(table.valid & np.isfinite(table.progress), table.progress, 0.0)
    return np.floor(known / step + ROUNDING).astype(np.int64)


def cell_numbers(table: TurnTable, step: float) -> IntArray:
    """A number for each row, equal where group, state and bucket of progress are. ``[R]``."""
    known: dict[tuple[int, int], int] = {}
    pairs = zip(state_numbers(table).tolist(), progress_buckets(table, step).tolist(), strict=True)
    return np.array([known.setdefault(pair, len(known)) for pair in pairs], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StateProgress(Stateless):
    """See the module's head."""

    settings: StateProgressSettings = StateProgressSettings()
    requires: ClassVar[tuple[str, ...]] = (
        *("group", "traj", "turn", "valid", "rewards"),
        *("state_key", "action_key", "progress"),
    )
    provides: ClassVar[tuple[str, ...]] = ("advantages",)
    grain: ClassVar[Grain] = Grain.GROUP

    @property
    def needs_group(self) -> bool:
        """Games are compared with their siblings."""
        return True

    def apply(self, table: TurnTable, previous: Advantage | None = None) -> Advantage:
        """Advantages ``[R]``.

        Raises:
            UserError: It is not the first of its chain.
            ValueError: The table lacks states, actions or progress.
        """
        require_first(previous, "state_progress")
        if len(table.action_key) != table.num_rows:
            raise ValueError("the turn table has no column action_key")
        knobs, used = self.settings, used_channels(table)
        cells = cell_numbers(table, knobs.progress_step)
        grid = table.grid(total_reward(used, table))
        returns = return_to_go(grid, knobs.gamma)[table.traj, table.turn]
        compared, preference = self._preferences(table, cells, returns, grid.sum(axis=1))
        if knobs.form == "centered":
            stats = group_stats(returns, table.valid, cells)
            preference = np.where(stats.flat, 0.0, returns - stats.mean)
        whole = whole_games(table, knobs.norm_adv_by_std_in_grpo, knobs.epsilon)
        advantage = finish(table, whole + knobs.preference_w * preference, used)
        buckets = progress_buckets(table, knobs.progress_step)[table.valid]
        stats = {
            "num_progress_buckets": float(len(np.unique(buckets))),
            "frac_compared_turns": float(compared / max(table.valid.sum(), 1)),
        }
        return replace(advantage, stats={**advantage.stats, **stats})

    def _preferences(
        self, table: TurnTable, cells: IntArray, returns: FloatArray, score: FloatArray
    ) -> tuple[int, FloatArray]:
        """Turns in cells of two or more actions, and wins minus losses of each row, ``[R]``."""
        margins = self._margins(table, returns, score)
        inside: dict[int, list[int]] = {}
        for row in np.flatnonzero(table.valid).tolist():
            inside.setdefault(int(cells[row]), []).append(row)
        compared, out = 0, np.zeros(table.num_rows)
        for rows in inside.values():
            if len({table.action_key[row] for row in rows}) < 2:
                continue
            compared += len(rows)
            everyone = _action_values(table, rows, returns)
            for row in rows:
                values = everyone
                if self.settings.form == "loo":
                    others = [other for other in rows if table.traj[other] != table.traj[row]]
                    values = _action_values(table, others, returns)
                out[row] = _wins(values, table.action_key[row], float(margins[row]))
        return compared, out

    def _margins(self, table: TurnTable, returns: FloatArray, score: FloatArray) -> FloatArray:
        """By how much one action must lead, ``[R]``; never less than what rounding makes."""
        groups = int(table.group.max()) + 1 if table.num_rows else 0
        largest, noise = np.zeros(groups), np.zeros(groups)
        live = live_games(table)
        np.maximum.at(largest, table.game_group()[live], np.abs(score[live]))
        np.maximum.at(noise, table.group[table.valid], np.abs(returns[table.valid]))
        return (self.settings.margin * largest + ROUNDING * noise)[table.group]


def _action_values(
    table: TurnTable, rows: Sequence[int], returns: FloatArray
) -> Mapping[str, float]:
    """Mean return-to-go of each action over some rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(table.action_key[row], []).append(float(returns[row]))
    return {action: sum(sorted(values)) / len(values) for action, values in found.items()}


def _wins(values: Mapping[str, float], action: str, margin: float) -> float:
    """Share of the other actions that this one beats, less the share that beats it."""
    if action not in values or len(values) < 2:
        return 0.0
    leads = [values[action] - value for other, value in values.items() if other != action]
    return (sum(lead > margin for lead in leads) - sum(lead < -margin for lead in leads)) / len(
        leads
    )
