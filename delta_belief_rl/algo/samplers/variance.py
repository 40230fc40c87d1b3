"""StarPO-S: only the groups whose games differ most are trained.

With ``sd_g`` the unbiased deviation of the games' returns in group ``g``, of ``P`` groups::

    rule="top_k"   the floor(keep * P) groups of largest sd, at least one
    rule="share"   groups by falling sd, until their part of the sum of sd^2 reaches keep

Returns are those before any normalisation of rewards. Games without an outcome enter no deviation;
a group without any game with an outcome is never kept, but counts in ``P``, so that the batch keeps
its size. Of equal deviations the earlier group goes first. Where nothing differs, ``share`` keeps
one group, as ``top_k`` always does.

Source: RAGEN (arXiv 2504.20073) and its public code. Confidence: the formula of that code, checked
on a worked example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from delta_belief_rl.algo.base import require_choice, require_range
from delta_belief_rl.algo.credit.groups import (
    group_stats,
    live_games,
    total_reward,
    used_channels,
)
from delta_belief_rl.algo.samplers.informative import METRICS
from delta_belief_rl.types import BoolArray, FloatArray, TurnTable

RULES = ("top_k", "share")
# A product or a sum that is a whole number on paper may lie this far below it.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class VarianceSettings:
    """Knobs of ``varied_groups``.

    ``keep`` is a share of the groups under ``top_k`` and of the summed variance under ``share``;
    ``metric`` is what is compared, see ``samplers.informative``.
    """

    rule: str = "top_k"
    keep: float = 0.25
    metric: str = "seq_reward"

    def __post_init__(self) -> None:
        require_choice("algorithm.filter_groups.rule", self.rule, RULES)
        require_range("algorithm.filter_groups.keep", self.keep, 0.0, 1.0, open_low=True)
        require_choice("algorithm.filter_groups.metric", self.metric, METRICS)


def group_deviations(table: TurnTable, num_groups: int, metric: str = "seq_reward") -> FloatArray:
    """``sd_g``, ``[groups]``; NaN for a group without a game that has an outcome."""
    out = np.full(num_groups, np.nan)
    if not table.num_rows:
        return out
    used = used_channels(table)
    if metric == "seq_final_reward":
        used = {name: value for name, value in used.items() if name == "outcome"}
    live, group = live_games(table), table.game_group()
    score = table.grid(total_reward(used, table)).sum(axis=1)
    stats = group_stats(score, live, group)
    out[group[live]] = np.where(stats.flat, 0.0, stats.std)[live]
    return out


def varied_groups(
    table: TurnTable, num_groups: int, settings: VarianceSettings | None = None
) -> BoolArray:
    """True for the groups to keep, ``[groups]``.

    Args:
        table: Turns with their reward channels.
        num_groups: ``P``; groups without a turn included.
        settings: What to keep.
    """
    knobs = settings or VarianceSettings()
    deviation = group_deviations(table, num_groups, knobs.metric)
    known = np.flatnonzero(np.isfinite(deviation))
    order = known[np.argsort(-deviation[known], kind="stable")]
    count = math.floor(knobs.keep * num_groups + ROUNDING)
    if knobs.rule == "share":
        reached = np.cumsum(deviation[order] ** 2)
        target = knobs.keep * float(reached[-1]) * (1.0 - ROUNDING) if len(reached) else 0.0
        count = int(np.searchsorted(reached, target)) + 1
    out = np.zeros(num_groups, dtype=np.bool_)
    out[order[: max(count, 1)]] = True
    return out
