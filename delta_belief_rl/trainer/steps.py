"""The parts of a training step that turn games into a rewarded turn table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from delta_belief_rl.algo.base import Advantage
from delta_belief_rl.algo.shapers.channels import build_table
from delta_belief_rl.algo.shapers.kl_reward import CHANNEL as KL_CHANNEL
from delta_belief_rl.belief.branched import ScoreRequest, View
from delta_belief_rl.belief.shaping import belief_grid, shape_rows
from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.rollout.store import GameScore as StoredScore
from delta_belief_rl.trainer.actor import BASE, GameScore
from delta_belief_rl.trainer.packing import flat_trajectories
from delta_belief_rl.trainer.rubrics import CHECKED
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.settings import BELIEF_MODELS, belief_models, shaping_options
from delta_belief_rl.types import FloatArray, Group, IntArray, Trajectory, TurnTable


def score_requests(run: Services, groups: Sequence[Group]) -> list[ScoreRequest]:
    """One request per game; with beliefs only when the belief reward is on."""
    wanted = bool(belief_models(run.cfg))
    return [
        ScoreRequest.of(game, run.elicit(game.task.secret) if wanted else None)
        for game in flat_trajectories(groups)
    ]


def with_views(
    run: Services, groups: Sequence[Group], requests: Sequence[ScoreRequest]
) -> list[ScoreRequest]:
    """The requests with the other contexts that the credit method asks for."""
    if not run.scorers:
        return list(requests)
    assert run.hinted is not None, "scorers need a way to render their hints"
    found: list[dict[str, View]] = [{} for _ in requests]
    games = flat_trajectories(groups)
    for scorer in run.scorers:
        for game, hint, views in zip(games, scorer.hints(groups), found, strict=True):
            if hint is not None and game.turns:
                views[scorer.view] = run.hinted(game, hint)
    return [replace(ask, views=views) for ask, views in zip(requests, found, strict=True)]


def token_columns(scores: Sequence[GameScore]) -> dict[str, FloatArray]:
    """``TurnTable.tokens`` from the score pass."""
    columns = {"logp": [score.logp for score in scores]}
    columns |= {f"view:{name}": rows for name, rows in views(scores).items()}
    valued = [score.values for score in scores if score.values is not None]
    if valued:
        columns["values"] = valued
        columns["end_value"] = [np.full(len(score.logp), score.end_value) for score in scores]
    for name in scores[0].columns if scores else ():
        columns[name] = [score.columns[name] for score in scores]
    return {name: np.concatenate([np.zeros(0), *rows]) for name, rows in columns.items()}


def with_beliefs(
    cfg: RunConfig, groups: Sequence[Group], scores: Sequence[GameScore]
) -> list[Group]:
    """The groups with the step model's beliefs on their games; unchanged when there are none."""
    if not belief_models(cfg):
        return list(groups)
    name = BELIEF_MODELS[cfg.multi_turn.logprob_reward.step_model]
    position = 0
    out: list[Group] = []
    for group in groups:
        games: list[Trajectory] = []
        for game in group.trajectories:
            beliefs = scores[position].beliefs[name]
            if len(beliefs) != game.num_turns + 1:
                raise ValueError(
                    f"game {game.task.id}/{game.game} has {game.num_turns} turns but "
                    f"{len(beliefs)} beliefs"
                )
            games.append(replace(game, beliefs=tuple(float(value) for value in beliefs)))
            position += 1
        out.append(Group(group.task, tuple(games)))
    return out


def reward_table(
    run: Services, groups: Sequence[Group], scores: Sequence[GameScore], update: int
) -> TurnTable:
    """The turn table with its reward channels.

    Args:
        run: The run.
        groups: The games.
        scores: Of the games; none where no belief is paid.
        update: Updates that the policy has had; prices may fade with them.
    """
    table = build_table(groups, run.cfg.multi_turn.win_rule)
    belief = belief_changes(run, table, scores)
    table = replace(table, rewards=run.shaper.shape(table, groups, belief), update=update)
    return run.prices.change(table)


def belief_changes(
    run: Services, table: TurnTable, scores: Sequence[GameScore]
) -> FloatArray | None:
    """Shaped changes of belief in nats, before their weight, ``[R]``; None where there are none."""
    cfg = run.cfg
    reward = cfg.multi_turn.logprob_reward
    if not reward.enabled:
        return None
    names = (BELIEF_MODELS[reward.step_model], BELIEF_MODELS[reward.base_model])
    after, before = (belief_grid([score.beliefs[name] for score in scores]) for name in names)
    previous = before if names[0] != names[1] else None
    return shape_rows(table, after, shaping_options(cfg), previous)


def finish_rewards(
    run: Services, table: TurnTable, scores: Sequence[GameScore]
) -> tuple[TurnTable, dict[str, float]]:
    """The table as credit sees it: with a price on divergence, on one scale, and its tokens.

    The controller of the price moves, so this is called once a step, on what is trained.
    """
    metrics: dict[str, float] = {}
    rewards = table.rewards
    if run.kl_reward is not None:
        own, reference = [score.logp for score in scores], [score.views[BASE] for score in scores]
        channel, metrics = run.kl_reward.charge(table, own, reference)
        rewards = {**rewards, KL_CHANNEL: channel}
    table = replace(table, rewards=rewards, tokens=token_columns(scores))
    return run.prices.scale(table), metrics


def views(scores: Sequence[GameScore]) -> dict[str, list[FloatArray]]:
    """Log-probs under other models, by name and game; checks of rules read no game's tokens."""
    names = [name for name in (scores[0].views if scores else ()) if name != CHECKED]
    return {name: [score.views[name] for score in scores] for name in names}


def batch_columns(
    table: TurnTable, advantage: Advantage, scores: Sequence[GameScore]
) -> dict[str, list[FloatArray]]:
    """``TrainBatch.views``: what the losses need of each sampled token, by name and game.

    Beside the views of the score pass these are ``values`` of a critic, ``targets``, what they are
    trained towards (NaN where they are not), ``distil``, the weight of a turn in distillation
    losses, and what the method hands to its learner.
    """
    columns: dict[str, FloatArray] = dict(advantage.columns)
    if "values" in table.tokens:
        columns["values"] = table.tokens["values"]
    if advantage.targets is not None:
        columns["targets"] = advantage.targets
    if advantage.distil is not None:
        columns["distil"] = np.repeat(advantage.distil, table.n_tokens)
    ends = np.cumsum([len(score.logp) for score in scores])[:-1]
    cut = {name: list(np.split(column, ends)) for name, column in columns.items()}
    return {**views(scores), **cut}


def scorer(
    groups: Sequence[Group], table: TurnTable, used: FloatArray, changes: FloatArray | None
) -> Callable[[Trajectory], StoredScore]:
    """Rewards of a game as the files show them.

    Args:
        groups: The games.
        table: Their turns.
        used: Reward of each row as the estimator uses it, ``[R]``. Turn-wise GRPO pays the outcome
            on every turn, and so counts it as often.
        changes: Shaped changes of belief in nats, ``[R]``.
    """
    rows: Mapping[tuple[str, int], IntArray] = {
        (game.task.id, game.game): np.flatnonzero(table.traj == index).astype(np.int64)
        for index, game in enumerate(flat_trajectories(groups))
    }

    def score_of(game: Trajectory) -> StoredScore:
        index = rows[game.task.id, game.game]
        shown = None if changes is None else tuple(changes[index].tolist())
        return StoredScore(float(used[index].sum()), shown)

    return score_of


def rollout_path(run: Services, step: int) -> Path:
    """File of a training step's games."""
    return Path(run.cfg.trainer.rollout_data_dir) / f"{step}.jsonl"


def due(step: int, every: int, last: int) -> bool:
    """Whether something that happens every so many steps, and at the last, happens now."""
    return every > 0 and (step % every == 0 or step == last)


def mean_entropy(scores: Sequence[GameScore]) -> float:
    """Entropy of the policy in nats before its update, a mean over the sampled tokens."""
    tokens = np.array([len(score.logp) for score in scores], dtype=np.float64)
    total = float(sum(n * score.entropy for n, score in zip(tokens, scores, strict=True)))
    return total / max(float(tokens.sum()), 1.0)


def judge_metrics(run: Services, games: int, kind: str = "") -> dict[str, float]:
    """What the judge pool did since it was last asked, and what that is for one game (J16).

    Args:
        run: The run.
        games: Games that were played meanwhile.
        kind: ``val`` for an evaluation, whose numbers must not stand in for those of training.
    """
    stats = run.judge.stats()
    run.judge.reset_stats()
    calls = max(stats.calls, 1)
    head, mark = ("val-aux/", "val_") if kind == "val" else ("", "")
    out = {
        f"{head}judge/calls": float(stats.calls),
        f"{head}judge/calls_per_game": stats.calls / max(games, 1),
        f"{head}judge/call_error_rate": stats.errors / calls,
        f"{head}judge/retries": float(stats.retries),
        f"{head}judge/timeouts": float(stats.timeouts),
        f"{head}judge/timeout_rate": stats.timeouts / (calls + stats.retries),
        f"{head}judge/restarts": float(stats.restarts),
        f"{head}judge/tokens": float(stats.tokens),
        f"{head}judge/tokens_per_game": stats.tokens / max(games, 1),
        # What depends on a cache or a clock stands apart from what a replay must repeat.
        f"perf/{mark}judge_cached_rate": stats.cached / calls,
    }
    if run.cfg.judge_rollout.name == "api":
        out |= {
            f"{head}judge/cost": stats.cost,
            f"{head}judge/cost_per_game": stats.cost / max(games, 1),
            f"{head}judge/api_faults": float(sum(stats.faults.values())),
            **{f"{head}judge/api_faults/{kind}": float(n) for kind, n in stats.faults.items()},
        }
    # Games that a resumed run took from the disk have calls, and no latency.
    if stats.latency_p95 > 0:
        out[f"perf/{mark}judge_latency_p50_s"] = stats.latency_p50
        out[f"perf/{mark}judge_latency_p95_s"] = stats.latency_p95
    return out
