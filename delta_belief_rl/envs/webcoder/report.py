"""Rewards of the tasks of finished games, by playing them again.

A game is a function of its task and the agent's messages, so a stored game says by itself what each
of its tasks was paid, and with which price of a regression it would have been paid what::

    rewards = task_rewards(game, settings, max_turns)      [K], NaN where a turn ends no task
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

import numpy as np

from delta_belief_rl.algo.shapers.channels import FAILED_STOPS
from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.webcoder.game import WebCoder
from delta_belief_rl.envs.webcoder.requirements import KINDS
from delta_belief_rl.envs.webcoder.settings import WebCoderSettings, read_settings
from delta_belief_rl.envs.webcoder.tasks import SOURCE
from delta_belief_rl.types import FloatArray, Trajectory


@dataclass(frozen=True, slots=True)
class KindReport:
    """Numbers of one kind of task.

    Attributes:
        tasks: How many were over.
        reward: Their mean reward.
        solved: Share with the reward 1.
        failed_builds: Share of the messages in them that changed the project and left it unbuilt.
        regressions: Share in which something that worked was broken.
        check_errors: Messages after which a check could not be carried out.
    """

    tasks: int
    reward: float
    solved: float
    failed_builds: float
    regressions: float
    check_errors: int


def report_of(games: Sequence[Trajectory], options: EnvOptions) -> dict[str, float]:
    """The numbers of every kind of task by name, e.g. ``repair/solved``.

    Args:
        games: Finished ones.
        options: With which they were played.
    """
    settings = read_settings(options.kwargs)
    return {
        f"{kind}/{field.name}": float(getattr(found, field.name))
        for kind, found in by_kind(games, settings, options.max_turns, options.question_tag).items()
        for field in fields(found)
    }


def rewards_of(game: Trajectory, options: EnvOptions) -> FloatArray:
    """``task_rewards`` with the settings of the options."""
    settings = read_settings(options.kwargs)
    return task_rewards(game, settings, options.max_turns, options.question_tag)


def task_rewards(
    game: Trajectory, settings: WebCoderSettings, max_turns: int, question_tag: bool = False
) -> FloatArray:
    """The reward of the task that each turn ends, ``[K]``; NaN where it ends none.

    Args:
        game: A finished game of this environment.
        settings: With which it was played, or another price of a regression.
        max_turns: With which it was played.
        question_tag: Likewise.
    """
    env = WebCoder(game.task, max_turns, settings, question_tag)
    rewards = np.full(game.num_turns, np.nan)
    for row, turn in enumerate(game.turns):
        known = len(env.rewards)
        env.apply(env.parse(turn.action), None)
        if len(env.rewards) > known:
            rewards[row] = env.rewards[-1]
    return rewards


def by_kind(
    games: Iterable[Trajectory],
    settings: WebCoderSettings,
    max_turns: int,
    question_tag: bool = False,
) -> dict[str, KindReport]:
    """One report for each kind of task that was over in some game.

    Games of other environments, and those without an outcome, are passed over.
    """
    rewards: dict[str, list[float]] = {kind: [] for kind in KINDS}
    notes: dict[str, list[tuple[str, ...]]] = {kind: [] for kind in KINDS}
    for game in games:
        if game.task.source != SOURCE or game.stop in FAILED_STOPS:
            continue
        stage = 0
        for reward, turn in zip(
            task_rewards(game, settings, max_turns, question_tag), game.turns, strict=True
        ):
            notes[KINDS[stage]].append(turn.diagnostics)
            if np.isfinite(reward):
                rewards[KINDS[stage]].append(float(reward))
                stage += 1
    return {
        kind: KindReport(
            tasks=len(values),
            reward=float(np.mean(values)),
            solved=float(np.mean([value >= 1.0 for value in values])),
            failed_builds=float(np.mean(["build_failed" in tags for tags in notes[kind]])),
            regressions=sum("regression" in tags for tags in notes[kind]) / len(values),
            check_errors=sum("check_error" in tags for tags in notes[kind]),
        )
        for kind, values in rewards.items()
        if values
    }
