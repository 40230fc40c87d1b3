"""The environment of a run, from its configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from delta_belief_rl.config.schema import RunConfig
from delta_belief_rl.envs.base import Env
from delta_belief_rl.envs.twenty_questions import TwentyQuestions
from delta_belief_rl.envs.worlds.game import WORLD_NOTICES, WorldTwentyQuestions
from delta_belief_rl.envs.worlds.grammar import Grammar
from delta_belief_rl.envs.worlds.table import load_world
from delta_belief_rl.trainer.settings import env_settings
from delta_belief_rl.types import Task, UserError

EnvFactory = Callable[[Task], Env]
"""Makes one game of a task."""


def env_factory(cfg: RunConfig, max_turns: int) -> EnvFactory:
    """A function that makes one game of a task.

    Args:
        cfg: The configuration.
        max_turns: Turns after which a game is over.

    Raises:
        UserError: There is no such environment.
    """
    make = FACTORIES.get(cfg.multi_turn.env)
    if make is None:
        raise UserError(
            f"multi_turn.env={cfg.multi_turn.env} is not available: use {', '.join(FACTORIES)}."
        )
    return make(cfg, max_turns)


def _twenty_questions(cfg: RunConfig, max_turns: int) -> EnvFactory:
    if cfg.data.world is None:
        return partial(TwentyQuestions, settings=env_settings(cfg, max_turns))
    grammar = Grammar(load_world(cfg.data.world))
    settings = env_settings(cfg, max_turns, notices=WORLD_NOTICES)
    return lambda task: WorldTwentyQuestions(task, settings, grammar)


FACTORIES: Mapping[str, Callable[[RunConfig, int], EnvFactory]] = {
    "twenty_questions": _twenty_questions,
}
"""By environment (``multi_turn.env``)."""
