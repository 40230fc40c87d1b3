"""Environments written for the library ``verifiers``, as a plug-in; see docs/verifiers.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from delta_belief_rl.envs.base import Env
from delta_belief_rl.envs.plugin import EnvOptions, EnvPlugin
from delta_belief_rl.envs.verifiers.game import VerifiersGame
from delta_belief_rl.envs.verifiers.rows import split_tasks
from delta_belief_rl.envs.verifiers.settings import read_settings
from delta_belief_rl.envs.verifiers.source import load_source
from delta_belief_rl.types import Task


def make(options: EnvOptions) -> Callable[[Task], Env]:
    """From the options to a function that makes one game of a task.

    Raises:
        UserError: The options do not fit, or the environment cannot be played here.
    """
    settings = read_settings(options)
    source = load_source(settings)
    return lambda task: VerifiersGame(task, source, settings)


def tasks(split: str, options: EnvOptions) -> Sequence[Task]:
    """The tasks of a split.

    Raises:
        UserError: As ``make``, or the dataset has too few rows or none that a game can be made of.
    """
    settings = read_settings(options)
    return split_tasks(split, load_source(settings), settings)


ENVIRONMENTS = {"verifiers": EnvPlugin(make=make, tasks=tasks)}
