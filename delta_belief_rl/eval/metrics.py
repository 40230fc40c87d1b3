"""Metrics of an evaluation, by the reference's names, with intervals over secrets.

Two win rules are always reported: ``val-core/strict_success_rate`` (one candidate, guessed
directly) and ``val-core/compatible_success_rate`` (the secret appears as a word in a valid
question). ``val-core/success_rate`` and ``pass@k/k`` follow the rule asked for, which by default is
the compatible one, as published; ``strict_pass@k/k`` is there as well.

A game whose judge or engine failed has no outcome. The main numbers leave such games out; the same
numbers with the suffix ``/errors_as_losses`` count them as lost, so that failures cannot flatter.
``n`` in a name is the number of games of a secret in the data; it is never taken from a setting.
``docs/metrics.md`` lists every name with its meaning.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from delta_belief_rl.algo.shapers.channels import WinRule, grade_of, is_void, iter_games
from delta_belief_rl.envs.answers import normalise
from delta_belief_rl.eval.source_metrics import source_metrics
from delta_belief_rl.eval.statistics import (
    Interval,
    cluster_bootstrap,
    mean_at_n,
    paired_difference,
    pass_at_k,
    std_at_n,
)
from delta_belief_rl.eval.step_metrics import (
    belief_metrics,
    count_duplicates,
    judge_classes,
    judge_extras,
    rollout_metrics,
)
from delta_belief_rl.types import FloatArray, Group, Trajectory, Verdict

__all__ = [
    "Interval",
    "cluster_bootstrap",
    "grades",
    "is_known",
    "mean_at_n",
    "paired_difference",
    "pass_at_k",
    "rollout_metrics",
    "secret_counts",
    "std_at_n",
    "success_rate",
    "summarise",
    "win_by_turn",
    "win_matrix",
    "win_turn",
]


def win_matrix(
    groups: Sequence[Group], rule: str = WinRule.COMPATIBLE, *, errors_as_losses: bool = False
) -> FloatArray:
    """1 won, 0 lost, NaN without outcome or without a game. ``[S, n]``, ``n`` the largest group."""
    chosen = WinRule(rule)
    width = max((len(group.trajectories) for group in groups), default=0)
    out = np.full((len(groups), width), np.nan)
    for row, group in zip(out, groups, strict=True):
        for column, game in enumerate(group.trajectories):
            if errors_as_losses or not is_void(game, chosen):
                row[column] = float(chosen.won(game))
    return out


def secret_counts(
    groups: Sequence[Group], rule: str = WinRule.COMPATIBLE, *, errors_as_losses: bool = False
) -> dict[str, tuple[float, int]]:
    """Task id to (wins, games with an outcome); groups of the same task are added up."""
    out: dict[str, tuple[float, int]] = {}
    wins = win_matrix(groups, rule, errors_as_losses=errors_as_losses)
    for group, row in zip(groups, wins, strict=True):
        old = out.get(group.task.id, (0.0, 0))
        seen = row[~np.isnan(row)]
        out[group.task.id] = (old[0] + float(seen.sum()), old[1] + len(seen))
    return out


def success_rate(
    groups: Sequence[Group],
    rule: str = WinRule.COMPATIBLE,
    *,
    errors_as_losses: bool = False,
    draws: int = 2000,
    seed: int = 0,
) -> Interval:
    """Share of games won, with an interval over secrets."""
    counts = secret_counts(groups, rule, errors_as_losses=errors_as_losses).values()
    wins, games = [c[0] for c in counts], [float(c[1]) for c in counts]
    return cluster_bootstrap(wins, games, draws=draws, seed=seed)


def win_by_turn(
    groups: Sequence[Group], rule: str = WinRule.COMPATIBLE, max_turns: int | None = None
) -> FloatArray:
    """Share of the games known until ``t`` that are won within ``t`` turns, ``t = 0 .. K``.

    ``[K + 1]``; never falls, because a game that was won is known for every ``t``.

    Args:
        groups: The games.
        rule: ``strict`` or ``compatible``.
        max_turns: ``K``; the longest game by default. Later wins are not shown.
    """
    chosen = WinRule(rule)
    games = [game for _, game in iter_games(groups)]
    ended = [game.num_turns for game in games if not is_void(game, chosen)]
    last = max(ended, default=0) if max_turns is None else max_turns
    won_at, known = np.zeros(last + 1), np.full(last + 1, float(len(ended)))
    for game in games:
        first = win_turn(game, chosen)
        if first <= last:
            won_at[int(first)] += 1
        if is_void(game, chosen):
            known += [is_known(game, chosen, until) for until in range(last + 1)]
    return np.cumsum(won_at) / np.maximum(known, 1)


def is_known(game: Trajectory, rule: WinRule, until: int) -> bool:
    """Whether it is known if the game is won within so many turns.

    It is where the game has an outcome, and where the judge or the engine failed only later.
    """
    if not is_void(game, rule):
        return True
    asked = game.turns[:until]
    return len(asked) == until and (not asked or asked[-1].verdict is not Verdict.ERROR)


def win_turn(game: Trajectory, rule: WinRule) -> float:
    """Number of the first winning turn from 1; infinite without one."""
    wins = (number for number, turn in enumerate(game.turns, 1) if rule.turn_won(turn))
    return next(wins, float("inf"))


def grades(groups: Sequence[Group], rule: WinRule) -> list[list[float]]:
    """The grades of the games with an outcome, by group; empty lists where nothing is graded.

    Where the environment grades, a game that ended without a grade counts as 1 where it was won and
    as 0 else, because its context was full, as it does in training.
    """
    if all(game.score is None for _, game in iter_games(groups)):
        return [[] for _ in groups]
    return [
        [grade_of(game, rule) for game in group.trajectories if not is_void(game, rule)]
        for group in groups
    ]


def pass_at_k_curve(wins: FloatArray) -> dict[int, float]:
    """Mean over secrets of pass@k for each ``k`` that some secret has games for.

    ``wins`` is ``[S, n]`` with NaN where there is no outcome. A ``k`` is left out as soon as one
    secret has fewer outcomes, because the mean would then run over an easier or harder set of
    secrets.
    """
    seen = (~np.isnan(wins)).sum(axis=1)
    won = np.nansum(wins, axis=1)
    if not len(seen):
        return {}
    return {
        k: float(np.mean([pass_at_k(int(n), int(c), k) for n, c in zip(seen, won, strict=True)]))
        for k in range(1, int(seen.min()) + 1)
    }


def _rates(
    groups: Sequence[Group], name: str, rule: str, draws: int, seed: int
) -> dict[str, float]:
    """A success rate with interval, mean@n and std@n, and its value with errors as losses."""
    rate = success_rate(groups, rule, draws=draws, seed=seed)
    strict_count = success_rate(groups, rule, errors_as_losses=True, draws=draws, seed=seed)
    out = {
        name: rate.value,
        f"{name}/ci_low": rate.low,
        f"{name}/ci_high": rate.high,
        f"{name}/se": rate.se,
        f"{name}/errors_as_losses": strict_count.value,
    }
    sizes = {len(group.trajectories) for group in groups}
    if len(sizes) == 1:
        n, wins = sizes.pop(), win_matrix(groups, rule)
        out[f"{name}/mean@{n}"] = mean_at_n(wins)
        out[f"{name}/std@{n}"] = std_at_n(wins)
    return out


def _part(groups: Sequence[Group], part: str, rule: str, draws: int, seed: int) -> dict[str, float]:
    """Size, rates and pass@k of some of the secrets, under names that end in ``/part``."""
    size = len({group.task.id for group in groups})
    out = {f"val-core/secrets/{part}": float(size)}
    if not size:
        return out
    for name, one in (("success_rate", rule), ("strict_success_rate", WinRule.STRICT)):
        rate = success_rate(groups, one, draws=draws, seed=seed)
        out[f"val-core/{name}/{part}"] = rate.value
        out[f"val-core/{name}/ci_low/{part}"] = rate.low
        out[f"val-core/{name}/ci_high/{part}"] = rate.high
    for prefix, one in (("pass@k", rule), ("strict_pass@k", WinRule.STRICT)):
        curve = pass_at_k_curve(win_matrix(groups, one))
        out |= {f"{prefix}/{k}/{part}": value for k, value in curve.items()}
    return out


def _counts(groups: Sequence[Group]) -> dict[str, float]:
    """Invalid, repeated, duplicate and list questions, lengths, judge errors, beliefs."""
    games = [game for _, game in iter_games(groups)]
    turns = [turn for game in games for turn in game.turns]
    void = [is_void(game, WinRule.COMPATIBLE) for game in games]
    played = [game.num_turns for game, unknown in zip(games, void, strict=True) if not unknown]
    total = max(len(turns), 1)
    out = {
        "val-core/invalid_total": float(sum(game.count(Verdict.INVALID) for game in games)),
        "val-core/repeated_total": float(sum(game.count(Verdict.REPEATED) for game in games)),
        "val-core/list_question_share": sum(turn.is_list for turn in turns) / total,
        "val-core/duplicate_share": sum(map(count_duplicates, games)) / total,
        "val-core/judge/error_rate": sum(t.verdict is Verdict.ERROR for t in turns) / total,
        "val-core/error_games": float(sum(void)),
        "val-core/games": float(len(games)),
        "val-core/secrets": float(len({group.task.id for group in groups})),
    }
    scores = [score for row in grades(groups, WinRule.COMPATIBLE) for score in row]
    if scores:
        out["val-core/mean_score"] = float(np.mean(scores))
    if played:
        out["val-aux/num_questions/mean"] = float(np.mean(played))
    judged = judge_classes(turns) | judge_extras(turns)
    out |= {f"val-core/{name}": value for name, value in judged.items()}
    return out | {f"val-aux/{name}": value for name, value in belief_metrics(games).items()}


def summarise(
    groups: Sequence[Group],
    rule: str = WinRule.COMPATIBLE,
    *,
    train_secrets: Set[str] = frozenset(),
    rewards: Sequence[float] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, float]:
    """Every number of one evaluation.

    Args:
        groups: One group for each secret.
        rule: What ``val-core/success_rate`` and ``pass@k`` follow.
        train_secrets: Secrets of the training data, compared in normal form; when some occur here,
            sizes, rates and pass@k of the secrets that do (``/overlap``) and of the others
            (``/clean``) are added.
        rewards: Sum of each game's rewards, in the order of the games; None leaves them out.
        draws: Bootstrap samples.
        seed: Names the bootstrap draws.
    """
    out: dict[str, float] = {}
    for name, one in (
        ("success_rate", rule),
        ("strict_success_rate", WinRule.STRICT),
        ("compatible_success_rate", WinRule.COMPATIBLE),
    ):
        out |= _rates(groups, f"val-core/{name}", one, draws, seed)
    for prefix, one in (("pass@k", rule), ("strict_pass@k", WinRule.STRICT)):
        curve = pass_at_k_curve(win_matrix(groups, one))
        lost = pass_at_k_curve(win_matrix(groups, one, errors_as_losses=True))
        out |= {f"{prefix}/{k}": value for k, value in curve.items()}
        out |= {f"{prefix}/{k}/errors_as_losses": value for k, value in lost.items()}
    known = {normalise(secret) for secret in train_secrets}
    overlap = [group for group in groups if normalise(group.task.secret) in known]
    if overlap:
        clean = [group for group in groups if normalise(group.task.secret) not in known]
        out |= _part(overlap, "overlap", rule, draws, seed)
        out |= _part(clean, "clean", rule, draws, seed)
    return out | _counts(groups) | source_metrics(groups, rule, rewards)
