"""The figures of an evaluation's cells: one benchmark played by one player.

A cell is the folder of a run with ``trainer.val_only``, ``<benchmark>/<player>`` below the folder
of the evaluation; ``cell.json`` in it says who plays. Figures are computed from its files alone, so
they can be made again at any time. Rates are shares of 1 with 95 % intervals by bootstrap over
secrets, beliefs are in nats, turns count from 1.

A policy does not know how many turns it has, unless its prompt says so. One evaluation with ``T``
turns therefore has the win rate of every smaller budget ``b``: the share of the games that were won
within ``b`` turns.

A game whose judge or engine failed has no outcome: rates leave it out, ``errors_as_losses`` counts
it as lost, and it never gets a score. For a budget that it had used up before the failure it is a
lost game: else won games, which never fail later, would be too large a share of small budgets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from delta_belief_rl.algo.shapers.channels import WinRule, is_void
from delta_belief_rl.config.compose import from_yaml
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.eval.best_of import draw_sizes
from delta_belief_rl.eval.game_statistics import BeliefStats, belief_stats
from delta_belief_rl.eval.metrics import (
    grades,
    is_known,
    pass_at_k_curve,
    success_rate,
    win_by_turn,
    win_matrix,
    win_turn,
)
from delta_belief_rl.eval.statistics import (
    Interval,
    cluster_bootstrap,
    mean_at_n,
    pass_at_k,
    std_at_n,
)
from delta_belief_rl.eval.step_metrics import count_duplicates
from delta_belief_rl.obs.jsonl import read_records
from delta_belief_rl.rollout.store import read_trajectories
from delta_belief_rl.types import FloatArray, Group, StopReason, Trajectory, UserError, Verdict

CELL = "cell.json"
BUDGETS = (20, 50)
"""Turns at which the win rate is always told: the published budget, and the longer one."""


@dataclass(frozen=True, slots=True)
class Player:
    """Who plays a cell.

    Attributes:
        name: Short, and a part of the cell's folder.
        model: Path or hub id of the (base) model, or the model's name at an API.
        adapter: Folder of the adapter that was put on it; None without one.
        checksum: Of the adapter's weights; empty without one.
        step: Training steps behind the adapter, where it is a run's checkpoint.
        api: The model is behind an API.
        identity: Which weights or service ``model`` stood for (``trainer.identity``).
    """

    name: str
    model: str
    adapter: str | None = None
    checksum: str = ""
    step: int = 0
    api: bool = False
    identity: str = ""


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under what a cell was played, as its configuration says.

    Attributes:
        tasks: The world, the task files with commas, or the environment that makes them.
        games: Of each secret.
        temperature: Of the policy; 0 is greedy.
        best_of: Candidate questions of each turn, of which the one with the largest change of
            belief is taken; 1 plays the policy alone.
        parser: How the judge's text was read.
        candidate_lists: What became of questions that name several candidates.
        duplicates: Who found repeated questions.
    """

    tasks: str
    judge: str
    games: int
    turns: int
    temperature: float
    top_p: float
    top_k: int
    win_rule: str
    best_of: int
    parser: str
    candidate_lists: str
    duplicates: str
    seed: int

    @classmethod
    def of(cls, cfg: RunConfig) -> Conditions:
        """The conditions of a configuration."""
        turns, judge = cfg.multi_turn, cfg.judge_rollout
        sampling, tried = cfg.actor_rollout_ref.rollout.val_kwargs, turns.logprob_sampling
        greedy = not sampling.do_sample or sampling.temperature == 0
        return cls(
            tasks=cfg.data.world or ", ".join(cfg.data.val_files) or turns.env,
            judge=judge.model.api_model_name or judge.model.path or judge.name,
            games=turns.val.n,
            turns=turns.max_turns.val,
            temperature=0.0 if greedy else sampling.temperature,
            top_p=1.0 if greedy else sampling.top_p,
            top_k=-1 if greedy else sampling.top_k,
            win_rule=turns.win_rule,
            best_of=cfg.actor_rollout_ref.rollout.n if tried.enabled else 1,
            parser=judge.parser,
            candidate_lists=turns.candidate_lists,
            duplicates=turns.duplicates,
            seed=cfg.seed,
        )


@dataclass(frozen=True, slots=True)
class RuleFigures:
    """Wins under one rule.

    Attributes:
        mean, std: ``mean@n`` and ``std@n`` over the ``n`` sample columns.
        pass_at_k: For ``k`` = 1, 2, 4, ... and ``n``, as far as every secret has outcomes.
        pass_curve: The value for every ``k``.
        by_turn: Share won within ``t`` turns, ``t = 0 .. T``, of the games known until then.
        budgets: The same with its interval, at ``BUDGETS`` and ``T``.
        gain_20_50: What the share gains from 20 to 50 turns; None for shorter games.
    """

    rate: Interval
    errors_as_losses: float
    mean: float
    std: float
    pass_at_k: Mapping[int, Interval]
    pass_curve: Mapping[int, float]
    by_turn: tuple[float, ...]
    budgets: Mapping[int, Interval]
    gain_20_50: Interval | None


@dataclass(frozen=True, slots=True)
class Cell:
    """One benchmark played by one player.

    Attributes:
        step: Of the evaluated checkpoint; 0 without one.
        mean_turns: Turns of the games with an outcome, lost ones included.
        invalid, repeated, duplicates, lists: Shares of all questions: answered as invalid, answered
            as repeated, asked word for word before in the game, naming several candidates.
        failed_games: Games without an outcome.
        judge_failures: Share of all turns whose judge failed.
        full_games: Games that ended because their token limit was reached.
        mean_score: Mean grade in [0, 1] in environments that grade, where a game that ended without
            a grade counts as 0; None elsewhere.
        beliefs: Of all, won and lost games; None where they were not measured.
        sampled_tokens: By the policy.
        judge_tokens: That the judges read and wrote, where they say so.
        seconds: Of the evaluation, over all its starts.
        reported: What the environment of a plug-in says of the games (``EnvPlugin.report``).
    """

    benchmark: str
    player: Player
    conditions: Conditions
    folder: str
    run_id: str
    secrets: int
    games: int
    compatible: RuleFigures
    strict: RuleFigures
    mean_turns: Interval
    invalid: float
    repeated: float
    duplicates: float
    lists: float
    failed_games: int
    judge_failures: float
    full_games: int
    mean_score: Interval | None
    beliefs: Mapping[str, BeliefStats | None]
    sampled_tokens: int
    judge_tokens: float
    seconds: float
    reported: Mapping[str, float]

    @property
    def rule(self) -> RuleFigures:
        """Figures of the rule that ended the games."""
        return self.strict if self.conditions.win_rule == "strict" else self.compatible

    @property
    def label(self) -> str:
        """What tells it from the other cells."""
        return f"{self.benchmark}, {self.player.name}"


def cell_folders(out: Path) -> list[Path]:
    """Folders of the cells of an evaluation, complete or not, by name."""
    return [path.parent for path in sorted(out.glob(f"*/*/{CELL}"))]


def is_complete(folder: Path) -> bool:
    """Whether the run of a cell has its record.

    Raises:
        UserError: The record is damaged.
    """
    return bool(read_records(folder / "metrics.jsonl"))


def read_cell(folder: Path) -> Cell:
    """The figures of a complete cell.

    Raises:
        UserError: One of its files is missing or damaged.
    """
    try:
        about: Any = json.loads((folder / CELL).read_bytes())
        benchmark, player = str(about["benchmark"]), Player(**about["player"])
        cfg = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
        record = read_records(folder / "metrics.jsonl")[-1]
        games, run_id = f"{record['step']}.jsonl", str(record["run_id"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(
            f"{folder} is no complete cell of an evaluation ({error}): remove it and play it again."
        ) from error
    # A copied folder has its games with it.
    own = folder / "validation" / games
    path = own if own.is_file() else Path(cfg.trainer.validation_data_dir) / games
    read = read_trajectories(path, run_id)
    if read.damaged or not read.trajectories:
        line = read.damaged[0].number if read.damaged else 1
        raise UserError(f"{path}, line {line}, cannot be read: remove {folder}, and play it again.")
    groups = [
        Group(task, tuple(games)) for task, games in groupby(read.trajectories, lambda g: g.task)
    ]
    return make_cell(benchmark, player, cfg, str(folder), record, groups)


def make_cell(
    benchmark: str,
    player: Player,
    cfg: RunConfig,
    folder: str,
    record: Mapping[str, Any],
    groups: Sequence[Group],
) -> Cell:
    """The figures of some games.

    Args:
        record: Of the evaluation, as in ``metrics.jsonl``.
        groups: One for each secret.
    """
    games = [game for group in groups for game in group.trajectories]
    turns = [turn for game in games for turn in game.turns]
    total = max(len(turns), 1)
    conditions = Conditions.of(cfg)
    rule = WinRule(conditions.win_rule)
    seed = cfg.seed
    parts = {
        "all": games,
        "won": [game for game in games if rule.won(game)],
        "lost": [game for game in games if not rule.won(game) and not is_void(game, rule)],
    }
    return Cell(
        benchmark=benchmark,
        player=player,
        conditions=conditions,
        folder=folder,
        run_id=str(record["run_id"]),
        secrets=len(groups),
        games=len(games),
        compatible=rule_figures(groups, WinRule.COMPATIBLE, conditions.turns, seed),
        strict=rule_figures(groups, WinRule.STRICT, conditions.turns, seed),
        mean_turns=_mean(
            [[float(g.num_turns) for g in _known(group, rule)] for group in groups], seed
        ),
        invalid=sum(turn.verdict is Verdict.INVALID for turn in turns) / total,
        repeated=sum(turn.verdict is Verdict.REPEATED for turn in turns) / total,
        duplicates=sum(map(count_duplicates, games)) / total,
        lists=sum(turn.is_list for turn in turns) / total,
        failed_games=sum(is_void(game, rule) for game in games),
        judge_failures=sum(turn.verdict is Verdict.ERROR for turn in turns) / total,
        full_games=sum(game.stop is StopReason.CONTEXT_FULL for game in games),
        mean_score=_mean(scores, seed) if any(scores := grades(groups, rule)) else None,
        beliefs={name: belief_stats(part) for name, part in parts.items()},
        sampled_tokens=sum(turn.n_tokens for turn in turns),
        judge_tokens=float(record.get("val-aux/judge/tokens") or 0.0),
        seconds=float(record.get("timing_s/testing") or 0.0),
        reported=_reported(record, cfg.multi_turn.env),
    )


def _reported(record: Mapping[str, Any], env: str) -> dict[str, float]:
    """The environment's own numbers; those of a source of the same name say how many games."""
    own = f"val-aux/{env}/"
    return {
        name.removeprefix(own): float(value)
        for name, value in record.items()
        if name.startswith(own) and "@" not in name
    }


def rule_figures(groups: Sequence[Group], rule: WinRule, turns: int, seed: int = 0) -> RuleFigures:
    """Wins of some games by one rule.

    Args:
        turns: ``T``, most turns of a game.
        seed: Names the bootstrap draws.
    """
    matrix = win_matrix(groups, rule)
    curve = pass_at_k_curve(matrix)
    n = max(curve, default=0)
    sizes = (1, *draw_sizes(n)) if n else ()
    budgets = sorted({b for b in BUDGETS if b <= turns} | {turns})
    low, high = BUDGETS
    return RuleFigures(
        rate=success_rate(groups, rule, seed=seed),
        errors_as_losses=success_rate(groups, rule, errors_as_losses=True, seed=seed).value,
        mean=mean_at_n(matrix),
        std=std_at_n(matrix),
        pass_at_k={k: _pass_interval(matrix, k, seed) for k in sizes},
        pass_curve=curve,
        by_turn=tuple(win_by_turn(groups, rule, turns).tolist()),
        budgets={b: won_between(groups, rule, 0, b, seed) for b in budgets},
        gain_20_50=won_between(groups, rule, low, high, seed) if turns >= high else None,
    )


def won_between(
    groups: Sequence[Group], rule: WinRule, after: int, until: int, seed: int = 0
) -> Interval:
    """Share of the games known until ``until`` that are won in the turns ``after + 1 .. until``."""
    return _mean(
        [
            [
                float(after < win_turn(game, rule) <= until)
                for game in group.trajectories
                if is_known(game, rule, until)
            ]
            for group in groups
        ],
        seed,
    )


def _known(group: Group, rule: WinRule) -> list[Trajectory]:
    """The games with an outcome."""
    return [game for game in group.trajectories if not is_void(game, rule)]


def _mean(rows: Sequence[Sequence[float]], seed: int) -> Interval:
    """Mean over all games, resampled by secrets; a row has the games of a secret."""
    return cluster_bootstrap(
        [sum(row) for row in rows], [float(len(row)) for row in rows], seed=seed
    )


def _pass_interval(matrix: FloatArray, k: int, seed: int) -> Interval:
    """pass@k with its interval; ``matrix`` is ``[S, n]``, NaN without an outcome."""
    seen, won = (~np.isnan(matrix)).sum(axis=1), np.nansum(matrix, axis=1)
    values = [pass_at_k(int(n), int(c), k) for n, c in zip(seen, won, strict=True)]
    return cluster_bootstrap(values, np.ones(len(values)), seed=seed)
