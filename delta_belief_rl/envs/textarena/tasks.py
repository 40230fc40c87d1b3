"""Tasks of a game of TextArena: one task is one seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delta_belief_rl.envs.plugin import EnvOptions
from delta_belief_rl.envs.textarena.library import begin, prototype_of
from delta_belief_rl.envs.textarena.settings import TextArenaSettings, read_settings
from delta_belief_rl.types import Message, Task, UserError

SOURCE = "textarena"
"""``Task.source`` of every task."""


def tasks_of(split: str, options: EnvOptions) -> Sequence[Task]:
    """The tasks of a split, in the order of their seeds.

    Raises:
        UserError: The options do not fit, or the game cannot be played.
    """
    settings = read_settings(options.kwargs)
    return [_task(settings, split, seed) for seed in settings.seeds(split)]


def seed_of(task: Task, settings: TextArenaSettings) -> int:
    """The seed that a task is named for.

    Raises:
        UserError: The task is none of this game.
    """
    game, _, seed = task.id.rpartition("_")
    if task.source != SOURCE or game != settings.game or not seed.isdecimal():
        raise UserError(f"The task {task.id!r} is no task of {settings.game}.")
    return int(seed)


def secret_of(settings: TextArenaSettings, env: Any) -> str:
    """The hidden answer of a game that was begun; empty where the game has none."""
    _, game = prototype_of(settings)
    return "" if game.secret is None else game.secret(env)


def _task(settings: TextArenaSettings, split: str, seed: int) -> Task:
    opening = begin(settings, seed)
    secret = secret_of(settings, opening.env)
    messages = (Message("user", opening.text),)
    return Task(f"{settings.game}_{seed}", SOURCE, secret, messages, split)
