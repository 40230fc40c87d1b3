"""Validation and the final test: the same driver, engines and judge as training (J9).

Random numbers of an evaluation depend on the secret and the game only, not on the step, so that two
evaluations differ by the policy and not by the draw.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from delta_belief_rl.algo.shapers.channels import WinRule
from delta_belief_rl.eval.metrics import summarise
from delta_belief_rl.obs.disk import writing
from delta_belief_rl.rollout.store import GameScore, write_groups
from delta_belief_rl.trainer.kept import (
    KeptGames,
    Key,
    is_kept,
    kept_path,
    parts,
    whole,
)
from delta_belief_rl.trainer.own_environment import environment_metrics
from delta_belief_rl.trainer.packing import flat_trajectories
from delta_belief_rl.trainer.services import Services
from delta_belief_rl.trainer.settings import belief_models, sampling_params
from delta_belief_rl.trainer.steps import (
    belief_changes,
    judge_metrics,
    reward_table,
    score_requests,
    scorer,
    with_beliefs,
)
from delta_belief_rl.types import Group, Task, Trajectory

EVALUATION = 0
"""Stands for the step in the seeds of every evaluation."""


async def evaluate(
    run: Services, tasks: Sequence[Task], games: int, sampling: str, phase: str
) -> list[Group]:
    """Play some tasks with the policy as it stands.

    Args:
        games: Games per task.
        sampling: ``train``, ``val`` or ``greedy``.
        phase: Keeps the sessions of different evaluations apart.
    """
    await run.engines.sync(run.policy)
    return await run.val_rollouts.collect(
        tasks, games, EVALUATION, sampling_params(run.cfg, sampling), phase=phase
    )


async def evaluate_kept(
    run: Services, tasks: Sequence[Task], games: int, phase: str
) -> list[Group]:
    """Play some tasks as an evaluation alone does: what an earlier start has played is not again.

    Args:
        games: Games per task.
        phase: As for ``evaluate``.
    """
    cfg, step = run.cfg, run.state.step
    await run.engines.sync(run.policy)
    key = Key.of(cfg, run.run_id, step, run.engines.adapter, tasks)
    turns, rule = cfg.multi_turn.max_turns.val, WinRule(cfg.multi_turn.win_rule)
    kept = KeptGames.open(kept_path(cfg, step), key, turns, rule, run.progress.say)
    if kept.games:
        run.progress.say(
            f"{len(kept.games)} of {len(tasks) * games} games were played before and are not again"
        )
    if kept.seconds:
        run.judge.rewind(kept.counts)
        run.timers.add("testing", kept.seconds)
    sampling, zero = sampling_params(cfg, "val"), time.monotonic() - kept.seconds

    def keep(*played: Trajectory) -> None:
        kept.append(played, run.judge.mark(), time.monotonic() - zero)

    fixed = cfg.actor_rollout_ref.rollout.deterministic
    groups: list[Group] = []
    for part in parts(tasks, games, fixed=fixed):
        found = whole(kept, part, games)
        if found is None and fixed:
            found = await run.val_rollouts.collect(part, games, EVALUATION, sampling, phase=phase)
            keep(*flat_trajectories(found))
        elif found is None:
            found = await run.val_rollouts.collect(
                part, games, EVALUATION, sampling, phase=phase, known=kept.games, on_game=keep
            )
        groups += found
    return groups


async def validate(run: Services, step: int) -> dict[str, float]:
    """Play the validation secrets, write the games, return the metrics."""
    run.progress.set_phase("validate")
    cfg = run.cfg
    with run.timers.measure("testing"):
        run.judge.reset_stats()
        tasks, games, phase = run.tasks.val, cfg.multi_turn.val.n, f"val-{step}"
        if is_kept(cfg):
            groups = await evaluate_kept(run, tasks, games, phase)
        else:
            groups = await evaluate(run, tasks, games, "val", phase)
        groups, score_of = await scored(run, groups)
        metrics = summarise(
            groups,
            cfg.multi_turn.win_rule,
            train_secrets=run.tasks.train_secrets(),
            rewards=[score_of(game).score for game in flat_trajectories(groups)],
            seed=cfg.seed,
        )
        metrics |= judge_metrics(run, sum(len(group.trajectories) for group in groups), "val")
        metrics |= environment_metrics(cfg, flat_trajectories(groups))
        path = Path(cfg.trainer.validation_data_dir) / f"{step}.jsonl"
        with writing("The games", path, "trainer.validation_data_dir"):
            write_groups(
                path,
                stamped(groups, step),
                max_turns=cfg.multi_turn.max_turns.val,
                score_of=score_of,
                run_seed=cfg.seed,
            )
        if cfg.trainer.validation.greedy:
            greedy = await evaluate(run, run.tasks.val, 1, "greedy", f"greedy-{step}")
            rates = summarise(greedy, cfg.multi_turn.win_rule, seed=cfg.seed)
            metrics |= {
                f"{name}/greedy": value for name, value in rates.items() if "success_rate" in name
            }
    if run.player is not None:
        metrics |= run.player.metrics()
    run.state.validated = step
    if metrics["val-core/success_rate"] > run.state.best:
        run.state.best, run.state.best_step = metrics["val-core/success_rate"], step
    rate, low, high = (
        100 * metrics[f"val-core/strict_success_rate{name}"] for name in ("", "/ci_low", "/ci_high")
    )
    run.progress.say(
        f"validation after step {step}: strict win {rate:.1f} % [{low:.1f}, {high:.1f}] "
        f"on {int(metrics['val-core/secrets'])} secrets x {cfg.multi_turn.val.n} games"
        f"{parts_text(metrics)}"
    )
    return metrics


async def scored(
    run: Services, groups: Sequence[Group]
) -> tuple[list[Group], Callable[[Trajectory], GameScore]]:
    """Beliefs and rewards of an evaluation, as training has them for its games.

    Returns:
        The groups with their beliefs, where the belief reward is on, and the rewards of each game.
    """
    scores = await run.policy.score(score_requests(run, groups)) if belief_models(run.cfg) else []
    groups = with_beliefs(run.cfg, groups, scores)
    table = reward_table(run, groups, scores, update=run.state.step)
    used = run.credit.paid(table)
    return groups, scorer(groups, table, used, belief_changes(run, table, scores))


def parts_text(metrics: Mapping[str, float]) -> str:
    """Strict win rates of the secrets that are training secrets, too, and of the others.

    Empty where no secret is one.
    """
    rates = [
        f"{100 * metrics[f'val-core/strict_success_rate/{part}']:.1f} % on the "
        f"{int(metrics[f'val-core/secrets/{part}'])} {words}"
        for part, words in (("overlap", "that are training secrets"), ("clean", "others"))
        if metrics.get(f"val-core/secrets/{part}")
    ]
    return f" ({', '.join(rates)})" if rates else ""


def stamped(groups: Sequence[Group], step: int) -> list[Group]:
    """The groups with the evaluated step on their games; their seeds did not know it."""
    return [
        replace(group, trajectories=tuple(replace(game, step=step) for game in group.trajectories))
        for group in groups
    ]
