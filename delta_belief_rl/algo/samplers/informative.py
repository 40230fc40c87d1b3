"""Which groups teach something: the games of a secret must differ (dynamic sampling).

================== ===============================================================
metric             compared between the games of a group
================== ===============================================================
``seq_reward``     sum of all reward channels over the game's turns
``seq_final_reward`` the outcome alone
================== ===============================================================

A group is kept when its games with an outcome differ. A group of one game has nothing to differ
from and is kept if that game has an outcome.

Source: DAPO (arXiv 2503.14476).
"""

from __future__ import annotations

import numpy as np

from delta_belief_rl.algo.base import require_choice
from delta_belief_rl.algo.credit.groups import (
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.types import BoolArray, TurnTable

METRICS = ("seq_reward", "seq_final_reward")


def informative_groups(table: TurnTable, sizes: list[int], metric: str) -> BoolArray:
    """True for the groups to keep, ``[groups]``.

    Args:
        table: Turns with their reward channels.
        sizes: Games of each group, those without a turn included.
        metric: One of ``METRICS``.

    Raises:
        UserError: Unknown metric.
    """
    require_choice("algorithm.filter_groups.metric", metric, METRICS)
    out = np.zeros(len(sizes), dtype=np.bool_)
    if not table.num_rows:
        return out
    used = used_channels(table)
    if metric == "seq_final_reward":
        used = {name: value for name, value in used.items() if name == "outcome"}
    live, group = live_games(table), table.game_group()
    score = table.grid(total_reward(used, table)).sum(axis=1)
    varied = live & ~group_stats(score, live, group).flat
    single = live & (np.array(sizes, dtype=np.int64)[group] == 1)
    out[group[varied | single]] = True
    return out
