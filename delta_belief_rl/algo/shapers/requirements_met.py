"""Reward for an application by the requirements that it meets when it is run.

With weights ``w_q > 0`` and ``s_q`` in [0, 1] the result of check ``q``, before a task and after::

    sat     = sum_q w_q s_q / sum_q w_q
    regress = sum_q w_q [before_q = 1 and after_q < 1] / sum_q w_q

    R = 0                               where the build failed and ``gate`` is on
    R = sat(after)                      reproduce, generate
    R = sat(after) - regression * regress     modify, repair

``R`` is placed on the last turn of its task, where the reward channel ``task`` pays it
(``TaskShaper``, for any environment that tells such rewards). A game of several tasks has the mean
over all of them as its return, tasks that were not reached counting 0, and as its grade that mean
clamped to [0, 1]: a regression can make it negative.

A check that broke counts as ``s = 0`` and is for the caller to report.

Shapes: ``Q`` requirements, ``R`` rows of the turn table; leading axes of ``met`` are kept.

Source: executable-application reward for agents that write web applications. Confidence:
reconstructed from a short description; all but the idea of checks against a running application and
the four kinds of tasks is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from delta_belief_rl.algo.base import Grain, Shaper, Stateless, require_range
from delta_belief_rl.types import BoolArray, FloatArray, Group, Trajectory, TurnTable

CHANNEL = "task"


@dataclass(frozen=True, slots=True)
class RequirementsSettings:
    """Knobs of ``task_reward``; ``regression`` is the price of breaking everything."""

    regression: float = 0.5
    gate: bool = True

    def __post_init__(self) -> None:
        require_range("multi_turn.env_kwargs.regression", self.regression, 0.0, 10.0)


def satisfied_share(weights: FloatArray, met: FloatArray) -> FloatArray:
    """``sat``, ``[Q]`` and ``[..., Q] -> [...]``.

    Raises:
        ValueError: The arrays do not fit, or hold what they must not.
    """
    _check(weights, met)
    return (weights * met).sum(axis=-1) / weights.sum()


def regressed_share(weights: FloatArray, before: FloatArray, after: FloatArray) -> FloatArray:
    """``regress``, ``[Q]`` and twice ``[..., Q] -> [...]``.

    Raises:
        ValueError: The arrays do not fit, or hold what they must not.
    """
    _check(weights, before)
    _check(weights, after)
    lost = (before >= 1.0) & (after < 1.0)
    return (weights * lost).sum(axis=-1) / weights.sum()


def task_reward(
    weights: FloatArray,
    before: FloatArray,
    after: FloatArray,
    *,
    built: BoolArray,
    keeps: BoolArray,
    settings: RequirementsSettings | None = None,
) -> FloatArray:
    """``R`` of the module's head, ``[...]``.

    Args:
        weights: ``w``, ``[Q]``.
        before: ``s`` at the beginning of the task, ``[..., Q]``.
        after: ``s`` at its end, ``[..., Q]``.
        built: Whether the build succeeded, ``[...]``.
        keeps: Whether the task is one that must not break anything, ``[...]``.
        settings: The knobs.

    Raises:
        ValueError: The arrays do not fit, or hold what they must not.
    """
    knobs = settings or RequirementsSettings()
    reward = satisfied_share(weights, after)
    lost = regressed_share(weights, before, after)
    reward = reward - np.where(keeps, knobs.regression * lost, 0.0)
    return np.where(built, reward, 0.0) if knobs.gate else reward


def game_return(rewards: FloatArray, num_tasks: int) -> float:
    """Mean of the rewards of a game's tasks, those that were not reached counting 0.

    Raises:
        ValueError: There are more rewards than tasks, or no tasks.
    """
    if num_tasks < 1 or len(rewards) > num_tasks:
        raise ValueError(f"{len(rewards)} rewards for {num_tasks} tasks")
    return float(rewards.sum()) / num_tasks


def grade(rewards: FloatArray, num_tasks: int) -> float:
    """``game_return`` clamped to [0, 1]."""
    return min(max(game_return(rewards, num_tasks), 0.0), 1.0)


def requirements_channel(table: TurnTable, rewards: FloatArray) -> FloatArray:
    """Rewards of tasks as a channel, ``[R]``, zero on rows that are not valid or end no task.

    Args:
        table: Its column ``valid`` is read.
        rewards: ``[R]``, the reward of the task that the turn ends; NaN where it ends none.

    Raises:
        ValueError: There is not one number for each row.
    """
    if rewards.shape != (table.num_rows,):
        raise ValueError(f"{rewards.shape} rewards for {table.num_rows} turns")
    return np.where(table.valid & np.isfinite(rewards), rewards, 0.0)


@dataclass(frozen=True, slots=True)
class TaskShaper(Stateless):
    """Another shaper's channels, and the channel ``task`` beside them.

    Attributes:
        others: Makes the other channels.
        rewards_of: From a game to the reward of the task that each turn ends, ``[K]``; NaN where it
            ends none.
        weight: Of these rewards.
    """

    others: Shaper
    rewards_of: Callable[[Trajectory], FloatArray]
    weight: float = 1.0
    requires: ClassVar[tuple[str, ...]] = ("valid",)
    provides: ClassVar[tuple[str, ...]] = (f"reward:{CHANNEL}",)
    grain: ClassVar[Grain] = Grain.TRAJECTORY

    def __post_init__(self) -> None:
        require_range("multi_turn.reward.weight_tasks", self.weight, 0.0)

    def shape(
        self, table: TurnTable, groups: Sequence[Group], belief: FloatArray | None = None
    ) -> dict[str, FloatArray]:
        """All channels, each ``[R]``, zero on rows that are not valid."""
        channels = self.others.shape(table, groups, belief)
        games = [game for group in groups for game in group.trajectories]
        rewards = np.concatenate([np.zeros(0), *(self.rewards_of(game) for game in games)])
        return {**channels, CHANNEL: self.weight * requirements_channel(table, rewards)}


def _check(weights: FloatArray, met: FloatArray) -> None:
    if weights.ndim != 1 or met.shape[-1:] != weights.shape or not len(weights):
        raise ValueError(f"{met.shape} results of checks for {weights.shape} weights")
    if not (np.isfinite(weights) & (weights > 0.0)).all():
        raise ValueError("a weight is not above 0")
    if not ((met >= 0.0) & (met <= 1.0)).all():
        raise ValueError("a result of a check is not in [0, 1]")
