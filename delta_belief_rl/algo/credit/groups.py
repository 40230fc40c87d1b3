"""Group statistics on the games-by-turns grid, shared by the credit methods.

One game is one unit of every statistic, however many turns it has. Shapes: ``N`` games, ``K``
turns, ``R`` rows; ``values`` and ``mask`` are ``[N]`` or ``[N, K]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.types import BoolArray, FloatArray, IntArray, TurnTable

PARITY_CHOICES = ("ours", "reference")


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of the own group, laid out like the values they came from.

    Attributes:
        std: Unbiased (``ddof=1``); 0 for fewer than two members.
        count: Members under the mask.
        flat: True where fewer than two members or no spread: nothing can be learnt from the
            comparison.
    """

    mean: FloatArray
    std: FloatArray
    count: FloatArray
    flat: BoolArray


def group_stats(values: FloatArray, mask: BoolArray, group: IntArray) -> GroupStats:
    """Statistics of ``values`` under ``mask``, by ``group`` (``[N]``) and column by column."""
    shape = (int(group.max()) + 1 if len(group) else 0, *values.shape[1:])

    def total(x: FloatArray) -> FloatArray:
        out = np.zeros(shape)
        np.add.at(out, group, np.where(mask, x, 0.0))
        return out

    count = total(np.ones_like(values))
    mean = total(values) / np.maximum(count, 1)
    deviation = values - mean[group]
    std = np.sqrt(total(deviation**2) / np.maximum(count - 1, 1))
    largest = np.zeros(shape)
    np.maximum.at(largest, group, np.where(mask, np.abs(values), 0.0))
    # Equal rewards differ by rounding in their mean; anything below it is no spread.
    flat = (count < 2) | (std <= 1e-12 * np.maximum(largest, 1e-300))
    return GroupStats(mean[group], std[group], count[group], flat[group])


def standardised(
    values: FloatArray,
    mask: BoolArray,
    group: IntArray,
    epsilon: float,
    *,
    divided: bool = True,
) -> FloatArray:
    """``(value - mean) / (std + epsilon)`` inside the own group; keeps the shape.

    0 outside the mask, and where fewer than two are compared or all are alike.

    Args:
        values: Laid out as ``group_stats`` takes them, like the next two.
        mask: What enters the statistics.
        group: Of each row of ``values``.
        epsilon: In units of ``values``.
        divided: False leaves ``value - mean``.
    """
    stats = group_stats(values, mask, group)
    out = values - stats.mean
    if divided:
        out = out / (stats.std + epsilon)
    return np.where(mask & ~stats.flat, out, 0.0)


def used_channels(table: TurnTable, everywhere: tuple[str, ...] = ()) -> dict[str, FloatArray]:
    """Reward channels as an estimator uses them, ``[R]`` each, zero on rows that are not valid.

    Args:
        table: Its ``rewards`` hold the channels.
        everywhere: Channels whose sum over the game is given to each of its turns.
    """
    used: dict[str, FloatArray] = {}
    for name, column in table.rewards.items():
        value = np.where(table.valid, column, 0.0)
        if name in everywhere and table.num_rows:
            per_game = np.bincount(table.traj, weights=value, minlength=table.num_games)
            value = np.where(table.valid, per_game[table.traj], 0.0)
        used[name] = value
    return used


def total_reward(used: Mapping[str, FloatArray], table: TurnTable) -> FloatArray:
    """Sum of the channels, ``[R]``."""
    return np.sum(list(used.values()), axis=0) if used else np.zeros(table.num_rows)


def live_games(table: TurnTable) -> BoolArray:
    """Games with at least one valid turn, ``[N]``; only these enter any statistic."""
    return np.asarray(table.grid(table.valid).any(axis=1), dtype=np.bool_)


def return_to_go(rewards: FloatArray, gamma: float) -> FloatArray:
    """``G_k = r_k + gamma * G_{k+1}`` along the last axis, zero after the end. Keeps the shape."""
    out = np.zeros_like(rewards)
    running = np.zeros(rewards.shape[:-1])
    for k in range(rewards.shape[-1] - 1, -1, -1):
        running = rewards[..., k] + gamma * running
        out[..., k] = running
    return out


def dead_share(table: TurnTable, taught: BoolArray) -> float:
    """Share of the groups with a valid turn in which no row (``taught``, ``[R]``) is taught."""
    live = np.unique(table.group[table.valid])
    return float((~np.isin(live, table.group[taught])).sum() / max(len(live), 1))


def finish(
    table: TurnTable,
    turns: FloatArray,
    used: Mapping[str, FloatArray],
) -> Advantage:
    """Zero the rows that are not valid and count what an experimenter must see.

    Args:
        turns: Advantages, ``[R]``.
        used: From ``used_channels``; their sums are reported as ``reward_sum/<channel>``.
    """
    turns = np.where(table.valid, turns, 0.0)
    stats = {f"reward_sum/{name}": float(value.sum()) for name, value in used.items()}
    rewards = total_reward(used, table)
    stats["reward_sum"] = float(rewards.sum())
    live, groups = live_games(table), table.game_group()
    present = np.unique(groups[live])
    sizes = np.bincount(groups[live], minlength=1)[present]
    total = max(len(present), 1)
    stats["frac_dead_groups"] = dead_share(table, turns != 0.0)
    stats["frac_singleton_groups"] = float((sizes < 2).sum() / total)
    stats["num_groups"] = float(len(present))
    stats["frac_invalid_turns"] = float(1 - table.valid.mean()) if table.num_rows else 0.0
    return Advantage(turns, table.valid.astype(np.float64), stats, rewards)
