"""What an environment of a plug-in brings beside its games: a report of them, rewards of tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.plugins import env_options, find_plugin, load_plugins
from delta_belief_rl.trainer.own_failures import PluginFailed, blamed
from delta_belief_rl.types import FloatArray, Trajectory, UserError

WEIGHT = "multi_turn.reward.weight_tasks"


def environment_metrics(cfg: RunConfig, games: Sequence[Trajectory]) -> dict[str, float]:
    """What the environment reports of the games of a validation; empty where it reports nothing.

    Raises:
        PluginFailed: It failed, or gave something else than numbers by name, or a name with "@",
            which is for counts of games.
    """
    plugin, env = find_plugin(cfg), cfg.multi_turn.env
    if plugin is None or plugin.report is None:
        return {}
    with blamed(_whose(cfg), "report"):
        found = plugin.report(games, env_options(cfg, cfg.multi_turn.max_turns.val))
        numbers = {f"val-aux/{env}/{name}": float(value) for name, value in found.items()}
    for name in found:
        if "@" in str(name):
            raise PluginFailed(
                f"{_whose(cfg)} reports {name!r}: '@' in a name says over how many games a number "
                "is, so choose another one."
            )
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def task_rewards(cfg: RunConfig) -> Callable[[Trajectory], FloatArray] | None:
    """What the turns of a game are paid for the tasks that they end; None where they are not paid.

    Raises:
        UserError: They are to be paid in an environment that does not say what.
    """
    if not cfg.multi_turn.reward.weight_tasks:
        return None
    plugin, turns = find_plugin(cfg), cfg.multi_turn.max_turns
    rewards = None if plugin is None else plugin.task_rewards
    if rewards is None:
        raise UserError(
            f"{WEIGHT} pays the rewards of single tasks, which the environment "
            f"{cfg.multi_turn.env} does not give: set it to 0."
        )
    whose = _whose(cfg)
    options = {
        True: env_options(cfg, turns.train),
        False: env_options(cfg, turns.val),
    }

    def rewards_of(game: Trajectory) -> FloatArray:
        with blamed(whose, "task_rewards"):
            found = np.asarray(rewards(game, options[game.task.split == "train"]), dtype=np.float64)
        if found.shape != (game.num_turns,):
            raise PluginFailed(
                f"{whose} returned {found.shape} numbers from task_rewards for a game of "
                f"{game.num_turns} turns."
            )
        return found

    return rewards_of


def _whose(cfg: RunConfig) -> str:
    env = cfg.multi_turn.env
    file = next(one for one in cfg.plugins if env in load_plugins([one]))
    return f"The environment {env} of the plug-in {file}"
