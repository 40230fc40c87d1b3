"""Metrics of an evaluation by data source and variable, by the reference's names.

For each source and each of ``reward``, ``invalid_count``, ``repeated_count`` and ``num_questions``,
and ``score`` where every game has a grade, with ``n`` games of each secret::

    val-aux/<source>/<variable>/{mean@n, std@n, best@j/mean, best@j/std, worst@j/mean, worst@j/std}

for ``j`` = 2, 4, 8, ... below ``n``, and ``n`` itself. Every number is a mean over secrets:
``std@n`` of the deviation (``ddof=0``) over a secret's games, ``best@j`` of the expected best of
``j`` of them (``eval.best_of``). ``mean@n`` and ``best@n`` of the reward are under ``val-core``
instead.

Games without an outcome are left out; a ``j`` for which a secret has too few games left is left
out, too. Sources whose secrets have different numbers of games get no name, because ``n`` would
lie.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from delta_belief_rl.algo.shapers.channels import WinRule, grade_of, is_void
from delta_belief_rl.eval.best_of import best_of, draw_sizes
from delta_belief_rl.types import FloatArray, Group, Trajectory, Verdict

REWARD, SCORE = "reward", "score"
COUNTS: Mapping[str, Callable[[Trajectory], float]] = {
    "invalid_count": lambda game: float(game.count(Verdict.INVALID)),
    "repeated_count": lambda game: float(game.count(Verdict.REPEATED)),
    "num_questions": lambda game: float(game.num_turns),
}
"""Variables that a game tells by itself; the reward comes from outside."""


def source_metrics(
    groups: Sequence[Group], rule: str = WinRule.COMPATIBLE, rewards: Sequence[float] | None = None
) -> dict[str, float]:
    """All names of the module's head.

    Args:
        groups: One group for each secret.
        rule: Decides which games have no outcome.
        rewards: Sum of each game's rewards, in the order of the games; None leaves it out.

    Raises:
        ValueError: Not one reward for each game.
    """
    total = sum(len(group.trajectories) for group in groups)
    if rewards is not None and len(rewards) != total:
        raise ValueError(f"{len(rewards)} rewards for {total} games")
    out: dict[str, float] = {}
    for source in sorted({group.task.source for group in groups}):
        chosen = [group.task.source == source for group in groups]
        own = [group for group, is_own in zip(groups, chosen, strict=True) if is_own]
        sizes = {len(group.trajectories) for group in own}
        if len(sizes) != 1 or sizes == {0}:
            continue
        known = ~np.array(
            [[is_void(game, WinRule(rule)) for game in group.trajectories] for group in own]
        )
        variables = {
            name: np.array([[value(game) for game in group.trajectories] for group in own])
            for name, value in COUNTS.items()
        }
        if any(game.score is not None for group in own for game in group.trajectories):
            variables[SCORE] = np.array(
                [[grade_of(game, WinRule(rule)) for game in group.trajectories] for group in own]
            )
        if rewards is not None:
            owner = np.repeat(chosen, [len(group.trajectories) for group in groups])
            variables[REWARD] = np.asarray(rewards, dtype=np.float64)[owner].reshape(known.shape)
        for name, values in variables.items():
            out |= _variable(source, name, np.where(known, values, np.nan))
    return out


def _variable(source: str, name: str, values: FloatArray) -> dict[str, float]:
    """Names of one variable; ``values`` is ``[S, n]`` with NaN where there is no outcome."""
    n = values.shape[1]
    kept = values[~np.isnan(values).all(axis=1)]
    if not len(kept):
        return {}
    found = {
        f"mean@{n}": float(np.nanmean(kept, axis=1).mean()),
        f"std@{n}": float(np.nanstd(kept, axis=1).mean()),
    }
    for j in draw_sizes(n):
        for word, worst in (("best", False), ("worst", True)):
            mean, deviation = best_of(values, j, worst=worst)
            if not np.isnan(mean):
                found |= {f"{word}@{j}/mean": mean, f"{word}@{j}/std": deviation}
    core = (f"mean@{n}", f"best@{n}/mean", f"best@{n}/std")
    return {
        f"{'val-core' if name == REWARD and part in core else 'val-aux'}/{source}/{name}/{part}": v
        for part, v in found.items()
    }
